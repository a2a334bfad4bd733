"""Sampling text from a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int


class Config(Protocol):
    """What a model's config must tell; hashable."""

    @property
    def vocab_size(self) -> int:
        """The number of real tokens; columns of the logits beyond it are padding."""
        ...

    @property
    def max_seq_len(self) -> int:
        """The most tokens the model can look back on."""
        ...


def generate(
    forward: Callable[..., Float[Array, "B T Vp"]],
    params: Any,
    prompt_tokens: ArrayLike | Sequence,
    *,
    config: Config,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    key: Array | None = None,
) -> Int[Array, "*B T"]:
    """Continues a prompt, one sampled token at a time.

    The loop is one compiled program over a buffer of the final length. Each step runs the model
    over the buffer, or over its last ``config.max_seq_len`` tokens once it is longer than that.

    Args:
        forward: ``forward(params, tokens, config)``, the logits of a causal model, such as
            ``jaxllm.models.gpt2.forward``. Pass the same function each time, or it is recompiled.
        params: The model's parameters, in the dtype to compute in.
        prompt_tokens: The tokens to continue, of shape (T,) or (B, T).
        config: The model's config.
        max_new_tokens: How many tokens to add.
        temperature: Divides the logits: below 1 sharpens, above 1 flattens. 0 takes the likeliest
            token each time, and needs no key.
        top_k: Sample among the ``top_k`` likeliest tokens; None for all.
        key: The source of randomness; equal keys give equal samples.

    Returns:
        The prompt and the new tokens, int32, with the axes of ``prompt_tokens``.

    Raises:
        ValueError: The prompt is empty or not of one or two axes, a number is out of range, or a
            key is needed and missing.
    """
    prompt = jnp.asarray(prompt_tokens)
    if prompt.ndim not in (1, 2) or prompt.size == 0:
        raise ValueError(
            f"prompt_tokens has shape {prompt.shape}; it must be (T,) or (B, T) and not empty"
        )
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 0")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}; it must be at least 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is {top_k}; it must be at least 1, or None for all tokens")
    if key is None:
        if temperature > 0:
            raise ValueError("key is missing; a temperature above 0 needs one")
        key = jax.random.key(0)  # never drawn from
    tokens = _generate(
        params,
        jnp.atleast_2d(prompt).astype(jnp.int32),
        jnp.float32(temperature),
        key,
        forward=forward,
        config=config,
        max_new_tokens=max_new_tokens,
        top_k=top_k if temperature > 0 else 1,
    )
    return tokens if prompt.ndim == 2 else tokens[0]


@functools.partial(jax.jit, static_argnames=("forward", "config", "max_new_tokens", "top_k"))
def _generate(params, prompt, temperature, key, *, forward, config, max_new_tokens, top_k):
    length = prompt.shape[1]
    window = min(length + max_new_tokens, config.max_seq_len)
    buffer = jnp.pad(prompt, ((0, 0), (0, max_new_tokens)))

    def add_token(i, buffer):
        # What follows position i is padding, which a causal model does not see from there.
        start = jnp.maximum(i - window, 0)
        context = jax.lax.dynamic_slice_in_dim(buffer, start, window, axis=1)
        logits = forward(params, context, config)
        last = jax.lax.dynamic_index_in_dim(logits, i - 1 - start, axis=1, keepdims=False)
        step_key = jax.random.fold_in(key, i)
        token = _sample(last[:, : config.vocab_size], temperature, top_k, step_key)
        return jax.lax.dynamic_update_index_in_dim(buffer, token, i, axis=1)

    return jax.lax.fori_loop(length, length + max_new_tokens, add_token, buffer)


def _sample(logits, temperature, top_k, key):
    """One token a row; ``top_k`` of 1 is the likeliest, whatever the temperature."""
    if top_k == 1:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if top_k is None or top_k >= logits.shape[-1]:
        scaled = logits.astype(jnp.float32) / temperature
        return jax.random.categorical(key, scaled).astype(jnp.int32)
    # Sampling among the sorted few, not below a threshold: a tie does not let another token in.
    best, ids = jax.lax.top_k(logits.astype(jnp.float32), top_k)
    choice = jax.random.categorical(key, best / temperature)
    return jnp.take_along_axis(ids, choice[:, None], axis=1)[:, 0].astype(jnp.int32)
