"""Products in ``jax.numpy``: products.py has the formulas, and the derivatives by hand."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax

from jaxllm.ops.activation import reference as activations
from jaxllm.ops.gemm import products
from jaxllm.ops.norm import reference as norms


def linear(x, weight, bias=None, *, activation=None):
    """The definition of ``linear``, for JAX to differentiate."""
    return linear_forward(x, weight, bias, activation=activation)[0]


def linear_forward(x, weight, bias, *, activation):
    """Returns ``(out, h)``; ``h`` is the product alone, None without an activation."""
    return products.forward(activations, x, weight, bias, activation)


def linear_backward(x, weight, bias, h, dout, *, activation):
    """Returns ``(dx, dweight, dbias)``."""
    return products.backward(activations, x, weight, bias, h, dout, activation)


def mlp(x, up_weight, up_bias, down_weight, down_bias, *, activation):
    """The definition of ``mlp``, for JAX to differentiate."""
    arrays = (x, up_weight, up_bias, down_weight, down_bias)
    return mlp_forward(*arrays, activation=activation)[0]


def mlp_forward(x, up_weight, up_bias, down_weight, down_bias, **options):
    """As :func:`jaxllm.ops.gemm.products.mlp_forward`."""
    arrays = (x, up_weight, up_bias, down_weight, down_bias)
    return products.mlp_forward(activations, *arrays, **options)


def mlp_backward(
    x, up_weight, up_bias, down_weight, down_bias, h, slope, hidden, dout, *, activation
):
    """Returns the gradients of ``x``, of ``up``'s weight and bias, and of ``down``'s."""
    arrays = (x, up_weight, up_bias, down_weight, down_bias, h, slope, hidden, dout)
    return products.mlp_backward(activations, arrays, activation)


def linear_add_layer_norm(x, weight, residual, scale, bias, x_bias=None, *, eps):
    """The definition of ``linear_add_layer_norm``, for JAX to differentiate."""
    arrays = (x, weight, residual, x_bias, scale, bias)
    return linear_add_layer_norm_forward(*arrays, eps=eps)[:2]


def linear_add_layer_norm_forward(
    x, weight, residual, x_bias, scale, bias, *, eps, statistics=True
):
    """Returns ``(out, total, mean, rstd)``: ``total`` is the sum that is normalized."""
    arrays = (x, weight, residual, x_bias, scale, bias)
    options = {"eps": eps, "statistics": statistics}
    return products.linear_add_layer_norm_forward(norms, *arrays, **options)


def linear_add_layer_norm_backward(x, weight, total, x_bias, scale, mean, rstd, dout, dtotal):
    """Returns the gradients of ``x, weight, residual, x_bias, scale, bias``."""
    arrays = (x, weight, total, x_bias, scale, mean, rstd, dout, dtotal)
    return products.linear_add_layer_norm_backward(norms, arrays)


linear_normed_forward = products.normed_forward
linear_residual_forward = products.residual_forward
linear_weight_gradients = products.weight_gradients


def linear_norm_forward(x, weight, bias, residual, normed, *, eps):
    """As :func:`jaxllm.ops.gemm.products.norm_forward`."""
    del normed
    return products.norm_forward(norms, x, weight, bias, residual, eps=eps)


def linear_normed_backward(
    dout, weight, bias, dweight, dbias, rows, rstd, scale, norm_bias, dtotal
):
    """As :func:`jaxllm.ops.gemm.products.normed_backward`."""
    arrays = (dout, weight, bias, dweight, dbias, rows, rstd, scale, norm_bias, dtotal)
    return products.normed_backward(activations, norms, *arrays)


def pre_norm_mlp(
    x, scale, bias, up_weight, up_bias, down_weight, down_bias=None, *, activation, eps
):
    """The definition of ``pre_norm_mlp``, for JAX to differentiate."""
    normed = norms.layer_norm(x, scale, bias, eps=eps)
    hidden = linear(normed, up_weight, up_bias, activation=activation)
    return products.residual_forward(hidden, down_weight, down_bias, x)


def pre_norm_mlp_forward(
    x, normed, scale, bias, up_weight, up_bias, down_weight, down_bias, **options
):
    """As :func:`jaxllm.ops.gemm.products.pre_norm_mlp_forward`."""
    arrays = (x, normed, scale, bias, up_weight, up_bias, down_weight, down_bias)
    return products.pre_norm_mlp_forward(activations, norms, arrays, **options)


def pre_norm_mlp_backward(
    rows, rstd, scale, bias, up_weight, up_bias, down_weight, h, slope, hidden, dout,
    *, activation,
):  # fmt: skip
    """As :func:`jaxllm.ops.gemm.products.pre_norm_mlp_backward`."""
    of_rows = (rows, rstd, scale, bias)
    arrays = (*of_rows, up_weight, up_bias, down_weight, h, slope, hidden, dout)
    return products.pre_norm_mlp_backward(activations, norms, arrays, activation)


def matmul(a, b, bias=None, **options):
    """The definition of ``matmul``, for JAX to differentiate."""
    return matmul_forward(a, b, bias, **options)[0]


def matmul_forward(a, b, bias, *, transpose_a, transpose_b, activation, out_dtype, precision):
    """Returns ``(out, h)``; ``h`` is the product alone, None without an activation."""
    out_dtype = jnp.dtype(out_dtype or a.dtype)
    h = _multiply(a, b, transpose_a, transpose_b, precision=precision, out_dtype=out_dtype)
    offset = None if bias is None else bias.astype(out_dtype)
    if activation is None:
        return (h if offset is None else h + offset), None
    if offset is None:
        return activations.gelu_forward(h), h
    return activations.bias_gelu_forward(h, offset), h


def matmul_backward(
    a, b, bias, h, dout, *, transpose_a, transpose_b, activation, out_dtype, precision
):
    """Returns ``(da, db, dbias)``."""
    del activation, out_dtype
    multiply = functools.partial(_multiply, precision=precision, out_dtype=a.dtype)
    turns = (transpose_a, transpose_b)
    return products.matmul_backward(activations, multiply, a, b, bias, h, dout, turns)


def _multiply(a, b, transpose_a, transpose_b, *, precision, out_dtype):
    # On a GPU the default is TF32.
    chosen = lax.Precision.DEFAULT if precision == "tf32" else lax.Precision.HIGHEST
    axes = ((0 if transpose_a else a.ndim - 1,), (1 if transpose_b else 0,))
    wide = jnp.promote_types(out_dtype, a.dtype)
    out = lax.dot_general(a, b, (axes, ((), ())), chosen, preferred_element_type=wide)
    return out.astype(out_dtype)


def matvec(w, x):
    """Returns ``out``."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum("mk,rk->rm", w.astype(wide), x.astype(wide)).astype(x.dtype)
