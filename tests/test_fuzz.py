"""Damaged files: every reader returns a result, or raises an error that names the file.

Hypothesis chooses the damage to valid files, the same on each run. With ``JAXLLM_FUZZ=5000`` in
the environment, each test tries 5000 random inputs, different ones on each run. ``-s`` prints the
counts.
"""

import bz2
import collections
import contextlib
import dataclasses
import gzip
import json
import lzma
import math
import os
import struct
import tracemalloc

import jax
import numpy as np
import pyarrow
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from jaxllm import data
from jaxllm.convert import huggingface, llama2c, llmc
from jaxllm.data import compression, documents, tokenize, tokenizer
from jaxllm.inference.quantize import quantize_params
from jaxllm.models import gpt2, llama3
from jaxllm.training import evaluation

EXAMPLES = int(os.environ.get("JAXLLM_FUZZ", "0"))
TRIED = collections.Counter()

GPT2 = gpt2.GPT2Config(vocab_size=5, max_seq_len=4, layers=1, heads=1, width=4)
LLAMA = llama3.Llama3Config(
    vocab_size=5, max_seq_len=4, layers=1, heads=2, kv_heads=1, width=16, mlp_width=8
)
SCALED = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}
SLACK = 16 << 20  # bytes that Python, JAX and the xz decoder use for any file
KINDS = ["word", "byte", "cut", "more", "splice"]


def fuzz(examples):
    """Runs a test on ``examples`` inputs, or on JAXLLM_FUZZ inputs if it is set."""
    return settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for the damaged files. Prints the number of inputs at the end."""
    yield tmp_path_factory.mktemp("fuzz")
    if EXAMPLES:
        print(f"\n{sum(TRIED.values()):,} inputs:", dict(TRIED))


# Damage.

WORDS = st.one_of(
    st.sampled_from([-(2**31), -1, 0, 1, 2, 127, 2**16, 2**30, 2**31 - 1]),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(0, 64),
)


@st.composite
def damaged(draw, valid, words=8):
    """A file with changed header words or bytes, or with bytes removed, added or moved."""
    raw = bytearray(draw(st.sampled_from(valid)))
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=4)):
        if kind == "word" and len(raw) >= 4 * words:
            struct.pack_into("<i", raw, 4 * draw(st.integers(0, words - 1)), draw(WORDS))
        elif kind == "byte" and raw:
            raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
        elif kind == "cut":
            del raw[draw(st.integers(0, len(raw))) :]
        elif kind == "more":
            raw += draw(st.binary(max_size=64))
        elif kind == "splice" and raw:
            start, end = sorted(draw(st.tuples(*2 * [st.integers(0, len(raw))])))
            raw[draw(st.integers(0, len(raw))) :] = raw[start:end]
    return bytes(raw)


NUMBERS = [0, -1, 1, 2, 2**31 - 1, 2**63, -(2**70), 10**400, 1e308, 5e-324, math.inf, math.nan]
JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 70), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def changed(draw, tree):
    """JSON with one value replaced or removed."""
    tree = json.loads(json.dumps(tree))
    node = tree
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return tree
        key = draw(st.sampled_from(keys))
        if isinstance(node[key], dict | list) and node[key] and draw(st.booleans()):
            node = node[key]
            continue
        if draw(st.integers(0, 4)):
            node[key] = draw(st.sampled_from(NUMBERS) | JSON_VALUES)
        else:
            del node[key]
        return tree


@st.composite
def damaged_json(draw, valid):
    """JSON with changed values, or with changed bytes."""
    tree = draw(st.sampled_from(valid))
    for _ in range(draw(st.sampled_from([1, 1, 1, 0, 2, 3]))):
        tree = changed(draw, tree) if isinstance(tree, dict) and tree else draw(JSON_VALUES)
    raw = json.dumps(tree).encode()
    return raw if draw(st.integers(0, 3)) else draw(damaged([raw]))


def check(name, path, raw, read):
    """Reads a damaged file. Asserts on the type of the error and on the memory used."""
    path.write_bytes(raw)
    found = None
    tracemalloc.start()
    try:
        found = read(path)
    except (ValueError, FileNotFoundError) as error:
        assert type(error) in (ValueError, FileNotFoundError), repr(error)
        assert str(path) in str(error) or str(path.parent) in str(error), repr(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        TRIED[name, "rejected" if found is None else "read"] += 1
    assert peak <= SLACK + 16 * len(raw)
    arrays = [x for x in jax.tree.leaves(found) if isinstance(x, np.ndarray | jax.Array)]
    assert sum(x.nbytes for x in arrays) <= SLACK + 16 * len(raw)
    return found


def saved(tmp, write):
    path = tmp / "valid"
    write(path)
    return path.read_bytes()


# llm.c and llama2.c


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """Valid files of each kind."""
    tmp = tmp_path_factory.mktemp("valid")
    gpt2_params, llama_params = (
        gpt2.init(jax.random.key(0), GPT2),
        llama3.init(jax.random.key(0), LLAMA),
    )
    state = llmc.OptimizerState(1, gpt2_params, gpt2_params, gpt2_params)
    words = [20240327, 2, 2, 3, *252 * [0]]
    body = [*12 * [1], *(2 * 3 * 5 + 1 + gpt2.num_params(GPT2)) * [0]]
    question = [65535, 0, 0, 0, 2, 2, 7, 8, 1, 9, 1, 6]
    question[1] = 2 * len(question)
    token_bytes = b"".join(b"\x01" + bytes([i]) for i in range(256)) + b"\x02ab\x03end"
    int8 = quantize_params(llama_params, group_size=8)
    return {
        "shard": [
            saved(tmp, lambda path: data.write_shard(path, range(9))),
            saved(tmp, lambda path: data.write_shard(path, range(9), kind="llama3")),
        ],
        "checkpoint": [
            saved(tmp, lambda path: llmc.save_gpt2(path, gpt2_params, GPT2)),
            saved(tmp, lambda path: llmc.save_gpt2(path, gpt2_params, GPT2, dtype="bfloat16")),
        ],
        "debug state": [np.array([*words, *body], "<i4").tobytes()],
        "optimizer state": [saved(tmp, lambda path: llmc.write_optimizer_state(path, state))],
        "questions": [
            np.array([20240522, 1, 1, 24, *252 * [0]], "<i4").tobytes()
            + np.array(question, "<u2").tobytes()
        ],
        "tokenizer": [np.array([20240328, 2, 258, 257, *252 * [0]], "<i4").tobytes() + token_bytes],
        "llama2c": [
            saved(tmp, lambda path: llama2c.save(path, llama_params, LLAMA)),
            saved(tmp, lambda path: llama2c.save(path, int8, LLAMA)),
        ],
    }


LLMC_READERS = {
    "shard": data.read_shard,
    "checkpoint": lambda path: llmc.load_gpt2(path)[0],
    "debug state": lambda path: llmc.read_debug_state(path, GPT2),
    "optimizer state": lambda path: llmc.read_optimizer_state(path, GPT2),
    "questions": evaluation.read_questions,
    "tokenizer": tokenizer.from_llmc,
    "llama2c": lambda path: llama2c.load(path)[0],
}


@pytest.mark.parametrize("name", LLMC_READERS)
def test_damaged_binary_files(folder, valid, name):
    read = LLMC_READERS[name]
    for raw in valid[name]:
        assert check(name, folder / "valid.bin", raw, read) is not None

    @fuzz(60)
    @given(damaged(valid[name]))
    def run(raw):
        check(name, folder / "damaged.bin", raw, read)

    run()


# Hugging Face


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The files of a model's folder, by name."""
    tmp = tmp_path_factory.mktemp("model")
    params = llama3.init(jax.random.key(0), LLAMA)
    ids = huggingface.SpecialTokens(1, (2, 3), 0)
    huggingface.save(tmp / "model", params, LLAMA, special_tokens=ids)
    return {path.name: path.read_bytes() for path in (tmp / "model").iterdir()}


def check_model(folder, files, name, raw):
    """Reads a model's folder with one damaged file."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for file, contents in files.items():
        (folder / file).write_bytes(contents)

    def read(_):
        return huggingface.load_special_tokens(folder), huggingface.load(folder)[0]

    check(name, folder / name, raw, read)


def tensors_of(raw):
    """The header of a safetensors file, and the bytes after it."""
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def test_damaged_safetensors(folder, model):
    header, body = tensors_of(model["model.safetensors"])

    @st.composite
    def another_header(draw):
        text = json.dumps(changed(draw, header)).encode()
        return struct.pack("<Q", len(text)) + text + body

    @fuzz(100)
    @given(st.one_of(another_header(), damaged([model["model.safetensors"]], words=16)))
    def run(raw):
        check_model(folder / "tensors", model, "model.safetensors", raw)

    run()


def test_damaged_safetensors_index(folder, model):
    files = {"config.json": model["config.json"], "1.safetensors": model["model.safetensors"]}
    names = tensors_of(model["model.safetensors"])[0].keys() - {"__metadata__"}
    index = {"weight_map": dict.fromkeys(sorted(names), "1.safetensors")}

    @fuzz(60)
    @given(damaged_json([index]))
    def run(raw):
        check_model(folder / "index", files, "model.safetensors.index.json", raw)

    run()


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_damaged_configs(folder, model, file):
    config = json.loads(model["config.json"])

    @fuzz(120 if file == "config.json" else 40)
    @given(damaged_json([config, config | SCALED, huggingface.config_to_dict(GPT2)]))
    def run(raw):
        check_model(folder / "configs", model, file, raw)

    run()


def test_extreme_values_in_a_config(folder, model):
    """Sizes are compared with the tensors before arrays are allocated."""
    config = json.loads(model["config.json"]) | SCALED
    paths = [(key,) for key in config] + [("rope_scaling", key) for key in config["rope_scaling"]]
    for path in paths:
        for number in (*NUMBERS, "x", [1], {}, None):
            tree = json.loads(json.dumps(config))
            node = tree if len(path) == 1 else tree["rope_scaling"]
            node[path[-1]] = number
            check_model(folder / "numbers", model, "config.json", json.dumps(tree).encode())


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_tokenizers(folder, file):
    out = folder / file
    out.mkdir()
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    inner.add_special_tokens(["<eos>"])
    contents = json.loads(inner.to_str())
    valid = {"eos_token": "<eos>", "add_bos_token": True, "bos_token": {"content": "<s>"}}
    (out / "tokenizer.json").write_text(json.dumps(contents))

    def read(_):
        found = tokenizer.from_file(out)
        assert 0 <= found.end_of_text < found.vocab_size
        return found

    @fuzz(80)
    @given(damaged_json([contents if file == "tokenizer.json" else valid]))
    def run(raw):
        check(file, out / file, raw, read)

    run()


# Documents

LINES = b"".join(
    json.dumps({"id": i, "text": text}).encode() + b"\n" for i, text in enumerate("abc" * 9)
)
ARRAY = json.dumps([{"text": text, "n": [1, {"a": None}]} for text in "abc"], indent=1).encode()
COMPRESSORS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda raw: compression._zstd().compress(raw),
}


def read_documents(path):
    """True if a file has a document; None if it has only faults."""
    sources, _ = documents.find([path])
    rows = list(documents.read(sources))
    for row in rows:
        if isinstance(row, documents.Fault):
            assert row.where.startswith(str(path)) and row.reason and row.count >= 0
        else:
            assert isinstance(row.text, str) and row.text.encode() is not None
    return any(isinstance(row, documents.Document) for row in rows) or None


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.data", "x.txt"])
def test_damaged_lines_and_json(folder, name):
    raw_lines = st.lists(
        st.one_of(
            st.binary(max_size=20),
            JSON_VALUES.map(lambda value: json.dumps({"text": value}).encode()),
            JSON_VALUES.map(lambda value: json.dumps(value).encode()),
            st.sampled_from([b'{"text": "a"}', b"[" * 2000, b'{"a":' * 2000, b"\xef\xbb\xbf{}"]),
        ),
        max_size=4,
    ).map(b"\n".join)

    @fuzz(150)
    @given(st.one_of(raw_lines, damaged([LINES, ARRAY])))
    def run(raw):
        check(name, folder / name, raw, read_documents)

    run()


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_damaged_compressed_files(folder, ending):
    valid = [COMPRESSORS[ending](LINES), COMPRESSORS[ending](ARRAY), COMPRESSORS[ending](b"")]

    @fuzz(60)
    @given(damaged(valid, words=4), st.sampled_from(["jsonl", "json", "data", "txt"]))
    def run(raw, kind):
        check(ending, folder / f"x.{kind}.{ending}", raw, read_documents)

    run()


def test_damaged_parquet_files(folder):
    path = folder / "valid.parquet"
    table = pyarrow.table({"text": list("abcabc"), "n": range(6)})
    parquet.write_table(table, path, row_group_size=3)

    @fuzz(100)
    @given(damaged([path.read_bytes()]))
    def run(raw):
        check("parquet", folder / "x.parquet", raw, read_documents)

    run()


def test_damaged_progress(folder):
    out = folder / "run"
    out.mkdir()
    recipe = {"files": [["a.txt", 3]], "tokenizer": "bytes"}
    valid = json.loads(json.dumps(dataclasses.asdict(tokenize.Progress(recipe, 2, 9, 1))))

    @fuzz(60)
    @given(damaged_json([valid]))
    def run(raw):
        def read(_):
            with contextlib.suppress(FileExistsError):  # the recipe differs
                return str(tokenize.Progress.read(out, recipe))

        check("progress.json", out / "progress.json", raw, read)

    run()
