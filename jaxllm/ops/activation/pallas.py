"""Pallas-Triton activation kernels.

Pointwise ops treat their arrays as one long row and split it into blocks. Where rows matter (for a
bias, or the halves of a row) a program has a tile of rows and columns. Block sizes are powers of
two, as Triton requires; elements past the end are masked. All functions compute in float32 and use
the logistic function: ``(1 + tanh(u)) / 2`` is ``logistic(2 u)``, which loses no digits where tanh
is near -1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.ops.pallas_call import pallas_call

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_SIZE = 2**31 - 1  # offsets are 32-bit integers
_BLOCK = 1024  # elements per program of a pointwise kernel
_TILE = (8, 256)  # rows and columns per program of a kernel with a bias
_MAX_PROGRAMS = 1024  # of bias_gelu's backward kernel: each writes a partial row of its columns

_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715 * _GELU_LINEAR
_SATURATION = 30.0  # beyond it gelu' is exactly 0 or 1, and the square of a huge x overflows


def gelu_unsupported(x, *_, **__) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if x.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"the input has dtype {x.dtype}; the kernel takes {names}"
    if x.size > _MAX_SIZE:
        return f"the input has {x.size} elements; the kernel takes at most {_MAX_SIZE}"
    return None


gelu_backward_unsupported = gelu_unsupported
bias_gelu_unsupported = bias_gelu_backward_unsupported = gelu_unsupported
bias_add_unsupported = gelu_unsupported
swiglu_packed_unsupported = swiglu_packed_backward_unsupported = gelu_unsupported
relu_unsupported = relu_backward_unsupported = gelu_unsupported
sigmoid_unsupported = sigmoid_backward_unsupported = gelu_unsupported
add_unsupported = gelu_unsupported


def bias_add_backward_unsupported(dout) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return gelu_unsupported(dout)


def swiglu_unsupported(gate, *_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return gelu_unsupported(gate)


swiglu_backward_unsupported = swiglu_unsupported


def gelu_forward(x, *, interpret=False):
    """Returns ``out``."""
    return _pointwise(gelu, x, interpret=interpret)[0]


def gelu_backward(x, dout, *, interpret=False):
    """Returns ``dx``."""
    return _pointwise(lambda x, dout: dout * _gelu_derivative(x), x, dout, interpret=interpret)[0]


def bias_gelu_forward(x, bias, *, interpret=False):
    """Returns ``out``."""
    return _bias_forward(gelu, x, bias, interpret)


def bias_gelu_backward(x, bias, dout, *, interpret=False):
    """Returns ``(dx, dbias)``."""
    shape = _flat_shape(x)
    strips, tiles = pl.cdiv(shape[1], _TILE[1]), pl.cdiv(shape[0], _TILE[0])
    tiles_each = max(1, pl.cdiv(tiles * strips, _MAX_PROGRAMS))
    programs = pl.cdiv(tiles, tiles_each)
    array = pl.BlockSpec((tiles_each * _TILE[0], _TILE[1]), lambda i, j: (i, j))
    row = pl.BlockSpec((_TILE[1],), lambda i, j: (j,))
    dx, dbias = _call(
        functools.partial(_bias_gelu_backward_kernel, shape=shape),
        grid=(programs, strips),
        in_specs=[array, row, array],
        out_specs=[array, pl.BlockSpec((None, _TILE[1]), lambda i, j: (i, j))],
        out_shape=[
            jax.ShapeDtypeStruct(shape, x.dtype),
            jax.ShapeDtypeStruct((programs, shape[1]), jnp.float32),
        ],
        interpret=interpret,
    )(x.reshape(shape), bias, dout.reshape(shape))
    return dx.reshape(x.shape), dbias.sum(axis=0).astype(bias.dtype)


def bias_add_forward(x, bias, *, interpret=False):
    """Returns ``out``."""
    return _bias_forward(lambda h: h, x, bias, interpret)


def bias_add_backward(dout, *, interpret=False):
    """Returns ``dbias``; the gradient of ``x`` is ``dout``."""
    del interpret
    # XLA sums columns at the speed of a copy; a Triton kernel took an eighth longer on an H200.
    return dout.sum(axis=tuple(range(dout.ndim - 1)), dtype=jnp.float32).astype(dout.dtype)


def swiglu_forward(gate, up, *, interpret=False):
    """Returns ``out``."""
    return _pointwise(_swiglu, gate, up, interpret=interpret)[0]


def swiglu_backward(gate, up, dout, *, interpret=False):
    """Returns ``(dgate, dup)``."""
    return tuple(_pointwise(_swiglu_gradients, gate, up, dout, results=2, interpret=interpret))


def swiglu_packed_forward(x, *, interpret=False):
    """Returns ``out``."""
    return _packed(_swiglu_packed_forward_kernel, x, None, interpret)


def swiglu_packed_backward(x, dout, *, interpret=False):
    """Returns ``dx``."""
    return _packed(_swiglu_packed_backward_kernel, x, dout, interpret)


def relu_forward(x, *, interpret=False):
    """Returns ``out``."""
    return _pointwise(lambda x: jnp.where(x < 0, 0.0, x), x, interpret=interpret)[0]


def relu_backward(x, dout, *, interpret=False):
    """Returns ``dx``."""
    return _pointwise(lambda x, dout: jnp.where(x > 0, dout, 0.0), x, dout, interpret=interpret)[0]


def sigmoid_forward(x, *, interpret=False):
    """Returns ``out``."""
    return _pointwise(_logistic, x, interpret=interpret)[0]


def sigmoid_backward(x, dout, *, interpret=False):
    """Returns ``dx``."""
    return _pointwise(_sigmoid_gradient, x, dout, interpret=interpret)[0]


def add_forward(x, y, *, interpret=False):
    """Returns ``out``; both gradients are the output gradient."""
    return _pointwise(lambda x, y: x + y, x, y, interpret=interpret)[0]


# Functions of float32 blocks.


def _logistic(z):
    return 1.0 / (1.0 + jnp.exp(-z))


def gelu(x):
    """GELU of a float32 block, also for the epilogues of other families' kernels."""
    return x * _logistic(x * (_GELU_LINEAR + _GELU_CUBIC * (x * x)))


def _gelu_derivative(x):
    # Not jnp.clip, which loses NaN in Triton.
    x = jnp.where(x > _SATURATION, _SATURATION, jnp.where(x < -_SATURATION, -_SATURATION, x))
    square = x * x
    s = _logistic(x * (_GELU_LINEAR + _GELU_CUBIC * square))
    return s + x * s * (1.0 - s) * (_GELU_LINEAR + 3 * _GELU_CUBIC * square)


def _sigmoid_gradient(x, dout):
    s = _logistic(x)
    return dout * s * (1.0 - s)


def _swiglu(gate, up):
    return gate * _logistic(gate) * up


def _swiglu_gradients(gate, up, dout):
    s = _logistic(gate)
    return dout * up * s * (1.0 + gate * (1.0 - s)), dout * gate * s


# Kernels. `size`, `width` and `shape` describe the whole arrays; a ref is one block of them.


def _pointwise_kernel(*refs, fn, inputs, size):
    inside = jnp.arange(_BLOCK) < size - pl.program_id(0) * _BLOCK
    results = fn(*(_load(ref, inside) for ref in refs[:inputs]))
    results = results if isinstance(results, tuple) else (results,)
    for ref, result in zip(refs[inputs:], results, strict=True):
        _store(ref, result, inside)


def _bias_forward_kernel(x_ref, bias_ref, out_ref, *, fn, shape):
    rows, columns = _masks(shape, pl.program_id(0) * _TILE[0])
    inside = rows[:, None] & columns
    _store(out_ref, fn(_load(x_ref, inside) + _load(bias_ref, columns)), inside)


def _bias_gelu_backward_kernel(x_ref, bias_ref, dout_ref, dx_ref, dbias_ref, *, shape):
    first_row = pl.program_id(0) * x_ref.shape[0]
    _, columns = _masks(shape, 0)
    bias = _load(bias_ref, columns)

    def visit(i, dbias):
        rows, _ = _masks(shape, first_row + i * _TILE[0])
        inside = rows[:, None] & columns
        here = pl.ds(i * _TILE[0], _TILE[0])
        x, dout = _load(x_ref.at[here, :], inside), _load(dout_ref.at[here, :], inside)
        dx = dout * _gelu_derivative(x + bias)
        _store(dx_ref.at[here, :], dx, inside)
        return dbias + jnp.sum(dx, axis=0)

    zeros = jnp.zeros(_TILE[1], jnp.float32)
    dbias = lax.fori_loop(0, x_ref.shape[0] // _TILE[0], visit, zeros)
    _store(dbias_ref, dbias, columns)


def _swiglu_packed_forward_kernel(gate_ref, up_ref, out_ref, *, width):
    inside = _columns(gate_ref.shape[1], width)[None]
    _store(out_ref, _swiglu(_load(gate_ref, inside), _load(up_ref, inside)), inside)


def _swiglu_packed_backward_kernel(gate_ref, up_ref, dout_ref, dx_ref, *, width):
    inside = _columns(gate_ref.shape[1], width)[None]
    gradients = _swiglu_gradients(*(_load(ref, inside) for ref in (gate_ref, up_ref, dout_ref)))
    for half, gradient in enumerate(gradients):
        _store(dx_ref.at[pl.ds(half, 1), :], gradient, inside)


def _columns(columns, width):
    """Which columns of a block are in the array."""
    return jnp.arange(columns) < width - pl.program_id(1) * columns


def _masks(shape, first_row):
    """Which rows and which columns of a tile that starts at ``first_row`` are in the array."""
    return first_row + jnp.arange(_TILE[0]) < shape[0], _columns(_TILE[1], shape[1])


def _load(ref, mask):
    """Reads a block as float32, zeros outside the mask."""
    return plgpu.load(ref, mask=mask, other=0.0).astype(jnp.float32)


def _store(ref, values, mask):
    plgpu.store(ref, values.astype(ref.dtype), mask=mask)


# Calls: block specs, grids, and the final sum over partial rows.


def _pointwise(fn, *arrays: Array, results: int = 1, interpret: bool) -> list[Array]:
    """Applies a function of float32 blocks to arrays of one shape."""
    x = arrays[0]
    block = pl.BlockSpec((_BLOCK,), lambda i: (i,))
    outputs = _call(
        functools.partial(_pointwise_kernel, fn=fn, inputs=len(arrays), size=x.size),
        grid=(pl.cdiv(x.size, _BLOCK),),
        in_specs=[block] * len(arrays),
        out_specs=[block] * results,
        out_shape=[jax.ShapeDtypeStruct((x.size,), x.dtype)] * results,
        interpret=interpret,
    )(*(array.reshape(-1) for array in arrays))
    return [output.reshape(x.shape) for output in outputs]


def _bias_forward(fn, x: Array, bias: Array, interpret: bool) -> Array:
    shape = _flat_shape(x)
    tile = pl.BlockSpec(_TILE, lambda i, j: (i, j))
    (out,) = _call(
        functools.partial(_bias_forward_kernel, fn=fn, shape=shape),
        grid=(pl.cdiv(shape[0], _TILE[0]), pl.cdiv(shape[1], _TILE[1])),
        in_specs=[tile, pl.BlockSpec((_TILE[1],), lambda i, j: (j,))],
        out_specs=[tile],
        out_shape=[jax.ShapeDtypeStruct(shape, x.dtype)],
        interpret=interpret,
    )(x.reshape(shape), bias)
    return out.reshape(x.shape)


def _packed(kernel, x: Array, dout: Array | None, interpret: bool) -> Array:
    """Runs a kernel on the halves of the rows of ``x``: the forward if ``dout`` is None."""
    rows, width = _flat_shape(x)
    width //= 2
    columns = min(pl.next_power_of_2(max(width, 1)), _BLOCK)
    pairs = x.reshape(rows, 2, width)
    # Blocks have one row. They are of the gate half, the up half, an array of F columns, and both.
    gate, up = (pl.BlockSpec((None, 1, columns), lambda i, j, h=h: (i, h, j)) for h in (0, 1))
    single = pl.BlockSpec((1, columns), lambda i, j: (i, j))
    both = pl.BlockSpec((None, 2, columns), lambda i, j: (i, 0, j))
    forward = dout is None
    (result,) = _call(
        functools.partial(kernel, width=width),
        grid=(rows, pl.cdiv(width, columns)),
        in_specs=[gate, up] if forward else [gate, up, single],
        out_specs=[single if forward else both],
        out_shape=[jax.ShapeDtypeStruct((rows, width) if forward else pairs.shape, x.dtype)],
        interpret=interpret,
    )(pairs, pairs, *([] if dout is None else [dout.reshape(rows, width)]))
    return result.reshape((*x.shape[:-1], width) if forward else x.shape)


def _call(kernel, *, grid, in_specs, out_specs, out_shape, interpret) -> Callable[..., Any]:
    """``pallas_call`` with the compiler parameters of these kernels; zeros for an empty grid."""
    if 0 in grid:
        zeros = [None if out is None else jnp.zeros(out.shape, out.dtype) for out in out_shape]
        return lambda *_: zeros
    return pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )


def _flat_shape(x: Array) -> tuple[int, int]:
    return math.prod(x.shape[:-1]), x.shape[-1]
