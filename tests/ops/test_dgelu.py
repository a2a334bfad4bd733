"""The GELU derivative that the MLP saves: its layout, its values and its limits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import mlp_arrays, random_arrays

from jaxllm.core import layout
from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.ops import bias_gelu, gelu, mlp
from jaxllm.ops.gemm import cuda_fused, fused, reference
from jaxllm.ops.gemm.tile_order import TileOrdered, shape_of
from jaxllm.testing import assert_close, cotangents_like


def pack(array):
    return TileOrdered(jnp.zeros(0), ()).pack(array)


def test_reference_saves_dgelu_or_the_preactivation():
    x, weight, bias, *_ = mlp_arrays()
    options = {"saves_derivative": False, "out_columns": 5}
    out, h = reference.matmul_bias_gelu(x, weight, bias, **options)
    assert_close(h, x @ weight, "float32")
    again, derivative = reference.matmul_bias_gelu(
        x, weight, bias, **options | {"saves_derivative": True}
    )
    assert_close(again, out, "float32")
    assert_close(derivative, jax.grad(lambda h: gelu(h).sum())(h + bias), "float32")


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_backward_with_saved_dgelu_matches_backward_with_the_preactivation(backend):
    x, up_weight, up_bias, weight, _ = mlp_arrays()
    h = x @ up_weight
    dout = cotangents_like(jnp.zeros((3, 5)))
    derivative = jax.grad(lambda h: gelu(h).sum())(h + up_bias)
    expected = jax.vjp(lambda h, bias: bias_gelu(h, bias) @ weight, h, up_bias)[1](dout)
    for saved in (h, pack(derivative)):
        found = fused.matmul_dgelu(backend, dout, weight, saved, up_bias)
        assert_close(found, expected, "float32")


@pytest.mark.parametrize("backend", ["xla", "pallas", "auto"])
@pytest.mark.parametrize("shape", [(3, 6), (2, 70, 200), (130, 392)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.covering(("dtype", "backend"), ("shape",))
def test_packed_dgelu_gives_the_same_as_plain_dgelu(backend, shape, dtype):
    dout, weight, derivative, bias = random_arrays(
        (*shape[:-1], 16), (shape[-1], 16), shape, shape[-1:], dtype=dtype
    )
    # Small integers and eighths: products and sums are exact, in whatever order XLA adds them up.
    dout, weight = (jnp.clip(jnp.round(2 * x), -3, 3) for x in (dout, weight))
    derivative = jnp.round(8 * derivative) / 8
    run = jax.jit(functools.partial(dispatch, fused.MATMUL_DGELU, Direction.INFERENCE, backend))
    dh, dbias = run(dout, weight, pack(derivative), bias)
    expected = ((dout @ weight.T) * derivative).astype(dtype)
    np.testing.assert_array_equal(dh.astype("float32"), expected.astype("float32"))
    sums = expected.astype("float32").sum(range(len(shape) - 1))
    assert_close(dbias, sums, dtype)


def test_reference_never_sees_a_packed_array(on_hopper, monkeypatch):
    # With the sizes of a fused MLP, auto traces the kernels and the implementations for the CPU. No
    # other test has these sizes, for which JAX would remember the trace.
    arrays = jax.eval_shape(
        functools.partial(mlp_arrays, "bfloat16", rows=133 * 128, width=72, hidden=192, out=72)
    )
    seen = {"reference": [], "cuda": []}

    def watch(module, name, kind):
        fn = getattr(module, name)

        @functools.wraps(fn)
        def watched(*a, **options):
            out = fn(*a, **options)
            nodes = jax.tree.leaves((a, out), is_leaf=layout.is_packed)
            seen[kind] += [(name, layout.is_packed(node)) for node in nodes]
            return out

        monkeypatch.setattr(module, name, watched)

    watch(reference, "matmul_bias_gelu", "reference")
    watch(fused.MATMUL_DGELU.cuda, "matmul_dgelu", "cuda")
    watch(fused.MATMUL_BIAS_GELU.cuda, "matmul_bias_gelu", "cuda")
    dgrads = []
    dgrad = fused.dgrad
    monkeypatch.setattr(fused, "dgrad", lambda *a: dgrads.append(a) or dgrad(*a))
    text = str(jax.make_jaxpr(jax.grad(lambda *a: mlp(*a).sum().astype("float32")))(*arrays))
    assert "matmul_dgelu" in text
    assert {name for name, packed in seen["cuda"] if packed} == {"matmul_bias_gelu", "matmul_dgelu"}
    assert seen["reference"]
    assert not any(packed for _, packed in seen["reference"])
    # The parts of matmul_dgelu, for the CPU.
    assert dgrads
    assert not any(map(layout.is_packed, jax.tree.leaves(dgrads, is_leaf=layout.is_packed)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(1, 8), (127, 264), (2, 3, 130, 400), (256, 384)])
@pytest.mark.covering(("shape",), ("dtype",))
def test_packed_dgelu_has_the_tile_layout(shape, dtype):
    derivative = jnp.asarray(np.random.default_rng(0).uniform(-0.13, 1.13, shape), dtype)
    packed = pack(derivative)
    rows, columns = np.prod(shape[:-1]), shape[-1]
    assert layout.is_packed(packed)
    assert packed.shape == shape
    assert packed.array.shape == shape_of(rows, columns)
    assert packed.array.shape[1] % 2 == 0
    # Packing does not round.
    assert packed.array.dtype == derivative.dtype
    np.testing.assert_array_equal(packed.unpack(), derivative)
    np.testing.assert_array_equal(layout.unpack({"saved": (packed, None)})["saved"][0], derivative)
    # The position of the last element, by hand: its warp's epilogue subtile, then its lane.
    row, column = (rows - 1) % 128, (columns - 1) % 192
    subtile = row // 16 % 4 * 6 + column // 64 * 2 + row // 64
    lane = row % 8 * 4 + column % 8 // 2
    at = subtile * 1024 + column % 64 // 16 * 32 * 8 + lane * 8
    at += column % 16 // 8 * 4 + row % 16 // 8 * 2 + column % 2
    last = packed.array[(rows - 1) // 128, (columns - 1) // 192, at]
    assert last == derivative.ravel()[-1]


def save(x, weight, bias, saves_derivative):
    """What the forward kernel returns."""
    options = {"saves_derivative": saves_derivative, "out_columns": x.shape[1]}
    return cuda_fused.matmul_bias_gelu(x, weight, bias, **options)


@pytest.mark.hopper
@pytest.mark.parametrize(("dtype", "huge"), [("bfloat16", 1e30), ("float16", 3e4)])
def test_fused_gelu_and_dgelu_are_exact_for_huge_inputs(dtype, huge):
    rows, width, columns = 130, 64, 264
    x = jnp.ones((rows, width), dtype)
    weight = jnp.full((width, columns), 1 / width, dtype)
    above = np.arange(columns) % 3 > 0
    bias = jnp.where(above, huge, -huge).astype(dtype)
    h: Any
    saved: Any
    out, h = save(x, weight, bias, False)
    again, saved = save(x, weight, bias, True)
    np.testing.assert_array_equal(h.astype("float32"), np.ones((rows, columns)))
    limits = np.where(above, (h + bias).astype("float32"), 0)
    np.testing.assert_array_equal(out.astype("float32"), limits)
    np.testing.assert_array_equal(again, out)
    derivative = saved.unpack().astype("float32")
    np.testing.assert_array_equal(derivative, np.broadcast_to(above, (rows, columns)))


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (130, 264), (500, 1160)])
def test_kernel_writes_dgelu_in_the_shared_layout(dtype, rows, columns):
    x, weight, bias, *_ = mlp_arrays(dtype, rows=rows, width=64, hidden=columns)
    _, saved = save(x, weight, bias, True)
    h = jnp.dot(*(a.astype("float32") for a in (x, weight)), precision="highest") + bias
    exact = jax.grad(lambda x: gelu(x).sum())(h)
    # The kernel rounds once, by half a unit in the last place. The float32 sums of the GEMM are in
    # another order.
    epsilon = float(jnp.finfo(dtype).eps)
    found = saved.unpack().astype("float32")
    np.testing.assert_allclose(found, exact, rtol=0.51 * epsilon, atol=1e-5)


@pytest.mark.hopper
def test_gemm_scaled_by_dgelu_returns_column_sums():
    x, weight, factors = (
        jax.random.normal(jax.random.key(i), shape, "bfloat16")
        for i, shape in enumerate([(130, 64), (264, 64), (130, 264)])
    )
    saved = pack(jnp.clip(factors, -0.1, 1.1))  # the range of dgelu
    found = cuda_fused.matmul_dgelu(x, weight, saved, None)
    wide = [*(a.astype("float32") for a in (x, weight)), saved.unpack()]
    expected = jnp.dot(wide[0], wide[1].T, precision="highest") * wide[2]
    assert_close(found, (expected, expected.sum(0)), "bfloat16")
