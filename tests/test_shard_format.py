"""The shard format, against files that are packed by hand."""

import struct

import numpy as np
import pytest

from jaxllm import data
from jaxllm.data.shard_format import read_shard, write_shard


def header(*words):
    return struct.pack("<256i", *words, *[0] * (256 - len(words)))


def gpt2_shard(tokens):
    return header(20240520, 1, len(tokens)) + struct.pack(f"<{len(tokens)}H", *tokens)


def llama_shard(tokens):
    return header(20240801, 7, len(tokens)) + struct.pack(f"<{len(tokens)}I", *tokens)


@pytest.mark.parametrize(
    ("kind", "build", "dtype", "tokens"),
    [
        ("gpt2", gpt2_shard, np.uint16, [0, 1, 50256, 65535]),
        ("llama3", llama_shard, np.uint32, [0, 1, 128_000, 2**31 - 1]),
        ("gpt2", gpt2_shard, np.uint16, []),
        ("llama3", llama_shard, np.uint32, []),
    ],
)
def test_shards_round_trip(tmp_path, kind, build, dtype, tokens):
    path, copy = tmp_path / "a.bin", tmp_path / "b.bin"
    path.write_bytes(build(tokens))
    found = read_shard(path)
    assert found.tolist() == tokens
    assert found.dtype == dtype
    write_shard(copy, found, kind=kind)
    assert copy.read_bytes() == path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "b.bin"]


@pytest.mark.parametrize(
    ("kind", "tokens", "message"),
    [
        ("gpt2", [-1], "spans -1 to -1"),
        ("gpt2", [65536], "kind gpt2 holds ids 0 to 65535"),
        ("llama3", [2**31], "kind llama3 holds ids 0 to 2147483647"),
        ("gpt3", [1], "kind is 'gpt3'; it must be one of gpt2, llama3"),
        ("gpt2", [[1, 2]], r"shape \(1, 2\); it must have one axis"),
    ],
)
def test_write_shard_rejects_invalid_tokens(tmp_path, kind, tokens, message):
    with pytest.raises(ValueError, match=message):
        write_shard(tmp_path / "shard.bin", tokens, kind=kind)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tokens", [[1.0, 2.0], [1.7, np.nan], [True, False]])
def test_write_shard_rejects_tokens_that_are_not_integers(tmp_path, tokens):
    with pytest.raises(TypeError, match=r"tokens has dtype .*; it must be an integer array"):
        write_shard(tmp_path / "shard.bin", tokens)
    assert not list(tmp_path.iterdir())


def test_batches_reject_tokens_beyond_int32(tmp_path):
    (tmp_path / "a.bin").write_bytes(llama_shard([5, 6, 7, 2**31 + 3, 8]))
    dataset = data.open_dataset([tmp_path / "a.bin"])
    assert data.batch_in_order(dataset, 1, 2, index=0)[0].tolist() == [[5, 6]]
    for read in (
        lambda: data.batch(dataset, 1, 4, seed=0, step=0),
        lambda: data.batch_in_order(dataset, 1, 4, index=0),
    ):
        with pytest.raises(
            ValueError, match=r"a\.bin has token 2147483651; the largest in a batch"
        ):
            read()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (header(20240326, 3, 0), "number 20240326; a token shard has 20240520 or 20240801"),
        (header(20240520, 7, 0), "version 7; .* 20240520 has version 1"),
        (header(20240801, 1, 0), "version 1; .* 20240801 has version 7"),
        (gpt2_shard(range(9))[:-1], "1041 bytes long; .* 9 tokens, so it must have 1042 bytes"),
        (gpt2_shard(range(9)) + b"\0", "1043 bytes long; .* 9 tokens, so it must have 1042 bytes"),
        (llama_shard(range(9))[:-4], "1056 bytes long; .* 9 tokens, so it must have 1060 bytes"),
        (
            header(20240801, 7, 2) + bytes(4),
            "1028 bytes long; .* must have 1032 bytes",
        ),
        (header(20240520, 1, 10), "1024 bytes long; .* 10 tokens, so it must have 1044 bytes"),
        (header(20240520, 1, -3), "1024 bytes long; .* -3 tokens"),
        (b"", "0 bytes long; a token shard begins with 1024"),
        (header(20240520)[:1023], "1023 bytes long"),
    ],
)
def test_read_shard_rejects_invalid_files(tmp_path, raw, message):
    path = tmp_path / "shard.bin"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=message) as caught:
        read_shard(path)
    assert str(caught.value).startswith(str(path))


def test_shards_are_mapped_with_64_bit_offsets(tmp_path):
    # 1.5 billion tokens of four bytes: 6 GB in a sparse file.
    count, path = 1_500_000_000, tmp_path / "large.bin"
    with path.open("wb") as file:
        file.write(header(20240801, 7, count))
        file.seek(1024 + 4 * (count - 3))
        file.write(struct.pack("<3I", 7, 8, 9))
    assert read_shard(path)[-3:].tolist() == [7, 8, 9]
    dataset = data.open_dataset(path)
    B, T = 3, 100_000
    last = (count - 1) // (B * T) - 1
    tokens, labels = data.batch_in_order(dataset, B, T, index=last)
    assert labels[-1, -1] == 0 and tokens.shape == (B, T)
    start = last * B * T
    assert start > 2**30  # bytes beyond 32 bits
    with path.open("r+b") as file:
        file.seek(1024 + 4 * start)
        file.write(struct.pack("<2I", 11, 12))
    tokens, labels = data.batch_in_order(dataset, B, T, index=last)
    assert (tokens[0, 0], labels[0, 0]) == (11, 12)


def llmc_order(shards, B, T, ranks, rank, batches):
    """An independent model of llm.c's loader: a shard and a position that advance."""
    shard = position = 0
    for _ in range(batches):
        while (position + 1) * ranks * B * T + 1 > len(shards[shard]):
            shard, position = (shard + 1) % len(shards), 0
        start = position * ranks * B * T + rank * B * T
        yield shards[shard][start : start + B * T + 1]
        position += 1


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_batch_in_order_matches_llmc(tmp_path, ranks, rank):
    rng = np.random.default_rng(0)
    # The second shard is too short for two ranks. The last token of a shard may be only a label.
    shards = [rng.integers(0, 99, n).tolist() for n in (49, 13, 30)]
    for i, tokens in enumerate(shards):
        build = (gpt2_shard, llama_shard)[i % 2]
        (tmp_path / f"{i}.bin").write_bytes(build(tokens))
    dataset = data.open_dataset(tmp_path / "*.bin")
    for index, wanted in enumerate(llmc_order(shards, 2, 4, ranks, rank, 17)):
        tokens, labels = data.batch_in_order(dataset, 2, 4, index=index, rank=rank, ranks=ranks)
        assert tokens.dtype == labels.dtype == np.int32
        assert tokens.shape == labels.shape == (2, 4)
        assert tokens.ravel().tolist() == wanted[:-1]
        assert labels.ravel().tolist() == wanted[1:]


def test_batch_in_order_rejects_out_of_range_arguments(tmp_path):
    (tmp_path / "a.bin").write_bytes(gpt2_shard(range(16)))
    dataset = data.open_dataset(tmp_path / "*.bin")
    with pytest.raises(ValueError, match="has 16 tokens; one batch of 2 x 2 x 4 needs 17"):
        data.batch_in_order(dataset, 2, 4, index=0, ranks=2)
    with pytest.raises(ValueError, match="rank is 1; it must be"):
        data.batch_in_order(dataset, 2, 4, index=0, rank=1)
    with pytest.raises(ValueError, match="index is -1"):
        data.batch_in_order(dataset, 2, 4, index=-1)


def test_batch_reads_four_byte_tokens(tmp_path):
    (tmp_path / "a.bin").write_bytes(llama_shard(range(100_000, 100_041)))
    tokens, labels = data.batch(data.open_dataset(tmp_path / "*.bin"), 5, 8, seed=0, step=0)
    assert sorted(tokens[:, 0].tolist()) == list(range(100_000, 100_040, 8))
    np.testing.assert_array_equal(labels, tokens + 1)
