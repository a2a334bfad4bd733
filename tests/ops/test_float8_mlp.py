"""The gated MLP of float8 operands: values and gradients of its formulas, bounds, transforms."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import testing
from jaxllm.ops import ffn_block, float8_quantize, residual
from jaxllm.ops.gemm.float8_mlp import float8_mlp
from jaxllm.ops.rounding import round_to_float8, scale_of

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
WIDTH, HIDDEN = 64, 96
each_backend = pytest.mark.parametrize(
    "backend", ["xla", pytest.param("auto", marks=pytest.mark.hopper)]
)


def arrays(dtype="float32", rows=(2, 16)):
    """x, both weights and dout, with a heavy tail."""
    generator = np.random.default_rng(0)

    def draw(*shape, scale=1.0):
        x = scale * generator.standard_normal(shape, np.float32)
        return jnp.asarray(np.where(generator.random(shape) < 0.02, 8 * x, x)).astype(dtype)

    shapes = ((*rows, WIDTH), (WIDTH, 2, HIDDEN), (HIDDEN, WIDTH), (*rows, WIDTH))
    return [draw(*shape, scale=s) for shape, s in zip(shapes, (1, 0.1, 0.1, 1), strict=True)]


def values_and_gradients(fn, x, gate_up, down, dout):
    out, pull = jax.vjp(fn, x, gate_up, down)
    return out, *pull(dout)


mlp = functools.partial(float8_mlp, backend="auto")


def quantized(x, dtype=E4M3, bound=None):
    """``x`` rounded, in float32: with its current scale, or one that follows from a bound."""
    if bound is None:
        values, scale = float8_quantize(x, dtype, axis=None)
    else:
        scale = scale_of(bound, dtype)
        values = round_to_float8(x, scale, dtype)
    return values.astype(jnp.float32) * scale


def by_formulas(x, gate_up, down, dout):
    """What the module's docstring says, in float32 but for the results of GEMMs."""
    dtype = x.dtype
    x, dout = x.reshape(-1, WIDTH), dout.reshape(-1, WIDTH)
    x8, w1, w2 = quantized(x), quantized(gate_up).reshape(WIDTH, -1), quantized(down)
    h = (x8 @ w1).astype(dtype)
    gate, up = (part.astype(jnp.float32) for part in jnp.split(h, 2, axis=1))
    largest = [abs(part).max() for part in (gate, up)]
    hidden = quantized(jax.nn.silu(gate) * up, bound=largest[0] * largest[1])
    out, dout8 = (hidden @ w2).astype(dtype), quantized(dout, E5M2)
    dhidden = (dout8 @ w2.T).astype(dtype).astype(jnp.float32)
    _, pull = jax.vjp(lambda g, u: jax.nn.silu(g) * u, gate, up)
    bound = abs(dhidden).max() * jnp.maximum(1.1 * largest[1], largest[0])
    dh = quantized(jnp.concatenate(pull(dhidden), axis=1), E5M2, bound)
    dx, dgate_up, ddown = dh @ w1.T, x8.T @ dh, hidden.T @ dout8
    shapes = (2, 16, WIDTH), (2, 16, WIDTH), gate_up.shape, down.shape
    results = (out, dx, dgate_up, ddown)
    return [r.astype(dtype).reshape(s) for r, s in zip(results, shapes, strict=True)]


def distance(found, expected):
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@each_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_results_are_those_of_the_formulas(dtype, backend):
    given = arrays(dtype)
    found = values_and_gradients(functools.partial(float8_mlp, backend=backend), *given)
    for result, expected in zip(found, by_formulas(*given), strict=True):
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        # An element that differs in its last bit may be rounded to another float8 number.
        assert distance(result, expected) < 0.01


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_error_is_that_of_rounding(dtype):
    given = arrays(dtype)

    def unrounded(x, gate_up, down):
        h = jnp.tensordot(x, gate_up, 1)
        return (jax.nn.silu(h[..., 0, :]) * h[..., 1, :]) @ down

    found = values_and_gradients(mlp, *given)
    expected = values_and_gradients(unrounded, *(x.astype(jnp.float32) for x in given))
    away = [distance(a, b) for a, b in zip(found, expected, strict=True)]
    # Operands in e4m3, of 2.6% each, are in out, and in the gradients two more in e5m2, of 5%.
    assert all(0.01 < of < bound for of, bound in zip(away, (0.08, 0.13, 0.13, 0.11), strict=True))


def test_no_element_exceeds_its_bound():
    x, gate_up, down, dout = arrays(rows=(4, 32))
    h = jnp.tensordot(x, gate_up, 1)
    gate, up = h[..., 0, :], h[..., 1, :]
    slope = jax.vmap(jax.grad(jax.nn.silu))(jnp.linspace(-40, 40, 100001))
    assert 1.099 < abs(slope).max() < 1.1
    assert abs(jax.nn.silu(gate) * up).max() <= abs(gate).max() * abs(up).max()
    dhidden = dout @ down.T
    _, pull = jax.vjp(lambda g, u: jax.nn.silu(g) * u, gate, up)
    largest = jnp.maximum(1.1 * abs(up).max(), abs(gate).max())
    assert max(abs(of).max() for of in pull(dhidden)) <= abs(dhidden).max() * largest


@each_backend
def test_results_repeat_bit_for_bit(backend):
    given = arrays("bfloat16", rows=(4, 64))
    run = jax.jit(
        functools.partial(values_and_gradients, functools.partial(float8_mlp, backend=backend))
    )
    for a, b in zip(run(*given), run(*given), strict=True):
        np.testing.assert_array_equal(a, b)


def test_zeros_give_zeros_and_masked_rows_change_no_gradient_of_others():
    x, gate_up, down, dout = arrays()
    masked = (jnp.arange(16) % 3 == 0)[:, None]
    out, dx, *_ = values_and_gradients(
        mlp, jnp.where(masked, 0, x), gate_up, down, jnp.where(masked, 0, dout)
    )
    for found in (out, dx):
        assert not found[:, masked[:, 0]].any()
        assert found[:, ~masked[:, 0]].all()
    assert not mlp(x, 0 * gate_up, down).any()
    assert mlp(x[:0], gate_up, down).shape == (0, 16, WIDTH)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_stay_visible_in_their_rows_alone(special):
    x, gate_up, down, dout = arrays()
    lost = ~np.isfinite(mlp(x.at[1, 2, 3].set(special), gate_up, down))
    assert lost[1, 2].all()
    assert lost.sum() == WIDTH
    _, dx, dgate_up, ddown = values_and_gradients(
        mlp, x, gate_up, down, dout.at[1, 2, 3].set(special)
    )
    lost = ~np.isfinite(dx)
    assert lost[1, 2].all()
    assert lost.sum() == WIDTH
    assert not np.isfinite(dgate_up).any()
    assert not np.isfinite(ddown[:, 3]).any()


def loss(x, gate_up, down):
    return (mlp(x, gate_up, down) * jnp.cos(jnp.arange(float(WIDTH)))).sum()


def test_transforms_give_the_values_of_plain_calls():
    x, gate_up, down, _ = arrays()
    plain = jax.value_and_grad(loss, (0, 1, 2))
    wanted = jax.tree.leaves(plain(x, gate_up, down))
    remat = jax.value_and_grad(jax.checkpoint(loss), (0, 1, 2))
    for fn in (jax.jit(plain), jax.jit(remat)):
        for a, b in zip(jax.tree.leaves(fn(x, gate_up, down)), wanted, strict=True):
            assert distance(a, b) < 0.01
    found = jax.tree.leaves(jax.vmap(plain, (0, None, None))(x, gate_up, down))
    each = [jax.tree.leaves(plain(one, gate_up, down)) for one in x]
    for a, *b in zip(found, *each, strict=True):
        assert distance(a, np.stack(b)) < 0.01


def test_forward_mode_differentiates_the_mlp_without_rounding():
    x, gate_up, down, _ = arrays()
    fn = functools.partial(float8_mlp, gate_up=gate_up, down=down, backend="xla")
    moved = jax.jvp(fn, (x,), (x,))[1]

    def unrounded(x):
        h = jnp.tensordot(x, gate_up, 1)
        return (jax.nn.silu(h[..., 0, :]) * h[..., 1, :]) @ down

    testing.assert_close(moved, jax.jvp(unrounded, (x,), (x,))[1], "float32")


def test_float8_operands_and_the_gates_alone_are_saved():
    x, gate_up, down, _ = arrays()
    kept = jax.tree.leaves(jax.vjp(mlp, x, gate_up, down)[1])
    rows = x.size // WIDTH
    wide = [leaf.shape for leaf in kept if leaf.dtype == jnp.float32 and leaf.size > rows]
    assert sorted(wide) == sorted([(2, 16, 2, HIDDEN), gate_up.shape, down.shape])
    narrow = [leaf.shape for leaf in kept if leaf.dtype == E4M3]
    assert sorted(narrow) == sorted([(WIDTH, 2, 16), (HIDDEN, 2, 16)])


def block(x, gate_up, down, precision: Any = "tensor", **of_up):
    layers = {"gate_up": {"weight": gate_up, **of_up}, "down": {"weight": down}}
    norm = {"scale": jnp.ones(WIDTH)}
    return ffn_block(residual(x, "rms"), norm, layers, activation="swiglu", precision=precision).x


def test_block_without_biases_runs_it_and_others_run_their_layers():
    x, gate_up, down, _ = arrays()

    def stems(*arrays, **options):
        calls = jaxllm.explain(functools.partial(block, **options), *arrays).calls
        return {call.stem for call in calls}

    assert {"float8_matmul_amax", "float8_swiglu_forward"} <= stems(x, gate_up, down)
    bias = jnp.ones((2, HIDDEN))
    merged = gate_up.reshape(WIDTH, -1)
    for found in (
        stems(x, gate_up, down, bias=bias),
        stems(x, merged, down),
        stems(x, gate_up, down, precision="row"),
        stems(x, gate_up, down, precision={"gate_up": "tensor"}),
    ):
        assert "float8_swiglu_forward" not in found
        assert "swiglu_packed_forward" in found
    both = {"gate_up": "tensor", "down": "tensor"}
    np.testing.assert_array_equal(block(x, gate_up, down), block(x, gate_up, down, both))
    # The layers one by one round with current scales: as near to the values without float8.
    assert distance(block(x, gate_up, down), block(x, merged, down)) < 0.05


def test_wrong_shapes_are_rejected():
    x, gate_up, down, _ = arrays()
    with pytest.raises(ValueError, match="down"):
        block(x, gate_up, down[:-8])
    with pytest.raises(ValueError, match="weight"):
        block(x, gate_up[:-8], down)
    with pytest.raises(TypeError, match="the weight of down has dtype"):
        block(x, gate_up, down.astype(jnp.bfloat16))
