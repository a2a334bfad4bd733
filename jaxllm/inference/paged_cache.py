"""A key-value cache in pages, of sequences that hold unequal numbers of tokens.

The keys and values of all sequences lie in one pool of pages, and the block table names the pages
of each sequence in order. A sequence wastes less than one page, where a cache in one piece has as
much room for each as for the longest::

    block table    sequence 0   0 1 2 -           page 4, slot 1: token 5 of sequence 2
                   sequence 1   3 - - -
                   sequence 2   5 4 6 7           "-" is no page

    pool           page 0   page 1   page 2   page 3   page 4   ...   of 4 tokens each

The pages are given out before the first token. A token beyond those of its sequence is not stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Num

from jaxllm import ops
from jaxllm.ops import pages
from jaxllm.ops.checks import as_integer


class PagedKVCache(NamedTuple):
    """The keys and values of the tokens so far, of each layer, in pages.

    Attributes:
        keys: A layer's keys, (P, page, K, H); floating-point or int8.
        values: A layer's values, likewise.
        key_scales: The scales of int8 keys, (P, page, K), float32; empty for other keys.
        value_scales: Those of int8 values.
        lengths: How many tokens each sequence has.
        block_table: The pages of each sequence, (B, M), in order; then P, which is no page.
    """

    keys: tuple[Num[Array, "P page K H"], ...]
    values: tuple[Num[Array, "P page K H"], ...]
    key_scales: tuple[Float[Array, "P page K"], ...]
    value_scales: tuple[Float[Array, "P page K"], ...]
    lengths: Int[Array, " B"]
    block_table: Int[Array, "B M"]

    @property
    def page_size(self) -> int:
        """The tokens of a page."""
        return self.keys[0].shape[1]

    @property
    def max_length(self) -> int:
        """The most tokens that the sequence with the most pages can have."""
        return self.block_table.shape[1] * self.page_size

    @property
    def room(self) -> Int[Array, " B"]:
        """The most tokens of each sequence."""
        return pages.room(self.block_table, self.keys[0])

    @property
    def quantized(self) -> bool:
        """Whether the cache holds int8."""
        return bool(self.key_scales)


jax.export.register_namedtuple_serialization(PagedKVCache, serialized_name="jaxllm.PagedKVCache")


def init_paged_cache(
    config: Any, max_lengths: Sequence[int], page_size: int, dtype: DTypeLike
) -> PagedKVCache:
    """An empty cache with pages for each sequence.

    Args:
        config: The model's shape, as of :func:`jaxllm.inference.cache.init_cache`. A layer with a
            window has room for all tokens too.
        max_lengths: The most tokens of each sequence, the prompt included.
        page_size: The tokens of a page.
        dtype: That of the model's parameters, or int8, which has a float32 scale for each token and
            head.

    Raises:
        TypeError: A length or ``page_size`` is no integer, ``max_lengths`` no sequence, or
            ``dtype`` neither floating-point nor int8.
        ValueError: ``page_size`` is below 1, or a length below 0.
    """
    page_size = as_integer("page_size", page_size, least=1)
    dtype = as_cache_dtype(dtype)
    if np.ndim(max_lengths) != 1:
        raise TypeError(f"max_lengths is {max_lengths!r}; it must have an integer a sequence")
    lengths = [as_integer("max_lengths", length) for length in max_lengths]
    if min(lengths, default=0) < 0:
        raise ValueError(f"max_lengths has {min(lengths)}; the least is 0")
    counts = np.array([-(-length // page_size) for length in lengths], np.int32)
    total = int(counts.sum())
    # The pages of a sequence are neighbours; behind them stands what is no page.
    number = np.arange(max(counts, default=0)) + (np.cumsum(counts) - counts)[:, None]
    table = np.where(np.arange(number.shape[1]) < counts[:, None], number, total)
    int8 = dtype == jnp.int8

    def arrays(dtype: DTypeLike, *widths: int) -> tuple[Array, ...]:
        shape = (total, page_size, config.kv_heads, *widths)
        return tuple(jnp.zeros(shape, dtype) for _ in range(config.layers))

    return PagedKVCache(
        arrays(dtype, config.head_width),
        arrays(dtype, config.head_width),
        arrays(jnp.float32) if int8 else (),
        arrays(jnp.float32) if int8 else (),
        jnp.zeros(len(lengths), jnp.int32),
        jnp.asarray(table, jnp.int32),
    )


def as_cache_dtype(dtype: DTypeLike) -> DTypeLike:
    """The dtype of a cache; raises TypeError where it is neither int8 nor one of a model."""
    wanted = "int8, or floating-point with 16 bits or more"
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype is {dtype!r}; it must be {wanted}") from error
    if found == jnp.int8:
        return found
    if not jnp.issubdtype(found, jnp.floating) or jnp.finfo(found).bits < 16:
        raise TypeError(f"dtype is {found}; it must be {wanted}")
    return found


def store(cache: PagedKVCache, array: Array, x: Array, positions: Int[Array, "B T"]) -> Array:
    """A layer's pages with tokens at positions of their sequences; those without a page are lost.

    Args:
        cache: The cache, for its block table.
        array: Keys, values or scales, (P, page, K) or (P, page, K, H).
        x: Those of the tokens, (B, T, K) or (B, T, K, H).
        positions: Where each token stands.
    """
    places = pages.places_of(positions, cache.block_table, array)
    return array.at[places].set(x.astype(array.dtype), mode="drop")


def decode_attention(cache: PagedKVCache, layer: int, q: Array, window: int | None) -> Array:
    """Attention of a query of each sequence, (B, N, H), with its token already stored."""
    scales = (cache.key_scales[layer], cache.value_scales[layer]) if cache.quantized else ()
    lengths = pages.count_keys(cache.lengths, cache.block_table, cache.keys[0])
    arrays = (cache.keys[layer], cache.values[layer], lengths, *scales)
    return ops.decode_attention(q, *arrays, block_table=cache.block_table, window=window)
