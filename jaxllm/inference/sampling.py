"""Sampling of the next token from logits: temperature, top-k and top-p."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from jaxllm.ops.checks import as_float, as_integer, check_floating


def sample(
    logits: Array, temperature: Array, key: Array, *, top_k: int | None, top_p: float | None = None
) -> Array:
    """Samples one token per row.

    Args:
        logits: The logits, (B, V).
        temperature: The divisor of the logits; above 0. One below the smallest normal float32
            counts as that.
        key: The random key.
        top_k: Sample among the ``top_k`` most likely tokens; 1 for greedy decoding, at any
            temperature; None for all tokens.
        top_p: Sample among the smallest set of most likely tokens whose probabilities sum to at
            least ``top_p``; None for all tokens.

    Returns:
        The tokens, (B,), int32.

    Raises:
        TypeError: ``logits`` is not floating-point, ``top_k`` no integer, or ``top_p`` no number.
        ValueError: ``logits`` is not of shape (B, V), or ``top_k`` or ``top_p`` is out of range.
    """
    check_floating(logits=logits)
    if logits.ndim != 2:
        raise ValueError(f"logits has shape {logits.shape}; it must be (B, V)")
    top_k, top_p = _as_top_k(top_k), _as_top_p(top_p)
    if top_k == 1:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32)
    top_k = None if top_k is None or top_k >= logits.shape[-1] else top_k
    if top_k is None and top_p is None:
        return jax.random.categorical(key, _divide(logits, temperature)).astype(jnp.int32)
    # Sample among the sorted top k. A threshold on logits would admit more than k tokens on a tie.
    best, ids = jax.lax.top_k(logits, logits.shape[-1] if top_k is None else top_k)
    best = _divide(best, temperature)
    if top_p is not None:
        probabilities = jax.nn.softmax(best, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        is_first = jnp.arange(best.shape[-1])[None] == 0
        best = jnp.where((before < top_p) | is_first, best, -jnp.inf)
    choice = jax.random.categorical(key, best)
    return jnp.take_along_axis(ids, choice[:, None], axis=1)[:, 0].astype(jnp.int32)


def _divide(logits: Array, temperature: Array) -> Array:
    """Logits by the temperature, each row less its largest logit: overflow gives -inf, not inf."""
    largest = logits.max(axis=-1, keepdims=True)
    shifted = logits - jnp.where(jnp.isfinite(largest), largest, 0)
    return shifted / jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)


def check_sampling(
    temperature: Any, top_k: Any, top_p: Any, key: Array | None
) -> tuple[float, int | None, float | None]:
    """Checks sampling options; returns all but the key as Python numbers.

    Args:
        temperature: The divisor of the logits; 0 for greedy decoding.
        top_k: As in :func:`sample`.
        top_p: As in :func:`sample`.
        key: The random key, which a temperature above 0 needs.

    Returns:
        ``(temperature, top_k, top_p)``.

    Raises:
        TypeError: ``temperature`` or ``top_p`` is no number, ``top_k`` no integer, or ``key`` no
            key of ``jax.random``.
        ValueError: An option is out of range, or the key is missing or of the wrong shape.
    """
    temperature = as_float("temperature", temperature)
    top_k = _as_top_k(top_k)
    top_p = _as_top_p(None if top_p is None else as_float("top_p", top_p))
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}; it must be at least 0")
    if key is None and temperature > 0:
        raise ValueError("key is missing; a temperature above 0 needs one")
    if key is not None:
        _check_key(key)
    return temperature, top_k, top_p


def _as_top_k(top_k: Any) -> int | None:
    if top_k is None:
        return None
    top_k = as_integer("top_k", top_k)
    if top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1, or None for all tokens")
    return top_k


def _as_top_p(top_p: Any) -> Any:
    if top_p is None or isinstance(top_p, Tracer):
        return top_p
    top_p = as_float("top_p", top_p)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be above 0 and at most 1, or None")
    return top_p


def _check_key(key: Any) -> None:
    dtype = getattr(key, "dtype", None)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_typed and dtype != jnp.uint32:
        found = f"dtype {dtype}" if dtype is not None else f"type {type(key).__name__}"
        raise TypeError(f"key has {found}; it must be one of jax.random.key")
    if key.ndim != (0 if is_typed else 1):
        raise ValueError(f"key has shape {key.shape}; it must be a single key")
    if not is_typed:
        try:
            jax.random.wrap_key_data(key)
        except TypeError as error:  # of another length
            raise ValueError(f"key has shape {key.shape}; it must be a single key") from error
