"""Products in ``jax.numpy``: products.py has the formulas, and the derivatives by hand."""

from __future__ import annotations

import jax.numpy as jnp

from jaxllm.ops.activation import reference as activations
from jaxllm.ops.gemm import products


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


def mlp_forward(x, up_weight, up_bias, down_weight, down_bias, *, activation):
    """Returns ``(out, h, hidden)``: ``h`` before bias and activation, ``hidden`` after them."""
    arrays = (x, up_weight, up_bias, down_weight, down_bias)
    return products.mlp_forward(activations, *arrays, activation)


def mlp_backward(*arrays, activation):
    """Returns the gradients of ``x``, of ``up``'s weight and bias, and of ``down``'s."""
    return products.mlp_backward(activations, arrays, activation)


def matvec(w, x):
    """Returns ``out``."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum("mk,rk->rm", w.astype(wide), x.astype(wide)).astype(x.dtype)
