"""FFI calls to the CUDA rotary kernels in ``cuda/rotary``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm.core import ffi

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def rope_unsupported(q, k, cos, sin, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if q.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"q has dtype {q.dtype}; the kernel takes {names}"
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
