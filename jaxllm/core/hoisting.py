"""What a loop computes of its fixed arguments alone, computed once before it.

XLA leaves custom calls in a loop. So without this a step that accumulates gradients would round
each weight to float8 once for every microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr  # type: ignore[attr-defined]
from jax.extend.core import Literal

# Results of so many elements are kept beside float8 arrays: scales, and counts.
_SMALL = 2**16


def hoist_rounding(function: Callable[..., Any], fixed: Any, *varying: Any) -> Callable[..., Any]:
    """Rounds what of ``function(fixed, *varying)`` depends on ``fixed`` alone, once.

    Args:
        function: A function of arrays, and of trees of them.
        fixed: Its first argument in all calls.
        *varying: The others of one call.

    Returns:
        A function of arguments like ``varying``, with the results of ``function``. It reads float8
        arrays that were computed here, and small ones. It is ``function`` itself where that rounds
        nothing to float8 of ``fixed`` alone.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(fixed, *varying)
    jaxpr, tree = closed.jaxpr, jax.tree.structure(shapes)
    leaves = jax.tree.leaves(fixed)
    given = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    given |= dict(zip(jaxpr.invars, leaves, strict=False))
    later = jaxpr.invars[len(leaves) :]

    early = _following(jaxpr.eqns, given)
    results = (variable for eqn in early for variable in eqn.outvars)
    keepable = [v for v in results if _is_float8(v) or _is_small(v)]
    late = _needed(jaxpr.eqns, jaxpr.outvars, keepable)
    read = _variables([*jaxpr.outvars, *(v for eqn in late for v in eqn.invars)])
    kept = [v for v in keepable if v in read]
    if not any(map(_is_float8, kept)):
        return lambda *varying: function(fixed, *varying)
    before = jaxpr.replace(
        constvars=[], invars=[*given], outvars=kept, eqns=_needed(early, kept, ())
    )
    given |= dict(zip(kept, eval_jaxpr(before, (), *given.values()), strict=True))
    after = jaxpr.replace(constvars=[], invars=[*given, *later], eqns=late)

    def run(*varying: Any) -> Any:
        found = eval_jaxpr(after, (), *given.values(), *jax.tree.leaves(varying))
        return jax.tree.unflatten(tree, found)

    return run


def _variables(atoms: Iterable[Any]) -> set[Any]:
    return {atom for atom in atoms if not isinstance(atom, Literal)}


def _is_float8(variable: Any) -> bool:
    dtype = variable.aval.dtype
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1


def _is_small(variable: Any) -> bool:
    sizes = variable.aval.shape  # not symbolic ones, which depend on a batch of any size
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= _SMALL


def _following(eqns: list[Any], given: Iterable[Any]) -> list[Any]:
    """The equations without effects that follow from given variables alone."""
    known, found = set(given), []
    for eqn in eqns:
        if not eqn.effects and _variables(eqn.invars) <= known:
            known.update(eqn.outvars)
            found.append(eqn)
    return found


def _needed(eqns: list[Any], wanted: Iterable[Any], given: Iterable[Any]) -> list[Any]:
    """The equations with effects, and those from given variables to wanted ones."""
    known, found = set(given), []
    missing = _variables(wanted) - known
    for eqn in reversed(eqns):
        if eqn.effects or not missing.isdisjoint(eqn.outvars):
            missing |= _variables(eqn.invars) - known
            found.append(eqn)
    return found[::-1]
