import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm import data, training
from jaxllm.models import gpt2
from jaxllm.models.common import unstack
from jaxllm.training import checkpoint, optim, parallel
from jaxllm.training.checksum import checksums

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
def test_restored_state_equals_the_saved_state(tmp_path, unrolled):
    """Later steps overwrite the donated buffers while the checkpoint is being written."""
    options = {"copy_dtype": "bfloat16", "detect_anomalies": True, "unrolled": unrolled}
    step = training.make_train_step(loss_fn, OPTIMIZER, compute_dtype="bfloat16")
    tokens = np.random.default_rng(0).integers(0, 61, (4, 1, 4, 17), np.int32)
    states, state = {}, fresh(**options)
    with checkpoint.open_folder(tmp_path, keep=None) as folder:
        for i, batch in enumerate(tokens, 1):
            state, _ = step(state, batch[..., :-1], batch[..., 1:])
            states[i] = jax.tree.map(np.array, state)
            checkpoint.save(folder, i, state, RECORD | {"step": i})
    like = fresh(**options)
    with checkpoint.open_folder(tmp_path, keep=None) as folder:
        assert checkpoint.steps(folder) == list(states)
        for i, wanted in states.items():
            found = checkpoint.restore(folder, like, i)
            assert_equal(found, wanted)
            assert_equal(found.copy, training.cast(wanted.params, "bfloat16"))
            assert checkpoint.read_record(folder, i) == RECORD | {"step": i}
        newest = checkpoint.restore(folder, like)
        assert int(newest.step) == 4
        assert checkpoint.read_record(folder)["step"] == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": 0}, ValueError, "keep is 0; it must be at least 1"),
        ({"keep": 2.5}, TypeError, r"keep is 2\.5; it must be an integer"),
        ({"keep_every": 0}, ValueError, "keep_every is 0; it must be at least 1"),
        ({"keep_every": "3"}, TypeError, "keep_every is '3'; it must be an integer"),
    ],
)
def test_no_folder_is_opened_that_would_keep_no_checkpoint(tmp_path, options, error, message):
    with (
        pytest.raises(error, match=message),
        checkpoint.open_folder(tmp_path / "new", **options),
    ):
        pass
    assert not (tmp_path / "new").exists()


def test_a_file_is_not_opened_as_a_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file: a file; checkpoints need a folder"):
        checkpoint.open_folder(tmp_path / "file").__enter__()


def test_steps_are_integers_of_any_type(tmp_path):
    state, record = training.init_state({"w": jnp.ones(2)}, OPTIMIZER), {"a": np.float32(0.5)}
    with checkpoint.open_folder(tmp_path) as folder:
        wrong: list[Any] = [3.0, "3", None]
        for step in wrong:
            with pytest.raises(TypeError, match=r"step is .*; it must be an integer"):
                checkpoint.save(folder, step, state, {})
        with pytest.raises(ValueError, match="step is -1; it must be at least 0"):
            checkpoint.save(folder, -1, state, {})
        checkpoint.save(folder, jnp.int32(3), state, record)
        folder.wait_until_finished()
        assert checkpoint.steps(folder) == [3]
        of_numpy: Any = np.int64(3)
        assert_equal(checkpoint.restore(folder, state, of_numpy), state)
        assert checkpoint.read_record(folder, jnp.int32(3)) == {"a": 0.5}
        for step in wrong[:2]:
            with pytest.raises(TypeError, match=r"step is .*; it must be an integer"):
                checkpoint.restore(folder, state, step)
        with pytest.raises(TypeError, match="cast_dtypes has '3'; it must be a bool"):
            checkpoint.restore(folder, state, cast_dtypes=wrong[1])


def test_leaves_that_are_no_arrays_are_named(tmp_path):
    state = training.init_state({"w": jnp.ones(2)}, OPTIMIZER)._replace(opt_state={"rate": 0.5})
    with checkpoint.open_folder(tmp_path) as folder:
        with pytest.raises(TypeError, match=r"opt_state/rate is 0\.5; it must be an array"):
            checkpoint.save(folder, 1, state, {})
        assert checkpoint.steps(folder) == []


@pytest.mark.parametrize("optimizer", [optim.adamw(1e-2), optax.adamw(1e-2)], ids=["ours", "optax"])
def test_states_of_other_optimizers_are_restored(tmp_path, optimizer):
    params = training.cast(gpt2.init(jax.random.key(1), CONFIG), "bfloat16")
    state = training.init_state(params, optimizer)
    with checkpoint.open_folder(tmp_path) as folder:
        checkpoint.save(folder, 1, state, {})
        folder.wait_until_finished()
        assert_equal(checkpoint.restore(folder, state), state)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_in_a_state_are_restored(tmp_path, impl):
    optimizer = optax.add_noise(0.01, 0.5, jax.random.key(0, impl=impl))
    state = training.init_state({"w": jnp.ones((3, 4))}, optimizer)
    _, opt_state = optimizer.update(state.params, state.opt_state)
    later = state._replace(opt_state=opt_state)
    with checkpoint.open_folder(tmp_path) as folder:
        checkpoint.save(folder, 1, later, {})
        folder.wait_until_finished()
        for like in (state, jax.eval_shape(lambda: state)):
            restored = checkpoint.restore(folder, like)
            assert checksums(restored) == checksums(later) != checksums(state)
            optimizer.update(state.params, restored.opt_state)  # fails if it is not a key
        mesh = parallel.make_mesh(data=1, devices=jax.devices()[:1])
        like = jax.tree.map(
            lambda x, of: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of),
            *(state, parallel.state_shardings(mesh, state)),
        )
        key = checkpoint.restore(folder, like).opt_state.rng_key
        assert isinstance(key.sharding, jax.NamedSharding) and key.sharding.mesh == mesh


def test_random_keys_of_another_implementation_are_not_restored(tmp_path):
    def state_of(impl):
        return training.TrainState({}, {"key": jax.random.key(0, impl=impl)}, jnp.int32(0))

    with checkpoint.open_folder(tmp_path) as folder:
        checkpoint.save(folder, 1, state_of("rbg"), {})
        folder.wait_until_finished()
        message = (
            "step 1: the random key opt_state/key has implementation rbg in the checkpoint and "
            "unsafe_rbg here"
        )
        for like in (state_of("unsafe_rbg"), jax.eval_shape(lambda: state_of("unsafe_rbg"))):
            with pytest.raises(ValueError, match=message):
                checkpoint.restore(folder, like)


@pytest.mark.parametrize("keep", [1, None])
def test_a_checkpoint_follows_all_others(tmp_path, keep):
    """Orbax would delete those of later steps, which it takes for older ones."""
    with checkpoint.open_folder(tmp_path, keep=keep) as folder:
        saved(folder, toy_state(), 30)
        for step in (15, 30):
            with pytest.raises(ValueError, match=rf"step is {step}; .* of steps \[30\], and a new"):
                saved(folder, toy_state(), step)
        assert checkpoint.steps(folder) == [30]
        folder.delete(30)
        saved(folder, toy_state(), 15)
        assert checkpoint.steps(folder) == [15]


def test_keep_and_keep_every_select_checkpoints(tmp_path):
    with checkpoint.open_folder(tmp_path, keep=2, keep_every=10) as folder:
        for step in range(4, 36, 2):
            checkpoint.save(
                folder, step, training.TrainState({"x": jnp.ones(3)}, (), jnp.int32(step)), {}
            )
    with checkpoint.open_folder(tmp_path, keep=2, keep_every=10) as folder:
        assert checkpoint.steps(folder) == [10, 20, 30, 32, 34]


def test_incomplete_checkpoints_are_removed(tmp_path):
    with checkpoint.open_folder(tmp_path) as folder:
        checkpoint.save(folder, 1, fresh(), {})
    half = tmp_path / "2.orbax-checkpoint-tmp"
    half.mkdir()
    (half / "state").write_text("half of it")
    with checkpoint.open_folder(tmp_path) as folder:
        assert checkpoint.steps(folder) == [1]
        assert int(checkpoint.restore(folder, fresh()).step) == 0
    assert not half.exists()


def test_missing_checkpoint_is_an_error(tmp_path):
    with checkpoint.open_folder(tmp_path) as folder:
        with pytest.raises(FileNotFoundError, match="no checkpoint; there are none"):
            checkpoint.restore(folder, fresh())
        checkpoint.save(folder, 1, fresh(), {})
        folder.wait_until_finished()
        with pytest.raises(FileNotFoundError, match=r"no checkpoint of step 2; there are \[1\]"):
            checkpoint.read_record(folder, 2)


def test_restore_rejects_other_shapes_and_names(tmp_path):
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


@pytest.mark.parametrize(
    ("stored", "wanted", "message"),
    [
        ({"0": 1, "1": 2}, [1, 2], "params/w is a dict in the checkpoint and a list here"),
        ((1, 2), {"0": 1, "1": 2}, "params/w is a list in the checkpoint and a dict here"),
        (
            {"a": 1},
            {"a": 1, "b": None},
            "params/w/b is missing in the checkpoint and is empty here",
        ),
        ({"a": 1, "b": {}}, {"a": 1}, "params/w/b is empty in the checkpoint and is missing here"),
    ],
)
def test_restore_names_other_containers(tmp_path, stored, wanted, message):
    """Such a checkpoint is not damaged."""

    def state_of(tree):
        return training.init_state({"w": jax.tree.map(jnp.float32, tree)}, optax.sgd(0.1))

    with checkpoint.open_folder(tmp_path) as folder:
        checkpoint.save(folder, 1, state_of(stored), {})
        folder.wait_until_finished()
        with pytest.raises(ValueError, match=f"step 1: {message}"):
            checkpoint.restore(folder, state_of(wanted))


DAMAGED = r"{}, step 1: cannot be read\. If it is damaged"


@pytest.mark.parametrize("lost", ["state", "record"])
def test_missing_item_error_names_the_checkpoint(tmp_path, lost):
    with checkpoint.open_folder(tmp_path) as folder:
        checkpoint.save(folder, 1, fresh(), RECORD)
    shutil.rmtree(tmp_path / "1" / lost)
    message = "^" + DAMAGED.format(tmp_path)
    with checkpoint.open_folder(tmp_path) as folder, pytest.raises(ValueError, match=message):
        if lost == "record":
            checkpoint.read_record(folder)
        else:
            checkpoint.restore(folder, fresh())


def test_damaged_metadata_error_names_the_checkpoint(tmp_path):
    with checkpoint.open_folder(tmp_path) as folder:
        checkpoint.save(folder, 1, fresh(), RECORD)
    path = tmp_path / "1" / "state" / "_METADATA"
    path.write_text(path.read_text().replace("jax.Array", "jax.Arrax"))
    with (
        checkpoint.open_folder(tmp_path) as folder,
        pytest.raises(ValueError, match="^" + DAMAGED.format(tmp_path)),
    ):
        checkpoint.restore(folder, fresh())


def test_damaged_array_error_names_the_checkpoint(tmp_path):
    with checkpoint.open_folder(tmp_path) as folder:
        checkpoint.save(folder, 1, fresh(), RECORD)
    largest = max((tmp_path / "1" / "state").rglob("*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:10])
    # In a subprocess: orbax leaves failed reads that nobody awaits, which raise when they are
    # garbage collected, in any later test.
    restore = "import sys, test_checkpoint; test_checkpoint.restore_fresh(sys.argv[1])"
    run = subprocess.run(
        [sys.executable, "-c", restore, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )
    assert re.match(DAMAGED.format(tmp_path), run.stdout), run.stderr


def restore_fresh(path):
    """Prints the error where threads print nothing into its lines."""
    with checkpoint.open_folder(path) as folder:
        try:
            checkpoint.restore(folder, fresh())
        except ValueError as error:
            print(error, flush=True)


def toy_state(dtype="float32", **options):
    params = {"w": jnp.linspace(0, 1, 12).reshape(3, 4).astype(dtype), "b": jnp.ones(4, dtype)}
    return training.init_state(params, optax.adamw(1e-2), **options)


def saved(folder, state, step=1):
    checkpoint.save(folder, step, state, RECORD)
    folder.wait_until_finished()


@pytest.mark.parametrize(("stored", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_restore_rejects_other_dtypes_without_cast_dtypes(tmp_path, stored, wanted):
    state, like = toy_state(stored), toy_state(wanted, copy_dtype="float16")
    with checkpoint.open_folder(tmp_path) as folder:
        saved(folder, state)
        message = (
            rf"params/b has dtype {stored} in the checkpoint and {wanted} here; params/w .*"
            r"Use restore\(..., cast_dtypes=True\)"
        )
        with pytest.raises(ValueError, match=message):
            checkpoint.restore(folder, like)
        found = checkpoint.restore(folder, like, cast_dtypes=True)
    assert_equal(found.params, training.cast(state.params, wanted))
    assert_equal(
        found.opt_state, jax.tree.map(lambda x, y: x.astype(y.dtype), *states(state, like))
    )
    assert_equal(found.copy, training.cast(found.params, "float16"))


def states(*each):
    return [state.opt_state for state in each]


def test_restore_rejects_64_bit_arrays_without_x64(tmp_path):
    with checkpoint.open_folder(tmp_path) as folder:
        with jax.enable_x64(True):
            saved(folder, toy_state("float64"))
            assert_equal(checkpoint.restore(folder, toy_state("float64")), toy_state("float64"))
        with pytest.raises(ValueError, match="mu/b has dtype float64, which needs jax_enable_x64"):
            checkpoint.restore(folder, toy_state(), cast_dtypes=True)


@pytest.mark.parametrize("optimizer", [optax.adamw(1e-2), optim.adamw(1e-2)], ids=["optax", "ours"])
def test_resumed_bfloat16_run_is_bit_identical(tmp_path, optimizer):
    """Optax initializes moments in bfloat16, and an update promotes them to float32."""

    def start():
        params = training.cast(gpt2.init(jax.random.key(0), CONFIG), "bfloat16")
        return training.init_state(params, optimizer)

    traced = []

    def counted_loss(*args):
        traced.append(args)
        return loss_fn(*args)

    step = training.make_train_step(counted_loss, optimizer, compute_dtype="bfloat16")
    tokens = np.random.default_rng(0).integers(0, 61, (4, 1, 4, 17), np.int32)
    state, losses = start(), []
    with checkpoint.open_folder(tmp_path) as folder:
        for i, batch in enumerate(tokens):
            if i == 2:
                saved(folder, state)
                restored = checkpoint.restore(folder, start())
                assert_equal(restored, state)
            state, metrics = step(state, batch[..., :-1], batch[..., 1:])
            losses.append(metrics["loss"])
        for i, batch in enumerate(tokens[2:], 2):
            restored, metrics = step(restored, batch[..., :-1], batch[..., 1:])
            assert metrics["loss"] == losses[i]
    assert_equal(restored, state)
    assert len(traced) == 1  # the restored state runs the same program


def test_checkpoint_without_checksums_is_read_with_a_warning(tmp_path):
    """Orbax checkpoints that another program wrote have no checksums."""
    state = toy_state()
    with checkpoint.open_folder(tmp_path) as folder:
        args = checkpoint._import_orbax().args
        items = {"state": args.StandardSave(state), "record": args.JsonSave(RECORD)}
        folder.save(1, args=args.Composite(**items), force=True)
    with checkpoint.open_folder(tmp_path) as folder:
        with pytest.warns(
            UserWarning, match=r"step 1: has no checksums, so damage may go undetected"
        ):
            assert_equal(checkpoint.restore(folder, state), state)
        with pytest.warns(UserWarning, match="no checksums"):
            assert checkpoint.read_record(folder) == RECORD


def test_missing_checksums_of_a_saved_checkpoint_are_damage(tmp_path):
    with checkpoint.open_folder(tmp_path) as folder:
        saved(folder, toy_state())
    shutil.rmtree(tmp_path / "1" / "checksums")
    with checkpoint.open_folder(tmp_path) as folder:
        for read in (lambda: checkpoint.restore(folder, toy_state()), folder_record(folder)):
            with pytest.raises(ValueError, match=DAMAGED.format(tmp_path)):
                read()


def folder_record(folder):
    return lambda: checkpoint.read_record(folder)


def test_checksum_mismatch_names_the_arrays(tmp_path, monkeypatch):
    state = toy_state()
    with checkpoint.open_folder(tmp_path) as folder:
        sums = checksums(state)
        sums["params/w"] = checksums(toy_state("bfloat16"))["params/w"]
        monkeypatch.setattr(checkpoint, "checksums", lambda _: sums)
        saved(folder, state)
        monkeypatch.undo()
        with pytest.raises(ValueError, match=r"step 1: damaged; .* checksums: params/w; delete"):
            checkpoint.restore(folder, state)
        record = next((tmp_path / "1" / "record").glob("metadata*"))
        record.write_text(record.read_text().replace("shuffled", "shuffle"))
        with pytest.raises(ValueError, match="step 1: the record is damaged"):
            checkpoint.read_record(folder)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"a": jnp.ones((0, 3))},
            r"params/a has shape \(0, 3\); a checkpoint cannot hold empty arrays",
        ),
        ({"a": np.ones(3)}, "params/a has dtype float64, which needs jax_enable_x64"),
        ({"a": jnp.ones(3, "uint4")}, "params/a has dtype uint4, which a checkpoint cannot hold"),
        (
            {"a": {"b": jnp.ones(3)}, "a.b": jnp.ones(3)},
            "params/a.b and params/a/b would have the same",
        ),
        (
            {"a": {"b": jnp.ones(3)}, "a/b": jnp.ones(3)},
            "params/a/b and params/a/b would have the same",
        ),
    ],
)
def test_save_rejects_unstorable_states_before_writing(tmp_path, params, message):
    with checkpoint.open_folder(tmp_path) as folder:
        state = training.TrainState(params, (), jnp.int32(0))
        with pytest.raises(ValueError, match=message):
            checkpoint.save(folder, 1, state, {})
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoint.save(folder, 1, toy_state(), {"path": tmp_path})
        wrong: Any = params
        with pytest.raises(TypeError, match="state has type dict; it must be a TrainState"):
            checkpoint.save(folder, 1, wrong, {})
        assert checkpoint.steps(folder) == []


@pytest.mark.parametrize("flips", [10, pytest.param(25, marks=pytest.mark.slow)])
def test_flipped_bits_are_found_and_arrays_are_resharded(tmp_path, flips):
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "damaged_checkpoints.py"), str(tmp_path), str(flips)],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4",
        },
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(set(found["specs"])) == 3
    counts = found["flips"]
    assert sum(counts.values()) >= flips
    assert set(counts) == {"nothing changed", "not readable", "found by checksum"}


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "uint8", "bool", "complex64"],
)
def test_checksum_depends_on_every_bit_and_position(dtype):
    rng = np.random.default_rng(0)
    array = rng.normal(size=(3, 5, 7))
    array = jnp.asarray(array > 0 if dtype == "bool" else 9 * array, dtype)
    values = np.asarray(array)

    def of(values):
        return checksums({"x": jnp.asarray(values, dtype)})["x"]

    assert of(values).startswith(f"{dtype}[3,5,7] ")
    sums = {
        of(values),
        of(values.reshape(5, 3, 7)),
        of(values[::-1]),
        of(values.transpose(0, 2, 1)),
    }
    if dtype == "bool":
        changed = [np.logical_xor(values, np.arange(values.size).reshape(values.shape) == 17)]
    else:  # each bit of an element
        bits = values.copy().reshape(-1)
        raw = bits.view(np.uint8)
        width = bits.dtype.itemsize
        changed = []
        for bit in range(8 * width):
            raw[17 * width + bit // 8] ^= 1 << bit % 8
            changed.append(bits.reshape(values.shape).copy())
            raw[17 * width + bit // 8] ^= 1 << bit % 8
    sums |= {of(each) for each in changed}
    assert len(sums) == 4 + len(changed)


def test_checksum_distinguishes_equal_values_with_different_bits():
    values = {"zero": 0.0, "negative": -0.0, "nan": np.nan}
    sums = {checksums({"x": jnp.float32(value)})["x"] for value in values.values()}
    other_nan = jax.lax.bitcast_convert_type(jnp.uint32(0x7FC00001), jnp.float32)
    assert len(sums | {checksums({"x": other_nan})["x"]}) == 4
    with jax.enable_x64(True):
        low, high = (checksums({"x": jnp.float64(x)})["x"] for x in (1.0, np.nextafter(1.0, 2)))
        assert low != high
    assert checksums({"k": jax.random.key(0)}) != checksums({"k": jax.random.key(1)})


# The opposite of what conftest.py asks for.
OPTIMIZED = "--xla_backend_optimization_level=3 --xla_llvm_disable_expensive_passes=false"


@pytest.mark.parametrize(("kills", "steps"), [(2, 24), (20, 80)])
@pytest.mark.slow  # test_parallel.py kills and resumes a run of two processes
def test_killed_and_resumed_run_is_bit_identical(tmp_path, kills, steps):
    """All runs share a cache and take many steps, so optimized programs save time."""
    (tmp_path / "shards").mkdir()
    tokens = np.random.default_rng(0).integers(0, 256, 20_000)
    data.write_shard(tmp_path / "shards" / "train.bin", tokens)
    script = str(ROOT / "tests" / "kill_and_resume.py")
    run = subprocess.run(
        [sys.executable, script, str(tmp_path), str(kills), str(steps)],
        capture_output=True,
        text=True,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {OPTIMIZED}",
        },
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    whole, runs = found["whole"], found["runs"]
    assert len(whole) == steps and len(runs) == kills + 1
    for number, losses in enumerate(runs):
        assert losses.items() <= whole.items(), f"after kill {number}"
    assert runs[-1] == whole
    assert found["half_written"] >= kills // 10
    models = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "broken")]
    assert models[0].read_bytes() == models[1].read_bytes()
