"""``dot_product_attention`` with the arguments of ``jax.nn``."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from jaxllm.core import meshes, promotion
from jaxllm.core.backend import Backend, BackendError, Call, record, resolve
from jaxllm.core.dispatch import Direction, choose, describe
from jaxllm.ops.attention.api import FLASH_ATTENTION, FLASH_ATTENTION_BIAS, flash_attention
from jaxllm.ops.checks import (
    as_array,
    as_bool,
    as_finite,
    as_int32,
    as_integer,
    as_integers,
    check_floating,
    check_shape,
    is_certain,
)
from jaxllm.ops.window import Window

Implementation = Literal["jaxllm", "xla", "cudnn"]

_NAME = "dot_product_attention"
_OURS = "jaxllm"
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_LONGEST = 2**30  # side of a window: beyond any sequence, and a position added to it is an int32
# The segments: queries and keys within their lengths, queries beyond, keys beyond.
_WITHIN, _QUERIES_BEYOND, _KEYS_BEYOND = 0, 1, 2


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> Any:
    r"""``jax.nn.dot_product_attention``, by flash attention where that computes the same.

    .. math::
        out_t = \sum_s softmax_s\!\left( scale \cdot q_t \cdot k_s + bias_{ts} \right) v_s

    The arguments, the masks and the result are those of ``jax.nn``. Positions are counted from the
    start of both sequences, so that a causal mask is top-left, unlike that of
    :func:`jaxllm.ops.flash_attention`. A query that sees no key gives the mean of all values.

    :func:`jaxllm.ops.flash_attention` serves

    * calls without a mask, and causal ones with T <= S;
    * sequence lengths, without a window;
    * windows with T == S; with a causal mask or ``(left, 0)`` also T < S.

    Results differ from those of ``jax.nn`` where a ``bias`` hides each key that a query sees:

    * With -inf they are zeros, and NaN in ``jax.nn``. Where ``is_causal``, a window or key lengths
      hide keys from the query, ``jax.nn`` gives the mean of the values of those hidden keys.
    * With the lowest float32 or bfloat16 the kernels give zeros too, and the logsumexp -inf: a bias
      below -2.3e38 is -inf to them. Backend ``"xla"`` gives the mean of the values that the query
      sees, and ``jax.nn`` the same, or again that of the hidden keys.

    The kernels have a gradient, but no forward mode (``jax.jvp``) and no second derivative:
    ``implementation="xla"`` has both.

    ``jax.nn.dot_product_attention`` runs for ``mask``, other masks, ``return_residual`` with
    sequence lengths, a ``scale`` that is traced, and dtypes and head widths that no kernel takes.
    :func:`jaxllm.explain` lists such a call with the reason. On Explicit mesh axes
    ``jax.nn`` takes shards along the batch and the heads alone. Flash attention serves the others.

    Args:
        query: The queries, (B, T, N, H) or (T, N, H).
        key: The keys, (B, S, K, H) or (S, K, H), in the dtype of ``query``; K divides N.
        value: The values, in the shape and dtype of ``key``, as ``jax.nn`` asks;
            :func:`jaxllm.ops.flash_attention` takes values of another width.
        bias: Added to the scaled scores; broadcasts to (B, N, T, S).
        mask: Bools, True where a query sees a key; broadcasts to (B, N, T, S).
        scale: Multiplies the scores; None for ``1/sqrt(H)``.
        is_causal: Query t sees the keys ``s <= t`` alone.
        query_seq_lengths: How many queries of each sequence are real, int32, (B,). The result of
            the others is zero.
        key_value_seq_lengths: How many keys of each sequence are real, int32, (B,). The others are
            seen by no query.
        local_window_size: ``(left, right)``: query t sees the keys from ``t - left`` to
            ``t + right`` alone; a pair or an array of two. An integer stands for both.
        implementation: None for flash attention where a kernel serves the call, and ``jax.nn``'s
            default otherwise. ``"jaxllm"`` for flash attention or an error. ``"xla"`` and
            ``"cudnn"`` for those of ``jax.nn``.
        return_residual: Whether to return the logsumexp too. It has no gradient, as in ``jax.nn``;
            that of ``flash_attention(..., return_lse=True)`` has one.

    Returns:
        What each query read, in the shape and dtype of ``query``; with ``return_residual`` a pair
        of that and the logsumexp, (B, T, N) or (T, N), in the dtype of ``key``.

    Raises:
        TypeError: What must be an array is none, or ``is_causal``, ``return_residual``, ``scale``
            or ``local_window_size`` is of the wrong kind.
        ValueError: An array does not fit the others in shape or dtype, ``scale`` is not finite,
            ``implementation`` is unknown, or ``jax.nn`` does not take the arrays' shards.
        BackendError: With ``"jaxllm"``, or where :func:`jaxllm.use_backend` asks for ``"cuda"`` or
            ``"pallas"``: no kernel serves the call, for the reason in the message.

    Source: ``jax.nn.dot_product_attention`` of JAX 0.12; :func:`jaxllm.ops.flash_attention` has
    those of the kernels.

    Example:
        >>> q = jax.random.normal(jax.random.key(0), (2, 1024, 12, 64), jnp.bfloat16)
        >>> out = jaxllm.nn.dot_product_attention(q, q, q, is_causal=True)
    """
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(
            f"implementation is {implementation!r}; it must be None or one of "
            f"{', '.join(get_args(Implementation))}"
        )
    call = _checked(
        query, key, value, bias, mask, scale, is_causal, query_seq_lengths, key_value_seq_lengths,
        local_window_size, return_residual,
    )  # fmt: skip
    if implementation in ("xla", "cudnn"):
        return _run_theirs(call, implementation, ())
    backend = resolve()
    reason, flash = _as_flash_attention(call)
    if flash is None:
        assert reason is not None
        if implementation == _OURS:
            raise BackendError(f"implementation {_OURS!r} cannot serve {_NAME}: {reason}")
        if backend not in ("auto", "xla"):
            raise BackendError(
                f"backend {backend!r} cannot serve {_NAME}: {reason}; implementation='xla' runs "
                "that of jax.nn"
            )
        return _run_theirs(call, None, ((_OURS, reason),))
    if implementation is None and backend == "auto":
        rejected = _rejected_kernels(flash)
        if rejected and _takes_shards(call):
            return _run_theirs(call, None, rejected)
    return _run_ours(call, flash, backend)


class _Call(NamedTuple):
    """The checked arguments of a call; arrays have four dimensions, a window is a pair."""

    query: Array
    key: Array
    value: Array
    bias: Array | None
    mask: Array | None
    scale: Any
    is_causal: bool
    query_lengths: Array | None
    key_lengths: Array | None
    window: tuple[Any, Any] | None
    return_residual: bool
    shape: tuple[int, ...]  # of the result


class _Flash(NamedTuple):
    """The arguments of flash attention that computes a call.

    Attributes:
        arrays: Queries, keys, values, and a pair of segments or None.
        bias: The bias of each score, or None.
        options: The options, by name.
        is_empty: Of each sequence whether it has no keys: jax.nn returns the mean of all values
            then, and flash attention zeros. None where every query sees a key.
    """

    arrays: tuple[Array, Array, Array, tuple[Array, Array] | None]
    bias: Array | None
    options: dict[str, Any]
    is_empty: Array | None


def _as_flash_attention(call: _Call) -> tuple[str | None, _Flash | None]:
    """Why flash attention cannot compute what a call asks for, or how it does."""
    q, k, v = call.query, call.key, call.value
    T, S, H = q.shape[1], k.shape[1], q.shape[3]
    if q.dtype.name not in _DTYPES:
        return f"query has dtype {q.dtype}; flash attention takes {', '.join(_DTYPES)}", None
    if is_certain(lambda: H == 0):
        return "query has heads of width 0", None
    bias = call.bias
    if bias is not None and bias.dtype.name not in _DTYPES:
        return f"bias has dtype {bias.dtype}; flash attention takes {', '.join(_DTYPES)}", None
    if call.mask is not None:
        return "mask is given; no kernel takes one: see is_causal, the lengths and windows", None
    if call.return_residual and (call.query_lengths is not None or call.key_lengths is not None):
        return (
            "return_residual comes with sequence lengths; jax.nn's has values for masked rows",
            None,
        )
    scale = 1 / math.sqrt(H) if call.scale is None else _number(call.scale)
    if scale is None:
        return "scale is traced, or an array; the kernels take a number", None
    reason, causal, window = _flash_mask(T, S, call.is_causal, call.window)
    if reason is None and window is not None and call.key_lengths is not None:
        reason = (
            "key_value_seq_lengths comes with local_window_size; a query whose window has no key "
            "would give zeros, and the mean of all values here"
        )
    if reason is not None:
        return reason, None
    if bias is not None:
        # Flash attention takes one of float32 or in the dtype of the queries, of each score.
        bias = bias if bias.dtype == q.dtype else bias.astype(jnp.float32)
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], T, S))
    if causal and not is_certain(lambda: T == S):
        k, v = _first(k, T, axis=1), _first(v, T, axis=1)  # no query sees the others
        bias = None if bias is None else _first(bias, T, axis=3)
    segments, is_empty = _segments(T, k.shape[1], call)
    options = {"causal": causal, "scale": scale, "window": window}
    return None, _Flash((q, k, v, segments), bias, options, is_empty)


def _first(x: Array, n: int, *, axis: int) -> Array:
    """The first n elements along an axis, whole on Explicit mesh axes: shards may not divide n."""
    sharding = meshes.explicit_sharding(x)
    if sharding is not None:
        spec = list(meshes.full_spec(sharding.spec, x.ndim))
        spec[axis] = None
        x = meshes.reshard(x, sharding.mesh, P(*spec))
    return lax.slice_in_dim(x, 0, n, axis=axis)


def _number(scale: Any) -> float | None:
    """The number that a scale is; None where it is traced, or has dimensions."""
    if isinstance(scale, Tracer) or jnp.ndim(scale):
        return None
    return as_finite("scale", scale)


def _flash_mask(
    T: int, S: int, is_causal: bool, window: tuple[Any, Any] | None
) -> tuple[str | None, bool, Window]:
    """The ``causal`` and ``window`` of flash attention for a mask of ``jax.nn``.

    Flash attention counts positions from the end of both sequences. Its masks are the same where
    T == S. Where T < S a causal query sees none of the last S - T keys, and the caller drops them.

    Returns:
        Why there are none, or None; ``causal``; ``window``.
    """
    if window is not None:
        left, right = window
        if isinstance(left, Tracer) or isinstance(right, Tracer):
            return "local_window_size is traced; the kernels take numbers", False, None
        given = f"local_window_size is {(left, right)}"
        if left < 0 or right < 0:
            return f"{given}; the windows of the kernels have a query's own position", False, None
        is_causal = is_causal or right == 0
    if is_causal and not is_certain(lambda: T <= S):
        why = "is_causal is set" if window is None else "local_window_size is given"
        return (
            f"{why} with {T} queries and {S} keys; a kernel needs a key for each query",
            False,
            None,
        )
    if window is not None and not is_causal and not is_certain(lambda: T == S):
        return f"local_window_size is given with {T} queries and {S} keys; T must be S", False, None
    return None, is_causal, window


def _segments(T: int, S: int, call: _Call) -> tuple[tuple[Array, Array] | None, Array | None]:
    """The segments that hide what is beyond the lengths, and which sequences have no keys."""
    lengths, key_lengths = call.query_lengths, call.key_lengths
    if lengths is None and key_lengths is None:
        return None, None
    B = call.query.shape[0]

    def of(n: int, lengths: Array | None, beyond: int) -> Array:
        if lengths is None:
            return jnp.full((B, n), _WITHIN, jnp.int32)
        is_within = _is_within(n, lengths)
        return jnp.where(is_within, jnp.int32(_WITHIN), jnp.int32(beyond))

    segments = of(T, lengths, _QUERIES_BEYOND), of(S, key_lengths, _KEYS_BEYOND)
    if key_lengths is None or is_certain(lambda: call.key.shape[1] == 0):
        return segments, None  # without any values jax.nn returns zeros too
    return segments, key_lengths <= 0


def _is_within(n: int, lengths: Array) -> Array:
    """Whether each of n positions is within its sequence, (B, n)."""
    # The positions are of the dtype of the lengths with x64 too: strict promotion mixes no others.
    return jnp.arange(n, dtype=lengths.dtype)[None] < lengths[:, None]


def _rejected_kernels(flash: _Flash) -> tuple[tuple[str, str], ...]:
    """Why each kernel cannot serve a call under ``auto``; nothing where one does."""
    options = flash.options | {"softcap": None, "interleaved": False}
    *qkv, segments = flash.arrays
    bias = () if flash.bias is None else (flash.bias,)
    op = FLASH_ATTENTION_BIAS if bias else FLASH_ATTENTION
    arrays = (*qkv, *bias, segments, None)  # no rotation table
    chosen, rejected = choose(op, Direction.FORWARD, "auto", *arrays, **options)
    return rejected if chosen == "xla" else ()


def _takes_shards(call: _Call) -> bool:
    """Whether ``jax.nn`` takes the types of a call on Explicit axes; flash attention takes any."""
    shardings = [meshes.explicit_sharding(x) for x in (call.query, call.key, call.value)]
    specs = [P() if sharding is None else sharding.spec for sharding in shardings]
    of_dims = [set(dim) for dim in zip(*(meshes.full_spec(x, 4) for x in specs), strict=True)]
    batch, sequence, heads, width = of_dims
    return len(batch) == len(heads) == 1 and sequence == width == {None}


def _run_ours(call: _Call, flash: _Flash, backend: Backend) -> Any:
    q, k, v, segments = flash.arrays
    options = {**flash.options, "segment_ids": segments, "backend": backend}
    if call.return_residual:
        out, lse = flash_attention(q, k, v, None, flash.bias, **options, return_lse=True)
        lse = lax.stop_gradient(lse.astype(k.dtype))  # as in jax.nn
        return out.reshape(call.shape), lse.swapaxes(1, 2).reshape(call.shape[:-1])
    out = flash_attention(q, k, v, None, flash.bias, **options)
    if flash.is_empty is not None:
        out = jnp.where(flash.is_empty[:, None, None, None], _mean_of_values(call), out)
    return out.reshape(call.shape)


def _mean_of_values(call: _Call) -> Array:
    """What queries of a sequence without keys read, to broadcast to (B, T, N, H)."""
    T, N = call.query.shape[1:3]
    mean = call.value.mean(axis=1, keepdims=True)
    mean = jnp.repeat(mean, N // mean.shape[2], axis=2)
    if call.query_lengths is None:
        return mean
    is_within = _is_within(T, call.query_lengths)
    return jnp.where(is_within[:, :, None, None], mean, jnp.zeros_like(mean))


def _run_theirs(call: _Call, implementation: Any, rejected: tuple[tuple[str, str], ...]) -> Any:
    """``jax.nn.dot_product_attention``, with a row in :func:`jaxllm.explain`."""
    name = "jax.nn" if implementation is None else f"jax.nn {implementation}"

    def row() -> Call:
        arrays = [
            x for x in (call.query, call.key, call.value, call.bias, call.mask) if x is not None
        ]
        return Call(_NAME, " ".join(map(describe, arrays)), name, name, rejected)

    # jax.nn mixes bfloat16 with float32, which strict promotion forbids.
    with promotion.defaults(), record(row, f"{_NAME}[{name}]"):
        try:
            found: Any = jax.nn.dot_product_attention(
                call.query,
                call.key,
                call.value,
                call.bias,
                call.mask,
                scale=call.scale,
                is_causal=call.is_causal,
                query_seq_lengths=call.query_lengths,
                key_value_seq_lengths=call.key_lengths,
                local_window_size=call.window,
                implementation=implementation,
                return_residual=call.return_residual,
            )
        except Exception as error:
            if type(error).__name__ != "ShardingTypeError":  # which JAX does not export
                raise
            raise _refused_shards(call, rejected) from error
    if not call.return_residual:
        return found.reshape(call.shape)
    out, residual = found
    return out.reshape(call.shape), residual.reshape(call.shape[:-1])


def _refused_shards(call: _Call, rejected: tuple[tuple[str, str], ...]) -> ValueError:
    """The error for types on Explicit axes that ``jax.nn`` does not take."""
    names = ("query", "key", "value", "bias", "mask")
    types = ", ".join(
        f"{name} {jax.typeof(x).str_short(short_dtypes=True)}"
        for name, x in zip(names, call[:5], strict=True)
        if x is not None
    )
    why = f". It runs because {rejected[0][1]}" if rejected else ""
    return ValueError(
        f"jax.nn.dot_product_attention does not take these shards on Explicit axes: {types}; they "
        f"must be along the batch or the heads alone, and alike: see jax.sharding.reshard{why}"
    )


def _checked(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    scale: Any,
    is_causal: Any,
    query_lengths: ArrayLike | None,
    key_lengths: ArrayLike | None,
    window: Any,
    return_residual: Any,
) -> _Call:
    query = as_array("query", query)
    shape = query.shape
    q, k, v = (_with_batch(n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    B, S, K, H = k.shape
    if (q.shape[0], q.shape[3]) != (B, H):
        raise ValueError(
            f"query has shape {q.shape}; it must be ({B}, T, N, {H}), with the batch and the head "
            f"width of key {k.shape}"
        )
    check_shape("value", v, k.shape, "the shape of key")
    _, T, N, _ = q.shape
    if K == 0 or N % K:
        raise ValueError(
            f"query has shape {q.shape}, {N} heads; their number must be a multiple of that of key "
            f"{k.shape}, {K}"
        )
    for name, array in (("query", q), ("value", v)):
        if array.dtype != k.dtype:
            raise ValueError(f"{name} has dtype {array.dtype}; it must be {k.dtype}, that of key")
    if jnp.issubdtype(k.dtype, jnp.floating):  # jax.nn takes other dtypes too
        check_floating(query=q)
    scores = (B, N, T, S)
    bias = None if bias is None else _scores_like("bias", bias, scores)
    if bias is not None and jnp.issubdtype(bias.dtype, jnp.floating):
        check_floating(bias=bias)
    mask = None if mask is None else _scores_like("mask", mask, scores)
    if mask is not None and mask.dtype != bool:
        raise ValueError(f"mask has dtype {mask.dtype}; it must be bool: see bias for numbers")
    if scale is not None and not isinstance(scale, Tracer) and not jnp.ndim(scale):
        scale = as_finite("scale", scale)
    return _Call(
        q, k, v, bias, mask, scale,
        is_causal=as_bool("is_causal", is_causal),
        query_lengths=_lengths("query_seq_lengths", query_lengths, B),
        key_lengths=_lengths("key_value_seq_lengths", key_lengths, B),
        window=None if window is None else _window(window),
        return_residual=as_bool("return_residual", return_residual),
        shape=shape,
    )  # fmt: skip


def _with_batch(name: str, array: ArrayLike) -> Array:
    found = as_array(name, array)
    if found.ndim not in (3, 4):
        letters = ("T, N", "S, K")[name != "query"]
        raise ValueError(
            f"{name} has shape {found.shape}; it must be (B, {letters}, H) or ({letters}, H)"
        )
    return found if found.ndim == 4 else found[None]


def _scores_like(name: str, array: ArrayLike, shape: tuple[int, ...]) -> Array:
    """An array that broadcasts to the scores, with their number of dimensions."""
    found = as_array(name, array)
    fits = found.ndim <= 4 and all(
        size in (1, whole) for size, whole in zip(found.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name} has shape {found.shape}; it must broadcast to {shape}, the scores"
        )
    return found.reshape((1,) * (4 - found.ndim) + found.shape)


def _lengths(name: str, array: ArrayLike | None, B: int) -> Array | None:
    if array is None:
        return None
    found = as_integers(name, array)
    check_shape(name, found, (B,), "one for each sequence")
    dtype = jax.dtypes.canonicalize_dtype(found.dtype)
    if dtype != jnp.int32:
        raise ValueError(f"{name} has dtype {dtype}; it must be int32")
    return as_int32(found)


def _window(window: Any) -> tuple[Any, Any]:
    pair = (window, window)
    if isinstance(window, tuple | list):
        pair = window
    elif jnp.ndim(window):  # JAX would trace the elements of an array inside jit
        pair = tuple(window if isinstance(window, Tracer) else np.asarray(window))
    if len(pair) != 2:
        raise ValueError(
            f"local_window_size is {window!r}; it must be an integer or a pair, (left, right)"
        )
    left, right = (size if isinstance(size, Tracer) else _window_side(size) for size in pair)
    return left, right


def _window_side(size: Any) -> int:
    """A side of a window, clipped: jax.nn adds it to positions, in int32."""
    return max(-_LONGEST, min(as_integer("local_window_size", size), _LONGEST))
