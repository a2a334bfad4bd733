"""Both models' training steps on eight devices: the results of one device, and what moves."""

import collections
import contextlib
import dataclasses
import functools
import math
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import data, training
from jaxllm.core.gathers import GatherWarning
from jaxllm.inference import generate
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import unstack
from jaxllm.training import parallel

SIZES: dict[str, Any] = {"vocab_size": 100, "max_seq_len": 32, "layers": 2, "heads": 4, "width": 64}
MODELS = {
    "gpt2": (gpt2, gpt2.GPT2Config(**SIZES)),
    "llama3": (llama3, llama3.Llama3Config(**SIZES, kv_heads=2, mlp_width=128)),
}
# With all options of models like Llama 3; the layers have different windows.
OPTIONS: dict[str, Any] = {"head_dim": 24, "qkv_bias": True, "qk_norm": True, "window": (None, 9)}
LIKE = dataclasses.replace(llama3.Llama3Config(**SIZES, kv_heads=2, mlp_width=128), **OPTIONS)
ALL = {**MODELS, "llama_like": (llama3, LIKE)}
SEQUENCES, TOKENS = 16, 32
# The sizes of the axes. Both models have an even number of key heads.
LAYOUTS = {
    "data x fsdp": {"data": 2, "fsdp": 4},
    "tensor": {"tensor": 2},
    "fsdp x tensor": {"fsdp": 4, "tensor": 2},
    "context": {"context": 4},
    "all": {"fsdp": 2, "context": 2, "tensor": 2},
}
MOVES = r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
STEPS = 3


OPTIMIZER = training.adamw(1e-3, max_grad_norm=1.0)


@functools.cache
def first_state(name, stacked):
    """The state before the steps, on the host."""
    model, config = ALL[name]
    params = model.init(jax.random.key(0), config)
    return jax.device_get(training.init_state(params if stacked else unstack(params), OPTIMIZER))


@functools.cache
def batch():
    tokens = jax.random.randint(jax.random.key(1), (1, SEQUENCES, TOKENS), 0, SIZES["vocab_size"])
    # Ignored labels, and not the same number in each shard: the mean is over all that count.
    labels = jnp.roll(tokens, -1, 2).at[0, 0, 5:].set(-1).at[0, 3, :2].set(-1)
    return jax.device_get((tokens, labels))


@functools.cache
def packed_batch():
    """The batch with documents that end at each token below 10: of ten tokens on average."""
    tokens, labels = batch()
    return tokens, labels, *data.find_documents(np.where(tokens < 10, 0, tokens), end_of_text=0)


def train(name, stacked, place=jax.device_put, precision=None, arrays=None):
    """Losses, parameters and gradient norms of a few steps; the final state, and the program."""
    model, config = ALL[name]

    def loss(params, tokens, labels, segment_ids=None, positions=None):
        documents = {"segment_ids": segment_ids, "positions": positions}
        return model.loss(params, tokens, labels, config, precision=precision, **documents)

    state, arrays = place((first_state(name, stacked), batch() if arrays is None else arrays))
    train_step = training.make_train_step(loss, OPTIMIZER, float8_counts=precision is not None)
    step = train_step.lower(state, *arrays).compile()
    found = []
    for _ in range(STEPS):
        state, metrics = step(state, *arrays)
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
        assert metrics.get("float8_overflow", 0) == 0
    return np.array(found), state, step.as_text()


@functools.cache
def on_one_device(name, stacked, precision=None):
    with jaxllm.use_backend("xla"):
        found, state, _ = train(name, stacked, precision=precision)
    return found, jax.device_get(state.params)


def place_on(mesh):
    """A function that puts a state and batches on a mesh."""

    def place(given):
        state, arrays = given
        shardings = parallel.state_shardings(mesh, state)
        of_batch = parallel.batch_sharding(mesh)
        return jax.device_put(state, shardings), jax.device_put(arrays, of_batch)

    return place


# Explicit axes and unrolled blocks on meshes that have what the others have.
FORMS = [("auto", layout, True) for layout in LAYOUTS] + [
    ("explicit", "fsdp x tensor", True),
    ("explicit", "all", True),
    ("auto", "data x fsdp", False),
    ("explicit", "all", False),
]


@pytest.mark.parametrize(
    ("kind", "layout", "stacked"),
    FORMS,
    ids=lambda x: x if isinstance(x, str) else "scan" * x or "unrolled",
)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings(f"error::{GatherWarning.__module__}.{GatherWarning.__qualname__}")
@pytest.mark.covering(("name", "kind"), ("layout",), ("stacked",))
def test_a_training_step_is_that_of_one_device(name, kind, layout, stacked):
    sizes = LAYOUTS[layout]
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = parallel.make_mesh(**{"data": 1, **sizes}, axis_type=kind, devices=devices)
    with jax.set_mesh(mesh), jaxllm.use_backend("auto"):
        found, state, program = train(name, stacked, place_on(mesh))
    expected, params = on_one_device(name, stacked)
    np.testing.assert_allclose(found, expected, rtol=3e-6)
    for got, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        # Adam divides by the gradient's size: of those that are rounding noise, the step is too.
        np.testing.assert_allclose(jax.device_get(got), want, atol=5e-5)
    check_shardings(mesh, state)
    check_moves(program, sizes, ALL[name][1])


@pytest.mark.parametrize(("name", "recipe"), [("gpt2", "row"), ("llama3", "tensor")])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.filterwarnings(f"error::{GatherWarning.__module__}.{GatherWarning.__qualname__}")
@pytest.mark.covering(("name",), ("kind",))
def test_a_step_with_float8_is_near_that_of_one_device(name, recipe, kind):
    sizes = LAYOUTS["fsdp x tensor"]
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = parallel.make_mesh(**{"data": 1, **sizes}, axis_type=kind, devices=devices)
    with jax.set_mesh(mesh), jaxllm.use_backend("auto"):
        found, state, program = train(name, True, place_on(mesh), recipe)
    expected, _ = on_one_device(name, True, recipe)
    # An element that differs in its last bit may be rounded to another float8 number.
    np.testing.assert_allclose(found, expected, rtol=2e-3)
    check_shardings(mesh, state)
    check_moves(program, sizes, ALL[name][1])


@pytest.mark.parametrize(
    ("name", "kind", "stacked"), [("gpt2", "auto", True), ("llama3", "explicit", False)]
)
@pytest.mark.filterwarnings(f"error::{GatherWarning.__module__}.{GatherWarning.__qualname__}")
def test_a_step_of_packed_documents_is_that_of_one_device(name, kind, stacked):
    sizes = LAYOUTS["all"]
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = parallel.make_mesh(**{"data": 1, **sizes}, axis_type=kind, devices=devices)
    with jax.set_mesh(mesh), jaxllm.use_backend("auto"):
        found, state, program = train(name, stacked, place_on(mesh), arrays=packed_batch())
    with jaxllm.use_backend("xla"):
        expected, wanted, _ = train(name, stacked, arrays=packed_batch())
    np.testing.assert_allclose(found, expected, rtol=3e-6)
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(wanted.params), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(jax.device_get(got), jax.device_get(want), atol=5e-5)
    check_shardings(mesh, state)
    check_moves(program, sizes, ALL[name][1])


def check_shardings(mesh, state):
    """Each device has its part of parameters and moments after the steps, as before them."""

    def check(path, x, expected):
        assert x.sharding.is_equivalent_to(expected, x.ndim), jax.tree_util.keystr(path)

    trees = (state.params, state.opt_state)
    jax.tree_util.tree_map_with_path(check, trees, parallel.state_shardings(mesh, trees))


def check_moves(program, sizes, config):
    """Activations stay where they are, and gradients of sharded weights are reduced in shards.

    But for the keys and values of a sequence in shards, and the queries that change places.
    """
    moves = collections.Counter(re.findall(MOVES, program))
    assert not moves["all-to-all"], moves
    gathered = re.findall(r"= (\S+) all-gather(?:-start)?\(", program)
    sequences = SEQUENCES // sizes.get("data", 1) // sizes.get("fsdp", 1)
    rows = re.compile(
        rf"\(?f32\[({SEQUENCES}|{sequences}),({TOKENS}|{TOKENS // 4}|{TOKENS // 2})\b"
    )
    activations = [x for x in gathered if rows.match(x)]
    if "context" in sizes:
        keys = config.kv_heads // sizes.get("tensor", 1)
        keys = rf"\(?f32\[{sequences},{TOKENS},{keys},{config.head_width}\]"
        assert activations and all(re.match(keys, x) for x in activations), activations
        assert moves["collective-permute"] and moves["reduce-scatter"], moves
    else:
        assert not activations and not moves["collective-permute"], activations
    if "fsdp" in sizes:
        assert len(gathered) > len(activations) and moves["reduce-scatter"], moves
    else:
        assert len(gathered) == len(activations), gathered


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", ["fsdp x tensor", "fsdp"])
@pytest.mark.parametrize("in_context", [False, True])
@pytest.mark.covering(("name",), ("layout",), ("in_context",))
@pytest.mark.filterwarnings(
    "ignore::jaxllm.core.gathers.GatherWarning"
)  # of decode_block's weights
def test_generation_from_parameters_on_explicit_axes(name, layout, in_context):
    model, config = MODELS[name]
    params = model.init(jax.random.key(0), config)
    key, sizes = jax.random.key(1), LAYOUTS.get(layout, {"fsdp": 8})
    options: dict[str, Any] = {"config": config, "max_new_tokens": 3}
    expected = generate.complete(model, params, [[1, 2, 3], [4]], key=key, **options)
    mesh = parallel.make_mesh(axis_type="explicit", **cast(Any, sizes))
    params = parallel.put(parallel.state_shardings(mesh, params), params)
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        context = jax.sharding.get_abstract_mesh()
        key = jax.random.key(1)
        texts = generate.complete(model, params, [[1, 2, 3], [4]], key=key, **options)
        tokens = []
        for token in generate.stream(model, params, [1, 2, 3], key=key, **options):
            tokens.append(token)
            assert jax.sharding.get_abstract_mesh() == context
    np.testing.assert_array_equal(texts, expected)
    assert len(tokens) == 3
