import dataclasses
import functools
import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxllm import data
from jaxllm.data import compression, shard_format, tokenize, tokenizer
from jaxllm.data.tokenizer import BYTES

TEXTS = ["a plain text\n", "", "naïve 日本 🙂", "x" * 50, "line\none", "the last of all"]
END = [BYTES.end_of_text]
# The end-of-text id precedes each document.
STREAM = [i for text in TEXTS for i in (*END, *text.encode())]


@pytest.fixture
def corpus(tmp_path):
    """The texts in files of several formats, in the order of their names."""
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXTS[0])
    lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS[1:4])]
    (folder / "b" / "1.jsonl").write_text("\n".join(lines[:2]) + "\n\n")
    with gzip.open(folder / "b" / "2.jsonl.gz", "wt") as file:
        file.write(lines[2])
    parquet.write_table(
        pyarrow.table({"id": [1, 2], "text": TEXTS[4:]}), folder / "c.parquet", row_group_size=1
    )
    (folder / "ignored.bin").write_bytes(b"\xff")
    return folder


def make(out, corpus, **options):
    options = {"tokenizer": "bytes", "shard_tokens": 40, "val_tokens": 15, "workers": 0} | options
    return tokenize.tokenize(out, [corpus], **options)


def contents(out):
    in_order = sorted(out.glob("*.bin"), key=lambda path: path.stem.rpartition("_")[2])
    return {path.name: data.read_shard(path).tolist() for path in in_order}


def stream(out):
    return list(itertools.chain.from_iterable(contents(out).values()))


def test_all_formats_are_tokenized_into_shards_of_equal_length(tmp_path, corpus):
    progress = make(tmp_path / "out", corpus)
    found = contents(tmp_path / "out")
    assert [len(shard) for shard in found.values()] == [15, 40, 40, len(STREAM) - 95]
    assert list(found) == ["val_000000.bin", *(f"train_00000{i}.bin" for i in (1, 2, 3))]
    assert stream(tmp_path / "out") == STREAM
    assert progress.finished and progress.tokens == len(STREAM) and progress.shards == 4


@pytest.mark.parametrize("options", [{"workers": 2}, {"val_tokens": 0}, {"shard_tokens": 1000}])
def test_token_order_does_not_depend_on_shards_or_workers(tmp_path, corpus, options, monkeypatch):
    monkeypatch.setattr(tokenize, "BATCH_CHARACTERS", 20)
    make(tmp_path / "out", corpus, **options)
    assert stream(tmp_path / "out") == STREAM


@pytest.mark.parametrize("shards", [0, 1, 2, 3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_stopped_run_resumes(tmp_path, corpus, shards, when, monkeypatch):
    """The run stops before a shard is written, or between the shard and progress.json."""
    make(tmp_path / "whole", corpus)
    written = []

    def write_and_stop(path, tokens, **options):
        written.append(path)
        if len(written) <= shards or when == "after":
            shard_format.write_shard(path, tokens, **options)
        if len(written) > shards:
            raise KeyboardInterrupt

    monkeypatch.setattr(tokenize, "write_shard", write_and_stop)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", corpus)
    encoded = []
    monkeypatch.setattr(tokenize, "write_shard", shard_format.write_shard)
    plain = tokenize._encode
    monkeypatch.setattr(
        tokenize, "_encode", lambda t, texts: encoded.extend(texts) or plain(t, texts)
    )
    make(tmp_path / "out", corpus)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert len(encoded) < len(TEXTS) or shards == 0  # finished documents are not encoded again
    encoded.clear()
    assert make(tmp_path / "out", corpus).finished
    assert not encoded


def test_large_vocabulary_makes_four_byte_shards(tmp_path, corpus, monkeypatch):
    wide = BYTES.__class__(
        name="wide",
        vocab_size=100_000,
        end_of_text=99_999,
        encode=lambda text: BYTES.encode(text).astype(np.uint32) + 70_000,
        decode=BYTES.decode,
    )
    monkeypatch.setattr(tokenize, "load", lambda *_, **__: wide)
    make(tmp_path / "out", corpus)
    tokens = data.open_dataset(tmp_path / "out" / "val*.bin").shards[0]
    assert tokens.dtype == np.uint32
    assert tokens[:3].tolist() == [99_999, 70_000 + ord("a"), 70_000 + ord(" ")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_tokens": 0}, "shard_tokens is 0"),
        ({"val_tokens": -1}, "val_tokens is -1"),
        ({"skip_bad": -1}, "skip_bad is -1"),
        ({"workers": -1}, "workers is -1; it must be at least 0"),
        ({"end_of_text": "</s>"}, r"end_of_text is '</s>'; that of bytes is '<\|endoftext\|>'"),
        ({"val_tokens": 1000}, f"corpus has {len(STREAM)} tokens, and val_tokens is 1000"),
        ({"val_tokens": len(STREAM)}, f"corpus has {len(STREAM)} tokens, and val_tokens is"),
        ({"key": "body"}, "1.jsonl, line 1: not an object with 'body'"),
    ],
)
def test_invalid_options_are_rejected(tmp_path, corpus, options, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "out", corpus, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_tokens": 50.0}, "shard_tokens is 50.0; it must be an integer"),
        ({"val_tokens": "10"}, "val_tokens is '10'; it must be an integer"),
        ({"skip_bad": 0.5}, "skip_bad is 0.5; it must be an integer"),
        ({"workers": "2"}, "workers is '2'; it must be an integer"),
        ({"key": None}, "key is None; it must be a string"),
        ({"tokenizer": None}, "tokenizer is None; it must be the name of one, or a path"),
    ],
)
def test_options_of_another_type_are_rejected_first(tmp_path, corpus, options, message):
    with pytest.raises(TypeError, match=message):
        make(tmp_path / "out", corpus, **options)
    assert not (tmp_path / "out").exists()


def test_numbers_of_numpy_and_a_tokenizer_by_path_are_accepted(tmp_path, corpus):
    options = {"shard_tokens": np.int64(50), "val_tokens": np.int32(10), "skip_bad": np.uint8(0)}
    found = make(tmp_path / "out", corpus, tokenizer=Path("bytes"), workers=np.int64(0), **options)
    assert found.recipe["tokenizer"] == "bytes" and found.finished


@pytest.mark.parametrize("changed", ["files_digest", "tokenizer_digest"])
def test_files_of_equal_size_but_other_contents_are_noticed(tmp_path, corpus, changed):
    vocabulary = Path(tmp_path, "tokenizer.json")
    tokens = {name: i for i, name in enumerate([*map(chr, range(97, 123)), "<|endoftext|>"])}
    model = {"type": "BPE", "vocab": tokens, "merges": []}
    vocabulary.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    make(tmp_path / "out", corpus, tokenizer=tmp_path)
    path = vocabulary if changed == "tokenizer_digest" else corpus / "a.txt"
    path.write_text(path.read_text().replace("a", "?"))
    with pytest.raises(FileExistsError, match=f"has shards with {changed} '.*', and now it is"):
        make(tmp_path / "out", corpus, tokenizer=tmp_path)
    progress = json.loads(Path(tmp_path, "out", "progress.json").read_text())
    del progress["recipe"][changed]  # as of an older run
    Path(tmp_path, "out", "progress.json").write_text(json.dumps(progress))
    assert make(tmp_path / "out", corpus, tokenizer=tmp_path).finished


def test_failed_run_without_shards_does_not_fix_the_recipe(tmp_path, corpus):
    for wrong in ({"val_tokens": 1000}, {"key": "body"}):
        with pytest.raises(ValueError):
            make(tmp_path / "out", corpus, **wrong)
    assert make(tmp_path / "out", corpus).tokens == len(STREAM)


@pytest.mark.parametrize(
    "content",
    ["{", '{"foo": 1}', "[]", "3", '{"recipe": 3}', '{"recipe": {}, "tokens": "x"}', 10_000 * "["],
    ids=["cut", "other", "list", "number", "recipe", "tokens", "deep"],
)
def test_damaged_progress_is_rejected(tmp_path, corpus, content):
    make(tmp_path / "out", corpus)
    (tmp_path / "out" / "progress.json").write_text(content)
    with pytest.raises(ValueError, match=r"progress\.json: damaged"):
        make(tmp_path / "out", corpus)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt.gz", b"hi", r"x\.txt\.gz: damaged, or not of the type in its name"),
        ("x.txt.gz", gzip.compress(b"a text", mtime=0)[:-4], r"x\.txt\.gz: damaged"),
        (
            "x.jsonl.gz",
            gzip.compress(b'{"text": "a"}', mtime=0)[:-12] + b"\xff" * 12,
            "x.jsonl.gz: damaged",
        ),
        ("x.parquet", b"", r"x\.parquet: damaged"),
        ("x.parquet", b"hi there, no table", r"x\.parquet: damaged"),
        ("x.jsonl", '{"text": "\\ud800"}', "line 1: 'text' is not valid text: .*surrogates"),
        ("x.jsonl", '{"text": 5}', "line 1: 'text' is of type int, not text"),
        ("x.jsonl", '{"text": null}', "line 1: 'text' is of type NoneType, not text"),
        ("x.jsonl", '{"text": ' + 10_000 * "[", "line 1: JSON is nested too deeply"),
        ("x.jsonl", '{"text": "a"}\n{"text": ', "line 2: not an object with 'text'"),
        ("x.jsonl", "[1]", "line 1: not an object with 'text'"),
        ("x.txt", b"\xe9", "x.txt: not UTF-8"),
    ],
)
def test_invalid_files_are_rejected(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "out", path)


def test_parquet_without_a_text_column_is_rejected(tmp_path):
    for column, message in (
        ("body", "no column 'text'; there are body"),
        ("text", "is of type int"),
    ):
        parquet.write_table(pyarrow.table({column: [1]}), tmp_path / "x.parquet")
        with pytest.raises(ValueError, match=message):
            make(tmp_path / "out", tmp_path / "x.parquet")


def test_folder_with_other_shards_is_rejected(tmp_path, corpus):
    make(tmp_path / "out", corpus)
    with pytest.raises(FileExistsError, match="has shards with shard_tokens 40, and now it is 41"):
        make(tmp_path / "out", corpus, shard_tokens=41)
    (corpus / "a.txt").write_text("longer than before")
    with pytest.raises(FileExistsError, match="has shards with files"):
        make(tmp_path / "out", corpus)
    (tmp_path / "out" / "progress.json").unlink()
    with pytest.raises(FileExistsError, match=r"has shards and no progress.json"):
        make(tmp_path / "out", corpus)
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such"):
        make(tmp_path / "other", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"empty: no file found with an ending of \.md, \.py"
    ):
        make(tmp_path / "other", tmp_path / "empty")
    assert not (tmp_path / "other").exists()


@pytest.fixture
def mixed(tmp_path):
    """A folder of good and bad documents, the good ones' numbers, and the faults' reasons."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    good = [json.dumps({"text": f"text {i}"}).encode() for i in range(4)]
    lines = [good[0], b'{"text": null}', good[1], b'{"text": "\xe9"}', good[2], good[3]]
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(good[0] + b"\n")[:-4])
    reasons = [
        f"{folder}/a.jsonl, line 2: 'text' is of type NoneType, not text",
        f"{folder}/a.jsonl, line 4: not an object with 'text': ",
        f"{folder}/b.jsonl.gz, after line 1: damaged, or not of the type in its name: ",
    ]
    return folder, [0, 1, 2, 3, 0], reasons


@pytest.mark.parametrize("workers", [0, 1])
def test_skip_bad_limits_the_skipped_documents(tmp_path, mixed, workers):
    folder, numbers, reasons = mixed
    options = {"val_tokens": 0, "shard_tokens": 10, "workers": workers}
    for allowed, reason in enumerate([] if workers else reasons):
        count = f"bad documents so far: {allowed + 1}; skip_bad, --skip-bad, is {allowed}"
        with pytest.raises(ValueError, match=rf"^{reason}.*{count}"):
            make(tmp_path / "out", folder, skip_bad=allowed, **options)
    progress = make(tmp_path / "out", folder, skip_bad=3, **options)
    expected = [i for number in numbers for i in (*END, *f"text {number}".encode())]
    assert stream(tmp_path / "out") == expected
    assert progress.bad == 3 and len(progress.skipped) == 3
    assert all(map(str.startswith, progress.skipped, reasons))
    assert str(progress).startswith(
        "2 files, 5 documents, 35 tokens in 4 shards\nskipped 3 bad doc"
    )
    assert make(tmp_path / "out", folder, skip_bad=3, **options) == progress


def test_resumed_run_counts_skipped_documents_once(tmp_path, mixed, monkeypatch):
    folder, _, _ = mixed
    options = {"val_tokens": 0, "shard_tokens": 10}
    whole = make(tmp_path / "whole", folder, skip_bad=3, **options)
    for stop in range(1, 5):
        written = []

        def write_and_stop(path, tokens, *, stop=stop, written=written, **kind):
            shard_format.write_shard(path, tokens, **kind)
            written.append(path)
            if len(written) == stop:
                raise KeyboardInterrupt

        out = tmp_path / f"stopped {stop}"
        with monkeypatch.context() as patch:
            patch.setattr(tokenize, "write_shard", write_and_stop)
            with pytest.raises(KeyboardInterrupt):
                make(out, folder, skip_bad=3, **options)
        assert make(out, folder, skip_bad=3, **options) == whole
        assert contents(out) == contents(tmp_path / "whole")


class Panic(BaseException):
    """An exception like those of Rust packages, which cannot be pickled."""

    def __reduce__(self):
        raise TypeError("cannot pickle")


Panic.__name__ = "PanicException"


def panic_on_b(text):
    """Encodes a text, unless it begins with a b."""
    if text.startswith("b"):
        raise Panic("at the disco")
    return BYTES.encode(text)


@pytest.mark.parametrize("workers", [0, 1])
def test_untokenizable_document_is_a_fault(tmp_path, monkeypatch, workers):
    fragile = BYTES.__class__(
        name="fragile",
        vocab_size=257,
        end_of_text=256,
        encode=functools.partial(tokenizer._call_rust, panic_on_b),
        decode=BYTES.decode,
    )
    monkeypatch.setattr(tokenize, "load", lambda *_, **__: fragile)
    (tmp_path / "x.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in "abc"))
    options = {"workers": workers, "val_tokens": 0}
    reason = "line 2: cannot be tokenized: the tokenizer package panicked: at the disco"
    if not workers:
        with pytest.raises(ValueError, match=rf"x\.jsonl, {reason}"):
            make(tmp_path / "out", tmp_path / "x.jsonl", **options)
    (skipped,) = make(tmp_path / "out", tmp_path / "x.jsonl", skip_bad=1, **options).skipped
    assert skipped == f"{tmp_path}/x.jsonl, {reason}"
    assert stream(tmp_path / "out") == [256, ord("a"), 256, ord("c")]


def die(text):
    """Ends the process, as the kernel does when memory runs out."""
    os._exit(9)


def test_dead_worker_error_names_its_documents(tmp_path, monkeypatch):
    deadly = dataclasses.replace(BYTES, encode=die)
    monkeypatch.setattr(tokenize, "load", lambda *_, **__: deadly)
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    with pytest.raises(
        ChildProcessError, match=f"from {path}, line 1 to {path}, line 2; if memory"
    ):
        make(tmp_path / "out", path, workers=1, val_tokens=0)


def test_every_file_of_a_folder_is_read_or_reported(tmp_path, capsys):
    """No file is left out silently, and no JSON file is read as one raw text."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.zst").write_bytes(compression._zstd().compress(lines))
    (folder / "c.json.gz").write_bytes(gzip.compress(lines))
    (folder / "notes.rst").write_text("notes")
    (folder / "broken.jsonl").write_bytes(lines + b"[]\n")
    out = str(tmp_path / "out")
    arguments = [str(folder), "--tokenizer", "bytes", "--val-tokens", "0", "--workers", "0"]
    tokenize.main([out, *arguments, "--skip-bad", "1"])
    assert stream(tmp_path / "out") == STREAM * 4
    printed = capsys.readouterr()
    reason = "text with an unknown ending; pass the file itself, or --format text"
    assert f"left out: {folder}/notes.rst: {reason}\n" in printed.err
    assert printed.out.splitlines() == [
        f"{out}: 4 files, 24 documents, {len(STREAM) * 4} tokens in 1 shards",
        "skipped 1 bad documents:",
        f"  {folder}/broken.jsonl, line 7: not an object with 'text'",
        "left out 1 files:",
        f"  {folder}/notes.rst: {reason}",
    ]
    with pytest.raises(SystemExit):
        tokenize.main([str(tmp_path / "other"), *arguments])
    assert "broken.jsonl, line 7: not an object with 'text' (bad" in capsys.readouterr().err


def test_empty_corpus_is_an_error(tmp_path):
    path = tmp_path / "x.jsonl"
    for content in ("", "\n", '{"text": 1}'):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"x\.jsonl: no documents found in 1 files"):
            make(tmp_path / "out", path, val_tokens=0, skip_bad=1)


def test_summary_shortens_long_lists():
    progress = tokenize.Progress({}, left_out=[f"file {i}" for i in range(25)])
    assert str(progress).splitlines()[-2:] == ["  file 19", "  and 5 more, in progress.json"]


def test_import_error_names_the_missing_package(tmp_path, corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r'pyarrow: pip install "jaxllm\[data\]"'):
        make(tmp_path / "out", corpus / "c.parquet")


def test_command_line_tokenizes_a_corpus(tmp_path, corpus, capsys):
    arguments = [str(tmp_path / "out"), str(corpus), "--tokenizer", "bytes", "--val-tokens", "9"]
    command = [sys.executable, "-m", "jaxllm.data.tokenize", *arguments, "--workers", "1"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    summary = f"out: 4 files, 6 documents, {len(STREAM)} tokens in 2 shards\nleft out 1 files:\n"
    assert summary in run.stdout
    assert "left out: " in run.stderr and "ignored.bin: not text, JSON or parquet" in run.stderr
    assert "100%" in run.stderr
    with pytest.raises(SystemExit) as caught:
        tokenize.main([*arguments, "--shard-tokens", "7"])
    assert caught.value.code == 2
    assert "now it is 7" in capsys.readouterr().err.splitlines()[-1]
