"""The formulas of rounding to float8: scales, and the values."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike


def amax(x: Array, axes: tuple[int, ...]) -> Array:
    """The largest finite absolute value along ``axes``, in float32; 0 where there is none."""
    wide = x.astype(jnp.float32)
    return jnp.max(jnp.abs(jnp.where(jnp.isfinite(wide), wide, 0)), axis=axes, initial=0)


def amax_of_columns(x: Array, parts: int) -> Array:
    """:func:`amax` of each of ``parts`` equal parts of the columns of a matrix, ``(parts,)``."""
    rows, columns = x.shape
    return amax(x.reshape(rows, parts, columns // parts), (0, 2))


def scale_of(bound: Array, dtype: DTypeLike) -> Array:
    """The scale with which no absolute value up to ``bound`` overflows a format."""
    largest, wide = float(jnp.finfo(dtype).max), jnp.finfo(jnp.float32)
    scale = jnp.clip(bound, max=float(wide.max)) / largest
    return jnp.where(bound == 0, 1, jnp.maximum(scale, float(wide.tiny)))


def current_scale(x: Array, dtype: DTypeLike, axes: tuple[int, ...]) -> Array:
    """The scale of ``float8_quantize``, one for all elements along ``axes``."""
    return scale_of(amax(x, axes), dtype)


def largest_row_norm(x: Array, scale: Array) -> Array:
    """The largest Euclidean norm of the rows of a matrix, of finite elements, in float32.

    ``scale`` is near the largest absolute value, or a part of that: no square overflows.
    """
    wide = x.astype(jnp.float32)
    quotients = jnp.where(jnp.isfinite(wide), wide, 0) / scale
    return scale * jnp.sqrt(jnp.max(jnp.sum(quotients * quotients, axis=1), initial=0))


def round_to_float8(x: Array, scale: Array, dtype: DTypeLike) -> Array:
    """``x / scale`` in float8, for scales that broadcast; what is finite does not overflow."""
    dtype = jnp.dtype(dtype)
    largest = float(jnp.finfo(dtype).max)
    wide = x.astype(jnp.float32)
    # As the kernel divides: by a product with the inverse, which is at most a unit away.
    quotients = jnp.where(jnp.isfinite(wide), wide, 0) * (1 / scale)
    values = jnp.clip(quotients, -largest, largest).astype(dtype)
    # What a cast makes of these depends on the device. NumPy's infinity of e4m3 is NaN.
    for special, where in (
        (np.nan, jnp.isnan(wide)),
        (np.inf, wide == np.inf),
        (-np.inf, wide == -np.inf),
    ):
        values = jnp.where(where, np.asarray(special, dtype), values)
    return values
