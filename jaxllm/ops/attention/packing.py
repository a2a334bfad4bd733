"""Attention of a projection that holds queries, keys and values, by that of separate arrays.

For implementations that cannot read q, k and v out of the rows of one array: they are sliced out of
it, and their gradients joined. The heads of a row of (N + 2K) H columns stand in this order. And
the gradient of the projection's bias, for those that do not compute it with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def split(qkv: Array, heads: int, kv_heads: int) -> tuple[Array, Array, Array]:
    """The queries (B, T, N, H), keys and values (B, T, K, H) of a projection."""
    B, T, columns = qkv.shape
    H = columns // (heads + 2 * kv_heads)
    parts = jax.lax.split(qkv, (heads * H, kv_heads * H, kv_heads * H), axis=-1)
    counts = (heads, kv_heads, kv_heads)
    q, k, v = (part.reshape(B, T, n, H) for part, n in zip(parts, counts, strict=True))
    return q, k, v


def rows(x: Array) -> Array:
    """(B, T, N, H) as (B, T, N*H)."""
    B, T, N, H = x.shape
    return x.reshape(B, T, N * H)


def forward(unpacked: Callable) -> Callable:
    """``flash_attention_packed_forward`` by a ``flash_attention_forward``."""

    def packed(qkv, segment_ids, rope_table, *, heads, kv_heads, **options):
        """Returns ``(out, lse)``; ``out`` is (B, T, N*H)."""
        q, k, v = split(qkv, heads, kv_heads)
        out, lse = unpacked(q, k, v, segment_ids, rope_table, **options)
        return rows(out), lse

    return packed


def backward(unpacked: Callable) -> Callable:
    """``flash_attention_packed_backward`` by a ``flash_attention_backward``."""

    def packed(qkv, out, lse, dout, segment_ids, rope_table, *, heads, kv_heads, **options):
        """Returns ``dqkv``."""
        q, k, v = split(qkv, heads, kv_heads)
        out, dout = out.reshape(q.shape), dout.reshape(q.shape)
        gradients = unpacked(q, k, v, out, lse, dout, segment_ids, rope_table, **options)
        return jnp.concatenate([rows(gradient) for gradient in gradients], axis=-1)

    return packed


def backward_with_bias(packed: Callable) -> Callable:
    """``self_attention_backward`` by a ``flash_attention_packed_backward``."""

    def summed(
        qkv, out, lse, dout, delta, row_sums, *rest, heads: int, kv_heads: int, **options: Any
    ) -> tuple[Array, Array]:
        """Returns ``(dqkv, dbias)``."""
        del delta, row_sums
        dqkv = packed(qkv, out, lse, dout, *rest, heads=heads, kv_heads=kv_heads, **options)
        dq, dk, _ = split(dqkv, heads, kv_heads)
        # A vector added to all keys changes no probability, and the probabilities of a query add up
        # to one. So two sums are known without the roundings of those gradients.
        *_, H = dk.shape
        dv = dout.reshape(*dout.shape[:2], kv_heads, heads // kv_heads, H)
        wide = jnp.promote_types(dqkv.dtype, jnp.float32)
        of_queries = dq.sum(axis=(0, 1), dtype=wide).ravel()
        of_values = dv.sum(axis=(0, 1, 3), dtype=wide).ravel()
        dbias = jnp.concatenate([of_queries, jnp.zeros_like(of_values), of_values])
        return dqkv, dbias.astype(dqkv.dtype)

    return summed


def unsupported(unpacked: Callable) -> Callable:
    """``flash_attention_packed_unsupported`` by a ``flash_attention_unsupported``.

    Likewise the predicates of the other ops that have a projection, in either direction: theirs are
    the arrays behind it.
    """

    def packed(qkv, *rest, heads, kv_heads, **options) -> str | None:
        """Why the kernels cannot serve a call; None if they can."""
        q, k, v = jax.eval_shape(lambda qkv: split(qkv, heads, kv_heads), qkv)
        return unpacked(q, k, v, *rest, **options)

    return packed
