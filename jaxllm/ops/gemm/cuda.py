"""FFI calls to the kernels of ``matmul``, ``matvec`` and ``float8_matmul`` in ``cuda/gemm``."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxllm.core import ffi
from jaxllm.ops.rounding import amax_of_columns

_MAX_SIZE = 2**31  # TMA's coordinates
_WIDE_TILE, _NARROW_TILE = (256, 192), (256, 128)  # of clusters, as in hopper/float8_matmul.cu
_SPLIT_TILE = (128, 192)  # of a cluster, as in cuda/gemm/hopper/float8_split.h
_SPLIT_CLUSTER = _SPLIT_TILE[0] // 128  # its SMs
_MAX_BUSY_UNSPLIT = 3 / 4  # with a larger share of the SMs' time in use, the depth is not split
_MIN_SPLIT_DEPTH = 4096
_MAX_SPLIT_WAVES = 2  # of more tiles only the last wave leaves SMs idle
# On an H200 the epilogue takes about 36,000 clocks for a tile, of which ping-pong hides the
# mainloop of the other consumer, 6 clocks for each K. By that the kernel that it replaces, some
# 12,000 clocks, is saved from a depth of 1600 on, and on an H100, with a slower memory, of less.
_MIN_DSWIGLU_DEPTH = 1536
_MAX_DERIVATIVE_DEPTH = 2048  # as in cuda/gemm/hopper/float8_mainloop.cuh
_DGELU_ROWS = 128  # as in cuda/gemm/hopper/float8_derivative.h


def matmul_unsupported(a, b, *_, **__) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    if a.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"a has dtype {a.dtype}; the kernels take float32, bfloat16, float16"
    if max(*a.shape, *b.shape) >= _MAX_SIZE:
        return f"a {a.shape} or b {b.shape} has a size of 2^31 or more"
    return None


def matmul_forward(a, b, bias, *, transpose_a, transpose_b, activation, out_dtype, precision):
    """Returns ``(out, h)``; ``h`` is the GEMM's result alone, None without an activation."""
    out_dtype = jnp.dtype(out_dtype or a.dtype)
    shape = (a.shape[1 if transpose_a else 0], b.shape[0 if transpose_b else 1])
    # The kernels write the dtype of the factors or float32.
    written = a.dtype if out_dtype == a.dtype else jnp.float32
    out = jax.ShapeDtypeStruct(shape, written)
    h = out if activation else jax.ShapeDtypeStruct((0,), written)
    out, h = ffi.call(
        "matmul",
        (out, h),
        a,
        b,
        jnp.zeros((0,), a.dtype) if bias is None else bias,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        gelu=activation == "gelu",
        tf32=precision == "tf32",
    )
    return out.astype(out_dtype), h.astype(out_dtype) if activation else None


def matvec_unsupported(w, x) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"x has dtype {x.dtype}; the kernel takes float32, bfloat16, float16"
    return None


def matvec(w, x):
    """Returns ``out``."""
    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[0]), x.dtype)
    (out,) = ffi.call("matvec", [result], w, x)
    return out


def float8_matmul_unsupported(a, b, *_, **__) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    (columns, depth), rows = b.shape, a.shape[0]
    if depth % 16 or depth == 0:  # TMA takes no array without elements
        return f"a {a.shape} and b {b.shape} have a depth of {depth}; it must be a multiple of 16"
    if columns % 8:
        return f"b {b.shape} has {columns} columns of the result; they must be a multiple of 8"
    if any(size >= _MAX_SIZE for size in (rows, columns, depth)):  # any may be symbolic
        return f"a {a.shape} or b {b.shape} has a size of 2^31 or more"
    if reason := ffi.no_hopper_reason():
        return reason
    gpu = ffi.device()
    if gpu is not None and gpu.clusters == 0:
        return "no two SMs of this GPU can run a cluster of the kernel"
    return None


def float8_matmul(a, b, scale_a, scale_b, bias, *, out_dtype):
    """Returns ``out``."""
    rows, columns, depth = a.shape[0], b.shape[0], a.shape[1]
    result = jax.ShapeDtypeStruct((rows, columns), jnp.dtype(out_dtype))
    # The kernel splits the depth where it gets a workspace for the parts.
    tiles = split_tiles(rows, columns, depth)
    partial = jax.ShapeDtypeStruct((tiles, *_SPLIT_TILE) if tiles else (0,), jnp.float32)
    bias = ffi.or_empty(bias, result.dtype)
    out, _ = ffi.call("float8_matmul", [result, partial], a, b, scale_a, scale_b, bias)
    return out


def split_tiles(rows, columns, depth) -> int:
    """The tiles of the workspace of a float8 GEMM whose depth is split; 0 where it is not.

    The kernel that does not split leaves SMs idle where the result has fewer tiles than run at
    once, or few in the last wave. Splitting gives all SMs as much to do, and costs a workspace.
    """
    gpu = ffi.device()
    if gpu is None or any(map(jax.export.is_symbolic_dim, (rows, columns, depth))):
        return 0
    # The workspace takes 8 bytes for each float32 sum of a part, written and read: 192 KiB for one
    # of 128 x 192. For that part a CTA reads 320 bytes of the operands for each K, so more where it
    # has more than 614 of the depth. It has 680 of 4096 where six CTAs share each tile.
    if depth < _MIN_SPLIT_DEPTH:
        return 0
    # Unsplit, a cluster of two SMs computes so many columns of 256 rows, tile after tile.
    # float8_matmul.cu chooses between the tiles in the same way.
    wide, narrow = (
        -(-_tiles(rows, columns, tile) // gpu.clusters) * tile[1]
        for tile in (_WIDE_TILE, _NARROW_TILE)
    )
    unsplit = narrow if 6 * narrow <= 5 * wide else wide
    tiles, clusters = _tiles(rows, columns, _SPLIT_TILE), gpu.multiprocessors // _SPLIT_CLUSTER
    # Of the elements that all SMs could compute in that time, those of the split tiles.
    busy = tiles * math.prod(_SPLIT_TILE) / (gpu.multiprocessors * 128 * max(unsplit, 1))
    if not 0 < busy <= _MAX_BUSY_UNSPLIT or tiles > _MAX_SPLIT_WAVES * clusters:
        return 0
    return clusters + tiles  # the clusters of this process's smallest GPU, on larger ones too


def _tiles(rows: int, columns: int, tile: tuple[int, int]) -> int:
    return math.prod(-(-size // of) for size, of in zip((rows, columns), tile, strict=True))


float8_matmul_amax_unsupported = float8_matmul_unsupported


def float8_matmul_amax(a, b, scale_a, scale_b, bias, *, out_dtype, parts):
    """Returns ``out``, and its largest finite absolute value in each part of the columns."""
    rows, columns = a.shape[0], b.shape[0]
    # As the forward GEMM of a layer with one scale for each array has it.
    is_forward = a.dtype == b.dtype == jnp.float8_e4m3fn and scale_a.shape == scale_b.shape == (1,)
    # The epilogue takes one part of 64 columns at a time.
    if not is_forward or (parts > 1 and columns % (parts * 64)):
        out = float8_matmul(a, b, scale_a, scale_b, bias, out_dtype=out_dtype)
        return out, amax_of_columns(out, parts)
    results = (
        jax.ShapeDtypeStruct((rows, columns), jnp.dtype(out_dtype)),
        jax.ShapeDtypeStruct((parts,), jnp.float32),
    )
    bias = ffi.or_empty(bias, results[0].dtype)
    return tuple(ffi.call("float8_matmul_amax", results, a, b, scale_a, scale_b, bias))


def float8_matmul_dgelu_unsupported(a, b, scale_a, scale_b, h, scale, *, has_bias) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del scale_a, scale_b, scale, has_bias
    return _derivative_unsupported(a, b, h)


def float8_matmul_dgelu(a, b, scale_a, scale_b, h, scale, *, has_bias):
    """Returns the gradient of ``h`` over ``scale`` in float8_e5m2, transposed, and its row sum.

    The last one is not over ``scale``, and None without a bias.
    """
    rows, columns = h.shape
    of_sums = ((columns,), (-(-rows // _DGELU_ROWS), columns)) if has_bias else ((0,), (0,))
    sums = zip(of_sums, (h.dtype, jnp.float32), strict=True)
    results = [*_both_layouts(h), *(jax.ShapeDtypeStruct(*each) for each in sums)]
    arrays = a, b, scale_a, scale_b, h, scale
    *rounded, dbias, _ = ffi.call("float8_matmul_dgelu", results, *arrays)
    return *rounded, dbias if has_bias else None


def float8_matmul_dswiglu_unsupported(a, b, scale_a, scale_b, h, scale, *, has_bias) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    del scale_a, scale_b, scale
    if has_bias:
        return "there is a bias, whose gradient the kernel does not sum"
    if a.shape[1] < _MIN_DSWIGLU_DEPTH:
        return (
            f"a {a.shape} and b {b.shape} have a depth of {a.shape[1]}; the kernel takes them from "
            f"{_MIN_DSWIGLU_DEPTH} on, for its epilogue takes long"
        )
    return _derivative_unsupported(a, b, h)


def float8_matmul_dswiglu(a, b, scale_a, scale_b, h, scale, *, has_bias):
    """Returns the gradient of ``h`` over ``scale`` in float8_e5m2, transposed, and None."""
    del has_bias
    arrays = a, b, scale_a, scale_b, h, scale
    return *ffi.call("float8_matmul_dswiglu", _both_layouts(h), *arrays), None


def _derivative_unsupported(a, b, h) -> str | None:
    (rows, depth), columns = a.shape, b.shape[0]
    if h.dtype not in (jnp.bfloat16, jnp.float16):
        return f"h has dtype {h.dtype}; the kernel takes bfloat16 and float16"
    if rows % 16 or columns % 16 or rows == 0 or columns == 0:
        return f"the product is {(rows, columns)}; both must be positive multiples of 16"
    if depth > _MAX_DERIVATIVE_DEPTH:
        return (
            f"a {a.shape} and b {b.shape} have a depth of {depth}; the kernel takes them up to "
            f"{_MAX_DERIVATIVE_DEPTH}, for the tensor cores add up all of it"
        )
    return float8_matmul_unsupported(a, b)


def _both_layouts(h):
    return [jax.ShapeDtypeStruct(shape, jnp.float8_e5m2) for shape in (h.shape, h.shape[::-1])]
