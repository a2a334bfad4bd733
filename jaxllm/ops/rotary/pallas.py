"""The Pallas-Triton rotary kernel.

A program rotates all heads of a few positions. The axes of a block are powers of two, as Triton
requires; elements past the last position, head or pair are masked.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.ops.pallas_call import pallas_call

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_BLOCK = 65536  # elements of all heads of a position
_TILE = 2048  # elements per program, unless one position has more


def rope_unsupported(q, k, cos, sin, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if q.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"q has dtype {q.dtype}; the kernel takes {names}"
    if cos.dtype not in _DTYPES:
        return f"cos has dtype {cos.dtype}; the kernel takes float32, bfloat16 or float16"
    heads = max(q.shape[-2], 0 if k is None else k.shape[-2])
    if heads * q.shape[-1] > _MAX_BLOCK:
        return f"q or k has {heads * q.shape[-1]} columns a row; the kernel takes {_MAX_BLOCK}"
    return None


def rope_slower(*_, interleaved, **__) -> str | None:
    """Why ``auto`` prefers XLA for a call; None if it does not."""
    if interleaved:
        return None
    return "XLA rotates half-split pairs as fast, by the rows in benchmarks/results"


rope_backward_slower = rope_slower


def rope_backward_unsupported(dq, dk, cos, sin, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return rope_unsupported(dq, dk, cos, sin)


def rope_forward(q, k, cos, sin, *, interleaved, interpret=False) -> tuple[Array, Any]:
    """Returns ``(q, k)``, rotated; ``k`` may be None."""
    return _rotate(q, k, cos, sin, interleaved, 1, interpret)


def rope_backward(dq, dk, cos, sin, *, interleaved, interpret=False) -> tuple[Array, Any]:
    """Returns ``(dq, dk)`` of the unrotated arrays, given those of the rotated ones."""
    return _rotate(dq, dk, cos, sin, interleaved, -1, interpret)


def _rope_kernel(
    q_ref, k_ref, cos_ref, sin_ref, q_out_ref, k_out_ref, *, length, heads, pairs, interleaved, sign
):
    tile, columns = cos_ref.shape
    first_row = pl.program_id(0) % pl.cdiv(length, tile) * tile
    rows = first_row + jnp.arange(tile) < length
    for x_ref, out_ref, count in zip((q_ref, k_ref), (q_out_ref, k_out_ref), heads, strict=True):
        if x_ref is None:
            continue
        is_row = rows[:, None] & (jnp.arange(x_ref.shape[1]) < count)
        if interleaved:
            # To the first column of a pair -sin times the second is added, to the second sin times
            # the first.
            column = jnp.arange(2 * columns)
            is_in_table = rows[:, None] & (column < 2 * pairs)
            cos = _load(cos_ref.at[_grid(tile, column // 2)], is_in_table)[:, None, :]
            sin = _load(sin_ref.at[_grid(tile, column // 2)], is_in_table)[:, None, :]
            sin *= jnp.where(column % 2 == 0, -sign, sign)
            inside = is_row[:, :, None] & (column < 2 * pairs)
            x = _load(x_ref, inside)
            neighbour = _load(x_ref.at[_grid(*x_ref.shape[:2], column ^ 1)], inside)
            out = x * cos + neighbour * sin
            plgpu.store(out_ref, out.astype(out_ref.dtype), mask=inside)
        else:
            is_pair = jnp.arange(columns) < pairs
            is_in_table = rows[:, None] & is_pair
            cos = _load(cos_ref, is_in_table)[:, None, :]
            sin = _load(sin_ref, is_in_table)[:, None, :] * sign
            inside = is_row[:, :, None] & is_pair
            left, right = pl.ds(0, columns), pl.ds(pairs, columns)
            a, b = _load(x_ref.at[:, :, left], inside), _load(x_ref.at[:, :, right], inside)
            dtype = out_ref.dtype
            plgpu.store(out_ref.at[:, :, left], (a * cos - b * sin).astype(dtype), mask=inside)
            plgpu.store(out_ref.at[:, :, right], (b * cos + a * sin).astype(dtype), mask=inside)


def _load(ref, mask):
    """Reads a block as float32, zeros outside the mask."""
    return plgpu.load(ref, mask=mask, other=0.0).astype(jnp.float32)


def _grid(*axes):
    """The indices of a grid; an axis that is a number n stands for 0 to n - 1."""
    indices = [jnp.arange(axis) if isinstance(axis, int) else axis for axis in axes]
    return tuple(jnp.meshgrid(*indices, indexing="ij"))


def _rotate(q, k, cos, sin, interleaved, sign, interpret):
    # jax.tree.map skips keys that are None.
    width = 2 * cos.shape[-1]
    if width < q.shape[-1]:  # XLA copies the unrotated columns
        q_pairs, k_pairs = jax.tree.map(lambda x: x[..., :width], (q, k))
        rotated = _rotate(q_pairs, k_pairs, cos, sin, interleaved, sign, interpret)
        return jax.tree.map(
            lambda pairs, x: jnp.concatenate([pairs, x[..., width:]], axis=-1), rotated, (q, k)
        )
    if q.size == 0 or width == 0:
        return q, k
    length = q.shape[-3]
    columns = pl.next_power_of_2(width // 2)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[-3:]), (q, k))
    cos, sin = (table.reshape(-1, *table.shape[-2:]) for table in (cos, sin))
    heads = tuple(0 if x is None else x.shape[2] for x in flat)
    elements = pl.next_power_of_2(max(heads)) * 2 * columns  # of one position
    tile = max(1, _TILE // elements)
    tiles = pl.cdiv(length, tile)
    per_table = flat[0].shape[0] // cos.shape[0]

    def of_heads(x: Array) -> pl.BlockSpec:
        block = (None, tile, pl.next_power_of_2(x.shape[2]), 2 * columns)
        return pl.BlockSpec(block, lambda i: (i // tiles, i % tiles, 0, 0))

    specs = jax.tree.map(of_heads, flat)
    of_table = pl.BlockSpec(
        (None, tile, columns), lambda i: (i // tiles // per_table, i % tiles, 0)
    )
    rotated = pallas_call(
        functools.partial(
            _rope_kernel,
            length=length,
            heads=heads,
            pairs=width // 2,
            interleaved=interleaved,
            sign=sign,
        ),
        grid=(flat[0].shape[0] * tiles,),
        in_specs=[*specs, of_table, of_table],
        out_specs=specs,
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), flat),
        compiler_params=plgpu.CompilerParams(
            num_warps=min(max(tile * elements // 512, 1), 16), num_stages=1
        ),
        interpret=interpret,
    )(*flat, cos, sin)
    return jax.tree.map(lambda out, x: out.reshape(x.shape), rotated, (q, k))
