"""``decode_block`` with the Pallas kernels of its products and of its attention."""

from __future__ import annotations

import functools

import jax

from jaxllm.ops.attention import pallas_decode as attention
from jaxllm.ops.decoding import composed
from jaxllm.ops.gemm import pallas as gemm
from jaxllm.ops.quantization import pallas as quantization


def decode_block_unsupported(
    residual, norm1, norm2, qkv, out, gate_up, down, cos, sin, k_cache, v_cache, lengths, **_
) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    B, H = residual.shape[0], k_cache.shape[-1]
    q = jax.ShapeDtypeStruct((B, k_cache.shape[2], H), residual.dtype)
    if reason := attention.decode_attention_unsupported(q, k_cache, v_cache, lengths, None, None):
        return reason
    for matrix in (qkv, out, gate_up, down):
        if isinstance(matrix, tuple):
            x = jax.ShapeDtypeStruct((B, matrix[0].shape[1]), residual.dtype)
            if reason := quantization.quantized_matvec_unsupported(matrix[0], matrix[1], x):
                return reason
    return None


def decode_block(*arrays, eps, interpret=False):
    """Returns ``(out, k_cache, v_cache)``."""
    kernels = (gemm.matvec, quantization.quantized_matvec, attention.decode_attention)
    own = (functools.partial(kernel, interpret=interpret) for kernel in kernels)
    return composed.block(*own, *arrays, eps=eps)
