"""FFI calls to the CUDA activation kernels in ``cuda/activation``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.core import ffi

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

# The bias backward has two stages: each CTA sums its rows into one partial row, and a second kernel
# sums the partial rows. The workspace bounds the CTAs along the rows: a few per SM of the largest
# GPUs.
_MAX_PARTIAL_ROWS = 640


def gelu_unsupported(x, *_, **__) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if x.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"the input has dtype {x.dtype}; the kernel takes {names}"
    return None


gelu_backward_unsupported = gelu_unsupported
bias_gelu_unsupported = bias_gelu_backward_unsupported = gelu_unsupported
bias_add_unsupported = gelu_unsupported
swiglu_packed_unsupported = swiglu_packed_backward_unsupported = gelu_unsupported
relu_unsupported = relu_backward_unsupported = gelu_unsupported
sigmoid_unsupported = sigmoid_backward_unsupported = gelu_unsupported
add_unsupported = gelu_unsupported


def bias_add_backward_unsupported(dout) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return gelu_unsupported(dout)


def swiglu_unsupported(gate, *_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return gelu_unsupported(gate)


swiglu_backward_unsupported = swiglu_unsupported


def gelu_forward(x):
    """Returns ``out``."""
    return ffi.call("gelu_forward", [_like(x)], x)[0]


def gelu_backward(x, dout):
    """Returns ``dx``."""
    return ffi.call("gelu_backward", [_like(x)], x, dout)[0]


def bias_gelu_forward(x, bias):
    """Returns ``out``."""
    return ffi.call("bias_gelu_forward", [_like(x)], x, bias)[0]


def bias_gelu_backward(x, bias, dout):
    """Returns ``(dx, dbias)``."""
    results = (_like(x), _like(bias), _partial_sums(x))
    return ffi.call("bias_gelu_backward", results, x, bias, dout)[:2]


def bias_add_forward(x, bias):
    """Returns ``out``."""
    return ffi.call("bias_add_forward", [_like(x)], x, bias)[0]


def bias_add_backward(dout):
    """Returns ``dbias``; the gradient of ``x`` is ``dout``."""
    dbias = jax.ShapeDtypeStruct(dout.shape[-1:], dout.dtype)
    return ffi.call("bias_add_backward", (dbias, _partial_sums(dout)), dout)[0]


def swiglu_forward(gate, up):
    """Returns ``out``."""
    return ffi.call("swiglu_forward", [_like(gate)], gate, up)[0]


def swiglu_backward(gate, up, dout):
    """Returns ``(dgate, dup)``."""
    return tuple(ffi.call("swiglu_backward", (_like(gate), _like(up)), gate, up, dout))


def swiglu_packed_forward(x):
    """Returns ``out``."""
    out = jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] // 2), x.dtype)
    return ffi.call("swiglu_packed_forward", [out], x)[0]


def swiglu_packed_backward(x, dout):
    """Returns ``dx``."""
    return ffi.call("swiglu_packed_backward", [_like(x)], x, dout)[0]


def relu_forward(x):
    """Returns ``out``."""
    return ffi.call("relu_forward", [_like(x)], x)[0]


def relu_backward(x, dout):
    """Returns ``dx``."""
    return ffi.call("relu_backward", [_like(x)], x, dout)[0]


def sigmoid_forward(x):
    """Returns ``out``."""
    return ffi.call("sigmoid_forward", [_like(x)], x)[0]


def sigmoid_backward(x, dout):
    """Returns ``dx``."""
    return ffi.call("sigmoid_backward", [_like(x)], x, dout)[0]


def add_forward(x, y):
    """Returns ``out``; both gradients are the output gradient."""
    return ffi.call("add_forward", [_like(x)], x, y)[0]


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _partial_sums(x: Array) -> jax.ShapeDtypeStruct:
    """The workspace: partial gradients of the bias."""
    rows = x.size // max(x.shape[-1], 1)
    return jax.ShapeDtypeStruct((min(rows, _MAX_PARTIAL_ROWS), x.shape[-1]), jnp.float32)
