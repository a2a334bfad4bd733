"""``linear`` and ``mlp`` with the Pallas activation kernels; their products stay with XLA."""

from __future__ import annotations

import jax

from jaxllm.ops.activation import pallas as activations
from jaxllm.ops.gemm import products


def linear_unsupported(x, weight, *_, **__) -> str | None:
    """Why the kernels cannot serve a call, in either direction; None if they can."""
    h = jax.ShapeDtypeStruct((*x.shape[:-1], weight.shape[1]), x.dtype)
    return activations.gelu_unsupported(h)


mlp_unsupported = linear_unsupported


def linear_forward(x, weight, bias, *, activation, interpret=False):
    """Returns ``(out, h)``; ``h`` is the product alone, None without an activation."""
    return products.forward(activations, x, weight, bias, activation, interpret=interpret)


def linear_backward(x, weight, bias, h, dout, *, activation, interpret=False):
    """Returns ``(dx, dweight, dbias)``."""
    return products.backward(activations, x, weight, bias, h, dout, activation, interpret=interpret)


def mlp_forward(x, up_weight, up_bias, down_weight, down_bias, *, activation, interpret=False):
    """Returns ``(out, h, hidden)``: ``h`` before bias and activation, ``hidden`` after them."""
    arrays = (x, up_weight, up_bias, down_weight, down_bias)
    return products.mlp_forward(activations, *arrays, activation, interpret=interpret)


def mlp_backward(*arrays, activation, interpret=False):
    """Returns the gradients of ``x``, of ``up``'s weight and bias, and of ``down``'s."""
    return products.mlp_backward(activations, *arrays, activation, interpret=interpret)
