r"""Embedding lookup in ``jax.numpy``: the reference implementation, with a hand-written gradient.

A row of the output is a row of the token table plus a row of the position table. So the gradient of
a row of a table is the sum of the output gradients at the positions that read it:

.. math::
    dwte_v = \sum_{b,t:\ tokens_{bt} = v} dout_{bt} \qquad dwpe_t = \sum_b dout_{bt}

A token outside the vocabulary reads the nearest row of the table, the first or the last, and that
row gets its gradient. Sums are float32 (float64 for float64 tables).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def embed(tokens, token_table, position_table=None):
    """``embed`` for JAX to differentiate, without a hand-written gradient."""
    return embed_forward(tokens, token_table, position_table)


def embed_forward(tokens, token_table, position_table):
    """Returns ``out``."""
    out = jnp.take(token_table, tokens, axis=0, mode="clip")
    if position_table is None:
        return out
    positions = position_table[: tokens.shape[-1]]
    return (_wide(out) + _wide(positions)).astype(token_table.dtype)


def embed_backward(tokens, token_table, position_table, dout, dlm_head):
    """The gradients of the tables.

    Args:
        tokens: As in the forward.
        token_table: Only its shape and dtype are used.
        position_table: Likewise; or None.
        dout: The gradient of the output.
        dlm_head: The gradient of ``token_table`` from an LM head tied to it, which this function
            adds to; or None.

    Returns:
        ``(dtoken_table, dposition_table)``.
    """
    dout = _wide(dout)
    rows = jnp.clip(tokens, 0, token_table.shape[0] - 1)
    start = jnp.zeros(token_table.shape, dout.dtype) if dlm_head is None else _wide(dlm_head)
    dtoken_table = start.at[rows].add(dout).astype(token_table.dtype)
    if position_table is None:
        return dtoken_table, None
    dpositions = dout.sum(axis=tuple(range(dout.ndim - 2)))
    unread = position_table.shape[0] - tokens.shape[-1]
    dposition_table = jnp.pad(dpositions, ((0, unread), (0, 0)))
    return dtoken_table, dposition_table.astype(position_table.dtype)
