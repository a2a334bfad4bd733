import gzip
import itertools
import json
import subprocess
import sys

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxllm import data, tokenize
from jaxllm.convert import llmc_shards
from jaxllm.tokenizer import BYTES

TEXTS = ["a plain text\n", "", "naïve 日本 🙂", "x" * 50, "line\none", "the last of all"]
END = [BYTES.end_of_text]
# Each document after the id that stands between two.
STREAM = [i for text in TEXTS for i in (*END, *text.encode())]


@pytest.fixture
def corpus(tmp_path):
    """The texts in files of every kind, whose names are in their order."""
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


def test_every_kind_of_file_and_shards_of_equal_length(tmp_path, corpus):
    progress = make(tmp_path / "out", corpus)
    found = contents(tmp_path / "out")
    assert [len(shard) for shard in found.values()] == [15, 40, 40, len(STREAM) - 95]
    assert list(found) == ["val_000000.bin", *(f"train_00000{i}.bin" for i in (1, 2, 3))]
    assert stream(tmp_path / "out") == STREAM
    assert progress.finished and progress.tokens == len(STREAM) and progress.shards == 4


@pytest.mark.parametrize("options", [{"workers": 2}, {"val_tokens": 0}, {"shard_tokens": 1000}])
def test_the_order_is_the_same_for_any_shards_and_workers(tmp_path, corpus, options, monkeypatch):
    monkeypatch.setattr(tokenize, "BATCH_CHARACTERS", 20)
    make(tmp_path / "out", corpus, **options)
    assert stream(tmp_path / "out") == STREAM


@pytest.mark.parametrize("shards", [0, 1, 2, 3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_that_was_stopped_goes_on(tmp_path, corpus, shards, when, monkeypatch):
    """Stopped while a shard is written, or between the shard and the note of it."""
    make(tmp_path / "whole", corpus)
    written = []

    def write_and_stop(path, tokens, **options):
        written.append(path)
        if len(written) <= shards or when == "after":
            llmc_shards.write_shard(path, tokens, **options)
        if len(written) > shards:
            raise KeyboardInterrupt

    monkeypatch.setattr(tokenize, "write_shard", write_and_stop)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", corpus)
    encoded = []
    monkeypatch.setattr(tokenize, "write_shard", llmc_shards.write_shard)
    plain = tokenize._encode
    monkeypatch.setattr(
        tokenize, "_encode", lambda t, texts: encoded.extend(texts) or plain(t, texts)
    )
    make(tmp_path / "out", corpus)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert len(encoded) < len(TEXTS) or shards == 0  # what is done is not done again
    encoded.clear()
    assert make(tmp_path / "out", corpus).finished
    assert not encoded


def test_a_large_vocabulary_makes_shards_of_four_bytes(tmp_path, corpus, monkeypatch):
    wide = BYTES.__class__(
        name="wide",
        vocab_size=100_000,
        end_of_text=99_999,
        encode=lambda text: BYTES.encode(text).astype(np.uint32) + 70_000,
        decode=BYTES.decode,
    )
    monkeypatch.setattr(tokenize, "load", lambda name: wide)
    make(tmp_path / "out", corpus)
    tokens = data.open_dataset(tmp_path / "out" / "val*.bin").shards[0]
    assert tokens.dtype == np.uint32
    assert tokens[:3].tolist() == [99_999, 70_000 + ord("a"), 70_000 + ord(" ")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard_tokens": 0}, "shard_tokens is 0"),
        ({"val_tokens": -1}, "val_tokens is -1"),
        ({"val_tokens": 1000}, f"corpus has {len(STREAM)} tokens, and val_tokens is 1000"),
        ({"val_tokens": len(STREAM)}, f"corpus has {len(STREAM)} tokens, and val_tokens is"),
        ({"key": "body"}, "1.jsonl, line 1: no object with 'body'"),
    ],
)
def test_misuse_is_refused(tmp_path, corpus, options, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "out", corpus, **options)


def test_a_call_that_made_no_shard_binds_no_other(tmp_path, corpus):
    for wrong in ({"val_tokens": 1000}, {"key": "body"}):
        with pytest.raises(ValueError):
            make(tmp_path / "out", corpus, **wrong)
    assert make(tmp_path / "out", corpus).tokens == len(STREAM)


@pytest.mark.parametrize("content", ["{", '{"foo": 1}', "[]"])
def test_a_damaged_progress_is_refused(tmp_path, corpus, content):
    make(tmp_path / "out", corpus)
    (tmp_path / "out" / "progress.json").write_text(content)
    with pytest.raises(ValueError, match=r"progress\.json: not as it was written"):
        make(tmp_path / "out", corpus)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt.gz", b"hi", r"x\.txt\.gz: damaged, or not what its name says"),
        ("x.txt.gz", gzip.compress(b"a text", mtime=0)[:-4], r"x\.txt\.gz: damaged"),
        (
            "x.jsonl.gz",
            gzip.compress(b'{"text": "a"}', mtime=0)[:-12] + b"\xff" * 12,
            "x.jsonl.gz: damaged",
        ),
        ("x.parquet", b"", r"x\.parquet: damaged"),
        ("x.parquet", b"hi there, no table", r"x\.parquet: damaged"),
        ("x.jsonl", '{"text": "\\ud800"}', "line 1: 'text' is no text: .*surrogates"),
        ("x.jsonl", '{"text": 5}', "line 1: 'text' holds int, no text"),
        ("x.jsonl", '{"text": "a"}\n{"text": ', "line 2: no object with 'text'"),
        ("x.jsonl", "[1]", "line 1: no object with 'text'"),
        ("x.txt", b"\xe9", "x.txt: not UTF-8"),
    ],
)
def test_files_that_are_not_what_they_should_be(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        make(tmp_path / "out", path)


def test_tables_without_the_column_are_refused(tmp_path):
    for column, message in (("body", "no column 'text'; there are body"), ("text", "holds int")):
        parquet.write_table(pyarrow.table({column: [1]}), tmp_path / "x.parquet")
        with pytest.raises(ValueError, match=message):
            make(tmp_path / "out", tmp_path / "x.parquet")


def test_a_folder_of_other_shards_is_refused(tmp_path, corpus):
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
    with pytest.raises(FileNotFoundError, match=r"empty: no file found that ends in \.md, \.py"):
        make(tmp_path / "other", tmp_path / "empty")
    assert not (tmp_path / "other").exists()


def test_packages_that_are_missing_are_named(tmp_path, corpus, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r'pyarrow: pip install "jaxllm\[data\]"'):
        make(tmp_path / "out", corpus / "c.parquet")


def test_the_command_line(tmp_path, corpus, capsys):
    arguments = [str(tmp_path / "out"), str(corpus), "--tokenizer", "bytes", "--val-tokens", "9"]
    command = [sys.executable, "-m", "jaxllm.tokenize", *arguments, "--workers", "1"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.endswith(f"out: 2 shards, {len(STREAM)} tokens\n")
    assert "100%" in run.stderr
    with pytest.raises(SystemExit) as caught:
        tokenize.main([*arguments, "--shard-tokens", "7"])
    assert caught.value.code == 2
    assert "now it is 7" in capsys.readouterr().err.splitlines()[-1]
