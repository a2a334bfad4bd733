"""Trains on a mesh of eight devices and on one device; test_parallel.py runs this.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/parallel_training.py CASE FOLDER

Checks what cannot differ by rounding, and prints a JSON object with the rest: losses, validation
losses and samples on one device and on the mesh.
"""

import contextlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from several_devices import MODELS

from jaxllm import data, training
from jaxllm.core.gathers import GatherWarning
from jaxllm.inference.generate import generate
from jaxllm.models.common import unstack
from jaxllm.training import checkpoint, evaluation, loader, parallel

# Programs that run at once can deadlock: their collectives wait for threads of one another.
jax.config.update("jax_cpu_enable_async_dispatch", False)

A, B, T, STEPS = 2, 16, 32, 3
CASES = {
    "gpt2": {
        "axes": {"fsdp": 2, "context": 2, "tensor": 2},
        "axis_type": "auto",
        "unroll": False,
        "documents": {"end_of_text": 7, "ignore_next_document": True},
    },
    "llama3": {
        "axes": {"data": 2, "fsdp": 2, "tensor": 2},
        "axis_type": "explicit",
        "unroll": True,
        "documents": {},
    },
}
DOCUMENTS: dict[str, Any] = CASES[sys.argv[1]]["documents"]
KEPT: dict[str, Any] = {"copy_dtype": "bfloat16", "detect_anomalies": True}
OPTIMIZER = training.adamw(1e-3)
DATASET = data.Dataset((np.random.default_rng(0).integers(0, 100, 9000).astype(np.uint16),))


def assert_equal(found, wanted):
    # Copies, because a NumPy array may share a buffer, which then cannot be donated.
    found, wanted = (jax.device_get(jax.tree.map(jnp.copy, tree)) for tree in (found, wanted))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def per_device(tree):
    """The bytes of a tree on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def check_creation(mesh, init, state, unroll):
    """The program that creates the state holds no whole matrix on any device."""
    with jax.set_mesh(parallel.with_auto_axes(mesh)):
        create, _ = parallel._creation(mesh, init, OPTIMIZER, unroll, KEPT)
        compiled = create.lower().compile()
    leaves = jax.tree.leaves((state.params, state.copy))
    shards = {leaf.addressable_shards[0].data.shape for leaf in leaves}
    whole = {leaf.shape for leaf in leaves} - shards
    assert len(whole) >= 3
    for shape in whole:
        assert f"[{','.join(map(str, shape))}]" not in compiled.as_text(), shape
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes < 1.1 * per_device(state) + 8 * len(jax.tree.leaves(state))
    assert memory.temp_size_in_bytes < 1.3 * per_device(state)


def make_loss(model, config):
    def loss_fn(params, tokens, labels, segment_ids=None, positions=None):
        documents = {"segment_ids": segment_ids, "positions": positions}
        return model.loss(params, tokens, labels, config, **documents)

    return loss_fn


def train(model, config, batches, state, shardings=None):
    """The state and the losses after the steps of the batches, in float32 without a copy."""
    state = state._replace(copy=None)
    shardings = None if shardings is None else shardings._replace(copy=None)
    loss_fn = make_loss(model, config)
    options: dict[str, Any] = {"compute_dtype": "float32", "shardings": shardings}
    step = training.make_train_step(loss_fn, OPTIMIZER, learning_rate=1e-3, **options)
    losses = []
    for batch in batches:
        before = state
        state, metrics = step(state, *batch)
        losses.append(float(metrics["loss"]))
        if shardings is not None:
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
    assert step._cache_size() == 1
    if shardings is not None:
        assert jax.tree.map(lambda x: x.sharding, state) == shardings
        memory = step.lower(state, *batches[0]).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= per_device((state.params, state.opt_state, state.copy))
    return state, losses


def step_with_copy(model, config, batch, state, shardings):
    """The state after a step in bfloat16, whose copy of the parameters has their shards."""
    loss_fn = make_loss(model, config)
    options: dict[str, Any] = {"compute_dtype": "bfloat16", "shardings": shardings}
    step = training.make_train_step(loss_fn, OPTIMIZER, **options)
    copy = jax.device_put(training.cast(state.params, "bfloat16"), shardings.copy)
    state, _ = step(state._replace(copy=copy), *batch)
    assert_equal(state.copy, training.cast(state.params, "bfloat16"))
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    return state


def read(step, rows=None):
    return data.batch(DATASET, A * B, T, seed=0, step=step, rows=rows, **DOCUMENTS)


def sharded_batches(mesh):
    """The batches of all steps; each sequence is read once, and each device has its part."""
    batches = []
    for step in range(STEPS):
        numbers = []

        def part(rows, step=step, numbers=numbers):
            numbers.extend(rows)
            return read(step, rows)

        batch = loader.load_batch(parallel.batch_sharding(mesh), (A, B, T), part)
        batches.append(batch)
        assert sorted(numbers) == list(range(A * B))
        parts = [mesh.shape[axis] for axis in ("data", "fsdp", "context")]
        for array, whole in zip(batch, read(step), strict=True):
            for shard in array.addressable_shards:
                assert shard.data.size == A * B * T // np.prod(parts)
                np.testing.assert_array_equal(shard.data, whole.reshape(A, B, T)[shard.index])
    return batches


def sample(model, config, params):
    """A greedy sample."""
    options: dict[str, Any] = {"config": config, "max_new_tokens": 4, "temperature": 0}
    return np.asarray(generate(model.forward, params, [1, 2, 3], **options)).tolist()


def outputs(model, config, params, sharding=None):
    """The validation loss, and the accuracy on random questions."""
    evaluate = training.make_eval_step(make_loss(model, config), compute_dtype="float32")
    sizes = {"batch_size": B, "seq_len": T, "batches": 2, **DOCUMENTS}
    loss = training.mean_loss(evaluate, params, DATASET, **sizes, sharding=sharding)
    random = np.random.default_rng(1)
    questions = [
        evaluation.Question(random.integers(0, 100, 5), tuple(random.integers(0, 100, (4, 3))), 1)
        for _ in range(6)
    ]
    share = evaluation.accuracy(
        model.forward, params, questions, config=config, batch_size=B, sharding=sharding
    )
    return {"validation": loss, "accuracy": share}


def check_checkpoints(folder, state):
    """Saves on eight devices, then restores and saves in other shards and on one device."""
    devices = jax.devices()
    meshes = [
        # From shards to whole parameters on each device.
        parallel.make_mesh(data=8, axis_type="explicit"),
        parallel.make_mesh(data=1, fsdp=2, tensor=2, devices=devices[:4]),
        parallel.make_mesh(data=1, devices=devices[:1]),
    ]
    wanted = jax.device_get(state)
    with checkpoint.open_folder(folder, keep=None) as opened:
        checkpoint.save(opened, 1, state, {})
        for number, mesh in enumerate(meshes, 2):
            shardings = parallel.state_shardings(mesh, state)
            like = jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                state,
                shardings,
            )
            opened.wait_until_finished()
            state = checkpoint.restore(opened, like)
            assert jax.tree.map(lambda x: x.sharding, state) == shardings
            assert_equal(state, wanted)
            checkpoint.save(opened, number, state, {})


def main(case: str, folder: Path) -> None:
    """Prints the JSON object of the module's docstring."""
    (model, config), options = MODELS[case], CASES[case]
    unroll = options["unroll"]

    def init():
        return model.init(jax.random.key(0), config)

    first = training.init_state(unstack(init()) if unroll else init(), OPTIMIZER, **KEPT)
    mesh = parallel.make_mesh(**{"data": 1, **options["axes"]}, axis_type=options["axis_type"])
    is_explicit = options["axis_type"] == "explicit"
    rows = parallel.batch_sharding(mesh, accumulate=False)
    with jax.set_mesh(mesh) if is_explicit else contextlib.nullcontext():
        state = parallel.init_state(mesh, init, OPTIMIZER, unroll=unroll, **KEPT)
        assert_equal(state, first)
        check_creation(mesh, init, state, unroll)
        loaded = parallel.init_state(mesh, jax.device_get(first.params), OPTIMIZER, **KEPT)
        assert_equal(loaded, first)
        shardings = parallel.state_shardings(mesh, state)
        assert jax.tree.map(lambda x: x.sharding, state) == shardings
        state, losses = train(model, config, sharded_batches(mesh), state, shardings)
        found = {"losses": losses, **outputs(model, config, state.params, rows)}
        assert_equal(parallel.to_host(state.params), state.params)
    auto = parallel.with_auto_axes(mesh)
    params = jax.device_put(state.params, parallel.state_shardings(auto, state.params))
    found["sample"] = sample(model, config, params)
    if not is_explicit:
        batch = sharded_batches(mesh)[0]
        check_checkpoints(folder, step_with_copy(model, config, batch, state, shardings))
    batches = [[of.reshape(A, B, T) for of in read(step)] for step in range(STEPS)]
    state, losses = train(model, config, batches, first)
    one = {"losses": losses, **outputs(model, config, state.params)}
    one["sample"] = sample(model, config, state.params)
    print(json.dumps({"one": one, "mesh": found}))


if __name__ == "__main__":
    warnings.simplefilter("error")
    # The sample has one sequence, which cannot be sharded.
    warnings.simplefilter("ignore", GatherWarning)
    main(sys.argv[1], Path(sys.argv[2]))
