import dataclasses
import functools
import gzip
import os
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import data
from jaxllm.data import documents, shards
from jaxllm.data.files import new_folder
from jaxllm.data.tokenize import tokenize
from jaxllm.data.tokenizer import BYTES


@pytest.fixture
def dataset(tmp_path):
    """Three shards of distinct tokens, with 4, 0 and 7 windows of 8 tokens."""
    tokens = np.arange(101)
    data.write_shard(tmp_path / "a_train.bin", tokens[:36])
    data.write_shard(tmp_path / "b_train.bin", tokens[36:44])
    data.write_shard(tmp_path / "c_train.bin", tokens[44:])
    return data.open_dataset(tmp_path / "*.bin")


def test_missing_shards_are_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such shard"):
        data.read_shard(tmp_path / "nowhere.bin")
    with pytest.raises(FileNotFoundError, match="no shards found"):
        data.open_dataset(tmp_path / "*.bin")
    with pytest.raises(FileNotFoundError, match="no shards found"):
        data.open_dataset([])


def test_batch_labels_are_tokens_shifted_by_one(dataset):
    tokens, labels = data.batch(dataset, 5, 8, seed=3, step=0)
    assert tokens.dtype == labels.dtype == np.int32
    assert tokens.shape == labels.shape == (5, 8)
    # The corpus counts upwards, and no window crosses shards.
    assert np.array_equal(tokens + 1, labels)
    assert np.array_equal(tokens, tokens[:, :1] + np.arange(8))
    starts = {*range(0, 32, 8), *range(44, 100, 8)}
    assert {int(first) for first in tokens[:, 0]} <= starts


@pytest.mark.parametrize(
    ("change", "is_noticed"),
    [
        (lambda first, second: (first.astype(np.uint32), second), False),
        (lambda first, second: (second, first), True),
        (lambda first, second: (np.concatenate([first, second]),), True),
        (lambda first, second: (first, second, second[:0]), True),
        (lambda first, second: (first, np.append(second[:-1], 7)), True),
    ],
    ids=["dtype", "order", "joined", "empty", "last token"],
)
def test_digest_depends_on_the_tokens_and_the_lengths_of_the_shards(change, is_noticed):
    shards = np.arange(40000, dtype=np.uint16), np.arange(99, dtype=np.uint16)
    found = data.Dataset(change(*shards)).digest
    assert (found != data.Dataset(shards).digest) == is_noticed


@pytest.mark.parametrize("batch_size", [1, 3, 11, 25])
def test_epoch_visits_every_window_once(dataset, batch_size):
    windows = data.num_windows(dataset, 8)
    assert windows == 11
    drawn = np.concatenate(
        [
            data.batch(dataset, batch_size, 8, seed=1, step=step)[0][:, 0]
            for step in range(3 * windows)
        ]
    )
    epochs = drawn[: len(drawn) // windows * windows].reshape(-1, windows)
    every = [*range(0, 32, 8), *range(44, 100, 8)]
    assert all(sorted(epoch) == every for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])


def test_seeds_give_different_orders(dataset):
    first, second = (data.batch(dataset, 11, 8, seed=seed, step=0)[0] for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_batch_depends_only_on_seed_and_step(dataset):
    expected = data.batch(dataset, 3, 8, seed=5, step=9)
    for step in range(8):  # other calls must have no effect
        data.batch(dataset, 3, 8, seed=step, step=step)
    code = (
        "import sys; from jaxllm import data; d = data.open_dataset(sys.argv[1:]);"
        "print(data.batch(d, 3, 8, seed=5, step=9)[0].tolist())"
    )
    paths = [str(shard.filename) for shard in dataset.shards]
    fresh = subprocess.run(
        [sys.executable, "-c", code, *paths], capture_output=True, text=True, check=True
    )
    assert fresh.stdout.strip() == str(expected[0].tolist())
    again = data.batch(dataset, 3, 8, seed=5, step=9)
    assert all(np.array_equal(a, b) for a, b in zip(again, expected, strict=True))


def test_short_corpus_is_an_error(dataset):
    assert data.num_windows(dataset, 56) == 1
    assert data.batch(dataset, 1, 56, seed=0, step=0)[0][0, 0] == 44
    with pytest.raises(ValueError, match="57 tokens; one window of 57 needs 58"):
        data.batch(dataset, 1, 57, seed=0, step=0)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"seq_len": 0}, {"seed": -1}, {"step": -1}], ids=str
)
def test_batch_rejects_out_of_range_arguments(dataset, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        data.batch(dataset, **{"batch_size": 1, "seq_len": 8, "seed": 0, "step": 0, **wrong})


@pytest.mark.parametrize("integer", [np.int32, np.array, jnp.int32])
def test_batches_accept_integers_of_numpy_and_jax(dataset, integer):
    step, batch_size = 2**20, 2**12  # together beyond int32
    found = data.batch(dataset, integer(batch_size), 8, seed=integer(1), step=integer(step))
    expected = data.batch(dataset, batch_size, 8, seed=1, step=step)
    np.testing.assert_array_equal(found, expected)
    ranks: dict[str, Any] = {"index": 2**31 - 1, "rank": 1, "ranks": 2}
    converted: dict[str, Any] = {name: integer(value) for name, value in ranks.items()}
    found = data.batch_in_order(dataset, 2, 8, **converted)
    expected = data.batch_in_order(dataset, 2, 8, **ranks)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["batch_size", "seq_len", "seed", "step"])
def test_batch_names_the_argument_that_is_not_an_integer(dataset, name):
    right: dict[str, Any] = {"batch_size": 1, "seq_len": 8, "seed": 0, "step": 0}
    right[name] = 1.5
    with pytest.raises(TypeError, match=rf"{name} is 1\.5; it must be an integer"):
        data.batch(dataset, **right)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"index": 0.0}, TypeError, r"index is 0\.0; it must be an integer"),
        ({"rank": 0.0}, TypeError, r"rank is 0\.0; it must be an integer"),
        ({"ranks": "2"}, TypeError, "ranks is '2'; it must be an integer"),
        ({"ranks": 0}, ValueError, "ranks is 0; it must be at least 1"),
        ({"rank": 1}, ValueError, "rank is 1; it must be at least 0 and less than ranks, 1"),
    ],
)
def test_batch_in_order_names_the_argument_that_does_not_fit(dataset, wrong, error, message):
    with pytest.raises(error, match=message):
        data.batch_in_order(dataset, 1, 8, **{"index": 0, **wrong})


@pytest.mark.parametrize("value", ["False", None, 1.0, [True]], ids=str)
def test_flags_that_are_no_bools_are_rejected(tmp_path, dataset, value):
    flag: dict[str, Any] = {"end_of_text": 1, "ignore_next_document": value}
    with pytest.raises(TypeError, match=r"ignore_next_document has .*; it must be a bool"):
        data.batch(dataset, 1, 8, seed=0, step=0, **flag)
    with pytest.raises(TypeError, match=r"ignore_next_document has .*; it must be a bool"):
        data.batch_in_order(dataset, 1, 8, index=0, **flag)
    with pytest.raises(TypeError, match=r"show_progress has .*; it must be a bool"):
        tokenize(tmp_path / "new", [tmp_path], tokenizer="bytes", show_progress=value)
    with pytest.raises(TypeError, match=r"overwrite has .*; it must be a bool"):
        new_folder(tmp_path / "new", overwrite=value).__enter__()
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": [0, 1]}, r"rows is \[0, 1\]; it must be a range"),
        ({"end_of_text": 1.5}, r"end_of_text is 1\.5; it must be an integer"),
        ({"end_of_text": "1"}, "end_of_text is '1'; it must be an integer"),
    ],
)
def test_rows_and_end_of_text_of_another_type_are_rejected(dataset, wrong, message):
    with pytest.raises(TypeError, match=message):
        data.batch(dataset, 2, 8, seed=0, step=0, **wrong)
    with pytest.raises(TypeError, match=message):
        data.batch_in_order(dataset, 2, 8, index=0, **wrong)


@pytest.mark.parametrize(
    ("token", "error", "message"),
    [
        (2**32 + 5, ValueError, "has token 4294967301; the largest in a batch"),
        (-1, ValueError, "has token -1; a token is at least 0"),
        (0.5, TypeError, "has dtype float64; its shards must have integers"),
    ],
)
def test_tokens_that_int32_would_change_are_rejected(token, error, message):
    dataset = data.Dataset((np.full(20, token), np.arange(20, dtype=np.uint16)))
    with pytest.raises(error, match=message):
        data.batch(dataset, 4, 8, seed=0, step=0)
    with pytest.raises(error, match=message):
        data.batch_in_order(dataset, 2, 8, index=0)


def test_batches_are_read_from_shards_of_any_integer_dtypes():
    """NumPy would promote uint64 and int64 to float64."""
    shards = np.arange(9, dtype=np.uint64), np.arange(9, dtype=np.int64)
    tokens, labels = data.batch(data.Dataset(shards), 2, 8, seed=0, step=0)
    assert tokens.dtype == labels.dtype == np.int32
    assert tokens.tolist() == 2 * [list(range(8))]
    assert labels.tolist() == 2 * [list(range(1, 9))]


def test_shards_may_come_from_an_iterator(tmp_path):
    for name in "ab":
        data.write_shard(tmp_path / f"{name}.bin", [1, 2, 3])
    assert data.open_dataset(tmp_path.glob("*.bin")).num_tokens == 6


@pytest.fixture
def texts(tmp_path):
    root = tmp_path / "texts"
    for name in ("b/2.txt", "b/1.py", "a.md", "z.txt", "skipped/x.txt", ".hidden.txt", "no.bin"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (root / "latin.txt").write_bytes(b"\xe9t\xe9")
    (root / "link.txt").symlink_to("nothing")
    return root


def test_build_writes_shards_of_equal_length(tmp_path, texts):
    out = tmp_path / "out" / "shards"
    summary = data.build(out, [texts], skip=["skip*"], val_fraction=0.25, shard_tokens=8)
    train = data.open_dataset(out / "train_*.bin")
    val = data.open_dataset(out / "val_*.bin")
    assert [len(shard) for shard in train.shards] == [8, 8, 4]
    end = [BYTES.end_of_text]
    documents = ["a.md", "b/1.py", "b/2.txt"]  # sorted; every fourth is held out
    expected = [i for name in documents for i in (*BYTES.encode(name), *end)]
    assert np.concatenate(train.shards).tolist() == expected
    assert np.concatenate(val.shards).tolist() == [*BYTES.encode("z.txt"), *end]
    assert (summary.files, summary.tokens) == ((3, 1), (20, 6))
    assert summary.skipped == (texts / "latin.txt",)
    assert [path.name for path in out.parent.iterdir()] == ["shards"]  # no temporary folder left


def test_build_reads_compressed_files(tmp_path):
    for name, data_ in (
        ("a.txt.gz", gzip.compress(b"one", mtime=0)),
        ("b.TXT", b"\xef\xbb\xbftwo"),
    ):
        (tmp_path / name).write_bytes(data_)
    data.build(tmp_path / "out", [tmp_path], val_fraction=0)
    assert data.read_shard(tmp_path / "out" / "train_000000.bin").tolist() == [
        i for text in (b"one", b"two") for i in (*text, BYTES.end_of_text)
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"\xe9", "x.txt: not UTF-8"),
        (
            "x.txt.gz",
            gzip.compress(b"text", mtime=0)[:-4],
            "x.txt.gz: damaged, or not of the type in its name",
        ),
        (
            "x.jsonl.gz",
            gzip.compress(b'{"text": "a"}', mtime=0),
            r"\.jsonl files hold rows of documents.*to --extensions",
        ),
        ("x.parquet", b"PAR1", r"x\.parquet: \.parquet files hold rows"),
    ],
)
def test_build_rejects_unreadable_files_in_paths(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.build(tmp_path / "out", [tmp_path / name])
    if "rows" in message and name != "x.parquet":  # accepted as one text
        data.build(tmp_path / "out", [tmp_path / name], extensions=[".jsonl"])


def test_unreadable_folder_is_an_error(tmp_path, texts, monkeypatch):
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("skipped"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="skipped: cannot be opened: Permission denied"):
        data.build(tmp_path / "out", [texts])


def test_build_is_deterministic(tmp_path, texts):
    for name in ("one", "two"):
        data.build(tmp_path / name, [texts, texts / "a.md"])
    files = [sorted((tmp_path / name).iterdir()) for name in ("one", "two")]
    assert [path.name for path in files[0]] == ["train_000000.bin", "val_000000.bin"]
    for one, two in zip(*files, strict=True):
        assert one.read_bytes() == two.read_bytes()


@pytest.mark.parametrize("count", [2, 3, 49, 98, 103])
def test_build_holds_out_at_least_one_file(tmp_path, count):
    for i in range(count):
        (tmp_path / f"{i:03}.txt").write_text(str(i))
    summary = data.build(tmp_path / "out", sorted(tmp_path.glob("*.txt")), val_fraction=1e-3)
    assert summary.files == (count - 1, 1)


@pytest.mark.parametrize("split", ["train", "val"])
def test_open_split_rejects_a_shard_of_both_splits(tmp_path, split):
    data.write_shard(tmp_path / "pretrain_val.bin", np.arange(9))
    with pytest.raises(ValueError, match=r"pretrain_val\.bin: a shard of both splits by its name"):
        data.open_split(tmp_path, split)


@pytest.mark.parametrize(
    ("shards", "error", "message"),
    [
        (([1, 2, 3],), TypeError, r"shards\[0\] has type list; it must be an array"),
        (np.arange(9), ValueError, r"shards\[0\] has shape \(\); it must have one axis"),
        ((np.zeros((2, 3), int),), ValueError, r"shards\[0\] has shape \(2, 3\); it must have one"),
    ],
)
def test_dataset_rejects_shards_that_are_no_vectors(shards, error, message):
    with pytest.raises(error, match=message):
        data.Dataset(shards)


@pytest.mark.parametrize(("token", "position"), [(-1, 2), (9, 0)])
def test_check_vocabulary_names_the_first_token_outside(token, position):
    tokens = np.arange(4)
    tokens[position] = token
    dataset = data.Dataset((np.arange(3), tokens), "two shards")
    message = (
        f"two shards has token {token}, but the model has 9; the first that it has not is {token}, "
        f"at position {position} of shard 1"
    )
    with pytest.raises(ValueError, match=message):
        data.check_vocabulary(dataset, 9)


def test_open_split_escapes_glob_characters_in_the_folder(tmp_path):
    folder = tmp_path / "a[1]*"
    folder.mkdir()
    data.write_shard(folder / "my_val_0.bin", [5, 6, 7])
    data.write_shard(folder / "train.bin", [60, 61])
    val, train = (data.open_split(folder, split) for split in ("val", "train"))
    assert (val.num_tokens, train.num_tokens) == (3, 2)
    data.check_vocabulary(val, 8)
    with pytest.raises(ValueError, match=r"val.* has token 7, but the model has 7"):
        data.check_vocabulary(val, 7)
    with pytest.raises(FileNotFoundError, match="no shards found"):
        data.open_split(folder, "test")


def test_val_fraction_0_holds_out_no_file(tmp_path, texts):
    summary = data.build(tmp_path / "out", [texts], val_fraction=0)
    assert summary.files == (5, 0)
    assert not list((tmp_path / "out").glob("val*"))


def test_failed_build_leaves_no_files(tmp_path, texts, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(shards, "write_shard", fail)
    with pytest.raises(OSError, match="disk full"):
        data.build(tmp_path / "out", [texts])
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def test_standard_library_corpus_is_built_once(tmp_path, monkeypatch):
    paths = data.find_texts([data.standard_library()], (".py",), data.STANDARD_LIBRARY_SKIP)
    names = {path.relative_to(data.standard_library()).as_posix() for path in paths}
    assert {"ast.py", "json/decoder.py", "email/message.py"} <= names
    assert not any("site-packages" in name or "/test" in name for name in names)

    part = data.standard_library() / "json"  # for speed
    monkeypatch.setattr(shards, "standard_library", lambda: part)
    folder = data.ensure_standard_library(tmp_path / "data" / "stdlib")
    before = (folder / "train_000000.bin").stat().st_mtime_ns
    assert data.ensure_standard_library(folder) == folder
    assert (folder / "train_000000.bin").stat().st_mtime_ns == before


def test_command_line_builds_shards(tmp_path, texts, capsys):
    out = tmp_path / "out"
    shards.main([str(out), str(texts), "--extensions", ".txt,", "--skip", "no, skip*"])
    printed = capsys.readouterr().out
    assert "train" in printed and "val" in printed and "latin.txt" in printed
    assert data.open_dataset(out / "*.bin").num_tokens == len("b/2.txt") + len("z.txt") + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["new", "nowhere"], "nowhere: there is no such file or folder"),
        (["texts", "texts"], "exists already"),
        (["new", "texts", "--extensions", ".rst"], "no text found"),
        (["new", "texts", "--val-fraction", "1"], "val_fraction is 1.0"),
        (["new", "texts", "--shard-tokens", "0"], "shard_tokens is 0"),
        (["new"], "PATH"),
    ],
)
def test_command_line_reports_misuse_in_one_line(texts, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(texts.parent)
    with pytest.raises(SystemExit) as caught:
        shards.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (texts.parent / "new").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"paths": "texts"}, r"paths is 'texts'; it must be a list, such as \['texts'\]"),
        ({"extensions": ".py"}, "extensions is '.py'; it must be a list"),
        ({"skip": "no*"}, r"skip is 'no\*'; it must be a list"),
        ({"val_fraction": "0.1"}, "val_fraction is '0.1'; it must be a number"),
        ({"shard_tokens": 1e8}, "shard_tokens is 100000000.0; it must be an integer"),
        ({"tokenizer": "bytes"}, "tokenizer is 'bytes'; it must be a Tokenizer"),
    ],
)
def test_build_names_the_argument_of_another_type(texts, monkeypatch, wrong, message):
    monkeypatch.chdir(texts.parent)
    with pytest.raises(TypeError, match=message):
        data.build("new", **{"paths": [texts], **wrong})
    if wrong.keys() & {"paths", "extensions", "skip"}:
        with pytest.raises(TypeError, match=message):
            data.find_texts(**{"paths": [texts], **wrong})
    assert not (texts.parent / "new").exists()


def test_one_path_for_a_list_is_rejected_by_every_reader(texts):
    for read in (documents.find, functools.partial(tokenize, texts / "new")):
        with pytest.raises(TypeError, match=r"paths is .*; it must be a list"):
            read(texts)


def test_build_takes_numbers_of_numpy(tmp_path, texts):
    options: dict[str, Any] = {"val_fraction": np.float32(0.25), "shard_tokens": np.int8(8)}
    found = data.build(tmp_path / "new", [texts], **options)
    assert found.tokens == data.build(tmp_path / "other", [texts], val_fraction=0.25).tokens


def test_build_rejects_vocabularies_beyond_16_bits(tmp_path):
    (tmp_path / "text.txt").write_text("text")
    large = dataclasses.replace(BYTES, name="large", vocab_size=2**16 + 1)
    with pytest.raises(ValueError, match="tokenizer large has 65537 ids; a shard holds ids 0"):
        data.build(tmp_path / "new", [tmp_path / "text.txt"], tokenizer=large)
    assert not (tmp_path / "new").exists()
