"""llm.c's file formats, against files packed with struct and NumPy."""

import struct
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm import __main__ as command_line
from jaxllm import training
from jaxllm.convert import llmc, llmc_check
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import for_decoding, unstack
from jaxllm.models.gpt2 import GPT2Config

V, VP, P, L, N, D = 61, 128, 12, 3, 2, 8
CONFIG = GPT2Config(vocab_size=V, max_seq_len=P, layers=L, heads=N, width=D)
# The tensors in file order, weights as (out, in).
SHAPES = {
    "wte": (VP, D),
    "wpe": (P, D),
    "ln1w": (L, D),
    "ln1b": (L, D),
    "qkvw": (L, 3 * D, D),
    "qkvb": (L, 3 * D),
    "attprojw": (L, D, D),
    "attprojb": (L, D),
    "ln2w": (L, D),
    "ln2b": (L, D),
    "fcw": (L, 4 * D, D),
    "fcb": (L, 4 * D),
    "fcprojw": (L, D, 4 * D),
    "fcprojb": (L, D),
    "lnfw": (D,),
    "lnfb": (D,),
}
COUNT = sum(int(np.prod(shape)) for shape in SHAPES.values())


def header(*words):
    return struct.pack("<256i", *words, *[0] * (256 - len(words)))


def random_tensors(seed, std=0.3):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, std, shape).astype("<f4") for name, shape in SHAPES.items()}


def as_bytes(tensors, dtype="<f4"):
    return b"".join(tensors[name].astype(dtype).tobytes() for name in SHAPES)


def checkpoint_bytes(tensors, version=3):
    dtype = {3: "<f4", 5: ml_dtypes.bfloat16}[version]
    return header(20240326, version, P, V, L, N, D, VP) + as_bytes(tensors, dtype)


def jaxllm_params(tensors):
    """The jaxllm parameters, written out by hand."""
    t = {name: jnp.asarray(array) for name, array in tensors.items()}
    transpose = lambda name: jnp.swapaxes(t[name], 1, 2)  # noqa: E731
    return {
        "wte": t["wte"],
        "wpe": t["wpe"],
        "blocks": {
            "ln1": {"scale": t["ln1w"], "bias": t["ln1b"]},
            "attention": {
                "qkv": {
                    "weight": transpose("qkvw").reshape(L, D, 3, N, -1),
                    "bias": t["qkvb"].reshape(L, 3, N, -1),
                },
                "out": {"weight": transpose("attprojw"), "bias": t["attprojb"]},
            },
            "ln2": {"scale": t["ln2w"], "bias": t["ln2b"]},
            "mlp": {
                "up": {"weight": transpose("fcw"), "bias": t["fcb"]},
                "down": {"weight": transpose("fcprojw"), "bias": t["fcprojb"]},
            },
        },
        "ln_f": {"scale": t["lnfw"], "bias": t["lnfb"]},
    }


def assert_equal(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.fixture
def tensors():
    return random_tensors(0)


@pytest.fixture
def checkpoint(tmp_path, tensors):
    path = tmp_path / "model.bin"
    path.write_bytes(checkpoint_bytes(tensors))
    return path


def test_load_gpt2_reads_parameters_and_config(checkpoint, tensors):
    params, config = llmc.load_gpt2(checkpoint)
    assert config == CONFIG
    assert_equal(params, jaxllm_params(tensors))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_gpt2_124m_has_the_published_size():
    assert gpt2.num_params(gpt2.PRESETS["d12"]) == 124_475_904
    assert 1024 + 4 * 124_475_904 == 497_904_640


@pytest.mark.parametrize("version", [3, 5])
def test_checkpoint_round_trip_is_identical(tmp_path, tensors, version):
    # Including nonzero padding, negative zeros, and the bits of NaNs.
    tensors["wte"][:, 0] = -0.0
    tensors["wpe"][0, 0] = np.frombuffer(struct.pack("<I", 0x7FE50000), "<f4")[0]
    path, copy = tmp_path / "model.bin", tmp_path / "copy.bin"
    path.write_bytes(checkpoint_bytes(tensors, version))
    params, config = llmc.load_gpt2(path)
    llmc.save_gpt2(copy, params, config)
    assert copy.read_bytes() == path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy.bin", "model.bin"]
    llmc.save_gpt2(copy, unstack(params), config)
    assert copy.read_bytes() == path.read_bytes()


def test_dtype_option_casts_parameters(tmp_path, checkpoint, tensors):
    narrow, _ = llmc.load_gpt2(checkpoint, dtype="bfloat16")
    assert_equal(narrow, training.cast(jaxllm_params(tensors), "bfloat16"))
    llmc.save_gpt2(tmp_path / "narrow.bin", jaxllm_params(tensors), CONFIG, dtype="bfloat16")
    assert (tmp_path / "narrow.bin").read_bytes() == checkpoint_bytes(tensors, 5)


def test_parameters_of_two_dtypes_are_written_in_float32(tmp_path, tensors):
    params = jaxllm_params(tensors)
    mixed = {**params, "wte": params["wte"].astype("bfloat16")}
    llmc.save_gpt2(tmp_path / "x.bin", mixed, CONFIG)
    found, _ = llmc.load_gpt2(tmp_path / "x.bin")
    assert_equal(found, {**params, "wte": mixed["wte"].astype("float32")})


def test_save_gpt2_rejects_invalid_parameters(tmp_path, tensors):
    with pytest.raises(ValueError, match="dtype is float16; it must be float32 or bfloat16"):
        llmc.save_gpt2(tmp_path / "x.bin", training.cast(jaxllm_params(tensors), "float16"), CONFIG)
    with pytest.raises(ValueError, match=r"wpe has shape \(12, 8\); it must be \(13, 8\)"):
        llmc.save_gpt2(tmp_path / "x.bin", jaxllm_params(tensors), GPT2Config(V, P + 1, L, N, D))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (0, 20240327, "magic number 20240327; a GPT-2 checkpoint has 20240326"),
        (1, 4, "version 4; .* has version 3 or 5"),
        (5, 3, "width 8 is not a multiple of heads 3"),
        (4, -1, "layers is -1"),
        (7, 61, "padded to 61; it must be padded to 128"),
        (
            2,
            13,
            rf"{1024 + 4 * COUNT} bytes long; .* so it must have {1024 + 4 * (COUNT + D)} bytes",
        ),
    ],
)
def test_invalid_headers_are_rejected(checkpoint, word, value, message):
    raw = bytearray(checkpoint.read_bytes())
    struct.pack_into("<i", raw, 4 * word, value)
    checkpoint.write_bytes(raw)
    with pytest.raises(ValueError, match=message) as caught:
        llmc.load_gpt2(checkpoint)
    assert str(caught.value).startswith(str(checkpoint))


@pytest.mark.parametrize("size", [0, 1023, 1024, 1024 + 4 * COUNT - 1, 1024 + 4 * COUNT + 1])
def test_wrong_file_size_is_rejected(checkpoint, size):
    checkpoint.write_bytes((checkpoint.read_bytes() + b"\0")[:size])
    with pytest.raises(ValueError, match=f"{size} bytes long"):
        llmc.load_gpt2(checkpoint)


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere.bin: there is no such file"):
        llmc.load_gpt2(tmp_path / "nowhere.bin")


B, T = 2, 5


def debug_bytes(logits, loss, gradients):
    tokens = np.random.default_rng(1).integers(0, V, B * T + 1).astype("<i4")
    return b"".join(
        [
            header(20240327, 2, B, T),
            tokens[:-1].tobytes(),
            tokens[1:].tobytes(),
            logits.astype("<f4").tobytes(),
            struct.pack("<f", loss),
            as_bytes(gradients),
        ]
    )


def test_debug_state_is_read(tmp_path):
    logits = np.random.default_rng(2).normal(size=(B, T, V)).astype("<f4")
    gradients = random_tensors(3)
    path = tmp_path / "debug.bin"
    path.write_bytes(debug_bytes(logits, 4.5, gradients))
    state = llmc.read_debug_state(path, CONFIG)
    np.testing.assert_array_equal(state.tokens.ravel()[1:], state.labels.ravel()[:-1])
    assert state.tokens.shape == (B, T)
    np.testing.assert_array_equal(state.logits, logits)
    assert state.loss == 4.5
    assert_equal(state.gradients, jaxllm_params(gradients))
    with pytest.raises(ValueError, match=r"a vocabulary of 60, .* bytes"):
        llmc.read_debug_state(path, GPT2Config(V - 1, P, L, N, D))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=f"2 sequences of 5 tokens.* {COUNT} gradients"):
        llmc.read_debug_state(path, CONFIG)
    path.write_bytes(header(20240326, 2))
    with pytest.raises(ValueError, match="magic number 20240326; a debug state has 20240327"):
        llmc.read_debug_state(path, CONFIG)


def torch_results(huggingface, tensors):
    """Logits, loss and gradients of the transformers model, in llm.c's order."""
    torch, transformers = huggingface
    config = transformers.GPT2Config(
        vocab_size=V, n_positions=P, n_embd=D, n_layer=L, n_head=N,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    named = dict(model.transformer.named_parameters())
    modules = {"wte": "wte.weight", "wpe": "wpe.weight", "lnfw": "ln_f.weight", "lnfb": "ln_f.bias"}
    layered = {
        "ln1w": "ln_1.weight", "ln1b": "ln_1.bias", "ln2w": "ln_2.weight", "ln2b": "ln_2.bias",
        "qkvw": "attn.c_attn.weight", "qkvb": "attn.c_attn.bias",
        "attprojw": "attn.c_proj.weight", "attprojb": "attn.c_proj.bias",
        "fcw": "mlp.c_fc.weight", "fcb": "mlp.c_fc.bias",
        "fcprojw": "mlp.c_proj.weight", "fcprojb": "mlp.c_proj.bias",
    }  # fmt: skip

    def each():
        """Yields a torch parameter, its tensor's name and index, and whether it is transposed."""
        for name, module in modules.items():
            yield named[module], name, (slice(V),) if name == "wte" else (), False
        for name, module in layered.items():
            for i in range(L):
                transposed = name in ("qkvw", "attprojw", "fcw", "fcprojw")  # Conv1D is (in, out)
                yield named[f"h.{i}.{module}"], name, (i,), transposed

    for parameter, name, index, transposed in each():
        part = torch.from_numpy(tensors[name][index].copy())
        parameter.data.copy_(part.T if transposed else part)
    raw = np.frombuffer(debug_bytes(np.zeros((B, T, V)), 0, tensors), "<i4")[256:]
    tokens = torch.from_numpy(raw[: B * T].reshape(B, T).astype(np.int64))
    labels = torch.from_numpy(raw[B * T : 2 * B * T].astype(np.int64))
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, V), labels)
    loss.backward()
    gradients = {name: np.zeros(shape, "<f4") for name, shape in SHAPES.items()}
    for parameter, name, index, transposed in each():
        grad = parameter.grad.numpy()
        gradients[name][index] = grad.T if transposed else grad
    return logits.detach().numpy(), loss.item(), gradients


def test_check_agrees_with_transformers(huggingface, checkpoint, tensors, tmp_path, capsys):
    logits, loss, gradients = torch_results(huggingface, tensors)
    path = tmp_path / "debug.bin"
    path.write_bytes(debug_bytes(logits, loss, gradients))
    command_line.main(["check-llmc", str(checkpoint), str(path), "--tolerance", "1e-4"])
    printed = capsys.readouterr().out
    assert "all are within 0.0001" in printed
    assert all(name in printed for name in ("logits", "loss", *llmc.TENSORS))


def test_check_reports_each_wrong_tensor(checkpoint, tmp_path, capsys):
    params, _ = llmc.load_gpt2(checkpoint)
    path = tmp_path / "debug.bin"
    path.write_bytes(debug_bytes(np.zeros((B, T, V)), 0, random_tensors(4)))
    wrong = llmc.read_debug_state(path, CONFIG)
    rows = llmc_check.compare(params, CONFIG, wrong)
    assert all(row.error > 0.1 for row in rows)
    # The model's own results, with one element changed, and with one NaN.
    tokens, labels = map(jnp.asarray, (wrong.tokens, wrong.labels))
    loss, gradients = jax.value_and_grad(gpt2.loss)(params, tokens, labels, CONFIG)
    logits = gpt2.forward(params, tokens, CONFIG)[..., :V]
    right = wrong._replace(logits=np.asarray(logits), loss=float(loss), gradients=gradients)
    assert all(row.error < 1e-5 for row in llmc_check.compare(params, CONFIG, right))
    for value in (1e9, np.nan):
        bad = right._replace(gradients=gradients | {"wpe": gradients["wpe"].at[1, 2].set(value)})
        faults = [r.name for r in llmc_check.compare(params, CONFIG, bad) if not r.error < 1e-5]
        assert faults == ["wpe"]
    with pytest.raises(SystemExit) as caught:
        command_line.main(["check-llmc", str(checkpoint), str(path)])
    assert caught.value.code == 1
    assert "18 of 18 exceed 0.001" in capsys.readouterr().out


def test_check_has_no_tolerance_of_other_dtypes(checkpoint):
    with pytest.raises(ValueError, match="dtype is float16; without a tolerance it must be"):
        llmc_check.check(checkpoint, checkpoint, dtype="float16")


def test_check_reports_misuse_in_one_line(checkpoint, capsys):
    with pytest.raises(SystemExit) as caught:
        command_line.main(["check-llmc", str(checkpoint), str(checkpoint)])
    assert caught.value.code == 2
    assert "a debug state has 20240327" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("masters", [False, True])
def test_optimizer_state_round_trip(tmp_path, masters):
    trees = [random_tensors(seed) for seed in range(3)][: 2 + masters]
    path, copy = tmp_path / "state_00000700_00000.bin", tmp_path / "copy.bin"
    words = header(20240527, 1, 1, 0, int(masters), 0, 0, 0, 0, 0, 700)
    path.write_bytes(words + b"".join(map(as_bytes, trees)))
    state = llmc.read_optimizer_state(path, CONFIG)
    assert state.step == 700
    assert_equal(state.m, jaxllm_params(trees[0]))
    assert_equal(state.v, jaxllm_params(trees[1]))
    assert (state.master is not None) == masters
    if masters:
        assert_equal(state.master, jaxllm_params(trees[2]))
    llmc.write_optimizer_state(copy, state)
    assert copy.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"step": 3.7}, TypeError, r"step is 3\.7; it must be an integer"),
        ({"step": -1}, ValueError, "step is -1; it must be at least 0 and below"),
        ({"step": 2**31}, ValueError, "step is 2147483648; it must be at least 0 and below"),
        ({"v": "int32"}, TypeError, "v/.* has dtype int32; it must be a floating-point array"),
    ],
)
def test_optimizer_state_that_would_change_is_rejected(tmp_path, tensors, changed, error, message):
    m = jaxllm_params(tensors)
    state = llmc.OptimizerState(1, m, m, None)
    if "v" in changed:
        changed = {"v": jax.tree.map(lambda x: x.astype(changed["v"]), m)}
    with pytest.raises(error, match=message):
        llmc.write_optimizer_state(tmp_path / "x.bin", state._replace(**changed))
    assert not (tmp_path / "x.bin").exists()


def test_optimizer_state_of_wrong_shape_is_rejected(tmp_path):
    params = jaxllm_params(random_tensors(0))
    path = tmp_path / "state.bin"
    for m, v, message in (
        (params, params | {"wte": params["wte"][:-1]}, "^v: wte has shape"),
        (params | {"other": params["wte"]}, params, "^m: other is unexpected"),
        (params, {"wte": 1}, "^v has no 'blocks'"),
        (params, for_decoding(params), "^v is in the layout of for_decoding"),
    ):
        with pytest.raises(ValueError, match=message):
            llmc.write_optimizer_state(path, llmc.OptimizerState(1, m, v, None))
    assert not path.exists()


def test_sharded_optimizer_state_is_rejected(tmp_path):
    path = tmp_path / "state.bin"
    path.write_bytes(header(20240527, 1, 2, 1, 0) + bytes(4 * COUNT))
    with pytest.raises(
        ValueError, match=f"rank 1 of 2 .*, so it must have {1024 + 8 * COUNT} bytes"
    ):
        llmc.read_optimizer_state(path, CONFIG)


def test_a_config_of_another_model_is_rejected(tmp_path):
    config: Any = llama3.Llama3Config(width=64, heads=4, kv_heads=4)
    for call in (
        lambda: llmc.save_gpt2(tmp_path / "m.bin", {}, config),
        lambda: llmc.read_debug_state(tmp_path / "m.bin", config),
        lambda: llmc.read_optimizer_state(tmp_path / "m.bin", config),
    ):
        with pytest.raises(TypeError, match="config has type Llama3Config; it must be GPT2Config"):
            call()
    assert not any(tmp_path.iterdir())
