import bz2
import gzip
import io
import json
import lzma
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from jaxllm.data import compression, documents
from jaxllm.data.documents import Document, Fault

ROWS = ["first", "naïve 日本", ""]
JSONL = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(ROWS)).encode()
ARRAY = json.dumps([{"text": text} for text in ROWS], indent=1).encode()
COMPRESS = {
    ".gz": gzip.compress,
    ".zst": lambda data: compression._zstd().compress(data),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def rows_of(*paths, **options):
    """The documents and faults of the files, and the files left out."""
    key = options.get("key", "text")
    sources, left_out = documents.find(paths, **options)
    return list(documents.read(sources, key=key)), left_out


def texts_of(*paths, **options):
    rows, _ = rows_of(*paths, **options)
    texts = [row.text for row in rows if isinstance(row, Document)]
    assert len(texts) == len(rows), rows
    return texts


def faults_of(*paths, **options):
    return [str(row) for row in rows_of(*paths, **options)[0] if isinstance(row, Fault)]


@pytest.mark.parametrize("ending", ["", *COMPRESS])
@pytest.mark.parametrize(
    "name",
    ["c4.json", "c4.jsonl", "C4.JSONL", "a.ndjson", "part-00000", "dolma-v1_7.json", "x.data"],
)
def test_each_json_line_is_a_document(tmp_path, name, ending):
    data = COMPRESS.get(ending, bytes)(JSONL)
    path = write(tmp_path / "folder" / f"{name}{ending}", data)
    assert texts_of(path) == texts_of(path.parent) == ROWS


@pytest.mark.parametrize("ending", ["", ".gz", ".ZST"])
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (ARRAY, ROWS),
        (json.dumps([{"text": "a"}]).encode(), ["a"]),
        (b'[\n{"text": "a"},\n{"text": "b"}\n]\n', ["a", "b"]),
        (b'{"text": "a"}', ["a"]),
        (b'{\n  "text": "a",\n  "n": 12\n}\n', ["a"]),
        (b'{\n "text": "a"\n}\n{\n "text": "b"\n}\n', ["a", "b"]),
    ],
    ids=["array", "array in a line", "array by lines", "object", "pretty object", "objects"],
)
def test_json_layouts_are_read(tmp_path, data, expected, ending):
    compress = COMPRESS.get(ending.lower(), bytes)
    assert texts_of(write(tmp_path / f"x.json{ending}", compress(data))) == expected


def test_json_values_cross_chunk_boundaries(tmp_path, monkeypatch):
    rows = [{"n": 12345, "text": f'\u20ac {i} \\ " ]' * (i % 7)} for i in range(50)]
    array = write(tmp_path / "a.json", json.dumps(rows, indent=2))
    lines = write(tmp_path / "b.json", "\n".join(json.dumps(row, indent=1) for row in rows))
    for chunk in (1, 2, 17, 64, 1000):
        monkeypatch.setattr(documents, "_CHUNK", chunk)
        assert texts_of(array) == texts_of(lines) == [row["text"] for row in rows]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.txt", b"\xef\xbb\xbftext"),
        ("x.jsonl", b'\xef\xbb\xbf{"text": "text"}\r\n\r\n'),
        ("x.json", b'\xef\xbb\xbf[{"text": "text"}]\r\n'),
        ("x.json", b'\xef\xbb\xbf{"text":\r\n"text"}'),
        ("x.md.gz", gzip.compress(b"te", mtime=0) + gzip.compress(b"xt", mtime=0)),  # two members
        ("x.txt", gzip.compress(b"text", mtime=0)),  # compressed, without the ending
        ("x.txt.gz", bz2.compress(b"text")),
        ("readme", b"text"),  # passed by name, so read as text
    ],
)
def test_byte_order_marks_and_line_endings_are_handled(tmp_path, name, data):
    assert texts_of(write(tmp_path / name, data)) == ["text"]


def test_lines_after_a_broken_first_line_are_read(tmp_path):
    path = write(tmp_path / "x.json", b'{"text": "cut\n\xff\n' + JSONL)
    rows, _ = rows_of(tmp_path)
    assert [row.text for row in rows if isinstance(row, Document)] == ROWS
    assert [row.where for row in rows if isinstance(row, Fault)] == [
        f"{path}, line 1",
        f"{path}, line 2",
    ]


def test_line_endings_within_a_text_are_kept(tmp_path):
    assert texts_of(write(tmp_path / "x.txt", b"a\r\nb\r\n")) == ["a\r\nb\r\n"]


def test_dotted_key_reads_a_nested_field(tmp_path):
    data = {"a": {"b": {"text": "deep"}}, "a.b": {"text": "no"}, "c.d": "flat", "c": {"d": "no"}}
    lines = write(tmp_path / "x.jsonl", json.dumps(data))
    table = tmp_path / "x.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([data]), table)
    nulls = [{"a": None}, {"a": {"b": None}}, {"a": {"b": {"text": "deep"}}}]
    parquet.write_table(pyarrow.Table.from_pylist(nulls), tmp_path / "nulls.parquet")
    both = tmp_path / "both.parquet"  # pyarrow reads both columns under this name
    parquet.write_table(pyarrow.Table.from_pylist([{"a": {"b": "inner"}, "a.b": "whole"}]), both)
    assert texts_of(both, key="a.b") == ["whole"]
    rows, _ = rows_of(tmp_path / "nulls.parquet", key="a.b.text")
    assert [isinstance(row, Document) for row in rows] == [False, False, True]
    for path in (lines, table):
        assert texts_of(path, key="a.b.text") == ["deep"]
        assert texts_of(path, key="c.d") == ["flat"]
    assert faults_of(lines, key="a.x") == [f"{lines}, line 1: not an object with 'a.x'"]
    reason = "no column 'a.x'; there are a, a.b, c.d, c"
    assert faults_of(table, key="a.x") == [f"{table}: {reason}"]


def test_all_string_column_types_are_read(tmp_path):
    for i, kind in enumerate(
        (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.string_view())
    ):
        values = [t.encode() if kind == pyarrow.binary() else t for t in ROWS]
        column = pyarrow.array(values, kind)
        parquet.write_table(pyarrow.table({"text": column}), tmp_path / f"{i}.parquet")
    words = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    parquet.write_table(pyarrow.table({"text": words}), tmp_path / "9.pq")
    assert texts_of(tmp_path) == [*ROWS * 4, "a", "b", "a"]


def test_unsupported_files_of_a_folder_are_left_out_with_a_reason(tmp_path):
    folder = tmp_path / "corpus"
    write(folder / "a.jsonl", JSONL)
    write(folder / "b.jsonl.zst", COMPRESS[".zst"](JSONL))
    write(folder / "c.json.gz", gzip.compress(JSONL, mtime=0))
    write(folder / "dataset_info.json", '{"features": {}}')
    write(folder / "empty.json", "")
    write(folder / "list.json", "[]")
    write(folder / "words.json", "words")
    write(folder / "model.bin", b"\x00\xff")
    write(folder / "t.csv", "text\na\n")
    write(folder / "main.c", "int main(){}")
    write(folder / ".hidden" / "x.txt", "x")
    write(folder / ".DS_Store", "x")
    with zipfile.ZipFile(folder / "x.zip", "w") as file:
        file.writestr("x.txt", "x")
    with tarfile.open(folder / "x.tar.gz", "w:gz") as file:
        file.addfile(tarfile.TarInfo("x.txt"), io.BytesIO())
    write(folder / "x.jsonl.lz4", b"\x04\x22\x4d\x18text")
    (folder / "dangling.txt").symlink_to("nowhere")
    (folder / "link.jsonl").symlink_to("a.jsonl")
    (folder / "loop").symlink_to(".")
    os.mkfifo(folder / "pipe.txt")
    rows, left_out = rows_of(folder)
    assert [row.text for row in rows if isinstance(row, Document)] == ROWS * 3
    assert {path.name: reason for path, reason in left_out} == {
        "dataset_info.json": "JSON without documents: not an object with 'text'",
        "empty.json": "empty",
        "list.json": "JSON without documents: an empty array",
        "words.json": "no JSON object or array",
        "model.bin": "not text, JSON or parquet",
        "t.csv": ".csv is not supported; convert it to .jsonl or .parquet",
        "main.c": "text with an unknown ending; pass the file itself, or --format text",
        ".hidden": "hidden",
        ".DS_Store": "hidden",
        "x.zip": "a zip archive; unpack it",
        "x.tar.gz": "a tar archive; unpack it",
        "x.jsonl.lz4": "compressed by lz4; unpack it",
        "dangling.txt": "not a regular file",
        "link.jsonl": "a link to a file that is read itself",
        "loop": "a folder that is read under another path",
        "pipe.txt": "not a regular file",
    }
    for path, reason in left_out:
        if path.name in ("link.jsonl", "loop", ".hidden", ".DS_Store"):
            continue  # read when passed by name
        if path.name == "main.c":
            assert texts_of(path) == ["int main(){}"]
        elif path.name == "dangling.txt":
            with pytest.raises(FileNotFoundError, match="a link to nothing"):
                documents.find([path])
        else:
            with pytest.raises(ValueError, match=f"{path.name}: {reason[:20]}"):
                documents.find([path])


def test_links_are_followed(tmp_path):
    write(tmp_path / "data" / "a.txt", "a")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b").symlink_to(tmp_path / "data")
    (folder / "c.txt").symlink_to(tmp_path / "data" / "a.txt")
    # The file is read once, by the path that is not a link.
    assert [Path(row.where) for row in rows_of(folder)[0]] == [folder / "b" / "a.txt"]
    (folder / "b").unlink()
    (folder / "d.txt").symlink_to(tmp_path / "data" / "a.txt")
    assert texts_of(folder) == ["a", "a"]  # two links to one file: a mixture that repeats it
    assert texts_of(tmp_path / "data" / "a.txt", tmp_path / "data", folder) == ["a"]


def test_format_option_applies_to_all_files(tmp_path):
    write(tmp_path / "a.c", "int main(){}")
    write(tmp_path / "b.jsonl", JSONL)
    assert texts_of(tmp_path, format="text") == ["int main(){}", JSONL.decode()]
    assert texts_of(write(tmp_path / "c.csv", JSONL), format="lines") == ROWS
    with pytest.raises(ValueError, match="format is 'csv'; it must be one of text, lines, json, p"):
        documents.find([tmp_path], format="csv")


def test_folder_without_readable_files_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "full" / "a.txt", "a")
    write(tmp_path / "other" / "meta.json", "{}")
    with pytest.raises(FileNotFoundError, match=r"empty: no file found with an ending of \.md, "):
        documents.find([tmp_path / "full", tmp_path / "empty"])
    with pytest.raises(
        FileNotFoundError, match=r"left out .*meta\.json: JSON without documents: not a"
    ):
        documents.find([tmp_path / "other"])


def test_unreadable_files_are_reported(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "a")
    closed = write(tmp_path / "b.txt", "b")
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and may(path, mode))
    rows, left_out = rows_of(tmp_path)
    assert [row.text for row in rows if isinstance(row, Document)] == ["a"]
    assert list(map(str, left_out)) == [f"{closed}: no permission to read it"]
    with pytest.raises(ValueError, match=r"b\.txt: no permission to read it"):
        documents.find([closed])

    def refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))

    sources, _ = documents.find([tmp_path / "a.txt"])
    monkeypatch.setattr(Path, "open", refuse)  # permission is lost after find
    assert str(*documents.read(sources)) == f"{tmp_path}/a.txt: cannot be read: Permission denied"


def test_unreadable_folder_is_reported(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "a")
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert list(map(str, rows_of(tmp_path)[1])) == [
        f"{tmp_path}/closed: cannot be opened: Permission denied"
    ]


DEEP = '{"text": ' + "[" * 10_000 + "]" * 10_000 + "}"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": null}', "'text' is of type NoneType, not text"),
        (b'{"text": 5}', "'text' is of type int, not text"),
        (b'{"id": 1}', "not an object with 'text'"),
        (b"[1]", "not an object with 'text'"),
        (b'{"text": "\\ud800"}', "'text' is not valid text: 'utf-8' codec can't encode"),
        (b'{"text": "\xe9"}', "not an object with 'text': 'utf-8' codec can't decode"),
        (b'{"text": "a"', "not an object with 'text': Expecting ',' delimiter"),
        (DEEP.encode(), "JSON is nested too deeply"),
        (
            b'{"text": "a", "n": ' + b"1" * 5000 + b"}",
            "not an object with 'text': Exceeds the limit",
        ),
    ],
    ids=["null", "int", "missing", "list", "surrogate", "byte", "cut", "deep", "digits"],
)
def test_bad_line_is_a_fault_and_other_lines_are_read(tmp_path, line, reason):
    path = write(tmp_path / "x.jsonl", JSONL + line + b"\n" + JSONL)
    rows, _ = rows_of(path)
    assert [row.text for row in rows if isinstance(row, Document)] == ROWS * 2
    (fault,) = (row for row in rows if isinstance(row, Fault))
    assert rows.index(fault) == 3
    assert str(fault).startswith(f"{path}, line 4: {reason}")


@pytest.mark.parametrize(
    ("data", "good", "fault"),
    [
        (
            b'[{"text": "a"}, {"text": null}, {"text": "b"}]',
            2,
            "object 2: 'text' is of type NoneType",
        ),
        (
            b'[{"text": "a"}, {"text": "\xe9"}, {"text": "b"}]',
            2,
            "object 2: 'text' is not valid text",
        ),
        (b'[{"text": "a"}, {"text": "b"}', 2, "object 3: invalid JSON: Expecting value: ''"),
        (b'[{"text": "a"}, {"text" "b"}]', 1, "object 2: invalid JSON: Expecting ':' delimiter"),
        (b'[{"text": "a"}] []', 1, "object 2: invalid JSON: unexpected text after the array: '[]'"),
        (b'[{"text": "a"}, ' + DEEP.encode() + b"]", 1, "object 2: JSON is nested too deeply"),
    ],
    ids=["null", "byte", "cut", "wrong", "after", "deep"],
)
def test_bad_array_item_is_a_fault(tmp_path, data, good, fault):
    path = write(tmp_path / "x.json", data)
    rows, _ = rows_of(path)
    assert sum(isinstance(row, Document) for row in rows) == good
    (found,) = (str(row) for row in rows if isinstance(row, Fault))
    assert found.startswith(f"{path}, {fault}")


@pytest.mark.parametrize("ending", COMPRESS)
def test_truncated_compressed_file_gives_the_documents_before_the_cut(tmp_path, ending):
    rows = "".join(json.dumps({"text": os.urandom(50).hex()}) + "\n" for _ in range(2000))
    data = COMPRESS[ending](rows.encode())
    path = write(tmp_path / f"x.jsonl{ending}", data[: len(data) * 3 // 4])
    found, _ = rows_of(path)
    *before, last = found
    assert (len(before) > 100 or ending == ".bz2") and all(isinstance(r, Document) for r in before)
    after = f", after line {len(before)}" if before else ""
    assert str(last).startswith(f"{path}{after}: damaged, or not of the type in its name: ")
    empty = write(tmp_path / f"y.txt{ending}", b"")
    assert faults_of(empty) == [f"{empty}: damaged, or not of the type in its name: it is empty"]


def test_truncated_json_file_is_a_fault(tmp_path):
    data = gzip.compress(JSONL, mtime=0)
    for end, after in ((-4, ", after line 3"), (20, "")):
        path = write(tmp_path / "x.json.gz", data[:end])
        assert faults_of(tmp_path) == [
            f"{path}{after}: damaged, or not of the type in its name: "
            "Compressed file ended before the end-of-stream marker was reached"
        ]


def test_null_and_invalid_utf8_in_a_column_are_faults(tmp_path):
    path = tmp_path / "x.parquet"
    broken = pyarrow.array([b"a", None, b"\xe9", b"b"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": broken}), path)
    rows, _ = rows_of(path)
    assert [row.text for row in rows if isinstance(row, Document)] == ["a", "b"]
    null, byte = (str(row) for row in rows if isinstance(row, Fault))
    assert null == f"{path}, row 2: 'text' is of type NoneType, not text"
    assert byte.startswith(f"{path}, row 3: 'text' is not valid text: 'utf-8' codec can't decode")


def test_corrupt_page_loses_only_its_row_group(tmp_path):
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"text": [f"text {i} " * 20 for i in range(300)]})
    parquet.write_table(
        table, path, row_group_size=100, compression="none", use_dictionary=False,
        write_page_checksum=True,
    )  # fmt: skip
    data = bytearray(path.read_bytes())
    data[data.index(b"text 150 ")] ^= 1
    path.write_bytes(data)
    rows, _ = rows_of(path)
    assert [row.text for row in rows if isinstance(row, Document)] == [
        text for i, text in enumerate(table["text"].to_pylist()) if i // 100 != 1
    ]
    (fault,) = (row for row in rows if isinstance(row, Fault))
    assert str(fault).startswith(f"{path}, rows 101 to 200: damaged")
    assert fault.count == 100


@pytest.mark.parametrize(
    ("name", "package", "extra"), [("a.parquet", "pyarrow", "pyarrow"), ("a.txt.zst", "zstd", "b")]
)
def test_import_error_names_the_missing_package(tmp_path, monkeypatch, name, package, extra):
    write(tmp_path / name, COMPRESS[".zst"](b"a"))
    if package == "zstd":
        for module in ("backports", "backports.zstd", "compression", "compression.zstd"):
            monkeypatch.setitem(sys.modules, module, None)
    else:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'package {extra}.*: pip install "jaxllm\[data\]"'):
        list(documents.read(documents.find([tmp_path])[0]))


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("name", ["x.parquet", "x.data"])
def test_parquet_in_a_compressed_file_is_a_fault_with_a_hint(tmp_path, name, ending):
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ROWS}), buffer)
    path = write(tmp_path / f"{name}{ending}", COMPRESS[ending](buffer.getvalue()))
    assert faults_of(path) == [f"{path}: parquet in a compressed file; decompress it first"]
    path = write(tmp_path / f"plain.parquet{ending}", buffer.getvalue())  # only its name is wrong
    assert texts_of(path) == ROWS
