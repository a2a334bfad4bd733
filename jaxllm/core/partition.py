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

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer, eval_jaxpr  # type: ignore[attr-defined]
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxllm.core.backend import use_xla
from jaxllm.core.derivatives import without_derivative
from jaxllm.core.gathers import Saved, gather_again, warn_of_gathers
from jaxllm.core.layout import is_packed
from jaxllm.core.meshes import (
    ROW_AXES,
    config_value,
    decode,
    explicit_sharding,
    full_spec,
    is_eager,
    mesh_of,
    reshard,
)
from jaxllm.core.sharding_rule import (
    MAPPED,
    MeshAxes,
    Names,
    Shard,
    ShardingRule,
    axes_of_entry,
    base_name,
    whole_name,
)
from jaxllm.core.shards import (
    Call,
    Function,
    Layout,
    Trace,
    array_of,
    by_leaf,
    inside_shard,
    is_inside,
    make_layout,
    only_first,
    trace_call,
    with_array,
)


def is_saved(residuals: Any) -> bool:
    """Whether residuals are those of :func:`forward`."""
    is_pair = isinstance(residuals, tuple) and len(residuals) == 2
    return is_pair and isinstance(residuals[1], Saved)


def has_symbolic_sizes(arrays: Any) -> bool:
    """Whether ``jax.export`` traces the call for any batch, or another size that is no number."""
    return any(map(jax.export.is_symbolic_dim, sum(map(jnp.shape, jax.tree.leaves(arrays)), ())))


def is_wanted(args: Any) -> bool:
    """Whether a call of these arrays may run on shards: whether there is more than one device."""
    if is_inside():
        return False
    arrays = jax.tree.leaves(args)
    if not any(isinstance(x, Tracer) for x in arrays):
        return is_eager(arrays)
    mesh = mesh_of(arrays)
    if mesh.empty:
        # jax.export cannot store a custom_partitioning.
        return jax.device_count() > 1 and not has_symbolic_sizes(arrays)
    return mesh.size > 1 and not mesh.are_all_axes_manual


def column_shards(x: Any, up: Any, down: Any) -> int:
    """How many shards the columns of ``x @ up``, the rows of ``down``, may have on the mesh.

    The types tell on Explicit axes. On Auto axes XLA decides when it compiles. So each axis counts
    that divides the columns, but for those of :data:`jaxllm.core.meshes.ROW_AXES`.
    """
    mesh = mesh_of((x, up, down))
    if mesh.empty or is_inside():
        return 1
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    if mesh.explicit_axes:
        shardings = map(explicit_sharding, (x, up, down))
        of_x, of_up, of_down = ([] if of is None else list(of.spec) for of in shardings)
        of_columns = {*axes_of_entry(of_up[-1]), *axes_of_entry(of_down[0])}
        axes = of_columns.difference(*map(axes_of_entry, of_x))
    elif mesh.manual_axes:  # XLA splits the call itself
        axes = set()
    else:
        axes = {axis for axis in sizes if axis not in ROW_AXES and up.shape[-1] % sizes[axis] == 0}
    return math.prod(sizes[axis] for axis in axes)


def forward(
    function: Function, name: str, rule: ShardingRule, args: tuple, *, is_opaque: bool
) -> tuple[Any, Any]:
    """``function(*args) -> (outputs, residuals)`` on shards; a :class:`Saved` beside residuals."""
    operands = rule.operands(args)
    call = _call(function, name, rule, operands, is_opaque=is_opaque)
    (outputs, residuals), names = _run(call, args)
    count = len(jax.tree.leaves(outputs, is_leaf=is_packed))
    saved = Saved(names[count:], names[:count], operands, _shardings(args))
    return outputs, (residuals, saved)


def forward_of_ops(function: Function, args: tuple) -> tuple[Any, Any]:
    """As :func:`forward`, of a function that is made of ops: each of them runs on shards."""
    outputs, residuals = function(*args)
    return outputs, (residuals, Saved((), (), (), _shardings(args)))


def backward_of_ops(function: Function, residuals: tuple[Any, Saved], cotangents: tuple) -> tuple:
    """As :func:`backward`, of a function that is made of ops."""
    kept, saved = residuals
    return _like_arguments(function(kept, *cotangents), saved.shardings)


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
    if not rule.backward_on_shards:
        return backward_of_ops(function, residuals, cotangents)
    given = jax.tree.leaves(cotangents, is_leaf=lambda x: x is None)
    of_cotangents = [n for n, x in zip(saved.outputs, given, strict=True) if x is not None]
    kept = gather_again(kept, saved, cotangents)
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


def _shardings(args: tuple) -> tuple[tuple[Any, ...], ...]:
    """The shardings that the types of arguments have, by argument."""
    return tuple(
        tuple(explicit_sharding(array_of(leaf)) for leaf in jax.tree.leaves(arg, is_leaf=is_packed))
        for arg in args
    )


def _like_arguments(gradients: tuple, shardings: tuple[tuple[Any, ...], ...]) -> tuple:
    """Gradients in the shardings that the types of the arguments have."""

    def like(gradient: Any, targets: tuple[Any, ...]) -> Any:
        leaves, tree = jax.tree.flatten(gradient, is_leaf=is_packed)
        pairs = zip(leaves, targets, strict=False)  # None has no leaves
        placed = [x if to is None else reshard(x, to.mesh, to.spec) for x, to in pairs]
        return tree.unflatten(placed)

    return tuple(map(like, gradients, shardings))


def run(
    function: Function, name: str, rule: ShardingRule, args: tuple, *, is_opaque: bool = True
) -> Any:
    """``function(*args)`` on shards, of an op without a derivative."""
    call = _call(function, name, rule, rule.operands(args), is_opaque=is_opaque)
    return _run(call, args)[0]


def _call(
    function: Function,
    name: str,
    rule: ShardingRule,
    operands: tuple[tuple[Names, ...], ...],
    *,
    is_opaque: bool,
) -> Call:
    """A call of a forward, given the names of each argument's arrays."""
    once = rule.once or (False,) * len(operands)
    flags = ((flag,) * len(of) for flag, of in zip(once, operands, strict=True))
    names, once = tuple(itertools.chain(*operands)), tuple(itertools.chain(*flags))
    return Call(function, name, rule, names, is_opaque=is_opaque, once=once)


def _run(call: Call, args: tuple) -> tuple[Any, tuple[Names, ...]]:
    """The results of a call on shards, and the names of their dimensions."""
    leaves, tree = jax.tree.flatten(args, is_leaf=is_packed)
    arrays = list(map(array_of, leaves))
    if is_eager(arrays):
        results, names = _run_jitted(call, args)
        return results, names.value
    mesh = mesh_of(arrays)
    is_typed = not mesh.empty and bool(mesh.explicit_axes)

    def whole(*arrays: Any) -> Any:
        return call.function(*tree.unflatten(map(with_array, leaves, arrays)))

    if is_typed:  # the shapes of results do not depend on the mesh
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            trace = trace_call(whole, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
    else:
        trace = trace_call(whole, arrays)
    layout = make_layout(call, leaves, trace)
    precision = config_value("jax_default_matmul_precision")
    problem = _Problem(layout, trace, leaves, tree, precision)
    if is_typed:
        fresh = problem.run(arrays) if call.is_opaque else _by_shard_map(problem, arrays)
    elif call.is_opaque and config_value("jax_use_shardy_partitioner") and not mesh.manual_axes:
        fresh = problem.run(arrays)
    else:  # XLA splits the definition itself
        fresh = problem.whole(*arrays)
    results: list[Any] = [None] * len(trace.leaves)
    found: list[Names] = [()] * len(trace.leaves)
    of_fresh = iter(zip(fresh, layout.results, trace.fresh, strict=True))
    for array, names, i in of_fresh:
        tag = trace.tags[i]
        results[i] = with_array(
            trace.leaves[i], array if tag is None else checkpoint_name(array, tag)
        )
        found[i] = names
    for i, (source, first) in enumerate(zip(trace.sources, trace.firsts, strict=True)):
        if source is not None:
            results[i], found[i] = (
                with_array(trace.leaves[i], arrays[source]),
                call.operands[source],
            )
        elif first != i:
            results[i], found[i] = results[first], found[first]
    # JAX asks that a gradient has its argument's sharding.
    for i, target in by_leaf(call.shardings, trace) if call.shardings else ():
        if target is not None:
            results[i] = reshard(results[i], target.mesh, target.spec)
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
    *names_of_tiles, name_of_tile = names
    if len(names_of_tiles) == len(leaf.shape):
        return tuple(names_of_tiles)
    middle = (whole_name(name_of_tile, dim) for dim in range(1, len(leaf.shape) - 1))
    return (names[0], *middle, names[1])


@dataclasses.dataclass(frozen=True)
class _Problem:
    """A call with its arrays flattened: functions of lists of arrays."""

    layout: Layout
    trace: Trace
    leaves: list[Any]
    tree: Any
    precision: Any  # JAX's setting while the call was traced: XLA asks for shards later

    def whole(self, *arrays: Any) -> list[Any]:
        """The computed results on one device, by the trace."""
        found = eval_jaxpr(self.trace.jaxpr.jaxpr, self.trace.jaxpr.consts, *arrays)
        return [found[i] for i in self.trace.fresh]

    def shard(self, axes: MeshAxes, sizes: dict[str, int], specs: Sequence[P]) -> Callable:
        """What each device computes: the function of its shards, then the sums."""
        layout = self.layout
        over = layout.over(layout.call.rule.sums, axes)
        once = layout.call.once or (False,) * len(self.leaves)

        def compute(*arrays: Any) -> list[Any]:
            given = []
            of_operands = zip(self.leaves, layout.operands, once, arrays, strict=True)
            for leaf, names, is_once, array in of_operands:
                parts = tuple(
                    math.prod(sizes[axis] for axis in axes.get(base_name(name), ()))
                    for name in names[:-1]
                )
                array = only_first(array, over) if is_once and over else array
                given.append(with_array(leaf, array, parts))
            shard = Shard(axes, sizes)
            with inside_shard(shard), jax.default_matmul_precision(self.precision):
                args, local = self.tree.unflatten(given), layout.call.local
                if local is None or not axes:
                    results = layout.call.function(*args)
                else:
                    results = local(layout.call.function, shard, *args)
            found = list(map(array_of, jax.tree.leaves(results, is_leaf=is_packed)))
            return [found[i] for i in self.trace.fresh]

        def summed(*arrays: Any) -> tuple:
            results = compute(*arrays)
            rest = zip(results, layout.results, layout.sums, specs, strict=True)
            return tuple(_sum(x, names, over, spec, axes) for x, names, over, spec in rest)

        return summed

    def run(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """The computed results, under ``jax.vmap`` too; they have no derivative."""
        batched = jax.custom_batching.custom_vmap(lambda *arrays: tuple(_on_shards(self, arrays)))

        @batched.def_vmap
        def _(size, flags, *arrays):
            del size
            problem = self.batched(flags, arrays)
            return tuple(problem.run(arrays)), (True,) * len(self.trace.fresh)

        why = (
            f"{self.layout.call.name} on sharded arrays has no derivative of this kind (forward "
            f"mode, or the derivative of a derivative); {use_xla(self.layout.call.name)}"
        )
        return without_derivative(batched, why)(*arrays)

    def batched(self, flags: Sequence[bool], arrays: Sequence[Any]) -> _Problem:
        """The same under ``jax.vmap``, with one more name for what is mapped."""
        axes = tuple(0 if flag else None for flag in flags)
        call, leaves, tree = self.layout.call, self.leaves, self.tree
        name = f"{MAPPED}{sum(of.startswith(MAPPED) for of in self.layout.shardable)}"

        def one(shard: Shard | None, *arrays: Any) -> Any:
            args, local = tree.unflatten(map(with_array, leaves, arrays)), call.local
            if local is None or shard is None:
                results = call.function(*args)
            else:
                results = local(call.function, shard, *args)
            flat = list(map(array_of, jax.tree.leaves(results, is_leaf=is_packed)))
            return [flat[i] for i in self.trace.fresh]

        def each(_: Any, shard: Shard | None, *arrays: Any) -> Any:
            return jax.vmap(functools.partial(one, shard), axes)(*arrays)

        function = Function(each, (None, None))
        hook = call.local and each
        rule = dataclasses.replace(call.rule, local=hook, local_backward=hook)
        # Of what is mapped along shards, only the mapped axis is: names differ in each.
        operands = tuple(
            (name, *names) if flag else names
            for names, flag in zip(self.layout.operands, flags, strict=True)
        )
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            trace = trace_call(function, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])
        results = tuple((name, *names) for names in self.layout.results)
        shardable = self.layout.shardable
        if any(map(is_packed, leaves)) or any(map(is_packed, self.trace.leaves)):
            shardable = frozenset()
        extents = [
            pair
            for names, x in zip((*operands, *results), (*arrays, *trace.leaves), strict=True)
            for pair in zip(names, x.shape, strict=True)
        ]
        layout = Layout(
            dataclasses.replace(call, function=function, rule=rule, shardings=()),
            operands,
            results,
            self.layout.sums,
            (*self.layout.extents, *extents),
            shardable | {name},
        )
        fresh = trace._replace(
            sources=[None] * len(trace.leaves), firsts=list(range(len(trace.leaves)))
        )
        structure = jax.tree.structure(tuple(arrays))
        return _Problem(layout, fresh, list(arrays), structure, self.precision)


def _sum(x: Any, names: Names, over: frozenset[str], spec: P, axes: MeshAxes) -> Any:
    """The sum over the shards that have terms of it, in shards where ``spec`` says so."""
    rest = list(Layout.over(over, axes))
    for dim, (name, entry) in enumerate(zip(map(base_name, names), spec, strict=True)):
        if more := axes_of_entry(entry)[len(axes.get(name, ())) :]:
            x = jax.lax.psum_scatter(x, more, scatter_dimension=dim, tiled=True)
            rest = [axis for axis in rest if axis not in more]
    return jax.lax.psum(x, tuple(rest)) if rest else x


def _on_shards(problem: _Problem, arrays: Sequence[Any]) -> Sequence[Any]:
    mesh = mesh_of(arrays)
    if not mesh.empty and mesh.explicit_axes:
        return _by_shard_map(problem, arrays)
    if not mesh.empty and mesh.manual_axes:
        return problem.whole(*arrays)
    return _by_custom_partitioning(problem, arrays)


def _by_shard_map(problem: _Problem, arrays: Sequence[Any]) -> Sequence[Any]:
    mesh, layout, trace = mesh_of(arrays), problem.layout, problem.trace
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    specs = [tuple(full_spec(jax.typeof(x).sharding.spec, x.ndim)) for x in arrays]
    axes = layout.assign(specs, sizes)
    warn_of_gathers(layout, axes, specs)
    in_specs = layout.in_specs(axes)
    shapes = [array_of(trace.leaves[i]).shape for i in trace.fresh]
    of_arguments = dict(by_leaf(layout.call.shardings, trace)) if layout.call.shardings else {}
    targets = [of_arguments.get(i) for i in trace.fresh]
    likes = layout.call.rule.likes if layout.call.gradients is None else {}
    wanted = [() if target is None else target.spec for target in targets]
    for i, operand in likes.items():
        # Under jax.vmap a result may have a dimension more than the operand.
        if i < len(wanted) and len(specs[operand]) == len(shapes[i]):
            wanted[i] = specs[operand]
    out_specs = layout.out_specs(axes, wanted, shapes, sizes)
    given = [reshard(x, mesh, spec) for x, spec in zip(arrays, in_specs, strict=True)]
    return jax.shard_map(
        problem.shard(axes, sizes, out_specs),
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=tuple(out_specs),
        axis_names=frozenset(mesh.explicit_axes) if mesh.auto_axes else frozenset(),
        check_vma=bool(mesh.manual_axes),
    )(*given)


def _by_custom_partitioning(problem: _Problem, arrays: Sequence[Any]) -> Sequence[Any]:
    layout, trace, jaxpr = problem.layout, problem.trace, problem.trace.jaxpr
    count = len(arrays)
    of_consts = [
        tuple(whole_name(f"const{i}", dim) for dim in range(np.ndim(x)))
        for i, x in enumerate(jaxpr.consts)
    ]

    def whole(*arrays: Any) -> tuple:
        found = eval_jaxpr(jaxpr.jaxpr, arrays[count:], *arrays[:count])
        return tuple(found[i] for i in trace.fresh)

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        sizes = dict(mesh.shape)
        args, results = jax.tree.leaves(args), jax.tree.leaves(results)
        specs = [decode(x.sharding, x.shape, mesh) for x in args[:count]]
        wanted = [decode(x.sharding, x.shape, mesh) for x in results]
        axes = layout.assign(specs, sizes)
        warn_of_gathers(layout, axes, specs)
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
