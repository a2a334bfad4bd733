"""Reads and writes safetensors files: one file, or several files with an index."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxllm.data.files import read_json, write_json

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": jnp.dtype("float32"), "BF16": jnp.dtype("bfloat16"), "F16": jnp.dtype("float16")}


class Stored(NamedTuple):
    """A tensor in an open file, not read yet.

    Attributes:
        shape: The shape.
        dtype: The dtype's name in safetensors, such as ``"BF16"``.
        read: The function that reads the tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


@contextlib.contextmanager
def open_tensors(folder: Path) -> Iterator[dict[str, Stored]]:
    """Opens the safetensors files of a folder.

    Yields:
        The tensors by name, not read yet.

    Raises:
        FileNotFoundError: The folder has neither a file nor an index, or a file of the index is
            missing.
        ValueError: A file is invalid, or its tensors differ from the index.
    """
    safetensors = _import_safetensors()
    listed = _files_of(folder)
    if missing := [name for name in listed if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{folder}: {', '.join(missing)} is missing; {INDEX} lists it")
    tensors: dict[str, Stored] = {}
    with contextlib.ExitStack() as stack:
        for file_name, expected in listed.items():
            path = folder / file_name
            try:
                file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(f"{path}: invalid safetensors file: {error}") from error
            names = set(file.keys())
            if differing := sorted(names ^ (names if expected is None else expected)):
                where = "the file" if differing[0] in names else INDEX
                raise ValueError(f"{path}: {differing[0]} is only in {where}")
            tensors |= {name: _stored(file, name) for name in sorted(names)}
        yield tensors


def write_tensors(
    folder: Path,
    sizes: Mapping[str, int],
    make: Callable[[str], np.ndarray],
    *,
    max_bytes: float,
) -> None:
    """Writes tensors to one file, or to several files with an index.

    Args:
        folder: An existing folder.
        sizes: The size of each tensor in bytes, by name.
        make: The function from a name to the tensor, contiguous. Host memory holds the tensors of
            one file at a time.
        max_bytes: The largest size of the tensors in one file. A single tensor may exceed it.
    """
    save_file = _import_safetensors().numpy.save_file
    shards = _shards(sizes, max_bytes)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [WHOLE]
    for file_name, names in zip(files, shards, strict=True):
        # transformers rejects a file without this metadata.
        save_file({name: make(name) for name in names}, folder / file_name, {"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: files[i] for i, names in enumerate(shards) for name in names}
        metadata = {"total_size": sum(sizes.values())}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def _files_of(folder: Path) -> dict[str, set[str] | None]:
    """The tensor names of each file, from the index; None for a single file without an index."""
    if (folder / WHOLE).is_file():
        return {WHOLE: None}
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: has neither {WHOLE} nor {INDEX}")
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: weight_map is missing or empty")
    files: dict[str, set[str] | None] = {}
    for name, file_name in weight_map.items():
        # Reject paths, which could lead out of the folder.
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ValueError(f"{path}: {name} is in {file_name!r}; it must be a file name")
        files[file_name] = (files.get(file_name) or set()) | {name}
    return files


def _stored(file: Any, name: str) -> Stored:
    view = file.get_slice(name)
    return Stored(tuple(view.get_shape()), view.get_dtype(), lambda: file.get_tensor(name))


def _shards(sizes: Mapping[str, int], max_bytes: float) -> list[list[str]]:
    """Splits names, in order, into files of at most ``max_bytes``."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _import_safetensors() -> Any:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            'safetensors files need the package safetensors: pip install "jaxllm[convert]"'
        ) from error
    return safetensors
