r"""Rotary embeddings in ``jax.numpy``: the definition, and its derivative by hand.

Each pair of columns :math:`(a, b)` of a head is a point that turns by the angle of its position:

.. math::
    a' = a \cos - b \sin \qquad b' = a \sin + b \cos

A rotation's transpose is the rotation back, so the gradient turns by the negative angle: it is the
same function with :math:`-\sin` in place of :math:`\sin`. The tables are constants: no gradient
flows into them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def rope(q, k, cos, sin, *, interleaved):
    """The definition of ``rope``, for JAX to differentiate."""
    turned = rope_forward(
        q, k, lax.stop_gradient(cos), lax.stop_gradient(sin), interleaved=interleaved
    )
    return turned[0] if k is None else turned


def rope_forward(q, k, cos, sin, *, interleaved) -> tuple[Array, Any]:
    """Returns ``(q, k)``, rotated; ``k`` may be None."""
    turned_k = None if k is None else _rotate(k, cos, sin, interleaved)
    return _rotate(q, cos, sin, interleaved), turned_k


def rope_backward(dq, dk, cos, sin, *, interleaved) -> tuple[Array, Any]:
    """Returns the gradients of ``q`` and ``k`` from those of the rotated ones."""
    return rope_forward(dq, dk, cos, -sin, interleaved=interleaved)


def _rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    # An axis for the heads, which all turn alike.
    cos, sin = (table.astype(dtype)[..., None, :] for table in (cos, sin))
    width = 2 * cos.shape[-1]
    pairs = x[..., :width].astype(dtype)
    if interleaved:
        a, b = pairs[..., 0::2], pairs[..., 1::2]
    else:
        a, b = pairs[..., : width // 2], pairs[..., width // 2 :]
    turned = (a * cos - b * sin, a * sin + b * cos)
    if interleaved:
        joined = jnp.stack(turned, axis=-1).reshape(pairs.shape)
    else:
        joined = jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([joined.astype(x.dtype), x[..., width:]], axis=-1)
