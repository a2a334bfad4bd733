"""The options of Llama 3's model that Mistral, Qwen2 and Qwen3 have, without another library."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.inference.cache import decode_step, init_cache, prefill
from jaxllm.inference.generate import complete, stream
from jaxllm.inference.quantize import quantize_params
from jaxllm.models import llama3
from jaxllm.models.common import SAVE_GEMMS, for_decoding, stack, unstack
from jaxllm.testing import error
from jaxllm.training import decay_mask, parallel
from jaxllm.training.plan import make_plan
from jaxllm.training.plan_inputs import Model

T, VOCAB = 20, 61
PLAIN = llama3.Llama3Config(
    vocab_size=VOCAB, max_seq_len=48, layers=3, heads=4, kv_heads=2, width=32, mlp_width=48,
    rope_theta=100.0, rope_scaling=None,
)  # fmt: skip
# Two runs of layers, the second of two. Heads are wider than the residual.
MIXED = dataclasses.replace(PLAIN, head_dim=12, qkv_bias=True, qk_norm=True, window=(None, 5, 5))
CONFIGS = {
    "window": dataclasses.replace(PLAIN, window=5),
    "bias": dataclasses.replace(PLAIN, qkv_bias=True, tied_head=True),
    "norm": dataclasses.replace(PLAIN, qk_norm=True, head_dim=12),
    "mixed": MIXED,
}


@functools.cache
def params_of(name):
    """Parameters that are random in every array."""
    params = llama3.init(jax.random.key(0), CONFIGS[name])
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = [0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return tree.unflatten([x + n for x, n in zip(leaves, noise, strict=True)])


@functools.cache
def batch() -> tuple[Any, Any]:
    # Of NumPy: a traced function may be the first to ask for it.
    tokens = np.random.default_rng(2).integers(0, VOCAB, (2, T), np.int32)
    labels = np.roll(tokens, -1, axis=1)
    labels[1, 13:] = -1
    return tokens, labels


@functools.cache
def loss_and_gradients(name):
    config = CONFIGS[name]
    return jax.jit(jax.value_and_grad(lambda p: llama3.loss(p, *batch(), config)))(params_of(name))


def test_defaults_have_the_parameters_of_llama_3():
    blocks = llama3.init(jax.random.key(0), PLAIN)["blocks"]
    assert jax.tree.map(jnp.shape, blocks) == {
        "norm1": {"scale": (3, 32)},
        "attention": {"qkv": {"weight": (3, 32, 4, 2, 8)}, "out": {"weight": (3, 32, 32)}},
        "norm2": {"scale": (3, 32)},
        "mlp": {"gate_up": {"weight": (3, 32, 2, 48)}, "down": {"weight": (3, 48, 32)}},
    }


def test_options_add_parameters():
    params = llama3.init(jax.random.key(0), MIXED)
    attention = params["blocks"]["attention"]
    assert jax.tree.map(jnp.shape, attention) == {
        "qkv": {"weight": (3, 32, 4, 2, 12), "bias": (3, 4, 2, 12)},
        "q_norm": {"scale": (3, 12)},
        "k_norm": {"scale": (3, 12)},
        "out": {"weight": (3, 48, 32)},
    }
    assert not attention["qkv"]["bias"].any()
    assert (attention["q_norm"]["scale"] == 1).all() and (attention["k_norm"]["scale"] == 1).all()
    assert llama3.num_params(MIXED) == sum(x.size for x in jax.tree.leaves(params))
    # What all configs have is drawn alike.
    plain = llama3.init(jax.random.key(0), PLAIN)
    biased = llama3.init(jax.random.key(0), dataclasses.replace(PLAIN, qkv_bias=True))
    del biased["blocks"]["attention"]["qkv"]["bias"]
    jax.tree.map(np.testing.assert_array_equal, biased, plain)


def test_flops_count_the_heads_and_the_keys_of_a_window():
    weights = 3 * (32 * 96 + 48 * 32 + 3 * 32 * 48) + 128 * 32
    for seq_len, keys in ((3, 3 * 3), (T, T + 2 * 5)):
        assert llama3.flops_per_token(MIXED, seq_len) == 6 * weights + 12 * 48 * keys


@pytest.mark.parametrize("form", [stack, unstack])
@pytest.mark.parametrize("remat", [False, True, SAVE_GEMMS], ids=["nothing", "blocks", "gemms"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.covering(("name", "form"), ("remat", "form"))
def test_remat_and_layers_apart_give_equal_gradients(name, remat, form):
    def loss(p):
        return llama3.loss(p, *batch(), CONFIGS[name], remat=remat)

    found = stack(jax.jit(jax.grad(loss))(form(params_of(name))))
    _, expected = loss_and_gradients(name)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert error(a, b) <= 1e-5


def test_pallas_kernels_give_the_same_gradients():
    name = "mixed"
    value, expected = loss_and_gradients(name)
    with jaxllm.use_backend("pallas"):
        gradient = jax.jit(jax.value_and_grad(lambda p: llama3.loss(p, *batch(), CONFIGS[name])))
        found = gradient(params_of(name))
    assert error(found[0], value) <= 1e-5
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected), strict=True):
        assert error(a, b) <= 1e-4


def test_a_window_ends_the_influence_of_a_token():
    """Through three layers with a window of 5, a token reaches the 12 positions after it."""
    tokens, _ = batch()
    config, params = CONFIGS["window"], params_of("window")
    logits = jax.jit(lambda t: llama3.forward(params, t, config))
    changed = tokens.copy()
    changed[:, 1] = (tokens[:, 1] + 1) % VOCAB
    before, after = logits(tokens), logits(changed)
    differs = np.asarray((before != after).any(axis=(0, 2)))
    assert differs.tolist() == [1 <= t <= 1 + 3 * (5 - 1) for t in range(T)]


def test_uniform_windows_are_one_scan():
    def scans(config, length=T):
        params = jax.eval_shape(lambda: llama3.init(jax.random.key(0), config))
        tokens = batch()[0][:, :length]
        program = jax.make_jaxpr(lambda p: llama3.forward(p, tokens, config))(params)
        equations = program.eqns
        return [e.params["length"] for e in equations if e.primitive.name == "scan"]

    assert scans(PLAIN) == scans(CONFIGS["window"]) == [3]
    assert scans(dataclasses.replace(PLAIN, window=(5,) * 3)) == [3]
    assert scans(MIXED) == [1, 2]
    assert scans(MIXED, length=5) == [3]  # the window hides nothing


@pytest.mark.parametrize("precision", ["row", {"qkv": "row", "down": "tensor"}], ids=str)
def test_float8_gemms_take_the_options(precision):
    run = functools.partial(llama3.forward, params_of("mixed"), batch()[0], MIXED)
    found, exact = jax.jit(lambda: run(precision=precision))(), jax.jit(run)()
    assert 1e-4 < error(found, exact) < 0.2
    with pytest.raises(ValueError, match="precision names 'q_norm'; the layers are"):
        run(precision={"q_norm": "row"})


def test_documents_of_a_row_are_apart():
    tokens, _ = batch()
    segments = jnp.where(jnp.arange(T) < 8, 0, 1)[None] + jnp.zeros((2, 1), jnp.int32)
    positions = jnp.where(segments == 0, jnp.arange(T), jnp.arange(T) - 8)
    run = functools.partial(llama3.forward, params_of("mixed"))
    packed = run(tokens, MIXED, segment_ids=segments, positions=positions)
    apart = jnp.concatenate([run(tokens[:, :8], MIXED), run(tokens[:, 8:], MIXED)], axis=1)
    assert error(packed, apart) <= 1e-5


def test_explain_says_that_norms_of_heads_are_not_fused(with_kernels):
    del with_kernels
    loss = functools.partial(llama3.loss, tokens=batch()[0], labels=batch()[1])
    for name, config in CONFIGS.items():
        calls = jaxllm.explain(lambda p, c=config: loss(p, config=c), params_of(name)).calls
        block = next(call for call in calls if call.stem == "attention_block")
        reasons = " ".join(reason for _, reason in block.rejected)
        assert ("norms; the fused block has none" in reasons) == config.qk_norm
        assert ("rms_norm_forward" in {call.stem for call in calls}) == config.qk_norm


# Generation.

PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]


forward = jax.jit(llama3.forward, static_argnums=2)


def recomputed(name, params, prompt, count):
    """Greedy search that reads the whole text anew for each token."""
    config, tokens = CONFIGS[name], list(prompt)
    for _ in range(count):
        padded = jnp.array([tokens + [0] * (config.max_seq_len - len(tokens))])
        logits = forward(params, padded, config)[0, len(tokens) - 1, :VOCAB]
        tokens.append(int(jnp.argmax(logits)))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("name", "form"), [("window", "float"), ("mixed", "int8")])
def test_greedy_is_that_of_full_recomputation(name, form):
    """Prompts are shorter and longer than the window; texts are several windows long."""
    params = params_of(name)
    params = quantize_params(params, group_size=16) if form == "int8" else params
    options: dict[str, Any] = {"config": CONFIGS[name], "max_new_tokens": 30, "temperature": 0}
    out = complete(llama3, params, PROMPTS, **options)
    for prompt, new in zip(PROMPTS, out, strict=True):
        assert new.tolist() == recomputed(name, params, prompt, 30)
    assert len(set(out[2].tolist())) > 3
    streamed = stream(llama3, for_decoding(params), PROMPTS[2], **options)
    assert list(streamed) == out[2].tolist()


@pytest.mark.parametrize(("name", "prompt_length"), [("window", 12), ("mixed", 3)])
def test_an_int8_cache_is_close(name, prompt_length):
    config, params = CONFIGS[name], params_of(name)
    tokens = batch()[0][:, :prompt_length]
    lengths = jnp.array([prompt_length, 2])

    @jax.jit
    def run(params, cache):
        _, cache = prefill(llama3, params, tokens, lengths, config, cache)
        return decode_step(llama3, params, jnp.array([3, 8]), config, cache)

    found = {}
    for dtype in (jnp.float32, jnp.int8):
        logits, cache = run(params, init_cache(config, 2, 16, dtype))
        assert cache.lengths.tolist() == [prompt_length + 1, 3]
        found[dtype] = logits[:, :VOCAB]
    difference = abs(found[jnp.int8] - found[jnp.float32]).max()
    assert 0 < difference < 0.05 * abs(found[jnp.float32]).max()


def test_a_layer_with_a_window_stores_the_window_only():
    cache = init_cache(MIXED, 2, 30, jnp.int8)
    assert [x.shape for x in cache.keys] == [(2, n, 2, 12) for n in (30, 5, 5)]
    assert [x.shape for x in cache.value_scales] == [(2, n, 2) for n in (30, 5, 5)]
    assert cache.max_length == 30
    assert {x.shape[1] for x in init_cache(MIXED, 2, 3, jnp.float32).keys} == {3}


def test_prefill_refuses_a_cache_that_is_not_for_the_windows():
    tokens, lengths = jnp.ones((1, 9), int), jnp.array([9])
    run = functools.partial(prefill, llama3)
    cache = init_cache(PLAIN, 1, 12, jnp.float32)
    with pytest.raises(ValueError, match="layer 0 has 12 slots; with a window of 5 it must have"):
        run(params_of("window"), tokens, lengths, CONFIGS["window"], cache)
    cache = init_cache(MIXED, 1, 8, jnp.float32)
    with pytest.raises(ValueError, match="prompts of 9; the cache has max_length 8"):
        run(params_of("mixed"), tokens, lengths, MIXED, cache)
    cache = init_cache(CONFIGS["window"], 1, 8, jnp.float32)  # of windows alone: any length
    run(params_of("window"), tokens, lengths, CONFIGS["window"], cache)


# Training.


def test_biases_are_placed_as_their_columns_and_norms_are_whole():
    shape = {"data": 1, "fsdp": 2, "context": 1, "tensor": 2}
    mesh = jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape))
    for form, first in ((stack, (None,)), (unstack, ())):
        params = jax.eval_shape(lambda form=form: form(llama3.init(jax.random.key(0), MIXED)))
        shardings, decays = parallel.state_shardings(mesh, params), decay_mask(params)
        pick = (lambda tree: tree["blocks"]) if form is stack else (lambda tree: tree["blocks"][0])
        specs = jax.tree.map(lambda x: tuple(x.spec), pick(shardings)["attention"])
        assert specs == {
            "qkv": {
                "weight": (*first, "fsdp", None, "tensor", None),
                "bias": (*first, None, "tensor", None),
            },
            "out": {"weight": (*first, ("tensor", "fsdp"), None)},
            "q_norm": {"scale": (*first, None)},
            "k_norm": {"scale": (*first, None)},
        }
        assert pick(decays)["attention"] == {
            "qkv": {"weight": True, "bias": False},
            "out": {"weight": True},
            "q_norm": {"scale": False},
            "k_norm": {"scale": False},
        }


def test_a_plan_counts_the_options():
    def plan(config, seq_len=32, **mesh):
        sizes = {"data": 1, "fsdp": 1, **mesh}
        return make_plan(Model("llama3", "small", config), sizes, batch_size=2, seq_len=seq_len)

    def saved(found):
        return next(line.backward for line in found.memory if line.name == "saved activations")

    mixed = plan(MIXED)
    assert mixed.num_params == llama3.num_params(MIXED)
    # The projection twice, before and after the norms, and the output of attention.
    columns = 4 * 32 + (2 * 96 + 48) + 3 * 48
    assert saved(mixed) == 2 * 64 * 3 * columns == 2 * 64 * MIXED.saved_per_token
    assert saved(plan(MIXED, tensor=2)) == 2 * 64 * 3 * (4 * 32 + (2 * 96 + 48 + 3 * 48) // 2)
    # A window saves time where it is shorter than the sequence.
    full = dataclasses.replace(MIXED, window=None)
    times = [[plan(of, length).compute_seconds for of in (MIXED, full)] for length in (5, 512)]
    (short, short_full), (long, long_full) = times
    assert short == short_full
    assert long is not None and long_full is not None and long < long_full


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 7}, "head_dim is 7; it must be even and at least 2"),
        ({"head_dim": 0}, "head_dim is 0; it must be even and at least 2"),
        ({"rope_theta": float("inf")}, "rope_theta is inf; it must be above 0, and finite"),
        ({"norm_eps": float("nan")}, "norm_eps is nan; it must be above 0, and finite"),
        ({"window": 0}, "window is 0; it must be at least 1, or None"),
        ({"window": (None, 5)}, "window has 2 entries; it must have one for each of the 3 layers"),
        ({"window": (None, 5, -1)}, r"window is \(None, 5, -1\); it must be at least 1"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAIN, **changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mlp_width": 1.5}, "mlp_width is 1.5; it must be an integer"),
        ({"head_dim": 8.0}, "head_dim is 8.0; it must be an integer"),
        ({"window": 2.5}, "window is 2.5; it must be an integer"),
        ({"window": (None, 5, "5")}, "window is '5'; it must be an integer"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'; it must be a number"),
        ({"norm_eps": None}, "norm_eps is None; it must be a number"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling has type dict; it must be RopeScaling"),
        ({"special_tokens": None}, "special_tokens has type NoneType; it must be SpecialTokens"),
    ],
)
def test_fields_of_other_types_are_errors(changed, message):
    with pytest.raises(TypeError, match=message):
        dataclasses.replace(PLAIN, **changed)


def test_fields_may_be_numbers_of_any_type():
    given: Any = {"window": [None, jnp.int32(5), np.array(5)], "head_dim": np.int64(12)}
    given |= {"rope_theta": jnp.float32(100), "norm_eps": np.float64(1e-5), "layers": np.int32(3)}
    config = dataclasses.replace(MIXED, **given)
    assert config == MIXED and hash(config) == hash(MIXED)


@pytest.mark.parametrize("form", [stack, unstack])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 2, "window": (None, 5)}, "params has 3 layers; it must have 2, as config has"),
        ({"heads": 2, "head_dim": 24}, r"qkv weight of shape .* must be \(..., 3, 2, 24\), by the"),
        ({"qk_norm": False}, "params has 'q_norm' in attention; config.qk_norm is False"),
        ({"qkv_bias": False}, "params has 'bias' in attention; config.qkv_bias is False"),
        ({"vocab_size": 129}, "params has a wte of 128 rows; config has vocab_size 129"),
    ],
)
def test_parameters_of_another_config_are_errors(changes, message, form):
    config = dataclasses.replace(MIXED, **changes)
    with pytest.raises(ValueError, match=message):
        llama3.forward(form(params_of("mixed")), batch()[0], config)


def test_a_head_that_is_not_tied_must_be_there():
    config = dataclasses.replace(CONFIGS["bias"], tied_head=False)
    with pytest.raises(ValueError, match=r"params has no 'lm_head'; config\.tied_head is False"):
        llama3.forward(params_of("bias"), batch()[0], config)


def test_a_head_width_need_not_divide_the_width():
    config = dataclasses.replace(PLAIN, width=40, heads=6, head_dim=8)
    assert config.head_width == 8 and config.qkv_widths == (48, 16, 16)
    assert dataclasses.replace(PLAIN, width=64).head_width == 16  # it follows the width


@pytest.mark.parametrize("window", [5, None])
def test_equal_windows_are_one(window):
    one = dataclasses.replace(PLAIN, window=window)
    for windows in ((window,) * 3, [window] * 3):
        config = dataclasses.replace(PLAIN, window=windows)
        assert config == one and hash(config) == hash(one)
        assert config.window == window and config.windows == (window,) * 3
    with pytest.raises(ValueError, match="window has 2 entries"):
        dataclasses.replace(PLAIN, window=(window,) * 2)


def test_norms_of_heads_must_be_whole():
    layer = jax.tree.map(lambda x: x[0], params_of("norm")["blocks"])
    table = llama3.rope_table(jnp.arange(T), CONFIGS["norm"])
    h = jaxllm.ops.residual(jnp.zeros((1, T, 32)), "rms")
    attention = {**layer["attention"]}
    del attention["k_norm"]
    with pytest.raises(ValueError, match="it must have q_norm, k_norm"):
        llama3.block(h, layer | {"attention": attention}, CONFIGS["norm"], table)
    attention["k_norm"] = {"scale": jnp.ones(8)}
    with pytest.raises(ValueError, match=r"scale has shape \(8,\)"):
        llama3.block(h, layer | {"attention": attention}, CONFIGS["norm"], table)
