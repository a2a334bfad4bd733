"""Counts of what rounding to float8 loses: elements that become zero, or are not finite.

Gradients are rounded in the backward pass, so no result of a loss can tell of them. The counts are
the gradient of the loss with respect to a *probe*, an argument that changes no value::

    forward    x, weight -> counts, saved beside the residuals
    backward   counts + those of the gradient of the output = the probe's gradient

JAX adds up the gradients of all layers, in scans, under remat and on shards as elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from jaxllm.ops.rounding import current_scale

_OPERANDS, _GRADIENTS = 0, 1


class Float8Counts(NamedTuple):
    """Counts of the elements that layers with a ``precision`` round: see :func:`count_float8`.

    The first element of each array is for inputs and weights, which the forward pass rounds, and
    the second for gradients.

    Attributes:
        elements: The elements that are finite and not zero.
        underflow: Those of them that became zero.
        overflow: The elements that are NaN or infinite. A current scale lets no other overflow.
    """

    elements: Float[Array, " 2"]
    underflow: Float[Array, " 2"]
    overflow: Float[Array, " 2"]

    @classmethod
    def zeros(cls) -> Float8Counts:
        """Counts of nothing: the probe of :func:`count_float8`."""
        return cls(*(jnp.zeros(2, jnp.float32) for _ in cls._fields))

    @property
    def underflow_share(self) -> Float[Array, " 2"]:
        """The share of the elements that became zero; 0 where there are none."""
        return self.underflow / jnp.maximum(self.elements, 1)


class _Probe:
    """The probe of a trace. JAX compares contexts, and each of these is equal to itself alone."""

    def __init__(self, counts: Float8Counts) -> None:
        self.counts: Float8Counts | None = counts


_probe = jax.make_user_context(None)


def count_float8(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function whose gradient has the counts of float8's losses.

    Args:
        fn: A function of arrays, such as a model's loss, that calls layers with a ``precision``.

    Returns:
        ``counted(probe, *args, **kwargs)``, with the value of ``fn(*args, **kwargs)``. ``probe`` is
        ``Float8Counts.zeros()``, and the gradient with respect to it is the :class:`Float8Counts`
        of what ``fn`` and its backward pass round. Each operand of a layer's forward GEMM counts
        once, and so does the gradient of its result. What a norm or an activation writes in
        float8 alone counts as it is written: its zeros are underflow.

    Example:
        >>> def loss(x, weight):
        ...     return jaxllm.ops.linear(x, weight, precision="tensor").sum()
        >>> x = jnp.full((2, 16), 1.0).at[0, 0].set(2.0**-20)
        >>> probe = jaxllm.ops.Float8Counts.zeros()
        >>> counts = jax.grad(jaxllm.ops.count_float8(loss))(probe, x, jnp.ones((16, 8)))
        >>> counts.elements.tolist(), counts.underflow.tolist()
        ([160.0, 16.0], [1.0, 0.0])
    """

    @functools.wraps(fn)
    def counted(probe: Float8Counts, *args: Any, **kwargs: Any) -> Any:
        context = _Probe(probe)
        try:
            with _probe(context):
                return fn(*args, **kwargs)
        finally:
            context.counts = None  # JAX's caches keep the context, and would keep the tracers in it

    return counted


def active_probe() -> Float8Counts | None:
    """The probe of the trace that is going on; None where nothing is counted."""
    probe: _Probe | None = _probe.value
    return None if probe is None else probe.counts


def of_operand(x: Array, axes: tuple[int, ...], dtype: DTypeLike) -> Float8Counts:
    """The counts of an input or a weight that has one current scale along ``axes``."""
    return _of_rounding(x, axes, dtype, _OPERANDS)


def of_gradient(x: Array, axes: tuple[int, ...], dtype: DTypeLike) -> Float8Counts:
    """Likewise of a gradient."""
    return _of_rounding(x, axes, dtype, _GRADIENTS)


def _of_rounding(x: Array, axes: tuple[int, ...], dtype: DTypeLike, group: int) -> Float8Counts:
    # As round_to_float8 divides. Half of the least number is a tie, and rounds to zero.
    half = float(jnp.finfo(dtype).smallest_subnormal) / 2
    wide = jnp.abs(x.astype(jnp.float32))
    inverse = 1 / jnp.expand_dims(current_scale(x, dtype, axes), axes)
    is_finite = jnp.isfinite(wide)
    is_element = is_finite & (wide > 0)
    return _counts(group, is_element, is_element & (wide * inverse <= half), ~is_finite)


def of_rounded_operand(values: Array) -> Float8Counts:
    """The counts of what exists in float8 alone, whose zeros are all underflow."""
    return _of_rounded(values, _OPERANDS)


def of_rounded_gradient(values: Array) -> Float8Counts:
    """Likewise of a gradient."""
    return _of_rounded(values, _GRADIENTS)


def _of_rounded(values: Array, group: int) -> Float8Counts:
    wide = values.astype(jnp.float32)
    is_finite = jnp.isfinite(wide)
    return _counts(group, is_finite, wide == 0, ~is_finite)


def _counts(group: int, *masks: Array) -> Float8Counts:
    sums = (jnp.sum(mask, dtype=jnp.float32) for mask in masks)
    return Float8Counts(*(jnp.zeros(2, jnp.float32).at[group].set(each) for each in sums))


def total(*counts: Float8Counts) -> Float8Counts:
    """The sum of counts."""
    return jax.tree.map(lambda *each: sum(each), *counts)
