"""SwiGLU in float8: values near those of NumPy, layouts, sizes, what is not finite."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.ops.quantization import cuda
from jaxllm.ops.quantization.api_float8 import FLOAT8_SWIGLU

BACKENDS = ("xla", pytest.param("cuda", marks=pytest.mark.gpu))
# A whole tile of the kernel, tails in each direction, one row of a tile, and many tiles.
SHAPES = ((128, 64), (144, 72), (16, 8), (272, 200), (16, 1024), (1040, 16))


def forward(gate_up, scale, backend, layout="both"):
    static = {"layout": layout}
    return dispatch(FLOAT8_SWIGLU, Direction.FORWARD, backend, gate_up, scale, **static)


def backward(gate_up, dout, scale, backend):
    return dispatch(FLOAT8_SWIGLU, Direction.BACKWARD, backend, gate_up, dout, scale)


def inputs(shape, dtype="bfloat16"):
    """gate_up with a heavy tail, and dout."""
    rows, width = shape
    generator = np.random.default_rng(0)
    gate_up = generator.standard_normal((rows, 2 * width), np.float32)
    gate_up = np.where(generator.random(gate_up.shape) < 0.02, 20 * gate_up, gate_up)
    dout = generator.standard_normal(shape, np.float32)
    return jnp.asarray(gate_up).astype(dtype), jnp.asarray(dout).astype(dtype)


def exact(gate_up, dout):
    """SwiGLU and the gradient of ``gate_up``, in float64."""
    gate, up = np.split(np.asarray(gate_up, np.float64), 2, axis=1)
    dout = np.asarray(dout, np.float64)
    s = 1 / (1 + np.exp(-gate))
    dgate = dout * up * s * (1 + gate * (1 - s))
    return gate * s * up, np.concatenate([dgate, dout * gate * s], axis=1)


def assert_rounded(found, values, scale, dtype):
    """Checks that each element is ``values / scale`` rounded, but for an error before it."""
    found, info = np.asarray(found), ml_dtypes.finfo(dtype)
    assert (found.shape, found.dtype) == (values.shape, dtype)
    quotients = np.clip(values / scale, -float(info.max), float(info.max))
    step = 2.0 ** np.floor(np.log2(np.maximum(abs(quotients), float(info.smallest_normal))))
    step *= float(info.eps)
    # The kernel's exponential has an error of 2^-22, and where dgate is near 0 its terms cancel.
    error = 2.0**-18 * np.maximum(abs(quotients), 2.0**-6 * abs(quotients).max())
    assert (abs(found.astype(np.float64) - quotients) <= step / 2 + error).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.covering(("shape", "backend"), ("dtype", "backend"))
def test_results_are_rounded_once_in_both_layouts(shape, dtype, backend):
    gate_up, dout = inputs(shape, dtype)
    hidden, dgate_up = exact(gate_up, dout)
    for values, scale, float8, found in (
        (hidden, 0.37, ml_dtypes.float8_e4m3fn, lambda s: forward(gate_up, s, backend)),
        (dgate_up, 0.011, ml_dtypes.float8_e5m2, lambda s: backward(gate_up, dout, s, backend)),
    ):
        rows, transposed = found(jnp.asarray([scale], jnp.float32))
        assert_rounded(rows, values, np.float64(np.float32(scale)), float8)
        np.testing.assert_array_equal(
            np.asarray(transposed).view("u1"), np.asarray(rows).T.view("u1")
        )
    rows = forward(gate_up, jnp.asarray([0.37], jnp.float32), backend, "rows")
    both = forward(gate_up, jnp.asarray([0.37], jnp.float32), backend)
    np.testing.assert_array_equal(np.asarray(rows).view("u1"), np.asarray(both[0]).view("u1"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nonfinite_elements_stay_visible_and_finite_ones_do_not_overflow(backend):
    gate_up, dout = inputs((16, 8), "float32")
    gate_up = gate_up.at[0, 0].set(jnp.nan).at[1, 9].set(jnp.inf).at[2, 10].set(3e38)
    gate_up = gate_up.at[1, 1].set(2.0).at[2, 2].set(1.0)  # what they are multiplied by
    dout = dout.at[3, 3].set(jnp.nan).at[4, 4].set(-jnp.inf)
    one = jnp.ones(1, jnp.float32)
    hidden = np.asarray(forward(gate_up, one, backend, "rows")).astype(np.float32)
    is_lost = np.zeros((16, 8), bool)
    is_lost[0, 0] = is_lost[1, 1] = True  # float8_e4m3fn has no infinity
    np.testing.assert_array_equal(np.isnan(hidden), is_lost)
    assert hidden[2, 2] == 448
    dgate, dup = np.split(np.asarray(backward(gate_up, dout, one, backend)[0], np.float32), 2, 1)
    for found, elements in (
        (dgate, [(0, 0), (1, 1), (3, 3), (4, 4)]),
        (dup, [(0, 0), (3, 3), (4, 4)]),
    ):
        assert sorted(zip(*np.nonzero(~np.isfinite(found)), strict=True)) == elements
    assert abs(dgate[2, 2]) == 57344


@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_matches_a_loop(backend):
    given = [jnp.stack([x, -x / 3]) for x in inputs((32, 48))]
    scale = jnp.asarray([[0.5], [2.0]], jnp.float32)
    for fn, arrays in (
        (lambda x, s: forward(x, s, backend), (given[0], scale)),
        (lambda x, s: forward(x, s, backend, "rows"), (given[0], scale)),
        (lambda x, y, s: backward(x, y, s, backend), (*given, scale)),
    ):
        found = jax.tree.leaves(jax.vmap(fn)(*arrays))
        each = [jax.tree.leaves(fn(*one)) for one in zip(*arrays, strict=True)]
        for result, *expected in zip(found, *each, strict=True):
            np.testing.assert_array_equal(
                np.asarray(result).view("u1"), np.stack(expected).view("u1")
            )


@pytest.mark.parametrize("layout", ["rows", "both"])
def test_sizes_that_the_kernel_does_not_take_are_named(layout):
    one = jnp.ones(1, jnp.float32)
    for shape, reason in (((16, 12), "12 columns"), ((8, 16), "8 rows")):
        gate_up, dout = inputs(shape)
        if "rows" in reason and layout == "rows":
            assert cuda.float8_swiglu_forward_unsupported(gate_up, one, layout=layout) is None
        else:
            why = cuda.float8_swiglu_forward_unsupported(gate_up, one, layout=layout)
            assert reason in (why or "")
        assert reason in (cuda.float8_swiglu_backward_unsupported(gate_up, dout, one) or "")
        found = jax.tree.leaves(forward(gate_up, one, "auto", layout))
        assert [sorted(x.shape) for x in found] == [sorted(shape)] * len(found)
