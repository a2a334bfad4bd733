"""The Pallas-Triton kernel of non-maximum suppression: one launch per tile of boxes.

The boxes are sorted. A launch has one program per tile. Each program computes which boxes of the
launch's tile are kept, which is faster than waiting for another program to compute it. Then it
suppresses the boxes that they overlap in its own tile.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.ops.pallas_call import pallas_call

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_TILE, _WARPS = 64, 4


def nms_unsupported(boxes, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if boxes.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"boxes has dtype {boxes.dtype}; the kernel takes {names}"
    return None


def nms(boxes, *, iou_threshold, inclusive, interpret=False):
    """Returns whether each box is kept."""
    count = boxes.shape[0]
    tiles = pl.cdiv(count, _TILE)
    # Padding boxes come last, so they suppress no box.
    corners = jnp.pad(boxes.astype(jnp.float32), ((0, tiles * _TILE - count), (0, 0))).T
    kernel = functools.partial(
        _nms_kernel, iou_threshold=iou_threshold, pixel=1.0 if inclusive else 0.0
    )
    whole, own = pl.BlockSpec((4, tiles * _TILE), lambda i: (0, 0)), (4, _TILE)
    suppress = pallas_call(
        kernel,
        grid=(tiles,),
        in_specs=[
            pl.BlockSpec((1,), lambda i: (0,)),
            whole,
            pl.BlockSpec(own, lambda i: (0, i)),
            pl.BlockSpec((tiles * _TILE,), lambda i: (0,)),
            pl.BlockSpec((_TILE,), lambda i: (i,)),
        ],
        out_specs=pl.BlockSpec((_TILE,), lambda i: (i,)),
        out_shape=jax.ShapeDtypeStruct((tiles * _TILE,), jnp.int32),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
    )

    def visit(tile, keep):
        return suppress(jnp.full(1, tile), corners, corners, keep, keep)

    keep = lax.fori_loop(0, tiles, visit, jnp.ones_like(corners[0], jnp.int32))
    return keep[:count] > 0


def _nms_kernel(
    tile_ref, corners_ref, own_corners_ref, keep_ref, own_keep_ref, out_ref, *, iou_threshold, pixel
):
    tile = tile_ref[0]
    here = pl.ds(tile * _TILE, _TILE)
    boxes = _corners(corners_ref, here)
    index = jnp.arange(_TILE)
    before = index[:, None] < index[None, :]
    overlap_in_tile = before & _overlap(boxes, boxes, iou_threshold, pixel)
    alive = keep_ref[here]

    # A box is kept if no kept box before it overlaps it. Start with all boxes and repeat this test
    # until nothing changes: box i is final after i + 1 iterations, and most after two or three.
    def suppressed(kept, overlap):
        return jnp.max(jnp.where(overlap & (kept[:, None] > 0), 1, 0), axis=0).astype(jnp.int32)

    def iterate(state):
        kept, _ = state
        new = alive * (1 - suppressed(kept, overlap_in_tile))
        return new, jnp.sum(jnp.abs(new - kept)) > 0

    kept, _ = lax.while_loop(lambda state: state[1], iterate, (alive, True))
    own = own_keep_ref[:]
    overlap = _overlap(boxes, _corners(own_corners_ref, slice(None)), iou_threshold, pixel)
    after = own * (1 - suppressed(kept, overlap))
    program = pl.program_id(0)
    out_ref[:] = jnp.where(program < tile, own, jnp.where(program == tile, kept, after))


def _corners(ref, here):
    return tuple(ref[i, here] for i in range(4))


def _overlap(rows, columns, iou_threshold, pixel):
    """Whether the IoU of each box of ``rows`` and each of ``columns`` is above the threshold."""
    x1, y1, x2, y2 = (x[:, None] for x in rows)
    other_x1, other_y1, other_x2, other_y2 = (x[None, :] for x in columns)

    def area(x1, y1, x2, y2):
        return _maximum(x2 - x1 + pixel, 0.0) * _maximum(y2 - y1 + pixel, 0.0)

    intersection = area(
        _maximum(x1, other_x1),
        _maximum(y1, other_y1),
        _minimum(x2, other_x2),
        _minimum(y2, other_y2),
    )
    areas = area(x1, y1, x2, y2) + area(other_x1, other_y1, other_x2, other_y2)
    return intersection > iou_threshold * (areas - intersection)


# A box with a NaN corner overlaps nothing, but jnp.maximum ignores NaN in Triton.


def _maximum(a, b):
    return jnp.where((a > b) | (a != a), a, b)


def _minimum(a, b):
    return jnp.where((a < b) | (a != a), a, b)
