"""Linear layers: the lowered program, saved residuals and errors."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxllm
from jaxllm.core import ffi
from jaxllm.ops import (
    Quantized,
    Transposed,
    attention_block,
    dequantize,
    ffn_block,
    gelu,
    linear,
    matvec,
    mlp,
    quantize,
    residual,
    self_attention,
)
from jaxllm.testing import assert_close, lower_for_cuda


def arrays(dtype="float32", rows=3, d_in=4, d_out=5):
    shapes = ((rows, d_in), (d_in, d_out), (d_out,))
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def test_mismatched_shapes_are_rejected():
    x, weight, bias = arrays()
    with pytest.raises(ValueError, match=r"weight has shape \(5, 4\); it must be \(4, D_out\)"):
        linear(x, weight.T)
    with pytest.raises(ValueError, match=r"weight has shape \(4,\)"):
        linear(x, weight[:, 0])
    with pytest.raises(ValueError, match=r"bias has shape \(4,\); it must be \(5,\)"):
        linear(x, weight, bias[:4])
    with pytest.raises(ValueError, match=r"x has shape \(\)"):
        linear(jnp.float32(1), weight)


def test_mismatched_dtypes_are_rejected():
    x, weight, bias = arrays()
    with pytest.raises(TypeError, match="weight has dtype bfloat16; it must have the dtype of x"):
        linear(x, weight.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="bias has dtype float16; it must have the dtype of x"):
        linear(x, weight, bias.astype(jnp.float16))
    with pytest.raises(TypeError, match="x has dtype int32"):
        linear(x.astype(jnp.int32), weight)


def test_gelu_activation_matches_the_gelu_op():
    x, weight, bias = arrays()
    fused = linear(x, weight, bias, activation="gelu")
    assert_close(fused, gelu(x @ weight + bias), "float32")


def test_bfloat16_matmuls_write_bfloat16():
    x, weight, bias = arrays("bfloat16")

    def both(x, weight, bias):
        out, pull = jax.vjp(lambda *a: linear(*a, activation="gelu"), x, weight, bias)
        return pull(out)

    matmuls = [
        line for line in lower_for_cuda(both, x, weight, bias).splitlines() if "dot_general" in line
    ]
    assert len(matmuls) == 3
    assert all("f32" not in matmul for matmul in matmuls)


def test_bias_gradient_is_summed_in_float32():
    rows = 4096
    x, weight, bias = arrays("bfloat16", rows=rows)
    pull = jax.vjp(lambda bias: linear(x, weight, bias), bias)[1]
    # In bfloat16 a sum of ones stops at 256.
    assert (pull(jnp.ones((rows, 5), jnp.bfloat16))[0] == rows).all()


@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (linear, [(64, 192), (192,)]),
        (mlp, [(64, 192), (192,), (192, 64), (64,)]),
        (lambda x, weight, bias: self_attention(x, weight, bias, 2), [(64, 192), (192,)]),
    ],
)
def test_dgrad_waits_for_wgrad(op, shapes):
    # Without the barrier XLA may compute all wgrads last, and keep the inputs of every layer.
    arrays = [jnp.ones(shape) for shape in [(2, 8, 64), *shapes]]
    every = tuple(range(len(arrays)))
    with jaxllm.use_backend("xla"):
        program = jax.make_jaxpr(jax.grad(lambda *a: op(*a).sum(), argnums=every))(*arrays)
    found = []
    for equations in nested_equations(program):
        matmuls = [e for e in equations if e.primitive.name == "dot_general"]
        for barrier in [e for e in equations if e.primitive.name == "optimization_barrier"]:
            dweight, dout = barrier.invars
            assert any(dweight in e.outvars for e in matmuls)
            assert any(barrier.outvars[1] in e.invars for e in matmuls)
            found.append((dweight.aval.shape, dout.aval.shape))
    weights = [shape for shape in shapes if len(shape) == 2]
    assert found == [(shape, (2, 8, shape[1])) for shape in reversed(weights)]


def attention_block_of(x, weight, bias, out_weight):
    layers = {"qkv": {"weight": weight, "bias": bias}, "out": {"weight": out_weight}}
    return attention_block(residual(x), {"scale": jnp.ones(64)}, layers, heads=2)


def ffn_block_of(x, weight, bias, down_weight):
    layers = {"up": {"weight": weight, "bias": bias}, "down": {"weight": down_weight}}
    return ffn_block(residual(x), {"scale": jnp.ones(64)}, layers)


@pytest.mark.parametrize(
    ("block", "last"), [(attention_block_of, (64, 64)), (ffn_block_of, (192, 64))]
)
def test_dgrad_of_a_block_waits_for_wgrad(form, block, last):
    arrays = [jnp.ones(shape) for shape in [(2, 8, 64), (64, 192), (192,), last]]
    with jaxllm.use_backend("xla"):
        gradient = jax.grad(lambda *a: block(*a).x.sum(), argnums=(0, 1, 2, 3))
        program = jax.make_jaxpr(gradient)(*arrays)
    found = []
    for equations in nested_equations(program):
        matmuls = [e for e in equations if e.primitive.name == "dot_general"]
        for barrier in [e for e in equations if e.primitive.name == "optimization_barrier"]:
            dweight, dout = barrier.invars
            if any(dweight in e.outvars for e in matmuls) and dout.aval.ndim == 3:
                found.append((dweight.aval.shape, dout.aval.shape))
    assert found == [(last, (2, 8, last[1])), ((64, 192), (2, 8, 192))]


def nested_equations(program):
    """The equations of a jaxpr, then those of each jaxpr nested in it."""
    program = getattr(program, "jaxpr", program)
    yield program.eqns
    for equation in program.eqns:
        for parameter in equation.params.values():
            if hasattr(parameter, "eqns") or hasattr(parameter, "jaxpr"):
                yield from nested_equations(parameter)


@pytest.mark.parametrize("backend", ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rows", [(), (1,), (3, 5), (16,), (17,), (2, 40)])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.covering(("rows", "backend"), ("activation",), ("with_bias",))
def test_weight_forms_match_the_plain_weight(backend, rows, activation, with_bias):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (*rows, 64))
    weight = jax.random.normal(keys[1], (64, 48)) / 8
    bias = jax.random.normal(keys[2], (48,)) if with_bias else None
    options = {"activation": activation, "backend": backend}
    transposed = linear(x, Transposed(weight.T), bias, **options)
    assert_close(transposed, linear(x, weight, bias, activation=activation), "float32")
    quantized = Quantized(*quantize(weight.T, group_size=32))
    rounded = dequantize(quantized.q, quantized.scales).T
    found = linear(x, quantized, bias, **options)
    assert found.shape == (*rows, 48)
    assert_close(found, linear(x, rounded, bias, activation=activation), "float32")


@pytest.mark.parametrize(("rows", "few"), [(1, True), (16, True), (17, False)])
def test_weight_forms_are_read_once_for_few_rows(rows, few):
    x, weight = jnp.ones((rows, 64)), jnp.ones((48, 64))
    quantized = Quantized(*quantize(weight, group_size=32))

    def stems(weight):
        return {call.stem for call in jaxllm.explain(linear, x, weight).calls}

    assert stems(Transposed(weight)) == ({"matvec"} if few else set())
    assert stems(quantized) == {"quantized_matvec" if few else "quantized_matmul"}


@pytest.mark.gpu
@pytest.mark.xdist_group("beyond 31 bits")
@pytest.mark.parametrize(("rows", "width"), [(16, 2**27 + 8), (2, 2**30)])
def test_rows_beyond_2_to_the_31_elements_are_multiplied(rows, width):
    # In 16 bits: the first x has 2**31 elements and more, the second weight 2**31 bytes in a row.
    x = jnp.zeros((rows, width), jnp.bfloat16).at[:, -1].set(jnp.arange(1, rows + 1))
    weight = jnp.zeros((2, width), jnp.bfloat16).at[:, -1].set(jnp.array([3, -1]))
    out = matvec(weight, x, backend="cuda")
    assert out.tolist() == [[3 * i, -i] for i in range(1, rows + 1)]


def test_mismatched_weight_forms_are_rejected():
    with pytest.raises(ValueError, match=r"x has shape \(\)"):
        linear(jnp.float32(1), Transposed(jnp.ones((48, 64))))
    x, weight = jnp.ones((3, 64)), jnp.ones((48, 64))
    for rows in (x, jnp.ones((17, 64))):
        with pytest.raises(ValueError, match="shape"):
            linear(rows, Transposed(weight.T))
        with pytest.raises(ValueError, match="shape"):
            linear(rows, Quantized(*quantize(weight.T, group_size=16)))
        with pytest.raises(TypeError, match="dtype bfloat16"):
            linear(rows, Transposed(weight.astype("bfloat16")))
        with pytest.raises(ValueError, match="activation is 'relu'; it must be None or 'gelu'"):
            linear(rows, Transposed(weight), activation="relu")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="bias has dtype bfloat16; it must have the dtype of x"):
            linear(rows, Transposed(weight), jnp.ones(48, "bfloat16"))
        for bias in (jnp.ones(1), jnp.ones((48, 1)), jnp.ones(47)):
            with pytest.raises(ValueError, match=r"bias has shape .*; it must be \(48,\)"):
                linear(rows, Transposed(weight), bias)


def test_only_inputs_are_saved_without_an_activation():
    x, weight, bias = arrays()
    kept = jax.tree.leaves(jax.vjp(linear, x, weight, bias)[1])
    assert (3, 5) not in [leaf.shape for leaf in kept]


def test_unknown_activation_is_rejected():
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
def test_lowered_program_calls_the_kernels_of_its_backend(
    backend, activation, with_bias, kernels, with_kernels
):
    some = arrays("bfloat16")[: 3 if with_bias else 2]

    def both(*some):
        out, pull = jax.vjp(lambda *a: linear(*a, activation=activation, backend=backend), *some)
        return out, pull(out)

    program = lower_for_cuda(both, *some)
    found = sorted(set(re.findall(r"@jaxllm_(\w+)", program)))
    assert found == (kernels if backend == "cuda" else [])
    assert ("triton" in program) == (backend == "pallas" and activation is not None)
    assert len(re.findall("dot_general", program)) == 3


def test_auto_picks_the_cuda_kernels():
    x, weight, bias = arrays()
    whole, after = jaxllm.explain(lambda *a: linear(*a, activation="gelu"), x, weight, bias).calls
    assert (whole.stem, whole.on_gpu) == ("matmul_bias_gelu", "its parts")
    assert after.stem == "bias_gelu_forward"
    assert after.on_gpu == ("cuda" if ffi.is_available() else "pallas")


def test_pallas_kernels_reject_float64():
    with jax.enable_x64(True):
        x, weight, bias = arrays("float64")
        with pytest.raises(jaxllm.BackendError, match="the input has dtype float64; the kernel"):
            linear(x, weight, bias, activation="gelu", backend="pallas")
        # Without an activation there is no kernel.
        assert_close(linear(x, weight, backend="pallas"), x @ weight, "float32")
