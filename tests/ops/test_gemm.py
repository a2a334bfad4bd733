"""What the contract leaves open of the matrix products: the program they become, and the errors."""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxllm
from jaxllm import ffi
from jaxllm.ops import gelu, linear
from jaxllm.testing import assert_close, lower_for_cuda


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
