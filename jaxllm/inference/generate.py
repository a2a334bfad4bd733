"""Sampling text from a model.

:func:`complete` and :func:`stream` decode with a cache of keys and values, a token a step;
:func:`generate` takes any causal model, without a cache, and reads the whole context each step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from jaxllm.inference.cache import KVCache, decode_step, init_cache, prefill
from jaxllm.inference.paged_cache import PagedKVCache, init_paged_cache
from jaxllm.inference.sampling import check_sampling, sample
from jaxllm.models.common import (
    Params,
    check_params,
    for_decoding,
    is_for_decoding,
    with_auto_axes,
)
from jaxllm.models.special_tokens import SpecialTokens
from jaxllm.ops.checks import as_integer


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
        TypeError: ``max_new_tokens`` or ``top_k`` is no integer, ``temperature`` no number, or
            ``key`` no key of ``jax.random``.
        ValueError: The prompt is empty, not of one or two axes, or not of integers, or has a token
            that is not in the vocabulary; a number is out of range; or a key is needed and missing.
    """
    prompt = _as_prompt("prompt_tokens", prompt_tokens)
    if prompt.ndim not in (1, 2) or prompt.size == 0:
        raise ValueError(
            f"prompt_tokens has shape {prompt.shape}; it must be (T,) or (B, T) and not empty"
        )
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise ValueError(f"prompt_tokens has dtype {prompt.dtype}; it must be integers")
    if not isinstance(prompt, Tracer):
        _check_vocabulary("prompt_tokens", np.asarray(prompt), config)
    max_new_tokens = as_integer("max_new_tokens", max_new_tokens, least=0)
    temperature, top_k, _ = check_sampling(temperature, top_k, None, key)
    if key is None:
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
        token = sample(last[:, : config.vocab_size], temperature, step_key, top_k=top_k)
        return jax.lax.dynamic_update_index_in_dim(buffer, token, i, axis=1)

    return jax.lax.fori_loop(length, length + max_new_tokens, add_token, buffer)


class Model(Protocol):
    """A model that decodes: the module ``jaxllm.models.gpt2`` or ``jaxllm.models.llama3``."""

    @property
    def cached_forward(self) -> Callable[..., Array]:
        """``cached_forward(params, tokens, positions, config, attend)``."""
        ...


def complete(
    model: Model,
    params: Params,
    prompts: Sequence[ArrayLike | Sequence[int]],
    *,
    config: Any,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: int | Sequence[int] | None = None,
    key: Array | None = None,
    max_length: int | None = None,
    cache_dtype: DTypeLike | None = None,
    page_size: int | None = None,
) -> list[np.ndarray]:
    """Continues prompts of any lengths, all steps in one compiled program.

    Args:
        model: ``jaxllm.models.gpt2`` or ``jaxllm.models.llama3``.
        params: The model's parameters, in the dtype to compute in, or their int8 form.
        prompts: The tokens to continue, a sequence of them for each text.
        config: The model's config.
        max_new_tokens: How many tokens to add at most.
        temperature: Divides the logits: below 1 sharpens, above 1 flattens. 0 takes the likeliest
            token each time, and needs no key.
        top_k: Sample among the ``top_k`` likeliest tokens; None for all.
        top_p: Sample among the fewest likeliest tokens whose probabilities add up to ``top_p``;
            None for all.
        stop_tokens: A text ends with the first of these that it gets. None for
            ``config.special_tokens.eos``, the ends that the model's checkpoint names; () for none.
            A tokenizer's ``stop_tokens`` are ids for it too.
        key: The source of randomness; equal keys give equal samples.
        max_length: The most tokens that the cache holds, the prompt included; None for as many as
            are needed.
        cache_dtype: ``jnp.int8``, or the dtype of ``params``; None for the latter.
        page_size: Keeps the cache in pages of so many tokens: each text has room for its prompt and
            ``max_new_tokens``, and wastes less than a page, whatever the longest needs. The logits
            have the bits of a cache in one piece with as many slots as the longest text has in its
            pages, and differ by rounding from others; so do those of layers with a window. None for
            a cache in one piece. ``max_length`` must be None.

    Returns:
        The new tokens of each prompt, int32, the token that stopped it included.

    Raises:
        TypeError: An option is of another type than this; ``config`` is that of another model;
            ``cache_dtype`` is neither int8 nor the dtype of ``params``; or ``params``, ``prompts``
            or ``key`` are traced, as inside ``jax.jit``.
        ValueError: A prompt is empty, has a token that is not in the vocabulary, or is too long for
            the cache or the model; a number is out of range; ``stop_tokens`` are no integers, or
            beyond int32; ``params`` are those of another model, or have other layers or heads than
            ``config``, or fewer tokens; or a key is needed and missing.
    """
    _check_untraced(params=params, prompts=prompts, key=key)
    temperature, top_k, top_p = check_sampling(temperature, top_k, top_p, key)
    max_new_tokens = as_integer("max_new_tokens", max_new_tokens, least=0)
    stops = _stops(stop_tokens, config)
    _check_params(model, params, config)
    dtype = _cache_dtype(params, cache_dtype)
    params, key, mesh = _on_auto_axes(params, key)
    with mesh():
        tokens, lengths = _pad_prompts(prompts, config)
        cache = _empty_cache(lengths, max_new_tokens, max_length, page_size, config, dtype)
        new, counts, _ = _complete(
            _laid_out(params),
            tokens,
            lengths,
            cache,
            jnp.float32(temperature),
            jax.random.key(0) if key is None else key,
            model=model,
            config=config,
            max_new_tokens=max_new_tokens,
            top_k=1 if temperature == 0 else top_k,
            top_p=top_p,
            stop_tokens=stops,
        )
    return [row[:count] for row, count in zip(np.asarray(new), np.asarray(counts), strict=True)]


def stream(
    model: Model,
    params: Params,
    prompt: ArrayLike | Sequence[int],
    *,
    config: Any,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: int | Sequence[int] | None = None,
    key: Array | None = None,
    max_length: int | None = None,
    cache_dtype: DTypeLike | None = None,
    page_size: int | None = None,
) -> Iterator[int]:
    """Continues one prompt, and yields each token as it comes.

    The tokens are those of :func:`complete`, whose arguments it takes.

    Yields:
        The new tokens.

    Raises:
        TypeError: As in :func:`complete`.
        ValueError: As in :func:`complete`.
    """
    _check_untraced(params=params, prompt=prompt, key=key)
    temperature, top_k, top_p = check_sampling(temperature, top_k, top_p, key)
    max_new_tokens = as_integer("max_new_tokens", max_new_tokens, least=0)
    stops = _stops(stop_tokens, config)
    _check_params(model, params, config)
    dtype = _cache_dtype(params, cache_dtype)
    params, key, mesh = _on_auto_axes(params, key)
    with mesh():
        tokens, lengths = _pad_prompts([prompt], config)
        cache: Any = _empty_cache(lengths, max_new_tokens, max_length, page_size, config, dtype)
    options = {
        "model": model,
        "config": config,
        "top_k": 1 if temperature == 0 else top_k,
        "top_p": top_p,
    }

    def run() -> Iterator[int]:
        nonlocal cache
        with mesh():
            laid_out, divisor = _laid_out(params), jnp.float32(temperature)
            source = jax.random.key(0) if key is None else key
        token = None
        for i in range(max_new_tokens):
            with mesh():  # not around the yield: the caller has a context of its own
                if token is None:
                    token, cache = _first(
                        laid_out, tokens, lengths, cache, divisor, source, **options
                    )
                else:
                    token, cache = _next(laid_out, token, cache, divisor, source, i, **options)
            found = int(np.asarray(token)[0])
            yield found
            if found in stops:
                return

    return run()


def _check_untraced(**given: Any) -> None:
    """Raises TypeError where an argument is traced: the tokens that return must be known."""
    for name, value in given.items():
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
            raise TypeError(
                f"{name} is traced by jax.jit, jax.vmap or the like; complete and stream return "
                "known tokens and run outside of them. Inside, use generate, or prefill and "
                "decode_step"
            )


def _on_auto_axes(
    params: Params, key: Array | None
) -> tuple[Params, Array | None, Callable[[], contextlib.AbstractContextManager]]:
    """The arrays on a mesh with Auto axes if they are on one with Explicit axes, and its context.

    Nothing is copied. Under Explicit axes JAX neither merges heads that are sharded nor slices the
    padding off logits that are sharded along the vocabulary.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves((params, key))]
    meshes: Any = [of.mesh for of in shardings if isinstance(of, NamedSharding)]
    if not any(mesh.explicit_axes for mesh in meshes):
        return params, key, contextlib.nullcontext

    def move(x: Any) -> Any:
        of = getattr(x, "sharding", None)
        if not isinstance(of, NamedSharding):
            return x
        return jax.device_put(x, NamedSharding(with_auto_axes(cast(Mesh, of.mesh)), of.spec))

    params, key = jax.tree.map(move, (params, key))
    return params, key, functools.partial(jax.set_mesh, with_auto_axes(meshes[0]))


def _stops(stop_tokens: int | Sequence[int] | None, config: Any) -> tuple[int, ...]:
    """One id or several, as configs have them, as a tuple."""
    name, given = "stop_tokens", stop_tokens
    if given is None:
        name = "config.special_tokens.eos"
        given = getattr(config, "special_tokens", SpecialTokens()).eos
    try:
        ids = np.atleast_1d(np.asarray(given))
    except ValueError:  # lists of several lengths
        ids = np.empty((0, 0))
    # Integers beyond 64 bits come as objects.
    found: tuple[Any, ...] = tuple(ids.tolist())
    if ids.ndim != 1 or not all(type(id_) is int for id_ in found):
        raise ValueError(f"{name} is {given!r}; it must be an integer or a list of them")
    for id_ in found:
        if not -(2**31) <= id_ < 2**31:
            raise ValueError(f"{name} has {id_}; it must be within int32, as tokens are")
    return found


def _pad_prompts(prompts: Sequence, config: Any) -> tuple[np.ndarray, np.ndarray]:
    """The prompts as one array, padded at their ends, and their lengths."""
    try:
        given = list(prompts)
    except TypeError as error:
        found = type(prompts).__name__
        raise TypeError(f"prompts has type {found}; it must be a sequence of prompts") from error
    rows = [np.asarray(_as_prompt(f"prompt {i}", prompt)) for i, prompt in enumerate(given)]
    if not rows:
        raise ValueError("prompts is empty; it must have at least one prompt")
    for i, row in enumerate(rows):
        if row.ndim != 1 or row.size == 0 or not np.issubdtype(row.dtype, np.integer):
            raise ValueError(
                f"prompt {i} has shape {row.shape} and dtype {row.dtype}; it must be integers, "
                "(T,), and not empty"
            )
        _check_vocabulary(f"prompt {i}", row, config)
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    return tokens, lengths


def _as_prompt(name: str, prompt: Any) -> np.ndarray | Array:
    """A prompt as an array: of JAX where it is traced, else of NumPy, which keeps 64 bits."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(prompt)):
        return jnp.asarray(prompt)
    try:
        found = np.asarray(prompt)
    except ValueError as error:
        raise ValueError(f"{name} has rows of unequal lengths; it must be one array") from error
    return jnp.asarray(found) if found.dtype.kind == "f" else found  # errors name JAX's dtype


def _check_params(model: Any, params: Params, config: Any) -> None:
    """Checks that parameters and config are those of a model, which may have no such check."""
    getattr(model, "check_params", check_params)(params, config)


def _check_vocabulary(name: str, tokens: np.ndarray, config: Config) -> None:
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ValueError(
            f"{name} has tokens from {tokens.min()} to {tokens.max()}; the vocabulary has those "
            f"from 0 to {config.vocab_size - 1}"
        )


def _check_max_length(
    lengths: np.ndarray, max_new_tokens: int, max_length: int | None, config: Any
) -> int:
    """The most tokens that the cache holds."""
    max_length = None if max_length is None else as_integer("max_length", max_length)
    needed = int(lengths.max()) + max_new_tokens
    for name, most in (("max_length", max_length), ("the model's max_seq_len", config.max_seq_len)):
        if most is not None and needed > most:
            raise ValueError(
                f"the longest prompt has {lengths.max()} tokens, {needed} with max_new_tokens; "
                f"{name} is {most}"
            )
    return needed if max_length is None else max_length


def _empty_cache(
    lengths: np.ndarray,
    max_new_tokens: int,
    max_length: int | None,
    page_size: int | None,
    config: Any,
    dtype: DTypeLike,
) -> KVCache | PagedKVCache:
    """A cache, in one piece or in pages, with room for prompts and the new tokens."""
    length = _check_max_length(lengths, max_new_tokens, max_length, config)
    if page_size is None:
        return init_cache(config, len(lengths), length, dtype)
    if max_length is not None:
        raise ValueError(
            f"max_length is {max_length}, with a page_size of {page_size}; it must be None: each "
            "text has as many pages as it needs"
        )
    return init_paged_cache(config, (lengths + max_new_tokens).tolist(), page_size, dtype)


def _cache_dtype(params: Params, dtype: DTypeLike | None) -> DTypeLike:
    """The dtype of the cache.

    Raises:
        TypeError: It is neither int8 nor that of the parameters, in which attention computes.
    """
    own = params["wte"].dtype
    if dtype is None:
        return own
    try:
        found = jax.dtypes.canonicalize_dtype(dtype)
    except TypeError as error:
        raise TypeError(f"cache_dtype is {dtype!r}; it must be int8, or {own}") from error
    if found not in (jnp.int8, own):
        raise TypeError(f"cache_dtype is {found}; it must be int8, or {own} as params are")
    return found


def _laid_out(params: Params) -> Params:
    """The parameters as decoding reads them fastest."""
    return params if is_for_decoding(params) else _for_decoding(params)


_for_decoding = jax.jit(for_decoding)


def _choose(logits, temperature, key, i, *, config, top_k, top_p):
    logits = logits[:, : config.vocab_size]
    return sample(logits, temperature, jax.random.fold_in(key, i), top_k=top_k, top_p=top_p)


@functools.partial(
    jax.jit,
    static_argnames=("model", "config", "max_new_tokens", "top_k", "top_p", "stop_tokens"),
    donate_argnames="cache",
)
def _complete(
    params, tokens, lengths, cache, temperature, key,
    *, model, config, max_new_tokens, top_k, top_p, stop_tokens,
):  # fmt: skip
    """Returns ``(new, counts, cache)``; the cache is the donated one, written over."""
    choose = functools.partial(
        _choose, temperature=temperature, key=key, config=config, top_k=top_k, top_p=top_p
    )
    new = jnp.zeros((len(tokens), max_new_tokens), jnp.int32)
    counts = jnp.zeros(len(tokens), jnp.int32)
    if max_new_tokens == 0:
        return new, counts, cache

    def add(i, token, state):
        new, counts, done = state
        new = jax.lax.dynamic_update_index_in_dim(new, token, i, axis=1)
        counts = counts + (~done).astype(counts.dtype)
        for stop in stop_tokens:
            done = done | (token == stop)
        return new, counts, done

    logits, cache = prefill(model, params, tokens, lengths, config, cache)
    token = choose(logits, i=0)
    state = add(0, token, (new, counts, jnp.zeros(len(tokens), bool)))

    def step(i, carry):
        token, cache, state = carry
        logits, cache = decode_step(model, params, token, config, cache)
        token = choose(logits, i=i)
        return token, cache, add(i, token, state)

    if not stop_tokens:  # a loop of known length never waits for the host
        _, cache, state = jax.lax.fori_loop(1, max_new_tokens, step, (token, cache, state))
    else:
        _, (_, cache, state) = jax.lax.while_loop(
            lambda carry: (carry[0] < max_new_tokens) & ~carry[1][2][2].all(),
            lambda carry: (carry[0] + 1, step(*carry)),
            (jnp.int32(1), (token, cache, state)),
        )
    return state[0], state[1], cache


@functools.partial(
    jax.jit, static_argnames=("model", "config", "top_k", "top_p"), donate_argnames="cache"
)
def _first(params, tokens, lengths, cache, temperature, key, *, model, config, top_k, top_p):
    logits, cache = prefill(model, params, tokens, lengths, config, cache)
    return _choose(logits, temperature, key, 0, config=config, top_k=top_k, top_p=top_p), cache


@functools.partial(
    jax.jit, static_argnames=("model", "config", "top_k", "top_p"), donate_argnames="cache"
)
def _next(params, token, cache, temperature, key, i, *, model, config, top_k, top_p):
    logits, cache = decode_step(model, params, token, config, cache)
    return _choose(logits, temperature, key, i, config=config, top_k=top_k, top_p=top_p), cache
