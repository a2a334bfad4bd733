"""The files of llama2.c and KuiperLLama: against ones made by hand, and a Llama in NumPy."""

import dataclasses
import struct

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
from jaxllm.models.blocks import unstack
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
    """Random weights, (out, in), of all layers, and the rotary tables."""
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
    """The bytes of a file."""
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
    """What llama2.c computes of one sequence, in NumPy."""

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

    def turn(x):
        cos, sin = (weights[name][:T, None] for name in ("cos", "sin"))
        halves = (slice(None, H // 2), slice(H // 2, None))
        one, two = (slice(0, None, 2), slice(1, None, 2)) if interleaved else halves
        a, b, turned = x[..., one], x[..., two], np.empty_like(x)
        turned[..., one], turned[..., two] = a * cos - b * sin, a * sin + b * cos
        return turned

    x = weights["table"][TOKENS]
    for layer in range(L):
        w = {name: array[layer] for name, array in weights.items() if name not in ("cos", "sin")}
        y = norm(x, w["norm1"])
        q, k, v = ((y @ w[name].T).reshape(T, -1, H) for name in ("wq", "wk", "wv"))
        k, v = (np.repeat(part, N // part.shape[1], axis=1) for part in (turn(k), v))
        scores = np.einsum("tnh,snh->nts", turn(q), k) / np.sqrt(H)
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
def test_a_float32_file_is_the_model_it_was_made_of(interleaved, tied, kv_heads, tmp_path):
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
    rotary = 2 * 4 * CONFIG.max_seq_len * H // 2  # bytes, which another library may round otherwise
    start = len(data) - rotary - (0 if tied else 4 * V * D)
    assert again[:start] == data[:start]
    assert again[start + rotary :] == data[start + rotary :]
    ours, theirs = (np.frombuffer(file[start : start + rotary], "<f4") for file in (again, data))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kv_heads", "group_size"), [(1, 64), (2, 64), (4, 32)])
def test_an_int8_file_is_the_model_it_was_made_of(
    interleaved, tied, kv_heads, group_size, tmp_path
):
    weights = make_weights(kv_heads, tied)
    data = file_by_hand(weights, kv_heads, group_size)
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    params, config = llama2c.load(path, interleaved=interleaved)
    assert config == dataclasses.replace(CONFIG, kv_heads=kv_heads, tied_head=tied)

    # Every number is the file's, and none was rounded again.
    down = params["blocks"]["mlp"]["down"]
    for layer in range(L):
        q, scales = quantize(weights["w2"][layer], group_size)
        np.testing.assert_array_equal(down["weight_q"][layer], q.reshape(D, F))
        np.testing.assert_array_equal(
            down["weight_scales"][layer], scales.reshape(D, F // group_size)
        )
    assert save_bytes(tmp_path / "again.bin", params, config, interleaved=interleaved) == data

    for name in MATRICES:
        if name in weights:
            q, scales = quantize(weights[name], group_size)
            weights[name] = (q * scales[:, None]).reshape(weights[name].shape)
    assert error(logits_of(params, config), logits_by_hand(weights, interleaved)) <= 1e-5


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("int8", [False, True])
def test_there_and_back_changes_no_bit(interleaved, config, int8, tmp_path):
    scaled = RopeScaling(factor=4.0, original_length=16)
    config = dataclasses.replace(config, rope_theta=5e5, rope_scaling=scaled, norm_eps=1e-6)
    params = random_params(config)
    if int8:
        params = quantize_params(params)
        params["head"] = jax.tree.map(lambda x: x.at[V:].set(0), params["head"])
    first = save_bytes(tmp_path / "a.bin", params, config, interleaved=interleaved)
    back, found = llama2c.load(
        tmp_path / "a.bin",
        rope_theta=5e5,
        rope_scaling=scaled,
        norm_eps=1e-6,
        interleaved=interleaved,
    )
    # An int8 head is an array of its own, also where the table was the head.
    assert found == (dataclasses.replace(config, tied_head=False) if int8 else config)
    assert_equal(back, params)
    assert save_bytes(tmp_path / "b.bin", back, found, interleaved=interleaved) == first
    np.testing.assert_array_equal(logits_of(back, found), logits_of(params, config))


def test_the_orders_of_rotary_pairs_differ_in_wq_and_wk_alone(tmp_path):
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


def test_the_dtype_may_be_chosen(tmp_path):
    params = jax.tree.map(lambda x: x.astype("bfloat16"), random_params(CONFIG))
    llama2c.save(tmp_path / "m.bin", params, CONFIG)
    assert_equal(llama2c.load(tmp_path / "m.bin", dtype="bfloat16")[0], params)
    llama2c.save(tmp_path / "m.bin", quantize_params(params), CONFIG)
    back, _ = llama2c.load(tmp_path / "m.bin", dtype="bfloat16")
    assert back["wte"].dtype == jnp.bfloat16
    assert back["head"]["weight_scales"].dtype == jnp.float32
    assert back["head"]["weight_q"].dtype == jnp.int8


def test_what_was_read_decodes(tmp_path):
    (tmp_path / "m.bin").write_bytes(file_by_hand(make_weights(2, tied=True), 2, 64))
    params, config = llama2c.load(tmp_path / "m.bin")
    (new,) = complete(llama3, params, [[5, 9, 2]], config=config, max_new_tokens=4, temperature=0)
    tokens = [5, 9, 2]
    for _ in range(4):
        padded = jnp.array([tokens + [0] * (7 - len(tokens))])
        logits = forward(params, padded, config)[0, len(tokens) - 1, :V]
        tokens.append(int(jnp.argmax(logits)))
    assert new.tolist() == tokens[3:]


def test_the_backend_does_not_matter(tmp_path, monkeypatch):
    """Nothing is computed, so one that cannot serve here does no harm."""
    asked = []

    def noting(*args, **options):
        asked.append(resolve())
        return quantize_params(*args, **options)

    monkeypatch.setattr(llama2c, "quantize_params", noting)
    (tmp_path / "m.bin").write_bytes(file_by_hand(make_weights(2, tied=False), 2, 64))
    with jaxllm.use_backend("cuda"):
        llama2c.load(tmp_path / "m.bin")
    assert set(asked) == {"xla"}


def damaged(change, group_size=None):
    """A file with one word of its header changed."""
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
        ({0: 0x616B3432, 1: 2}, "is of version 2 of llama2.c's export; it must be of version 0"),
        ({2: 3}, r"has \d+ bytes; its header asks for \d+ in float32"),
        ({5: -V}, r"has \d+ bytes; its header asks for \d+ in float32"),
        # More than any machine holds: told from the size, not by trying.
        ({2: 2**31 - 1}, r"has \d+ bytes; its header asks for \d+ in float32"),
        ({0: 2**30, 3: 1, 4: 1, 5: 2**31 - 1}, r"has \d+ bytes; its header asks for \d+ in f"),
    ],
)
@pytest.mark.parametrize("group_size", [None, 64])
def test_a_wrong_header_is_refused(change, message, group_size, tmp_path):
    path = tmp_path / "m.bin"
    path.write_bytes(damaged(change, group_size))
    with pytest.raises(ValueError, match=f"^{path}: {message}"):
        llama2c.load(path)


@pytest.mark.parametrize("group_size", [None, 64])
@pytest.mark.parametrize("bytes_more", [-100_000, -4, -1, 1, 4])
def test_a_file_of_another_size_is_refused_unread(group_size, bytes_more, tmp_path, monkeypatch):
    data = damaged({}, group_size)
    size = len(data)
    path = tmp_path / "m.bin"
    path.write_bytes((data + bytes(4))[: size + bytes_more])

    def assemble(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(llama2c, "assemble", assemble)
    wanted = f"for {size} in {'float32' if group_size is None else 'int8 with groups of 64'}"
    with pytest.raises(ValueError, match=f"^{path}: has {size + bytes_more} bytes; .*{wanted}"):
        llama2c.load(path)


def test_a_group_size_that_cannot_be_is_refused(tmp_path):
    path = tmp_path / "m.bin"
    for group_size in (0, -64, 48):
        path.write_bytes(damaged({7: group_size}, 64))
        message = f"int8: {group_size} is not a divisor of width 128 and mlp_width 192"
        with pytest.raises(ValueError, match=message):
            llama2c.load(path)
    path.write_bytes(damaged({7: 32}, 64))
    with pytest.raises(ValueError, match="int8 with groups of 32"):
        llama2c.load(path)


def test_a_file_that_is_not_there_or_has_no_header_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing: there is no such file"):
        llama2c.load(tmp_path / "nothing")
    (tmp_path / "short").write_bytes(bytes(27))
    with pytest.raises(ValueError, match="short: has 27 bytes; the header alone has 28"):
        llama2c.load(tmp_path / "short")


@pytest.mark.parametrize("int8", [False, True])
def test_layers_in_a_list_are_saved_as_those_stacked(int8, tmp_path):
    params = llama3.init(jax.random.key(0), CONFIG)
    params = quantize_params(params, group_size=8) if int8 else params
    stacked, listed = tmp_path / "stacked.bin", tmp_path / "listed.bin"
    llama2c.save(stacked, params, CONFIG)
    llama2c.save(listed, unstack(params), CONFIG)
    assert listed.read_bytes() == stacked.read_bytes()


def test_saving_refuses_what_it_cannot_write_and_leaves_nothing(tmp_path, monkeypatch):
    path, params = tmp_path / "m.bin", random_params(CONFIG)
    with pytest.raises(ValueError, match="head is unexpected"):
        llama2c.save(path, params, TIED)
    with pytest.raises(ValueError, match="norm_f/scale has dtype int32; it must be floating"):
        llama2c.save(path, {**params, "norm_f": {"scale": jnp.ones(D, int)}}, CONFIG)
    int8 = quantize_params(params)
    int8["head"]["weight_q"] = int8["head"]["weight_q"].astype(int)
    with pytest.raises(ValueError, match="head/weight_q has dtype int32; it must be int8"):
        llama2c.save(path, int8, CONFIG)
    mixed = quantize_params(params, group_size=64)
    mixed["head"] = quantize_params(params, group_size=32)["head"]
    with pytest.raises(ValueError, match=r"head/weight_scales has shape \(128, 4\); it must be"):
        llama2c.save(path, mixed, CONFIG)

    def fail(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(llama2c, "_pairs_together", fail)
    with pytest.raises(OSError, match="no space left"):
        llama2c.save(path, params, CONFIG)
    assert not list(tmp_path.iterdir())
