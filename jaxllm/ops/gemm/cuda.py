"""``linear`` with the CUDA activation kernels, its products XLA's; and ``matvec``'s FFI call."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm import ffi
from jaxllm.ops.activation import cuda as activations
from jaxllm.ops.gemm import products

linear_unsupported = activations.gelu_unsupported


def linear_forward(x, weight, bias, *, activation):
    """Returns ``(out, h)``; ``h`` is the product alone, None without an activation."""
    return products.forward(activations, x, weight, bias, activation)


def linear_backward(x, weight, bias, h, dout, *, activation):
    """Returns ``(dx, dweight, dbias)``."""
    return products.backward(activations, x, weight, bias, h, dout, activation)


def matvec_unsupported(w, x) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"x has dtype {x.dtype}; the kernel takes float32, bfloat16, float16"
    return None


def matvec(w, x):
    """Returns ``out``."""
    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), x.dtype)
    (out,) = ffi.call("matvec", [result], w, x)
    return out
