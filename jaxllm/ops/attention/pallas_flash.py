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
and the columns of one head. Triton's blocks have powers of two on a side, and its dot asks for
16 at least: what lies past the end of the head or of the sequence is masked.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.core import ffi
from jaxllm.ops.attention import packing, sink
from jaxllm.ops.attention.pallas_flash_blocks import (
    LN2,
    LOG2E,
    Problem,
    Rows,
    Tile,
    block_width,
    column,
    load_bias,
    load_head,
    load_segments,
    load_statistic,
    row,
    seeing_queries,
    segments_of_keys,
    segments_of_queries,
    store_bias,
    store_head,
    store_statistic,
    visible_keys,
    walk,
)
from jaxllm.ops.pallas_call import pallas_call
from jaxllm.ops.rotary.pallas import rope_backward, rope_forward, rope_unsupported

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_WIDTH = 256
# Below every score. The largest of no scores, but a number: the difference of two is none.
_LOWEST = float(jnp.finfo(jnp.float32).min)


def flash_attention_unsupported(
    q, k, v, segment_ids, rope_table=None, sinks=None, **_
) -> str | None:
    """Why the forward kernel cannot serve a call; None if it can."""
    return _unsupported(q, k, v, rope_table)


def flash_attention_backward_unsupported(
    q, k, v, out, lse, dout, segment_ids, rope_table=None, dlse=None, sinks=None, **_
) -> str | None:
    """Why the backward kernels cannot serve a call; None if they can."""
    return _unsupported(q, k, v, rope_table)


def _unsupported(q, k, v, rope_table) -> str | None:
    """Both directions take the same."""
    if q.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"q has dtype {q.dtype}; the kernel takes {names}"
    width = max(q.shape[-1], v.shape[-1])
    if width > _MAX_WIDTH:
        return f"heads are {width} wide; the kernel takes at most {_MAX_WIDTH}"
    if rope_table is not None:
        return rope_unsupported(q, k, *rope_table)
    return None


def flash_attention_slower(*_, **__) -> str | None:
    """Why ``auto`` leaves a call to other implementations; None where it does not."""
    if set(ffi.compute_capabilities()) == {"9.0"}:  # the CUDA extension may be missing
        return None
    return "its tiles are for the shared memory of Hopper GPUs, and it has run on no others"


flash_attention_backward_slower = flash_attention_slower
flash_attention_packed_slower = flash_attention_slower
flash_attention_packed_backward_slower = flash_attention_slower
flash_attention_bias_slower = flash_attention_slower
flash_attention_bias_backward_slower = flash_attention_slower
self_attention_backward_slower = flash_attention_slower


def flash_attention_forward(
    q, k, v, segment_ids, rope_table=None, sinks=None,
    *, causal, scale, window, softcap, interleaved=False, bias=None, interpret=False, tiles=None,
):  # fmt: skip
    """Returns ``(out, lse)``; ``tiles`` stands in for those of the table."""
    if rope_table is not None:
        q, k = rope_forward(q, k, *rope_table, interleaved=interleaved, interpret=interpret)
    B, T, N, _ = q.shape
    shape = (B, T, N, v.shape[-1])
    if q.size == 0 or k.size == 0:
        lse = jnp.full((B, N, T), -jnp.inf, jnp.float32)
        return sink.join(jnp.zeros(shape, q.dtype), lse, sinks)
    problem = Problem.of(q, k, v, causal, scale, window, softcap, interpret)
    tile = problem.fit((tiles or problem.tiles(q.dtype)).forward)
    out, lse = _call(
        functools.partial(_forward_kernel, problem=problem, tile=tile),
        grid=(pl.cdiv(T, tile.queries), N, B),
        tile=tile,
        inputs=(_flat(q), _flat(k), _flat(v), segments_of_queries(segment_ids, tile), bias),
        outputs=(
            jax.ShapeDtypeStruct((B, T, N * v.shape[-1]), q.dtype),
            jax.ShapeDtypeStruct((B, N * T), jnp.float32),
        ),
        interpret=interpret,
    )
    return sink.join(out.reshape(shape), lse.reshape(B, N, T), sinks)


def flash_attention_backward(
    q, k, v, out, lse, dout, segment_ids, rope_table=None, dlse=None, sinks=None,
    *, causal, scale, window, softcap, interleaved=False, bias=None, interpret=False, tiles=None,
):  # fmt: skip
    """Returns ``(dq, dk, dv)``, and ``dbias`` and ``dsinks`` where there are biases and sinks.

    ``dlse`` may be None.
    """
    dsinks = sink.gradients(out, lse, dout, dlse, sinks)
    if rope_table is not None:
        q, k = rope_forward(q, k, *rope_table, interleaved=interleaved, interpret=interpret)
    B, T, N, _ = q.shape
    S, K = k.shape[1:3]
    if q.size == 0 or k.size == 0:
        return *(jnp.zeros_like(x) for x in (q, k, v, bias) if x is not None), *dsinks
    problem = Problem.of(q, k, v, causal, scale, window, softcap, interpret)
    tiles = tiles or problem.tiles(q.dtype)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    if dlse is not None:
        delta = delta - dlse
    arrays = (
        _flat(q), _flat(k), _flat(v), _flat(dout), lse.reshape(B, N * T), delta.reshape(B, N * T),
    )  # fmt: skip
    tile = problem.fit(tiles.backward_keys)
    dk, dv = _call(
        functools.partial(_backward_keys_kernel, problem=problem, tile=tile),
        grid=(pl.cdiv(S, tile.keys), K, B),
        tile=tile,
        inputs=(*arrays, segments_of_keys(segment_ids, tile), bias),
        outputs=(_like(_flat(k)), _like(_flat(v))),
        interpret=interpret,
    )
    tile = problem.fit(tiles.backward_queries)
    (dq,) = _call(
        functools.partial(_backward_queries_kernel, problem=problem, tile=tile),
        grid=(pl.cdiv(T, tile.queries), N, B),
        tile=tile,
        inputs=(*arrays, segments_of_queries(segment_ids, tile), bias),
        outputs=(_like(_flat(q)),),
        interpret=interpret,
    )
    dq, dk, dv = dq.reshape(q.shape), dk.reshape(k.shape), dv.reshape(v.shape)
    if rope_table is not None:
        dq, dk = rope_backward(dq, dk, *rope_table, interleaved=interleaved, interpret=interpret)
    if bias is None:
        return dq, dk, dv, *dsinks
    return dq, dk, dv, _bias_gradient(problem, tile, arrays, segment_ids, bias), *dsinks


def _bias_gradient(problem: Problem, tile: Tile, arrays, segment_ids, bias: Array) -> Array:
    """The gradient of the bias: a program for each block of it adds up those that share it."""
    B, groups = arrays[0].shape[0], bias.shape[0] * bias.shape[1]
    segments = None if segment_ids is None else tuple(ids.reshape(-1) for ids in segment_ids)
    # The rows of all sequences, one after the other.
    arrays = [x.reshape(-1, x.shape[-1]) if x.ndim == 3 else x.reshape(-1) for x in arrays]
    (dbias,) = _call(
        functools.partial(_backward_bias_kernel, problem=problem, tile=tile, B=B, bias=bias.shape),
        grid=(pl.cdiv(problem.T, tile.queries), pl.cdiv(problem.S, tile.keys), groups),
        tile=tile,
        inputs=(*arrays, segments, bias.reshape(groups, problem.T, problem.S)),
        outputs=(jax.ShapeDtypeStruct((groups, problem.T, problem.S), bias.dtype),),
        interpret=problem.interpret,
        by_sequence=False,
    )
    return dbias.reshape(bias.shape)


def flash_attention_bias_unsupported(q, k, v, bias, *rest, **options) -> str | None:
    """Why the forward kernel cannot serve a call; None if it can."""
    return flash_attention_unsupported(q, k, v, *rest, **options)


def flash_attention_bias_backward_unsupported(q, k, v, bias, *rest, **options) -> str | None:
    """Why the backward kernels cannot serve a call; None if they can."""
    return flash_attention_backward_unsupported(q, k, v, *rest, **options)


def flash_attention_bias_forward(q, k, v, bias, *rest, **options):
    """Returns ``(out, lse)``."""
    return flash_attention_forward(q, k, v, *rest, bias=bias, **options)


def flash_attention_bias_backward(q, k, v, bias, *rest, **options):
    """Returns ``(dq, dk, dv, dbias)``, and ``dsinks`` where there are sinks."""
    return flash_attention_backward(q, k, v, *rest, bias=bias, **options)


flash_attention_packed_unsupported = packing.unsupported(flash_attention_unsupported)
flash_attention_packed_backward_unsupported = packing.unsupported(
    flash_attention_backward_unsupported
)
flash_attention_packed_forward = packing.forward(flash_attention_forward)
flash_attention_packed_backward = packing.backward(flash_attention_backward)
self_attention_backward_unsupported = packing.unsupported_with_bias(
    flash_attention_packed_backward_unsupported
)
self_attention_backward = packing.backward_with_bias(flash_attention_packed_backward)


# The kernels. A ref is all of one batch entry: rows are queries or keys, columns those of all
# heads; lse and delta hold the queries of one head after those of another.


def _forward_kernel(q_ref, k_ref, v_ref, segments, bias_ref, out_ref, lse_ref, *, problem, tile):
    # Under a causal mask the last queries see the most keys, so they come first.
    block = pl.num_programs(0) - 1 - pl.program_id(0)
    head = pl.program_id(1)
    queries = Rows(block * tile.queries, tile.queries, problem.T, problem.T % tile.queries != 0)
    key_head = lax.div(head, jnp.int32(problem.groups))
    q = load_head(q_ref, queries, head, problem.H)
    of_query = load_segments(segments, 0, queries)

    def visit(keys, carry, edge):
        largest, total, values = carry
        k = load_head(k_ref, keys, key_head, problem.H)
        scores = problem.scores(_dot(q, k, trans_b=True))
        scores, unit = problem.biased(scores, load_bias(bias_ref, queries, keys, head))
        mask = _pairs(
            queries.positions()[:, None], keys.positions()[None, :],
            column(of_query), row(load_segments(segments, 1, keys)), problem, edge,
        )  # fmt: skip
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        grown = jnp.maximum(largest, jnp.max(scores, axis=1) * unit)
        weights = problem.exp2(scores * unit - grown[:, None])
        shrink = problem.exp2(largest - grown)
        v = load_head(v_ref, keys, key_head, problem.Hv)
        total = total * shrink + jnp.sum(weights, axis=1)
        values = values * shrink[:, None] + _dot(weights.astype(v.dtype), v)
        return grown, total, values

    carry = (
        jnp.full(tile.queries, _LOWEST, jnp.float32),
        jnp.zeros(tile.queries, jnp.float32),
        jnp.zeros((tile.queries, block_width(problem.Hv)), jnp.float32),
    )
    bounds = visible_keys(block, segments, problem, tile)
    largest, total, values = walk(visit, bounds, tile.keys, problem.S, carry)
    # A query without keys has the sum 0: zeros, and the logarithm -inf.
    out = values / jnp.where(total == 0, 1.0, total)[:, None]
    store_head(out_ref, queries, head, problem.Hv, out)
    store_statistic(lse_ref, queries, head, largest * LN2 + jnp.log(total))


def _backward_keys_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, segments, bias_ref, dk_ref, dv_ref,
    *, problem, tile,
):  # fmt: skip
    block = pl.program_id(0)
    key_head = pl.program_id(1)
    keys = Rows(block * tile.keys, tile.keys, problem.S, problem.S % tile.keys != 0)
    k = load_head(k_ref, keys, key_head, problem.H)
    v = load_head(v_ref, keys, key_head, problem.Hv)
    of_key = load_segments(segments, 0, keys)
    bounds = seeing_queries(block, segments, problem, tile)

    def visit_head(member, carry):
        head = key_head * problem.groups + member

        # Rows past the last query are zeros, dout's too: whatever their weights, they add nothing.
        # Rows past the last key gather nonsense, and are not stored.
        def visit(queries, carry, edge):
            dk, dv = carry
            q = load_head(q_ref, queries, head, problem.H)
            lse = load_statistic(lse_ref, queries, head) * LOG2E
            scores = problem.scores(_dot(k, q, trans_b=True))
            bias = load_bias(bias_ref, queries, keys, head)
            weights = problem.weights(scores, None if bias is None else bias.T, lse[None, :])
            mask = _pairs(
                queries.positions()[None, :], keys.positions()[:, None],
                row(load_segments(segments, 1, queries)), column(of_key), problem, edge,
            )  # fmt: skip
            if mask is not None:  # a query without keys: exp2(inf)
                weights = jnp.where(mask, weights, 0.0)
            dout = load_head(dout_ref, queries, head, problem.Hv)
            dv += _dot(weights.astype(dout.dtype), dout)
            dweights = _dot(v, dout, trans_b=True)
            dscores = weights * (dweights - load_statistic(delta_ref, queries, head)[None, :])
            if problem.softcap is not None:
                dscores *= 1.0 - scores * scores
            dk += _dot(dscores.astype(q.dtype), q)
            return dk, dv

        return walk(visit, bounds, tile.queries, problem.T, carry)

    widths = block_width(problem.H), block_width(problem.Hv)
    zeros = tuple(jnp.zeros((tile.keys, width), jnp.float32) for width in widths)
    if problem.groups == 1:
        dk, dv = visit_head(0, zeros)
    else:
        dk, dv = lax.fori_loop(0, problem.groups, visit_head, zeros)
    store_head(dk_ref, keys, key_head, problem.H, dk * problem.scale)
    store_head(dv_ref, keys, key_head, problem.Hv, dv)


def _backward_queries_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, segments, bias_ref, dq_ref, *, problem, tile
):
    block = pl.num_programs(0) - 1 - pl.program_id(0)
    head = pl.program_id(1)
    queries = Rows(block * tile.queries, tile.queries, problem.T, problem.T % tile.queries != 0)
    key_head = lax.div(head, jnp.int32(problem.groups))
    q = load_head(q_ref, queries, head, problem.H)
    dout = load_head(dout_ref, queries, head, problem.Hv)
    lse = load_statistic(lse_ref, queries, head) * LOG2E
    delta = load_statistic(delta_ref, queries, head)
    of_query = load_segments(segments, 0, queries)

    def visit(keys, dq, edge):
        k = load_head(k_ref, keys, key_head, problem.H)
        v = load_head(v_ref, keys, key_head, problem.Hv)
        scores = problem.scores(_dot(q, k, trans_b=True))
        weights = problem.weights(scores, load_bias(bias_ref, queries, keys, head), lse[:, None])
        mask = _pairs(
            queries.positions()[:, None], keys.positions()[None, :],
            column(of_query), row(load_segments(segments, 1, keys)), problem, edge,
        )  # fmt: skip
        if mask is not None:
            weights = jnp.where(mask, weights, 0.0)
        dscores = weights * (_dot(dout, v, trans_b=True) - delta[:, None])
        if problem.softcap is not None:
            dscores *= 1.0 - scores * scores
        return dq + _dot(dscores.astype(k.dtype), k)

    bounds = visible_keys(block, segments, problem, tile)
    zeros = jnp.zeros((tile.queries, block_width(problem.H)), jnp.float32)
    dq = walk(visit, bounds, tile.keys, problem.S, zeros)
    store_head(dq_ref, queries, head, problem.H, dq * problem.scale)


def _backward_bias_kernel(
    q_ref, k_ref, v_ref, dout_ref, lse_ref, delta_ref, segments, bias_ref, dbias_ref,
    *, problem, tile, B, bias,
):  # fmt: skip
    first_query, first_key = pl.program_id(0) * tile.queries, pl.program_id(1) * tile.keys
    group = pl.program_id(2)
    of_sequences, of_heads = bias[:2]
    # The sequences and heads that share the block.
    sequences, heads = B // of_sequences, problem.N // of_heads

    def rows_of_sequence(b):
        T, S = problem.T, problem.S
        queries = Rows(first_query, tile.queries, T, T % tile.queries != 0, b * T)
        return queries, Rows(first_key, tile.keys, S, S % tile.keys != 0, b * S)

    def add(member, dbias):
        b = lax.div(group, jnp.int32(of_heads)) * sequences + lax.div(member, jnp.int32(heads))
        head = lax.rem(group, jnp.int32(of_heads)) * heads + lax.rem(member, jnp.int32(heads))
        queries, keys = rows_of_sequence(b)
        key_head = lax.div(head, jnp.int32(problem.groups))
        q = load_head(q_ref, queries, head, problem.H)
        k = load_head(k_ref, keys, key_head, problem.H)
        scores = problem.scores(_dot(q, k, trans_b=True))
        lse = load_statistic(lse_ref, queries, b * problem.N + head) * LOG2E
        weights = problem.weights(scores, load_bias(bias_ref, queries, keys, group), lse[:, None])
        of_query, of_key = (load_segments(segments, i, x) for i, x in enumerate((queries, keys)))
        mask = _pairs(
            queries.positions()[:, None], keys.positions()[None, :],
            column(of_query), row(of_key), problem, True,
        )  # fmt: skip
        assert mask is not None  # of rows past the end at least
        weights = jnp.where(mask, weights, 0.0)
        dout = load_head(dout_ref, queries, head, problem.Hv)
        v = load_head(v_ref, keys, key_head, problem.Hv)
        delta = load_statistic(delta_ref, queries, b * problem.N + head)
        return dbias + weights * (_dot(dout, v, trans_b=True) - delta[:, None])

    bounds = visible_keys(pl.program_id(0), None, problem, tile)
    is_seen = (bounds.start <= pl.program_id(1)) & (pl.program_id(1) < bounds.stop)
    members = jnp.where(is_seen, jnp.int32(sequences * heads), jnp.int32(0))
    zeros = jnp.zeros((tile.queries, tile.keys), jnp.float32)
    dbias = lax.fori_loop(0, members, add, zeros)
    store_bias(dbias_ref, *rows_of_sequence(0), group, dbias)


def _dot(a: Array, b: Array, *, trans_b: bool = False) -> Array:
    """A product in float32. Of float32 factors too: Triton would take 10 bits of each otherwise."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plgpu.dot(a, b, trans_b=trans_b, precision=precision)


# Which pairs of queries and keys there are.


def _pairs(t, s, of_query, of_key, problem: Problem, edge: bool) -> Array | None:
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


def _flat(x: Array) -> Array:
    """(B, T, N, H) as (B, T, N*H)."""
    return x.reshape(*x.shape[:2], -1)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(kernel, *, grid, tile: Tile, inputs, outputs, interpret: bool, by_sequence: bool = True):
    """``pallas_call`` over (blocks, heads, B), each program with all of one batch entry.

    Or, not ``by_sequence``, over any grid, each program with all of the arrays.
    """

    def spec(x):
        if not by_sequence:
            return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
        is_shared = x.shape[0] == 1  # by all sequences, or there is only one
        index = lambda _, __, b: (0 if is_shared else b, *[0] * (x.ndim - 1))  # noqa: E731
        return pl.BlockSpec((None, *x.shape[1:]), index)

    return pallas_call(
        kernel,
        grid=grid,
        in_specs=list(jax.tree.map(spec, inputs)),
        out_specs=jax.tree.map(spec, outputs),
        out_shape=outputs,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
    )(*inputs)
