"""The declaration of how an op may be sharded: the names of its dimensions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.core.layout import is_packed

Names = tuple[str, ...]  # of an array's dimensions
MeshAxes = dict[str, tuple[str, ...]]  # the mesh axes along which a dimension is sharded, by name
WHOLE_DIM = "_"
MAPPED = "mapped"  # of a dimension that jax.vmap maps


@dataclasses.dataclass(frozen=True)
class ShardingRule:
    """The dimensions of an op's arrays, and along which of them it may be sharded.

    Attributes:
        dims: The names of the dimensions of each argument, and of each result after the arrow, as
            in ``"... D, D, D -> ... D; ..., ..."``. After the semicolon stands what the forward
            saves beside arguments and results. ``...`` stands for any number of dimensions; ``_``
            for a dimension that each device has whole; ``+B`` after the names of a result for a
            term of a sum over shards of B, and ``=1`` where it is wanted in the sharding of operand
            1. ``[B T | B S]`` are the arrays of a tuple. Saved arrays with a ``?`` before them are
            all there or none. An argument with a ``!`` before it is added once where a result is
            such a sum. XLA does not carry a sharding on from or to a dimension with a prime, as
            ``D'``: that of a weight must not reach the activations.
        sharded: The names along which the op may be sharded. Of all others each device has the
            whole; XLA gathers what is sharded along them.
        broadcast: Names along which an argument of size 1 serves all shards of the others, such as
            one key head: its gradient is summed over them.
        backward_on_shards: Whether the backward runs on shards too. False where ``jax.numpy``
            alone computes it, which XLA can split.
        local: ``local(function, shard, *args)`` is what a device computes where that is more than
            the function of its shards; ``shard`` is a :class:`Shard`.
        local_backward: Likewise of the backward, whose arguments are the residuals and the
            cotangents.
    """

    dims: str
    sharded: str = "..."
    broadcast: str = ""
    backward_on_shards: bool = True
    local: Callable[..., Any] | None = None
    local_backward: Callable[..., Any] | None = None

    def operands(self, args: Sequence[Any]) -> tuple[tuple[Names, ...], ...]:
        """The names of the dimensions of each array, by argument."""
        entries = [entry.split("|") for entry in self.dims.partition("->")[0].split(",")]
        if self.dims == _ALL_WHOLE:
            entries = [[""]] * len(args)
        if len(entries) != len(args):
            raise ValueError(f"{self.dims!r} has {len(entries)} arguments; there are {len(args)}")
        named = []
        for i, (entry, arg) in enumerate(zip(entries, args, strict=True)):
            leaves = jax.tree.leaves(arg, is_leaf=is_packed)
            words = [part.strip(" []!").split() for part in entry]
            words = words * len(leaves) if len(words) == 1 else words
            if leaves and len(words) != len(leaves):
                raise ValueError(f"{entry!r} of {self.dims!r} stands for {len(leaves)} arrays")
            places = [f"a{i}.{j}" for j in range(len(leaves))]
            named.append(tuple(map(_names, words, leaves, places)))
        return tuple(named)

    def results(self, leaves: Sequence[Any]) -> tuple[tuple[Names, frozenset[str]], ...]:
        """For each result that is no argument, the names of its dimensions and of its sum's."""
        entries = self.dims.partition("->")[2].replace(";", ",").split(",")
        entries = [entry.strip() for entry in entries]
        if self.dims == _ALL_WHOLE:
            entries = [""] * len(leaves)
        if len(entries) > len(leaves):
            entries = [entry for entry in entries if not entry.startswith("?")]
        if len(entries) < len(leaves):
            raise ValueError(f"{self.dims!r} has {len(entries)} results; there are {len(leaves)}")
        words = [entry.lstrip("?").split() for entry in entries[: len(leaves)]]
        sums = [frozenset(_rows(w[1:] for w in of if w.startswith("+"))) for of in words]
        dims = [[w for w in of if w[0] not in "+="] for of in words]
        places = [f"r{i}" for i in range(len(leaves))]
        return tuple(zip(map(_names, dims, leaves, places), sums, strict=True))

    @property
    def likes(self) -> dict[int, int]:
        """For a result that is a sum the operand whose sharding is wanted of it."""
        entries = self.dims.partition("->")[2].replace(";", ",").split(",")
        words = [(i, word) for i, entry in enumerate(entries) for word in entry.split()]
        return {i: int(word[1:]) for i, word in words if word[0] == "="}

    @property
    def once(self) -> tuple[bool, ...]:
        """For each argument whether one shard alone adds it to a sum; empty where none is."""
        if self.dims == _ALL_WHOLE:
            return ()
        return tuple("!" in entry for entry in self.dims.partition("->")[0].split(","))

    @property
    def sums(self) -> frozenset[str]:
        """The names over whose shards a result is summed."""
        words = self.dims.partition("->")[2].split()
        return frozenset(_rows(word[1:].rstrip(",;") for word in words if word[0] == "+"))

    @property
    def joined(self) -> tuple[frozenset[str], ...]:
        """For each result and each array that is saved, its names and those that it sums over."""
        entries = self.dims.partition("->")[2].replace(";", ",").split(",")
        words = [[base_name(word.lstrip("?+")) for word in entry.split()] for entry in entries]
        return tuple(frozenset(_rows(w for w in of if w[0] not in "=_")) for of in words)

    @property
    def shardable(self) -> frozenset[str]:
        """The names along which the op may be sharded."""
        return frozenset(_rows(self.sharded.split()))


_MAX_ROWS = 8
ROWS = tuple(f"row{i}" for i in range(_MAX_ROWS))  # the names that ``...`` stands for
_ALL_WHOLE = "whole"
WHOLE = ShardingRule(_ALL_WHOLE, sharded="")  # of an op that each device computes alone


@dataclasses.dataclass(frozen=True)
class Shard:
    """The shard that a device computes.

    Attributes:
        axes: The mesh axes along which each named dimension is sharded.
        sizes: The number of devices along each mesh axis.
    """

    axes: MeshAxes
    sizes: dict[str, int]

    def over(self, *names: str) -> tuple[str, ...]:
        """The mesh axes along which any of the dimensions is sharded."""
        return tuple(axis for name in names for axis in self.axes.get(name, ()))

    def count(self, name: str) -> int:
        """The number of shards along a dimension."""
        return math.prod(self.sizes[axis] for axis in self.over(name))

    def index(self, name: str) -> Any:
        """The place of this shard along a dimension, from 0."""
        over = self.over(name)
        return jax.lax.axis_index(over) if over else 0

    def of_each(self, x: Any, *names: str) -> Any:
        """What every shard along the dimensions has of an array, stacked, on all of them.

        Each fills its place in an array of zeros, whose sum over the shards is the same on all:
        for arrays of a few bytes, where a gather takes no less time than a sum.
        """
        over = self.over(*names)
        count = math.prod(self.sizes[axis] for axis in over)
        every = jnp.zeros((count, *x.shape), x.dtype)
        index = jax.lax.axis_index(over)
        return jax.lax.psum(jax.lax.dynamic_update_index_in_dim(every, x, index, 0), over)


def _rows(words: Any) -> Iterator[str]:
    """The names, with one for each dimension that ``...`` may stand for."""
    for word in words:
        yield from ROWS if word == "..." else (word,)


def _names(words: Sequence[str], leaf: Any, place: str) -> Names:
    rank = len(leaf.shape)
    if "..." in words:
        at, count = words.index("..."), rank - len(words) + 1
        words = [*words[:at], *ROWS[:count], *words[at + 1 :]]
    # Of fewer dimensions, the last; before all that are named, whole ones.
    words = [WHOLE_DIM] * (rank - len(words)) + list(words)[max(len(words) - rank, 0) :]
    return tuple(
        whole_name(place, i) if word == WHOLE_DIM else word for i, word in enumerate(words)
    )


def whole_name(place: str, dim: int) -> str:
    """The name of a dimension that each device has whole, like no other."""
    return f"{WHOLE_DIM}{place}.{dim}"


def base_name(name: str) -> str:
    """A name without its prime."""
    return name.rstrip("'")


def axes_of_entry(entry: Any) -> tuple[str, ...]:
    """The mesh axes of an entry of a ``PartitionSpec``."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
