r"""Matrix products in ``jax.numpy``: the definition of each op, and its derivative by hand.

With :math:`h = x W + b` and :math:`out = f(h)`, the gradient that reaches :math:`h` is
:math:`dh = dout \cdot f'(h)` (:math:`f' = 1` without an activation), and

.. math::
    dx = dh\, W^T \qquad dW = x^T dh \qquad db = \sum_{rows} dh

For GELU, with :math:`u = \sqrt{2/\pi}\,(h + 0.044715 h^3)` and :math:`t = \tanh u`,

.. math::
    f(h) = \tfrac{1}{2} h (1 + t) \qquad
    f'(h) = \tfrac{1}{2} (1 + t) + \tfrac{1}{2} h\,(1 - t^2) \sqrt{2/\pi}\,(1 + 0.134145 h^2)

Products are written in the dtype of their factors: a GEMM accumulates in float32 whatever it
writes, and a float32 result would cost a pass over memory to round it. What XLA multiplies float32
factors with is JAX's ``jax_default_matmul_precision``. Everything else is float32 (float64 for
float64 inputs).
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax

_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_SATURATION = 30.0  # beyond it gelu' is exactly 0 or 1, and a huge h would overflow on the way


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _gelu(h: Array) -> Array:
    wide = _wide(h)
    t = jnp.tanh(_ROOT_2_OVER_PI * (wide + _CUBIC * wide**3))
    return (0.5 * wide * (1 + t)).astype(h.dtype)


def _gelu_slope(h: Array) -> Array:
    wide = jnp.clip(_wide(h), -_SATURATION, _SATURATION)
    square = wide * wide
    t = jnp.tanh(_ROOT_2_OVER_PI * (wide + _CUBIC * wide * square))
    return 0.5 * (1 + t) + 0.5 * wide * (1 - t * t) * _ROOT_2_OVER_PI * (1 + 3 * _CUBIC * square)


def linear(x, weight, bias=None, *, activation=None):
    """The definition of ``linear``, for JAX to differentiate."""
    return linear_forward(x, weight, bias, activation=activation)[0]


def linear_forward(x, weight, bias, *, activation):
    """Returns ``(out, h)``; ``h`` is what the activation was applied to, None without one."""
    h = jnp.dot(x, weight)
    if bias is not None:
        h = h + bias
    return (h, None) if activation is None else (_gelu(h), h)


def linear_backward(x, weight, bias, h, dout, *, activation):
    """Returns ``(dx, dweight, dbias)``; of the bias only its presence is used."""
    dh = _wide(dout) if activation is None else _gelu_slope(h) * _wide(dout)
    rows = tuple(range(x.ndim - 1))
    dbias = None if bias is None else dh.sum(axis=rows).astype(bias.dtype)
    dh = dh.astype(x.dtype)
    dx = lax.dot_general(dh, weight, (((dh.ndim - 1,), (1,)), ((), ())))
    dweight = lax.dot_general(x, dh, ((rows, rows), ((), ())))
    return dx, dweight, dbias
