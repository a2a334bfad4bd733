"""How an MLP keeps GELU's slope for its backward: in few bits, in the order of the tensor cores.

The CUDA kernel that makes the slope is of the same tiles as the one that multiplies by it. So each
thread stores what it has of a tile, and loads it again, without a detour through shared memory. All
backends keep it so: under ``"auto"`` a program is made for a GPU and for other devices, which must
keep arrays of one shape, and any forward may be followed by any backward.

Of a tile of 128 x 192 a warp has 16 of any 64 rows, and of 8 rows and 8 columns a lane has two
neighbours, four lanes a row. The slope lies between -0.129 and 1.129. Beside bfloat16 it is kept in
a byte, in steps of 1/200: rounded to one it is at most 0.0025 off, and to a bfloat16 up to 0.002
below 1 and 0.004 above. Other dtypes keep their own bits.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

# As in cuda/gemm/matmul_hopper.cu: what a block has of the result, and two blocks side by side.
_TILE = (128, 192)
_BLOCKS_OF_A_CLUSTER = 2
_ROW_PARTS = (2, 4, 2, 8)  # of 64, warp, of 8, lane / 4
# Axes of (row tile, *row parts, column tile, *column parts), as they are kept.
_ORDER = (0, 5, 2, 6, 1, 7, 4, 9, 8, 3, 10)
_STEPS, _ZERO = 200, 27  # as in cuda/gemm/slope_codes.cuh


def dtype_of(dtype) -> jnp.dtype:
    """What slopes are kept in, beside numbers of a dtype."""
    return jnp.dtype("uint8" if dtype == jnp.bfloat16 else dtype)


def shape_of(rows: int, columns: int) -> tuple[int, int, int]:
    """What slopes of so many rows and columns are kept in: tiles down, across, and numbers."""
    height, width = _TILE
    across = -(-columns // (width * _BLOCKS_OF_A_CLUSTER)) * _BLOCKS_OF_A_CLUSTER
    return -(-rows // height), across, height * width


def pack(slope):
    """Encodes slopes ``(*rows, columns)``, and puts them in the order in which they are kept."""
    rows, columns = math.prod(slope.shape[:-1]), slope.shape[-1]
    down, across, _ = shape = shape_of(rows, columns)
    kept = dtype_of(slope.dtype)
    if kept != slope.dtype:
        slope = jnp.round(slope.astype(jnp.float32) * _STEPS + _ZERO).astype(kept)
    height, width = _TILE
    beyond = ((0, down * height - rows), (0, across * width - columns))
    whole = jnp.pad(slope.reshape(rows, columns), beyond)
    parts = whole.reshape(down, *_ROW_PARTS, across, *_column_parts(kept))
    return parts.transpose(_ORDER).reshape(shape)


def unpack(kept, like):
    """The slopes of :func:`pack`, in the shape of ``like``; those from codes in float32."""
    rows, columns = math.prod(like.shape[:-1]), like.shape[-1]
    down, across, _ = kept.shape
    sizes = (down, *_ROW_PARTS, across, *_column_parts(kept.dtype))
    parts = kept.reshape([sizes[axis] for axis in _ORDER])
    whole = parts.transpose([_ORDER.index(axis) for axis in range(len(sizes))])
    height, width = _TILE
    slope = whole.reshape(down * height, across * width)[:rows, :columns].reshape(like.shape)
    if kept.dtype == like.dtype:
        return slope
    return (slope.astype(jnp.float32) - _ZERO) / _STEPS


def _column_parts(dtype) -> tuple[int, ...]:
    """Of a tile's column: of 64, of what gives each lane 16 bytes, of 8, lane % 4, neighbour."""
    eights = 4 // min(dtype.itemsize, 4)
    return _TILE[1] // 64, 8 // eights, eights, 4, 2
