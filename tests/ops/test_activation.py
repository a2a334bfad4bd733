"""What the contract leaves open of the activations: extreme inputs, and the errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.ops import gelu


def test_gelu_at_points_that_are_known():
    out = gelu(jnp.array([0.0, 1.0, -1.0, 3.0]))
    np.testing.assert_allclose(out, [0.0, 0.841192, -0.158808, 2.996363], atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_huge_inputs_have_a_finite_value_and_slope(dtype):
    x = jnp.array([-1e30, -1e4, -50.0, 50.0, 1e4, 1e30], dtype)
    out, pull = jax.vjp(gelu, x)
    np.testing.assert_array_equal(out, jnp.where(x > 0, x, 0))
    np.testing.assert_array_equal(pull(jnp.ones_like(x))[0], x > 0)


def test_integers_are_refused():
    with pytest.raises(TypeError, match="x has dtype int32; it must be a floating-point array"):
        gelu(jnp.arange(3))


@pytest.mark.parametrize("backend", ["cuda", "pallas"])
def test_kernels_that_are_not_there_are_named(backend):
    with pytest.raises(jaxllm.BackendError, match="gelu_forward has no " + backend + " kernel"):
        gelu(jnp.ones(3), backend=backend)


def test_auto_passes_over_kernels_that_are_not_there():
    calls = jaxllm.explain(lambda x: gelu(x), jnp.ones(3)).calls
    assert calls[0].on_gpu == "xla"
    reasons = dict(calls[0].passed_over)
    assert reasons["cuda"].startswith("gelu_forward has no cuda kernel")
    assert reasons["pallas"].startswith("gelu_forward has no pallas kernel")
