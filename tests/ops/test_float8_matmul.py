"""Matmuls of float8 operands: their error against float64, and what is rejected."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import pretend_sms

import jaxllm
from jaxllm import testing
from jaxllm.core import ffi
from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.ops import float8_matmul
from jaxllm.ops.gemm import cuda
from jaxllm.ops.gemm.api_float8 import FLOAT8_MATMUL_AMAX

FORMATS = ("float8_e4m3fn", "float8_e5m2")
OUT_DTYPES = ("bfloat16", "float16", "float32")
# Rows, columns, depth.
SHAPES = ((1, 8, 16), (3, 200, 144), (257, 392, 1008), (130, 200, 1040), (257, 136, 2064))
# Whose depth is split on an H100. The last has more tiles than the GPU has SMs.
SPLIT_SHAPES = ((1, 8, 4096), (257, 200, 8208), (400, 392, 32784), (300, 9592, 4112))


def operands(shape, formats, one_scale=False, seed=0):
    """Operands with a heavy tail and a row of zeros, and their scales."""
    generator = np.random.default_rng(seed)
    rows, columns, depth = shape

    def draw(size, dtype):
        x = 0.25 * generator.standard_normal((size, depth), np.float32)
        tail = np.where(generator.random(x.shape) < 0.01, 1e3 * x, x)
        tail[size // 2 :: size] = 0
        return jnp.asarray(np.clip(tail, -448, 448)).astype(dtype)

    def scale(size):
        drawn = np.float32(2.0) ** generator.uniform(-12, -8, () if one_scale else (size,))
        return jnp.asarray(drawn, jnp.float32)

    a, b = draw(rows, formats[0]), draw(columns, formats[1])
    return a, b, scale(rows), scale(columns)


def exact(a, b, scale_a, scale_b):
    """The product in float64, and that of the absolute values."""
    a, b, scale_a, scale_b = (np.asarray(x, np.float64) for x in (a, b, scale_a, scale_b))
    scales = scale_a.reshape(-1, 1) * scale_b.reshape(1, -1)
    with np.errstate(invalid="ignore"):
        return scales * (a @ b.T), abs(scales) * (abs(a) @ abs(b).T)


def assert_bounded(out, arrays, accumulation, few=0.0):
    """Checks each element: ``accumulation`` times the absolute sum, and the output's rounding.

    A share of the elements of at most ``few`` may be beyond the bound.
    """
    expected, absolute = exact(*arrays)
    info = jnp.finfo(out.dtype)
    bound = accumulation * absolute + 4 * 2.0**-24 * abs(expected)  # two scales
    bound += float(info.eps) / 2 * (abs(expected) + bound) + float(info.smallest_subnormal)
    lost = abs(np.asarray(out, np.float64) - expected)
    assert (~(lost <= bound)).mean() <= few, float((lost - bound).max())


def float32_bound(depth):
    return depth * 2.0**-24


def tensor_core_bound(depth, addends=1, in_halves=False):
    """14 bits in sums, which are added in float32: one truncation an instruction, or more.

    The sums are of 512 elements of the depth; a depth of 1024 at most is one sum. Results of 16
    bits of a depth from 1536 to 2048 may be computed ``in_halves``, of which the sum of the first
    is rounded to bfloat16. The docstring's bound is that of 33 truncations, which do not cancel.
    """
    if in_halves:
        return addends * 2.0**-13 * (1024 / 32) + 2.0**-9
    summed = max(depth, 512) if depth <= 1024 else 512
    return addends * 2.0**-13 * (summed / 32) + (depth / 512 + 1) * 2.0**-24


def each_call(shapes):
    """Runs a test with all pairs of formats, some with one scale, and with all results' dtypes."""
    calls = itertools.product(
        shapes,
        zip([*itertools.product(FORMATS, FORMATS)], (False, True, False, True), strict=True),
        OUT_DTYPES,
    )
    return pytest.mark.parametrize(
        ("shape", "formats", "one_scale", "out_dtype"),
        [
            pytest.param(shape, pair, one, out, id="-".join(map(str, (*shape, *pair, one, out))))
            for shape, (pair, one), out in calls
        ],
    )


@each_call(SHAPES)
@pytest.mark.covering(("shape",), ("formats", "one_scale"), ("out_dtype",))
def test_error_on_a_cpu_is_that_of_float32_accumulation(shape, formats, one_scale, out_dtype):
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = operands(shape, formats, one_scale)
        out = float8_matmul(*arrays, out_dtype=out_dtype, backend="xla")
    assert (out.shape, out.dtype) == (shape[:2], out_dtype)
    assert_bounded(out, arrays, float32_bound(shape[-1]))


@pytest.mark.hopper
@each_call(SHAPES)
def test_error_of_the_kernel_is_within_the_documented_bound(shape, formats, one_scale, out_dtype):
    arrays = operands(shape, formats, one_scale)
    out = float8_matmul(*arrays, out_dtype=out_dtype, backend="cuda")
    assert (out.shape, out.dtype) == (shape[:2], out_dtype)
    assert_bounded(out, arrays, tensor_core_bound(shape[-1]))


def assert_split_and_bounded(shape, formats, one_scale=False, out_dtype="bfloat16"):
    """Checks the error of a GEMM whose depth is split, and that its bits are those of each run."""
    assert cuda.split_tiles(*shape) > 0
    arrays = operands(shape, formats, one_scale)
    out, *more = (float8_matmul(*arrays, out_dtype=out_dtype, backend="cuda") for _ in range(3))
    assert (out.shape, out.dtype) == (shape[:2], out_dtype)
    assert_bounded(out, arrays, tensor_core_bound(shape[-1], addends=33))
    assert_bounded(out, arrays, tensor_core_bound(shape[-1]), few=1e-5)
    for again in more:
        np.testing.assert_array_equal(again.astype(jnp.float32), out.astype(jnp.float32))


@pytest.mark.hopper
@each_call(SPLIT_SHAPES)
def test_split_depth_is_within_the_documented_bound(shape, formats, one_scale, out_dtype):
    assert_split_and_bounded(shape, formats, one_scale, out_dtype)


@pytest.mark.hopper
@pytest.mark.parametrize(("sms", "shape"), [(114, (768, 776, 8208)), (14, (257, 392, 4112))])
def test_split_kernel_stays_within_the_workspace_of_a_smaller_gpu(monkeypatch, sms, shape):
    pretend_sms(monkeypatch, sms, ffi.device())
    assert_split_and_bounded(shape, FORMATS)


@pytest.mark.hopper
@pytest.mark.parametrize("out_dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("formats", [*itertools.product(FORMATS, FORMATS)], ids="-".join)
def test_error_of_more_tiles_than_run_at_once_is_within_the_documented_bound(formats, out_dtype):
    # The results of SHAPES have few tiles, and narrow ones.
    arrays = operands((20000, 376, 1040), formats, one_scale=True)
    out, amax = with_amax(arrays, 1, "cuda", out_dtype)
    assert_bounded(out, arrays, tensor_core_bound(1040, addends=33))
    assert_bounded(out, arrays, tensor_core_bound(1040), few=1e-5)
    assert amax == abs(np.asarray(out, np.float32)).max()


@pytest.mark.hopper
@pytest.mark.parametrize("out_dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("rows", [7000, 20000])  # at most a tile for each SM, and three
@pytest.mark.parametrize("depth", [1536, 1552, 2048])
@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("formats", [*itertools.product(FORMATS, FORMATS)], ids="-".join)
@pytest.mark.covering(("formats", "out_dtype"), ("rows", "depth"), ("one_scale", "rows"))
def test_depth_in_halves_is_within_the_documented_bound(formats, one_scale, depth, rows, out_dtype):
    def assert_some_bounded(out, arrays, addends, few=0.0):
        # Of every 37th row: float64 on a CPU is slow.
        a, b, scale_a, scale_b = arrays
        some = a[::37], b, scale_a if one_scale else scale_a[::37], scale_b
        assert_bounded(out[::37], some, tensor_core_bound(depth, addends, in_halves=True), few)

    a, b, *scales = arrays = operands((rows, 376, depth), formats, one_scale)
    out, amax = with_amax(arrays, 1, "cuda", out_dtype)
    assert_some_bounded(out, arrays, addends=33)
    assert_some_bounded(out, arrays, addends=1, few=5e-5)
    assert amax == abs(np.asarray(out, np.float32)).max()
    again = float8_matmul(*arrays, out_dtype=out_dtype, backend="cuda")
    np.testing.assert_array_equal(again.astype(jnp.float32), out.astype(jnp.float32))
    # Sums beyond the largest float16, whose scaled results are not.
    large = jnp.full_like(a, 448), b, *(scale / 16 for scale in scales)
    assert_some_bounded(float8_matmul(*large, out_dtype=out_dtype, backend="cuda"), large, 33)
    # A bias is added to the product before that is rounded.
    bias = jax.random.normal(jax.random.key(2), (376,), out_dtype)
    with_bias = float8_matmul(*arrays, bias, out_dtype=out_dtype, backend="cuda")
    out, bias, with_bias = (np.asarray(x, np.float64) for x in (out, bias, with_bias))
    roundings = float(jnp.finfo(out_dtype).eps) / 2 * (abs(out) + abs(out + bias))
    assert (abs(with_bias - (out + bias)) <= 1.01 * roundings + 1e-6).all()


@pytest.mark.hopper
def test_nonfinite_elements_reach_their_rows_alone_where_the_depth_is_in_halves():
    a, b, scale_a, scale_b = operands((20000, 376, 2048), FORMATS)
    a = a.at[3, 5].set(jnp.nan).at[700, 1999].set(jnp.inf)  # NaN in e4m3
    b = b.at[11, 13].set(jnp.nan).at[300, 1234].set(-jnp.inf)
    arrays = a, b, scale_a.at[23].set(jnp.inf), scale_b.at[29].set(jnp.nan)
    out = np.asarray(float8_matmul(*arrays, backend="cuda"), np.float32)[:1000]
    expected, _ = exact(a[:1000], b, arrays[2][:1000], arrays[3])
    for special in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(special(out), special(expected))


each_backend = pytest.mark.parametrize(
    "backend", ["xla", pytest.param("cuda", marks=pytest.mark.hopper)]
)


@each_backend
@pytest.mark.parametrize("depth", [144, 8208])  # the latter is split
@pytest.mark.parametrize("formats", [*itertools.product(FORMATS, FORMATS)], ids="-".join)
def test_nonfinite_elements_and_scales_reach_their_rows_alone(backend, formats, depth):
    a, b, scale_a, scale_b = operands((130, 136, depth), formats)
    a = a.at[3, 5].set(jnp.nan).at[7, 9].set(jnp.inf)  # NaN in e4m3
    b = b.at[11, 13].set(jnp.nan).at[17, 19].set(-jnp.inf)
    arrays = a, b, scale_a.at[23].set(jnp.inf), scale_b.at[29].set(jnp.nan)
    out = np.asarray(float8_matmul(*arrays, out_dtype=jnp.float32, backend=backend))
    expected, _ = exact(*arrays)
    for special in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(special(out), special(expected))
    assert 0.9 < np.isfinite(out).mean() < 1


# The kernel finds the largest elements of a product of two e4m3 arrays with one scale each.
each_formats_of_amax = pytest.mark.parametrize(
    "formats", [(FORMATS[0], FORMATS[0]), FORMATS], ids="-".join
)


def with_amax(arrays, parts, backend, out_dtype="bfloat16", bias=None):
    static = {"out_dtype": out_dtype, "parts": parts}
    a, b, *scales = arrays
    arrays = a, b, *map(jnp.atleast_1d, scales), bias
    return dispatch(FLOAT8_MATMUL_AMAX, Direction.INFERENCE, backend, *arrays, **static)


@each_backend
@each_formats_of_amax
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize(("columns", "parts"), [(200, 1), (136, 2), (384, 2), (640, 2), (640, 1)])
@pytest.mark.covering(("formats", "out_dtype"), ("columns", "parts"))
def test_amax_is_the_largest_finite_element_of_each_part(
    columns, parts, out_dtype, formats, backend
):
    a, b, _, scale_b = operands((257, columns, 1040), formats, one_scale=True)
    a = a.at[3, 5].set(jnp.nan)  # a row of NaN
    b = b.at[columns - 1].multiply(8).at[0].set(0).at[0, 7].set(448)
    scale = {"float16": 2.0**20, "bfloat16": 1.0, "float32": 1.0}[out_dtype]
    # In float16 some elements are rounded to infinity.
    arrays = a, b, jnp.asarray(scale, jnp.float32), scale_b
    out, amax = with_amax(arrays, parts, backend, out_dtype)
    plain = float8_matmul(*arrays, out_dtype=out_dtype, backend=backend)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(plain, np.float32))
    wide = abs(np.asarray(out, np.float32).reshape(257, parts, -1))
    assert np.isinf(wide).any() == (out_dtype == "float16")
    expected = np.where(np.isfinite(wide), wide, 0).max((0, 2))
    np.testing.assert_array_equal(amax, expected)
    assert (expected > 0).all()


def drawn_bias(columns, dtype):
    drawn = np.random.default_rng(1).standard_normal(columns, np.float32)
    return jnp.asarray(drawn).at[columns - 1].set(1e3).astype(dtype)


def assert_rounded_once(out, plain, bias):
    """Checks that a result is the product in float32 plus a bias, before the rounding."""
    wide = np.asarray(plain, np.float64) + np.asarray(bias, np.float64)
    # A product in float32, and one rounding of the sum more than that to float32.
    expected = wide.astype(np.float32).astype(out.dtype)
    info = jnp.finfo(out.dtype)
    lost = abs(np.asarray(out, np.float64) - expected.astype(np.float64))
    assert (lost <= float(info.eps) * abs(wide) + 2.0**-23 * abs(np.asarray(plain))).all()
    assert (lost > 0).mean() < 0.01


@each_backend
@each_formats_of_amax
@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("shape", [(257, 384, 1040), (130, 200, 144)])
@pytest.mark.covering(("formats", "one_scale", "shape"), ("out_dtype",))
def test_bias_is_added_before_the_rounding_and_counts_for_amax(
    shape, out_dtype, one_scale, formats, backend
):
    arrays = operands(shape, formats, one_scale)
    bias = drawn_bias(shape[1], out_dtype)
    out, amax = with_amax(arrays, 1, backend, out_dtype, bias)
    plain = float8_matmul(*arrays, out_dtype="float32", backend=backend)
    assert_rounded_once(out, plain, bias)
    assert amax == abs(np.asarray(out, np.float32)).max()
    alone = float8_matmul(*arrays, bias, out_dtype=out_dtype, backend=backend)
    np.testing.assert_array_equal(alone.astype(jnp.float32), out.astype(jnp.float32))


@each_backend
@each_formats_of_amax
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("depth", [16, 1040, 2048])
@pytest.mark.parametrize("rows", [1, 127, 250])
@pytest.mark.covering(("formats", "depth"), ("out_dtype",), ("rows",))
def test_amax_has_no_part_of_rows_beyond_the_last(rows, depth, out_dtype, formats, backend):
    # A tile has more rows. There the product is 0, and the sum with the bias is the bias.
    a, b = jnp.ones((rows, depth), formats[0]), -jnp.ones((256, depth), formats[1])
    scale, bias = jnp.ones((), jnp.float32), jnp.zeros(256, out_dtype).at[:128].set(depth)
    out, amax = with_amax((a, b, scale, scale), 2, backend, out_dtype, bias)
    np.testing.assert_array_equal(amax, [0, depth])
    assert (out == jnp.where(jnp.arange(256) < 128, 0, -depth)).all()


@pytest.mark.hopper
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("one_scale", [False, True])
def test_bias_of_a_split_depth_is_added_before_the_rounding(one_scale, out_dtype):
    arrays = operands((257, 200, 4112), FORMATS, one_scale)
    bias = drawn_bias(200, out_dtype)
    out = float8_matmul(*arrays, bias, out_dtype=out_dtype, backend="cuda")
    assert_rounded_once(out, float8_matmul(*arrays, out_dtype="float32", backend="cuda"), bias)


@pytest.mark.hopper
def test_split_depth_under_vmap_has_the_bits_of_each_call():
    a, b, scale_a, scale_b = operands((257, 200, 4112), FORMATS)
    bias = drawn_bias(200, "bfloat16")
    batch = jnp.stack([a, a[::-1], 0 * a]), jnp.stack([scale_a, scale_a[::-1], 2 * scale_a])

    def of_one(a, scale_a):
        return float8_matmul(a, b, scale_a, scale_b, bias, backend="cuda")

    found = jax.vmap(of_one)(*batch)
    for one, *arrays in zip(found, *batch, strict=True):
        np.testing.assert_array_equal(one.astype(jnp.float32), of_one(*arrays).astype(jnp.float32))


@each_backend
@each_formats_of_amax
def test_amax_of_zeros_and_of_no_rows_is_zero(formats, backend):
    a, b, scale_a, scale_b = operands((32, 128, 64), formats, one_scale=True)
    for rows in (0 * a, a[:0]):
        np.testing.assert_array_equal(with_amax((rows, b, scale_a, scale_b), 2, backend)[1], 0)


@each_backend
@each_formats_of_amax
def test_amax_under_vmap_is_that_of_each_call(formats, backend):
    a, b, scale_a, scale_b = operands((32, 128, 64), formats, one_scale=True)
    batch = jnp.stack([a, a[::-1], 0 * a])

    def of_one(a):
        return with_amax((a, b, scale_a, scale_b), 2, backend)

    found = jax.vmap(of_one)(batch)
    for i, one in enumerate(batch):
        for result, expected in zip(found, of_one(one), strict=True):
            np.testing.assert_array_equal(
                result[i].astype(jnp.float32), expected.astype(jnp.float32)
            )


@each_backend
@pytest.mark.parametrize("depth", [1040, 4112])  # the latter is split
def test_scalar_scale_gives_the_values_of_equal_scales(backend, depth):
    a, b, scale_a, scale_b = operands((130, 136, depth), FORMATS, one_scale=True)
    scales = jnp.full(130, scale_a), jnp.full(136, scale_b)
    found = float8_matmul(a, b, scale_a, scale_b, backend=backend)
    expected = float8_matmul(a, b, *scales, backend=backend)
    np.testing.assert_array_equal(found.astype(jnp.float32), expected.astype(jnp.float32))


def test_lowers_to_its_cuda_kernel_on_hopper_and_to_xla_elsewhere(with_kernels, monkeypatch):
    arrays = operands((3, 200, 144), FORMATS, one_scale=True)
    for gpu, is_called in ((ffi.H100, True), (dataclasses.replace(ffi.H100, capability=80), False)):
        monkeypatch.setattr(ffi, "device", lambda gpu=gpu: gpu)
        program = testing.lower_for_cuda(float8_matmul, *arrays)
        assert ("@jaxllm_float8_matmul(" in program) == is_called
        assert ("f8E4M3FN" in program.partition("dot_general")[2]) == (not is_called)


def test_kernel_gets_a_workspace_where_the_depth_is_split(on_hopper):
    for depth, partial in ((4080, "0xf32"), (4096, "134x128x192xf32")):
        arrays = operands((130, 136, depth), FORMATS)
        program = testing.lower_for_cuda(float8_matmul, *arrays)
        (call,) = [line for line in program.splitlines() if "@jaxllm_float8_matmul(" in line]
        assert f"(tensor<130x136xbf16>, tensor<{partial}>)" in call
        batch = jax.tree.map(lambda x: jnp.stack([x, x]), arrays)
        program = testing.lower_for_cuda(jax.vmap(float8_matmul), *batch)
        assert f"(tensor<2x130x136xbf16>, tensor<2x{partial}>)" in program


@pytest.mark.parametrize(
    ("shape", "gpu", "reason"),
    [
        ((3, 8, 24), {}, r"a \(3, 24\) and b \(8, 24\) have a depth of 24; it must be a multiple"),
        ((3, 12, 16), {}, r"b \(12, 16\) has 12 columns of the result; they must be a multiple of"),
        ((3, 8, 16), {"capability": 89}, "the kernel needs a Hopper GPU"),
        ((3, 8, 16), {"clusters": 0}, "no two SMs of this GPU can run a cluster of the kernel"),
        ((3, 8, 16), {"has_sm90a": False}, "the CUDA extension is not built for sm_90a"),
    ],
)
def test_kernel_rejects_other_sizes_and_gpus(shape, gpu, reason, with_kernels, monkeypatch):
    monkeypatch.setattr(ffi, "device", lambda: dataclasses.replace(ffi.H100, **gpu))
    monkeypatch.setattr(ffi, "devices", lambda: ())
    arrays = operands(shape, FORMATS)
    with pytest.raises(jaxllm.BackendError, match=f"cannot serve float8_matmul: {reason}"):
        float8_matmul(*arrays, backend="cuda")
    with pytest.raises(jaxllm.BackendError, match="float8_matmul has no pallas kernel"):
        float8_matmul(*arrays, backend="pallas")


def test_wrong_arguments_raise_errors_that_name_them():
    a, b, scale_a, scale_b = operands((3, 8, 16), FORMATS)
    f8 = "it must be float8_e4m3fn or float8_e5m2"
    with pytest.raises(TypeError, match=f"a has dtype bfloat16; {f8}"):
        float8_matmul(a.astype(jnp.bfloat16), b, scale_a, scale_b)
    with pytest.raises(TypeError, match=f"b has type list; {f8}"):
        float8_matmul(a, [1.0], scale_a, scale_b)  # pyright: ignore
    with pytest.raises(ValueError, match=r"a has shape \(16,\); it must be a matrix, \(M, K\)"):
        float8_matmul(a[0], b, scale_a, scale_b)
    with pytest.raises(ValueError, match=r"b has shape \(16, 8\); it must be \(N, 16\)"):
        float8_matmul(a, b.T, scale_a, scale_b)
    with pytest.raises(TypeError, match="scale_a has dtype bfloat16; it must be float32"):
        float8_matmul(a, b, scale_a.astype(jnp.bfloat16), scale_b)
    with pytest.raises(ValueError, match=r"scale_b has shape \(3,\); it must be \(8,\)"):
        float8_matmul(a, b, scale_a, scale_a)
    with pytest.raises(TypeError, match="out_dtype is int32; it must be bfloat16 or float16 or"):
        float8_matmul(a, b, scale_a, scale_b, out_dtype=int)
    with pytest.raises(TypeError, match="bias has dtype float32; it must be bfloat16"):
        float8_matmul(a, b, scale_a, scale_b, jnp.zeros(8))
    with pytest.raises(ValueError, match="bias has shape"):
        float8_matmul(a, b, scale_a, scale_b, jnp.zeros(7, jnp.bfloat16))
