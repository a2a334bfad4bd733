r"""Group quantization in ``jax.numpy``: the reference implementation.

Of each group of :math:`g` neighbours along the last axis

.. math::
    scale = \max |w| / 127 \qquad q = round(w / scale) \qquad w \approx q \cdot scale

with ties to even; a group of zeros has the scale 0 and the values 0. The error of a weight is at
most half a scale. A group with a non-finite weight has a non-finite scale and the values 0, so it
is NaN after dequantization.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from jaxllm.ops.activation import reference as activations
from jaxllm.ops.norm import reference as norms
from jaxllm.ops.rounding import current_scale, round_to_float8


def quantize(w, *, group_size):
    """Returns ``(q, scales)``."""
    wide = w.astype(jnp.promote_types(w.dtype, jnp.float32))
    groups = wide.reshape(*w.shape[:-1], -1, group_size) if w.size else _no_groups(wide, group_size)
    scales = jnp.max(jnp.abs(groups), axis=-1, initial=0) / 127
    # XLA's maximum on a CPU may ignore NaN.
    scales = jnp.where(jnp.isnan(groups).any(axis=-1), jnp.nan, scales)
    divisors = jnp.where(scales == 0, 1, scales)[..., None]
    q = jnp.clip(jnp.round(groups / divisors), -127, 127)
    q = jnp.where(jnp.isnan(q), 0, q)  # the integer that NaN is cast to depends on the device
    return q.astype(jnp.int8).reshape(w.shape), scales


def _no_groups(w, group_size):
    return w.reshape(*w.shape[:-1], w.shape[-1] // group_size, group_size)


def dequantize(q, scales):
    """Returns ``w``."""
    groups = q.reshape(*scales.shape, q.shape[-1] // max(scales.shape[-1], 1))
    return (groups.astype(scales.dtype) * scales[..., None]).reshape(q.shape)


def quantized_matvec(q, scales, x):
    """Returns ``out``."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    w = dequantize(q, scales.astype(wide))
    return jnp.einsum("rk,mk->rm", x.astype(wide), w).astype(x.dtype)


def quantized_matmul(q, scales, x):
    """Returns ``out``."""
    # A GEMM of many rows, in the dtype of x for the tensor cores.
    return jnp.einsum("rk,mk->rm", x, dequantize(q, scales).astype(x.dtype))


# Float8


def float8_round(x, scale, *, dtype, layout, has_bias=False):
    """Returns the matrix ``x / scale`` in float8, as a matrix, transposed, or both."""
    if has_bias:
        rounded = float8_round(x, scale, dtype=dtype, layout="both")
        return *rounded, x.astype(jnp.float32).sum(0).astype(x.dtype)
    of_columns = layout == "transposed"
    values = round_to_float8(x, scale if of_columns else scale[:, None], dtype)
    if layout == "rows":
        return values
    return values.T if of_columns else (values, values.T)


def float8_scale_and_round(x, *, dtype, layout, has_bias=False):
    """Returns ``(values, transposed, sums, scale)``, with None for what is not wanted."""
    scale = current_scale(x, jnp.dtype(dtype), (0, 1)).reshape(1)
    values, transposed, *sums = float8_round(
        x, scale, dtype=dtype, layout="both", has_bias=has_bias
    )
    return (
        None if layout == "transposed" else values,
        None if layout == "rows" else transposed,
        sums[0] if has_bias else None,
        scale,
    )


def float8_gelu_forward(h, scale, *, layout):
    """Returns GELU over ``scale`` in float8_e4m3fn, as a matrix, or this and transposed."""
    hidden = activations.gelu_forward(h.astype(jnp.float32))
    return _round_once(hidden, scale, "float8_e4m3fn", layout)


def float8_gelu_backward(h, dout, scale, *, has_bias):
    """Returns the gradient of ``h`` over ``scale`` in float8_e5m2, transposed, and its sums."""
    dh = activations.gelu_backward(h.astype(jnp.float32), dout.astype(jnp.float32))
    return _round_gradient(dh, scale, h.dtype, has_bias)


def float8_swiglu_forward(h, scale, *, layout):
    """Returns SwiGLU over ``scale`` in float8_e4m3fn, as a matrix, or this and transposed."""
    gate, up = jnp.split(h.astype(jnp.float32), 2, axis=-1)
    hidden = activations.swiglu_forward(gate, up)
    return _round_once(hidden, scale, "float8_e4m3fn", layout)


def float8_swiglu_backward(h, dout, scale, *, has_bias):
    """Returns the gradient of ``h`` over ``scale`` in float8_e5m2, transposed, and its sums."""
    gate, up = jnp.split(h.astype(jnp.float32), 2, axis=-1)
    gradients = activations.swiglu_backward(gate, up, dout.astype(jnp.float32))
    return _round_gradient(jnp.concatenate(gradients, axis=-1), scale, h.dtype, has_bias)


def _round_once(x, scale, dtype, layout):
    # Without the barrier XLA may compute x for each layout, and differently.
    return float8_round(lax.optimization_barrier(x), scale, dtype=dtype, layout=layout)


def _round_gradient(dh, scale, dtype, has_bias):
    rounded = _round_once(dh, scale, "float8_e5m2", "both")
    return (*rounded, dh.sum(0).astype(dtype) if has_bias else None)


def float8_norm_forward(
    x, residual, x_bias, scale, bias, float8_scale, *, eps, layout, statistics=True
):
    """Returns ``(values, transposed, h, mean, rstd)``, with None for what there is not."""
    h = norms.rounded_sum(x, residual, x_bias)
    wide = h.astype(jnp.float32)  # so that the norm does not round its result to the dtype of x
    if bias is None:
        out, *found = norms.rms_norm_forward(wide, scale, eps=eps, statistics=statistics)
        found = [None, *found]
    else:
        out, *found = norms.layer_norm_forward(wide, scale, bias, eps=eps, statistics=statistics)
    rounded = _round_once(out, float8_scale, "float8_e4m3fn", layout)
    values, transposed = rounded if layout == "both" else (rounded, None)
    return values, transposed, None if residual is None else h, *found
