"""Reads the documents of a corpus from text, JSON and parquet files.

:func:`find` lists the files to read and the files that it leaves out. :func:`read` yields their
documents in order. For a document that cannot be read it yields a :class:`Fault` with the file and
row, so one bad document need not stop a job.

- The file name's ending selects the format, in upper or lower case. For ``.json`` and unknown
  endings, the contents do.
- Text and JSON files may be compressed (``.json.gz``). The first bytes tell the compression.
- Parquet files must not be compressed: parquet compresses its pages itself.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxllm.data.checks import as_list
from jaxllm.data.compression import (
    describe_error,
    is_compressed,
    open_file,
    plain_name,
    read_errors,
)
from jaxllm.data.files import walk

TEXTS = (".md", ".py", ".txt")
LINES = (".jsonl", ".ndjson", ".jsonlines", ".jl")
JSON = (".json",)
TABLES = (".parquet", ".pq")
FORMATS = {"text": TEXTS, "lines": LINES, "json": JSON, "parquet": TABLES}
ENDINGS = (*TEXTS, *LINES, *JSON, *TABLES)

_BY_NAME = {ending: name for name, endings in FORMATS.items() for ending in endings}
_NO_TEXT = (".csv", ".tsv", ".xml")  # text files of rows or markup, which are not one document
_PACKED = {
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!": "a rar archive",
    b"\x04\x22\x4d\x18": "compressed by lz4",
    b"\x1f\x9d": "compressed by compress",
    b"\xff\x06\0\0sNaPpY": "compressed by snappy",
}
_HEAD = 1 << 16  # the bytes to inspect to detect a format
_ROWS = 10  # the rows to inspect to detect documents in JSON
_CHUNK = 1 << 20  # the characters of JSON to read at a time


class Document(NamedTuple):
    """One text.

    Attributes:
        text: The text, without a byte order mark.
        where: Its file, and its line or row, counted from 1.
        size: Its share of the file's size, in bytes, for progress bars.
    """

    text: str
    where: str
    size: float = 0.0


class Fault(NamedTuple):
    """A document, or several, that cannot be read.

    Attributes:
        where: The file, and the line or row, counted from 1.
        reason: The error.
        size: The share of the file's size, in bytes, for progress bars.
        count: The number of documents lost, if it is known; else 1.
    """

    where: str
    reason: str
    size: float = 0.0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class Source(NamedTuple):
    """A file to read, and its format, a key of :data:`FORMATS`."""

    path: Path
    format: str


class LeftOut(NamedTuple):
    """A file that is not read, and the reason."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def find(
    paths: Iterable[str | Path], *, key: str = "text", format: str | None = None
) -> tuple[list[Source], list[LeftOut]]:
    """Lists the files to read in files and folders.

    Folders are searched recursively, and links are followed. A link is left out if its target is
    read under its own name.

    Args:
        paths: Files and folders.
        key: The field that holds the text, as in :func:`read`. It is used to detect documents in
            files whose name does not tell the format.
        format: The format of every file, a key of :data:`FORMATS`; None to detect it by name and
            contents.

    Returns:
        ``(sources, left_out)``. The sources are in the order of ``paths``, sorted within a folder,
        without duplicates. ``left_out`` has the other files of the folders.

    Raises:
        FileNotFoundError: A path does not exist, or a folder has no file to read.
        TypeError: ``paths`` is one path instead of a list, or ``key`` is not a string.
        ValueError: ``format`` is unknown, or the format of a file in ``paths`` is not supported.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"format is {format!r}; it must be one of {', '.join(FORMATS)}")
    if not isinstance(key, str):
        raise TypeError(f"key is {key!r}; it must be a string, the name of a field")
    sources, left_out = [], []
    for path in map(Path, as_list("paths", paths)):
        if path.is_dir():
            found, others = _find_in_folder(path, key, format)
            sources += found
            left_out += others
        elif not path.exists():
            link = "a link to nothing" if path.is_symlink() else "there is no such file or folder"
            raise FileNotFoundError(f"{path}: {link}")
        elif isinstance(source := _classify(path, key, format, named=True), LeftOut):
            raise ValueError(str(source))
        else:
            sources.append(source)
    sources = list(dict.fromkeys(sources))
    read = {source.path.resolve() for source in sources if not source.path.is_symlink()}
    links = {s for s in sources if s.path.is_symlink() and s.path.resolve() in read}
    left_out += [LeftOut(s.path, "a link to a file that is read itself") for s in sorted(links)]
    return [source for source in sources if source not in links], left_out


def _find_in_folder(
    folder: Path, key: str, format: str | None
) -> tuple[list[Source], list[LeftOut]]:
    sources, left_out = [], []
    for path, reason in walk(folder):
        source = LeftOut(path, reason) if reason else _classify(path, key, format, named=False)
        (left_out if isinstance(source, LeftOut) else sources).append(source)
    if not sources:
        also = [f"; left out {one}" for one in left_out[:3]]
        also += [f"; and {len(left_out) - 3} more"] if len(left_out) > 3 else []
        raise FileNotFoundError(
            f"{folder}: no file found with an ending of {', '.join(ENDINGS)}{''.join(also)}"
        )
    return sources, left_out


def _classify(path: Path, key: str, format: str | None, *, named: bool) -> Source | LeftOut:
    """Selects the format of a file, or the reason to leave it out."""
    if not path.is_file():
        return LeftOut(path, "not a regular file")
    if not os.access(path, os.R_OK):
        return LeftOut(path, "no permission to read it")
    ending = _ending(path)
    if format is not None:
        return Source(path, format)
    if ending in _BY_NAME and ending not in JSON:
        return Source(path, _BY_NAME[ending])
    try:
        found, reason = _by_contents(path, key)
    except read_errors() as error:
        # read() yields the documents before the damage, and then a fault.
        return Source(path, "lines") if ending in JSON else LeftOut(path, describe_error(error))
    if found == "text" and ending in JSON:
        return LeftOut(path, "no JSON object or array")
    if found == "text" and ending in _NO_TEXT:
        return LeftOut(path, f"{ending} is not supported; convert it to .jsonl or .parquet")
    if found == "text" and not named:
        return LeftOut(path, "text with an unknown ending; pass the file itself, or --format text")
    return Source(path, found) if found else LeftOut(path, reason)


def _ending(path: Path) -> str:
    """The last ending in lower case, after removing the ending of a compression."""
    return Path(plain_name(path)).suffix


def _by_contents(path: Path, key: str) -> tuple[str, str]:
    """Detects the format by contents: ``(format, "")``, or ``("", reason)`` if it is unknown."""
    with open_file(path) as (_, file):
        head = file.read(_HEAD)
    if head.startswith(b"PAR1"):
        return "parquet", ""
    if not head:
        return "", "empty"
    for magic, kind in _PACKED.items():
        if head.startswith(magic):
            return "", f"{kind}; unpack it"
    if head[257:262] == b"ustar":
        return "", "a tar archive; unpack it"
    if head.removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"{", b"[")):
        format = "lines" if _has_lines(path) else "json"
        rows = list(itertools.islice(read([Source(path, format)], key=key), _ROWS))
        if any(isinstance(row, Document) for row in rows):
            return format, ""
        reason = rows[0].reason if rows and isinstance(rows[0], Fault) else "an empty array"
        if not reason.startswith(_NO_JSON):
            return "", f"JSON without documents: {reason}"
    try:
        is_text = "\0" not in codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        is_text = False
    return ("text", "") if is_text else ("", "not text, JSON or parquet")


def _has_lines(path: Path) -> bool:
    """Whether a JSON file has one object per line; broken lines at its beginning are ignored."""
    with open_file(path) as (_, file):
        lines = (line.removeprefix(codecs.BOM_UTF8).strip() for line in file)
        for line in itertools.islice(filter(None, lines), _ROWS):
            if line == b"{" or line.startswith(b"["):
                return False  # one object or array that spans lines
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(json.loads(line), dict):
                    return True
    return False


def read(sources: Iterable[Source], *, key: str = "text") -> Iterator[Document | Fault]:
    """Yields the documents of files in order, and a fault for each that cannot be read.

    ======== =========================================================================
    text     The file is one document.
    lines    Each line is a JSON object with one document.
    json     A JSON array of objects, or objects one after another; a document each.
    parquet  Each row is a document.
    ======== =========================================================================

    If the rest of a file is unreadable, its last item is a fault. A parquet file continues with its
    next row group.

    Args:
        sources: The sources from :func:`find`.
        key: The field or column that holds the text. ``"a.b"`` is the field ``"a.b"`` if it
            exists, else the field b of the field a.

    Yields:
        Documents and faults.

    Raises:
        ImportError: A file needs a package that is not installed.
    """
    for path, format in sources:
        row = None
        try:
            for row in _READERS[format](path, key):
                yield row
        except read_errors() as error:
            after = f", after {row.where.removeprefix(f'{path}, ')}" if row else ""
            yield Fault(f"{path}{after}", describe_error(error))


def _read_text(path: Path, key: str) -> Iterator[Document | Fault]:
    with open_file(path) as (_, file):
        data = file.read()
    try:
        yield Document(data.decode("utf-8-sig"), str(path), path.stat().st_size)
    except UnicodeDecodeError as error:
        yield Fault(str(path), f"not UTF-8: {error}", path.stat().st_size)


def _read_lines(path: Path, key: str) -> Iterator[Document | Fault]:
    with open_file(path) as (raw, file):
        offset = 0
        for number, line in enumerate(file, 1):
            before, offset = offset, raw.tell()
            if not line.removeprefix(codecs.BOM_UTF8).strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except ValueError as error:
                yield Fault(where, f"not an object with {key!r}: {error}", offset - before)
            except RecursionError:
                yield Fault(where, "JSON is nested too deeply", offset - before)
            else:
                yield _document(_field(value, key), where, key, offset - before)


def _read_json(path: Path, key: str) -> Iterator[Document | Fault]:
    with open_file(path) as (raw, file):
        offset = number = 0
        try:
            for number, value in enumerate(_json_values(file), 1):
                before, offset = offset, raw.tell()
                where = f"{path}, object {number}"
                yield _document(_field(value, key), where, key, offset - before)
        except ValueError as error:
            yield Fault(f"{path}, object {number + 1}", f"{_NO_JSON}: {error}")
        except RecursionError:
            yield Fault(f"{path}, object {number + 1}", "JSON is nested too deeply")


def _json_values(file: IO[bytes]) -> Iterator[Any]:
    """Yields the values of a JSON array, or of concatenated JSON values.

    Only one chunk of the file, or one value, is in memory at a time.

    Raises:
        ValueError: The file is not valid JSON.
        RecursionError: A value is nested too deeply.
    """
    decode = json.JSONDecoder().raw_decode
    # A broken byte must invalidate only its own value, so it becomes a surrogate.
    with io.TextIOWrapper(file, "utf-8-sig", "surrogateescape") as text:
        buffer = text.read(_CHUNK).lstrip()
        in_array = buffer.startswith("[")
        start = int(in_array)
        while True:
            start += len(_GAP.match(buffer, start)[0])  # type: ignore[index]
            fault, value = None, None
            if in_array and buffer.startswith("]", start):
                if rest := (buffer[start + 1 :] + text.read(_CHUNK)).strip():
                    raise ValueError(f"unexpected text after the array: {rest[:20]!r}")
                return
            try:
                value, end = decode(buffer, start)
            except json.JSONDecodeError as error:
                fault, end = error, error.pos
            # A value near the end of the buffer may continue in the next chunk.
            if end > len(buffer) - 16 or (fault and fault.msg.startswith("Unterminated")):
                if more := text.read(max(_CHUNK, len(buffer) - start)):
                    buffer, start = buffer[start:] + more, 0
                    continue
                if fault and start == len(buffer) and not in_array:
                    return
            if fault:
                raise ValueError(f"{fault.msg}: {buffer[start : start + 20]!r}")
            yield value
            start = end


_GAP = re.compile(r"[\s,]*")
_NO_JSON = "invalid JSON"


def _read_parquet(path: Path, key: str) -> Iterator[Document | Fault]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            'parquet files need the package pyarrow: pip install "jaxllm[data]"'
        ) from error
    broken, file_bytes = (pyarrow.ArrowException, OSError), path.stat().st_size
    if is_compressed(path):
        yield Fault(str(path), "parquet in a compressed file; decompress it first", file_bytes)
        return
    try:
        table = parquet.ParquetFile(path, page_checksum_verification=True)
        metadata, schema = table.metadata, table.schema_arrow
    except broken as error:
        yield Fault(str(path), describe_error(error), file_bytes)
        return
    with table:
        size, number = file_bytes / max(metadata.num_rows, 1), 0
        fields = [key] if key in schema.names else key.split(".")
        if not _has_column(schema, fields):
            reason = f"no column {key!r}; there are {', '.join(schema.names)}"
            yield Fault(str(path), reason, file_bytes, metadata.num_rows)
            return
        for group in range(metadata.num_row_groups):
            after = number + metadata.row_group(group).num_rows
            batches = table.iter_batches(batch_size=1024, row_groups=[group], columns=[key])
            try:
                for batch in batches:
                    for value in _column_values(batch, fields):
                        number += 1
                        yield _document(value, f"{path}, row {number}", key, size)
            except broken as error:
                lost = after - number
                where = f"{path}, rows {number + 1} to {after}"
                yield Fault(where, describe_error(error), size * lost, lost)
            number = after


def _has_column(schema: Any, fields: list[str]) -> bool:
    """Whether a schema has the column ``fields[0]``, with the nested fields ``fields[1:]``."""
    import pyarrow

    inner = pyarrow.struct(list(schema))
    for name in fields:
        if not pyarrow.types.is_struct(inner) or inner.get_field_index(name) < 0:
            return False
        inner = inner.field(name).type
    return True


def _column_values(batch: Any, fields: list[str]) -> list[Any]:
    """The values of a column or a nested field; bytes if a value is not UTF-8."""
    import pyarrow

    column = batch.column(fields[0])  # by name: the batch may have "a.b" and "a" with a field "b"
    for name in fields[1:]:
        # Unlike `field`, `flatten` gives null if the parent struct is null.
        column = column.flatten()[column.type.get_field_index(name)]
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return column.cast(pyarrow.large_binary()).to_pylist()


_MISSING = object()


def _field(value: Any, key: str) -> Any:
    """The field of an object, or :data:`_MISSING`."""
    if isinstance(value, dict) and key in value:
        return value[key]
    for name in key.split("."):
        value = value.get(name, _MISSING) if isinstance(value, dict) else _MISSING
    return value


def _document(value: Any, where: str, key: str, size: float) -> Document | Fault:
    if value is _MISSING:
        return Fault(where, f"not an object with {key!r}", size)
    try:
        if isinstance(value, bytes):
            value = value.decode()
        if not isinstance(value, str):
            return Fault(where, f"{key!r} is of type {type(value).__name__}, not text", size)
        value.encode()
    except UnicodeError as error:  # an invalid byte, or a lone surrogate from a JSON escape
        return Fault(where, f"{key!r} is not valid text: {error}", size)
    return Document(value, where, size)


_READERS: dict[str, Callable[[Path, str], Iterator[Document | Fault]]] = {
    "text": _read_text,
    "lines": _read_lines,
    "json": _read_json,
    "parquet": _read_parquet,
}
