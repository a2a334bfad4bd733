r"""GEMMs fused with what precedes or follows them, each an :class:`~jaxllm.core.dispatch.Op`.

On a Hopper GPU one kernel serves a large enough call in 16 bits. Otherwise the parts run: a GEMM by
XLA, and the backend's kernels of the other families.

==========================  ================================================================
``matmul_bias``             :math:`x W + b`
``matmul_bias_gelu``        :math:`gelu(x W + b)`, saving GELU's derivative or its input
``matmul_dgelu``            :math:`dh = (dout\, W^T) \odot gelu'`, and its sum over rows
``matmul_residual``         :math:`x W + b + residual`
``matmul_residual_norm``    the same, and its layer norm :math:`\hat x` with mean and rstd
``matmul_norm_backward``    :math:`dtotal` plus the layer norm's backward of :math:`dout\, W^T`
``matmul_delta``            :math:`dout\, W^T`, and attention's delta of it
``fold_norm``               a norm's scale and bias folded into the linear layer after it
``wgrad_pair``              the weight gradients of two layers
==========================  ================================================================

**Folding.** A layer norm's scale :math:`s` and bias :math:`t` belong to the layer after it:
:math:`(s \hat x + t) W + b = \hat x W' + b'` with :math:`W' = diag(s) W` and :math:`b' = b + t W`.
So kernels handle :math:`\hat x` alone. With :math:`M = \hat x^T dh` the gradients are

.. math::
    dW = diag(s) M + t\, db^T \qquad ds = \sum_{columns} W \odot M \qquad dt = W db

and no sum over rows is left of the norm's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxllm.core.dispatch import Direction, Op, dispatch, serves
from jaxllm.core.layout import is_packed
from jaxllm.core.partition import column_shards
from jaxllm.ops.activation.api import BIAS_ADD, BIAS_GELU
from jaxllm.ops.gemm import cuda_fused, reference, tile_order
from jaxllm.ops.gemm.gradients import dgrad, wgrad
from jaxllm.ops.norm.api import LAYER_NORM


class Normalized(NamedTuple):
    """A layer norm without its scale and bias.

    Attributes:
        x_hat: ``(x - mean) * rstd``, in the dtype of ``x``.
        mean: Of each row, float32.
        rstd: The reciprocal of its standard deviation, float32.
    """

    x_hat: Float[Array, "*rows D"]
    mean: Float[Array, "*rows"]
    rstd: Float[Array, "*rows"]


def normalize(backend, x, eps) -> Normalized:
    """The layer norm of ``x`` without scale and bias."""
    ones = jnp.ones(x.shape[-1:], x.dtype)
    arrays = (x, ones, jnp.zeros_like(ones))
    return Normalized(*dispatch(LAYER_NORM, Direction.FORWARD, backend, *arrays, eps=eps))


def gemm_unsupported(x, weight) -> str | None:
    """Why no fused GEMM multiplies ``x`` by a weight."""
    if x.ndim == 0 or weight.ndim != 2:
        return f"x has shape {x.shape} and the weight {weight.shape}, which is no linear layer"
    return cuda_fused.gemm_unsupported(x, weight.shape[1])


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _matmul_bias(_, x, weight, bias):
    # XLA adds a bias in the GEMM's epilogue where it is an argument of the program.
    return jnp.dot(x, weight) + bias


def saves_derivative(backend, x, weight, bias, next_weight) -> bool:
    """Whether a layer saves GELU's derivative for the backward, and not GELU's input.

    That changes what the forward returns, so it is decided for the whole call and not for a shard.
    The derivative is in tiles, which shards may not cut; GELU's input is sharded along any columns.
    """
    shards = column_shards(x, weight, next_weight)
    if shards > 1 and not tile_order.has_whole_tiles(weight.shape[1], shards):
        return False
    options: dict[str, Any] = {"saves_derivative": True, "out_columns": next_weight.shape[1]}
    return serves(MATMUL_BIAS_GELU, backend, x, weight, bias, **options)


def _matmul_bias_gelu(backend, x, weight, bias, *, saves_derivative, out_columns):
    if saves_derivative:  # the shard is too small for the kernel
        options: dict[str, Any] = {"saves_derivative": True, "out_columns": out_columns}
        out, derivative = reference.matmul_bias_gelu(x, weight, bias, **options)
        return out, tile_order.pack(derivative)
    h = jnp.dot(x, weight)
    return dispatch(BIAS_GELU, Direction.FORWARD, backend, h, bias), h


def _matmul_dgelu(backend, dout, weight, saved, bias):
    dhidden = dgrad(dout, weight)
    if not is_packed(saved):
        return dispatch(BIAS_GELU, Direction.BACKWARD, backend, saved, bias, dhidden)
    dh = (dhidden * saved.unpack()).astype(dhidden.dtype)
    return dh, dispatch(BIAS_ADD, Direction.BACKWARD, backend, dh)


def _matmul_residual(_, x, weight, bias, residual):
    # The GEMM's result is rounded, and then the sum.
    total = _wide(jnp.dot(x, weight)) + _wide(residual)
    return (total if bias is None else total + _wide(bias)).astype(residual.dtype)


def _matmul_residual_norm(backend, x, weight, bias, residual, norm, *, eps):
    del norm
    out = matmul_residual(backend, x, weight, bias, residual)
    return out, tuple(normalize(backend, out, eps))


def _matmul_norm_backward(backend, dout, weight, x_hat, rstd, dtotal):
    # Of rows that are normalized the mean is zero and rstd one, but for what eps keeps of them; and
    # the chain rule through the norm is linear in rstd.
    ones, statistics = jnp.ones(x_hat.shape[-1:], x_hat.dtype), jnp.zeros_like(rstd)
    arrays = (x_hat, ones, statistics, jnp.ones_like(rstd), dgrad(dout, weight))
    dx_hat, *_ = dispatch(LAYER_NORM, Direction.BACKWARD, backend, *arrays)
    dx = (_wide(dtotal) + rstd[..., None] * _wide(dx_hat)).astype(dtotal.dtype)
    return dx, dispatch(BIAS_ADD, Direction.BACKWARD, backend, dtotal)


def _matmul_delta(_, dout, weight, out, **__):
    del out
    return dgrad(dout, weight), None, None


def _fold_norm(_, scale, norm_bias, weight, bias):
    wide = _wide(weight)
    offset = jnp.dot(norm_bias.astype(weight.dtype), weight, preferred_element_type=wide.dtype)
    folded = (_wide(scale)[:, None] * wide).astype(weight.dtype)
    # XLA would recompute them in each kernel that reads them.
    return lax.optimization_barrier((folded, (_wide(bias) + offset).astype(weight.dtype)))


def _fold_norm_backward(_, scale, norm_bias, weight, dweight, dbias):
    wide = _wide(dweight)
    dscale = jnp.sum(_wide(weight) * wide, axis=1)
    of_weight = _wide(scale)[:, None] * wide + _wide(norm_bias)[:, None] * _wide(dbias)
    dnorm_bias = jnp.dot(weight, dbias)
    return (
        dscale.astype(scale.dtype),
        dnorm_bias.astype(scale.dtype),
        of_weight.astype(weight.dtype),
    )


def _wgrad_pair(_, x, dout, other_x, other_dout, **__):
    other_dweight, other_dout = wgrad(other_x, other_dout)
    dweight, dout = wgrad(x, dout)
    return dweight, other_dweight, dout, other_dout


def _fusion(parts, **options) -> tuple[Op, Any]:
    op = Op(parts.__name__.lstrip("_"), cuda=cuda_fused, parts=parts, **options)

    def call(backend, *arrays, **static):
        return dispatch(op, Direction.INFERENCE, backend, *arrays, **static)

    return op, call


# Functions of a backend, arrays and options.
MATMUL_BIAS, matmul_bias = _fusion(_matmul_bias)
MATMUL_BIAS_GELU, matmul_bias_gelu = _fusion(_matmul_bias_gelu, reference=reference)
MATMUL_DGELU, matmul_dgelu = _fusion(_matmul_dgelu)
MATMUL_RESIDUAL, matmul_residual = _fusion(_matmul_residual)
MATMUL_RESIDUAL_NORM, matmul_residual_norm = _fusion(_matmul_residual_norm)
MATMUL_NORM_BACKWARD, matmul_norm_backward = _fusion(_matmul_norm_backward)
MATMUL_DELTA, matmul_delta = _fusion(_matmul_delta, reference=reference)
FOLD_NORM, fold_norm = _fusion(_fold_norm)
FOLD_NORM_BACKWARD, fold_norm_backward = _fusion(_fold_norm_backward)
WGRAD_PAIR, wgrad_pair = _fusion(_wgrad_pair)
