"""FFI calls to the CUDA kernels in ``cuda/attention``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm import ffi

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_WIDTH = 2**30  # of a row of the softmax


def softmax_unsupported(x, *_, **__) -> str | None:
    """Why the kernels cannot serve a call, in either direction; None if they can."""
    if x.shape[-1] > _MAX_WIDTH:
        return f"x has rows of {x.shape[-1]}; the kernel takes at most {_MAX_WIDTH}"
    return repeat_kv_unsupported(x)


def repeat_kv_unsupported(x, *_, **__) -> str | None:
    """Why the kernels cannot serve a call, in either direction; None if they can."""
    if x.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"x has dtype {x.dtype}; the kernel takes {names}"
    return None


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
