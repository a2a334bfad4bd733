"""The fused blocks of GPT-2 along tensor: what they save, and that no weight moves.

They are traced as in a process with the CUDA extension and H100s. On the CPU their reference
implementations run, which save what the kernels save.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

import jaxllm
from jaxllm import testing
from jaxllm.core import ffi
from jaxllm.core.gathers import GatherWarning
from jaxllm.core.partition import column_shards
from jaxllm.models import gpt2
from jaxllm.ops.gemm import cuda_fused
from jaxllm.training import parallel

B, T = 4, 128
MOVES = r"= (.*) (all-gather|all-to-all|collective-permute)(?:-start)?\("


@pytest.fixture
def on_hopper(with_kernels, with_hopper_gpus, monkeypatch):
    """Fuses blocks of any size."""
    monkeypatch.setattr(ffi, "device", lambda: ffi.H100)
    monkeypatch.setattr(cuda_fused, "_MIN_TILES_OF_SM", 0)


def loss_and_gradients(config, params, tokens):
    return jax.value_and_grad(gpt2.loss)(params, tokens, jnp.roll(tokens, -1, 1), config)


@functools.cache
def inputs(config):
    params = gpt2.init(jax.random.key(0), config)
    tokens = jax.random.randint(jax.random.key(1), (B, T), 0, config.vocab_size)
    return jax.device_get((jax.tree.map(lambda x: x.astype("bfloat16"), params), tokens))


@functools.cache
def on_one_device(config, dtype):
    params, tokens = inputs(config)
    run = jax.jit(functools.partial(loss_and_gradients, config))
    with jaxllm.use_backend("xla"):
        return jax.device_get(run(jax.tree.map(lambda x: x.astype(dtype), params), tokens))


# The MLP has four times as many columns, in tiles of 384: two shards of 768 columns are whole
# tiles. Three heads stay whole.
@pytest.mark.parametrize(
    ("heads", "width", "tensor", "dgelu"),
    [(2, 192, 2, "cuda"), (4, 192, 4, "its parts"), (3, 144, 2, "its parts")],
)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.covering(("heads",), ("kind",))
@pytest.mark.filterwarnings(f"error::{GatherWarning.__module__}.{GatherWarning.__qualname__}")
def test_fused_blocks_gather_nothing_along_tensor(on_hopper, kind, heads, width, tensor, dgelu):
    config = gpt2.GPT2Config(vocab_size=100, max_seq_len=T, layers=2, heads=heads, width=width)
    devices = jax.devices()[:tensor]
    mesh = parallel.make_mesh(data=1, tensor=tensor, axis_type=kind, devices=devices)
    params, tokens = inputs(config)
    shardings = parallel.state_shardings(mesh, params)
    run = functools.partial(loss_and_gradients, config)
    with jax.set_mesh(mesh), jaxllm.use_backend("auto"):
        of_tokens = parallel.batch_sharding(mesh, accumulate=False)
        arrays = jax.device_put((params, tokens), (shardings, of_tokens))
        calls = jaxllm.explain(run, *arrays).calls
        assert {call.on_gpu for call in calls if call.stem == "matmul_dgelu"} == {dgelu}
        assert {call.on_gpu for call in calls if call.stem == "attention_block"} == {"fused"}
        jitted = jax.jit(run, out_shardings=(parallel.replicated(mesh), shardings))
        program = jitted.lower(*arrays).compile()
        found = jax.device_get(program(*arrays))
    moves = re.findall(MOVES, program.as_text() or "")
    assert not moves, moves
    wanted, baseline = (on_one_device(config, dtype) for dtype in ("float32", "bfloat16"))
    testing.assert_close(found, wanted, "bfloat16", baseline)


# Sizes of the axes, the spec of a weight with 64 columns, and the shards of these: on Auto axes,
# where only the mesh is known, and on Explicit ones.
@pytest.mark.parametrize(
    ("sizes", "up", "auto", "explicit"),
    [
        ({"data": 2, "fsdp": 2, "context": 2}, (None, None), 1, 1),
        ({"fsdp": 4, "tensor": 2}, ("fsdp", "tensor"), 2, 2),
        ({"data": 2, "tensor": 4}, (None, None), 4, 1),
        ({"fsdp": 8}, (None, "fsdp"), 1, 1),  # its axis shards the rows
        ({"x": 4, "y": 2}, (None, ("x", "y")), 8, 8),
        ({"x": 3, "y": 2}, (None, "y"), 2, 2),  # three do not divide the columns
    ],
)
def test_how_many_shards_a_mesh_may_cut_columns_into(sizes, up, auto, explicit):
    rows = tuple(axis for axis in ("data", "fsdp") if axis in sizes) or None
    found = []
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        shape, axes = tuple(sizes.values()), tuple(sizes)
        mesh = jax.sharding.AbstractMesh(shape, axes, axis_types=(kind,) * len(axes))

        def ask(x, up, down):
            found.append(column_shards(x, up, down))

        def abstract(shape, *spec, mesh=mesh):
            sharding = jax.sharding.NamedSharding(mesh, jax.P(*spec))
            return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=sharding)

        with jax.sharding.use_abstract_mesh(mesh):
            given = abstract((16, 8), rows), abstract((8, 64), *up), abstract((64, 8), up[1])
            jax.eval_shape(ask, *given)
    assert found == [auto, explicit]
