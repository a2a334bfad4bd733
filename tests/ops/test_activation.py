"""Activations: extreme inputs, large arrays and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.ops import add, bias_add, bias_gelu, gelu, relu, sigmoid, swiglu, swiglu_packed
from jaxllm.ops.activation import cuda
from jaxllm.testing import assert_close

BACKENDS = ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)]
HUGE = [-1e30, -1e4, -100.0, 100.0, 1e4, 1e30]


def value_and_derivative(fn, x):
    out, pull = jax.vjp(fn, x)
    return out, pull(jnp.ones_like(x))[0]


def test_gelu_matches_known_values():
    out = gelu(jnp.array([0.0, 1.0, -1.0, 3.0]))
    np.testing.assert_allclose(out, [0.0, 0.841192, -0.158808, 2.996363], atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.covering(("dtype",), ("backend",))
def test_huge_inputs_have_exact_values_and_derivatives(dtype, backend):
    x = jnp.array(HUGE, dtype)
    zero, one = jnp.zeros_like(x), jnp.ones_like(x)
    positive = x > 0
    for fn, value, derivative in (
        (gelu, jnp.where(positive, x, 0), positive),
        (lambda x, **o: bias_gelu(x, zero, **o), jnp.where(positive, x, 0), positive),
        (relu, jnp.where(positive, x, 0), positive),
        (sigmoid, positive, zero),
        (lambda x, **o: swiglu(x, one, **o), jnp.where(positive, x, 0), positive),
    ):
        out, dx = value_and_derivative(lambda x, fn=fn: fn(x, backend=backend), x)
        np.testing.assert_allclose(out.astype("float32"), value.astype("float32"), atol=1e-30)
        np.testing.assert_allclose(dx.astype("float32"), derivative.astype("float32"), atol=1e-30)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_propagates(backend):
    x = jnp.array([jnp.nan, 1.0])
    for fn in (gelu, relu, sigmoid):
        out, dx = value_and_derivative(lambda x, fn=fn: fn(x, backend=backend), x)
        np.testing.assert_array_equal(jnp.isnan(out), [True, False])
        if fn is not relu:  # the derivative of relu is a comparison
            np.testing.assert_array_equal(jnp.isnan(dx), [True, False])


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_small_gelu_values_are_exact(backend):
    # 0.5 (1 + tanh(u)), as in the reference implementation, cancels to zero here.
    x = np.array([-5.0, -6.0])
    u = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    out = gelu(jnp.asarray(x, jnp.float32), backend=backend)
    np.testing.assert_allclose(out, x / (1 + np.exp(-2 * u)), rtol=1e-4)


def test_relu_derivative_at_zero_is_zero():
    np.testing.assert_array_equal(jax.grad(lambda x: relu(x).sum())(jnp.zeros(3)), jnp.zeros(3))


def test_packed_swiglu_matches_swiglu_of_its_halves():
    x = jax.random.normal(jax.random.key(0), (3, 10))
    assert_close(swiglu_packed(x), swiglu(x[:, :5], x[:, 5:]), "float32")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fn", [bias_add, bias_gelu])
def test_bias_gradient_is_summed_in_float32(fn, backend):
    x = jnp.full((1024, 5), 50.0, jnp.bfloat16)  # where the derivative of GELU is one
    pull = jax.vjp(lambda bias: fn(x, bias, backend=backend), jnp.zeros(5, jnp.bfloat16))[1]
    # In bfloat16 a sum of ones stops at 256.
    assert (pull(jnp.ones_like(x))[0] == 1024).all()


def test_bias_add_saves_no_activations():
    kept = jax.tree.leaves(jax.vjp(bias_add, jnp.ones((3, 4)), jnp.ones(4))[1])
    assert (3, 4) not in [leaf.shape for leaf in kept]


# Offsets of more than 31 bits. All elements are equal, so an element that is not written shows.

BEYOND = 2**31 + 11


@pytest.mark.gpu
@pytest.mark.xdist_group("beyond 31 bits")
@pytest.mark.parametrize("shape", [(BEYOND,), (2**20 + 3, 2048), (2**20 + 3, 2049)])
def test_more_than_2_to_the_31_elements(shape):
    @jax.jit
    def run():
        x = jnp.ones(shape, jnp.bfloat16)
        if len(shape) == 1:
            return *value_and_derivative(lambda x: gelu(x, backend="cuda"), x), None
        bias = jnp.zeros(shape[1:], jnp.bfloat16)
        out, pull = jax.vjp(lambda *a: bias_gelu(*a, backend="cuda"), x, bias)
        return out, *pull(x)

    out, dx, dbias = run()
    value, derivative = value_and_derivative(gelu, jnp.ones((), jnp.bfloat16))
    assert (out == value).all()
    assert (dx == derivative).all()
    if dbias is not None:
        np.testing.assert_allclose(dbias.astype("float32"), 1.08296 * shape[0], rtol=5e-3)


@pytest.mark.gpu
@pytest.mark.xdist_group("beyond 31 bits")
def test_more_than_2_to_the_31_packed_elements():
    x = jnp.ones((2**18 + 3, 8192), jnp.bfloat16)
    dout = jnp.ones((2**18 + 3, 4096), jnp.bfloat16)
    out, pull = jax.vjp(lambda x: swiglu_packed(x, backend="cuda"), x)
    (dx,) = pull(dout)
    one = jnp.ones((), jnp.bfloat16)
    assert (out == swiglu(one, one)).all()
    dgate, dup = jax.grad(swiglu, argnums=(0, 1))(one, one)
    assert (dx[:, :4096] == dgate).all()
    assert (dx[:, 4096:] == dup).all()


def test_integers_are_rejected():
    with pytest.raises(TypeError, match="x has dtype int32; it must be a floating-point array"):
        gelu(jnp.arange(3))
    with pytest.raises(TypeError, match="bias has dtype int32"):
        bias_gelu(jnp.ones(3), jnp.arange(3))
    with pytest.raises(TypeError, match="up has dtype int32"):
        swiglu(jnp.ones(3), jnp.arange(3))


def test_traced_flags_are_rejected():
    with pytest.raises(TypeError, match=r"by_parts has .*; it must be a bool, and no traced one"):
        jax.jit(lambda by_parts: swiglu_packed(jnp.ones((2, 3)), by_parts=by_parts))(True)


def test_mismatched_shapes_are_rejected():
    x = jnp.ones((2, 3))
    for fn in (bias_add, bias_gelu):
        with pytest.raises(ValueError, match=r"bias has shape \(2,\); it must be \(3,\)"):
            fn(x, jnp.ones(2))
        with pytest.raises(ValueError, match=r"x has shape \(\)"):
            fn(jnp.float32(1), jnp.ones(1))
    with pytest.raises(ValueError, match=r"up has shape \(3,\); it must be \(2, 3\)"):
        swiglu(x, x[0])
    with pytest.raises(ValueError, match=r"y has shape \(3,\); it must be \(2, 3\)"):
        add(x, x[0])
    with pytest.raises(ValueError, match=r"x has shape \(2, 3\); it must have .* an even width"):
        swiglu_packed(x)


def test_mismatched_dtypes_are_rejected():
    x, half = jnp.ones((2, 3)), jnp.ones((2, 3), jnp.float16)
    for fn, other, name in ((bias_add, half[0], "bias"), (swiglu, half, "up"), (add, half, "y")):
        with pytest.raises(TypeError, match=f"{name} has dtype float16; it must have the dtype of"):
            fn(x, other)


@pytest.mark.parametrize("backend", ["pallas", "auto"])
def test_float64_falls_back_to_the_reference(backend):
    with jax.enable_x64(True):
        x = jnp.ones(3, jnp.float64)
        if backend == "auto":
            (call,) = jaxllm.explain(lambda x: gelu(x), x).calls
            assert call.on_gpu == "xla"
        else:
            with pytest.raises(
                jaxllm.BackendError, match="the input has dtype float64; the kernel"
            ):
                gelu(x, backend=backend)


# If the workspace has fewer rows than the GPU has SMs, its rows limit the number of CTAs.
@pytest.mark.gpu
@pytest.mark.parametrize("width", [768, 770])
@pytest.mark.parametrize("most", [1, 7])
@pytest.mark.parametrize("op", [bias_add, bias_gelu])
def test_gradients_are_exact_with_a_small_workspace(monkeypatch, op, most, width):
    monkeypatch.setattr(cuda, "_MAX_PARTIAL_ROWS", most)
    # No other test compiles this row count.
    x = jax.random.normal(jax.random.key(0), (1000 + most, width))
    bias = jax.random.normal(jax.random.key(1), (width,))

    def gradients(backend):
        return jax.jit(jax.grad(lambda *a: jnp.sin(op(*a, backend=backend)).sum(), (0, 1)))(x, bias)

    assert_close(gradients("cuda"), gradients("xla"), "float32")
