"""Checkpoint folders: config.json and safetensors files."""

import dataclasses
import functools
import json
import shutil
import struct
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from test_huggingface import GPT2, LLAMA, NAMES, TIED, assert_equal, random_params

from jaxllm.convert import huggingface, llama2c, llmc, safetensors_files
from jaxllm.models.common import for_decoding, unstack
from jaxllm.models.special_tokens import SpecialTokens


@pytest.fixture(scope="module")
def all_params():
    return {name: random_params(config) for name, config in NAMES.items()}


@pytest.fixture(scope="module")
def saved(all_params, tmp_path_factory):
    """Checkpoint folders of the untied Llama, with one file and with several."""
    root = tmp_path_factory.mktemp("saved")
    huggingface.save(root / "whole", all_params["llama"], LLAMA)
    huggingface.save(root / "sharded", all_params["llama"], LLAMA, max_shard_bytes=20_000)
    return root


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of the folder with one file, which the test may damage."""
    return shutil.copytree(saved / "whole", tmp_path / "whole")


@pytest.fixture
def sharded(saved, tmp_path):
    return shutil.copytree(saved / "sharded", tmp_path / "sharded")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 10_000])
def test_round_trip_is_bit_identical(name, dtype, max_shard_bytes, all_params, tmp_path):
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), all_params[name])
    huggingface.save(tmp_path / "a", params, NAMES[name], max_shard_bytes=max_shard_bytes)
    back, config = huggingface.load(tmp_path / "a")
    assert config == NAMES[name]
    assert_equal(back, params)
    # Saving the loaded model gives identical files.
    huggingface.save(tmp_path / "b", back, config, max_shard_bytes=max_shard_bytes)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert ("model.safetensors" in files) == (max_shard_bytes > 10_000)
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_folder_has_the_files_that_transformers_expects(saved):
    config = json.loads((saved / "whole" / "config.json").read_text())
    assert config["torch_dtype"] == "float32"
    assert config["architectures"] == ["LlamaForCausalLM"]
    with safe_open(saved / "whole" / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert len(file.keys()) == 1 + 9 * LLAMA.layers + 2


def test_index_matches_the_shards(saved, all_params):
    index = json.loads((saved / "sharded" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (saved / "sharded").glob("*.safetensors"))
    assert files == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, 1 + len(files))
    ]
    contents = {file: load_file(saved / "sharded" / file) for file in files}
    held = {name: file for file, tensors in contents.items() for name in tensors}
    assert held == index["weight_map"]
    sizes = {f: sum(x.nbytes for x in tensors.values()) for f, tensors in contents.items()}
    assert max(sizes.values()) <= 20_000
    assert index["metadata"]["total_size"] == sum(sizes.values())


def test_tied_lm_head_is_not_written(all_params, tmp_path):
    for name in ("gpt2", "tied"):
        huggingface.save(tmp_path / name, all_params[name], NAMES[name])
        assert "lm_head.weight" not in load_file(tmp_path / name / "model.safetensors")


def test_dtype_option_casts_parameters(saved, all_params):
    params, _ = huggingface.load(saved / "whole", dtype="bfloat16")
    assert_equal(params, jax.tree.map(lambda leaf: leaf.astype("bfloat16"), all_params["llama"]))


def rewrite(folder, change):
    """Changes the tensors of a folder with one file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_mixed_dtypes_become_float32(folder, all_params):
    name = "model.layers.0.input_layernorm.weight"
    rewrite(folder, lambda t: t.update({name: t[name].astype(ml_dtypes.bfloat16)}))
    params, _ = huggingface.load(folder)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    ours = all_params["llama"]["blocks"]["norm1"]["scale"]
    expected = ours.at[0].set(ours[0].astype("bfloat16").astype("float32"))
    np.testing.assert_array_equal(params["blocks"]["norm1"]["scale"], expected)


NAME = "model.layers.1.mlp.up_proj.weight"
LONG = "model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NAME), rf"{NAME} is missing"),
        (lambda t: t.update({LONG: t[NAME]}), rf"{LONG} is unexpected"),
        (lambda t: t.update({NAME: t[NAME][:-1]}), r"shape \(39, 32\); it must be \(40, 32\)"),
        (lambda t: t.update({NAME: t[NAME].astype("int8")}), rf"{NAME} has dtype I8; it must be F"),
        (lambda t: t.update({NAME: t[NAME].astype("float64")}), rf"{NAME} has dtype F64"),
    ],
    ids=["missing", "unexpected", "misshapen", "int8", "float64"],
)
def test_tensors_that_differ_from_the_model_are_rejected(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=rf"^{folder}: .*{message}"):
        huggingface.load(folder)


@pytest.mark.parametrize("left", [0, 5, 100, 20_000, -1])
def test_truncated_file_is_rejected(folder, left):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(ValueError, match=f"^{path}: invalid safetensors file"):
        huggingface.load(folder)


def header_of(data):
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@pytest.mark.parametrize("fault", ["length", "json", "offsets", "tail"])
def test_corrupt_file_is_rejected(folder, fault):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header, body = header_of(data)
    if fault == "length":
        data = struct.pack("<Q", 2**60) + data[8:]
    elif fault == "json":
        data = data[:8] + b"}" + data[9:]
    elif fault == "offsets":
        header[NAME]["data_offsets"][0] += 4
        text = json.dumps(header).encode()
        data = struct.pack("<Q", len(text)) + text + body
    else:
        data += b"\0"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"^{path}: invalid safetensors file"):
        huggingface.load(folder)


def test_all_files_are_checked_before_a_tensor_is_read(sharded, monkeypatch):
    """The last of several files is truncated. No tensor of the others is read."""
    last = sorted(sharded.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])

    def assemble(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(huggingface, "assemble", assemble)
    with pytest.raises(ValueError, match=f"^{last}: invalid safetensors file"):
        huggingface.load(sharded)


@pytest.mark.parametrize("name", NAMES)
def test_unstacked_layers_are_saved_like_stacked_ones(name, all_params, tmp_path):
    params, config = all_params[name], NAMES[name]
    huggingface.save(tmp_path / "list", unstack(params), config)
    back, _ = huggingface.load(tmp_path / "list")
    assert_equal(back, params)
    layers = unstack(params)
    tensors = huggingface.to_state_dict(layers, config)
    for key, tensor in huggingface.to_state_dict(params, config).items():
        np.testing.assert_array_equal(tensors[key], tensor)
    layers["blocks"] = tuple(layers["blocks"])
    huggingface.save(tmp_path / "tuple", layers, config)
    assert_equal(huggingface.load(tmp_path / "tuple")[0], params)


def test_parameters_of_other_forms_are_rejected_with_a_hint(all_params, tmp_path):
    params = all_params["gpt2"]
    layers = unstack(params)["blocks"]
    for wrong, message in (
        (for_decoding(params), r"in the layout of for_decoding, with a Transposed .*/weight; pass"),
        (params | {"blocks": [*layers[:2], {}]}, r"params\['blocks'\] is a list of layers that d"),
        (params | {"wte": 1.0}, "params: wte is of type float; it must be an array"),
        (params | {"wte": [1.0]}, "params: wte is of type list; it must be an array"),
        (params["wte"], "params has no 'blocks'; it must be a dict from the model's init"),
    ):
        with pytest.raises(ValueError, match=message):
            huggingface.save(tmp_path / "out", wrong, GPT2)
    assert not (tmp_path / "out").exists()


IDS = {"bos_token_id": 1, "eos_token_id": [2, 5, 7], "pad_token_id": 3}


@pytest.fixture
def source(saved, tmp_path):
    """A folder like Llama 3.1's, with a list of eos ids and tokenizer files."""
    folder = shutil.copytree(saved / "whole", tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | IDS))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_special_token_ids_are_kept(name, source, all_params, tmp_path):
    params, config, out = all_params[name], NAMES[name], tmp_path / "out"
    ids = huggingface.load_special_tokens(source)
    assert ids == huggingface.SpecialTokens(bos=1, eos=(2, 5, 7), pad=3)
    huggingface.save(out, params, config, tokenizer_json=source / "tokenizer.json")
    assert IDS.items() <= json.loads((out / "config.json").read_text()).items()
    beside = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    # transformers 5 has chat templates in files of their own.
    beside |= {"chat_template.jinja", "additional_chat_templates/tools.jinja"}
    for file in beside:
        assert (out / file).read_bytes() == (source / file).read_bytes()
    files = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert files == beside | {"config.json", "model.safetensors"}
    assert huggingface.load_special_tokens(out) == ids
    huggingface.load(out)
    # The argument takes precedence, and a single eos id is written as an integer.
    (source / "generation_config.json").write_text('{"eos_token_id": 5, "temperature": 0.5}')
    given = huggingface.SpecialTokens(eos=(9,))
    huggingface.save(
        out, params, config, tokenizer_json=source / "tokenizer.json", special_tokens=given,
        overwrite=True,
    )  # fmt: skip
    written = json.loads((out / "config.json").read_text())
    assert written["eos_token_id"] == 9
    assert written.get("bos_token_id") is None and "pad_token_id" not in written
    assert huggingface.load_special_tokens(out) == given
    assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.5


def test_load_and_save_keep_special_tokens(source, tmp_path):
    (source / "generation_config.json").write_text('{"eos_token_id": [7, 8], "pad_token_id": 0}')
    ids = huggingface.SpecialTokens(bos=1, eos=(2, 5, 7, 8), pad=0)
    params, config = huggingface.load(source)
    assert config.special_tokens == huggingface.load_special_tokens(source) == ids
    bare = dataclasses.replace(config, special_tokens=huggingface.SpecialTokens())
    assert config == bare and hash(config) == hash(bare)  # no second compilation
    out = tmp_path / "out"
    huggingface.save(out, params, config)
    assert huggingface.load_special_tokens(out) == ids
    assert huggingface.load(out)[1].special_tokens == ids
    assert huggingface.config_from_dict(huggingface.config_to_dict(config)).special_tokens == ids
    # The config's ids win over the tokenizer's, and the copied files get the config's ids.
    shutil.rmtree(out)
    other = config.special_tokens._replace(eos=(6,))
    config = dataclasses.replace(config, special_tokens=other)
    huggingface.save(out, params, config, tokenizer_json=source / "tokenizer.json")
    assert huggingface.load_special_tokens(out) == other
    # If the ids agree, the files are copied unchanged.
    huggingface.save(out, params, bare, tokenizer_json=source / "tokenizer.json", overwrite=True)
    for name in ("generation_config.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert huggingface.load_special_tokens(out) == ids


def test_generation_config_adds_eos_ids(source):
    (source / "generation_config.json").write_text('{"eos_token_id": [7, 8], "pad_token_id": 0}')
    assert huggingface.load_special_tokens(source) == (1, (2, 5, 7, 8), 0)
    (source / "config.json").unlink()
    assert huggingface.load_special_tokens(source) == (None, (7, 8), 0)
    (source / "generation_config.json").unlink()
    assert huggingface.load_special_tokens(source) == huggingface.SpecialTokens()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"eos_token_id": "2"}, "eos_token_id is '2'; it must be an integer or a list of them"),
        ({"eos_token_id": [2, None]}, r"eos_token_id is \[2, None\]; it must be an integer or a l"),
        ({"bos_token_id": [1]}, r"bos_token_id is \[1\]; it must be an integer$"),
        ({"pad_token_id": True}, "pad_token_id is True; it must be an integer$"),
    ],
)
def test_special_ids_must_be_integers(source, all_params, tmp_path, ids, message):
    path = source / "config.json"
    path.write_text(json.dumps(ids))
    with pytest.raises(ValueError, match=f"^{path}: {message}"):
        huggingface.load_special_tokens(source)
    with pytest.raises(ValueError, match=message):
        huggingface.save(
            tmp_path / "out", all_params["gpt2"], GPT2, tokenizer_json=source / "tokenizer.json"
        )
    assert not (tmp_path / "out").exists()


def test_missing_tokenizer_is_an_error_before_writing(all_params, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such file"):
        huggingface.save(
            tmp_path / "out", all_params["gpt2"], GPT2, tokenizer_json=tmp_path / "nowhere"
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("contents", [10_000 * "[", "\xff", '{"a": 1e'])
def test_invalid_json_is_rejected(folder, contents):
    path = folder / "config.json"
    path.write_bytes(contents.encode("latin-1"))
    with pytest.raises(ValueError, match=f"^{path}: invalid JSON"):
        huggingface.load(folder)


def test_byte_order_mark_is_accepted(folder, all_params):
    path = folder / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert_equal(huggingface.load(folder)[0], all_params["llama"])


def test_tensors_are_read_one_at_a_time(saved, monkeypatch):
    """Host memory holds one tensor at a time."""
    log = []
    stored = safetensors_files._stored

    def noting(file, name):
        tensor = stored(file, name)
        return tensor._replace(read=lambda: log.append(name) or tensor.read())

    monkeypatch.setattr(safetensors_files, "_stored", noting)
    huggingface.load(saved / "sharded")
    assert len(log) == len(set(log)) == 1 + 9 * LLAMA.layers + 2
    # The tensors of one parameter are read consecutively.
    parts = [name for name in log if any(part in name for part in ("q_proj", "k_proj", "v_proj"))]
    assert parts == [
        f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(3) for part in "qkv"
    ]
    first = log.index(parts[0])
    assert log[first : first + 9] == parts


def test_missing_files_are_an_error(folder, sharded, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such folder"):
        huggingface.load(tmp_path / "nowhere")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor model\.safetens"):
        huggingface.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json: there is no such file"):
        huggingface.load(folder)
    second = sorted(sharded.glob("*.safetensors"))[1]
    second.unlink()
    with pytest.raises(FileNotFoundError, match=f"{second.name} is missing; .* lists it"):
        huggingface.load(sharded)


def test_invalid_index_is_rejected(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())

    def refused(change, message):
        weight_map = dict(index["weight_map"])
        change(weight_map)
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=message):
            huggingface.load(sharded)

    refused(lambda m: m.pop(NAME), f"{NAME} is only in the file")
    refused(lambda m: m.update({LONG: m[NAME]}), rf"{LONG} is only in model.*index\.json")
    refused(lambda m: m.update({NAME: "../whole/model.safetensors"}), "must be a file name")
    refused(lambda m: m.update({NAME: 3}), "must be a file name")
    refused(lambda m: m.clear(), "weight_map is missing or empty")
    path.write_text("{")
    with pytest.raises(ValueError, match=r"index\.json: invalid JSON"):
        huggingface.load(sharded)


ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_invalid_config_error_has_its_path(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ValueError, match=r"model\.layers\.3\.input_layernorm\.weight is missing"):
        huggingface.load(folder)
    path.write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(ValueError, match=f"^{path}: hidden_act is 'relu'"):
        huggingface.load(folder)
    for change, message in (
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        ({"rope_scaling": "llama3"}, "rope_scaling is 'llama3'; it must be an object"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; it must be an object"),
        ({"vocab_size": 10**18}, "vocab_size is 1000000000000000000; it must be an integer below"),
        ({"vocab_size": 10**200}, r"vocab_size is 10+\.\.\. \(201 characters\); it must be an int"),
        (
            {"rms_norm_eps": 10**400},
            r"rms_norm_eps is 10+\.\.\. \(401 characters\); it must be a f",
        ),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; it must be a finite number"),
        (
            {"rope_scaling": None, "rope_parameters": [1]},
            r"rope_parameters is \[1\]; it must be an object",
        ),
        (
            {"rope_scaling": ROPE | {"factor": 0}},
            "rope_scaling has factor 0.0, low_freq_factor 1.0, .*: factor is 0.0; it must be above",
        ),
        (
            {"rope_scaling": ROPE | {"low_freq_factor": 4.0}},
            "rope_scaling has factor 8.0, low_freq_factor 4.0, .*: low is 4.0; it must be below hi",
        ),
        (
            {"rope_scaling": ROPE | {"original_max_position_embeddings": 0}},
            "rope_scaling has .* original_max_position_embeddings 0: original_length is 0; it must",
        ),
    ):
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=f"^{path}: {message}"):
            huggingface.load(folder)
    path.write_text(json.dumps({**config, "num_hidden_layers": 10**7}))
    with pytest.raises(ValueError, match=f"^{folder}: the config has 10000000 layers; there are"):
        huggingface.load(folder)
    path.write_text("[]")
    with pytest.raises(ValueError, match=f"^{path}: not a JSON object"):
        huggingface.load(folder)


def test_save_rejects_invalid_arguments(all_params, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    with pytest.raises(FileExistsError, match="full: exists already"):
        huggingface.save(tmp_path / "full", all_params["gpt2"], GPT2)
    with pytest.raises(ValueError, match="head is unexpected"):
        huggingface.save(tmp_path / "new", all_params["llama"], TIED)
    whole = jax.tree.map(lambda leaf: leaf.astype(jnp.int8), all_params["gpt2"])
    with pytest.raises(ValueError, match="bias has dtype int8; it must be float32 or bfloat16 or"):
        huggingface.save(tmp_path / "new", whole, GPT2)
    with pytest.raises(ValueError, match="max_shard_bytes is 0"):
        huggingface.save(tmp_path / "new", all_params["gpt2"], GPT2, max_shard_bytes=0)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("value", ["False", None, 1.0, [True]], ids=str)
def test_flags_that_are_no_bools_are_rejected(all_params, tmp_path, value):
    params = all_params["llama"]
    for name, call in (
        ("overwrite", functools.partial(huggingface.save, tmp_path, params, LLAMA)),
        ("interleaved", functools.partial(llama2c.save, tmp_path / "x.bin", params, LLAMA)),
        ("interleaved", functools.partial(llama2c.load, tmp_path / "x.bin")),
    ):
        with pytest.raises(TypeError, match=f"{name} has .*; it must be a bool"):
            call(**{name: value})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("int8", "dtype is int8; it must be a floating dtype"),
        (bool, "dtype is bool; it must be a floating dtype"),
        ("bf16", "dtype is 'bf16'; it must be a floating dtype"),
        ("float64", "dtype is float64, which needs jax_enable_x64"),
    ],
)
def test_parameters_of_another_dtype_are_not_loaded(folder, tmp_path, dtype, message):
    for load in (
        functools.partial(huggingface.load, folder),
        functools.partial(huggingface.from_state_dict, {}, LLAMA),
        functools.partial(llama2c.load, tmp_path / "x.bin"),
        functools.partial(llmc.load_gpt2, tmp_path / "x.bin"),
    ):
        with pytest.raises(TypeError, match=message):
            load(dtype=dtype)


def special_tokens(**ids: Any) -> SpecialTokens:
    return SpecialTokens(**ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_shard_bytes": "5GB"}, "max_shard_bytes is '5GB'; it must be a number"),
        ({"special_tokens": special_tokens(eos=2)}, "eos is 2; it must be a tuple of integers"),
        ({"special_tokens": special_tokens(eos=(2.5,))}, r"eos is 2\.5; it must be an integer"),
        ({"special_tokens": special_tokens(bos="1")}, "bos is '1'; it must be an integer"),
        ({"special_tokens": {"eos": (2,)}}, "special_tokens is .*; it must be SpecialTokens"),
    ],
)
def test_save_names_the_argument_of_another_type(all_params, tmp_path, options, message):
    with pytest.raises(TypeError, match=message):
        huggingface.save(tmp_path / "new", all_params["llama"], LLAMA, **options)
    assert not (tmp_path / "new").exists()


def test_numbers_of_numpy_are_written(all_params, tmp_path):
    config = dataclasses.replace(
        LLAMA, vocab_size=np.int64(LLAMA.vocab_size), norm_eps=np.float32(0.5)
    )
    ids = special_tokens(bos=np.int64(1), eos=np.array([2, 3]), pad=jnp.int32(4))
    huggingface.save(tmp_path / "new", all_params["llama"], config, special_tokens=ids)
    _, found = huggingface.load(tmp_path / "new")
    assert found == dataclasses.replace(LLAMA, norm_eps=0.5)
    assert found.special_tokens == SpecialTokens(1, (2, 3), 4)


def test_failed_save_leaves_no_folder(all_params, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(huggingface, "write_tensors", fail)
    with pytest.raises(OSError, match="no space left"):
        huggingface.save(tmp_path / "new", all_params["gpt2"], GPT2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_saved_folders(request, name, all_params, tmp_path):
    """jaxllm also reads the folders that transformers writes."""
    torch, transformers = request.getfixturevalue("huggingface")
    huggingface.save(tmp_path / "ours", all_params[name], NAMES[name], max_shard_bytes=20_000)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    expected = huggingface.to_state_dict(all_params[name], NAMES[name])
    theirs = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    assert theirs.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(theirs[key], array)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    params, config = huggingface.load(tmp_path / "theirs")
    assert config == NAMES[name]
    assert_equal(params, all_params[name])


def test_import_error_names_safetensors(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r'package safetensors: pip install "jaxllm\[convert\]"'):
        huggingface.load(saved / "whole")
