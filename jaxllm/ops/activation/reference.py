r"""Activations in ``jax.numpy``: the definition of each op, and its derivative by hand.

With :math:`u = \sqrt{2/\pi}\,(x + 0.044715 x^3)` and :math:`t = \tanh u`, GELU is
:math:`\frac{1}{2} x (1 + t)`. Since :math:`\tanh' = 1 - \tanh^2`, the product rule gives

.. math::
    dx = dout \left( \tfrac{1}{2} (1 + t)
         + \tfrac{1}{2} x\,(1 - t^2) \sqrt{2/\pi}\,(1 + 3 \cdot 0.044715 x^2) \right)

Both directions compute in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
# Beyond it 1 - tanh^2 is exactly zero in float64 too, so x may be clamped to it in the derivative:
# the square of a huge x would overflow, and infinity times zero is NaN.
_SATURATION = 30.0


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def gelu(x):
    """The definition of ``gelu``, for JAX to differentiate."""
    return gelu_forward(x)


def gelu_forward(x):
    """Returns ``out``."""
    wide = _wide(x)
    t = jnp.tanh(_ROOT_2_OVER_PI * (wide + _CUBIC * wide**3))
    return (0.5 * wide * (1 + t)).astype(x.dtype)


def gelu_backward(x, dout):
    """Returns ``dx``."""
    wide = jnp.clip(_wide(x), -_SATURATION, _SATURATION)
    square = wide * wide
    t = jnp.tanh(_ROOT_2_OVER_PI * (wide + _CUBIC * wide * square))
    du = _ROOT_2_OVER_PI * (1 + 3 * _CUBIC * square)
    slope = 0.5 * (1 + t) + 0.5 * wide * (1 - t * t) * du
    return (slope * _wide(dout)).astype(x.dtype)
