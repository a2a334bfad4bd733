"""Reductions of whole arrays: sum, maximum, dot product, histogram."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Int32

from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.precision import wide_dtype
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.checks import (
    as_int32,
    as_integer,
    check_floating,
    check_floating_of_any_width,
    check_integer,
    check_same_dtype,
    check_shape,
)
from jaxllm.ops.reduction import cuda, pallas, reference

REDUCE_SUM = Op("reduce_sum", reference=reference, pallas=pallas, cuda=cuda)
REDUCE_MAX = Op("reduce_max", reference=reference, pallas=pallas, cuda=cuda)
DOT = Op("dot", reference=reference, pallas=pallas, cuda=cuda)
HISTOGRAM = Op(
    "histogram",
    reference=reference,
    pallas=pallas,
    cuda=cuda,
    sharding=ShardingRule("... -> _ +..."),
)


def reduce_sum(x: Float[Array, "*shape"], *, backend: Backend | None = None) -> Float[Array, ""]:
    r"""The sum of all elements.

    .. math::
        out = \sum_i x_i

    The sum is float32 (float64 for float64) in a fixed order, so it repeats bit for bit. Under
    ``jax.vmap`` the order may differ from that of a single call.

    Args:
        x: Any shape; float32, bfloat16 or float16 for the kernels.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The sum, a float32 scalar (float64 for float64); zero for an empty array.

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
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _reduce_sum(x, backend=resolve(backend), options=like)


def reduce_max(x: Float[Array, "*shape"], *, backend: Backend | None = None) -> Float[Array, ""]:
    """The largest element; NaN where any element is.

    Elements that share the maximum share its gradient equally.

    Args:
        x: As in :func:`reduce_sum`.
        backend: As in :func:`reduce_sum`.

    Returns:
        The largest element, a scalar in the dtype of ``x``; minus infinity for an empty array.

    Raises:
        TypeError: ``x`` is not floating-point.
        ValueError: The backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: CUDA-Learn-Notes' ``block_reduce_max``.
    """
    check_floating_of_any_width(x=x)
    return _reduce_max(x, backend=resolve(backend))


def dot(
    a: Float[Array, "*shape"], b: Float[Array, "*shape"], *, backend: Backend | None = None
) -> Float[Array, ""]:
    r"""The dot product of two arrays of any shape.

    .. math::
        out = \sum_i a_i b_i

    Products and sum are float32 (float64 for float64), in a fixed order as in :func:`reduce_sum`.

    Args:
        a: Any shape; float32, bfloat16 or float16 for the kernels.
        b: In the shape and dtype of ``a``.
        backend: As in :func:`reduce_sum`.

    Returns:
        The dot product, a float32 scalar (float64 for float64); zero for empty arrays.

    Raises:
        TypeError: An argument is not floating-point, or ``b`` differs from ``a`` in dtype.
        ValueError: ``b`` differs from ``a`` in shape, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: CUDA-Learn-Notes' ``dot_product``.
    """
    check_floating(a=a, b=b)
    check_shape("b", b, a.shape, "the shape of a")
    check_same_dtype("b", b, "a", a)
    return _dot(a, b, backend=resolve(backend))


def histogram(
    x: Int[Array, "*shape"], *, bins: int, backend: Backend | None = None
) -> Int32[Array, " bins"]:
    r"""Counts how often each integer from 0 to ``bins - 1`` occurs.

    .. math::
        out_k = \sum_i [x_i = k]

    Other integers are not counted.

    Args:
        x: Any shape; int32 for the kernels.
        bins: The number of counts.
        backend: As in :func:`reduce_sum`.

    Returns:
        The counts in int32: a count above 2**31 - 1 wraps around.

    Raises:
        TypeError: ``x`` is not an array of integers.
        ValueError: ``bins`` is not from 1 to 2**31 - 1, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: CUDA-Learn-Notes' ``histogram``, with counters in shared memory.

    Example:
        >>> jaxllm.ops.histogram(jnp.array([0, 2, 2, 7, -1]), bins=3)
        Array([1, 0, 2], dtype=int32)
    """
    check_integer(x=x)
    bins = as_integer("bins", bins)
    if not 1 <= bins < 2**31:
        raise ValueError(f"bins is {bins}; it must be from 1 to 2**31 - 1")
    x = as_int32(x) if x.dtype.itemsize > 4 else x  # JAX may cast, which wraps around
    return dispatch(HISTOGRAM, Direction.INFERENCE, resolve(backend), x, bins=bins)


# The gradients need no kernels: see reference.py.


def _reduce_sum_forward(_, backend, x):
    out = dispatch(REDUCE_SUM, Direction.FORWARD, backend, x)
    return checkpoint_name(out, "reduce_sum"), None


def _reduce_sum_backward(like, backend, saved, dout):
    del backend, saved
    return (jnp.broadcast_to(dout.astype(like.dtype), like.shape),)


def _reduce_max_forward(_, backend, x):
    out = checkpoint_name(dispatch(REDUCE_MAX, Direction.FORWARD, backend, x), "reduce_max")
    return out, (x, out)


def _reduce_max_backward(_, backend, saved, dout):
    del backend
    x, out = saved
    wide = wide_dtype(x.dtype)
    is_largest = x == out
    share = dout.astype(wide) / jnp.sum(is_largest, dtype=wide)
    return (jnp.where(is_largest, share, 0.0).astype(x.dtype),)


def _dot_forward(_, backend, a, b):
    return checkpoint_name(dispatch(DOT, Direction.FORWARD, backend, a, b), "dot"), (a, b)


def _dot_backward(_, backend, saved, dout):
    del backend
    a, b = saved
    return (dout * b).astype(a.dtype), (dout * a).astype(b.dtype)


def _reduce_max_on_shard(function, shard, x):
    out, saved = function(x)
    names = [name for name in shard.axes if name.startswith("row")]
    # No pmax: NCCL does not promise that the maximum of a NaN is NaN.
    return shard.of_each(out, *names).max() if shard.over(*names) else out, saved


# The backwards are of whole arrays: XLA splits them.
_reduce_sum = with_backward(
    "reduce_sum",
    _reduce_sum_forward,
    _reduce_sum_backward,
    sharding=ShardingRule("... -> +...", backward_on_shards=False),
)
_reduce_max = with_backward(
    "reduce_max",
    _reduce_max_forward,
    _reduce_max_backward,
    sharding=ShardingRule("... -> ", backward_on_shards=False, local=_reduce_max_on_shard),
)
_dot = with_backward("dot", _dot_forward, _dot_backward, sharding=ShardingRule("..., ... -> +..."))
