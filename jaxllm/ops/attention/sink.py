"""Attention sinks, for implementations whose kernels do not see them.

A sink is a key of one head with a score of its own and the value zero. From the ``out`` and ``lse``
of attention without it follow ``out * sigmoid(lse - sink)`` and ``logaddexp(lse, sink)``. A
backward that is given those two computes the gradients of queries, keys and values with the sink:
its probabilities are ``exp(s - lse)``, and its ``delta`` the sum of ``dout * out``. What is left is
the sink's own gradient, with ``dp`` zero: ``exp(sink - lse) * (dlse - delta)``.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array


def join(out: Array, lse: Array, sinks: Array | None) -> tuple[Array, Array]:
    """``(out, lse)`` of a softmax whose denominators have one more term each.

    Args:
        out: The output without sinks, (B, T, N, H) or (B, T, N*H).
        lse: Likewise, (B, N, T).
        sinks: The sink of each head, (N,); with None nothing changes.

    Returns:
        Both with the sinks.
    """
    if sinks is None:
        return out, lse
    sinks = sinks.astype(lse.dtype)[:, None]
    # Of a query without keys lse is -inf, as a sink may be that is switched off.
    share = jnp.where(lse == -jnp.inf, 0, jax.nn.sigmoid(lse - sinks))
    scaled = _heads(out, lse) * share.swapaxes(1, 2)[..., None]
    return scaled.astype(out.dtype).reshape(out.shape), jnp.logaddexp(lse, sinks)


def gradients(
    out: Array, lse: Array, dout: Array, dlse: Array | None, sinks: Array | None
) -> tuple[Array, ...]:
    """The gradient of the sinks, of what :func:`join` returned; none without sinks."""
    if sinks is None:
        return ()
    delta = (_heads(out, lse) * _heads(dout, lse)).sum(axis=-1).swapaxes(1, 2)
    return (gradient_by_delta(lse, delta if dlse is None else delta - dlse, sinks),)


def gradient_by_delta(lse: Array, delta: Array, sinks: Array) -> Array:
    """The gradient of the sinks by what backward kernels compute, ``delta - dlse``, (B, N, T)."""
    wide = sinks.astype(lse.dtype)[:, None]
    p = jnp.where(lse == -jnp.inf, 0, jnp.exp(wide - lse))
    return -(p * delta).sum(axis=(0, 2)).astype(sinks.dtype)


def _heads(x: Array, lse: Array) -> Array:
    """``out`` or its gradient as (B, T, N, H), in the dtype of ``lse``."""
    B, N, T = lse.shape
    # Without heads the width does not count: there are no elements.
    return x.reshape(B, T, N, math.prod(x.shape[2:]) // max(N, 1)).astype(lse.dtype)
