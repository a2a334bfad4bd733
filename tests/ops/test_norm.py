"""Norms: the first and the last residual, small workspaces and errors."""

import re

import jax
import jax.numpy as jnp
import pytest

from jaxllm.core import ffi
from jaxllm.ops import (
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    rms_norm,
)
from jaxllm.ops.norm import cuda
from jaxllm.testing import assert_close, lower_for_cuda

BACKENDS = ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH = 64


def arrays(*shapes, dtype="float32"):
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


ROWS, WEIGHT = (3, 5, WIDTH), (WIDTH,)
# The ops that return a norm and the residual, and the shapes of their arguments.
OPS = {
    "add_layer_norm": (add_layer_norm, [ROWS, ROWS, WEIGHT, WEIGHT]),
    "add_layer_norm_x_bias": (add_layer_norm, [ROWS, ROWS, WEIGHT, WEIGHT, WEIGHT]),
    "add_rms_norm": (add_rms_norm, [ROWS, ROWS, WEIGHT]),
}


def gradients_of_norm(fn, zeros, inputs, **options):
    """Gradients of a weighted sum of the norm, plus ``zeros * residual`` unless it is None."""
    (weights,) = arrays(ROWS)

    def loss(*inputs):
        out, residual = fn(*inputs, **options)
        return (weights * out).sum() + (0 if zeros is None else (zeros * residual).sum())

    return jax.jit(jax.grad(loss, argnums=tuple(range(len(inputs)))))(*inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_unused_residual_output_adds_no_gradient(op, backend):
    fn, shapes = OPS[op]
    inputs = arrays(*shapes)
    expected = gradients_of_norm(fn, jnp.zeros(ROWS), inputs, backend="xla")
    actual = gradients_of_norm(fn, None, inputs, backend=backend)
    assert_close(actual, expected, "float32", what=op)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", OPS)
def test_unused_norm_output_leaves_the_residual_gradient(op, backend):
    fn, shapes = OPS[op]

    def gradients(backend):
        return jax.jit(
            jax.grad(lambda *a: fn(*a, backend=backend)[1].sum(), argnums=range(len(shapes)))
        )(*arrays(*shapes))

    assert_close(gradients(backend), gradients("xla"), "float32", what=op)
    assert all(jnp.isfinite(x).all() for x in gradients(backend))


@pytest.mark.parametrize("op", OPS)
def test_no_zero_gradient_is_written_for_an_unused_residual_output(op):
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    fn, shapes = OPS[op]
    inputs = arrays(*shapes)

    def calls(zeros):
        program = lower_for_cuda(
            lambda *a: gradients_of_norm(fn, zeros, a, backend="cuda"), *inputs
        )
        lines = [x for x in program.splitlines() if "_norm_backward(" in x]
        assert len(lines) == 1
        return lines[0]

    assert "tensor<0xf32>" not in calls(jnp.zeros(ROWS)).split("->")[0]
    assert "tensor<0xf32>" in calls(None).split("->")[0]


# If the workspace has fewer rows than the GPU has SMs, its rows limit the number of CTAs.
@pytest.mark.gpu
@pytest.mark.parametrize("width", [768, 770])
@pytest.mark.parametrize("most", [1, 7])
@pytest.mark.parametrize("op", [layer_norm, rms_norm])
def test_gradients_are_exact_with_a_small_workspace(monkeypatch, op, most, width):
    monkeypatch.setattr(cuda, "_MAX_PARTIAL_ROWS", most)
    # No other test compiles this row count.
    x = jax.random.normal(jax.random.key(0), (1000 + most, width))
    scale = 1 + jax.random.normal(jax.random.key(1), (width,)) / 8

    def gradients(backend):
        return jax.jit(jax.grad(lambda *a: jnp.sin(op(*a, backend=backend)).sum(), (0, 1)))(
            x, scale
        )

    assert_close(gradients("cuda"), gradients("xla"), "float32")


@pytest.mark.parametrize("op", [add_layer_norm, add_rms_norm])
def test_norm_without_a_residual_matches_a_zero_residual(op):
    x, scale = arrays(ROWS, WEIGHT)

    def gradients(fn):
        def loss(x, scale):
            out, residual = fn(x, scale)
            return (jnp.sin(out) + out * residual + residual**2).sum()

        return jax.grad(loss, argnums=(0, 1))(x, scale)

    def written_out(x, scale):
        return op(x, jnp.zeros_like(x), scale)

    def first(x, scale):
        return op(x, None, scale)

    assert_close(first(x, scale), written_out(x, scale), "float32")
    assert_close(gradients(first), gradients(written_out), "float32")


def test_x_bias_without_a_residual_is_rejected():
    x, scale = arrays(ROWS, WEIGHT)
    with pytest.raises(ValueError, match="x_bias is given and residual is None"):
        add_layer_norm(x, None, scale, x_bias=scale)


@pytest.mark.parametrize("op", [layer_norm, rms_norm, add_layer_norm, add_rms_norm])
def test_rows_without_columns_have_empty_results_under_pallas(op):
    rows, weight = jnp.ones((3, 0)), jnp.ones(0)
    inputs = (rows, rows, weight) if "add" in op.__name__ else (rows, weight)
    outputs, pull = jax.vjp(lambda *x: op(*x, backend="pallas"), *inputs)
    gradients = pull(outputs)
    assert {x.shape for x in jax.tree.leaves(outputs)} == {(3, 0)}
    assert [x.shape for x in gradients] == [x.shape for x in inputs]


@pytest.mark.parametrize("eps", [-1e-5, float("nan"), float("inf"), 1e39])
@pytest.mark.parametrize("op", [layer_norm, rms_norm])
def test_eps_outside_its_range_is_rejected(op, eps):
    message = re.escape(f"eps is {eps}; it must be finite and at least 0")
    with pytest.raises(ValueError, match=message):
        op(*arrays(ROWS, WEIGHT), eps=eps)


def test_an_integer_beyond_float64_is_rejected():
    with pytest.raises(ValueError, match="eps is beyond the range of float64"):
        rms_norm(*arrays(ROWS, WEIGHT), eps=10**400)
