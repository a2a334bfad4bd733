"""The private layout of the saved GELU derivative: the register order of the tensor cores.

The GEMM that saves dgelu and the GEMM that multiplies by it have the same tiles. So each thread
stores its accumulator fragment as it is and loads it again, without shared memory. In a tile of
128 x 192 elements a warp has 16 of every 64 rows. In each 8 x 8 block of the fragment four lanes
share a row, and each has two neighbours::

    row of a block    lane 4r    lane 4r+1    lane 4r+2    lane 4r+3
    r                 c0 c1      c2 c3        c4 c5        c6 c7
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

# As in cuda/gemm/hopper/dgelu_order.cuh: the tile of a CTA, and two of them side by side.
_TILE = (128, 192)
_CLUSTER_COLUMNS = 2
_ROW_PARTS = (2, 4, 2, 8)  # of 64, warp, of 8, lane / 4
# Of a column: which 64, which of the 16 that give a lane 16 bytes, which 8, lane % 4, neighbour.
_COLUMN_PARTS = (3, 4, 2, 4, 2)
# The order of the axes (row tile, *row parts, column tile, *column parts) in memory.
_ORDER = (0, 5, 2, 6, 1, 7, 4, 9, 8, 3, 10)


def shape_of(rows: int, columns: int) -> tuple[int, int, int]:
    """The shape in memory of so many rows and columns: tiles down, tiles across, elements."""
    height, width = _TILE
    across = -(-columns // (width * _CLUSTER_COLUMNS)) * _CLUSTER_COLUMNS
    return -(-rows // height), across, height * width


def has_whole_tiles(columns: int, parts: int) -> bool:
    """Whether each of so many equal parts of the columns is whole tiles."""
    return columns % (parts * _TILE[1] * _CLUSTER_COLUMNS) == 0


def shape_in_memory(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in memory of an array ``(*rows, columns)``.

    Where the last dimension of the rows is whole tiles, those before stay dimensions of their own,
    along which the array can be sharded.
    """
    *outer, rows = _rows_of(shape)
    return *outer, *shape_of(rows, shape[-1])


def _rows_of(shape: tuple[int, ...]) -> list[int]:
    """The sizes of the dimensions of rows that memory has."""
    *rows, _ = shape
    return rows if len(rows) > 1 and rows[-1] % _TILE[0] == 0 else [math.prod(rows)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileOrdered:
    """A :class:`jaxllm.core.layout.PrivateLayout`.

    Attributes:
        array: The elements, of :func:`shape_in_memory`; beyond the last row and column zeros or
            anything.
        shape: The shape of the plain array, ``(*rows, columns)``.
    """

    array: jax.Array
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def whole_tiles(self) -> tuple[int, ...]:
        """In how many equal parts of whole tiles each dimension but the last can be cut."""
        height, width = _TILE[0], _TILE[1] * _CLUSTER_COLUMNS
        across, beyond = divmod(self.shape[-1], width)
        *outer, rows = _rows_of(self.shape)
        down, below = divmod(rows, height)
        return *outer, 1 if below else down, 1 if beyond else across

    def shard(self, array: jax.Array, parts: tuple[int, ...]) -> TileOrdered:
        """The node of one of so many parts of these dimensions."""
        if len(parts) < len(self.shape):  # the rows are one dimension
            parts = (parts[0], *(1,) * (len(self.shape) - 2), parts[1])
        pairs = zip(self.shape, parts, strict=True)
        return TileOrdered(array, tuple(size // count for size, count in pairs))

    def unpack(self) -> jax.Array:
        """The array in the usual order."""
        rows, columns = math.prod(self.shape[:-1]), self.shape[-1]
        across = self.array.shape[-2]
        down = math.prod(self.array.shape[:-2])
        sizes = (down, *_ROW_PARTS, across, *_COLUMN_PARTS)
        parts = self.array.reshape([sizes[axis] for axis in _ORDER])
        whole = parts.transpose([_ORDER.index(axis) for axis in range(len(sizes))])
        height, width = _TILE
        return whole.reshape(down * height, across * width)[:rows, :columns].reshape(self.shape)

    def pack(self, array: jax.Array) -> TileOrdered:
        """An array of the same shape in this layout."""
        return pack(array)


def pack(array: jax.Array) -> TileOrdered:
    """An array in this layout."""
    rows, columns = math.prod(array.shape[:-1]), array.shape[-1]
    down, across, _ = shape_of(rows, columns)
    height, width = _TILE
    beyond = ((0, down * height - rows), (0, across * width - columns))
    whole = jnp.pad(array.reshape(rows, columns), beyond)
    parts = whole.reshape(down, *_ROW_PARTS, across, *_COLUMN_PARTS)
    ordered = parts.transpose(_ORDER).reshape(shape_in_memory(array.shape))
    return TileOrdered(ordered, array.shape)
