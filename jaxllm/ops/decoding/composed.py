r"""A block of a Llama for one token a sequence, of the products and the attention of one backend.

With the token's residual stream :math:`x`

.. math::
    q, k, v = split(W_{qkv}\, norm_1(x)) \qquad
    h = x + W_{out}\, attention(rope(q), cache) \qquad
    out = h + W_{down}\, (silu(gate) \cdot up), \quad gate, up = split(W_{gate\_up}\, norm_2(h))

where the cache has got the turned :math:`k`, and :math:`v`, before it is read. The functions take
the backend's ``matvec``, ``quantized_matvec`` and ``decode_attention``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def block(
    matvec: Callable, quantized_matvec: Callable, decode_attention: Callable,
    residual, norm1, norm2, qkv, out, gate_up, down, cos, sin, k_cache, v_cache, lengths, *, eps,
):  # fmt: skip
    """Returns ``(out, k_cache, v_cache)``."""
    B = residual.shape[0]
    K, H = k_cache.shape[2:]

    def product(matrix, x):
        if isinstance(matrix, tuple):
            return quantized_matvec(*matrix, x)
        return matvec(matrix, x)

    heads = product(qkv, _rms_norm(residual, norm1, eps)).reshape(B, -1, H)
    N = heads.shape[1] - 2 * K
    q, k = _turn(heads[:, :N], cos, sin), _turn(heads[:, N : N + K], cos, sin)
    k_cache, v_cache = (
        cache.at[jnp.arange(B), lengths].set(x, mode="drop", wrap_negative_indices=False)
        for cache, x in ((k_cache, k), (v_cache, heads[:, N + K :]))
    )
    attended = decode_attention(
        q, k_cache, v_cache, lengths + 1, None, None, scale=H**-0.5
    ).reshape(B, -1)
    hidden = product(out, attended) + residual
    gate, up = jnp.split(product(gate_up, _rms_norm(hidden, norm2, eps)), 2, axis=-1)
    wide = _wide(gate)
    activated = (jax.nn.silu(wide) * _wide(up)).astype(gate.dtype)
    return product(down, activated) + hidden, k_cache, v_cache


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _rms_norm(x: Array, scale: Array, eps: float) -> Array:
    wide = _wide(x)
    rstd = jax.lax.rsqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)
    return (wide * rstd * scale).astype(x.dtype)


def _turn(x: Array, cos: Array, sin: Array) -> Array:
    a, b = jnp.split(_wide(x), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
