"""The cache of keys and values that decoding reads, one array a layer so that each is written in
place.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Num

from jaxllm import ops
from jaxllm.models.blocks import check_tokens
from jaxllm.ops.checks import is_certain


class KVCache(NamedTuple):
    """The keys and values of the tokens so far, of each layer.

    Attributes:
        keys: A layer's keys, (B, S, K, H) with room for S tokens; floating-point or int8.
        values: A layer's values, likewise.
        key_scales: Of int8 keys the factor of each token's head, (B, S, K), float32; else empty.
        value_scales: Likewise of the values.
        lengths: How many tokens each sequence has.
    """

    keys: tuple[Num[Array, "B S K H"], ...]
    values: tuple[Num[Array, "B S K H"], ...]
    key_scales: tuple[Float[Array, "B S K"], ...]
    value_scales: tuple[Float[Array, "B S K"], ...]
    lengths: Int[Array, " B"]

    @property
    def room(self) -> int:
        """S, the tokens that a sequence may have."""
        return self.keys[0].shape[1]

    @property
    def quantized(self) -> bool:
        """Whether the cache holds int8."""
        return bool(self.key_scales)


jax.export.register_namedtuple_serialization(KVCache, serialized_name="jaxllm.KVCache")


def make_cache(
    layers: int, batch: int, room: int, kv_heads: int, head_width: int, dtype: DTypeLike
) -> KVCache:
    """An empty cache; with int8 each token's head has a float32 scale."""
    shape = (batch, room, kv_heads, head_width)
    int8 = jnp.dtype(dtype) == jnp.int8

    def arrays(shape: tuple[int, ...], dtype: DTypeLike, count: int) -> tuple[Array, ...]:
        return tuple(jnp.zeros(shape, dtype) for _ in range(count))

    return KVCache(
        arrays(shape, dtype, layers),
        arrays(shape, dtype, layers),
        arrays(shape[:-1], jnp.float32, layers if int8 else 0),
        arrays(shape[:-1], jnp.float32, layers if int8 else 0),
        jnp.zeros(batch, jnp.int32),
    )


def check_prompts(tokens: Array, lengths: Array, max_seq_len: int, cache: KVCache) -> None:
    """Checks what goes into ``prefill``.

    Raises:
        TypeError: ``tokens`` is not of an integer dtype.
        ValueError: ``tokens`` is not of shape (B, T), or ``lengths`` or the cache not of B
            sequences, or T is beyond ``max_seq_len`` or the room of the cache.
    """
    check_tokens(tokens, max_seq_len)
    B, T = tokens.shape
    for name, shape in (("lengths", lengths.shape), ("cache.lengths", cache.lengths.shape)):
        if shape != (B,):
            raise ValueError(
                f"{name} has shape {shape}; it must be ({B},), by the rows of tokens {tokens.shape}"
            )
    if is_certain(lambda: cache.room < T):
        raise ValueError(
            f"tokens has shape {tokens.shape}, prompts of {T}; the cache has room for {cache.room}"
        )


def attend_prompt(
    cache: KVCache, layer: int, q: Array, k: Array, v: Array
) -> tuple[Array, KVCache]:
    """Attention of whole prompts, (B, T, N, H), whose keys and values begin the cache.

    Prompts of unequal lengths are padded at their ends: no token sees what comes after it, and
    what is decoded later takes the places of the padding.
    """
    out = ops.flash_attention(q, k, v, causal=True)
    return out, _write(cache, layer, k, v, lambda array, x: array.at[:, : x.shape[1]].set(x))


def attend_token(cache: KVCache, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, KVCache]:
    """Attention of one more token a sequence, (B, 1, N, H); a full cache stays as it is."""
    sequence = jnp.arange(cache.lengths.shape[0])

    def write(array: Array, x: Array) -> Array:
        return array.at[sequence, cache.lengths].set(x[:, 0], mode="drop")

    cache = _write(cache, layer, k, v, write)
    scales = (cache.key_scales[layer], cache.value_scales[layer]) if cache.quantized else ()
    arrays = (cache.keys[layer], cache.values[layer], cache.lengths + 1, *scales)
    return ops.decode_attention(q[:, 0], *arrays)[:, None], cache


def _write(cache: KVCache, layer: int, k: Array, v: Array, write) -> KVCache:
    def put(arrays: tuple[Array, ...], x: Array) -> tuple[Array, ...]:
        return (*arrays[:layer], write(arrays[layer], x), *arrays[layer + 1 :])

    if not cache.quantized:
        dtype = cache.keys[layer].dtype
        return cache._replace(
            keys=put(cache.keys, k.astype(dtype)), values=put(cache.values, v.astype(dtype))
        )
    (k, k_scales), (v, v_scales) = (ops.quantize(x, group_size=x.shape[-1]) for x in (k, v))
    return cache._replace(
        keys=put(cache.keys, k),
        values=put(cache.values, v),
        key_scales=put(cache.key_scales, k_scales[..., 0]),
        value_scales=put(cache.value_scales, v_scales[..., 0]),
    )
