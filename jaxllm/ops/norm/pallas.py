"""Pallas-Triton normalization kernels.

A program has a tile of whole rows. Its width is rounded up to a power of two, as Triton requires;
columns past the row's end and rows past the last are masked. Statistics and sums are float32. One
kernel serves an op with and without a residual, which is None there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.ops.pallas_call import pallas_call

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_WIDTH = 65536
_MAX_ROWS = 2**30  # rows are counted in 32 bits, and the last tile ends beyond the last row
_TILE = 1024  # elements per tile, unless one row is longer
_MAX_PROGRAMS = 1024  # of a backward kernel: each writes one partial row of weight gradients


def layer_norm_unsupported(x, *_, **__) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if x.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"x has dtype {x.dtype}; the kernel takes {names}"
    if x.shape[-1] > _MAX_WIDTH:
        return f"x has rows of {x.shape[-1]}; the kernel takes at most {_MAX_WIDTH}"
    if (rows := math.prod(x.shape[:-1])) > _MAX_ROWS:
        return f"x has {rows} rows; the kernel takes at most {_MAX_ROWS}"
    return None


rms_norm_unsupported = layer_norm_unsupported
add_layer_norm_unsupported = layer_norm_unsupported
add_rms_norm_unsupported = layer_norm_unsupported
layer_norm_backward_unsupported = layer_norm_unsupported
rms_norm_backward_unsupported = layer_norm_unsupported


def add_layer_norm_backward_unsupported(h, *_, **__) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return layer_norm_unsupported(h)


add_rms_norm_backward_unsupported = add_layer_norm_backward_unsupported


def layer_norm_forward(x, scale, bias, *, eps, statistics=True, interpret=False):
    """Returns ``(out, mean, rstd)``."""
    results = _layer_norm_forward(x, None, None, scale, bias, eps, statistics, interpret)
    out, _, mean, rstd = results
    return out, mean, rstd


def layer_norm_backward(x, scale, mean, rstd, dout, *, interpret=False):
    """Returns ``(dx, dscale, dbias)``."""
    dx, _, dscale, dbias = _layer_norm_backward(x, None, scale, mean, rstd, dout, None, interpret)
    return dx, dscale, dbias


def rms_norm_forward(x, scale, *, eps, statistics=True, interpret=False):
    """Returns ``(out, rstd)``."""
    out, _, rstd = _rms_norm_forward(x, None, scale, eps, statistics, interpret)
    return out, rstd


def rms_norm_backward(x, scale, rstd, dout, *, interpret=False):
    """Returns ``(dx, dscale)``."""
    return _rms_norm_backward(x, scale, rstd, dout, None, interpret)


def add_layer_norm_forward(
    x, residual, x_bias, scale, bias, *, eps, statistics=True, interpret=False
):
    """Returns ``(out, h, mean, rstd)``."""
    return _layer_norm_forward(x, residual, x_bias, scale, bias, eps, statistics, interpret)


def add_layer_norm_backward(h, x_bias, scale, mean, rstd, dout, dh, *, interpret=False):
    """Returns ``(dx, dx_bias, dscale, dbias)``."""
    return _layer_norm_backward(h, x_bias, scale, mean, rstd, dout, dh, interpret)


def add_rms_norm_forward(x, residual, scale, *, eps, statistics=True, interpret=False):
    """Returns ``(out, h, rstd)``."""
    return _rms_norm_forward(x, residual, scale, eps, statistics, interpret)


def add_rms_norm_backward(h, scale, rstd, dout, dh, *, interpret=False):
    """Returns ``(dx, dscale)``."""
    return _rms_norm_backward(h, scale, rstd, dout, dh, interpret)


# Kernels. `shape` is the shape of the whole array, (rows, width); a ref is one block of it.


def _layer_norm_forward_kernel(
    x_ref, residual_ref, x_bias_ref, scale_ref, bias_ref,
    out_ref, h_ref, mean_ref, rstd_ref, *, shape, eps,
):  # fmt: skip
    rows, columns = _masks(shape, x_ref.shape, pl.program_id(0) * x_ref.shape[0])
    inside = rows[:, None] & columns
    x_bias = None if x_bias_ref is None else _load(x_bias_ref, columns)
    x = _sum(x_ref, residual_ref, h_ref, inside, x_bias)
    mean = jnp.sum(x, axis=1) / shape[1]
    centred = jnp.where(inside, x - mean[:, None], 0.0)
    rstd = lax.rsqrt(jnp.sum(centred * centred, axis=1) / shape[1] + eps)
    out = centred * rstd[:, None] * _load(scale_ref, columns) + _load(bias_ref, columns)
    plgpu.store(out_ref, out.astype(out_ref.dtype), mask=inside)
    if mean_ref is not None:
        plgpu.store(mean_ref, mean, mask=rows)
        plgpu.store(rstd_ref, rstd, mask=rows)


def _rms_norm_forward_kernel(
    x_ref, residual_ref, scale_ref, out_ref, h_ref, rstd_ref, *, shape, eps
):
    rows, columns = _masks(shape, x_ref.shape, pl.program_id(0) * x_ref.shape[0])
    inside = rows[:, None] & columns
    x = _sum(x_ref, residual_ref, h_ref, inside)
    rstd = lax.rsqrt(jnp.sum(x * x, axis=1) / shape[1] + eps)
    out = x * rstd[:, None] * _load(scale_ref, columns)
    plgpu.store(out_ref, out.astype(out_ref.dtype), mask=inside)
    if rstd_ref is not None:
        plgpu.store(rstd_ref, rstd, mask=rows)


def _layer_norm_backward_kernel(
    x_ref, scale_ref, mean_ref, rstd_ref, dout_ref, dh_ref,
    dx_ref, dx_bias_ref, dscale_ref, dbias_ref, *, shape, tile,
):  # fmt: skip
    block = (tile, x_ref.shape[1])
    first_row = pl.program_id(0) * x_ref.shape[0]
    _, columns = _masks(shape, block, 0)
    scale = _load(scale_ref, columns)

    def visit(i, sums):
        dx_bias, dscale, dbias = sums
        rows, _ = _masks(shape, block, first_row + i * tile)
        inside = rows[:, None] & columns
        here = pl.ds(i * tile, tile)
        x, dout = _load(x_ref.at[here, :], inside), _load(dout_ref.at[here, :], inside)
        mean, rstd = _load(mean_ref.at[here], rows), _load(rstd_ref.at[here], rows)
        n = jnp.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0)
        g = dout * scale
        mean_g = jnp.sum(g, axis=1, keepdims=True) / shape[1]
        mean_gn = jnp.sum(g * n, axis=1, keepdims=True) / shape[1]
        dx = rstd[:, None] * (g - mean_g - n * mean_gn)
        if dh_ref is not None:
            dx += _load(dh_ref.at[here, :], inside)
        plgpu.store(dx_ref.at[here, :], dx.astype(dx_ref.dtype), mask=inside)
        if dx_bias is not None:
            dx_bias += jnp.sum(dx, axis=0)
        return dx_bias, dscale + jnp.sum(n * dout, axis=0), dbias + jnp.sum(dout, axis=0)

    zeros = jnp.zeros(block[1], jnp.float32)
    sums = (None if dx_bias_ref is None else zeros, zeros, zeros)
    dx_bias, dscale, dbias = lax.fori_loop(0, x_ref.shape[0] // tile, visit, sums)
    if dx_bias_ref is not None:
        plgpu.store(dx_bias_ref, dx_bias, mask=columns)
    plgpu.store(dscale_ref, dscale, mask=columns)
    plgpu.store(dbias_ref, dbias, mask=columns)


def _rms_norm_backward_kernel(
    x_ref, scale_ref, rstd_ref, dout_ref, dh_ref, dx_ref, dscale_ref, *, shape, tile
):
    block = (tile, x_ref.shape[1])
    first_row = pl.program_id(0) * x_ref.shape[0]
    _, columns = _masks(shape, block, 0)
    scale = _load(scale_ref, columns)

    def visit(i, dscale):
        rows, _ = _masks(shape, block, first_row + i * tile)
        inside = rows[:, None] & columns
        here = pl.ds(i * tile, tile)
        x, dout = _load(x_ref.at[here, :], inside), _load(dout_ref.at[here, :], inside)
        rstd = _load(rstd_ref.at[here], rows)
        n = x * rstd[:, None]
        g = dout * scale
        dx = rstd[:, None] * (g - n * (jnp.sum(g * n, axis=1, keepdims=True) / shape[1]))
        if dh_ref is not None:
            dx += _load(dh_ref.at[here, :], inside)
        plgpu.store(dx_ref.at[here, :], dx.astype(dx_ref.dtype), mask=inside)
        return dscale + jnp.sum(n * dout, axis=0)

    zeros = jnp.zeros(block[1], jnp.float32)
    dscale = lax.fori_loop(0, x_ref.shape[0] // tile, visit, zeros)
    plgpu.store(dscale_ref, dscale, mask=columns)


def _masks(shape, block, first_row):
    """Which rows and which columns of a block that starts at ``first_row`` are in the array."""
    rows = first_row + jnp.arange(block[0]) < shape[0]
    return rows, jnp.arange(block[1]) < shape[1]


def _load(ref, mask):
    """Reads a block as float32, zeros outside the mask."""
    return plgpu.load(ref, mask=mask, other=0.0).astype(jnp.float32)


def _sum(x_ref, residual_ref, h_ref, inside, x_bias=None):
    """``h = x + x_bias + residual``, rounded as it is stored; ``x`` if there is no residual."""
    x = _load(x_ref, inside)
    if residual_ref is None:
        return x
    if x_bias is not None:
        x += x_bias
    h = (x + _load(residual_ref, inside)).astype(h_ref.dtype)
    plgpu.store(h_ref, h, mask=inside)
    return h.astype(jnp.float32)


# Calls: block specs, grids, and the final sums over partial rows.


def _layer_norm_forward(x, residual, x_bias, scale, bias, eps, statistics, interpret):
    shape = _flat_shape(x)
    block = _tile(shape)
    array, statistic, weight, _ = _specs(block)
    fused = None if residual is None else array
    out, h, mean, rstd = _call(
        functools.partial(_layer_norm_forward_kernel, shape=shape, eps=eps),
        programs=pl.cdiv(shape[0], block[0]),
        in_specs=[array, fused, None if x_bias is None else weight, weight, weight],
        out_specs=[array, fused, *2 * [statistic if statistics else None]],
        out_shape=[_flat(x), _flat(residual), *2 * [_statistic(x) if statistics else None]],
        tile=block,
        interpret=interpret,
    )(_reshape(x, shape), _reshape(residual, shape), x_bias, scale, bias)
    rows = x.shape[:-1]
    return out.reshape(x.shape), _reshape(h, x.shape), _reshape(mean, rows), _reshape(rstd, rows)


def _rms_norm_forward(x, residual, scale, eps, statistics, interpret):
    shape = _flat_shape(x)
    block = _tile(shape)
    array, statistic, weight, _ = _specs(block)
    fused = None if residual is None else array
    out, h, rstd = _call(
        functools.partial(_rms_norm_forward_kernel, shape=shape, eps=eps),
        programs=pl.cdiv(shape[0], block[0]),
        in_specs=[array, fused, weight],
        out_specs=[array, fused, statistic if statistics else None],
        out_shape=[_flat(x), _flat(residual), _statistic(x) if statistics else None],
        tile=block,
        interpret=interpret,
    )(_reshape(x, shape), _reshape(residual, shape), scale)
    return out.reshape(x.shape), _reshape(h, x.shape), _reshape(rstd, x.shape[:-1])


def _layer_norm_backward(x, x_bias, scale, mean, rstd, dout, dh, interpret):
    shape = _flat_shape(x)
    tile = _tile(shape)
    block = _visited_block(shape, tile)
    programs = pl.cdiv(shape[0], block[0])
    array, statistic, weight, partial = _specs(block)
    partials = jax.ShapeDtypeStruct((programs, shape[1]), jnp.float32)
    dx_bias = (None, None) if x_bias is None else (partial, partials)
    dx, *sums = _call(
        functools.partial(_layer_norm_backward_kernel, shape=shape, tile=tile[0]),
        programs=programs,
        in_specs=[array, weight, statistic, statistic, array, None if dh is None else array],
        out_specs=[array, dx_bias[0], partial, partial],
        out_shape=[_flat(x), dx_bias[1], partials, partials],
        tile=tile,
        interpret=interpret,
    )(
        _reshape(x, shape), scale, mean.reshape(-1), rstd.reshape(-1),
        _reshape(dout, shape), _reshape(dh, shape),
    )  # fmt: skip
    sums = (None if x is None else x.sum(axis=0).astype(scale.dtype) for x in sums)
    return (dx.reshape(x.shape), *sums)


def _rms_norm_backward(x, scale, rstd, dout, dh, interpret):
    shape = _flat_shape(x)
    tile = _tile(shape)
    block = _visited_block(shape, tile)
    programs = pl.cdiv(shape[0], block[0])
    array, statistic, weight, partial = _specs(block)
    dx, dscale = _call(
        functools.partial(_rms_norm_backward_kernel, shape=shape, tile=tile[0]),
        programs=programs,
        in_specs=[array, weight, statistic, array, None if dh is None else array],
        out_specs=[array, partial],
        out_shape=[_flat(x), jax.ShapeDtypeStruct((programs, shape[1]), jnp.float32)],
        tile=tile,
        interpret=interpret,
    )(_reshape(x, shape), scale, rstd.reshape(-1), _reshape(dout, shape), _reshape(dh, shape))
    return dx.reshape(x.shape), dscale.sum(axis=0).astype(scale.dtype)


def _call(
    kernel, *, programs, in_specs, out_specs, out_shape, tile, interpret
) -> Callable[..., Any]:
    """``pallas_call`` with the compiler parameters for a tile; zeros where no element is."""
    if programs == 0 or 0 in out_shape[0].shape:
        zeros = [None if out is None else jnp.zeros(out.shape, out.dtype) for out in out_shape]
        return lambda *_: zeros
    # One warp for a tile of the usual size; wider rows need more warps to hide memory latency.
    elements = tile[0] * tile[1]
    warps = 1 if elements <= _TILE else elements // 512
    return pallas_call(
        kernel,
        grid=programs,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=min(warps, 32), num_stages=1),
        interpret=interpret,
    )


def _flat_shape(x: Array) -> tuple[int, int]:
    return math.prod(x.shape[:-1]), x.shape[-1]


def _flat(x: Array | None) -> jax.ShapeDtypeStruct | None:
    return None if x is None else jax.ShapeDtypeStruct(_flat_shape(x), x.dtype)


def _reshape(x: Array | None, shape: tuple[int, ...]) -> Array | None:
    return None if x is None else x.reshape(shape)


def _statistic(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((_flat_shape(x)[0],), jnp.float32)


def _tile(shape: tuple[int, int]) -> tuple[int, int]:
    """The rows and columns of a tile: powers of two, whole rows."""
    width = pl.next_power_of_2(shape[1])
    return max(1, _TILE // width), width


def _visited_block(shape: tuple[int, int], tile: tuple[int, int]) -> tuple[int, int]:
    """The rows of one backward program, which processes them tile by tile."""
    tiles = max(1, pl.cdiv(pl.cdiv(shape[0], tile[0]), _MAX_PROGRAMS))
    return tiles * tile[0], tile[1]


def _specs(block: tuple[int, int]) -> tuple[pl.BlockSpec, ...]:
    """The block specs of an array of rows, a row statistic, a weight, and partial sums."""
    return (
        pl.BlockSpec(block, lambda i: (i, 0)),
        pl.BlockSpec((block[0],), lambda i: (i,)),
        pl.BlockSpec((block[1],), lambda i: (0,)),
        pl.BlockSpec((None, block[1]), lambda i: (i, 0)),
    )
