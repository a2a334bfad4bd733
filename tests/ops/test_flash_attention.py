"""Flash attention: grouped heads, softcap, log-sum-exp, extreme scores and errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import (
    FLASH_BACKENDS,
    attention_arrays,
    attention_by_hand,
    attention_gradients,
    packed_arrays,
)

from jaxllm import ops
from jaxllm.nn import dot_product_attention
from jaxllm.ops import flash_attention, flash_attention_packed
from jaxllm.ops.attention import reference
from jaxllm.testing import error


def test_grouped_query_heads_match_repeated_kv_heads():
    q, k, v = attention_arrays(N=6, K=2)
    k3, v3 = (jnp.repeat(x, 3, axis=2) for x in (k, v))
    out = flash_attention(q, k, v, causal=True)
    assert error(out, attention_by_hand(q, k3, v3, lambda _, t, s: s <= t)) < 1e-6
    dq, dk, dv = attention_gradients(q, k, v, causal=True)
    expected = attention_gradients(q, k3, v3, causal=True)
    assert error(dq, expected[0]) < 1e-6
    for found, wanted in ((dk, expected[1]), (dv, expected[2])):
        assert error(found, wanted.reshape(2, 6, 2, 3, 8).sum(axis=3)) < 1e-6


def test_softcap_matches_tanh_of_the_scores():
    q, k, v = attention_arrays()
    scores = 2.0 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", 5 * q, k) / 2.0)
    expected = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
    assert error(flash_attention(5 * q, k, v, scale=1.0, softcap=2.0), expected) < 1e-6


def test_lse_matches_float64():
    q, k, v = attention_arrays(N=4, K=2, dtype="bfloat16")
    options = {"causal": False, "scale": 0.5, "window": None, "softcap": None}
    _, lse = reference.flash_attention_forward(q, k, v, None, **options)
    wide_q, wide_k = np.asarray(q, np.float64), np.repeat(np.asarray(k, np.float64), 2, axis=2)
    expected = np.log(np.exp(0.5 * np.einsum("btnh,bsnh->bnts", wide_q, wide_k)).sum(axis=-1))
    assert (lse.shape, lse.dtype) == ((2, 4, 6), jnp.float32)
    assert error(lse, expected) < 1e-6


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.covering(("dtype",), ("backend",))
def test_huge_scores_give_finite_outputs_and_gradients(dtype, backend):
    q, k, v = attention_arrays(dtype=dtype)
    options = {"causal": True, "scale": 1.0, "backend": backend}
    assert np.isfinite(flash_attention(100 * q, 100 * k, v, **options)).all()
    assert all(np.isfinite(x).all() for x in attention_gradients(100 * q, 100 * k, v, **options))


def test_mismatched_shapes_are_rejected():
    q, k, v = attention_arrays(N=4)
    with pytest.raises(ValueError, match=r"q has shape \(2, 6, 4\); it must be \(B, T, N, H\)"):
        flash_attention(q[..., 0], k, v)
    with pytest.raises(ValueError, match=r"k has shape \(1, 6, 4, 8\); it must be \(2, S, K, 8\)"):
        flash_attention(q, k[:1], v)
    for wrong in (v[:, :5], v[:, :, :3], v[..., :0], v[..., 0]):
        with pytest.raises(
            ValueError, match=r"v has shape .*; it must be \(2, 6, 4, Hv\), the shape"
        ):
            flash_attention(q, k, wrong)
    with pytest.raises(ValueError, match=r"3 heads; their number must divide that of q .*, 4"):
        flash_attention(q, k[:, :, :3], v[:, :, :3])


def test_mismatched_dtypes_are_rejected():
    q, k, v = attention_arrays()
    with pytest.raises(TypeError, match="k has dtype bfloat16; it must have the dtype of q"):
        flash_attention(q, k.astype(jnp.bfloat16), v)
    with pytest.raises(TypeError, match="v has dtype int32; it must be a floating-point array"):
        flash_attention(q, k, v.astype(jnp.int32))


def test_out_of_range_options_are_rejected():
    q, k, v = attention_arrays()
    with pytest.raises(ValueError, match="window is 0; it must be at least 1"):
        flash_attention(q, k, v, window=0)
    with pytest.raises(ValueError, match=r"softcap is 0\.0; it must be above 0"):
        flash_attention(q, k, v, softcap=0.0)
    with pytest.raises(ValueError, match="softcap is 1e-40; it must be above 0, and normal in"):
        flash_attention(q, k, v, softcap=1e-40)


@pytest.mark.parametrize("traced", [False, True])
def test_bools_that_are_not_known_are_rejected(traced):
    (q, k, v), qkv = packed_arrays(4, 2)
    boxes, angles = jnp.ones((3, 4)), jnp.ones((6, 4))
    calls = {
        "causal": (
            lambda x: flash_attention(q, k, v, causal=x),
            lambda x: flash_attention_packed(qkv, 4, 2, causal=x),
            lambda x: ops.softmax(q, causal=x),
        ),
        "interleaved": (
            lambda x: flash_attention(q, k, v, interleaved=x),
            lambda x: ops.rope(q, k, angles, angles, interleaved=x),
        ),
        "inclusive": (lambda x: ops.nms(boxes, boxes[:, 0], iou_threshold=0.5, inclusive=x),),
        "transpose_a": (lambda x: ops.matmul(boxes, boxes, transpose_a=x),),
        "transpose_b": (lambda x: ops.matmul(boxes, boxes, transpose_b=x),),
    }
    wrong = [jnp.array([True, False]), jnp.array([True]), "False", None, 1.0, object()]
    for name, given in calls.items():
        for call in given:
            call = jax.jit(call) if traced else call
            for value in [jnp.array(True)] if traced else wrong:
                with pytest.raises(TypeError, match=f"{name} has .*; it must be a bool"):
                    call(value)


def test_options_take_bools_of_any_type():
    x = jax.random.normal(jax.random.key(0), (3, 3))
    trues: tuple[Any, ...] = (True, 1, np.True_, np.array(True), jnp.array(True), jnp.array(1))
    falses: tuple[Any, ...] = (False, 0, np.False_, jnp.array(False))
    for value in trues:
        np.testing.assert_array_equal(ops.softmax(x, causal=value), ops.softmax(x, causal=True))
    for value in falses:
        np.testing.assert_array_equal(ops.softmax(x, causal=value), ops.softmax(x, causal=False))


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e39])
def test_options_that_are_not_finite_are_rejected(name, value):
    q, k, v = attention_arrays(T=4)
    (_, qkv), given = packed_arrays(4, 2), {name: value}
    cache, lengths = jnp.ones((2, 5, 2, 8)), jnp.ones(2, int)
    calls = [
        lambda: flash_attention(q, k, v, **given),
        lambda: flash_attention_packed(qkv, 4, 2, **given),
    ]
    if name == "scale":
        calls += [
            lambda: ops.decode_attention(jnp.ones((2, 4, 8)), cache, cache, lengths, **given),
            lambda: ops.softmax(q, **given),
            lambda: dot_product_attention(q, k, v, **given),
            lambda: dot_product_attention(
                q, k, v, scale=jnp.float32(jnp.inf), implementation="xla"
            ),
        ]
    for call in calls:
        with pytest.raises(ValueError, match=f"{name} is .*; it must be finite in float32"):
            call()


def test_mismatched_segment_ids_are_rejected():
    q, k, v = attention_arrays(T=4, S=6)
    of_query, of_key = jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 6), jnp.int32)
    with pytest.raises(ValueError, match=r"segment_ids is one array, but q .* differ in length"):
        flash_attention(q, k, v, segment_ids=of_query)
    with pytest.raises(ValueError, match=r"segment_ids has shape \(2, 6\); it must be \(2, 4\)"):
        flash_attention(q, k, v, segment_ids=(of_key, of_query))
    with pytest.raises(TypeError, match=r"segment_ids is a list; it must be .* or a tuple of the"):
        flash_attention(q, k, v, segment_ids=[q, k])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="segment_ids is a tuple of 1"):
        flash_attention(q, k, v, segment_ids=(of_query,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="segment_ids of the keys has dtype float32"):
        flash_attention(q, k, v, segment_ids=(of_query, of_key.astype(jnp.float32)))
