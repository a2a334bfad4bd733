"""Linear layers with float8 operands: values and gradients against float64, and transforms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import ops, testing
from jaxllm.core import ffi
from jaxllm.ops import Quantized, Transposed, bias_gelu, float8_quantize, gelu, linear, quantize

DTYPES = ("float32", "bfloat16", "float16")
PEAK = 0.875  # 448 / 2^9: scales are powers of two, and division by them is exact in every program
RECIPES = ("row", "tensor")
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_recipe = pytest.mark.parametrize("recipe", RECIPES)


def layer(recipe, **static):
    return functools.partial(linear, precision=recipe, **static)


row = layer("row")


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


# What a sum may be off by, over the sum of the absolute products: the bound of float8_matmul.
ACCUMULATION = {"cpu": 0.0, "gpu": 16 * 2.0**-13}


def assert_product(found, a, b, recipe="row", dtypes=("float8_e4m3fn", "float8_e4m3fn"), bias=0.0):
    """Checks ``found`` against the float64 product of two matrices, rounded by a recipe."""
    bias = np.asarray(bias, np.float64)
    a, b = a.reshape(found.size // b.shape[0], -1), b.reshape(b.shape[0], -1)
    wide, axis = [], -1 if recipe == "row" else None
    for matrix, dtype in zip((a, b), dtypes, strict=True):
        values, scale = float8_quantize(matrix, dtype, axis=axis)
        scale = np.broadcast_to(np.asarray(scale, np.float64), len(matrix))
        wide.append(np.asarray(values, np.float64) * scale[:, None])
    expected, absolute = wide[0] @ wide[1].T + bias, abs(wide[0]) @ abs(wide[1]).T + abs(bias)
    info = jnp.finfo(found.dtype)
    bound = ((a.shape[1] + 4) * 2.0**-24 + ACCUMULATION[jax.default_backend()]) * absolute
    bound += float(info.eps) / 2 * (abs(expected) + bound) + float(info.smallest_subnormal)
    lost = abs(np.asarray(found, np.float64).reshape(expected.shape) - expected)
    assert (lost <= bound).all(), float((lost - bound).max())
    # The check would see an operand that is not rounded.
    unrounded = np.asarray(a, float) @ np.asarray(b, float).T + bias
    assert (abs(unrounded - expected) > bound).any()


# What the gradient of the output is rounded to, and the other operand.
GRADIENT_AND_OTHER = {
    "row": ("float8_e4m3fn", "float8_e4m3fn"),
    "tensor": ("float8_e5m2", "float8_e4m3fn"),
}


@each_recipe
@each_dtype
@pytest.mark.parametrize(
    ("rows", "columns"),
    [((), (24,)), ((), (3, 8)), ((7,), (3, 8)), ((2, 5), (24,)), ((2, 5), (3, 2, 4))],
)
@pytest.mark.parametrize("scale_is_exact", [True, False])
@pytest.mark.covering(("recipe", "dtype", "scale_is_exact"), ("recipe", "rows", "columns"))
def test_results_are_products_of_rounded_operands(recipe, dtype, rows, columns, scale_is_exact):
    x, weight, _, dout = arrays(dtype, rows, columns, scale_is_exact=scale_is_exact)
    out, pull = jax.vjp(layer(recipe), x, weight)
    dx, dweight = pull(dout)
    assert (out.shape, out.dtype) == ((*rows, *columns), dtype)
    assert (dx.shape, dx.dtype) == (x.shape, dtype)
    assert (dweight.shape, dweight.dtype) == (weight.shape, dtype)
    assert_product(out, x, weight.reshape(32, -1).T, recipe)
    of_dout = GRADIENT_AND_OTHER[recipe]
    assert_product(dx, dout, weight, recipe, of_dout)
    if recipe == "tensor":
        dout = dout.reshape(-1, weight[0].size)
        assert_product(dweight, x.reshape(-1, 32).T, dout.T, recipe, of_dout[::-1])


@each_recipe
@each_dtype
@pytest.mark.parametrize("backend", ["auto", "xla"])
@pytest.mark.covering(("recipe", "dtype"), ("backend",))
def test_gradients_with_unrounded_operands_are_those_without_float8(recipe, dtype, backend):
    given = arrays(dtype)
    _, _, *found = values_and_gradients(layer(recipe, backend=backend), *given)
    _, _, *wanted = values_and_gradients(layer(None, backend=backend), *given)
    if recipe == "row" or jax.default_backend() == "cpu":
        np.testing.assert_array_equal(found[1], wanted[1])
    # With "tensor" the kernel that rounds dout adds its rows, in an order of its own.
    testing.assert_close(found[1], wanted[1], dtype)
    assert (found[0] == wanted[0]).all() == (recipe == "row")


@each_recipe
@each_dtype
@pytest.mark.parametrize(("with_bias", "columns"), [(False, (24,)), (True, (24,)), (True, (3, 8))])
@pytest.mark.covering(("recipe", "dtype"), ("columns",), ("with_bias",))
def test_a_bias_alone_is_rounded_with_the_product_and_one_with_gelu_after_it(
    recipe, dtype, with_bias, columns
):
    x, weight, bias, dout = arrays(dtype, columns=columns)
    bias, fn = bias if with_bias else None, layer(recipe)
    h = fn(x, weight).reshape(10, 24)
    assert fn(x, weight, bias).dtype == dtype
    if bias is not None:
        of_bias = {"recipe": recipe, "bias": bias.ravel()}
        assert_product(fn(x, weight, bias), x, weight.reshape(32, 24).T, **of_bias)
    out, pull = jax.vjp(lambda *a: fn(*a, activation="gelu"), x, weight, bias)
    epilogue = gelu if bias is None else lambda h: bias_gelu(h, bias.ravel())
    wanted, pull_epilogue = jax.vjp(epilogue, h)
    np.testing.assert_array_equal(out.reshape(10, 24), wanted)
    (dh,) = pull_epilogue(dout.reshape(10, 24))
    dx, dweight, dbias = pull(dout)
    of_dh = GRADIENT_AND_OTHER[recipe]
    assert_product(dx, dh, weight, recipe, of_dh)
    if recipe == "row":
        of_plain = jax.vjp(linear, x.reshape(10, 32), weight.reshape(32, 24))[1](dh)
        testing.assert_close(dweight.reshape(32, 24), of_plain[1], dtype)
    else:
        assert_product(dweight, x.reshape(10, 32).T, dh.T, recipe, of_dh[::-1])
    if bias is not None:
        wanted = jax.vjp(bias_gelu, h, bias.ravel())[1](dout.reshape(10, 24))[1]
        testing.assert_close(dbias.ravel(), wanted, dtype)


@each_recipe
@each_dtype
def test_rows_of_zeros_give_zeros(recipe, dtype):
    x, weight, _, dout = arrays(dtype)
    fn = layer(recipe)
    masked = jnp.array([False, True, False, True, False])
    x, dout = (jnp.where(masked[:, None], 0, a) for a in (x, dout))
    out, pull = jax.vjp(fn, x, weight)
    dx, _ = pull(dout)
    for found in (out, dx):
        assert not found[:, masked].any()
        assert found[:, ~masked].any()
    assert not fn(x, jnp.zeros_like(weight)).any()
    assert fn(x[:0], weight).shape == (0, 5, 24)
    assert fn(x[..., :0], weight[:0]).shape == (2, 5, 24)
    assert not fn(x[..., :0], weight[:0]).any()


def test_masked_rows_do_not_change_the_others():
    x, weight, _, dout = arrays()
    out, pull = jax.vjp(row, x, weight)
    part, pull_part = jax.vjp(row, x.at[:, 3].set(1e6), weight)
    kept = np.array([0, 1, 2, 4])
    np.testing.assert_array_equal(part[:, kept], out[:, kept])
    changed = dout.at[:, 3].set(1e6)
    np.testing.assert_array_equal(pull_part(changed)[0][:, kept], pull(dout)[0][:, kept])


@each_recipe
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_nonfinite_elements_stay_visible_in_their_rows_alone(recipe, special):
    x, weight, _, dout = arrays()
    fn = layer(recipe)
    is_nan = np.isnan(fn(x.at[1, 2, 3].set(special), weight))
    assert is_nan[1, 2].all()
    assert is_nan.sum() == 24
    assert np.isnan(fn(x, weight.at[5, 7].set(special)))[..., 7].all()
    dx, dweight = jax.vjp(fn, x, weight)[1](dout.at[1, 2, 3].set(special))
    lost = ~np.isfinite(dx)
    assert lost[1, 2].all()
    assert lost.sum() == 32
    lost = ~np.isfinite(dweight)
    assert lost[:, 3].all()
    assert lost.sum() == 32


@each_recipe
@each_dtype
def test_error_of_a_product_is_that_of_its_rounded_factors(recipe, dtype):
    x, weight, _, _ = arrays(dtype, scale_is_exact=False)
    fn, by_row = layer(recipe), recipe == "row"
    exact = np.asarray(x, float) @ np.asarray(weight, float)
    absolute = abs(np.asarray(x, float)) @ abs(np.asarray(weight, float))
    # The smallest step times the scale, of either factor.
    sides = (x, -1 if by_row else None), (weight, 0 if by_row else None)
    ends = (abs(np.asarray(array, float)).max(axis) for array, axis in sides)
    x_step, w_step = (np.asarray(2.0**-10 / 448 * end) for end in ends)
    small = x_step[..., None] * abs(np.asarray(weight, float)).sum(0)
    small = small + w_step * abs(np.asarray(x, float)).sum(-1)[..., None]
    bound = (1 + 2.0**-4) * ((2 * 2.0**-4 + 2.0**-8) * absolute + small)
    bound += float(jnp.finfo(dtype).eps) * abs(exact) + 1e-7
    assert (abs(np.asarray(fn(x, weight), float) - exact) <= bound).all()


@each_recipe
def test_transposed_weight_gives_the_value_of_the_plain_one(recipe):
    x, weight, bias, _ = arrays("bfloat16")
    fn = layer(recipe)
    for rows in (x, x[0, 0], jnp.tile(x, (2, 1, 1))):
        for activation in (None, "gelu"):
            found = fn(rows, Transposed(weight.T), bias, activation=activation)
            wanted = fn(rows, weight, bias, activation=activation)
            np.testing.assert_array_equal(found, wanted)


def loss(x, weight, bias, fn=row):
    return (fn(x, weight, bias) * jnp.cos(jnp.arange(24.0))).sum()


@each_recipe
def test_transforms_give_the_values_of_plain_calls(recipe):
    x, weight, bias, _ = arrays()
    of_recipe = functools.partial(loss, fn=layer(recipe))
    plain = jax.value_and_grad(of_recipe, (0, 1, 2))
    wanted = plain(x, weight, bias)
    testing.assert_close(jax.jit(plain)(x, weight, bias), wanted, "float32")
    remat = jax.value_and_grad(jax.checkpoint(of_recipe), (0, 1, 2))
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


def along(x, fn):
    """The derivative of a function of ``x`` along ``x``, in forward mode."""
    return jax.jvp(fn, (x,), (x,))[1]


SECOND_DERIVATIVES = {
    "hessian": lambda fn, x: jax.hessian(fn)(x),
    "gradient of a gradient": lambda fn, x: jax.grad(lambda x: jax.grad(fn)(x).sum())(x),
    "gradient of a jvp": lambda fn, x: jax.grad(lambda x: along(x, fn))(x),
    "jvp of a jvp": lambda fn, x: along(x, lambda x: along(x, fn)),
}


@pytest.mark.parametrize("how", SECOND_DERIVATIVES)
@pytest.mark.parametrize("precision", ["row", "tensor"])
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.covering(("how", "precision"), ("block",))
def test_a_second_derivative_is_an_error(precision, how, block):
    x, weights = jnp.ones((2, 3, 16)), {"weight": jnp.ones((16, 16))}
    norm = {"scale": jnp.ones(16), "bias": jnp.ones(16)}

    def fn(x):
        if not block:
            return jnp.sin(layer(precision)(x, **weights)).sum()
        h = ops.residual(x, norm="layer")
        out = ops.ffn_block(h, norm, {"up": weights, "down": weights}, precision=precision)
        return jnp.sin(out.x).sum()

    with jaxllm.use_backend("xla"):
        jax.eval_shape(jax.grad(fn), x)
        jax.eval_shape(lambda x: along(x, jax.checkpoint(fn)), x)
        with pytest.raises(jaxllm.BackendError, match="no second derivative; give precision=None"):
            jax.eval_shape(lambda x: SECOND_DERIVATIVES[how](fn, x), x)


def test_inputs_alone_are_saved_without_an_activation():
    x, weight, bias, _ = arrays()
    kept = [leaf.shape for leaf in jax.tree.leaves(jax.vjp(row, x, weight, bias)[1])]
    assert x.shape in kept
    assert (2, 5, 24) not in kept
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(jax.vjp(row, x, weight)[1]))


def test_rounded_input_is_saved_where_dw_is_its_product():
    x, weight, _, _ = arrays()
    kept = jax.tree.leaves(jax.vjp(layer("tensor"), x, weight)[1])
    of_x = [leaf.dtype for leaf in kept if leaf.size == x.size]
    assert of_x == [jnp.float8_e4m3fn]


FLOAT8_GEMMS = {
    "row": [
        ["float8_e4m3fn[10,32]", "float8_e4m3fn[24,32]"],
        ["float8_e4m3fn[10,24]", "float8_e4m3fn[32,24]"],
    ],
    "tensor": [
        ["float8_e4m3fn[10,32]", "float8_e4m3fn[24,32]"],
        ["float8_e4m3fn[32,10]", "float8_e5m2[24,10]"],
        ["float8_e5m2[10,24]", "float8_e4m3fn[32,24]"],
    ],
}


@each_recipe
def test_explain_lists_every_float8_gemm(recipe):
    x, weight, bias, _ = arrays()
    of_recipe = functools.partial(loss, fn=layer(recipe))
    calls = jaxllm.explain(jax.value_and_grad(of_recipe, (0, 1)), x, weight, bias).calls
    calls = [call for call in calls if call.stem == "float8_matmul"]
    assert [call.shapes.split()[:2] for call in calls] == FLOAT8_GEMMS[recipe]


@each_recipe
def test_lowers_to_float8_kernels_on_hopper(recipe, with_kernels, monkeypatch):
    monkeypatch.setattr(ffi, "device", lambda: ffi.H100)
    given = arrays("bfloat16", rows=(2, 8), columns=(48,))

    def both(*given):
        return values_and_gradients(layer(recipe, backend="cuda"), *given)

    program = testing.lower_for_cuda(both, *given)
    assert program.count("@jaxllm_float8_matmul(") == len(FLOAT8_GEMMS[recipe])
    gemms = [line for line in program.splitlines() if "dot_general" in line]
    assert all("bf16" in line and "f8" not in line for line in gemms)
    assert bool(gemms) == (recipe == "row")


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
    with pytest.raises(ValueError, match="'fp8'; it must be None or 'row' or 'tensor'"):
        linear(x, weight, precision="fp8")  # pyright: ignore
    with pytest.raises(ValueError, match=r"weight has shape \(24, 32\); it must be \(32, D_out\)"):
        row(x, weight.T)
    with pytest.raises(TypeError, match="bias has dtype bfloat16"):
        row(x, weight, bias.astype("bfloat16"))
    with pytest.raises(ValueError, match="precision is 'row'; it must be None with a Quantized"):
        row(x, Quantized(*quantize(weight.T, group_size=16)))
    with pytest.raises(jaxllm.BackendError, match="float8_round has no pallas kernel"):
        row(x, weight, backend="pallas")
    with (
        jax.enable_x64(True),
        pytest.raises(TypeError, match="x has dtype float64; with precision 'row' it must be"),
    ):
        row(x.astype("float64"), weight.astype("float64"))


@pytest.mark.hopper
@each_recipe
@each_dtype
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_kernels_agree_with_xla(recipe, dtype, activation):
    given = arrays(dtype, rows=(4, 100), columns=(3, 64), depth=1040)
    found, wanted = (
        values_and_gradients(layer(recipe, activation=activation, backend=backend), *given)
        for backend in ("cuda", "xla")
    )
    # The tensor cores sum with 14 bits. With an activation dh may be rounded to other numbers.
    tolerance = 2.0**-8 if activation is None else 2.0**-5
    tolerance = max(tolerance, 4 * float(jnp.finfo(dtype).eps))
    for a, b in zip(found, wanted, strict=True):
        a, b = (np.asarray(array, np.float64) for array in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * abs(b).max())


@pytest.mark.hopper
def test_a_weight_is_rounded_once_for_both_passes():
    x, weight, bias, dout = arrays("bfloat16", rows=(64,), columns=(64,), depth=128)
    fn = functools.partial(values_and_gradients, layer("tensor", backend="cuda"))
    program = jax.jit(fn).lower(x, weight, bias, dout).compile().as_text() or ""
    # x, the weight and dout.
    assert program.count('custom_call_target="jaxllm_float8_scale_and_round"') == 3
