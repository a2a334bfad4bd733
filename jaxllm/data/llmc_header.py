"""The header of llm.c's binary files: 256 little-endian int32 words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

HEADER_WORDS = 256
HEADER_BYTES = HEADER_WORDS * 4


def read_header(path: Path, what: str, versions: Mapping[int, Sequence[int]]) -> np.ndarray:
    """Reads and checks the header of a file.

    Args:
        path: The file.
        what: The expected kind of file, for error messages, such as ``"a token shard"``.
        versions: The supported versions by magic number.

    Returns:
        The 256 words, int32.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is shorter than a header, or has an unknown magic number or version.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        raise ValueError(
            f"{path}: {len(raw)} bytes long; {what} begins with {HEADER_BYTES} of header"
        )
    header = np.frombuffer(raw, "<i4")
    magic, version = header[:2].tolist()
    if magic not in versions:
        wanted = " or ".join(map(str, versions))
        raise ValueError(f"{path}: magic number {magic}; {what} has {wanted}")
    if version not in versions[magic]:
        wanted = " or ".join(map(str, versions[magic]))
        raise ValueError(
            f"{path}: version {version}; {what} with magic number {magic} has version {wanted}"
        )
    return header


def check_size(path: Path, wanted: int, contents: str) -> None:
    """Raises ValueError unless a file has ``wanted`` bytes, the size that its header implies."""
    found = path.stat().st_size
    if found != wanted:
        raise ValueError(
            f"{path}: {found} bytes long; its header has {contents}, so it must have {wanted} bytes"
        )


def header_of(*words: int) -> bytes:
    """The bytes of a header that begins with these words; the remaining words are zero."""
    header = np.zeros(HEADER_WORDS, "<i4")
    header[: len(words)] = words
    return header.tobytes()
