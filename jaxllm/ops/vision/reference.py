"""Non-maximum suppression in ``jax.numpy``: the reference implementation.

The boxes are sorted by falling score. Each box in turn that is still kept suppresses the boxes
after it that it overlaps. The IoU is compared without a division, as ``intersection > threshold *
union``, so that two empty boxes do not overlap.

Corners and areas are float32 (float64 for float64 boxes).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def nms(boxes, *, iou_threshold, inclusive):
    """Returns whether each box is kept."""
    boxes = boxes.astype(jnp.promote_types(boxes.dtype, jnp.float32))
    areas = _area(boxes[:, :2], boxes[:, 2:], inclusive)
    later = jnp.arange(boxes.shape[0])

    def visit(i, keep):
        low = jnp.maximum(boxes[i, :2], boxes[:, :2])
        high = jnp.minimum(boxes[i, 2:], boxes[:, 2:])
        intersection = _area(low, high, inclusive)
        overlaps = intersection > iou_threshold * (areas[i] + areas - intersection)
        return keep & ~(keep[i] & overlaps & (later > i))

    return lax.fori_loop(0, boxes.shape[0], visit, jnp.ones_like(areas, bool))


def _area(low: Array, high: Array, inclusive: bool) -> Array:
    """The areas between corners; negative sides count as zero."""
    sides = jnp.maximum(high - low + (1 if inclusive else 0), 0)
    return sides[:, 0] * sides[:, 1]
