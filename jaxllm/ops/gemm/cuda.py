"""Layers with CUDA kernels, and the FFI calls of ``matmul`` and ``matvec``.

The products of layers stay with XLA, but for these on a Hopper GPU, which do what belongs to them
in the same kernel, in ``cuda/gemm``. Two are of ``mlp``: the one that GELU follows and the one
whose result GELU's slope is applied to. That saves a pass over an array of the hidden width in
either direction. The first computes the slope too, beside GELU, with which it has most of its
operations in common, and keeps it for the second to multiply by. The third adds a bias and a
residual to the product that a norm follows. The norm then reads one array instead of two, and
writes one instead of two. The fourth makes the gradient of attention's output, and adds up what
attention's backward would read it for.

The stream between the halves of pre-norm blocks is kept normalized, and is itself never written:
the product that adds to a half goes on to the norm of the sum, and in the backward pass the one
that is the gradient of a norm's output to that of the stream. The norm's scale and bias are made
part of the layer after it by a kernel of a few microseconds, and their gradients come of that of
the layer's weight by another. The gradients of attention's two weights, of which each has too few
tiles to fill a GPU, are made by one kernel that shares out the tokens.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.core import ffi
from jaxllm.ops.activation import cuda as activations
from jaxllm.ops.gemm import products, slopes
from jaxllm.ops.norm import cuda as norms

_TILE = (128, 192)  # rows and columns, as in cuda/gemm/matmul_hopper.cu
HEAD_WIDTH = 64  # of matmul_head_sums
# With fewer tiles for each SM XLA's products, in smaller tiles, are faster.
_MIN_TILES_OF_SM = 1
# The tiles of a row wait for one another, so they are no more than the clusters that run at once.
# Nor are they more than this, the most that the kernels have been tested with.
_MAX_ROW_TILES = 48
_NORM_PARTIAL_ROWS = 16  # as in cuda/gemm/matmul_hopper.h
_MAX_SIZE = 2**31  # the copy engine's coordinates
_MAX_LAYER_SIDE = 2**30  # as in cuda/gemm/norm_layer.cu
_GRADIENT_TILE = (256, 192)  # of a weight, as in cuda/gemm/weight_gradients.cuh
# With so many SMs for each tile of the weights, or more, cuBLAS leaves SMs idle: it gives each
# weight a kernel and each tile a whole number of CTAs.
_MIN_SMS_OF_GRADIENT_TILE = 2
# With so many rows one SM is enough: the sums of a tile's parts take as long whatever the rows are,
# and are a small part then. For an MLP's weights that is worth .1% of GPT-2 124M's step on an H200.
_MANY_GRADIENT_ROWS = 65536
_MIN_FILLED = 7 / 8
_MIN_GRADIENT_ROWS = 8192


# The predicates of dispatch say whether the kernels may run at all. Which of them do, the functions
# ask fused_unsupported and its like.


def linear_unsupported(x, *_, **__) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    return activations.gelu_unsupported(x)


linear_residual_forward_unsupported = linear_unsupported
linear_normed_forward_unsupported = linear_unsupported
linear_weight_gradients_unsupported = linear_unsupported


def linear_backward_unsupported(x, weight, bias, h, dout, **_) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    del weight, bias, h
    return activations.gelu_unsupported(dout) or activations.gelu_unsupported(x)


def linear_norm_forward_unsupported(x, weight, bias, residual, *_, **__) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    del weight, bias
    return activations.gelu_unsupported(x) or norms.layer_norm_unsupported(residual)


def linear_normed_backward_unsupported(
    dout, weight, bias, dweight, dbias, rows, rstd, scale, norm_bias, dtotal
) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    del weight, bias, dweight, dbias, rstd
    reason = activations.gelu_unsupported(dout) or activations.gelu_unsupported(dtotal)
    return reason or norms.layer_norm_unsupported(rows, scale, norm_bias)


def mlp_unsupported(x, *_, **__) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    return activations.gelu_unsupported(x)


def mlp_backward_unsupported(
    x, up_weight, up_bias, down_weight, down_bias, h, slope, hidden, dout, **_
) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    del up_weight, up_bias, down_weight, down_bias, h, slope, hidden
    return activations.gelu_unsupported(dout) or activations.gelu_unsupported(x)


def linear_add_layer_norm_unsupported(x, *arrays, **_) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    return norms.add_layer_norm_unsupported(x, *arrays)


def linear_add_layer_norm_backward_unsupported(x, weight, *of_norm) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    del weight
    return norms.add_layer_norm_unsupported(x, *of_norm)


def pre_norm_mlp_unsupported(x, *arrays, **_) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    return norms.layer_norm_unsupported(x, *jax.tree.leaves(arrays))


def pre_norm_mlp_backward_unsupported(
    rows, rstd, scale, bias, up_weight, up_bias, down_weight, h, slope, hidden, dout, **_
) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    del rstd, up_weight, up_bias, down_weight, h, slope, hidden
    reason = activations.gelu_unsupported(rows) or activations.gelu_unsupported(dout)
    return reason or norms.layer_norm_unsupported(rows, scale, bias)


def linear_forward(x, weight, bias, *, activation):
    """Returns ``(out, h)``; ``h`` is the product alone, None without an activation."""
    if activation == "gelu" and bias is not None and not fused_unsupported(x, weight.shape[1]):
        return _matmul_bias_gelu(x, weight, bias)
    return products.forward(activations, x, weight, bias, activation)


def linear_backward(x, weight, bias, h, dout, *, activation):
    """Returns ``(dx, dweight, dbias)``."""
    return products.backward(activations, x, weight, bias, h, dout, activation)


def mlp_forward_options(x, up_weight, up_bias, down_weight, *_, **__) -> dict[str, bool]:
    """GELU's slope is kept for the backward where both fused products serve the call."""
    del up_bias
    dout = jax.ShapeDtypeStruct((*x.shape[:-1], down_weight.shape[1]), x.dtype)
    columns = up_weight.shape[1]
    reason = fused_unsupported(x, columns) or fused_unsupported(dout, columns)
    return {"keeps_slope": reason is None}


def pre_norm_mlp_forward_options(x, normed, scale, bias, *layers, **_) -> dict[str, bool]:
    """As :func:`mlp_forward_options`."""
    del normed, scale, bias
    return mlp_forward_options(x, *layers)


def mlp_forward(x, up_weight, up_bias, down_weight, down_bias, *, activation, keeps_slope=False):
    """As :func:`jaxllm.ops.gemm.products.mlp_forward`."""
    hidden, *kept = _hidden_layer(x, up_weight, up_bias, activation, keeps_slope)
    out, _ = products.forward(activations, hidden, down_weight, down_bias, None)
    return out, *kept, hidden


def _hidden_layer(x, weight, bias, activation, keeps_slope):
    """As :func:`jaxllm.ops.gemm.products.hidden_layer`."""
    if not keeps_slope:
        return *linear_forward(x, weight, bias, activation=activation), None
    hidden, slope = _matmul_bias_gelu(x, weight, bias, slope=True)
    return hidden, None, slope


def mlp_backward(
    x, up_weight, up_bias, down_weight, down_bias, h, slope, hidden, dout, *, activation
):
    """Returns the gradients of ``x``, of ``up``'s weight and bias, and of ``down``'s."""
    if slope is None:
        arrays = (x, up_weight, up_bias, down_weight, down_bias, h, slope, hidden, dout)
        return products.mlp_backward(activations, arrays, activation)
    ddown_weight, dout = products.weight_gradient_first(hidden, dout)
    dh, dup_bias = _matmul_scale(dout, down_weight, slope)
    ddown_bias = None if down_bias is None else activations.bias_add_backward(dout)
    up = products.factor_gradients(x, up_weight, dh)
    return *up, dup_bias, ddown_weight, ddown_bias


def linear_add_layer_norm_forward(
    x, weight, residual, x_bias, scale, bias, *, eps, statistics=True
):
    """Returns ``(out, total, mean, rstd)``: ``total`` is the sum that is normalized."""
    options = {"eps": eps, "statistics": statistics}
    # A bias that is wider than the product is added by the norm's kernel.
    wider_bias = x_bias is not None and x_bias.dtype != x.dtype
    if wider_bias or fused_unsupported(x, weight.shape[1]):
        arrays = (x, weight, residual, x_bias, scale, bias)
        return products.linear_add_layer_norm_forward(norms, *arrays, **options)
    total = _matmul_residual(x, weight, x_bias, residual)
    out, *kept = norms.layer_norm_forward(total, scale, bias, **options)
    return out, total, *kept


def linear_add_layer_norm_backward(*arrays):
    """Returns the gradients of ``x, weight, residual, x_bias, scale, bias``."""
    return products.linear_add_layer_norm_backward(norms, arrays)


def linear_residual_forward(x, weight, bias, residual):
    """Returns ``x @ weight + bias + residual``."""
    if fused_unsupported(x, weight.shape[1]):
        return products.residual_forward(x, weight, bias, residual)
    return _matmul_residual(x, weight, bias, residual)


def linear_normed_forward(x, weight, bias, normed, scale, norm_bias):
    """As :func:`jaxllm.ops.gemm.products.normed_forward`; the norm's are made part of the layer."""
    if fused_unsupported(x, weight.shape[1]):
        return products.normed_forward(x, weight, bias, normed, scale, norm_bias)
    weight, bias = _layer_with_norm(scale, norm_bias, weight, bias)
    rows, *_ = normed
    flat = rows.reshape(-1, rows.shape[-1])
    options = {"out_dtype": rows.dtype, "precision": None}
    out, _ = _matmul(flat, weight, False, False, bias, **options)
    return out.reshape(*rows.shape[:-1], -1)


def linear_norm_forward(x, weight, bias, residual, normed, *, eps):
    """As :func:`jaxllm.ops.gemm.products.norm_forward`; of the residual the kernel reads its norm.

    What it normalizes it does not write: XLA makes that of the norm, if anybody wants it.
    """
    if norm_unsupported(x, weight.shape[1]):
        return products.norm_forward(norms, x, weight, bias, residual, eps=eps)
    rows, mean, rstd = next_normed = _matmul_norm(x, weight, bias, *normed, eps=eps)
    out = rows.astype(jnp.float32) / rstd[..., None] + mean[..., None]
    return out.astype(residual.dtype), next_normed


def linear_normed_backward(
    dout, weight, bias, dweight, dbias, rows, rstd, scale, norm_bias, dtotal
):
    """As :func:`jaxllm.ops.gemm.products.normed_backward`."""
    if norm_unsupported(dout, weight.shape[0]):
        arrays = (dout, weight, bias, dweight, dbias, rows, rstd, scale, norm_bias, dtotal)
        return products.normed_backward(activations, norms, *arrays)
    # XLA merges this call with the forward's.
    with_weight, _ = _layer_with_norm(scale, norm_bias, weight, bias)
    dx, dtotal_sum = _matmul_norm_gradient(dout, with_weight, rows, rstd, dtotal)
    return dx, *_layer_without_norm(scale, norm_bias, weight, dweight, dbias), dtotal_sum


def linear_weight_gradients(*arrays):
    """As :func:`jaxllm.ops.gemm.products.weight_gradients`, by one kernel."""
    if weight_gradients_unsupported(*arrays):
        return products.weight_gradients(*arrays)
    return _weight_gradients(*arrays)


def _weight_gradients(x, dout, other_x, other_dout):
    arrays = (x, dout, other_x, other_dout)
    shapes = _weight_shapes(*arrays)
    # The kernel has a CTA for each SM of this process's smallest GPU, on larger ones too.
    partial = (_gpu().multiprocessors + sum(map(_gradient_tiles, shapes)), *_GRADIENT_TILE)
    results = (
        *(jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes),
        jax.ShapeDtypeStruct(partial, jnp.float32),
    )
    dweight, other_dweight, _ = ffi.call("weight_gradients", results, *arrays)
    return lax.optimization_barrier((dweight, other_dweight, dout, other_dout))


def weight_gradients_unsupported(
    x, dout, other_x, other_dout, *, sms_of_tile: int | None = None
) -> str | None:
    """Why the gradients of two weights are XLA's products; None if one kernel makes both."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {x.dtype}; the kernel takes bfloat16 and float16"
    shapes = _weight_shapes(x, dout, other_x, other_dout)
    if any(size % 8 or size == 0 for shape in shapes for size in shape):
        return f"weights of {shapes} have sides that are no multiples of 8, 16 bytes"
    rows = math.prod(x.shape[:-1])
    if not _MIN_GRADIENT_ROWS <= rows < _MAX_SIZE:
        return f"x has {rows} rows, too few to be shared among blocks, or 2^31 or more"
    if reason := ffi.no_hopper_reason():
        return reason
    tiles, sms = sum(map(_gradient_tiles, shapes)), _gpu().multiprocessors
    if (sms_of_tile or _MIN_SMS_OF_GRADIENT_TILE) * tiles > sms:
        return (
            f"the weights have {tiles} tiles of {_GRADIENT_TILE} for {sms} SMs, enough for XLA's "
            "products"
        )
    filled = sum(map(math.prod, shapes)) / (tiles * math.prod(_GRADIENT_TILE))
    if filled < _MIN_FILLED:
        return f"the weights fill {filled:.2f} of their tiles of {_GRADIENT_TILE}"
    return None


def _weight_shapes(x, dout, other_x, other_dout) -> tuple[tuple[int, int], ...]:
    return (x.shape[-1], dout.shape[-1]), (other_x.shape[-1], other_dout.shape[-1])


def _gradient_tiles(shape: tuple[int, int]) -> int:
    return math.prod(-(-size // tile) for size, tile in zip(shape, _GRADIENT_TILE, strict=True))


def pre_norm_mlp_forward(
    x, normed, scale, bias, up_weight, up_bias, down_weight, down_bias,
    *, activation, eps, keeps_slope=False,
):  # fmt: skip
    """As :func:`jaxllm.ops.gemm.products.pre_norm_mlp_forward`."""
    rows, _, rstd = normed or products.normalize(norms, x, eps=eps)
    up = _layer_with_norm(scale, bias, up_weight, up_bias)
    hidden, *kept = _hidden_layer(rows, *up, activation, keeps_slope)
    down = (hidden, down_weight, down_bias, x)
    if normed is None:
        out, next_normed = linear_residual_forward(*down), None
    else:
        out, next_normed = linear_norm_forward(*down, normed, eps=eps)
    return out, next_normed, rows, rstd, *kept, hidden


def pre_norm_mlp_backward(
    rows, rstd, scale, bias, up_weight, up_bias, down_weight, h, slope, hidden, dout,
    *, activation,
):  # fmt: skip
    """As :func:`jaxllm.ops.gemm.products.pre_norm_mlp_backward`."""
    if slope is None:
        layers = (up_weight, up_bias, down_weight)
        arrays = (rows, rstd, scale, bias, *layers, h, slope, hidden, dout)
        return products.pre_norm_mlp_backward(activations, norms, arrays, activation)
    if _one_kernel_makes_both(rows, hidden, dout):
        dh, dup_bias = _matmul_scale(dout, down_weight, slope)
        dweight, ddown_weight, dh, dout = _weight_gradients(rows, dh, hidden, dout)
    else:
        ddown_weight, dout = products.weight_gradient_first(hidden, dout)
        dh, dup_bias = _matmul_scale(dout, down_weight, slope)
        dweight, dh = products.weight_gradient_first(rows, dh)
    arrays = (dh, up_weight, up_bias, dweight, dup_bias, rows, rstd, scale, bias, dout)
    dx, dscale, dbias, dup_weight, ddown_bias = linear_normed_backward(*arrays)
    return dx, dscale, dbias, dup_weight, dup_bias, ddown_weight, ddown_bias


def _one_kernel_makes_both(rows, hidden, dout) -> bool:
    """Whether it makes the gradients of ``up``'s and ``down``'s weights."""
    if math.prod(rows.shape[:-1]) < _MANY_GRADIENT_ROWS:
        return False
    arrays = (rows, hidden, hidden, dout)
    return not weight_gradients_unsupported(*arrays, sms_of_tile=1)


def fused_unsupported(x, columns: int) -> str | None:
    """Why the product of ``x`` and a matrix of so many columns is XLA's; None if it is ours."""
    *outer, width = x.shape
    rows = math.prod(outer)
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x has dtype {x.dtype}; the fused product takes bfloat16 and float16"
    if width % 8 or columns % 8 or width == 0:
        return (
            f"the product of {x.shape} and {(width, columns)} has widths that are no multiples of "
            "8, 16 bytes, as the copy engine needs them"
        )
    if max(rows, width, columns) >= _MAX_SIZE:
        return f"the product of {x.shape} and {(width, columns)} has a size of 2^31 or more"
    if reason := ffi.no_hopper_reason():
        return reason
    if _gpu().clusters == 0:
        return "no two SMs of this GPU can run a cluster of the kernel"
    tiles, sms = _tiles(rows, columns), _gpu().multiprocessors
    if tiles < _MIN_TILES_OF_SM * sms:
        return f"the product has {tiles} tiles of {_TILE}, too few to fill {sms} SMs"
    return None


def _gpu() -> ffi.Device:
    """The GPU that a call is compiled for, where it is known to be Hopper's."""
    gpu = ffi.device()
    assert gpu is not None
    return gpu


def _tiles(rows: int, columns: int) -> int:
    return math.prod(-(-size // tile) for size, tile in zip((rows, columns), _TILE, strict=True))


def _matmul_bias_gelu(x, weight, bias, *, slope=False):
    """Returns ``gelu(x @ weight + bias)`` and GELU's slope there, or else ``x @ weight``.

    The slope is kept as slopes.py says.
    """
    *outer, columns = *x.shape[:-1], weight.shape[1]
    out = kept = jax.ShapeDtypeStruct((*outer, columns), x.dtype)
    if slope:
        kept = jax.ShapeDtypeStruct(slopes.shape_of(math.prod(outer), columns), x.dtype)
    return tuple(ffi.call("matmul_bias_gelu", (out, kept), x, weight, bias, slope=slope))


def _matmul_scale(x, weight, slope):
    """Returns ``(x @ weight.T) * slope`` and its sum over rows."""
    *outer, _ = x.shape
    columns = weight.shape[0]
    row_tiles = -(-math.prod(outer) // _TILE[0])
    results = (
        jax.ShapeDtypeStruct((*outer, columns), x.dtype),
        jax.ShapeDtypeStruct((columns,), x.dtype),
        jax.ShapeDtypeStruct((row_tiles, columns), jnp.float32),
    )
    return tuple(ffi.call("matmul_scale", results, x, weight, slope)[:2])


def _matmul_residual(x, weight, bias, residual):
    """Returns ``x @ weight + bias + residual``, rounded once."""
    if bias is None:
        bias = jnp.zeros(weight.shape[1:], x.dtype)
    total = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    return ffi.call("matmul_residual", [total], x, weight, bias, residual)[0]


def matmul_head_sums(x, weight, saved, tokens: int):
    """Returns ``x @ weight.T`` and two float32 sums of it, as attention's backward wants them.

    One, (sequences, heads, tokens), is over the 64 columns of each head, times ``saved``; the other
    over every 128 rows. ``tokens``, of a sequence, is a multiple of those.
    """
    rows, columns = math.prod(x.shape[:-1]), weight.shape[0]
    results = (
        jax.ShapeDtypeStruct((*x.shape[:-1], columns), x.dtype),
        jax.ShapeDtypeStruct((rows // tokens, columns // HEAD_WIDTH, tokens), jnp.float32),
        jax.ShapeDtypeStruct((rows // _TILE[0], columns), jnp.float32),
    )
    return tuple(ffi.call("matmul_head_sums", results, x, weight, saved))


def norm_unsupported(x, columns: int) -> str | None:
    """Why a product is not made by a kernel that goes on to a norm of its rows, or its gradient."""
    if reason := fused_unsupported(x, columns):
        return reason
    tiles, most = _tiles(1, columns), min(_gpu().clusters, _MAX_ROW_TILES)
    if tiles > most:
        return f"a row of {columns} columns has {tiles} tiles, and no more than {most} run at once"
    return None


def _layer_with_norm(scale, norm_bias, weight, bias) -> tuple[Any, Any]:
    """As :func:`jaxllm.ops.gemm.products.with_norm`, in one kernel."""
    if _norm_layer_unsupported(scale, weight):
        return products.with_norm(scale, norm_bias, weight, bias)
    results = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (weight, bias)]
    return tuple(ffi.call("layer_with_norm", results, scale, norm_bias, weight, bias))


def _layer_without_norm(scale, norm_bias, weight, dweight, dbias):
    """As :func:`jaxllm.ops.gemm.products.without_norm`, in one kernel."""
    arrays = (scale, norm_bias, weight, dweight, dbias)
    if _norm_layer_unsupported(scale, weight):
        return products.without_norm(*arrays)
    results = [
        jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (scale, norm_bias, weight)
    ]
    return tuple(ffi.call("layer_without_norm", results, *arrays))


def _norm_layer_unsupported(scale, weight) -> str | None:
    if scale.dtype != weight.dtype:
        return f"scale has dtype {scale.dtype} beside a weight of {weight.dtype}"
    if weight.dtype not in (jnp.bfloat16, jnp.float16):
        return f"weight has dtype {weight.dtype}; the kernel takes bfloat16 and float16"
    if weight.shape[1] % 8:
        return f"weight has {weight.shape[1]} columns, no multiple of 8, 16 bytes"
    if max(weight.shape) >= _MAX_LAYER_SIDE:
        return f"weight has shape {weight.shape}, a side of 2^30 or more"
    return None


def _matmul_norm(x, weight, bias, rows, mean, rstd, *, eps):
    """Returns ``x @ weight + bias + rows / rstd + mean``, normalized, and its mean and rstd."""
    if bias is None:
        bias = jnp.zeros(weight.shape[1:], x.dtype)
    statistic = jax.ShapeDtypeStruct(rstd.shape, jnp.float32)
    results = (
        jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        statistic,
        statistic,
        _row_sums(rows),
    )
    arrays = (x, weight, bias, rows, mean, rstd)
    return tuple(ffi.call("matmul_norm", results, *arrays, eps=eps)[:3])


def _matmul_norm_gradient(dout, weight, rows, rstd, dtotal):
    """Adds the gradient of a layer norm's input to ``dtotal``.

    That of its output, ``rows``, is ``dout @ weight.T``. ``dtotal`` is written over, where nobody
    else needs it.

    Returns:
        ``(dx, dtotal_sum)``; the latter is the sum over rows of ``dtotal``.
    """
    columns = weight.shape[0]
    # The kernel has as many clusters as run at once on this process's smallest GPU.
    partial_rows = _gpu().clusters // _tiles(1, columns) * _NORM_PARTIAL_ROWS
    results = (
        jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        jax.ShapeDtypeStruct((columns,), dout.dtype),
        jax.ShapeDtypeStruct((partial_rows, columns), jnp.float32),
        _row_sums(rows),
    )
    arrays = (dout, weight, rows, rstd, dtotal)
    return tuple(ffi.call("matmul_norm_gradient", results, *arrays, aliases={4: 0})[:2])


def _row_sums(rows) -> jax.ShapeDtypeStruct:
    """A workspace: two numbers for each row of each tile, of pairs of tiles."""
    *outer, columns = rows.shape
    row_tiles, column_tiles = -(-math.prod(outer) // _TILE[0]), -(-columns // _TILE[1])
    shape = (-(-row_tiles // 2) * 2, column_tiles, 2 * _TILE[0])
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def matmul_unsupported(a, b, *_, **__) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    if a.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"a has dtype {a.dtype}; the kernels take float32, bfloat16, float16"
    if max(*a.shape, *b.shape) >= _MAX_SIZE:
        return f"a {a.shape} or b {b.shape} has a size of 2^31 or more"
    return None


# Its first arrays are the forward's, and its products no larger.
matmul_backward_unsupported = matmul_unsupported
matmul_slower = matmul_backward_slower = products.matmul_slower


def matmul_forward(a, b, bias, *, transpose_a, transpose_b, activation, out_dtype, precision):
    """Returns ``(out, h)``; ``h`` is the product alone, None without an activation."""
    turns = (transpose_a, transpose_b)
    return _matmul(a, b, *turns, bias, activation, out_dtype=out_dtype, precision=precision)


def matmul_backward(
    a, b, bias, h, dout, *, transpose_a, transpose_b, activation, out_dtype, precision
):
    """Returns ``(da, db, dbias)``."""
    del activation, out_dtype

    def multiply(*factors):
        return _matmul(*factors, out_dtype=a.dtype, precision=precision)[0]

    turns = (transpose_a, transpose_b)
    return products.matmul_backward(activations, multiply, a, b, bias, h, dout, turns)


def _matmul(a, b, transpose_a, transpose_b, bias=None, activation=None, *, out_dtype, precision):
    out_dtype = jnp.dtype(out_dtype or a.dtype)
    shape = (a.shape[1 if transpose_a else 0], b.shape[0 if transpose_b else 1])
    # The kernels write the dtype of the factors or float32.
    written = a.dtype if out_dtype == a.dtype else jnp.float32
    out = jax.ShapeDtypeStruct(shape, written)
    h = out if activation else jax.ShapeDtypeStruct((0,), written)
    out, h = ffi.call(
        "matmul",
        (out, h),
        a,
        b,
        jnp.zeros((0,), a.dtype) if bias is None else bias,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        gelu=activation == "gelu",
        tf32=precision == "tf32",
    )
    return out.astype(out_dtype), h.astype(out_dtype) if activation else None


def matvec_unsupported(w, x) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"x has dtype {x.dtype}; the kernel takes float32, bfloat16, float16"
    return None


def matvec(w, x):
    """Returns ``out``."""
    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), x.dtype)
    (out,) = ffi.call("matvec", [result], w, x)
    return out
