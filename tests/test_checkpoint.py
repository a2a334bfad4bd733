import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm import checkpoint, data, optim, training
from jaxllm.models import gpt2
from jaxllm.models.blocks import unstack

ROOT = Path(__file__).parent.parent
CONFIG = gpt2.GPT2Config(vocab_size=61, max_seq_len=16, layers=2, heads=2, width=32)
OPTIMIZER = training.adamw(1e-2)
RECORD = {"seed": 3, "order": "shuffled", "nested": [1, None, {"a": 0.5}]}


def fresh(optimizer=OPTIMIZER, config=CONFIG, unrolled=False, **options):
    params = gpt2.init(jax.random.key(0), config)
    return training.init_state(unstack(params) if unrolled else params, optimizer, **options)


def assert_equal(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    dtypes = [[leaf.dtype for leaf in jax.tree.leaves(tree)] for tree in (found, wanted)]
    assert dtypes[0] == dtypes[1]


def loss_fn(params, tokens, labels):
    return gpt2.loss(params, tokens, labels, CONFIG)


@pytest.mark.parametrize("unrolled", [False, True])
def test_a_checkpoint_is_the_state_when_it_was_saved(tmp_path, unrolled):
    """Though the next steps write over its buffers while it is written."""
    options = {"copy_dtype": "bfloat16", "guarded": True, "unrolled": unrolled}
    step = training.make_train_step(loss_fn, OPTIMIZER, compute_dtype="bfloat16")
    tokens = np.random.default_rng(0).integers(0, 61, (8, 1, 4, 17), np.int32)
    states, state = {}, fresh(**options)
    with checkpoint.open_folder(tmp_path, keep=None) as folder:
        for i, batch in enumerate(tokens, 1):
            state, _ = step(state, batch[..., :-1], batch[..., 1:])
            states[i] = jax.tree.map(np.array, state)
            checkpoint.save(folder, i, state, RECORD | {"step": i})
    with checkpoint.open_folder(tmp_path, keep=None) as folder:
        assert checkpoint.steps(folder) == list(states)
        for i, wanted in states.items():
            found = checkpoint.restore(folder, fresh(**options), i)
            assert_equal(found, wanted)
            assert_equal(found.copy, training.cast(wanted.params, "bfloat16"))
            assert checkpoint.read_record(folder, i) == RECORD | {"step": i}
        newest = checkpoint.restore(folder, fresh(**options))
        assert int(newest.step) == 8
        assert checkpoint.read_record(folder)["step"] == 8


@pytest.mark.parametrize("optimizer", [optim.adamw(1e-2), optax.adamw(1e-2)], ids=["ours", "optax"])
def test_other_optimizers_states(tmp_path, optimizer):
    params = training.cast(gpt2.init(jax.random.key(1), CONFIG), "bfloat16")
    state = training.init_state(params, optimizer)
    with checkpoint.open_folder(tmp_path) as folder:
        checkpoint.save(folder, 1, state, {})
        folder.wait_until_finished()
        assert_equal(checkpoint.restore(folder, state), state)


def test_the_last_ones_stay_and_every_so_many(tmp_path):
    with checkpoint.open_folder(tmp_path, keep=2, keep_every=10) as folder:
        for step in range(4, 36, 2):
            checkpoint.save(
                folder, step, training.TrainState({"x": jnp.ones(3)}, (), jnp.int32(step)), {}
            )
    with checkpoint.open_folder(tmp_path, keep=2, keep_every=10) as folder:
        assert checkpoint.steps(folder) == [10, 20, 30, 32, 34]


def test_what_is_incomplete_does_not_count(tmp_path):
    with checkpoint.open_folder(tmp_path) as folder:
        checkpoint.save(folder, 1, fresh(), {})
    half = tmp_path / "2.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "state").write_text("half of it")
    with checkpoint.open_folder(tmp_path) as folder:
        assert checkpoint.steps(folder) == [1]
        assert int(checkpoint.restore(folder, fresh()).step) == 0
    assert not half.exists()


def test_what_is_not_there_is_said(tmp_path):
    with checkpoint.open_folder(tmp_path) as folder:
        with pytest.raises(FileNotFoundError, match="no checkpoint; there are none"):
            checkpoint.restore(folder, fresh())
        checkpoint.save(folder, 1, fresh(), {})
        folder.wait_until_finished()
        with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 2; there are \[1\]"):
            checkpoint.read_record(folder, 2)


def test_a_checkpoint_of_another_shape_is_refused(tmp_path):
    with checkpoint.open_folder(tmp_path) as folder:
        checkpoint.save(folder, 1, fresh(), {})
        folder.wait_until_finished()
        wider = gpt2.GPT2Config(vocab_size=61, max_seq_len=16, layers=2, heads=2, width=64)
        with pytest.raises(
            ValueError, match=r"step 1: params/.*bias has shape \(2, 32\); it must be \(2, 64\)"
        ):
            checkpoint.restore(folder, fresh(config=wider))
        with pytest.raises(ValueError, match="blocks/0/attention/out/bias is missing"):
            checkpoint.restore(folder, fresh(unrolled=True))


DAMAGED = r"{}, step 1: cannot be read\. If it is damaged"


@pytest.mark.parametrize("lost", ["state", "record"])
def test_a_damaged_checkpoint_is_named(tmp_path, lost):
    with checkpoint.open_folder(tmp_path) as folder:
        checkpoint.save(folder, 1, fresh(), RECORD)
    shutil.rmtree(tmp_path / "1" / lost)
    message = "^" + DAMAGED.format(tmp_path)
    with checkpoint.open_folder(tmp_path) as folder, pytest.raises(ValueError, match=message):
        if lost == "record":
            checkpoint.read_record(folder)
        else:
            checkpoint.restore(folder, fresh())


def test_a_checkpoint_with_a_damaged_array_is_named(tmp_path):
    with checkpoint.open_folder(tmp_path) as folder:
        checkpoint.save(folder, 1, fresh(), RECORD)
    largest = max((tmp_path / "1" / "state").rglob("*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:10])
    # In a process of its own: orbax leaves reads that nobody awaits, and they fail when they are
    # collected, in whatever test that is.
    restore = "import sys, test_checkpoint; test_checkpoint.restore_fresh(sys.argv[1])"
    run = subprocess.run(
        [sys.executable, "-c", restore, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )
    assert run.returncode != 0
    assert re.search("ValueError: " + DAMAGED.format(tmp_path), run.stderr), run.stderr


def restore_fresh(path):
    with checkpoint.open_folder(path) as folder:
        checkpoint.restore(folder, fresh())


@pytest.mark.slow
def test_killed_at_any_moment_a_run_goes_on_to_the_bit(tmp_path):
    (tmp_path / "shards").mkdir()
    tokens = np.random.default_rng(0).integers(0, 256, 20_000)
    data.write_shard(tmp_path / "shards" / "train.bin", tokens)
    kills = 20
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "kill_and_resume.py"), str(tmp_path), str(kills)],
        capture_output=True,
        text=True,
        env=os.environ
        | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}"},
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    whole, runs = found["whole"], found["runs"]
    assert len(whole) == 80 and len(runs) == kills + 1
    for number, losses in enumerate(runs):
        assert losses.items() <= whole.items(), f"after kill {number}"
    assert runs[-1] == whole
    assert found["half_written"] >= kills // 10
    models = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "broken")]
    assert models[0].read_bytes() == models[1].read_bytes()
