"""Rotary position embeddings: the rotation of queries and keys, and its tables of angles."""

from __future__ import annotations

import dataclasses
import math
import typing

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Op
from jaxllm.core.op import differentiable
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.checks import (
    as_bool,
    as_finite,
    as_float,
    as_integer,
    check_floating,
    check_integer,
    check_same_dtype,
    check_shape,
)
from jaxllm.ops.rotary import cuda, pallas, reference

ROPE = Op("rope", reference=reference, pallas=pallas, cuda=cuda)


@typing.overload
def rope(
    q: Array, k: Array, cos: Array, sin: Array, *,
    interleaved: bool = False, backend: Backend | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@typing.overload
def rope(
    q: Array, k: None, cos: Array, sin: Array, *,
    interleaved: bool = False, backend: Backend | None = None,
) -> Array: ...  # fmt: skip


def rope(
    q: Float[Array, "*B T N H"],
    k: Float[Array, "*B T K H"] | None,
    cos: Float[Array, "*#B T R"],
    sin: Float[Array, "*#B T R"],
    *,
    interleaved: bool = False,
    backend: Backend | None = None,
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B T K H"]] | Float[Array, "*B T N H"]:
    r"""Rotates pairs of columns of each head by the angles of the position.

    .. math::
        out_a = x_a \cos - x_b \sin \qquad out_b = x_a \sin + x_b \cos

    One pass rotates queries and keys. With :math:`i` from 0 to R - 1, the i-th pair is columns
    ``i`` and ``i + R`` (half-split, as in Hugging Face's models), or ``2i`` and ``2i + 1``
    (interleaved, as in Meta's and llm.c's). The columns from 2R on are unchanged. The tables are
    constants: their gradients are zero.

    Args:
        q: Queries; float32, bfloat16 or float16 for the kernels.
        k: Keys, which may have fewer heads, in the dtype of ``q``; None to rotate only ``q``.
        cos: Cosines, one per pair, as :func:`rope_table` computes them: (T, R), or (\*B, T, R)
            where each sequence has its own positions; float32 for the kernels.
        sin: Sines, in the shape and dtype of ``cos``.
        interleaved: Whether the columns of a pair are neighbours.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        ``q`` and ``k``, rotated, in their shapes and dtypes; only ``q`` where ``k`` is None.

    Raises:
        TypeError: An argument is not floating-point, ``k`` differs from ``q``, or ``sin`` from
            ``cos``, in dtype, or ``interleaved`` is no bool that is known while the program is
            traced.
        ValueError: ``q`` has fewer than three axes, ``k`` differs from it in another axis than the
            heads, ``cos`` does not fit it, ``sin`` differs from ``cos`` in shape, or the backend is
            unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Su et al., "RoFormer" (arXiv:2104.09864); llama3.cuda's ``apply_rope``.

    Example:
        >>> q, k = jnp.ones((2, 1024, 32, 128)), jnp.ones((2, 1024, 8, 128))
        >>> cos, sin = jaxllm.ops.rope_table(jnp.arange(1024), 128, theta=500_000.0)
        >>> q, k = jaxllm.ops.rope(q, k, cos, sin)
    """
    check_floating(q=q, cos=cos, sin=sin)
    options = _Options(as_bool("interleaved", interleaved))
    if q.ndim < 3:
        raise ValueError(f"q has shape {q.shape}; it must be (*B, T, N, H)")
    if k is not None:
        _check_keys(q, k)
    _check_tables(q, cos, sin)
    rotated_q, rotated_k = _rope(q, k, cos, sin, backend=resolve(backend), options=options)
    return rotated_q if k is None else (rotated_q, rotated_k)


@dataclasses.dataclass(frozen=True)
class _Options:
    interleaved: bool


_rope = differentiable(
    ROPE,
    saves=lambda q, k, cos, sin, *_: (cos, sin),
    sharding=ShardingRule("B T N H, B T N H, B T R, B T R -> B T N H, B T N H", "B T N"),
    outputs=2,
    arrange=lambda cos, sin, dq, dk: (dq, dk, cos, sin),
)


def _check_keys(q: Array, k: Array) -> None:
    check_floating(k=k)
    check_same_dtype("k", k, "q", q)
    if k.ndim != q.ndim or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k has shape {k.shape}; it must be that of q {q.shape} but for the number of heads, "
            "the last axis but one"
        )


def _check_tables(q: Array, cos: Array, sin: Array) -> None:
    if cos.ndim < 2 or cos.shape[:-1] not in (q.shape[-3:-2], q.shape[:-2]):
        raise ValueError(
            f"cos has shape {cos.shape}; with q {q.shape} it must be {(*q.shape[-3:-2], 'R')} "
            f"or {(*q.shape[:-2], 'R')}"
        )
    if 2 * cos.shape[-1] > q.shape[-1]:
        raise ValueError(
            f"cos has shape {cos.shape}, {cos.shape[-1]} pairs of columns; q {q.shape} has heads "
            f"of {q.shape[-1]} columns"
        )
    check_shape("sin", sin, cos.shape, "the shape of cos")
    check_same_dtype("sin", sin, "cos", cos)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 and later scale the frequencies for contexts longer than in pretraining.

    Attributes:
        factor: The divisor of low frequencies.
        low: A frequency with at most this many periods in ``original_length`` positions is low.
        high: A frequency with at least this many periods is unchanged; those between are blended.
        original_length: The context length of pretraining.

    Raises:
        TypeError: ``factor``, ``low`` or ``high`` is no number.
        ValueError: ``factor``, ``low`` or ``high`` is not finite and above 0, ``low`` is not below
            ``high``, or ``original_length`` is not an integer of at least 1.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192

    def __post_init__(self):
        # Python's numbers, whatever is given: a config with a scaling is hashable.
        for name in ("factor", "low", "high"):
            number = as_float(name, getattr(self, name))
            if not 0 < number < math.inf:
                raise ValueError(f"{name} is {number}; it must be above 0, and finite")
            object.__setattr__(self, name, number)
        if not self.low < self.high:
            raise ValueError(f"low is {self.low}; it must be below high, which is {self.high}")
        try:
            length = as_integer("original_length", self.original_length)
        except TypeError as error:
            raise ValueError(f"{error}, at least 1") from error
        if length < 1:
            raise ValueError(f"original_length is {length}; it must be an integer, at least 1")
        object.__setattr__(self, "original_length", length)


def rope_table(
    positions: Integer[Array, "*P"],
    head_dim: int,
    *,
    theta: float,
    scaling: RopeScaling | None = None,
) -> tuple[Float[Array, "*P R"], Float[Array, "*P R"]]:
    r"""The cosines and sines of the angles by which :func:`rope` rotates.

    .. math::
        angle_{p,i} = p \cdot \theta^{-2i / head\_dim} \qquad 0 \le i < R = head\_dim / 2

    Args:
        positions: Positions, in any shape.
        head_dim: The number of columns to rotate, even; usually all columns of a head.
        theta: The base of the frequencies; 10,000 in Llama 2, 500,000 in Llama 3.
        scaling: How to scale low frequencies; None for no scaling.

    Returns:
        ``(cos, sin)``, float32, with a last axis of ``head_dim / 2``.

    Raises:
        TypeError: ``positions`` is not of an integer dtype, ``head_dim`` no integer, ``theta`` no
            number, or ``scaling`` no :class:`RopeScaling`.
        ValueError: ``head_dim`` is odd or below 0, or ``theta`` not finite and above 0.

    Source: llama3.cuda's ``precompute_freqs_cis``; Hugging Face's ``rope_type`` "llama3".
    """
    check_integer(positions=positions)
    head_dim, theta = as_integer("head_dim", head_dim), as_finite("theta", theta)
    if head_dim < 0 or head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}; it must be even, as columns rotate in pairs")
    if not theta > 0:
        raise ValueError(f"theta is {theta}; it must be above 0")
    if not isinstance(scaling, RopeScaling | None):
        raise TypeError(f"scaling has type {type(scaling).__name__}; it must be a RopeScaling")
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if scaling is not None:
        periods = scaling.original_length * frequencies / (2 * np.pi)
        unscaled = np.clip((periods - scaling.low) / (scaling.high - scaling.low), 0.0, 1.0)
        frequencies = frequencies * (unscaled + (1.0 - unscaled) / scaling.factor)
    frequencies = np.expand_dims(frequencies.astype(np.float32), tuple(range(positions.ndim)))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)
