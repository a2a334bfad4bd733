"""Where tokens are in a cache in pages: a pool (P, page, ...) and a block table (B, M).

The table has the pages of each sequence in order, then P, which is no page.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def room(block_table: Array, pool: Array) -> Array:
    """The most tokens of each sequence, (B,)."""
    pages, page = pool.shape[:2]
    return (block_table < pages).sum(axis=1, dtype=jnp.int32) * page


def count_keys(lengths: Array, block_table: Array, pool: Array) -> Array:
    """The tokens of each sequence with a new one, as far as it has pages."""
    return jnp.minimum(lengths + 1, room(block_table, pool))


def places_of(positions: Array, block_table: Array, pool: Array) -> tuple[Array, Array]:
    """The pages and slots of tokens at positions (B, T); beyond the pool where there is no page."""
    pages, page = pool.shape[:2]
    entries = jnp.where(positions < 0, block_table.shape[1], positions // page)
    found = jnp.take_along_axis(block_table, entries, axis=1, mode="fill", fill_value=pages)
    return found, positions % page
