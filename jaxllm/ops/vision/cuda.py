"""FFI calls to the CUDA vision kernels in ``cuda/vision``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm.core import ffi

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_BOXES = 2**17  # one bit per pair of boxes is 2 GiB
_TILE = 64  # boxes per word of bits


def nms_unsupported(boxes, **_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if boxes.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"boxes has dtype {boxes.dtype}; the kernel takes {names}"
    if boxes.shape[0] > _MAX_BOXES:
        return f"there are {boxes.shape[0]} boxes; the kernel takes at most {_MAX_BOXES}"
    return None


def nms(boxes, *, iou_threshold, inclusive):
    """Returns whether each box is kept."""
    count = boxes.shape[0]
    # The workspace: a 64-bit word, as two halves, per box and tile.
    overlaps = jax.ShapeDtypeStruct((count, -(-count // _TILE), 2), jnp.uint32)
    results = (jax.ShapeDtypeStruct((count,), jnp.bool_), overlaps)
    return ffi.call("nms", results, boxes, iou_threshold=iou_threshold, inclusive=inclusive)[0]
