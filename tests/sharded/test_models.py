"""Both models' training steps on eight devices: the results of one device, and what moves."""

import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxllm
from jaxllm import training
from jaxllm.core.partition import GatherWarning
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import unstack

SIZES: dict[str, Any] = {"vocab_size": 100, "max_seq_len": 32, "layers": 2, "heads": 4, "width": 64}
MODELS = {
    "gpt2": (gpt2, gpt2.GPT2Config(**SIZES)),
    "llama3": (llama3, llama3.Llama3Config(**SIZES, kv_heads=2, mlp_width=128)),
}
SEQUENCES, TOKENS = 16, 32
# The mesh, the axes that the batch is sharded along, and the axis of the parameters.
LAYOUTS = {
    "data": ((8,), ("data",), ("data",), None),
    "fsdp": ((8,), ("fsdp",), ("fsdp",), "fsdp"),
    "data x fsdp": ((2, 4), ("data", "fsdp"), ("data", "fsdp"), "fsdp"),
}
MOVES = r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
STEPS = 3


def params_of(name, stacked):
    model, config = MODELS[name]
    params = model.init(jax.random.key(0), config)
    return params if stacked else unstack(params)


def batch():
    tokens = jax.random.randint(jax.random.key(1), (1, SEQUENCES, TOKENS), 0, SIZES["vocab_size"])
    # Ignored labels, and not the same number in each shard: the mean is over all that count.
    labels = jnp.roll(tokens, -1, 2).at[0, 0, 5:].set(-1).at[0, 3, :2].set(-1)
    return tokens, labels


def spec_of(axis, path, array):
    """Weights are sharded along the dimension that a layer contracts, tables along their rows."""
    name = jax.tree_util.keystr(path)
    if axis is None or not ("'weight'" in name or "wte" in name or "wpe" in name):
        return P(*[None] * array.ndim)
    return P(*[None] * (array.ndim - 2), axis, None)


def train(name, stacked, place=lambda state, batch: (state, batch)):
    """Losses, parameters and gradient norms of a few steps; the final state, and the program."""
    model, config = MODELS[name]

    def loss(params, tokens, labels):
        return model.loss(params, tokens, labels, config)

    optimizer = training.adamw(1e-3, max_grad_norm=1.0)
    state = training.init_state(params_of(name, stacked), optimizer)
    state, arrays = place(state, batch())
    step = training.make_train_step(loss, optimizer).lower(state, *arrays).compile()
    found = []
    for _ in range(STEPS):
        state, metrics = step(state, *arrays)
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return np.array(found), state, step.as_text()


@functools.cache
def on_one_device(name, stacked):
    with jaxllm.use_backend("xla"):
        found, state, _ = train(name, stacked)
    return found, jax.device_get(state.params)


# Unrolled blocks on the mesh of both axes alone, which has what the others have.
FORMS = [(layout, True) for layout in LAYOUTS] + [("data x fsdp", False)]


@pytest.mark.parametrize(
    ("layout", "stacked"),
    FORMS,
    ids=lambda x: x if isinstance(x, str) else "scan" * x or "unrolled",
)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings(f"error::{GatherWarning.__module__}.{GatherWarning.__qualname__}")
def test_a_training_step_is_that_of_one_device(name, layout, kind, stacked):
    shape, names, batch_axes, axis = LAYOUTS[layout]
    mesh = jax.make_mesh(shape, names, axis_types=(getattr(AxisType, kind),) * len(shape))

    def place(state, arrays):
        def of_leaf(path, x):
            return NamedSharding(mesh, spec_of(axis, path, x))

        shardings = jax.tree_util.tree_map_with_path(of_leaf, state)
        of_batch = NamedSharding(mesh, P(None, batch_axes, None))
        return jax.device_put(state, shardings), jax.device_put(arrays, of_batch)

    with jax.set_mesh(mesh), jaxllm.use_backend("auto"):
        found, state, program = train(name, stacked, place)
    expected, params = on_one_device(name, stacked)
    np.testing.assert_allclose(found, expected, rtol=3e-6)
    for got, want in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(jax.device_get(got), want, atol=1e-5)
    check_shardings(state, axis)
    check_moves(program, axis)


def check_shardings(state, axis):
    """Each device has its part of parameters and moments after the steps, as before them."""

    def check(path, x):
        expected = NamedSharding(x.sharding.mesh, spec_of(axis, path, x))
        assert x.sharding.is_equivalent_to(expected, x.ndim), jax.tree_util.keystr(path)

    jax.tree_util.tree_map_with_path(check, (state.params, state.opt_state))


def check_moves(program, axis):
    """Activations stay where they are, and gradients of sharded weights are reduced in shards."""
    moves = collections.Counter(re.findall(MOVES, program))
    assert not moves["all-to-all"] and not moves["collective-permute"], moves
    gathered = re.findall(r"= (\S+) all-gather(?:-start)?\(", program)
    activations = [x for x in gathered if re.match(rf"\(?f32\[{SEQUENCES},{TOKENS}\b", x)]
    assert not activations, activations
    if axis is None:
        assert not gathered and not moves["reduce-scatter"], moves
    else:
        assert gathered and moves["reduce-scatter"], moves
