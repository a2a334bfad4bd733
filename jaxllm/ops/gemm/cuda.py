"""FFI calls to the kernels of ``matmul``, ``matvec`` and ``float8_matmul`` in ``cuda/gemm``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm.core import ffi
from jaxllm.ops.rounding import amax_of_columns

_MAX_SIZE = 2**31  # TMA's coordinates


def matmul_unsupported(a, b, *_, **__) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    if a.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"a has dtype {a.dtype}; the kernels take float32, bfloat16, float16"
    if max(*a.shape, *b.shape) >= _MAX_SIZE:
        return f"a {a.shape} or b {b.shape} has a size of 2^31 or more"
    return None


def matmul_forward(a, b, bias, *, transpose_a, transpose_b, activation, out_dtype, precision):
    """Returns ``(out, h)``; ``h`` is the GEMM's result alone, None without an activation."""
    out_dtype = jnp.dtype(out_dtype or a.dtype)
    shape = (a.shape[1 if transpose_a else 0], b.shape[0 if transpose_b else 1])
    # The kernels write the dtype of the factors or float32.
    written = a.dtype if out_dtype == a.dtype else jnp.float32
    out = jax.ShapeDtypeStruct(shape, written)
    h = out if activation else jax.ShapeDtypeStruct((0,), written)
    out, h = ffi.call(
        "matmul",
        (out, h),
        a,
        b,
        jnp.zeros((0,), a.dtype) if bias is None else bias,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        gelu=activation == "gelu",
        tf32=precision == "tf32",
    )
    return out.astype(out_dtype), h.astype(out_dtype) if activation else None


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


def float8_matmul_unsupported(a, b, *_, **__) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    (columns, depth), rows = b.shape, a.shape[0]
    if depth % 16 or depth == 0:  # TMA takes no array without elements
        return f"a {a.shape} and b {b.shape} have a depth of {depth}; it must be a multiple of 16"
    if columns % 8:
        return f"b {b.shape} has {columns} columns of the result; they must be a multiple of 8"
    if any(size >= _MAX_SIZE for size in (rows, columns, depth)):  # any may be symbolic
        return f"a {a.shape} or b {b.shape} has a size of 2^31 or more"
    if reason := ffi.no_hopper_reason():
        return reason
    gpu = ffi.device()
    if gpu is not None and gpu.clusters == 0:
        return "no two SMs of this GPU can run a cluster of the kernel"
    return None


def float8_matmul(a, b, scale_a, scale_b, bias, *, out_dtype):
    """Returns ``out``."""
    result = jax.ShapeDtypeStruct((a.shape[0], b.shape[0]), jnp.dtype(out_dtype))
    bias = ffi.or_empty(bias, result.dtype)
    (out,) = ffi.call("float8_matmul", [result], a, b, scale_a, scale_b, bias)
    return out


float8_matmul_amax_unsupported = float8_matmul_unsupported


def float8_matmul_amax(a, b, scale_a, scale_b, bias, *, out_dtype, parts):
    """Returns ``out``, and its largest finite absolute value in each part of the columns."""
    rows, columns = a.shape[0], b.shape[0]
    if parts > 1 and columns % (parts * 64):  # the epilogue takes one part of 64 columns at a time
        out = float8_matmul(a, b, scale_a, scale_b, bias, out_dtype=out_dtype)
        return out, amax_of_columns(out, parts)
    results = (
        jax.ShapeDtypeStruct((rows, columns), jnp.dtype(out_dtype)),
        jax.ShapeDtypeStruct((parts,), jnp.float32),
    )
    bias = ffi.or_empty(bias, results[0].dtype)
    return tuple(ffi.call("float8_matmul_amax", results, a, b, scale_a, scale_b, bias))
