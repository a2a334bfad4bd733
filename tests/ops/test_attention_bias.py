"""Attention with a bias: values, gradients of what shares it, hidden keys and errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import (
    BACKENDS,
    attention_arrays,
    document_ids,
    in_float64,
    jit_with_gradients,
    packed_arrays,
)

import jaxllm
from jaxllm.ops import flash_attention, flash_attention_packed, rope_table
from jaxllm.ops.attention import reference
from jaxllm.testing import assert_close, cotangents_like, lower_for_cuda

FEW_BACKENDS = ["xla", pytest.param("cuda", marks=pytest.mark.gpu)]
SHARED = [(2, 4), (1, 4), (2, 1), (1, 1)]


def draw_bias(sequences, heads, T=9, S=9, dtype="float32"):
    values = np.random.default_rng(5).standard_normal((sequences, heads, T, S))
    return jnp.asarray(values, dtype)


def exact(q, k, v, bias, *, causal=True, window=None, softcap=None, segment_ids=None):
    """The formula."""
    groups, (T, S) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    distance = jnp.arange(T)[:, None] + S - T - jnp.arange(S)
    mask = (distance >= 0) | (not causal)
    mask &= jnp.abs(distance) < (T + S if window is None else window)
    if segment_ids is not None:
        of_query, of_key = segment_ids
        mask = mask & (of_query[:, :, None] == of_key[:, None, :])[:, None]
    # Of a query without keys no number is NaN, and the weights are zeros.
    scores = jnp.where(mask, scores + bias, jnp.where(mask.any(-1, keepdims=True), -jnp.inf, 0.0))
    return jnp.einsum("bnts,bsnh->btnh", jnp.where(mask, jax.nn.softmax(scores), 0.0), v)


def attend(q, k, v, bias, sinks=None, causal=True, **options: Any):
    return flash_attention(q, k, v, sinks, bias, causal=causal, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.covering(("shared",), ("backend",))
def test_values_and_gradients_match_float64(shared, backend):
    arrays = (*attention_arrays(T=9, K=2), draw_bias(*shared))
    found = jit_with_gradients(functools.partial(attend, backend=backend), arrays)
    assert_close(found, in_float64(exact, arrays), "float32")


# Lengths that no tile divides, and more tiles than one of queries and of keys.
OPTIONS = {
    "plain": {"causal": False},
    "causal_window": {"window": 70},
    "all": {
        "window": 90,
        "softcap": 2.0,
        "segment_ids": (document_ids(2, 131), document_ids(2, 150)),
    },
}


@pytest.mark.parametrize("backend", FEW_BACKENDS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("H", [20, 64, 96, 128, 200])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.covering(("backend", "name", "shared"), ("backend", "H", "dtype"))
def test_values_and_gradients_of_many_tiles_match_float64(dtype, H, shared, name, backend):
    options: Any = OPTIONS[name]
    # A bias in float32, beside queries of any dtype, or in theirs, where sequences do not share it.
    sequences, heads = shared
    bias = draw_bias(sequences, heads, 131, 150, "float32" if sequences == 1 else dtype)
    arrays = (*attention_arrays(T=131, S=150, K=2, H=H, dtype=dtype), bias)
    found = jit_with_gradients(functools.partial(attend, **options, backend=backend), arrays)
    assert [x.dtype for x in found[1]] == [x.dtype for x in arrays]
    # The reference rounds its results as the kernels do.
    narrow = jit_with_gradients(functools.partial(reference_of, **options), arrays)
    expected = in_float64(functools.partial(exact, **options), arrays)
    assert_close(found, expected, dtype, narrow)


def reference_of(q, k, v, bias, sinks=None, causal=True, **options: Any):
    return reference.flash_attention(q, k, v, sinks, bias, causal=causal, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("dtype", "H"), [("float32", 64), ("bfloat16", 64), ("bfloat16", 200), ("float16", 128)]
)
def test_cuda_with_rotation_sinks_and_lse_is_as_exact_as_the_reference(dtype, H, interleaved):
    q, k, v = attention_arrays(T=131, K=2, H=H, dtype=dtype)
    arrays = (q, k, v, draw_bias(1, 4, 131, 131), jnp.array([0.5, -1.0, 2.0, 0.0]))
    table = rope_table(jnp.arange(131), H, theta=10_000.0)
    options: Any = {"rope_table": table, "interleaved": interleaved, "return_lse": True}
    call = functools.partial(attend, **options, backend="cuda")
    narrow, wide = (
        jit_with_gradients(functools.partial(reference_of, **options), given)
        for given in (arrays, [x.astype("float32") for x in arrays])
    )
    found = jit_with_gradients(call, arrays)
    assert_close(found, wide, dtype, narrow)
    jax.tree.map(np.testing.assert_array_equal, found, jit_with_gradients(call, arrays))


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_gradient_of_a_bias_of_no_sequences_is_zero(backend):
    q, k, v = attention_arrays(B=0, T=9)
    _, gradients = jit_with_gradients(
        functools.partial(attend, backend=backend), (q, k, v, draw_bias(1, 4))
    )
    np.testing.assert_array_equal(gradients[3], np.zeros((1, 4, 9, 9)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.covering(("dtype",), ("backend",))
def test_gradient_has_the_dtype_of_the_bias_and_is_summed_in_float32(dtype, backend):
    # As many sequences as make a sum in bfloat16 stop growing.
    q, k, v = attention_arrays(B=400, T=2, N=1, H=1, dtype="bfloat16")
    arrays = (jnp.zeros_like(q), k, jnp.ones_like(v).at[:, 1].set(-1), draw_bias(1, 1, 2, 2, dtype))

    def total(q, k, v, bias):
        return attend(q, k, v, bias, causal=False).sum(dtype=jnp.float32)

    with jaxllm.use_backend(backend):
        gradient = jax.jit(jax.grad(total, argnums=3))(*arrays)
    assert gradient.dtype == dtype
    p = jax.nn.softmax(arrays[3].astype(jnp.float32))[0, 0]
    slope = 2 * p[:, 0] * p[:, 1] * 400
    expected = jnp.stack([slope, -slope], axis=1)
    np.testing.assert_allclose(gradient[0, 0].astype(jnp.float32), expected, rtol=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.covering(("dtype",), ("backend",))
def test_minus_infinity_hides_a_key(dtype, backend):
    q, k, v = attention_arrays(T=9, dtype=dtype)
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
    assert_close((out, lse, found), (low, low_lse, near), dtype)


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.covering(("shared",), ("backend",))
def test_vmap_of_a_bias_matches_a_loop(shared, backend):
    arrays = attention_arrays(T=9)
    biases = jnp.stack([draw_bias(*shared), -draw_bias(*shared)])

    def fn(bias):
        return jit_with_gradients(functools.partial(attend, backend=backend), (*arrays, bias))

    looped = jax.tree.map(lambda *x: jnp.stack(x), *map(fn, biases))
    assert_close(jax.vmap(fn)(biases), looped, "float32")


def test_explain_says_what_runs(with_hopper_gpus):
    q, k, v = attention_arrays(T=9)
    (call,) = jaxllm.explain(attend, q, k, v, draw_bias(1, 4)).calls
    assert (call.stem, call.on_gpu) == ("flash_attention_bias_forward", "pallas")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cuda_calls_reserve_no_workspace_for_hopper(on_hopper, dtype):
    qkv = [jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)] * 3
    bias = jax.ShapeDtypeStruct((1, 4, 128, 128), dtype)

    def gradients(*arrays):
        def total(*arrays):
            return attend(*arrays, backend="cuda").astype(jnp.float32).sum()

        return jax.grad(total, argnums=range(4))(*arrays)

    program = lower_for_cuda(gradients, *qkv, bias)
    calls = [x for x in program.splitlines() if "@jaxllm_flash_attention_bias_" in x]
    assert len(calls) == 2 and all("hopper = false" in x for x in calls)


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
