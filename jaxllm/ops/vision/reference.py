"""Non-maximum suppression in ``jax.numpy``: the definition.

The boxes come sorted, the highest score first. One after the other, each box that is still there
strikes out the boxes after it that it overlaps. The intersection over the union is compared without
a division, ``both > threshold * union``, so that two empty boxes overlap nothing.

Corners and areas are float32 (float64 for float64 boxes).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def nms(boxes, *, iou_threshold, inclusive):
    """Returns which boxes stay."""
    boxes = boxes.astype(jnp.promote_types(boxes.dtype, jnp.float32))
    areas = _area(boxes[:, :2], boxes[:, 2:], inclusive)
    later = jnp.arange(boxes.shape[0])

    def visit(i, keep):
        low = jnp.maximum(boxes[i, :2], boxes[:, :2])
        high = jnp.minimum(boxes[i, 2:], boxes[:, 2:])
        both = _area(low, high, inclusive)
        overlaps = both > iou_threshold * (areas[i] + areas - both)
        return keep & ~(keep[i] & overlaps & (later > i))

    return lax.fori_loop(0, boxes.shape[0], visit, jnp.ones_like(areas, bool))


def _area(low: Array, high: Array, inclusive: bool) -> Array:
    """The areas between corners; a side that would be negative is nothing."""
    sides = jnp.maximum(high - low + (1 if inclusive else 0), 0)
    return sides[:, 0] * sides[:, 1]
