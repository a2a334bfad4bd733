"""The residual stream beside its norm: how ops hand both on, and the derivative of such ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jaxtyping import Array, Float

from jaxllm.ops.checks import check_same_dtype, check_shape


class NormedRows(NamedTuple):
    """Rows of zero mean and unit variance, and what the stream was that they were made of.

    The stream is ``rows / rstd + mean``, and ``rows`` its layer norm without scale and bias. An op
    that returns the stream may return this beside it, and the op that takes the stream next take
    it too: then the stream is normalized where it is made, and need not be written. For the
    derivative it does not exist: gradients go along the stream.

    Attributes:
        rows: In the dtype of the stream.
        mean: Of each row, float32.
        rstd: One over its deviation, float32.
    """

    rows: Float[Array, "*rows D"]
    mean: Float[Array, "*rows"]
    rstd: Float[Array, "*rows"]


jax.export.register_namedtuple_serialization(NormedRows, serialized_name="jaxllm.NormedRows")


def check_normed(normed: NormedRows | None, x: Array) -> None:
    """Raises TypeError or ValueError where ``normed`` cannot be that of ``x``."""
    if normed is None:
        return
    if not isinstance(normed, NormedRows):
        raise TypeError(f"normed is of type {type(normed).__name__}; it must be a NormedRows")
    check_shape("normed.rows", normed.rows, x.shape, "the shape of x")
    check_same_dtype("normed.rows", normed.rows, "x", x)
    for name, statistic in (("normed.mean", normed.mean), ("normed.rstd", normed.rstd)):
        check_shape(name, statistic, x.shape[:-1], f"one number for each row of x {x.shape}")


def defvjp(op: Any, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """``op.defvjp``, but ``backward`` gets None along a stream that nobody but the norm reads.

    So it is after the last block. JAX by itself would have zeros of the stream's size written, for
    a kernel to read and to add.

    Args:
        op: A ``custom_vjp`` that returns ``(out, stream)``.
        forward: As ``op.defvjp`` takes it.
        backward: As ``op.defvjp`` takes it; the cotangents are ``(dout, dstream)``.
    """

    def forward_of_values(*args: Any) -> Any:
        return forward(*jax.tree.map(_value, args))

    def backward_of_given(*args: Any) -> Any:
        *others, cotangents = args
        dout, dstream = (None if isinstance(ct, SymbolicZero) else ct for ct in cotangents)
        if dout is None:
            like: Any = cotangents[0]
            dout = jnp.zeros(like.shape, like.dtype)
        return backward(*others, (dout, dstream))

    op.defvjp(forward_of_values, backward_of_given, symbolic_zeros=True)


def without_normed(op: Callable[..., Any]) -> Callable[..., Any]:
    """What forward mode differentiates of an op that takes and returns a :class:`NormedRows`.

    The tangent goes along the stream, so the op normalizes it itself.

    Args:
        op: ``op(x, normed, ...) -> (out, normed)``.
    """

    def definition(x: Array, normed: NormedRows | None, *rest: Any) -> Any:
        out, _ = op(x, None, *rest)
        return out, jax.tree.map(jax.lax.stop_gradient, op(x, normed, *rest)[1])

    return definition


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, CustomVJPPrimal) else leaf
