"""The float8 GEMM that multiplies by GELU's derivative: near float64, and what it rejects."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from test_float8_matmul_dswiglu import (
    E5M2,
    assert_rounded,
    each_dtype,
    exact_product,
    operands,
    scale_of,
)

import jaxllm
from jaxllm import testing
from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.ops import ffn_block, residual
from jaxllm.ops.gemm.api_float8 import FLOAT8_MATMUL_DGELU

# Rows, columns, depth: whole tiles, tails in each direction, the least and the largest depth, one
# tile for most SMs, and several for each.
SHAPES = (
    (256, 384, 768),
    (304, 208, 784),
    (16, 16, 16),
    (144, 80, 2048),
    (2320, 1040, 1024),
    (4240, 3088, 64),
)


def each_of(shapes):
    return pytest.mark.parametrize("shape", shapes, ids=lambda shape: "x".join(map(str, shape)))


each_shape = each_of(SHAPES)


def gradient(*arrays, backend: Any = "cuda", has_bias=True):
    op, direction = FLOAT8_MATMUL_DGELU, Direction.INFERENCE
    return dispatch(op, direction, backend, *arrays, has_bias=has_bias)


def inputs(shape, dtype="bfloat16", bound=None):
    """The operands and the scale of the result, that of a bound an eighth too large."""
    given = operands(shape, 1, dtype)
    return *given, scale_of(1.125 * abs(exact(*given)).max() if bound is None else bound)


def exact(*arrays):
    """The gradient of ``h``, the last one, in float64."""
    dout, h = exact_product(*arrays)
    linear = 2 * np.sqrt(2 / np.pi)
    s = 1 / (1 + np.exp(np.clip(-linear * (h + 0.044715 * h**3), None, 700)))
    return dout * (s + h * s * (1 - s) * linear * (1 + 3 * 0.044715 * h**2))


def assert_same_bits(found, expected):
    found, expected = (np.asarray(x).view(f"u{x.dtype.itemsize}") for x in (found, expected))
    np.testing.assert_array_equal(found, expected)


def assert_sums(dbias, dh, dtype):
    """Checks for a rounding to a dtype of 16 bits, and the error of the elements."""
    assert (dbias.shape, dbias.dtype) == (dh.shape[1:], dtype)
    wanted, eps = dh.sum(0), float(jnp.finfo(dtype).eps)
    lost = abs(np.asarray(dbias, np.float64) - wanted)
    assert (lost <= eps / 2 * abs(wanted) + 2.0**-9 * abs(dh).sum(0)).all()


@pytest.mark.hopper
@each_dtype
@each_shape
def test_kernel_rounds_the_exact_gradient_in_both_layouts(shape, dtype):
    *given, scale = inputs(shape, dtype)
    rows, transposed, dbias = gradient(*given, scale)
    assert (rows.shape, rows.dtype) == (shape[:2], E5M2)
    dh = exact(*given)
    assert_rounded(rows, dh / float(scale[0]))
    assert_same_bits(transposed, rows.T)
    assert_sums(dbias, dh, dtype)
    for again, before in zip(gradient(*given, scale), (rows, transposed, dbias), strict=True):
        assert_same_bits(again, before)
    *without, nothing = gradient(*given, scale, has_bias=False)
    assert nothing is None
    for found, before in zip(without, (rows, transposed), strict=True):
        assert_same_bits(found, before)


@pytest.mark.hopper
@each_dtype
@each_shape
def test_kernel_is_a_rounding_away_from_the_parts(shape, dtype):
    arrays = inputs(shape, dtype)
    found, parts = (
        np.asarray(gradient(*arrays, backend=backend)[0], np.float64) for backend in ("cuda", "xla")
    )
    # The parts also round the product to 16 bits. As in assert_rounded, of both.
    info = ml_dtypes.finfo(E5M2)
    largest = np.maximum(abs(found), abs(parts))
    step = 2.0 ** np.floor(np.log2(np.maximum(largest, float(info.smallest_normal))))
    error = 2.0**-8 * largest.max()
    assert (abs(found - parts) <= step * float(info.eps) + error).all()
    assert (found != parts).mean() < 0.1


@each_dtype
@each_of(SHAPES[:4])  # the others have more tiles of the kernel
def test_parts_compute_the_same(shape, dtype):
    *given, scale = inputs(shape, dtype)
    dh = exact(*given)
    for has_bias in (False, True):
        rows, transposed, dbias = gradient(*given, scale, backend="xla", has_bias=has_bias)
        assert_rounded(rows, dh / float(scale[0]))
        np.testing.assert_array_equal(transposed, rows.T)
    assert_sums(dbias, dh, dtype)


@pytest.mark.hopper
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("of", ["dout", "h"])
def test_nonfinite_elements_stay_visible_in_their_places_alone(special, of):
    a, b, *scales, h, scale = inputs((304, 208, 784))
    plain, _, plain_sums = gradient(a, b, *scales, h, scale)
    changed = np.zeros(plain.shape, bool)
    if of == "dout":
        a = a.at[131, 17].set(special)
        changed[131] = True
    else:
        h = h.at[131, 197].set(special)
        changed[131, 197] = True
    found, transposed, dbias = gradient(a, b, *scales, h, scale)
    assert_same_bits(transposed, found.T)
    found, plain = (np.asarray(x, np.float32) for x in (found, plain))
    np.testing.assert_array_equal(found[~changed], plain[~changed])
    of_columns = changed.any(0)
    np.testing.assert_array_equal(dbias[~of_columns], plain_sums[~of_columns])
    # The derivative is 1 at infinity, and 0 at the other.
    is_lost = of == "dout" or np.isnan(special)
    assert (np.isfinite(found[changed]) != is_lost).all()
    assert (np.isfinite(np.asarray(dbias, np.float32)[of_columns]) != is_lost).all()
    if not is_lost:
        assert bool(found[131, 197]) == (special > 0)


@pytest.mark.hopper
def test_no_finite_number_overflows_where_the_bound_is_attained():
    *arrays, scale = inputs((256, 384, 768))
    bound = 57344 * float(scale[0]) / 1.125  # the largest element
    found = np.asarray(gradient(*arrays, scale_of(bound))[0], np.float32)
    assert np.isfinite(found).all()
    assert abs(found).max() == 57344


@pytest.mark.hopper
@pytest.mark.parametrize("has_bias", [False, True])
def test_vmap_has_the_bits_of_each_call(has_bias):
    a, b, scale_a, scale_b, h, scale = inputs((304, 208, 784))
    batch = jnp.stack([a, a[::-1]]), jnp.stack([h, h[::-1]]), jnp.stack([scale, 2 * scale])

    def of_one(a, h, scale):
        found = gradient(a, b, scale_a, scale_b, h, scale, has_bias=has_bias)
        return [x for x in found if x is not None]

    each = [of_one(*arrays) for arrays in zip(*batch, strict=True)]
    for found, *expected in zip(jax.vmap(of_one)(*batch), *each, strict=True):
        assert_same_bits(found, jnp.stack(expected))


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((32, 48, 768), "float32", "h has dtype float32"),
        ((24, 48, 768), "bfloat16", "both must be positive multiples of 16"),
        ((32, 40, 768), "bfloat16", "both must be positive multiples of 16"),
        ((0, 48, 768), "bfloat16", "both must be positive multiples of 16"),
        ((32, 48, 2064), "bfloat16", "up to 2048"),
        ((32, 48, 776), "bfloat16", "it must be a multiple of 16"),
    ],
)
def test_calls_that_the_kernel_does_not_serve_say_why(on_hopper, shape, dtype, reason):
    arrays = jax.eval_shape(functools.partial(inputs, shape, dtype, bound=1.0))
    call = functools.partial(gradient, backend="auto")
    (row,) = [
        row for row in jaxllm.explain(call, *arrays).calls if row.stem == FLOAT8_MATMUL_DGELU.name
    ]
    assert row.on_gpu == "its parts"
    ((_, why),) = row.rejected
    assert reason in why


@pytest.mark.parametrize("has_bias", [False, True])
def test_block_runs_the_kernel(on_hopper, has_bias):
    width, hidden = 768, 256
    x = jax.ShapeDtypeStruct((64, width), jnp.bfloat16)
    up = jax.ShapeDtypeStruct((width, hidden), jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((hidden,), jnp.bfloat16) if has_bias else None
    down = jax.ShapeDtypeStruct((hidden, width), jnp.bfloat16)

    def loss(x, up, bias, down):
        layers = {"up": {"weight": up, "bias": bias}, "down": {"weight": down}}
        norm = {"scale": jnp.ones(width, x.dtype)}
        options: Any = {"activation": "gelu", "precision": "tensor"}
        return ffn_block(residual(x, "rms"), norm, layers, **options).x.astype(jnp.float32).sum()

    gradients = jax.grad(loss, (0, 1, 2, 3))
    found = jaxllm.explain(gradients, x, up, bias, down).calls
    calls = {call.stem: call.on_gpu for call in found}
    assert calls[FLOAT8_MATMUL_DGELU.name] == "cuda"
    assert "float8_gelu_backward" not in calls
    assert [call.stem for call in found].count("float8_matmul_amax") == 1
    program = testing.lower_for_cuda(gradients, x, up, bias, down)
    assert "@jaxllm_float8_matmul_dgelu(" in program
