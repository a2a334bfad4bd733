"""How a call runs on the shards of its arrays: the one place that knows of meshes.

XLA cannot look into a kernel. Left alone it gathers every operand of a custom call on every device,
and each computes everything. So each op declares its dimensions in a :class:`ShardingRule`, and a
call on sharded arrays runs on each device's shards:

==============  ==================================================================================
Auto axes       XLA chooses shardings when it compiles. The call is a ``custom_partitioning``: XLA
                asks then, and the function is traced again, with the shapes of shards.
Explicit axes   The types of arrays have their shardings. The call is a ``jax.shard_map``.
Manual axes     A ``jax.shard_map`` of the user's. The call runs as it is.
==============  ==================================================================================

Inside, kernels are chosen for the shapes of the shards, and what a shard only has a part of is
summed: a ``psum``, or a ``psum_scatter`` where the result is wanted in shards. In a process with
one device, and without a mesh, nothing of this happens.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer, eval_jaxpr  # type: ignore[attr-defined]
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.core import promotion
from jaxllm.core.backend import note_gather
from jaxllm.core.layout import is_packed

Names = tuple[str, ...]  # of an array's dimensions
MeshAxes = dict[str, tuple[str, ...]]  # the mesh axes along which a dimension is sharded, by name
_WHOLE = "_"


@dataclasses.dataclass(frozen=True)
class ShardingRule:
    """The dimensions of an op's arrays, and along which of them it may be sharded.

    Attributes:
        dims: The names of the dimensions of each argument, and of each result after the arrow, as
            in ``"... D, D, D -> ... D; ..., ..."``. After the semicolon stands what the forward
            saves beside arguments and results. ``...`` stands for any leading dimensions; ``_`` for
            a dimension that each device has whole; ``+B`` after the names of a result for a term
            of a sum over shards of B. ``[B T | B S]`` are the arrays of a tuple. Saved arrays with
            a ``?`` before them are all there or none. An argument with a ``!`` before it is added
            once where a result is such a sum. XLA does not carry a sharding on from or to a
            dimension with a prime, as ``D'``: that of a weight must not reach the activations.
        sharded: The names along which the op may be sharded. Of all others each device has the
            whole; XLA gathers what is sharded along them.
        sums_gradients: Whether the gradient of an array is a sum over the shards of dimensions that
            the array lacks. False where the forward has summed already.
        local: ``local(function, shard, *args)`` is what a device computes where that is more than
            the function of its shards; ``shard`` is a :class:`Shard`.
    """

    dims: str
    sharded: str = "..."
    sums_gradients: bool = True
    local: Callable[..., Any] | None = None

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
        dims = [[w for w in of if not w.startswith("+")] for of in words]
        places = [f"r{i}" for i in range(len(leaves))]
        return tuple(zip(map(_names, dims, leaves, places), sums, strict=True))

    @property
    def once(self) -> tuple[bool, ...]:
        """For each argument whether one shard alone adds it to a sum."""
        return tuple("!" in entry for entry in self.dims.partition("->")[0].split(","))

    @property
    def sums(self) -> frozenset[str]:
        """The names over whose shards a result is summed."""
        words = self.dims.partition("->")[2].split()
        return frozenset(_rows(word[1:].rstrip(",;") for word in words if word[0] == "+"))

    @property
    def shardable(self) -> frozenset[str]:
        """The names along which the op may be sharded."""
        return frozenset(_rows(self.sharded.split()))


_MAX_ROWS = 8
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

    def sum(self, x: Any, *names: str) -> Any:
        """The sum over the shards along the dimensions."""
        over = self.over(*names)
        return jax.lax.psum(x, over) if over else x


def _rows(words: Any) -> Iterator[str]:
    """The names, with one for each dimension that ``...`` may stand for."""
    for word in words:
        yield from (f"row{i}" for i in range(_MAX_ROWS)) if word == "..." else (word,)


def _names(words: Sequence[str], leaf: Any, place: str) -> Names:
    rank = len(leaf.shape)
    if words[:1] == ["..."]:
        count = rank - len(words) + 1
        words = [*(f"row{i}" for i in range(count)), *words[1:]]
    # Of fewer dimensions, the last; before all that are named, whole ones.
    words = [_WHOLE] * (rank - len(words)) + list(words)[max(len(words) - rank, 0) :]
    return tuple(_whole(place, i) if word == _WHOLE else word for i, word in enumerate(words))


def _whole(place: str, dim: int) -> str:
    """The name of a dimension that each device has whole, like no other."""
    return f"{_WHOLE}{place}.{dim}"


# ---- A call, its trace, and the shards of its arrays


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


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Saved:
    """Beside residuals: what the backward must know of the forward's arrays.

    Attributes:
        residuals: The names of each residual's dimensions.
        outputs: Likewise of the outputs.
        arguments: Likewise of the arguments, by argument.
        shardings: The shardings that the types of the arguments have, by argument.
    """

    residuals: tuple[Names, ...]
    outputs: tuple[Names, ...]
    arguments: tuple[tuple[Names, ...], ...]
    shardings: tuple[tuple[Any, ...], ...]


def is_saved(residuals: Any) -> bool:
    """Whether residuals are those of :func:`forward`."""
    is_pair = isinstance(residuals, tuple) and len(residuals) == 2
    return is_pair and isinstance(residuals[1], Saved)


# What is traced is one shard's: the mesh axes along which the rows are sharded. None outside.
_axes_inside: contextvars.ContextVar[tuple[str, ...] | None] = contextvars.ContextVar(
    "axes inside a shard", default=None
)


def is_wanted(args: Any) -> bool:
    """Whether a call of these arrays may run on shards: whether there is more than one device."""
    if _axes_inside.get() is not None:
        return False
    mesh = _mesh(jax.tree.leaves(args))
    if mesh.empty:
        return jax.device_count() > 1
    return mesh.size > 1 and not mesh.are_all_axes_manual


@contextlib.contextmanager
def _inside(axes: tuple[str, ...] = ()) -> Iterator[None]:
    """Calls of ops are those of one shard."""
    token = _axes_inside.set(axes)
    try:
        with promotion.defaults():
            yield
    finally:
        _axes_inside.reset(token)


def is_inside() -> bool:
    """Whether what is traced is the function of a shard."""
    return _axes_inside.get() is not None


def in_one_shard(x: Any) -> Any:
    """In the function of a shard: the array in the first one, zeros in the others."""
    axes = _axes_inside.get()
    return only_first(x, axes) if axes else x


class _Trace(NamedTuple):
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


def _trace(fn: Callable[..., Any], arrays: Sequence[Any]) -> _Trace:
    found: list[Any] = []

    def flat(*arrays: Any) -> list[Any]:
        with _inside():
            leaves, tree = jax.tree.flatten(fn(*arrays), is_leaf=is_packed)
        found.extend((leaves, tree))
        return list(map(_array, leaves))

    jaxpr = jax.make_jaxpr(flat)(*arrays)
    leaves, tree = found
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.out_avals]
    leaves = [_with_array(leaf, shape) for leaf, shape in zip(leaves, shapes, strict=True)]
    operands = {id(var): i for i, var in enumerate(jaxpr.jaxpr.invars)}
    seen = [id(var) for var in jaxpr.jaxpr.outvars]
    tags = _tags(jaxpr.jaxpr)
    return _Trace(
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


def _array(leaf: Any) -> Any:
    return leaf.array if is_packed(leaf) else leaf


def _with_array(leaf: Any, array: Any, parts: int = 1) -> Any:
    """A leaf with another array; one in a private layout with 1/parts of its rows."""
    return leaf.shard(array, parts) if is_packed(leaf) else array


@dataclasses.dataclass(frozen=True)
class _Layout:
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
            if isinstance(name, str) and name[0] != _WHOLE and name not in self.shardable
        ]
        return *[[tuple(names) for names in side] for side in sides], gathered  # type: ignore[return-value]

    def assign(self, specs: Sequence[Sequence[Any]], sizes: dict[str, int]) -> MeshAxes:
        """The mesh axes of each name: those of the first operand that is sharded along it.

        A mesh axis shards one name only of those that some array joins, and the number of shards
        divides every size of the name.
        """
        group = {name: {name} for name, _ in self.extents}
        for names in (*self.operands, *self.results):
            joined = set().union(*(group[name] for name in map(_base, names)))
            for name in joined:
                group[name] = joined
        axes: MeshAxes = {}
        for names, spec in zip(self.operands, specs, strict=True):
            for name, entry in zip(map(_base, names), spec, strict=False):
                if name in axes or name not in self.shardable:
                    continue
                used = {axis for other in group[name] for axis in axes.get(other, ())}
                fit = _fitting(
                    _entry(entry), used, sizes, [n for x, n in self.extents if x == name]
                )
                if fit:
                    axes[name] = fit
        return axes

    def in_specs(self, axes: MeshAxes) -> list[P]:
        """The shardings of the operands."""
        return [P(*map(axes.get, map(_base, names))) for names in self.operands]

    def out_specs(
        self, axes: MeshAxes, wanted: Sequence[Sequence[Any]], shapes: Any, sizes: dict[str, int]
    ) -> list[P]:
        """The shardings of the results; of a sum the one that is wanted, as far as shards allow."""
        specs = []
        for names, sums, want, shape in zip(self.results, self.sums, wanted, shapes, strict=True):
            spec, over = list(map(axes.get, map(_base, names))), self.over(sums, axes)
            for dim, entry in enumerate(want):
                have, of_want = _entry(spec[dim]), _entry(entry)
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
            if set(itertools.chain(*map(_entry, spec))) - used:
                yield i, spec


def _base(name: str) -> str:
    return name.rstrip("'")


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


def _entry(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _layout(call: Call, leaves: Sequence[Any], trace: _Trace) -> _Layout:
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
            extents += zip(map(_base, of[i]), leaf.shape, strict=True)
            if is_packed(leaf):
                # Only along the first rows, and by whole tiles.
                shardable -= set(map(_base, of[i][1:]))
                extents.append((of[i][0], leaf.whole_tiles))
                others = tuple(_whole(f"{kind}{i}", j) for j in (1, 2))
                of[i] = (of[i][0], *others)
                extents += zip(others, leaf.array.shape[1:], strict=True)
    # What is broadcast along a dimension, with the size 1, each device has whole.
    sizes: dict[str, int] = {}
    for name, size in extents:
        sizes[name] = max(size, sizes.get(name, 1))
    for kind, of, arrays in (("operand", operands, leaves), ("result", results, fresh)):
        for i, leaf in enumerate(arrays):
            of[i] = tuple(
                _whole(f"{kind}{i}", dim) if size == 1 < sizes[_base(name)] else name
                for dim, (name, size) in enumerate(zip(of[i], _array(leaf).shape, strict=True))
            )
    extents = [(name, size) for name, size in extents if size > 1 or sizes[name] == 1]
    extents += [
        (name, 1) for of in (*operands, *results) for name in map(_base, of) if name not in sizes
    ]
    sums = tuple(of_result for _, of_result in described)
    return _Layout(
        call, tuple(operands), tuple(results), sums, tuple(extents), frozenset(shardable)
    )


def _describe_gradients(call: Call, trace: _Trace) -> list[tuple[Names, frozenset[str]]]:
    """The names of each computed gradient's dimensions, and those over whose shards it is summed.

    A part of an array's gradient comes from every shard that reads the array: from all along the
    dimensions that the array lacks.
    """
    rule = call.rule
    excepted = [rule.sums if once else frozenset() for once in rule.once]
    by_leaf = [
        [(names, except_) for names in of]
        for of, except_ in zip(call.gradients or (), excepted, strict=True)
    ]
    described = {}
    for i, (names, except_) in _by_leaf(by_leaf, trace):
        lacking = rule.shardable - set(map(_base, names)) - except_
        described[i] = names, frozenset(lacking if rule.sums_gradients else ())
    return [described[i] for i in trace.fresh]


def _by_leaf(of_arguments: Sequence[Sequence[Any]], trace: _Trace) -> Iterator[tuple[int, Any]]:
    """What belongs to the leaf i of the gradients, of what belongs to each argument's arrays."""
    gradients = trace.tree.unflatten(range(len(trace.leaves)))
    for gradient, of_argument in zip(gradients, of_arguments, strict=True):
        leaves = jax.tree.leaves(gradient, is_leaf=lambda x: x is None)
        if len(leaves) == len(of_argument):
            pairs = zip(leaves, of_argument, strict=True)
            yield from ((i, of) for i, of in pairs if i is not None)


# ---- Forward, backward, and calls without a derivative


def forward(
    function: Function, name: str, rule: ShardingRule, args: tuple, *, is_opaque: bool
) -> tuple[Any, Any]:
    """``function(*args) -> (outputs, residuals)`` on shards; a :class:`Saved` beside residuals."""
    operands = rule.operands(args)
    flags = ((flag,) * len(of) for flag, of in zip(rule.once, operands, strict=True))
    call = Call(
        function,
        name,
        rule,
        tuple(itertools.chain(*operands)),
        is_opaque=is_opaque,
        once=tuple(itertools.chain(*flags)),
    )
    (outputs, residuals), names = _run(call, args)
    count = len(jax.tree.leaves(outputs, is_leaf=is_packed))
    shardings = tuple(
        tuple(_explicit(_array(leaf)) for leaf in jax.tree.leaves(arg, is_leaf=is_packed))
        for arg in args
    )
    return outputs, (residuals, Saved(names[count:], names[:count], operands, shardings))


def backward(
    function: Function,
    name: str,
    rule: ShardingRule,
    residuals: tuple[Any, Saved],
    cotangents: tuple,
    *,
    is_opaque: bool,
) -> tuple:
    """``function(residuals, *cotangents) -> gradients`` on shards."""
    kept, saved = residuals
    given = jax.tree.leaves(cotangents, is_leaf=lambda x: x is None)
    of_cotangents = [n for n, x in zip(saved.outputs, given, strict=True) if x is not None]
    kept = _gather_again(kept, saved.residuals, rule, cotangents)
    call = Call(
        function,
        name,
        rule,
        (*saved.residuals, *of_cotangents),
        saved.arguments,
        saved.shardings,
        is_opaque,
    )
    return _run(call, (kept, *cotangents))[0]


def run(
    function: Function, name: str, rule: ShardingRule, args: tuple, *, is_opaque: bool = True
) -> Any:
    """``function(*args)`` on shards, of an op without a derivative."""
    operands = tuple(itertools.chain(*rule.operands(args)))
    return _run(Call(function, name, rule, operands, is_opaque=is_opaque), args)[0]


def _gather_again(kept: Any, names: Sequence[Names], rule: ShardingRule, cotangents: Any) -> Any:
    """The residuals, with weights that the forward's gathers do not serve.

    XLA would keep a gathered weight from the forward until the backward, on every device.
    """
    leaves, tree = jax.tree.flatten(kept, is_leaf=is_packed)
    weights = [i for i, of in enumerate(names) if not rule.shardable & set(of)]
    some = [x for x in jax.tree.leaves(cotangents) if x.dtype != jax.dtypes.float0][:1]
    if not weights or not some:
        return kept
    fenced, _ = jax.lax.optimization_barrier(([leaves[i] for i in weights], some))
    for i, leaf in zip(weights, fenced, strict=True):
        leaves[i] = leaf
    return tree.unflatten(leaves)


def _run(call: Call, args: tuple) -> tuple[Any, tuple[Names, ...]]:
    """The results of a call on shards, and the names of their dimensions."""
    leaves, tree = jax.tree.flatten(args, is_leaf=is_packed)
    arrays = list(map(_array, leaves))
    if _is_eager(arrays):
        results, names = _run_jitted(call, args)
        return results, names.value
    mesh = _mesh(arrays)
    is_typed = not mesh.empty and bool(mesh.explicit_axes)

    def whole(*arrays: Any) -> Any:
        return call.function(*tree.unflatten(map(_with_array, leaves, arrays)))

    if is_typed:  # the shapes of results do not depend on the mesh
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            trace = _trace(whole, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
    else:
        trace = _trace(whole, arrays)
    layout = _layout(call, leaves, trace)
    problem = _Problem(layout, trace, leaves, tree)
    if is_typed:
        fresh = problem.run(arrays) if call.is_opaque else _by_shard_map(problem, arrays)
    elif call.is_opaque and _config("jax_use_shardy_partitioner") and not mesh.manual_axes:
        fresh = problem.run(arrays)
    else:  # XLA splits the definition itself
        fresh = problem.whole(*arrays)
    results: list[Any] = [None] * len(trace.leaves)
    found: list[Names] = [()] * len(trace.leaves)
    of_fresh = iter(zip(fresh, layout.results, trace.fresh, strict=True))
    for array, names, i in of_fresh:
        tag = trace.tags[i]
        results[i] = _with_array(
            trace.leaves[i], array if tag is None else checkpoint_name(array, tag)
        )
        found[i] = names
    for i, (source, first) in enumerate(zip(trace.sources, trace.firsts, strict=True)):
        if source is not None:
            results[i], found[i] = (
                _with_array(trace.leaves[i], arrays[source]),
                call.operands[source],
            )
        elif first != i:
            results[i], found[i] = results[first], found[first]
    plain = [_plain_names(leaf, names) for leaf, names in zip(trace.leaves, found, strict=True)]
    return trace.tree.unflatten(results), tuple(plain)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    value: Any


@functools.partial(jax.jit, static_argnums=0)
def _run_jitted(call: Call, args: tuple) -> tuple[Any, _Static]:
    results, names = _run(call, args)
    return results, _Static(names)


def _plain_names(leaf: Any, names: Names) -> Names:
    """The names of a leaf's dimensions; of one in a private layout those of the plain array."""
    if not is_packed(leaf):
        return names
    return (names[0], *(_whole(names[1], dim) for dim in range(1, len(leaf.shape))))


@dataclasses.dataclass(frozen=True)
class _Problem:
    """A call with its arrays flattened: functions of lists of arrays."""

    layout: _Layout
    trace: _Trace
    leaves: list[Any]
    tree: Any

    def whole(self, *arrays: Any) -> list[Any]:
        """The computed results on one device, by the trace."""
        found = eval_jaxpr(self.trace.jaxpr.jaxpr, self.trace.jaxpr.consts, *arrays)
        return [found[i] for i in self.trace.fresh]

    def shard(self, axes: MeshAxes, sizes: dict[str, int], specs: Sequence[P]) -> Callable:
        """What each device computes: the function of its shards, then the sums."""
        layout, precision = self.layout, _config("jax_default_matmul_precision")
        over = layout.over(layout.call.rule.sums, axes)
        once = layout.call.once or (False,) * len(self.leaves)

        def compute(*arrays: Any) -> list[Any]:
            given = []
            of_operands = zip(self.leaves, layout.operands, once, arrays, strict=True)
            for leaf, names, is_once, array in of_operands:
                parts = math.prod(sizes[a] for a in axes.get(names[0], ())) if names else 1
                array = only_first(array, over) if is_once and over else array
                given.append(_with_array(leaf, array, parts))
            rows = tuple(itertools.chain(*axes.values()))
            with _inside(rows), jax.default_matmul_precision(precision):
                args, local = self.tree.unflatten(given), layout.call.rule.local
                if local is None or not axes:
                    results = layout.call.function(*args)
                else:
                    results = local(layout.call.function, Shard(axes, sizes), *args)
            found = list(map(_array, jax.tree.leaves(results, is_leaf=is_packed)))
            return [found[i] for i in self.trace.fresh]

        def summed(*arrays: Any) -> tuple:
            results = compute(*arrays)
            rest = zip(results, layout.results, layout.sums, specs, strict=True)
            return tuple(_sum(x, names, over, spec, axes) for x, names, over, spec in rest)

        return summed

    def run(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The computed results, under ``jax.vmap`` too; they have no derivative."""
        batched = jax.custom_batching.custom_vmap(lambda *arrays: _on_shards(self, arrays))

        @batched.def_vmap
        def _(size, flags, *arrays):
            del size
            problem = self.batched(flags, arrays)
            return problem.run(arrays), [True] * len(self.trace.fresh)

        return _without_derivative(batched, self.layout.call.name)(*arrays)

    def batched(self, flags: Sequence[bool], arrays: Sequence[Any]) -> _Problem:
        """The same under ``jax.vmap``, with one more name for what is mapped."""
        axes = tuple(0 if flag else None for flag in flags)
        call, leaves, tree = self.layout.call, self.leaves, self.tree
        name = f"mapped{sum(of.startswith('mapped') for of in self.layout.shardable)}"

        def one(*arrays: Any) -> Any:
            results = call.function(*tree.unflatten(map(_with_array, leaves, arrays)))
            flat = list(map(_array, jax.tree.leaves(results, is_leaf=is_packed)))
            return [flat[i] for i in self.trace.fresh]

        function = Function(lambda *arrays: jax.vmap(one, axes)(*arrays), ())
        # Of what is mapped along shards, only the mapped axis is: names differ in each.
        operands = tuple(
            (name, *names) if flag else names
            for names, flag in zip(self.layout.operands, flags, strict=True)
        )
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            trace = _trace(function, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
        results = tuple((name, *names) for names in self.layout.results)
        shardable = self.layout.shardable
        if any(map(is_packed, leaves)) or any(map(is_packed, self.trace.leaves)):
            shardable = frozenset()
        extents = [
            pair
            for names, x in zip((*operands, *results), (*arrays, *trace.leaves), strict=True)
            for pair in zip(names, x.shape, strict=True)
        ]
        layout = _Layout(
            dataclasses.replace(call, function=function),
            operands,
            results,
            self.layout.sums,
            (*self.layout.extents, *extents),
            shardable | {name},
        )
        fresh = trace._replace(
            sources=[None] * len(trace.leaves), firsts=list(range(len(trace.leaves)))
        )
        return _Problem(layout, fresh, list(arrays), jax.tree.structure(tuple(arrays)))


def only_first(x: Any, over: tuple[str, ...]) -> Any:
    """The array on the first shard along these mesh axes, zeros on the others."""
    is_first = jax.lax.axis_index(over) == 0
    return x * is_first.astype(x.dtype)


def _sum(x: Any, names: Names, over: frozenset[str], spec: P, axes: MeshAxes) -> Any:
    """The sum over the shards that have terms of it, in shards where ``spec`` says so."""
    rest = list(_Layout.over(over, axes))
    for dim, (name, entry) in enumerate(zip(map(_base, names), spec, strict=True)):
        if more := _entry(entry)[len(axes.get(name, ())) :]:
            x = jax.lax.psum_scatter(x, more, scatter_dimension=dim, tiled=True)
            rest = [axis for axis in rest if axis not in more]
    return jax.lax.psum(x, tuple(rest)) if rest else x


def _on_shards(problem: _Problem, arrays: Sequence[Any]) -> Sequence[Any]:
    mesh = _mesh(arrays)
    if not mesh.empty and mesh.explicit_axes:
        return _by_shard_map(problem, arrays)
    if not mesh.empty and mesh.manual_axes:
        return problem.whole(*arrays)
    return _by_custom_partitioning(problem, arrays)


def _by_shard_map(problem: _Problem, arrays: Sequence[Any]) -> Sequence[Any]:
    mesh, layout, trace = _mesh(arrays), problem.layout, problem.trace
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    specs = [tuple(_full(jax.typeof(x).sharding.spec, x.ndim)) for x in arrays]
    axes = layout.assign(specs, sizes)
    _warn_of_gathers(layout, axes, specs)
    in_specs = layout.in_specs(axes)
    shapes = [_array(trace.leaves[i]).shape for i in trace.fresh]
    of_arguments = dict(_by_leaf(layout.call.shardings, trace)) if layout.call.shardings else {}
    targets = [of_arguments.get(i) for i in trace.fresh]
    wanted = [() if target is None else target.spec for target in targets]
    out_specs = layout.out_specs(axes, wanted, shapes, sizes)
    given = [reshard(x, mesh, spec) for x, spec in zip(arrays, in_specs, strict=True)]
    results = jax.shard_map(
        problem.shard(axes, sizes, out_specs),
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=tuple(out_specs),
        axis_names=frozenset(mesh.explicit_axes) if mesh.auto_axes else frozenset(),
        check_vma=bool(mesh.manual_axes),
    )(*given)
    # JAX asks that a gradient has its argument's sharding.
    pairs = zip(results, targets, strict=True)
    return [x if target is None else reshard(x, target.mesh, target.spec) for x, target in pairs]


def _by_custom_partitioning(problem: _Problem, arrays: Sequence[Any]) -> Sequence[Any]:
    layout, trace, jaxpr = problem.layout, problem.trace, problem.trace.jaxpr
    count = len(arrays)
    of_consts = [
        tuple(_whole(f"const{i}", dim) for dim in range(np.ndim(x)))
        for i, x in enumerate(jaxpr.consts)
    ]

    def whole(*arrays: Any) -> tuple:
        found = eval_jaxpr(jaxpr.jaxpr, arrays[count:], *arrays[:count])
        return tuple(found[i] for i in trace.fresh)

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        sizes = dict(mesh.shape)
        args, results = jax.tree.leaves(args), jax.tree.leaves(results)
        specs = [_decode(x.sharding, x.shape, mesh) for x in args[:count]]
        wanted = [_decode(x.sharding, x.shape, mesh) for x in results]
        axes = layout.assign(specs, sizes)
        _warn_of_gathers(layout, axes, specs)
        out_specs = layout.out_specs(axes, wanted, [x.shape for x in results], sizes)
        in_specs = [*layout.in_specs(axes), *(P() for _ in jaxpr.consts)]
        shard = problem.shard(axes, sizes, out_specs)
        named = functools.partial(NamedSharding, mesh)
        out, into = tuple(map(named, out_specs)), tuple(map(named, in_specs))
        return mesh, lambda *arrays: shard(*arrays[:count]), out, into

    call = custom_partitioning(whole)
    of_operands, of_results, gathered = layout.factors(*of_consts)
    call.def_partition(
        partition,
        decode_shardings=False,
        sharding_rule=SdyShardingRule(
            tuple(ArrayMapping(*of) for of in of_operands),
            tuple(ArrayMapping(*of) for of in of_results),
            need_replication_factors=tuple(gathered),
        ),
    )
    return call(*arrays, *jaxpr.consts)


def _without_derivative(fn: Callable, name: str) -> Callable:
    refusing = jax.custom_jvp(fn)

    @refusing.defjvp
    def refuse(*_):
        raise NotImplementedError(
            f"{name} on sharded arrays has no derivative of this kind (forward mode, or the "
            "derivative of a derivative); use backend 'xla'"
        )

    return refusing


# ---- Shardings


def _config(name: str) -> Any:
    return jax.config.values[name]


def _mesh(arrays: Sequence[Any]) -> Any:
    """The mesh of the arrays' types, or the one in the context."""
    for x in arrays:
        mesh = jax.typeof(x).sharding.mesh if isinstance(x, jax.Array) else None
        if mesh is not None and not mesh.empty:
            return mesh
    return jax.sharding.get_abstract_mesh()


def _is_eager(arrays: Sequence[Any]) -> bool:
    """Whether the arrays have values, on several devices, of which their types do not tell."""
    if any(isinstance(x, Tracer) for x in arrays):
        return False
    mesh = _mesh(arrays)
    if not mesh.empty and mesh.explicit_axes:
        return False
    return any(isinstance(x, jax.Array) and len(x.sharding.device_set) > 1 for x in arrays)


def _explicit(x: Any) -> NamedSharding | None:
    """The sharding that an array's type has, if it has one."""
    sharding = jax.typeof(x).sharding
    return sharding if not sharding.mesh.empty and sharding.mesh.explicit_axes else None


def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of a shape, a dtype and, where the type has one, a sharding."""
    sharding = like.sharding
    is_explicit = isinstance(sharding, NamedSharding) and bool(sharding.mesh.explicit_axes)
    return jnp.zeros(like.shape, like.dtype, device=sharding if is_explicit else None)


def _full(spec: P, rank: int) -> P:
    return P(*spec, *(None,) * (rank - len(spec)))


def reshard(x: Any, mesh: Any, spec: P) -> Any:
    """The array with another sharding in its type."""
    have, full = jax.typeof(x).sharding, _full(spec, x.ndim)
    if not have.mesh.empty and _full(have.spec, x.ndim) == full:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, full))


def _decode(sharding: Any, shape: Sequence[int], mesh: Any) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dimension, of a sharding that XLA chose.

    Where it is along no whole axes, or uneven, there are none.
    """
    if sharding is None:
        return ((),) * len(shape)
    indices = sharding.devices_indices_map(tuple(shape))
    of_device = np.vectorize(lambda d, dim: indices[d][dim].start or 0, otypes=[int])
    return tuple(
        _axes_of(of_device(mesh.devices, dim), size, mesh) for dim, size in enumerate(shape)
    )


def _axes_of(first: np.ndarray, size: int, mesh: Any) -> tuple[str, ...]:
    """The axes along which a dimension is sharded, given each device's first index."""
    devices = mesh.devices.shape
    along = [k for k in range(first.ndim) if (first != first.take([0], k)).any()]
    for order in itertools.permutations(along) if along else ():
        parts = math.prod(devices[k] for k in order)
        place = np.zeros_like(first)
        for k in order:
            others = [j for j in range(first.ndim) if j != k]
            place = place * devices[k] + np.expand_dims(np.arange(devices[k]), others)
        if size % parts == 0 and (place * (size // parts) == first).all():
            return tuple(mesh.axis_names[k] for k in order)
    return ()


class GatherWarning(UserWarning):
    """An op gathers an operand that it cannot take in shards."""


_warned: set[Any] = set()


def _warn_of_gathers(layout: _Layout, axes: MeshAxes, specs: Sequence[Sequence[Any]]) -> None:
    for i, spec in layout.gathered(axes, specs):
        name = layout.call.name
        shown = cast(Any, P)(*(axis or None for axis in map(_entry, spec)))
        sentence = (
            f"{name} gathers operand {i}, whose sharding is {shown}: the op may be sharded along "
            f"{layout.call.rule.sharded!r} of {layout.call.rule.dims!r}"
        )
        note_gather(sentence)
        if sentence not in _warned:
            _warned.add(sentence)
            warnings.warn(sentence, GatherWarning, stacklevel=2)
