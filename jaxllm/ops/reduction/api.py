"""Reductions of whole arrays: the sum, the largest element, the dot product, a histogram."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Int32

from jaxllm.core import vma
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Op, dispatch
from jaxllm.ops.checks import (
    as_integer,
    check_floating,
    check_integer,
    check_same_dtype,
    check_shape,
)
from jaxllm.ops.reduction import cuda, pallas, reference

REDUCE_SUM = Op("reduce_sum", reference=reference, pallas=pallas, cuda=cuda)
REDUCE_MAX = Op("reduce_max", reference=reference, pallas=pallas, cuda=cuda)
DOT = Op("dot", reference=reference, pallas=pallas, cuda=cuda)
HISTOGRAM = Op("histogram", reference=reference, pallas=pallas, cuda=cuda)


def reduce_sum(x: Float[Array, "*shape"], *, backend: Backend | None = None) -> Float[Array, ""]:
    r"""The sum of all elements.

    .. math::
        out = \sum_i x_i

    The sum is float32 (float64 of float64), added in a fixed order, so it repeats bit for bit. A
    row under ``jax.vmap`` may be added in another order than by itself.

    Args:
        x: Any shape; float32, bfloat16 or float16 for the kernels.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The sum, a float32 scalar (float64 of float64); zero where there are no elements.

    Raises:
        TypeError: ``x`` is not floating-point.
        ValueError: The backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: CUDA-Learn-Notes' ``block_all_reduce``, with a second stage in place of atomics.

    Example:
        >>> jaxllm.ops.reduce_sum(jnp.ones((3, 4), jnp.bfloat16))
        Array(12., dtype=float32)
    """
    check_floating(x=x)
    return _reduce_sum(x, jax.ShapeDtypeStruct(x.shape, x.dtype), resolve(backend))


def reduce_max(x: Float[Array, "*shape"], *, backend: Backend | None = None) -> Float[Array, ""]:
    """The largest element; NaN where any element is.

    Elements that are equal and largest share the gradient.

    Args:
        x: As in :func:`reduce_sum`.
        backend: As in :func:`reduce_sum`.

    Returns:
        The largest element, a scalar in the dtype of ``x``; minus infinity where there is none.

    Raises:
        TypeError: ``x`` is not floating-point.
        ValueError: The backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: CUDA-Learn-Notes' ``block_reduce_max``.
    """
    check_floating(x=x)
    return _reduce_max(x, resolve(backend))


def dot(
    a: Float[Array, "*shape"], b: Float[Array, "*shape"], *, backend: Backend | None = None
) -> Float[Array, ""]:
    r"""The sum of the products of two arrays' elements, whatever their shape.

    .. math::
        out = \sum_i a_i b_i

    Products and sum are float32 (float64 of float64), added as :func:`reduce_sum` adds.

    Args:
        a: Any shape; float32, bfloat16 or float16 for the kernels.
        b: In the shape and dtype of ``a``.
        backend: As in :func:`reduce_sum`.

    Returns:
        The dot product, a float32 scalar (float64 of float64); zero where there are no elements.

    Raises:
        TypeError: An argument is not floating-point, or ``b`` differs from ``a`` in dtype.
        ValueError: ``b`` differs from ``a`` in shape, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: CUDA-Learn-Notes' ``dot_product``.
    """
    check_floating(a=a, b=b)
    check_shape("b", b, a.shape, "the shape of a")
    check_same_dtype("b", b, "a", a)
    return _dot(a, b, resolve(backend))


def histogram(
    x: Int[Array, "*shape"], *, bins: int, backend: Backend | None = None
) -> Int32[Array, " bins"]:
    r"""How often each of the numbers from 0 to ``bins - 1`` occurs.

    .. math::
        out_k = \sum_i [x_i = k]

    Numbers outside of that range are not counted.

    Args:
        x: Any shape; int32 for the kernels.
        bins: How many numbers are counted, from zero up.
        backend: As in :func:`reduce_sum`.

    Returns:
        The counts. They are int32: of more than 2**31 - 1 equal numbers the count wraps around.

    Raises:
        TypeError: ``x`` is not an array of integers.
        ValueError: ``bins`` is not positive, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: CUDA-Learn-Notes' ``histogram``, with counters in shared memory.

    Example:
        >>> jaxllm.ops.histogram(jnp.array([0, 2, 2, 7, -1]), bins=3)
        Array([1, 0, 2], dtype=int32)
    """
    check_integer(x=x)
    bins = as_integer("bins", bins)
    if bins < 1:
        raise ValueError(f"bins is {bins}; it must be at least 1")
    return dispatch(HISTOGRAM, "", resolve(backend), x, bins=bins)


# The gradients need no kernels: see reference.py.


@functools.partial(vma.custom_vjp, nondiff_argnums=(1, 2))
def _reduce_sum(x, like, backend):
    return _reduce_sum_forward(x, like, backend)[0]


def _reduce_sum_forward(x, like, backend):
    return checkpoint_name(dispatch(REDUCE_SUM, "forward", backend, x), "reduce_sum"), None


def _reduce_sum_backward(like, backend, _, dout):
    return (jnp.broadcast_to(dout.astype(like.dtype), like.shape),)


@functools.partial(vma.custom_vjp, nondiff_argnums=(1,))
def _reduce_max(x, backend):
    return _reduce_max_forward(x, backend)[0]


def _reduce_max_forward(x, backend):
    out = checkpoint_name(dispatch(REDUCE_MAX, "forward", backend, x), "reduce_max")
    return out, (x, out)


def _reduce_max_backward(backend, residuals, dout):
    x, out = residuals
    wide = jnp.promote_types(x.dtype, jnp.float32)
    largest = x == out
    share = dout.astype(wide) / jnp.sum(largest, dtype=wide)
    return (jnp.where(largest, share, 0.0).astype(x.dtype),)


@functools.partial(vma.custom_vjp, nondiff_argnums=(2,))
def _dot(a, b, backend):
    return _dot_forward(a, b, backend)[0]


def _dot_forward(a, b, backend):
    return checkpoint_name(dispatch(DOT, "forward", backend, a, b), "dot"), (a, b)


def _dot_backward(backend, residuals, dout):
    a, b = residuals
    return (dout * b).astype(a.dtype), (dout * a).astype(b.dtype)


_reduce_sum.defvjp(_reduce_sum_forward, _reduce_sum_backward)
_reduce_max.defvjp(_reduce_max_forward, _reduce_max_backward)
_dot.defvjp(_dot_forward, _dot_backward)
