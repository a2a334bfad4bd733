"""Checkpoints of a training run, written asynchronously and atomically by orbax.

A checkpoint holds the training state and a JSON record. Every batch and every random number is a
function of the seed and the step. So a run that resumes from a checkpoint repeats the steps of the
uninterrupted run::

    with checkpoint.open_folder("runs/mine/checkpoints", keep=3, keep_every=1000) as folder:
        if checkpoint.steps(folder):
            state = checkpoint.restore(folder, state)
        ...
        checkpoint.save(folder, step, state, {"seed": 0})

A process that is killed during a write leaves a folder with a temporary name. The next call of
:func:`open_folder` removes it.

:func:`save` stores a checksum of each array and of the record, and :func:`restore` verifies them. A
restored state is bit-identical to the saved one, or an error is raised.
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

from jaxllm.convert.parameter_mapping import check_shapes
from jaxllm.core.precision import is_floating, is_random_key
from jaxllm.data.files import plain_number
from jaxllm.ops.checks import as_bool, as_integer
from jaxllm.training import TrainState, cast
from jaxllm.training.checksum import checksums
from jaxllm.training.step import check_state

if TYPE_CHECKING:
    from orbax.checkpoint import CheckpointManager


def _import_orbax() -> Any:
    """Imports orbax lazily, because it takes half a second."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError('checkpoints need orbax: pip install "jaxllm[train]"') from error
    return orbax.checkpoint


@contextlib.contextmanager
def open_folder(
    folder: str | Path, *, keep: int | None = 3, keep_every: int | None = None
) -> Iterator[CheckpointManager]:
    """Opens a folder of checkpoints, and creates it if it does not exist.

    The context manager waits for pending writes on exit.

    Args:
        folder: The folder. Incomplete checkpoints in it are removed.
        keep: The number of newest checkpoints to keep; None for all.
        keep_every: Also keep the checkpoints of steps that are multiples of this.

    Yields:
        The checkpoint manager that the other functions of this module take.

    Raises:
        ImportError: The package ``orbax-checkpoint`` is not installed.
        NotADirectoryError: ``folder`` is a file.
        TypeError: ``keep`` or ``keep_every`` is not an integer.
        ValueError: ``keep`` or ``keep_every`` is below 1.
    """
    keep = None if keep is None else as_integer("keep", keep, least=1)
    keep_every = None if keep_every is None else as_integer("keep_every", keep_every, least=1)
    if Path(folder).exists() and not Path(folder).is_dir():
        raise NotADirectoryError(f"{folder}: a file; checkpoints need a folder")
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
    """Starts to write a checkpoint, and returns as soon as the state may be donated or changed.

    ``state.copy`` is not stored: :func:`restore` casts it from the parameters.

    Args:
        manager: The manager from :func:`open_folder`.
        step: The number of steps taken.
        state: The state after those steps.
        record: More values to store, as JSON. Numbers may be scalars of NumPy or JAX.

    Raises:
        TypeError: The step is not an integer, ``state`` is not a :class:`TrainState`, a leaf of it
            is not an array, or the record cannot be written as JSON.
        ValueError: The step is negative, or not after the newest checkpoint; an array has no
            elements, or a dtype that a checkpoint cannot hold, or that needs ``jax_enable_x64``; or
            two arrays would have the same name in the checkpoint.
    """
    step = as_integer("step", step, least=0)
    _check_newer(manager, step)
    ocp = _import_orbax()
    check_state("state", state)
    _check_arrays(state)
    state = state._replace(copy=None)
    keys, state = _key_impls(state), _plain(state)
    _check_storable(state)
    record = json.loads(json.dumps(dict(record), default=plain_number))
    sums = {"state": checksums(state), "record": _digest(record), "keys": keys}
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
        manager: The manager from :func:`open_folder`.
        like: A state with the same shapes and dtypes, such as the initial state. The restored
            arrays get its shardings.
        step: The step of the checkpoint; None for the newest.
        cast_dtypes: Cast arrays whose dtype in the checkpoint differs from ``like``. By default,
            different dtypes are an error.

    Returns:
        The saved state, bit for bit. A checkpoint without checksums is read with a warning.

    Raises:
        FileNotFoundError: The checkpoint does not exist.
        TypeError: ``step`` is not an integer, ``cast_dtypes`` is not a bool, or ``like`` is not a
            :class:`TrainState`.
        ValueError: The names, shapes or dtypes of the arrays differ from those in ``like``, or the
            implementation of a random key does; the message names the arrays. Or the checkpoint is
            damaged; the message names the damaged arrays if the others could be read.
    """
    step, cast_dtypes = _existing(manager, step), as_bool("cast_dtypes", cast_dtypes)
    check_state("like", like)
    name = f"{manager.directory}, step {step}"
    wanted = _plain(like._replace(copy=None))
    with _orbax_errors(name):
        found = manager.item_metadata(step)["state"].tree
        stored = _arrays(found)
    expected = _arrays(wanted)
    try:
        check_shapes(*({n: array.shape for n, array in of.items()} for of in (stored, expected)))
        _check_dtypes(stored, expected, cast_dtypes)
        _check_containers(found, wanted._asdict())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error

    ocp = _import_orbax()
    abstract = jax.tree_util.tree_map_with_path(
        lambda path, x: _to_read(x, stored[_name(path)].dtype), wanted
    )
    with _orbax_errors(name):
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        state = TrainState(*jax.tree.map(jnp.asarray, manager.restore(step, args=args)["state"]))
    sums = _read_checksums(manager, step, name)
    _verify(name, checksums(state), sums.get("state"))
    _check_keys(name, sums.get("keys", {}), _key_impls(like._replace(copy=None)))
    if cast_dtypes:
        state = jax.tree.map(
            lambda x, y: x if x.dtype == y.dtype else _shard_like(x.astype(y.dtype), y),
            state,
            wanted,
        )
    state = jax.tree.map(_with_key, state, like._replace(copy=None))
    if like.copy is None:
        return state
    dtypes = (x.dtype for x in jax.tree.leaves(like.copy) if is_floating(x))
    dtype = next(dtypes, jnp.float32)  # without any, nothing is cast
    copy = jax.tree.map(_shard_like, cast(state.params, dtype), like.copy)
    return state._replace(copy=copy)


def read_record(manager: CheckpointManager, step: int | None = None) -> dict[str, Any]:
    """Reads the record of a checkpoint, as it was passed to :func:`save`.

    Args:
        manager: The manager from :func:`open_folder`.
        step: The step of the checkpoint; None for the newest.

    Returns:
        The record.

    Raises:
        FileNotFoundError: The checkpoint does not exist.
        TypeError: ``step`` is not an integer.
        ValueError: The checkpoint is damaged.
    """
    ocp = _import_orbax()
    step = _existing(manager, step)
    name = f"{manager.directory}, step {step}"
    with _orbax_errors(name):
        args = ocp.args.Composite(record=ocp.args.JsonRestore())
        record = manager.restore(step, args=args)["record"]
    wanted = _read_checksums(manager, step, name).get("record")
    if wanted is not None and _digest(record) != wanted:
        raise ValueError(f"{name}: the record is damaged: {_ADVICE}")
    return record


_ADVICE = "delete its folder to resume from the previous checkpoint"


@contextlib.contextmanager
def _orbax_errors(name: str) -> Iterator[None]:
    """Converts any exception of orbax to a ValueError: a damaged file may raise any type."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name}: cannot be read. If it is damaged, {_ADVICE}. {error}") from error


def _read_checksums(manager: CheckpointManager, step: int, name: str) -> dict[str, Any]:
    """The checksums of a checkpoint; empty, with a warning, if it has none."""
    args = _import_orbax().args
    with _orbax_errors(name):
        # The saved item list and the folders on disk. Either may be damaged, so look in both.
        items = {*(manager.metadata(step).item_handlers or ()), *manager.item_metadata(step)}
        if "checksums" in items:
            wanted = args.Composite(checksums=args.JsonRestore())
            sums = manager.restore(step, args=wanted)["checksums"]
            # Older checkpoints do not name the implementations of random keys.
            keys = dict(sums.get("keys") or {})
            return {"state": dict(sums["state"]), "record": sums["record"], "keys": keys}
    warnings.warn(f"{name}: has no checksums, so damage may go undetected", stacklevel=3)
    return {}


def _verify(name: str, found: Mapping[str, str], wanted: Mapping[str, str] | None) -> None:
    """Raises ValueError with the names of the arrays whose checksums differ."""
    if wanted is None:
        return
    if damaged := [leaf for leaf in found if found[leaf] != wanted.get(leaf)]:
        more = f" and {len(damaged) - 5} more" if len(damaged) > 5 else ""
        raise ValueError(
            f"{name}: damaged; these arrays differ from their saved checksums: "
            f"{', '.join(damaged[:5])}{more}; {_ADVICE}"
        )


def _check_newer(manager: CheckpointManager, step: int) -> None:
    """Raises ValueError if the folder has a checkpoint of this step or a later one.

    Orbax would count the new one as the newest, and delete later ones beyond ``keep``.
    """
    if later := [other for other in steps(manager) if other >= step]:
        raise ValueError(
            f"step is {step}; {manager.directory} has checkpoints of steps {later}, and a new one "
            "must follow them all: delete them with manager.delete(step), or save to another folder"
        )


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _check_arrays(state: TrainState) -> None:
    """Raises TypeError with the name of a leaf that is not an array, such as a Python number."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not hasattr(leaf, "dtype"):
            raise TypeError(f"{_name(path)} is {leaf!r}; it must be an array")


# Orbax would fail at them in the background, after `save` has returned.
_NOT_STORED = tuple(map(jnp.dtype, ("uint2", "uint4")))


def _check_storable(state: TrainState) -> None:
    """Raises ValueError if orbax or :func:`restore` would fail, or two names would be one."""
    taken: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = _name(path)
        if not np.size(leaf):
            raise ValueError(
                f"{name} has shape {leaf.shape}; a checkpoint cannot hold empty arrays"
            )
        if leaf.dtype in _NOT_STORED:
            raise ValueError(f"{name} has dtype {leaf.dtype}, which a checkpoint cannot hold")
        # JAX would compute the checksum of a narrower array than the stored one.
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise ValueError(f"{name} has dtype {leaf.dtype}, which needs jax_enable_x64")
        stored = name.replace("/", ".")
        if stored in taken:
            raise ValueError(
                f"{name} and {taken[stored]} would have the same name in a checkpoint; rename one"
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
        raise ValueError(f"{'; '.join(faults)}. Use restore(..., cast_dtypes=True) to cast them")


def _check_containers(found: Any, wanted: Any) -> None:
    """Raises ValueError where one tree has a list, and the other a dict or no entry at all."""
    stored, here = _is_indexed(found), _is_indexed(wanted)
    for name in {**stored, **here}:
        if name not in stored or name not in here:
            there, this = ("is empty" if name in of else "is missing" for of in (stored, here))
            raise ValueError(f"{name} {there} in the checkpoint and {this} here")
        for depth, kinds in enumerate(zip(stored[name], here[name], strict=True)):
            if kinds[0] != kinds[1]:
                parent = "/".join(name.split("/")[:depth])
                there, this = ("a list" if kind else "a dict" for kind in kinds)
                raise ValueError(f"{parent} is {there} in the checkpoint and {this} here")


def _is_indexed(tree: Any) -> dict[str, list[bool]]:
    """For each array and empty container, which keys of its path are indices of a list.

    A checkpoint has lists, of tuples too, and dicts, of all else that has names.
    """
    index = jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey

    def is_empty(x: Any) -> bool:
        return not jax.tree.leaves(x, is_leaf=lambda child: child is not x)

    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_empty)
    return {_name(path): [isinstance(key, index) for key in path] for path, _ in leaves}


def _plain(tree: Any) -> Any:
    """Replaces random keys by their uint32 data, because orbax cannot restore keys."""

    def plain(x: Any) -> Any:
        if not is_random_key(x):
            return x
        data = jax.random.key_data
        return data(x) if isinstance(x, jax.Array) else jax.eval_shape(data, x)

    return jax.tree.map(plain, tree)


def _with_key(x: Array, like: Any) -> Array:
    """Wraps uint32 data as a random key, with the sharding of ``like``, if that is a key."""
    if not is_random_key(like):
        return x
    return _shard_like(jax.random.wrap_key_data(x, impl=_key_impl(like)), like)


def _key_impl(key: Any) -> Any:
    """The implementation of a random key, which may be a ShapeDtypeStruct: read from a tracer."""
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), key)
    return impls[0]


def _key_impls(tree: Any) -> dict[str, str]:
    """The implementations of the random keys in a tree, such as ``"rbg"``, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {_name(path): str(_key_impl(x)) for path, x in leaves if is_random_key(x)}


def _check_keys(name: str, stored: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raises ValueError if a random key has another implementation, which draws other numbers."""
    for key, impl in stored.items():
        if impl != wanted.get(key, impl):
            raise ValueError(
                f"{name}: the random key {key} has implementation {impl} in the checkpoint and "
                f"{wanted[key]} here"
            )


def _to_read(x: Any, dtype: Any) -> Any:
    """The restore argument for one array: the stored dtype, with the sharding of ``x``.

    An uncommitted array, such as the step count, is restored as a NumPy array. Orbax would commit
    it to the first device, and jit would reject it next to arrays sharded over several devices.
    """
    if sharding := _bound_sharding(x):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)
    return np.broadcast_to(np.zeros((), dtype), x.shape)


def _shard_like(x: Array, like: Any) -> Array:
    """Gives an array the sharding of ``like``, if that has one."""
    return jax.device_put(x, sharding) if (sharding := _bound_sharding(like)) else x


def _bound_sharding(x: Any) -> Any:
    """The sharding that an array must have; None for an uncommitted array."""
    is_bound = x.committed if isinstance(x, jax.Array) else True
    return getattr(x, "sharding", None) if is_bound else None


def _arrays(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the arrays in a tree, by name in a checkpoint."""
    return {
        _name(path): jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _existing(manager: CheckpointManager, step: int | None) -> int:
    complete = steps(manager)
    step = None if step is None else as_integer("step", step)
    if not complete or step not in (None, *complete):
        raise FileNotFoundError(
            f"{manager.directory}: no checkpoint{'' if step is None else f' of step {step}'}; "
            f"there are {complete or 'none'}"
        )
    return complete[-1] if step is None else step


def steps(manager: CheckpointManager) -> list[int]:
    """The steps of the complete checkpoints, in ascending order."""
    return sorted(manager.all_steps())
