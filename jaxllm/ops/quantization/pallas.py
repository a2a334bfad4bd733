"""Pallas-Triton kernels of group quantization.

To quantize and dequantize, a program has a tile of whole groups, whose width is rounded up to a
power of two and masked. The matvec loops over the rows of the matrix by groups, or parts of one:
the int8 values are exact in the dtype of x, and the scale of the group multiplies their sum.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.ops.pallas_call import pallas_call

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_TILE = 4096  # elements per program
_MAX_GROUP = 16384
_MAX_GROUPS = 2**30  # counted in 32 bits, and the last tile ends beyond the last group
_MIN_BLOCK = 16


def quantize_unsupported(w, *, group_size) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if w.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"w has dtype {w.dtype}; the kernel takes {names}"
    if group_size > _MAX_GROUP:
        return f"group_size is {group_size}; the kernel takes at most {_MAX_GROUP}"
    if w.size // group_size > _MAX_GROUPS:
        return f"w has {w.size // group_size} groups; the kernel takes at most {_MAX_GROUPS}"
    return None


def dequantize_unsupported(q, scales) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if scales.dtype != jnp.float32:
        return f"scales has dtype {scales.dtype}; the kernel takes float32"
    if q.size and q.shape[-1] // scales.shape[-1] > _MAX_GROUP:
        return f"groups are {q.shape[-1] // scales.shape[-1]} long; the kernel takes {_MAX_GROUP}"
    if scales.size > _MAX_GROUPS:
        return f"there are {scales.size} groups; the kernel takes at most {_MAX_GROUPS}"
    return None


def quantized_matvec_unsupported(q, scales, x) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if x.dtype not in _DTYPES or scales.dtype != jnp.float32:
        return (
            f"x has dtype {x.dtype} and scales {scales.dtype}; the kernel takes float32, bfloat16 "
            "or float16, and float32"
        )
    group = q.shape[1] // max(scales.shape[1], 1)
    if q.size and (group < _MIN_BLOCK or group != pl.next_power_of_2(group)):
        return f"groups are {group} long; the kernel takes powers of two from {_MIN_BLOCK} on"
    return None


def quantized_matmul_unsupported(q, scales, x) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return dequantize_unsupported(q, scales)


def quantize(w, *, group_size, interpret=False):
    """Returns ``(q, scales)``."""
    shape = (*w.shape[:-1], w.shape[-1] // group_size)
    if w.size == 0:
        return jnp.zeros(w.shape, jnp.int8), jnp.zeros(shape, jnp.float32)
    groups = w.reshape(-1, group_size)
    q, scales = _by_group(
        _quantize_kernel, groups,
        out_shape=[jax.ShapeDtypeStruct(groups.shape, jnp.int8),
                   jax.ShapeDtypeStruct((len(groups),), jnp.float32)],
        interpret=interpret,
    )  # fmt: skip
    return q.reshape(w.shape), scales.reshape(shape)


def dequantize(q, scales, *, interpret=False):
    """Returns ``w``."""
    if q.size == 0:
        return jnp.zeros(q.shape, scales.dtype)
    groups = q.reshape(scales.size, -1)
    (w,) = _by_group(
        _dequantize_kernel, groups, scales.reshape(-1),
        out_shape=[jax.ShapeDtypeStruct(groups.shape, scales.dtype)],
        interpret=interpret,
    )  # fmt: skip
    return w.reshape(q.shape)


def quantized_matmul(q, scales, x, *, interpret=False):
    """Returns ``out``."""
    w = dequantize(q, scales, interpret=interpret).astype(x.dtype)
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def quantized_matvec(q, scales, x, *, interpret=False):
    """Returns ``out``."""
    (M, K), rows = q.shape, x.shape[0]
    if q.size == 0:
        return jnp.zeros((rows, M), x.dtype)
    group = K // scales.shape[1]
    block = min(32, pl.next_power_of_2(max(M, _MIN_BLOCK)))
    padded = jnp.pad(x, ((0, _MIN_BLOCK - rows), (0, 0)))
    out = pallas_call(
        functools.partial(_matvec_kernel, M=M, K=K, group=group, step=min(group, 256), block=block),
        grid=(pl.cdiv(M, block),),
        out_shape=jax.ShapeDtypeStruct((_MIN_BLOCK, M), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
    )(q, scales, padded)
    return out[:rows]


def _by_group(kernel, groups, *arrays, out_shape, interpret):
    """Calls a kernel on tiles of whole groups of ``groups``, ``arrays`` and the results."""
    count, width = groups.shape
    tile = min(max(1, _TILE // pl.next_power_of_2(width)), pl.next_power_of_2(count))
    specs = {
        1: pl.BlockSpec((tile,), lambda i: (i,)),
        2: pl.BlockSpec((tile, pl.next_power_of_2(width)), lambda i: (i, 0)),
    }
    return pallas_call(
        functools.partial(kernel, count=count, width=width),
        grid=(math.ceil(count / tile),),
        in_specs=[specs[array.ndim] for array in (groups, *arrays)],
        out_specs=[specs[len(out.shape)] for out in out_shape],
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(groups, *arrays)


def _masks(count, width, block):
    """Masks of the groups and of the elements of a program's tile that are in the array."""
    start = pl.program_id(0) * block[0]
    groups = start + jnp.arange(block[0], dtype=jnp.int32) < count
    columns = jnp.arange(block[1], dtype=jnp.int32) < width
    return groups, groups[:, None] & columns[None, :]


def _quantize_kernel(w_ref, q_ref, scales_ref, *, count, width):
    groups, mask = _masks(count, width, w_ref.shape)
    w = plgpu.load(w_ref, mask=mask, other=0).astype(jnp.float32)
    scales = _largest(w) / 127
    q = _round(w / jnp.where(scales == 0, 1, scales)[:, None])
    # NaN is replaced first: jnp.clip loses it in Triton.
    q = jnp.clip(jnp.where(q == q, q, 0), -127, 127)
    plgpu.store(q_ref, q.astype(jnp.int8), mask=mask)
    plgpu.store(scales_ref, scales, mask=groups)


def _largest(w):
    """The largest magnitude of each row, or NaN, which Triton's maximum ignores."""
    # Magnitudes have the same order as integers, with NaN after infinity.
    bits = lax.bitcast_convert_type(jnp.abs(w), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis=1), jnp.float32)


def _round(x):
    """The nearest integer, ties to even; Pallas has no rounding for Triton."""
    below = jnp.floor(x)
    odd = below - 2 * jnp.floor(below / 2)
    fraction = x - below
    return below + jnp.where((fraction > 0.5) | ((fraction == 0.5) & (odd != 0)), 1.0, 0.0)


def _dequantize_kernel(q_ref, scales_ref, w_ref, *, count, width):
    groups, mask = _masks(count, width, w_ref.shape)
    q = plgpu.load(q_ref, mask=mask, other=0).astype(jnp.float32)
    scales = plgpu.load(scales_ref, mask=groups, other=0)
    plgpu.store(w_ref, q * scales[:, None], mask=mask)


def _matvec_kernel(q_ref, scales_ref, x_ref, out_ref, *, M, K, group, step, block):
    rows = pl.ds(pl.program_id(0) * block, block)
    inside = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32) < M
    tile = jnp.broadcast_to(inside[:, None], (block, step))
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def visit(i, total):
        columns = pl.ds(i * step, step)
        q = plgpu.load(q_ref.at[rows, columns], mask=tile, other=0).astype(x_ref.dtype)
        x = plgpu.load(x_ref.at[pl.ds(0, _MIN_BLOCK), columns])
        group_index = lax.div(i * step, i.dtype.type(group))  # i has 64 bits where integers do
        scales = plgpu.load(scales_ref.at[rows, group_index], mask=inside, other=0)
        return total + plgpu.dot(x, q, trans_b=True, precision=precision) * scales[None, :]

    total = lax.fori_loop(0, K // step, visit, jnp.zeros((_MIN_BLOCK, block), jnp.float32))
    mask = jnp.broadcast_to(inside[None, :], (_MIN_BLOCK, block))
    # With 64-bit types enabled a plain 0 would have 64 bits, but the row index has 32.
    all_rows = pl.ds(np.int32(0), _MIN_BLOCK)  # pyright: ignore
    plgpu.store(out_ref.at[all_rows, rows], total.astype(out_ref.dtype), mask=mask)
