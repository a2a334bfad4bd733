r"""Normalization in ``jax.numpy``: the reference implementations, with hand-written gradients.

With :math:`n` the normalized row, :math:`r` its ``rstd``, and :math:`g = scale \cdot dout` the
gradient that reaches ``n``, the chain rule through mean and variance gives for one row

.. math::
    dx = r\,(g - \overline{g} - n\,\overline{g n})

where a bar is the mean over the row: ``g`` loses its component along the constant vector, because
the forward subtracts the mean, and its component along ``n``, because the forward divides by the
standard deviation. RMS normalization subtracts no mean and has no :math:`\overline{g}` term. Over
all rows

.. math::
    dscale = \sum_{rows} n \cdot dout \qquad dbias = \sum_{rows} dout

and the gradient of a bias that was added to ``x`` is :math:`\sum_{rows} dx`. Statistics and sums
are float32 (float64 for float64 inputs). A forward without a backward pass is called with
``statistics=False`` and returns None for each statistic.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _sum_rows(values: Array, like: Array) -> Array:
    return values.sum(axis=tuple(range(values.ndim - 1))).astype(like.dtype)


def rounded_sum(x: Array, residual: Array | None, x_bias: Array | None = None) -> Array:
    """``x + x_bias + residual``, rounded once to the dtype of ``x``."""
    if residual is None:
        return x
    # The backward reads the stored, rounded h, so the statistics must be of the rounded h too. XLA
    # by itself computes them from the unrounded sum.
    dtype = jnp.finfo(x.dtype)
    h = x + residual
    if x_bias is not None:
        h = (_wide(x) + _wide(x_bias) + _wide(residual)).astype(x.dtype)
    return lax.reduce_precision(h, dtype.nexp, dtype.nmant)


def layer_norm(x, scale, bias, *, eps):
    """``layer_norm`` for JAX to differentiate, without a hand-written gradient."""
    return layer_norm_forward(x, scale, bias, eps=eps)[0]


def layer_norm_forward(x, scale, bias, *, eps, statistics=True):
    """Returns ``(out, mean, rstd)``."""
    wide = _wide(x)
    mean = wide.mean(axis=-1)
    centred = wide - mean[..., None]
    rstd = lax.rsqrt(jnp.mean(centred * centred, axis=-1) + eps)
    out = centred * rstd[..., None] * _wide(scale) + _wide(bias)
    return out.astype(x.dtype), *((mean, rstd) if statistics else (None, None))


def layer_norm_backward(x, scale, mean, rstd, dout):
    """Returns ``(dx, dscale, dbias)``."""
    n = (_wide(x) - mean[..., None]) * rstd[..., None]
    g = _wide(dout) * _wide(scale)
    mean_g = g.mean(axis=-1, keepdims=True)
    mean_gn = (g * n).mean(axis=-1, keepdims=True)
    dx = rstd[..., None] * (g - mean_g - n * mean_gn)
    return dx.astype(x.dtype), _sum_rows(n * _wide(dout), scale), _sum_rows(_wide(dout), scale)


def rms_norm(x, scale, *, eps):
    """``rms_norm`` for JAX to differentiate, without a hand-written gradient."""
    return rms_norm_forward(x, scale, eps=eps)[0]


def rms_norm_forward(x, scale, *, eps, statistics=True):
    """Returns ``(out, rstd)``."""
    wide = _wide(x)
    rstd = lax.rsqrt(jnp.mean(wide * wide, axis=-1) + eps)
    out = wide * rstd[..., None] * _wide(scale)
    return out.astype(x.dtype), rstd if statistics else None


def rms_norm_backward(x, scale, rstd, dout):
    """Returns ``(dx, dscale)``."""
    n = _wide(x) * rstd[..., None]
    g = _wide(dout) * _wide(scale)
    dx = rstd[..., None] * (g - n * (g * n).mean(axis=-1, keepdims=True))
    return dx.astype(x.dtype), _sum_rows(n * _wide(dout), scale)


def add_layer_norm(x, residual, scale, bias, x_bias=None, *, eps):
    """``add_layer_norm`` for JAX to differentiate, without a hand-written gradient."""
    return add_layer_norm_forward(x, residual, x_bias, scale, bias, eps=eps)[:2]


def add_layer_norm_forward(x, residual, x_bias, scale, bias, *, eps, statistics=True):
    """Returns ``(out, h, mean, rstd)``; the statistics are of the rounded ``h``."""
    h = rounded_sum(x, residual, x_bias)
    out, mean, rstd = layer_norm_forward(h, scale, bias, eps=eps, statistics=statistics)
    return out, h, mean, rstd


def add_layer_norm_backward(h, x_bias, scale, mean, rstd, dout, dh):
    """Returns ``(dx, dx_bias, dscale, dbias)``; ``dx`` is the gradient of ``x`` and ``residual``.

    ``dh`` is None where only the norm reads the sum.
    """
    dx, dscale, dbias = layer_norm_backward(_wide(h), scale, mean, rstd, dout)
    if dh is not None:
        dx += _wide(dh)
    dx_bias = None if x_bias is None else _sum_rows(dx, x_bias)
    return dx.astype(h.dtype), dx_bias, dscale, dbias


def add_rms_norm(x, residual, scale, *, eps):
    """``add_rms_norm`` for JAX to differentiate, without a hand-written gradient."""
    return add_rms_norm_forward(x, residual, scale, eps=eps)[:2]


def add_rms_norm_forward(x, residual, scale, *, eps, statistics=True):
    """Returns ``(out, h, rstd)``; ``rstd`` is of the rounded ``h``."""
    h = rounded_sum(x, residual)
    out, rstd = rms_norm_forward(h, scale, eps=eps, statistics=statistics)
    return out, h, rstd


def add_rms_norm_backward(h, scale, rstd, dout, dh):
    """Returns ``(dx, dscale)``; ``dh`` as in :func:`add_layer_norm_backward`."""
    dx, dscale = rms_norm_backward(_wide(h), scale, rstd, dout)
    if dh is not None:
        dx += _wide(dh)
    return dx.astype(h.dtype), dscale
