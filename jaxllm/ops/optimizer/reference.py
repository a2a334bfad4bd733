"""AdamW and the global norm in ``jax.numpy``: the reference implementations.

Neither op has a hand-written derivative. Arrays are tuples with one entry per leaf of a tree.
Arithmetic is float32 (float64 for float64 parameters) whatever the dtypes.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def adamw_update(
    params, grads, ms, vs, scalars, seeds, traced, *,
    b1, b2, eps, decays, copy_dtype, whole_shapes=None,
):  # fmt: skip
    """Returns the tuples ``(params, ms, vs, copies)``.

    ``scalars`` are the learning rate, the two bias corrections ``1 / (1 - b ** step)``, the factor
    of the gradients, and whether to skip the step. ``seeds`` has a random uint32 per leaf, or is
    None. ``decays`` has a weight decay per leaf. ``traced`` is None, or has traced values of b1,
    b2, eps and a factor of the weight decays. ``copies`` is empty without a ``copy_dtype``.
    ``whole_shapes`` are those of the arrays that the leaves are shards of: random bits depend on an
    element's place in the whole array.
    """
    if traced is not None:
        b1, b2, eps, weight_decay = traced
        decays = [weight_decay * decay for decay in decays]
    lr, m_correction, v_correction, grad_scale, skip = scalars
    results = []
    for i, (param, grad, m, v) in enumerate(zip(params, grads, ms, vs, strict=True)):
        grad = grad.astype(m.dtype) * grad_scale
        new_m = b1 * m + (1 - b1) * grad
        new_v = b2 * v + (1 - b2) * grad * grad
        step = new_m * m_correction / (jnp.sqrt(new_v * v_correction) + eps)
        wide = _wide(param)
        new_wide = wide - lr * (step + decays[i] * wide)
        m, v, wide = (
            jnp.where(skip != 0, old, new)
            for old, new in ((m, new_m), (v, new_v), (wide, new_wide))
        )
        bits = None
        if seeds is not None:
            bits = _random_bits(wide.shape, seeds[i], whole_shapes[i] if whole_shapes else None)
        copies = [] if copy_dtype is None else [_round(wide, copy_dtype, bits)]
        results.append((_round(wide, param.dtype, bits), m, v, *copies))
    params, ms, vs, *copies = zip(*results, strict=True)
    return params, ms, vs, copies[0] if copies else ()


def global_norm(arrays):
    """Returns the norm."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(_wide(x))) for x in arrays))


def _round(x: Array, dtype, random_bits: Array | None) -> Array:
    """Rounds to the nearest or, to bfloat16 with random bits, stochastically.

    A bfloat16 is the upper half of a float32. A random 16-bit integer is added to the lower half.
    It carries into the upper half with a probability equal to the fraction that is truncated, so
    the expectation of the result is ``x``.
    """
    if random_bits is None or dtype != jnp.bfloat16:
        return x.astype(dtype)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    carried = (bits + (random_bits & 0xFFFF)) & jnp.uint32(0xFFFF0000)
    rounded = lax.bitcast_convert_type(carried, jnp.float32).astype(dtype)
    return jnp.where(jnp.isnan(x), x.astype(dtype), rounded)


def _random_bits(
    shape: tuple[int, ...], seed: Array, whole_shape: tuple[int, ...] | None = None
) -> Array:
    """A hash of seed and position for each element, the same in every implementation.

    In a shard of an array of ``whole_shape`` positions are those in the array, less the first's.

    Two rounds of multiplication and shift, with the constants of Wellons's "hash prospector".
    """
    if whole_shape is None:
        positions = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    else:
        positions = jnp.zeros(shape, jnp.uint32)
        for dim in range(len(shape)):
            stride = math.prod(whole_shape[dim + 1 :]) % 2**32
            positions += lax.broadcasted_iota(jnp.uint32, shape, dim) * jnp.uint32(stride)
    bits = positions + seed
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)
