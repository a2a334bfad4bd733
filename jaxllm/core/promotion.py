"""The library's own arithmetic under a caller's rules of promotion.

``jax.numpy_rank_promotion("raise")`` and ``jax.numpy_dtype_promotion("strict")`` look for mistakes
in a caller's code. The implementations of the ops broadcast a bias over rows and mix bfloat16 with
float32 on purpose, so they run under JAX's defaults. What a caller gives to be called, such as a
schedule, keeps the caller's rules.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

_DEFAULTS = ("allow", "standard")
_of_caller: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar(
    "rules of promotion", default=_DEFAULTS
)


@contextlib.contextmanager
def defaults() -> Iterator[None]:
    """Traces what is inside with JAX's default rules of promotion."""
    surrounding = _current()
    if surrounding == _DEFAULTS:
        yield
        return
    token = _of_caller.set(surrounding)
    try:
        with _rules(*_DEFAULTS):
            yield
    finally:
        _of_caller.reset(token)


def by_default(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, traced with JAX's default rules of promotion."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        with defaults():
            return fn(*args, **kwargs)

    return call


def callback(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A caller's ``fn``, traced with the caller's rules inside :func:`defaults` too."""

    def call(*args: Any, **kwargs: Any) -> Any:
        rules = _of_caller.get()
        if rules == _DEFAULTS or _current() != _DEFAULTS:
            return fn(*args, **kwargs)
        with _rules(*rules):
            return fn(*args, **kwargs)

    return call


def _current() -> tuple[str, str]:
    config: Any = jax.config
    return config.jax_numpy_rank_promotion, config.jax_numpy_dtype_promotion


@contextlib.contextmanager
def _rules(rank: Any, dtype: Any) -> Iterator[None]:
    with jax.numpy_rank_promotion(rank), jax.numpy_dtype_promotion(dtype):
        yield
