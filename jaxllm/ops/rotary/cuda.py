"""FFI calls to the CUDA rotary kernels in ``cuda/rotary``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.core import ffi

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def rope_unsupported(q, k, cos, sin, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return _dtype_reason("q", q, cos)


def _dtype_reason(name, array, cos) -> str | None:
    if array.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"{name} has dtype {array.dtype}; the kernel takes {names}"
    if cos.dtype != jnp.float32:
        return f"cos has dtype {cos.dtype}; the kernel takes float32"
    return None


def rope_backward_unsupported(dq, dk, cos, sin, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return rope_unsupported(dq, dk, cos, sin)


def rope_forward(q, k, cos, sin, *, interleaved):
    """Returns ``(q, k)``, rotated; ``k`` may be None."""
    return _call("rope_forward", q, k, cos, sin, interleaved)


def rope_backward(dq, dk, cos, sin, *, interleaved):
    """Returns ``(dq, dk)`` of the unrotated arrays, given those of the rotated ones."""
    return _call("rope_backward", dq, dk, cos, sin, interleaved)


def _call(stem, q, k, cos, sin, interleaved):
    keys = q[..., :0, :] if k is None else k
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, keys))
    rotated, rotated_keys = ffi.call(stem, results, q, keys, cos, sin, interleaved=interleaved)
    return rotated, None if k is None else rotated_keys


def rope_packed_unsupported(qkv, cos, sin, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return _dtype_reason("qkv", qkv, cos)


def rope_packed_backward_unsupported(dqkv, cos, sin, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return _dtype_reason("dqkv", dqkv, cos)


def rope_packed_forward(qkv, cos, sin, *, heads, kv_heads, interleaved):
    """Returns the projection with queries and keys rotated, which is written over ``qkv``."""
    return _call_packed("rope_packed_forward", qkv, cos, sin, heads, kv_heads, interleaved)


def rope_packed_backward(dqkv, cos, sin, *, heads, kv_heads, interleaved):
    """Returns the gradient of the unrotated projection, which is written over ``dqkv``."""
    return _call_packed("rope_packed_backward", dqkv, cos, sin, heads, kv_heads, interleaved)


def _call_packed(stem, qkv, cos, sin, heads, kv_heads, interleaved):
    flat = lax.collapse(qkv, 2)
    result = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
    static = {**rotated_heads(qkv, heads, kv_heads), "interleaved": interleaved}
    (out,) = ffi.call(stem, [result], flat, cos, sin, aliases={0: 0}, **static)
    return out.reshape(qkv.shape)


def rotated_heads(qkv, heads, kv_heads) -> dict[str, int]:
    """How many heads of a projection rotate, its first ones, and their width."""
    if qkv.ndim == 5:  # by parts, and maybe a shard
        parts, kv_heads, width = qkv.shape[2:]
        return {"heads": (parts - 1) * kv_heads, "head_dim": width}
    return {"heads": heads + kv_heads, "head_dim": qkv.shape[-1] // (heads + 2 * kv_heads)}
