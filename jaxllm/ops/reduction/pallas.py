"""Pallas-Triton kernels of the reductions.

The array is one row of elements, split into one block per program; elements past its end are
masked. Each program writes one partial result, and XLA reduces them.

Triton has no counters in shared memory, so the histogram is a matmul. Let ``x = row * W + column``
and arrange the counts as an R x W matrix. It is the sum, over the elements, of the outer product of
the one-hot vectors of ``row`` and ``column``. That takes R + W comparisons per element rather than
R * W, and the tensor cores do the sum. Ones and zeros are exact in bfloat16, and counts below 2**24
in float32.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.ops.pallas_call import pallas_call

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_BLOCK, _WARPS = 4096, 4  # per program
_TILE = 128  # elements per matmul of a histogram
_MAX_BINS = 4096
_MAX_PROGRAMS = 2048  # of a histogram


def reduce_sum_unsupported(x, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return _unsupported("x", x, _DTYPES)


def reduce_max_unsupported(x, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return _unsupported("x", x, _DTYPES)


def dot_unsupported(a, b, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return _unsupported("a", a, _DTYPES)


def histogram_unsupported(x, *, bins) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if bins > _MAX_BINS:
        return f"there are {bins} bins; the kernel takes at most {_MAX_BINS}"
    return _unsupported("x", x, (jnp.int32,))


def _unsupported(name: str, x: Array, dtypes: tuple) -> str | None:
    if x.dtype not in dtypes:
        names = ", ".join(jnp.dtype(dtype).name for dtype in dtypes)
        return f"{name} has dtype {x.dtype}; the kernel takes {names}"
    if x.size >= 2**31:
        return f"{name} has {x.size} elements; the kernel takes fewer than 2**31"
    return None


def reduce_sum_forward(x, *, interpret=False):
    """Returns the sum."""
    return jnp.sum(_partials(jnp.sum, 0.0, interpret, x))


def reduce_max_forward(x, *, interpret=False):
    """Returns the largest element."""
    return _max(_partials(_max, -jnp.inf, interpret, x)).astype(x.dtype)


def dot_forward(a, b, *, interpret=False):
    """Returns the dot product."""
    return jnp.sum(_partials(jnp.sum, 0.0, interpret, a, b))


def histogram(x, *, bins, interpret=False):
    """Returns the counts."""
    if x.size == 0:
        return jnp.zeros(bins, jnp.int32)
    # Powers of two, nearly square, and at least the smallest size of a Triton dot.
    width = max(16, pl.next_power_of_2(math.isqrt(bins - 1) + 1))
    rows = max(16, pl.next_power_of_2(pl.cdiv(bins, width)))
    tiles = pl.cdiv(pl.cdiv(x.size, _TILE), _MAX_PROGRAMS)
    programs = pl.cdiv(x.size, tiles * _TILE)
    counts = pallas_call(
        functools.partial(_histogram_kernel, size=x.size),
        grid=(programs,),
        in_specs=[pl.BlockSpec((tiles * _TILE,), lambda i: (i,))],
        out_specs=pl.BlockSpec((None, rows, width), lambda i: (i, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((programs, rows, width), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
    )(x.reshape(-1))
    return counts.sum(axis=0, dtype=jnp.int32).reshape(-1)[:bins]


def _max(values):
    # Triton's maximum ignores NaN, and so may XLA's on a CPU.
    any_nan = jnp.sum((values != values).astype(jnp.float32)) > 0
    return jnp.where(any_nan, jnp.nan, jnp.max(values))


def _reduce_kernel(*refs, size, reduce, identity):
    *array_refs, partial_ref = refs
    inside = pl.program_id(0) * _BLOCK + jnp.arange(_BLOCK) < size
    values = 1.0
    for ref in array_refs:
        values *= plgpu.load(ref, mask=inside, other=0.0).astype(jnp.float32)
    partial_ref[0] = reduce(jnp.where(inside, values, identity))


def _histogram_kernel(x_ref, counts_ref, *, size):
    rows, width = counts_ref.shape
    first = pl.program_id(0) * x_ref.shape[0]

    def count(i, counts):
        position = first + i * _TILE + jnp.arange(_TILE)
        here = x_ref.at[pl.ds(i * _TILE, _TILE)]
        x = plgpu.load(here, mask=position < size, other=-1)
        # Other integers have no row, or a bin past the last one.
        row, column = x >> (width.bit_length() - 1), x & (width - 1)
        is_row = (jnp.arange(rows)[:, None] == row[None, :]).astype(jnp.bfloat16)
        is_column = (column[:, None] == jnp.arange(width)[None, :]).astype(jnp.bfloat16)
        return counts + jnp.dot(is_row, is_column, preferred_element_type=jnp.float32)

    counts = jnp.zeros((rows, width), jnp.float32)
    counts = jax.lax.fori_loop(0, x_ref.shape[0] // _TILE, count, counts)
    counts_ref[...] = counts.astype(jnp.int32)


def _partials(reduce, identity: float, interpret: bool, *arrays: Array) -> Array:
    """The partial result of each program for its block of the elementwise product."""
    size = arrays[0].size
    if size == 0:
        return jnp.full(1, identity, jnp.float32)
    programs = pl.cdiv(size, _BLOCK)
    return pallas_call(
        functools.partial(_reduce_kernel, size=size, reduce=reduce, identity=identity),
        grid=(programs,),
        in_specs=[pl.BlockSpec((_BLOCK,), lambda i: (i,))] * len(arrays),
        out_specs=pl.BlockSpec((1,), lambda i: (i,)),
        out_shape=jax.ShapeDtypeStruct((programs,), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
    )(*(x.reshape(-1) for x in arrays))
