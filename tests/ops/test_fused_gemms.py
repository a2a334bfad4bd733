"""GEMMs fused with the residual and the layer norm after them: kernels, parts and rejections."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import LARGE_LINEAR, random_arrays

import jaxllm
from jaxllm.core.dispatch import Op
from jaxllm.ops import bias_gelu, gelu, layer_norm, linear
from jaxllm.ops.gemm import cuda_fused, fused, reference
from jaxllm.ops.gemm.tile_order import TileOrdered
from jaxllm.testing import assert_close, error, lower_for_cuda

EPS = 1e-5
SIZES = LARGE_LINEAR


def normalized(x):
    """The layer norm of ``x`` without scale and bias, in plain ``jax.numpy``."""
    mean = x.mean(-1)
    rstd = 1 / jnp.sqrt(x.var(-1) + EPS)
    return (x - mean[..., None]) * rstd[..., None], mean, rstd


def residual_arrays(dtype="float32", rows=3, hidden=6, out=5):
    """Input, weight, bias and residual of ``matmul_residual``."""
    return random_arrays((rows, hidden), (hidden, out), (out,), (rows, out), dtype=dtype)


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_residual_gemm_matches_unfused_ops(backend, with_bias):
    x, weight, bias, residual = residual_arrays()
    bias = bias if with_bias else None
    norm = fused.normalize(backend, residual, EPS)
    assert_close(tuple(norm), normalized(residual), "float32")
    expected = residual + linear(x, weight, bias)
    arrays = (x, weight, bias, residual)
    assert_close(fused.matmul_residual(backend, *arrays), expected, "float32")
    out, following = fused.matmul_residual_norm(backend, *arrays, norm, eps=EPS)
    assert_close((out, following), (expected, normalized(expected)), "float32")


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_dgrad_gemm_with_norm_backward_matches_unfused_ops(backend):
    x, weight, dout, dtotal = random_arrays((3, 5), (5, 7), (3, 7), (3, 5))

    def branch_and_residual(x):
        return linear(layer_norm(x, jnp.ones(5)), weight), x

    (expected,) = jax.vjp(branch_and_residual, x)[1]((dout, dtotal))
    x_hat, _, rstd = fused.normalize(backend, x, EPS)
    found, sums = fused.matmul_norm_backward(backend, dout, weight, x_hat, rstd, dtotal)
    assert_close((found, sums), (expected, dtotal.sum(0)), "float32")


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_gelu_gemm_matches_unfused_ops(backend):
    x, weight, bias, *_ = residual_arrays()
    h, options = x @ weight, {"out_columns": 8}
    arrays = (backend, x, weight, bias)
    out, saved = fused.matmul_bias_gelu(*arrays, saves_derivative=False, **options)
    # The parts save the input of GELU, without the bias.
    assert_close((out, saved), (bias_gelu(h, bias), h), "float32")
    # Or, where the whole call saves that, GELU's derivative in the kernel's order.
    out, saved = fused.matmul_bias_gelu(*arrays, saves_derivative=True, **options)
    derivative = jax.vmap(jax.vmap(jax.grad(gelu)))(h + bias)
    assert_close((out, saved.unpack()), (bias_gelu(h, bias), derivative), "float32")


def test_delta_is_the_inner_product_of_an_output_and_its_gradient():
    B, T, N, H = 2, 128, 3, 64
    dout, weight, out = random_arrays((B, T, 40), (N * H, 40), (B, T, N * H))
    found = reference.matmul_delta(dout, weight, out, heads=N, kv_heads=N)
    attended, delta, row_sums = found
    assert_close(attended, dout @ weight.T, "float32")
    # As attention's backward has it: rowsum(dout * out) of each head.
    by_hand = (attended.reshape(B, T, N, H) * out.reshape(B, T, N, H)).sum(-1)
    assert_close(delta, by_hand.transpose(0, 2, 1), "float32")
    assert_close(row_sums.sum(0), attended.sum((0, 1)), "float32")
    parts = fused.matmul_delta("xla", dout, weight, out, heads=N, kv_heads=N)
    assert_close(parts[0], attended, "float32")
    assert parts[1:] == (None, None)  # attention's backward computes them


def test_parts_round_a_residual_once():
    rows, columns = 40, 16
    index = jnp.arange(rows * columns).reshape(rows, columns) % 251
    x, weight = jnp.ones((rows, 64), "bfloat16"), jnp.full((64, columns), 1 / 64, "bfloat16")
    # In bfloat16 1 + 256 is 256: a sum that is rounded twice loses the 1.
    arrays = (x, weight, jnp.full(columns, 256, "bfloat16"), (index - 256).astype("bfloat16"))
    total = fused.matmul_residual("xla", *arrays)
    np.testing.assert_array_equal(total.astype("float32"), 1 + index)


def calls_of_fusions(rows, width, columns, dtype="bfloat16"):
    """Arrays and options for each fused GEMM, by name."""

    def of(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    def float32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    x, weight, bias, dout = of(rows, width), of(width, columns), of(columns), of(rows, columns)
    norm = (dout, float32(rows), float32(rows))
    saved = jax.eval_shape(lambda: TileOrdered(jnp.zeros(0), ()).pack(jnp.zeros(dout.shape, dtype)))
    sequences, heads = (rows // 128, 128), {"heads": columns // 64, "kv_heads": columns // 64}
    return {
        "matmul_bias": ((x, weight, bias), {}),
        "matmul_bias_gelu": ((x, weight, bias), {"saves_derivative": True, "out_columns": width}),
        "matmul_dgelu": ((x, of(columns, width), saved, bias), {}),
        "matmul_residual": ((x, weight, bias, dout), {}),
        "matmul_residual_norm": ((x, weight, bias, dout, norm), {"eps": EPS}),
        "matmul_norm_backward": ((x, of(columns, width), dout, float32(rows), dout), {}),
        "matmul_delta": (
            (of(*sequences, width), of(columns, width), of(*sequences, columns)),
            heads,
        ),
        "fold_norm": ((of(width), of(width), weight, bias), {}),
        "fold_norm_backward": ((of(width), of(width), weight, weight, bias), {}),
        "wgrad_pair": ((x, dout, x, dout), {"min_rows": 0, "sms_of_tile": 1}),
    }


FUSIONS = list(calls_of_fusions(128, 64, 64))


def explain_fusion(name, *sizes, **options):
    """What runs a call of a fused GEMM under ``auto``, and the program for a GPU."""
    arrays, static = calls_of_fusions(*sizes, **options)[name]
    run = lambda *a: getattr(fused, name)("auto", *a, **static)  # noqa: E731
    return jaxllm.explain(run, *arrays).calls, lower_for_cuda(run, *arrays)


def test_every_fusion_is_tested():
    ops = {op.name for op in vars(fused).values() if isinstance(op, Op) and op.parts}
    assert ops == set(FUSIONS)


@pytest.mark.parametrize("name", FUSIONS)
def test_one_kernel_serves_a_large_call(on_hopper, name):
    calls, program = explain_fusion(name, 132 * 128, 704, 1152)
    assert [(call.stem, call.on_gpu, call.rejected) for call in calls] == [(name, "cuda", ())]
    assert len(re.findall(r"@jaxllm_", program)) == 1
    assert "dot_general" not in program


@pytest.mark.parametrize("name", FUSIONS)
def test_parts_run_where_the_kernel_rejects_a_call(on_hopper, name):
    calls, program = explain_fusion(name, 132 * 128, 64, 192, dtype="float32")
    assert (calls[0].stem, calls[0].on_gpu, calls[0].fallback) == (name, *2 * ["its parts"])
    ((rejected, reason),) = calls[0].rejected
    assert rejected == "cuda"
    assert "has dtype float32" in reason
    assert "@jaxllm_matmul" not in program


@pytest.mark.parametrize("backend", ["xla", "pallas"])
@pytest.mark.parametrize("name", FUSIONS)
def test_backends_without_kernels_run_the_parts(on_hopper, name, backend):
    arrays, static = calls_of_fusions(128, 64, 64)[name]
    run = lambda *a: getattr(fused, name)(backend, *a, **static)  # noqa: E731
    first, *others = jaxllm.explain(run, *arrays).calls
    assert (first.stem, first.on_gpu, first.rejected) == (name, "its parts", ())
    assert {call.on_gpu for call in others} <= {backend, "its parts"}
    assert "@jaxllm_" not in lower_for_cuda(run, *arrays)


def test_wide_rows_are_normalized_by_a_separate_kernel(on_hopper):
    columns = cuda_fused._MAX_ROW_TILES * 192 + 8
    calls, program = explain_fusion("matmul_residual_norm", 512, 64, columns)
    assert "tiles, and no more than 48 run at once" in dict(calls[0].rejected)["cuda"]
    names = ["matmul_residual_norm", "matmul_residual", "layer_norm_forward"]
    assert [(call.stem, call.on_gpu) for call in calls] == list(
        zip(names, ("its parts", "cuda", "cuda"), strict=True)
    )
    found = re.findall(r"@jaxllm_(\w+)", program)
    assert sorted(set(found)) == ["layer_norm_forward", "matmul_residual"]
    assert "dot_general" not in program


@pytest.mark.parametrize(
    "changed", [{"dtype": "float32"}, {"out": 60}, {"dtype": "float16", "rows": 131 * 128}]
)
def test_xla_adds_the_residual_of_other_gemms(on_hopper, changed):
    arrays = jax.eval_shape(lambda: residual_arrays(**({"dtype": "bfloat16"} | SIZES | changed)))
    program = lower_for_cuda(lambda *a: fused.matmul_residual("cuda", *a), *arrays)
    assert "@jaxllm_" not in program
    assert program.count("dot_general") == 1


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("rows", "hidden", "out"),
    [
        (1, 8, 8),
        (127, 64, 264),
        (129, 72, 256),
        (300, 520, 248),
        (2500, 1032, 1544),
        # Each consumer warpgroup of an SM computes several tiles in turn.
        (40000, 72, 200),
        (17000, 3072, 776),
    ],
)
def test_residual_gemm_is_exact_for_any_rows_and_widths(
    monkeypatch, skip_if_declined, dtype, rows, hidden, out
):
    monkeypatch.setattr(cuda_fused, "_MIN_TILES_OF_SM", 0)
    arrays = residual_arrays(dtype, rows=rows, hidden=hidden, out=out)
    skip_if_declined(lambda: cuda_fused.gemm_unsupported(arrays[0], out))
    found, again = (jax.jit(cuda_fused.matmul_residual)(*arrays) for _ in range(2))
    expected = fused.matmul_residual("xla", *(x.astype("float32") for x in arrays))
    assert_close(found, expected, dtype, fused.matmul_residual("xla", *arrays))
    assert error(found, again) == 0


@pytest.mark.hopper
@pytest.mark.parametrize("with_bias", [True, False])
def test_kernel_adds_the_residual_before_rounding(with_bias):
    rows, width, columns = 400, 64, 328
    x = jnp.ones((rows, width), "bfloat16")
    weight = jnp.full((width, columns), 1 / width, "bfloat16")
    # In bfloat16 1 + 256 is 256: a sum that is rounded twice loses the 1.
    bias = jnp.full(columns, 256, "bfloat16") if with_bias else None
    index = jnp.arange(rows * columns).reshape(rows, columns) % 251
    residual = (index - (256 if with_bias else 0)).astype("bfloat16")
    total = cuda_fused.matmul_residual(x, weight, bias, residual)
    np.testing.assert_array_equal(total.astype("float32"), 1 + index)


@pytest.mark.hopper
def test_vmap_matches_separate_calls(monkeypatch):
    monkeypatch.setattr(cuda_fused, "_MIN_TILES_OF_SM", 0)
    first = residual_arrays("bfloat16", rows=130, hidden=64, out=264)
    second = [2 * x for x in first]
    stacked = [jnp.stack(pair) for pair in zip(first, second, strict=True)]
    mapped = jax.vmap(cuda_fused.matmul_residual)(*stacked)
    for i, arrays in enumerate((first, second)):
        assert_close(mapped[i], cuda_fused.matmul_residual(*arrays), "bfloat16")
