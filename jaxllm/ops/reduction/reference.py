r"""Reductions of whole arrays in ``jax.numpy``: the reference implementations.

With :math:`dout` the gradient of the scalar output,

.. math::
    dx_i = dout \quad (\text{sum}) \qquad
    da_i = dout \cdot b_i \quad (\text{dot}) \qquad
    dx_i = dout \cdot \frac{[x_i = max]}{\sum_j [x_j = max]} \quad (\text{max})

so the elements that share the maximum share its gradient. None of this needs a kernel: XLA fuses
the broadcast of a scalar into the ops that read it.

Products and sums are float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def reduce_sum(x):
    """``reduce_sum`` for JAX to differentiate, without a hand-written gradient."""
    return jnp.sum(_wide(x))


def reduce_max(x):
    """``reduce_max`` for JAX to differentiate, without a hand-written gradient."""
    if x.size == 0:
        return jnp.array(-jnp.inf, x.dtype)
    # XLA's maximum on a CPU may ignore NaN.
    return jnp.where(jnp.isnan(x).any(), jnp.nan, jnp.max(x)).astype(x.dtype)


def dot(a, b):
    """``dot`` for JAX to differentiate, without a hand-written gradient."""
    return jnp.sum(_wide(a) * _wide(b))


# The backward is in api.py and needs no kernel.
reduce_sum_forward = reduce_sum
reduce_max_forward = reduce_max
dot_forward = dot


def histogram(x, *, bins):
    """Returns the counts."""
    if jnp.iinfo(x.dtype).bits < 32:
        x = x.astype(jnp.int32)  # a narrow dtype may not hold `bins`
    inside = (x >= 0) & (x < bins)
    # A negative index would count from the end; one past the end is dropped.
    bin_of = jnp.where(inside, x, bins).reshape(-1)
    return jnp.zeros(bins, jnp.int32).at[bin_of].add(1, mode="drop")
