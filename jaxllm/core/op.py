"""One derivative rule per op, without the writing: primal, forward, backward and their wiring.

:func:`differentiable` makes an op of an :class:`~jaxllm.core.dispatch.Op`: a function of arrays
whose forward and backward are dispatched. :func:`with_backward` makes one of two functions written
by hand, for ops that are composed of others. Both take the static options as one frozen dataclass,
bring the arrays to one type in a ``jax.shard_map`` (:mod:`jaxllm.core.vma`), and give forward mode
and strict promotion what they need (:mod:`jaxllm.core.derivatives`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxllm.core import derivatives, partition, shards, vma
from jaxllm.core.backend import Backend
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.sharding_rule import ShardingRule


class _Static(NamedTuple):
    """The static argument of every rule."""

    options: Any  # a frozen dataclass, or None
    backend: Backend


def differentiable(
    op: Op,
    *,
    saves: Callable[..., Any],
    sharding: ShardingRule | Callable[[Any], ShardingRule],
    outputs: int = 1,
    primal: dict[str, Any] | None = None,
    arrange: Callable[..., tuple] | None = None,
    gradients: Callable[..., tuple] | None = None,
    name: str | None = None,
) -> Callable[..., Any]:
    """The function of an op whose forward and backward are dispatched.

    Outputs and residuals carry a name, the op's, so that a remat policy such as
    ``jax.checkpoint_policies.save_only_these_names("layer_norm")`` keeps them and no kernel runs
    twice.

    Args:
        op: The op. Its backward gets what ``saves`` returns, and then the cotangents.
        saves: ``saves(*arrays, *results) -> residuals``, a tuple, where ``results`` are what the
            forward implementation returns.
        sharding: How the op may be sharded, or a function of the options.
        outputs: How many of the results the op returns. The others are for ``saves`` alone.
        primal: Options of the forward where nothing is differentiated, such as to leave out
            results that only the backward needs.
        arrange: ``arrange(*saved, *cotangents)`` returns the backward's arrays where it takes them
            in another order.
        gradients: ``gradients(*results of the backward) -> one for each array``. None where the
            backward returns them in order; the arrays that are left get none.
        name: The name of outputs and residuals; None for the op's.

    Returns:
        ``fn(*arrays, backend=, options=None)``, where ``options`` is a frozen dataclass. Each
        direction gets those of its fields that its reference implementation takes.
    """
    name = name or op.name

    def results_of(static: dict[str, Any], backend: Backend, arrays: tuple) -> tuple:
        results = _tuple(dispatch(op, Direction.FORWARD, backend, *arrays, **static))
        return checkpoint_name(results, name)

    def returned(results: tuple) -> Any:
        return results[0] if outputs == 1 else results[:outputs]

    def plain(options: Any, backend: Backend, *arrays: Any) -> Any:
        static = _accepted(op, Direction.FORWARD, options) | (primal or {})
        return returned(results_of(static, backend, arrays))

    def forward(options: Any, backend: Backend, *arrays: Any) -> tuple[Any, Any]:
        static = _accepted(op, Direction.FORWARD, options)
        results = results_of(static, backend, arrays)
        # The Nones, which no program holds, tell the backward how many arrays there are.
        return returned(results), (saves(*arrays, *results), (None,) * len(arrays))

    def backward(options: Any, backend: Backend, residuals: Any, *cotangents: Any) -> tuple:
        saved, nothing = residuals
        static = _accepted(op, Direction.BACKWARD, options)
        arrays = (*saved, *cotangents)
        arrays = arrays if arrange is None else arrange(*arrays)
        found = _tuple(dispatch(op, Direction.BACKWARD, backend, *arrays, **static))
        found = found if gradients is None else gradients(*found)
        return (*found, *nothing[len(found) :])

    return with_backward(
        op.name, forward, backward, sharding=sharding, primal=plain, outputs=outputs
    )


def with_backward(
    name: str,
    forward: Callable[..., tuple[Any, Any]],
    backward: Callable[..., tuple],
    *,
    sharding: ShardingRule | Callable[[Any], ShardingRule] | None,
    primal: Callable[..., Any] | None = None,
    outputs: int = 1,
    maps_together: bool = True,
    reference: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """A function with a derivative rule that is written by hand.

    Args:
        name: The name, for error messages.
        forward: ``forward(options, backend, *arrays) -> (outputs, residuals)``.
        backward: ``backward(options, backend, residuals, *cotangents)``, one gradient for each
            array. The first cotangent is an array. Any other is None where nothing depends on that
            output: JAX alone would write zeros of its size for a kernel to read and add.
        sharding: How forward and backward may be sharded, or a function of the options; None where
            both are made of ops, each of which runs on shards.
        primal: ``primal(options, backend, *arrays) -> outputs`` where nothing is differentiated;
            None for the forward's.
        outputs: The number of outputs; 1 for a single one, which is no tuple.
        maps_together: Whether :func:`jaxllm.core.derivatives.map_together` is used. False where
            ``backward`` itself takes care of a cotangent that belongs to a whole batch.
        reference: ``reference(primal)`` is what forward mode differentiates instead of it.

    Returns:
        ``fn(*arrays, backend=, options=None)``.
    """

    def without_residuals(options: Any, backend: Backend, *arrays: Any) -> tuple[Any, Any]:
        if primal is not None:
            return primal(options, backend, *arrays), ()
        return forward(options, backend, *arrays)[0], ()

    def on_shards(static: _Static, of: Callable[..., Any], arrays: tuple) -> tuple[Any, Any]:
        if not partition.is_wanted(arrays):
            return of(*static, *arrays)
        function, rule = shards.Function(of, static), rule_of(static.options)
        if rule is None:
            return partition.forward_of_ops(function, arrays)
        is_opaque = static.backend != "xla"
        return partition.forward(function, name, rule, arrays, is_opaque=is_opaque)

    def results(static: _Static, of: Callable[..., Any], arrays: tuple) -> tuple[Any, Any]:
        returned, residuals = on_shards(static, of, arrays)
        if outputs == 1 or not maps_together:
            return returned, residuals
        together = derivatives.map_together(returned)
        # An output that is a residual too stays the same array: else jax.jit returns a copy of it.
        pairs = zip(jax.tree.leaves(returned), jax.tree.leaves(together), strict=True)
        same = {id(old): new for old, new in pairs}
        return together, jax.tree.map(lambda x: same.get(id(x), x), residuals)

    def fn(static: _Static, *arrays: Any) -> Any:
        return results(static, without_residuals, arrays)[0]

    def forward_of_values(static: _Static, *arrays: Any) -> Any:
        return results(static, forward, jax.tree.map(_value, arrays))

    def backward_of_given(static: _Static, residuals: Any, cotangents: Any) -> Any:
        first, *others = (cotangents,) if outputs == 1 else cotangents
        given = (jax.tree.map(_given, x, is_leaf=_is_zero) for x in others)
        arrays = (_array(first), *given)
        if not partition.is_saved(residuals):
            return backward(*static, residuals, *arrays)
        function, rule = shards.Function(backward, static), rule_of(static.options)
        if rule is None:
            return partition.backward_of_ops(function, residuals, arrays)
        is_opaque = static.backend != "xla"
        return partition.backward(function, name, rule, residuals, arrays, is_opaque=is_opaque)

    def rule_of(options: Any) -> ShardingRule | None:
        return sharding(options) if callable(sharding) else sharding

    fn.__name__ = name
    rule, zeros = derivatives.custom_vjp(fn), outputs > 1
    rule.defvjp(forward_of_values, backward_of_given, symbolic_zeros=zeros, reference=reference)

    def call(*arrays: Any, backend: Backend, options: Any = None) -> Any:
        # JAX asks that the gradient of an argument has the argument's type.
        return rule(_Static(options, backend), *vma.alike(arrays))

    return call


def _accepted(op: Op, direction: Direction, options: Any) -> dict[str, Any]:
    """The fields of the options that one direction of an op takes."""
    if options is None:
        return {}
    static = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    parameters = inspect.signature(getattr(op.reference, op.stem(direction))).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return static
    return {name: value for name, value in static.items() if name in parameters}


def _tuple(results: Any) -> tuple:
    return tuple(results) if isinstance(results, tuple | list) else (results,)


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, CustomVJPPrimal) else leaf


def _is_zero(leaf: Any) -> bool:
    return isinstance(leaf, SymbolicZero)


def _given(leaf: Any) -> Any:
    return None if _is_zero(leaf) else leaf


def _array(cotangent: Any) -> Any:
    if not _is_zero(cotangent):
        return cotangent
    return jnp.zeros(cotangent.shape, cotangent.dtype)
