"""llama2.c's and KuiperLLama's file formats, against packed files and a Llama in NumPy."""

import dataclasses
import struct
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_huggingface import assert_equal, random_params

import jaxllm
from jaxllm.convert import llama2c
from jaxllm.core.backend import resolve
from jaxllm.inference.generate import complete
from jaxllm.inference.quantize import quantize_params
from jaxllm.models import llama3
from jaxllm.models.common import unstack
from jaxllm.models.gpt2 import GPT2Config
from jaxllm.ops import RopeScaling
from jaxllm.testing import error

D, F, L, N, V, T = 128, 192, 2, 4, 61, 20
H = D // N
TOKENS = np.random.default_rng(1).integers(0, V, T)
CONFIG = llama3.Llama3Config(
    vocab_size=V, max_seq_len=24, layers=L, heads=N, kv_heads=2, width=D, mlp_width=F,
    rope_theta=10_000.0, rope_scaling=None,
)  # fmt: skip
TIED = dataclasses.replace(CONFIG, tied_head=True)
MATRICES = ("wq", "wk", "wv", "wo", "w1", "w2", "w3", "head")
FLOAT32 = ("table", "norm1", "wq", "wk", "wv", "wo", "norm2", "w1", "w2", "w3", "norm_f")
FLOAT32 = (*FLOAT32, "cos", "sin", "head")
INT8 = (*MATRICES, "table", "norm1", "norm2", "norm_f")


def make_weights(kv_heads, tied):
    """Random weights, (out, in), for all layers, and the RoPE tables."""
    rng = np.random.default_rng(0)
    shapes = {
        "table": (V, D), "norm1": (L, D), "norm2": (L, D), "norm_f": (D,), "head": (V, D),
        "wq": (L, D, D), "wk": (L, kv_heads * H, D), "wv": (L, kv_heads * H, D), "wo": (L, D, D),
        "w1": (L, F, D), "w2": (L, D, F), "w3": (L, F, D),
    }  # fmt: skip
    weights = {name: 0.2 * rng.standard_normal(shape) for name, shape in shapes.items()}
    angles = np.arange(CONFIG.max_seq_len)[:, None] * 10_000.0 ** -(np.arange(0, H, 2) / H)
    weights |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    if tied:
        del weights["head"]
    return {name: array.astype(np.float32) for name, array in weights.items()}


def quantize(w, group_size):
    groups = w.reshape(-1, group_size)
    scales = (abs(groups).max(axis=1) / 127).astype(np.float32)
    return np.round(groups / scales[:, None]).astype(np.int8), scales


def file_by_hand(weights, kv_heads, group_size=None):
    """Packs a file with struct and NumPy."""
    sizes = [D, F, L, N, kv_heads, -V if "head" in weights else V, CONFIG.max_seq_len]
    if group_size is None:
        arrays = [weights[name] for name in FLOAT32 if name in weights]
        return struct.pack("<7i", *sizes) + b"".join(array.tobytes() for array in arrays)
    data = struct.pack("<8i", *sizes, group_size)
    for name in INT8:
        if name in MATRICES and name in weights:
            layers = weights[name] if name != "head" else weights[name][None]
            for layer in layers:
                q, scales = quantize(layer, group_size)
                data += q.tobytes() + scales.tobytes()
        elif name in weights:
            data += weights[name].tobytes()
    return data


def logits_by_hand(weights, interleaved):
    """llama2.c's forward pass for one sequence, in NumPy."""

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

    def rotate(x):
        cos, sin = (weights[name][:T, None] for name in ("cos", "sin"))
        halves = (slice(None, H // 2), slice(H // 2, None))
        one, two = (slice(0, None, 2), slice(1, None, 2)) if interleaved else halves
        a, b, rotated = x[..., one], x[..., two], np.empty_like(x)
        rotated[..., one], rotated[..., two] = a * cos - b * sin, a * sin + b * cos
        return rotated

    x = weights["table"][TOKENS]
    for layer in range(L):
        w = {name: array[layer] for name, array in weights.items() if name not in ("cos", "sin")}
        y = norm(x, w["norm1"])
        q, k, v = ((y @ w[name].T).reshape(T, -1, H) for name in ("wq", "wk", "wv"))
        k, v = (np.repeat(part, N // part.shape[1], axis=1) for part in (rotate(k), v))
        scores = np.einsum("tnh,snh->nts", rotate(q), k) / np.sqrt(H)
        scores = np.where(np.tri(T, dtype=bool), scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        x = x + np.einsum("nts,snh->tnh", weight, v).reshape(T, D) @ w["wo"].T
        y = norm(x, w["norm2"])
        gate = y @ w["w1"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w["w3"].T)) @ w["w2"].T
    return norm(x, weights["norm_f"]) @ weights.get("head", weights["table"]).T


forward = jax.jit(llama3.forward, static_argnums=2)


def logits_of(params, config):
    return forward(params, jnp.asarray(TOKENS)[None], config)[0, :, :V]


def save_bytes(path, *args, **options):
    llama2c.save(path, *args, **options)
    return path.read_bytes()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_float32_file_matches_the_numpy_model(interleaved, tied, kv_heads, tmp_path):
    weights = make_weights(kv_heads, tied)
    path = tmp_path / "model.bin"
    data = file_by_hand(weights, kv_heads)
    path.write_bytes(data)
    params, config = llama2c.load(path, interleaved=interleaved)
    assert config == dataclasses.replace(CONFIG, kv_heads=kv_heads, tied_head=tied)
    assert error(logits_of(params, config), logits_by_hand(weights, interleaved)) <= 1e-5
    assert error(logits_of(params, config), logits_by_hand(weights, not interleaved)) > 1e-2
    assert not params["wte"][V:].any()

    again = save_bytes(tmp_path / "again.bin", params, config, interleaved=interleaved)
    assert len(again) == len(data)
    rotary = 2 * 4 * CONFIG.max_seq_len * H // 2  # bytes; NumPy may round them differently
    start = len(data) - rotary - (0 if tied else 4 * V * D)
    assert again[:start] == data[:start]
    assert again[start + rotary :] == data[start + rotary :]
    ours, theirs = (np.frombuffer(file[start : start + rotary], "<f4") for file in (again, data))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kv_heads", "group_size"), [(1, 64), (2, 64), (4, 32)])
@pytest.mark.covering(("kv_heads",), ("group_size",), ("tied",), ("interleaved",))
def test_int8_file_matches_the_numpy_model(interleaved, tied, kv_heads, group_size, tmp_path):
    weights = make_weights(kv_heads, tied)
    data = file_by_hand(weights, kv_heads, group_size)
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    params, config = llama2c.load(path, interleaved=interleaved)
    assert config == dataclasses.replace(CONFIG, kv_heads=kv_heads, tied_head=tied)

    # Elements and scales are read unchanged.
    down = params["blocks"]["mlp"]["down"]["weight"]
    for layer in range(L):
        q, scales = quantize(weights["w2"][layer], group_size)
        np.testing.assert_array_equal(down.q[layer], q.reshape(D, F))
        np.testing.assert_array_equal(down.scales[layer], scales.reshape(D, F // group_size))
    assert save_bytes(tmp_path / "again.bin", params, config, interleaved=interleaved) == data

    for name in MATRICES:
        if name in weights:
            q, scales = quantize(weights[name], group_size)
            weights[name] = (q * scales[:, None]).reshape(weights[name].shape)
    assert error(logits_of(params, config), logits_by_hand(weights, interleaved)) <= 1e-5


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.covering(("config",), ("int8",), ("interleaved",))
def test_round_trip_is_bit_identical(interleaved, config, int8, tmp_path):
    scaled = RopeScaling(factor=4.0, original_length=16)
    config = dataclasses.replace(config, rope_theta=5e5, rope_scaling=scaled, norm_eps=1e-6)
    params = random_params(config)
    if int8:
        params = quantize_params(params)
        params["lm_head"] = jax.tree.map(lambda x: x.at[V:].set(0), params["lm_head"])
    first = save_bytes(tmp_path / "a.bin", params, config, interleaved=interleaved)
    back, found = llama2c.load(
        tmp_path / "a.bin",
        rope_theta=5e5,
        rope_scaling=scaled,
        norm_eps=1e-6,
        interleaved=interleaved,
    )
    # An int8 LM head is a separate array, even if the float one was tied.
    assert found == (dataclasses.replace(config, tied_head=False) if int8 else config)
    assert_equal(back, params)
    assert save_bytes(tmp_path / "b.bin", back, found, interleaved=interleaved) == first
    np.testing.assert_array_equal(logits_of(back, found), logits_of(params, config))


def test_interleaving_changes_only_wq_and_wk(tmp_path):
    params = random_params(CONFIG)
    files = [
        np.frombuffer(
            save_bytes(tmp_path / "m.bin", params, CONFIG, interleaved=interleaved)[28:], "<f4"
        )
        for interleaved in (True, False)
    ]
    first = V * D + L * D
    last = first + L * (D + 2 * H) * D
    assert (files[0][first:last] != files[1][first:last]).any()
    np.testing.assert_array_equal(files[0][:first], files[1][:first])
    np.testing.assert_array_equal(files[0][last:], files[1][last:])


def test_dtype_option_casts_parameters(tmp_path):
    params = jax.tree.map(lambda x: x.astype("bfloat16"), random_params(CONFIG))
    llama2c.save(tmp_path / "m.bin", params, CONFIG)
    assert_equal(llama2c.load(tmp_path / "m.bin", dtype="bfloat16")[0], params)
    llama2c.save(tmp_path / "m.bin", quantize_params(params), CONFIG)
    back, _ = llama2c.load(tmp_path / "m.bin", dtype="bfloat16")
    assert back["wte"].dtype == jnp.bfloat16
    assert back["lm_head"].scales.dtype == jnp.float32
    assert back["lm_head"].q.dtype == jnp.int8


def test_loaded_int8_model_decodes(tmp_path):
    (tmp_path / "m.bin").write_bytes(file_by_hand(make_weights(2, tied=True), 2, 64))
    params, config = llama2c.load(tmp_path / "m.bin")
    (new,) = complete(llama3, params, [[5, 9, 2]], config=config, max_new_tokens=4, temperature=0)
    tokens = [5, 9, 2]
    for _ in range(4):
        padded = jnp.array([tokens + [0] * (7 - len(tokens))])
        logits = forward(params, padded, config)[0, len(tokens) - 1, :V]
        tokens.append(int(jnp.argmax(logits)))
    assert new.tolist() == tokens[3:]


def test_load_does_not_depend_on_the_backend(tmp_path, monkeypatch):
    """Only shapes are evaluated, so a backend that is unavailable causes no error."""
    asked = []

    def record(*args, **options):
        asked.append(resolve())
        return quantize_params(*args, **options)

    monkeypatch.setattr(llama2c, "quantize_params", record)
    (tmp_path / "m.bin").write_bytes(file_by_hand(make_weights(2, tied=False), 2, 64))
    with jaxllm.use_backend("cuda"):
        llama2c.load(tmp_path / "m.bin")
    assert set(asked) == {"xla"}


def damaged(change, group_size=None):
    """A file with some words of its header changed."""
    data = bytearray(file_by_hand(make_weights(2, tied=True), 2, group_size))
    for word, value in change.items():
        struct.pack_into("<i", data, 4 * word, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: -D}, "width is -128; it must be >= 1"),
        ({1: 0}, "mlp_width is 0; it must be >= 1"),
        ({2: -1}, "layers is -1"),
        ({3: 0}, "heads is 0"),
        ({3: 3}, "width 128 is not a multiple of twice heads 3"),
        ({4: -2}, "kv_heads is -2"),
        ({4: 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({5: 0}, "vocab_size is 0"),
        ({6: 0}, "max_seq_len is 0"),
        ({0: 0x616B3432, 1: 2}, "has version 2 of llama2.c's export; it must have version 0"),
        ({2: 3}, r"has \d+ bytes; by its header it must have \d+ in float32"),
        ({5: -V}, r"has \d+ bytes; by its header it must have \d+ in float32"),
        # Larger than any memory: rejected by its size, without an allocation.
        ({2: 2**31 - 1}, r"has \d+ bytes; by its header it must have \d+ in float32"),
        (
            {0: 2**30, 3: 1, 4: 1, 5: 2**31 - 1},
            r"has \d+ bytes; by its header it must have \d+ in f",
        ),
    ],
)
@pytest.mark.parametrize("group_size", [None, 64])
def test_invalid_header_is_rejected(change, message, group_size, tmp_path):
    path = tmp_path / "m.bin"
    path.write_bytes(damaged(change, group_size))
    with pytest.raises(ValueError, match=f"^{path}: {message}"):
        llama2c.load(path)


@pytest.mark.parametrize("group_size", [None, 64])
@pytest.mark.parametrize("bytes_more", [-100_000, -4, -1, 1, 4])
def test_wrong_file_size_is_rejected_before_reading(group_size, bytes_more, tmp_path, monkeypatch):
    data = damaged({}, group_size)
    size = len(data)
    path = tmp_path / "m.bin"
    path.write_bytes((data + bytes(4))[: size + bytes_more])

    def assemble(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(llama2c, "assemble", assemble)
    wanted = f" {size} in {'float32' if group_size is None else 'int8 with groups of 64'}"
    with pytest.raises(ValueError, match=f"^{path}: has {size + bytes_more} bytes; .*{wanted}"):
        llama2c.load(path)


def test_invalid_group_size_is_rejected(tmp_path):
    path = tmp_path / "m.bin"
    for group_size in (0, -64, 48):
        path.write_bytes(damaged({7: group_size}, 64))
        message = f"int8: {group_size} is not a divisor of width 128 and mlp_width 192"
        with pytest.raises(ValueError, match=message):
            llama2c.load(path)
    path.write_bytes(damaged({7: 32}, 64))
    with pytest.raises(ValueError, match="int8 with groups of 32"):
        llama2c.load(path)


def test_missing_or_short_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing: there is no such file"):
        llama2c.load(tmp_path / "nothing")
    (tmp_path / "short").write_bytes(bytes(27))
    with pytest.raises(ValueError, match="short: has 27 bytes; the header alone has 28"):
        llama2c.load(tmp_path / "short")


@pytest.mark.parametrize("int8", [False, True])
def test_unstacked_layers_are_saved_like_stacked_ones(int8, tmp_path):
    params = llama3.init(jax.random.key(0), CONFIG)
    params = quantize_params(params, group_size=8) if int8 else params
    stacked, listed = tmp_path / "stacked.bin", tmp_path / "listed.bin"
    llama2c.save(stacked, params, CONFIG)
    llama2c.save(listed, unstack(params), CONFIG)
    assert listed.read_bytes() == stacked.read_bytes()


def test_failed_save_leaves_no_file(tmp_path, monkeypatch):
    path, params = tmp_path / "m.bin", random_params(CONFIG)
    with pytest.raises(ValueError, match="head is unexpected"):
        llama2c.save(path, params, TIED)
    with pytest.raises(ValueError, match="norm_f/scale has dtype int32; it must be floating"):
        llama2c.save(path, {**params, "norm_f": {"scale": jnp.ones(D, int)}}, CONFIG)
    int8 = quantize_params(params)
    int8["lm_head"] = dataclasses.replace(int8["lm_head"], q=int8["lm_head"].q.astype(int))
    with pytest.raises(ValueError, match="lm_head/q has dtype int32; it must be int8"):
        llama2c.save(path, int8, CONFIG)
    mixed = quantize_params(params, group_size=64)
    mixed["lm_head"] = quantize_params(params, group_size=32)["lm_head"]
    with pytest.raises(ValueError, match=r"lm_head/scales has shape \(128, 4\); it must be"):
        llama2c.save(path, mixed, CONFIG)

    def fail(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(llama2c, "_interleave_pairs", fail)
    with pytest.raises(OSError, match="no space left"):
        llama2c.save(path, params, CONFIG)
    assert not list(tmp_path.iterdir())


def test_options_and_configs_of_another_type_are_rejected(tmp_path):
    path: Any = tmp_path / "m.bin"
    scaling: Any = {"factor": 8.0}
    config: Any = GPT2Config(width=64, heads=4)
    save_bytes(path, random_params(CONFIG), CONFIG)
    with pytest.raises(TypeError, match="rope_scaling has type dict; it must be RopeScaling"):
        llama2c.load(path, rope_scaling=scaling)
    with pytest.raises(TypeError, match="config has type GPT2Config; it must be Llama3Config"):
        llama2c.save(path, {}, config)
