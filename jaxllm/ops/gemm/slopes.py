"""How an MLP keeps GELU's slope for its backward: in the order of the tensor cores.

The CUDA kernel that makes the slope is of the same tiles as the one that multiplies by it. So each
thread stores what it has of a tile, and loads it again, without a detour through shared memory. All
backends keep it so: under ``"auto"`` a program is made for a GPU and for other devices, which must
keep arrays of one shape, and any forward may be followed by any backward.

Of a tile of 128 x 192 a warp has 16 of any 64 rows, and of 8 rows and 8 columns a lane has two
neighbours, four lanes a row. The slope is kept in the dtype of the numbers that it is applied to.
"""

from __future__ import annotations

import math

import jax.numpy as jnp

# As in cuda/gemm/matmul_hopper.cu: what a block has of the result, and two blocks side by side.
_TILE = (128, 192)
_BLOCKS_OF_A_CLUSTER = 2
_ROW_PARTS = (2, 4, 2, 8)  # of 64, warp, of 8, lane / 4
# Of a column: of 64, of the 16 of which a lane has 16 bytes, of 8, lane % 4, neighbour.
_COLUMN_PARTS = (3, 4, 2, 4, 2)
# Axes of (row tile, *row parts, column tile, *column parts), as they are kept.
_ORDER = (0, 5, 2, 6, 1, 7, 4, 9, 8, 3, 10)


def shape_of(rows: int, columns: int) -> tuple[int, int, int]:
    """What slopes of so many rows and columns are kept in: tiles down, across, and numbers."""
    height, width = _TILE
    across = -(-columns // (width * _BLOCKS_OF_A_CLUSTER)) * _BLOCKS_OF_A_CLUSTER
    return -(-rows // height), across, height * width


def pack(slope):
    """Puts slopes ``(*rows, columns)`` in the order in which they are kept."""
    rows, columns = math.prod(slope.shape[:-1]), slope.shape[-1]
    down, across, _ = shape = shape_of(rows, columns)
    height, width = _TILE
    beyond = ((0, down * height - rows), (0, across * width - columns))
    whole = jnp.pad(slope.reshape(rows, columns), beyond)
    parts = whole.reshape(down, *_ROW_PARTS, across, *_COLUMN_PARTS)
    return parts.transpose(_ORDER).reshape(shape)


def unpack(kept, like):
    """The slopes of :func:`pack`, in the shape of ``like``."""
    rows, columns = math.prod(like.shape[:-1]), like.shape[-1]
    down, across, _ = kept.shape
    sizes = (down, *_ROW_PARTS, across, *_COLUMN_PARTS)
    parts = kept.reshape([sizes[axis] for axis in _ORDER])
    whole = parts.transpose([_ORDER.index(axis) for axis in range(len(sizes))])
    height, width = _TILE
    return whole.reshape(down * height, across * width)[:rows, :columns].reshape(like.shape)
