"""``linear`` and ``mlp`` with the Pallas activation kernels, products by XLA; and ``matvec``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.ops.activation import pallas as activations
from jaxllm.ops.gemm import products


def linear_unsupported(x, weight, *_, **__) -> str | None:
    """Why the kernels cannot serve a call, in either direction; None if they can."""
    h = jax.ShapeDtypeStruct((*x.shape[:-1], weight.shape[1]), x.dtype)
    return activations.gelu_unsupported(h)


mlp_unsupported = linear_unsupported


def linear_forward(x, weight, bias, *, activation, interpret=False):
    """Returns ``(out, h)``; ``h`` is the product alone, None without an activation."""
    return products.forward(activations, x, weight, bias, activation, interpret=interpret)


def linear_backward(x, weight, bias, h, dout, *, activation, interpret=False):
    """Returns ``(dx, dweight, dbias)``."""
    return products.backward(activations, x, weight, bias, h, dout, activation, interpret=interpret)


def mlp_forward(x, up_weight, up_bias, down_weight, down_bias, *, activation, interpret=False):
    """Returns ``(out, h, hidden)``: ``h`` before bias and activation, ``hidden`` after them."""
    arrays = (x, up_weight, up_bias, down_weight, down_bias)
    return products.mlp_forward(activations, *arrays, activation, interpret=interpret)


def mlp_backward(*arrays, activation, interpret=False):
    """Returns the gradients of ``x``, of ``up``'s weight and bias, and of ``down``'s."""
    return products.mlp_backward(activations, arrays, activation, interpret=interpret)


_ROWS = 16  # of x, as Triton's products ask


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
    out = pl.pallas_call(
        functools.partial(_matvec_kernel, M=M, K=K, tile=tile),
        grid=(pl.cdiv(M, tile[0]),),
        out_shape=jax.ShapeDtypeStruct((_ROWS, M), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
    )(w, jnp.pad(x, ((0, _ROWS - rows), (0, 0))))
    return out[:rows]


def _add_product(sums, product, dtype):
    """Adds a tile's product to ``(total, lost)``, where ``lost`` is what rounding added to it.

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
        return _add_product(sums, plgpu.dot(x, w, trans_b=True, precision=precision), x.dtype)

    zeros = jnp.zeros((_ROWS, tile[0]), jnp.float32)
    total, _ = lax.fori_loop(0, pl.cdiv(K, tile[1]), visit, (zeros, zeros))
    mask = jnp.broadcast_to(inside[None, :], (_ROWS, tile[0]))
    plgpu.store(out_ref.at[pl.ds(0, _ROWS), rows], total.astype(out_ref.dtype), mask=mask)
