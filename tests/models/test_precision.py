"""Models with float8 GEMMs: which layers have them, and how near loss and gradients stay."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import training
from jaxllm.models import common, gpt2, llama3

SIZES: dict[str, Any] = {"vocab_size": 61, "max_seq_len": 32, "layers": 2, "heads": 4, "width": 64}
MODELS = {
    "gpt2": (gpt2, gpt2.GPT2Config(**SIZES)),
    "llama3": (llama3, llama3.Llama3Config(**SIZES, kv_heads=2, mlp_width=128)),
}
LAYERS = {"gpt2": ("qkv", "out", "up", "down"), "llama3": ("qkv", "out", "gate_up", "down")}
each_model = pytest.mark.parametrize("name", MODELS)
each_recipe = pytest.mark.parametrize("recipe", ["row", "tensor"])


@functools.cache
def params_of(name):
    model, config = MODELS[name]
    return model.init(jax.random.key(0), config)


@functools.cache
def batch(steps=1):
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (steps, 4, 32), np.int32)
    return tokens, (3 * tokens + 1) % SIZES["vocab_size"]


def loss(name, params, precision=None, **options):
    model, config = MODELS[name]
    tokens, labels = batch()
    return model.loss(params, tokens[0], labels[0], config, precision=precision, **options)


@functools.cache
def loss_and_gradients(name, precision, *, unrolled=False, remat=False):
    def fn(params):
        return loss(name, common.unstack(params) if unrolled else params, precision, remat=remat)

    return jax.device_get(jax.jit(jax.value_and_grad(fn))(params_of(name)))


def distance(found, expected):
    """The distance of two trees over the norm of the second."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    squares = [(((a - b) ** 2).sum(), (b**2).sum()) for a, b in pairs]
    return float(np.sqrt(sum(a for a, _ in squares) / sum(b for _, b in squares)))


@each_model
@each_recipe
@pytest.mark.covering(("name",), ("recipe",))
def test_loss_and_gradients_are_near_those_without_float8(name, recipe):
    found, gradients = loss_and_gradients(name, recipe)
    expected, wanted = loss_and_gradients(name, None)
    assert 0 < abs(found - expected) < 2e-3
    away = distance(gradients["blocks"], wanted["blocks"])
    assert 0.01 < away < {"row": 0.05, "tensor": 0.1}[recipe]


@pytest.mark.parametrize(("name", "recipe"), [("gpt2", "row"), ("llama3", "tensor")])
def test_unrolled_and_recomputed_blocks_have_the_gradients_of_stacked_ones(name, recipe):
    _, expected = loss_and_gradients(name, recipe)
    for options in ({"unrolled": True}, {"remat": common.SAVE_GEMMS}):
        _, found = loss_and_gradients(name, recipe, **options)
        # An element that differs in its last bit may be rounded to another float8 number.
        assert distance(found, expected) < 0.01


def float8_weights(name, precision):
    """The weights that float8 GEMMs of one block have as their second operand, and how often."""
    model, config = MODELS[name]
    call = functools.partial(model.forward, config=config, precision=precision)
    calls = jaxllm.explain(call, params_of(name), batch()[0][0]).calls
    calls = [call.shapes.split()[1] for call in calls if call.stem == "float8_matmul"]
    return collections.Counter(calls)


@each_model
def test_layers_are_selected_by_name(name):
    # Of qkv, out, up and down. There are no others: no LM head and no attention.
    shapes = {"gpt2": ((192, 64), (64, 64), (256, 64), (64, 256))}
    shapes["llama3"] = ((128, 64), (64, 64), (256, 64), (64, 128))
    qkv, out, up, down = (f"float8_e4m3fn[{n},{k}]" for n, k in shapes[name])
    names = LAYERS[name]
    assert float8_weights(name, dict.fromkeys(names[::3], "row")) == {qkv: 1, down: 1}
    assert float8_weights(name, {names[1]: "tensor", names[2]: "row"}) == {out: 1, up: 1}
    assert float8_weights(name, "row") == collections.Counter([qkv, out, up, down])
    assert not float8_weights(name, {names[0]: None})


@each_model
def test_unknown_layers_and_recipes_are_rejected(name):
    params = params_of(name)
    with pytest.raises(ValueError, match=r"precision names 'mlp'; the layers are [a-z_, ]*qkv"):
        loss(name, params, {"mlp": "row"})
    with pytest.raises(ValueError, match="precision is 'fp8'; it must be 'row', 'tensor', None"):
        loss(name, params, "fp8")
    model, config = MODELS[name]
    logits = model.forward(params, batch()[0][0], config, precision="row")
    assert logits.shape == (4, 32, config.padded_vocab_size)
    assert not (logits == model.forward(params, batch()[0][0], config)).all()


def test_training_loss_follows_that_without_float8():
    model, config = MODELS["gpt2"]
    tokens, labels = batch(steps=40)

    def train(precision):
        def fn(params, tokens, labels):
            return model.loss(params, tokens, labels, config, precision=precision)

        optimizer = training.adamw(3e-3)
        # The step donates its state, and the parameters serve every run.
        state = training.init_state(jax.tree.map(jnp.copy, params_of("gpt2")), optimizer)
        step, losses = training.make_train_step(fn, optimizer), []
        for i in range(len(tokens)):
            state, metrics = step(state, tokens[i][None], labels[i][None])
            losses.append(float(metrics["loss"]))
        return np.array(losses)

    expected = train(None)
    assert expected[-1] < expected[0] - 0.5
    for recipe in ("row", "tensor"):
        assert 0 < abs(train(recipe) - expected).max() < 0.02
