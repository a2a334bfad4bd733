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
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxllm.convert.places import check
from jaxllm.training import TrainState, cast

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
    handlers = {"state": ocp.StandardCheckpointHandler(), "record": ocp.JsonCheckpointHandler()}
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
    """
    ocp = _import_orbax()
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(state._replace(copy=None)),
        record=ocp.args.JsonSave(dict(record)),
    )
    manager.save(step, args=args, force=True)


def restore(manager: CheckpointManager, like: TrainState, step: int | None = None) -> TrainState:
    """Reads the state of a checkpoint.

    Args:
        manager: From :func:`open_folder`.
        like: A state of the same shapes and dtypes, such as that before the first step.
        step: Which checkpoint; None for the newest.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        ValueError: It has other arrays, or of other shapes, and the message names them; or it is
            damaged.
    """
    step = _existing(manager, step)
    with _naming(manager, step):
        stored = manager.item_metadata(step)["state"].tree
    try:
        check(_shapes(stored), _shapes(like._replace(copy=None)))
    except ValueError as error:
        raise ValueError(f"{manager.directory}, step {step}: {error}") from error
    ocp = _import_orbax()
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like._replace(copy=None))
    args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
    with _naming(manager, step):
        state = TrainState(*manager.restore(step, args=args)["state"])
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
    with _naming(manager, step):
        return manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))[
            "record"
        ]


@contextlib.contextmanager
def _naming(manager: CheckpointManager, step: int) -> Iterator[None]:
    """Makes what orbax raises of a damaged checkpoint, which may be anything, into one error."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{manager.directory}, step {step}: cannot be read. If it is damaged, delete its "
            f"folder, and a run goes on from the checkpoint before. {error}"
        ) from error


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of a tree's arrays, by their names in a checkpoint."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


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
