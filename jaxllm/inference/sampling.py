"""The choice of a token among logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def sample(
    logits: Array, temperature: Array, key: Array, *, top_k: int | None, top_p: float | None = None
) -> Array:
    """One token a row.

    Args:
        logits: (B, V).
        temperature: Divides the logits; above 0.
        key: The source of randomness.
        top_k: Choose among the likeliest ``top_k`` alone; 1 for the likeliest, whatever the
            temperature; None for all.
        top_p: Choose among the fewest likeliest tokens alone whose probabilities add up to
            ``top_p`` or more; None for all.

    Returns:
        The tokens, int32.
    """
    if top_k == 1:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32)
    top_k = None if top_k is None or top_k >= logits.shape[-1] else top_k
    if top_k is None and top_p is None:
        return jax.random.categorical(key, logits / temperature).astype(jnp.int32)
    # Sampling among the sorted few, not below a threshold: a tie does not let another token in.
    best, ids = jax.lax.top_k(logits, logits.shape[-1] if top_k is None else top_k)
    best = best / temperature
    if top_p is not None:
        probabilities = jax.nn.softmax(best, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        best = jnp.where((before < top_p) | (jnp.arange(best.shape[-1]) == 0), best, -jnp.inf)
    choice = jax.random.categorical(key, best)
    return jnp.take_along_axis(ids, choice[:, None], axis=1)[:, 0].astype(jnp.int32)


def check_sampling(
    temperature: float, top_k: int | None, top_p: float | None, key: Array | None
) -> None:
    """Raises ValueError where a number is out of range, or a key is needed and missing."""
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}; it must be at least 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1, or None for all tokens")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1, or None")
    if key is None and temperature > 0:
        raise ValueError("key is missing; a temperature above 0 needs one")
