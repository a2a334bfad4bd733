"""Files and folders that are there whole or not at all, whenever the process ends."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Gives a file to write that takes another's place when the block ends well.

    Args:
        path: The file to be. Until then it has a hidden name in the folder, which is created.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of one name, so that the next process takes what one that was killed has left.
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Gives a folder to fill that gets its name when the block ends well.

    Args:
        folder: The folder to be.
        overwrite: It may be there, and is replaced then.

    Raises:
        FileExistsError: See :func:`check_new`.
    """
    folder = Path(folder)
    if not overwrite:
        check_new(folder)
    folder = folder.resolve()  # a link stays one
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Names of their own: two processes may make one folder, and the first to finish is kept.
    partial, old = (folder.with_name(f".{folder.name}.{uuid.uuid4().hex}") for _ in range(2))
    partial.mkdir()
    try:
        yield partial
        if overwrite and folder.exists():
            folder.rename(old)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_new(folder: Path) -> None:
    """Refuses a folder that holds something.

    Raises:
        FileExistsError: It is no folder, or not empty.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder}: exists already; give a new folder or delete this one")
