"""The MLP of float8 operands: values and gradients of its formulas, bounds, transforms."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import distance, rounded

import jaxllm
from jaxllm import testing
from jaxllm.ops import ffn_block, residual
from jaxllm.ops.gemm.float8_mlp import float8_mlp
from jaxllm.ops.gemm.float8_norm import NormArrays

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
WIDTH, HIDDEN, EPS = 64, 96, 1e-5
ACTIVATIONS = ("gelu", "swiglu")
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
each_backend = pytest.mark.parametrize(
    "backend", ["xla", pytest.param("auto", marks=pytest.mark.hopper)]
)


def arrays(activation="swiglu", dtype="float32", rows=(2, 16), seed=0):
    """x, the first weight and its bias, the second weight and dout, with a heavy tail."""
    generator = np.random.default_rng(seed)

    def draw(scale, *shape):
        x = scale * generator.standard_normal(shape, np.float32)
        return jnp.asarray(np.where(generator.random(shape) < 0.02, 8 * x, x)).astype(dtype)

    columns = (HIDDEN,) if activation == "gelu" else (2, HIDDEN)
    x, up, down, dout = (
        draw(scale, *shape)
        for shape, scale in (
            ((*rows, WIDTH), 1),
            ((WIDTH, *columns), 0.1),
            ((HIDDEN, WIDTH), 0.1),
            ((*rows, WIDTH), 1),
        )
    )
    return x, up, draw(0.3, *columns), down, dout


def values_and_gradients(fn, x, up, bias, down, dout):
    out, pull = jax.vjp(fn, x, up, bias, down)
    return out, *pull(dout)


def mlp_of(activation, backend="auto"):
    """The MLP of the RMS norm of ``x``, without a residual."""
    static = {"activation": activation, "eps": EPS, "backend": backend}

    def mlp(x, *layers):
        scale = jnp.ones(WIDTH, x.dtype)
        return float8_mlp(NormArrays(x, None, None, scale, None), *layers, **static)[0]

    return mlp


def rms_norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS)


def function_of(activation):
    """The activation of ``(rows, parts, F)``."""
    if activation == "gelu":
        return lambda h: jax.nn.gelu(h[:, 0])
    return lambda h: jax.nn.silu(h[:, 0]) * h[:, 1]


def by_formulas(activation, x, up, bias, down, dout, units=(0, 0), *, fused=False):
    """What the module's docstring says, in float32 but for the results of GEMMs.

    The maximum of each part of h is ``units`` in the last place away. A ``fused`` derivative takes
    the gradient of the activation before it is rounded.
    """
    dtype, rows = x.dtype, x.shape[:-1]
    x, dout = x.astype(jnp.float32).reshape(-1, WIDTH), dout.reshape(-1, WIDTH)
    normalized, pull_norm = jax.vjp(rms_norm, x)
    x8, w1, w2 = rounded(normalized, bound=8.0), rounded(up), rounded(down)
    w1 = w1.reshape(WIDTH, -1)  # sqrt(WIDTH) is 8
    h = x8 @ w1 if bias is None else x8 @ w1 + bias.astype(jnp.float32).ravel()
    h = h.astype(dtype).astype(jnp.float32).reshape(len(x), -1, HIDDEN)
    fn = function_of(activation)
    largest = moved(abs(h).max((0, 2)), units[: h.shape[1]], dtype)
    hidden = rounded(fn(h), bound=largest.prod())
    out, dout8 = (hidden @ w2).astype(dtype), rounded(dout, E5M2)
    dhidden = dout8 @ w2.T
    if not fused:
        dhidden = dhidden.astype(dtype).astype(jnp.float32)
    (dh,) = jax.vjp(fn, h)[1](dhidden)
    norms = jnp.sqrt((down.astype(jnp.float32) ** 2).sum(1))
    largest_gradient = 1.2 * math.sqrt(WIDTH) * abs(dout.astype(jnp.float32)).max()
    slope = 1.13 if activation == "gelu" else max(1.1 * largest[1], largest[0])
    bound = largest_gradient * norms.max() * slope
    dh8 = rounded(dh, E5M2, bound).reshape(len(x), -1)
    dx, dup, ddown = dh8 @ w1.T, x8.T @ dh8, hidden.T @ dout8
    dbias = None if bias is None else dh.sum(0).astype(dtype).reshape(bias.shape)
    (dx,) = pull_norm(dx.astype(dtype).astype(jnp.float32))
    dx = dx.astype(dtype).reshape(*rows, WIDTH)
    out = out.reshape(*rows, WIDTH)
    return out, dx, dup.astype(dtype).reshape(up.shape), dbias, ddown.astype(dtype)


@each_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("has_bias", [False, True])
@each_activation
@pytest.mark.covering(("activation", "has_bias", "backend"), ("activation", "dtype", "backend"))
def test_results_are_those_of_the_formulas(activation, has_bias, dtype, backend):
    # In float32 no large element is so near a tie that an error of 2^-14, as the tensor cores make
    # it, has it rounded to another number.
    x, up, bias, down, dout = arrays(activation, dtype, seed=9 if dtype == "float32" else 0)
    given = x, up, bias if has_bias else None, down, dout
    found = values_and_gradients(mlp_of(activation, backend), *given)
    # SwiGLU's is for larger depths.
    fused = backend == "auto" and activation == "gelu" and dtype != "float32"
    wanted = by_formulas(activation, *given, fused=fused)
    for result, expected in zip(found, wanted, strict=True):
        if expected is None:
            assert result is None
            continue
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    if most_away(found, wanted) < 0.01:
        return
    # An element that differs in its last bit may be rounded to another float8 number. Where a
    # maximum of 16 bits does, its scale differs, and 1% of the elements are: another GEMM may find
    # the number next to it.
    assert dtype != "float32"
    near = (
        most_away(found, by_formulas(activation, *given, units=units, fused=fused))
        for units in itertools.product((0, -1, 1), repeat=2)
    )
    assert any(away < 0.01 for away in near)


def most_away(found, expected):
    pairs = zip(found, expected, strict=True)
    return max(distance(a, b) for a, b in pairs if b is not None)


def moved(maximum, units, dtype):
    """A maximum that many units in the last place of its dtype away, in float32."""
    bits = np.asarray(maximum.astype(dtype))
    as_integer = f"i{bits.dtype.itemsize}"
    next_to = bits.view(as_integer) + np.asarray(units, as_integer)
    return jnp.asarray(next_to.view(bits.dtype)).astype(jnp.float32)


def unrounded(activation):
    def mlp(x, up, bias, down):
        h = jnp.tensordot(rms_norm(x), up, 1)
        h = (h if bias is None else h + bias).reshape(x.size // WIDTH, -1, HIDDEN)
        return (function_of(activation)(h) @ down).reshape(x.shape)

    return mlp


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@each_activation
def test_error_is_that_of_rounding(activation, dtype):
    given = arrays(activation, dtype)
    found = values_and_gradients(mlp_of(activation), *given)
    wide = (x.astype(jnp.float32) for x in given)
    expected = values_and_gradients(unrounded(activation), *wide)
    away = [distance(a, b) for a, b in zip(found, expected, strict=True)]
    # Operands in e4m3, of 2.6% each, are in out, and in the gradients two more in e5m2, of 5%. The
    # gradient of the bias has one rounding to e5m2 less.
    bounds = 0.08, 0.13, 0.13, 0.11, 0.11
    assert all(0.01 < of < bound for of, bound in zip(away, bounds, strict=True))


def test_no_element_exceeds_its_bound():
    at = jnp.linspace(-40, 40, 100001)
    for fn, least, most in ((jax.nn.silu, 1.099, 1.1), (jax.nn.gelu, 1.128, 1.13)):
        assert least < abs(jax.vmap(jax.grad(fn))(at)).max() < most
        assert (abs(fn(at)) <= abs(at)).all()
    x, up, _, down, dout = arrays(rows=(4, 32))
    h = jnp.tensordot(x, up, 1)
    gate, up = h[..., 0, :], h[..., 1, :]
    assert abs(jax.nn.silu(gate) * up).max() <= abs(gate).max() * abs(up).max()
    dhidden = dout @ down.T
    _, pull = jax.vjp(lambda g, u: jax.nn.silu(g) * u, gate, up)
    largest = jnp.maximum(1.1 * abs(up).max(), abs(gate).max())
    assert max(abs(of).max() for of in pull(dhidden)) <= abs(dhidden).max() * largest


@each_backend
@each_activation
def test_results_repeat_bit_for_bit(activation, backend):
    given = arrays(activation, "bfloat16", rows=(4, 64))
    run = jax.jit(functools.partial(values_and_gradients, mlp_of(activation, backend)))
    for a, b in zip(run(*given), run(*given), strict=True):
        np.testing.assert_array_equal(a, b)


@each_activation
def test_zeros_give_zeros_and_masked_rows_change_no_gradient_of_others(activation):
    x, up, bias, down, dout = arrays(activation)
    mlp, masked = mlp_of(activation), (jnp.arange(16) % 3 == 0)[:, None]
    given = jnp.where(masked, 0, x), up, None, down, jnp.where(masked, 0, dout)
    out, dx, *_ = values_and_gradients(mlp, *given)
    for found in (out, dx):
        assert not found[:, masked[:, 0]].any()
        assert found[:, ~masked[:, 0]].all()
    assert not mlp(x, 0 * up, None, down).any()
    assert mlp(x[:0], up, bias, down).shape == (0, 16, WIDTH)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@each_activation
def test_nonfinite_elements_stay_visible_in_their_rows_alone(activation, special):
    x, up, bias, down, dout = arrays(activation)
    mlp = mlp_of(activation)
    lost = ~np.isfinite(mlp(x.at[1, 2, 3].set(special), up, bias, down))
    assert lost[1, 2].all()
    assert lost.sum() == WIDTH
    given = x, up, bias, down, dout.at[1, 2, 3].set(special)
    _, dx, dup, dbias, ddown = values_and_gradients(mlp, *given)
    lost = ~np.isfinite(dx)
    assert lost[1, 2].all()
    assert lost.sum() == WIDTH
    assert not np.isfinite(dup).any()
    assert not np.isfinite(dbias).any()
    assert not np.isfinite(ddown[:, 3]).any()


@each_activation
def test_transforms_give_the_values_of_plain_calls(activation):
    x, up, bias, down, _ = arrays(activation)

    def loss(*arrays):
        return (mlp_of(activation)(*arrays) * jnp.cos(jnp.arange(float(WIDTH)))).sum()

    plain = jax.value_and_grad(loss, (0, 1, 2, 3))
    wanted = jax.tree.leaves(plain(x, up, bias, down))
    remat = jax.value_and_grad(jax.checkpoint(loss), (0, 1, 2, 3))
    for fn in (jax.jit(plain), jax.jit(remat)):
        for a, b in zip(jax.tree.leaves(fn(x, up, bias, down)), wanted, strict=True):
            assert distance(a, b) < 0.01
    found = jax.tree.leaves(jax.vmap(plain, (0, None, None, None))(x, up, bias, down))
    each = [jax.tree.leaves(plain(one, up, bias, down)) for one in x]
    for a, *b in zip(found, *each, strict=True):
        assert distance(a, np.stack(b)) < 0.01


@each_activation
def test_forward_mode_differentiates_the_mlp_without_rounding(activation):
    x, *layers, _ = arrays(activation)
    along = x[..., ::-1]  # along x itself the norm does not change
    moved = jax.jvp(lambda x: mlp_of(activation, "xla")(x, *layers), (x,), (along,))[1]
    wanted = jax.jvp(lambda x: unrounded(activation)(x, *layers), (x,), (along,))[1]
    testing.assert_close(moved, wanted, "float32")


@each_activation
def test_float8_operands_and_what_the_activation_takes_alone_are_saved(activation):
    x, up, bias, down, _ = arrays(activation)
    kept = jax.tree.leaves(jax.vjp(mlp_of(activation), x, up, bias, down)[1])
    wide = [leaf.shape for leaf in kept if leaf.dtype == jnp.float32 and leaf.size > WIDTH]
    h = (2, 16, *up.shape[1:])
    assert sorted(wide) == sorted([x.shape, h, up.shape, bias.shape, down.shape])
    narrow = [leaf.shape for leaf in kept if leaf.dtype == E4M3]
    assert sorted(narrow) == sorted([(WIDTH, 2, 16), (HIDDEN, 2, 16)])


def block(x, up, down, precision: Any = "tensor", activation: Any = "swiglu", **of_up):
    name = "up" if activation == "gelu" else "gate_up"
    layers = {name: {"weight": up, **of_up}, "down": {"weight": down}}
    norm = {"scale": jnp.ones(WIDTH)}
    return ffn_block(residual(x, "rms"), norm, layers, activation=activation, precision=precision).x


def stems(*arrays, **options):
    calls = jaxllm.explain(functools.partial(block, **options), *arrays).calls
    return {call.stem for call in calls}


def test_blocks_run_it_and_those_with_merged_columns_or_other_recipes_run_their_layers():
    x, gate_up, bias, down, _ = arrays()
    for options in ({}, {"bias": bias}):
        found = stems(x, gate_up, down, **options)
        assert {"float8_matmul_amax", "float8_swiglu_forward"} <= found
    merged = gate_up.reshape(WIDTH, -1)
    for found in (
        stems(x, merged, down),
        stems(x, gate_up, down, precision="row"),
        stems(x, gate_up, down, precision={"gate_up": "tensor"}),
    ):
        assert "float8_swiglu_forward" not in found
        assert "swiglu_packed_forward" in found
    both = {"gate_up": "tensor", "down": "tensor"}
    np.testing.assert_array_equal(block(x, gate_up, down), block(x, gate_up, down, both))
    # The layers one by one round with current scales: as near to the values without float8.
    wanted = block(x, gate_up, down, precision=None)
    for weight in (gate_up, merged):
        assert 0.01 < distance(block(x, weight, down), wanted) < 0.05


def test_blocks_with_gelu_run_it_and_those_of_another_recipe_run_their_layers():
    x, up, bias, down, _ = arrays("gelu")
    of_gelu = {"activation": "gelu", "bias": bias}
    assert {"float8_matmul_amax", "float8_gelu_forward"} <= stems(x, up, down, **of_gelu)
    for precision in ("row", {"up": "tensor"}):
        found = stems(x, up, down, precision=precision, **of_gelu)
        assert "float8_gelu_forward" not in found
        assert "bias_gelu_forward" in found


def test_wrong_shapes_are_rejected():
    x, gate_up, bias, down, _ = arrays()
    with pytest.raises(ValueError, match="down"):
        block(x, gate_up, down[:-8])
    with pytest.raises(ValueError, match="weight"):
        block(x, gate_up[:-8], down)
    with pytest.raises(ValueError, match="bias"):
        block(x, gate_up, down, bias=bias[:, :-8])
    with pytest.raises(TypeError, match="the weight of down has dtype"):
        block(x, gate_up, down.astype(jnp.bfloat16))
