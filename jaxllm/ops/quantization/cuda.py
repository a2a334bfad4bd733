"""FFI calls to the CUDA kernels in ``cuda/quantization``."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.core import ffi
from jaxllm.ops.rotary.cuda import rotated_heads

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_TILE_ROWS = 128  # of float8_tile.cuh
_FLOAT8_MAXIMA = 256  # kFloat8Maxima of float8_scale_and_round.h
_FLOAT8_ROPE_MAXIMA = 1024  # kFloat8RopeMaxima of float8_rope.h
_MAX_ROPE_SIDE = 2**31 - 1
_ROPE_WIDTHS = (16, 32, 64, 128, 256)  # of float8_rope.cu, half-split


def _dtype_reason(name, array) -> str | None:
    if array.dtype in _DTYPES:
        return None
    names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
    return f"{name} has dtype {array.dtype}; the kernel takes {names}"


def quantize_unsupported(w, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return _dtype_reason("w", w)


def dequantize_unsupported(q, scales, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if scales.dtype != jnp.float32:
        return f"scales has dtype {scales.dtype}; the kernel takes float32"
    return None


def quantized_matvec_unsupported(q, scales, x) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return _dtype_reason("x", x) or dequantize_unsupported(q, scales)


def quantized_matmul_unsupported(q, scales, x) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    return dequantize_unsupported(q, scales)


def quantize(w, *, group_size):
    """Returns ``(q, scales)``."""
    results = (
        jax.ShapeDtypeStruct(w.shape, jnp.int8),
        jax.ShapeDtypeStruct((*w.shape[:-1], w.shape[-1] // group_size), jnp.float32),
    )
    return tuple(ffi.call("quantize", results, w, group_size=group_size))


def dequantize(q, scales, *, dtype=jnp.float32):
    """Returns ``w`` in a dtype of the kernel."""
    (w,) = ffi.call("dequantize", [jax.ShapeDtypeStruct(q.shape, dtype)], q, scales)
    return w


def quantized_matvec(q, scales, x):
    """Returns ``out``."""
    result = jax.ShapeDtypeStruct((x.shape[0], q.shape[0]), x.dtype)
    (out,) = ffi.call("quantized_matvec", [result], q, scales, x)
    return out


def quantized_matmul(q, scales, x):
    """Returns ``out``."""
    # The kernel writes the dtype of x: a cast by XLA would be another pass over the matrix.
    dtype = x.dtype if x.dtype in _DTYPES else jnp.float32
    w = dequantize(q, scales, dtype=dtype).astype(x.dtype)
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def float8_round_unsupported(x, scale, *, dtype, layout, has_bias=False) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del scale, dtype, has_bias
    return _tile_reason("x", x, x.shape[1], layout)


def _tile_reason(name, x, columns, layout) -> str | None:
    """Why float8_tile.cuh does not serve ``columns`` columns of ``x``; None if it does."""
    rows = x.shape[0]
    if reason := _dtype_reason(name, x):
        return reason
    if columns % 8:
        return f"{name} {x.shape} has {columns} columns; they must be a multiple of 8"
    if layout != "rows" and rows % 16:
        return f"{name} {x.shape} has {rows} rows; to be transposed they must be a multiple of 16"
    return None


def float8_round(x, scale, *, dtype, layout, has_bias=False):
    """Returns the matrix ``x / scale`` in float8, as a matrix, transposed, or both."""
    values, transposed = _float8_results(x.shape, dtype)
    if has_bias:
        results = [values, transposed, *_sums(x, has_bias)]
        return tuple(ffi.call("float8_round_sums", results, x, scale)[:3])
    if layout == "both":
        return tuple(ffi.call("float8_round_both", [values, transposed], x, scale))
    if layout == "rows":
        return ffi.call("float8_round", [values], x, scale)[0]
    return ffi.call("float8_round_transposed", [transposed], x, scale)[0]


def float8_scale_and_round_unsupported(x, *, dtype, layout, has_bias=False) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del dtype, has_bias
    return _tile_reason("x", x, x.shape[1], layout)


def float8_scale_and_round(x, *, dtype, layout, has_bias=False):
    """Returns ``(values, transposed, sums, scale)``, with None for what is not wanted."""
    values, transposed = _float8_results(x.shape, dtype)
    sums, partial = _sums(x, has_bias)
    wanted = layout != "transposed", layout != "rows", has_bias, True
    kinds = values, transposed, sums, jax.ShapeDtypeStruct((1,), jnp.float32)
    results = [
        kind if is_wanted else _none_of(kind) for kind, is_wanted in zip(kinds, wanted, strict=True)
    ]
    workspaces = partial, jax.ShapeDtypeStruct((_FLOAT8_MAXIMA,), jnp.float32)
    found = ffi.call("float8_scale_and_round", [*results, *workspaces], x)[:4]
    return tuple(
        array if is_wanted else None for array, is_wanted in zip(found, wanted, strict=True)
    )


def float8_rope_backward_unsupported(
    dqkv, cos, sin, *, heads, kv_heads, interleaved, has_bias=False
) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del sin, has_bias
    shape = math.prod(dqkv.shape[:2]), math.prod(dqkv.shape[2:])
    matrix = jax.ShapeDtypeStruct(shape, dqkv.dtype)
    if reason := _tile_reason("dqkv", matrix, matrix.shape[1], "both"):
        return reason
    if cos.dtype != jnp.float32:
        return f"cos has dtype {cos.dtype}; the kernel takes float32"
    if max(shape) > _MAX_ROPE_SIDE:
        return f"dqkv is a matrix {shape}; the kernel takes at most {_MAX_ROPE_SIDE} of either"
    width, pairs = rotated_heads(dqkv, heads, kv_heads)["head_dim"], cos.shape[-1]
    given = f"heads are {width} wide, and {pairs} pairs of columns rotate"
    if interleaved and (width % 8 or pairs % 4):
        return f"{given}; interleaved, the kernel takes multiples of 8 and of 4"
    if not interleaved and (width not in _ROPE_WIDTHS or 2 * pairs != width):
        return f"{given}; the kernel takes 16, 32, 64, 128 or 256 columns, all in pairs"
    return None


def float8_rope_backward(dqkv, cos, sin, *, heads, kv_heads, interleaved, has_bias=False):
    """Returns ``(values, transposed, sums, scale)``, with None for no sums."""
    flat = lax.collapse(dqkv, 2)
    rows, columns = math.prod(flat.shape[:2]), flat.shape[2]
    matrix = jax.ShapeDtypeStruct((rows, columns), flat.dtype)
    sums, partial = _sums(matrix, has_bias)
    scale, maxima = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (1, _FLOAT8_ROPE_MAXIMA))
    results = [*_float8_results(matrix.shape, jnp.float8_e5m2), sums, scale, partial, maxima]
    static = {**rotated_heads(dqkv, heads, kv_heads), "interleaved": interleaved}
    found = ffi.call("float8_rope_backward", results, flat, cos, sin, **static)
    values, transposed, sums, scale = found[:4]
    return values, transposed, sums if has_bias else None, scale


def _float8_results(shape, dtype):
    """A float8 matrix and the transposed one."""
    return [jax.ShapeDtypeStruct(each, jnp.dtype(dtype)) for each in (shape, shape[::-1])]


def float8_gelu_forward_unsupported(h, scale, *, layout) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del scale
    return _tile_reason("h", h, h.shape[1], layout)


def float8_gelu_backward_unsupported(h, dout, scale, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del dout
    return float8_gelu_forward_unsupported(h, scale, layout="both")


def float8_swiglu_forward_unsupported(h, scale, *, layout) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del scale
    return _tile_reason("half of h", h, h.shape[1] // 2, layout)


def float8_swiglu_backward_unsupported(h, dout, scale, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del dout
    return float8_swiglu_forward_unsupported(h, scale, layout="both")


def float8_gelu_forward(h, scale, *, layout):
    """Returns GELU over ``scale`` in float8_e4m3fn, as a matrix, or this and transposed."""
    results = _float8_results(h.shape, jnp.float8_e4m3fn)
    if layout == "both":
        return tuple(ffi.call("float8_gelu_forward_both", results, h, scale))
    return ffi.call("float8_gelu_forward", results[:1], h, scale)[0]


def float8_swiglu_forward(h, scale, *, layout):
    """Returns SwiGLU over ``scale`` in float8_e4m3fn, as a matrix, or this and transposed."""
    results = _float8_results((h.shape[0], h.shape[1] // 2), jnp.float8_e4m3fn)
    if layout == "both":
        return tuple(ffi.call("float8_swiglu_forward_both", results, h, scale))
    return ffi.call("float8_swiglu_forward", results[:1], h, scale)[0]


def float8_gelu_backward(h, dout, scale, *, has_bias):
    """Returns the gradient of ``h`` over ``scale`` in float8_e5m2, transposed, and its sums."""
    results = [*_float8_results(h.shape, jnp.float8_e5m2), *_sums(h, has_bias)]
    *rounded, dbias, _ = ffi.call("float8_gelu_backward", results, h, dout, scale)
    return *rounded, dbias if has_bias else None


def float8_swiglu_backward(h, dout, scale, *, has_bias):
    """Returns the gradient of ``h`` over ``scale`` in float8_e5m2, transposed, and its sums."""
    results = [*_float8_results(h.shape, jnp.float8_e5m2), *_sums(h, has_bias)]
    *rounded, dbias, _ = ffi.call("float8_swiglu_backward", results, h, dout, scale)
    return *rounded, dbias if has_bias else None


def _sums(x, wanted):
    """The sums over the rows of ``x``, and their workspace; without elements if not wanted."""
    rows, columns = x.shape
    partial = (-(-rows // _TILE_ROWS), columns) if wanted else (0,)
    sums = jax.ShapeDtypeStruct((columns if wanted else 0,), x.dtype)
    return sums, jax.ShapeDtypeStruct(partial, jnp.float32)


_MAX_NORM_COLUMNS = 8192


def float8_norm_forward_unsupported(
    x, residual, x_bias, scale, bias, float8_scale, *, eps, layout, statistics=True
) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del float8_scale, eps, statistics
    if reason := _tile_reason("x", x, x.shape[1], layout):
        return reason
    if x.shape[1] > _MAX_NORM_COLUMNS:
        return f"x {x.shape} has {x.shape[1]} columns; the kernel takes at most {_MAX_NORM_COLUMNS}"
    if residual is not None and residual.dtype != x.dtype:
        return f"residual has dtype {residual.dtype}; the kernel takes that of x, {x.dtype}"
    if scale.dtype not in (x.dtype, jnp.float32):
        return f"scale has dtype {scale.dtype}; the kernel takes that of x, {x.dtype}, or float32"
    for name, array in (("x_bias", x_bias), ("bias", bias)):
        if array is not None and array.dtype != scale.dtype:
            return f"{name} has dtype {array.dtype}; the kernel takes that of scale, {scale.dtype}"
    if x_bias is not None and (residual is None or bias is None):
        return "x_bias is given; the kernel takes it with a residual and a bias"
    return None


def float8_norm_forward(
    x, residual, x_bias, scale, bias, float8_scale, *, eps, layout, statistics=True
):
    """Returns ``(values, transposed, h, mean, rstd)``, with None for what there is not."""
    values, transposed = _float8_results(x.shape, jnp.float8_e4m3fn)
    row = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
    wanted = (
        (values, True),
        (transposed, layout == "both"),
        (jax.ShapeDtypeStruct(x.shape, x.dtype), residual is not None),
        (row, statistics and bias is not None),
        (row, statistics),
    )
    results = [kind if is_wanted else _none_of(kind) for kind, is_wanted in wanted]
    arrays = (
        x,
        ffi.or_empty(residual, x.dtype),
        ffi.or_empty(x_bias, scale.dtype),
        scale,
        ffi.or_empty(bias, scale.dtype),
        float8_scale,
    )
    found = ffi.call("float8_norm_forward", results, *arrays, eps=eps)
    return tuple(
        array if is_wanted else None for array, (_, is_wanted) in zip(found, wanted, strict=True)
    )


def _none_of(kind):
    """A result without elements: it is not wanted."""
    return jax.ShapeDtypeStruct((0,), kind.dtype)
