"""Pallas-Triton embedding kernels.

Rows are padded to the next power of two, as Triton requires; columns past the end are masked. The
backward sorts the tokens. One program per row of the table sums the rows of ``dout`` that read it,
in the order of their positions and in float32. Long runs of one token are first summed in chunks,
one program per chunk, so that no program has a long sum.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.ops.pallas_call import pallas_call

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_WIDTH = 65536
_TILE = 2048  # elements per forward program, unless one row is longer
_SEARCHES = 256  # rows of the table that one program looks up among the sorted tokens
_CHUNK = 64


def embed_unsupported(tokens, token_table, position_table, *_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if token_table.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"token_table has dtype {token_table.dtype}; the kernel takes {names}"
    if token_table.shape[1] > _MAX_WIDTH:
        return f"token_table has rows of {token_table.shape[1]}; the kernel takes {_MAX_WIDTH}"
    if tokens.size >= 2**30:
        return f"tokens has {tokens.size} elements; the kernel takes fewer than 2**30"
    return None


embed_backward_unsupported = embed_unsupported


def embed_forward(tokens, token_table, position_table, *, interpret=False):
    """Returns ``out``."""
    width = token_table.shape[1]
    result = jax.ShapeDtypeStruct((tokens.size, width), token_table.dtype)
    if 0 in result.shape:
        return jnp.zeros((*tokens.shape, width), token_table.dtype)
    columns = pl.next_power_of_2(width)
    tile = max(1, _TILE // columns)
    out = pallas_call(
        functools.partial(_embed_forward_kernel, count=tokens.size, length=tokens.shape[-1]),
        grid=(pl.cdiv(tokens.size, tile),),
        in_specs=[
            pl.BlockSpec((tile,), lambda i: (i,)),
            pl.no_block_spec,
            None if position_table is None else pl.no_block_spec,
        ],
        out_specs=pl.BlockSpec((tile, columns), lambda i: (i, 0)),
        out_shape=result,
        compiler_params=_parameters(tile * columns),
        interpret=interpret,
    )(tokens.reshape(-1), token_table, position_table)
    return out.reshape(*tokens.shape, width)


def embed_backward(tokens, token_table, position_table, dout, dlm_head, *, interpret=False):
    """As :func:`jaxllm.ops.embedding.reference.embed_backward`."""
    dtoken_table = _sum_by_token(tokens.reshape(-1), token_table, dout, interpret)
    if dlm_head is not None:
        dtoken_table = dtoken_table + dlm_head
    if position_table is None:
        return dtoken_table, None
    dpositions = dout.astype(jnp.float32).sum(axis=tuple(range(dout.ndim - 2)))
    unread = position_table.shape[0] - tokens.shape[-1]
    dposition_table = jnp.pad(dpositions, ((0, unread), (0, 0)))
    return dtoken_table, dposition_table.astype(position_table.dtype)


def _sum_by_token(tokens: Array, token_table: Array, dout: Array, interpret: bool) -> Array:
    count, (vocabulary, width) = tokens.size, token_table.shape
    if count * width == 0:
        return jnp.zeros_like(token_table)
    rows = jnp.clip(tokens, 0, vocabulary - 1)
    tokens, positions = lax.sort((rows, lax.iota(jnp.int32, count)), num_keys=1, is_stable=True)
    dout = dout.reshape(count, width)
    columns = pl.next_power_of_2(width)
    whole_row = pl.BlockSpec((None, columns), lambda i: (i, 0))

    starts = pallas_call(
        functools.partial(_starts_kernel, vocabulary=vocabulary),
        grid=(pl.cdiv(vocabulary + 1, _SEARCHES),),
        in_specs=[pl.no_block_spec],
        out_specs=pl.BlockSpec((_SEARCHES,), lambda i: (i,)),
        out_shape=jax.ShapeDtypeStruct((vocabulary + 1,), jnp.int32),
        compiler_params=_parameters(_SEARCHES),
        interpret=interpret,
    )(tokens)

    partial = None
    if chunks := count // _CHUNK:
        partial = pallas_call(
            _chunk_sums_kernel,
            grid=(chunks,),
            in_specs=[pl.no_block_spec] * 3,
            out_specs=whole_row,
            out_shape=jax.ShapeDtypeStruct((chunks, width), jnp.float32),
            compiler_params=_parameters(columns),
            interpret=interpret,
        )(tokens, positions, dout)

    return pallas_call(
        _embed_backward_kernel,
        grid=(vocabulary,),
        in_specs=[pl.no_block_spec] * 3 + [None if partial is None else pl.no_block_spec],
        out_specs=whole_row,
        out_shape=jax.ShapeDtypeStruct(token_table.shape, token_table.dtype),
        compiler_params=_parameters(columns),
        interpret=interpret,
    )(starts, positions, dout, partial)


def _embed_forward_kernel(
    tokens_ref, token_table_ref, position_table_ref, out_ref, *, count, length
):
    tile, columns = out_ref.shape
    vocabulary, width = token_table_ref.shape
    rows = pl.program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
    tokens = plgpu.load(tokens_ref, mask=rows < count, other=0)
    inside = (rows < count)[:, None] & (jnp.arange(columns, dtype=jnp.int32) < width)

    def read(table_ref, which):
        return plgpu.load(table_ref.at[_grid(which, columns)], mask=inside, other=0.0)

    out = read(token_table_ref, jnp.clip(tokens, 0, vocabulary - 1))
    if position_table_ref is not None:
        positions = read(position_table_ref, rows % length)
        out = (out.astype(jnp.float32) + positions.astype(jnp.float32)).astype(out.dtype)
    plgpu.store(out_ref, out, mask=inside)


def _starts_kernel(tokens_ref, starts_ref, *, vocabulary):
    """For each row of the table, the index of the first sorted token that is not below it."""
    (count,) = tokens_ref.shape
    row = pl.program_id(0) * starts_ref.shape[0] + jnp.arange(starts_ref.shape[0], dtype=jnp.int32)

    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        token = plgpu.load(tokens_ref.at[middle], mask=low < high, other=0)
        below = (low < high) & (token < row)
        return jnp.where(below, middle + 1, low), jnp.where(below, high, middle)

    bounds = jnp.zeros_like(row), jnp.full_like(row, count)
    low, _ = lax.fori_loop(0, count.bit_length(), halve, bounds)
    plgpu.store(starts_ref, low, mask=row <= vocabulary)


def _chunk_sums_kernel(tokens_ref, positions_ref, dout_ref, out_ref):
    """Sums a chunk of the sorted positions if all its tokens are equal; otherwise writes zeros."""
    first = pl.program_id(0) * _CHUNK
    is_whole = tokens_ref[first] == tokens_ref[first + _CHUNK - 1]
    end = jnp.where(is_whole, first + _CHUNK, first)
    _store_row(out_ref, _add_rows(dout_ref, positions_ref, first, end, _zeros(out_ref)), dout_ref)


def _embed_backward_kernel(starts_ref, positions_ref, dout_ref, partial_ref, out_ref):
    """Sums positions before the first whole chunk of a row, chunk sums, and positions after."""
    row = pl.program_id(0)
    begin, end = starts_ref[row], starts_ref[row + 1]
    first_chunk = (begin + _CHUNK - 1) // _CHUNK
    last_chunk = jnp.maximum(end // _CHUNK, first_chunk)
    chunks_begin = jnp.minimum(first_chunk * _CHUNK, end)
    chunks_end = jnp.maximum(last_chunk * _CHUNK, chunks_begin)
    total = _add_rows(dout_ref, positions_ref, begin, chunks_begin, _zeros(out_ref))
    if partial_ref is not None:
        total = _add_rows(partial_ref, None, first_chunk, last_chunk, total)
    total = _add_rows(dout_ref, positions_ref, chunks_end, end, total)
    _store_row(out_ref, total, dout_ref)


def _add_rows(rows_ref, positions_ref, begin, end, total):
    """Adds rows ``positions[begin:end]``, or rows ``begin:end`` without positions, to ``total``."""
    columns = jnp.arange(total.size, dtype=jnp.int32)

    def add(i, total):
        position = i if positions_ref is None else positions_ref[i]
        row = rows_ref.at[jnp.full_like(columns, position), columns]
        mask = columns < rows_ref.shape[1]
        return total + plgpu.load(row, mask=mask, other=0.0).astype(jnp.float32)

    return lax.fori_loop(begin, end, add, total)


def _zeros(out_ref):
    return jnp.zeros(out_ref.shape, jnp.float32)


def _store_row(out_ref, row, like_ref):
    mask = jnp.arange(row.size, dtype=jnp.int32) < like_ref.shape[1]
    plgpu.store(out_ref, row.astype(out_ref.dtype), mask=mask)


def _grid(rows: Array, columns: int) -> tuple[Array, ...]:
    """The indices of all columns of these rows."""
    return tuple(jnp.meshgrid(rows, jnp.arange(columns, dtype=jnp.int32), indexing="ij"))


def _parameters(elements: int) -> plgpu.CompilerParams:
    """The compiler parameters for a program with this many elements."""
    return plgpu.CompilerParams(num_warps=min(max(elements // 512, 1), 16), num_stages=1)
