"""FFI calls to the CUDA kernels in ``cuda/attention``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm import ffi

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def softmax_unsupported(x, *_, **__) -> str | None:
    """Why the kernels cannot serve a call, in either direction; None if they can."""
    if x.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"x has dtype {x.dtype}; the kernel takes {names}"
    return None


repeat_kv_unsupported = softmax_unsupported


def softmax_forward(x, *, scale, causal):
    """Returns ``out``."""
    (out,) = ffi.call("softmax_forward", [_like(x)], x, scale=scale, causal=causal)
    return out


def softmax_backward(out, dout, *, scale, causal):
    """Returns ``dx``."""
    (dx,) = ffi.call("softmax_backward", [_like(out)], out, dout, scale=scale, causal=causal)
    return dx


def repeat_kv_forward(x, *, groups):
    """Returns ``out``."""
    *outer, K, H = x.shape
    result = jax.ShapeDtypeStruct((*outer, K * groups, H), x.dtype)
    (out,) = ffi.call("repeat_kv_forward", [result], x, groups=groups)
    return out


def repeat_kv_backward(dout, *, groups):
    """Returns ``dx``."""
    *outer, N, H = dout.shape
    result = jax.ShapeDtypeStruct((*outer, N // groups, H), dout.dtype)
    (dx,) = ffi.call("repeat_kv_backward", [result], dout, groups=groups)
    return dx


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
