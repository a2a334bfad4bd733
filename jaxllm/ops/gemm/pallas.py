"""Pallas kernels of ``matmul`` and ``matvec``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.ops.activation import pallas as activations
from jaxllm.ops.pallas_call import pallas_call

_MAX_SIZE = 2**31 - 1  # offsets are 32-bit integers


def matmul_unsupported(a, b, *_, transpose_a=False, transpose_b=False, **__) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if a.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"a has dtype {a.dtype}; the kernel takes float32, bfloat16, float16"
    size = max(a.size, b.size, a.shape[1 if transpose_a else 0] * b.shape[0 if transpose_b else 1])
    if size > _MAX_SIZE:
        return f"an array has {size} elements; the kernel takes at most {_MAX_SIZE}"
    return None


def matmul_forward(
    a, b, bias, *, transpose_a, transpose_b, activation, out_dtype, precision, interpret=False
):
    """Returns ``(out, h)``; ``h`` is the GEMM's result alone, None without an activation."""
    out_dtype = jnp.dtype(out_dtype or a.dtype)
    transposes = (transpose_a, transpose_b)
    (M, K), N = a.shape[:: -1 if transpose_a else 1], b.shape[0 if transpose_b else 1]
    result = jax.ShapeDtypeStruct((M, N), out_dtype)
    if M * N == 0:
        empty = jnp.zeros((M, N), out_dtype)
        return empty, empty if activation else None
    if K == 0:  # a grid needs arrays with elements
        a = jnp.zeros((1, M) if transpose_a else (M, 1), a.dtype)
        b = jnp.zeros((N, 1) if transpose_b else (1, N), b.dtype)
        K = 1
    # In float32 a tile of half the sides is what fits the registers.
    limits = (64, 64, 32) if a.dtype == jnp.float32 else (128, 128, 64)
    tile = tuple(
        min(limit, pl.next_power_of_2(max(size, 16)))
        for limit, size in zip(limits, (M, N, K), strict=True)
    )
    kernel = functools.partial(
        _matmul_kernel,
        shape=(M, N, K),
        tile=tile,
        transposes=transposes,
        with_bias=bias is not None,
        activation=activation,
        # Of float32 factors the default is TF32.
        precision=lax.Precision.HIGHEST if precision is None and a.dtype == jnp.float32 else None,
    )
    outputs = pallas_call(
        kernel,
        grid=(pl.cdiv(M, tile[0]), pl.cdiv(N, tile[1])),
        out_shape=[result] * (2 if activation else 1),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=3),
        interpret=interpret,
    )(a, b, *([] if bias is None else [bias]))
    return outputs[0], outputs[1] if activation else None


def _matmul_kernel(a_ref, b_ref, *refs, shape, tile, transposes, with_bias, activation, precision):
    starts = (pl.program_id(0) * tile[0], pl.program_id(1) * tile[1])
    spans = [pl.ds(start, size) for start, size in zip(starts, tile[:2], strict=True)]
    row_inside, column_inside = (
        start + jnp.arange(size, dtype=jnp.int32) < limit
        for start, size, limit in zip(starts, tile[:2], shape[:2], strict=True)
    )

    def load(ref, span, inside, step, transposed):
        """A tile of the side's span and a step of the depth, as it is stored."""
        depth = pl.ds(step * tile[2], tile[2])
        known = step * tile[2] + jnp.arange(tile[2], dtype=jnp.int32) < shape[2]
        if transposed:
            return plgpu.load(ref.at[depth, span], mask=known[:, None] & inside[None, :], other=0)
        return plgpu.load(ref.at[span, depth], mask=inside[:, None] & known[None, :], other=0)

    def visit(step, sums):
        a = load(a_ref, spans[0], row_inside, step, transposes[0])
        b = load(b_ref, spans[1], column_inside, step, not transposes[1])
        product = plgpu.dot(a, b, trans_a=transposes[0], trans_b=transposes[1], precision=precision)
        return _add_partial(sums, product, a.dtype)

    zeros = jnp.zeros(tile[:2], jnp.float32)
    total, _ = lax.fori_loop(0, pl.cdiv(shape[2], tile[2]), visit, (zeros, zeros))
    mask = row_inside[:, None] & column_inside[None, :]
    out_ref, *h_ref = refs[1:] if with_bias else refs
    if activation:
        plgpu.store(h_ref[0].at[*spans], total.astype(out_ref.dtype), mask=mask)
    if with_bias:
        bias = plgpu.load(refs[0].at[spans[1]], mask=column_inside, other=0)
        total += bias.astype(jnp.float32)[None, :]
    if activation:
        total = activations.gelu(total)
    plgpu.store(out_ref.at[*spans], total.astype(out_ref.dtype), mask=mask)


_ROWS = 16  # of x, as Triton's dot asks


def matvec_unsupported(w, x) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"x has dtype {x.dtype}; the kernel takes float32, bfloat16, float16"
    return None


def matvec(w, x, *, interpret=False):
    """Returns ``out``; a program has some rows of the matrix, a block of columns at a time."""
    (M, K), rows = w.shape, x.shape[0]
    if w.size == 0:
        return jnp.zeros((rows, M), x.dtype)
    tile = (min(32, pl.next_power_of_2(max(M, _ROWS))), min(256, pl.next_power_of_2(max(K, _ROWS))))
    out = pallas_call(
        functools.partial(_matvec_kernel, M=M, K=K, tile=tile),
        grid=(pl.cdiv(M, tile[0]),),
        out_shape=jax.ShapeDtypeStruct((_ROWS, M), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
    )(w, jnp.pad(x, ((0, _ROWS - rows), (0, 0))))
    return out[:rows]


def _add_partial(sums, product, dtype):
    """Adds a tile's partial sums to ``(total, lost)``, where ``lost`` is what rounding added to it.

    Triton makes a plain sum one chain of additions over all columns, whose rounding errors show in
    float32. With Kahan's compensation a chain ends with its tile.
    """
    total, lost = sums
    if dtype != jnp.float32:
        return total + product, lost
    corrected = product - lost
    grown = total + corrected
    return grown, (grown - total) - corrected


def _matvec_kernel(w_ref, x_ref, out_ref, *, M, K, tile):
    start = pl.program_id(0) * tile[0]
    rows = pl.ds(start, tile[0])
    inside = start + jnp.arange(tile[0], dtype=jnp.int32) < M
    precision = lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def visit(i, sums):
        columns = pl.ds(i * tile[1], tile[1])
        known = i * tile[1] + jnp.arange(tile[1], dtype=jnp.int32) < K
        mask = inside[:, None] & known[None, :]
        w = plgpu.load(w_ref.at[rows, columns], mask=mask, other=0)
        mask = jnp.broadcast_to(known[None, :], (_ROWS, tile[1]))
        x = plgpu.load(x_ref.at[pl.ds(0, _ROWS), columns], mask=mask, other=0)
        return _add_partial(sums, plgpu.dot(x, w, trans_b=True, precision=precision), x.dtype)

    zeros = jnp.zeros((_ROWS, tile[0]), jnp.float32)
    total, _ = lax.fori_loop(0, pl.cdiv(K, tile[1]), visit, (zeros, zeros))
    mask = jnp.broadcast_to(inside[None, :], (_ROWS, tile[0]))
    # With 64-bit types enabled a plain 0 would have 64 bits, and the index of rows has 32.
    every = pl.ds(np.int32(0), _ROWS)  # pyright: ignore
    plgpu.store(out_ref.at[every, rows], total.astype(out_ref.dtype), mask=mask)
