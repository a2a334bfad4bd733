"""Files and folders that are there whole or not at all; what a folder holds, and a JSON file."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


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


def walk(folder: str | Path, skip: Sequence[str] = ()) -> list[tuple[Path, str]]:
    """The files in a folder and in those below it, sorted; links to folders are followed.

    Args:
        folder: The folder.
        skip: Patterns, such as ``"test*"``, for names of files and folders that are passed over.

    Returns:
        Each file with an empty string; and what is passed over with the reason: hidden files and
        folders, those that ``skip`` names, folders that cannot be opened, and links to folders that
        are read themselves.
    """
    found: list[tuple[Path, str]] = []
    seen = {Path(folder).resolve()}

    def note(error: OSError) -> None:
        found.append((Path(error.filename), f"cannot be opened: {error.strerror}"))

    def why(name: str) -> str:
        if name.startswith("."):
            return "hidden"
        return "skipped" if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip) else ""

    for root, folders, names in os.walk(folder, onerror=note, followlinks=True):
        folders.sort()
        for name in list(folders):
            path = Path(root, name)
            reason = why(name)
            if not reason and (real := path.resolve()) in seen:
                reason = "a folder that is read by another name"
            if reason:
                found.append((path, reason))
                folders.remove(name)
            else:
                seen.add(real)
        found += [(Path(root, name), why(name)) for name in names]
    return sorted(found)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds something else.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        contents = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: no JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return contents


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    """Writes an object as a JSON file."""
    path.write_text(json.dumps(contents, indent=2) + "\n")
