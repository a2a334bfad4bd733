"""Trains on four devices and on one; test_training.py runs this in a subprocess.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python tests/several_devices.py

Prints a JSON object: for each model the losses on one and on four devices, and the relative
difference of the parameters' total change.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from jaxllm import training
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import unstack

STEPS = 3
SIZES: dict[str, Any] = {"vocab_size": 100, "max_seq_len": 32, "layers": 2, "heads": 4, "width": 64}
MODELS = {
    "gpt2": (gpt2, gpt2.GPT2Config(**SIZES)),
    "llama3": (llama3, llama3.Llama3Config(**SIZES, kv_heads=2, mlp_width=128)),
}


def train(loss_fn, params, batch):
    optimizer = training.adamw(1e-3, max_grad_norm=1.0)
    state = training.init_state(jax.tree.map(jnp.asarray, params), optimizer)
    step = training.make_train_step(loss_fn, optimizer, learning_rate=1e-3)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, *batch)
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state.params)


def distance(a, b):
    """The Euclidean norm of the difference of two trees."""
    return float(optax.global_norm(jax.tree.map(np.subtract, a, b)))


def compare(model, config):
    def loss(params, tokens, labels):
        return model.loss(params, tokens, labels, config)

    def mean_loss(*args):
        return jax.lax.pmean(loss(*args), "data")

    mesh = jax.make_mesh((4,), ("data",))
    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}
    # Two microbatches of eight sequences per step.
    tokens = jax.random.randint(jax.random.key(1), (2, 8, config.max_seq_len), 0, config.vocab_size)
    batch = tokens, jnp.roll(tokens, -1, axis=2)
    first = jax.device_get(unstack(model.init(jax.random.key(0), config)))
    one, of_one = train(loss, first, batch)
    batch = jax.device_put(batch, jax.NamedSharding(mesh, P(None, "data")))
    four, of_four = train(jax.shard_map(mean_loss, mesh=mesh, **specs), first, batch)
    return {"one": one, "four": four, "apart": distance(of_one, of_four) / distance(first, of_one)}


if __name__ == "__main__":
    print(json.dumps({name: compare(*model) for name, model in MODELS.items()}))
