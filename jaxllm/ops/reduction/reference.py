r"""Reductions of whole arrays in ``jax.numpy``: the definition of each op.

With :math:`dout` the gradient of the one number that comes out,

.. math::
    dx_i = dout \quad (\text{sum}) \qquad
    da_i = dout \cdot b_i \quad (\text{dot}) \qquad
    dx_i = dout \cdot \frac{[x_i = max]}{\sum_j [x_j = max]} \quad (\text{max})

so the elements that share the maximum share its gradient. None of this needs a kernel: a number
that is spread over an array is best left to XLA, which fuses it into what reads it.

Products and sums are float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def reduce_sum(x):
    """The definition of ``reduce_sum``, for JAX to differentiate."""
    return jnp.sum(_wide(x))


def reduce_max(x):
    """The definition of ``reduce_max``, for JAX to differentiate."""
    if x.size == 0:
        return jnp.array(-jnp.inf, x.dtype)
    # XLA's maximum on a CPU may pass over NaN.
    return jnp.where(jnp.isnan(x).any(), jnp.nan, jnp.max(x)).astype(x.dtype)


def dot(a, b):
    """The definition of ``dot``, for JAX to differentiate."""
    return jnp.sum(_wide(a) * _wide(b))


# There is one direction to implement; see the derivatives in api.py.
reduce_sum_forward = reduce_sum
reduce_max_forward = reduce_max
dot_forward = dot


def histogram(x, *, bins):
    """Returns the counts."""
    if jnp.iinfo(x.dtype).bits < 32:
        x = x.astype(jnp.int32)  # which holds `bins`, as a narrow dtype may not
    inside = (x >= 0) & (x < bins)
    # A negative index would count from the end; one past the end is dropped.
    bin_of = jnp.where(inside, x, bins).reshape(-1)
    return jnp.zeros(bins, jnp.int32).at[bin_of].add(1, mode="drop")
