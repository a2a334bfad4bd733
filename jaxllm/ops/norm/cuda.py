"""FFI calls to the CUDA normalization kernels in ``cuda/norm``."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.core import ffi

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

# The weight gradients have two stages: each CTA sums its rows into one partial row, and a second
# kernel sums the partial rows. The workspace bounds the number of CTAs: a few per SM of the largest
# GPUs.
_MAX_PARTIAL_ROWS = 640
_MAX_ROWS = 2**31 - 1  # the x axis of a grid


def layer_norm_unsupported(x, *arrays, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if x.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"x has dtype {x.dtype}; the kernel takes {names}"
    for array in arrays:
        if array is not None and array.dtype not in (x.dtype, jnp.float32):
            return (
                f"an argument has dtype {array.dtype}; with x of {x.dtype} the kernel takes "
                "that dtype or float32"
            )
    if (rows := math.prod(x.shape[:-1])) > _MAX_ROWS:
        return f"x has {rows} rows; the kernel takes at most {_MAX_ROWS}"
    return None


rms_norm_unsupported = layer_norm_unsupported
add_layer_norm_unsupported = layer_norm_unsupported
add_rms_norm_unsupported = layer_norm_unsupported
layer_norm_backward_unsupported = layer_norm_unsupported
rms_norm_backward_unsupported = layer_norm_unsupported


def add_layer_norm_backward_unsupported(h, *arrays, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return layer_norm_unsupported(h, *arrays)


add_rms_norm_backward_unsupported = add_layer_norm_backward_unsupported


def layer_norm_forward(x, scale, bias, *, eps, statistics=True):
    """Returns ``(out, mean, rstd)``."""
    results = (_like(x), *2 * [_row_statistic(x, statistics)])
    out, *row_statistics = ffi.call("layer_norm_forward", results, x, scale, bias, eps=eps)
    return (out, *(row_statistics if statistics else (None, None)))


def layer_norm_backward(x, scale, mean, rstd, dout):
    """Returns ``(dx, dscale, dbias)``."""
    results = (_like(x), _like(scale), _like(scale), _partial_sums(x, 2))
    return ffi.call("layer_norm_backward", results, x, scale, mean, rstd, dout)[:3]


def rms_norm_forward(x, scale, *, eps, statistics=True):
    """Returns ``(out, rstd)``."""
    results = (_like(x), _row_statistic(x, statistics))
    out, rstd = ffi.call("rms_norm_forward", results, x, scale, eps=eps)
    return out, rstd if statistics else None


def rms_norm_backward(x, scale, rstd, dout):
    """Returns ``(dx, dscale)``."""
    results = (_like(x), _like(scale), _partial_sums(x, 1))
    return ffi.call("rms_norm_backward", results, x, scale, rstd, dout)[:2]


def add_layer_norm_forward(x, residual, x_bias, scale, bias, *, eps, statistics=True):
    """Returns ``(out, h, mean, rstd)``."""
    if x_bias is None:
        x_bias = jnp.zeros(0, scale.dtype)
    results = (_like(x), _like(x), *2 * [_row_statistic(x, statistics)])
    arrays = (x, residual, x_bias, scale, bias)
    out, h, *row_statistics = ffi.call("add_layer_norm_forward", results, *arrays, eps=eps)
    return (out, h, *(row_statistics if statistics else (None, None)))


def add_layer_norm_backward(h, x_bias, scale, mean, rstd, dout, dh):
    """Returns ``(dx, dx_bias, dscale, dbias)``."""
    dx_bias = jax.ShapeDtypeStruct((0,), scale.dtype) if x_bias is None else _like(x_bias)
    sums = 2 if x_bias is None else 3
    results = (_like(h), _like(scale), _like(scale), dx_bias, _partial_sums(h, sums))
    arrays = (h, scale, mean, rstd, dout, _or_empty(dh, h))
    gradients = ffi.call("add_layer_norm_backward", results, *arrays)
    dx, dscale, dbias, dx_bias, _ = gradients
    return dx, None if x_bias is None else dx_bias, dscale, dbias


def add_rms_norm_forward(x, residual, scale, *, eps, statistics=True):
    """Returns ``(out, h, rstd)``."""
    results = (_like(x), _like(x), _row_statistic(x, statistics))
    out, h, rstd = ffi.call("add_rms_norm_forward", results, x, residual, scale, eps=eps)
    return out, h, rstd if statistics else None


def add_rms_norm_backward(h, scale, rstd, dout, dh):
    """Returns ``(dx, dscale)``."""
    results = (_like(h), _like(scale), _partial_sums(h, 1))
    arrays = (h, scale, rstd, dout, _or_empty(dh, h))
    return ffi.call("add_rms_norm_backward", results, *arrays)[:2]


def _or_empty(dh: Array | None, h: Array) -> Array:
    return jnp.zeros(0, h.dtype) if dh is None else dh


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _row_statistic(x: Array, wanted: bool) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[:-1] if wanted else (0,), jnp.float32)


def _partial_sums(x: Array, weights: int) -> jax.ShapeDtypeStruct:
    """The workspace: partial gradients of each of ``weights`` row vectors."""
    rows = x.size // max(x.shape[-1], 1)
    return jax.ShapeDtypeStruct((weights, min(rows, _MAX_PARTIAL_ROWS), x.shape[-1]), jnp.float32)
