"""Matmul: transposed operands, output dtypes, backends, precision and errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import with_gradients

import jaxllm
from jaxllm.core import ffi
from jaxllm.ops import matmul
from jaxllm.testing import DTYPES, assert_close, error, lower_for_cuda

TRANSPOSES = [(False, False), (False, True), (True, False), (True, True)]


def operands(dtype, rows, depth, columns, transposes=(False, False)):
    keys = jax.random.split(jax.random.key(0), 3)
    a = jax.random.normal(keys[0], (depth, rows) if transposes[0] else (rows, depth))
    b = jax.random.normal(keys[1], (columns, depth) if transposes[1] else (depth, columns))
    bias = jax.random.normal(keys[2], (columns,))
    return [x.astype(dtype) for x in (a, b / depth**0.5, bias)]


@pytest.mark.parametrize("transposes", TRANSPOSES)
def test_operands_may_be_transposed(transposes):
    a, b, _ = operands("float32", 5, 7, 3, transposes)
    out = matmul(a, b, transpose_a=transposes[0], transpose_b=transposes[1])
    expected = (a.T if transposes[0] else a) @ (b.T if transposes[1] else b)
    assert_close(out, expected, "float32")


def test_leading_axes_of_a_are_kept():
    a, b, _ = operands("float32", 6, 7, 3)
    assert_close(matmul(a.reshape(2, 3, 7), b), (a @ b).reshape(2, 3, 3), "float32")
    assert_close(matmul(a[0], b), (a @ b)[0], "float32")


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_float32_output_of_bfloat16_operands_is_not_rounded(backend):
    a, b, bias = operands("bfloat16", 16, 64, 24)

    def wide(*arrays):
        return matmul(*arrays, out_dtype=jnp.float32, backend=backend)

    out, gradients = with_gradients(wide, (a, b, bias))
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64) + np.asarray(bias, np.float64)
    assert out.dtype == jnp.float32
    assert_close(out, exact, "float32")
    assert [x.dtype for x in gradients] == [jnp.bfloat16] * 3


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_bfloat16_output_of_float32_operands_is_rounded_once(backend):
    a, b, _ = operands("float32", 16, 64, 24)
    out = matmul(a, b, out_dtype="bfloat16", backend=backend)
    np.testing.assert_array_equal(out, matmul(a, b, backend=backend).astype("bfloat16"))


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_bias_gradient_is_summed_in_float32(backend):
    rows = 4096
    a, b, bias = operands("bfloat16", rows, 4, 5)
    pull = jax.vjp(lambda bias: matmul(a, b, bias, backend=backend), bias)[1]
    # In bfloat16 a sum of ones stops at 256.
    assert (pull(jnp.ones((rows, 5), jnp.bfloat16))[0] == rows).all()


def test_only_inputs_are_saved_without_an_activation():
    kept = jax.tree.leaves(jax.vjp(matmul, *operands("float32", 6, 4, 5))[1])
    assert (6, 5) not in [leaf.shape for leaf in kept]


@pytest.mark.parametrize("backend", ["cuda", "pallas", "xla"])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("transposes", TRANSPOSES)
def test_forward_dgrad_and_wgrad_run_on_the_chosen_backend(
    backend, activation, transposes, with_kernels
):
    options = {"transpose_a": transposes[0], "transpose_b": transposes[1], "activation": activation}
    arrays = operands("bfloat16", 16, 64, 24, transposes)
    program = lower_for_cuda(
        lambda *a: with_gradients(lambda *b: matmul(*b, **options, backend=backend), a), *arrays
    )
    assert len(re.findall(r"@jaxllm_matmul\b", program)) == (3 if backend == "cuda" else 0)
    assert len(re.findall("stablehlo.dot_general", program)) == (3 if backend == "xla" else 0)
    assert ("triton" in program) == (backend == "pallas")


def test_auto_picks_xla():
    (call,) = jaxllm.explain(matmul, *operands("float32", 6, 4, 5)).calls
    assert call.on_gpu == call.fallback == "xla"
    assert call.rejected == ()  # no kernel comes before XLA


def test_mismatched_shapes_are_rejected():
    a, b, bias = operands("float32", 3, 4, 5)
    with pytest.raises(ValueError, match=r"b has shape \(5, 4\); it must be \(4, N\)"):
        matmul(a, b.T)
    with pytest.raises(
        ValueError, match=r"b has shape \(4, 5\); it must be \(N, 4\), as transpose"
    ):
        matmul(a, b, transpose_b=True)
    with pytest.raises(ValueError, match=r"b has shape \(4, 5\); it must be \(3, N\)"):
        matmul(a, b, transpose_a=True)
    with pytest.raises(ValueError, match=r"b has shape \(1, 4, 5\)"):
        matmul(a, b[None])
    with pytest.raises(ValueError, match=r"a has shape \(1, 4, 3\); it must be \(K, M\)"):
        matmul(a.T[None], b, transpose_a=True)
    with pytest.raises(ValueError, match=r"a has shape \(\); it must be \(..., K\)"):
        matmul(jnp.float32(1), b)
    with pytest.raises(ValueError, match=r"bias has shape \(4,\); it must be \(5,\)"):
        matmul(a, b, bias[:4])


def test_invalid_dtypes_and_options_are_rejected():
    a, b, bias = operands("float32", 3, 4, 5)
    with pytest.raises(TypeError, match="a has dtype int32; it must be a floating-point array"):
        matmul(a.astype(int), b)
    with pytest.raises(
        TypeError, match="b has dtype float16; it must have the dtype of a, float32"
    ):
        matmul(a, b.astype(jnp.float16))
    with pytest.raises(TypeError, match="bias has dtype float16; it must have the dtype of a"):
        matmul(a, b, bias.astype(jnp.float16))
    with pytest.raises(TypeError, match="out_dtype is float8_e5m2; it must be a floating dtype of"):
        matmul(*operands("float32", 3, 4, 5)[:2], out_dtype=jnp.float8_e5m2)
    with pytest.raises(TypeError, match="out_dtype is 'none'; it must be a dtype"):
        matmul(*operands("float32", 3, 4, 5)[:2], out_dtype="none")
    with pytest.raises(TypeError, match="out_dtype is int32; it must be a floating dtype"):
        matmul(a, b, out_dtype=jnp.int32)
    with pytest.raises(ValueError, match="activation is 'relu'; it must be None or 'gelu'"):
        matmul(a, b, activation="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="precision is 'fast'; it must be None or 'tf32'"):
        matmul(a, b, precision="fast")  # type: ignore[arg-type]


# Sizes with partial tiles, rows aligned to 16, 4 and 2 bytes, partial K-blocks, and in the last two
# sizes for the Hopper kernels.
SIZES = [(1, 1, 1), (300, 77, 514), (129, 65, 257), (264, 72, 136), (1288, 1096, 1160)]


SIZES += [(2056, 264, 4104), (4104, 520, 2056)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("sizes", SIZES)
def test_cuda_kernels_match_reference_for_any_size(dtype, transposes, sizes):
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    options = {"transpose_a": transposes[0], "transpose_b": transposes[1], "activation": "gelu"}
    arrays = operands(dtype, *sizes, transposes=transposes)

    def run(backend, *arrays):
        return with_gradients(lambda *a: matmul(*a, **options, backend=backend), arrays)

    expected = run("xla", *(x.astype("float32") for x in arrays))
    assert_close(run("cuda", *arrays), expected, dtype, run("xla", *arrays))


@pytest.mark.gpu
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_cuda_kernels_write_float32_outputs(dtype, transposes, sizes):
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    options = {"transpose_a": transposes[0], "transpose_b": transposes[1]}
    arrays = operands(dtype, *sizes, transposes=transposes)
    out = matmul(*arrays, **options, out_dtype="float32", backend="cuda")
    expected = matmul(*(x.astype("float32") for x in arrays), **options, backend="xla")
    assert out.dtype == jnp.float32
    assert_close(out, expected, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("transposes", TRANSPOSES)
@pytest.mark.parametrize("sizes", SIZES[1:])
def test_cuda_kernels_round_to_tf32_only_where_allowed(transposes, sizes):
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    options = {"transpose_a": transposes[0], "transpose_b": transposes[1]}
    arrays = operands("float32", *sizes, transposes=transposes)
    exact = matmul(*arrays, **options, backend="xla")
    rounded = matmul(*arrays, **options, precision="tf32", backend="cuda")
    assert 1e-5 < error(rounded, exact) < 2e-3
    assert error(matmul(*arrays, **options, backend="cuda"), exact) < 4e-6
