r"""Pallas-Triton kernels of flash attention, forward and backward.

A program takes a block of queries and walks over blocks of the keys that they see, or the other
way round, so that no more than one block of scores exists at a time. The forward keeps the largest
score of each query so far, the sum of the exponentials and that of the values, and scales both sums
down whenever the largest grows. The backward computes the scores again from ``lse``: one kernel
takes blocks of keys, for dk and dv, and adds up the query heads of the group one after the other;
one takes blocks of queries, for dq. There are no atomics: the gradients repeat bit for bit.

Blocks that the mask hides are not visited, and those that it lets through as a whole, between the
ones at the edges, have no mask computed. Exponentials are powers of two, with log2(e) in the factor
that holds the scale.

Heads stay where they are: q, (B, T, N, H), is read as (B, T, N*H), and a block is some of the rows
and the columns of one head. Triton's blocks have powers of two on a side, and its products ask for
16 at least: what lies past the end of the head or of the sequence is masked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.ops.attention import packing
from jaxllm.ops.pallas_call import pallas_call
from jaxllm.ops.rotary.pallas import rope_backward, rope_forward, rope_unsupported

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_WIDTH = 256
_MIN_BLOCK = 16
_LOG2E = math.log2(math.e)
_LN2 = math.log(2)
# Below every score. The largest of no scores, but a number: the difference of two is none.
_LOWEST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True)
class Tile:
    """The block of scores that a program computes at a time, and how Triton compiles it."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of the three kernels."""

    forward: Tile
    backward_keys: Tile
    backward_queries: Tile


# By the head width, rounded up. Sums of the size of a block of queries or keys live in registers,
# one in the forward and the backward over queries, two in the backward over keys: these are tiles
# that ptxas compiles for sm_90a with few spills or none. They have not been timed yet.
_HALF_TILES = {
    64: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2)),
    256: Tiles(Tile(64, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
}
# Products of float32 run on the plain cores, which have their factors in registers too.
_FLOAT_TILES = {
    64: Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 64, 8, 1)),
    128: Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    256: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}


def flash_attention_unsupported(q, k, v, *rest, **_) -> str | None:
    """Why the forward kernel cannot serve a call; None if it can."""
    return _unsupported(q, k, rest[-1])


def flash_attention_backward_unsupported(q, k, v, out, lse, dout, *rest, **_) -> str | None:
    """Why the backward kernels cannot serve a call; None if they can."""
    return _unsupported(q, k, rest[-1])


def _unsupported(q, k, rope_table) -> str | None:
    """Both directions take the same."""
    if q.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"q has dtype {q.dtype}; the kernel takes {names}"
    if q.shape[-1] > _MAX_WIDTH:
        return f"heads are {q.shape[-1]} wide; the kernel takes at most {_MAX_WIDTH}"
    if rope_table is not None:
        return rope_unsupported(q, k, *rope_table)
    return None


def flash_attention_forward(
    q, k, v, segment_ids, rope_table=None,
    *, causal, scale, window, softcap, interleaved=False, interpret=False, tiles=None,
):  # fmt: skip
    """Returns ``(out, lse)``; ``tiles`` stands in for those of the table."""
    if rope_table is not None:
        q, k = rope_forward(q, k, *rope_table, interleaved=interleaved, interpret=interpret)
    B, T, N, _ = q.shape
    if q.size == 0 or k.size == 0:
        return jnp.zeros_like(q), jnp.full((B, N, T), -jnp.inf, jnp.float32)
    problem = _Problem.of(q, k, causal, scale, window, softcap, interpret)
    tile = problem.fit((tiles or problem.tiles(q.dtype)).forward)
    out, lse = _call(
        functools.partial(_forward_kernel, problem=problem, tile=tile),
        grid=(pl.cdiv(T, tile.queries), N, B),
        tile=tile,
        inputs=(_flat(q), _flat(k), _flat(v), _segments_of_queries(segment_ids, tile)),
        outputs=(_like(_flat(q)), jax.ShapeDtypeStruct((B, N * T), jnp.float32)),
        interpret=interpret,
    )
    return out.reshape(q.shape), lse.reshape(B, N, T)


def flash_attention_backward(
    q, k, v, out, lse, dout, segment_ids, rope_table=None,
    *, causal, scale, window, softcap, interleaved=False, interpret=False, tiles=None,
):  # fmt: skip
    """Returns ``(dq, dk, dv)``; ``tiles`` stands in for those of the table."""
    if rope_table is not None:
        q, k = rope_forward(q, k, *rope_table, interleaved=interleaved, interpret=interpret)
    B, T, N, _ = q.shape
    S, K = k.shape[1:3]
    if q.size == 0 or k.size == 0:
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    problem = _Problem.of(q, k, causal, scale, window, softcap, interpret)
    tiles = tiles or problem.tiles(q.dtype)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    arrays = (
        _flat(q), _flat(k), _flat(v), _flat(dout), lse.reshape(B, N * T), delta.reshape(B, N * T),
    )  # fmt: skip
    tile = problem.fit(tiles.backward_keys)
    dk, dv = _call(
        functools.partial(_backward_keys_kernel, problem=problem, tile=tile),
        grid=(pl.cdiv(S, tile.keys), K, B),
        tile=tile,
        inputs=(*arrays, _segments_of_keys(segment_ids, tile)),
        outputs=(_like(_flat(k)), _like(_flat(v))),
        interpret=interpret,
    )
    tile = problem.fit(tiles.backward_queries)
    (dq,) = _call(
        functools.partial(_backward_queries_kernel, problem=problem, tile=tile),
        grid=(pl.cdiv(T, tile.queries), N, B),
        tile=tile,
        inputs=(*arrays, _segments_of_queries(segment_ids, tile)),
        outputs=(_like(_flat(q)),),
        interpret=interpret,
    )
    dq, dk, dv = dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)
    if rope_table is not None:
        dq, dk = rope_backward(dq, dk, *rope_table, interleaved=interleaved, interpret=interpret)
    return dq, dk, dv


flash_attention_packed_unsupported = packing.unsupported(flash_attention_unsupported)
flash_attention_packed_backward_unsupported = packing.unsupported(
    flash_attention_backward_unsupported
)
flash_attention_packed_forward = packing.forward(flash_attention_forward)
flash_attention_packed_backward = packing.backward(flash_attention_backward)
self_attention_backward_unsupported = flash_attention_packed_backward_unsupported
self_attention_backward = packing.backward_with_bias(flash_attention_packed_backward)
pre_norm_self_attention_backward_unsupported = flash_attention_packed_backward_unsupported
pre_norm_self_attention_backward = packing.backward_through_layer(self_attention_backward)


@dataclasses.dataclass(frozen=True)
class _Problem:
    """What is known of a call when it is traced.

    Query t stands at the position ``t + S - T`` among the keys, and sees those from ``back`` before
    it to ``ahead`` after it; None where nothing ends them but the ends of the keys.
    """

    T: int
    S: int
    N: int
    K: int
    H: int
    scale: float
    softcap: float | None
    back: int | None
    ahead: int | None
    interpret: bool

    @classmethod
    def of(cls, q, k, causal, scale, window, softcap, interpret) -> _Problem:
        (T, N, H), (S, K) = q.shape[1:], k.shape[1:3]
        back = None if window is None else window - 1
        ahead = 0 if causal else back
        if back is not None and back >= S - 1:  # the last query sees the first key
            back = None
        if ahead is not None and ahead >= T - 1:  # the first query sees the last key
            ahead = None
        return cls(T, S, N, K, H, scale, softcap, back, ahead, interpret)

    @property
    def groups(self) -> int:
        return self.N // self.K

    @property
    def width(self) -> int:
        """The head width of a block."""
        return max(_MIN_BLOCK, pl.next_power_of_2(self.H))

    def tiles(self, dtype) -> Tiles:
        table = _FLOAT_TILES if dtype == jnp.float32 else _HALF_TILES
        return table[max(64, self.width)]

    def fit(self, tile: Tile) -> Tile:
        """The tile, no longer than the sequences ask for."""
        return dataclasses.replace(
            tile,
            queries=min(tile.queries, max(_MIN_BLOCK, pl.next_power_of_2(self.T))),
            keys=min(tile.keys, max(_MIN_BLOCK, pl.next_power_of_2(self.S))),
        )

    def unit(self) -> float:
        """What makes the exponent of a power of two out of :meth:`scores`; above zero."""
        if self.softcap is not None:
            return self.softcap * _LOG2E
        return self.scale * _LOG2E if self.scale > 0 else 1.0

    def scores(self, products: Array) -> Array:
        """The scores over ``unit``: of the usual scale, the products as they are.

        The exponent is then a multiplication and a subtraction of each, which is one instruction.
        """
        if self.softcap is not None:
            return jnp.tanh(products * (self.scale / self.softcap))
        return products if self.scale > 0 else products * (self.scale * _LOG2E)

    def exp2(self, x: Array) -> Array:
        """The power of two, in one instruction; below the least normal number it is zero."""
        if self.interpret:
            return jnp.exp2(x)
        # XLA compiles jnp.exp2 to keep subnormal numbers, at three instructions more.
        (y,) = plgpu.elementwise_inline_asm(
            "ex2.approx.ftz.f32 $0, $1;",
            args=[x],
            constraints="=f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        )
        return y


# The kernels. A ref is all of one batch entry: rows are queries or keys, columns those of all
# heads; lse and delta hold the queries of one head after those of another.


def _forward_kernel(q_ref, k_ref, v_ref, segments, out_ref, lse_ref, *, problem, tile):
    # Under a causal mask the last queries see the most keys, so they come first.
    block = pl.num_programs(0) - 1 - pl.program_id(0)
    head = pl.program_id(1)
    queries = _Rows(block * tile.queries, tile.queries, problem.T, problem.T % tile.queries != 0)
    key_head = lax.div(head, jnp.int32(problem.groups))
    q = _load_head(q_ref, queries, head, problem)
    of_query = _load_segments(segments, 0, queries)
    unit = problem.unit()

    def visit(keys, carry, edge):
        largest, total, values = carry
        k = _load_head(k_ref, keys, key_head, problem)
        scores = problem.scores(_dot(q, k, trans_b=True))
        mask = _pairs(
            queries.positions()[:, None], keys.positions()[None, :],
            _column(of_query), _row(_load_segments(segments, 1, keys)), problem, edge,
        )  # fmt: skip
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        grown = jnp.maximum(largest, jnp.max(scores, axis=1) * unit)
        weights = problem.exp2(scores * unit - grown[:, None])
        shrink = problem.exp2(largest - grown)
        v = _load_head(v_ref, keys, key_head, problem)
        total = total * shrink + jnp.sum(weights, axis=1)
        values = values * shrink[:, None] + _dot(weights.astype(v.dtype), v)
        return grown, total, values

    carry = (
        jnp.full(tile.queries, _LOWEST, jnp.float32),
        jnp.zeros(tile.queries, jnp.float32),
        jnp.zeros((tile.queries, problem.width), jnp.float32),
    )
    bounds = _visible_keys(block, segments, problem, tile)
    largest, total, values = _walk(visit, bounds, tile.keys, problem.S, carry)
    # A query without keys has the sum 0: zeros, and the logarithm -inf.
    out = values / jnp.where(total == 0, 1.0, total)[:, None]
    _store_head(out_ref, queries, head, problem, out)
    _store_statistic(lse_ref, queries, head, largest * _LN2 + jnp.log(total))


def _backward_keys_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, segments, dk_ref, dv_ref, *, problem, tile
):
    block = pl.program_id(0)
    key_head = pl.program_id(1)
    keys = _Rows(block * tile.keys, tile.keys, problem.S, problem.S % tile.keys != 0)
    k = _load_head(k_ref, keys, key_head, problem)
    v = _load_head(v_ref, keys, key_head, problem)
    of_key = _load_segments(segments, 0, keys)
    unit = problem.unit()
    bounds = _seeing_queries(block, segments, problem, tile)

    def visit_head(member, carry):
        head = key_head * problem.groups + member

        # Rows past the last query are zeros, dout's too: whatever their weights, they add nothing.
        # Rows past the last key gather nonsense, and are not stored.
        def visit(queries, carry, edge):
            dk, dv = carry
            q = _load_head(q_ref, queries, head, problem)
            lse = _load_statistic(lse_ref, queries, head) * _LOG2E
            scores = problem.scores(_dot(k, q, trans_b=True))
            weights = problem.exp2(scores * unit - lse[None, :])
            mask = _pairs(
                queries.positions()[None, :], keys.positions()[:, None],
                _row(_load_segments(segments, 1, queries)), _column(of_key), problem, edge,
            )  # fmt: skip
            if mask is not None:  # a query without keys: exp2(inf)
                weights = jnp.where(mask, weights, 0.0)
            dout = _load_head(dout_ref, queries, head, problem)
            dv += _dot(weights.astype(dout.dtype), dout)
            dweights = _dot(v, dout, trans_b=True)
            dscores = weights * (dweights - _load_statistic(delta_ref, queries, head)[None, :])
            if problem.softcap is not None:
                dscores *= 1.0 - scores * scores
            dk += _dot(dscores.astype(q.dtype), q)
            return dk, dv

        return _walk(visit, bounds, tile.queries, problem.T, carry)

    zeros = jnp.zeros((tile.keys, problem.width), jnp.float32)
    if problem.groups == 1:
        dk, dv = visit_head(0, (zeros, zeros))
    else:
        dk, dv = lax.fori_loop(0, problem.groups, visit_head, (zeros, zeros))
    _store_head(dk_ref, keys, key_head, problem, dk * problem.scale)
    _store_head(dv_ref, keys, key_head, problem, dv)


def _backward_queries_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, segments, dq_ref, *, problem, tile
):
    block = pl.num_programs(0) - 1 - pl.program_id(0)
    head = pl.program_id(1)
    queries = _Rows(block * tile.queries, tile.queries, problem.T, problem.T % tile.queries != 0)
    key_head = lax.div(head, jnp.int32(problem.groups))
    q = _load_head(q_ref, queries, head, problem)
    dout = _load_head(dout_ref, queries, head, problem)
    lse = _load_statistic(lse_ref, queries, head) * _LOG2E
    delta = _load_statistic(delta_ref, queries, head)
    of_query = _load_segments(segments, 0, queries)
    unit = problem.unit()

    def visit(keys, dq, edge):
        k = _load_head(k_ref, keys, key_head, problem)
        v = _load_head(v_ref, keys, key_head, problem)
        scores = problem.scores(_dot(q, k, trans_b=True))
        weights = problem.exp2(scores * unit - lse[:, None])
        mask = _pairs(
            queries.positions()[:, None], keys.positions()[None, :],
            _column(of_query), _row(_load_segments(segments, 1, keys)), problem, edge,
        )  # fmt: skip
        if mask is not None:
            weights = jnp.where(mask, weights, 0.0)
        dscores = weights * (_dot(dout, v, trans_b=True) - delta[:, None])
        if problem.softcap is not None:
            dscores *= 1.0 - scores * scores
        return dq + _dot(dscores.astype(k.dtype), k)

    bounds = _visible_keys(block, segments, problem, tile)
    zeros = jnp.zeros((tile.queries, problem.width), jnp.float32)
    dq = _walk(visit, bounds, tile.keys, problem.S, zeros)
    _store_head(dq_ref, queries, head, problem, dq * problem.scale)


def _dot(a: Array, b: Array, *, trans_b: bool = False) -> Array:
    """A product in float32. Of float32 factors too: Triton would take 10 bits of each otherwise."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision)


# Which pairs of queries and keys there are.


def _pairs(t, s, of_query, of_key, problem: _Problem, edge: bool) -> Array | None:
    """Which pairs of a block the mask lets through; None for all.

    Args:
        t: The queries, (queries, 1) or (1, queries).
        s: The keys along the other axis.
        of_query: Their segments, in the shape of ``t``, or None.
        of_key: The keys', in the shape of ``s``, or None.
        problem: The call.
        edge: Whether some pairs of the block may be hidden by their positions.
    """
    mask = None
    if edge:
        mask = s < problem.S
        position = t + (problem.S - problem.T)
        if problem.ahead is not None:
            mask &= s <= position + problem.ahead
        if problem.back is not None:
            mask &= s >= position - problem.back
    if of_query is not None:
        same = of_query == of_key
        mask = same if mask is None else mask & same
    return mask


@dataclasses.dataclass(frozen=True)
class _Bounds:
    """The blocks to visit: at an edge, start to inner_start; whole ones; at an edge, up to stop."""

    start: Any
    inner_start: Any
    inner_stop: Any
    stop: Any
    edge_before: bool  # False: there is no such block, whatever the program
    edge_after: bool


def _visible_keys(block, segments, problem: _Problem, tile: Tile) -> _Bounds:
    """The blocks of keys that a block of queries sees."""
    first = block * tile.queries + (problem.S - problem.T)
    last = first + tile.queries - 1
    bounds = _reach(first, last, problem.back, problem.ahead, problem.S, tile.keys)
    return _within_segments(bounds, segments, block)


def _seeing_queries(block, segments, problem: _Problem, tile: Tile) -> _Bounds:
    """The blocks of queries that see a block of keys."""
    first = block * tile.keys - (problem.S - problem.T)
    last = first + tile.keys - 1
    bounds = _reach(first, last, problem.ahead, problem.back, problem.T, tile.queries)
    return _within_segments(bounds, segments, block)


def _reach(first, last, back: int | None, ahead: int | None, length: int, size: int) -> _Bounds:
    """The blocks of ``size`` of ``length`` rows within reach of some row from first to last.

    A row at x reaches x - back to x + ahead. Whole blocks are within reach of all of them.
    """

    def clip(x):
        return jnp.clip(x, 0, length)  # so that divisions round down

    start, inner_start = 0, 0
    stop, inner_stop = pl.cdiv(length, size), length // size
    if back is not None:
        start = lax.div(clip(first - back), jnp.int32(size))
        inner_start = lax.div(clip(last - back) + (size - 1), jnp.int32(size))
    if ahead is not None:
        stop = lax.div(clip(last + ahead + 1) + (size - 1), jnp.int32(size))
        inner_stop = lax.div(clip(first + ahead + 1), jnp.int32(size))
    edge_after = ahead is not None or length % size != 0
    return _Bounds(start, inner_start, inner_stop, stop, back is not None, edge_after)


def _within_segments(bounds: _Bounds, segments, block) -> _Bounds:
    """Leaves out the blocks before the first and after the last that shares a segment."""
    if segments is None:
        return bounds
    start = jnp.maximum(bounds.start, plgpu.load(segments[2].at[block]))
    stop = jnp.minimum(bounds.stop, plgpu.load(segments[3].at[block]))
    return dataclasses.replace(bounds, start=start, stop=stop)


def _walk(visit, bounds: _Bounds, size: int, length: int, carry, loop=lax.fori_loop):
    """Calls ``visit(rows, carry, edge)`` for each block of rows within the bounds, in order."""

    def over(start, stop, edge, carry):
        def visit_block(i, carry):
            return visit(_Rows(i * size, size, length, edge), carry, edge)

        return loop(start, stop, visit_block, carry)

    # The edges of a few blocks may meet, and leave none whole.
    start, stop = bounds.start, bounds.stop
    if bounds.edge_before or not isinstance(start, int):
        inner_start = jnp.minimum(jnp.maximum(bounds.inner_start, start), stop)
    else:
        inner_start = start
    if bounds.edge_after or not isinstance(stop, int):
        inner_stop = jnp.maximum(jnp.minimum(bounds.inner_stop, stop), inner_start)
    else:
        inner_stop = stop
    if bounds.edge_before:
        carry = over(start, inner_start, True, carry)
    carry = over(inner_start, inner_stop, False, carry)
    if bounds.edge_after:
        carry = over(inner_stop, stop, True, carry)
    return carry


def _segments_of_queries(segment_ids, tile: Tile):
    """The segments of queries and keys, and the range of blocks of keys for each of queries."""
    if segment_ids is None:
        return None
    of_query, of_key = segment_ids
    return of_query, of_key, *_shared_range(of_query, tile.queries, of_key, tile.keys)


def _segments_of_keys(segment_ids, tile: Tile):
    """The segments of keys and queries, and the range of blocks of queries for each of keys."""
    if segment_ids is None:
        return None
    of_query, of_key = segment_ids
    return of_key, of_query, *_shared_range(of_key, tile.keys, of_query, tile.queries)


def _shared_range(mine: Array, size: int, theirs: Array, their_size: int) -> tuple[Array, Array]:
    """For each of my blocks the first of theirs that may share a segment, and the end of them.

    Blocks whose segments lie apart as intervals share none. That finds all of them where segments
    are numbered in order, as packed documents are; elsewhere some are visited in vain.
    """
    (low, high), (their_low, their_high) = _extrema(mine, size), _extrema(theirs, their_size)
    meet = low[:, :, None] <= their_high[:, None, :]
    meet &= their_low[:, None, :] <= high[:, :, None]
    number = jnp.arange(their_low.shape[1], dtype=jnp.int32)
    start = jnp.min(jnp.where(meet, number, len(number)), axis=2)
    return start, jnp.max(jnp.where(meet, number + 1, 0), axis=2)


def _extrema(segments: Array, size: int) -> tuple[Array, Array]:
    """The smallest and the largest segment of each block."""
    B, length = segments.shape
    padded = jnp.pad(segments, ((0, 0), (0, -length % size)), mode="edge")
    blocks = padded.reshape(B, -1, size)
    return blocks.min(axis=2), blocks.max(axis=2)


# Loads and stores of a block of rows.


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Some rows of a sequence: ``size`` from ``start`` on."""

    start: Any
    size: int
    length: int  # of the sequence
    ragged: bool  # whether some of them may lie past its end

    def positions(self) -> Array:
        return self.start + jnp.arange(self.size, dtype=jnp.int32)

    def mask(self) -> Array | None:
        return self.positions() < self.length if self.ragged else None


def _head_block(ref, rows: _Rows, head, problem: _Problem):
    """The ref of one head's rows, and the mask of what lies in the array or None."""
    H, width = problem.H, problem.width
    mask = rows.mask()
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, None], (rows.size, width))
    if width != H:
        columns = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32) < H, (rows.size, width))
        mask = columns if mask is None else mask & columns
    return ref.at[pl.ds(rows.start, rows.size), pl.ds(head * H, width)], mask


def _load_head(ref, rows: _Rows, head, problem: _Problem) -> Array:
    block, mask = _head_block(ref, rows, head, problem)
    return _load(block, mask)


def _store_head(ref, rows: _Rows, head, problem: _Problem, x: Array) -> None:
    block, mask = _head_block(ref, rows, head, problem)
    plgpu.store(block, x.astype(ref.dtype), mask=mask)


def _load_statistic(ref, rows: _Rows, head) -> Array:
    return _load(ref.at[pl.ds(head * rows.length + rows.start, rows.size)], rows.mask())


def _store_statistic(ref, rows: _Rows, head, x: Array) -> None:
    block = ref.at[pl.ds(head * rows.length + rows.start, rows.size)]
    plgpu.store(block, x, mask=rows.mask())


def _load_segments(segments, which: int, rows: _Rows) -> Array | None:
    if segments is None:
        return None
    return _load(segments[which].at[pl.ds(rows.start, rows.size)], rows.mask())


def _load(block, mask: Array | None) -> Array:
    return plgpu.load(block) if mask is None else plgpu.load(block, mask=mask, other=0)


def _column(x: Array | None) -> Array | None:
    return None if x is None else x[:, None]


def _row(x: Array | None) -> Array | None:
    return None if x is None else x[None, :]


# The calls.


def _flat(x: Array) -> Array:
    """(B, T, N, H) as (B, T, N*H)."""
    return x.reshape(*x.shape[:2], -1)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(kernel, *, grid, tile: Tile, inputs, outputs, interpret: bool):
    """``pallas_call`` over (blocks, heads, B), each program with all of one batch entry."""

    def spec(x):
        return pl.BlockSpec((None, *x.shape[1:]), lambda _, __, b: (b, *[0] * (x.ndim - 1)))

    return pallas_call(
        kernel,
        grid=grid,
        in_specs=list(jax.tree.map(spec, inputs)),
        out_specs=jax.tree.map(spec, outputs),
        out_shape=outputs,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(*inputs)
