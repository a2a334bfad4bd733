"""Quantization to float8 with current scales, for ``float8_matmul``."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.ops.checks import as_dtype, check_floating
from jaxllm.ops.quantization import cuda, reference
from jaxllm.ops.rotary.packed import ROPE_PACKED
from jaxllm.ops.rounding import current_scale, round_to_float8

_DTYPES = (jnp.float8_e4m3fn, jnp.float8_e5m2)

# Layers have a rule for their first derivative. The derivative of a cast to float8 is in float8:
# JAX would round the second derivative without a scale, and return zeros or NaN.
_NO_DERIVATIVE = "a layer with float8 operands has no second derivative; give precision=None"


FLOAT8_ROUND = Op(
    "float8_round",
    reference=reference,
    # No Pallas kernel: there is none of float8_matmul.
    cuda=cuda,
    no_derivative=_NO_DERIVATIVE,
)
"""The matrix ``x / scale``, rounded to float8 in the layouts that float8_matmul takes.

``(x, scale)`` with ``dtype`` and ``layout``: as it is, transposed, or both. A scale per row of the
result, or one. What is finite does not overflow. With ``has_bias``, for both layouts, it also
returns the sum of the unrounded rows, in the dtype of ``x``: the gradient of a bias. On sharded
arrays it runs inside of linear layers, on their shards.
"""


FLOAT8_SCALE_AND_ROUND = Op(
    "float8_scale_and_round", reference=reference, cuda=cuda, no_derivative=_NO_DERIVATIVE
)
"""The current scale of a matrix, and FLOAT8_ROUND with it.

``(x,)`` with ``dtype``, ``layout`` and ``has_bias`` as there. Returns ``(values, transposed, sums,
scale)``, with None for what is not wanted; the scale is ``(1,)``. For arrays on one device: the
scale of a sharded one is of all shards.
"""


def _rotate_back_and_round(backend, dqkv, cos, sin, *, has_bias, **rotation):
    dqkv = dispatch(ROPE_PACKED, Direction.BACKWARD, backend, dqkv, cos, sin, **rotation)
    matrix = dqkv.reshape(math.prod(dqkv.shape[:2]), math.prod(dqkv.shape[2:]))
    static = {"dtype": "float8_e5m2", "layout": "both", "has_bias": has_bias}
    return dispatch(FLOAT8_SCALE_AND_ROUND, Direction.INFERENCE, backend, matrix, **static)


FLOAT8_ROPE_BACKWARD = Op("float8_rope_backward", cuda=cuda, parts=_rotate_back_and_round)
"""The gradient of a rotated projection, rotated back and rounded: ROPE_PACKED's backward, and
FLOAT8_SCALE_AND_ROUND of its rows in float8_e5m2 and both layouts.

``(dqkv, cos, sin)`` with the options of ROPE_PACKED, and ``has_bias``.
"""


FLOAT8_GELU = Op("float8_gelu", reference=reference, cuda=cuda, no_derivative=_NO_DERIVATIVE)
"""GELU of a matrix ``h``, rounded to float8 as by ``FLOAT8_ROUND``.

Forward ``(h, scale)``, with ``layout`` ``"rows"`` or ``"both"``: in float8_e4m3fn. Backward ``(h,
dout, scale)``: the gradient of ``h`` in float8_e5m2, both layouts. One scale. With ``has_bias`` the
backward also returns the sum of the unrounded rows, in the dtype of ``h``; else None.
"""


FLOAT8_SWIGLU = Op("float8_swiglu", reference=reference, cuda=cuda, no_derivative=_NO_DERIVATIVE)
"""As FLOAT8_GELU, SwiGLU of the halves of the rows of ``h``: the gates, then what they gate."""


FLOAT8_NORM = Op("float8_norm", reference=reference, cuda=cuda, no_derivative=_NO_DERIVATIVE)
"""A layer norm or RMS norm, rounded to float8_e4m3fn as by ``FLOAT8_ROUND``, with one scale.

Forward ``(x, residual, x_bias, scale, bias, float8_scale)`` with ``eps``, ``layout``, which is
``"rows"`` or ``"both"``, and ``statistics``. It normalizes ``h = x + x_bias + residual``, rounded
to the dtype of ``x``; without a ``residual`` it normalizes ``x``. Without a ``bias`` it is an RMS
norm. Returns ``(values, transposed, h, mean, rstd)``, with None for what there is not.
"""


def float8_quantize(
    x: Float[Array, "*rows K"], dtype: DTypeLike = jnp.float8_e4m3fn, *, axis: int | None = -1
) -> tuple[Float[Array, "*rows K"], Float[Array, "*rows"]]:
    r"""Rounds an array to float8, with one current scale per row or one for the array.

    .. math::
        scale = \max |x| / \max(dtype) \qquad values = round(x / scale)

    The maximum is over the finite elements. Ties round to even, and nothing finite overflows. A row
    of zeros has the scale 1. Rows whose scale would be below the smallest normal float32 have that
    as their scale. It has no kernel: XLA fuses it with what computes ``x``.

    Args:
        x: The array; float32, bfloat16 or float16.
        dtype: float8_e4m3fn, with 3 bits after the leading one and a maximum of 448, or
            float8_e5m2, with 2 bits and a maximum of 57344.
        axis: -1 for one scale per row, over the last axis; None for one scale for the array.

    Returns:
        ``(values, scale)``: float8 in the shape of ``x``, and float32 of the shape of ``x`` without
        its last axis, or ``()``. NaN is NaN in ``values``. An infinity is one in float8_e5m2, and
        NaN in float8_e4m3fn, which has none. Neither changes the scale of its row.

    Raises:
        TypeError: ``x`` is not floating-point, or ``dtype`` is another than these two.
        ValueError: ``axis`` is neither -1 nor None, or ``x`` has no axis and ``axis`` is -1.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433.

    Example:
        >>> values, scale = jaxllm.ops.float8_quantize(jnp.array([[7.0, -3.5], [0.0, 0.0]]))
        >>> values.astype(float).tolist(), scale.tolist()
        ([[448.0, -224.0], [0.0, 0.0]], [0.015625, 1.0])
    """
    check_floating(x=x)
    dtype = as_dtype("dtype", dtype)
    if dtype not in _DTYPES:
        raise TypeError(f"dtype is {dtype}; it must be float8_e4m3fn or float8_e5m2")
    if axis not in (-1, None):
        raise ValueError(f"axis is {axis!r}; it must be -1 or None")
    if axis == -1 and x.ndim == 0:
        raise ValueError("x has shape (); it must have a last axis, or axis must be None")
    axes = (x.ndim - 1,) if axis == -1 else tuple(range(x.ndim))
    scale = current_scale(x, dtype, axes)
    return round_to_float8(x, jnp.expand_dims(scale, axes), dtype), scale
