"""Sampling of the next token from logits: temperature, top-k and top-p."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxllm.ops.checks import as_array, as_float, as_integer, check_floating, check_key, is_certain


def sample(
    logits: Array, temperature: Array, key: Array, *, top_k: int | None, top_p: float | None = None
) -> Array:
    """Samples one token per row.

    Args:
        logits: The logits, (B, V).
        temperature: The divisor of the logits; above 0. One below the smallest normal float32
            counts as that. A scalar, or (B, 1) for one a row.
        key: The random key.
        top_k: Sample among the ``top_k`` most likely tokens; 1 for greedy decoding, at any
            temperature; None for all tokens.
        top_p: Sample among the smallest set of most likely tokens whose probabilities sum to at
            least ``top_p``; None for all tokens.

    Returns:
        The tokens, (B,), int32.

    Raises:
        TypeError: ``logits`` is not floating-point, ``top_k`` no integer, ``temperature`` or
            ``top_p`` no number, or ``key`` no key of ``jax.random``.
        ValueError: ``logits`` is not of shape (B, V) or V is 0, ``key`` is not a single key,
            ``temperature`` has another shape, or an option that is not traced is out of range.
    """
    check_floating(logits=logits)
    if logits.ndim != 2 or is_certain(lambda: logits.shape[1] == 0):
        raise ValueError(f"logits has shape {logits.shape}; it must be (B, V) with V at least 1")
    top_k, top_p = _as_top_k(top_k), _as_top_p(top_p)
    if top_k == 1:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    _check_temperature(temperature, logits.shape[0])
    check_key(key)
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
    divided = shifted / jnp.maximum(temperature, jnp.finfo(jnp.float32).tiny)
    # -inf by inf is NaN, which is sampled before any number.
    return jnp.where(jnp.isneginf(shifted), shifted, divided)


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
        check_key(key)
    return temperature, top_k, top_p


def _check_temperature(temperature: Any, rows: int) -> None:
    """Checks that it is a number or one a row, and at least 0 if it is not traced."""
    temperature = as_array("temperature", temperature)
    if temperature.shape not in ((), (1,), (1, 1), (rows, 1)):  # (V,) would divide columns
        raise ValueError(
            f"temperature has shape {temperature.shape}; it must be a scalar, or ({rows}, 1) for "
            "one a row of logits"
        )
    if not isinstance(temperature, Tracer) and not (np.asarray(temperature) >= 0).all():
        raise ValueError(f"temperature is {temperature}; it must be at least 0")


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
