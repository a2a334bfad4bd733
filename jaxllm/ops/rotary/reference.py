r"""Rotary embeddings in ``jax.numpy``: the reference implementation, with a hand-written gradient.

Each pair of columns :math:`(a, b)` of a head is rotated by the angle of its position:

.. math::
    a' = a \cos - b \sin \qquad b' = a \sin + b \cos

The transpose of a rotation is its inverse, so the backward rotates by the negative angle: it is the
same function with :math:`-\sin` for :math:`\sin`. The tables are constants without gradients.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def rope(q, k, cos, sin, *, interleaved):
    """``rope`` for JAX to differentiate, without a hand-written gradient."""
    rotated = rope_forward(q, k, cos, sin, interleaved=interleaved)
    return rotated[0] if k is None else rotated


def rope_forward(q, k, cos, sin, *, interleaved) -> tuple[Array, Any]:
    """Returns ``(q, k)``, rotated; ``k`` may be None."""
    cos, sin = lax.stop_gradient((cos, sin))  # forward mode differentiates this function
    rotated_k = None if k is None else _rotate(k, cos, sin, interleaved)
    return _rotate(q, cos, sin, interleaved), rotated_k


def rope_backward(dq, dk, cos, sin, *, interleaved) -> tuple[Array, Any]:
    """Returns ``(dq, dk)`` of the unrotated arrays, given those of the rotated ones."""
    return rope_forward(dq, dk, cos, -sin, interleaved=interleaved)


def rope_packed_forward(qkv, cos, sin, *, heads, kv_heads, interleaved) -> Array:
    """Returns the projection with queries and keys rotated."""
    cos, sin = lax.stop_gradient((cos, sin))  # forward mode differentiates this function
    rotated, values = _split_values(qkv, heads, kv_heads)
    rotated = _rotate(rotated, cos, sin, interleaved)
    return jnp.concatenate([rotated, values], axis=-2).reshape(qkv.shape)


def rope_packed_backward(dqkv, cos, sin, *, heads, kv_heads, interleaved) -> Array:
    """Returns the gradient of the unrotated projection, given that of the rotated one."""
    static = {"heads": heads, "kv_heads": kv_heads, "interleaved": interleaved}
    return rope_packed_forward(dqkv, cos, -sin, **static)


def _split_values(qkv: Array, heads: int, kv_heads: int) -> tuple[Array, Array]:
    """The heads (B, T, ..., H) of a projection that rotate, and those of the values.

    The values are last in both shapes of a projection. One by parts may be a shard.
    """
    if qkv.ndim == 5:
        parts, kv_heads, H = qkv.shape[2:]
        heads = (parts - 2) * kv_heads
    else:
        H = qkv.shape[-1] // (heads + 2 * kv_heads)
    of_heads = qkv.reshape(*qkv.shape[:2], heads + 2 * kv_heads, H)
    return of_heads[..., : heads + kv_heads, :], of_heads[..., heads + kv_heads :, :]


def _rotate(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    # An axis for the heads, which all have the same angles.
    cos, sin = (table.astype(dtype)[..., None, :] for table in (cos, sin))
    width = 2 * cos.shape[-1]
    pairs = x[..., :width].astype(dtype)
    if interleaved:
        a, b = pairs[..., 0::2], pairs[..., 1::2]
    else:
        a, b = pairs[..., : width // 2], pairs[..., width // 2 :]
    rotated = (a * cos - b * sin, a * sin + b * cos)
    if interleaved:
        joined = jnp.stack(rotated, axis=-1).reshape(pairs.shape)
    else:
        joined = jnp.concatenate(rotated, axis=-1)
    return jnp.concatenate([joined.astype(x.dtype), x[..., width:]], axis=-1)
