"""The Pallas-Triton kernel of non-maximum suppression: a launch for each tile of boxes.

The boxes come sorted. The launch for a tile has a program for each tile from there on; each finds
out which boxes of the launch's tile stay, which is quicker than to wait for another to tell, and
strikes out what they overlap in its own tile.
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
    """Returns which boxes stay."""
    count = boxes.shape[0]
    tiles = pl.cdiv(count, _TILE)
    # What fills up the last tile comes last, and so strikes out no box.
    corners = jnp.pad(boxes.astype(jnp.float32), ((0, tiles * _TILE - count), (0, 0))).T
    kernel = functools.partial(
        _nms_kernel, iou_threshold=iou_threshold, pixel=1.0 if inclusive else 0.0
    )
    whole, own = pl.BlockSpec((4, tiles * _TILE), lambda i: (0, 0)), (4, _TILE)
    strike = pallas_call(
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
        return strike(jnp.full(1, tile), corners, corners, keep, keep)

    keep = lax.fori_loop(0, tiles, visit, jnp.ones_like(corners[0], jnp.int32))
    return keep[:count] > 0


def _nms_kernel(
    tile_ref, corners_ref, own_corners_ref, keep_ref, own_keep_ref, out_ref, *, iou_threshold, pixel
):
    tile = tile_ref[0]
    here = pl.ds(tile * _TILE, _TILE)
    boxes = _corners(corners_ref, here)
    place = jnp.arange(_TILE)
    before = place[:, None] < place[None, :]
    rivals = before & _overlap(boxes, boxes, iou_threshold, pixel)
    alive = keep_ref[here]

    # A box stays if nothing that stays overlaps it. Take all as kept, and ask each box again until
    # no answer changes: box i has its final answer after i + 1 turns, and most after two or three.
    def strike(kept, overlap):
        return jnp.max(jnp.where(overlap & (kept[:, None] > 0), 1, 0), axis=0).astype(jnp.int32)

    def ask(state):
        kept, _ = state
        asked = alive * (1 - strike(kept, rivals))
        return asked, jnp.sum(jnp.abs(asked - kept)) > 0

    kept, _ = lax.while_loop(lambda state: state[1], ask, (alive, True))
    own = own_keep_ref[:]
    overlap = _overlap(boxes, _corners(own_corners_ref, slice(None)), iou_threshold, pixel)
    after = own * (1 - strike(kept, overlap))
    program = pl.program_id(0)
    out_ref[:] = jnp.where(program < tile, own, jnp.where(program == tile, kept, after))


def _corners(ref, here):
    return tuple(ref[i, here] for i in range(4))


def _overlap(rows, columns, iou_threshold, pixel):
    """Whether each box of the rows shares more than the threshold with each of the columns."""
    x1, y1, x2, y2 = (x[:, None] for x in rows)
    other_x1, other_y1, other_x2, other_y2 = (x[None, :] for x in columns)

    def area(x1, y1, x2, y2):
        return _maximum(x2 - x1 + pixel, 0.0) * _maximum(y2 - y1 + pixel, 0.0)

    both = area(
        _maximum(x1, other_x1),
        _maximum(y1, other_y1),
        _minimum(x2, other_x2),
        _minimum(y2, other_y2),
    )
    areas = area(x1, y1, x2, y2) + area(other_x1, other_y1, other_x2, other_y2)
    return both > iou_threshold * (areas - both)


# A box with a corner that is NaN overlaps nothing; but jnp.maximum passes over NaN in Triton.


def _maximum(a, b):
    return jnp.where((a > b) | (a != a), a, b)


def _minimum(a, b):
    return jnp.where((a < b) | (a != a), a, b)
