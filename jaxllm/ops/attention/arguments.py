"""The arguments of attention: what fits together, and the static options."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxllm.ops.attention.packing import is_by_parts
from jaxllm.ops.checks import (
    as_bool,
    as_finite,
    as_integer,
    check_floating,
    check_floating_of_any_width,
    check_integer,
    check_same_dtype,
    check_shape,
)
from jaxllm.ops.window import Window, check_window, shortest

_SMALLEST = float(jnp.finfo(jnp.float32).tiny)


def check_arrays(q: Array, k: Array, v: Array) -> None:
    """Raises TypeError or ValueError where queries, keys and values do not fit together."""
    check_floating(q=q, k=k, v=v)
    check_arrays_of_any_width(q, k, v)


def check_arrays_of_any_width(q: Array, k: Array, v: Array) -> None:
    """:func:`check_arrays` for dtypes that may be float8."""
    check_floating_of_any_width(q=q, k=k, v=v)
    if q.ndim != 4 or q.shape[-1] == 0:
        raise ValueError(f"q has shape {q.shape}; it must be (B, T, N, H) with H at least 1")
    B, _, N, H = q.shape
    if k.ndim != 4 or (k.shape[0], k.shape[3]) != (B, H):
        raise ValueError(
            f"k has shape {k.shape}; it must be ({B}, S, K, {H}), with the batch and the head "
            f"width of q {q.shape}"
        )
    S, K = k.shape[1:3]
    if v.ndim != 4 or v.shape[:3] != k.shape[:3] or v.shape[-1] == 0:
        raise ValueError(
            f"v has shape {v.shape}; it must be ({B}, {S}, {K}, Hv), the shape of k {k.shape} but "
            "for the last dimension, with Hv at least 1"
        )
    if K == 0 or N % K:
        raise ValueError(
            f"k has shape {k.shape}, {K} heads; their number must divide that of q {q.shape}, {N}"
        )
    check_same_dtype("k", k, "q", q)
    check_same_dtype("v", v, "q", q)


def check_sinks(sinks: Array | None, heads: int, dtype: Any) -> None:
    """Raises TypeError or ValueError where sinks do not fit heads of a dtype."""
    if sinks is None:
        return
    check_floating(sinks=sinks)
    check_shape("sinks", sinks, (heads,), "the query heads")
    _check_wide_or_same("sinks", sinks, dtype)


def _check_wide_or_same(name: str, array: Array, dtype: Any) -> None:
    if array.dtype not in (jnp.float32, dtype):
        raise TypeError(f"{name} has dtype {array.dtype}; it must be float32 or {dtype}, as q is")


def check_bias(bias: Array, q: Any, k: Any) -> None:
    """Raises TypeError or ValueError where a bias does not fit queries and keys."""
    check_floating(bias=bias)
    (B, T, N, _), S = q.shape, k.shape[1]
    if bias.ndim != 4 or bias.shape[0] not in (1, B) or bias.shape[1] not in (1, N):
        wanted = f"({B} or 1, {N} or 1, {T}, {S})"
        raise ValueError(f"bias has shape {bias.shape}; it must be {wanted}")
    check_shape("bias", bias, (*bias.shape[:2], T, S), "queries and keys")
    _check_wide_or_same("bias", bias, q.dtype)


def check_segment_ids(q, k, segment_ids) -> tuple[Array, Array] | None:
    """Returns the segments of the queries and of the keys, or None."""
    if segment_ids is None:
        return None
    if isinstance(segment_ids, list):
        raise TypeError(
            "segment_ids is a list; it must be an integer array, or a tuple of the queries' and "
            "the keys'"
        )
    if isinstance(segment_ids, tuple):
        if len(segment_ids) != 2:
            raise ValueError(
                f"segment_ids is a tuple of {len(segment_ids)}; it must be one array, or a pair of "
                "the queries' and the keys'"
            )
        of_query, of_key = segment_ids
    elif q.shape[1] != k.shape[1]:
        raise ValueError(
            f"segment_ids is one array, but q {q.shape} and k {k.shape} differ in length; it must "
            "be a pair, of shapes (B, T) and (B, S)"
        )
    else:
        of_query = of_key = segment_ids
    check_integer(**{"segment_ids": of_query, "segment_ids of the keys": of_key})
    check_shape("segment_ids", of_query, q.shape[:2], f"batch and length of q {q.shape}")
    check_shape("segment_ids of the keys", of_key, k.shape[:2], f"batch and length of k {k.shape}")
    return of_query.astype(jnp.int32), of_key.astype(jnp.int32)


def check_projection(qkv: Array, heads: int, kv_heads: int) -> None:
    """Raises TypeError or ValueError where a projection is not of these heads."""
    check_floating(qkv=qkv)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"heads is {heads}; it must be a multiple of kv_heads, {kv_heads}, above 0"
        )
    parts = heads + 2 * kv_heads
    if is_by_parts(qkv):
        wanted = (heads // kv_heads + 2, kv_heads)
        if qkv.shape[2:4] != wanted or qkv.shape[-1] == 0:
            raise ValueError(
                f"qkv has shape {qkv.shape}; it must be (B, T, {wanted[0]}, {wanted[1]}, H), with "
                f"H at least 1, of {heads} queries and {kv_heads} keys and values in parts"
            )
        return
    if qkv.ndim != 3 or qkv.shape[-1] % parts or qkv.shape[-1] == 0:
        raise ValueError(
            f"qkv has shape {qkv.shape}; it must be (B, T, {parts}*H), with H at least 1, of "
            f"{heads} queries and {kv_heads} keys and values"
        )


def check_rope_table(q, k, rope_table) -> tuple[Array, Array] | None:
    """Returns the cosines and sines, or None."""
    if rope_table is None:
        return None
    if not isinstance(rope_table, tuple) or len(rope_table) != 2:
        found = f"is of type {type(rope_table).__name__}"
        if isinstance(rope_table, tuple):
            found = f"is a tuple of {len(rope_table)}"
        raise ValueError(f"rope_table {found}; it must be a tuple of the cosines and the sines")
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"rope_table has one position for a query and its key, but q {q.shape} and k {k.shape} "
            "differ in length; rotate them by rope before"
        )
    cos, sin = rope_table
    check_floating(**{"cos of rope_table": cos, "sin of rope_table": sin})
    B, T, _, H = q.shape
    if cos.ndim not in (2, 3) or cos.shape[:-1] not in ((T,), (B, T)) or 2 * cos.shape[-1] > H:
        raise ValueError(
            f"cos of rope_table has shape {cos.shape}; it must be ({T}, R) or ({B}, {T}, R), with "
            f"R at most {H // 2}, half the width of a head"
        )
    check_shape("sin of rope_table", sin, cos.shape, "the shape of cos")
    check_same_dtype("sin of rope_table", sin, "cos", cos)
    return jnp.asarray(cos), jnp.asarray(sin)


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The static options of attention over separate queries, keys and values."""

    causal: bool
    scale: float
    window: Window
    softcap: float | None
    interleaved: bool


@dataclasses.dataclass(frozen=True)
class PackedOptions:
    """Those of attention over the columns of one projection."""

    causal: bool
    scale: float
    window: Window
    softcap: float | None
    interleaved: bool
    heads: int
    kv_heads: int


def make_options(
    causal: bool,
    scale: float | None,
    window: Window,
    softcap: float | None,
    width: int,
    interleaved: bool,
) -> AttentionOptions:
    """The checked options of attention with heads of a width."""
    softcap = None if softcap is None else as_finite("softcap", softcap)
    # A GPU may flush a subnormal softcap to zero, and a score of zero divided by it is no number.
    if softcap is not None and not softcap >= _SMALLEST:
        raise ValueError(f"softcap is {softcap}; it must be above 0, and normal in float32")
    factor = width**-0.5 if scale is None else as_finite("scale", scale)
    causal, window = shortest(as_bool("causal", causal), check_window(window))
    return AttentionOptions(causal, factor, window, softcap, as_bool("interleaved", interleaved))


def check_packed(
    qkv: Any,
    heads: int,
    kv_heads: int | None,
    segment_ids: Array | None,
    *,
    causal: bool,
    scale: float | None,
    window: Window,
    softcap: float | None,
    interleaved: bool,
) -> tuple[tuple[Array, Array] | None, PackedOptions]:
    """Checks a projection, in either shape, and the options of its attention.

    Args:
        qkv: The projection, or what has its shape and dtype.
        heads: N.
        kv_heads: K; None for N.
        segment_ids: The segments, or None.
        causal: As in :func:`flash_attention`, as are the options that follow.
        scale: None for ``1/sqrt(H)``.
        window: How many keys a query sees, or how many on each side of it.
        softcap: A bound on the scores.
        interleaved: How pairs of columns rotate.

    Returns:
        The segments of queries and keys, and the static options.
    """
    heads = as_integer("heads", heads)
    kv_heads = heads if kv_heads is None else as_integer("kv_heads", kv_heads)
    check_projection(qkv, heads, kv_heads)
    segments = check_segment_ids(qkv, qkv, segment_ids)
    options = make_options(causal, scale, window, softcap, 1, interleaved)
    packed = PackedOptions(**dataclasses.asdict(options), heads=heads, kv_heads=kv_heads)
    if scale is None:
        packed = dataclasses.replace(packed, scale=head_width(qkv, packed) ** -0.5)
    return segments, packed


def check_packed_table(
    qkv: Any, options: PackedOptions, rope_table: Any
) -> tuple[Array, Array] | None:
    """:func:`check_rope_table` of a projection that is checked."""
    q = jax.ShapeDtypeStruct((*qkv.shape[:2], options.heads, head_width(qkv, options)), qkv.dtype)
    return check_rope_table(q, q, rope_table)


def head_width(qkv: Any, options: PackedOptions) -> int:
    """H of a projection."""
    columns = qkv.shape[-1]
    return columns if is_by_parts(qkv) else columns // (options.heads + 2 * options.kv_heads)
