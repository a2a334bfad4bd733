"""FFI calls to the CUDA kernels in ``cuda/attention``."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.core import ffi
from jaxllm.ops.attention import packing, sink
from jaxllm.ops.checks import is_certain
from jaxllm.ops.window import sides

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_WIDTH = 2**30  # of a row of the softmax
_MAX_HEAD_WIDTH = 256
_MAX_LENGTH = 2**28
# Widths of heads, by rows of Hopper GPUs.
_FASTER_THAN_CUDNN = (32, 64, 80, 96, 128, 192, 256)
# As in cuda/attention/flash_attention.h, and so are the sizes of all workspaces.
_LATENT_WIDTHS = (192, 128)  # of keys and values: the one pair that differs and has kernels
_SEGMENT_GRANULE = 32  # rows
_HOPPER_QUERIES, _HOPPER_KEYS = 128, 64  # the fewest of a tile, of the forward and the backward
_MAX_FUSED_DQ_WIDTH = 128  # wider heads have a kernel for dq in the backward
_MAX_PARTIAL_ROWS = 640  # of a bias's gradient
_MAX_GRID_SIDE = 65535  # sequences, and heads, of Hopper's own kernels


def flash_attention_unsupported(
    q, k, v, segment_ids, rope_table=None, sinks=None, **options
) -> str | None:
    """Why the forward kernels cannot serve a call; None if they can."""
    reason = _unsupported(q, k, rope_table) or _values_unsupported(q, k, v, **options)
    return reason or _shared_memory_reason(q, v, "forward")


def flash_attention_backward_unsupported(
    q, k, v, out, lse, dout, segment_ids, rope_table=None, dlse=None, sinks=None, **options
) -> str | None:
    """Why the backward kernels cannot serve a call; None if they can."""
    reason = _unsupported(q, k, rope_table) or _values_unsupported(q, k, v, **options)
    return reason or _shared_memory_reason(q, v, "backward")


def flash_attention_bias_unsupported(
    q, k, v, bias, segment_ids, rope_table=None, sinks=None, **_
) -> str | None:
    """Why the forward kernels cannot serve a call; None if they can."""
    reason = _unsupported(q, k, rope_table) or _values_unsupported(q, k, v, has_bias=True)
    return reason or _shared_memory_reason(q, v, "forward", has_bias=True)


def flash_attention_bias_backward_unsupported(
    q, k, v, bias, out, lse, dout, segment_ids, rope_table=None, dlse=None, sinks=None, **_
) -> str | None:
    """Why the backward kernels cannot serve a call; None if they can."""
    reason = _unsupported(q, k, rope_table) or _values_unsupported(q, k, v, has_bias=True)
    return reason or _shared_memory_reason(q, v, "backward", has_bias=True)


def _unsupported(q, k, rope_table) -> str | None:
    """What both directions have in common."""
    if q.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"q has dtype {q.dtype}; the kernel takes {names}"
    if q.shape[2] == 0:
        return "q has no heads"
    if q.shape[-1] > _MAX_HEAD_WIDTH:
        return f"heads are {q.shape[-1]} wide; the kernel takes at most {_MAX_HEAD_WIDTH}"
    if max(q.shape[1], k.shape[1]) > _MAX_LENGTH:
        return (
            f"q has {q.shape[1]} queries and k {k.shape[1]} keys; the kernel takes at most "
            f"{_MAX_LENGTH}"
        )
    for table in rope_table or ():
        if table.dtype != jnp.float32:
            return f"rope_table has dtype {table.dtype}; the kernel takes float32"
    return None


def _values_unsupported(q, k, v, *, scale=1.0, softcap=None, has_bias=False, **_) -> str | None:
    """Why no kernel takes these values, of another width than the keys; None if one does.

    Only the kernels for Hopper have such values. No other kernel serves a call that they do not.
    """
    widths = q.shape[-1], v.shape[-1]
    if widths[0] == widths[1]:
        return None
    given = f"queries and keys are {widths[0]} wide and values {widths[1]}"
    wide, narrow = _LATENT_WIDTHS
    if widths != _LATENT_WIDTHS:
        return f"{given}; of widths that differ the kernels take {wide} and {narrow} alone"
    if q.dtype == jnp.float32:
        return f"{given}; the kernels for that take bfloat16 and float16"
    if has_bias or softcap is not None:
        return f"{given}; the kernels for that take no {'bias' if has_bias else 'softcap'}"
    if not scale > 0:
        return f"scale is {scale}; the kernels for values of another width take scales above zero"
    if is_certain(lambda: k.shape[1] == 0):
        return f"{given}; the kernels for that need a key"
    if is_certain(lambda: max(q.shape[0], q.shape[2]) > _MAX_GRID_SIDE):
        return f"q has shape {q.shape}; it may have {_MAX_GRID_SIDE} sequences and heads here"
    reason = ffi.no_hopper_reason()
    return None if reason is None else f"{given}: {reason}"


def _shared_memory_reason(q, v, direction: str, *, has_bias: bool = False) -> str | None:
    """Why the tiles for heads as wide as these do not fit the GPU; None if they do."""
    if q.shape[-1] != v.shape[-1]:
        return None  # the kernels for Hopper alone serve these, and fit
    kernel, widths = f"flash_attention_{direction}", (32, 64, 96, 128, 256)
    if has_bias:
        kernel, widths = f"{kernel}_bias", (64, 128, 256)
    if q.dtype == jnp.float32:
        kernel, widths = "flash_attention_float32", (64, 128, 256)
    width = next(width for width in widths if q.shape[-1] <= width)
    return ffi.shared_memory_reason(f"{kernel}_{width}")


flash_attention_packed_unsupported = packing.unsupported(flash_attention_unsupported)
flash_attention_packed_backward_unsupported = packing.unsupported(
    flash_attention_backward_unsupported
)
self_attention_backward_unsupported = packing.unsupported_with_bias(
    flash_attention_packed_backward_unsupported
)


def flash_attention_float8_unsupported(q, k, *_, **__) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if q.dtype != jnp.float8_e4m3fn:
        return f"q has dtype {q.dtype}; the kernel takes float8_e4m3fn"
    wide_q, wide_k = (jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (q, k))
    if reason := _unsupported(wide_q, wide_k, None):
        return reason
    width = next(width for width in (64, 128, 256) if q.shape[-1] <= width)
    return ffi.shared_memory_reason(f"flash_attention_forward_{width}")


def flash_attention_slower(q, k, v, *_, **__) -> str | None:
    """Why ``auto`` leaves a call to cuDNN where that can serve it; None where it does not."""
    widths, (wide, narrow) = _FASTER_THAN_CUDNN, _LATENT_WIDTHS
    H, Hv = q.shape[-1], v.shape[-1]
    is_faster = H in widths if Hv == H else (H, Hv) == _LATENT_WIDTHS
    if is_faster and _is_for_hopper(q, v):
        return None
    return (
        "the rows in benchmarks/results that show it faster than cuDNN are of Hopper GPUs, of "
        f"bfloat16 and float16, and of heads {', '.join(map(str, widths[:-1]))} and {widths[-1]} "
        f"wide with values as wide, or {wide} wide with values of {narrow}"
    )


flash_attention_backward_slower = flash_attention_slower
flash_attention_packed_slower = packing.unsupported(flash_attention_slower)
flash_attention_packed_backward_slower = packing.unsupported(flash_attention_slower)
self_attention_backward_slower = flash_attention_packed_backward_slower


def softmax_unsupported(x, *_, **__) -> str | None:
    """Why the forward kernels cannot serve a call; None if they can."""
    return _rows_unsupported("x", x)


def softmax_backward_unsupported(out, *_, **__) -> str | None:
    """Why the backward kernels cannot serve a call; None if they can."""
    return _rows_unsupported("out", out)


def _rows_unsupported(name: str, array) -> str | None:
    if array.shape[-1] > _MAX_WIDTH:
        return f"{name} has rows of {array.shape[-1]}; the kernel takes at most {_MAX_WIDTH}"
    return _dtype_unsupported(name, array)


def repeat_kv_unsupported(x, *_, **__) -> str | None:
    """Why the forward kernel cannot serve a call; None if it can."""
    return _dtype_unsupported("x", x)


def repeat_kv_backward_unsupported(dout, *_, **__) -> str | None:
    """Why the backward kernel cannot serve a call; None if it can."""
    return _dtype_unsupported("dout", dout)


def _dtype_unsupported(name: str, array) -> str | None:
    if array.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"{name} has dtype {array.dtype}; the kernel takes {names}"
    return None


def flash_attention_forward(
    q, k, v, segment_ids, rope_table=None, sinks=None,
    *, causal, scale, window, softcap, interleaved=False,
):  # fmt: skip
    """Returns ``(out, lse)``."""
    extras = _extras(segment_ids, rope_table, _wide(sinks))
    workspaces = _workspaces(q, k, segment_ids, rope_table)
    results = (_out_of(q, v), _query_statistic(q), *workspaces, _forward_scratch(q, v))
    options = _flash_options(q, v, causal, scale, window, softcap, rope_table, interleaved)
    options |= _last_option(sinks=sinks)
    return ffi.call("flash_attention_forward", results, q, k, v, *extras, **options)[:2]


def flash_attention_backward(
    q, k, v, out, lse, dout, segment_ids, rope_table=None, dlse=None, sinks=None,
    *, causal, scale, window, softcap, interleaved=False,
):  # fmt: skip
    """Returns ``(dq, dk, dv)``, and ``dsinks`` where there are sinks.

    ``dlse`` is the gradient of ``lse``, None where it has none.
    """
    arrays = (q, k, v, out, lse, dout, *_extras(segment_ids, rope_table, dlse))
    workspaces = (_query_statistic(q), *_workspaces(q, k, segment_ids, rope_table))
    results = (_like(q), _like(k), _like(v), *workspaces, _backward_scratch(q, k, v))
    options = _flash_options(q, v, causal, scale, window, softcap, rope_table, interleaved)
    options |= _last_option(dlse=dlse)
    *gradients, delta = ffi.call("flash_attention_backward", results, *arrays, **options)[:4]
    return *gradients, *_sinks_gradient(lse, delta, sinks)


def flash_attention_bias_forward(
    q, k, v, bias, segment_ids, rope_table=None, sinks=None,
    *, causal, scale, window, softcap, interleaved=False,
):  # fmt: skip
    """Returns ``(out, lse)``."""
    extras = _extras(segment_ids, rope_table, _wide(sinks))
    workspaces = _workspaces(q, k, segment_ids, rope_table)
    results = (_out_of(q, v), _query_statistic(q), *workspaces, _scratch(q, 0))
    options = _flash_options(q, v, causal, scale, window, softcap, rope_table, interleaved)
    options |= {"hopper": False, **_last_option(sinks=sinks)}
    stem = "flash_attention_bias_forward"
    return ffi.call(stem, results, q, k, v, bias, *extras, **options)[:2]


def flash_attention_bias_backward(
    q, k, v, bias, out, lse, dout, segment_ids, rope_table=None, dlse=None, sinks=None,
    *, causal, scale, window, softcap, interleaved=False,
):  # fmt: skip
    """Returns ``(dq, dk, dv, dbias)``, and ``dsinks`` where there are sinks.

    ``dlse`` is the gradient of ``lse``, None where it has none.
    """
    arrays = (q, k, v, bias, out, lse, dout, *_extras(segment_ids, rope_table, dlse))
    workspaces = (_query_statistic(q), *_workspaces(q, k, segment_ids, rope_table))
    results = (_like(q), _like(k), _like(v), _like(bias), *workspaces, _scratch(q, 0))
    options = _flash_options(q, v, causal, scale, window, softcap, rope_table, interleaved)
    options |= {"hopper": False, **_last_option(dlse=dlse)}
    stem = "flash_attention_bias_backward"
    *gradients, delta = ffi.call(stem, results, *arrays, **options)[:5]
    return *gradients, *_sinks_gradient(lse, delta, sinks)


def flash_attention_packed_forward(
    qkv, segment_ids, rope_table, sinks=None,
    *, heads, kv_heads, causal, scale, window, softcap, interleaved,
):  # fmt: skip
    """Returns ``(out, lse)``; ``out`` is (B, T, N*H)."""
    q, k = _unpacked(qkv, heads, kv_heads)
    B, T, N, H = q.shape
    options = _flash_options(q, k, causal, scale, window, softcap, rope_table, interleaved)
    by_parts = _has_apart(qkv)
    options |= {"heads": N, "kv_heads": k.shape[2], "by_parts": by_parts}
    out = jax.ShapeDtypeStruct((B, T, N * H), qkv.dtype)
    workspaces = _workspaces(q, k, segment_ids, rope_table, by_parts=by_parts)
    results = (out, _query_statistic(q), *workspaces, _forward_scratch(q, k))
    extras = _extras(segment_ids, rope_table, _wide(sinks))
    options |= _last_option(sinks=sinks)
    qkv = lax.collapse(qkv, 2)
    return ffi.call("flash_attention_packed_forward", results, qkv, *extras, **options)[:2]


def flash_attention_packed_backward(
    qkv, out, lse, dout, segment_ids, rope_table, dlse=None, sinks=None, **options
) -> Any:
    """Returns ``dqkv``, and ``dsinks`` where there are sinks.

    ``dlse`` is the gradient of ``lse``, None where it has none.
    """
    arrays, more = (qkv, out, lse, dout), (segment_ids, rope_table, dlse)
    stem = "flash_attention_packed_backward"
    dqkv, delta, *_ = _packed_backward(stem, (), arrays, *more, **options)
    return dqkv if sinks is None else (dqkv, *_sinks_gradient(lse, delta, sinks))


def self_attention_backward(
    qkv, out, lse, dout, delta, row_sums, *extras, heads, kv_heads, **options
):
    """Returns ``(dqkv, dbias)``; ``delta`` and ``row_sums`` are known of ``dout``, or both None."""
    options |= {"heads": heads, "kv_heads": kv_heads}
    if _has_apart(qkv):
        return _with_bias(qkv, out, lse, dout, delta, row_sums, *extras, **options)
    q, _ = _unpacked(qkv, heads, kv_heads)
    nothing = jnp.zeros(0, jnp.float32)
    known = (nothing, nothing) if delta is None else (delta, row_sums)
    columns = math.prod(qkv.shape[2:])
    dbias = jax.ShapeDtypeStruct((columns,), qkv.dtype)
    more = (dbias, _bias_partial(q, columns))
    arrays = (qkv, out, lse, dout, *known)
    results = _packed_backward("self_attention_backward", more, arrays, *extras, **options)
    return results[0], results[-2].reshape(qkv.shape[2:])


def flash_attention_float8(
    q, k, v, q_scale, k_scale, v_scale, segment_ids, *, causal, scale, window, softcap
):
    """Returns ``out``."""
    out = jax.ShapeDtypeStruct(q.shape, jnp.bfloat16)
    options = _flash_options(q, v, causal, scale, window, softcap, None, False)
    results = (out, *_workspaces(q, k, segment_ids, None), _scratch(q, 0))
    arrays = (q, k, v, q_scale, k_scale, v_scale, *(segment_ids or ()))
    return ffi.call("flash_attention_float8", results, *arrays, **options)[0]


_with_bias = packing.backward_with_bias(flash_attention_packed_backward)


def softmax_forward(x, *, scale, causal):
    """Returns ``out``."""
    (out,) = ffi.call("softmax_forward", [_like(x)], x, scale=scale, causal=causal)
    return out


def softmax_backward(out, dout, *, scale, causal):
    """Returns ``dx``."""
    (dx,) = ffi.call("softmax_backward", [_like(out)], out, dout, scale=scale, causal=causal)
    return dx


def repeat_kv_forward(x, *, groups):
    """Returns ``out``."""
    *outer, K, H = x.shape
    result = jax.ShapeDtypeStruct((*outer, K * groups, H), x.dtype)
    (out,) = ffi.call("repeat_kv_forward", [result], x, groups=groups)
    return out


def repeat_kv_backward(dout, *, groups):
    """Returns ``dx``."""
    *outer, N, H = dout.shape
    result = jax.ShapeDtypeStruct((*outer, N // groups, H), dout.dtype)
    (dx,) = ffi.call("repeat_kv_backward", [result], dout, groups=groups)
    return dx


def _packed_backward(
    stem, more, arrays, segment_ids, rope_table, dlse=None,
    *, heads, kv_heads, causal, scale, window, softcap, interleaved,
):  # fmt: skip
    """Returns ``dqkv``, workspaces, and ``more`` results."""
    qkv, *others = arrays
    q, k = _unpacked(qkv, heads, kv_heads)
    by_parts = _has_apart(qkv)
    workspaces = _workspaces(
        q, k, segment_ids, rope_table, by_parts=by_parts, has_gradients=by_parts
    )
    extras = _extras(segment_ids, rope_table, dlse)
    options = _flash_options(q, k, causal, scale, window, softcap, rope_table, interleaved)
    options |= {"heads": q.shape[2], "kv_heads": k.shape[2], "by_parts": by_parts}
    options |= _last_option(dlse=dlse)
    flat = lax.collapse(qkv, 2)
    scratch = _backward_scratch(q, k, k)
    results = (_like(flat), _query_statistic(q), *workspaces, scratch, *more)
    dqkv, *rest = ffi.call(stem, results, flat, *others, *extras, **options)
    return dqkv.reshape(qkv.shape), *rest


def _has_apart(qkv: jax.Array) -> bool:
    """Whether the queries of a key head stand apart."""
    return packing.is_by_parts(qkv) and qkv.shape[2] > 3


def _flash_options(q, v, causal, scale, window, softcap, rope_table, interleaved) -> dict[str, Any]:
    """The attributes of a call; -1 is a side of the window without an end, and 0 no softcap."""
    left, right = sides(causal, window)
    return {
        "hopper": _is_for_hopper(q, v),
        "left": -1 if left is None else left,
        "right": -1 if right is None else right,
        "scale": scale,
        "softcap": 0.0 if softcap is None else float(softcap),
        "rope": rope_table is not None,
        "interleaved": interleaved,
        "by_parts": False,
    }


def _extras(segment_ids, rope_table, last=None) -> tuple:
    """The arrays of a call that it may lack, in the order of the handlers.

    The last are the sinks of a forward, or the gradient of lse of a backward.
    """
    return (*(rope_table or ()), *(segment_ids or ()), *(() if last is None else (last,)))


def _last_option(**last) -> dict[str, Any]:
    """The attribute that says what the last array is; calls without it have none."""
    return {name: True for name, array in last.items() if array is not None}


def _wide(sinks: jax.Array | None) -> jax.Array | None:
    return None if sinks is None else sinks.astype(jnp.float32)


def _sinks_gradient(lse, delta, sinks: jax.Array | None) -> tuple[jax.Array, ...]:
    """By the kernels' ``delta - dlse``, which costs no pass over the output."""
    return () if sinks is None else (sink.gradient_by_delta(lse, delta, sinks),)


def _unpacked(qkv: jax.Array, heads: int, kv_heads: int) -> tuple:
    """What the queries and the keys of a projection would be."""
    return jax.eval_shape(lambda qkv: packing.split(qkv, heads, kv_heads), qkv)[:2]


def _out_of(q, v) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)


def _query_statistic(q: jax.Array) -> jax.ShapeDtypeStruct:
    B, T, N, _ = q.shape
    return jax.ShapeDtypeStruct((B, N, T), jnp.float32)


def _workspaces(
    q, k, segment_ids, rope_table, *, by_parts: bool = False, has_gradients: bool = False
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The least and largest segment of every few queries and keys, and the arranged heads.

    Those are rotated and, of queries by parts, in the usual order. With ``has_gradients`` also the
    gradients of the queries, before they rotate.
    """
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    lengths = (T, S) if segment_ids is not None else ()
    granules = sum(-(-length // _SEGMENT_GRANULE) for length in lengths)
    arranged = N + K + has_gradients * N if by_parts or rope_table is not None else 0
    return (
        jax.ShapeDtypeStruct((B, granules, 2), jnp.int32),
        jax.ShapeDtypeStruct((B, T, arranged, H), q.dtype),
    )


def _forward_scratch(q, v) -> jax.ShapeDtypeStruct:
    """The workspace of the Hopper forward: some elements for every tile of queries."""
    if not _is_for_hopper(q, v):
        return _scratch(q, 0)
    return _scratch(q, 4 + 2 * -(-q.shape[1] // _HOPPER_QUERIES))


def _backward_scratch(q, k, v) -> jax.ShapeDtypeStruct:
    """The workspace of the Hopper backward: a few elements a query and tile, and dq in float32.

    Heads wider than :data:`_MAX_FUSED_DQ_WIDTH` have a kernel for dq, and no dq in float32.
    """
    if not _is_for_hopper(q, v):
        return _scratch(q, 0)
    _, T, N, H = q.shape
    tile = _backward_tile(H)
    tiles = -(-T // tile)
    ranges = tiles + -(-k.shape[1] // _HOPPER_KEYS)
    if H > _MAX_FUSED_DQ_WIDTH:
        return _scratch(q, N * tiles * tile * 2 + 2 * ranges + 2)
    return _scratch(q, N * tiles * (tile * (_hopper_columns(H) + 2) + 1) + 2 * ranges + 1)


def _bias_partial(q, columns: int) -> jax.ShapeDtypeStruct:
    """Partial sums of a bias's gradient."""
    B, T, N, H = q.shape
    if not _is_for_hopper(q, q):
        return jax.ShapeDtypeStruct((min(B * T, _MAX_PARTIAL_ROWS) * columns,), jnp.float32)
    # Of each tile of queries the sums of dq of every 64, and those of dout; but at least a row, for
    # calls that turn out not to be for Hopper's own kernels.
    tile = _backward_tile(H)
    rows = B * -(-T // tile) * (tile // 64 + 1)
    return jax.ShapeDtypeStruct((max(rows * N * H, columns),), jnp.float32)


def _backward_tile(width: int) -> int:
    """The queries of a tile of Hopper's own kernels."""
    return 128 if _hopper_columns(width) == 64 else 64


def _hopper_columns(width: int) -> int:
    """The columns that these kernels have for a head; 0 for a width that they do not serve.

    As ``flash_hopper_columns`` of ``cuda/attention/flash_attention.h``.
    """
    return 0 if width > _MAX_HEAD_WIDTH or width % 8 else -(-width // 64) * 64


def _scratch(q: jax.Array, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((q.shape[0], size), jnp.float32)


def reads_rotated(qkv: Any, heads: int, kv_heads: int) -> bool:
    """Whether the kernels read a rotated projection where it stands.

    Those for Hopper do. Others rotate queries on load, and save a pass over them.
    """
    q, k = _unpacked(qkv, heads, kv_heads)
    return _is_for_hopper(q, k)


def _is_for_hopper(q: jax.Array, v: jax.Array) -> bool:
    """Whether to reserve workspace for the Hopper kernels; the attribute ``hopper`` says so.

    The handlers check the sizes of the workspace against cuda/attention/flash_attention.h; the
    launchers look again whether the kernels serve the call.
    """
    H, Hv = q.shape[-1], v.shape[-1]
    has_widths = _hopper_columns(H) > 0 if Hv == H else (H, Hv) == _LATENT_WIDTHS
    if q.dtype not in (jnp.bfloat16, jnp.float16) or not has_widths:
        return False
    return ffi.runs_hopper_kernels()


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)
