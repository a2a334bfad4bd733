"""Quantization to float8: values, scales, and what is not finite."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.ops import float8_matmul, float8_quantize

FLOAT8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
DTYPES = ("float32", "bfloat16", "float16")
each_format = pytest.mark.parametrize("name", FLOAT8)


def heavy_tailed(*shape):
    generator = np.random.default_rng(0)
    x = generator.standard_normal(shape, np.float32)
    return np.where(generator.random(shape) < 0.02, 1e3 * x, x)


@each_format
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [-1, None])
def test_values_are_rounded_quotients_of_current_scales(name, dtype, axis):
    x = jnp.asarray(heavy_tailed(2, 5, 300)).astype(dtype)
    values, scale = float8_quantize(x, name, axis=axis)
    wide, largest = np.asarray(x, np.float32), np.float32(ml_dtypes.finfo(FLOAT8[name]).max)
    wanted = np.abs(wide).max(axis=axis) / largest
    assert (values.shape, values.dtype) == (x.shape, FLOAT8[name])
    assert (scale.shape, scale.dtype) == (wanted.shape, jnp.float32)
    np.testing.assert_allclose(scale, wanted, rtol=2e-7)
    quotients = wide / np.expand_dims(np.asarray(scale), -1 if axis == -1 else ())
    found = np.asarray(values, np.float32)
    # XLA may multiply by the inverse of a scale, whose product is a unit from the quotient.
    near = [np.clip(quotients * (1 + unit), -largest, largest) for unit in (-3e-7, 0, 3e-7)]
    assert np.any([found == q.astype(FLOAT8[name]).astype(np.float32) for q in near], axis=0).all()
    assert np.abs(found).max() == largest


@each_format
@pytest.mark.parametrize("dtype", DTYPES)
def test_error_is_within_half_a_unit_of_the_format(name, dtype):
    x = jnp.asarray(heavy_tailed(7, 513)).astype(dtype)
    values, scale = float8_quantize(x, name)
    back, wide = np.asarray(values, np.float64) * np.asarray(scale)[:, None], np.asarray(x, float)
    info = ml_dtypes.finfo(FLOAT8[name])
    bound = 2.0 ** -(info.nmant + 1) * np.abs(wide)
    least = float(info.smallest_subnormal) / 2 * np.asarray(scale)[:, None]
    assert (np.abs(back - wide) <= np.maximum(bound, least) * (1 + 1e-6)).all()


@each_format
@pytest.mark.parametrize("axis", [-1, None])
def test_zeros_have_the_scale_1(name, axis):
    x = jnp.zeros((3, 16)).at[1].set(2.0 if axis == -1 else 0.0)
    values, scale = float8_quantize(x, name, axis=axis)
    assert jnp.atleast_1d(scale)[0] == 1
    assert not np.asarray(values, np.float32)[[0, 2]].any()


def test_no_finite_value_overflows():
    info = jnp.finfo(jnp.float32)
    x = jnp.asarray([[info.max, -1.0], [info.tiny, -info.tiny], [3e-37, 1e-38]])
    for name in FLOAT8:
        values, scale = float8_quantize(x, name)
        assert np.isfinite(np.asarray(values, np.float32)).all()
        assert np.isfinite(scale).all() and (np.asarray(scale) > 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [-1, None])
def test_nonfinite_values_stay_visible_and_change_no_scale(dtype, axis):
    x = heavy_tailed(4, 64)
    x[0, 3], x[1, 5], x[2, 7] = np.nan, np.inf, -np.inf
    x = jnp.asarray(x).astype(dtype)
    _, expected = float8_quantize(jnp.where(jnp.isfinite(x), x, 0), axis=axis)
    values, scale = float8_quantize(x, axis=axis)  # e4m3 has no infinity
    np.testing.assert_array_equal(scale, expected)
    np.testing.assert_array_equal(np.isnan(np.asarray(values, np.float32)), ~np.isfinite(x))
    values, _ = float8_quantize(x, jnp.float8_e5m2, axis=axis)
    wide = np.asarray(values, np.float32)
    assert np.isnan(wide[0, 3]) and wide[1, 5] == np.inf and wide[2, 7] == -np.inf
    assert np.isfinite(wide).sum() == x.size - 3


@pytest.mark.parametrize("shape", [(0, 16), (3, 0)])
def test_empty_arrays_have_empty_rows_or_the_scale_1(shape):
    values, scale = jax.jit(float8_quantize)(jnp.zeros(shape))
    assert values.shape == shape and scale.shape == shape[:1]
    assert (np.asarray(scale) == 1).all()


def test_product_of_quantized_arrays_is_near_the_product():
    x, y = heavy_tailed(40, 256), heavy_tailed(24, 256)
    (a, scale_a), (b, scale_b) = (
        float8_quantize(jnp.asarray(x)),
        float8_quantize(jnp.asarray(y), axis=None),
    )
    out = float8_matmul(a, b, scale_a, scale_b, out_dtype=jnp.float32)
    lost = np.linalg.norm(out - x @ y.T) / np.linalg.norm(x @ y.T)
    assert lost < 0.06


def test_wrong_arguments_raise_errors_that_name_them():
    x = jnp.ones((2, 16))
    with pytest.raises(TypeError, match="x has dtype int32; it must be a floating-point array"):
        float8_quantize(x.astype(int))
    with pytest.raises(TypeError, match="dtype is bfloat16; it must be float8_e4m3fn or float8_e5"):
        float8_quantize(x, jnp.bfloat16)
    with pytest.raises(ValueError, match="axis is 0; it must be -1 or None"):
        float8_quantize(x, axis=0)
    with pytest.raises(ValueError, match=r"x has shape \(\); it must have a last axis"):
        float8_quantize(x[0, 0])
