r"""Activations in ``jax.numpy``: the reference implementations, with hand-written gradients.

With :math:`s(z) = 1 / (1 + e^{-z})`, whose derivative is :math:`s (1 - s)`:

.. math::
    sigmoid' = s (1 - s) \qquad silu(x) = x\,s(x) \qquad silu' = s + x s (1 - s)

SwiGLU multiplies two factors, so :math:`dgate = dout \cdot up \cdot silu'(gate)` and
:math:`dup = dout \cdot silu(gate)`.

With :math:`u = \sqrt{2/\pi}\,(x + 0.044715 x^3)` and :math:`t = \tanh u`, GELU is
:math:`\frac{1}{2} x (1 + t)`. Since :math:`\tanh' = 1 - \tanh^2`, the product rule gives

.. math::
    dx = dout \left( \tfrac{1}{2} (1 + t)
         + \tfrac{1}{2} x\,(1 - t^2) \sqrt{2/\pi}\,(1 + 3 \cdot 0.044715 x^2) \right)

A bias is added to every row, so its gradient is the sum over rows of the gradient of ``x``. Both
directions compute in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

_ROOT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
# The derivative clamps x to this range. Beyond it 1 - tanh^2 is exactly zero even in float64, and
# the square of a huge x would overflow: infinity times zero is NaN.
_SATURATION = 30.0


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _sum_rows(values: Array) -> Array:
    return values.sum(axis=tuple(range(values.ndim - 1)))


def _gelu(x: Array) -> Array:
    t = jnp.tanh(_ROOT_2_OVER_PI * (x + _CUBIC * x**3))
    return 0.5 * x * (1 + t)


def _gelu_derivative(x: Array) -> Array:
    x = jnp.clip(x, -_SATURATION, _SATURATION)
    square = x * x
    t = jnp.tanh(_ROOT_2_OVER_PI * (x + _CUBIC * x * square))
    du = _ROOT_2_OVER_PI * (1 + 3 * _CUBIC * square)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du


def gelu(x):
    """``gelu`` for JAX to differentiate, without a hand-written gradient."""
    return gelu_forward(x)


def gelu_forward(x):
    """Returns ``out``."""
    return _gelu(_wide(x)).astype(x.dtype)


def gelu_backward(x, dout):
    """Returns ``dx``."""
    return (_gelu_derivative(_wide(x)) * _wide(dout)).astype(x.dtype)


def bias_gelu(x, bias):
    """``bias_gelu`` for JAX to differentiate, without a hand-written gradient."""
    return bias_gelu_forward(x, bias)


def bias_gelu_forward(x, bias):
    """Returns ``out``."""
    return _gelu(_wide(x) + _wide(bias)).astype(x.dtype)


def bias_gelu_backward(x, bias, dout):
    """Returns ``(dx, dbias)``."""
    dx = _gelu_derivative(_wide(x) + _wide(bias)) * _wide(dout)
    return dx.astype(x.dtype), _sum_rows(dx).astype(bias.dtype)


def bias_add(x, bias):
    """``bias_add`` for JAX to differentiate, without a hand-written gradient."""
    return bias_add_forward(x, bias)


def bias_add_forward(x, bias):
    """Returns ``out``."""
    return (_wide(x) + _wide(bias)).astype(x.dtype)


def bias_add_backward(dout):
    """Returns ``dbias``; the gradient of ``x`` is ``dout``."""
    return _sum_rows(_wide(dout)).astype(dout.dtype)


def swiglu(gate, up):
    """``swiglu`` for JAX to differentiate, without a hand-written gradient."""
    return swiglu_forward(gate, up)


def swiglu_forward(gate, up):
    """Returns ``out``."""
    return (jax.nn.silu(_wide(gate)) * _wide(up)).astype(gate.dtype)


def swiglu_backward(gate, up, dout):
    """Returns ``(dgate, dup)``."""
    wide, dout = _wide(gate), _wide(dout)
    s = jax.nn.sigmoid(wide)
    dgate = dout * _wide(up) * s * (1 + wide * (1 - s))
    return dgate.astype(gate.dtype), (dout * wide * s).astype(up.dtype)


def swiglu_packed(x, *, by_parts=False):
    """``swiglu_packed`` for JAX to differentiate, without a hand-written gradient."""
    return swiglu_packed_forward(lax.collapse(x, x.ndim - 2) if by_parts else x)


def swiglu_packed_forward(x):
    """Returns ``out``."""
    gate, up = jnp.split(x, 2, axis=-1)
    return swiglu_forward(gate, up)


def swiglu_packed_backward(x, dout):
    """Returns ``dx``."""
    gate, up = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(swiglu_backward(gate, up, dout), axis=-1)


def relu(x):
    """``relu`` for JAX to differentiate, without a hand-written gradient."""
    return relu_forward(x)


def relu_forward(x):
    """Returns ``out``."""
    return jax.nn.relu(x)


def relu_backward(x, dout):
    """Returns ``dx``."""
    return jnp.where(x > 0, dout, jnp.zeros_like(dout))


def sigmoid(x):
    """``sigmoid`` for JAX to differentiate, without a hand-written gradient."""
    return sigmoid_forward(x)


def sigmoid_forward(x):
    """Returns ``out``."""
    return jax.nn.sigmoid(_wide(x)).astype(x.dtype)


def sigmoid_backward(x, dout):
    """Returns ``dx``."""
    s = jax.nn.sigmoid(_wide(x))
    return (_wide(dout) * s * (1 - s)).astype(x.dtype)


def add(x, y):
    """``add`` for JAX to differentiate, without a hand-written gradient."""
    return add_forward(x, y)


def add_forward(x, y):
    """Returns ``out``; both gradients are the output gradient."""
    return x + y
