"""Norms in float8: values near those of NumPy, layouts, sizes, statistics, what is not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm import testing
from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.ops.norm.api import ADD_LAYER_NORM, ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from jaxllm.ops.quantization import cuda
from jaxllm.ops.quantization.api_float8 import FLOAT8_NORM
from jaxllm.ops.rounding import round_to_float8

BACKENDS = ("xla", pytest.param("cuda", marks=pytest.mark.gpu))
NORMS = ("layer", "rms")
EPS = 1e-5
# One thread, a part of a warp, a part of a CTA, and each size of a CTA.
SHAPES = ((16, 8), (48, 200), (48, 768), (16, 1600), (48, 2048), (48, 4096), (16, 8192))


def forward(arrays, backend, layout="both", **static):
    static = {"eps": EPS, "layout": layout, **static}
    return dispatch(FLOAT8_NORM, Direction.FORWARD, backend, *arrays, **static)


def inputs(shape, norm="layer", dtype="bfloat16", weights=None, adds=True, x_bias=True) -> Any:
    """The arrays of a call, with rows of different means and sizes."""
    rows, width = shape
    generator = np.random.default_rng(0)

    def normal(*sizes):
        return generator.standard_normal(sizes, np.float32)

    of_row = np.exp(normal(rows, 1))
    x = of_row * (normal(rows, width) + normal(rows, 1))
    residual = of_row * normal(rows, width) if adds else None
    bias = 0.3 * normal(width) if norm == "layer" else None
    x_bias = normal(width) if adds and x_bias and norm == "layer" else None
    scale = 1 + 0.2 * normal(width)
    weights = weights or dtype
    arrays = ((x, dtype), (residual, dtype), (x_bias, weights), (scale, weights), (bias, weights))
    given = [None if each is None else jnp.asarray(each, kind) for each, kind in arrays]
    return (*given, jnp.asarray([0.017], jnp.float32))


def normalized(x, residual, x_bias, scale, bias, _, h=None):
    """The norm in float64, of ``h`` or of ``x``."""
    wide = np.asarray(x if h is None else h, np.float64)
    centred = wide if bias is None else wide - wide.mean(1, keepdims=True)
    rstd = 1 / np.sqrt((centred * centred).mean(1, keepdims=True) + EPS)
    offset = 0 if bias is None else np.asarray(bias, np.float64)
    return centred * rstd * np.asarray(scale, np.float64) + offset


def assert_rounded(found, values, scale):
    """Checks that each element is ``values / scale`` rounded, but for an error before it."""
    found, info = np.asarray(found), ml_dtypes.finfo(ml_dtypes.float8_e4m3fn)
    assert (found.shape, found.dtype) == (values.shape, info.dtype)
    quotients = np.clip(values / scale, -float(info.max), float(info.max))
    step = 2.0 ** np.floor(np.log2(np.maximum(abs(quotients), float(info.smallest_normal))))
    step *= float(info.eps)
    # The mean has an error of float32, and so has a term that cancels.
    error = 2.0**-16 * np.maximum(abs(quotients), abs(values).max() / scale)
    assert (abs(found.astype(np.float64) - quotients) <= step / 2 + error).all()


def assert_same_bits(found, expected):
    np.testing.assert_array_equal(np.asarray(found).view("u1"), np.asarray(expected).view("u1"))


def unfused(arrays, backend, **static) -> Any:
    """``(out, h, mean, rstd)`` of the ops that write the dtype of ``x``."""
    x, residual, x_bias, scale, bias, _ = arrays
    if bias is None:
        op, given = (
            (RMS_NORM, (x, scale)) if residual is None else (ADD_RMS_NORM, (x, residual, scale))
        )
    elif residual is None:
        op, given = LAYER_NORM, (x, scale, bias)
    else:
        op, given = ADD_LAYER_NORM, (x, residual, x_bias, scale, bias)
    out, *others = dispatch(op, Direction.FORWARD, backend, *given, eps=EPS, **static)
    h = None if residual is None else others.pop(0)
    mean = None if bias is None else others.pop(0)
    return out, h, mean, others[0]


def units(found, expected):
    """How many units of e4m3 apart two arrays are; a pair of NaN is 0 apart."""

    def ordered(values):
        bits = np.asarray(values).view("u1").astype(int)
        return np.where(bits < 128, bits, 128 - bits)

    return abs(ordered(found) - ordered(expected)).max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        *((dtype, dtype) for dtype in ("float32", "bfloat16", "float16")),
        *((dtype, "float32") for dtype in ("bfloat16", "float16")),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.covering(("shape", "backend"), ("dtype", "weights", "norm", "adds", "backend"))
def test_results_are_rounded_once_in_both_layouts(shape, dtype, weights, adds, norm, backend):
    # XLA's float32 division on a GPU is not exact.
    device = jax.devices("cpu" if backend == "xla" else None)[0]
    with jax.default_device(device):
        check_results(shape, dtype, weights, adds, norm, backend)


def check_results(shape, dtype, weights, adds, norm, backend):
    arrays = inputs(shape, norm, dtype, weights, adds)
    values, transposed, h, mean, rstd = forward(arrays, backend)
    assert (h is None, mean is None) == (not adds, norm == "rms")
    assert_rounded(values, normalized(*arrays, h=h), float(arrays[-1][0]))
    assert_same_bits(transposed, np.ascontiguousarray(np.asarray(values).T))
    rows = forward(arrays, backend, "rows", statistics=False)
    assert rows[1] is rows[3] is rows[4] is None
    assert_same_bits(rows[0], values)
    # The ops that write 16 bits have the same h and statistics, and a result that is rounded twice.
    out, *others = unfused(arrays, backend)
    for found, expected in zip((h, mean, rstd), others, strict=True):
        if expected is None:
            assert found is None
        else:
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if adds:
        assert_same_bits(h, others[0])
    if norm == "layer":
        near = 4e-6 / np.asarray(rstd)  # float32 sums in another order
        assert (abs(np.asarray(mean) - np.asarray(others[1])) <= near).all()
    np.testing.assert_allclose(rstd, others[2], rtol=5e-6)
    assert units(values, round_to_float8(out, arrays[-1], "float8_e4m3fn")) <= 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("width", [8, 768, 2560, 8192])
def test_one_layout_takes_any_number_of_rows(width, norm, backend):
    arrays = inputs((130, width), norm)
    values, transposed, h, *_ = forward(arrays, backend, "rows")
    assert transposed is None
    assert_rounded(values, normalized(*arrays, h=h), float(arrays[-1][0]))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(8464, 2048), (5648, 3072)])
def test_large_arrays_are_rounded_as_small_ones(shape, dtype, norm):
    """Of so many rows a CTA has 32, and the last one 16."""
    arrays = inputs(shape, norm, dtype)
    values, transposed, h, mean, rstd = forward(arrays, "cuda")
    assert_same_bits(transposed, np.ascontiguousarray(np.asarray(values).T))
    x, residual, *others = arrays
    last = forward((x[-48:], residual[-48:], *others), "cuda")
    for found, expected in zip((values, h, mean, rstd), (last[0], *last[2:]), strict=True):
        if expected is not None:
            assert_same_bits(found[-48:], expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_x_bias_may_be_absent(backend):
    arrays = inputs((32, 200), x_bias=False)
    x, residual, x_bias, scale, bias, one = arrays
    found = forward(arrays, backend)
    expected = forward((x, residual, jnp.zeros_like(scale), scale, bias, one), backend)
    assert x_bias is None
    for each, other in zip(found, expected, strict=True):
        assert_same_bits(each, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("width", [768, 4096])
def test_nonfinite_rows_leave_the_others_alone_and_finite_ones_do_not_overflow(
    width, norm, backend
):
    arrays = inputs((32, width), norm, "float32")
    x, *others = arrays
    others[-1] = jnp.asarray([1e-3], jnp.float32)  # most elements are beyond the largest number
    expected = np.asarray(forward((x, *others), backend)[0]).astype(np.float32)
    assert np.isfinite(expected).all() and (abs(expected) == 448).mean() > 0.5
    x = x.at[5, 3].set(jnp.nan).at[18, 7].set(jnp.inf)
    values, transposed, *_ = forward((x, *others), backend)
    values = np.asarray(values).astype(np.float32)
    kept = np.delete(np.arange(32), [5, 18])
    np.testing.assert_array_equal(values[kept], expected[kept])
    assert np.isnan(values[5]).all() and np.isnan(values[18, 7])
    np.testing.assert_array_equal(np.asarray(transposed).astype(np.float32), values.T)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize(("rows", "layout"), [(32, "both"), (3, "rows")])
def test_vmap_matches_a_loop(rows, layout, adds, norm, backend):
    given = inputs((rows, 72), norm, adds=adds)
    stacked = [None if x is None else jnp.stack([x, x * 3, -x * 0.7]) for x in given]
    stacked[-1] = jnp.asarray([[0.5], [2.0], [0.1]], jnp.float32)
    found = jax.tree.leaves(jax.vmap(lambda *each: forward(each, backend, layout))(*stacked))
    for i in range(3):
        each = [None if x is None else x[i] for x in stacked]
        expected = jax.tree.leaves(forward(each, backend, layout))
        for result, one in zip(found, expected, strict=True):
            if backend == "cuda":
                assert_same_bits(result[i], one)
            elif one.dtype.itemsize == 1:  # XLA sums in another order
                assert units(result[i], one) <= 1
            else:
                testing.assert_close(result[i], one, one.dtype.name)


@pytest.mark.parametrize("layout", ["rows", "both"])
def test_calls_that_the_kernel_does_not_take_are_named(layout):
    static = {"eps": EPS, "layout": layout}
    for shape, reason in (
        ((16, 12), "12 columns; they must be a multiple of 8"),
        ((16, 8200), "8200 columns; the kernel takes at most 8192"),
        ((8, 16), "8 rows; to be transposed"),
    ):
        arrays = inputs(shape)
        why = cuda.float8_norm_forward_unsupported(*arrays, **static)
        if "rows" in reason and layout == "rows":
            assert why is None
        else:
            assert reason in (why or "")
        values, transposed, *_ = forward(arrays, "auto", layout)
        assert values.shape == shape
        assert transposed is None if layout == "rows" else transposed.shape == shape[::-1]
    x, residual, x_bias, scale, bias, one = inputs((16, 16))
    for arrays, reason in (
        ((x, residual, x_bias, scale.astype("float16"), bias, one), "scale has dtype float16"),
        ((x, residual, x_bias, scale, bias.astype("float32"), one), "bias has dtype float32"),
        ((x, residual.astype("float32"), x_bias, scale, bias, one), "residual has dtype float32"),
        ((x, None, x_bias, scale, bias, one), "x_bias is given"),
        ((x, residual, x_bias, scale, None, one), "x_bias is given"),
    ):
        assert reason in (cuda.float8_norm_forward_unsupported(*arrays, **static) or "")
