"""Where tokens are in a cache in pages: a pool (P, page, ...) and a block table (B, M).

The table has the pages of each sequence in order, then P, which is no page.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from jaxllm.ops.checks import check_integer


def check_table(block_table: Array, pool: Array, of: str, sequences: int) -> None:
    """Raises TypeError or ValueError where a table does not fit the keys, or the array ``of``."""
    check_integer(block_table=block_table)
    if block_table.ndim != 2 or block_table.shape[0] != sequences:
        raise ValueError(
            f"block_table has shape {block_table.shape}; it must be ({sequences}, M), the pages of "
            f"each sequence of {of}"
        )
    if 0 in pool.shape[:2] and block_table.size:
        raise ValueError(f"k_cache has shape {pool.shape}, no page; block_table names some")


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
