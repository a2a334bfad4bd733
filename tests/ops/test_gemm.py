"""What the contract leaves open of the matrix products: the program they become, and the errors."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.core import ffi
from jaxllm.ops import (
    add_layer_norm,
    gelu,
    layer_norm,
    linear,
    linear_add_layer_norm,
    matmul,
    mlp,
    normed_rows,
    pre_norm_mlp,
    self_attention,
)
from jaxllm.ops.gemm import cuda, pallas, products, reference, slopes
from jaxllm.testing import DTYPES, assert_close, cotangents_like, error, lower_for_cuda


def arrays(dtype="float32", rows=3, d_in=4, d_out=5):
    shapes = ((rows, d_in), (d_in, d_out), (d_out,))
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def test_the_activation_is_gelu_of_the_product():
    x, weight, bias = arrays()
    fused = linear(x, weight, bias, activation="gelu")
    assert_close(fused, gelu(x @ weight + bias), "float32")


def test_bfloat16_products_are_written_in_bfloat16():
    x, weight, bias = arrays("bfloat16")

    def both(x, weight, bias):
        out, pull = jax.vjp(lambda *a: linear(*a, activation="gelu"), x, weight, bias)
        return pull(out)

    products = [
        line for line in lower_for_cuda(both, x, weight, bias).splitlines() if "dot_general" in line
    ]
    assert len(products) == 3
    assert all("f32" not in product for product in products)


def test_the_bias_gradient_adds_up_in_float32():
    rows = 4096
    x, weight, bias = arrays("bfloat16", rows=rows)
    pull = jax.vjp(lambda bias: linear(x, weight, bias), bias)[1]
    # 4096 ones added in bfloat16 stop at 256.
    assert (pull(jnp.ones((rows, 5), jnp.bfloat16))[0] == rows).all()


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (linear, [(64, 192), (192,)]),
        (mlp, [(64, 192), (192,), (192, 64), (64,)]),
        (lambda x, *layer: linear_add_layer_norm(x, *layer)[0], [(64, 64), (2, 8, 64), (64,)]),
        (lambda x, weight, bias: self_attention(x, weight, bias, 2), [(64, 192), (192,)]),
    ],
)
def test_the_gradient_of_an_input_waits_for_that_of_the_weight(op, shapes):
    # Else XLA may leave the weights for the end, and keep what all layers need for them.
    arrays = [jnp.ones(shape) for shape in [(2, 8, 64), *shapes]]
    every = tuple(range(len(arrays)))
    with jaxllm.use_backend("xla"):
        program = jax.make_jaxpr(jax.grad(lambda *a: op(*a).sum(), argnums=every))(*arrays)
    found = []
    for equations in blocks_of(program):
        products = [e for e in equations if e.primitive.name == "dot_general"]
        for barrier in [e for e in equations if e.primitive.name == "optimization_barrier"]:
            dweight, dout = barrier.invars
            assert any(dweight in e.outvars for e in products)
            assert any(barrier.outvars[1] in e.invars for e in products)
            found.append((dweight.aval.shape, dout.aval.shape))
    weights = [shape for shape in shapes if len(shape) == 2]
    assert found == [(shape, (2, 8, shape[1])) for shape in reversed(weights)]


def blocks_of(program):
    """The equations of a program, and those of each program in them."""
    program = getattr(program, "jaxpr", program)
    yield program.eqns
    for equation in program.eqns:
        for parameter in equation.params.values():
            if hasattr(parameter, "eqns") or hasattr(parameter, "jaxpr"):
                yield from blocks_of(parameter)


def test_without_an_activation_only_inputs_are_kept():
    x, weight, bias = arrays()
    kept = jax.tree.leaves(jax.vjp(linear, x, weight, bias)[1])
    assert (3, 5) not in [leaf.shape for leaf in kept]


def test_shapes_that_do_not_fit_are_refused():
    x, weight, bias = arrays()
    with pytest.raises(ValueError, match=r"weight has shape \(5, 4\); it must be \(4, D_out\)"):
        linear(x, weight.T)
    with pytest.raises(ValueError, match=r"weight has shape \(4,\)"):
        linear(x, weight[:, 0])
    with pytest.raises(ValueError, match=r"bias has shape \(4,\); it must be \(5,\)"):
        linear(x, weight, bias[:4])
    with pytest.raises(ValueError, match=r"x has shape \(\)"):
        linear(jnp.float32(1), weight)


def test_dtypes_that_differ_are_refused():
    x, weight, bias = arrays()
    with pytest.raises(TypeError, match="weight has dtype bfloat16; it must have the dtype of x"):
        linear(x, weight.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="bias has dtype float16; it must have the dtype of x"):
        linear(x, weight, bias.astype(jnp.float16))
    with pytest.raises(TypeError, match="x has dtype int32"):
        linear(x.astype(jnp.int32), weight)


def test_an_unknown_activation_is_refused():
    x, weight, _ = arrays()
    with pytest.raises(ValueError, match="activation is 'relu'; it must be None or 'gelu'"):
        linear(x, weight, activation="relu")  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["cuda", "pallas", "xla"])
@pytest.mark.parametrize(
    ("activation", "with_bias", "kernels"),
    [
        (None, True, ["bias_add_backward"]),
        ("gelu", True, ["bias_gelu_backward", "bias_gelu_forward"]),
        ("gelu", False, ["gelu_backward", "gelu_forward"]),
        (None, False, []),
    ],
)
def test_the_program_for_a_gpu_holds_the_kernels(backend, activation, with_bias, kernels):
    if backend == "cuda" and not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    some = arrays("bfloat16")[: 3 if with_bias else 2]

    def both(*some):
        out, pull = jax.vjp(lambda *a: linear(*a, activation=activation, backend=backend), *some)
        return out, pull(out)

    program = lower_for_cuda(both, *some)
    found = sorted(set(re.findall(r"@jaxllm_(\w+)", program)))
    assert found == (kernels if backend == "cuda" else [])
    assert ("triton" in program) == (backend == "pallas" and activation is not None)
    assert len(re.findall("dot_general", program)) == 3


def test_auto_runs_the_cuda_kernels():
    x, weight, bias = arrays()
    (call,) = jaxllm.explain(lambda *a: linear(*a, activation="gelu"), x, weight, bias).calls
    assert call.on_gpu == ("cuda" if ffi.is_available() else "pallas")


def test_float64_is_left_to_the_definition():
    with jax.enable_x64(True):
        x, weight, _ = arrays("float64")
        with pytest.raises(jaxllm.BackendError, match="the input has dtype float64; the kernel"):
            linear(x, weight, backend="pallas")


def mlp_arrays(dtype="float32", rows=3, width=4, hidden=6, out=5):
    shapes = ((rows, width), (width, hidden), (hidden,), (hidden, out), (out,))
    keys = jax.random.split(jax.random.key(0), 5)
    return [
        (jax.random.normal(key, shape) / max(len(shape) * shape[0] ** 0.5, 1)).astype(dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def two_layers(x, up_weight, up_bias, down_weight, down_bias, **options):
    hidden = linear(x, up_weight, up_bias, activation="gelu", **options)
    return linear(hidden, down_weight, down_bias, **options)


def with_gradients(fn, arrays):
    out, pull = jax.vjp(fn, *arrays)
    return out, pull(cotangents_like(out))


def check_fused(op, by_ops, arrays, dtype):
    """The CUDA kernels are as exact as the ops one by one, and run twice give the same bits."""

    def run(fn, backend, arrays):
        return with_gradients(lambda *a: fn(*a, backend=backend), arrays)

    fused, again = (run(op, "cuda", arrays) for _ in range(2))
    expected = run(by_ops, "xla", [x.astype("float32") for x in arrays])
    assert_close(fused, expected, dtype, run(by_ops, "xla", arrays))
    for a, b in zip(jax.tree.leaves(fused), jax.tree.leaves(again), strict=True):
        assert error(a, b) == 0


def test_mlp_is_two_layers():
    arrays = mlp_arrays()
    expected = with_gradients(two_layers, arrays)
    assert_close(with_gradients(mlp, arrays), expected, "float32")


def test_mlp_keeps_what_a_policy_keeps_of_two_layers():
    arrays = mlp_arrays()
    policy = jax.checkpoint_policies.save_only_these_names("linear")

    def products_of(fn):
        saving = jax.checkpoint(lambda *arrays: fn(*arrays).sum(), policy=policy)
        return str(jax.make_jaxpr(jax.grad(saving, argnums=(0, 1, 2, 3, 4)))(*arrays)).count(
            "dot_general"
        )

    assert products_of(mlp) == products_of(two_layers)


def test_shapes_and_dtypes_that_do_not_fit_an_mlp_are_refused():
    x, up_weight, up_bias, down_weight, down_bias = mlp_arrays()
    with pytest.raises(ValueError, match=r"up_weight has shape \(6, 4\); it must be \(4, D_out\)"):
        mlp(x, up_weight.T, up_bias, down_weight, down_bias)
    with pytest.raises(ValueError, match=r"up_bias has shape \(5,\); it must be \(6,\)"):
        mlp(x, up_weight, down_bias, down_weight, down_bias)
    with pytest.raises(
        ValueError, match=r"down_weight has shape \(5, 6\); it must be \(6, D_out\)"
    ):
        mlp(x, up_weight, up_bias, down_weight.T, down_bias)
    with pytest.raises(ValueError, match=r"down_bias has shape \(6,\); it must be \(5,\)"):
        mlp(x, up_weight, up_bias, down_weight, up_bias)
    with pytest.raises(TypeError, match="down_bias has dtype float16; it must have the dtype of x"):
        mlp(x, up_weight, up_bias, down_weight, down_bias.astype(jnp.float16))
    with pytest.raises(ValueError, match=r"x has shape \(\)"):
        mlp(jnp.float32(1), up_weight, up_bias, down_weight, down_bias)
    with pytest.raises(ValueError, match="activation is None; it must be 'gelu'"):
        mlp(x, up_weight, up_bias, down_weight, down_bias, activation=None)  # type: ignore[arg-type]


LARGE_ADDED = {"rows": 132 * 128, "hidden": 192, "out": 64}
LARGE = LARGE_ADDED | {"width": 64}


def mlp_under(backend, arrays):
    return with_gradients(lambda *a: mlp(*a, backend=backend), arrays)


def mlp_program(dtype, sizes, backend="cuda"):
    arrays = jax.eval_shape(lambda: mlp_arrays(dtype, **sizes))
    return lower_for_cuda(lambda *a: mlp_under(backend, a), *arrays)


def test_a_large_mlp_for_hopper_fuses_gelu_with_its_products(on_hopper):
    program = mlp_program("bfloat16", LARGE)
    found = sorted(set(re.findall(r"@jaxllm_(\w+)", program)))
    assert found == ["bias_add_backward", "matmul_bias_gelu", "matmul_scale"]
    assert len(re.findall("dot_general", program)) == 4


@pytest.mark.parametrize(
    ("dtype", "changed", "why"),
    [
        ("float32", {}, "x has dtype float32; the fused product takes bfloat16 and float16"),
        ("bfloat16", {"width": 60, "out": 60}, "widths that are no multiples of 8"),
        ("bfloat16", {"hidden": 188}, "widths that are no multiples of 8"),
        ("float16", {"rows": 131 * 128}, "the product has 131 tiles"),
    ],
)
def test_other_mlps_have_kernels_after_the_products(on_hopper, dtype, changed, why):
    sizes = LARGE | changed
    x, weight, *_ = jax.eval_shape(lambda: mlp_arrays(dtype, **sizes))
    assert why in str(cuda.fused_unsupported(x, weight.shape[1]))
    program = mlp_program(dtype, sizes)
    found = sorted(set(re.findall(r"@jaxllm_(\w+)", program)))
    assert found == ["bias_add_backward", "bias_gelu_backward", "bias_gelu_forward"]
    assert len(re.findall("dot_general", program)) == 6


@pytest.mark.parametrize(
    ("changed", "kernels"),
    [
        ({"width": 60}, ["bias_gelu_backward", "bias_gelu_forward"]),
        ({"out": 60}, ["bias_gelu_backward", "matmul_bias_gelu"]),
    ],
)
def test_an_mlp_keeps_the_slope_where_both_products_are_fused(on_hopper, changed, kernels):
    program = mlp_program("bfloat16", LARGE | changed)
    found = sorted(set(re.findall(r"@jaxllm_(\w+)", program)))
    assert found == ["bias_add_backward", *kernels]


@pytest.mark.parametrize("module", [reference, pallas])
def test_every_backend_may_keep_the_slope_in_the_place_of_h(module):
    arrays = mlp_arrays()
    options = {} if module is reference else {"interpret": True}

    def run(keeps_slope):
        kept = module.mlp_forward(*arrays, activation="gelu", keeps_slope=keeps_slope, **options)
        residuals = (*arrays, *kept[1:], jnp.cos(kept[0]))
        gradients = reference.mlp_backward(*residuals, activation="gelu")
        return kept, gradients

    (out, h, nothing, hidden), expected = run(keeps_slope=False)
    assert nothing is None
    (again, nothing, slope, same_hidden), gradients = run(keeps_slope=True)
    assert nothing is None
    assert_close((again, same_hidden), (out, hidden), "float32")
    exact = jax.grad(lambda x: gelu(x).sum())(h + arrays[2])
    assert_close(slopes.unpack(slope, like=h), exact, "float32")
    assert_close(gradients, expected, "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(1, 8), (127, 264), (2, 3, 130, 400), (256, 384)])
def test_slopes_are_kept_tile_by_tile(shape, dtype):
    slope = jnp.asarray(np.random.default_rng(0).uniform(-0.13, 1.13, shape), dtype)
    kept = slopes.pack(slope)
    rows, columns = np.prod(shape[:-1]), shape[-1]
    assert kept.shape == slopes.shape_of(rows, columns)
    assert kept.shape[1] % 2 == 0
    # No rounding beyond that of the dtype, which the slope has already.
    assert kept.dtype == slope.dtype
    np.testing.assert_array_equal(slopes.unpack(kept, like=slope), slope)
    # The last number, by hand: where its lane has it, in its warp's band of the tile.
    row, column = (rows - 1) % 128, (columns - 1) % 192
    band = row // 16 % 4 * 6 + column // 64 * 2 + row // 64
    lane = row % 8 * 4 + column % 8 // 2
    at = band * 1024 + column % 64 // 16 * 32 * 8 + lane * 8
    at += column % 16 // 8 * 4 + row % 16 // 8 * 2 + column % 2
    assert kept[(rows - 1) // 128, (columns - 1) // 192, at] == slope.ravel()[-1]


def test_auto_keeps_the_slope_where_a_gpu_would_and_gives_the_same_elsewhere(on_hopper):
    program = mlp_program("bfloat16", LARGE, "auto")
    assert {"matmul_bias_gelu", "matmul_scale"} < set(re.findall(r"@jaxllm_(\w+)", program))
    arrays = mlp_arrays("bfloat16", **LARGE)
    assert cuda.mlp_forward_options(*arrays) == {"keeps_slope": True}
    expected = mlp_under("xla", [x.astype("float32") for x in arrays])
    assert_close(mlp_under("auto", arrays), expected, "bfloat16", mlp_under("xla", arrays))


def test_a_machine_without_hopper_leaves_the_products_to_xla(monkeypatch):
    x, weight, *_ = jax.eval_shape(lambda: mlp_arrays("bfloat16", **LARGE))
    monkeypatch.setattr(ffi, "no_hopper_reason", lambda: "there is none")
    assert cuda.fused_unsupported(x, weight.shape[1]) == "there is none"


def pretend_sms(monkeypatch, sms, gpu: ffi.Device | None = ffi.H100):
    """Makes predicates and workspaces be those of a GPU with no more SMs than that."""
    assert gpu is not None
    sms, clusters = min(sms, gpu.multiprocessors), min(sms // 2, gpu.clusters)
    smaller = dataclasses.replace(gpu, multiprocessors=sms, clusters=clusters)
    monkeypatch.setattr(ffi, "device", lambda: smaller)
    return smaller


# The tiles of a row that may wait for one another, and whether the gradients of the two weights of
# GPT-2's attention, 48 tiles, are worth a kernel.
@pytest.mark.parametrize(
    ("sms", "row_tiles", "fits"),
    [
        (148, 48, True),
        (132, 48, True),
        (114, 48, True),
        (78, 39, False),
        (60, 30, False),
        (14, 7, False),
    ],
)
def test_predicates_ask_the_gpu_for_its_sms(monkeypatch, sms, row_tiles, fits):
    gpu = dataclasses.replace(ffi.H100, multiprocessors=148, clusters=74)
    pretend_sms(monkeypatch, sms, gpu)

    def rows(count, width=3072):
        return jax.ShapeDtypeStruct((count, width), jnp.bfloat16)

    assert cuda.fused_unsupported(rows(128 * sms), 192) is None
    assert f"too few to fill {sms} SMs" in str(cuda.fused_unsupported(rows(128 * (sms - 1)), 192))
    assert cuda.norm_unsupported(rows(65536), 768) is None
    assert cuda.norm_unsupported(rows(65536), row_tiles * 192) is None
    reason = cuda.norm_unsupported(rows(65536), row_tiles * 192 + 8)
    assert f"no more than {row_tiles} run at once" in str(reason)
    arrays = [rows(65536, width) for width in (768, 2304, 768, 768)]
    assert (cuda.weight_gradients_unsupported(*arrays) is None) == fits
    assert (cuda.weight_gradients_unsupported(*arrays, sms_of_tile=1) is None) == (sms >= 48)


@pytest.mark.parametrize(("sms", "groups"), [(132, 16), (114, 14), (78, 9), (60, 7), (14, 1)])
def test_workspaces_have_room_for_the_ctas_of_the_gpu(monkeypatch, sms, groups):
    pretend_sms(monkeypatch, sms)
    workspaces = []

    def call(stem, results, *arrays, **_):
        workspaces.extend(x.shape for x in results if x.dtype == jnp.float32)
        return [jnp.zeros(x.shape, x.dtype) for x in results]

    monkeypatch.setattr(ffi, "call", call)
    rows, weight = jnp.ones((256, 768), jnp.bfloat16), jnp.ones((768, 64), jnp.bfloat16)
    dout, rstd = jnp.ones((256, 64), jnp.bfloat16), jnp.ones(256)
    cuda._matmul_norm_gradient(dout, weight, rows, rstd, rows)
    assert workspaces.pop(0) == (16 * groups, 768)
    workspaces.clear()
    cuda._weight_gradients(rows, dout, rows, rows)  # 3 and 12 tiles
    assert workspaces == [(sms + 3 + 12, 256, 192)]


def test_an_unknown_gpu_gets_no_kernel_for_hopper(monkeypatch):
    monkeypatch.setattr(ffi, "device", lambda: None)
    x = jax.ShapeDtypeStruct((65536, 768), jnp.bfloat16)
    for reason in (
        cuda.fused_unsupported(x, 768),
        cuda.norm_unsupported(x, 768),
        cuda.weight_gradients_unsupported(x, x, x, x),
    ):
        assert "this process has no NVIDIA GPU" in str(reason)


def test_a_gpu_without_clusters_gets_no_kernel_for_hopper(monkeypatch):
    gpu = dataclasses.replace(ffi.H100, multiprocessors=1, clusters=0)
    monkeypatch.setattr(ffi, "device", lambda: gpu)
    x = jax.ShapeDtypeStruct((65536, 768), jnp.bfloat16)
    assert "no two SMs" in str(cuda.fused_unsupported(x, 768))
    assert "no two SMs" in str(cuda.norm_unsupported(x, 768))


# Where a process has a smaller GPU too, workspaces have room for the CTAs of that one.
@pytest.mark.hopper
@pytest.mark.parametrize("sms", [114, 60, 14])
def test_kernels_keep_to_the_room_of_a_smaller_gpu(monkeypatch, skip_if_declined, sms):
    monkeypatch.setattr(cuda, "_MIN_TILES_OF_SM", 0)
    pretend_sms(monkeypatch, sms, ffi.device())
    # Of other rows for each: an eager call may be one that was made before.
    arrays = pre_norm_arrays("bfloat16", rows=2000 + sms, width=776, hidden=1032)
    skip_if_declined(lambda: cuda.norm_unsupported(arrays[0], 776))
    check_fused(pre_norm_mlp, pre_norm_mlp_by_ops, arrays, "bfloat16")


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("sms", "widths"), [(114, (768, 2304, 768, 768)), (14, (248, 576, 200, 384))]
)
def test_gradients_of_weights_keep_to_the_room_of_a_smaller_gpu(
    monkeypatch, skip_if_declined, sms, widths
):
    monkeypatch.setattr(cuda, "_MIN_SMS_OF_GRADIENT_TILE", 1)
    for name in ("MIN_FILLED", "MIN_GRADIENT_ROWS"):
        monkeypatch.setattr(cuda, f"_{name}", 0)
    gpu = pretend_sms(monkeypatch, sms, ffi.device())
    arrays = rows_of_two_layers("bfloat16", 5000, *widths)
    skip_if_declined(lambda: cuda.weight_gradients_unsupported(*arrays))
    found = jax.jit(lambda *a: cuda.linear_weight_gradients(*a))(*arrays)[:2]
    assert gpu.multiprocessors <= sms
    expected = products.weight_gradients(*(x.astype("float32") for x in arrays))[:2]
    assert_close(found, expected, "bfloat16", products.weight_gradients(*arrays)[:2])


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("rows", "width", "hidden"),
    [(1, 8, 8), (127, 64, 264), (129, 72, 256), (300, 520, 248), (2500, 1032, 1544)],
)
def test_the_fused_products_take_any_rows_and_widths(
    monkeypatch, skip_if_declined, dtype, rows, width, hidden
):
    monkeypatch.setattr(cuda, "_MIN_TILES_OF_SM", 0)
    arrays = mlp_arrays(dtype, rows=rows, width=width, hidden=hidden, out=width)
    skip_if_declined(lambda: cuda.fused_unsupported(arrays[0], hidden))
    fused = mlp_under("cuda", arrays)
    again = mlp_under("cuda", arrays)
    wide = [x.astype("float32") for x in arrays]
    expected = mlp_under("xla", wide)
    reference = mlp_under("xla", arrays)
    assert_close(fused, expected, dtype, reference)
    for a, b in zip(jax.tree.leaves(fused), jax.tree.leaves(again), strict=True):
        assert error(a, b) == 0


@pytest.mark.hopper
@pytest.mark.parametrize(("dtype", "huge"), [("bfloat16", 1e30), ("float16", 3e4)])
def test_the_fused_products_have_the_limits_of_gelu(dtype, huge):
    rows, width, columns = 130, 64, 264
    x = jnp.ones((rows, width), dtype)
    weight = jnp.full((width, columns), 1 / width, dtype)
    above = np.arange(columns) % 3 > 0
    bias = jnp.where(above, huge, -huge).astype(dtype)
    out, h = cuda._matmul_bias_gelu(x, weight, bias)
    again, slope = cuda._matmul_bias_gelu(x, weight, bias, slope=True)
    np.testing.assert_array_equal(h.astype("float32"), np.ones((rows, columns)))
    limits = np.where(above, (h + bias).astype("float32"), 0)
    np.testing.assert_array_equal(out.astype("float32"), limits)
    np.testing.assert_array_equal(again, out)
    slope = slopes.unpack(slope, like=out).astype("float32")
    np.testing.assert_array_equal(slope, np.broadcast_to(above, (rows, columns)))


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (130, 264), (500, 1160)])
def test_the_slope_is_kept_in_the_order_that_all_backends_know(dtype, rows, columns):
    x, weight, bias, *_ = mlp_arrays(dtype, rows=rows, width=64, hidden=columns)
    out, slope = cuda._matmul_bias_gelu(x, weight, bias, slope=True)
    h = jnp.dot(*(a.astype("float32") for a in (x, weight)), precision="highest") + bias
    exact = jax.grad(lambda x: gelu(x).sum())(h)
    found = slopes.unpack(slope, like=out)
    # Rounded once, to the dtype: half a unit in the last place. The sums of the product, float32
    # too, are in another order.
    epsilon = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(found.astype("float32"), exact, rtol=0.51 * epsilon, atol=1e-5)


@pytest.mark.hopper
def test_a_scaled_product_has_the_sums_of_its_columns():
    x, weight, factors = (
        jax.random.normal(jax.random.key(i), shape, "bfloat16")
        for i, shape in enumerate([(130, 64), (264, 64), (130, 264)])
    )
    kept = slopes.pack(jnp.clip(factors, -0.1, 1.1))  # as slopes are
    out, sums = cuda._matmul_scale(x, weight, kept)
    wide = [*(a.astype("float32") for a in (x, weight)), slopes.unpack(kept, like=out)]
    expected = jnp.dot(wide[0], wide[1].T, precision="highest") * wide[2]
    assert_close((out, sums), (expected, expected.sum(0)), "bfloat16")


@pytest.mark.gpu
def test_a_mapped_mlp_launches_a_fused_product_for_each_call(monkeypatch):
    monkeypatch.setattr(cuda, "_MIN_TILES_OF_SM", 0)
    first, second = (
        mlp_arrays("bfloat16", rows=rows, width=64, hidden=264, out=64) for rows in (130, 130)
    )
    second = [2 * x for x in second]
    stacked = [jnp.stack(pair) for pair in zip(first, second, strict=True)]
    mapped = jax.vmap(lambda *a: mlp_under("cuda", a))(*stacked)
    for i, arrays in enumerate((first, second)):
        one = mlp_under("cuda", arrays)
        assert_close(jax.tree.map(lambda x, i=i: x[i], mapped), one, "bfloat16")


def added_arrays(dtype="float32", rows=3, hidden=6, out=5):
    """Those of ``linear_add_layer_norm``, the two last ones the biases of norm and layer."""
    *_, weight, x_bias = mlp_arrays(dtype, hidden=hidden, out=out)
    x = jax.random.normal(jax.random.key(2), (rows, hidden)).astype(dtype)
    residual, scale, bias = jax.random.normal(jax.random.key(1), (3, rows, out)).astype(dtype)
    return [x, weight, residual, 1 + scale[0], bias[0], x_bias]


def two_ops(x, weight, residual, scale, bias, x_bias, **options):
    out = linear(x, weight, **options)
    return add_layer_norm(out, residual, scale, bias, x_bias, **options)


def test_a_layer_that_is_added_and_normalized_is_two_ops():
    arrays = added_arrays()
    expected = with_gradients(two_ops, arrays)
    assert_close(with_gradients(linear_add_layer_norm, arrays), expected, "float32")
    assert_close(jax.jit(linear_add_layer_norm)(*arrays), expected[0], "float32")


def test_a_layer_that_is_added_needs_no_bias():
    *arrays, bias, layer_bias = added_arrays()
    zeros = (jnp.zeros_like(bias), jnp.zeros_like(layer_bias))
    out, gradients = with_gradients(linear_add_layer_norm, arrays)
    expected, expected_gradients = with_gradients(two_ops, [*arrays, *zeros])
    assert_close((out, gradients), (expected, expected_gradients[:-2]), "float32")


def test_a_layer_that_is_added_keeps_what_two_ops_keep():
    arrays = added_arrays(rows=64)

    def kept(fn):
        leaves = jax.tree.leaves(jax.vjp(fn, *arrays)[1])
        return sum(leaf.size for leaf in leaves)

    assert kept(linear_add_layer_norm) <= kept(two_ops)


def test_a_policy_that_keeps_products_makes_none_of_them_twice():
    arrays = added_arrays()
    policy = jax.checkpoint_policies.save_only_these_names("linear")

    def products_of(fn):
        # The square asks for the normalized rows in the backward pass.
        saving = jax.checkpoint(lambda *arrays: (fn(*arrays)[0] ** 2).sum(), policy=policy)
        argnums = tuple(range(len(arrays)))
        return str(jax.make_jaxpr(jax.grad(saving, argnums))(*arrays)).count("dot_general")

    assert products_of(linear_add_layer_norm) == products_of(two_ops)


def test_arguments_that_do_not_fit_a_layer_that_is_added_are_refused():
    x, weight, residual, scale, bias, x_bias = added_arrays()
    with pytest.raises(ValueError, match=r"weight has shape \(5, 6\); it must be \(6, D_out\)"):
        linear_add_layer_norm(x, weight.T, residual, scale)
    with pytest.raises(ValueError, match=r"residual has shape \(2, 5\); it must be \(3, 5\)"):
        linear_add_layer_norm(x, weight, residual[:2], scale)
    with pytest.raises(TypeError, match="residual has dtype float16; it must have the dtype of x"):
        linear_add_layer_norm(x, weight, residual.astype(jnp.float16), scale)
    with pytest.raises(ValueError, match=r"scale has shape \(4,\); it must be \(5,\)"):
        linear_add_layer_norm(x, weight, residual, scale[:4])
    with pytest.raises(ValueError, match=r"bias has shape \(4,\); it must be \(5,\)"):
        linear_add_layer_norm(x, weight, residual, scale, bias[:4])
    with pytest.raises(TypeError, match="x_bias has dtype float16; it must have the dtype of sca"):
        linear_add_layer_norm(x, weight, residual, scale, bias, x_bias.astype(jnp.float16))
    with pytest.raises(ValueError, match=r"x has shape \(\)"):
        linear_add_layer_norm(jnp.float32(1), weight, residual, scale)


def added_program(dtype="bfloat16", norm_dtype=None, sizes=LARGE_ADDED):
    def arrays():
        *some, scale, bias, layer_bias = added_arrays(dtype, **sizes)
        return *some, *(x.astype(norm_dtype or dtype) for x in (scale, bias, layer_bias))

    return lower_for_cuda(
        lambda *a: with_gradients(lambda *b: linear_add_layer_norm(*b, backend="cuda"), a),
        *jax.eval_shape(arrays),
    )


def test_hopper_adds_a_residual_with_the_product(on_hopper):
    program = added_program()
    found = sorted(set(re.findall(r"@jaxllm_(\w+)", program)))
    assert found == ["add_layer_norm_backward", "layer_norm_forward", "matmul_residual"]
    assert len(re.findall("dot_general", program)) == 2


@pytest.mark.parametrize(
    ("dtype", "norm_dtype", "changed"),
    [
        ("float32", None, {}),
        ("bfloat16", "float32", {}),
        ("bfloat16", None, {"out": 60}),
        ("float16", None, {"rows": 131 * 128}),
    ],
)
def test_other_residuals_are_added_by_the_norm(on_hopper, dtype, norm_dtype, changed):
    sizes = LARGE_ADDED | changed
    program = added_program(dtype, norm_dtype, sizes)
    found = sorted(set(re.findall(r"@jaxllm_(\w+)", program)))
    assert found == ["add_layer_norm_backward", "add_layer_norm_forward"]
    assert len(re.findall("dot_general", program)) == 3


@pytest.mark.parametrize("backend", ["pallas", "xla"])
def test_other_backends_add_a_residual_in_their_norm(backend):
    arrays = jax.eval_shape(lambda: added_arrays("bfloat16"))
    program = lower_for_cuda(
        lambda *a: with_gradients(lambda *b: linear_add_layer_norm(*b, backend=backend), a), *arrays
    )
    assert "@jaxllm_" not in program
    assert ("triton" in program) == (backend == "pallas")


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("rows", "hidden", "out"),
    [
        (1, 8, 8),
        (127, 64, 264),
        (129, 72, 256),
        (300, 520, 248),
        (2500, 1032, 1544),
        # Several tiles to each multiplier of a multiprocessor, one after another.
        (40000, 72, 200),
        (17000, 3072, 776),
    ],
)
def test_a_residual_is_added_to_any_rows_and_widths(
    monkeypatch, skip_if_declined, dtype, rows, hidden, out
):
    monkeypatch.setattr(cuda, "_MIN_TILES_OF_SM", 0)
    arrays = added_arrays(dtype, rows=rows, hidden=hidden, out=out)
    skip_if_declined(lambda: cuda.fused_unsupported(arrays[0], out))
    check_fused(linear_add_layer_norm, two_ops, arrays, dtype)


# ---- pre_norm_mlp


def pre_norm_arrays(dtype="float32", rows=3, width=5, hidden=6):
    x, *layers = mlp_arrays(dtype, rows=rows, width=width, hidden=hidden, out=width)
    scale, bias = jax.random.normal(jax.random.key(1), (2, width)).astype(dtype)
    return [x, 1 + scale, bias, *layers]


def pre_norm_mlp_by_ops(x, scale, bias, *layers, **options):
    return x + mlp(layer_norm(x, scale, bias, **options), *layers, **options)


@pytest.mark.parametrize("backend", ["pallas", "xla"])
def test_a_pre_norm_mlp_is_the_ops_that_it_is_made_of(backend):
    arrays = pre_norm_arrays()
    op = functools.partial(pre_norm_mlp, backend=backend)
    expected = with_gradients(pre_norm_mlp_by_ops, arrays)
    assert_close(with_gradients(op, arrays), expected, "float32")
    assert_close(jax.jit(op)(*arrays), expected[0], "float32")


def test_a_pre_norm_mlp_needs_no_bias_of_norm_and_result():
    x, scale, bias, up_weight, up_bias, down_weight, down_bias = pre_norm_arrays()

    def bare(x, scale, up_weight, up_bias, down_weight):
        return pre_norm_mlp(x, scale, None, up_weight, up_bias, down_weight)

    zeros = (jnp.zeros_like(bias), jnp.zeros_like(down_bias))
    arrays = [x, scale, zeros[0], up_weight, up_bias, down_weight, zeros[1]]
    out, gradients = with_gradients(pre_norm_mlp_by_ops, arrays)
    found = with_gradients(bare, [x, scale, up_weight, up_bias, down_weight])
    assert_close(found, (out, (*gradients[:2], *gradients[3:6])), "float32")


def test_a_pre_norm_mlp_keeps_what_its_ops_keep():
    arrays = pre_norm_arrays(rows=64)

    def kept(fn):
        return sum(leaf.size for leaf in jax.tree.leaves(jax.vjp(fn, *arrays)[1]))

    assert kept(pre_norm_mlp) <= kept(pre_norm_mlp_by_ops)


def test_a_policy_that_keeps_products_makes_none_of_a_pre_norm_mlp_twice():
    arrays = pre_norm_arrays()
    policy = jax.checkpoint_policies.save_only_these_names("linear")

    def products_of(fn):
        saving = jax.checkpoint(lambda *arrays: (fn(*arrays) ** 2).sum(), policy=policy)
        program = str(jax.make_jaxpr(jax.grad(saving, range(7)))(*arrays))
        # Those of two matrices: the norm's bias is multiplied by one, and that is made again.
        return len(re.findall(r"f32\[\d+,\d+\] = dot_general", program))

    assert products_of(pre_norm_mlp) == products_of(pre_norm_mlp_by_ops)


def test_arguments_that_do_not_fit_a_pre_norm_mlp_are_refused():
    x, scale, bias, up_weight, up_bias, down_weight, down_bias = pre_norm_arrays()
    up = (up_weight, up_bias)
    with pytest.raises(ValueError, match=r"scale has shape \(4,\); it must be \(5,\)"):
        pre_norm_mlp(x, scale[:4], bias, *up, down_weight)
    with pytest.raises(ValueError, match=r"bias has shape \(4,\); it must be \(5,\)"):
        pre_norm_mlp(x, scale, bias[:4], *up, down_weight)
    with pytest.raises(TypeError, match="bias has dtype float16; it must have the dtype of scale"):
        pre_norm_mlp(x, scale, bias.astype(jnp.float16), *up, down_weight)
    with pytest.raises(ValueError, match=r"up_bias has shape \(5,\); it must be \(6,\)"):
        pre_norm_mlp(x, scale, bias, up_weight, down_bias, down_weight)
    with pytest.raises(ValueError, match=r"down_weight has shape \(6, 4\); it must be \(6, 5\)"):
        pre_norm_mlp(x, scale, bias, *up, down_weight[:, :4])
    with pytest.raises(ValueError, match=r"down_bias has shape \(4,\); it must be \(5,\)"):
        pre_norm_mlp(x, scale, bias, *up, down_weight, down_bias[:4])
    with pytest.raises(ValueError, match="activation is None; it must be 'gelu'"):
        pre_norm_mlp(x, scale, bias, *up, down_weight, activation=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"x has shape \(\)"):
        pre_norm_mlp(jnp.float32(1), scale, bias, *up, down_weight)


PRE_NORM = {"rows": 132 * 128, "width": 64, "hidden": 192}


def pre_norm_program(dtype="bfloat16", norm_dtype=None, sizes=PRE_NORM):
    def arrays():
        x, scale, bias, *layers = pre_norm_arrays(dtype, **sizes)
        return x, *(a.astype(norm_dtype or dtype) for a in (scale, bias)), *layers

    return lower_for_cuda(
        lambda *a: with_gradients(lambda *b: pre_norm_mlp(*b, backend="cuda"), a),
        *jax.eval_shape(arrays),
    )


def test_hopper_goes_on_from_a_product_to_the_gradient_of_the_norm(on_hopper):
    program = pre_norm_program()
    found = sorted(set(re.findall(r"@jaxllm_(\w+)", program)))
    assert found == [
        "layer_norm_forward",
        "layer_with_norm",
        "layer_without_norm",
        "matmul_bias_gelu",
        "matmul_norm_gradient",
        "matmul_residual",
        "matmul_scale",
    ]
    # The gradients of two weights.
    assert len(re.findall("dot_general", program)) == 2


@pytest.mark.parametrize(
    ("rows", "width", "fits"), [(65536, 768, True), (65535, 768, False), (65536, 1024, False)]
)
def test_one_kernel_makes_the_gradients_of_an_mlp_with_many_rows(on_hopper, rows, width, fits):
    program = pre_norm_program(sizes={"rows": rows, "width": width, "hidden": 4 * width})
    assert program.count("@jaxllm_weight_gradients(") == fits
    assert program.count("dot_general") == (0 if fits else 2)


def test_hopper_goes_on_from_a_product_to_the_norm(on_hopper):
    x, *arrays = jax.eval_shape(lambda: pre_norm_arrays("bfloat16", **PRE_NORM))
    program = lower_for_cuda(lambda *a: twice_normed(*a, backend="cuda"), x, *arrays)
    assert program.count("@jaxllm_matmul_norm(") == 2
    # The first norm alone is a kernel of its own, and nobody reads the stream between the blocks.
    assert program.count("@jaxllm_layer_norm_forward(") == 1
    assert "@jaxllm_matmul_residual" not in program


def test_a_norm_in_float32_is_made_part_of_a_layer_by_xla(on_hopper):
    program = pre_norm_program(norm_dtype="float32")
    assert "@jaxllm_matmul_norm_gradient(" in program
    assert "@jaxllm_layer_with" not in program


@pytest.mark.parametrize(("dtype", "changed"), [("float32", {}), ("float16", {"rows": 131 * 128})])
def test_other_norms_have_their_gradient_from_a_kernel_of_their_own(on_hopper, dtype, changed):
    program = pre_norm_program(dtype, sizes=PRE_NORM | changed)
    assert "@jaxllm_matmul_norm_gradient" not in program
    assert program.count("@jaxllm_layer_norm_backward(") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("width", "columns"), [(1, 8), (5, 24), (768, 2304), (1000, 1032)])
def test_a_norm_becomes_part_of_a_layer_of_any_size(dtype, width, columns):
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = [(width,), (width,), (width, columns), (columns,)]
    # Scale and bias of the norm, weight and bias of the layer, and the gradients of the latter.
    shapes += shapes[2:]
    arrays = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]
    wide = [x.astype("float32") for x in arrays]
    found = jax.jit(cuda._layer_with_norm)(*arrays[:4])
    assert_close(found, tuple(products.with_norm(*wide[:4])), dtype)
    del arrays[3]
    found = jax.jit(cuda._layer_without_norm)(*arrays)
    scale, norm_bias, weight, _, *gradients = wide
    expected = products.without_norm(scale, norm_bias, weight, *gradients)
    assert_close(found, expected, dtype, products.without_norm(*arrays))


def rows_of_two_layers(dtype, rows, *widths):
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, (rows, width), dtype)
        for key, width in zip(keys, widths, strict=True)
    ]


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({}, True),
        ({"rows": 8191}, False),
        ({"dtype": "float32"}, False),
        ({"widths": (768, 2300, 768, 768)}, False),
        # A kernel for each has enough tiles; or the tiles would stand half empty.
        ({"widths": (1536, 4608, 1536, 1536)}, False),
        ({"widths": (384, 1152, 384, 384)}, False),
    ],
)
def test_one_kernel_makes_the_gradients_of_two_small_weights(on_hopper, changed, fits):
    sizes = {"dtype": "bfloat16", "rows": 8192, "widths": (768, 2304, 768, 768)} | changed
    arrays = jax.eval_shape(
        lambda: rows_of_two_layers(sizes["dtype"], sizes["rows"], *sizes["widths"])
    )
    program = lower_for_cuda(cuda.linear_weight_gradients, *arrays)
    assert program.count("@jaxllm_weight_gradients(") == fits
    assert program.count("dot_general") == (0 if fits else 2)


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("rows", "widths"),
    [
        (1, (8, 8, 8, 8)),
        (63, (256, 192, 264, 200)),
        (1000, (768, 2304, 768, 768)),
        (8192, (1032, 776, 8, 1544)),
        (33000, (768, 2304, 768, 768)),
        # On an H200: as many tiles as multiprocessors; and blocks that have the rests of three
        # tiles each, those of eight other tiles being cut.
        (5000, (2816, 1152, 2816, 1152)),
        (4100, (2560, 1920, 8, 8)),
    ],
)
def test_one_kernel_makes_the_gradients_of_two_weights_of_any_size(
    monkeypatch, skip_if_declined, dtype, rows, widths
):
    monkeypatch.setattr(cuda, "_MIN_SMS_OF_GRADIENT_TILE", 1)
    for name in ("MIN_FILLED", "MIN_GRADIENT_ROWS"):
        monkeypatch.setattr(cuda, f"_{name}", 0)
    arrays = rows_of_two_layers(dtype, rows, *widths)
    skip_if_declined(lambda: cuda.weight_gradients_unsupported(*arrays))
    found, again = (jax.jit(cuda.linear_weight_gradients)(*arrays)[:2] for _ in range(2))
    wide = [x.astype("float32") for x in arrays]
    expected = products.weight_gradients(*wide)[:2]
    assert_close(found, expected, dtype, products.weight_gradients(*arrays)[:2])
    for a, b in zip(found, again, strict=True):
        assert error(a, b) == 0


NORM_SIZES = [
    (1, 8, 8),
    (127, 264, 64),
    (129, 256, 72),
    (300, 248, 520),
    (2500, 1544, 1032),
    # Several tiles to each multiplier of a multiprocessor, one after another.
    (40000, 200, 72),
    (17000, 776, 3072),
    # As many tiles to a row as run at once.
    (300, cuda._MAX_ROW_TILES * 192, 64),
]


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "width", "hidden"), NORM_SIZES)
def test_a_norm_s_gradient_is_added_to_any_rows_and_widths(
    monkeypatch, skip_if_declined, dtype, rows, width, hidden
):
    monkeypatch.setattr(cuda, "_MIN_TILES_OF_SM", 0)
    skip_if_declined(lambda: cuda.norm_unsupported(jnp.zeros((rows, hidden), dtype), width))
    arrays = pre_norm_arrays(dtype, rows=rows, width=width, hidden=hidden)
    check_fused(pre_norm_mlp, pre_norm_mlp_by_ops, arrays, dtype)


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "width", "hidden"), [(2500, 1544, 1032), (17000, 776, 3072)])
def test_one_kernel_makes_the_gradients_of_both_weights_of_an_mlp(
    monkeypatch, skip_if_declined, dtype, rows, width, hidden
):
    for name in ("MIN_TILES_OF_SM", "MIN_FILLED", "MIN_GRADIENT_ROWS", "MANY_GRADIENT_ROWS"):
        monkeypatch.setattr(cuda, f"_{name}", 0)
    arrays = pre_norm_arrays(dtype, rows=rows, width=width, hidden=hidden)
    x, hidden_rows = arrays[0], jnp.zeros((rows, hidden), dtype)
    of_both = (x, hidden_rows, hidden_rows, x)
    skip_if_declined(lambda: cuda.weight_gradients_unsupported(*of_both, sms_of_tile=1))
    assert "@jaxllm_weight_gradients(" in pre_norm_program(
        dtype, sizes={"rows": rows, "width": width, "hidden": hidden}
    )
    check_fused(pre_norm_mlp, pre_norm_mlp_by_ops, arrays, dtype)


def twice(op, x, *arrays, **options):
    """A stack of two half blocks, and what the stream is before and after them."""
    return op(op(x, *arrays, **options), *arrays, **options)


def twice_normed(x, *arrays, **options):
    normed = normed_rows(x, **options)
    for _ in range(2):
        x, normed = pre_norm_mlp(x, *arrays, normed=normed, **options)
    return x, tuple(normed)


@pytest.mark.parametrize("backend", ["pallas", "xla"])
def test_pre_norm_mlps_hand_on_the_stream_normalized(backend):
    arrays = pre_norm_arrays()
    expected = with_gradients(functools.partial(twice, pre_norm_mlp_by_ops), arrays)
    found = with_gradients(lambda *a: twice_normed(*a, backend=backend)[0], arrays)
    assert_close(found, expected, "float32")
    x, normed = twice_normed(*arrays, backend=backend)
    assert_close(normed, tuple(normed_rows(x, backend="xla")), "float32")


def test_of_a_stream_s_norm_there_is_no_gradient():
    arrays = pre_norm_arrays()
    gradients = jax.grad(lambda *a: sum(x.sum() for x in twice_normed(*a)[1]), range(7))(*arrays)
    assert all(error(x, jnp.zeros_like(x)) == 0 for x in gradients)


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "width", "hidden"), NORM_SIZES)
def test_a_product_goes_on_to_the_norm_of_any_rows_and_widths(
    monkeypatch, skip_if_declined, dtype, rows, width, hidden
):
    monkeypatch.setattr(cuda, "_MIN_TILES_OF_SM", 0)
    arrays = pre_norm_arrays(dtype, rows=rows, width=width, hidden=hidden)
    skip_if_declined(lambda: cuda.norm_unsupported(jnp.zeros((rows, hidden), dtype), width))

    def run(arrays, backend):
        return jax.jit(functools.partial(twice_normed, backend=backend))(*arrays)

    found, again = run(arrays, "cuda"), run(arrays, "cuda")
    expected = run([x.astype("float32") for x in arrays], "xla")
    assert_close(found, expected, dtype, run(arrays, "xla"))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        assert error(a, b) == 0


@pytest.mark.hopper
@pytest.mark.parametrize("offset", [0.0, 100.0, -1000.0])
def test_a_stream_far_from_zero_is_normalized_where_it_is_made(monkeypatch, offset):
    monkeypatch.setattr(cuda, "_MIN_TILES_OF_SM", 0)
    x, scale, bias, *up, down_weight, down_bias = pre_norm_arrays("bfloat16", 300, 776, 72)
    arrays = [x, scale, bias, *up, down_weight, down_bias + jnp.bfloat16(offset)]
    expected = twice_normed(*(x.astype("float32") for x in arrays), backend="xla")[1]
    rows, mean, rstd = twice_normed(*arrays, backend="cuda")[1]
    assert_close(rows, expected[0], "bfloat16")
    np.testing.assert_allclose(mean, expected[1], rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(rstd, expected[2], rtol=1e-2)


@pytest.mark.hopper
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_residual_is_added_before_the_one_rounding(with_bias):
    rows, width, columns = 400, 64, 328
    x = jnp.ones((rows, width), "bfloat16")
    weight = jnp.full((width, columns), 1 / width, "bfloat16")
    # In bfloat16 1 + 256 is 256: of a sum that is rounded twice the 1 is missing.
    bias = jnp.full(columns, 256, "bfloat16") if with_bias else None
    place = jnp.arange(rows * columns).reshape(rows, columns) % 251
    residual = (place - (256 if with_bias else 0)).astype("bfloat16")
    total = cuda._matmul_residual(x, weight, bias, residual)
    np.testing.assert_array_equal(total.astype("float32"), 1 + place)


@pytest.mark.gpu
def test_a_mapped_layer_is_added_to_each_residual(monkeypatch):
    monkeypatch.setattr(cuda, "_MIN_TILES_OF_SM", 0)
    first = added_arrays("bfloat16", rows=130, hidden=64, out=264)
    second = [2 * x for x in first]
    stacked = [jnp.stack(pair) for pair in zip(first, second, strict=True)]

    def run(*arrays):
        return with_gradients(lambda *a: linear_add_layer_norm(*a, backend="cuda"), arrays)

    mapped = jax.vmap(run)(*stacked)
    for i, arrays in enumerate((first, second)):
        assert_close(jax.tree.map(lambda x, i=i: x[i], mapped), run(*arrays), "bfloat16")


def of_shape(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_each_direction_is_judged_by_its_own_arrays():
    # GPT-2's at 32 sequences of 8192 tokens. The limit of 2^31 elements is one for arrays that a
    # kernel gets, and not for products of others.
    rows, narrow, wide = of_shape(2**18, 768), of_shape(768, 3072), of_shape(2**18, 3072)
    huge, of_huge = of_shape(2**18, 2**13), of_shape(768, 2**13)
    too_large, too_wide = f"{2**31} elements", "x has rows of 131072"
    gelu_after, nothing_after = {"activation": "gelu"}, {"activation": None}

    assert pallas.linear_weight_gradients_unsupported(rows, huge, rows, huge) is None
    check = pallas.linear_unsupported
    assert check(rows, of_huge, None, **nothing_after) is None
    assert too_large in str(check(rows, of_huge, None, **gelu_after))
    check = pallas.linear_backward_unsupported
    assert check(rows, of_huge, None, None, huge, **nothing_after) is None
    assert check(rows, narrow, None, wide, wide, **gelu_after) is None
    assert too_large in str(check(rows, of_huge, None, huge, huge, **gelu_after))
    layers = (narrow, None, of_shape(3072, 768), None)
    check = pallas.mlp_backward_unsupported
    assert check(rows, *layers, None, wide, wide, rows) is None
    assert too_large in str(check(rows, *layers, None, huge, huge, rows))

    wider = of_shape(4, 2**17)
    check = pallas.linear_normed_backward_unsupported
    assert check(wider, narrow, None, narrow, None, rows) is None
    assert too_wide in str(check(wide, narrow, None, narrow, None, wider))
    check = pallas.linear_norm_forward_unsupported
    assert check(wider, narrow, None, rows) is None
    assert too_wide in str(check(rows, narrow, None, wider))

    # What the norm's kernel does not take of the norm's weights.
    scale = of_shape(768, dtype="float16")
    arrays = (wide, narrow, None, narrow, None, rows, None, scale, scale, rows)
    assert "dtype float16" in str(cuda.linear_normed_backward_unsupported(*arrays))


TURNS = [(False, False), (False, True), (True, False), (True, True)]


def factors(dtype, rows, depth, columns, turns=(False, False)):
    keys = jax.random.split(jax.random.key(0), 3)
    a = jax.random.normal(keys[0], (depth, rows) if turns[0] else (rows, depth))
    b = jax.random.normal(keys[1], (columns, depth) if turns[1] else (depth, columns))
    bias = jax.random.normal(keys[2], (columns,))
    return [x.astype(dtype) for x in (a, b / depth**0.5, bias)]


@pytest.mark.parametrize("turns", TURNS)
def test_matmul_multiplies_what_is_stored_turned(turns):
    a, b, _ = factors("float32", 5, 7, 3, turns)
    out = matmul(a, b, transpose_a=turns[0], transpose_b=turns[1])
    expected = (a.T if turns[0] else a) @ (b.T if turns[1] else b)
    assert_close(out, expected, "float32")


def test_matmul_keeps_the_leading_axes_of_a():
    a, b, _ = factors("float32", 6, 7, 3)
    assert_close(matmul(a.reshape(2, 3, 7), b), (a @ b).reshape(2, 3, 3), "float32")
    assert_close(matmul(a[0], b), (a @ b)[0], "float32")


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_a_float32_result_of_bfloat16_factors_is_not_rounded(backend):
    a, b, bias = factors("bfloat16", 16, 64, 24)

    def wide(*arrays):
        return matmul(*arrays, out_dtype=jnp.float32, backend=backend)

    out, gradients = with_gradients(wide, (a, b, bias))
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64) + np.asarray(bias, np.float64)
    assert out.dtype == jnp.float32
    assert_close(out, exact, "float32")
    assert [x.dtype for x in gradients] == [jnp.bfloat16] * 3


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_a_bfloat16_result_of_float32_factors_is_rounded_once(backend):
    a, b, _ = factors("float32", 16, 64, 24)
    out = matmul(a, b, out_dtype="bfloat16", backend=backend)
    np.testing.assert_array_equal(out, matmul(a, b, backend=backend).astype("bfloat16"))


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_matmul_adds_up_the_bias_gradient_in_float32(backend):
    rows = 4096
    a, b, bias = factors("bfloat16", rows, 4, 5)
    pull = jax.vjp(lambda bias: matmul(a, b, bias, backend=backend), bias)[1]
    # 4096 ones added in bfloat16 stop at 256.
    assert (pull(jnp.ones((rows, 5), jnp.bfloat16))[0] == rows).all()


def test_matmul_keeps_only_inputs_without_an_activation():
    kept = jax.tree.leaves(jax.vjp(matmul, *factors("float32", 6, 4, 5))[1])
    assert (6, 5) not in [leaf.shape for leaf in kept]


@pytest.mark.parametrize("backend", ["cuda", "pallas", "xla"])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("turns", TURNS)
def test_all_products_of_matmul_are_the_backend_s(backend, activation, turns):
    if backend == "cuda" and not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    options = {"transpose_a": turns[0], "transpose_b": turns[1], "activation": activation}
    arrays = factors("bfloat16", 16, 64, 24, turns)
    program = lower_for_cuda(
        lambda *a: with_gradients(lambda *b: matmul(*b, **options, backend=backend), a), *arrays
    )
    assert len(re.findall(r"@jaxllm_matmul\b", program)) == (3 if backend == "cuda" else 0)
    assert len(re.findall("stablehlo.dot_general", program)) == (3 if backend == "xla" else 0)
    assert ("triton" in program) == (backend == "pallas")


def test_auto_leaves_matmul_to_xla():
    (call,) = jaxllm.explain(matmul, *factors("float32", 6, 4, 5)).calls
    assert call.on_gpu == "xla"
    reasons = dict(call.passed_over)
    assert "cuBLAS" in reasons["pallas"]
    assert ("cuBLAS" in reasons["cuda"]) == ffi.is_available()


def test_factors_that_do_not_fit_are_refused():
    a, b, bias = factors("float32", 3, 4, 5)
    with pytest.raises(ValueError, match=r"b has shape \(5, 4\); it must be \(4, N\)"):
        matmul(a, b.T)
    with pytest.raises(
        ValueError, match=r"b has shape \(4, 5\); it must be \(N, 4\), as transpose"
    ):
        matmul(a, b, transpose_b=True)
    with pytest.raises(ValueError, match=r"b has shape \(4, 5\); it must be \(3, N\)"):
        matmul(a, b, transpose_a=True)
    with pytest.raises(ValueError, match=r"b has shape \(1, 4, 5\)"):
        matmul(a, b[None])
    with pytest.raises(ValueError, match=r"a has shape \(1, 4, 3\); it must be \(K, M\)"):
        matmul(a.T[None], b, transpose_a=True)
    with pytest.raises(ValueError, match=r"a has shape \(\); it must be \(..., K\)"):
        matmul(jnp.float32(1), b)
    with pytest.raises(ValueError, match=r"bias has shape \(4,\); it must be \(5,\)"):
        matmul(a, b, bias[:4])


def test_dtypes_and_options_of_matmul_are_checked():
    a, b, bias = factors("float32", 3, 4, 5)
    with pytest.raises(TypeError, match="a has dtype int32; it must be a floating-point array"):
        matmul(a.astype(int), b)
    with pytest.raises(
        TypeError, match="b has dtype float16; it must have the dtype of a, float32"
    ):
        matmul(a, b.astype(jnp.float16))
    with pytest.raises(TypeError, match="bias has dtype float16; it must have the dtype of a"):
        matmul(a, b, bias.astype(jnp.float16))
    with pytest.raises(TypeError, match="out_dtype is int32; it must be a floating dtype"):
        matmul(a, b, out_dtype=jnp.int32)
    with pytest.raises(ValueError, match="activation is 'relu'; it must be None or 'gelu'"):
        matmul(a, b, activation="relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="precision is 'fast'; it must be None or 'tf32'"):
        matmul(a, b, precision="fast")  # type: ignore[arg-type]


# For matmul's kernels: partial tiles, rows that begin at multiples of 16, 4 and 2 bytes, depths of
# part of a slice, and, the last two, products for Hopper's kernels.
SIZES = [(1, 1, 1), (300, 77, 514), (129, 65, 257), (264, 72, 136), (1288, 1096, 1160)]
SIZES += [(2056, 264, 4104), (4104, 520, 2056)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_cuda_products_take_any_sizes(dtype, turns, sizes):
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    options = {"transpose_a": turns[0], "transpose_b": turns[1], "activation": "gelu"}
    arrays = factors(dtype, *sizes, turns=turns)

    def run(backend, *arrays):
        return with_gradients(lambda *a: matmul(*a, **options, backend=backend), arrays)

    expected = run("xla", *(x.astype("float32") for x in arrays))
    assert_close(run("cuda", *arrays), expected, dtype, run("xla", *arrays))


@pytest.mark.gpu
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_cuda_products_write_float32_results(dtype, turns, sizes):
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    options = {"transpose_a": turns[0], "transpose_b": turns[1]}
    arrays = factors(dtype, *sizes, turns=turns)
    out = matmul(*arrays, **options, out_dtype="float32", backend="cuda")
    expected = matmul(*(x.astype("float32") for x in arrays), **options, backend="xla")
    assert out.dtype == jnp.float32
    assert_close(out, expected, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("sizes", SIZES[1:])
def test_the_cuda_products_round_to_tf32_where_they_may(turns, sizes):
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    options = {"transpose_a": turns[0], "transpose_b": turns[1]}
    arrays = factors("float32", *sizes, turns=turns)
    exact = matmul(*arrays, **options, backend="xla")
    rounded = matmul(*arrays, **options, precision="tf32", backend="cuda")
    assert 1e-5 < error(rounded, exact) < 2e-3
    assert error(matmul(*arrays, **options, backend="cuda"), exact) < 4e-6
