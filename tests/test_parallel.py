"""A training state and its batches on several devices, and in several processes."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pretrain_gpt2
import pytest
from jax.sharding import PartitionSpec as P
from pretraining_scripts import read_log
from several_devices import MODELS

from jaxllm import data, training
from jaxllm.models.common import unstack
from jaxllm.training import loader, optim, parallel

ROOT = Path(__file__).parent.parent
MESH = jax.sharding.AbstractMesh((2, 4, 1, 1), parallel.AXES)
AUTO = jax.sharding.AbstractMesh(
    (2, 4, 1, 1), parallel.AXES, axis_types=(jax.sharding.AxisType.Auto,) * 4
)


def environment(devices):
    """The environment of a child process with this number of CPU devices."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "examples")),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
    }


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("data=2,fsdp=4", {"data": 2, "fsdp": 4}),
        (" fsdp = 8 ", {"fsdp": 8}),
        ("data=-1", {"data": -1}),
        ("tensor=2,context=-1", {"context": -1, "tensor": 2}),
    ],
)
def test_parse_mesh_reads_sizes(text, sizes):
    assert parallel.parse_mesh(text) == dict.fromkeys(parallel.AXES, 1) | sizes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "it must be like data=2,fsdp=4"),
        ("data=two", "has 'data=two'; it must be like"),
        ("model=2", "has the axis 'model'; axes are data, fsdp, context, tensor"),
        ("data=2,data=4", "names the axis data twice"),
    ],
)
def test_parse_mesh_rejects_other_texts(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parallel.parse_mesh(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": 2, "fsdp": 4}, "sizes multiply to 8, but there are 1 devices in 1 processes"),
        ({"data": -1, "fsdp": 4}, "4 does not divide the number of devices, 1"),
        ({"tensor": 4}, "data=-1, tensor=4: 4 does not divide the number of devices, 1"),
        ({"data": 1, "context": 2}, "context=2: the sizes multiply to 2, but there are 1 devices"),
        ({"data": -1, "fsdp": -1}, "only one size may be -1"),
        ({"fsdp": 0}, "fsdp is 0; it must be at least 1, or -1"),
        ({"tensor": -2}, "tensor is -2; it must be at least 1, or -1"),
        ({"axis_type": "manual"}, "it must be 'auto' or 'explicit'"),
    ],
)
def test_make_mesh_rejects_wrong_sizes(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parallel.make_mesh(**options, devices=jax.devices()[:1])


@pytest.mark.parametrize(
    ("of_shardings", "of_state", "message"),
    [
        ({"copy_dtype": "bfloat16"}, {}, "copy differs from state.copy .*: weight is unexpected"),
        ({}, {"copy_dtype": "bfloat16"}, "copy differs from state.copy .*: weight is missing"),
        ({"detect_anomalies": True}, {}, "anomaly differs from state.anomaly .*: losses is unexp"),
    ],
)
def test_step_names_what_shardings_of_another_state_have(of_shardings, of_state, message):
    mesh, optimizer = parallel.make_mesh(devices=jax.devices()[:1]), optim.adamw(0.1)
    first, state = (
        training.init_state({"weight": jnp.ones((4, 4))}, optimizer, **options)
        for options in (of_shardings, of_state)
    )
    shardings = parallel.state_shardings(mesh, first)
    step = training.make_train_step(
        lambda params, *_: params["weight"].sum(),
        optimizer,
        compute_dtype="bfloat16",
        shardings=shardings,
    )
    tokens = np.zeros((1, 2, 3), np.int32)
    with pytest.raises(ValueError, match=rf"shardings\.{message}.*; make the shardings of this"):
        step(state, tokens, tokens)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"weight": np.ones(3)}, r"params has the keys \['weight'\]; it must have blocks"),
        ({"blocks": {"a": np.ones(3), "b": np.ones(2)}}, r"shape \(3,\) and \(2,\); all must have"),
        ({"blocks": {"a": np.ones(3), "b": np.ones(())}}, r"shape \(3,\) and \(\); all must have"),
    ],
)
def test_unroll_rejects_blocks_that_are_not_stacked(params, message):
    mesh = parallel.make_mesh(devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=message):
        parallel.init_state(mesh, params, optim.adamw(0.1), unroll=True)


def test_put_names_what_shardings_of_another_tree_have():
    shardings = parallel.state_shardings(
        parallel.make_mesh(devices=jax.devices()[:1]), {"a": np.ones(3), "c": np.ones(3)}
    )
    message = "shardings differs from tree in structure: b is missing; c is unexpected"
    with pytest.raises(ValueError, match=message):
        parallel.put(shardings, {"a": np.ones(3), "b": np.ones(3)})


def test_mesh_that_is_none_is_named():
    nothing: Any = None
    with pytest.raises(TypeError, match="mesh has type NoneType; it must be a mesh of make_mesh"):
        parallel.state_shardings(nothing, {"a": np.ones(3)})


def test_unroll_leaves_a_list_of_blocks():
    params = {"blocks": [{"a": np.ones(3), "b": np.ones(2)}]}
    assert unstack(params) is params


@pytest.mark.parametrize("size", ["8", 1.0, None])
def test_sizes_of_a_mesh_are_integers(size):
    with pytest.raises(TypeError, match=f"fsdp is {size!r}; it must be an integer"):
        parallel.make_mesh(fsdp=size)


@pytest.mark.parametrize(
    "make",
    [
        parallel.batch_sharding,
        lambda mesh: parallel.state_shardings(mesh, {"weight": jnp.ones((8, 8))}),
        lambda mesh: parallel.init_state(mesh, {"weight": jnp.ones((8, 8))}, training.adamw(1.0)),
    ],
)
def test_meshes_without_the_axes_are_rejected(make):
    mesh = jax.make_mesh((1, 1), ("data", "model"), devices=jax.devices()[:1])
    with pytest.raises(ValueError, match="mesh has the axes data, model, and no fsdp; make it"):
        make(mesh)


def test_whether_batches_accumulate_is_a_bool():
    wrong: Any = "no"
    with pytest.raises(TypeError, match="accumulate has 'no'; it must be a bool"):
        parallel.batch_sharding(MESH, accumulate=wrong)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=[])
@dataclasses.dataclass
class Module:
    """Parameters that can be called, as a module of Equinox can."""

    weight: jax.Array

    def __call__(self, x):
        return x @ self.weight


def test_parameters_may_be_a_callable_pytree():
    mesh = parallel.make_mesh(data=1, devices=jax.devices()[:1])
    state = parallel.init_state(mesh, Module(jnp.ones((2, 3))), training.adamw(1.0))
    assert state.params.weight.shape == (2, 3)


def test_random_keys_are_put_in_shards_and_copied_to_the_host():
    mesh = parallel.make_mesh(data=1, devices=jax.devices()[:1])
    keys = {"one": jax.random.key(0), "many": jax.random.split(jax.random.key(1, impl="rbg"), 3)}
    shardings = parallel.state_shardings(mesh, keys)
    found = parallel.put(shardings, keys)
    for name, key in keys.items():
        assert found[name].dtype == key.dtype
        assert found[name].sharding.is_equivalent_to(shardings[name], key.ndim)
        for copy in (parallel.to_host(found)[name], jax.random.key_data(found[name])):
            np.testing.assert_array_equal(copy, jax.random.key_data(key))


# The mesh axes of the dimensions of each array, without the layer axis of stacked blocks.
SPECS = {
    "qkv/weight": ("fsdp", None, "tensor", None),
    "qkv/bias": (None, "tensor", None),
    "gate_up/weight": ("fsdp", None, "tensor"),
    "up/weight": ("fsdp", "tensor"),
    "up/bias": ("tensor",),
    "out/weight": (("tensor", "fsdp"), None),
    "down/weight": (("tensor", "fsdp"), None),
    "wte": (("tensor", "fsdp"), None),
    "lm_head": (("tensor", "fsdp"), None),
    "wpe": ("fsdp", None),
}


def of_optimizer(spec):
    """Of masters and moments: along context too, of which each device has the copy."""
    more = {"fsdp": ("fsdp", "context"), ("tensor", "fsdp"): ("tensor", "fsdp", "context")}
    return tuple(more.get(entry, entry) for entry in spec)


def without_tensor(spec):
    whole = {"tensor": None, ("tensor", "fsdp"): "fsdp"}
    return tuple(whole.get(entry, entry) for entry in spec)


def abstract_state(model, config, optimizer, unrolled):
    def create():
        params = model.init(jax.random.key(0), config)
        params = training.cast(unstack(params) if unrolled else params, "bfloat16")
        options = {"copy_dtype": "bfloat16", "detect_anomalies": True}
        return training.init_state(params, optimizer, **options)

    return jax.eval_shape(create)


@pytest.mark.parametrize("unrolled", [False, True])
@pytest.mark.parametrize("tensor", [1, 2])
def test_state_is_sharded_along_input_dimensions_and_whole_heads(unrolled, tensor):
    mesh = jax.sharding.AbstractMesh((1, 4, 2, tensor), parallel.AXES)
    seen = set()
    for model, config in MODELS.values():
        for optimizer in (training.adamw(1e-3), optim.adamw(1e-3)):
            state = abstract_state(model, config, optimizer, unrolled)
            shardings = parallel.state_shardings(mesh, state)
            for path, sharding in jax.tree_util.tree_leaves_with_path(shardings):
                *_, layer, leaf = (
                    "",
                    *jax.tree_util.keystr(path, simple=True, separator="/").split("/"),
                )
                name = f"{layer}/{leaf}" if leaf in ("weight", "bias") else leaf
                spec = SPECS.get(name, (None,) * len(sharding.spec))
                spec = spec if tensor > 1 else without_tensor(spec)
                is_copy = path[0] == jax.tree_util.GetAttrKey("copy")
                spec = spec if is_copy else of_optimizer(spec)
                stacked = (None,) if "/" in name and name in SPECS and not unrolled else ()
                assert tuple(sharding.spec) == (*stacked, *spec), path
                seen.add(name)
            ranks = jax.tree.map(lambda x, sharding: x.ndim == len(sharding.spec), state, shardings)
            assert all(jax.tree.leaves(ranks))
    assert {*SPECS, "scale", "ln1/bias", "down/bias", "step"} <= seen


@pytest.mark.parametrize(
    ("sizes", "shape", "spec"),
    [
        ((4, 1, 2, 1), (16, 6), P(("fsdp", "data", "context"), None)),
        ((4, 1, 2, 1), (4, 16), P(None, ("fsdp", "data", "context"))),
        ((4, 1, 2, 1), (4, 6), P(("fsdp", "data"), None)),
        ((4, 1, 2, 1), (3, 6), P(None, ("fsdp", "context"))),
        ((4, 1, 2, 1), (3, 5), P("fsdp", None)),
        ((4, 2, 1, 1), (4, 16), P("fsdp", None)),
        ((4, 2, 1, 1), (3, 16), P(None, ("fsdp", "data"))),
    ],
)
def test_masters_are_sharded_along_the_axes_of_the_copy_that_divide_them(sizes, shape, spec):
    mesh = jax.sharding.AbstractMesh(sizes, parallel.AXES)
    tree = {"weight": jnp.zeros(shape)}
    for copy_dtype in ("bfloat16", None):
        state = training.init_state(tree, training.adamw(1e-3), copy_dtype=copy_dtype)
        found = parallel.state_shardings(mesh, state)
        params = found.params["weight"].spec
        moments = {x.spec for x in jax.tree.leaves(found.opt_state) if len(x.spec) == 2}
        assert moments == {params}
        if copy_dtype is None:
            assert params == parallel.state_shardings(mesh, tree)["weight"].spec
        else:
            assert params == spec
            assert found.copy["weight"].spec == parallel.state_shardings(mesh, tree)["weight"].spec


def test_heads_that_the_tensor_axis_does_not_divide_stay_whole():
    model, config = MODELS["llama3"]  # two key heads
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), config))
    mesh = jax.sharding.AbstractMesh((1, 2, 1, 4), parallel.AXES)
    block = parallel.state_shardings(mesh, params)["blocks"]
    attention, mlp = block["attention"], block["mlp"]
    assert attention["qkv"]["weight"].spec == P(None, "fsdp", None, None, None)
    assert attention["out"]["weight"].spec == P(None, "fsdp", None)
    assert mlp["gate_up"]["weight"].spec == P(None, "fsdp", None, "tensor")
    assert mlp["down"]["weight"].spec == P(None, ("tensor", "fsdp"), None)


@pytest.mark.parametrize(
    ("context", "spec"),
    [(1, P(None, ("data", "fsdp"), None)), (2, P(None, ("data", "fsdp"), "context"))],
)
def test_batches_are_sharded_along_sequences_and_with_context_along_tokens(context, spec):
    mesh = jax.sharding.AbstractMesh((2, 2, context, 2), parallel.AXES)
    assert parallel.batch_sharding(mesh).spec == spec
    assert parallel.batch_sharding(mesh, accumulate=False).spec == P(*spec[1:])


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((6, 8), P(None, "fsdp")), ((6, 6), P(None, None)), ((8, 8), P("fsdp", None))],
)
def test_dimensions_that_the_axis_does_not_divide_stay_whole(shape, spec):
    tree = {"weight": jax.ShapeDtypeStruct(shape, "float32")}
    assert parallel.state_shardings(MESH, tree)["weight"].spec == spec


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            (2, 4, 1, 1),
            "batch size is 12; it must be a multiple of 8, the devices of the mesh (data=2",
        ),
        ((2, 1, 4, 1), "have 6 tokens; it must be a multiple of 4, the devices of the mesh along"),
    ],
)
def test_load_batch_rejects_uneven_batches(sizes, message):
    sharding = parallel.batch_sharding(jax.sharding.AbstractMesh(sizes, parallel.AXES))
    with pytest.raises(ValueError, match=re.escape(message)):
        loader.load_batch(sharding, (1, 12, 6), lambda rows: (np.zeros(0), np.zeros(0)))


@pytest.mark.parametrize(
    ("spec", "leading"),
    [
        (P("data", None), ()),
        (P("data"), ()),
        (P(), ()),
        (P(None, "data"), (2,)),
        (P("fsdp", ("data",), "context"), (2,)),
    ],
)
def test_load_batch_takes_any_spec_of_the_axes_of_the_mesh(spec, leading):
    tokens = np.arange(math.prod(leading) * 4 * 6).reshape(-1, 6)
    sharding = jax.NamedSharding(parallel.make_mesh(), spec)

    def read(rows):
        return tokens[rows.start : rows.stop], -tokens[rows.start : rows.stop]

    for array, sign in zip(
        loader.load_batch(sharding, (*leading, 4, 6), read), (1, -1), strict=True
    ):
        assert array.sharding == sharding
        np.testing.assert_array_equal(array, sign * tokens.reshape(*leading, 4, 6))


@pytest.mark.parametrize(
    ("sharding", "shape", "error", "message"),
    [
        (jax.NamedSharding(MESH, P("data")), (4,), ValueError, "shape is (4,); it must be (acc"),
        (jax.NamedSharding(MESH, P("data")), (8, -6), ValueError, "shape is (8, -6); it must be"),
        (
            parallel.batch_sharding(MESH),
            (8, 6),
            ValueError,
            f"sharding has {P(None, ('data', 'fsdp'), None)}; it must have at most 2 dimensions",
        ),
        (
            jax.NamedSharding(AUTO, P(P.UNCONSTRAINED)),
            (8, 6),
            ValueError,
            "each with names of mesh axes or None",
        ),
        (None, (8, 6), TypeError, "sharding has type NoneType; it must be a jax.NamedSharding"),
    ],
)
def test_load_batch_rejects_shardings_of_other_arrays(sharding, shape, error, message):
    with pytest.raises(error, match=re.escape(message)):
        loader.load_batch(sharding, shape, lambda rows: ())


@pytest.mark.parametrize(
    ("shape", "read", "message"),
    [
        ((0, 4, 6), (4, 6), r"shape is \(0, 4, 6\); .* with at least 1 microbatch"),
        (
            [2, 4, 6],
            (4, 7),
            r"read\(range\(0, 4\)\) returns an array of shape \(4, 7\), not \(4, 6",
        ),
        ((4, 6), (3, 6), r"returns an array of shape \(3, 6\), not \(4, 6\)"),
    ],
)
def test_load_batch_rejects_other_shapes_of_rows(shape, read, message):
    mesh = parallel.make_mesh(data=1, devices=jax.devices()[:1])
    sharding = parallel.batch_sharding(mesh, accumulate=len(shape) == 3)
    with pytest.raises(ValueError, match=message):
        loader.load_batch(sharding, shape, lambda rows: (np.zeros(read, np.int32),) * 2)


@pytest.mark.parametrize("order", ["shuffled", "llmc"])
def test_rows_of_a_batch_are_those_of_the_whole_batch(order):
    dataset = data.Dataset((np.arange(500, dtype=np.uint16), np.arange(400, dtype=np.uint16)))

    def read(rows=None):
        if order == "llmc":
            return data.batch_in_order(dataset, 6, 7, index=5, rank=1, ranks=2, rows=rows)
        return data.batch(dataset, 6, 7, seed=1, step=20, rows=rows)

    for rows in (range(0, 2), range(2, 6), range(6)):
        for part, whole in zip(read(rows), read(), strict=True):
            np.testing.assert_array_equal(part, whole[rows.start : rows.stop])
    for rows in (range(4, 7), range(0, 4, 2)):
        with pytest.raises(ValueError, match="consecutive rows of a batch of 6"):
            read(rows)


# Of the steps of Llama in shards there are more tests in tests/sharded.
@pytest.mark.parametrize("case", ["gpt2", pytest.param("llama3", marks=pytest.mark.slow)])
def test_training_on_a_mesh_equals_training_on_one_device(tmp_path, case):
    run = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "parallel_training.py"), case, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment(8),
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    one, mesh = found["one"], found["mesh"]
    assert len(one["losses"]) == 3
    np.testing.assert_allclose(mesh["losses"], one["losses"], rtol=1e-5)
    np.testing.assert_allclose(mesh["validation"], one["validation"], rtol=1e-5)
    assert (mesh["accuracy"], mesh["sample"]) == (one["accuracy"], one["sample"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "data=2,fsdp=4"], "data=2, fsdp=4: the sizes multiply to 8, but there are"),
        (["--mesh", "tensor=2"], "tensor=2: the sizes multiply to 2, but there are"),
        (["--processes", "2"], "--coordinator, --processes and --process must be passed together"),
        (["--distributed", "--process", "1"], "pass --distributed, or --coordinator"),
        (
            ["--coordinator", "localhost:1", "--processes", "2", "--process", "2"],
            "--process is 2, must be from 0 to --processes - 1",
        ),
    ],
)
def test_pretrain_rejects_wrong_meshes_in_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        pretrain_gpt2.main(["--smoke", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


# Runs a script with one program at a time: the collectives of several can deadlock on CPUs.
ONE_AT_A_TIME = """
import os, runpy, sys
import jax
jax.config.update("jax_cpu_enable_async_dispatch", False)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(folder, name, *more):
    """Starts a run of two processes with two devices each, under FSDP."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    arguments = ["--smoke", "--steps", "8", "--batch-size", "4", "--data", "shards", "--resume"]
    arguments += ["--checkpoint-every", "2", "--no-tensorboard", "--heartbeat-timeout", "10"]
    arguments += ["--out", name, "--mesh", "data=2,fsdp=2", "--coordinator", address, *more]
    script = str(ROOT / "examples" / "pretrain_gpt2.py")
    processes = []
    for i in range(2):
        with (folder / f"{name}{i}.txt").open("a") as output:
            child = [sys.executable, "-c", ONE_AT_A_TIME, script, *arguments]
            child += ["--processes", "2", "--process", str(i)]
            processes.append(
                subprocess.Popen(
                    child, stdout=output, stderr=output, cwd=folder, env=environment(2)
                )
            )
    return processes


def finish(folder, name, processes):
    """Waits for a run, which must succeed."""
    codes = [process.wait(timeout=200) for process in processes]
    assert codes == [0, 0], (folder / f"{name}0.txt").read_text()[-5000:]


def end(processes):
    """Kills what still runs."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def test_killed_process_ends_the_run_and_the_resumed_run_is_bit_identical(tmp_path):
    (tmp_path / "shards").mkdir()
    tokens = np.random.default_rng(0).integers(0, 256, 20_000)
    data.write_shard(tmp_path / "shards" / "train.bin", tokens)
    with contextlib.ExitStack() as stack:
        broken = start(tmp_path, "broken")
        stack.callback(end, broken)
        deadline = time.monotonic() + 120
        while not (tmp_path / "broken" / "checkpoints" / "2").exists():
            assert time.monotonic() < deadline, (tmp_path / "broken0.txt").read_text()
            time.sleep(0.02)
        broken[1].kill()
        killed = time.monotonic()
        whole = start(tmp_path, "whole")  # while the other process waits for heartbeats
        stack.callback(end, whole)
        assert broken[0].wait(timeout=60) != 0
        assert time.monotonic() - killed < 45
        named = re.compile(r"task:?\s?1\b|unhealthy \(stopped sending heartbeats\):\s+\S*1\n", re.I)
        assert named.search((tmp_path / "broken0.txt").read_text())
        finish(tmp_path, "whole", whole)
        resumed = start(tmp_path, "broken")
        stack.callback(end, resumed)
        finish(tmp_path, "broken", resumed)
    printed = (tmp_path / "broken0.txt").read_text()
    assert "resuming from step" in printed and "4 cpu (data=2, fsdp=2; 2 processes)" in printed
    assert "--- sample after step 8" in printed
    assert "step" not in (tmp_path / "whole1.txt").read_text()  # process 0 prints for all
    logs = [read_log(tmp_path / name / "log.jsonl") for name in ("whole", "broken")]
    losses = [[(r["step"], r["loss"], r["grad_norm"]) for r in log] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 8
    models = [tmp_path / name / "model" / "model.safetensors" for name in ("whole", "broken")]
    assert models[0].read_bytes() == models[1].read_bytes()
