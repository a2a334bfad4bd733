"""Checkpoints of a run: written in the background by orbax, and complete or not there at all.

A checkpoint has the state of the training, and a record of where in the run it was taken. As every
batch and every random number is a function of the seed and the step, a run that goes on from one
repeats what it would have done::

    with checkpoint.open_folder("runs/mine/checkpoints", keep=3, keep_every=1000) as folder:
        if checkpoint.steps(folder):
            state = checkpoint.restore(folder, state)
        ...
        checkpoint.save(folder, step, state, {"seed": 0})

A process that is killed while it writes leaves a folder under a temporary name, which the next one
removes.

A checkpoint comes back as it was saved, bit for bit and in its dtypes, or not at all: a checksum of
each array and of the record is written with it and verified when it is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.convert.places import check
from jaxllm.training import TrainState, cast
from jaxllm.training.checksum import checksums

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager


def _import_orbax() -> Any:
    """The package, which takes half a second to import: no run without checkpoints waits for it."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError('checkpoints need orbax: pip install "jaxllm[train]"') from error
    return orbax.checkpoint


@contextlib.contextmanager
def open_folder(
    folder: str | Path, *, keep: int | None = 3, keep_every: int | None = None
) -> Iterator[CheckpointManager]:
    """Opens a folder of checkpoints, creating it if it is not there.

    What is being written is finished before the block is left.

    Args:
        folder: The folder; what is incomplete in it is removed.
        keep: How many of the last checkpoints stay; None for all.
        keep_every: Those of steps that are multiples of this stay as well.

    Raises:
        ImportError: The package ``orbax-checkpoint`` is not installed.
    """
    ocp = _import_orbax()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        keep_period=keep_every,
        enable_async_checkpointing=True,
        cleanup_tmp_directories=True,
    )
    handlers = {
        "state": ocp.StandardCheckpointHandler(),
        "record": ocp.JsonCheckpointHandler(),
        "checksums": ocp.JsonCheckpointHandler(),
    }
    with ocp.CheckpointManager(
        Path(folder).resolve(), options=options, item_handlers=handlers
    ) as manager:
        yield manager


def save(
    manager: CheckpointManager, step: int, state: TrainState, record: Mapping[str, Any]
) -> None:
    """Starts to write a checkpoint and returns once the state may change.

    The copy of the parameters is left out, as they make it anew.

    Args:
        manager: From :func:`open_folder`.
        step: The number of steps taken.
        state: The state after them.
        record: What else to keep, for JSON.

    Raises:
        TypeError: The record is not for JSON.
        ValueError: An array has no elements, or two arrays would have one name in the checkpoint.
    """
    ocp = _import_orbax()
    state = _plain(state._replace(copy=None))
    _check_storable(state)
    record = json.loads(json.dumps(dict(record)))
    sums = {"state": checksums(state), "record": _digest(record)}
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        record=ocp.args.JsonSave(record),
        checksums=ocp.args.JsonSave(sums),
    )
    manager.save(step, args=args, force=True)


def restore(
    manager: CheckpointManager,
    like: TrainState,
    step: int | None = None,
    *,
    cast_dtypes: bool = False,
) -> TrainState:
    """Reads the state of a checkpoint.

    Args:
        manager: From :func:`open_folder`.
        like: A state of the same shapes and dtypes, such as that before the first step. The arrays
            get its shardings.
        step: Which checkpoint; None for the newest.
        cast_dtypes: Cast what has another dtype in the checkpoint, rather than refuse it.

    Returns:
        The state that was saved, to the bit. A checkpoint of a version that wrote no checksums is
        read with a warning.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        ValueError: It has other arrays, or of other shapes or dtypes, and the message names them;
            or it is damaged, and the message names the arrays if some can be read.
    """
    step = _existing(manager, step)
    name = f"{manager.directory}, step {step}"
    wanted = _plain(like._replace(copy=None))
    with _naming(name):
        stored = _arrays(manager.item_metadata(step)["state"].tree)
    ours = _arrays(wanted)
    try:
        check(*({n: array.shape for n, array in of.items()} for of in (stored, ours)))
        _check_dtypes(stored, ours, cast_dtypes)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error

    ocp = _import_orbax()
    abstract = jax.tree_util.tree_map_with_path(
        lambda path, x: _to_read(x, stored[_name(path)].dtype), wanted
    )
    with _naming(name):
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        state = TrainState(*jax.tree.map(jnp.asarray, manager.restore(step, args=args)["state"]))
    _verify(name, checksums(state), _read_checksums(manager, step, name).get("state"))
    if cast_dtypes:
        state = jax.tree.map(
            lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), state, wanted
        )
    state = jax.tree.map(_with_key, state, like._replace(copy=None))
    if like.copy is None:
        return state
    dtype = jax.tree.leaves(like.copy)[0].dtype
    return state._replace(copy=cast(state.params, dtype))


def read_record(manager: CheckpointManager, step: int | None = None) -> dict[str, Any]:
    """Reads what was kept beside the state of a checkpoint.

    Args:
        manager: From :func:`open_folder`.
        step: Which checkpoint; None for the newest.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        ValueError: It is damaged.
    """
    ocp = _import_orbax()
    step = _existing(manager, step)
    name = f"{manager.directory}, step {step}"
    with _naming(name):
        args = ocp.args.Composite(record=ocp.args.JsonRestore())
        record = manager.restore(step, args=args)["record"]
    wanted = _read_checksums(manager, step, name).get("record")
    if wanted is not None and _digest(record) != wanted:
        raise ValueError(f"{name}: the record is damaged: {_ADVICE}")
    return record


_ADVICE = "delete its folder, and a run goes on from the checkpoint before"


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Makes what orbax raises of a damaged checkpoint, which may be anything, into one error."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name}: cannot be read. If it is damaged, {_ADVICE}. {error}") from error


def _read_checksums(manager: CheckpointManager, step: int, name: str) -> dict[str, Any]:
    """The checksums of a checkpoint; none, with a warning, where it was written without them."""
    args = _import_orbax().args
    with _naming(name):
        # What was saved, and what is there: one of them may be damaged.
        items = {*(manager.metadata(step).item_handlers or ()), *manager.item_metadata(step)}
        if "checksums" in items:
            wanted = args.Composite(checksums=args.JsonRestore())
            sums = manager.restore(step, args=wanted)["checksums"]
            return {"state": dict(sums["state"]), "record": sums["record"]}
    warnings.warn(f"{name}: has no checksums, and damage to it may not be found", stacklevel=3)
    return {}


def _verify(name: str, found: Mapping[str, str], wanted: Mapping[str, str] | None) -> None:
    """Raises ValueError with the names of the arrays whose checksums are not the wanted ones."""
    if wanted is None:
        return
    if damaged := [leaf for leaf in found if found[leaf] != wanted.get(leaf)]:
        more = f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""
        raise ValueError(
            f"{name}: damaged, for these arrays are not as they were saved: "
            f"{', '.join(damaged[:5])}{more}; {_ADVICE}"
        )


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _check_storable(state: TrainState) -> None:
    """Raises ValueError where orbax would fail, or write one array over another."""
    taken: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = _name(path)
        if not np.size(leaf):
            raise ValueError(f"{name} has shape {leaf.shape}; a checkpoint holds no empty arrays")
        stored = name.replace("/", ".")
        if stored in taken:
            raise ValueError(
                f"{name} and {taken[stored]} would have one name in a checkpoint; rename one"
            )
        taken[stored] = name


def _check_dtypes(
    found: Mapping[str, jax.ShapeDtypeStruct],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    cast_dtypes: bool,
) -> None:
    unknown = [n for n, x in found.items() if jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype]
    if unknown:
        raise ValueError(
            f"{unknown[0]} has dtype {found[unknown[0]].dtype}, which needs jax_enable_x64"
        )
    faults = [
        f"{name} has dtype {leaf.dtype} in the checkpoint and {wanted[name].dtype} here"
        for name, leaf in found.items()
        if leaf.dtype != wanted[name].dtype
    ]
    if len(faults) > 5:
        faults[5:] = [f"and {len(faults) - 5} more"]
    if faults and not cast_dtypes:
        raise ValueError(f"{'; '.join(faults)}. restore(..., cast_dtypes=True) casts to those here")


def _plain(tree: Any) -> Any:
    """A tree with the numbers of random keys in their place; orbax does not give keys back."""

    def plain(x: Any) -> Any:
        if not _is_key(x):
            return x
        data = jax.random.key_data
        return data(x) if isinstance(x, jax.Array) else jax.eval_shape(data, x)

    return jax.tree.map(plain, tree)


def _with_key(x: Array, like: Any) -> Array:
    """The random keys that numbers stand for, where ``like`` has keys."""
    if not _is_key(like):
        return x
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), like)  # which may be a shape
    return jax.random.wrap_key_data(x, impl=impls[0])


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _to_read(x: Any, dtype: Any) -> Any:
    """What orbax is to read: an array in its own dtype, where ours is.

    The number of steps, for one, is on no device in particular. Orbax would bind it to the first
    device, and no step takes it there beside arrays on several. So orbax reads a NumPy array.
    """
    sharding = getattr(x, "sharding", None)
    is_bound = x.committed if isinstance(x, jax.Array) else sharding is not None
    if is_bound:
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)
    return np.broadcast_to(np.zeros((), dtype), x.shape)


def _arrays(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of a tree's arrays, by their names in a checkpoint."""
    return {
        _name(path): jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _existing(manager: CheckpointManager, step: int | None) -> int:
    complete = steps(manager)
    if not complete or step not in (None, *complete):
        raise FileNotFoundError(
            f"{manager.directory}: no checkpoint{'' if step is None else f' of step {step}'}; "
            f"there are {complete or 'none'}"
        )
    return complete[-1] if step is None else step


def steps(manager: CheckpointManager) -> list[int]:
    """The steps that there are complete checkpoints of, in order."""
    return sorted(manager.all_steps())
