"""FFI calls to the CUDA kernels in ``cuda/attention``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxllm import ffi

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_WIDTH = 2**30  # of a row of the softmax
_MAX_HEAD_WIDTH = 256
_MAX_LENGTH = 2**28
_SEGMENT_GRANULE = 32  # rows, as in cuda/attention/flash_attention.h


def flash_attention_unsupported(q, k, *_, **__) -> str | None:
    """Why the kernels cannot serve a call, in either direction; None if they can."""
    if q.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"q has dtype {q.dtype}; the kernel takes {names}"
    if q.shape[2] == 0:
        return "q has no heads"
    if q.shape[-1] > _MAX_HEAD_WIDTH:
        return f"heads are {q.shape[-1]} wide; the kernel takes at most {_MAX_HEAD_WIDTH}"
    if max(q.shape[1], k.shape[1]) > _MAX_LENGTH:
        return (
            f"q has {q.shape[1]} queries and k {k.shape[1]} keys; the kernel takes at most "
            f"{_MAX_LENGTH}"
        )
    return None


def flash_attention_slower(*_, **__) -> str | None:
    """Why ``auto`` leaves a call to cuDNN where that can serve it; None where it does not."""
    return "no row in benchmarks/results shows it faster than cuDNN"


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


def flash_attention_forward(q, k, v, segment_ids, *, causal, scale, window, softcap):
    """Returns ``(out, lse)``."""
    options = _flash_options(causal, scale, window, softcap)
    results = (_like(q), _query_statistic(q), _segment_ranges(q, k, segment_ids))
    arrays = (q, k, v, *(segment_ids or ()))
    return ffi.call("flash_attention_forward", results, *arrays, **options)[:2]


def flash_attention_backward(
    q, k, v, out, lse, dout, segment_ids, *, causal, scale, window, softcap
):
    """Returns ``(dq, dk, dv)``."""
    options = _flash_options(causal, scale, window, softcap)
    workspaces = (_query_statistic(q), _segment_ranges(q, k, segment_ids))
    results = (_like(q), _like(k), _like(v), *workspaces)
    arrays = (q, k, v, out, lse, dout, *(segment_ids or ()))
    return ffi.call("flash_attention_backward", results, *arrays, **options)[:3]


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


def _flash_options(causal, scale, window, softcap) -> dict[str, Any]:
    """The attributes of a call; zero stands for no window and no softcap."""
    return {
        "causal": causal,
        "scale": scale,
        "window": 0 if window is None else int(window),
        "softcap": 0.0 if softcap is None else float(softcap),
    }


def _query_statistic(q: jax.Array) -> jax.ShapeDtypeStruct:
    B, T, N, _ = q.shape
    return jax.ShapeDtypeStruct((B, N, T), jnp.float32)


def _segment_ranges(q: jax.Array, k: jax.Array, segment_ids) -> jax.ShapeDtypeStruct:
    """The workspace: the least and the largest segment of every few queries and keys."""
    lengths = (q.shape[1], k.shape[1]) if segment_ids is not None else ()
    granules = sum(-(-length // _SEGMENT_GRANULE) for length in lengths)
    return jax.ShapeDtypeStruct((q.shape[0], granules, 2), jnp.int32)


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
