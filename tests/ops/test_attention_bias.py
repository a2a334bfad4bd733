"""Attention with a bias: values, gradients of what shares it, hidden keys and errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import attention_arrays, in_float64, jit_with_gradients, packed_arrays

import jaxllm
from jaxllm.core.backend import BackendError
from jaxllm.ops import flash_attention, flash_attention_packed
from jaxllm.testing import assert_close, cotangents_like, lower_for_cuda

BACKENDS: list[Any] = ["xla", "pallas"]
SHARED = [(2, 4), (1, 4), (2, 1), (1, 1)]


def draw_bias(sequences, heads, T=9, S=9, dtype="float32"):
    values = np.random.default_rng(5).standard_normal((sequences, heads, T, S))
    return jnp.asarray(values, dtype)


def exact(q, k, v, bias):
    """The formula, under a causal mask."""
    groups, (T, S) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5 + bias
    scores = jnp.where(jnp.tril(jnp.ones((T, S), bool), S - T), scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def attend(q, k, v, bias, sinks=None, causal=True, **options: Any):
    return flash_attention(q, k, v, sinks, bias, causal=causal, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shared", SHARED)
def test_values_and_gradients_match_float64(shared, backend):
    arrays = (*attention_arrays(T=9, K=2), draw_bias(*shared))
    found = jit_with_gradients(functools.partial(attend, backend=backend), arrays)
    assert_close(found, in_float64(exact, arrays), "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradient_has_the_dtype_of_the_bias_and_is_summed_in_float32(dtype):
    # As many sequences as make a sum in bfloat16 stop growing.
    q, k, v = attention_arrays(B=400, T=2, N=1, H=1, dtype="bfloat16")
    arrays = (jnp.zeros_like(q), k, jnp.ones_like(v).at[:, 1].set(-1), draw_bias(1, 1, 2, 2, dtype))

    def total(q, k, v, bias):
        return attend(q, k, v, bias, causal=False).sum(dtype=jnp.float32)

    for backend in BACKENDS:
        with jaxllm.use_backend(backend):
            gradient = jax.jit(jax.grad(total, argnums=3))(*arrays)
        assert gradient.dtype == dtype
        p = jax.nn.softmax(arrays[3].astype(jnp.float32))[0, 0]
        slope = 2 * p[:, 0] * p[:, 1] * 400
        expected = jnp.stack([slope, -slope], axis=1)
        np.testing.assert_allclose(gradient[0, 0].astype(jnp.float32), expected, rtol=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_infinity_hides_a_key(backend):
    q, k, v = attention_arrays(T=9)
    bias = draw_bias(2, 4)
    hidden = np.random.default_rng(1).random(bias.shape) < 0.3
    hidden[1, :, 4] = True  # all keys of a query
    fn = functools.partial(attend, causal=False, backend=backend, return_lse=True)
    cotangents = cotangents_like(jax.eval_shape(fn, q, k, v, bias))

    def gradients(bias):
        (out, lse), pull = jax.vjp(fn, q, k, v, bias)
        return out, lse, pull(cotangents)

    out, lse, found = gradients(jnp.where(hidden, -jnp.inf, bias))
    assert all(np.isfinite(x).all() for x in (out, *found))
    assert not found[3][hidden].any()
    assert not out[1, 4].any()
    assert np.isneginf(lse[1, :, 4]).all()
    # Of the other queries as with a number that no other score comes near.
    out, lse, found = (np.delete(x, 4, axis) for x, axis in ((out, 1), (lse, 2), (found[3], 2)))
    low, low_lse, near = gradients(jnp.where(hidden, -1e9, bias))
    low, low_lse, near = (
        np.delete(x, 4, axis) for x, axis in ((low, 1), (low_lse, 2), (near[3], 2))
    )
    assert_close((out, lse, found), (low, low_lse, near), "float32")


@pytest.mark.parametrize("by_parts", [False, True])
def test_packed_attention_is_that_of_its_parts(by_parts):
    (q, k, v), qkv = packed_arrays(N=4, K=4, T=9)
    if by_parts:
        qkv = qkv.reshape(2, 9, 3, 4, 8)
    bias, sinks = draw_bias(1, 4), jnp.arange(4.0)
    options: Any = {"causal": True, "softcap": 3.0, "return_lse": True}

    def packed(qkv, bias):
        return flash_attention_packed(qkv, 4, bias=bias, sinks=sinks, **options)

    def apart(qkv, bias):
        q, k, v = (x.reshape(2, 9, 4, 8) for x in jnp.split(qkv.reshape(2, 9, -1), 3, axis=-1))
        out, lse = attend(q, k, v, bias, sinks, **options)
        return out.reshape(2, 9, -1), lse

    found, expected = (jit_with_gradients(fn, (qkv, bias)) for fn in (packed, apart))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    alone = flash_attention_packed(qkv, 4, bias=bias, causal=True)
    np.testing.assert_array_equal(alone, attend(q, k, v, bias).reshape(alone.shape))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_linear_bias_is_alibi(backend):
    # A slope for each head times the distance, which is the same for all sequences.
    q, k, v = attention_arrays(T=9)
    slopes = 2.0 ** -jnp.arange(1, 5)
    distance = jnp.arange(9)[:, None] - jnp.arange(9)
    bias = -(slopes[:, None, None] * distance)[None]
    found = attend(q, k, v, bias, backend=backend)
    assert_close(found, in_float64(exact, (q, k, v, bias))[0], "float32")


def test_pallas_lowers_to_four_kernels_for_a_gpu():
    arrays = (*attention_arrays(T=9), draw_bias(1, 4))

    def gradients(*arrays):
        return jax.grad(lambda *x: attend(*x, backend="pallas").sum(), argnums=range(4))(*arrays)

    assert lower_for_cuda(gradients, *arrays).count("__gpu$xla.gpu.triton") == 4


def test_vmap_of_a_bias_matches_a_loop():
    q, k, v = attention_arrays(T=9)
    biases = jnp.stack([draw_bias(1, 4), -draw_bias(1, 4)])
    for backend in BACKENDS:
        fn = functools.partial(attend, q, k, v, backend=backend)
        looped = jnp.stack([fn(bias) for bias in biases])
        assert_close(jax.vmap(fn)(biases), looped, "float32")


def test_no_cuda_kernel_takes_a_bias_and_explain_says_what_runs():
    q, k, v = attention_arrays(T=9)
    bias = draw_bias(1, 4)
    (call,) = jaxllm.explain(attend, q, k, v, bias).calls
    assert (call.stem, call.on_gpu) == ("flash_attention_bias_forward", "pallas")
    with pytest.raises(BackendError, match="flash_attention_bias_forward has no cuda kernel"):
        attend(q, k, v, bias, backend="cuda")


@pytest.mark.parametrize(
    ("bias", "kind", "message"),
    [
        (jnp.zeros((4, 9, 9)), ValueError, r"\(4, 9, 9\); it must be \(2 or 1, 4 or 1, 9, 9\)"),
        (jnp.zeros((3, 4, 9, 9)), ValueError, r"\(3, 4, 9, 9\); it must be \(2 or 1, 4 or 1"),
        (jnp.zeros((2, 2, 9, 9)), ValueError, r"\(2, 2, 9, 9\); it must be \(2 or 1, 4 or 1"),
        (jnp.zeros((2, 1, 9, 1)), ValueError, r"\(2, 1, 9, 1\); it must be \(2, 1, 9, 9\)"),
        (jnp.zeros((2, 4, 9, 9), "bfloat16"), TypeError, "bias has dtype bfloat16; it must be"),
        (jnp.zeros((2, 4, 9, 9), int), TypeError, "bias has dtype int32; it must be a floating"),
    ],
)
def test_wrong_biases_are_errors(bias, kind, message):
    (q, k, v), qkv = packed_arrays(N=4, K=4, T=9)
    with pytest.raises(kind, match=message):
        flash_attention(q, k, v, None, bias)
    with pytest.raises(kind, match=message):
        flash_attention_packed(qkv, 4, bias=bias)
