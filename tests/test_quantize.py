"""Models with int8 weights."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import data, ops, training
from jaxllm.inference.generate import complete
from jaxllm.inference.quantize import quantize_params, size_in_bytes
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import for_decoding, in_usual_order, unstack

GPT2 = gpt2.GPT2Config(vocab_size=61, max_seq_len=32, layers=2, heads=2, width=128)
LLAMA3 = llama3.Llama3Config(
    vocab_size=61, max_seq_len=32, layers=2, heads=4, kv_heads=2, width=128, mlp_width=192,
    rope_scaling=None, tied_head=True,
)  # fmt: skip
MODELS: list[Any] = [pytest.param(gpt2, GPT2, id="gpt2"), pytest.param(llama3, LLAMA3, id="llama3")]
TOKENS = jax.random.randint(jax.random.key(1), (2, 20), 0, 61)
LABELS = jax.random.randint(jax.random.key(2), (2, 20), 0, 61)


def widened(params):
    """The float parameters with the values of int8 ones."""

    def widen(x):
        if not isinstance(x, ops.Quantized):
            return x
        return ops.dequantize(x.q, x.scales).swapaxes(-1, -2)

    found = jax.tree.map(widen, params, is_leaf=lambda x: isinstance(x, ops.Quantized))
    return {**found, "lm_head": found["lm_head"].T}


@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.covering(("model",), ("stacked",))
def test_a_model_is_that_of_the_rounded_weights(model, config, stacked):
    params = model.init(jax.random.key(0), config)
    int8 = quantize_params(params)
    wide = widened(int8)
    if not stacked:
        int8 = quantize_params(unstack(params))
    logits = model.forward(int8, TOKENS, config)
    np.testing.assert_allclose(logits, model.forward(wide, TOKENS, config), atol=1e-4, rtol=1e-4)
    loss = model.loss(int8, TOKENS, LABELS, config)
    exact = model.loss(params, TOKENS, LABELS, config)
    assert 0 < abs(loss - exact) < 0.01 * exact


@pytest.mark.parametrize(("model", "config"), MODELS)
def test_it_decodes_the_tokens_of_the_rounded_weights(model, config):
    params = model.init(jax.random.key(0), config)
    int8 = quantize_params(jax.tree.map(lambda x: 5 * x, params))
    options = {"config": config, "max_new_tokens": 12, "temperature": 0}
    forward = jax.jit(model.forward, static_argnums=2)
    out = complete(model, int8, [[5, 9, 2], [7]], **options)
    for prompt, new in zip([[5, 9, 2], [7]], out, strict=True):
        tokens = list(prompt)
        for _ in range(12):
            padded = jnp.array([tokens + [0] * (config.max_seq_len - len(tokens))])
            logits = forward(int8, padded, config)[0, len(tokens) - 1, :61]
            tokens.append(int(jnp.argmax(logits)))
        assert new.tolist() == tokens[len(prompt) :]


@pytest.mark.parametrize(("model", "config"), MODELS)
def test_no_weight_is_off_by_more_than_half_its_scale(model, config):
    params = model.init(jax.random.key(0), config)
    int8 = quantize_params(params)
    wide = widened(int8)
    params = {**params, "blocks": in_usual_order(params["blocks"], is_stacked=True)}
    pairs = [(wide["lm_head"].T, params["wte"].T, int8["lm_head"])]
    for part in ("attention", "mlp"):
        pairs += [
            (
                wide["blocks"][part][name]["weight"],
                params["blocks"][part][name]["weight"],
                int8["blocks"][part][name]["weight"],
            )
            for name in params["blocks"][part]
        ]
    assert len(pairs) == 5
    for rounded, exact, numbers in pairs:
        scales = numbers.scales
        off = abs(rounded - exact).swapaxes(-1, -2).reshape(*scales.shape, 64)
        assert off.max() > 0
        assert (off <= 0.501 * scales[..., None]).all()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The default corpus of the examples: training and held-out text."""
    folder = data.ensure_standard_library(tmp_path_factory.mktemp("corpus") / "stdlib")
    return tuple(data.open_dataset(folder / f"{split}_*.bin") for split in ("train", "val"))


BYTES: Any = {"vocab_size": 257, "max_seq_len": 64, "layers": 2, "width": 64}


@pytest.mark.parametrize(
    ("model", "config"),
    [
        pytest.param(gpt2, gpt2.GPT2Config(heads=2, **BYTES), id="gpt2"),
        pytest.param(
            llama3,
            dataclasses.replace(LLAMA3, heads=4, kv_heads=2, mlp_width=128, **BYTES),
            id="llama3",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_int8_changes_the_perplexity_of_held_out_text_by_less_than_a_percent(model, config, corpus):
    train, held_out = corpus

    def loss(params, tokens, labels):
        return model.loss(params, tokens, labels, config)

    optimizer = training.adamw(training.warmup_cosine(1e-2, 200, warmup=10))
    train_step = training.make_train_step(loss, optimizer)
    state = training.init_state(model.init(jax.random.key(0), config), optimizer)
    for step in range(200):
        tokens, labels = data.batch(train, 8, 64, seed=0, step=step)
        state, _ = train_step(state, tokens[None], labels[None])

    evaluate = training.make_eval_step(loss)
    perplexity, rounded = (
        np.exp(training.mean_loss(evaluate, params, held_out, batch_size=32, seq_len=64, batches=8))
        for params in (state.params, quantize_params(state.params))
    )
    assert perplexity < 20  # of 257 it began with
    assert 0 < abs(rounded - perplexity) < 0.01 * perplexity


def test_it_takes_a_quarter_of_the_memory():
    params = llama3.init(jax.random.key(0), LLAMA3)
    int8 = quantize_params(params)
    before = {"blocks": params["blocks"]}
    assert size_in_bytes({"blocks": int8["blocks"]}) < 0.28 * size_in_bytes(before)


class Frozen(Mapping):
    """A mapping that is no dict and has no ``|``, as Flax's ``FrozenDict`` once was."""

    def __init__(self, items):
        self.items_of = {
            name: Frozen(value) if isinstance(value, dict) else value
            for name, value in dict(items).items()
        }

    def __getitem__(self, name):
        return self.items_of[name]

    def __iter__(self):
        return iter(self.items_of)

    def __len__(self):
        return len(self.items_of)


jax.tree_util.register_pytree_node(
    Frozen,
    lambda tree: (list(tree.values()), tuple(tree)),
    lambda names, values: Frozen(zip(names, values, strict=True)),
)


@pytest.mark.parametrize("form", [quantize_params, for_decoding, unstack])
def test_parameters_may_be_in_any_mapping(form):
    params = llama3.init(jax.random.key(0), LLAMA3)
    found, expected = form(Frozen(params)), form(params)
    weights = [[x.shape for x in jax.tree.leaves(tree)] for tree in (found, expected)]
    assert sorted(weights[0]) == sorted(weights[1])
    assert num_int8(found) == num_int8(expected)


def num_int8(tree):
    return sum(x.dtype == jnp.int8 for x in jax.tree.leaves(tree))


def test_refuses():
    params = llama3.init(jax.random.key(0), LLAMA3)
    with pytest.raises(ValueError, match=r"blocks.attention.qkv.weight has shape .* width 128"):
        quantize_params(params, group_size=48)
    with pytest.raises(ValueError, match="group_size is 0; it must be at least 1"):
        quantize_params(params, group_size=0)
    with pytest.raises(TypeError, match=r"group_size is 32\.0; it must be an integer"):
        quantize_params(params, group_size=32.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="int8 already"):
        quantize_params(quantize_params(params))
