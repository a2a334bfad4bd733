"""``linear`` with the CUDA activation kernels; its products stay with XLA."""

from __future__ import annotations

from jaxllm.ops.activation import cuda as activations
from jaxllm.ops.gemm import products

linear_unsupported = activations.gelu_unsupported


def linear_forward(x, weight, bias, *, activation):
    """Returns ``(out, h)``; ``h`` is the product alone, None without an activation."""
    return products.forward(activations, x, weight, bias, activation)


def linear_backward(x, weight, bias, h, dout, *, activation):
    """Returns ``(dx, dweight, dbias)``."""
    return products.backward(activations, x, weight, bias, h, dout, activation)
