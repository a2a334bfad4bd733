"""What devices gather: weights for each pass, and what an op cannot take in shards."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
from jax.core import Tracer  # type: ignore[attr-defined]
from jax.sharding import PartitionSpec as P

from jaxllm.core import meshes
from jaxllm.core.backend import note_gather
from jaxllm.core.layout import is_packed
from jaxllm.core.sharding_rule import WHOLE, MeshAxes, Names, axes_of_entry
from jaxllm.core.shards import Layout, array_of


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


_are_weights_whole: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "each device has all weights", default=False
)


@contextlib.contextmanager
def whole_weights() -> Iterator[None]:
    """Says of the program that is traced that no weight is sharded, so that none is gathered."""
    token = _are_weights_whole.set(True)
    try:
        yield
    finally:
        _are_weights_whole.reset(token)


def gather_again(kept: Any, saved: Saved, cotangents: Any) -> Any:
    """The residuals, with weights that the forward's gathers do not serve.

    XLA would keep a gathered weight from the forward until the backward, on every device. What
    lacks the first dimension of the output, rows or a batch, is a weight, and what it was made of
    by an operation of the forward, such as a folded norm, is computed again.
    """
    if _are_weights_whole.get() or not saved.outputs[0]:
        return kept
    leaves, tree = jax.tree.flatten(kept, is_leaf=is_packed)
    weights = [i for i, of in enumerate(saved.residuals) if saved.outputs[0][0] not in of]
    some = [x for x in jax.tree.leaves(cotangents) if x.dtype != jax.dtypes.float0][:1]
    if not weights or not some:
        return kept
    matrices = [array_of(leaves[i]) for i in weights if len(saved.residuals[i]) > 1]
    fence = _ahead(some[0], sum(x.nbytes for x in matrices)) if matrices else some[0]
    fenced, _ = jax.lax.optimization_barrier(([leaves[i] for i in weights], fence))
    for i, leaf in zip(weights, fenced, strict=True):
        leaves[i] = leaf
    return tree.unflatten(leaves)


# The cotangents of the ops with matrices whose backward was traced, and the bytes of the matrices.
_Traced = tuple[tuple[weakref.ref, int], ...]
_traced: contextvars.ContextVar[_Traced] = contextvars.ContextVar("ops with matrices", default=())
_MOST_TRACED = 16
_AHEAD_BYTES = 2**26


def _ahead(cotangent: Any, nbytes: int) -> Any:
    """What the gathers of an op's matrices wait for: the cotangent of an op before it.

    That of the op before in the backward, or of an earlier one as long as all matrices from there
    on are small together; its own where there is none. So gathers can run while other ops compute,
    and XLA joins those of several ops.
    """
    if not isinstance(cotangent, Tracer):
        return cotangent
    traced = _traced.get()
    _traced.set((*traced, (weakref.ref(cotangent), nbytes))[-_MOST_TRACED:])
    found = cotangent
    for at, size in reversed(traced):
        earlier, nbytes = at(), nbytes + size
        # A value of another trace, such as the body of another loop, is none of this one's.
        if earlier is None or earlier._trace is not cotangent._trace:
            break
        if found is not cotangent and nbytes > _AHEAD_BYTES:
            break
        found = earlier
    return found


class GatherWarning(UserWarning):
    """An op gathers an operand that it cannot take in shards."""


_warned: set[Any] = set()


def warn_of_gathers(layout: Layout, axes: MeshAxes, specs: Sequence[Sequence[Any]]) -> None:
    """Warns once of each operand that the op gathers, and notes it for ``explain``."""
    rule = layout.call.rule
    why = f"the op may be sharded along {rule.sharded!r} of {rule.dims!r}"
    why = "each device computes the whole op" if rule is WHOLE else why
    for i, spec in layout.gathered(axes, specs):
        _warn_of_gather(layout.call.name, i, spec, why)


def sharded_like(name: str, i: int, x: Any, other: Any) -> Any:
    """The array in the sharding that another's type has, with a warning where they differ.

    Args:
        name: What adds the two, which JAX refuses in two shardings.
        i: The number of the operand that is moved.
        x: The array to move.
        other: An array of its shape.
    """
    to, have = meshes.explicit_sharding(other), meshes.explicit_sharding(x)
    if to is None or have is None:
        return x
    wanted, found = (meshes.full_spec(of.spec, x.ndim) for of in (to, have))
    if wanted != found:
        _warn_of_gather(
            name, i, tuple(found), f"it is added to an array whose sharding is {wanted}"
        )
    return meshes.reshard(x, to.mesh, wanted)


def _warn_of_gather(name: str, i: int, spec: Sequence[Any], why: str) -> None:
    shown = cast(Any, P)(*(axis or None for axis in map(axes_of_entry, spec)))
    sentence = f"{name} gathers operand {i}, whose sharding is {shown}: {why}"
    note_gather(sentence)
    if sentence not in _warned:
        _warned.add(sentence)
        warnings.warn(sentence, GatherWarning, stacklevel=2)
