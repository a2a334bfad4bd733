"""The attention block: layer norm, self-attention, output projection and residual."""

import collections
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import (
    FLASH_BACKENDS,
    assert_normalized,
    attention_block_arrays,
    document_ids,
    with_gradients,
)

import jaxllm
from jaxllm.ops import (
    Transposed,
    attention_block,
    flash_attention,
    layer_norm,
    linear,
    residual,
    rms_norm,
    rope,
    rope_table,
    self_attention,
)
from jaxllm.testing import assert_close, lower_for_cuda


def block(x, norm, weights, kind: Any = "layer", **options):
    return attention_block(residual(x, kind), norm, weights, **options).x


def unfused_ops(x, norm, weights, backend=None, **options):
    normalized = layer_norm(x, **norm, backend=backend)
    out = self_attention(normalized, **weights["qkv"], backend=backend, **options)
    return x + linear(out, **weights["out"], backend=backend)


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
@pytest.mark.parametrize(
    ("N", "K", "options"),
    [
        (3, 3, {"causal": True}),
        (4, 2, {"window": 2, "scale": 0.7}),
        (2, 1, {"causal": True, "segment_ids": jnp.array([[0, 0, 1, 1, 1, 2]] * 2)}),
    ],
)
@pytest.mark.covering(("options", "backend"), ("form", "backend"), ("options", "form"))
def test_block_matches_unfused_ops(form, N, K, options, backend):
    arrays = attention_block_arrays(N, K)
    options = {"heads": N, "kv_heads": K, "backend": backend} | options
    found, expected = (
        jax.jit(lambda *a, fn=fn: with_gradients(functools.partial(fn, **options), a))(*arrays)
        for fn in (block, unfused_ops)
    )
    assert_close(found, expected, "float32")


def test_biases_are_optional(form):
    x, norm, weights = attention_block_arrays(4, 2)
    zeros = jax.tree.map(jnp.zeros_like, (norm["bias"], weights["qkv"]["bias"], x[0, 0]))
    bare = (
        x,
        {"scale": norm["scale"]},
        {name: {"weight": layer["weight"]} for name, layer in weights.items()},
    )
    with_zeros = (
        x,
        bare[1] | {"bias": zeros[0]},
        {
            "qkv": bare[2]["qkv"] | {"bias": zeros[1]},
            "out": bare[2]["out"] | {"bias": zeros[2]},
        },
    )
    options = {"heads": 4, "kv_heads": 2, "causal": True}
    out, gradients = with_gradients(functools.partial(unfused_ops, **options), with_zeros)
    for tree in (gradients[1], *gradients[2].values()):
        del tree["bias"]
    found = with_gradients(functools.partial(block, **options), bare)
    assert_close(found, (out, gradients), "float32")


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("attends", [False, True])
def test_options_without_a_fused_form_match_separate_ops(kind, rotates, attends):
    x, norm, weights = attention_block_arrays(4, 2)
    norm = norm if kind == "layer" else {"scale": norm["scale"]}
    table: Any = rope_table(jnp.arange(6), 8, theta=100.0) if rotates else None

    def attend(q, k, v):
        return 2 * flash_attention(q, k, v, causal=True)

    def separate_ops(x, norm, weights):
        norm_op = layer_norm if kind == "layer" else rms_norm
        qkv = linear(norm_op(x, **norm), **weights["qkv"])
        q, k, v = (part.reshape(2, 6, -1, 8) for part in jnp.split(qkv, [32, 48], axis=-1))
        if rotates:
            q, k = rope(q, k, *table)
        out = attend(q, k, v) if attends else flash_attention(q, k, v, causal=True)
        return x + linear(out.reshape(2, 6, 32), **weights["out"])

    found = functools.partial(
        block, kind=kind, heads=4, kv_heads=2, causal=True, rope_table=table,
        attend=attend if attends else None,
    )  # fmt: skip
    arrays = (x, norm, weights)
    assert_close(with_gradients(found, arrays), with_gradients(separate_ops, arrays), "float32")


@pytest.mark.parametrize("names", [("linear",), ("linear", "flash_attention")])
def test_checkpoint_policy_saves_the_same_as_for_unfused_ops(form, names):
    arrays = attention_block_arrays(4, 2)
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def program_of(fn):
        def value(*a):
            return fn(*a, heads=4, kv_heads=2, causal=True, backend="xla").sum()

        saving = jax.checkpoint(value, policy=policy)
        return str(jax.make_jaxpr(jax.grad(saving, argnums=range(3)))(*arrays))

    found, plain = program_of(block), program_of(unfused_ops)
    # Matmuls with the vector of the norm's bias, of the fused form, do not count.
    for operation in (r"f32\[\d+(,\d+)+\] = dot_general", "exp "):
        assert len(re.findall(operation, found)) == len(re.findall(operation, plain)), operation


def test_block_saves_no_more_than_unfused_ops(form):
    def kept(fn):
        fn = functools.partial(fn, heads=4, kv_heads=2, causal=True)
        leaves = jax.tree.leaves(jax.vjp(fn, *attention_block_arrays(4, 2))[1])
        # Vectors are arguments, which exist anyway.
        return collections.Counter(leaf.shape for leaf in leaves if leaf.ndim > 1)

    assert kept(block) <= kept(unfused_ops)


def two_unfused_blocks(x, norm, weights, **options):
    x = unfused_ops(x, norm, weights, **options)
    return unfused_ops(x, norm, weights, **options)


def two_blocks(x, norm, weights, **options):
    h = residual(x)
    for _ in range(2):
        h = attention_block(h, norm, weights, **options)
    return h


@pytest.mark.parametrize("backend", ["pallas", "xla"])
@pytest.mark.covering(("form",), ("backend",))
def test_blocks_pass_on_what_the_next_norm_needs(form, backend):
    arrays = attention_block_arrays(4, 2)
    options = {"heads": 4, "kv_heads": 2, "causal": True, "backend": backend}
    expected = with_gradients(functools.partial(two_unfused_blocks, **options), arrays)
    found = with_gradients(lambda *a: two_blocks(*a, **options).x, arrays)
    assert_close(found, expected, "float32")
    h = two_blocks(*arrays, **options)
    assert (h.normalized is not None) == (h.branch is None) == (form == "fused")
    if form == "fused":
        assert_normalized(h)


def test_mismatched_arguments_are_rejected(form):
    x, norm, weights = attention_block_arrays(4, 2)
    qkv, out = weights["qkv"], weights["out"]

    def fn(x=x, norm=norm, qkv=qkv, out=out, heads=4, kv_heads: Any = 2):
        return attention_block(
            residual(x), norm, {"qkv": qkv, "out": out}, heads=heads, kv_heads=kv_heads
        )

    with pytest.raises(ValueError, match=r"has shape \(5, 32\); it must be \(32, D_out"):
        fn(out=out | {"weight": out["weight"].T})
    with pytest.raises(ValueError, match=r"has shape \(32, 4\); it must be \(32, 5\)"):
        fn(out={"weight": out["weight"][:, :4]})
    with pytest.raises(ValueError, match=r"scale has shape \(4,\); it must be \(5,\)"):
        fn(norm=norm | {"scale": norm["scale"][:4]})
    with pytest.raises(TypeError, match="bias has dtype float16; it must have the dtype of"):
        fn(norm=norm | {"bias": norm["bias"].astype(jnp.float16)})
    with pytest.raises(TypeError, match="bias of out has dtype float16; it must have the dtype"):
        fn(out=out | {"bias": out["bias"].astype(jnp.float16)})
    with pytest.raises(ValueError, match=r"qkv has shape \(2, 6, 64\); .* of 5 queries and 5 keys"):
        fn(heads=5, kv_heads=None)
    with pytest.raises(ValueError, match=r"shape \(2, 5\); it must be \(B, T, D\)"):
        fn(x=x[:, 0])


def test_plain_array_is_rejected():
    x, norm, weights = attention_block_arrays(4, 2)
    reason = r"h is of type .*; it must be a Residual, which jaxllm\.ops\.residual\(x\) makes"
    with pytest.raises(TypeError, match=reason):
        attention_block(x, norm, weights, heads=4, kv_heads=2)  # type: ignore[arg-type]


# Sizes for which the output projection's dgrad GEMM computes delta: whole tiles, and enough.
WHOLE_TILES = {"N": 6, "K": 6, "H": 64, "B": 72, "T": 128, "D": 96, "dtype": "bfloat16"}


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
def test_output_projection_dgrad_computes_delta(changed, fits, on_hopper):
    sizes = WHOLE_TILES | changed
    arrays = jax.eval_shape(lambda: attention_block_arrays(**sizes))
    options = {"heads": sizes["N"], "kv_heads": sizes["K"], "causal": True, "backend": "cuda"}
    fn = functools.partial(block, **options)
    program = lower_for_cuda(lambda *a: with_gradients(fn, a), *arrays)
    assert program.count("@jaxllm_matmul_delta(") == fits
    (call,) = re.findall(r"@jaxllm_self_attention_backward\((.*)", program)
    assert ("tensor<0xf32>" in call) != fits


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"kind": "rms"}, "the block begins with the norm 'rms'; the fused block has a layer norm"),
        ({"rope_table": True}, "attention rotates queries and keys, or is the caller's"),
        ({"attend": True}, "attention rotates queries and keys, or is the caller's"),
        ({"transposed": True}, "a weight is transposed or in int8"),
        ({"dtype": "float32"}, "x has dtype float32; the fused GEMM takes bfloat16 and float16"),
        ({"D": 98}, "widths that are no multiples of 8"),
        ({"B": 1}, r"the GEMM has 6 tiles of \(128, 192\), too few to fill 132 SMs"),
        ({"backend": "xla"}, "backend 'xla' has no fused kernels"),
        ({"backend": "pallas"}, "backend 'pallas' has no fused kernels"),
    ],
)
def test_explain_tells_why_a_block_is_not_fused(changed, reason, on_hopper):
    sizes = {name: changed.get(name, size) for name, size in WHOLE_TILES.items()}
    kind = changed.get("kind", "layer")
    table = rope_table(jnp.arange(128), 64, theta=100.0) if "rope_table" in changed else None

    def run(x, norm, weights):
        if kind == "rms":
            norm = {"scale": norm["scale"]}
        if "transposed" in changed:
            weights = weights | {"out": {"weight": Transposed(weights["out"]["weight"].T)}}
        options = {"backend": changed.get("backend", "auto"), "rope_table": table, "kind": kind}
        attend = (lambda q, k, v: q) if "attend" in changed else None
        return block(x, norm, weights, heads=6, **options, attend=attend)

    arrays = jax.eval_shape(lambda: attention_block_arrays(**sizes))
    (call,) = (c for c in jaxllm.explain(run, *arrays).calls if c.stem == "attention_block")
    if reason is None:
        assert (call.on_gpu, call.fallback, call.rejected) == ("fused", "its parts", ())
    else:
        assert call.on_gpu == call.fallback == "its parts"
        ((rejected, why),) = call.rejected
        assert rejected == "fused"
        assert re.search(reason, why)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ({}, {"causal": True}),
        ({"dtype": "float16", "N": 5, "K": 5, "B": 73, "D": 200}, {"causal": True}),
        ({"T": 640, "B": 14}, {"window": 100, "scale": 0.3}),
        ({"T": 256, "B": 36}, {"causal": True, "segments": True}),
        ({"T": 1024, "B": 9}, {"causal": True, "scale": -0.1}),
    ],
)
def test_cuda_gradients_match_unfused_ops(changed, options):
    sizes = WHOLE_TILES | changed
    arrays = attention_block_arrays(**sizes)
    if options.get("segments"):
        ids = document_ids(sizes["B"], sizes["T"])
        options = {"causal": True, "segment_ids": ids}
    options = {"heads": sizes["N"], "backend": "cuda"} | options
    fn = functools.partial(block, **options)
    found = with_gradients(fn, arrays)
    unfused = functools.partial(unfused_ops, **options)
    expected = with_gradients(unfused, jax.tree.map(lambda x: x.astype("float32"), arrays))
    assert_close(found, expected, sizes["dtype"], with_gradients(unfused, arrays))
    again = with_gradients(fn, arrays)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cuda_blocks_pass_on_the_normalized_residual(fused_form, dtype):
    sizes = WHOLE_TILES | {"D": 768, "N": 12, "K": 12, "dtype": dtype}
    arrays = attention_block_arrays(**sizes)

    def run(arrays, backend):
        fn = functools.partial(two_blocks, heads=12, causal=True, backend=backend)
        return with_gradients(lambda *a: fn(*a).x, arrays), tuple(fn(*arrays).normalized or ())

    found, again = run(arrays, "cuda"), run(arrays, "cuda")
    expected = run(jax.tree.map(lambda x: x.astype("float32"), arrays), "xla")
    same_dtype = run(arrays, "xla")
    for part in range(2):
        assert_close(found[part], expected[part], dtype, same_dtype[part])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.gpu
def test_vmap_matches_separate_calls():
    first = attention_block_arrays(**WHOLE_TILES)
    second = jax.tree.map(lambda x: 2 * x, first)
    stacked = jax.tree.map(lambda *pair: jnp.stack(pair), first, second)
    fn = functools.partial(block, heads=WHOLE_TILES["N"], causal=True, backend="cuda")
    mapped = jax.vmap(lambda *a: with_gradients(fn, a))(*stacked)
    for i, arrays in enumerate((first, second)):
        found = jax.tree.map(lambda x, i=i: x[i], mapped)
        assert_close(found, with_gradients(fn, arrays), "bfloat16")
