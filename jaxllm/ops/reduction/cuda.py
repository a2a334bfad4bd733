"""FFI calls to the CUDA reduction kernels in ``cuda/reduction``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.core import ffi

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

# Each thread block reduces a chunk, and one thread block reduces the partial results. Chunks grow
# where there would be more than _MAX_PARTIALS.
_CHUNK = 16384
_MAX_PARTIALS = 16384


def reduce_sum_unsupported(x, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return _unsupported_dtype("x", x)


def reduce_max_unsupported(x, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return _unsupported_dtype("x", x)


def dot_unsupported(a, b, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return _unsupported_dtype("a", a)


def histogram_unsupported(x, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if x.dtype != jnp.int32:
        return f"x has dtype {x.dtype}; the kernel takes int32"
    return None


def _unsupported_dtype(name: str, x: Array) -> str | None:
    if x.dtype in _DTYPES:
        return None
    names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
    return f"{name} has dtype {x.dtype}; the kernel takes {names}"


def reduce_sum_forward(x):
    """Returns the sum."""
    return ffi.call("reduce_sum_forward", (_scalar(jnp.float32), _partials(x)), x)[0]


def reduce_max_forward(x):
    """Returns the largest element."""
    return ffi.call("reduce_max_forward", (_scalar(x.dtype), _partials(x)), x)[0]


def dot_forward(a, b):
    """Returns the dot product."""
    return ffi.call("dot_forward", (_scalar(jnp.float32), _partials(a)), a, b)[0]


def histogram(x, *, bins):
    """Returns the counts."""
    return ffi.call("histogram", [jax.ShapeDtypeStruct((bins,), jnp.int32)], x)[0]


def _scalar(dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((), dtype)


def _partials(x: Array) -> jax.ShapeDtypeStruct:
    """The workspace: the partial result of each chunk."""
    count = min(max(-(-x.size // _CHUNK), 1), _MAX_PARTIALS)
    return jax.ShapeDtypeStruct((count,), jnp.float32)
