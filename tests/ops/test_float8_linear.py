"""Linear layers with float8 operands: values and gradients against float64, and transforms."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import testing
from jaxllm.core import ffi
from jaxllm.ops import Quantized, Transposed, bias_gelu, float8_quantize, gelu, linear, quantize

DTYPES = ("float32", "bfloat16", "float16")
PEAK = 0.875  # 448 / 2^9: scales are powers of two, and division by them is exact in every program
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def row(*arrays, **options):
    return linear(*arrays, precision="row", **options)


def arrays(dtype="float32", rows=(2, 5), columns=(24,), depth=32, scale_is_exact=True):
    """x, weight, bias and dout, with a heavy tail."""
    generator = np.random.default_rng(0)

    def draw(*shape):
        x = 0.1 * generator.standard_normal(shape, np.float32)
        return np.clip(np.where(generator.random(shape) < 0.05, 10 * x, x), -PEAK, PEAK)

    x, dout = draw(*rows, depth), draw(*rows, *columns)
    weight, bias = draw(depth, *columns), draw(*columns)
    if scale_is_exact:
        x[..., 0] = weight[0] = PEAK
        flat = weight.reshape(depth, -1)
        flat[:, 0] = PEAK
        dout.reshape(-1, flat.shape[1])[:, 0] = PEAK
    return [jnp.asarray(array).astype(dtype) for array in (x, weight, bias, dout)]


def values_and_gradients(fn, x, weight, bias, dout):
    out, pull = jax.vjp(fn, x, weight, bias)
    return out, *pull(dout)


def assert_product(found, a, b):
    """Checks ``found`` against the float64 product of two matrices, rounded by rows."""
    a, b = a.reshape(found.size // b.shape[0], -1), b.reshape(b.shape[0], -1)
    wide = []
    for matrix in (a, b):
        values, scale = float8_quantize(matrix)
        wide.append(np.asarray(values, np.float64) * np.asarray(scale, np.float64)[:, None])
    expected, absolute = wide[0] @ wide[1].T, abs(wide[0]) @ abs(wide[1]).T
    info = jnp.finfo(found.dtype)
    bound = (a.shape[1] + 4) * 2.0**-24 * absolute
    bound += float(info.eps) / 2 * (abs(expected) + bound) + float(info.smallest_subnormal)
    lost = abs(np.asarray(found, np.float64).reshape(expected.shape) - expected)
    assert (lost <= bound).all(), float((lost - bound).max())
    # The check would see an operand that is not rounded.
    assert (abs(np.asarray(a, float) @ np.asarray(b, float).T - expected) > bound).any()


@each_dtype
@pytest.mark.parametrize("rows", [(), (7,), (2, 5)])
@pytest.mark.parametrize("columns", [(24,), (3, 8), (3, 2, 4)])
@pytest.mark.parametrize("scale_is_exact", [True, False])
def test_value_and_dx_are_products_of_rounded_operands(dtype, rows, columns, scale_is_exact):
    x, weight, _, dout = arrays(dtype, rows, columns, scale_is_exact=scale_is_exact)
    out, pull = jax.vjp(row, x, weight)
    dx, dweight = pull(dout)
    assert (out.shape, out.dtype) == ((*rows, *columns), dtype)
    assert (dx.shape, dx.dtype) == (x.shape, dtype)
    assert (dweight.shape, dweight.dtype) == (weight.shape, dtype)
    assert_product(out, x, weight.reshape(32, -1).T)
    assert_product(dx, dout, weight)


@each_dtype
@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_gradients_of_weight_and_bias_are_those_without_float8(dtype, backend):
    given = arrays(dtype)
    _, _, *found = values_and_gradients(lambda *a: row(*a, backend=backend), *given)
    _, _, *wanted = values_and_gradients(lambda *a: linear(*a, backend=backend), *given)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@each_dtype
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("columns", [(24,), (3, 8)])
def test_bias_and_activation_follow_the_rounded_product(dtype, with_bias, columns):
    x, weight, bias, dout = arrays(dtype, columns=columns)
    bias = bias if with_bias else None
    h = row(x, weight).reshape(10, 24)
    assert row(x, weight, bias).dtype == dtype
    if bias is not None:
        np.testing.assert_array_equal(row(x, weight, bias).reshape(10, 24), h + bias.ravel())
    out, pull = jax.vjp(lambda *a: row(*a, activation="gelu"), x, weight, bias)
    epilogue = gelu if bias is None else lambda h: bias_gelu(h, bias.ravel())
    wanted, pull_epilogue = jax.vjp(epilogue, h)
    np.testing.assert_array_equal(out.reshape(10, 24), wanted)
    (dh,) = pull_epilogue(dout.reshape(10, 24))
    dx, dweight, dbias = pull(dout)
    assert_product(dx, dh, weight)
    of_plain = jax.vjp(linear, x.reshape(10, 32), weight.reshape(32, 24))[1](dh)
    testing.assert_close(dweight.reshape(32, 24), of_plain[1], dtype)
    if bias is not None:
        wanted = jax.vjp(bias_gelu, h, bias.ravel())[1](dout.reshape(10, 24))[1]
        testing.assert_close(dbias.ravel(), wanted, dtype)


@each_dtype
def test_rows_of_zeros_give_zeros(dtype):
    x, weight, _, dout = arrays(dtype)
    masked = jnp.array([False, True, False, True, False])
    x, dout = (jnp.where(masked[:, None], 0, a) for a in (x, dout))
    out, pull = jax.vjp(row, x, weight)
    dx, _ = pull(dout)
    for found in (out, dx):
        assert not found[:, masked].any()
        assert found[:, ~masked].any()
    assert not row(x, jnp.zeros_like(weight)).any()
    assert row(x[:0], weight).shape == (0, 5, 24)
    assert row(x[..., :0], weight[:0]).shape == (2, 5, 24)
    assert not row(x[..., :0], weight[:0]).any()


def test_masked_rows_do_not_change_the_others():
    x, weight, _, dout = arrays()
    out, pull = jax.vjp(row, x, weight)
    part, pull_part = jax.vjp(row, x.at[:, 3].set(1e6), weight)
    kept = np.array([0, 1, 2, 4])
    np.testing.assert_array_equal(part[:, kept], out[:, kept])
    changed = dout.at[:, 3].set(1e6)
    np.testing.assert_array_equal(pull_part(changed)[0][:, kept], pull(dout)[0][:, kept])


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_make_their_rows_nan(special):
    x, weight, _, dout = arrays()
    is_nan = np.isnan(row(x.at[1, 2, 3].set(special), weight))
    assert is_nan[1, 2].all()
    assert is_nan.sum() == 24
    assert np.isnan(row(x, weight.at[5, 7].set(special)))[..., 7].all()
    dx = jax.vjp(row, x, weight)[1](dout.at[1, 2, 3].set(special))[0]
    assert np.isnan(dx[1, 2]).all()
    assert np.isnan(dx).sum() == 32


@each_dtype
def test_error_of_a_product_is_that_of_its_rounded_factors(dtype):
    x, weight, _, _ = arrays(dtype, scale_is_exact=False)
    exact = np.asarray(x, float) @ np.asarray(weight, float)
    absolute = abs(np.asarray(x, float)) @ abs(np.asarray(weight, float))
    # The smallest step times the scale, of either factor.
    ends = (abs(np.asarray(array, float)).max(axis) for array, axis in ((x, -1), (weight, 0)))
    x_step, w_step = (2.0**-10 / 448 * end for end in ends)
    small = x_step[..., None] * abs(np.asarray(weight, float)).sum(0)
    small = small + w_step * abs(np.asarray(x, float)).sum(-1)[..., None]
    bound = (1 + 2.0**-4) * ((2 * 2.0**-4 + 2.0**-8) * absolute + small)
    bound += float(jnp.finfo(dtype).eps) * abs(exact) + 1e-7
    assert (abs(np.asarray(row(x, weight), float) - exact) <= bound).all()


def test_transposed_weight_gives_the_value_of_the_plain_one():
    x, weight, bias, _ = arrays("bfloat16")
    for rows in (x, x[0, 0], jnp.tile(x, (2, 1, 1))):
        for activation in (None, "gelu"):
            found = row(rows, Transposed(weight.T), bias, activation=activation)
            wanted = row(rows, weight, bias, activation=activation)
            np.testing.assert_array_equal(found, wanted)


def loss(x, weight, bias):
    return (row(x, weight, bias) * jnp.cos(jnp.arange(24.0))).sum()


def test_transforms_give_the_values_of_plain_calls():
    x, weight, bias, _ = arrays()
    plain = jax.value_and_grad(loss, (0, 1, 2))
    wanted = plain(x, weight, bias)
    testing.assert_close(jax.jit(plain)(x, weight, bias), wanted, "float32")
    remat = jax.value_and_grad(jax.checkpoint(loss), (0, 1, 2))
    testing.assert_close(jax.jit(remat)(x, weight, bias), wanted, "float32")
    of_each = jax.vmap(plain, (0, None, None))(x, weight, bias)
    each = [plain(x[i], weight, bias) for i in range(2)]
    testing.assert_close(of_each, jax.tree.map(lambda *a: jnp.stack(a), *each), "float32")
    weights = jnp.stack([weight, -2 * weight])  # of the same powers of two
    of_weights = jax.vmap(plain, (0, 0, None))(x, weights, bias)
    each = [plain(x[i], weights[i], bias) for i in range(2)]
    testing.assert_close(of_weights, jax.tree.map(lambda *a: jnp.stack(a), *each), "float32")


def test_scan_over_layers_gives_the_value_of_a_loop():
    x = arrays()[0]
    weights = jnp.stack([arrays(columns=(32,))[1] * 2.0**-i for i in range(3)])

    def scanned(x, weights):
        body = jax.checkpoint(lambda x, weight: (x + row(x, weight), None))
        return jax.lax.scan(body, x, weights)[0]

    def looped(x, weights):
        for weight in weights:
            x = x + row(x, weight)
        return x

    found, pull = jax.vjp(jax.jit(scanned), x, weights)
    wanted, pull_loop = jax.vjp(looped, x, weights)
    # A row that differs in its last bit may be rounded to other float8 numbers.
    scale = float(abs(wanted).max())
    np.testing.assert_allclose(found, wanted, atol=2.0**-4 * scale)
    for a, b in zip(pull(wanted), pull_loop(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=2.0**-4 * float(abs(b).max()))


def test_forward_mode_differentiates_the_product_without_rounding():
    x, weight, _, dout = arrays()
    fn = lambda x, weight: row(x, weight, backend="xla")  # noqa: E731
    moved = jax.jvp(fn, (x, weight), (2 * x, weight))[1]
    testing.assert_close(moved, 3 * x @ weight, "float32")
    dx, _ = jax.vjp(fn, x, weight)[1](dout)
    assert_product(dx, dout, weight)


def test_inputs_alone_are_saved_without_an_activation():
    x, weight, bias, _ = arrays()
    kept = [leaf.shape for leaf in jax.tree.leaves(jax.vjp(row, x, weight, bias)[1])]
    assert x.shape in kept
    assert (2, 5, 24) not in kept
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(jax.vjp(row, x, weight)[1]))


def test_explain_lists_both_float8_gemms():
    x, weight, bias, _ = arrays()
    calls = jaxllm.explain(jax.value_and_grad(loss, (0, 1)), x, weight, bias).calls
    calls = [call for call in calls if call.stem == "float8_matmul"]
    assert [call.shapes.split()[:2] for call in calls] == [
        ["float8_e4m3fn[10,32]", "float8_e4m3fn[24,32]"],
        ["float8_e4m3fn[10,24]", "float8_e4m3fn[32,24]"],
    ]


def test_lowers_to_two_float8_kernels_and_one_gemm_on_hopper(with_kernels, monkeypatch):
    monkeypatch.setattr(ffi, "device", lambda: ffi.H100)
    given = arrays("bfloat16", columns=(48,))

    def both(*given):
        return values_and_gradients(lambda *a: row(*a, backend="cuda"), *given)

    program = testing.lower_for_cuda(both, *given)
    assert program.count("@jaxllm_float8_matmul(") == 2
    gemms = [line for line in program.splitlines() if "dot_general" in line]
    assert all("bf16" in line and "f8" not in line for line in gemms)


def test_gpu_without_float8_raises_an_error_that_says_so(monkeypatch):
    x, weight, _, _ = arrays()
    for capability in (80, 86):
        gpu = dataclasses.replace(ffi.H100, capability=capability)
        monkeypatch.setattr(ffi, "device", lambda gpu=gpu: gpu)
        for backend in ("auto", "cuda"):
            why = f"this GPU, sm_{capability}, has no float8 tensor cores"
            with pytest.raises(jaxllm.BackendError, match=why):
                row(x, weight, backend=backend)
        assert row(x, weight, backend="xla").shape == (2, 5, 24)
        assert linear(x, weight).shape == (2, 5, 24)
    monkeypatch.setattr(ffi, "device", lambda: dataclasses.replace(ffi.H100, capability=89))
    assert row(x, weight).shape == (2, 5, 24)


def test_wrong_arguments_raise_errors_that_name_them():
    x, weight, bias, _ = arrays()
    with pytest.raises(ValueError, match="precision is 'fp8'; it must be None or 'row'"):
        linear(x, weight, precision="fp8")  # pyright: ignore
    with pytest.raises(ValueError, match=r"weight has shape \(24, 32\); it must be \(32, D_out\)"):
        row(x, weight.T)
    with pytest.raises(TypeError, match="bias has dtype bfloat16"):
        row(x, weight, bias.astype("bfloat16"))
    with pytest.raises(ValueError, match="precision is 'row'; it must be None with a Quantized"):
        row(x, Quantized(*quantize(weight.T, group_size=16)))
    with pytest.raises(jaxllm.BackendError, match="float8_matmul has no pallas kernel"):
        row(x, weight, backend="pallas")
    with (
        jax.enable_x64(True),
        pytest.raises(TypeError, match="x has dtype float64; with precision 'row' it must be"),
    ):
        row(x.astype("float64"), weight.astype("float64"))


@pytest.mark.hopper
@each_dtype
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_kernels_agree_with_xla(dtype, activation):
    x, weight, bias, dout = arrays(dtype, rows=(3, 100), columns=(3, 64), depth=1040)
    found, wanted = (
        values_and_gradients(
            lambda *a, of=backend: row(*a, activation=activation, backend=of), x, weight, bias, dout
        )
        for backend in ("cuda", "xla")
    )
    # The tensor cores sum with 14 bits. With an activation dh may be rounded to other numbers.
    tolerance = 2.0**-8 if activation is None else 2.0**-5
    tolerance = max(tolerance, 4 * float(jnp.finfo(dtype).eps))
    for a, b in zip(found, wanted, strict=True):
        a, b = (np.asarray(array, np.float64) for array in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * abs(b).max())
