r"""Embedding lookup in ``jax.numpy``: the definition, and its derivative by hand.

A row of the output is a row of the token table plus a row of the position table, so the gradient
of a table's row is the sum of the output gradients at the places that read it:

.. math::
    dwte_v = \sum_{b,t:\ tokens_{bt} = v} dout_{bt} \qquad dwpe_t = \sum_b dout_{bt}

A token outside the vocabulary reads the nearest row of the table, the first or the last, and its
gradient goes there. Sums are float32 (float64 for float64 tables).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def embed(tokens, token_table, position_table=None):
    """The definition of ``embed``, for JAX to differentiate."""
    return embed_forward(tokens, token_table, position_table)


def embed_forward(tokens, token_table, position_table):
    """Returns ``out``."""
    out = jnp.take(token_table, tokens, axis=0, mode="clip")
    if position_table is None:
        return out
    positions = position_table[: tokens.shape[-1]]
    return (_wide(out) + _wide(positions)).astype(token_table.dtype)


def embed_backward(tokens, token_table, position_table, dout, dtable):
    """The gradients of the tables.

    Args:
        tokens: As the forward has them.
        token_table: Of the tables only shape and dtype are used.
        position_table: Likewise; or None.
        dout: The gradient of the output.
        dtable: The gradient of ``token_table`` from elsewhere, to be added to; or None.

    Returns:
        ``(dtoken_table, dposition_table)``.
    """
    dout = _wide(dout)
    rows = jnp.clip(tokens, 0, token_table.shape[0] - 1)
    others = jnp.zeros(token_table.shape, dout.dtype) if dtable is None else _wide(dtable)
    dtoken_table = others.at[rows].add(dout)
    dtoken_table = dtoken_table.astype(token_table.dtype)
    if position_table is None:
        return dtoken_table, None
    dpositions = dout.sum(axis=tuple(range(dout.ndim - 2)))
    unread = position_table.shape[0] - tokens.shape[-1]
    dposition_table = jnp.pad(dpositions, ((0, unread), (0, 0)))
    return dtoken_table, dposition_table.astype(position_table.dtype)
