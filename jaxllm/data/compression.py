"""Reads files that may be compressed by gzip, zstd, bzip2 or xz. The first bytes tell which."""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple


def plain_name(path: Path) -> str:
    """The name of a file in lower case, without the ending of a compression."""
    name = Path(path.name.lower())
    return name.stem if name.suffix in COMPRESSED else name.name


def read_bytes(path: Path) -> bytes:
    """The contents of a file, decompressed if the file is compressed.

    Raises:
        ImportError: The compression needs a package that is not installed.
        OSError: The file cannot be read.
        ValueError: The file is damaged.
    """
    try:
        with open_file(path) as (_, file):
            return file.read()
    except read_errors() as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path}: {describe_error(error)}") from error


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Opens a file, and decompresses it on the fly if it is compressed.

    Yields:
        ``(raw, file)``: the file as stored, and its decompressed contents. Without compression,
        both are the same object.

    Raises:
        EOFError: The name has the ending of a compression, but the file is empty.
        ImportError: The compression needs a package that is not installed.
    """
    with path.open("rb") as raw:
        head = raw.peek(16)
        name = path.suffix.lower()
        kinds = [kind for kind in _COMPRESSIONS if kind.magic.match(head)]
        kinds += [kind for kind in _COMPRESSIONS if name in kind.endings]
        if not kinds:
            yield raw, raw
            return
        if not head:
            raise EOFError("it is empty")
        with kinds[0].open(raw) as file:
            yield raw, file


def is_compressed(path: Path) -> bool:
    """Whether a file begins with the magic bytes of a compression.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as raw:
        return any(kind.magic.match(raw.peek(16)) for kind in _COMPRESSIONS)


@functools.cache
def read_errors() -> tuple[type[Exception], ...]:
    """The exceptions that reading or decompressing a file may raise."""
    errors = (OSError, EOFError, zlib.error, lzma.LZMAError, MemoryError)
    with contextlib.suppress(ImportError):
        errors += (_zstd().ZstdError,)
    return errors


def describe_error(error: Exception) -> str:
    """The message for an exception of :func:`read_errors`."""
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot be read: {error.strerror}"
    return f"damaged, or not of the type in its name: {error or 'not enough memory'}"


def _zstd() -> Any:
    """The standard module of Python 3.14, or its backport."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as error:
        raise ImportError(
            '.zst files need the package backports.zstd: pip install "jaxllm[data]"'
        ) from error
    return zstd


def _open_zstd(raw: IO[bytes]) -> Any:
    zstd = _zstd()
    # Large dumps are compressed with `zstd --long=31`. Memory use follows the file's real window.
    longest = {zstd.DecompressionParameter.window_log_max: 31}
    return zstd.open(raw, options=longest)


class _Compression(NamedTuple):
    """A compression: its file name endings, its magic bytes, and the function that opens it."""

    endings: tuple[str, ...]
    magic: re.Pattern[bytes]
    open: Callable[[IO[bytes]], Any]


_COMPRESSIONS = (
    _Compression((".gz", ".gzip"), re.compile(rb"\x1f\x8b"), gzip.open),
    _Compression(
        (".zst", ".zstd"), re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"), _open_zstd
    ),
    _Compression((".bz2",), re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), bz2.open),
    _Compression((".xz",), re.compile(rb"\xfd7zXZ\0"), lzma.open),
)
COMPRESSED = [ending for kind in _COMPRESSIONS for ending in kind.endings]
