"""The key-value cache, and the two programs that use it: prefill and decode step.

The cache has one array a layer, so that each is written in place. A layer with a sliding window
keeps the most recent tokens only: its array is a ring of as many slots as the window, in which the
token at position p has the slot ``p % window``. Attention to a ring is attention to a cache that is
full, since keys are rotated before they are stored and the order of keys does not count.

:mod:`jaxllm.inference.paged_cache` has a cache in pages, which both programs take too.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Integer, Num

from jaxllm import ops
from jaxllm.inference import decode, paged_cache
from jaxllm.inference.paged_cache import PagedKVCache
from jaxllm.models import llama3
from jaxllm.models.common import (
    Params,
    check_tokens,
    is_for_decoding,
    lm_head,
    next_logits,
    window_within,
)
from jaxllm.ops.checks import (
    as_integer,
    check_integer,
    check_same_dtype,
    check_shape,
    is_certain,
)
from jaxllm.ops.gemm.api import FEW_ROWS
from jaxllm.ops.window import is_ring


class KVCache(NamedTuple):
    """The keys and values of the tokens so far, of each layer.

    Attributes:
        keys: A layer's keys, (B, S, K, H), of at most S tokens; floating-point or int8. S is
            ``max_length``, or the layer's window if that is smaller.
        values: A layer's values, likewise.
        key_scales: The scales of int8 keys, (B, S, K), float32; empty for other keys.
        value_scales: Those of int8 values.
        lengths: How many tokens each sequence has.
    """

    keys: tuple[Num[Array, "B S K H"], ...]
    values: tuple[Num[Array, "B S K H"], ...]
    key_scales: tuple[Float[Array, "B S K"], ...]
    value_scales: tuple[Float[Array, "B S K"], ...]
    lengths: Int[Array, " B"]

    @property
    def max_length(self) -> int:
        """The most tokens of the layers without a window; without such, the largest window."""
        return max(keys.shape[1] for keys in self.keys)

    @property
    def quantized(self) -> bool:
        """Whether the cache holds int8."""
        return bool(self.key_scales)


jax.export.register_namedtuple_serialization(KVCache, serialized_name="jaxllm.KVCache")
Cache = TypeVar("Cache", KVCache, PagedKVCache)


class Shape(Protocol):
    """What the cache reads of a model's config, besides ``windows`` if it has them."""

    @property
    def layers(self) -> int:
        """Blocks."""
        ...

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        ...

    @property
    def head_width(self) -> int:
        """The width of one head."""
        ...


def init_cache(config: Shape, batch: int, max_length: int, dtype: DTypeLike) -> KVCache:
    """An empty cache.

    Args:
        config: The model's shape.
        batch: Sequences.
        max_length: The most tokens of each, the prompt included. A layer whose window is smaller
            has room for as many as that.
        dtype: That of the model's parameters, or int8, which has a float32 scale for each token and
            head.

    Raises:
        TypeError: ``batch`` or ``max_length`` is no integer, or ``dtype`` neither floating-point
            nor int8.
        ValueError: ``batch`` or ``max_length`` is below 0.
    """
    batch, max_length = _as_size("batch", batch), _as_size("max_length", max_length)
    dtype = paged_cache.as_cache_dtype(dtype)
    int8 = dtype == jnp.int8

    def arrays(dtype: DTypeLike, *widths: int) -> tuple[Array, ...]:
        return tuple(
            jnp.zeros((batch, _slots(window, max_length), config.kv_heads, *widths), dtype)
            for window in _windows(config)
        )

    return KVCache(
        arrays(dtype, config.head_width),
        arrays(dtype, config.head_width),
        arrays(jnp.float32) if int8 else (),
        arrays(jnp.float32) if int8 else (),
        jnp.zeros(batch, jnp.int32),
    )


def _as_size(name: str, size: Any) -> Any:
    return size if jax.export.is_symbolic_dim(size) else as_integer(name, size, least=0)


def _windows(config: Any) -> tuple[int | None, ...]:
    """The sliding window of each layer."""
    return getattr(config, "windows", (None,) * config.layers)


def _slots(window: int | None, max_length: int) -> int:
    """The slots of a layer's cache."""
    if window is None or is_certain(lambda: max_length < window):
        return max_length
    return window


def prefill(
    model: Any,
    params: Params,
    tokens: Integer[Array, "B T"],
    lengths: Integer[Array, " B"],
    config: Any,
    cache: Cache,
) -> tuple[Float[Array, "B Vp"], Cache]:
    """Reads prompts into an empty cache.

    Args:
        model: :mod:`jaxllm.models.gpt2` or :mod:`jaxllm.models.llama3`, or another module with such
            a ``cached_forward``.
        params: The model's parameters, or their int8 form, or what
            :func:`jaxllm.models.common.for_decoding` makes of either.
        tokens: The prompts, padded at their ends with any token.
        lengths: The tokens of each prompt, from 1 to T.
        config: The shape that ``params`` was made with.
        cache: Of :func:`init_cache` or :func:`jaxllm.inference.paged_cache.init_paged_cache`.

    Returns:
        The logits of the token after each prompt, and the cache.

    Raises:
        TypeError: ``tokens`` or ``lengths`` is not an array of an integer dtype, or the cache is
            neither int8 nor of the dtype that the model computes in.
        ValueError: ``tokens`` is not of shape (B, T), or ``lengths`` or the cache is of another
            number of sequences, or T is 0, or beyond the model's maximum, or that of a layer of the
            cache without a window; or a length is not from 1 to T, which is not checked of traced
            ones; or a layer of the cache has more slots than its window; or the cache or ``params``
            have other layers or heads than ``config``.
    """
    _check_prompts(tokens, lengths, config, cache)
    # Attention reads the lengths, to store the last tokens of each prompt in a ring.
    cache = cache._replace(lengths=lengths.astype(jnp.int32))
    writer = _Writer(cache, _prefill_attention, _windows(config))
    x = model.cached_forward(params, tokens, None, config, writer)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return next_logits(last, lm_head(params)), writer.cache


def decode_step(
    model: Any, params: Params, tokens: Integer[Array, " B"], config: Any, cache: Cache
) -> tuple[Float[Array, "B Vp"], Cache]:
    """Reads one more token of each sequence.

    Args:
        model: As in :func:`prefill`. A Llama's parameters that are laid out for decoding run block
            by block: :mod:`jaxllm.inference.decode`. With an int8 cache, or more than 16 sequences,
            they run op by op.
        params: As in :func:`prefill`.
        tokens: The tokens that follow the cache's.
        config: The shape that ``params`` was made with.
        cache: Of :func:`prefill`, or of the step before; a full one stays as it is. A layer with a
            window replaces its oldest token instead.

    Returns:
        The logits of the token after each, and the cache with the tokens in it.

    Raises:
        TypeError: As in :func:`prefill`.
        ValueError: ``tokens`` is not one token for each sequence of the cache, or the cache or
            ``params`` have other layers or heads than ``config``, or a layer of the cache has more
            slots than its window.
    """
    check_integer(tokens=tokens)
    check_shape("tokens", tokens, cache.lengths.shape, "one for each sequence of the cache")
    _check_cache(config, cache)
    few = is_certain(lambda: 1 <= tokens.shape[0] <= FEW_ROWS)
    is_by_block = model is llama3 and is_for_decoding(params)
    if few and is_by_block and not cache.quantized:
        caches = list(zip(cache.keys, cache.values, strict=True))
        table = cache.block_table if isinstance(cache, PagedKVCache) else None
        x, caches = decode.llama3_forward(params, tokens, cache.lengths, config, caches, table)
        keys, values = zip(*caches, strict=True)
        cache = cache._replace(keys=keys, values=values)
    else:
        writer = _Writer(cache, _decode_attention, _windows(config))
        positions = cache.lengths[:, None]
        x = model.cached_forward(params, tokens[:, None], positions, config, writer)[:, 0]
        cache = writer.cache
    cache = cache._replace(lengths=cache.lengths + 1)
    return next_logits(x, lm_head(params)), cache


class _Writer:
    """The ``attend`` of a model: writes keys and values to a cache, and attends to it."""

    def __init__(self, cache: Any, attention: Any, windows: tuple[int | None, ...]) -> None:
        self.cache, self.attention, self.windows = cache, attention, windows

    def __call__(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        out, self.cache = self.attention(self.cache, layer, q, k, v, self.windows[layer])
        return out


def _ring(cache: KVCache | PagedKVCache, layer: int, window: int | None) -> int | None:
    """The slots of a layer's cache if it holds the tokens of the window only; None if it does not.

    Raises:
        ValueError: It has more slots: attention to it would see tokens before the window.
    """
    if isinstance(cache, PagedKVCache):
        return None
    slots = cache.keys[layer].shape[1]
    return window if is_ring(f"the cache of layer {layer}", slots, window) else None


def _check_cache(config: Shape, cache: KVCache | PagedKVCache) -> None:
    """Raises ValueError where a cache does not have the layers and heads of a config."""
    sequences = cache.lengths.shape
    is_paged = isinstance(cache, PagedKVCache)
    if is_paged and cache.block_table.shape[:1] != sequences:
        raise ValueError(
            f"cache.block_table has shape {cache.block_table.shape}; it must be {(*sequences, 'M')}"
        )
    heads = (config.kv_heads, config.head_width)
    for name in ("keys", "values", "key_scales", "value_scales"):
        arrays = getattr(cache, name)
        of_scales = name.endswith("scales")
        if of_scales and not cache.quantized:
            continue
        if len(arrays) != config.layers:
            raise ValueError(
                f"cache.{name} has {len(arrays)} layers; it must have {config.layers}, those of "
                "config"
            )
        first = ("P", "page") if is_paged else (*sequences, "S")
        last = heads[:1] if of_scales else heads
        for layer, array in enumerate(arrays):
            if array.shape[2:] != last or (not is_paged and array.shape[:1] != sequences):
                raise ValueError(
                    f"cache.{name} of layer {layer} has shape {array.shape}; it must be "
                    f"({', '.join(map(str, (*first, *last)))}), by the key heads of config and "
                    "their width"
                )


def _check_prompts(
    tokens: Array, lengths: Array, config: Any, cache: KVCache | PagedKVCache
) -> None:
    """Checks the arguments of :func:`prefill`.

    Raises:
        TypeError: ``tokens`` or ``lengths`` is not an array of an integer dtype.
        ValueError: ``tokens`` is not of shape (B, T), or ``lengths`` or the cache not of B
            sequences, or T is beyond the config's max_seq_len or the cache's max_length, or the
            cache is of another config, or a length that is not traced is not from 1 to T.
    """
    check_tokens(tokens, config.max_seq_len)
    check_integer(lengths=lengths)
    B, T = tokens.shape
    if is_certain(lambda: B > 0 and T == 0):
        raise ValueError(f"tokens has shape {tokens.shape}; a prompt has at least one token")
    for name, shape in (("lengths", lengths.shape), ("cache.lengths", cache.lengths.shape)):
        if shape != (B,):
            raise ValueError(
                f"{name} has shape {shape}; it must be ({B},), by the rows of tokens {tokens.shape}"
            )
    _check_cache(config, cache)
    rings = [_ring(cache, layer, window) for layer, window in enumerate(_windows(config))]
    if None in rings and is_certain(lambda: cache.max_length < T):
        raise ValueError(
            f"tokens has shape {tokens.shape}, prompts of {T}; the cache has max_length "
            f"{cache.max_length}"
        )
    # The logits behind a token that a prompt has not would be NaN, or those of its padding.
    if not isinstance(lengths, Tracer) and getattr(lengths, "is_fully_addressable", True):
        for length in np.asarray(lengths).tolist():
            if length < 1 or is_certain(lambda length=length: length > T):
                raise ValueError(
                    f"lengths has {length}; a length is from 1 to {T}, by the columns of tokens "
                    f"{tokens.shape}"
                )


def _prefill_attention(
    cache: Cache, layer: int, q: Array, k: Array, v: Array, window: int | None
) -> tuple[Array, Cache]:
    """Attention of whole prompts, (B, T, N, H), whose keys and values begin the cache.

    Prompts of unequal lengths are padded at their ends: no token sees the padding, and the tokens
    that are decoded later replace it.
    """
    hiding = window_within(window, k.shape[1])
    out = ops.flash_attention(q, k, v, causal=True, window=hiding)
    if isinstance(cache, PagedKVCache):
        positions = jnp.broadcast_to(jnp.arange(k.shape[1]), k.shape[:2])
        store = functools.partial(paged_cache.store, cache, positions=positions)
        return out, _write(cache, layer, k, v, store)
    ring = _ring(cache, layer, window)
    if ring is None or is_certain(lambda: k.shape[1] <= ring):
        return out, _write(cache, layer, k, v, lambda array, x: array.at[:, : x.shape[1]].set(x))
    # The slots of a ring, and for each the last token of the prompt that belongs there. A slot that
    # a short prompt does not reach gets any token, which the lengths hide.
    slots, last = jnp.arange(ring, dtype=jnp.int32)[None], cache.lengths[:, None] - 1
    chosen = jnp.maximum(last - (last - slots) % ring, 0)
    k, v = (jnp.take_along_axis(x, chosen[:, :, None, None], axis=1) for x in (k, v))
    return out, _write(cache, layer, k, v, lambda array, x: x)


def _decode_attention(
    cache: Cache, layer: int, q: Array, k: Array, v: Array, window: int | None
) -> tuple[Array, Cache]:
    """Attention of one more token a sequence, (B, 1, N, H); a full cache stays as it is."""
    if isinstance(cache, PagedKVCache):
        store = functools.partial(paged_cache.store, cache, positions=cache.lengths[:, None])
        stored: Any = _write(cache, layer, k, v, store)
        return paged_cache.decode_attention(stored, layer, q[:, 0], window)[:, None], stored
    sequence = jnp.arange(cache.lengths.shape[0])
    slots, lengths = cache.lengths, cache.lengths + 1
    if (ring := _ring(cache, layer, window)) is not None:
        slots, lengths = slots % ring, jnp.minimum(lengths, ring)

    def write(array: Array, x: Array) -> Array:
        return array.at[sequence, slots].set(x[:, 0], mode="drop")

    cache = _write(cache, layer, k, v, write)
    scales = (cache.key_scales[layer], cache.value_scales[layer]) if cache.quantized else ()
    arrays = (cache.keys[layer], cache.values[layer], lengths, *scales)
    return ops.decode_attention(q[:, 0], *arrays)[:, None], cache


def _write(cache: Cache, layer: int, k: Array, v: Array, write: Any) -> Cache:
    def put(arrays: tuple[Array, ...], x: Array) -> tuple[Array, ...]:
        # A cache that was loaded from a file may have NumPy's arrays.
        array = jnp.asarray(arrays[layer])
        # The scales of float64 keys are float64.
        return (*arrays[:layer], write(array, x.astype(array.dtype)), *arrays[layer + 1 :])

    if not cache.quantized:
        check_same_dtype(f"the cache of layer {layer}", cache.keys[layer], "the model's keys", k)
        return cache._replace(keys=put(cache.keys, k), values=put(cache.values, v))
    (k, k_scales), (v, v_scales) = (ops.quantize(x, group_size=x.shape[-1]) for x in (k, v))
    return cache._replace(
        keys=put(cache.keys, k),
        values=put(cache.values, v),
        key_scales=put(cache.key_scales, k_scales[..., 0]),
        value_scales=put(cache.value_scales, v_scales[..., 0]),
    )
