"""Caches in pages, as ``decode_block`` writes and reads them."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def count_keys(lengths: Array, block_table: Array, cache: Array) -> Array:
    """The tokens of each sequence with a new one, as far as it has pages."""
    pages, page = cache.shape[:2]
    room = (block_table < pages).sum(axis=1, dtype=jnp.int32) * page
    return jnp.minimum(lengths + 1, room)


def places_of(positions: Array, block_table: Array, cache: Array) -> tuple[Array, Array]:
    """The page of a token of each sequence, and its slot there; beyond the pool without a page."""
    pages, page = cache.shape[:2]
    entry = jnp.where(positions < 0, block_table.shape[1], positions // page)
    found = jnp.take_along_axis(block_table, entry[:, None], axis=1, mode="fill", fill_value=pages)
    return found[:, 0], positions % page
