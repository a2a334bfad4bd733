"""Sharded ops and training steps on two GPUs against one, with the CUDA kernels.

By hand, on a machine with two GPUs::

    python -m pytest tests/on_two_gpus.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxllm
from jaxllm import ops, testing, training
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import unstack
from jaxllm.training import parallel

AXES = ("auto", "explicit")
# So large that the fused blocks are chosen.
MODELS = {
    "gpt2": (gpt2, dataclasses.replace(gpt2.PRESETS["d12"], layers=2)),
    "llama3": (
        llama3,
        dataclasses.replace(
            llama3.PRESETS["d12"], layers=2, heads=8, kv_heads=4, width=1024, vocab_size=50257
        ),
    ),
}
SEQUENCES, TOKENS, STEPS = 8, 1024, 3


@pytest.fixture(autouse=True)
def kernels():
    assert jax.default_backend() == "gpu" and jax.device_count() >= 2
    with jaxllm.use_backend("cuda"):
        yield


def mesh_of(axis, kind):
    return parallel.make_mesh(**{"data": 1, axis: 2}, axis_type=kind, devices=jax.devices()[:2])


def value_and_gradients(fn, arrays, dout):
    out, pullback = jax.vjp(fn, *arrays)
    return out, pullback(dout)


def draw(*shapes, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("kind", AXES)
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window": 300},
        {"window": 100},
        {"causal": True, "segments": True},
        {"causal": True, "rope": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_attention_over_a_sequence_in_shards(options, kind):
    B, T, N, K, H = 2, 2048, 8, 2, 128
    options = dict(options)
    arrays = draw((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
    if options.pop("segments", False):
        options["segment_ids"] = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32) // 700, (B, T))
    if options.pop("rope", False):
        options["rope_table"] = ops.rope_table(jnp.arange(T), H, theta=1e4)
    *given, dout = arrays
    attend = functools.partial(ops.flash_attention, **options)
    wanted = jax.jit(functools.partial(value_and_gradients, attend))(given, dout)
    mesh = mesh_of("context", kind)
    placed = jax.device_put(arrays, NamedSharding(mesh, P(None, "context")))
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(value_and_gradients, attend))(placed[:3], placed[3])
    testing.assert_close(jax.device_get(found), jax.device_get(wanted), "bfloat16")


@pytest.mark.parametrize("kind", AXES)
def test_the_loss_of_a_vocabulary_in_shards(kind):
    rows, D, V = 4096, 512, 50304
    hidden, weight = draw((rows, D), (V, D))
    labels = jax.random.randint(jax.random.key(1), (rows,), -1, V)

    def loss(hidden, weight, labels):
        options = {"transpose_weight": True, "vocab_size": V - 47}
        return ops.linear_cross_entropy(hidden, weight / 32, labels, **options)

    run = jax.value_and_grad(loss, (0, 1))
    on_one = jax.jit(run)(hidden, weight, labels)
    with jaxllm.use_backend("xla"):
        wide = (x.astype(jnp.float32) for x in (hidden, weight))
        wanted = jax.jit(run)(*wide, labels)
    mesh = mesh_of("tensor", kind)
    specs = (P(None, None), P("tensor", None), P(None))
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    with jax.set_mesh(mesh):
        found = jax.jit(run)(*jax.device_put((hidden, weight, labels), shardings))
    found, wanted, on_one = map(jax.device_get, (found, wanted, on_one))
    testing.assert_close(found, wanted, "bfloat16", on_one)


def train(name, mesh):
    model, config = MODELS[name]
    tokens = jax.random.randint(jax.random.key(1), (1, SEQUENCES, TOKENS), 0, config.vocab_size)
    batch = tokens, jnp.roll(tokens, -1, 2)

    def loss(params, tokens, labels):
        return model.loss(params, tokens, labels, config)

    optimizer = training.adamw(1e-3)
    params = unstack(model.init(jax.random.key(0), config))
    state = training.init_state(params, optimizer, copy_dtype="bfloat16")
    shardings = None
    if mesh is not None:
        shardings = parallel.state_shardings(mesh, state)
        state = jax.device_put(state, shardings)
        batch = jax.device_put(batch, parallel.batch_sharding(mesh))
    step = training.make_train_step(loss, optimizer, compute_dtype="bfloat16", shardings=shardings)
    found = []
    for _ in range(STEPS):
        state, metrics = step(state, *batch)
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return np.array(found)


@functools.cache
def on_one_gpu(name):
    return train(name, None)


@pytest.mark.parametrize("kind", AXES)
@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor", "context"])
@pytest.mark.parametrize("name", MODELS)
def test_training_steps(name, axis, kind):
    wanted = on_one_gpu(name)
    mesh = mesh_of(axis, kind)
    with jax.set_mesh(mesh):
        found = train(name, mesh)
    np.testing.assert_allclose(found[:, 0], wanted[:, 0], rtol=2e-3)
    np.testing.assert_allclose(found[:, 1], wanted[:, 1], rtol=2e-2)
