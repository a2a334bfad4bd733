"""The feed-forward block: layer norm, MLP and residual, fused on Hopper."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import (
    assert_normalized,
    check_fused,
    ffn_block_arrays,
    pretend_sms,
    random_arrays,
    with_gradients,
)

import jaxllm
from jaxllm.core import ffi
from jaxllm.ops import (
    Quantized,
    Transposed,
    dequantize,
    ffn_block,
    layer_norm,
    linear,
    mlp,
    quantize,
    residual,
    rms_norm,
    swiglu_packed,
)
from jaxllm.ops.gemm import cuda_fused, fused
from jaxllm.testing import assert_close, error, lower_for_cuda


def block(x, norm, weights, kind: Any = "layer", **options):
    return ffn_block(residual(x, kind), norm, weights, **options).x


def unfused_ops(x, norm, weights, **options):
    up, down = weights["up"], weights["down"]
    layers = (up["weight"], up["bias"], down["weight"], down["bias"])
    return x + mlp(layer_norm(x, **norm, **options), *layers, **options)


@pytest.mark.parametrize("backend", ["pallas", "xla"])
@pytest.mark.covering(("form",), ("backend",))
def test_block_matches_unfused_ops(form, backend):
    arrays = ffn_block_arrays()
    op = functools.partial(block, backend=backend)
    expected = with_gradients(unfused_ops, arrays)
    assert_close(with_gradients(op, arrays), expected, "float32")
    assert_close(jax.jit(op)(*arrays), expected[0], "float32")


def test_biases_are_optional(form):
    x, norm, weights = ffn_block_arrays()
    zeros = jax.tree.map(jnp.zeros_like, (norm["bias"], weights["up"]["bias"], x[0]))
    scale = {"scale": norm["scale"]}
    up, down = ({"weight": weights[name]["weight"]} for name in ("up", "down"))
    layers = {"up": up | {"bias": zeros[1]}, "down": down | {"bias": zeros[2]}}
    out, gradients = with_gradients(unfused_ops, (x, scale | {"bias": zeros[0]}, layers))
    for tree in (gradients[1], *gradients[2].values()):
        del tree["bias"]
    found = with_gradients(block, (x, scale, {"up": up, "down": down}))
    assert_close(found, (out, gradients), "float32")


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("weight_form", ["plain", "transposed", "quantized"])
def test_options_without_a_fused_form_match_separate_ops(kind, activation, weight_form):
    first, second = "up" if activation == "gelu" else "gate_up", "down"
    shapes = [(2, 3, 32), (32,), (32,), (32, 128), (64 if activation == "swiglu" else 128, 32)]
    x, scale, bias, *matrices = random_arrays(*shapes)
    norm = {"scale": scale} | ({"bias": bias} if kind == "layer" else {})
    rounded = dict(zip((first, second), matrices, strict=True))
    weights = dict(rounded)
    if weight_form == "transposed":
        weights = {name: Transposed(matrix.T) for name, matrix in rounded.items()}
    elif weight_form == "quantized":
        weights = {name: Quantized(*quantize(m.T, group_size=16)) for name, m in rounded.items()}
        rounded = {name: dequantize(w.q, w.scales).T for name, w in weights.items()}

    def separate_ops(x, norm):
        h = (layer_norm if kind == "layer" else rms_norm)(x, **norm)
        hidden = linear(h, rounded[first], activation="gelu" if activation == "gelu" else None)
        hidden = hidden if activation == "gelu" else swiglu_packed(hidden)
        return x + linear(hidden, rounded[second])

    layers = {name: {"weight": weight} for name, weight in weights.items()}
    options = {"kind": kind, "activation": activation}
    found = lambda x, norm: block(x, norm, layers, **options)  # noqa: E731
    if weight_form == "plain":
        expected = with_gradients(separate_ops, (x, norm))
        assert_close(with_gradients(found, (x, norm)), expected, "float32")
    else:  # for inference
        assert_close(found(x, norm), separate_ops(x, norm), "float32")


def test_block_saves_no_more_than_unfused_ops(form):
    arrays = ffn_block_arrays(rows=64)

    def kept(fn):
        return sum(leaf.size for leaf in jax.tree.leaves(jax.vjp(fn, *arrays)[1]))

    assert kept(block) <= kept(unfused_ops)


def test_checkpoint_policy_recomputes_no_saved_matmul(form):
    arrays = ffn_block_arrays()
    policy = jax.checkpoint_policies.save_only_these_names("linear")

    def matmuls_of(fn):
        saving = jax.checkpoint(lambda *arrays: (fn(*arrays) ** 2).sum(), policy=policy)
        program = str(jax.make_jaxpr(jax.grad(saving, range(3)))(*arrays))
        # Only matmuls of two matrices count: the one with the vector of the norm's bias runs twice.
        return len(re.findall(r"f32\[\d+,\d+\] = dot_general", program))

    assert matmuls_of(block) == matmuls_of(unfused_ops)


def test_mismatched_arguments_are_rejected(form):
    x, norm, weights = ffn_block_arrays()
    up, down = weights["up"], weights["down"]

    def fn(x=x, norm=norm, up=up, down=down, **options):
        return ffn_block(residual(x), norm, {"up": up, "down": down}, **options)

    with pytest.raises(ValueError, match=r"scale has shape \(4,\); it must be \(5,\)"):
        fn(norm=norm | {"scale": norm["scale"][:4]})
    with pytest.raises(ValueError, match=r"bias has shape \(4,\); it must be \(5,\)"):
        fn(norm=norm | {"bias": norm["bias"][:4]})
    with pytest.raises(TypeError, match="bias has dtype float16; it must have the dtype of scale"):
        fn(norm=norm | {"bias": norm["bias"].astype(jnp.float16)})
    with pytest.raises(ValueError, match=r"bias.* has shape \(5,\); it must be \(6,\)"):
        fn(up=up | {"bias": down["bias"]})
    with pytest.raises(ValueError, match=r"weight of down has shape \(6, 4\); it must be \(6, 5\)"):
        fn(down={"weight": down["weight"][:, :4]})
    with pytest.raises(ValueError, match=r"bias of down has shape \(4,\); it must be \(5,\)"):
        fn(down=down | {"bias": down["bias"][:4]})
    with pytest.raises(TypeError, match="bias of down has dtype float16; it must have the dtype"):
        fn(down=down | {"bias": down["bias"].astype(jnp.float16)})
    with pytest.raises(ValueError, match="activation is None; it must be 'gelu' or 'swiglu'"):
        fn(activation=None)
    with pytest.raises(ValueError, match=r"has shape \(\)"):
        fn(x=jnp.float32(1))


def test_result_of_the_block_must_be_as_wide_as_the_residual(form):
    x, norm, weights = ffn_block_arrays()
    narrow = weights["down"]["weight"][:, :1]  # it would broadcast
    with pytest.raises(ValueError, match=r"the weight of down has shape \(6, 1\); it must be"):
        ffn_block(residual(x), norm, weights | {"down": {"weight": narrow}})


def test_result_of_a_transposed_weight_must_be_as_wide_as_the_residual():
    x, norm, weights = ffn_block_arrays()
    narrow = Transposed(weights["down"]["weight"][:, :1].T)
    with pytest.raises(ValueError, match=r"the result of down has shape \(3, 1\); it must be"):
        ffn_block(residual(x), norm, weights | {"down": {"weight": narrow}})


def test_plain_array_is_rejected():
    x, norm, weights = ffn_block_arrays()
    reason = r"h is of type .*; it must be a Residual, which jaxllm\.ops\.residual\(x\) makes"
    with pytest.raises(TypeError, match=reason):
        ffn_block(x, norm, weights)  # type: ignore[arg-type]


LARGE_BLOCK = {"rows": 132 * 128, "width": 64, "hidden": 192}


def block_program(dtype="bfloat16", norm_dtype=None, sizes=LARGE_BLOCK):
    def arrays():
        x, norm, weights = ffn_block_arrays(dtype, **sizes)
        return x, jax.tree.map(lambda a: a.astype(norm_dtype or dtype), norm), weights

    return lower_for_cuda(
        lambda *a: with_gradients(lambda *b: block(*b, backend="cuda"), a), *jax.eval_shape(arrays)
    )


def kernels(program):
    return sorted(set(re.findall(r"@jaxllm_(\w+)", program)))


def test_hopper_dgrad_gemm_applies_norm_backward_in_its_epilogue(on_hopper):
    program = block_program()
    assert kernels(program) == [
        "fold_norm",
        "fold_norm_backward",
        "layer_norm_forward",
        "matmul_bias_gelu",
        "matmul_dgelu",
        "matmul_norm_backward",
        "matmul_residual_norm",
    ]
    # XLA runs the two wgrads.
    assert len(re.findall("dot_general", program)) == 2


@pytest.mark.parametrize(
    ("rows", "width", "fits"), [(65536, 768, True), (65535, 768, False), (65536, 1024, False)]
)
def test_one_kernel_computes_both_wgrads_for_many_rows(on_hopper, rows, width, fits):
    program = block_program(sizes={"rows": rows, "width": width, "hidden": 4 * width})
    assert program.count("@jaxllm_wgrad_pair(") == fits
    assert program.count("dot_general") == (0 if fits else 2)


def test_hopper_gemm_normalizes_the_residual(on_hopper):
    arrays = jax.eval_shape(lambda: ffn_block_arrays("bfloat16", **LARGE_BLOCK))
    program = lower_for_cuda(lambda *a: two_blocks(*a, backend="cuda"), *arrays)
    assert program.count("@jaxllm_matmul_residual_norm(") == 2
    # Only the first norm is a separate kernel. The residual between the blocks is not written.
    assert program.count("@jaxllm_layer_norm_forward(") == 1
    assert "@jaxllm_matmul_residual(" not in program


@pytest.mark.parametrize(
    ("sizes", "norm_dtype", "changed", "reason"),
    [
        (LARGE_BLOCK, None, {"dtype": "float32"}, "x has dtype float32; the fused GEMM takes"),
        (LARGE_BLOCK | {"rows": 131 * 128}, None, {}, "the GEMM has 131 tiles"),
        (LARGE_BLOCK | {"width": 60}, None, {}, "widths that are no multiples of 8"),
        (LARGE_BLOCK, None, {"kind": "rms"}, "the block begins with the norm 'rms'"),
        (LARGE_BLOCK, None, {"activation": "swiglu"}, "the activation is 'swiglu'"),
        (LARGE_BLOCK, None, {"transposed": True}, "a weight is transposed or in int8"),
        (LARGE_BLOCK, None, {"backend": "xla"}, "backend 'xla' has no fused kernels"),
    ],
)
def test_explain_tells_why_a_block_is_not_fused(on_hopper, sizes, norm_dtype, changed, reason):
    dtype = changed.get("dtype", "bfloat16")

    def run(x, norm, weights):
        norm = jax.tree.map(lambda a: a.astype(norm_dtype or dtype), norm)
        kind = changed.get("kind", "layer")
        if kind == "rms":
            norm = {"scale": norm["scale"]}
        if "transposed" in changed:
            down = weights["down"] | {"weight": Transposed(weights["down"]["weight"].T)}
            weights = weights | {"down": down}
        if "activation" in changed:
            half = weights["down"]["weight"][: sizes["hidden"] // 2]
            weights = {"gate_up": weights["up"], "down": {"weight": half}}
        options = {name: changed[name] for name in ("activation", "backend") if name in changed}
        return block(x, norm, weights, kind, **options)

    arrays = jax.eval_shape(lambda: ffn_block_arrays(dtype, **sizes))
    calls = jaxllm.explain(run, *arrays).calls
    (call,) = (c for c in calls if c.stem == "ffn_block")
    assert call.on_gpu == call.fallback == "its parts"
    ((rejected, why),) = call.rejected
    assert rejected == "fused"
    assert reason in why


def test_xla_folds_a_float32_norm_into_16_bit_weights(on_hopper):
    program = block_program("bfloat16", "float32", sizes=LARGE_BLOCK)
    assert "@jaxllm_fold_norm" not in program
    for kernel in (
        "matmul_bias_gelu",
        "matmul_dgelu",
        "matmul_residual_norm",
        "matmul_norm_backward",
    ):
        assert f"@jaxllm_{kernel}(" in program


def test_explain_names_the_fused_block(on_hopper):
    arrays = jax.eval_shape(lambda: ffn_block_arrays("bfloat16", **LARGE_BLOCK))
    calls = jaxllm.explain(block, *arrays).calls
    assert (calls[0].stem, calls[0].on_gpu, calls[0].rejected) == ("ffn_block", "fused", ())
    assert {call.on_gpu for call in calls[1:]} == {"cuda"}


@pytest.mark.parametrize(
    ("dtype", "norm_dtype", "changed"),
    [("float32", None, {}), ("float16", None, {"rows": 131 * 128})],
)
def test_other_blocks_run_a_separate_norm_backward_kernel(on_hopper, dtype, norm_dtype, changed):
    program = block_program(dtype, norm_dtype, sizes=LARGE_BLOCK | changed)
    assert "@jaxllm_matmul_norm_backward" not in program
    assert "@jaxllm_fold_norm" not in program
    assert program.count("@jaxllm_add_layer_norm_backward(") == 1


@pytest.mark.parametrize("backend", ["cuda", "pallas", "xla"])
def test_next_norm_adds_the_result_of_an_unfused_block(on_hopper, backend):
    # Too few rows for the fused form.
    arrays = jax.eval_shape(lambda: ffn_block_arrays("bfloat16", 24, 64, 192))

    def run(*arrays):
        return with_gradients(lambda *a: two_blocks(*a, backend=backend).x, arrays)

    program = lower_for_cuda(run, *arrays)
    assert kernels(program) == (
        [
            "add_layer_norm_backward",
            "add_layer_norm_forward",
            "bias_gelu_backward",
            "bias_gelu_forward",
            "layer_norm_forward",
        ]
        if backend == "cuda"
        else []
    )
    assert ("triton" in program) == (backend == "pallas")
    # The first norm has nothing to add.
    assert program.count("@jaxllm_add_layer_norm_forward(") == (backend == "cuda")
    assert len(re.findall("dot_general", program)) == 2 * 6


@pytest.mark.parametrize("dtypes", ["float32 float32", "bfloat16 bfloat16", "float32 bfloat16"])
def test_folded_norm_matches_norm_then_linear(dtypes):
    norm_dtype, dtype = dtypes.split()
    x, scale, norm_bias, weight, bias = random_arrays((6, 24), (24,), (24,), (24, 10), (10,))
    scale, norm_bias = scale.astype(norm_dtype), norm_bias.astype(norm_dtype)
    weight, bias = weight.astype(dtype), bias.astype(dtype)
    arrays = (scale, norm_bias, weight, bias)

    def folded(*arrays):
        weight, bias = fused.fold_norm("xla", *arrays)
        return linear(x.astype(dtype), weight, bias)

    def separate_ops(scale, norm_bias, weight, bias):
        return linear(scale * x + norm_bias, weight, bias)

    exact = separate_ops(*(a.astype("float32") for a in arrays))
    assert_close(folded(*arrays), exact, dtype)
    dout = jnp.cos(exact)
    expected = jax.vjp(separate_ops, *(a.astype("float32") for a in arrays))[1](dout)
    dfolded, dbias = (x.T @ dout).astype(dtype), dout.sum(0).astype(dtype)
    found = fused.fold_norm_backward("xla", scale, norm_bias, weight, dfolded, dbias)
    assert [a.dtype for a in found] == [a.dtype for a in arrays[:3]]
    assert_close(found, expected[:3], dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("width", "columns"), [(1, 8), (5, 24), (768, 2304), (1000, 1032)])
def test_norm_is_folded_into_weights_of_any_size(dtype, width, columns):
    shapes = [(width,), (width,), (width, columns), (columns,)]
    # The scale and bias of the norm, the weight and bias of the layer, and their gradients.
    arrays = random_arrays(*shapes, *shapes[2:], dtype=dtype)
    wide = [x.astype("float32") for x in arrays]
    found = jax.jit(cuda_fused.fold_norm)(*arrays[:4])
    assert_close(found, tuple(fused.fold_norm("xla", *wide[:4])), dtype)
    for each in (arrays, wide):
        del each[3]
    found = jax.jit(cuda_fused.fold_norm_backward)(*arrays)
    expected = fused.fold_norm_backward("xla", *wide)
    assert_close(found, expected, dtype, fused.fold_norm_backward("xla", *arrays))


BLOCK_SIZES = [
    (1, 8, 8),
    (127, 264, 64),
    (129, 256, 72),
    (300, 248, 520),
    (2500, 1544, 1032),
    # Each consumer warpgroup of an SM computes several tiles in turn.
    (40000, 200, 72),
    (17000, 776, 3072),
    # As many tiles per row as can run at once.
    (300, cuda_fused._MAX_ROW_TILES * 192, 64),
]


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "width", "hidden"), BLOCK_SIZES)
def test_cuda_block_matches_unfused_ops_for_any_rows_and_widths(
    monkeypatch, skip_if_declined, dtype, rows, width, hidden
):
    monkeypatch.setattr(cuda_fused, "_MIN_TILES_OF_SM", 0)
    x = jnp.zeros((rows, hidden), dtype)
    skip_if_declined(lambda: cuda_fused.row_gemm_unsupported(x, width))
    arrays = ffn_block_arrays(dtype, rows=rows, width=width, hidden=hidden)
    check_fused(block, unfused_ops, arrays, dtype)


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "width", "hidden"), [(2500, 1544, 1032), (17000, 776, 3072)])
def test_one_kernel_computes_both_wgrads_of_any_size(
    monkeypatch, skip_if_declined, dtype, rows, width, hidden
):
    for name in ("MIN_TILES_OF_SM", "MIN_FILLED", "MIN_WGRAD_ROWS"):
        monkeypatch.setattr(cuda_fused, f"_{name}", 0)
    monkeypatch.setattr("jaxllm.ops.block.ffn._MIN_PAIR_ROWS", 0)
    arrays = ffn_block_arrays(dtype, rows=rows, width=width, hidden=hidden)
    x, hidden_rows = arrays[0], jnp.zeros((rows, hidden), dtype)
    of_both, options = (x, hidden_rows, hidden_rows, x), {"min_rows": 0, "sms_of_tile": 1}
    skip_if_declined(lambda: cuda_fused.wgrad_pair_unsupported(*of_both, **options))
    assert "@jaxllm_wgrad_pair(" in block_program(
        dtype, sizes={"rows": rows, "width": width, "hidden": hidden}
    )
    check_fused(block, unfused_ops, arrays, dtype)


def two_unfused_blocks(*arrays, **options):
    """Two blocks in sequence; they share their weights."""
    x, *layers = arrays
    return unfused_ops(unfused_ops(x, *layers, **options), *layers, **options)


def two_blocks(x, norm, weights, **options):
    h = residual(x)
    for _ in range(2):
        h = ffn_block(h, norm, weights, **options)
    return h


@pytest.mark.parametrize("backend", ["pallas", "xla"])
def test_blocks_pass_on_what_the_next_norm_needs(form, backend):
    arrays = ffn_block_arrays()
    expected = with_gradients(two_unfused_blocks, arrays)
    found = with_gradients(lambda *a: two_blocks(*a, backend=backend).x, arrays)
    assert_close(found, expected, "float32")
    h = two_blocks(*arrays, backend=backend)
    assert (h.normalized is not None) == (h.branch is None) == (form == "fused")
    if form == "fused":
        assert_normalized(h)


def test_normalized_residual_has_zero_gradient(fused_form):
    def total(*arrays):
        return sum(x.sum() for x in two_blocks(*arrays).normalized or ())

    gradients = jax.grad(total, range(3))(*ffn_block_arrays())
    assert all(error(x, jnp.zeros_like(x)) == 0 for x in jax.tree.leaves(gradients))


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "width", "hidden"), BLOCK_SIZES)
def test_cuda_blocks_pass_on_the_normalized_residual_for_any_size(
    monkeypatch, skip_if_declined, fused_form, dtype, rows, width, hidden
):
    monkeypatch.setattr(cuda_fused, "_MIN_TILES_OF_SM", 0)
    arrays = ffn_block_arrays(dtype, rows=rows, width=width, hidden=hidden)
    x = jnp.zeros((rows, hidden), dtype)
    skip_if_declined(lambda: cuda_fused.row_gemm_unsupported(x, width))

    def run(arrays, backend):
        h = jax.jit(functools.partial(two_blocks, backend=backend))(*arrays)
        return h.x, tuple(h.normalized or ())

    found, again = run(arrays, "cuda"), run(arrays, "cuda")
    expected = run(jax.tree.map(lambda x: x.astype("float32"), arrays), "xla")
    assert_close(found, expected, dtype, run(arrays, "xla"))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        assert error(a, b) == 0


@pytest.mark.hopper
@pytest.mark.parametrize("offset", [0.0, 100.0, -1000.0])
def test_hopper_gemm_normalizes_a_residual_far_from_zero(monkeypatch, fused_form, offset):
    monkeypatch.setattr(cuda_fused, "_MIN_TILES_OF_SM", 0)
    x, norm, weights = ffn_block_arrays("bfloat16", 300, 776, 72)
    weights["down"]["bias"] += jnp.bfloat16(offset)
    arrays = (x, norm, weights)
    wide = jax.tree.map(lambda x: x.astype("float32"), arrays)
    expected: Any = two_blocks(*wide, backend="xla").normalized
    found: Any = two_blocks(*arrays, backend="cuda").normalized
    x_hat, mean, rstd = found
    assert_close(x_hat, expected.x_hat, "bfloat16")
    np.testing.assert_allclose(mean, expected.mean, rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(rstd, expected.rstd, rtol=1e-2)


# If a process also has a smaller GPU, workspaces are sized for the CTAs of the smaller one.
@pytest.mark.hopper
@pytest.mark.parametrize("sms", [114, 60, 14])
def test_kernels_stay_within_the_workspace_of_a_smaller_gpu(monkeypatch, skip_if_declined, sms):
    monkeypatch.setattr(cuda_fused, "_MIN_TILES_OF_SM", 0)
    pretend_sms(monkeypatch, sms, ffi.device())
    # The row count differs by parameter, so that no compiled program is reused.
    arrays = ffn_block_arrays("bfloat16", rows=2000 + sms, width=776, hidden=1032)
    skip_if_declined(lambda: cuda_fused.row_gemm_unsupported(arrays[0], 776))
    check_fused(block, unfused_ops, arrays, "bfloat16")
