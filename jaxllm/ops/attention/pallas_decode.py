"""Pallas-Triton kernel of ``decode_attention``.

A program reads a part of one key head's cache, for all query heads that share it: a block of keys
at a time, with the running softmax of flash attention. The parts of a sequence are then added up,
each with the weight that its largest score and its total give it.

Triton's dot needs blocks of 16 at least, and powers of two: the queries of a group are
padded, and the columns past the end of a head are masked.

In a cache in pages, the kernel looks up the row of each key. So a block of keys may lie in several
pages, and the order of all sums is that of a cache in one piece. Sinks join the sums at the end.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.ops.pallas_call import pallas_call

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_WIDTH = 256
_MIN_BLOCK = 16
_BLOCKS = 264  # that keep the largest GPUs busy
_MAX_SPLITS = 64
_LOG2E = math.log2(math.e)
# Below every score. The largest of no scores, but a number: the difference of two is none.
_LOWEST = float(jnp.finfo(jnp.float32).min)


def decode_attention_unsupported(q, k_cache, v_cache, lengths, k_scales, v_scales, *_, **__):
    """Why the kernel cannot serve a call; None if it can."""
    if q.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"q has dtype {q.dtype}; the kernel takes {names}"
    if q.shape[-1] > _MAX_WIDTH:
        return f"heads are {q.shape[-1]} wide; the kernel takes at most {_MAX_WIDTH}"
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if scales is not None and scales.dtype != jnp.float32:
            return f"{name} has dtype {scales.dtype}; the kernel takes float32"
    return None


decode_attention_paged_unsupported = decode_attention_unsupported


def decode_attention(
    q, k_cache, v_cache, lengths, k_scales, v_scales, sinks, block_table=None,
    *, scale, window, interpret=False,
):  # fmt: skip
    """Returns ``out``."""
    B, N, H = q.shape
    page, K = k_cache.shape[1:3]
    S = page if block_table is None else page * block_table.shape[1]
    if q.size == 0 or S == 0:
        return jnp.zeros_like(q)
    groups, width = N // K, max(_MIN_BLOCK, pl.next_power_of_2(H))
    heads = max(_MIN_BLOCK, pl.next_power_of_2(groups))
    block = min(128 if width <= 64 else 64, max(_MIN_BLOCK, pl.next_power_of_2(S)))
    visited = pl.cdiv(S if window is None else min(S, window), block)
    splits = max(1, min(_MAX_SPLITS, _BLOCKS // (B * K), visited))
    queries = jnp.pad(
        q.reshape(B, K, groups, H), ((0, 0), (0, 0), (0, heads - groups), (0, width - H))
    )
    kernel = functools.partial(
        _kernel, page=None if block_table is None else page, pages=k_cache.shape[0],
        S=S, H=H, block=block, splits=splits, scale=scale, window=window,
    )  # fmt: skip

    def all_of(*shape):  # of one sequence
        return pl.BlockSpec((None, *shape), lambda b, k, i: (b, *[0] * len(shape)))

    def part_of(*shape):
        return pl.BlockSpec(
            (None, None, None, *shape), lambda b, k, i: (b, k, i, *[0] * len(shape))
        )

    def cache(x):
        """All of a sequence, (S, ...); of pages all of the rows of all."""
        rows = x.reshape(*x.shape[:2], -1)
        if block_table is None:
            return rows, all_of(*rows.shape[1:])
        rows = rows.reshape(-1, rows.shape[-1])
        return rows, pl.BlockSpec(rows.shape, lambda b, k, i: (0, 0))

    table, table_spec = (), ()
    if block_table is not None:
        table, table_spec = (block_table,), (all_of(block_table.shape[1]),)
    given = [x for x in (k_cache, v_cache, k_scales, v_scales) if x is not None]
    caches, cache_specs = zip(*map(cache, given), strict=True)
    sums, largest, total = pallas_call(
        kernel,
        grid=(B, K, splits),
        in_specs=[
            pl.BlockSpec((None, None, heads, width), lambda b, k, i: (b, k, 0, 0)),
            pl.BlockSpec((B,), lambda b, k, i: (0,)),
            *table_spec,
            *cache_specs,
        ],
        out_specs=[part_of(heads, width), part_of(heads), part_of(heads)],
        out_shape=[
            jax.ShapeDtypeStruct((B, K, splits, heads, width), jnp.float32),
            jax.ShapeDtypeStruct((B, K, splits, heads), jnp.float32),
            jax.ShapeDtypeStruct((B, K, splits, heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )(queries, lengths, *table, *caches)
    largest_of_all = largest.max(axis=2, keepdims=True)
    weights = jnp.exp2(largest - largest_of_all)
    total = (total * weights).sum(axis=2)
    if sinks is not None:
        sinks = jnp.pad(sinks.astype(jnp.float32).reshape(K, groups), ((0, 0), (0, heads - groups)))
        total += jnp.exp2(sinks * _LOG2E - largest_of_all[:, :, 0])
    out = (sums * weights[..., None]).sum(axis=2) / jnp.where(total == 0, 1, total)[..., None]
    return out[:, :, :groups, :H].reshape(q.shape).astype(q.dtype)


decode_attention_paged = decode_attention


def _kernel(q_ref, length_ref, *refs, page, pages, S, H, block, splits, scale, window):
    table_ref, refs = (None, refs) if page is None else (refs[0], refs[1:])
    k_ref, v_ref, *scales, sums_ref, largest_ref, total_ref = refs
    head, split = pl.program_id(1), pl.program_id(2)
    q = q_ref[...]
    heads, width = q.shape
    length = jnp.clip(plgpu.load(length_ref.at[pl.program_id(0)]), 0, S)
    begin = jnp.int32(0) if window is None else jnp.maximum(length - window, 0)
    skipped = lax.div(begin, jnp.int32(block))
    blocks = lax.div(length + (block - 1), jnp.int32(block))
    per_split = lax.div(blocks - skipped + (splits - 1), jnp.int32(splits))
    start = skipped + split * per_split
    columns = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32) < H, (block, width))
    # Triton multiplies 16-bit numbers with tensor cores; int8 becomes the dtype of q, exactly.
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def rows_of(first, tokens, seen):
        """The rows of a block of tokens: neighbours, or those that the table says."""
        if table_ref is None or page is None:
            return pl.ds(first, block)
        place = plgpu.load(table_ref.at[lax.div(tokens, jnp.int32(page))], mask=seen, other=0)
        return jnp.clip(place, 0, pages - 1) * page + lax.rem(tokens, jnp.int32(page))

    def load(ref, rows, seen):
        if table_ref is None:
            at = ref.at[rows, pl.ds(head * H, width)]
        else:
            of_head = head * H + jnp.arange(width, dtype=jnp.int32)
            at = ref.at[rows[:, None], of_head[None, :]]
        return plgpu.load(at, mask=columns & seen[:, None], other=0).astype(q.dtype)

    def load_scales(ref, rows, seen):
        at = ref.at[rows, head] if table_ref is None else ref.at[rows, jnp.full(block, head)]
        return plgpu.load(at, mask=seen, other=0)

    def visit(i, carry):
        largest, total, sums = carry
        first = i * block
        tokens = first + jnp.arange(block, dtype=jnp.int32)
        seen = (tokens < length) & (tokens >= begin)
        rows = rows_of(first, tokens, seen)
        k = load(k_ref, rows, seen)
        scores = plgpu.dot(q, k, trans_b=True, precision=precision) * (scale * _LOG2E)
        if scales:
            scores *= load_scales(scales[0], rows, seen)[None, :]
        scores = jnp.where(seen[None, :], scores, -jnp.inf)
        grown = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores - grown[:, None])
        shrink = jnp.exp2(largest - grown)
        total = total * shrink + jnp.sum(weights, axis=1)
        if scales:
            weights *= load_scales(scales[1], rows, seen)[None, :]
        v = load(v_ref, rows, seen)
        sums = sums * shrink[:, None] + plgpu.dot(weights.astype(q.dtype), v, precision=precision)
        return grown, total, sums

    carry = (
        jnp.full(heads, _LOWEST, jnp.float32),
        jnp.zeros(heads, jnp.float32),
        jnp.zeros((heads, width), jnp.float32),
    )
    stop = jnp.minimum(start + per_split, blocks)
    largest, total, sums = lax.fori_loop(jnp.minimum(start, stop), stop, visit, carry)
    sums_ref[...] = sums
    largest_ref[...] = largest
    total_ref[...] = total
