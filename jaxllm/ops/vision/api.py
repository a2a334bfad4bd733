"""Bounding boxes in images: non-maximum suppression."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxllm.core import partition, shards
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.sharding_rule import WHOLE
from jaxllm.ops.checks import as_bool, as_float, check_floating, check_shape
from jaxllm.ops.vision import cuda, pallas, reference

NMS = Op("nms", reference=reference, pallas=pallas, cuda=cuda)


def nms(
    boxes: Float[Array, "N 4"],
    scores: Float[Array, " N"],
    *,
    iou_threshold: float,
    inclusive: bool = False,
    backend: Backend | None = None,
) -> Bool[Array, " N"]:
    r"""Greedy non-maximum suppression: of overlapping boxes, keeps those with the highest scores.

    In the order of falling scores, a box is kept unless its overlap with a kept box is too large:

    .. math::
        IoU(a, b) = \frac{|a \cap b|}{|a| + |b| - |a \cap b|} > iou\_threshold

    Negative sides count as zero, so separate boxes do not overlap. Areas are float32 (float64 for
    float64). XLA sorts the scores; ties keep the order of ``boxes``.

    Args:
        boxes: Corners ``(x1, y1, x2, y2)`` in any unit; float32, bfloat16 or float16 for the
            kernels.
        scores: One per box, any floating dtype.
        iou_threshold: The largest overlap (IoU) of two kept boxes, from 0 to 1.
        inclusive: Whether corners are pixels inside the box: its sides are then ``x2 - x1 + 1`` and
            ``y2 - y1 + 1``.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        Whether each box is kept, in the order of ``boxes``. ``jnp.nonzero(keep, size=...)`` returns
        the indices.

    Raises:
        TypeError: An argument is not floating-point, ``iou_threshold`` is no number, or
            ``inclusive`` no bool that is known while the program is traced.
        ValueError: ``boxes`` is not (N, 4), ``scores`` is not as long, ``iou_threshold`` is not in
            its range, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: CUDA-Learn-Notes' ``hard_nms``, whose corners are ``inclusive``.

    Example:
        >>> boxes = jnp.array([[0.0, 0, 10, 10], [1, 0, 11, 10], [20, 0, 30, 10]])
        >>> jaxllm.ops.nms(boxes, jnp.array([0.8, 0.9, 0.7]), iou_threshold=0.5)
        Array([False,  True,  True], dtype=bool)
    """
    check_floating(boxes=boxes, scores=scores)
    if boxes.ndim != 2 or boxes.shape[1] != 4:
        raise ValueError(f"boxes has shape {boxes.shape}; it must be (N, 4)")
    check_shape("scores", scores, boxes.shape[:1], f"one for each row of boxes {boxes.shape}")
    iou_threshold = as_float("iou_threshold", iou_threshold)
    inclusive = as_bool("inclusive", inclusive)
    if not 0 <= iou_threshold <= 1:
        raise ValueError(f"iou_threshold is {iou_threshold}; it must be from 0 to 1")
    backend = resolve(backend)
    if boxes.shape[0] == 0:
        return jnp.zeros(0, bool)
    boxes, scores = jnp.asarray(boxes), jnp.asarray(scores)
    static = backend, iou_threshold, inclusive
    suppress = shards.Function(_suppress, static)
    if partition.is_wanted((boxes, scores)):  # with the sort, so that it sees the shardings
        given = boxes, scores
        return partition.run(suppress, NMS.name, WHOLE, given, is_opaque=backend != "xla")
    return suppress(boxes, scores)


def _suppress(
    backend: Backend, iou_threshold: float, inclusive: bool, boxes: Array, scores: Array
) -> Array:
    order = jnp.argsort(scores, stable=True, descending=True)
    static = {"iou_threshold": iou_threshold, "inclusive": inclusive}
    keep = dispatch(NMS, Direction.INFERENCE, backend, boxes[order], **static)
    return jnp.zeros_like(keep).at[order].set(keep, unique_indices=True)
