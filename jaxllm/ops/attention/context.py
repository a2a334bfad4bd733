"""Context parallelism: attention of sequences that are sharded along their queries and keys.

Each of c devices has T/c queries and S/c keys and values. It gathers all keys and values, which are
few where several query heads share a key head, and attends to those that its queries may see. The
gradients of keys and values are summed by a reduce-scatter.
Of a bias a device has the rows of its queries, with all keys.

In causal attention later queries see more keys. So the sequence is cut into 2c chunks of queries,
and devices swap their second halves before, and those of the results after (zigzag). All then
attend to equally many keys::

                 device 0   device 1   device 2   device 3
    holds         0   1      2   3      4   5      6   7     chunks of queries
    computes      0   7      2   5      4   3      6   1     i keeps 2i, and swaps with c - 1 - i
    attends to    1 + 8      3 + 6      5 + 4      7 + 2     chunks of keys, 9 each

The kernels count positions from the end of both sequences. A chunk of queries with the keys up to
the position of its last query is therefore a call like any other. The sizes differ by device:
``jax.lax.switch`` has a branch for each, and all collectives are outside of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.core import vma
from jaxllm.core.backend import Backend
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.sharding_rule import Shard
from jaxllm.ops.attention import sink
from jaxllm.ops.rotary.api import ROPE
from jaxllm.ops.window import Window, shortest, sides

# The axis of the sequence, by the rank of an array: segments (B, T), lse (B, N, T), heads
# (B, T, N, H).
_AXIS = {2: 1, 3: 2, 4: 1}
Pair = tuple[Array, Array] | None


class Piece(NamedTuple):
    """A chunk of queries, and the keys that it may see.

    Attributes:
        queries: Its place in the whole sequence.
        keys: Likewise of the keys; empty where it sees none.
        beyond: How many of the keys are after the position of the last query.
    """

    queries: range
    keys: range
    beyond: int


def make_piece(queries: range, T: int, S: int, *, causal: bool, window: Window) -> Piece:
    """The keys that a chunk of queries may see."""
    first, end = queries.start + S - T, queries.stop + S - T  # positions
    left, right = sides(causal, window)
    low = 0 if left is None else max(0, first - left)
    high = S if right is None else min(S, end + right)
    keys = range(low, max(low, high))
    # Without a mask by distance it does not matter at which key a query stands.
    is_aligned = left is not None or right is not None
    return Piece(queries, keys, max(0, high - end) if keys and is_aligned else 0)


def is_zigzag(queries: int, *, causal: bool, window: Window) -> bool:
    """Whether devices with so many queries swap halves of them.

    They do where the mask is causal and a window is wider than a shard: else all devices but the
    first see about as many keys.
    """
    left, right = sides(causal, window)
    return right == 0 and queries % 2 == 0 and (left is None or left >= queries)


def make_pieces(
    shards: int, T: int, S: int, *, causal: bool, window: Window
) -> list[tuple[Piece, ...]]:
    """The one or two pieces that each device computes."""
    mask: dict[str, Any] = {"causal": causal, "window": window}
    if is_zigzag(T // shards, **mask):
        count, chunks = 2 * shards, [(2 * i, 2 * (shards - i) - 1) for i in range(shards)]
    else:
        count, chunks = shards, [(i,) for i in range(shards)]
    size = T // count
    ranges = [[range(i * size, (i + 1) * size) for i in of_device] for of_device in chunks]
    return [tuple(make_piece(x, T, S, **mask) for x in of_device) for of_device in ranges]


def is_needed(shard: Shard, q: Array, k: Array) -> bool:
    """Whether a device must see more than its own shards of these queries and keys."""
    return shard.count("T") > 1 and q.size > 0 and k.size > 0


def forward(
    op: Op,
    backend: Backend,
    shard: Shard,
    q: Array,
    k: Array,
    v: Array,
    segments: Pair,
    table: Pair,
    sinks: Array | None = None,
    *,
    bias: Array | None = None,
    interleaved: bool,
    **options: Any,
) -> tuple[Array, Array]:
    """``flash_attention_forward`` of the queries, keys and values of a shard.

    Args:
        op: The op that computes a piece, ``FLASH_ATTENTION`` or ``FLASH_ATTENTION_BIAS``.
        backend: Its backend.
        shard: The shard; "T" is the name of both sequences.
        q: The queries of the shard.
        k: Its keys.
        v: Its values.
        segments: The segments of its queries and of its keys.
        table: The cosines and sines of its positions.
        sinks: The sinks of its heads.
        bias: The rows of the bias of its queries, (B or 1, N or 1, T / c, S), for all keys.
        interleaved: As in :func:`jaxllm.ops.flash_attention`.
        **options: Likewise.

    Returns:
        ``(out, lse)`` of the queries of the shard.
    """
    q, k = _rotate(Direction.FORWARD, backend, q, k, table, interleaved)
    pieces, options = _plan(shard, q, k, **options)
    of_queries, of_keys = segments or (None, None)
    chunks = _send(shard, pieces, (q, of_queries, _rows(bias)))
    keys = _gather(shard, (k, v, of_keys))

    def attend(piece: Piece, chunk: Any, keys: Any) -> tuple[Array, Array]:
        q, *_ = chunk
        if not piece.keys:
            statistic = jnp.promote_types(q.dtype, jnp.float32)
            B, T, N, _ = q.shape
            zeros = jnp.zeros((B, T, N, keys[1].shape[-1]), q.dtype)
            return sink.join(zeros, jnp.full((B, N, T), -jnp.inf, statistic), sinks)
        k, v, of_keys = _cut(keys, piece.keys)
        longer, of_queries, rows = _append(piece.beyond, chunk)
        more = () if sinks is None else (sinks,)
        arrays = (longer, k, v, *_bias_of(piece, rows), _pair(of_queries, of_keys), None, *more)
        found = dispatch(op, Direction.FORWARD, backend, *arrays, **options)
        return _cut(found, range(q.shape[1]))

    def compute(pieces: tuple[Piece, ...], chunks: Any, keys: Any) -> list[Any]:
        pairs = zip(pieces, chunks, strict=True)
        return [attend(piece, chunk, keys) for piece, chunk in pairs]

    return _send_back(shard, _on_each_device(shard, pieces, compute, chunks, keys))


def backward(
    op: Op,
    backend: Backend,
    shard: Shard,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    dout: Array,
    segments: Pair,
    table: Pair,
    dlse: Array | None = None,
    sinks: Array | None = None,
    *,
    bias: Array | None = None,
    interleaved: bool,
    **options: Any,
) -> tuple[Array, ...]:
    """``flash_attention_backward`` of a shard, as :func:`forward`.

    Args:
        op: As in :func:`forward`, as are all arguments that are not described here.
        backend: The backend.
        shard: The shard.
        q: The queries.
        k: The keys.
        v: The values.
        out: What :func:`forward` returned.
        lse: Likewise.
        dout: The gradient of ``out``.
        segments: The segments.
        table: The cosines and sines.
        dlse: The gradient of ``lse``; None where it has none.
        sinks: The sinks.
        bias: The rows of the bias.
        interleaved: How columns rotate.
        **options: The other options.

    Returns:
        ``(dq, dk, dv)`` of the shard; with a bias or sinks also their gradients.
    """
    # XLA would keep the forward's gathered keys until the backward.
    (q, k, v, segments), dout = jax.lax.optimization_barrier(((q, k, v, segments), dout))
    q, k = _rotate(Direction.FORWARD, backend, q, k, table, interleaved)
    pieces, options = _plan(shard, q, k, **options)
    of_queries, of_keys = segments or (None, None)
    # The gradients by the pieces are summed before they are rounded.
    wide = None if sinks is None else sinks.astype(lse.dtype)
    chunks = _send(shard, pieces, (q, out, lse, dout, dlse, of_queries, _rows(bias)))
    keys = _gather(shard, (k, v, of_keys))

    def attend(piece: Piece, chunk: Any, keys: Any) -> tuple[Any, Array, Array, Any]:
        """The gradients of the queries and of the rows of the bias, of keys, values and sinks."""
        (q, out, lse, dout, dlse, _, rows), (k, v, _) = chunk, keys
        if not piece.keys:
            of_rows = None if rows is None else jnp.zeros_like(rows)
            of_heads = sink.gradients(out, lse, dout, dlse, wide)
            return (jnp.zeros_like(q), of_rows), jnp.zeros_like(k), jnp.zeros_like(v), of_heads
        k, v, of_keys = _cut(keys, piece.keys)
        # Queries, statistics and gradients of what is appended are zero, and add nothing.
        longer, *given, dlse, of_queries, rows = _append(piece.beyond, chunk)
        more = (dlse, wide) if wide is not None else () if dlse is None else (dlse,)
        of_bias = _bias_of(piece, rows)
        arrays = (longer, k, v, *of_bias, *given, _pair(of_queries, of_keys), None, *more)
        dq, dk, dv, *others = dispatch(op, Direction.BACKWARD, backend, *arrays, **options)
        dbias, of_heads = others[: len(of_bias)], tuple(others[len(of_bias) :])
        ends = (piece.keys.start, keys[0].shape[1] - piece.keys.stop)
        dk, dv = (jnp.pad(x, ((0, 0), ends, (0, 0), (0, 0))) for x in (dk, dv))
        of_rows = [jnp.pad(_rows(x), ((0, 0), (0, 0), (0, 0), ends)) for x in dbias]
        of_rows = of_rows[0][:, : q.shape[1]] if of_rows else None
        return (dq[:, : q.shape[1]], of_rows), dk, dv, of_heads

    def compute(pieces: tuple[Piece, ...], chunks: Any, keys: Any) -> tuple:
        pairs = zip(pieces, chunks, strict=True)
        found = [attend(piece, chunk, keys) for piece, chunk in pairs]
        dq, dk, dv, of_heads = zip(*found, strict=True)
        return dq, _total(dk), _total(dv), *map(_total, zip(*of_heads, strict=True))

    chunks, dk, dv, *dsinks = _on_each_device(shard, pieces, compute, chunks, keys)
    (dq, of_rows), over = _send_back(shard, chunks), shard.over("T")
    dk, dv = (jax.lax.psum_scatter(x, over, scatter_dimension=1, tiled=True) for x in (dk, dv))
    dq, dk = _rotate(Direction.BACKWARD, backend, dq, dk, table, interleaved)
    dbias = () if of_rows is None else (_rows(of_rows),)
    of_sinks = () if sinks is None else (dsinks[0].astype(sinks.dtype),)
    return dq, dk, dv, *dbias, *of_sinks


def _rows(bias: Array | None) -> Any:
    """A bias with queries before heads, as the arrays of heads have them; or the way back."""
    return None if bias is None else bias.swapaxes(1, 2)


def _bias_of(piece: Piece, rows: Array | None) -> tuple[Array, ...]:
    """The bias of a piece, if there is one."""
    return () if rows is None else (_rows(rows[..., piece.keys.start : piece.keys.stop]),)


def _rotate(
    direction: Direction, backend: Backend, q: Array, k: Array, table: Pair, interleaved: bool
) -> tuple[Array, Array]:
    """Queries and keys rotated, or their gradients rotated back."""
    if table is None:
        return q, k
    return dispatch(ROPE, direction, backend, q, k, *table, interleaved=interleaved)


def _plan(
    shard: Shard, q: Array, k: Array, *, causal: bool, window: Window, **options: Any
) -> tuple[list[tuple[Piece, ...]], dict[str, Any]]:
    """The pieces of each device, and the options of each piece."""
    shards = shard.count("T")
    T, S = shards * q.shape[1], shards * k.shape[1]
    left, right = sides(causal, window)
    # An end of the window that is further away than any key hides nothing.
    left, right = (None if x is not None and x >= max(T, S) - 1 else x for x in (left, right))
    causal, window = shortest(False, (left, right))
    mask: dict[str, Any] = {"causal": causal, "window": window}
    return make_pieces(shards, T, S, **mask), mask | options


def _on_each_device(
    shard: Shard, pieces: list[tuple[Piece, ...]], compute: Callable[..., Any], *arrays: Any
) -> Any:
    """``compute(its pieces, *arrays)``: one program where the devices differ in no size."""

    def branch(pieces: tuple[Piece, ...], *arrays: Any) -> Any:
        return vma.vary(compute(pieces, *arrays), vma.axes_of(arrays))

    sizes = {tuple((piece.keys, piece.beyond) for piece in of_device) for of_device in pieces}
    branches = [functools.partial(branch, of_device) for of_device in pieces]
    if len(sizes) == 1:
        return branches[0](*arrays)
    return jax.lax.switch(shard.index("T"), branches, *arrays)


def _gather(shard: Shard, arrays: Any) -> Any:
    over = shard.over("T")
    return jax.tree.map(lambda x: jax.lax.all_gather(x, over, axis=1, tiled=True), arrays)


def _send(shard: Shard, pieces: list[tuple[Piece, ...]], arrays: Any) -> list[Any]:
    """The chunks of queries that a device computes, of those that it holds."""
    if len(pieces[0]) == 1:
        return [arrays]
    size = len(pieces[0][0].queries)
    return [_cut(arrays, range(size)), _swap(shard, _cut(arrays, range(size, 2 * size)))]


def _send_back(shard: Shard, chunks: Sequence[Any]) -> Any:
    """Likewise of results: those of the queries that a device holds."""
    first, *others = chunks
    if not others:
        return first
    halves = first, _swap(shard, *others)
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=_AXIS[x[0].ndim]), *halves)


def _swap(shard: Shard, arrays: Any) -> Any:
    """What the device at the same distance from the other end has."""
    count = shard.count("T")
    pairs = [(i, count - 1 - i) for i in range(count)]
    # JAX wants the axes in the mesh's order. Each is reversed, so the order changes nothing.
    over = sorted(shard.over("T"), key=list(shard.sizes).index)
    return jax.tree.map(lambda x: jax.lax.ppermute(x, tuple(over), pairs), arrays)


def _cut(arrays: Any, part: range) -> Any:
    """A part of the sequence."""

    def cut(x: Array) -> Array:
        return jax.lax.slice_in_dim(x, part.start, part.stop, axis=_AXIS[x.ndim])

    return jax.tree.map(cut, arrays)


def _append(count: int, arrays: Any) -> Any:
    """The arrays with zeros at the end of the sequence."""

    def longer(x: Array) -> Array:
        ends = [(0, 0)] * x.ndim
        ends[_AXIS[x.ndim]] = (0, count)
        return jnp.pad(x, ends)

    return jax.tree.map(longer, arrays) if count else arrays


def _pair(of_queries: Array | None, of_keys: Array | None) -> Pair:
    return None if of_queries is None or of_keys is None else (of_queries, of_keys)


def _total(terms: Sequence[Array]) -> Array:
    """The sum, rounded once."""
    first, *others = terms
    wide = jnp.promote_types(first.dtype, jnp.float32)
    return sum((x.astype(wide) for x in others), first.astype(wide)).astype(first.dtype)
