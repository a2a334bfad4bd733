"""Quantized weights and matvec: rounding, nonfinite values, dispatch and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import ops, testing
from jaxllm.core import ffi

BACKENDS = ["xla", "pallas"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantize_matches_the_documented_example(backend):
    q, scales = ops.quantize(jnp.array([1.0, 3.0, 5.0, -1.0]), group_size=2, backend=backend)
    assert q.tolist() == [42, 127, 127, -25]
    np.testing.assert_array_equal(scales, np.array([3, 5], np.float32) / np.float32(127))


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_round_to_even(backend):
    w = jnp.array([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])  # a scale of one
    q, scales = ops.quantize(w, group_size=8, backend=backend)
    assert scales.tolist() == [1.0]
    assert q.tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@pytest.mark.parametrize("backend", BACKENDS)
def test_group_of_zeros_has_a_zero_scale(backend):
    w = jnp.concatenate([jnp.zeros(64), jnp.ones(64)])
    q, scales = ops.quantize(w, backend=backend)
    assert scales[0] == 0 and not q[:64].any()
    np.testing.assert_array_equal(ops.dequantize(q, scales, backend=backend), w)


@pytest.mark.parametrize("dtype", testing.DTYPES)
@pytest.mark.parametrize("group_size", [64, 24, 1024])  # in packs, element by element, in warps
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.covering(("backend", "dtype"), ("value",), ("group_size",))
def test_nonfinite_group_dequantizes_to_nan(backend, value, group_size, dtype):
    # int8 cannot hold NaN or infinity, so the scale does.
    w = np.random.default_rng(0).standard_normal(6 * group_size, np.float32)
    w[2 * group_size + 5], w[4 * group_size] = value, value
    is_nonfinite = np.isin(np.arange(6), [2, 4])
    q, scales = ops.quantize(jnp.asarray(w, dtype), group_size=group_size, backend=backend)
    expected = np.isnan if np.isnan(value) else np.isposinf
    np.testing.assert_array_equal(expected(scales), is_nonfinite)
    np.testing.assert_array_equal(np.isfinite(scales), ~is_nonfinite)
    assert not q.reshape(6, group_size)[is_nonfinite].any()
    assert q.reshape(6, group_size)[~is_nonfinite].any(axis=1).all()
    widened = ops.dequantize(q, scales, backend=backend).reshape(6, group_size)
    np.testing.assert_array_equal(
        np.isnan(widened), np.repeat(is_nonfinite[:, None], group_size, 1)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_quantization_error_is_at_most_half_a_scale(backend):
    w = jax.random.normal(jax.random.key(0), (40, 256)) * jnp.arange(40)[:, None] ** 2
    q, scales = ops.quantize(w, backend=backend)
    assert abs(q.astype(int)).max() == 127
    deviation = abs(ops.dequantize(q, scales, backend=backend) - w).reshape(40, 4, 64)
    assert (deviation <= scales[..., None] * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_matvec_matches_the_documented_example(backend):
    w = jnp.arange(1.0, 10.0).reshape(3, 3)
    out = ops.matvec(w, jnp.array([1.0, 1.0, -1.0]), backend=backend)
    assert out.tolist() == [0, 3, 6]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [None, 1, 5])
def test_quantized_matmuls_match_the_dequantized_matrix(backend, rows):
    keys = jax.random.split(jax.random.key(0))
    q, scales = ops.quantize(jax.random.normal(keys[0], (24, 128)))
    x = jax.random.normal(keys[1], (128,) if rows is None else (rows, 128))
    expected = x @ ops.dequantize(q, scales).T
    for op in (ops.quantized_matvec, ops.quantized_matmul):
        testing.assert_close(op(q, scales, x, backend=backend), expected, "float32")


Q, SCALES = jnp.ones((4, 128), jnp.int8), jnp.ones((4, 2))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.quantize(jnp.ones((2, 100))), ValueError, "rows of 100; .* group_size 64"),
        (lambda: ops.quantize(jnp.ones((2, 64), int)), TypeError, "w has dtype int32"),
        (lambda: ops.quantize(jnp.array(1.0)), ValueError, r"w has shape \(\)"),
        (lambda: ops.dequantize(SCALES, SCALES), TypeError, "q has dtype float32"),
        (lambda: ops.dequantize(Q, jnp.ones((4, 3))), ValueError, "3 groups a row"),
        (lambda: ops.dequantize(Q, jnp.ones((5, 2))), ValueError, r"scales has shape \(5, 2\)"),
        (lambda: ops.quantized_matvec(Q, SCALES, jnp.ones(64)), ValueError, "128 wide"),
        (lambda: ops.quantized_matvec(Q, SCALES, jnp.ones((17, 128))), ValueError, "from 1 to 16"),
        (lambda: ops.quantized_matmul(Q, SCALES, jnp.ones(128, int)), TypeError, "x has dtype"),
        (lambda: ops.matvec(jnp.ones((3, 4)), jnp.ones(5)), ValueError, r"w has shape \(3, 4\)"),
        (lambda: ops.matvec(jnp.ones((3, 4)), jnp.ones((0, 4))), ValueError, "from 1 to 16"),
        (lambda: ops.matvec(jnp.ones((3, 4)), jnp.ones(4, jnp.bfloat16)), TypeError, "w has dtype"),
    ],
)
def test_invalid_arguments_are_rejected(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_many_rows_use_an_xla_matmul_of_dequantized_weights():
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    shapes = [((40, 128), "int8"), ((40, 2), "float32"), ((21, 128), "bfloat16")]
    program = testing.lower_for_cuda(
        lambda *arrays: ops.quantized_matmul(*arrays, backend="cuda"),
        *(jnp.zeros(shape, dtype) for shape, dtype in shapes),
    )
    (call,) = (line for line in program.splitlines() if "@jaxllm_dequantize" in line)
    assert call.endswith("tensor<40x128xbf16>")  # no float32 matrix in between
    assert "dot_general" in program


def test_auto_picks_cuda_kernels_to_quantize_or_falls_back_to_pallas():
    kernels, others = ("@jaxllm_", "triton") if ffi.is_available() else ("triton", "@jaxllm_")
    w = jnp.ones((8, 128))
    q, scales = ops.quantize(w)
    for call, array in ((lambda w: ops.quantize(w), w), (lambda q: ops.dequantize(q, scales), q)):
        program = testing.lower_for_cuda(call, array)
        assert kernels in program and others not in program


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2])
def test_large_quantized_matvec_handles_outliers_and_nonfinite_inputs(rows):
    # For a large matrix the kernel quantizes x to integers, with one scale per 64 elements.
    rng = np.random.default_rng(0)
    q = rng.integers(-127, 128, (4112, 4096), np.int8)
    scales = rng.uniform(0.5, 1, (4112, 64)).astype(np.float32)
    q[:, 5] = 0  # so the outlier of x contributes nothing
    x = jnp.asarray(rng.normal(size=(rows, 4096)), jnp.bfloat16).at[:, 5].set(1000)
    matrix = jnp.asarray(q), jnp.asarray(scales)
    out = ops.quantized_matvec(*matrix, x, backend="cuda").astype(float)
    want = np.asarray(x, float) @ (q * np.repeat(scales.astype(float), 64, axis=1)).T
    assert np.linalg.norm(out - want) < 3e-3 * np.linalg.norm(want)
    for value in (jnp.inf, -jnp.inf, jnp.nan):
        out = ops.quantized_matvec(*matrix, x.at[0, 4095].set(value), backend="cuda")
        assert not jnp.isfinite(out[0]).any() and jnp.isfinite(out[1:]).all()


def test_a_matrix_without_columns_gives_zeros():
    q, scales = ops.quantize(jnp.ones((2, 0)))
    weights = ops.Quantized(q, scales), ops.Transposed(jnp.ones((2, 0)))
    products = [ops.linear(jnp.ones((3, 0)), weight) for weight in weights]
    for out in (ops.quantized_matmul(q, scales, jnp.ones((3, 0))), *products):
        np.testing.assert_array_equal(out, jnp.zeros((3, 2)))
