"""Self-attention: a QKV projection and attention, with the bias gradient of its kernel."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import (
    FLASH_BACKENDS,
    attention_arrays,
    document_ids,
    linear_then_attention,
    packed_arrays,
    projection_arrays,
    with_gradients,
)

import jaxllm
from jaxllm.core import ffi
from jaxllm.ops import (
    self_attention,
)
from jaxllm.ops.attention import cuda
from jaxllm.testing import assert_close, cotangents_like, error, lower_for_cuda, tolerance


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
@pytest.mark.covering(("options",), ("backend",))
def test_self_attention_matches_linear_then_attention(N, K, options, backend):
    arrays = projection_arrays(N, K)
    options = {"heads": N, "kv_heads": K, "backend": backend} | options
    found, expected = (
        jax.jit(lambda *a, fn=fn: with_gradients(functools.partial(fn, **options), a))(*arrays)
        for fn in (self_attention, linear_then_attention)
    )
    assert_close(found, expected, "float32")
    # A bias on the keys shifts all scores of a query equally, so its gradient is zero. A bias on
    # the values is added to the output, so its gradient is the sum of dout.
    of_queries, of_keys, of_values = jnp.split(found[1][2], [N * 8, (N + K) * 8])
    assert abs(of_keys).max() <= tolerance("float32") * abs(of_queries).max()
    dout = cotangents_like(found[0]).reshape(-1, K, N // K, 8)
    assert error(of_values.reshape(K, 8), dout.sum(axis=(0, 2))) <= tolerance("float32")


@pytest.mark.parametrize("names", [("linear",), ("linear", "flash_attention")])
def test_checkpoint_policy_saves_the_same_as_for_unfused_ops(names):
    arrays = projection_arrays(4, 2)
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def program_of(fn):
        value = lambda *a: fn(*a, 4, 2, causal=True, backend="xla").sum()  # noqa: E731
        saving = jax.checkpoint(value, policy=policy)
        return str(jax.make_jaxpr(jax.grad(saving, argnums=(0, 1, 2)))(*arrays))

    fused, plain = program_of(self_attention), program_of(linear_then_attention)
    for word in ("dot_general", "exp "):
        assert fused.count(word) == plain.count(word), word


def test_self_attention_saves_no_more_than_unfused_ops():
    def kept(fn):
        pull = jax.vjp(lambda *a: fn(*a, 4, 2, causal=True), *projection_arrays(4, 2))[1]
        return collections.Counter(leaf.shape for leaf in jax.tree.leaves(pull))

    assert kept(self_attention) <= kept(linear_then_attention)


@pytest.mark.parametrize("width", [32, 64, 96, 128])
def test_self_attention_picks_the_same_backends_as_attention(pretend_cudnn, width, on_hopper):
    arrays = projection_arrays(2, 1, H=width, dtype="bfloat16")

    def choices(fn):
        fn = functools.partial(fn, heads=2, kv_heads=1, causal=True)
        gradient = jax.grad(lambda *a: fn(*a).sum())
        calls = jaxllm.explain(gradient, *arrays).calls
        return [call.on_gpu for call in calls if call.stem != "bias_add_backward"]

    assert choices(self_attention) == choices(linear_then_attention)


def test_mismatched_arguments_are_rejected():
    x, weight, bias = projection_arrays(4, 2)
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


@pytest.mark.parametrize("segments", [False, True])
def test_backward_kernel_computes_the_bias_gradient(segments, with_kernels):
    arrays = projection_arrays(4, 2, H=64, dtype="bfloat16")
    segment_ids = jnp.zeros((2, 6), jnp.int32) if segments else None
    options = {"causal": True, "segment_ids": segment_ids, "backend": "cuda"}
    fn = functools.partial(self_attention, heads=4, kv_heads=2, **options)
    program = lower_for_cuda(lambda *a: with_gradients(fn, a), *arrays)
    found = sorted(set(re.findall(r"@jaxllm_(\w+)", program)))
    assert found == ["flash_attention_packed_forward", "self_attention_backward"]
    assert len(re.findall("dot_general", program)) == 3
    for pass_name in ("reduce", "slice", "concatenate", "pad"):
        assert f"stablehlo.{pass_name}" not in program
    (call,) = (line for line in program.splitlines() if "@jaxllm_self_attention_backward(" in line)
    arguments = call[call.index("(") + 1 : call.index(")")]
    # Two of the six operands are optional sums of dout, delta among them; both are empty here.
    assert len(arguments.split(",")) == 6 + 2 * segments
    assert "rope = false" in call
    results = call[call.rindex("->") :]
    assert "tensor<512xbf16>" in results  # the bias gradient


@pytest.mark.parametrize(
    ("H", "T", "floats"), [(64, 200, 2 * 2 * 3 * 4 * 64), (128, 200, 2 * 4 * 2 * 4 * 128)]
)
def test_workspace_holds_partial_bias_gradients_of_each_tile(H, T, floats, monkeypatch):
    q, *_ = attention_arrays(T=T, H=H, dtype="bfloat16")
    columns = (4 + 2 * 2) * H
    monkeypatch.setattr(ffi, "device", lambda: ffi.H100)
    assert cuda._bias_partial(q, columns).size == floats
    # The portable kernels run for other widths, and on GPUs other than Hopper.
    assert cuda._bias_partial(q[..., :36], columns).size == 2 * T * columns
    monkeypatch.setattr(ffi, "no_hopper_reason", lambda: "there is none")
    assert cuda._bias_partial(q, columns).size == 2 * T * columns


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
        (301, {"scale": -0.1}),  # the Hopper kernels reject negative scales
    ],
)
def test_bias_gradient_of_the_backward_kernel_is_exact(dtype, H, N, K, T, options):
    _, qkv = packed_arrays(N, K, H=H, T=T, dtype=dtype)
    dout = cotangents_like(jax.ShapeDtypeStruct((2, T, N * H), dtype))
    options = {
        "causal": False,
        "scale": H**-0.5,
        "window": None,
        "heads": N,
        "kv_heads": K,
    } | options
    ids = (document_ids(2, T),) * 2 if options.pop("segments", False) else None
    options |= {"softcap": None, "interleaved": False}
    out, lse = cuda.flash_attention_packed_forward(qkv, ids, None, **options)
    arrays = (qkv, out, lse, dout, ids, None)
    expected = cuda.flash_attention_packed_backward(*arrays, **options)
    arrays = (qkv, out, lse, dout, None, None, ids, None)  # nothing is known of dout
    dqkv, dbias = cuda.self_attention_backward(*arrays, **options)
    assert error(dqkv, expected) == 0
    assert error(cuda.self_attention_backward(*arrays, **options)[1], dbias) == 0

    exact = np.asarray(dqkv, np.float64).sum(axis=(0, 1))
    of_queries, of_keys, _ = np.split(exact, [N * H, (N + K) * H])
    if ffi.no_hopper_reason() is None and options["scale"] > 0:
        of_values = np.asarray(dout, np.float64).reshape(-1, K, N // K, H).sum(axis=(0, 2))
        np.testing.assert_array_equal(np.asarray(dbias[N * H : (N + K) * H], np.float64), 0)
        exact = np.concatenate([of_queries, 0 * of_keys, of_values.ravel()])
    # The kernel sums in float32 and rounds once, by at most half a unit in the last place.
    np.testing.assert_allclose(
        np.asarray(dbias, np.float64),
        exact,
        rtol=float(jnp.finfo(dtype).eps),
        atol=1e-5 * abs(exact).max() + float(jnp.finfo(dtype).smallest_subnormal),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("H", [40, 64, 128])
def test_vmap_matches_separate_calls(H):
    first = projection_arrays(4, 2, H=H, T=150, dtype="bfloat16")
    second = [2 * x for x in first]
    stacked = [jnp.stack(pair) for pair in zip(first, second, strict=True)]

    fn = functools.partial(self_attention, heads=4, kv_heads=2, causal=True, backend="cuda")
    run = lambda *arrays: with_gradients(fn, arrays)  # noqa: E731
    mapped = jax.vmap(run)(*stacked)
    for i, arrays in enumerate((first, second)):
        assert_close(jax.tree.map(lambda x, i=i: x[i], mapped), run(*arrays), "bfloat16")
