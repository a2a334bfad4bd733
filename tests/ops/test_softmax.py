"""Softmax: masks, extreme scores, large arrays and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import BACKENDS

import jaxllm
from jaxllm.ops import softmax
from jaxllm.ops.attention import cuda, pallas, reference
from jaxllm.testing import error, tolerance


def softmax_gradient(x, dout, **options):
    return jax.jit(lambda x, dout: jax.vjp(lambda x: softmax(x, **options), x)[1](dout)[0])(x, dout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("T", "S"), [(1, 1), (6, 6), (3, 7), (7, 3), (5, 33)])
def test_causal_softmax_normalizes_over_visible_keys(T, S, backend):
    x = jax.random.normal(jax.random.key(0), (2, T, S))
    out = softmax(x, scale=1.5, causal=True, backend=backend)
    for b, t in np.ndindex(2, T):
        seen = max(0, t + S - T + 1)
        weights = np.exp(1.5 * np.asarray(x[b, t, :seen], np.float64))
        assert error(out[b, t, :seen], weights / weights.sum()) < 1e-6
        assert not out[b, t, seen:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_softmax_ignores_masked_values(backend):
    x = jax.random.normal(jax.random.key(0), (5, 9))
    hidden = jnp.where(jnp.tri(5, 9, 4, dtype=bool), x, jnp.nan)
    options = {"causal": True, "backend": backend}
    np.testing.assert_array_equal(softmax(hidden, **options), softmax(x, **options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_query_without_visible_keys_has_zero_output_and_gradient(backend):
    x, dout = jax.random.normal(jax.random.key(0), (2, 5, 3))
    options = {"causal": True, "backend": backend}
    out, dx = softmax(x, **options), softmax_gradient(x, dout, **options)
    assert not out[:2].any()
    assert not dx[:2].any()
    np.testing.assert_allclose(out[2:].sum(axis=-1), 1.0, rtol=1e-6)
    assert dx[3:].any()
    assert np.isfinite(dx).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("width", [40, 3000])
@pytest.mark.covering(("dtype", "backend"), ("width",))
def test_huge_scores_are_exact(width, dtype, backend):
    signs = jax.random.rademacher(jax.random.key(0), (4, width), dtype)
    x = 1e4 * signs
    out = softmax(x, backend=backend)
    expected = (signs > 0) / (signs > 0).sum(axis=-1, keepdims=True)
    assert error(out, expected) < tolerance(dtype)
    assert np.isfinite(softmax_gradient(x, signs, backend=backend)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_of_minus_infinity_have_zero_weight(backend):
    x = jax.random.normal(jax.random.key(0), (3, 50)).at[:, 7:].set(-jnp.inf).at[2].set(-jnp.inf)
    out = softmax(x, backend=backend)
    assert error(out[:2, :7], jax.nn.softmax(x[:2, :7])) < 1e-6
    assert not out[:, 7:].any()
    assert not out[2].any()


@pytest.mark.gpu
@pytest.mark.xdist_group("beyond 31 bits")
@pytest.mark.parametrize("backend", ["cuda", "pallas"])
def test_more_than_2_to_the_31_elements(backend):
    # The arrays take 9 GiB. Only some heads are compared, the last ones included.
    heads, T, S = 2049, 1024, 1024
    assert heads * T * S > 2**31
    options = {"scale": 0.5, "causal": True}

    @jax.jit
    def make(seed):
        head = jax.random.normal(jax.random.key(seed), (T, S), jnp.bfloat16)
        factors = 1 + jnp.arange(heads, dtype=jnp.bfloat16)[:, None, None] / heads
        return head * factors

    x = make(0)
    checked = [0, 1, 1023, heads - 2, heads - 1]
    some_x = [x[i].astype(jnp.float32) for i in checked]
    out = jax.jit(lambda x: softmax(x, **options, backend=backend))(x)
    del x
    for i, wanted in zip(checked, some_x, strict=True):
        expected = reference.softmax(wanted, **options)
        assert error(out[i], expected) < tolerance("bfloat16")
    dout = make(1)
    op = {"cuda": cuda, "pallas": pallas}[backend]
    dx = jax.jit(lambda out, dout: op.softmax_backward(out, dout, **options))(out, dout)
    for i in checked:
        some = out[i].astype(jnp.float32), dout[i].astype(jnp.float32)
        assert error(dx[i], reference.softmax_backward(*some, **options)) < tolerance("bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_rows_larger_than_shared_memory(causal):
    x, dout = jax.random.normal(jax.random.key(0), (2, 3, 150001), jnp.bfloat16)
    out = softmax(x, causal=causal, backend="cuda")
    wide = x.astype(jnp.float32)
    assert error(out, reference.softmax(wide, causal=causal)) < tolerance("bfloat16")
    dx = softmax_gradient(x, dout, causal=causal, backend="cuda")
    expected = softmax_gradient(wide, dout.astype(jnp.float32), causal=causal, backend="xla")
    assert error(dx, expected) < tolerance("bfloat16")


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match=r"x has shape \(\); it must be \(\.\.\., S\)"):
        softmax(jnp.zeros(()))
    with pytest.raises(ValueError, match=r"x has shape \(3,\); it must be \(\.\.\., T, S\)"):
        softmax(jnp.zeros(3), causal=True)
    with pytest.raises(TypeError, match="x has dtype int32; it must be a floating-point array"):
        softmax(jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match=r"causal has .*; it must be a bool, and no traced one"):
        jax.jit(lambda causal: softmax(jnp.zeros((3, 3)), causal=causal))(True)


@pytest.mark.parametrize("backend", ["cuda", "pallas"])
def test_kernels_reject_float64(backend, monkeypatch):
    monkeypatch.setattr("jaxllm.core.ffi.unavailable_reason", lambda *_: None)
    with jax.enable_x64(True), pytest.raises(jaxllm.BackendError, match="x has dtype float64"):
        softmax(jnp.zeros(3, jnp.float64), backend=backend)


def test_pallas_rejects_long_rows():
    x = jax.ShapeDtypeStruct((2, 70000), jnp.bfloat16)
    with pytest.raises(jaxllm.BackendError, match="x has rows of 70000; the kernel takes at most"):
        jax.eval_shape(lambda x: softmax(x, backend="pallas"), x)
