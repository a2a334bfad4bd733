"""The optimizer's step in ``jax.numpy``: the definition of each op.

Neither op has a derivative here. Arrays come as tuples, one entry for each leaf of a tree.
Arithmetic is float32 (float64 for float64 parameters) whatever the dtypes.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def adamw_update(params, grads, ms, vs, scalars, seeds, traced, *, b1, b2, eps, decays, copy_dtype):
    """Returns ``(params, ms, vs, copies)``, tuples all.

    ``scalars`` are the learning rate, the two bias corrections ``1 / (1 - b ** step)``, and the
    factor of the gradients, and whether to skip the step; ``seeds`` has a random uint32 for each
    leaf, or is None; ``decays`` has a weight decay for each leaf. ``traced`` is None, or has b1,
    b2, eps and a weight decay that those of the leaves are multiplied by. ``copies`` is empty where
    ``copy_dtype`` is None.
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
        seed = None if seeds is None else seeds[i]
        copies = [] if copy_dtype is None else [_round(wide, copy_dtype, seed)]
        results.append((_round(wide, param.dtype, seed), m, v, *copies))
    params, ms, vs, *copies = zip(*results, strict=True)
    return params, ms, vs, copies[0] if copies else ()


def global_norm(arrays):
    """Returns the root of the sum of all squares."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(_wide(x))) for x in arrays))


def _round(x: Array, dtype, seed: Array | None) -> Array:
    """Rounds to the nearest or, for a bfloat16 with a seed, up or down at random.

    A bfloat16 is the upper half of a float32. Adding a random number of 16 bits to the lower half
    carries into the upper one with a probability equal to the fraction that is cut off, so the
    expectation of the result is ``x``.
    """
    if seed is None or dtype != jnp.bfloat16:
        return x.astype(dtype)
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    carried = (bits + (_random_bits(x.shape, seed) & 0xFFFF)) & jnp.uint32(0xFFFF0000)
    rounded = lax.bitcast_convert_type(carried, jnp.float32).astype(dtype)
    return jnp.where(jnp.isnan(x), x.astype(dtype), rounded)


def _random_bits(shape: tuple[int, ...], seed: Array) -> Array:
    """A hash of seed and position for each element; equal in every implementation.

    Two rounds of multiplication and shift, with the constants of Wellons's "hash prospector".
    """
    bits = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + seed
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)
