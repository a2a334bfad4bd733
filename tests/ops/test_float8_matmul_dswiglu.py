"""The float8 GEMM that multiplies by SwiGLU's derivative: near float64, and what it rejects."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxllm
from jaxllm import testing
from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.ops import ffn_block, residual
from jaxllm.ops.gemm.api_float8 import FLOAT8_MATMUL_DSWIGLU

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# Rows, columns of each part, depth: whole tiles, tails in each direction, and many tiles.
SHAPES = ((256, 384, 1536), (304, 208, 1552), (16, 16, 2048), (2320, 1040, 1536))
each_dtype = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def gradient(*arrays, backend: Any = "cuda", has_bias=False):
    op, direction = FLOAT8_MATMUL_DSWIGLU, Direction.INFERENCE
    return dispatch(op, direction, backend, *arrays, has_bias=has_bias)


def operands(shape, parts, dtype):
    """a, b, their scales, and h with so many parts, each with a heavy tail."""
    rows, columns, depth = shape
    generator = np.random.default_rng(0)

    def draw(*shape):
        x = generator.standard_normal(shape, np.float32)
        return np.where(generator.random(shape) < 0.02, 8 * x, x)

    a = jnp.asarray(1000 * draw(rows, depth)).astype(E5M2)
    b, h = jnp.asarray(10 * draw(columns, depth)).astype(E4M3), draw(rows, parts * columns)
    scales = [jnp.asarray([x / np.sqrt(depth)], jnp.float32) for x in (1e-3, 1e-1)]
    return a, b, *scales, jnp.asarray(h).astype(dtype)


def scale_of(bound):
    """The scale of a result with this bound."""
    return jnp.asarray([bound / 57344], jnp.float32)


def inputs(shape, dtype="bfloat16", bound=None):
    """The operands and the scale of the result, that of a bound an eighth too large."""
    given = operands(shape, 2, dtype)
    return *given, scale_of(1.125 * abs(exact(*given)).max() if bound is None else bound)


def exact_product(*arrays):
    """The product and ``h``, the last one, in float64."""
    a, b, scale_a, scale_b, h = (np.asarray(x, np.float64) for x in arrays)
    return scale_a * scale_b * (a @ b.T), h


def exact(*arrays):
    """The gradient of ``h``, the last one, in float64."""
    dout, h = exact_product(*arrays)
    gate, up = np.split(h, 2, axis=1)
    s = 1 / (1 + np.exp(-gate))
    return np.concatenate([dout * up * (s + gate * s * (1 - s)), dout * gate * s], axis=1)


def assert_near(found, arrays):
    *given, scale = arrays
    assert_rounded(found, exact(*given) / float(scale[0]))


def assert_rounded(found, quotients):
    """Checks for one rounding to e5m2, and the error of the tensor cores before it."""
    info = ml_dtypes.finfo(E5M2)
    step = 2.0 ** np.floor(np.log2(np.maximum(abs(quotients), float(info.smallest_normal))))
    # 14 bits of the largest addend of each of 64 instructions; some 2^-9 of the largest results.
    error = 2.0**-9 * abs(quotients).max()
    found = np.asarray(found, np.float64)
    assert (abs(found - quotients) <= step * float(info.eps) / 2 + error).all()
    # Half a unit in the last place: a fourteenth of a number between 1 and 2, in the mean.
    away = np.linalg.norm(found - quotients) / np.linalg.norm(quotients)
    assert 0.03 < away < 0.07


@pytest.mark.hopper
@each_dtype
@each_shape
def test_kernel_rounds_the_exact_gradient_in_both_layouts(shape, dtype):
    arrays = inputs(shape, dtype)
    rows, transposed, dbias = gradient(*arrays)
    assert dbias is None
    assert (rows.shape, rows.dtype) == ((shape[0], 2 * shape[1]), E5M2)
    assert_near(rows, arrays)
    np.testing.assert_array_equal(np.asarray(transposed).view("u1"), np.asarray(rows).T.view("u1"))
    for again in gradient(*arrays)[:2]:
        expected = rows if again.shape == rows.shape else transposed
        np.testing.assert_array_equal(np.asarray(again).view("u1"), np.asarray(expected).view("u1"))


@each_dtype
@each_shape
def test_parts_compute_the_same(shape, dtype):
    arrays = inputs(shape, dtype)
    for has_bias in (False, True):
        rows, transposed, dbias = gradient(*arrays, backend="xla", has_bias=has_bias)
        assert_near(rows, arrays)
        np.testing.assert_array_equal(transposed, rows.T)
    testing.assert_close(dbias, exact(*arrays[:-1]).sum(0).astype(dtype), dtype)


@pytest.mark.hopper
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("of", ["dout", "gate", "up"])
def test_nonfinite_elements_stay_visible_in_their_places_alone(special, of):
    shape = rows, columns, _ = 304, 208, 1552
    a, b, *scales, h, scale = inputs(shape)
    plain = np.asarray(gradient(a, b, *scales, h, scale)[0], np.float32)
    lost = np.zeros((rows, 2 * columns), bool)
    if of == "dout":
        a = a.at[131, 17].set(special)
        lost[131] = True
    else:
        # Where it is what is gated, the gradient of that has no part of it.
        h = h.at[131, 197 + columns * (of == "up")].set(special)
        lost[131, 197] = True
        lost[131, 197 + columns] = of == "gate"
    found, transposed, _ = gradient(a, b, *scales, h, scale)
    np.testing.assert_array_equal(np.asarray(transposed).view("u1"), np.asarray(found).T.view("u1"))
    found = np.asarray(found, np.float32)
    if of == "gate" and special == -np.inf:
        # silu is 0 times an infinity, NaN; of the gradients both have it.
        assert np.isnan(found[lost]).all()
    assert not np.isfinite(found[lost]).any()
    np.testing.assert_array_equal(found[~lost], plain[~lost])


@pytest.mark.hopper
def test_no_finite_number_overflows_where_the_bound_is_attained():
    *arrays, scale = inputs((256, 384, 1536))
    bound = 57344 * float(scale[0]) / 1.125  # the largest element
    found = gradient(*arrays, scale_of(bound))[0]
    found = np.asarray(found, np.float32)
    assert np.isfinite(found).all()
    assert abs(found).max() == 57344


@pytest.mark.hopper
def test_vmap_has_the_bits_of_each_call():
    a, b, scale_a, scale_b, h, scale = inputs((304, 208, 1552))
    batch = jnp.stack([a, a[::-1]]), jnp.stack([h, h[::-1]]), jnp.stack([scale, 2 * scale])

    def of_one(a, h, scale):
        return gradient(a, b, scale_a, scale_b, h, scale)[:2]

    each = [of_one(*arrays) for arrays in zip(*batch, strict=True)]
    for found, *expected in zip(jax.vmap(of_one)(*batch), *each, strict=True):
        found = np.asarray(found).view("u1")
        np.testing.assert_array_equal(found, np.stack(expected).view("u1"))


@pytest.mark.parametrize(
    ("shape", "dtype", "has_bias", "reason"),
    [
        ((32, 48, 1536), "bfloat16", True, "there is a bias"),
        ((32, 48, 1536), "float32", False, "h has dtype float32"),
        ((24, 48, 1536), "bfloat16", False, "both must be positive multiples of 16"),
        ((32, 40, 1536), "bfloat16", False, "both must be positive multiples of 16"),
        ((0, 48, 1536), "bfloat16", False, "both must be positive multiples of 16"),
        ((32, 48, 1520), "bfloat16", False, "from 1536"),
        ((32, 48, 2064), "bfloat16", False, "to 2048"),
        ((32, 48, 1544), "bfloat16", False, "it must be a multiple of 16"),
    ],
)
def test_calls_that_the_kernel_does_not_serve_say_why(on_hopper, shape, dtype, has_bias, reason):
    arrays = jax.eval_shape(functools.partial(inputs, shape, dtype, bound=1.0))
    call = functools.partial(gradient, backend="auto", has_bias=has_bias)
    (row,) = [
        row for row in jaxllm.explain(call, *arrays).calls if row.stem == FLOAT8_MATMUL_DSWIGLU.name
    ]
    assert row.on_gpu == "its parts"
    ((_, why),) = row.rejected
    assert reason in why


def test_block_runs_the_kernel(on_hopper):
    width, hidden = 2048, 256
    x = jax.ShapeDtypeStruct((64, width), jnp.bfloat16)
    up = jax.ShapeDtypeStruct((width, 2, hidden), jnp.bfloat16)
    down = jax.ShapeDtypeStruct((hidden, width), jnp.bfloat16)

    def loss(x, up, down):
        layers = {"gate_up": {"weight": up}, "down": {"weight": down}}
        norm = {"scale": jnp.ones(width, x.dtype)}
        options: Any = {"activation": "swiglu", "precision": "tensor"}
        return ffn_block(residual(x, "rms"), norm, layers, **options).x.astype(jnp.float32).sum()

    found = jaxllm.explain(jax.grad(loss, (0, 1, 2)), x, up, down).calls
    calls = {call.stem: call.on_gpu for call in found}
    assert calls[FLOAT8_MATMUL_DSWIGLU.name] == "cuda"
    assert "float8_swiglu_backward" not in calls
    program = testing.lower_for_cuda(jax.grad(loss, (0, 1, 2)), x, up, down)
    assert "@jaxllm_float8_matmul_dswiglu(" in program
