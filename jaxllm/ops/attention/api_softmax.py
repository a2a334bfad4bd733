"""Softmax, and the repetition of key heads for grouped queries."""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Float

from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Op
from jaxllm.core.op import differentiable
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.attention import cuda, pallas, reference
from jaxllm.ops.checks import (
    as_bool,
    as_finite,
    as_integer,
    check_floating,
    check_floating_of_any_width,
)

SOFTMAX = Op("softmax", reference=reference, pallas=pallas, cuda=cuda)
REPEAT_KV = Op("repeat_kv", reference=reference, pallas=pallas, cuda=cuda)


def softmax(
    x: Float[Array, "*rows S"],
    *,
    scale: float = 1.0,
    causal: bool = False,
    backend: Backend | None = None,
) -> Float[Array, "*rows S"]:
    r"""The softmax along the last axis, of scores or of anything else.

    .. math::
        out_s = \frac{e^{scale \cdot x_s - m}}{\sum_r e^{scale \cdot x_r - m}}
        \qquad m = \max_r scale \cdot x_r

    In float32 whatever the dtype of ``x``. Between the passes the op keeps its output alone.

    Args:
        x: The scores; float32, bfloat16 or float16 for the kernels.
        scale: Multiplies the scores.
        causal: ``x`` is (..., T, S), the scores of T queries and S keys, and query t sees the keys
            ``s <= t + S - T`` alone: the last query stands at the last key, as in
            :func:`flash_attention`. All else is zero, the whole row of a query that sees no key
            (T above S). The elements of ``x`` there are not read.
        backend: As in :func:`flash_attention`.

    Returns:
        The probabilities, in the shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` is not floating-point, ``scale`` no number, or ``causal`` no bool that is
            known while the program is traced.
        ValueError: ``x`` has no last axis, or ``causal`` and no axis before it, ``scale`` is not
            finite, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867);
    llm.c's ``softmax_forward_kernel5`` and ``softmax_autoregressive_backward``.

    Example:
        >>> scores = jax.random.normal(jax.random.key(0), (2, 12, 1024, 1024), jnp.bfloat16)
        >>> p = jaxllm.ops.softmax(scores, scale=0.125, causal=True)
    """
    check_floating(x=x)
    causal = as_bool("causal", causal)
    wanted = 2 if causal else 1
    if x.ndim < wanted:
        axes = "(..., T, S)" if causal else "(..., S)"
        raise ValueError(f"x has shape {x.shape}; it must be {axes}")
    options = _SoftmaxOptions(as_finite("scale", scale), causal)
    return _softmax(x, backend=resolve(backend), options=options)


def repeat_kv(
    x: Float[Array, "*B S K H"], groups: int, *, backend: Backend | None = None
) -> Float[Array, "*B S N H"]:
    """Repeats each key or value head for the query heads that share it: ``N = K * groups``.

    Head n of the result is head ``n // groups`` of ``x``; the gradient of a head is the sum of
    those of its copies, in float32. :func:`flash_attention` shares key heads without copies.

    Args:
        x: Keys or values; float32, bfloat16 or float16 for the kernels.
        groups: The number of query heads to a key head.
        backend: As in :func:`flash_attention`.

    Returns:
        The repeated heads, in the dtype of ``x``.

    Raises:
        TypeError: ``x`` is not floating-point.
        ValueError: ``x`` has less than two axes, ``groups`` is below 1, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Ainslie et al., "GQA" (arXiv:2305.13245); llama3.cuda's ``repeat_interleave``.
    """
    check_floating_of_any_width(x=x)
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; it must be (..., K, H)")
    groups = as_integer("groups", groups, least=1)
    options = _RepeatOptions(groups)
    if x.shape[-2] == 1:  # one head has no shards, although its copies might
        return _repeat_one(x, backend=resolve(backend), options=options)
    return _repeat_kv(x, backend=resolve(backend), options=options)


@dataclasses.dataclass(frozen=True)
class _SoftmaxOptions:
    scale: float
    causal: bool


@dataclasses.dataclass(frozen=True)
class _RepeatOptions:
    groups: int


_softmax = differentiable(
    SOFTMAX, saves=lambda x, out: (out,), sharding=ShardingRule("... T S -> ... T S")
)
_repeat_kv, _repeat_one = (
    differentiable(
        REPEAT_KV, saves=lambda x, out: (), sharding=ShardingRule("... K H -> ... K H", sharded)
    )
    for sharded in ("... K", "...")
)
