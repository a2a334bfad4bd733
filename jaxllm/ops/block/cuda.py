"""FFI call to the CUDA kernels of a block in ``cuda/block``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm.core import ffi
from jaxllm.ops.attention import cuda_decode as attention
from jaxllm.ops.pages import count_keys
from jaxllm.ops.weights import Quantized

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def decode_block_unsupported(
    residual, norm1, norm2, qkv, out, gate_up, down, cos, sin, k_cache, v_cache, lengths,
    qkv_bias=None, q_norm=None, k_norm=None, block_table=None, **_,
) -> str | None:  # fmt: skip
    """Why the kernels cannot serve a call; None if they can."""
    del qkv_bias, q_norm, k_norm  # of the dtype of residual
    if residual.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"residual has dtype {residual.dtype}; the kernels take {names}"
    B, H = residual.shape[0], k_cache.shape[-1]
    if reason := attention.decode_attention_unsupported(
        jax.ShapeDtypeStruct((B, _query_heads(out, H), H), residual.dtype),
        k_cache, v_cache, lengths, None, None, None, block_table,
    ):  # fmt: skip
        return reason
    for name, array in (("norm1", norm1), ("norm2", norm2)):
        if array.dtype != residual.dtype:
            return f"{name} has dtype {array.dtype}; the kernels take that of residual"
    for name, array in (("cos", cos), ("sin", sin)):
        if array.dtype != jnp.float32:
            return f"{name} has dtype {array.dtype}; the kernels take float32"
    for matrix in (qkv, out, gate_up, down):
        if isinstance(matrix, Quantized) and matrix.scales.dtype != jnp.float32:
            return f"scales have dtype {matrix.scales.dtype}; the kernels take float32"
    return None


def decode_block(
    residual, norm1, norm2, qkv, out, gate_up, down, cos, sin, k_cache, v_cache, lengths,
    qkv_bias, q_norm, k_norm, block_table, *, ring, window, eps,
):  # fmt: skip
    """Returns ``(out, k_cache, v_cache)``; the caches are written in place where they may be."""
    B, (_, S, K, H) = residual.shape[0], k_cache.shape
    page, keys = 0, None
    if block_table is not None:
        page, S = S, block_table.shape[1] * S
        keys = count_keys(lengths, block_table, k_cache)
    matrices = (qkv, out, gate_up, down)
    data = [_elements(matrix) for matrix in matrices]
    scales = [matrix.scales for matrix in matrices if isinstance(matrix, Quantized)]
    N, F = _query_heads(out, H), data[3].shape[1]
    splits = attention.count_splits(B, N, K, S if window is None else min(S, window))

    def like(*shape, dtype=residual.dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    results = (
        like(*residual.shape),
        like(*k_cache.shape),
        like(*v_cache.shape),
        # What one kernel passes to the next.
        like(B, 0 if q_norm is None else (N + 2 * K) * H),
        like(B, N * H),
        like(B, N * H),
        like(*residual.shape),
        like(B, F),
        like(splits if splits > 1 else 0, B, N, H + 2, dtype=jnp.float32),
    )
    optional = [ffi.or_empty(array, residual.dtype) for array in (qkv_bias, q_norm, k_norm)]
    optional += [ffi.or_empty(array, jnp.int32) for array in (block_table, keys)]
    operands = (residual, norm1, norm2, cos, sin, k_cache, v_cache, lengths, *optional)
    static = {"aliases": {5: 1, 6: 2}, "eps": eps, "ring": ring, "window": window or 0}
    static |= {"page": page, "splits": splits}
    return tuple(ffi.call("decode_block", results, *operands, *data, *scales, **static))[:3]


def _elements(matrix):
    return matrix.q if isinstance(matrix, Quantized) else matrix.array


def _query_heads(out, width: int) -> int:
    """The number of query heads, by the matrix after attention."""
    return _elements(out).shape[1] // width
