r"""``decode_attention`` in ``jax.numpy``.

For one query head and the first ``lengths`` rows of its key head's cache,

.. math::
    out = \sum_s softmax_s(scale \cdot q \cdot k_s)\, v_s

where an int8 cache holds :math:`k_s / k\_scales_s` and :math:`v_s / v\_scales_s`. With a window
only its last rows count, and a sink is one more score in the softmax, without a value. A cache in
pages is put together first: row s of a sequence is row ``s % page`` of page
``block_table[s // page]``.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def decode_attention(q, k_cache, v_cache, lengths, k_scales, v_scales, sinks, *, scale, window):
    """Returns ``out``."""
    B, N, H = q.shape
    S, K = k_cache.shape[1:3]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries = q.astype(wide).reshape(B, K, N // K, H)
    keys, values = _widen(k_cache, k_scales, wide), _widen(v_cache, v_scales, wide)
    scores = scale * jnp.einsum("bkgh,bskh->bkgs", queries, keys)
    token, end = jnp.arange(S), jnp.clip(lengths, 0, S)[:, None]
    seen = (token < end) if window is None else (token < end) & (token >= end - window)
    seen = seen[:, None, None]
    sink = -jnp.inf if sinks is None else sinks.astype(wide).reshape(K, N // K, 1)
    largest = jnp.max(scores, axis=-1, where=seen, initial=-jnp.inf, keepdims=True)
    largest = jnp.maximum(largest, sink)
    largest = jnp.where(largest == -jnp.inf, 0, largest)  # without keys, -inf - -inf
    weights = jnp.where(seen, jnp.exp(scores - largest), 0)
    total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - largest)
    weights = weights / jnp.where(total == 0, 1, total)
    out = jnp.einsum("bkgs,bskh->bkgh", weights, jnp.where(seen[:, 0, 0, :, None, None], values, 0))
    return out.reshape(q.shape).astype(q.dtype)


def decode_attention_paged(
    q, k_cache, v_cache, lengths, k_scales, v_scales, sinks, block_table, **options
):
    """Returns ``out``; the caches and their scales are in pages."""
    k, v, k_scales, v_scales = (
        None if x is None else _put_together(x, block_table)
        for x in (k_cache, v_cache, k_scales, v_scales)
    )
    return decode_attention(q, k, v, lengths, k_scales, v_scales, sinks, **options)


def _put_together(pages: Array, block_table: Array) -> Array:
    """(P, page, ...) -> (B, M * page, ...), by the pages of each sequence."""
    found = jnp.take(pages, block_table, axis=0, mode="clip")
    B, M = block_table.shape
    return found.reshape(B, M * pages.shape[1], *pages.shape[2:])


def _widen(cache: Array, scales: Array | None, dtype) -> Array:
    wide = cache.astype(dtype)
    return wide if scales is None else wide * scales[..., None].astype(dtype)
