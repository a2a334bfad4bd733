"""A call on sharded arrays, before it is known how they are sharded.

A :class:`Call` is traced, its arrays get the names of the op's :class:`ShardingRule`, and
:meth:`Layout.assign` finds the mesh axes of each name.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec as P

from jaxllm.core import promotion
from jaxllm.core.layout import is_packed
from jaxllm.core.sharding_rule import (
    MAPPED,
    WHOLE_DIM,
    MeshAxes,
    Names,
    Shard,
    ShardingRule,
    axes_of_entry,
    base_name,
    whole_name,
)


class Function(NamedTuple):
    """A function with its static arguments: hashable, unlike a closure."""

    fn: Callable[..., Any]
    static: tuple

    def __call__(self, *args: Any) -> Any:
        """Calls it."""
        return self.fn(*self.static, *args)

    def having(self, **options: Any) -> Function:
        """The function with more options: the last of the static arguments are pairs of them."""
        *others, last = self.static
        return Function(self.fn, (*others, (*last, *options.items())))


@dataclasses.dataclass(frozen=True)
class Call:
    """What is known of a call before its arrays.

    Attributes:
        function: What computes it.
        name: The op's, for warnings.
        rule: The op's.
        operands: The names of each array's dimensions.
        gradients: Of a backward: for each argument, the names of the gradient's dimensions.
        shardings: Of a backward on Explicit axes: the shardings of those arguments.
        is_opaque: Whether XLA cannot look into the function.
        once: Of a forward: which arrays one shard alone adds to a sum.
    """

    function: Function
    name: str
    rule: ShardingRule
    operands: tuple[Names, ...]
    gradients: tuple[tuple[Names, ...], ...] | None = None
    shardings: tuple[tuple[Any, ...], ...] = ()
    is_opaque: bool = True
    once: tuple[bool, ...] = ()

    @property
    def local(self) -> Callable[..., Any] | None:
        """What a device computes in this direction where that is more than the function."""
        return self.rule.local if self.gradients is None else self.rule.local_backward


class Trace(NamedTuple):
    """A function of arrays, traced.

    Attributes:
        jaxpr: The program.
        tree: The structure of the results.
        leaves: Their shapes and dtypes; nodes in a private layout are leaves.
        sources: For each leaf the operand that it is, None for a new array.
        firsts: For each leaf the index of the first leaf that is the same array.
        tags: For each leaf the name that it has for remat policies.
    """

    jaxpr: Any
    tree: Any
    leaves: list[Any]
    sources: list[int | None]
    firsts: list[int]
    tags: list[str | None]

    @property
    def fresh(self) -> list[int]:
        """The leaves that are computed, each once."""
        pairs = enumerate(zip(self.sources, self.firsts, strict=True))
        return [i for i, (source, first) in pairs if source is None and first == i]


# The shard whose function is traced; None outside.
_inside: contextvars.ContextVar[Shard | None] = contextvars.ContextVar(
    "the shard that is traced", default=None
)
_WHOLE = Shard({}, {})


def is_inside() -> bool:
    """Whether what is traced is the function of a shard."""
    return _inside.get() is not None


@contextlib.contextmanager
def inside_shard(shard: Shard = _WHOLE) -> Iterator[None]:
    """Calls of ops are those of one shard."""
    token = _inside.set(shard)
    try:
        with promotion.defaults():
            yield
    finally:
        _inside.reset(token)


def current_shard() -> Shard:
    """The shard whose function is traced; one of a whole call outside."""
    return _inside.get() or _WHOLE


def in_one_shard(x: Any, *names: str) -> Any:
    """In the function of a shard: the array in the first one along these names, zeros elsewhere."""
    over = current_shard().over(*names)
    return only_first(x, over) if over else x


def sum_over(x: Any, *names: str) -> Any:
    """In the function of a shard: the sum over the shards along these names."""
    over = current_shard().over(*names)
    return jax.lax.psum(x, over) if over else x


def only_first(x: Any, over: tuple[str, ...]) -> Any:
    """The array on the first shard along these mesh axes, zeros on the others."""
    is_first = jax.lax.axis_index(over) == 0
    return x * is_first.astype(x.dtype)


def trace_call(fn: Callable[..., Any], arrays: Sequence[Any]) -> Trace:
    """Traces a function of arrays as one of a shard."""
    found: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        with inside_shard():
            leaves, tree = jax.tree.flatten(fn(*arrays), is_leaf=is_packed)
        found.extend((leaves, tree))
        return list(map(array_of, leaves))

    jaxpr = jax.make_jaxpr(flat)(*arrays)
    leaves, tree = found
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.out_avals]
    leaves = [with_array(leaf, shape) for leaf, shape in zip(leaves, shapes, strict=True)]
    operands = {id(var): i for i, var in enumerate(jaxpr.jaxpr.invars)}
    seen = [id(var) for var in jaxpr.jaxpr.outvars]
    tags = _tags(jaxpr.jaxpr)
    return Trace(
        jaxpr,
        tree,
        leaves,
        sources=[operands.get(var) for var in seen],
        firsts=[seen.index(var) for var in seen],
        tags=[tags.get(var) for var in seen],
    )


def _tags(jaxpr: Jaxpr) -> dict[int, str]:
    equations = [e for e in jaxpr.eqns if e.primitive.name == "name"]
    return {id(e.outvars[0]): e.params["name"] for e in equations}


def array_of(leaf: Any) -> Any:
    """The array of a leaf, which may be in a private layout."""
    return leaf.array if is_packed(leaf) else leaf


def with_array(leaf: Any, array: Any, parts: tuple[int, ...] | None = None) -> Any:
    """A leaf with another array; one in a private layout with one of so many parts."""
    if not is_packed(leaf):
        return array
    return leaf.shard(array, parts or (1,) * len(leaf.whole_tiles))


@dataclasses.dataclass(frozen=True)
class Layout:
    """The dimensions of all arrays of one call, flattened.

    Attributes:
        call: The call.
        operands: The names of each operand's dimensions, as the array has them in memory.
        results: Likewise of each computed result.
        sums: For each result the names over whose shards it is summed.
        extents: For each name the sizes that the number of shards must divide.
        shardable: The names along which the call may be sharded.
    """

    call: Call
    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    sums: tuple[frozenset[str], ...]
    extents: tuple[tuple[str, int], ...]
    shardable: frozenset[str]

    def factors(self, *more: Names) -> tuple[list[Names], list[Names], list[str]]:
        """The names that XLA propagates by, of operands and results, and those to be gathered."""
        operands, results = list(self.operands) + list(more), list(self.results)
        sides = [list(map(list, of)) for of in (operands, results)]
        found: dict[Any, str] = {}
        for side in sides:
            for i, names in enumerate(side):
                for dim, name in enumerate(names):
                    key = (id(side), i, dim) if name.endswith("'") else name
                    names[dim] = found.setdefault(key, f"f{len(found)}")
        gathered = [
            factor
            for name, factor in found.items()
            if isinstance(name, str) and name[0] != WHOLE_DIM and name not in self.shardable
        ]
        return *[[tuple(names) for names in side] for side in sides], gathered  # type: ignore[return-value]

    def assign(self, specs: Sequence[Sequence[Any]], sizes: dict[str, int]) -> MeshAxes:
        """The mesh axes of each name: those of the first operand that is sharded along it.

        A mesh axis shards one name only of those that some array joins, and the number of shards
        divides every size of the name. A result that is a sum over a name joins it. The arrays
        that a forward saves for gradients join their names in every call: without gradients they
        are intermediate arrays of its function.
        """
        group = {name: {name} for name, _ in self.extents}
        arrays = [set(map(base_name, names)) for names in (*self.operands, *self.results)]
        for names, sums in zip(arrays[len(self.operands) :], self.sums, strict=True):
            names |= sums & group.keys()
        arrays += [set(names & group.keys()) for names in self.call.rule.joined]
        for names in arrays:
            # A mapped dimension joins no arrays: each may be sharded otherwise, as without it.
            plain = {name for name in names if not name.startswith(MAPPED)}
            joined = set().union(*(group[name] for name in plain))
            for name in joined:
                group[name] = joined
        for names in arrays:
            for name in names:
                group[name] |= names
        axes: MeshAxes = {}
        for names, spec in zip(self.operands, specs, strict=True):
            for name, entry in zip(map(base_name, names), spec, strict=False):
                if name in axes or name not in self.shardable:
                    continue
                used = {axis for other in group[name] for axis in axes.get(other, ())}
                fit = _fitting(
                    axes_of_entry(entry), used, sizes, [n for x, n in self.extents if x == name]
                )
                if fit:
                    axes[name] = fit
        return axes

    def in_specs(self, axes: MeshAxes) -> list[P]:
        """The shardings of the operands."""
        return [P(*map(axes.get, map(base_name, names))) for names in self.operands]

    def out_specs(
        self, axes: MeshAxes, wanted: Sequence[Sequence[Any]], shapes: Any, sizes: dict[str, int]
    ) -> list[P]:
        """The shardings of the results; of a sum the one that is wanted, as far as shards allow."""
        specs = []
        for names, sums, want, shape in zip(self.results, self.sums, wanted, shapes, strict=True):
            spec, over = list(map(axes.get, map(base_name, names))), self.over(sums, axes)
            for dim, entry in enumerate(want):
                have, of_want = axes_of_entry(spec[dim]), axes_of_entry(entry)
                more = of_want[len(have) :]
                shards = math.prod(sizes[axis] for axis in of_want)
                is_scatter = more and of_want[: len(have)] == have and set(more) <= set(over)
                if is_scatter and shape[dim] % shards == 0:
                    spec[dim] = of_want
                    break
            specs.append(P(*spec))
        return specs

    @staticmethod
    def over(names: Any, axes: MeshAxes) -> tuple[str, ...]:
        """The mesh axes along which the names are sharded."""
        return tuple(axis for name, of_name in axes.items() if name in names for axis in of_name)

    def gathered(self, axes: MeshAxes, specs: Sequence[Sequence[Any]]) -> Iterator[tuple[int, Any]]:
        """Operands that are sharded along a mesh axis that the call does not use."""
        used = set(itertools.chain(*axes.values()))
        for i, spec in enumerate(specs):
            if set(itertools.chain(*map(axes_of_entry, spec))) - used:
                yield i, spec


def _fitting(
    entry: tuple[str, ...], used: set[str], sizes: dict[str, int], extents: Sequence[int]
) -> tuple[str, ...]:
    fit: list[str] = []
    shards = 1
    for axis in entry:
        shards *= sizes[axis]
        if axis in used or any(extent % shards for extent in extents):
            break
        fit.append(axis)
    return tuple(fit)


def make_layout(call: Call, leaves: Sequence[Any], trace: Trace) -> Layout:
    """The dimensions of a call's arrays."""
    fresh = [trace.leaves[i] for i in trace.fresh]
    if call.gradients is None:
        described = call.rule.results(fresh)
    else:
        described = _describe_gradients(call, trace)
    operands, results = list(call.operands), [names for names, _ in described]
    shardable = set(call.rule.shardable)
    extents: list[tuple[str, int]] = []
    for kind, of, arrays in (("operand", operands, leaves), ("result", results, fresh)):
        for i, leaf in enumerate(arrays):
            extents += zip(map(base_name, of[i]), leaf.shape, strict=True)
            if is_packed(leaf):
                # By whole tiles; where all rows are one dimension, along the first of them alone.
                if len(leaf.whole_tiles) < len(of[i]):
                    shardable -= set(map(base_name, of[i][1:-1]))
                    of[i] = (of[i][0], of[i][-1])
                of[i] = (*of[i], whole_name(f"{kind}{i}", len(of[i])))
                tiles = dict(zip(map(base_name, of[i]), leaf.whole_tiles, strict=False))
                shardable -= {name for name, parts in tiles.items() if parts == 1}
                extents += tiles.items()
    # What is broadcast along a dimension, with the size 1, each device has whole.
    sizes: dict[str, int] = {}
    for name, size in extents:
        sizes[name] = max(size, sizes.get(name, 1))
    sums = [of_result for _, of_result in described]
    for kind, of, arrays in (("operand", operands, leaves), ("result", results, fresh)):
        for i, leaf in enumerate(arrays):
            shape = array_of(leaf).shape
            ones = {
                dim: base_name(name)
                for dim, (name, size) in enumerate(zip(of[i], shape, strict=True))
                if size == 1 < sizes[base_name(name)]
            }
            if kind == "result" and call.gradients is not None:
                sums[i] |= shardable.intersection(call.rule.broadcast.split(), ones.values())
            of[i] = tuple(
                whole_name(f"{kind}{i}", dim) if dim in ones else name
                for dim, name in enumerate(of[i])
            )
    extents = [(name, size) for name, size in extents if size > 1 or sizes[name] == 1]
    renamed = set(map(base_name, itertools.chain(*operands, *results))) - sizes.keys()
    extents += [(name, 1) for name in sorted(renamed)]
    return Layout(
        call, tuple(operands), tuple(results), tuple(sums), tuple(extents), frozenset(shardable)
    )


def _describe_gradients(call: Call, trace: Trace) -> list[tuple[Names, frozenset[str]]]:
    """The names of each computed gradient's dimensions, and those over whose shards it is summed.

    A part of an array's gradient comes from every shard that reads the array: from all along the
    dimensions that the array lacks.
    """
    rule = call.rule
    excepted = [rule.sums if once else frozenset() for once in rule.once]
    pairs = [
        [(names, except_) for names in of]
        for of, except_ in zip(call.gradients or (), excepted, strict=True)
    ]
    described = {}
    for i, (names, except_) in by_leaf(pairs, trace):
        lacking = rule.shardable - set(map(base_name, names)) - except_
        described[i] = names, frozenset(lacking)
    return [described[i] for i in trace.fresh]


def by_leaf(of_arguments: Sequence[Sequence[Any]], trace: Trace) -> Iterator[tuple[int, Any]]:
    """What belongs to the leaf i of the gradients, of what belongs to each argument's arrays."""
    gradients = trace.tree.unflatten(range(len(trace.leaves)))
    for gradient, of_argument in zip(gradients, of_arguments, strict=True):
        leaves = jax.tree.leaves(gradient, is_leaf=lambda x: x is None)
        if len(leaves) == len(of_argument):
            pairs = zip(leaves, of_argument, strict=True)
            yield from ((i, of) for i, of in pairs if i is not None)
