"""Rounding to float8 with given scales: bits, layouts, tails of tiles, what is not finite."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.ops.quantization import cuda
from jaxllm.ops.quantization.api_float8 import FLOAT8_ROUND

FLOAT8 = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}
LAYOUTS = ("rows", "transposed", "both")
BACKENDS = ("xla", pytest.param("cuda", marks=pytest.mark.gpu))
# A whole tile of the kernel, tails in each direction, one row of a tile, and many tiles.
SHAPES = ((128, 64), (144, 72), (16, 8), (272, 200), (16, 1024), (1040, 16))


def rounded(x, scale, backend, dtype="float8_e4m3fn", layout="rows", **more):
    static = {"dtype": dtype, "layout": layout, **more}
    return dispatch(FLOAT8_ROUND, Direction.INFERENCE, backend, x, scale, **static)


def wanted(x, scale, dtype):
    """The values, by NumPy; ``scale`` broadcasts."""
    largest = np.float32(ml_dtypes.finfo(FLOAT8[dtype]).max)
    quotients = np.asarray(x, np.float32) * (np.float32(1) / np.asarray(scale))
    values = np.clip(quotients, -largest, largest)
    return np.where(np.isinf(quotients), quotients, values).astype(FLOAT8[dtype])


def heavy_tailed(shape, dtype):
    generator = np.random.default_rng(0)
    x = generator.standard_normal(shape, np.float32)
    x = np.where(generator.random(shape) < 0.02, 1e3 * x, x)
    x[0, :8] = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e4, -1e4, 1e-7]
    return jnp.asarray(x).astype(dtype)


def assert_same_bits(found, expected):
    """Compares bits, and of NaN only that it is one."""
    found = np.asarray(found)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    is_nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), is_nan)
    found, expected = (np.where(is_nan, 0, x.view(np.uint8)) for x in (found, expected))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("of_x", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.covering(("shape", "layout", "backend"), ("of_x", "dtype", "layout", "backend"))
def test_bits_are_those_of_numpy(shape, layout, of_x, dtype, backend):
    # XLA's float32 division on a GPU is not exact.
    device = jax.devices("cpu" if backend == "xla" else None)[0]
    with jax.default_device(device):
        check_bits(shape, layout, of_x, dtype, backend)


def check_bits(shape, layout, of_x, dtype, backend):
    x, one = heavy_tailed(shape, of_x), jnp.asarray([0.37], jnp.float32)
    found = rounded(x, one, backend, dtype, layout)
    found = found if layout == "both" else (found,)
    values = wanted(x, one, dtype)
    of_layouts = {"rows": (values,), "transposed": (values.T,), "both": (values, values.T)}
    for result, expected in zip(found, of_layouts[layout], strict=True):
        assert_same_bits(result, expected)
    if layout == "both":
        return
    count = shape[layout == "transposed"]
    each = jnp.asarray(np.random.default_rng(1).uniform(0.1, 9, count).astype(np.float32))
    result = rounded(x, each, backend, dtype, layout)
    values = wanted(x, each if layout == "transposed" else each[:, None], dtype)
    assert_same_bits(result, values.T if layout == "transposed" else values)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("of_x", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.covering(("shape", "backend"), ("of_x", "backend"))
def test_gradient_of_a_bias_is_the_sum_of_unrounded_rows(shape, of_x, backend):
    x, scale = heavy_tailed(shape, of_x)[1:], jnp.asarray([0.37], jnp.float32)
    x = jnp.concatenate([x, x[:1]])
    *found, sums = rounded(x, scale, backend, layout="both", has_bias=True)
    for result, expected in zip(found, rounded(x, scale, backend, layout="both"), strict=True):
        assert_same_bits(result, np.asarray(expected))
    wide = np.asarray(x, np.float64)
    assert (sums.shape, sums.dtype) == (x.shape[1:], of_x)
    lost = abs(np.asarray(sums, np.float64) - wide.sum(0))
    eps = float(jnp.finfo(of_x).eps)
    assert (lost <= eps / 2 * abs(wide.sum(0)) + len(x) * 2.0**-24 * abs(wide).sum(0)).all()
    again = rounded(x, scale, backend, layout="both", has_bias=True)[2]
    np.testing.assert_array_equal(sums, again)
    assert not rounded(x[:0], scale, backend, layout="both", has_bias=True)[2].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(32, 48), (3, 24)], ids=str)
def test_vmap_matches_a_loop(shape, backend):
    x = jnp.stack([heavy_tailed(shape, "bfloat16"), -heavy_tailed(shape, "bfloat16") / 3])
    scale = jnp.asarray([[0.5], [2.0]], jnp.float32)
    calls = (*((of, {}) for of in LAYOUTS), ("both", {"has_bias": True}))
    # Of an odd number of rows the second result starts at 8 bytes after a multiple of 16.
    for layout, more in calls if shape[0] % 16 == 0 else [("rows", {})]:

        def of_one(x, scale, layout=layout, more=more):
            return rounded(x, scale, backend, layout=layout, **more)

        found, each = (
            jax.vmap(of_one)(x, scale),
            [of_one(*one) for one in zip(x, scale, strict=True)],
        )
        for result, *expected in zip(*map(jax.tree.leaves, (found, *each)), strict=True):
            if result.dtype == x.dtype:
                wide = np.stack(expected).astype(np.float32)
                np.testing.assert_array_equal(np.asarray(result, np.float32), wide)
            else:
                assert_same_bits(result, np.stack(expected))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_that_the_kernel_does_not_take_are_named(layout):
    one = jnp.ones(1, jnp.float32)
    for shape, reason in (((16, 12), "12 columns"), ((8, 16), "8 rows")):
        x = jnp.ones(shape)
        if "rows" in reason and layout == "rows":
            assert rounded(x, one, "auto", layout=layout).shape == x.shape
            continue
        static = {"dtype": "float8_e4m3fn", "layout": layout}
        assert reason in (cuda.float8_round_unsupported(x, one, **static) or "")
        for result in jax.tree.leaves(rounded(x, one, "auto", layout=layout)):
            assert sorted(result.shape) == sorted(shape)
