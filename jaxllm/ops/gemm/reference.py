"""GEMMs in ``jax.numpy``."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jaxllm.ops.activation import reference as activations
from jaxllm.ops.rounding import amax_of_columns


def linear(x, weight, bias=None, *, activation=None, precision=None):
    """The reference implementation of ``linear``, for JAX to differentiate."""
    assert precision is None  # JAX would not find the derivatives of the float8 layer
    h = jnp.tensordot(x, weight, 1)  # the columns may be in parts
    if activation is None:
        return h if bias is None else h + bias
    return activations.gelu_forward(h) if bias is None else activations.bias_gelu_forward(h, bias)


def matmul(a, b, bias=None, **options):
    """The reference implementation of ``matmul``, for JAX to differentiate."""
    return matmul_forward(a, b, bias, **options)[0]


def matmul_forward(a, b, bias, *, transpose_a, transpose_b, activation, out_dtype, precision):
    """Returns ``(out, h)``; ``h`` is the GEMM's result alone, None without an activation."""
    out_dtype = jnp.dtype(out_dtype or a.dtype)
    # On a GPU the default is TF32.
    chosen = lax.Precision.DEFAULT if precision == "tf32" else lax.Precision.HIGHEST
    axes = ((0 if transpose_a else a.ndim - 1,), (1 if transpose_b else 0,))
    wide = jnp.promote_types(out_dtype, a.dtype)
    h = lax.dot_general(a, b, (axes, ((), ())), chosen, preferred_element_type=wide)
    h = h.astype(out_dtype)
    offset = None if bias is None else bias.astype(out_dtype)
    if activation is None:
        return (h if offset is None else h + offset), None
    if offset is None:
        return activations.gelu_forward(h), h
    return activations.bias_gelu_forward(h, offset), h


def matvec(w, x):
    """Returns ``out``."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum("mk,rk->rm", w.astype(wide), x.astype(wide)).astype(x.dtype)


def float8_matmul(a, b, scale_a, scale_b, bias, *, out_dtype):
    """Returns ``out``."""
    # The products are exact in float32. On a GPU of sm_89 or later, XLA's GemmRewriter replaces
    # this dot with cuBLASLt's float8 GEMM, and pads the sizes to multiples of 16. One of the
    # operands must be float8_e4m3fn; otherwise, and on older GPUs, it becomes a float16 GEMM, which
    # is exact too. At precision DEFAULT cuBLASLt would not add its sums in float32 on the way. It
    # takes scalar scales alone, so the scales and the rounding are an elementwise fusion.
    wide = jnp.promote_types(scale_a.dtype, jnp.float32)
    axes = (((1,), (1,)), ((), ()))
    out = lax.dot_general(a, b, axes, lax.Precision.HIGHEST, preferred_element_type=wide)
    out = out * scale_a[:, None] * scale_b
    out = out if bias is None else out + bias.astype(wide)
    return out.astype(out_dtype)


def float8_matmul_amax(a, b, scale_a, scale_b, bias, *, out_dtype, parts):
    """Returns ``out``, and its largest finite absolute value in each part of the columns."""
    out = float8_matmul(a, b, scale_a, scale_b, bias, out_dtype=out_dtype)
    return out, amax_of_columns(out, parts)


# What fused kernels compute, for the ops whose parts save something else.


def matmul_bias_gelu(x, weight, bias, *, saves_derivative, out_columns):
    """Returns ``gelu(h + bias)``, and GELU's derivative there, or else ``h = x @ weight``."""
    del out_columns
    h = jnp.dot(x, weight)
    out = activations.bias_gelu_forward(h, bias)
    if not saves_derivative:
        return out, h
    derivative, _ = activations.bias_gelu_backward(h, bias, jnp.ones_like(out))
    return out, derivative


def matmul_delta(dout, weight, out, *, heads, kv_heads):
    """Returns ``dout @ weight.T``, its inner product with ``out`` in each head, and sums of rows.

    The latter are float32: the delta of attention's backward, ``(B, heads, T)``, and one row of
    sums for every 128 rows.
    """
    del kv_heads
    B, T, _ = dout.shape
    attended = lax.dot_general(dout, weight, (((2,), (1,)), ((), ())))
    wide = attended.astype(jnp.float32)
    by_head = (wide * out.astype(jnp.float32)).reshape(B, T, heads, -1).sum(-1)
    return attended, by_head.transpose(0, 2, 1), wide.reshape(-1, 128, wide.shape[-1]).sum(1)
