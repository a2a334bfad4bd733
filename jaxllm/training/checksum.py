"""Checksums of arrays, computed on the devices of the arrays: shards are not gathered."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.core.precision import is_random_key

_SEEDS = (0x9E3779B9, 0x85EBCA6B)


def checksums(tree: object) -> dict[str, str]:
    """Computes a checksum for each array of a tree.

    A checksum depends on dtype, shape and every bit of an array, but not on sharding or device. It
    detects every change within one 32-bit word. It misses any other change with probability 2^-64.

    Args:
        tree: Any pytree of arrays.

    Returns:
        Checksums such as ``"float32[50304,768] 8d3f1c0042aa97e1"``, by paths such as
        ``"params/wte"``.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    # One at a time: on CPUs, the collectives of programs that run at once can deadlock.
    sums = [jax.device_get(_sums(leaf)) for _, leaf in leaves]
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): (
            f"{leaf.dtype}[{','.join(map(str, leaf.shape))}] {first:08x}{second:08x}"
        )
        for (path, leaf), (first, second) in zip(leaves, sums, strict=True)
    }


@jax.jit
def _sums(x: Array) -> tuple[Array, ...]:
    """Two sums modulo 2^32 over the words of an array, each word hashed with its position.

    For a given position the hash is a bijection of the word. Integer sums are exact in any order,
    so they do not depend on the sharding.
    """
    words = _words(x)
    position = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        position += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride)
    return tuple(
        jnp.sum(_hash(words ^ _hash(position ^ jnp.uint32(seed))), dtype=jnp.uint32)
        for seed in _SEEDS
    )


def _hash(x: Array) -> Array:
    """Two rounds of multiplication and shift, with Wellons's "hash prospector" constants."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _words(x: Array) -> Array:
    """The bits of an array as uint32; 64-bit elements get one more axis of length 2."""
    if is_random_key(x):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype.itemsize == 8:
        return lax.bitcast_convert_type(x, jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = jnp.finfo(x.dtype).bits
        x = lax.bitcast_convert_type(x, f"uint{bits}")
    return x.astype(jnp.uint32)
