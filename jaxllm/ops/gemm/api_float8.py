"""Matrix multiplication of float8 operands."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.checks import as_dtype, check_shape
from jaxllm.ops.gemm import cuda, reference
from jaxllm.ops.quantization.api_float8 import FLOAT8_GELU, FLOAT8_SWIGLU

_FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_OUT = (jnp.bfloat16, jnp.float16, jnp.float32)


def _sharding(a: Array, b: Array, scale_a: Array, scale_b: Array, *_: Any, **__: str):
    # One scale for all rows or columns is on every device.
    scales = ["M" if scale_a.shape == a.shape[:1] else "_"]
    scales += ["N" if scale_b.shape == b.shape[:1] else "_"]
    return ShardingRule(f"M K', N K', {', '.join(scales)}, !N' -> M N +K", "M N K")


FLOAT8_MATMUL = Op(
    "float8_matmul",
    reference=reference,
    # No Pallas kernel: XLA's GEMM of float8 arrays serves the GPUs that the CUDA kernel does not.
    cuda=cuda,
    sharding=_sharding,
)


FLOAT8_MATMUL_AMAX = Op("float8_matmul_amax", reference=reference, cuda=cuda)
"""As FLOAT8_MATMUL; it also returns the largest finite absolute value of the result, as float32.

With ``parts`` 2 it is that of each half of the columns, and with 1 that of all.
"""


def _with_derivative(name: str, activation: Op) -> Op:
    """A float8 GEMM that multiplies by the derivative of an activation."""

    def parts(backend, a, b, scale_a, scale_b, h, scale, *, has_bias):
        arrays, static = (a, b, scale_a, scale_b, None), {"out_dtype": h.dtype.name}
        dout = dispatch(FLOAT8_MATMUL, Direction.INFERENCE, backend, *arrays, **static)
        arrays = h, dout, scale
        return dispatch(activation, Direction.BACKWARD, backend, *arrays, has_bias=has_bias)

    return Op(name, cuda=cuda, parts=parts)


FLOAT8_MATMUL_DGELU = _with_derivative("float8_matmul_dgelu", FLOAT8_GELU)
"""The gradient of ``h``, given that of GELU of it as a float8 product.

``(a, b, scale_a, scale_b, h, scale)``: FLOAT8_GELU's backward of ``h`` and the product, which has
one scale of each operand. The kernel does not round the product. ``scale`` must be that of a bound
which is an eighth too large, or a finite number may become an infinity beside one.
"""

FLOAT8_MATMUL_DSWIGLU = _with_derivative("float8_matmul_dswiglu", FLOAT8_SWIGLU)
"""Likewise of SwiGLU of its halves: FLOAT8_SWIGLU's backward."""


def float8_matmul(
    a: Float[Array, "M K"],
    b: Float[Array, "N K"],
    scale_a: Float[Array, "*M"],
    scale_b: Float[Array, "*N"],
    bias: Float[Array, " N"] | None = None,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    backend: Backend | None = None,
) -> Float[Array, "M N"]:
    r"""A matrix product of float8 operands, each with one scale, or one scale per row.

    .. math::
        out_{ij} = scale^a_i \, scale^b_j \sum_k a_{ik} b_{jk} + bias_j

    Both operands are K-major, as Hopper's float8 tensor cores read them. The scales are current
    scales, as :func:`float8_quantize` returns them. The result is rounded once, to ``out_dtype``.
    NaN and infinities propagate. For inference only: there is no derivative.

    The CUDA kernel is for Hopper GPUs, with a depth K that is a multiple of 16 and N a multiple of
    8. There the tensor cores accumulate with about 14 bits, and the kernel adds their sums in
    float32 every 512 elements of the depth, 16 instructions. A depth of at most 1024 the tensor
    cores add up alone. Where ``out_dtype`` has 16 bits they do so with each half of a depth from
    1536 to 2048, and the kernel keeps the sum of the first half in bfloat16; but not where the
    result has few tiles, or its depth is split. An instruction truncates each of its 33 addends,
    32 products and the sum so far, to 14 bits of the largest. So the error before the last rounding
    is at most :math:`16 \cdot 33 \cdot 2^{-13} \, scale^a_i \, scale^b_j \sum_k |a_{ik} b_{jk}|`,
    and that of float32. It is twice that for sums of more than 512, and a half that is kept in
    bfloat16 adds at most :math:`2^{-9}` of the same sum. For sums of 512 random products with heavy
    tails it was below a 25th of the bound. Where the depth is sharded, the term of each shard is
    rounded to ``out_dtype`` before the sum.

    Args:
        a: The rows, ``(M, K)``; float8_e4m3fn or float8_e5m2.
        b: The columns, ``(N, K)``; float8_e4m3fn or float8_e5m2, whatever ``a`` has.
        scale_a: float32; one scale, of shape ``()``, or one per row of ``a``, ``(M,)``.
        scale_b: float32; one scale, of shape ``()``, or one per row of ``b``, ``(N,)``.
        bias: One offset per column, ``(N,)`` in ``out_dtype``; None for no offset.
        out_dtype: bfloat16, float16 or float32.
        backend: ``"cuda"``, ``"xla"`` or ``"auto"``; None for the surrounding choice. There is no
            Pallas kernel.

    Returns:
        The product, ``(M, N)`` in ``out_dtype``.

    Raises:
        TypeError: ``a`` or ``b`` is not float8_e4m3fn or float8_e5m2, a scale is not float32,
            ``out_dtype`` is another than these three, or ``bias`` is not of that.
        ValueError: ``a`` or ``b`` is not a matrix, they differ in depth, a scale is neither one
            nor one per row, ``bias`` is not one per column, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: the formats are those of Micikevicius et al., FP8 Formats for Deep Learning, arXiv
    2209.05433; the accumulation follows section 3.3 of the DeepSeek-V3 report, arXiv 2412.19437.

    Example:
        >>> a, scale_a = jaxllm.ops.float8_quantize(jnp.ones((2, 16)))
        >>> b, scale_b = jaxllm.ops.float8_quantize(jnp.ones((8, 16)))
        >>> jaxllm.ops.float8_matmul(a, b, scale_a, scale_b)[0, 0].item()
        16.0
    """
    for name, array in (("a", a), ("b", b)):
        _check_dtype(name, array, *_FLOAT8)
    if a.ndim != 2:
        raise ValueError(f"a has shape {a.shape}; it must be a matrix, (M, K)")
    if b.ndim != 2 or b.shape[1] != a.shape[1]:
        raise ValueError(
            f"b has shape {b.shape}; it must be (N, {a.shape[1]}) to be multiplied by a {a.shape}"
        )
    for name, scale, rows in (("a", scale_a, a), ("b", scale_b, b)):
        _check_dtype(f"scale_{name}", scale, jnp.float32)
        if scale.ndim:
            why = f"one scale for each row of {name} {rows.shape}, or () for one"
            check_shape(f"scale_{name}", scale, rows.shape[:1], why)
    dtype = as_dtype("out_dtype", out_dtype)
    if dtype not in _OUT:
        raise TypeError(f"out_dtype is {dtype}; it must be {_names(_OUT)}")
    if bias is not None:
        _check_dtype("bias", bias, dtype)
        check_shape("bias", bias, b.shape[:1], f"one for each row of b {b.shape}")
    # As the kernel takes them.
    scale_a, scale_b = (jnp.atleast_1d(scale) for scale in (scale_a, scale_b))
    arrays, static = (a, b, scale_a, scale_b, bias), {"out_dtype": dtype.name}
    return dispatch(FLOAT8_MATMUL, Direction.INFERENCE, resolve(backend), *arrays, **static)


def _check_dtype(name: str, array: Array, *known: DTypeLike) -> None:
    dtype = getattr(array, "dtype", None)
    if dtype not in known:
        found = f"dtype {dtype}" if dtype is not None else f"type {type(array).__name__}"
        raise TypeError(f"{name} has {found}; it must be {_names(known)}")


def _names(dtypes: tuple[DTypeLike, ...]) -> str:
    return " or ".join(jnp.dtype(dtype).name for dtype in dtypes)
