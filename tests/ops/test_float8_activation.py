"""Activations in float8: values near those of NumPy, layouts, sizes, what is not finite."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.ops.quantization import cuda
from jaxllm.ops.quantization.api_float8 import FLOAT8_GELU, FLOAT8_SWIGLU

BACKENDS = ("xla", pytest.param("cuda", marks=pytest.mark.gpu))
# A whole tile of the kernel, tails in each direction, one row of a tile, and many tiles.
SHAPES = ((128, 64), (144, 72), (16, 8), (272, 200), (16, 1024), (1040, 16))


PARTS = {FLOAT8_GELU: 1, FLOAT8_SWIGLU: 2}
each_op = pytest.mark.parametrize("op", list(PARTS), ids=lambda op: op.name)


def forward(op, h, scale, backend, layout="both"):
    return dispatch(op, Direction.FORWARD, backend, h, scale, layout=layout)


def backward(op, h, dout, scale, backend, has_bias=False):
    return dispatch(op, Direction.BACKWARD, backend, h, dout, scale, has_bias=has_bias)


def inputs(op, shape, dtype="bfloat16"):
    """h with a heavy tail, and dout."""
    rows, width = shape
    generator = np.random.default_rng(0)
    h = generator.standard_normal((rows, PARTS[op] * width), np.float32)
    h = np.where(generator.random(h.shape) < 0.02, 20 * h, h)
    dout = generator.standard_normal(shape, np.float32)
    return jnp.asarray(h).astype(dtype), jnp.asarray(dout).astype(dtype)


def exact(op, h, dout):
    """The activation and the gradient of ``h``, in float64."""
    h, dout = (np.asarray(x, np.float64) for x in (h, dout))
    if op is FLOAT8_GELU:
        linear = 2 * np.sqrt(2 / np.pi)
        s = 1 / (1 + np.exp(np.clip(-linear * (h + 0.044715 * h**3), None, 700)))
        slope = linear * (1 + 3 * 0.044715 * h**2)
        return h * s, dout * (s + h * s * (1 - s) * slope)
    gate, up = np.split(h, 2, axis=1)
    s = 1 / (1 + np.exp(-gate))
    dgate = dout * up * s * (1 + gate * (1 - s))
    return gate * s * up, np.concatenate([dgate, dout * gate * s], axis=1)


def assert_rounded(found, values, scale, dtype, least=2.0**-6):
    """Checks that each element is ``values / scale`` rounded, but for an error before it.

    The error is relative, down to ``least`` times the largest element, and below absolute.
    """
    found, info = np.asarray(found), ml_dtypes.finfo(dtype)
    assert (found.shape, found.dtype) == (values.shape, dtype)
    quotients = np.clip(values / scale, -float(info.max), float(info.max))
    step = 2.0 ** np.floor(np.log2(np.maximum(abs(quotients), float(info.smallest_normal))))
    step *= float(info.eps)
    # The kernel's exponential has an error of 2^-22, and where dgate is near 0 its terms cancel.
    error = 2.0**-18 * np.maximum(abs(quotients), least * abs(quotients).max())
    assert (abs(found.astype(np.float64) - quotients) <= step / 2 + error).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
@each_op
@pytest.mark.covering(("op", "shape", "backend"), ("op", "dtype", "backend"))
def test_results_are_rounded_once_in_both_layouts(op, shape, dtype, backend):
    h, dout = inputs(op, shape, dtype)
    hidden, dh = exact(op, h, dout)
    for values, scale, float8, found in (
        (hidden, 0.37, ml_dtypes.float8_e4m3fn, lambda s: forward(op, h, s, backend)),
        (dh, 0.011, ml_dtypes.float8_e5m2, lambda s: backward(op, h, dout, s, backend)[:2]),
    ):
        rows, transposed = found(jnp.asarray([scale], jnp.float32))
        # In the reference 1 - tanh^2 cancels, where h is near -5.
        least = {"least": 2.0} if op is FLOAT8_GELU and backend == "xla" else {}
        assert_rounded(rows, values, np.float64(np.float32(scale)), float8, **least)
        np.testing.assert_array_equal(
            np.asarray(transposed).view("u1"), np.asarray(rows).T.view("u1")
        )
    rows = forward(op, h, jnp.asarray([0.37], jnp.float32), backend, "rows")
    both = forward(op, h, jnp.asarray([0.37], jnp.float32), backend)
    np.testing.assert_array_equal(np.asarray(rows).view("u1"), np.asarray(both[0]).view("u1"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
@each_op
@pytest.mark.covering(("op", "shape", "backend"), ("op", "dtype", "backend"))
def test_gradient_of_the_bias_is_the_sum_of_unrounded_rows(op, shape, dtype, backend):
    h, dout = inputs(op, shape, dtype)
    scale = jnp.asarray([0.011], jnp.float32)
    *rounded, dbias = backward(op, h, dout, scale, backend, has_bias=True)
    *wanted, nothing = backward(op, h, dout, scale, backend)
    assert nothing is None
    assert (dbias.shape, dbias.dtype) == (h.shape[1:], dtype)
    _, dh = exact(op, h, dout)
    if op is FLOAT8_GELU and backend == "xla":  # two programs, in which 1 - tanh^2 may differ
        assert_rounded(rounded[0], dh, np.float64(scale[0]), ml_dtypes.float8_e5m2, least=2.0)
        wanted = rounded[0], rounded[0].T
    for a, b in zip(rounded, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a).view("u1"), np.asarray(b).view("u1"))
    lost = abs(np.asarray(dbias, np.float64) - dh.sum(0))
    # Float32 sums of elements with an error of 2^-20 of the largest, and a rounding.
    eps = float(jnp.finfo(dtype).eps)
    assert (lost <= eps / 2 * abs(dh.sum(0)) + 2.0**-18 * abs(dh).sum(0).max()).all()
    again = backward(op, h, dout, scale, backend, has_bias=True)[2]
    np.testing.assert_array_equal(dbias, again)
    of_none = backward(op, h[:0], dout[:0], scale, backend, has_bias=True)[2]
    assert not of_none.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nonfinite_elements_stay_visible_in_gelu_and_finite_ones_do_not_overflow(backend):
    h, dout = inputs(FLOAT8_GELU, (16, 8), "float32")
    h = h.at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf).at[2, 2].set(3e38)
    dout = dout.at[3, 3].set(jnp.nan).at[4, 4].set(-jnp.inf).at[2, 2].set(3e38)
    one = jnp.ones(1, jnp.float32)
    hidden = np.asarray(forward(FLOAT8_GELU, h, one, backend, "rows")).astype(np.float32)
    assert sorted(zip(*np.nonzero(~np.isfinite(hidden)), strict=True)) == [(0, 0), (1, 1)]
    assert hidden[2, 2] == 448
    dh = np.asarray(backward(FLOAT8_GELU, h, dout, one, backend)[0], np.float32)
    assert sorted(zip(*np.nonzero(~np.isfinite(dh)), strict=True)) == [(0, 0), (3, 3), (4, 4)]
    assert dh[2, 2] == 57344


@pytest.mark.parametrize("backend", BACKENDS)
def test_nonfinite_elements_stay_visible_in_swiglu_and_finite_ones_do_not_overflow(backend):
    gate_up, dout = inputs(FLOAT8_SWIGLU, (16, 8), "float32")
    gate_up = gate_up.at[0, 0].set(jnp.nan).at[1, 9].set(jnp.inf).at[2, 10].set(3e38)
    gate_up = gate_up.at[1, 1].set(2.0).at[2, 2].set(1.0)  # what they are multiplied by
    dout = dout.at[3, 3].set(jnp.nan).at[4, 4].set(-jnp.inf)
    one = jnp.ones(1, jnp.float32)
    hidden = np.asarray(forward(FLOAT8_SWIGLU, gate_up, one, backend, "rows")).astype(np.float32)
    is_lost = np.zeros((16, 8), bool)
    is_lost[0, 0] = is_lost[1, 1] = True  # float8_e4m3fn has no infinity
    np.testing.assert_array_equal(np.isnan(hidden), is_lost)
    assert hidden[2, 2] == 448
    found = backward(FLOAT8_SWIGLU, gate_up, dout, one, backend)
    dgate, dup = np.split(np.asarray(found[0], np.float32), 2, 1)
    for found, elements in (
        (dgate, [(0, 0), (1, 1), (3, 3), (4, 4)]),
        (dup, [(0, 0), (3, 3), (4, 4)]),
    ):
        assert sorted(zip(*np.nonzero(~np.isfinite(found)), strict=True)) == elements
    assert abs(dgate[2, 2]) == 57344


@pytest.mark.parametrize("backend", BACKENDS)
@each_op
@pytest.mark.parametrize("shape", [(32, 48), (3, 24)], ids=str)
def test_vmap_matches_a_loop(shape, op, backend):
    given = [jnp.stack([x, -x / 3]) for x in inputs(op, shape)]
    scale = jnp.asarray([[0.5], [2.0]], jnp.float32)
    calls = (
        (lambda x, s: forward(op, x, s, backend, "rows"), (given[0], scale)),
        (lambda x, s: forward(op, x, s, backend), (given[0], scale)),
        (lambda x, y, s: backward(op, x, y, s, backend), (*given, scale)),
        (lambda x, y, s: backward(op, x, y, s, backend, has_bias=True), (*given, scale)),
    )
    # Of an odd number of rows the second result starts at 8 bytes after a multiple of 16.
    for fn, arrays in calls if shape[0] % 16 == 0 else calls[:1]:
        found = jax.tree.leaves(jax.vmap(fn)(*arrays))
        each = [jax.tree.leaves(fn(*one)) for one in zip(*arrays, strict=True)]
        for result, *expected in zip(found, *each, strict=True):
            np.testing.assert_array_equal(
                np.asarray(result).view("u1"), np.stack(expected).view("u1")
            )


@pytest.mark.parametrize("layout", ["rows", "both"])
@each_op
def test_sizes_that_the_kernel_does_not_take_are_named(op, layout):
    one = jnp.ones(1, jnp.float32)
    for shape, reason in (((16, 12), "12 columns"), ((8, 16), "8 rows")):
        h, dout = inputs(op, shape)
        unsupported = getattr(cuda, f"{op.name}_forward_unsupported")
        if "rows" in reason and layout == "rows":
            assert unsupported(h, one, layout=layout) is None
        else:
            assert reason in (unsupported(h, one, layout=layout) or "")
        unsupported = getattr(cuda, f"{op.name}_backward_unsupported")
        assert reason in (unsupported(h, dout, one, has_bias=True) or "")
        found = jax.tree.leaves(forward(op, h, one, "auto", layout))
        assert [sorted(x.shape) for x in found] == [sorted(shape)] * len(found)
