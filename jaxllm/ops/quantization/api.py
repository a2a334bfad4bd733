"""Int8 weights with one scale per group: quantization, and matmuls with such weights."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.checks import as_integer, check_floating, check_floating_of_any_width, is_certain
from jaxllm.ops.quantization import cuda, pallas, reference


def _op(name: str, sharding: ShardingRule) -> Op:
    return Op(name, reference=reference, pallas=pallas, cuda=cuda, sharding=sharding)


# K also stands for the groups along it: a shard has whole ones, or a part of a row's only one.
_PRODUCT = ShardingRule("M K', M K', R K' -> R M +K", "M R K")
QUANTIZE = _op("quantize", ShardingRule("... _ -> ... _, ... _"))
DEQUANTIZE = _op("dequantize", ShardingRule("... K, ... K -> ... K", "... K"))
QUANTIZED_MATVEC = _op("quantized_matvec", _PRODUCT)
QUANTIZED_MATMUL = _op("quantized_matmul", _PRODUCT)

_MAX_ROWS = 16


def quantize(
    w: Float[Array, "*rows K"], *, group_size: int = 64, backend: Backend | None = None
) -> tuple[Int8[Array, "*rows K"], Float[Array, "*rows G"]]:
    r"""Rounds weights to int8, with one scale per group of neighbours along the last axis.

    .. math::
        scale = \max |w| / 127 \qquad q = round(w / scale)

    Ties round to even. A group of zeros has the scale 0. Groups do not span rows.

    Args:
        w: The weights, ``(out, in)`` for the matmuls below; float32, bfloat16 or float16 for the
            kernels.
        group_size: The number of weights that share a scale; it divides K.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        ``(q, scales)``: int8 in the shape of ``w``, and float32 of shape (..., K / group_size).

    Raises:
        TypeError: ``w`` is not floating-point.
        ValueError: ``w`` has no axis, K is not a multiple of ``group_size``, or the backend is
            unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: KuiperLLama, lesson 13 on quantized matrix-vector products.

    Example:
        >>> q, scales = jaxllm.ops.quantize(jnp.array([1.0, 3.0, 5.0, -1.0]), group_size=2)
        >>> q.tolist()
        [42, 127, 127, -25]
    """
    check_floating(w=w)
    if w.ndim == 0:
        raise ValueError("w has shape (); it must have a last axis to form groups along")
    group_size = as_integer("group_size", group_size)
    if group_size < 1 or w.shape[-1] % group_size:
        raise ValueError(
            f"w has shape {w.shape}, rows of {w.shape[-1]}; they must be multiples of group_size "
            f"{group_size}"
        )
    return dispatch(QUANTIZE, Direction.INFERENCE, resolve(backend), w, group_size=group_size)


def dequantize(
    q: Int8[Array, "*rows K"], scales: Float[Array, "*rows G"], *, backend: Backend | None = None
) -> Float[Array, "*rows K"]:
    """The weights that int8 values and their scales represent: ``q * scale``.

    Args:
        q: The int8 values, as :func:`quantize` returns them.
        scales: The scales of their groups, G per row; float32 for the kernels.
        backend: As in :func:`quantize`.

    Returns:
        The weights, in the dtype of ``scales``.

    Raises:
        TypeError: ``q`` is not int8 or ``scales`` not floating-point.
        ValueError: ``scales`` does not fit ``q``, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.
    """
    _check_quantized(q, scales)
    return dispatch(DEQUANTIZE, Direction.INFERENCE, resolve(backend), q, scales)


def quantized_matvec(
    q: Int8[Array, "M K"],
    scales: Float[Array, "M G"],
    x: Float[Array, "*R K"],
    *,
    backend: Backend | None = None,
) -> Float[Array, "*R M"]:
    r"""Multiplies a few rows by an int8 matrix, which is read once.

    .. math::
        out_m = \sum_k x_k \cdot scale_{m, k / g} \cdot q_{mk}

    The sums are float32. For inference only: there is no derivative.

    Args:
        q: The matrix, ``(out, in)``, as :func:`quantize` returns it.
        scales: The scales of its groups; float32 for the kernels.
        x: One row, or 1 to 16; float32, bfloat16 or float16 for the kernels.
        backend: As in :func:`quantize`.

    Returns:
        The result, in the dtype of ``x``.

    Raises:
        TypeError: ``q`` is not int8, or another argument is not floating-point.
        ValueError: The shapes do not fit together, ``x`` has no row or more than 16, or the backend
            is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: KuiperLLama's ``matmul_kernel_cu_fp32int8``.
    """
    _check_matmul(q, scales, x)
    if x.ndim == 1:
        return quantized_matvec(q, scales, x[None], backend=backend)[0]
    if x.ndim != 2 or is_certain(lambda: not 1 <= x.shape[0] <= _MAX_ROWS):
        raise ValueError(
            f"x has shape {x.shape}; it must be (K,), or (R, K) with R from 1 to {_MAX_ROWS}"
        )
    return dispatch(QUANTIZED_MATVEC, Direction.INFERENCE, resolve(backend), q, scales, x)


def quantized_matmul(
    q: Int8[Array, "M K"],
    scales: Float[Array, "M G"],
    x: Float[Array, "*rows K"],
    *,
    backend: Backend | None = None,
) -> Float[Array, "*rows M"]:
    """Multiplies many rows, such as a prompt's, by an int8 matrix.

    A kernel dequantizes the matrix to the dtype of ``x``, and XLA runs the GEMM. For inference
    only: there is no derivative.

    Args:
        q: As in :func:`quantized_matvec`.
        scales: As in :func:`quantized_matvec`.
        x: Any number of rows.
        backend: As in :func:`quantize`, for the dequantization kernel.

    Returns:
        The result, in the dtype of ``x``.

    Raises:
        TypeError: As in :func:`quantized_matvec`.
        ValueError: The shapes do not fit together, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.
    """
    _check_matmul(q, scales, x)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = dispatch(QUANTIZED_MATMUL, Direction.INFERENCE, resolve(backend), q, scales, rows)
    return out.reshape(*x.shape[:-1], q.shape[0])


def _check_quantized(q: Array, scales: Array) -> None:
    if getattr(q, "dtype", None) != jnp.int8:
        raise TypeError(f"q has dtype {getattr(q, 'dtype', type(q).__name__)}; it must be int8")
    check_floating_of_any_width(scales=scales)
    if q.ndim == 0 or scales.ndim != q.ndim or scales.shape[:-1] != q.shape[:-1]:
        raise ValueError(
            f"scales has shape {scales.shape}; it must be that of q {q.shape}, (..., G)"
        )
    groups = scales.shape[-1]
    if (q.shape[-1] % groups) if groups else q.shape[-1]:
        raise ValueError(
            f"scales has shape {scales.shape}, {groups} groups a row; they must divide the rows of "
            f"q {q.shape}"
        )


def _check_matmul(q: Array, scales: Array, x: Array) -> None:
    _check_quantized(q, scales)
    check_floating(x=x)
    if q.ndim != 2:
        raise ValueError(f"q has shape {q.shape}; it must be a matrix, (M, K)")
    if x.ndim == 0 or x.shape[-1] != q.shape[1]:
        raise ValueError(
            f"x has shape {x.shape}; its rows must be {q.shape[1]} wide, as those of q {q.shape}"
        )
