"""Attention of one query per sequence to a cache."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, Num

from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.attention import cuda_decode, pallas_decode, reference_decode
from jaxllm.ops.attention.arguments import check_sinks
from jaxllm.ops.checks import (
    as_finite,
    as_int32,
    check_floating,
    check_floating_of_any_width,
    check_integer,
    check_same_dtype,
    check_shape,
)
from jaxllm.ops.pages import check_table
from jaxllm.ops.window import Window, last_tokens

DECODE_ATTENTION = Op(
    "decode_attention",
    reference=reference_decode,
    pallas=pallas_decode,
    cuda=cuda_decode,
    sharding=ShardingRule("B N H, B S N H, B S N H, B, B S N, B S N, N -> B N H", "B N"),
)


# Of caches in pages, which all sequences share.
DECODE_ATTENTION_PAGED = Op(
    "decode_attention_paged",
    reference=reference_decode,
    pallas=pallas_decode,
    cuda=cuda_decode,
    sharding=ShardingRule("B N H, _ _ N H, _ _ N H, B, _ _ N, _ _ N, N, B _ -> B N H", "B N"),
)


def decode_attention(
    q: Float[Array, "B N H"],
    k_cache: Num[Array, "B S K H"],
    v_cache: Num[Array, "B S K H"],
    lengths: Integer[Array, " B"],
    k_scales: Float[Array, "B S K"] | None = None,
    v_scales: Float[Array, "B S K"] | None = None,
    block_table: Integer[Array, "B M"] | None = None,
    sinks: Float[Array, " N"] | None = None,
    *,
    scale: float | None = None,
    window: Window = None,
    backend: Backend | None = None,
) -> Float[Array, "B N H"]:
    r"""Attention of one query a sequence to a cache of keys and values, as decoding has it.

    .. math::
        out = \sum_{s < length} softmax_s\!\left( scale \cdot q \cdot k_s \right) v_s

    Query head n reads key head ``n // (N // K)``; the query heads of a key head share one read of
    it. The caches hold at most S tokens, and sequence b has its first ``lengths[b]`` of them. For
    inference alone: there is no derivative.

    Args:
        q: The queries; float32, bfloat16 or float16 for the kernels.
        k_cache: The keys, in the dtype of ``q``, or int8 with ``k_scales``; K divides N.
        v_cache: The values, in the shape and dtype of ``k_cache``.
        lengths: How many tokens of the cache each sequence has, used as int32 and as if it were
            within 0 and S. A sequence without any gives zeros.
        k_scales: Of an int8 cache: what each token's key head is multiplied by; float32 for the
            kernels.
        v_scales: Likewise for the values.
        block_table: Of caches in pages, (P, page, K, H) with scales (P, page, K), the pages of each
            sequence, used as int32: token s of sequence b is row ``s % page`` of page
            ``block_table[b, s // page]``, and S is ``M * page``. Sequences may share pages. Entries
            behind ``lengths`` may be anything. The result has the bits of a cache of S tokens in
            one piece.
        sinks: As in :func:`flash_attention`: one more score of each head in the denominator.
        scale: Multiplies the scores; None for ``1/sqrt(H)``.
        window: As in :func:`flash_attention`. The query is the last of its sequence's tokens: it
            sees the last ``window`` of them, itself included, or the last ``window[0] + 1``.
        backend: As in :func:`flash_attention`.

    Returns:
        What each query read, in the shape and dtype of ``q``.

    Raises:
        TypeError: An array is of the wrong kind, a cache is neither int8 nor of the dtype of ``q``,
            scales are missing or not wanted, ``sinks`` are neither float32 nor of the dtype of
            ``q``, ``scale`` is no number, or ``window`` is no integer and no pair of integers.
        ValueError: The shapes do not fit together, N is not a multiple of K, ``window`` is below 1,
            ``scale`` is not finite, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Dao et al., "Flash-Decoding for long-context inference"; CUDA-Learn-Notes' split-KV
    ``flash_attn``; Kwon et al., "PagedAttention" (arXiv:2309.06180).

    Example:
        >>> q = jax.random.normal(jax.random.key(0), (2, 32, 128), jnp.bfloat16)
        >>> cache = jax.random.normal(jax.random.key(1), (2, 1024, 8, 128), jnp.bfloat16)
        >>> out = jaxllm.ops.decode_attention(q, cache, cache, jnp.array([1000, 17]))
    """
    _check_cache(q, k_cache, v_cache, lengths, block_table)
    quantized = k_cache.dtype == jnp.int8
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if (scales is not None) != quantized:
            wanted = "given" if quantized else "None"
            raise TypeError(f"{name} must be {wanted} with caches of dtype {k_cache.dtype}")
        if scales is not None:
            check_floating_of_any_width(**{name: scales})
            check_shape(name, scales, k_cache.shape[:3], f"one a head of k_cache {k_cache.shape}")
    check_sinks(sinks, q.shape[1], q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else as_finite("scale", scale)
    options = {"scale": scale, "window": last_tokens(window)}
    arrays = (q, k_cache, v_cache, as_int32(lengths), k_scales, v_scales, sinks)
    direction = Direction.INFERENCE
    if block_table is not None:
        arrays = (*arrays, as_int32(block_table))
        return dispatch(DECODE_ATTENTION_PAGED, direction, resolve(backend), *arrays, **options)
    return dispatch(DECODE_ATTENTION, direction, resolve(backend), *arrays, **options)


def _check_cache(
    q: Array, k_cache: Array, v_cache: Array, lengths: Array, block_table: Array | None
) -> None:
    check_floating(q=q)
    if q.ndim != 3 or q.shape[-1] == 0:
        raise ValueError(f"q has shape {q.shape}; it must be (B, N, H) with H at least 1")
    B, N, H = q.shape
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        dtype = getattr(cache, "dtype", None)
        if dtype not in (jnp.int8, q.dtype):
            found = f"dtype {dtype}" if dtype is not None else f"type {type(cache).__name__}"
            raise TypeError(f"{name} has {found}; it must be int8, or {q.dtype} as q is")
    in_pages = block_table is not None
    if k_cache.ndim != 4 or k_cache.shape[3] != H or (not in_pages and k_cache.shape[0] != B):
        wanted = f"(P, page, K, {H}), with" if in_pages else f"({B}, S, K, {H}), with the batch and"
        raise ValueError(
            f"k_cache has shape {k_cache.shape}; it must be {wanted} the head width of q {q.shape}"
        )
    if block_table is not None:
        check_table(block_table, k_cache, f"q {q.shape}", B)
    check_shape("v_cache", v_cache, k_cache.shape, "the shape of k_cache")
    check_same_dtype("v_cache", v_cache, "k_cache", k_cache)
    K = k_cache.shape[2]
    if K == 0 or N % K:
        raise ValueError(
            f"k_cache has shape {k_cache.shape}, {K} heads; their number must divide that of q "
            f"{q.shape}, {N}"
        )
    check_integer(lengths=lengths)
    check_shape("lengths", lengths, (B,), f"one a sequence of q {q.shape}")
