"""FFI calls to the CUDA kernels of ``decode_attention`` in ``cuda/attention/decode/decode.cu``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm.core import ffi

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
# As in cuda/attention/decode_ffi.cc.
_MAX_WIDTH = 256
_MAX_BATCH = _MAX_HEADS = 65535
_MAX_LENGTH = 2**30
_MAX_PAGES = 2**31 - 1
_TENSOR_CORE_WIDTHS = (64, 128)
_HEADS_PER_BLOCK = 8  # query heads that one read of their keys serves
# Blocks that keep the largest GPUs busy. Where the GPU and the code for it have clusters, a cluster
# of blocks puts its parts together in its shared memory; more parts take a second kernel, which
# does not pay where half of the blocks are there. Where there are no clusters it adds up all parts.
_BLOCKS, _ENOUGH_BLOCKS = 128, 64
_CLUSTER = 8  # kMaxCluster of cuda/attention/decode/merge.cuh
_TOKENS_PER_BLOCK = 256  # that are worth a block
_MAX_SPLITS = 64


def decode_attention_unsupported(
    q, k_cache, v_cache, lengths, k_scales, v_scales, sinks=None, block_table=None, **_
):
    """Why the kernels cannot serve a call; None if they can."""
    if q.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"q has dtype {q.dtype}; the kernel takes {names}"
    if q.shape[-1] > _MAX_WIDTH:
        return f"heads are {q.shape[-1]} wide; the kernel takes at most {_MAX_WIDTH}"
    if q.shape[0] > _MAX_BATCH:
        return f"q has {q.shape[0]} sequences; the kernel takes at most {_MAX_BATCH}"
    if q.shape[1] > _MAX_HEADS:
        return f"q has {q.shape[1]} heads; the kernel takes at most {_MAX_HEADS}"
    if (length := _length(k_cache, block_table)) > _MAX_LENGTH:
        whose = "k_cache has" if block_table is None else "the pages of a sequence have"
        return f"{whose} {length} tokens; the kernel takes at most {_MAX_LENGTH}"
    if block_table is not None and k_cache.shape[0] > _MAX_PAGES:
        return f"k_cache has {k_cache.shape[0]} pages; the kernel takes at most {_MAX_PAGES}"
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales is not None and scales.dtype != jnp.float32:
            return f"{name} has dtype {scales.dtype}; the kernel takes float32"
    return shared_memory_reason(q)


def shared_memory_reason(q) -> str | None:
    """Why no kernel for heads like these fits the GPU; None if one does."""
    on_tensor_cores = q.dtype != jnp.float32 and q.shape[-1] in _TENSOR_CORE_WIDTHS
    name = "decode_attention" if on_tensor_cores else "decode_attention_any_width"
    return ffi.shared_memory_reason(name)


decode_attention_paged_unsupported = decode_attention_unsupported


def decode_attention(
    q, k_cache, v_cache, lengths, k_scales, v_scales, sinks, block_table=None, *, scale, window
):
    """Returns ``out``."""
    B, N, H = q.shape
    S, K = _length(k_cache, block_table), k_cache.shape[2]
    splits = count_splits(B, N, K, S if window is None else min(S, window))
    optional = (
        ffi.or_empty(k_scales, jnp.float32), ffi.or_empty(v_scales, jnp.float32),
        ffi.or_empty(None if sinks is None else sinks.astype(jnp.float32), jnp.float32),
        ffi.or_empty(block_table, jnp.int32),
    )  # fmt: skip
    # Each split's sums, and its largest score and total; unused where there is one split.
    partial = jax.ShapeDtypeStruct((splits if splits > 1 else 0, B, N, H + 2), jnp.float32)
    out, _ = ffi.call(
        "decode_attention",
        (jax.ShapeDtypeStruct(q.shape, q.dtype), partial),
        q, k_cache, v_cache, lengths, *optional,
        scale=scale, window=window or 0, splits=splits,
        page=0 if block_table is None else k_cache.shape[1],
    )  # fmt: skip
    return out


decode_attention_paged = decode_attention


def _length(k_cache, block_table) -> int:
    """The tokens of a sequence at most."""
    pages = 1 if block_table is None else block_table.shape[1]
    return pages * k_cache.shape[1]


def count_splits(batch: int, heads: int, kv_heads: int, length: int) -> int:
    """Into how many parts a cache is cut, a power of two: enough for all of the GPU to read."""
    blocks = batch * kv_heads * -(-(heads // kv_heads) // _HEADS_PER_BLOCK)
    splits = 1
    while splits < _MAX_SPLITS and splits * _TOKENS_PER_BLOCK < length:
        if splits * blocks >= (_ENOUGH_BLOCKS if splits == _CLUSTER else _BLOCKS):
            break
        splits *= 2
    return splits
