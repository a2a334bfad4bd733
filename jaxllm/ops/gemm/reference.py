"""``linear`` in ``jax.numpy``: products.py has the formulas, and the derivative by hand."""

from __future__ import annotations

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
