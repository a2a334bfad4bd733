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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TileOrdered:
    """A :class:`jaxllm.core.layout.PrivateLayout`.

    Attributes:
        array: The elements, of :func:`shape_of`; beyond the last row and column zeros or anything.
        shape: The shape of the plain array, ``(*rows, columns)``.
    """

    array: jax.Array
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def whole_tiles(self) -> tuple[int, int]:
        """In how many equal parts of whole tiles rows and columns can be cut."""
        height, width = _TILE[0], _TILE[1] * _CLUSTER_COLUMNS
        down, below = divmod(math.prod(self.shape[:-1]), height)
        across, beyond = divmod(self.shape[-1], width)
        return 1 if below else down, 1 if beyond else across

    def shard(self, array: jax.Array, parts: tuple[int, int]) -> TileOrdered:
        """The node of one of so many parts of the first and the last dimension."""
        first, *middle, last = self.shape
        return TileOrdered(array, (first // parts[0], *middle, last // parts[1]))

    def unpack(self) -> jax.Array:
        """The array in the usual order."""
        rows, columns = math.prod(self.shape[:-1]), self.shape[-1]
        down, across, _ = self.array.shape
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
    down, across, _ = shape = shape_of(rows, columns)
    height, width = _TILE
    beyond = ((0, down * height - rows), (0, across * width - columns))
    whole = jnp.pad(array.reshape(rows, columns), beyond)
    parts = whole.reshape(down, *_ROW_PARTS, across, *_COLUMN_PARTS)
    return TileOrdered(parts.transpose(_ORDER).reshape(shape), array.shape)
