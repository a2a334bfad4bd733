"""``linear`` with the Pallas activation kernels; its products stay with XLA."""

from __future__ import annotations

import jax

from jaxllm.ops.activation import pallas as activations
from jaxllm.ops.gemm import products


def linear_unsupported(x, weight, *_, **__) -> str | None:
    """Why the kernels cannot serve a call, in either direction; None if they can."""
    h = jax.ShapeDtypeStruct((*x.shape[:-1], weight.shape[1]), x.dtype)
    return activations.gelu_unsupported(h)


def linear_forward(x, weight, bias, *, activation, interpret=False):
    """Returns ``(out, h)``; ``h`` is the product alone, None without an activation."""
    return products.forward(activations, x, weight, bias, activation, interpret=interpret)


def linear_backward(x, weight, bias, h, dout, *, activation, interpret=False):
    """Returns ``(dx, dweight, dbias)``."""
    return products.backward(activations, x, weight, bias, h, dout, activation, interpret=interpret)
