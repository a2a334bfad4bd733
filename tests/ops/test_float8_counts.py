"""Counts of what rounding to float8 loses, and how they get out of the backward pass."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm import ops

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
PROBE = ops.Float8Counts.zeros()
each_recipe = pytest.mark.parametrize("recipe", ["row", "tensor"])


def draw(shape, seed, spread=12):
    """Elements over so many powers of two, with zeros."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal(shape) * 2.0 ** generator.integers(-spread, 1, shape)
    return np.where(generator.random(shape) < 0.1, 0, x).astype(np.float32)


def expected(x, axes, dtype):
    """The elements, the underflow and the overflow of a rounding with one scale along ``axes``."""
    finite = np.isfinite(x)
    largest = abs(np.where(finite, x, 0)).max(axes, keepdims=True)
    scale = np.where(largest == 0, 1, largest / float(ml_dtypes.finfo(dtype).max))
    rounded = (x / scale).astype(dtype).astype(np.float32)
    elements = finite & (x != 0)
    return np.array([elements.sum(), (elements & (rounded == 0)).sum(), (~finite).sum()])


def counts_of(fn, *args):
    """The gradient with respect to the probe, as rows of operands and of gradients."""
    return np.stack(jax.jit(jax.grad(ops.count_float8(fn)))(PROBE, *args), axis=1)


@each_recipe
@pytest.mark.parametrize("columns", [(24,), (2, 12)])
def test_counts_of_a_layer_are_those_of_its_operands(recipe, columns):
    x, dout = draw((3, 10, 32), 0, spread=30), draw((3, 10, *columns), 1, spread=60)
    weight = draw((32, *columns), 2, spread=30)
    x[1, 2, 3], x[0, 4, 5], dout[2, 1, 0] = np.nan, -np.inf, np.inf

    def loss(x, weight):
        return jnp.vdot(ops.linear(x, weight, precision=recipe), dout)

    of_dout = {"row": (tuple(range(2, dout.ndim)), E4M3), "tensor": (None, E5M2)}[recipe]
    of_x, of_weight = {"row": (-1, 0), "tensor": (None, None)}[recipe]
    operands = expected(x, of_x, E4M3) + expected(weight, of_weight, E4M3)
    found = counts_of(loss, x, weight)
    np.testing.assert_array_equal(found, [operands, expected(dout, *of_dout)])
    assert (found[:, 1] > 0).all() and (found[:, 2] > 0).all()


def test_counts_of_a_float8_mlp_include_what_it_writes_in_float8_alone():
    x, dout = draw((40, 32), 0), draw((40, 32), 1)
    dout[::2] *= 2.0**-50
    gate_up, down = draw((32, 2, 24), 2), draw((24, 32), 3)
    weights = {"gate_up": {"weight": gate_up}, "down": {"weight": down}}

    def loss(x):
        h, norm = ops.residual(x, norm="rms"), {"scale": jnp.ones(32)}
        out = ops.ffn_block(h, norm, weights, activation="swiglu", precision="tensor")
        return (out.x * dout).sum()

    (elements, underflow, overflow), (of_gradients, lost, _) = counts_of(loss, x)
    weights_and_x = 32 * 48 + 24 * 32 + 40 * 32
    assert 0.85 * weights_and_x < elements - 40 * 24 < weights_and_x
    assert 0 < underflow < 40 * 24 and overflow == 0
    assert 0.8 * 40 * 32 < of_gradients - 40 * 48 <= 40 * 32
    assert 20 * 48 < lost - 0.8 * 20 * 32 < 40 * 48


def stack(recipe, how):
    """Three layers in a scan, under remat there, or one by one."""
    weights = jnp.asarray(draw((3, 32, 32), 3, spread=2)) / 4
    dout = draw((10, 32), 4, spread=40)

    def layer(x, weight):
        return x + ops.linear(x, weight, activation="gelu", precision=recipe), None

    def loss(x, weights):
        if how == "one by one":
            for weight in weights:
                x, _ = layer(x, weight)
        else:
            x, _ = jax.lax.scan(jax.checkpoint(layer) if how == "remat" else layer, x, weights)
        return jnp.vdot(x, dout)

    return loss, (draw((10, 32), 5), weights)


@each_recipe
def test_a_probe_changes_no_bit_and_counts_alike_in_scans_and_under_remat(recipe):
    counts = {}
    for how in ("scan", "remat", "one by one"):
        loss, arguments = stack(recipe, how)
        counted = jax.jit(jax.value_and_grad(ops.count_float8(loss), argnums=(0, 1, 2)))
        value, (counts[how], *gradients) = counted(PROBE, *arguments)
        plain = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*arguments)
        jax.tree.map(np.testing.assert_array_equal, (value, tuple(gradients)), plain)
    found = counts["scan"]
    assert np.asarray(found.underflow).all() and not np.asarray(found.overflow).any()
    for other in counts.values():
        np.testing.assert_array_equal(other.elements, found.elements)
        # What another order of summation rounds to another neighbour may be above the limit.
        np.testing.assert_allclose(other.underflow, found.underflow, atol=2)


def test_layers_without_float8_count_nothing():
    loss, arguments = stack(None, "scan")
    np.testing.assert_array_equal(counts_of(loss, *arguments), 0)


def test_a_jitted_function_counts_in_each_trace_and_outside_of_none():
    inner = jax.jit(lambda x: ops.linear(x, jnp.ones((16, 8)), precision="tensor").sum())
    x = jnp.ones((2, 16)).at[0, 0].set(2.0**-20)
    for rows in (x, jnp.concatenate([x, x]), x):
        found = counts_of(inner, rows)
        np.testing.assert_array_equal(found[0], [rows.size + 128, len(rows) // 2, 0])
        assert jnp.isfinite(inner(rows))
        np.testing.assert_allclose(jax.grad(inner)(rows), 8, rtol=1e-6)


def test_share_of_nothing_is_zero():
    np.testing.assert_array_equal(PROBE.underflow_share, 0)
    counts = ops.Float8Counts(jnp.array([8.0, 0.0]), jnp.array([2.0, 0.0]), jnp.zeros(2))
    np.testing.assert_array_equal(counts.underflow_share, [0.25, 0])


def test_a_probe_leaves_no_tracers_behind():
    x, weight = draw((4, 32), 0), jnp.asarray(draw((32, 16), 1))

    def loss(x):
        return jax.jit(lambda x: ops.linear(x, weight, precision="tensor").sum())(x)

    with jax.checking_leaks():
        jax.jit(jax.grad(ops.count_float8(loss)))(PROBE, x)
