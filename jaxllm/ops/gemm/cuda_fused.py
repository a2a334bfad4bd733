"""FFI calls to the fused GEMMs in ``cuda/gemm``: what precedes or follows a GEMM in its kernel.

They need a Hopper GPU and 16-bit operands. Where they reject a call, the parts run that
:mod:`jaxllm.ops.gemm.fused` gives.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.core import ffi
from jaxllm.ops.gemm.tile_order import TileOrdered, shape_in_memory

_TILE = (128, 192)  # rows and columns of a CTA's tile, as in cuda/gemm/hopper/matmul_hopper.cu
_HEAD_WIDTH = 64  # of matmul_delta
# With fewer tiles for each SM, XLA's GEMMs, in smaller tiles, are faster.
_MIN_TILES_OF_SM = 1
# The tiles of a row wait for one another, so they are no more than the clusters that run at once,
# nor more than the most that the kernels have been tested with.
_MAX_ROW_TILES = 48
_NORM_PARTIAL_ROWS = 16  # as in cuda/gemm/hopper/matmul_hopper.h
_MAX_SIZE = 2**31  # TMA's coordinates
_MAX_LAYER_SIDE = 2**30  # as in cuda/gemm/fold_norm.cu
_WGRAD_TILE = (256, 192)  # of a weight, as in cuda/gemm/hopper/wgrad.h
_MIN_FILLED = 7 / 8
_MIN_WGRAD_ROWS = 8192


def gemm_unsupported(x, columns: int) -> str | None:
    """Why no fused GEMM multiplies ``x`` by a matrix of so many columns; None if one does."""
    *outer, width = x.shape
    rows = math.prod(outer)
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {x.dtype}; the fused GEMM takes bfloat16 and float16"
    if width % 8 or columns % 8 or width == 0:
        return (
            f"the GEMM of {x.shape} and {(width, columns)} has widths that are no multiples of 8, "
            "16 bytes, as TMA needs them"
        )
    if max(rows, width, columns) >= _MAX_SIZE:
        return f"the GEMM of {x.shape} and {(width, columns)} has a size of 2^31 or more"
    if reason := ffi.no_hopper_reason():
        return reason
    if _gpu().clusters == 0:
        return "no two SMs of this GPU can run a cluster of the kernel"
    tiles, sms = _tiles(rows, columns), _gpu().multiprocessors
    if tiles < _MIN_TILES_OF_SM * sms:
        return f"the GEMM has {tiles} tiles of {_TILE}, too few to fill {sms} SMs"
    return None


def row_gemm_unsupported(x, columns: int) -> str | None:
    """Why no fused GEMM has whole rows of the result at once, as a norm in its epilogue needs."""
    if reason := gemm_unsupported(x, columns):
        return reason
    tiles, most = _tiles(1, columns), min(_gpu().clusters, _MAX_ROW_TILES)
    if tiles > most:
        return f"a row of {columns} columns has {tiles} tiles, and no more than {most} run at once"
    return None


def _gpu() -> ffi.Device:
    """The GPU that a call is compiled for, where it is known to be a Hopper GPU."""
    gpu = ffi.device()
    assert gpu is not None
    return gpu


def _tiles(rows: int, columns: int) -> int:
    return math.prod(-(-size // tile) for size, tile in zip((rows, columns), _TILE, strict=True))


def matmul_bias_unsupported(x, weight, bias) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del bias
    return gemm_unsupported(x, weight.shape[1])


def matmul_bias(x, weight, bias):
    """Returns ``x @ weight + bias``."""
    flat = x.reshape(-1, x.shape[-1])
    out = jax.ShapeDtypeStruct((flat.shape[0], weight.shape[1]), x.dtype)
    nothing = jax.ShapeDtypeStruct((0,), x.dtype)
    out, _ = ffi.call(
        "matmul", (out, nothing), flat, weight, bias,
        transpose_a=False, transpose_b=False, gelu=False, tf32=False,
    )  # fmt: skip
    return out.reshape(*x.shape[:-1], -1)


def matmul_bias_gelu_unsupported(x, weight, bias, *, saves_derivative, out_columns) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del bias
    columns = weight.shape[1]
    reason = gemm_unsupported(x, columns)
    if reason is None and saves_derivative:  # then matmul_dgelu must read what this one saves
        dout = jax.ShapeDtypeStruct((*x.shape[:-1], out_columns), x.dtype)
        reason = gemm_unsupported(dout, columns)
    return reason


def matmul_bias_gelu(x, weight, bias, *, saves_derivative, out_columns):
    """Returns ``gelu(x @ weight + bias)``, and GELU's derivative there, or else ``x @ weight``."""
    del out_columns
    shape = (*x.shape[:-1], weight.shape[1])
    out = saved = jax.ShapeDtypeStruct(shape, x.dtype)
    if saves_derivative:
        saved = jax.ShapeDtypeStruct(shape_in_memory(shape), x.dtype)
    arrays = (x, weight, bias)
    out, saved = ffi.call("matmul_bias_gelu", (out, saved), *arrays, save_dgelu=saves_derivative)
    return out, TileOrdered(saved, shape) if saves_derivative else saved


def matmul_dgelu_unsupported(dout, weight, saved, bias) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del bias
    if not isinstance(saved, TileOrdered):
        return "the forward saved the input of GELU, and not its derivative"
    return gemm_unsupported(dout, weight.shape[0])


def matmul_dgelu(dout, weight, saved, bias):
    """Returns ``(dout @ weight.T) * dgelu`` and its sum over rows."""
    del bias
    columns = weight.shape[0]
    row_tiles = -(-math.prod(dout.shape[:-1]) // _TILE[0])
    results = (
        jax.ShapeDtypeStruct((*dout.shape[:-1], columns), dout.dtype),
        jax.ShapeDtypeStruct((columns,), dout.dtype),
        jax.ShapeDtypeStruct((row_tiles, columns), jnp.float32),
    )
    return tuple(ffi.call("matmul_dgelu", results, dout, weight, saved.array)[:2])


def matmul_residual_unsupported(x, weight, bias, residual) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del bias, residual
    return gemm_unsupported(x, weight.shape[1])


def matmul_residual(x, weight, bias, residual):
    """Returns ``x @ weight + bias + residual``, rounded once."""
    if bias is None:
        bias = jnp.zeros(weight.shape[1:], x.dtype)
    total = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    return ffi.call("matmul_residual", [total], x, weight, bias, residual)[0]


def matmul_residual_norm_unsupported(x, weight, bias, residual, norm, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del bias, residual, norm
    return row_gemm_unsupported(x, weight.shape[1])


def matmul_residual_norm(x, weight, bias, residual, norm, *, eps):
    """Returns ``out = x @ weight + bias + residual``, and its layer norm ``(x_hat, mean, rstd)``.

    The kernel reads the residual's layer norm instead of the residual, and does not write ``out``:
    XLA computes it from the norm, if anything uses it.
    """
    x_hat, *_ = norm
    if bias is None:
        bias = jnp.zeros(weight.shape[1:], x.dtype)
    statistic = jax.ShapeDtypeStruct(x_hat.shape[:-1], jnp.float32)
    results = (
        jax.ShapeDtypeStruct(x_hat.shape, x_hat.dtype),
        statistic,
        statistic,
        _row_sums(x_hat),
    )
    arrays = (x, weight, bias, *norm)
    x_hat, mean, rstd, _ = ffi.call("matmul_residual_norm", results, *arrays, eps=eps)
    out = x_hat.astype(jnp.float32) / rstd[..., None] + mean[..., None]
    return out.astype(residual.dtype), (x_hat, mean, rstd)


def matmul_norm_backward_unsupported(dout, weight, x_hat, rstd, dtotal) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del x_hat, rstd, dtotal
    return row_gemm_unsupported(dout, weight.shape[0])


def matmul_norm_backward(dout, weight, x_hat, rstd, dtotal):
    """Returns ``dtotal`` plus the layer norm's backward of ``dout @ weight.T``, and a sum.

    The sum is that of ``dtotal`` over rows. ``dtotal`` is written over where nothing else reads it.
    """
    columns = weight.shape[0]
    # The kernel has as many clusters as run at once on this process's smallest GPU.
    partial_rows = _gpu().clusters // _tiles(1, columns) * _NORM_PARTIAL_ROWS
    results = (
        jax.ShapeDtypeStruct(x_hat.shape, x_hat.dtype),
        jax.ShapeDtypeStruct((columns,), dout.dtype),
        jax.ShapeDtypeStruct((partial_rows, columns), jnp.float32),
        _row_sums(x_hat),
    )
    arrays = (dout, weight, x_hat, rstd, dtotal)
    return tuple(ffi.call("matmul_norm_backward", results, *arrays, aliases={4: 0})[:2])


def _row_sums(x_hat) -> jax.ShapeDtypeStruct:
    """A workspace: two sums for each row of each tile, for pairs of row tiles."""
    *outer, columns = x_hat.shape
    row_tiles, column_tiles = -(-math.prod(outer) // _TILE[0]), -(-columns // _TILE[1])
    shape = (-(-row_tiles // 2) * 2, column_tiles, 2 * _TILE[0])
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def matmul_delta_unsupported(dout, weight, out, *, heads, kv_heads) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del out
    columns, T = weight.shape[0], dout.shape[1]
    if columns != heads * _HEAD_WIDTH or kv_heads != heads:
        return (
            f"{heads} query heads of {columns // heads} share {kv_heads} key heads; the kernel "
            f"takes heads of {_HEAD_WIDTH} that share none"
        )
    if T % _TILE[0]:
        return f"a sequence of {T} is no multiple of {_TILE[0]}, the tile of attention's backward"
    return gemm_unsupported(dout, columns)


def matmul_delta(dout, weight, out, *, heads, kv_heads):
    """Returns ``dout @ weight.T``, attention's delta, and the sums of every 128 rows.

    The latter two are float32.
    """
    del heads, kv_heads
    B, T, _ = dout.shape
    columns = weight.shape[0]
    results = (
        jax.ShapeDtypeStruct((B, T, columns), dout.dtype),
        jax.ShapeDtypeStruct((B, columns // _HEAD_WIDTH, T), jnp.float32),
        jax.ShapeDtypeStruct((B * T // _TILE[0], columns), jnp.float32),
    )
    return tuple(ffi.call("matmul_delta", results, dout, weight, out))


def fold_norm_unsupported(scale, norm_bias, weight, *_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del norm_bias
    if scale.dtype != weight.dtype:
        return f"scale has dtype {scale.dtype} beside a weight of {weight.dtype}"
    if weight.dtype not in (jnp.bfloat16, jnp.float16):
        return f"weight has dtype {weight.dtype}; the kernel takes bfloat16 and float16"
    if weight.shape[1] % 8:
        return f"weight has {weight.shape[1]} columns, no multiple of 8, 16 bytes"
    if max(weight.shape) >= _MAX_LAYER_SIDE:
        return f"weight has shape {weight.shape}, a side of 2^30 or more"
    return None


def fold_norm(scale, norm_bias, weight, bias):
    """Returns the weight and the bias of a layer with those of the norm before it folded in."""
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (weight, bias)]
    return tuple(ffi.call("fold_norm", results, scale, norm_bias, weight, bias))


fold_norm_backward_unsupported = fold_norm_unsupported


def fold_norm_backward(scale, norm_bias, weight, dweight, dbias):
    """Returns ``(dscale, dnorm_bias, dweight)``."""
    arrays = (scale, norm_bias, weight)
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    return tuple(ffi.call("fold_norm_backward", results, *arrays, dweight, dbias))


def wgrad_pair_unsupported(x, dout, other_x, other_dout, *, min_rows, sms_of_tile) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {x.dtype}; the kernel takes bfloat16 and float16"
    shapes = _weight_shapes(x, dout, other_x, other_dout)
    if any(size % 8 or size == 0 for shape in shapes for size in shape):
        return f"weights of {shapes} have sides that are no multiples of 8, 16 bytes"
    rows = math.prod(x.shape[:-1])
    if not max(min_rows, _MIN_WGRAD_ROWS) <= rows < _MAX_SIZE:
        return f"x has {rows} rows, too few to be shared among CTAs, or 2^31 or more"
    if reason := ffi.no_hopper_reason():
        return reason
    tiles, sms = sum(map(_wgrad_tiles, shapes)), _gpu().multiprocessors
    if sms_of_tile * tiles > sms:
        return (
            f"the weights have {tiles} tiles of {_WGRAD_TILE} for {sms} SMs, enough for XLA's GEMMs"
        )
    filled = sum(map(math.prod, shapes)) / (tiles * math.prod(_WGRAD_TILE))
    if filled < _MIN_FILLED:
        return f"the weights fill {filled:.2f} of their tiles of {_WGRAD_TILE}"
    return None


def wgrad_pair(x, dout, other_x, other_dout, *, min_rows, sms_of_tile):
    """Returns ``(dweight, other_dweight, dout, other_dout)``."""
    del min_rows, sms_of_tile
    arrays = (x, dout, other_x, other_dout)
    shapes = _weight_shapes(*arrays)
    # The kernel has a CTA for each SM of this process's smallest GPU, on larger ones too.
    partial = (_gpu().multiprocessors + sum(map(_wgrad_tiles, shapes)), *_WGRAD_TILE)
    results = (
        *(jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes),
        jax.ShapeDtypeStruct(partial, jnp.float32),
    )
    dweight, other_dweight, _ = ffi.call("wgrad_pair", results, *arrays)
    return lax.optimization_barrier((dweight, other_dweight, dout, other_dout))


def _weight_shapes(x, dout, other_x, other_dout) -> tuple[tuple[int, int], ...]:
    return (x.shape[-1], dout.shape[-1]), (other_x.shape[-1], other_dout.shape[-1])


def _wgrad_tiles(shape: tuple[int, int]) -> int:
    return math.prod(-(-size // tile) for size, tile in zip(shape, _WGRAD_TILE, strict=True))
