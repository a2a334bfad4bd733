"""Rounding a whole matrix to float8 with its current scale: bits, layouts, sizes, extremes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_float8_round import (
    BACKENDS,
    FLOAT8,
    LAYOUTS,
    SHAPES,
    assert_same_bits,
    heavy_tailed,
    rounded,
    wanted,
)

from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.ops.quantization import cuda
from jaxllm.ops.quantization.api_float8 import FLOAT8_SCALE_AND_ROUND
from jaxllm.ops.rounding import current_scale

# More tiles than run at once; and a row of tiles more than a power of two.
LARGE = ((20000, 1032), (1040, 8200))


def quantized(x, backend, dtype="float8_e4m3fn", layout="both", **more):
    """``(values, transposed, sums, scale)``."""
    static = {"dtype": dtype, "layout": layout, "has_bias": False, **more}
    return dispatch(FLOAT8_SCALE_AND_ROUND, Direction.INFERENCE, backend, x, **static)


def scale_of(x, dtype):
    # Under jit XLA divides by a constant, as it does in a layer.
    return np.asarray(jax.jit(lambda x: current_scale(x, jnp.dtype(dtype), (0, 1)))(x))


def check(x, backend, dtype, layout="both"):
    values, transposed, sums, scale = quantized(x, backend, dtype, layout)
    assert (scale.shape, scale.dtype, sums) == ((1,), jnp.float32, None)
    np.testing.assert_array_equal(scale[0], scale_of(x, dtype))
    expected = wanted(x, scale, dtype)
    for name, found, each in (("transposed", values, expected), ("rows", transposed, expected.T)):
        assert (found is None) == (layout == name)
        if found is not None:
            assert_same_bits(found, each)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("of_x", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.covering(("shape", "backend"), ("of_x", "dtype", "backend"), ("layout", "backend"))
def test_bits_are_those_of_numpy(shape, layout, of_x, dtype, backend):
    # XLA's float32 division on a GPU is not exact.
    with jax.default_device(jax.devices("cpu" if backend == "xla" else None)[0]):
        check(heavy_tailed(shape, of_x), backend, dtype, layout)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("of_x", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", LARGE)
def test_bits_of_more_tiles_than_run_at_once(shape, of_x, dtype):
    x = heavy_tailed(shape, of_x)
    # The largest element is the last one, or in the middle of the others.
    for at in ((-1, -1), (shape[0] // 2, shape[1] // 2)):
        check(x.at[at].set(60000), "cuda", dtype)
    found, again = (quantized(x, "cuda", dtype, has_bias=True) for _ in range(2))
    for one, two in zip(found, again, strict=True):
        assert_same_bits(one.view(jnp.uint8), np.asarray(two.view(jnp.uint8)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOAT8)
def test_extreme_numbers_have_the_scale_of_the_formula(dtype, backend):
    tiny, largest = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    for number in (0.0, -0.0, 1e-45, tiny, 1e-30, largest, -largest, np.inf, -np.inf, np.nan):
        for others in (0.0, 1.0):
            x = jnp.full((32, 24), others).at[17, 9].set(number)
            with jax.default_device(jax.devices("cpu" if backend == "xla" else None)[0]):
                check(x, backend, dtype)
    assert quantized(jnp.full((16, 8), jnp.nan), backend, dtype)[3] == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("of_x", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.covering(("shape", "backend"), ("of_x", "backend"))
def test_sums_are_those_of_rounding_with_a_given_scale(shape, of_x, backend):
    x = heavy_tailed(shape, of_x)[1:]
    x = jnp.concatenate([x, x[:1]])
    *found, scale = quantized(x, backend, has_bias=True)
    given = rounded(x, scale, backend, layout="both", has_bias=True)
    for result, expected in zip(found, given, strict=True):
        assert_same_bits(result.view(jnp.uint8), np.asarray(expected.view(jnp.uint8)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_no_elements_have_the_scale_one(shape, backend):
    values, transposed, sums, scale = quantized(jnp.zeros(shape), backend, has_bias=True)
    assert (values.shape, transposed.shape, scale) == (shape, shape[::-1], 1)
    assert sums.shape == shape[1:]
    assert not sums.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(32, 48), (3, 24)], ids=str)
def test_vmap_matches_a_loop(shape, backend):
    x = jnp.stack([heavy_tailed(shape, "bfloat16"), -heavy_tailed(shape, "bfloat16") / 3])
    calls = (*((of, False) for of in LAYOUTS), ("both", True))
    # Of an odd number of rows the second result starts at 8 bytes after a multiple of 16.
    for layout, has_bias in calls if shape[0] % 16 == 0 else [("rows", False)]:

        def of_one(x, layout=layout, has_bias=has_bias):
            results = quantized(x, backend, layout=layout, has_bias=has_bias)
            return [each for each in results if each is not None]

        found, each = jax.vmap(of_one)(x), [of_one(one) for one in x]
        for result, *expected in zip(found, *each, strict=True):
            bits = np.stack([np.asarray(one.view(jnp.uint8)) for one in expected])
            np.testing.assert_array_equal(np.asarray(result.view(jnp.uint8)), bits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_that_the_kernel_does_not_take_are_named(layout):
    for shape, reason in (((16, 12), "12 columns"), ((8, 16), "8 rows")):
        x, static = jnp.ones(shape), {"dtype": "float8_e4m3fn", "layout": layout}
        found = cuda.float8_scale_and_round_unsupported(x, **static)
        assert found is None if "rows" in reason and layout == "rows" else reason in (found or "")
        assert quantized(x, "auto", layout=layout)[3] == np.float32(1) / 448
