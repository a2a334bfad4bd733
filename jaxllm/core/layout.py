"""Arrays in the private layout of a kernel, which other implementations never see.

A kernel may save an array for the backward pass in the order of its own tiles. Such an array is a
pytree node of a class with two methods: ``unpack()`` returns the plain array, and ``pack(array)``
the same in this layout. Dispatch converts at the border of the CUDA implementations. On sharded
arrays each device has whole tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax


@runtime_checkable
class PrivateLayout(Protocol):
    """A pytree node that holds one array in a kernel's own order.

    Attributes:
        array: The elements. Its last dimension is a tile; those before count tiles down and across.
        shape: The shape of the plain array.
        whole_tiles: In how many equal parts of whole tiles each dimension of ``array`` but the last
            can be cut. They are as many as those of ``shape``, or two: all rows, and columns.
    """

    array: Any
    shape: tuple[int, ...]

    @property
    def whole_tiles(self) -> tuple[int, ...]:
        """In how many equal parts of whole tiles each dimension but the last can be cut."""
        ...

    def shard(self, array: Any, parts: tuple[int, ...]) -> Any:
        """The node of one of so many parts of these dimensions."""
        ...

    def unpack(self) -> jax.Array:
        """The array in the usual order."""
        ...

    def pack(self, array: jax.Array) -> Any:
        """An array of the same shape in this layout."""
        ...


def is_packed(node: Any) -> bool:
    """Whether a node of a pytree is an array in a private layout."""
    return isinstance(node, PrivateLayout)


def unpack(tree: Any) -> Any:
    """The same tree with plain arrays."""
    return jax.tree.map(lambda x: x.unpack() if is_packed(x) else x, tree, is_leaf=is_packed)


def pack_like(kernel: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, whose results are packed where those of ``kernel`` are."""

    def packed(*arrays: Any) -> Any:
        like, out = jax.eval_shape(kernel, *arrays), fn(*arrays)
        if not any(map(is_packed, jax.tree.leaves(like, is_leaf=is_packed))):
            return out
        return jax.tree.map(
            lambda x, y: x.pack(y) if is_packed(x) else y, like, out, is_leaf=is_packed
        )

    return packed
