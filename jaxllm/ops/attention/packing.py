"""Attention of a projection that holds queries, keys and values, by that of separate arrays.

For implementations that cannot read q, k and v out of the rows of one array: they are sliced out of
it, and their gradients joined. And the gradient of the projection's bias, for those that do not
compute it with the others.

A projection has one of two shapes. In (B, T, (N + 2K) H) the queries, the keys and the values stand
one after another. In (B, T, N/K + 2, K, H) it is **by parts**, of K heads each, so that it can be
sharded along K. With four queries a key head (N = 4K) the heads of a token are::

    usual       q0 q1 q2 q3 | q4 q5 q6 q7 | k0 k1 | v0 v1        queries of a key head together
    by parts    q0 q4 | q1 q5 | q2 q6 | q3 q7 | k0 k1 | v0 v1    the first query of each, ...
    a shard     q0    | q1    | q2    | q3    | k0    | v0       of the first key head

Where N = K both are the same in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


def is_by_parts(qkv: Any) -> bool:
    """Whether a projection is (B, T, N/K + 2, K, H)."""
    return len(qkv.shape) == 5


def split(qkv: Array, heads: int, kv_heads: int) -> tuple[Array, Array, Array]:
    """The queries (B, T, N, H), keys and values (B, T, K, H) of a projection.

    One by parts may be a shard, of fewer heads than it says here.
    """
    if is_by_parts(qkv):
        B, T, parts, K, H = qkv.shape
        queries = qkv[:, :, :-2].swapaxes(2, 3)
        return queries.reshape(B, T, (parts - 2) * K, H), qkv[:, :, -2], qkv[:, :, -1]
    B, T, columns = qkv.shape
    H = columns // (heads + 2 * kv_heads)
    parts = jax.lax.split(qkv, (heads * H, kv_heads * H, kv_heads * H), axis=-1)
    counts = (heads, kv_heads, kv_heads)
    q, k, v = (part.reshape(B, T, n, H) for part, n in zip(parts, counts, strict=True))
    return q, k, v


def join(q: Array, k: Array, v: Array, *, by_parts: bool) -> Array:
    """The projection of queries, keys and values."""
    if not by_parts:
        return jnp.concatenate([rows(q), rows(k), rows(v)], axis=-1)
    B, T, K, H = k.shape
    queries = q.reshape(B, T, K, q.shape[2] // K, H).swapaxes(2, 3)
    return jnp.concatenate([queries, k[:, :, None], v[:, :, None]], axis=2)


def rows(x: Array) -> Array:
    """(B, T, N, H) as (B, T, N*H)."""
    B, T, N, H = x.shape
    return x.reshape(B, T, N * H)


def forward(unpacked: Callable) -> Callable:
    """``flash_attention_packed_forward`` by a ``flash_attention_forward``."""

    def packed(qkv, *rest, heads, kv_heads, **options):
        """Returns ``(out, lse)``; ``out`` is (B, T, N*H)."""
        q, k, v = split(qkv, heads, kv_heads)
        out, lse = unpacked(q, k, v, *rest, **options)
        return rows(out), lse

    return packed


def backward(unpacked: Callable) -> Callable:
    """``flash_attention_packed_backward`` by a ``flash_attention_backward``."""

    def packed(qkv, out, lse, dout, *rest, heads, kv_heads, **options):
        """Returns ``dqkv``, in a tuple with more gradients if there are any."""
        q, k, v = split(qkv, heads, kv_heads)
        out, dout = out.reshape(q.shape), dout.reshape(q.shape)
        dq, dk, dv, *more = unpacked(q, k, v, out, lse, dout, *rest, **options)
        dqkv = join(dq, dk, dv, by_parts=is_by_parts(qkv))
        return (dqkv, *more) if more else dqkv

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
        *_, K, H = dk.shape
        # A vector added to all keys changes no probability, and the probabilities of a query add up
        # to one. So two sums are known without the roundings of those gradients.
        dv = dout.reshape(*dout.shape[:2], K, dq.shape[2] // K, H)
        wide = jnp.promote_types(dqkv.dtype, jnp.float32)
        of_queries = dq.sum(axis=(0, 1), keepdims=True, dtype=wide)
        of_values = dv.sum(axis=(0, 1, 3), dtype=wide)[None, None]
        of_keys = jnp.zeros_like(of_values)
        dbias = join(of_queries, of_keys, of_values, by_parts=is_by_parts(qkv))
        return dqkv, dbias[0, 0].astype(dqkv.dtype)

    return summed


def unsupported(unpacked: Callable) -> Callable:
    """``flash_attention_packed_unsupported`` by a ``flash_attention_unsupported``.

    Likewise that of its backward: theirs are the arrays behind the projection.
    """

    def packed(qkv, *rest, heads, kv_heads, **options) -> str | None:
        """Why the kernels cannot serve a call; None if they can."""
        q, k, v = jax.eval_shape(lambda qkv: split(qkv, heads, kv_heads), qkv)
        return unpacked(q, k, v, *rest, **options)

    return packed


def unsupported_with_bias(packed: Callable) -> Callable:
    """``self_attention_backward_unsupported`` by that of ``flash_attention_packed_backward``."""

    def summed(qkv, out, lse, dout, delta, row_sums, *rest, **options) -> str | None:
        """Why the kernels cannot serve a call; None if they can."""
        del delta, row_sums
        return packed(qkv, out, lse, dout, *rest, **options)

    return summed
