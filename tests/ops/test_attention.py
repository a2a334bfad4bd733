"""What the contract leaves open of attention and its parts: masks, heads, cuDNN, the errors."""

import collections
import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import jaxllm
from jaxllm.core import ffi
from jaxllm.ops import (
    flash_attention,
    flash_attention_float8,
    flash_attention_packed,
    layer_norm,
    linear,
    normed_rows,
    pre_norm_self_attention,
    repeat_kv,
    rope,
    rope_table,
    self_attention,
    softmax,
)
from jaxllm.ops.attention import cuda, cuda_decode, pallas, pallas_flash, reference, xla
from jaxllm.ops.attention.pallas_flash import Tile, Tiles
from jaxllm.testing import assert_close, cotangents_like, error, lower_for_cuda, tolerance

FLASH_BACKENDS = ["xla", "pallas"]


def arrays(B=2, T=6, N=4, H=8, S=None, K=None, dtype="float32"):
    shapes = ((B, T, N, H), (B, S or T, K or N, H), (B, S or T, K or N, H))
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def by_hand(q, k, v, visible, scale=None):
    """Attention of as many query heads as key heads, one query and one head at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for b, t, n in np.ndindex(q.shape[0], q.shape[1], q.shape[2]):
        seen = [s for s in range(k.shape[1]) if visible(b, t, s)]
        if seen:
            scores = np.array([scale * q[b, t, n] @ k[b, s, n] for s in seen])
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights @ v[b, seen, n] / weights.sum()
    return out


def gradients(q, k, v, **options):
    def total(q, k, v):
        out = flash_attention(q, k, v, **options)
        # Counted in float32: float16 ends at 65504.
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out * weights.astype(out.dtype)).sum()

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(q, k, v)


@pytest.mark.parametrize(
    ("lengths", "options", "visible"),
    [
        ((6, 6), {}, lambda t, s: True),
        ((6, 6), {"causal": True}, lambda t, s: s <= t),
        ((3, 7), {"causal": True}, lambda t, s: s <= t + 4),
        ((7, 3), {"causal": True}, lambda t, s: s <= t - 4),
        ((6, 6), {"causal": True, "window": 1}, lambda t, s: s == t),
        ((6, 6), {"causal": True, "window": 3}, lambda t, s: s in (t - 2, t - 1, t)),
        ((6, 6), {"causal": True, "window": 99}, lambda t, s: s <= t),
        ((6, 6), {"window": 2}, lambda t, s: s in (t - 1, t, t + 1)),
        ((3, 7), {"window": 2}, lambda t, s: s in (t + 3, t + 4, t + 5)),
    ],
)
def test_which_keys_a_query_sees(lengths, options, visible):
    T, S = lengths
    q, k, v = arrays(T=T, S=S)
    expected = by_hand(q, k, v, lambda _, t, s: visible(t, s))
    assert error(flash_attention(q, k, v, **options), expected) < 1e-6


def test_query_heads_share_key_heads_in_groups():
    q, k, v = arrays(N=6, K=2)
    k3, v3 = (jnp.repeat(x, 3, axis=2) for x in (k, v))
    out = flash_attention(q, k, v, causal=True)
    assert error(out, by_hand(q, k3, v3, lambda _, t, s: s <= t)) < 1e-6
    dq, dk, dv = gradients(q, k, v, causal=True)
    expected = gradients(q, k3, v3, causal=True)
    assert error(dq, expected[0]) < 1e-6
    for found, wanted in ((dk, expected[1]), (dv, expected[2])):
        assert error(found, wanted.reshape(2, 6, 2, 3, 8).sum(axis=3)) < 1e-6


def test_softcap_bounds_the_scores():
    q, k, v = arrays()
    scores = 2.0 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", 5 * q, k) / 2.0)
    expected = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    assert error(flash_attention(5 * q, k, v, scale=1.0, softcap=2.0), expected) < 1e-6


def test_segments_do_not_see_each_other():
    q, k, v = arrays()
    segments = jnp.array([[0, 0, 0, 1, 1, 1], [7, 3, 3, 7, 7, 3]])
    of = np.asarray(segments)
    expected = by_hand(q, k, v, lambda b, t, s: s <= t and of[b, t] == of[b, s])
    assert error(flash_attention(q, k, v, causal=True, segment_ids=segments), expected) < 1e-6


def test_queries_and_keys_may_have_segments_of_their_own():
    q, k, v = arrays(T=3, S=5)
    of_query, of_key = np.array([[0, 1, 2]] * 2), np.array([[0, 1, 1, 0, 0], [2, 2, 1, 1, 1]])
    out = flash_attention(q, k, v, segment_ids=(jnp.array(of_query), jnp.array(of_key)))
    expected = by_hand(q, k, v, lambda b, t, s: of_query[b, t] == of_key[b, s])
    assert error(out, expected) < 1e-6


@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 2, "softcap": 3.0}])
def test_gradients_with_segments_are_those_of_the_definition(options):
    q, k, v = arrays(N=4, K=2)
    segments = jnp.array([[0, 0, 1, 1, 1, 2], [4, 4, 4, 4, 5, 5]])

    def total(attention):
        return lambda *qkv: jnp.sin(attention(*qkv, segment_ids=segments, **options)).sum()

    found, expected = (
        jax.jit(jax.grad(total(attention), argnums=(0, 1, 2)))(q, k, v)
        for attention in (flash_attention, reference.flash_attention)
    )
    for a, e in zip(found, expected, strict=True):
        assert error(a, e) < 2e-6


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
def test_a_query_without_keys_gives_zeros_and_has_no_gradient(backend):
    q, k, v = arrays(T=5, S=3)
    options = {"causal": True, "scale": 1.0, "window": None, "softcap": None}
    if backend == "pallas":
        options["interpret"] = jax.default_backend() != "gpu"
    module = {"xla": reference, "pallas": pallas_flash}[backend]
    out, lse = module.flash_attention_forward(q, k, v, None, **options)
    assert not out[:, :2].any()
    np.testing.assert_array_equal(lse[:, :, :2], -np.inf)
    assert np.isfinite(lse[:, :, 2:]).all()
    dq, dk, dv = gradients(q, k, v, causal=True, backend=backend)
    assert not dq[:, :2].any()
    assert dq[:, 3:].any()
    assert all(np.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
@pytest.mark.parametrize("of_key", [[1, 1, 1, 1], [9, 0, 9, 0]])
def test_if_no_query_has_a_key_all_gradients_are_zero(of_key, backend):
    q, k, v = arrays(T=4)
    segments = (jnp.full((2, 4), 3), jnp.array([of_key] * 2))
    options = {"segment_ids": segments, "backend": backend}
    assert not flash_attention(q, k, v, **options).any()
    assert not any(x.any() for x in gradients(q, k, v, **options))


def test_lse_is_the_logarithm_of_the_sum_for_each_head_and_query():
    q, k, v = arrays(N=4, K=2, dtype="bfloat16")
    options = {"causal": False, "scale": 0.5, "window": None, "softcap": None}
    _, lse = reference.flash_attention_forward(q, k, v, None, **options)
    wide_q, wide_k = np.asarray(q, np.float64), np.repeat(np.asarray(k, np.float64), 2, axis=2)
    expected = np.log(np.exp(0.5 * np.einsum("btnh,bsnh->bnts", wide_q, wide_k)).sum(axis=-1))
    assert (lse.shape, lse.dtype) == ((2, 4, 6), jnp.float32)
    assert error(lse, expected) < 1e-6


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_huge_scores_are_stable(dtype, backend):
    q, k, v = arrays(dtype=dtype)
    options = {"causal": True, "scale": 1.0, "backend": backend}
    assert np.isfinite(flash_attention(100 * q, 100 * k, v, **options)).all()
    assert all(np.isfinite(x).all() for x in gradients(100 * q, 100 * k, v, **options))


# cuDNN runs on a GPU alone, but what JAX hands to it can be read anywhere.


@pytest.fixture
def pretend_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(xla, "_no_cudnn", lambda: None)


def custom_calls(fn, *args):
    """The lines of the program for CUDA that call cuDNN, without the names of values."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return [
        line.split(" = ")[1].split("(")[0] + line[line.index("{") :]
        for line in text.splitlines()
        if "__cudnn" in line
    ]


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
def test_cudnn_gets_what_jax_gives_it(pretend_cudnn, causal, window):
    q, k, v = arrays(T=16, N=4, K=2, H=64, dtype="bfloat16")

    def gradient(attention):
        return jax.grad(lambda *qkv: attention(*qkv).sum(), argnums=(0, 1, 2))

    ours = gradient(lambda *qkv: flash_attention(*qkv, causal=causal, window=window, backend="xla"))
    theirs = gradient(
        lambda *qkv: jax.nn.dot_product_attention(
            *qkv,
            is_causal=causal,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
    )
    calls = custom_calls(ours, q, k, v)
    assert len(calls) == 2
    assert calls == custom_calls(theirs, q, k, v)


def test_cudnn_s_results_have_the_shapes_of_the_contract(pretend_cudnn):
    q, k, v = arrays(T=16, N=4, K=2, H=64, dtype="float16")
    options = {"causal": True, "scale": 0.125, "window": None, "softcap": None}
    out, lse = jax.eval_shape(lambda: xla.flash_attention_forward(q, k, v, None, **options))
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 16), jnp.float32)
    arguments = (q, k, v, out, lse, out, None)
    gradients = jax.eval_shape(lambda *a: xla.flash_attention_backward(*a, **options), *arguments)
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]


@pytest.mark.parametrize(
    ("shapes", "options", "reason"),
    [
        ({"dtype": "float32"}, {}, "q has dtype float32; cuDNN's attention takes bfloat16 and"),
        ({"H": 12}, {}, "heads are 12 wide"),
        ({"H": 136}, {}, "heads are 136 wide"),
        ({"T": 1}, {}, "needs two keys or more"),
        ({"T": 4, "S": 6}, {"causal": True}, "so 4 queries need 4 keys, not 6"),
        ({}, {"scale": -0.5}, "scale is -0.5; cuDNN's attention takes scales above zero"),
        ({}, {"window": 3}, "window needs a causal mask"),
        ({}, {"softcap": 3.0}, "no softcap"),
        ({}, {"segment_ids": np.zeros((2, 6), np.int32)}, "no segment ids"),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_what_cudnn_cannot_serve_goes_to_the_definition(
    pretend_cudnn, shapes, options, reason, backward
):
    q, k, v = arrays(**{"dtype": "bfloat16"} | shapes)
    fn = lambda *qkv: flash_attention(*qkv, **options, backend="xla").sum()  # noqa: E731
    calls = jaxllm.explain(jax.grad(fn) if backward else fn, q, k, v).calls
    call = calls[-1]
    assert call.stem == f"flash_attention_{'backward' if backward else 'forward'}"
    assert call.on_gpu == call.elsewhere == "xla"
    ((passed_over, why),) = call.passed_over
    assert passed_over == "xla-gpu"
    assert reason in why


@pytest.mark.no_gpu
def test_without_a_gpu_cudnn_is_passed_over_with_the_reason():
    q, k, v = arrays(dtype="bfloat16")
    (call,) = jaxllm.explain(lambda *qkv: flash_attention(*qkv, backend="xla"), q, k, v).calls
    assert dict(call.passed_over)["xla-gpu"].startswith("this process has no NVIDIA GPU")


def test_shapes_that_do_not_fit_are_refused():
    q, k, v = arrays(N=4)
    with pytest.raises(ValueError, match=r"q has shape \(2, 6, 4\); it must be \(B, T, N, H\)"):
        flash_attention(q[..., 0], k, v)
    with pytest.raises(ValueError, match=r"k has shape \(1, 6, 4, 8\); it must be \(2, S, K, 8\)"):
        flash_attention(q, k[:1], v)
    with pytest.raises(ValueError, match=r"v has shape \(2, 5, 4, 8\); it must be \(2, 6, 4, 8\)"):
        flash_attention(q, k, v[:, :5])
    with pytest.raises(ValueError, match=r"3 heads; their number must divide that of q .*, 4"):
        flash_attention(q, k[:, :, :3], v[:, :, :3])


def test_dtypes_that_differ_are_refused():
    q, k, v = arrays()
    with pytest.raises(TypeError, match="k has dtype bfloat16; it must have the dtype of q"):
        flash_attention(q, k.astype(jnp.bfloat16), v)
    with pytest.raises(TypeError, match="v has dtype int32; it must be a floating-point array"):
        flash_attention(q, k, v.astype(jnp.int32))


def test_options_out_of_range_are_refused():
    q, k, v = arrays()
    with pytest.raises(ValueError, match="window is 0; it must be at least 1"):
        flash_attention(q, k, v, window=0)
    with pytest.raises(ValueError, match=r"softcap is 0\.0; it must be above 0"):
        flash_attention(q, k, v, softcap=0.0)


def test_segment_ids_that_do_not_fit_are_refused():
    q, k, v = arrays(T=4, S=6)
    of_query, of_key = jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 6), jnp.int32)
    with pytest.raises(ValueError, match=r"segment_ids is one array, but q .* differ in length"):
        flash_attention(q, k, v, segment_ids=of_query)
    with pytest.raises(ValueError, match=r"segment_ids has shape \(2, 6\); it must be \(2, 4\)"):
        flash_attention(q, k, v, segment_ids=(of_key, of_query))
    with pytest.raises(ValueError, match="segment_ids is a tuple of 1"):
        flash_attention(q, k, v, segment_ids=(of_query,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="segment_ids of the keys has dtype float32"):
        flash_attention(q, k, v, segment_ids=(of_query, of_key.astype(jnp.float32)))


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}])
def test_auto_takes_cudnn_by_rows_and_the_cuda_kernels_where_cudnn_cannot(
    pretend_cudnn, options, monkeypatch
):
    monkeypatch.setattr("jaxllm.core.ffi.unavailable_reason", lambda *_: None)
    q, k, v = arrays(dtype="bfloat16")
    grad = jax.grad(lambda *qkv: flash_attention(*qkv, causal=True, **options).sum())
    for call in jaxllm.explain(grad, q, k, v).calls:
        assert call.elsewhere == "xla"
        if options:
            assert (call.on_gpu, call.passed_over) == ("cuda", ())
        else:
            assert call.on_gpu == "xla-gpu"
            assert "benchmarks/results" in dict(call.passed_over)["cuda"]


@pytest.mark.parametrize(("width", "served"), [(64, True), (128, True), (32, False), (96, False)])
def test_auto_takes_the_hopper_kernels_where_rows_show_them_faster(
    pretend_cudnn, width, served, monkeypatch
):
    monkeypatch.setattr("jaxllm.core.ffi.unavailable_reason", lambda *_: None)
    monkeypatch.setattr("jaxllm.core.ffi.device", lambda: ffi.H100)
    qkv = arrays(H=width, dtype="bfloat16")
    packed = jnp.zeros((2, 6, 3 * 4 * width), jnp.bfloat16)
    calls = jaxllm.explain(lambda *qkv: flash_attention(*qkv, causal=True), *qkv).calls
    calls += jaxllm.explain(lambda x: flash_attention_packed(x, 4, causal=True), packed).calls
    assert [call.on_gpu for call in calls] == 2 * ["cuda" if served else "xla-gpu"]


def test_backend_cuda_runs_kernels_that_auto_passes_over(pretend_cudnn, monkeypatch):
    monkeypatch.setattr("jaxllm.core.ffi.unavailable_reason", lambda *_: None)
    q, k, v = arrays(dtype="bfloat16")
    (call,) = jaxllm.explain(lambda *qkv: flash_attention(*qkv, backend="cuda"), q, k, v).calls
    assert (call.on_gpu, call.passed_over) == ("cuda", ())


# One projection, rotary embeddings and float8.


def projection(N, K, H=8, B=2, T=6, dtype="float32"):
    """q, k and v, and the array that holds them."""
    qkv = arrays(B=B, T=T, N=N, K=K, H=H, dtype=dtype)
    return qkv, jnp.concatenate([x.reshape(B, T, -1) for x in qkv], axis=-1)


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
@pytest.mark.parametrize(("N", "K"), [(3, 3), (4, 2)])
def test_a_projection_holds_queries_then_keys_then_values(N, K, backend):
    (q, k, v), qkv = projection(N, K)
    options = {"causal": True, "backend": backend}
    out, pull = jax.vjp(lambda x: flash_attention_packed(x, N, K, **options), qkv)
    expected, pull_unpacked = jax.vjp(lambda *x: flash_attention(*x, **options), q, k, v)
    assert out.shape == (2, 6, N * 8)
    assert error(out, expected.reshape(out.shape)) <= tolerance("float32")
    dout = jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    wanted = [x.reshape(2, 6, -1) for x in pull_unpacked(dout.reshape(expected.shape))]
    assert error(pull(dout)[0], jnp.concatenate(wanted, axis=-1)) <= tolerance("float32")


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_attention_turns_queries_and_keys_as_rope_does(interleaved, backend):
    q, k, v = arrays(N=4, K=2)
    angles = rope_table(jnp.arange(3, 9), 8, theta=100.0)

    def inside(q, k, v):
        options = {"rope_table": angles, "interleaved": interleaved, "backend": backend}
        return flash_attention(q, k, v, causal=True, **options)

    def before(q, k, v):
        q, k = rope(q, k, *angles, interleaved=interleaved)
        return flash_attention(q, k, v, causal=True)

    found, expected = (
        jax.jit(jax.value_and_grad(lambda *x: jnp.sin(fn(*x)).sum(), (0, 1, 2)))(q, k, v)  # noqa: B023
        for fn in (inside, before)
    )
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert error(a, e) <= tolerance("float32")


def test_each_sequence_may_have_its_angles_and_none_has_a_gradient():
    _, qkv = projection(2, 1)
    positions = jnp.array([[0, 1, 2, 0, 1, 2], [5, 6, 7, 8, 9, 10]])
    angles = rope_table(positions, 6, theta=100.0)
    run = lambda qkv, angles: flash_attention_packed(qkv, 2, 1, rope_table=angles)  # noqa: E731
    out = run(qkv, angles)
    for b in range(2):
        alone = run(qkv[b : b + 1], jax.tree.map(lambda x: x[b], angles))  # noqa: B023
        assert error(out[b], alone[0]) <= tolerance("float32")
    gradients = jax.grad(lambda angles: run(qkv, angles).sum())(angles)
    assert not any(x.any() for x in gradients)


def test_projections_and_tables_that_do_not_fit_are_refused():
    (q, k, v), qkv = projection(4, 2)
    with pytest.raises(ValueError, match="heads is 4; it must be a multiple of kv_heads, 3, above"):
        flash_attention_packed(qkv, 4, 3)
    with pytest.raises(ValueError, match=r"qkv has shape \(2, 6, 64\); it must be \(B, T, 9\*H\)"):
        flash_attention_packed(qkv, 3)
    with pytest.raises(TypeError, match="qkv has dtype int32"):
        flash_attention_packed(qkv.astype(jnp.int32), 4, 2)
    cos, sin = rope_table(jnp.arange(6), 8, theta=100.0)
    with pytest.raises(ValueError, match="rope_table is no pair"):
        flash_attention_packed(qkv, 4, 2, rope_table=cos)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"cos of rope_table has shape \(5, 4\); it must be \(6, R"
    ):
        flash_attention(q, k, v, rope_table=(cos[:5], sin[:5]))
    with pytest.raises(ValueError, match=r"sin of rope_table has shape \(6, 3\)"):
        flash_attention(q, k, v, rope_table=(cos, sin[:, :3]))
    with pytest.raises(ValueError, match="differ in length; turn them by rope before"):
        flash_attention(q[:, 1:], k, v, rope_table=(cos, sin))


# Attention with the projection before it.


def layer(N, K, H=8, B=2, T=6, D=5, dtype="float32"):
    """Tokens, and a projection to queries, keys and values."""
    columns = (N + 2 * K) * H
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((B, T, D), (D, columns), (columns,))
    x, weight, bias = (jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))
    return [array.astype(dtype) for array in (x, weight / D**0.5, bias)]


def two_ops(x, weight, bias, heads, kv_heads, backend=None, **options):
    qkv = linear(x, weight, bias, backend=backend)
    return flash_attention_packed(qkv, heads, kv_heads, **options, backend=backend)


def with_gradients(fn, arrays):
    out, pull = jax.vjp(fn, *arrays)
    return out, pull(cotangents_like(out))


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
@pytest.mark.parametrize(
    ("N", "K", "options"),
    [
        (3, 3, {"causal": True}),
        (4, 2, {"window": 2, "scale": 0.7}),
        (
            2,
            1,
            {"causal": True, "segment_ids": jnp.array([[0, 0, 0, 1, 1, 1], [2, 5, 5, 5, 1, 1]])},
        ),
    ],
)
def test_self_attention_is_a_projection_and_attention(N, K, options, backend):
    arrays = layer(N, K)
    options = {"heads": N, "kv_heads": K, "backend": backend} | options
    found, expected = (
        jax.jit(lambda *a, fn=fn: with_gradients(functools.partial(fn, **options), a))(*arrays)
        for fn in (self_attention, two_ops)
    )
    assert_close(found, expected, "float32")
    # A vector that is added to all keys changes nothing, and to all values itself alone.
    of_queries, of_keys, of_values = jnp.split(found[1][2], [N * 8, (N + K) * 8])
    assert abs(of_keys).max() <= tolerance("float32") * abs(of_queries).max()
    dout = cotangents_like(found[0]).reshape(-1, K, N // K, 8)
    assert error(of_values.reshape(K, 8), dout.sum(axis=(0, 2))) <= tolerance("float32")


@pytest.mark.parametrize("names", [("linear",), ("linear", "flash_attention")])
def test_self_attention_keeps_what_a_policy_keeps_of_two_ops(names):
    arrays = layer(4, 2)
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def program_of(fn):
        value = lambda *a: fn(*a, 4, 2, causal=True, backend="xla").sum()  # noqa: E731
        saving = jax.checkpoint(value, policy=policy)
        return str(jax.make_jaxpr(jax.grad(saving, argnums=(0, 1, 2)))(*arrays))

    fused, plain = program_of(self_attention), program_of(two_ops)
    for word in ("dot_general", "exp "):
        assert fused.count(word) == plain.count(word), word


def test_self_attention_keeps_no_more_than_two_ops():
    def kept(fn):
        pull = jax.vjp(lambda *a: fn(*a, 4, 2, causal=True), *layer(4, 2))[1]
        return collections.Counter(leaf.shape for leaf in jax.tree.leaves(pull))

    assert kept(self_attention) <= kept(two_ops)


def half_block(N, K, H=8, B=2, T=6, D=5, dtype="float32"):
    """The arrays of ``layer``, and what comes before and after attention in a block."""
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = ((N * H, D), (D,), (D,), (D,))
    more = [jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True)]
    more[0] /= (N * H) ** 0.5
    out_weight, *rows = (array.astype(dtype) for array in more)
    x, weight, bias = layer(N, K, H, B, T, D, dtype)
    return [x, *rows[:2], weight, bias, out_weight, rows[2]]


def half_block_by_ops(
    x, scale, norm_bias, weight, bias, out_weight, out_bias,
    attention_scale=None, backend=None, **options,
):  # fmt: skip
    options |= {"scale": attention_scale, "backend": backend}
    normed = layer_norm(x, scale, norm_bias, backend=backend)
    out = self_attention(normed, weight, bias, **options)
    return x + linear(out, out_weight, out_bias, backend=backend)


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
@pytest.mark.parametrize(
    ("N", "K", "options"),
    [
        (3, 3, {"causal": True}),
        (4, 2, {"window": 2, "attention_scale": 0.7}),
        (2, 1, {"causal": True, "segment_ids": jnp.array([[0, 0, 1, 1, 1, 2]] * 2)}),
    ],
)
def test_half_a_block_is_the_ops_that_it_is_made_of(N, K, options, backend):
    arrays = half_block(N, K)
    options = {"heads": N, "kv_heads": K, "backend": backend} | options
    found, expected = (
        jax.jit(lambda *a, fn=fn: with_gradients(functools.partial(fn, **options), a))(*arrays)
        for fn in (pre_norm_self_attention, half_block_by_ops)
    )
    assert_close(found, expected, "float32")


@pytest.mark.parametrize("names", [("linear",), ("linear", "flash_attention")])
def test_half_a_block_keeps_what_a_policy_keeps_of_its_ops(names):
    arrays = half_block(4, 2)
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def program_of(fn):
        def value(*a):
            return fn(*a, heads=4, kv_heads=2, causal=True, backend="xla").sum()

        saving = jax.checkpoint(value, policy=policy)
        return str(jax.make_jaxpr(jax.grad(saving, argnums=range(7)))(*arrays))

    fused, plain = program_of(pre_norm_self_attention), program_of(half_block_by_ops)
    # One product more: the gradient of the norm's bias.
    for word, more in (("dot_general", 1), ("exp ", 0)):
        assert fused.count(word) == plain.count(word) + more, word


def test_half_a_block_keeps_no_more_than_its_ops():
    def kept(fn):
        fn = functools.partial(fn, heads=4, kv_heads=2, causal=True)
        leaves = jax.tree.leaves(jax.vjp(fn, *half_block(4, 2))[1])
        # Vectors are arguments, which are there anyway.
        return collections.Counter(leaf.shape for leaf in leaves if leaf.ndim > 1)

    assert kept(pre_norm_self_attention) <= kept(half_block_by_ops)


def two_half_blocks(fn, x, *arrays, **options):
    return fn(fn(x, *arrays, **options), *arrays, **options)


def two_normed_half_blocks(x, *arrays, **options):
    normed = normed_rows(x)
    for _ in range(2):
        x, normed = pre_norm_self_attention(x, *arrays, normed=normed, **options)
    return x, normed


@pytest.mark.parametrize("backend", ["pallas", "xla"])
def test_half_blocks_hand_on_the_stream_normalized(backend):
    arrays = half_block(4, 2)
    options = {"heads": 4, "kv_heads": 2, "causal": True}

    def by_ops(*arrays):
        return two_half_blocks(half_block_by_ops, *arrays, **options)

    def handed_on(*arrays):
        return two_normed_half_blocks(*arrays, backend=backend, **options)

    expected = with_gradients(by_ops, arrays)
    assert_close(with_gradients(lambda *a: handed_on(*a)[0], arrays), expected, "float32")
    x, normed = handed_on(*arrays)
    assert_close(tuple(normed), tuple(normed_rows(x)), "float32")


def test_what_does_not_fit_half_a_block_is_refused():
    x, scale, norm_bias, weight, bias, out_weight, out_bias = half_block(4, 2)
    fn = functools.partial(pre_norm_self_attention, heads=4, kv_heads=2)
    with pytest.raises(ValueError, match=r"out_weight has shape \(5, 32\); it must be \(32, D_out"):
        fn(x, scale, norm_bias, weight, bias, out_weight.T, out_bias)
    with pytest.raises(ValueError, match=r"out_weight has shape \(32, 4\); it must be \(32, 5\)"):
        fn(x, scale, norm_bias, weight, bias, out_weight[:, :4])
    with pytest.raises(ValueError, match=r"scale has shape \(4,\); it must be \(5,\)"):
        fn(x, scale[:4], norm_bias, weight, bias, out_weight)
    with pytest.raises(TypeError, match="norm_bias has dtype float16; it must have the dtype of"):
        fn(x, scale, norm_bias.astype(jnp.float16), weight, bias, out_weight)
    with pytest.raises(TypeError, match="out_bias has dtype float16; it must have the dtype of"):
        fn(x, scale, norm_bias, weight, bias, out_weight, out_bias.astype(jnp.float16))
    normed = normed_rows(x)
    with pytest.raises(TypeError, match="normed is of type tuple; it must be a NormedRows"):
        fn(x, scale, norm_bias, weight, bias, out_weight, normed=tuple(normed))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"normed.rows has shape \(1, 6, 5\); it must be \(2, 6, 5\)"
    ):
        fn(x, scale, norm_bias, weight, bias, out_weight, normed=normed_rows(x[:1]))
    with pytest.raises(ValueError, match=r"normed.rstd has shape \(2,\); it must be \(2, 6\)"):
        short = normed._replace(rstd=normed.rstd[:, 0])
        fn(x, scale, norm_bias, weight, bias, out_weight, normed=short)
    with pytest.raises(ValueError, match=r"qkv has shape \(2, 6, 64\); .* of 5 queries and 5 keys"):
        pre_norm_self_attention(x, scale, norm_bias, weight, bias, out_weight, heads=5)


# The product before attention's backward fits its sums: whole tiles, and enough of them.
FITTING = {"N": 6, "K": 6, "H": 64, "B": 72, "T": 128, "D": 96, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({}, True),
        ({"dtype": "float16", "T": 384, "B": 23}, True),
        ({"dtype": "float32"}, False),
        ({"T": 100}, False),
        ({"H": 128}, False),
        ({"K": 3}, False),
        ({"B": 8}, False),
        ({"D": 98}, False),
    ],
)
def test_the_product_before_attention_s_backward_has_its_sums(changed, fits, on_hopper):
    sizes = FITTING | changed
    arrays = jax.eval_shape(lambda: half_block(**sizes))
    options = {"heads": sizes["N"], "kv_heads": sizes["K"], "causal": True, "backend": "cuda"}
    fn = functools.partial(pre_norm_self_attention, **options)
    program = lower_for_cuda(lambda *a: with_gradients(fn, a), *arrays)
    assert program.count("@jaxllm_matmul_head_sums(") == fits
    (call,) = re.findall(r"@jaxllm_self_attention_backward\((.*)", program)
    assert ("tensor<0xf32>" in call) != fits


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ({}, {"causal": True}),
        ({"dtype": "float16", "N": 5, "K": 5, "B": 73, "D": 200}, {"causal": True}),
        ({"T": 640, "B": 14}, {"window": 100, "attention_scale": 0.3}),
        ({"T": 256, "B": 36}, {"causal": True, "segments": True}),
        ({"T": 1024, "B": 9}, {"causal": True, "attention_scale": -0.1}),
    ],
)
def test_half_a_block_has_the_gradients_of_its_ops(changed, options):
    sizes = FITTING | changed
    arrays = half_block(**sizes)
    if options.get("segments"):
        ids = documents(sizes["B"], sizes["T"])
        options = {"causal": True, "segment_ids": ids}
    options = {"heads": sizes["N"], "backend": "cuda"} | options
    fn = functools.partial(pre_norm_self_attention, **options)
    found = with_gradients(fn, arrays)
    by_ops = functools.partial(half_block_by_ops, **options)
    expected = with_gradients(by_ops, [x.astype("float32") for x in arrays])
    assert_close(found, expected, sizes["dtype"], with_gradients(by_ops, arrays))
    again = with_gradients(fn, arrays)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_blocks_on_hopper_hand_on_the_stream_normalized(dtype):
    sizes = FITTING | {"D": 768, "N": 12, "K": 12, "dtype": dtype}
    arrays = half_block(**sizes)
    options = {"heads": 12, "causal": True}

    def run(arrays, **more):
        fn = functools.partial(two_normed_half_blocks, **options, **more)
        return with_gradients(lambda *a: fn(*a)[0], arrays), tuple(fn(*arrays)[1])

    found, again = run(arrays, backend="cuda"), run(arrays, backend="cuda")
    expected = run([x.astype("float32") for x in arrays], backend="xla")
    same_dtype = run(arrays, backend="xla")
    for part in range(2):
        assert_close(found[part], expected[part], dtype, same_dtype[part])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.gpu
def test_a_mapped_half_block_has_the_gradients_of_each():
    first = half_block(**FITTING)
    second = [2 * x for x in first]
    stacked = [jnp.stack(pair) for pair in zip(first, second, strict=True)]
    fn = functools.partial(pre_norm_self_attention, heads=FITTING["N"], causal=True, backend="cuda")
    mapped = jax.vmap(lambda *a: with_gradients(fn, a))(*stacked)
    for i, arrays in enumerate((first, second)):
        found = jax.tree.map(lambda x, i=i: x[i], mapped)
        assert_close(found, with_gradients(fn, arrays), "bfloat16")


@pytest.mark.parametrize("width", [32, 64, 96, 128])
def test_self_attention_runs_where_attention_does(pretend_cudnn, width, monkeypatch):
    monkeypatch.setattr("jaxllm.core.ffi.unavailable_reason", lambda *_: None)
    monkeypatch.setattr("jaxllm.core.ffi.device", lambda: ffi.H100)
    arrays = layer(2, 1, H=width, dtype="bfloat16")

    def choices(fn):
        fn = functools.partial(fn, heads=2, kv_heads=1, causal=True)
        gradient = jax.grad(lambda *a: fn(*a).sum())
        calls = jaxllm.explain(gradient, *arrays).calls
        return [call.on_gpu for call in calls if not call.stem.startswith("linear")]

    assert choices(self_attention) == choices(two_ops)


def test_projections_that_do_not_fit_self_attention_are_refused():
    x, weight, bias = layer(4, 2)
    with pytest.raises(ValueError, match=r"x has shape \(6, 5\); it must be \(B, T, D\)"):
        self_attention(x[0], weight, bias, 4, 2)
    with pytest.raises(ValueError, match=r"weight has shape \(64, 5\); it must be \(5, P\)"):
        self_attention(x, weight.T, bias, 4, 2)
    with pytest.raises(ValueError, match=r"bias has shape \(63,\); it must be \(64,\)"):
        self_attention(x, weight, bias[1:], 4, 2)
    with pytest.raises(ValueError, match=r"qkv has shape \(2, 6, 64\); it must be \(B, T, 9\*H\)"):
        self_attention(x, weight, bias, 3)
    with pytest.raises(TypeError, match="bias has dtype bfloat16; it must have the dtype of x"):
        self_attention(x, weight, bias.astype(jnp.bfloat16), 4, 2)
    with pytest.raises(ValueError, match=r"segment_ids has shape \(2, 5\); it must be \(2, 6\)"):
        self_attention(x, weight, bias, 4, 2, segment_ids=jnp.zeros((2, 5), jnp.int32))
    with pytest.raises(ValueError, match="window is 0; it must be at least 1"):
        self_attention(x, weight, bias, 4, 2, window=0)


def in_float8(x):
    """The array over a scale for each head, and the scales."""
    scale = jnp.abs(x).max(axis=(0, 1, 3)) / 448
    return (x / scale[:, None]).astype(jnp.float8_e4m3fn), scale


def float8_attention(q, k, v, **options):
    (q, q_scale), (k, k_scale), (v, v_scale) = (in_float8(x) for x in (q, k, v))
    return flash_attention_float8(q, k, v, q_scale, k_scale, v_scale, **options)


def test_float8_loses_what_its_docstring_says():
    q, k, v = arrays(B=1, T=512, N=4, K=2, H=64)
    out = float8_attention(q, 3 * k, 5 * v, causal=True, backend="xla")
    expected = flash_attention(q, 3 * k, 5 * v, causal=True)
    lost = jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected)
    assert out.dtype == jnp.bfloat16
    assert 0.03 < lost < 0.08


def test_float8_asks_for_a_scale_for_each_head():
    q, k, v = (x.astype(jnp.float8_e4m3fn) for x in arrays(N=4, K=2))
    four, two = jnp.ones(4), jnp.ones(2)
    with pytest.raises(ValueError, match=r"k_scale has shape \(4,\); it must be \(2,\)"):
        flash_attention_float8(q, k, v, four, four, two)
    with pytest.raises(TypeError, match="v_scale has dtype bfloat16; it must be float32"):
        flash_attention_float8(q, k, v, four, two, two.astype(jnp.bfloat16))


# The CUDA kernels.


@pytest.mark.parametrize("turned", [False, True])
def test_the_cuda_kernels_read_and_write_the_projection_where_it_stands(turned):
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    _, qkv = projection(4, 2, H=16, dtype="bfloat16")
    angles = rope_table(jnp.arange(6), 16, theta=100.0) if turned else None

    def gradient(qkv, angles):
        run = lambda qkv: flash_attention_packed(  # noqa: E731
            qkv, 4, 2, rope_table=angles, causal=True, backend="cuda"
        )
        out, pull = jax.vjp(run, qkv)
        return pull(out)[0]

    program = lower_for_cuda(gradient, qkv, angles)
    for direction, operands in (("forward", 1), ("backward", 4)):
        (call,) = (
            line
            for line in program.splitlines()
            if f"@jaxllm_flash_attention_packed_{direction}(" in line
        )
        arguments = call[call.index("(") + 1 : call.index(")")]
        assert len(arguments.split(",")) == operands + 2 * turned
        assert "heads = 4 : i64" in call
        assert f"rope = {str(turned).lower()}" in call
    for pass_over_memory in ("slice", "concatenate", "transpose", "pad"):
        assert f"stablehlo.{pass_over_memory}" not in program


@pytest.mark.parametrize("segments", [False, True])
def test_self_attention_asks_its_kernel_for_the_gradient_of_the_bias(segments):
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    arrays = layer(4, 2, H=64, dtype="bfloat16")
    segment_ids = jnp.zeros((2, 6), jnp.int32) if segments else None
    options = {"causal": True, "segment_ids": segment_ids, "backend": "cuda"}
    fn = functools.partial(self_attention, heads=4, kv_heads=2, **options)
    program = lower_for_cuda(lambda *a: with_gradients(fn, a), *arrays)
    found = sorted(set(re.findall(r"@jaxllm_(\w+)", program)))
    assert found == ["flash_attention_packed_forward", "self_attention_backward"]
    assert len(re.findall("dot_general", program)) == 3
    for pass_over_memory in ("reduce", "slice", "concatenate", "pad"):
        assert f"stablehlo.{pass_over_memory}" not in program
    (call,) = (line for line in program.splitlines() if "@jaxllm_self_attention_backward(" in line)
    arguments = call[call.index("(") + 1 : call.index(")")]
    # What is known of dout, nothing here, is two more.
    assert len(arguments.split(",")) == 6 + 2 * segments
    assert "rope = false" in call
    results = call[call.rindex("->") :]
    assert "tensor<512xbf16>" in results  # the gradient of the bias


@pytest.mark.parametrize(
    ("H", "T", "floats"), [(64, 200, 2 * 2 * 3 * 4 * 64), (128, 200, 2 * 4 * 2 * 4 * 128)]
)
def test_self_attention_has_room_for_partial_sums_of_each_tile(H, T, floats, monkeypatch):
    q, *_ = arrays(T=T, H=H, dtype="bfloat16")
    columns = (4 + 2 * 2) * H
    monkeypatch.setattr(ffi, "device", lambda: ffi.H100)
    assert cuda._bias_partial(q, columns, None).size == floats
    # Where the kernels for every GPU serve the call: with a softcap, and elsewhere.
    assert cuda._bias_partial(q, columns, 5.0).size == 2 * T * columns
    monkeypatch.setattr(ffi, "no_hopper_reason", lambda: "there is none")
    assert cuda._bias_partial(q, columns, None).size == 2 * T * columns


def test_float8_goes_to_its_kernel():
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    q, k, v = arrays(N=4, K=2)
    program = lower_for_cuda(lambda *x: float8_attention(*x, backend="cuda"), q, k, v)
    assert "@jaxllm_flash_attention_float8(" in program
    with pytest.raises(jaxllm.BackendError, match="q has dtype float32; the kernel takes float8"):
        flash_attention_float8(q, k, v, jnp.ones(4), jnp.ones(2), jnp.ones(2), backend="cuda")


@pytest.mark.parametrize("segments", [False, True])
def test_the_program_for_a_gpu_holds_the_cuda_kernels(segments):
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    q, k, v = arrays(N=4, K=2, dtype="bfloat16")
    segment_ids = jnp.zeros((2, 6), jnp.int32) if segments else None
    options = {"causal": True, "window": 3, "softcap": 5, "segment_ids": segment_ids}
    program = lower_for_cuda(lambda q, k, v: gradients(q, k, v, **options, backend="cuda"), q, k, v)
    for direction, operands in (("forward", 3), ("backward", 6)):
        (call,) = (
            line for line in program.splitlines() if f"@jaxllm_flash_attention_{direction}(" in line
        )
        arguments = call[call.index("(") + 1 : call.index(")")]
        assert len(arguments.split(",")) == operands + 2 * segments
        assert "window = 3 : i64" in call
        assert "softcap = 5.000000e+00 : f32" in call


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"H": 257}, "heads are 257 wide; the kernel takes at most 256"),
        ({"N": 0, "K": 1}, "q has no heads"),
        ({"dtype": "float8_e4m3fn"}, "q has dtype float8_e4m3fn; the kernel takes"),
    ],
)
def test_what_the_cuda_kernels_cannot_serve_is_named(shapes, reason, monkeypatch):
    monkeypatch.setattr("jaxllm.core.ffi.unavailable_reason", lambda *_: None)
    B, T, N, H = 1, 6, shapes.get("N", 2), shapes.get("H", 8)
    dtype = jnp.dtype(shapes.get("dtype", "bfloat16"))
    q = jax.ShapeDtypeStruct((B, T, N, H), dtype)
    k = jax.ShapeDtypeStruct((B, T, shapes.get("K", N), H), dtype)
    with pytest.raises(jaxllm.BackendError, match=reason):
        jax.eval_shape(lambda *qkv: flash_attention(*qkv, backend="cuda"), q, k, k)


def unfused(q, k, v, *, causal=False, scale=None, window=None, softcap=None, segment_ids=None):
    """Attention one op at a time, each of which gives arrays in the dtype of ``q``."""
    (T, N, H), (S, K) = q.shape[1:], k.shape[1:3]
    k, v = (repeat_kv(x, N // K, backend="xla") for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (H**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    mask = reference._mask(T, S, causal, window, segment_ids)
    mask = mask[:, 0] if mask.ndim == 5 else mask
    weights = softmax(jnp.where(mask, scores, -jnp.inf), backend="xla")
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def documents(B, length):
    """Segments of unequal lengths, one after the other, which begin elsewhere in each sequence."""
    return jnp.array([[(5 * i + 37 * b) // length for i in range(length)] for b in range(B)])


def check_cuda_kernels(q, k, v, but=(), **options):
    """Both passes lose no more than those of one op at a time, twice over, lose by rounding."""
    dtype = q.dtype.name
    # Made outside of jit, where XLA might leave out the rounding.
    dout = jax.random.normal(jax.random.key(1), q.shape, jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=0)
    def run(attention, q, k, v, dout):
        out, pull = jax.vjp(lambda *qkv: attention(*qkv, **options), q, k, v)
        return out, *pull(dout.astype(out.dtype))

    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v)]
        exact = jax.tree.map(np.asarray, run(reference.flash_attention, *wide, dout))
    with jax.default_matmul_precision("highest"):
        plain = run(unfused, q, k, v, dout)
    found = run(functools.partial(flash_attention, backend="cuda"), q, k, v, dout)
    for name, a, e, p in zip(("out", "dq", "dk", "dv"), found, exact, plain, strict=True):
        if name in but:
            continue
        # Float32 is as exact as its order of summation lets it be.
        allowed = tolerance(dtype) if dtype == "float32" else 2 * error(p, e)
        assert error(a, e) <= min(allowed, tolerance(dtype)), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("H", [32, 40, 64, 96, 128, 200, 256])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((301, 301), {"causal": True}),
        ((301, 301), {}),
        ((97, 517), {"causal": True, "window": 90}),
        ((517, 97), {"causal": True}),
        ((517, 301), {"window": 70, "softcap": 3.0}),
        ((301, 517), {"segments": True, "scale": -0.1}),
        ((301, 301), {"segments": True, "causal": True, "softcap": 5.0, "window": 99}),
        ((301, 301), {"segments": True, "causal": True}),
        ((301, 517), {"segments": True, "window": 120}),
    ],
)
def test_cuda_kernels_of_any_tile(dtype, H, lengths, options):
    T, S = lengths
    q, k, v = arrays(T=T, S=S, N=6, K=2, H=H, dtype=dtype)
    options = dict(options)
    if options.pop("segments", False):
        options["segment_ids"] = (documents(2, T), documents(2, S))

    check_cuda_kernels(q, k, v, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rise", [-40.0, 0.5, 6.0, 12.0, 25.0])
def test_cuda_kernels_follow_scores_that_rise_from_tile_to_tile(dtype, H, causal, rise):
    q, k, v = arrays(T=700, N=2, K=2, H=H, dtype="float32")
    # So many factors of two for 64 keys, towards the first, which the kernels visit last.
    towards_first = jnp.arange(700)[::-1, None] / 64 * rise * np.log(2)
    q = q.at[..., 0].set(1.0)
    k = k.at[..., 0].set(towards_first * H**0.5)
    # Numbers as large as that column's leave no precision to sums whose terms cancel, as dq's do.
    check_cuda_kernels(*(x.astype(dtype) for x in (q, k, v)), but=("dq",), causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cuda_kernels_stand_huge_scores_and_rows_without_keys(dtype):
    q, k, v = arrays(T=150, S=90, H=64, dtype=dtype)
    options = {"causal": True, "backend": "cuda"}
    out = flash_attention(1e4 * q, k, v, **options)
    assert not out[:, :60].any()
    assert np.isfinite(np.asarray(out, np.float32)).all()
    for x in gradients(1e4 * q, k, v, **options):
        assert np.isfinite(np.asarray(x, np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("H", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("pairs", "interleaved"), [(2, False), (2, True), (8, False), (8, True)])
def test_cuda_kernels_turn_heads_of_any_tile(dtype, H, pairs, interleaved):
    """All columns of a head, or an eighth of them."""
    _, qkv = projection(4, 2, H=H, T=150, dtype=dtype)
    angles = rope_table(jnp.arange(150), 2 * (H // pairs), theta=1000.0)
    options = {"rope_table": angles, "interleaved": interleaved, "causal": True}

    # Made outside of jit, where XLA might leave out the rounding.
    dout = jax.random.normal(jax.random.key(1), (2, 150, 4 * H), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=2)
    def run(qkv, dout, backend):
        attention = functools.partial(flash_attention_packed, heads=4, kv_heads=2, backend=backend)
        out, pull = jax.vjp(lambda qkv: attention(qkv, **options), qkv)
        return out, pull(dout.astype(out.dtype))[0]

    with jax.default_matmul_precision("highest"):
        expected = run(qkv.astype(jnp.float32), dout, "xla")
        plain = run(qkv, dout, "xla")
    found = run(qkv, dout, "cuda")
    for a, e, p in zip(found, expected, plain, strict=True):
        assert error(a, e) <= tolerance(dtype, error(p, e))


@pytest.mark.gpu
@pytest.mark.parametrize("H", [30, 64, 128, 192])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 50}, {"softcap": 3.0}])
def test_the_float8_kernel_rounds_no_more_than_bfloat16_does(H, options):
    q, k, v = arrays(T=130, S=170, N=4, K=2, H=H)
    found, expected = (float8_attention(q, k, v, **options, backend=b) for b in ("cuda", "xla"))
    assert error(found, expected) <= tolerance("bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("segments", [False, True])
def test_a_mapped_float8_call_has_scales_for_each(segments):
    calls = [
        arrays(T=70, S=90, N=4, K=2, H=64),
        [x * 3 for x in arrays(T=70, S=90, N=4, K=2, H=64)],
    ]
    # The scales of a call are not those of the other, and the numbers are.
    q, k, v = (jnp.stack(x) for x in zip(*calls, strict=True))
    ids = (documents(2, 70), documents(2, 90)) if segments else None
    fn = functools.partial(float8_attention, segment_ids=ids, causal=True, backend="cuda")
    mapped = jax.vmap(fn)(q, k, v)
    for i, call in enumerate(calls):
        np.testing.assert_array_equal(
            np.asarray(mapped[i], np.float32), np.asarray(fn(*call), np.float32)
        )


# The shared memory that a CTA may take, by the compute capability of the GPU.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


def gpu_with(shared_kib, capability=86):
    return dataclasses.replace(
        ffi.H100,
        capability=capability,
        shared_bytes=shared_kib << 10,
        has_sm90a=capability == 90,
    )


def predicates(H, dtype):
    """What the forward, the backward and decoding say of heads so wide."""
    q, k = (jax.ShapeDtypeStruct((2, 6, heads, H), dtype) for heads in (4, 2))
    lse = jax.ShapeDtypeStruct((2, 4, 6), jnp.float32)
    one = jax.ShapeDtypeStruct((2, 4, H), dtype)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    return (
        cuda.flash_attention_unsupported(q, k, k, None, None),
        cuda.flash_attention_backward_unsupported(q, k, k, q, lse, q, None, None),
        cuda_decode.decode_attention_unsupported(one, k, k, lengths, None, None),
    )


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_every_gpu_has_the_shared_memory_that_attention_needs(capability, monkeypatch):
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    names = ("flash_attention", "decode_attention")
    needs = {k: need for k, need in ffi.shared_needs().items() if k.startswith(names)}
    assert len(needs) == 15
    assert max(needs.values()) <= SHARED_KIB[capability] << 10
    monkeypatch.setattr(ffi, "device", lambda: gpu_with(SHARED_KIB[capability], capability))
    for dtype in ("float32", "bfloat16", "float16"):
        for H in range(1, 257):
            assert predicates(H, dtype) == (None, None, None), (dtype, H)


@pytest.mark.parametrize(
    ("kernel", "dtype", "widths", "direction"),
    [
        ("flash_attention_forward_96", "bfloat16", range(65, 97), 0),
        ("flash_attention_forward_256", "float16", range(129, 257), 0),
        ("flash_attention_backward_32", "bfloat16", range(1, 33), 1),
        ("flash_attention_backward_256", "bfloat16", range(129, 257), 1),
        ("decode_attention", "float16", (64, 128), 2),
    ],
)
def test_what_does_not_fit_the_gpu_is_declined(kernel, dtype, widths, direction, monkeypatch):
    monkeypatch.setattr(ffi, "shared_needs", lambda: {kernel: 100 << 10})
    for shared_kib, declined in ((99, set(widths)), (100, set())):
        monkeypatch.setattr(ffi, "device", lambda kib=shared_kib: gpu_with(kib))
        reasons = {H: predicates(H, dtype) for H in range(1, 257)}
        assert {H for H, found in reasons.items() if found[direction]} == declined
        for H in declined:
            assert "takes 100.0 KiB of shared memory; this GPU has 99" in reasons[H][direction]
            assert sum(reason is not None for reason in reasons[H]) == 1
    # Of what is not known nothing is held against a kernel.
    monkeypatch.setattr(ffi, "device", lambda: None)
    assert all(predicates(H, dtype) == (None, None, None) for H in widths)


@pytest.mark.parametrize("direction", [0, 1])
def test_float32_tiles_that_do_not_fit_the_gpu_are_declined(direction, monkeypatch):
    monkeypatch.setattr(ffi, "shared_needs", lambda: {"flash_attention_float32_128": 100 << 10})
    monkeypatch.setattr(ffi, "device", lambda: gpu_with(99))
    declined = {H for H in range(1, 257) if predicates(H, "float32")[direction]}
    assert declined == set(range(65, 129))


@pytest.mark.parametrize(
    ("H", "dtype", "softcap", "served"),
    [
        (64, "bfloat16", None, True),
        (128, "float16", None, True),
        (64, "float32", None, False),
        (96, "bfloat16", None, False),
        (128, "bfloat16", 5.0, False),
    ],
)
def test_hopper_s_kernels_get_room_for_what_they_serve(H, dtype, softcap, served, monkeypatch):
    monkeypatch.setattr(ffi, "device", lambda: ffi.H100)
    rooms, told = [], []

    def call(_, results, *__, hopper, **___):
        rooms.append(results[-1])
        told.append(hopper)
        return results

    monkeypatch.setattr(ffi, "call", call)
    q, k, v = arrays(B=2, T=200, N=4, K=2, H=H, dtype=dtype)
    options = {"causal": True, "scale": 1.0, "window": None, "softcap": softcap}
    out, lse = cuda.flash_attention_forward(q, k, v, None, **options)
    cuda.flash_attention_backward(q, k, v, out, lse, out, None, **options)
    assert [room.size > 0 for room in rooms] == [served] * 2 == told
    assert rooms[1].size == 0 or rooms[1].size > q.size  # dq in float32, and more


@pytest.mark.hopper
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("H", [64, 128])
def test_hopper_s_kernels_agree_with_those_for_every_gpu(H, segments, monkeypatch):
    q, k, v = arrays(B=2, T=700, N=4, K=2, H=H, dtype="bfloat16")
    ids = jnp.arange(700)[None].repeat(2, 0) // 150 if segments else None
    options = {"causal": True, "segment_ids": ids, "backend": "cuda"}

    def run():
        return flash_attention(q, k, v, **options), *gradients(q, k, v, **options)

    found = run()
    monkeypatch.setattr(cuda, "_is_for_hopper", lambda *_: False)
    jax.clear_caches()
    expected = run()
    for x, y in zip(found, expected, strict=True):
        assert error(x, y) < tolerance("bfloat16")
    # Tiles of other sizes round otherwise, so that equal bits would come from the same kernel.
    assert any((x != y).any() for x, y in zip(found, expected, strict=True))


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("H", [64, 128])
# More queries than keys see some keys alike; an odd number of tiles has one in the middle.
@pytest.mark.parametrize(("T", "S"), [(1900, 1900), (1024, 1024), (1700, 1100), (900, 1550)])
def test_backward_in_halves_matches_the_kernels_for_every_gpu(dtype, H, T, S, monkeypatch):
    # More tiles of 128 keys than SMs, so that the SMs take several, and less than 16 for each.
    tiles, gpu = -(-S // 128), ffi.device()
    assert gpu is not None
    K = 2 * gpu.multiprocessors // tiles + 1
    assert gpu.multiprocessors < K * tiles < 16 * gpu.multiprocessors
    q, k, v = arrays(B=1, T=T, S=S, N=2 * K, K=K, H=H, dtype=dtype)
    found = gradients(q, k, v, causal=True, backend="cuda")
    again = gradients(q, k, v, causal=True, backend="cuda")
    for x, y in zip(found, again, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
    monkeypatch.setattr(cuda, "_is_for_hopper", lambda *_: False)
    jax.clear_caches()
    expected = gradients(q, k, v, causal=True, backend="cuda")
    for x, y in zip(found, expected, strict=True):
        assert error(x, y) < tolerance(dtype)
    assert any((x != y).any() for x, y in zip(found, expected, strict=True))


# What the environment says of this GPU, and tests whose kernels then take other decisions.
SMALLER_GPUS = {
    ("JAXLLM_MAX_SHARED_KIB", 99): "any_tile and (200 or 256) or see_nothing",
    ("JAXLLM_MAX_SHARED_KIB", 163): "any_tile and 256 or see_nothing",
    ("JAXLLM_MAX_SMS", 14): "any_tile and (64 or 128) or see_nothing or halves",
}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("variable", "value"), SMALLER_GPUS)
def test_kernels_serve_smaller_gpus(variable, value):
    def run(*command):
        return subprocess.run(
            [sys.executable, *command],
            env=os.environ | {variable: str(value)},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )

    facts = run("-c", "from jaxllm import ffi; print(ffi.device())")
    gpu = ffi.device()
    assert gpu is not None
    if "SHARED" in variable:
        fact = f"shared_bytes={min(value << 10, gpu.shared_bytes)},"
    else:
        fact = f"multiprocessors={min(value, gpu.multiprocessors)},"
    assert fact in facts.stdout, facts
    names = f"({SMALLER_GPUS[variable, value]}) and bfloat16 and not pallas"
    files = [__file__, str(Path(__file__).with_name("test_decode_attention.py"))]
    options = [
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-m",
        "gpu",
        "-k",
        names,
    ]
    tests = run("-m", "pytest", *options, *files)
    assert tests.returncode == 0, tests.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", tests.stdout)[0]) > 20, tests.stdout[-4000:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize(("N", "K"), [(2, 2), (6, 2)])
@pytest.mark.parametrize(
    ("T", "options"),
    [
        (1, {"causal": True}),
        (63, {}),
        (64, {"causal": True}),
        (65, {"causal": True}),
        (128, {"window": 5}),
        (200, {"causal": True, "window": 70}),
        (301, {"segments": True, "causal": True}),
        (1100, {"causal": True}),
        (301, {"scale": -0.1}),  # not for Hopper's own kernels
    ],
)
def test_the_gradient_of_a_bias_comes_with_those_of_attention(dtype, H, N, K, T, options):
    _, qkv = projection(N, K, H=H, T=T, dtype=dtype)
    dout = cotangents_like(jax.ShapeDtypeStruct((2, T, N * H), dtype))
    options = {
        "causal": False,
        "scale": H**-0.5,
        "window": None,
        "heads": N,
        "kv_heads": K,
    } | options
    ids = (documents(2, T),) * 2 if options.pop("segments", False) else None
    options |= {"softcap": None, "interleaved": False}
    out, lse = cuda.flash_attention_packed_forward(qkv, ids, None, **options)
    arrays = (qkv, out, lse, dout, ids, None)
    expected = cuda.flash_attention_packed_backward(*arrays, **options)
    dqkv, dbias = cuda.self_attention_backward(*arrays, **options)
    assert error(dqkv, expected) == 0
    assert error(cuda.self_attention_backward(*arrays, **options)[1], dbias) == 0

    exact = np.asarray(dqkv, np.float64).sum(axis=(0, 1))
    of_queries, of_keys, _ = np.split(exact, [N * H, (N + K) * H])
    if ffi.no_hopper_reason() is None and options["scale"] > 0:
        of_values = np.asarray(dout, np.float64).reshape(-1, K, N // K, H).sum(axis=(0, 2))
        np.testing.assert_array_equal(np.asarray(dbias[N * H : (N + K) * H], np.float64), 0)
        exact = np.concatenate([of_queries, 0 * of_keys, of_values.ravel()])
    # Rounded once: half a place in the last of 8 or 11 bits, and the sums in float32 before it.
    np.testing.assert_allclose(
        np.asarray(dbias, np.float64),
        exact,
        rtol=float(jnp.finfo(dtype).eps),
        atol=1e-5 * abs(exact).max() + float(jnp.finfo(dtype).smallest_subnormal),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("H", [40, 64, 128])
def test_a_mapped_self_attention_has_the_gradient_of_each_bias(H):
    first = layer(4, 2, H=H, T=150, dtype="bfloat16")
    second = [2 * x for x in first]
    stacked = [jnp.stack(pair) for pair in zip(first, second, strict=True)]

    fn = functools.partial(self_attention, heads=4, kv_heads=2, causal=True, backend="cuda")
    run = lambda *arrays: with_gradients(fn, arrays)  # noqa: E731
    mapped = jax.vmap(run)(*stacked)
    for i, arrays in enumerate((first, second)):
        assert_close(jax.tree.map(lambda x, i=i: x[i], mapped), run(*arrays), "bfloat16")


# The Pallas kernels of flash attention, in tiles so small that short sequences have many.

SMALL_TILES = Tiles(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))


def both_passes(module, q, k, v, segment_ids=None, /, **options):
    """``(out, lse, dq, dk, dv)`` of an implementation."""
    static = {"causal": False, "scale": 0.25, "window": None, "softcap": None} | options
    dout = jnp.cos(jnp.arange(q.size)).reshape(q.shape).astype(q.dtype)

    @jax.jit
    def run(q, k, v, dout):
        out, lse = module.flash_attention_forward(q, k, v, segment_ids, **static)
        arrays = (q, k, v, out, lse, dout, segment_ids)
        return out, lse, *module.flash_attention_backward(*arrays, **static)

    return run(q, k, v, dout)


def pallas_passes(q, k, v, segment_ids=None, /, **options):
    options |= {"tiles": SMALL_TILES, "interpret": jax.default_backend() != "gpu"}
    return both_passes(pallas_flash, q, k, v, segment_ids, **options)


def check_small_tiles(q, k, v, segment_ids=None, **options):
    with jax.enable_x64(True):
        wide_q, wide_k, wide_v = (jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v))
        expected = both_passes(reference, wide_q, wide_k, wide_v, segment_ids, **options)
        expected = [np.asarray(x) for x in expected]
    narrow = both_passes(reference, q, k, v, segment_ids, **options)
    found = pallas_passes(q, k, v, segment_ids, **options)
    assert_close(found, expected, q.dtype, narrow)


@pytest.mark.parametrize(("T", "S"), [(64, 64), (49, 83), (83, 49)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": 20},
        {"window": 5, "softcap": 2.0},
        {"causal": True, "window": 34, "scale": -0.25},
    ],
)
def test_pallas_walks_over_blocks_whole_and_cut(T, S, options):
    q, k, v = arrays(T=T, S=S, K=2, H=16)
    check_small_tiles(q, k, v, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pallas_walks_over_blocks_that_share_segments(dtype):
    of_query = np.sort(np.random.default_rng(0).integers(6, size=(2, 70)), axis=1)
    of_key = np.sort(np.random.default_rng(1).integers(1, 7, size=(2, 90)), axis=1)
    segments = (jnp.array(of_query, jnp.int32), jnp.array(of_key, jnp.int32))
    q, k, v = arrays(T=70, S=90, K=1, H=40, dtype=dtype)
    check_small_tiles(q, k, v, segments)
    check_small_tiles(q, k, v, segments, causal=True)


@pytest.mark.parametrize("by", ["window", "segments"])
def test_pallas_reads_no_block_that_is_hidden(by):
    q, k, v = arrays(T=16, S=64)
    hidden = jnp.arange(64)[None, :, None, None] < 32
    k, v = (jnp.where(hidden, jnp.nan, x) for x in (k, v))
    if by == "window":
        results = pallas_passes(q, k, v, causal=True, window=8)
    else:
        segments = (jnp.ones((2, 16), jnp.int32), (jnp.arange(64) // 32).repeat(2).reshape(64, 2).T)
        results = pallas_passes(q, k, v, segments)
    out, lse, dq, dk, dv = results
    assert all(np.isfinite(x).all() for x in (out, lse, dq))
    assert all(np.isfinite(x).all() and not x[:, :32].any() for x in (dk, dv))


@pytest.mark.parametrize(("T", "S"), [(40, 40), (23, 61), (61, 23), (1, 50)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 30, 70])
def test_pallas_visits_what_is_seen_and_masks_what_is_cut(T, S, causal, window):
    q, k = (jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32) for length in (T, S))
    problem = pallas_flash._Problem.of(q, k, causal, 1.0, window, None, True)
    seen = np.asarray(reference._mask(T, S, causal, window, None))
    tile = Tile(8, 4, 1, 1)
    for size, their_size, mask, bounds_of in (
        (tile.queries, tile.keys, seen, pallas_flash._visible_keys),
        (tile.keys, tile.queries, seen.T, pallas_flash._seeing_queries),
    ):
        for i in range(-(-len(mask) // size)):
            visits = []
            pallas_flash._walk(
                lambda rows, _, edge, to=visits: to.append((int(rows.start) // rows.size, edge)),
                bounds_of(jnp.int32(i), None, problem, tile), their_size, mask.shape[1], None,
                loop=lambda start, stop, body, carry: [body(j, carry) for j in range(start, stop)],
            )  # fmt: skip
            rows = mask[i * size : (i + 1) * size]
            cut = [rows[:, j : j + their_size] for j in range(0, mask.shape[1], their_size)]
            assert [j for j, _ in visits] == sorted({j for j, _ in visits})
            for j, block in enumerate(cut):
                edge = dict(visits).get(j)
                assert (edge is not None) == block.any()
                if edge is False:
                    assert block.all() and block.shape[1] == their_size


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ({"T": 1024, "H": 64}, {"causal": True}),
        ({"T": 1000, "S": 2100, "H": 128, "K": 1}, {"causal": True, "window": 300}),
        ({"T": 77, "H": 256}, {"softcap": 20.0, "window": 9}),
        ({"T": 1, "S": 300, "H": 96}, {"causal": True, "scale": -1.0}),
        ({"T": 9, "H": 5}, {"causal": True, "segment_ids": np.zeros((2, 9), np.int32)}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pallas_lowers_to_three_kernels_for_a_gpu(shapes, options, dtype):
    def gradient(*qkv):
        total = lambda *qkv: flash_attention(*qkv, **options, backend="pallas").sum()  # noqa: E731
        return jax.grad(total, argnums=(0, 1, 2))(*qkv)

    program = lower_for_cuda(gradient, *arrays(**shapes, dtype=dtype))
    for name in ("forward", "backward_keys", "backward_queries"):
        assert program.count(f'name = "_{name}_kernel"') == 1


def test_pallas_holds_no_scores():
    q, k, v = (jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.bfloat16) for _ in range(3))
    segments = jnp.zeros((1, 4096), jnp.int32)

    def gradient(backend):
        options = {"causal": True, "segment_ids": segments, "backend": backend}
        return jax.grad(lambda *qkv: flash_attention(*qkv, **options).sum(), argnums=(0, 1, 2))

    assert "4096x4096" in lower_for_cuda(gradient("xla"), q, k, v)
    assert "4096x4096" not in lower_for_cuda(gradient("pallas"), q, k, v)


def test_pallas_names_what_it_cannot_serve():
    q = jax.ShapeDtypeStruct((1, 4, 2, 257), jnp.bfloat16)
    call = lambda q: flash_attention(q, q, q, backend="pallas")  # noqa: E731
    with pytest.raises(jaxllm.BackendError, match="heads are 257 wide; the kernel takes at most"):
        jax.eval_shape(call, q)
    with jax.enable_x64(True), pytest.raises(jaxllm.BackendError, match="q has dtype float64"):
        call(jnp.zeros((1, 4, 2, 8), jnp.float64))


# softmax

BACKENDS = ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)]


def softmax_gradient(x, dout, **options):
    return jax.jit(lambda x, dout: jax.vjp(lambda x: softmax(x, **options), x)[1](dout)[0])(x, dout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("T", "S"), [(1, 1), (6, 6), (3, 7), (7, 3), (5, 33)])
def test_softmax_of_what_a_query_sees(T, S, backend):
    x = jax.random.normal(jax.random.key(0), (2, T, S))
    out = softmax(x, scale=1.5, causal=True, backend=backend)
    for b, t in np.ndindex(2, T):
        seen = max(0, t + S - T + 1)
        weights = np.exp(1.5 * np.asarray(x[b, t, :seen], np.float64))
        assert error(out[b, t, :seen], weights / weights.sum()) < 1e-6
        assert not out[b, t, seen:].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_does_not_see_what_the_mask_hides(backend):
    x = jax.random.normal(jax.random.key(0), (5, 9))
    hidden = jnp.where(jnp.tri(5, 9, 4, dtype=bool), x, jnp.nan)
    options = {"causal": True, "backend": backend}
    np.testing.assert_array_equal(softmax(hidden, **options), softmax(x, **options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_of_a_query_without_keys_is_zero_and_has_no_gradient(backend):
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
def test_softmax_of_huge_scores(width, dtype, backend):
    signs = jax.random.rademacher(jax.random.key(0), (4, width), dtype)
    x = 1e4 * signs
    out = softmax(x, backend=backend)
    expected = (signs > 0) / (signs > 0).sum(axis=-1, keepdims=True)
    assert error(out, expected) < tolerance(dtype)
    assert np.isfinite(softmax_gradient(x, signs, backend=backend)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_passes_over_scores_of_minus_infinity(backend):
    x = jax.random.normal(jax.random.key(0), (3, 50)).at[:, 7:].set(-jnp.inf).at[2].set(-jnp.inf)
    out = softmax(x, backend=backend)
    assert error(out[:2, :7], jax.nn.softmax(x[:2, :7])) < 1e-6
    assert not out[:, 7:].any()
    assert not out[2].any()


@pytest.mark.gpu
@pytest.mark.xdist_group("beyond 31 bits")
@pytest.mark.parametrize("backend", ["cuda", "pallas"])
def test_softmax_of_more_elements_than_an_int_counts(backend):
    # 9 GiB in all. The rows are checked in a few places, at the end above all.
    heads, T, S = 2049, 1024, 1024
    assert heads * T * S > 2**31
    options = {"scale": 0.5, "causal": True}

    @jax.jit
    def make(seed):
        head = jax.random.normal(jax.random.key(seed), (T, S), jnp.bfloat16)
        factors = 1 + jnp.arange(heads, dtype=jnp.bfloat16)[:, None, None] / heads
        return head * factors

    x = make(0)
    places = [0, 1, 1023, heads - 2, heads - 1]
    some_x = [x[i].astype(jnp.float32) for i in places]
    out = jax.jit(lambda x: softmax(x, **options, backend=backend))(x)
    del x
    for i, wanted in zip(places, some_x, strict=True):
        expected = reference.softmax(wanted, **options)
        assert error(out[i], expected) < tolerance("bfloat16")
    dout = make(1)
    op = {"cuda": cuda, "pallas": pallas}[backend]
    dx = jax.jit(lambda out, dout: op.softmax_backward(out, dout, **options))(out, dout)
    for i in places:
        some = out[i].astype(jnp.float32), dout[i].astype(jnp.float32)
        assert error(dx[i], reference.softmax_backward(*some, **options)) < tolerance("bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_of_rows_beyond_shared_memory(causal):
    x, dout = jax.random.normal(jax.random.key(0), (2, 3, 150001), jnp.bfloat16)
    out = softmax(x, causal=causal, backend="cuda")
    wide = x.astype(jnp.float32)
    assert error(out, reference.softmax(wide, causal=causal)) < tolerance("bfloat16")
    dx = softmax_gradient(x, dout, causal=causal, backend="cuda")
    expected = softmax_gradient(wide, dout.astype(jnp.float32), causal=causal, backend="xla")
    assert error(dx, expected) < tolerance("bfloat16")


def test_softmax_checks_its_argument():
    with pytest.raises(ValueError, match=r"x has shape \(\); it must be \(\.\.\., S\)"):
        softmax(jnp.zeros(()))
    with pytest.raises(ValueError, match=r"x has shape \(3,\); it must be \(\.\.\., T, S\)"):
        softmax(jnp.zeros(3), causal=True)
    with pytest.raises(TypeError, match="x has dtype int32; it must be a floating-point array"):
        softmax(jnp.zeros(3, jnp.int32))


@pytest.mark.parametrize("backend", ["cuda", "pallas"])
def test_softmax_names_what_its_kernels_cannot_serve(backend, monkeypatch):
    monkeypatch.setattr("jaxllm.core.ffi.unavailable_reason", lambda *_: None)
    with jax.enable_x64(True), pytest.raises(jaxllm.BackendError, match="x has dtype float64"):
        softmax(jnp.zeros(3, jnp.float64), backend=backend)


def test_pallas_leaves_long_rows_to_others():
    x = jax.ShapeDtypeStruct((2, 70000), jnp.bfloat16)
    with pytest.raises(jaxllm.BackendError, match="x has rows of 70000; the kernel takes at most"):
        jax.eval_shape(lambda x: softmax(x, backend="pallas"), x)


# repeat_kv


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_heads_stand_beside_each_other(backend):
    x = jax.random.normal(jax.random.key(0), (2, 3, 2, 8))
    out = repeat_kv(x, 3, backend=backend)
    for n in range(6):
        np.testing.assert_array_equal(out[:, :, n], x[:, :, n // 3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_repeated_head_is_summed_in_float32(backend):
    # In bfloat16 1 + 2^-8 + 2^-8 would stay at 1.
    dout = jnp.array([1.0, 2**-8, 2**-8], jnp.bfloat16)[None, None, :, None].repeat(8, axis=3)
    _, pull = jax.vjp(lambda x: repeat_kv(x, 3, backend=backend), dout[:, :, :1])
    np.testing.assert_array_equal(pull(dout)[0], jnp.full((1, 1, 1, 8), 1 + 2**-7, jnp.bfloat16))


def test_repeat_kv_checks_its_arguments():
    with pytest.raises(ValueError, match=r"x has shape \(3,\); it must be \(\.\.\., K, H\)"):
        repeat_kv(jnp.zeros(3), 2)
    with pytest.raises(ValueError, match="groups is 0; it must be at least 1"):
        repeat_kv(jnp.zeros((3, 4)), 0)
    with pytest.raises(TypeError, match="x has dtype int32; it must be a floating-point array"):
        repeat_kv(jnp.zeros((3, 4), jnp.int32), 2)
