"""Blocks of flash attention in Pallas: which are visited, and how they are loaded and stored.

A ref is all of one batch entry: rows are queries or keys, columns those of all heads.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.ops.window import sides

MIN_BLOCK = 16
LOG2E = math.log2(math.e)
LN2 = math.log(2)


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
HALF_TILES = {
    64: Tiles(Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2)),
    128: Tiles(Tile(128, 64, 8, 3), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2)),
    256: Tiles(Tile(64, 64, 8, 2), Tile(32, 64, 8, 2), Tile(64, 32, 8, 2)),
}
# Float32 dots run on CUDA cores, with their operands in registers too.
FLOAT_TILES = {
    64: Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 64, 8, 1)),
    128: Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)),
    256: Tiles(Tile(32, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is known of a call when it is traced.

    Query t stands at the position ``t + S - T`` among the keys, and sees those from ``back`` before
    it to ``ahead`` after it; None where nothing ends them but the ends of the keys.
    """

    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int
    scale: float
    softcap: float | None
    back: int | None
    ahead: int | None
    interpret: bool

    @classmethod
    def of(cls, q, k, v, causal, scale, window, softcap, interpret) -> Problem:
        """The problem of a call."""
        (T, N, H), (S, K, Hv) = q.shape[1:], v.shape[1:]
        back, ahead = sides(causal, window)
        if back is not None and back >= S - 1:  # the last query sees the first key
            back = None
        if ahead is not None and ahead >= T - 1:  # the first query sees the last key
            ahead = None
        return cls(T, S, N, K, H, Hv, scale, softcap, back, ahead, interpret)

    @property
    def groups(self) -> int:
        """Query heads for each key head."""
        return self.N // self.K

    def tiles(self, dtype) -> Tiles:
        """The tiles of the three kernels."""
        table = FLOAT_TILES if dtype == jnp.float32 else HALF_TILES
        return table[max(64, block_width(self.H), block_width(self.Hv))]

    def fit(self, tile: Tile) -> Tile:
        """The tile, no longer than the sequences ask for."""
        return dataclasses.replace(
            tile,
            queries=min(tile.queries, max(MIN_BLOCK, pl.next_power_of_2(self.T))),
            keys=min(tile.keys, max(MIN_BLOCK, pl.next_power_of_2(self.S))),
        )

    def unit(self) -> float:
        """What makes the exponent of a power of two out of :meth:`scores`; above zero."""
        if self.softcap is not None:
            return self.softcap * LOG2E
        return self.scale * LOG2E if self.scale > 0 else 1.0

    def scores(self, dots: Array) -> Array:
        """The scores over ``unit``: of a positive scale, the dots as they are.

        The exponent is then a multiplication and a subtraction of each, which is one instruction.
        """
        if self.softcap is not None:
            return jnp.tanh(dots * (self.scale / self.softcap))
        return dots if self.scale > 0 else dots * (self.scale * LOG2E)

    def biased(self, scores: Array, bias: Array | None) -> tuple[Array, float]:
        """The scores with a bias, and what makes the exponent out of these."""
        if bias is None:
            return scores, self.unit()
        return scores * self.unit() + bias * LOG2E, 1.0

    def weights(self, scores: Array, bias: Array | None, lse: Array) -> Array:
        """The softmax of scores, by the logarithm of its denominator to the base two."""
        scores, unit = self.biased(scores, bias)
        weights = self.exp2(scores * unit - lse)
        if bias is None:
            return weights
        return jnp.where(scores == -jnp.inf, 0.0, weights)  # of no key at all: exp2(-inf + inf)

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


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The blocks to visit: at an edge, start to inner_start; whole ones; at an edge, up to stop."""

    start: Any
    inner_start: Any
    inner_stop: Any
    stop: Any
    edge_before: bool  # False: there is no such block, whatever the program
    edge_after: bool


def visible_keys(block, segments, problem: Problem, tile: Tile) -> Bounds:
    """The blocks of keys that a block of queries sees."""
    first = block * tile.queries + (problem.S - problem.T)
    last = first + tile.queries - 1
    bounds = reach(first, last, problem.back, problem.ahead, problem.S, tile.keys)
    return within_segments(bounds, segments, block)


def seeing_queries(block, segments, problem: Problem, tile: Tile) -> Bounds:
    """The blocks of queries that see a block of keys."""
    first = block * tile.keys - (problem.S - problem.T)
    last = first + tile.keys - 1
    bounds = reach(first, last, problem.ahead, problem.back, problem.T, tile.queries)
    return within_segments(bounds, segments, block)


def reach(first, last, back: int | None, ahead: int | None, length: int, size: int) -> Bounds:
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
    return Bounds(start, inner_start, inner_stop, stop, back is not None, edge_after)


def within_segments(bounds: Bounds, segments, block) -> Bounds:
    """Leaves out the blocks before the first and after the last that shares a segment."""
    if segments is None:
        return bounds
    start = jnp.maximum(bounds.start, plgpu.load(segments[2].at[block]))
    stop = jnp.minimum(bounds.stop, plgpu.load(segments[3].at[block]))
    return dataclasses.replace(bounds, start=start, stop=stop)


def walk(visit, bounds: Bounds, size: int, length: int, carry, loop=lax.fori_loop):
    """Calls ``visit(rows, carry, edge)`` for each block of rows within the bounds, in order."""

    def over(start, stop, edge, carry):
        def visit_block(i, carry):
            return visit(Rows(i * size, size, length, edge), carry, edge)

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


def segments_of_queries(segment_ids, tile: Tile):
    """The segments of queries and keys, and the range of blocks of keys for each of queries."""
    if segment_ids is None:
        return None
    of_query, of_key = segment_ids
    return of_query, of_key, *shared_range(of_query, tile.queries, of_key, tile.keys)


def segments_of_keys(segment_ids, tile: Tile):
    """The segments of keys and queries, and the range of blocks of queries for each of keys."""
    if segment_ids is None:
        return None
    of_query, of_key = segment_ids
    return of_key, of_query, *shared_range(of_key, tile.keys, of_query, tile.queries)


def shared_range(mine: Array, size: int, theirs: Array, their_size: int) -> tuple[Array, Array]:
    """For each of my blocks the first of theirs that may share a segment, and the end of them.

    Blocks whose segments lie apart as intervals share none. That finds all of them where segments
    are numbered in order, as packed documents are; otherwise some are visited in vain.
    """
    (low, high), (their_low, their_high) = extrema(mine, size), extrema(theirs, their_size)
    meet = low[:, :, None] <= their_high[:, None, :]
    meet &= their_low[:, None, :] <= high[:, :, None]
    number = jnp.arange(their_low.shape[1], dtype=jnp.int32)
    start = jnp.min(jnp.where(meet, number, len(number)), axis=2)
    return start, jnp.max(jnp.where(meet, number + 1, 0), axis=2)


def extrema(segments: Array, size: int) -> tuple[Array, Array]:
    """The smallest and the largest segment of each block."""
    B, length = segments.shape
    padded = jnp.pad(segments, ((0, 0), (0, -length % size)), mode="edge")
    blocks = padded.reshape(B, -1, size)
    return blocks.min(axis=2), blocks.max(axis=2)


# Loads and stores of a block of rows.


@dataclasses.dataclass(frozen=True)
class Rows:
    """Some rows of a sequence: ``size`` from ``start`` on."""

    start: Any
    size: int
    length: int  # of the sequence
    ragged: bool  # whether some of them may lie past its end
    base: Any = 0  # the first row of the sequence in an array of several

    def positions(self) -> Array:
        """The position of each row in its sequence."""
        return self.start + jnp.arange(self.size, dtype=jnp.int32)

    def mask(self) -> Array | None:
        """Whether each row is in the sequence; None where all are."""
        return self.positions() < self.length if self.ragged else None


def block_width(H: int) -> int:
    """The columns of a block of heads that are ``H`` wide."""
    return max(MIN_BLOCK, pl.next_power_of_2(H))


def head_block(ref, rows: Rows, head, H: int):
    """The ref of one head's rows, and the mask of what lies in the array or None."""
    width = block_width(H)
    mask = rows.mask()
    if mask is not None:
        mask = jnp.broadcast_to(mask[:, None], (rows.size, width))
    if width != H:
        columns = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32) < H, (rows.size, width))
        mask = columns if mask is None else mask & columns
    return ref.at[pl.ds(rows.base + rows.start, rows.size), pl.ds(head * H, width)], mask


def load_head(ref, rows: Rows, head, H: int) -> Array:
    """The rows of one head of width ``H``; zeros past their end."""
    block, mask = head_block(ref, rows, head, H)
    return load(block, mask)


def store_head(ref, rows: Rows, head, H: int, x: Array) -> None:
    """Writes the rows of one head."""
    block, mask = head_block(ref, rows, head, H)
    plgpu.store(block, x.astype(ref.dtype), mask=mask)


def load_statistic(ref, rows: Rows, head) -> Array:
    """One number for each row, such as lse."""
    return load(ref.at[pl.ds(head * rows.length + rows.start, rows.size)], rows.mask())


def store_statistic(ref, rows: Rows, head, x: Array) -> None:
    """Writes one number for each row."""
    block = ref.at[pl.ds(head * rows.length + rows.start, rows.size)]
    plgpu.store(block, x, mask=rows.mask())


def load_segments(segments, which: int, rows: Rows) -> Array | None:
    """The segment of each row; None without segments."""
    if segments is None:
        return None
    return load(segments[which].at[pl.ds(rows.base + rows.start, rows.size)], rows.mask())


def bias_block(ref, queries: Rows, keys: Rows, head):
    """The ref of a block of the bias, which all heads may share, and the mask of what it has."""
    of_query, of_key = queries.mask(), keys.mask()
    mask = None
    if of_query is not None or of_key is not None:
        every = jnp.ones((queries.size, keys.size), bool)
        mask = every if of_query is None else every & of_query[:, None]
        mask = mask if of_key is None else mask & of_key[None, :]
    rows = pl.ds(queries.start, queries.size), pl.ds(keys.start, keys.size)
    return ref.at[lax.rem(head, jnp.int32(ref.shape[0])), *rows], mask


def load_bias(ref, queries: Rows, keys: Rows, head) -> Array | None:
    """A block of the bias in float32, (queries, keys); None without one."""
    if ref is None:
        return None
    return load(*bias_block(ref, queries, keys, head)).astype(jnp.float32)


def store_bias(ref, queries: Rows, keys: Rows, head, x: Array) -> None:
    """Writes a block of the bias's gradient."""
    block, mask = bias_block(ref, queries, keys, head)
    plgpu.store(block, x.astype(ref.dtype), mask=mask)


def load(block, mask: Array | None) -> Array:
    """A block; zeros where the mask is False."""
    return plgpu.load(block) if mask is None else plgpu.load(block, mask=mask, other=0)


def column(x: Array | None) -> Array | None:
    """A vector as a column."""
    return None if x is None else x[:, None]


def row(x: Array | None) -> Array | None:
    """A vector as a row."""
    return None if x is None else x[None, :]


# The calls.
