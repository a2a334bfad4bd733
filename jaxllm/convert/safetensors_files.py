"""Tensors by name in safetensors files: one file, or several with an index, as on the Hub."""

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
    """A tensor in an open file.

    Attributes:
        shape: Its shape.
        dtype: Its dtype, as safetensors calls it.
        read: Reads it.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


@contextlib.contextmanager
def open_tensors(folder: Path) -> Iterator[dict[str, Stored]]:
    """The tensors of a folder, by name, none of them read yet.

    Raises:
        FileNotFoundError: There is neither a file nor an index, or a file of the index is missing.
        ValueError: A file is not whole, or differs from the index.
    """
    safetensors = _import_safetensors()
    listed = _files_of(folder)
    if missing := [name for name in listed if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{folder}: {', '.join(missing)} is missing, which {INDEX} names")
    tensors: dict[str, Stored] = {}
    with contextlib.ExitStack() as stack:
        for file_name, expected in listed.items():
            path = folder / file_name
            try:
                file = stack.enter_context(safetensors.safe_open(path, framework="numpy"))
            except (safetensors.SafetensorError, OSError) as error:
                raise ValueError(f"{path}: no whole safetensors file: {error}") from error
            names = set(file.keys())
            if differing := sorted(names ^ (names if expected is None else expected)):
                where = "the file" if differing[0] in names else INDEX
                raise ValueError(f"{path}: {differing[0]} is in {where} alone")
            tensors |= {name: _stored(file, name) for name in sorted(names)}
        yield tensors


def write_tensors(
    folder: Path,
    sizes: Mapping[str, int],
    make: Callable[[str], np.ndarray],
    *,
    max_bytes: int,
) -> None:
    """Writes tensors into one file, or into several of at most ``max_bytes`` and an index.

    Args:
        folder: The folder, which exists.
        sizes: The bytes of each tensor; a file has at least one.
        make: Gives a tensor, contiguous, by its name. No more than one file's are kept.
        max_bytes: Bytes of the tensors in one file.
    """
    save_file = _import_safetensors().numpy.save_file
    shards = _shards(sizes, max_bytes)
    files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [WHOLE]
    for file_name, names in zip(files, shards, strict=True):
        # Without this entry transformers refuses the file.
        save_file({name: make(name) for name in names}, folder / file_name, {"format": "pt"})
    if len(shards) > 1:
        weight_map = {name: files[i] for i, names in enumerate(shards) for name in names}
        metadata = {"total_size": sum(sizes.values())}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": weight_map})


def _files_of(folder: Path) -> dict[str, set[str] | None]:
    """The tensors in each file, as the index has them; None where there is no index to tell."""
    if (folder / WHOLE).is_file():
        return {WHOLE: None}
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{folder}: holds neither {WHOLE} nor {INDEX}")
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path}: weight_map is missing or empty")
    files: dict[str, set[str] | None] = {}
    for name, file_name in weight_map.items():
        # A path could lead out of the folder.
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ValueError(f"{path}: {name} is in {file_name!r}; it must be a file of the folder")
        files[file_name] = (files.get(file_name) or set()) | {name}
    return files


def _stored(file: Any, name: str) -> Stored:
    view = file.get_slice(name)
    return Stored(tuple(view.get_shape()), view.get_dtype(), lambda: file.get_tensor(name))


def _shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names in their order, cut where a file would be too large."""
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
