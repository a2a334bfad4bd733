"""The plan of a small step against the activations' collectives of its compiled program."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxllm import training
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import unstack
from jaxllm.training import parallel
from jaxllm.training.plan import make_plan
from jaxllm.training.plan_inputs import Model

SIZES: dict[str, Any] = {"vocab_size": 100, "max_seq_len": 32, "layers": 2, "heads": 4, "width": 64}
MODELS = {
    "gpt2": (gpt2, gpt2.GPT2Config(**SIZES)),
    "llama3": (llama3, llama3.Llama3Config(**SIZES, kv_heads=2, mlp_width=160)),
}
B, T = 4, 32
RESULT = r"= (.*?) (all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("


def moved(program, kind, shape):
    """Elements of the results of a kind of collective that have a shape."""
    text = f"f32[{','.join(map(str, shape))}]"
    found = (result for result, of in re.findall(RESULT, program) if of == kind)
    return sum(result.count(text) for result in found) * math.prod(shape)


@pytest.mark.parametrize(
    ("name", "kv_heads", "remat"),
    [("gpt2", 4, True), ("llama3", 2, False), ("llama3", 2, True), ("llama3", 1, True)],
)
def test_activations_move_as_planned(name, kv_heads, remat):
    module, config = MODELS[name]
    if kv_heads != config.kv_heads:
        config = dataclasses.replace(config, kv_heads=kv_heads)
    sizes: Any = {"data": 1, "fsdp": 1, "context": 2, "tensor": 2}
    mesh = parallel.make_mesh(**sizes, devices=jax.devices()[:4])
    optimizer = training.adamw(1e-3)

    def loss(params, tokens, labels):
        return module.loss(params, tokens, labels, config, remat=remat)

    with jax.set_mesh(mesh):
        params = unstack(module.init(jax.random.key(0), config))
        state = training.init_state(params, optimizer)
        state = jax.device_put(state, parallel.state_shardings(mesh, state))
        tokens = jax.device_put(jnp.zeros((1, B, T), jnp.int32), parallel.batch_sharding(mesh))
        step = training.make_train_step(loss, optimizer)
        program = step.lower(state, tokens, tokens).compile().as_text()

    model = Model(name, "small", config)
    plan = make_plan(model, sizes, batch_size=B, seq_len=T, remat=remat, dtype="float32")
    sent = {(of.kind, of.axes): of.sent / 4 for of in plan.communication}  # elements
    shards = 2 if kv_heads % 2 == 0 else 1  # of the heads: one key head stays whole
    H, N, K = config.head_width, config.heads // shards, kv_heads // shards
    rows, keys, part = (B, T // 2, config.width), (B, T, K, H), (B, T // 2, K, H)
    # Of two devices each sends half of the array, and all of it in an all-reduce or a permute.
    assert sent["all-reduce", "tensor"] == moved(program, "all-reduce", rows)
    assert sent["all-gather", "context"] == moved(program, "all-gather", keys) / 2
    assert sent["reduce-scatter", "context"] == moved(program, "reduce-scatter", part)
    swapped = (B, T // 4, N, H)
    assert sent["permute", "context"] == moved(program, "collective-permute", swapped)
