"""Attention that returns lse, and attention sinks: values, gradients, transforms and errors."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import BACKENDS, attention_arrays, in_float64, jit_with_gradients, packed_arrays

import jaxllm
from jaxllm.core import vma
from jaxllm.ops import flash_attention, flash_attention_packed, rope, rope_table
from jaxllm.ops.attention import reference
from jaxllm.testing import assert_close, cotangents_like, lower_for_cuda

# Pallas's interpreter is slow; the contract tests run it on these calls too.
FEW_BACKENDS = ["xla", pytest.param("cuda", marks=pytest.mark.gpu)]

# Of the queries of the second sequence the last two have a segment that no key has.
OF_QUERY = np.array([[0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 1, 0, 1, 0, 1, 0, 7, 7]], np.int32)
OF_KEY = np.array([[0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2], [0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0]], np.int32)
SEGMENTS = (jnp.array(OF_QUERY), jnp.array(OF_KEY))
SINKS = jnp.array([0.5, -1.0, 2.0, 0.0])

CALLS = {
    "plain": ({}, {}),
    "causal": ({"T": 9, "S": 11, "K": 2}, {"causal": True}),
    "queries_without_keys": ({"T": 11, "S": 7, "H": 5}, {"causal": True, "scale": -0.3}),
    "window": ({"T": 21, "S": 17, "K": 1}, {"window": 4, "softcap": 2.0}),
    "segments": ({"T": 9, "S": 11, "K": 2}, {"segment_ids": SEGMENTS, "causal": True}),
}


def exact(
    q, k, v, sinks=None, *, causal=False, scale=None, window=None, softcap=None, segment_ids=None
):
    """``(out, lse)`` with the sink as one more key, whose value is zero."""
    (B, T, N, H), S = q.shape, k.shape[1]
    k, v = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (H**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    distance = jnp.arange(T)[:, None] + S - T - jnp.arange(S)
    mask = (distance >= 0) | (not causal)
    mask &= jnp.abs(distance) < (T + S if window is None else window)
    mask = jnp.broadcast_to(mask, (B, N, T, S))
    if segment_ids is not None:
        of_query, of_key = segment_ids
        mask &= (of_query[:, :, None] == of_key[:, None, :])[:, None]
    if sinks is not None:
        of_sinks = jnp.broadcast_to(sinks[:, None, None], (B, N, T, 1))
        scores = jnp.concatenate([scores, of_sinks.astype(scores.dtype)], axis=-1)
        mask = jnp.concatenate([mask, jnp.ones((B, N, T, 1), bool)], axis=-1)
        v = jnp.concatenate([v, jnp.zeros((B, 1, N, H), v.dtype)], axis=1)
    sees = mask.any(axis=-1, keepdims=True)
    masked = jnp.where(mask, scores, jnp.where(sees, -jnp.inf, 0.0))
    lse = jax.nn.logsumexp(masked, axis=-1, keepdims=True)
    p = jnp.where(mask, jnp.exp(masked - lse), 0)
    return jnp.einsum("bnts,bsnh->btnh", p, v), jnp.where(sees, lse, -jnp.inf)[..., 0]


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "xla") for name in CALLS]
    + [("segments", "pallas"), ("queries_without_keys", "pallas")]
    + [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in CALLS],
)
@pytest.mark.covering(("name",), ("backend",))
def test_out_lse_and_gradients_match_float64(name, backend):
    shapes, options = CALLS[name]
    q, k, v = attention_arrays(**shapes)
    sinks = None if name in ("plain", "queries_without_keys") else SINKS
    arrays = (q, k, v) if sinks is None else (q, k, v, sinks)
    fn = functools.partial(flash_attention, **options, return_lse=True, backend=backend)
    expected = in_float64(functools.partial(exact, **options), arrays)
    found = jit_with_gradients(fn, arrays)
    assert found[0][1].dtype == jnp.float32
    assert_close(found, expected, "float32", what=name)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
@pytest.mark.parametrize("sinks_dtype", ["float32", "bfloat16"])
def test_bfloat16_matches_float64(sinks_dtype, backend):
    arrays = (*attention_arrays(K=2, dtype="bfloat16"), SINKS.astype(sinks_dtype))
    call = functools.partial(flash_attention, causal=True, return_lse=True, backend=backend)
    found = jit_with_gradients(call, arrays)
    assert [x.dtype for x in found[1]] == [x.dtype for x in arrays]
    # The reference rounds its results as the kernels do.
    narrow = jit_with_gradients(functools.partial(reference_of, causal=True), arrays)
    assert_close(
        found, in_float64(functools.partial(exact, causal=True), arrays), "bfloat16", narrow
    )


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_merged_parts_of_the_keys_match_attention_over_all_of_them(backend):
    q, k, v = attention_arrays(T=5, S=12, K=2)

    def merged(q, k, v):
        attend = functools.partial(flash_attention, return_lse=True, backend=backend)
        parts = [attend(q, k[:, rows], v[:, rows]) for rows in (slice(0, 7), slice(7, 12))]
        lse = jnp.logaddexp(parts[0][1], parts[1][1])
        weights = [jnp.exp(of_part - lse).swapaxes(1, 2)[..., None] for _, of_part in parts]
        return sum(w * out for w, (out, _) in zip(weights, parts, strict=True)), lse

    assert_close(jit_with_gradients(merged, (q, k, v)), in_float64(exact, (q, k, v)), "float32")


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_without_keys_have_finite_gradients_whatever_that_of_lse(backend):
    q, k, v = attention_arrays(T=6, S=3)  # the first three see none

    def weighted(q, k, v):
        out, lse = flash_attention(q, k, v, causal=True, return_lse=True, backend=backend)
        # The derivative of this is NaN where both are -inf.
        return out, lse, lse - jax.nn.logsumexp(jnp.stack([lse, lse]), axis=0)

    out, lse, _ = weighted(q, k, v)
    assert not out[:, :3].any()
    np.testing.assert_array_equal(lse[:, :, :3], -np.inf)
    assert np.isfinite(lse[:, :, 3:]).all()
    _, pull = jax.vjp(weighted, q, k, v)
    gradients = pull((jnp.ones_like(out), jnp.ones_like(lse), jnp.full_like(lse, jnp.nan)))
    dq, *_ = gradients
    assert not dq[:, :3].any()
    gradients = pull((jnp.ones_like(out), jnp.ones_like(lse), jnp.zeros_like(lse)))
    assert all(np.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_query_without_keys_has_its_sink_as_lse(backend):
    q, k, v = attention_arrays(T=6, S=3)
    call = functools.partial(flash_attention, causal=True, return_lse=True, backend=backend)
    (out, lse), (dq, _, _, dsinks) = jit_with_gradients(call, (q, k, v, SINKS))
    assert not out[:, :3].any()
    np.testing.assert_array_equal(lse[:, :, :3], np.broadcast_to(SINKS[:, None], (2, 4, 3)))
    assert not dq[:, :3].any()
    assert np.isfinite(dsinks).all()


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_sink_of_minus_infinity_changes_nothing(backend):
    q, k, v = attention_arrays(T=6, S=4)  # the first two see no key
    call = functools.partial(flash_attention, causal=True, return_lse=True, backend=backend)
    found, gradients = jit_with_gradients(call, (q, k, v, jnp.full(4, -jnp.inf)))
    expected, of_expected = jit_with_gradients(call, (q, k, v))
    assert_close((found, gradients[:3]), (expected, of_expected), "float32")
    assert not gradients[3].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "H"),
    [("float32", 24), ("bfloat16", 20), ("bfloat16", 64), ("float16", 128), ("bfloat16", 256)],
)
@pytest.mark.covering(("backend",), ("dtype",))
def test_sinks_of_any_size_match_float64(dtype, H, backend):
    # The kernels of every GPU serve heads of 20, and those of Hopper heads of 64 and 128.
    sinks = jnp.array([-jnp.inf, -1e30, -200.0, 0.0, 20.0, 200.0, 1e4, 1e30])
    arrays = (*attention_arrays(T=9, S=9, N=8, K=2, H=H, dtype=dtype), sinks)
    call = functools.partial(flash_attention, causal=True, return_lse=True, backend=backend)
    narrow = jit_with_gradients(functools.partial(reference_of, causal=True), arrays)
    expected = in_float64(functools.partial(exact, causal=True), arrays)
    for found, wide, of_reference in zip(
        *map(heads_first, (jit_with_gradients(call, arrays), expected, narrow)), strict=True
    ):
        assert_close(found, wide, dtype, of_reference)


def heads_first(results):
    """The results of each query head, whose scales differ by the sink; and dk and dv."""
    (out, lse), (dq, dk, dv, dsinks) = results
    of_heads = zip(out.swapaxes(0, 2), dq.swapaxes(0, 2), lse.swapaxes(0, 1), strict=True)
    return [*of_heads, (dk, dv), dsinks]


def reference_of(*arrays, **options):
    return reference.flash_attention(*arrays, **options, return_lse=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "H"), [("float32", 24), ("bfloat16", 20), ("bfloat16", 64)])
@pytest.mark.parametrize("whose", ["sink", "score"])
@pytest.mark.covering(("backend", "whose"), ("dtype",))
def test_nan_of_a_sink_or_a_score_stays_visible(whose, dtype, H, backend):
    q, k, v = attention_arrays(T=5, S=5, N=4, K=4, H=H, dtype=dtype)
    sinks = SINKS
    if whose == "sink":
        sinks = sinks.at[1].set(jnp.nan)
    else:
        k = k.at[:, :, 1].set(jnp.nan)
    out = flash_attention(q, k, v, sinks, backend=backend)
    assert np.isnan(out[:, :, 1]).all()
    assert np.isfinite(jnp.delete(out, 1, axis=2)).all()


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_either_result_may_be_left_out(backend):
    q, k, v = attention_arrays()
    call = functools.partial(flash_attention, return_lse=True, backend=backend)
    lse_alone = jit_with_gradients(lambda *x: call(*x)[1], (q, k, v))
    assert_close(lse_alone, in_float64(lambda *x: exact(*x)[1], (q, k, v)), "float32")
    arrays = (q, k, v, SINKS)
    out_alone = jit_with_gradients(functools.partial(flash_attention, backend=backend), arrays)
    assert_close(out_alone, in_float64(lambda *x: exact(*x)[0], arrays), "float32")


@pytest.mark.parametrize("by_parts", [False, True])
@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_packed_attention_matches_unpacked(backend, by_parts):
    q, k, v = attention_arrays(K=2)
    table = rope_table(jnp.arange(6), 8, theta=10_000.0)
    options = {"causal": True, "return_lse": True, "backend": backend, "rope_table": table}

    def packed(q, k, v, sinks):
        qkv = jnp.concatenate([x.reshape(2, 6, -1) for x in (q, k, v)], axis=-1)
        if by_parts:
            parts = [q[:, :, 0::2], q[:, :, 1::2], k, v]
            qkv = jnp.stack(parts, axis=2)
        out, lse = flash_attention_packed(qkv, 4, 2, sinks=sinks, **options)
        return out.reshape(q.shape), lse

    arrays = (q, k, v, SINKS)

    def rotated(q, k, v, sinks):
        cos, sin = (x.astype(q.dtype) for x in table)
        q, k = rope(q, k, cos, sin, backend="xla")
        return exact(q, k, v, sinks, causal=True)

    assert_close(jit_with_gradients(packed, arrays), in_float64(rotated, arrays), "float32")


@pytest.mark.parametrize("backend", FEW_BACKENDS)
def test_vmap_remat_and_scan_match_single_calls(backend):
    q, k, v = (jnp.stack([x, x[::-1], -x]) for x in attention_arrays(T=5, H=4))
    sinks = jnp.stack([SINKS, -SINKS, 2 * SINKS])

    def total(*arrays):
        out, lse = flash_attention(*arrays, causal=True, return_lse=True, backend=backend)
        return (out * jnp.cos(jnp.arange(4))).sum() + jnp.sin(lse).sum()

    gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))
    arrays = (q, k, v, sinks)
    expected = jax.tree.map(
        lambda *x: jnp.stack(x), *(gradient(*(x[i] for x in arrays)) for i in range(3))
    )
    policy = jax.checkpoint_policies.save_only_these_names("flash_attention")

    def scanned(*arrays):
        step = jax.checkpoint(lambda carry, x: (carry + total(*x), None), policy=policy)
        return jax.lax.scan(step, 0.0, arrays)[0]

    assert_close(jax.vmap(gradient)(*arrays), expected, "float32")
    in_scan = jax.jit(jax.grad(scanned, argnums=(0, 1, 2, 3)))(*arrays)
    assert_close(in_scan, expected, "float32")
    shared = jax.vmap(gradient, (0, None, None, None))(q, k[0], v[0], SINKS)
    assert_close([x[0] for x in shared], [x[0] for x in expected], "float32")


def test_forward_mode_matches_reverse_mode():
    q, k, v = attention_arrays(T=4, H=4)
    fn = functools.partial(flash_attention, return_lse=True, backend="xla")
    tangents = tuple(jnp.cos(x) for x in (q, k, v, SINKS))
    out, moved = jax.jit(lambda *x: jax.jvp(fn, x[:4], x[4:]))(q, k, v, SINKS, *tangents)
    cotangents = cotangents_like(out)
    dot = lambda a, b: sum(jnp.vdot(x, y) for x, y in zip(a, b, strict=True))  # noqa: E731
    _, pull = jax.vjp(fn, q, k, v, SINKS)
    np.testing.assert_allclose(dot(moved, cotangents), dot(tangents, pull(cotangents)), rtol=1e-5)


@pytest.mark.parametrize(("kept", "forwards"), [("flash_attention", 1), ("nothing", 2)])
def test_remat_policy_keeps_the_results(on_hopper, kept, forwards):
    policy = jax.checkpoint_policies.save_only_these_names(kept)

    def loss(*arrays):
        out, lse = flash_attention(*arrays, causal=True, return_lse=True, backend="cuda")
        return jnp.sin(out.astype(jnp.float32)).sum() + jnp.sin(lse).sum()

    qkv = [jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)] * 3
    gradients = jax.value_and_grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1, 2, 3))
    program = lower_for_cuda(gradients, *qkv, SINKS)
    assert program.count("@jaxllm_flash_attention_forward(") == forwards


def test_sinks_save_no_more_than_attention_without_them():
    def kept(*arrays):
        call = functools.partial(flash_attention, return_lse=True)
        pull = jax.vjp(call, *arrays)[1]
        return collections.Counter(leaf.shape for leaf in jax.tree.leaves(pull))

    q, k, v = attention_arrays()
    assert kept(q, k, v, SINKS) == kept(q, k, v) + collections.Counter([SINKS.shape])


def test_cudnn_rejects_the_gradient_of_lse_with_its_reason(pretend_cudnn):
    qkv = attention_arrays(T=16, N=4, K=2, H=64, dtype="bfloat16")

    def on_gpu(weight):
        def total(q, k, v):
            out, lse = flash_attention(q, k, v, SINKS, return_lse=True, backend="xla")
            return out.astype(jnp.float32).sum() + (weight * lse.sum() if weight else 0)

        return jaxllm.explain(jax.grad(total), *qkv).calls

    assert [call.on_gpu for call in on_gpu(0)] == ["xla-gpu", "xla-gpu"]
    forward, backward = on_gpu(1)
    assert (forward.on_gpu, backward.on_gpu) == ("xla-gpu", "xla")
    reason = "lse has a gradient; cuDNN's attention takes that of the output alone"
    assert dict(backward.rejected) == {"xla-gpu": reason}


@pytest.mark.parametrize("weight", [0, 1])
def test_cuda_backward_takes_the_gradient_of_lse_only_where_there_is_one(on_hopper, weight):
    qkv = [jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)] * 3

    def total(*qkv):
        out, lse = flash_attention(*qkv, causal=True, return_lse=True, backend="cuda")
        return out.astype(jnp.float32).sum() + (lse.sum() if weight else 0)

    program = lower_for_cuda(jax.grad(total, argnums=(0, 1, 2)), *qkv)
    (call,) = (x for x in program.splitlines() if "@jaxllm_flash_attention_backward(" in x)
    operands = call.split("@jaxllm_flash_attention_backward(")[1].split(")")[0].split(",")
    assert len(operands) == 6 + weight
    assert ("dlse = true" in call) == bool(weight)


@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_shard_map_gradients_have_the_vma_of_their_arguments(backend):
    mesh = jax.sharding.AbstractMesh((2,), ("d",))

    def check(q, k, v, sinks):
        q = jax.lax.pcast(q, "d", to="varying")
        fn = functools.partial(flash_attention, return_lse=True, backend=backend)
        out, pull = jax.vjp(fn, q, k, v, sinks)
        gradients = pull(jax.tree.map(jnp.ones_like, out))
        assert list(map(vma.axes_of, gradients)) == [{"d"}, set(), set(), set()]
        return ()

    P = jax.sharding.PartitionSpec
    mapped = jax.shard_map(check, mesh=mesh, in_specs=P(), out_specs=())
    jax.eval_shape(mapped, *attention_arrays(), SINKS)


def test_wrong_sinks_are_rejected():
    q, k, v = attention_arrays(K=2)
    with pytest.raises(ValueError, match=r"sinks has shape \(2,\); it must be \(4,\)"):
        flash_attention(q, k, v, SINKS[:2])
    with pytest.raises(TypeError, match="sinks has dtype bfloat16; it must be float32"):
        flash_attention(q, k, v, SINKS.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="sinks has dtype int32; it must be a floating-point"):
        flash_attention(q, k, v, SINKS.astype(jnp.int32))
    _, qkv = packed_arrays(N=4, K=2)
    with pytest.raises(ValueError, match=r"sinks has shape \(3,\); it must be \(4,\)"):
        flash_attention_packed(qkv, 4, 2, sinks=SINKS[:3])


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0, "S": 3}, {"T": 3, "S": 0}, {"N": 0}])
def test_empty_arrays_have_zero_gradients(sizes, backend):
    N = sizes.get("N", 4)
    q = jnp.ones((sizes.get("B", 2), sizes.get("T", 3), N, 8))
    k = v = jnp.ones((sizes.get("B", 2), sizes.get("S", 3), 2, 8))
    fn = functools.partial(flash_attention, return_lse=True, backend=backend)
    if sizes.get("S") == 0:
        k, v = (jnp.zeros((2, 0, 2, 8)) for _ in range(2))
    (out, lse), gradients = jit_with_gradients(fn, (q, k, v, SINKS[:N]))
    assert (out.shape, lse.shape) == (q.shape, (q.shape[0], N, q.shape[1]))
    assert not any(x.any() for x in gradients[:3])
    assert np.isfinite(gradients[3]).all()
