"""Atomic writes of files and folders, recursive folder listings, and JSON files."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxllm.data.checks import as_bool


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Writes a file atomically.

    Args:
        path: The file to create or replace. Its folder is created if it does not exist.

    Yields:
        A temporary path in the same folder. It is renamed to ``path`` if the block succeeds, and
        removed if the block fails.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A fixed name: if a process was killed, the next one overwrites its temporary file.
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Creates a folder atomically.

    Args:
        folder: The folder to create.
        overwrite: Replace the folder if it exists.

    Yields:
        A temporary folder next to it. It is renamed to ``folder`` if the block succeeds, and
        removed if the block fails.

    Raises:
        FileExistsError: The folder has contents and ``overwrite`` is false, or it is a file.
        TypeError: ``overwrite`` is not a bool.
    """
    folder, overwrite = Path(folder), as_bool("overwrite", overwrite)
    check_new(folder, overwrite=overwrite)
    folder = folder.resolve()  # so that a link is kept and its target is replaced
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Unique names, because two processes may create the same folder. The first to finish wins.
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


def check_new(folder: Path, *, overwrite: bool = False) -> None:
    """Checks that a folder does not exist or is empty, or that it may be replaced.

    Raises:
        FileExistsError: The path is not a folder, or one with contents and ``overwrite`` is false.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"{folder}: exists already, and is not a folder; use another name")
    if not overwrite and any(folder.iterdir()):
        raise FileExistsError(f"{folder}: exists already; use a new folder or delete this one")


def walk(folder: str | Path, skip: Sequence[str] = ()) -> list[tuple[Path, str]]:
    """Lists the files in a folder recursively, sorted. Links to folders are followed.

    Args:
        folder: The folder.
        skip: Patterns, such as ``"test*"``, for names of files and folders to skip.

    Returns:
        ``(path, reason)`` pairs. The reason is empty for a file to read. It is given for hidden
        files and folders, names that match ``skip``, folders that cannot be opened, and folders
        that are read under another path.
    """
    found: list[tuple[Path, str]] = []
    seen = {Path(folder).resolve()}

    def note(error: OSError) -> None:
        found.append((Path(error.filename), f"cannot be opened: {error.strerror}"))

    def skip_reason(name: str) -> str:
        if name.startswith("."):
            return "hidden"
        return "skipped" if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip) else ""

    for root, folders, names in os.walk(folder, onerror=note, followlinks=True):
        folders.sort()
        for name in list(folders):
            path = Path(root, name)
            reason = skip_reason(name)
            if not reason and (real := path.resolve()) in seen:
                reason = "a folder that is read under another path"
            if reason:
                found.append((path, reason))
                folders.remove(name)
            else:
                seen.add(real)
        found += [(Path(root, name), skip_reason(name)) for name in names]
    return sorted(found)


def digest_of(paths: Iterable[str | Path], *, block: int = 2**16) -> str:
    """A digest of files, in hexadecimal, to notice that one has changed.

    Args:
        paths: The files. Their names have no influence, their order has.
        block: Read this many bytes at the beginning and at the end of each file. A change between
            the two is not noticed.
    """
    found = hashlib.sha256()
    for path in paths:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            found.update(f"{size} ".encode())
            for start in (0, max(size - block, block)):
                file.seek(start)
                found.update(file.read(block))
    return found.hexdigest()[:16]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not valid JSON, or its value is not an object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        contents = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: invalid JSON: {error}") from error
    if not isinstance(contents, dict):
        raise ValueError(f"{path}: not a JSON object")
    return contents


def write_json(path: Path, contents: Mapping[str, Any]) -> None:
    """Writes an object as a JSON file. Numbers may be NumPy's or JAX's."""
    path.write_text(json.dumps(contents, indent=2, default=plain_number) + "\n")


def plain_number(value: Any) -> Any:
    """The Python number of a scalar of NumPy or JAX, for ``json.dumps(..., default=)``.

    Raises:
        TypeError: The value is not a scalar.
    """
    if isinstance(value, np.generic | np.ndarray | jax.Array) and not value.ndim:
        return value.item()
    raise TypeError(f"{value!r} of type {type(value).__name__} is not JSON serializable")
