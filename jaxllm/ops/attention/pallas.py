"""Pallas-Triton kernels of the softmax and of the repetition of key heads.

A program holds a tile of whole rows, its width rounded up to a power of two as Triton asks; the
columns past the row's end, and the rows past the last, are masked. Sums are float32.
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
_MAX_WIDTH = 65536
_TILE = 1024  # elements that a program works on at once, unless one row is longer


def softmax_unsupported(x, *_, **__) -> str | None:
    """Why the forward kernel cannot serve a call; None if it can."""
    return _unsupported("x", x)


def softmax_backward_unsupported(out, *_, **__) -> str | None:
    """Why the backward kernel cannot serve a call; None if it can."""
    return _unsupported("out", out)


def repeat_kv_unsupported(x, *_, groups, **__) -> str | None:
    """Why the forward kernel cannot serve a call; None if it can."""
    return _unsupported("x", x) or _heads_unsupported(x, groups)


def repeat_kv_backward_unsupported(dout, *_, groups, **__) -> str | None:
    """Why the backward kernel cannot serve a call; None if it can."""
    return _unsupported("dout", dout) or _heads_unsupported(dout, groups)


def _unsupported(name: str, array) -> str | None:
    if array.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"{name} has dtype {array.dtype}; the kernel takes {names}"
    if array.shape[-1] > _MAX_WIDTH:
        return f"{name} has rows of {array.shape[-1]}; the kernel takes at most {_MAX_WIDTH}"
    return None


def _heads_unsupported(heads, groups: int) -> str | None:
    if groups * heads.shape[-1] > _MAX_WIDTH:
        return (
            f"{groups} heads of {heads.shape[-1]} share a key head; the kernel takes at most "
            f"{_MAX_WIDTH} elements of them"
        )
    return None


def softmax_forward(x, *, scale, causal, interpret=False):
    """Returns ``out``."""
    return _row_by_row(_softmax_forward_kernel, x, scale=scale, causal=causal, interpret=interpret)


def softmax_backward(out, dout, *, scale, causal, interpret=False):
    """Returns ``dx``."""
    return _row_by_row(
        _softmax_backward_kernel, out, dout, scale=scale, causal=causal, interpret=interpret
    )


def repeat_kv_forward(x, *, groups, interpret=False):
    """Returns ``out``."""
    *outer, K, H = x.shape
    rows = math.prod((*outer, K))
    one, copies = _head_specs(H, groups)
    out = _call(
        functools.partial(_repeat_kv_forward_kernel, shape=(rows, groups, H)),
        rows=rows,
        in_specs=[one],
        out_spec=copies,
        out_shape=jax.ShapeDtypeStruct((rows, groups, H), x.dtype),
        interpret=interpret,
    )(x.reshape(rows, H))
    return out.reshape(*outer, K * groups, H)


def repeat_kv_backward(dout, *, groups, interpret=False):
    """Returns ``dx``."""
    *outer, N, H = dout.shape
    rows = math.prod((*outer, N // groups))
    one, copies = _head_specs(H, groups)
    dx = _call(
        functools.partial(_repeat_kv_backward_kernel, shape=(rows, groups, H)),
        rows=rows,
        in_specs=[copies],
        out_spec=one,
        out_shape=jax.ShapeDtypeStruct((rows, H), dout.dtype),
        interpret=interpret,
    )(dout.reshape(rows, groups, H))
    return dx.reshape(*outer, N // groups, H)


# The kernels. `shape` is that of the whole array; a ref is a block of it.


def _softmax_forward_kernel(x_ref, out_ref, *, shape, length, scale):
    inside, seen = _masks(shape, x_ref.shape, length)
    # What the mask hides is not read.
    x = scale * plgpu.load(x_ref, mask=seen, other=0.0).astype(jnp.float32)
    scores = jnp.where(seen, x, -jnp.inf)
    largest = jnp.max(scores, axis=1)
    # A row that sees nothing would compute -inf - -inf.
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    weights = jnp.exp(scores - largest[:, None])
    total = jnp.sum(weights, axis=1)
    out = weights / jnp.where(total == 0.0, 1.0, total)[:, None]
    plgpu.store(out_ref, out.astype(out_ref.dtype), mask=inside)


def _softmax_backward_kernel(out_ref, dout_ref, dx_ref, *, shape, length, scale):
    inside, seen = _masks(shape, out_ref.shape, length)
    out = plgpu.load(out_ref, mask=seen, other=0.0).astype(jnp.float32)
    dout = plgpu.load(dout_ref, mask=seen, other=0.0).astype(jnp.float32)
    delta = jnp.sum(out * dout, axis=1)
    dx = scale * out * (dout - delta[:, None])
    plgpu.store(dx_ref, dx.astype(dx_ref.dtype), mask=inside)


def _repeat_kv_forward_kernel(x_ref, out_ref, *, shape):
    one, copies = _head_masks(shape, out_ref.shape)
    x = plgpu.load(x_ref, mask=one, other=0.0)
    plgpu.store(out_ref, jnp.broadcast_to(x[:, None, :], out_ref.shape), mask=copies)


def _repeat_kv_backward_kernel(dout_ref, dx_ref, *, shape):
    one, copies = _head_masks(shape, dout_ref.shape)
    dout = plgpu.load(dout_ref, mask=copies, other=0.0).astype(jnp.float32)
    plgpu.store(dx_ref, jnp.sum(dout, axis=1).astype(dx_ref.dtype), mask=one)


def _masks(shape: tuple[int, int], block: tuple[int, int], length: int) -> tuple[Array, Array]:
    """Which elements of this program's block are in the array, and which of them are seen."""
    row = pl.program_id(0) * block[0] + jnp.arange(block[0])[:, None]
    column = jnp.arange(block[1])[None, :]
    inside = (row < shape[0]) & (column < shape[1])
    # Query t of `length` stands at the key t + S - length.
    return inside, inside & (column <= row % length + (shape[1] - length))


def _head_masks(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[Array, Array]:
    """Which elements of this program's block of heads, and of copies, are in the arrays."""
    row = pl.program_id(0) * block[0] + jnp.arange(block[0])[:, None]
    one = (row < shape[0]) & (jnp.arange(block[2])[None, :] < shape[2])
    return one, one[:, None, :] & (jnp.arange(block[1])[None, :, None] < shape[1])


# The calls: blocks and grids.


def _row_by_row(kernel, *arrays: Array, scale: float, causal: bool, interpret: bool) -> Array:
    """Runs a kernel over tiles of whole rows of equal arrays, with a result like them."""
    x = arrays[0]
    shape = math.prod(x.shape[:-1]), x.shape[-1]
    # Without a mask every row stands at the last key, as a single query does.
    length = x.shape[-2] if causal else 1
    width = pl.next_power_of_2(max(1, shape[1]))
    spec = pl.BlockSpec((max(1, _TILE // width), width), lambda i: (i, 0))
    out = _call(
        functools.partial(kernel, shape=shape, length=length, scale=scale),
        rows=shape[0],
        in_specs=[spec] * len(arrays),
        out_spec=spec,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        interpret=interpret,
    )(*(array.reshape(shape) for array in arrays))
    return out.reshape(x.shape)


def _head_specs(width: int, groups: int) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """The blocks of key heads and of their copies, whose sizes are powers of two."""
    groups, width = pl.next_power_of_2(groups), pl.next_power_of_2(max(1, width))
    rows = max(1, _TILE // (groups * width))
    return (
        pl.BlockSpec((rows, width), lambda i: (i, 0)),
        pl.BlockSpec((rows, groups, width), lambda i: (i, 0, 0)),
    )


def _call(kernel, *, rows, in_specs, out_spec, out_shape, interpret):
    """``pallas_call`` with the compiler parameters that suit a tile, and no rows allowed."""
    if rows == 0 or 0 in out_shape.shape:
        return lambda *_: jnp.zeros(out_shape.shape, out_shape.dtype)
    elements = max(math.prod(spec.block_shape) for spec in (*in_specs, out_spec))
    # One warp for a tile of the usual size; wider rows want more threads to share the waiting.
    warps = 1 if elements <= _TILE else elements // 512
    return pallas_call(
        kernel,
        grid=pl.cdiv(rows, out_spec.block_shape[0]),
        in_specs=in_specs,
        out_specs=out_spec,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=min(warps, 32), num_stages=1),
        interpret=interpret,
    )
