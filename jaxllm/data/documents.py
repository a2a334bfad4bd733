"""The documents of a corpus: text, JSON and parquet files, compressed or not.

:func:`find` lists the files and says which it leaves out; :func:`read` gives their documents in
order. What cannot be read is a :class:`Fault` with its file and row, so that one bad document need
not end a job.

The ending of a name decides how a file is read, in any case of letters and before an ending of a
compression (``.json.gz``). Compression is told by the first bytes. The contents decide about
``.json`` and unknown endings.
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

from jaxllm.data.compression import damage, damaged, open_file, plain_name
from jaxllm.data.files import walk

TEXTS = (".md", ".py", ".txt")
LINES = (".jsonl", ".ndjson", ".jsonlines", ".jl")
JSON = (".json",)
TABLES = (".parquet", ".pq")
FORMATS = {"text": TEXTS, "lines": LINES, "json": JSON, "parquet": TABLES}
ENDINGS = (*TEXTS, *LINES, *JSON, *TABLES)

_BY_NAME = {ending: name for name, endings in FORMATS.items() for ending in endings}
_NO_TEXT = (".csv", ".tsv", ".xml")  # rows or markup, of which the whole is no document
_PACKED = {
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!": "a rar archive",
    b"\x04\x22\x4d\x18": "compressed by lz4",
    b"\x1f\x9d": "compressed by compress",
    b"\xff\x06\0\0sNaPpY": "compressed by snappy",
}
_HEAD = 1 << 16  # bytes that tell text from other contents
_ROWS = 10  # that tell whether JSON holds documents
_CHUNK = 1 << 20  # characters of JSON that are read at a time


class Document(NamedTuple):
    """One text.

    Attributes:
        text: The text, without a byte order mark.
        where: Its file, and its line or row, counted from 1.
        size: The bytes of the file that it stands for.
    """

    text: str
    where: str
    size: float = 0.0


class Fault(NamedTuple):
    """What stands where no text can be read.

    Attributes:
        where: The file, and the line or row, counted from 1.
        reason: What is wrong there.
        size: The bytes of the file that it stands for.
        count: How many documents are lost, as far as that is known.
    """

    where: str
    reason: str
    size: float = 0.0
    count: int = 1

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class Source(NamedTuple):
    """A file to read, and how: a key of :data:`FORMATS`."""

    path: Path
    format: str


class LeftOut(NamedTuple):
    """A file that is not read, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def find(
    paths: Iterable[str | Path], *, key: str = "text", format: str | None = None
) -> tuple[list[Source], list[LeftOut]]:
    """The files to read: those named, and those in the folders named.

    Folders are searched recursively, links followed. A link is left out if the file that it leads
    to is read itself.

    Args:
        paths: Files and folders.
        key: As in :func:`read`; by it the contents are judged.
        format: How to read every file, a key of :data:`FORMATS`; None to tell by name and contents.

    Returns:
        The sources in the order of ``paths``, those of a folder sorted, none twice; and what the
        folders hold beside them.

    Raises:
        FileNotFoundError: A path does not exist, or a folder holds no file to read.
        ValueError: ``format`` is unknown, or a file that was named cannot be read as any.
    """
    if format is not None and format not in FORMATS:
        raise ValueError(f"format is {format!r}; it must be one of {', '.join(FORMATS)}")
    sources, left_out = [], []
    for path in map(Path, paths):
        if path.is_dir():
            found, others = _find_in_folder(path, key, format)
            sources += found
            left_out += others
        elif not path.exists():
            link = "a link to nothing" if path.is_symlink() else "there is no such file or folder"
            raise FileNotFoundError(f"{path}: {link}")
        elif isinstance(verdict := _judge(path, key, format, named=True), LeftOut):
            raise ValueError(str(verdict))
        else:
            sources.append(verdict)
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
        verdict = LeftOut(path, reason) if reason else _judge(path, key, format, named=False)
        (left_out if isinstance(verdict, LeftOut) else sources).append(verdict)
    if not sources:
        also = [f"; left out {one}" for one in left_out[:3]]
        also += [f"; and {len(left_out) - 3} more"] if len(left_out) > 3 else []
        raise FileNotFoundError(
            f"{folder}: no file found that ends in {', '.join(ENDINGS)}{''.join(also)}"
        )
    return sources, left_out


def _judge(path: Path, key: str, format: str | None, *, named: bool) -> Source | LeftOut:
    """How a file is read, or why it is not."""
    if not path.is_file():
        return LeftOut(path, "no regular file")
    if not os.access(path, os.R_OK):
        return LeftOut(path, "no permission to read it")
    ending = _ending(path)
    if format is not None:
        return Source(path, format)
    if ending in _BY_NAME and ending not in JSON:
        return Source(path, _BY_NAME[ending])
    try:
        found, reason = _by_contents(path, key)
    except damage() as error:
        # Reading reports it, after what is whole before the damage.
        return Source(path, "lines") if ending in JSON else LeftOut(path, damaged(error))
    if found == "text" and ending in JSON:
        return LeftOut(path, "no JSON object or array")
    if found == "text" and ending in _NO_TEXT:
        return LeftOut(path, f"{ending} is not read; convert it to .jsonl or .parquet")
    if found == "text" and not named:
        return LeftOut(path, "text without a known ending; name it, or give the format text")
    return Source(path, found) if found else LeftOut(path, reason)


def _ending(path: Path) -> str:
    """The last ending, in small letters, without that of a compression."""
    return Path(plain_name(path)).suffix


def _by_contents(path: Path, key: str) -> tuple[str, str]:
    """A key of :data:`FORMATS`, or an empty string and why."""
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
            return "", f"JSON without texts: {reason}"
    try:
        is_text = "\0" not in codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        is_text = False
    return ("text", "") if is_text else ("", "neither text nor JSON nor parquet")


def _has_lines(path: Path) -> bool:
    """Whether JSON is an object a line: the first lines are, but for those that are broken."""
    with open_file(path) as (_, file):
        lines = (line.removeprefix(codecs.BOM_UTF8).strip() for line in file)
        for line in itertools.islice(filter(None, lines), _ROWS):
            if line == b"{" or line.startswith(b"["):
                return False  # an object or array over several lines, or as long as the file
            with contextlib.suppress(ValueError, RecursionError):
                if isinstance(json.loads(line), dict):
                    return True
    return False


def read(sources: Iterable[Source], *, key: str = "text") -> Iterator[Document | Fault]:
    """The documents of files in order; a fault where one cannot be read.

    A text file is one document. A JSON file has an object a line, or an array of objects, or one
    object; a parquet file has a row a document. A fault that makes the rest of a file unreadable is
    the file's last; in parquet, of a row group's.

    Args:
        sources: As :func:`find` gives them.
        key: The field or column that holds the text. ``"a.b"`` is the field b of the field a, where
            there is none of that very name.

    Raises:
        ImportError: A file needs a package that is not installed.
    """
    for path, format in sources:
        row = None
        try:
            for row in _READERS[format](path, key):
                yield row
        except damage() as error:
            after = f", after {row.where.removeprefix(f'{path}, ')}" if row else ""
            yield Fault(f"{path}{after}", damaged(error))


def _read_text(path: Path, key: str) -> Iterator[Document | Fault]:
    with open_file(path) as (_, file):
        data = file.read()
    try:
        yield Document(data.decode("utf-8-sig"), str(path), path.stat().st_size)
    except UnicodeDecodeError as error:
        yield Fault(str(path), f"not UTF-8: {error}", path.stat().st_size)


def _read_lines(path: Path, key: str) -> Iterator[Document | Fault]:
    with open_file(path) as (raw, file):
        place = 0
        for number, line in enumerate(file, 1):
            before, place = place, raw.tell()
            if not line.removeprefix(codecs.BOM_UTF8).strip():
                continue
            where = f"{path}, line {number}"
            try:
                value = json.loads(line)
            except ValueError as error:
                yield Fault(where, f"no object with {key!r}: {error}", place - before)
            except RecursionError:
                yield Fault(where, "JSON that is nested too deep", place - before)
            else:
                yield _document(_field(value, key), where, key, place - before)


def _read_json(path: Path, key: str) -> Iterator[Document | Fault]:
    with open_file(path) as (raw, file):
        place = number = 0
        try:
            for number, value in enumerate(_json_values(file), 1):
                before, place = place, raw.tell()
                where = f"{path}, object {number}"
                yield _document(_field(value, key), where, key, place - before)
        except ValueError as error:
            yield Fault(f"{path}, object {number + 1}", f"{_NO_JSON}: {error}")
        except RecursionError:
            yield Fault(f"{path}, object {number + 1}", "JSON that is nested too deep")


def _json_values(file: IO[bytes]) -> Iterator[Any]:
    """The values of a JSON array, or JSON values one after another, a chunk in memory at a time.

    Raises:
        ValueError: Something else stands there.
        RecursionError: A value is nested too deep.
    """
    decode = json.JSONDecoder().raw_decode
    # A broken byte is its value's fault alone: it becomes a surrogate, which is no text.
    with io.TextIOWrapper(file, "utf-8-sig", "surrogateescape") as text:
        buffer = text.read(_CHUNK).lstrip()
        in_array = buffer.startswith("[")
        place = int(in_array)
        while True:
            place += len(_GAP.match(buffer, place)[0])  # type: ignore[index]
            fault, value = None, None
            if in_array and buffer.startswith("]", place):
                if rest := (buffer[place + 1 :] + text.read(_CHUNK)).strip():
                    raise ValueError(f"after the array stands {rest[:20]!r}")
                return
            try:
                value, end = decode(buffer, place)
            except json.JSONDecodeError as error:
                fault, end = error, error.pos
            # What a chunk cuts off may go on in the next: a number, a name, an escape, a string.
            if end > len(buffer) - 16 or (fault and fault.msg.startswith("Unterminated")):
                if more := text.read(max(_CHUNK, len(buffer) - place)):
                    buffer, place = buffer[place:] + more, 0
                    continue
                if fault and place == len(buffer) and not in_array:
                    return
            if fault:
                raise ValueError(f"{fault.msg}: {buffer[place : place + 20]!r}")
            yield value
            place = end


_GAP = re.compile(r"[\s,]*")
_NO_JSON = "no JSON"


def _read_parquet(path: Path, key: str) -> Iterator[Document | Fault]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            'parquet files need the package pyarrow: pip install "jaxllm[data]"'
        ) from error
    broken, file_bytes = (pyarrow.ArrowException, OSError), path.stat().st_size
    try:
        table = parquet.ParquetFile(path, page_checksum_verification=True)
        metadata, schema = table.metadata, table.schema_arrow
    except broken as error:
        yield Fault(str(path), damaged(error), file_bytes)
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
                yield Fault(where, damaged(error), size * lost, lost)
            number = after


def _has_column(schema: Any, fields: list[str]) -> bool:
    """Whether there is a column, and in it the fields."""
    import pyarrow

    inner = pyarrow.struct(list(schema))
    for name in fields:
        if not pyarrow.types.is_struct(inner) or inner.get_field_index(name) < 0:
            return False
        inner = inner.field(name).type
    return True


def _column_values(batch: Any, fields: list[str]) -> list[Any]:
    """The values of a column, or of a field in it; bytes where one is not UTF-8."""
    import pyarrow

    column = batch.column(fields[0])  # by its name: there may be "a.b" and "a" with "b" in it
    for name in fields[1:]:
        # Unlike `field`, it gives null where the object around it is.
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
        return Fault(where, f"no object with {key!r}", size)
    try:
        if isinstance(value, bytes):
            value = value.decode()
        if not isinstance(value, str):
            return Fault(where, f"{key!r} holds {type(value).__name__}, no text", size)
        value.encode()
    except UnicodeError as error:  # a broken byte; or half of a character, which JSON can name
        return Fault(where, f"{key!r} is no text: {error}", size)
    return Document(value, where, size)


_READERS: dict[str, Callable[[Path, str], Iterator[Document | Fault]]] = {
    "text": _read_text,
    "lines": _read_lines,
    "json": _read_json,
    "parquet": _read_parquet,
}
