"""Non-maximum suppression: NaN, ties, thresholds, inclusive corners and errors."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import ops, testing

BACKENDS = ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)]
NO_NUMBER: Any = "a"


def greedy(boxes, scores, iou_threshold, pixel=0.0):
    """Greedy suppression in NumPy, in float64."""
    boxes = np.asarray(boxes, np.float64)
    keep = np.zeros(len(boxes), bool)
    for i in np.argsort(-np.asarray(scores, np.float64), kind="stable"):
        keep[i] = all(iou(boxes[i], boxes[j], pixel) <= iou_threshold for j in np.flatnonzero(keep))
    return keep


def iou(a, b, pixel):
    def area(low, high):
        return np.prod(np.maximum(high - low + pixel, 0))

    both = area(np.maximum(a[:2], b[:2]), np.minimum(a[2:], b[2:]))
    union = area(a[:2], a[2:]) + area(b[:2], b[2:]) - both
    return both / union if union else 0.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("corner", range(4))
@pytest.mark.parametrize("first", [0, 1])
def test_box_with_a_nan_corner_overlaps_nothing(corner, first, backend):
    boxes = np.array([[0.0, 0, 10, 10]] * 2, np.float32)
    scores = jnp.array([0.9, 0.8])
    options = {"iou_threshold": 0.5, "backend": backend}
    assert ops.nms(jnp.asarray(boxes), scores, **options).tolist() == [True, False]
    boxes[first, corner] = np.nan
    assert ops.nms(jnp.asarray(boxes), scores, **options).tolist() == [True, True]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("inclusive", [False, True])
@pytest.mark.covering(("backend", "count"), ("backend", "inclusive"), ("count", "inclusive"))
def test_nms_matches_a_greedy_loop(backend, count, inclusive):
    specs = {"boxes": testing.Boxes((count, 4), 30.0, 20.0), "scores": testing.Normal((count,))}
    boxes, scores = testing.make_inputs(testing.Case("nms", "", specs), "float32", seed=count)
    keep = ops.nms(boxes, scores, iou_threshold=0.3, inclusive=inclusive, backend=backend)
    np.testing.assert_array_equal(keep, greedy(boxes, scores, 0.3, float(inclusive)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [64, 200])
def test_chain_of_overlapping_boxes_keeps_every_other_box(backend, count):
    # Each box overlaps the next, so whether a box is kept depends on all boxes before it.
    low = jnp.arange(count) * 0.4
    boxes = jnp.stack([low, jnp.zeros(count), low + 1, jnp.ones(count)], axis=1)
    keep = ops.nms(boxes, -jnp.arange(count, dtype=float), iou_threshold=0.4, backend=backend)
    np.testing.assert_array_equal(keep, np.arange(count) % 2 == 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_distant_boxes_do_not_overlap(backend):
    # Without a clamp the intersection would be a product of two negative sides.
    boxes = jnp.array([[0.0, 0, 1, 1], [10, 10, 11, 11], [0, 10, 1, 11]])
    for inclusive in (False, True):
        keep = ops.nms(boxes, jnp.ones(3), iou_threshold=0.0, inclusive=inclusive, backend=backend)
        assert keep.all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_inclusive_corners_make_adjacent_boxes_overlap(backend):
    # With inclusive corners the boxes share two of six pixels.
    boxes, scores = jnp.array([[0.0, 0, 1, 1], [1, 0, 2, 1]]), jnp.array([1.0, 2.0])
    apart = ops.nms(boxes, scores, iou_threshold=0.3, backend=backend)
    shared = ops.nms(boxes, scores, iou_threshold=0.3, inclusive=True, backend=backend)
    assert apart.tolist() == [True, True]
    assert shared.tolist() == [False, True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_first_of_equal_boxes_is_kept(backend):
    boxes = jnp.tile(jnp.array([[0.0, 0, 5, 5]]), (70, 1))
    keep = ops.nms(boxes, jnp.zeros(70), iou_threshold=0.5, backend=backend)
    assert keep.tolist() == [True] + [False] * 69


@pytest.mark.parametrize("backend", BACKENDS)
def test_box_with_iou_equal_to_the_threshold_is_kept(backend):
    boxes, scores = jnp.array([[0.0, 0, 2, 1], [0, 0, 1, 1]]), jnp.array([2.0, 1.0])
    assert ops.nms(boxes, scores, iou_threshold=0.5, backend=backend).all()
    assert not ops.nms(boxes, scores, iou_threshold=0.49, backend=backend).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_box_overlaps_nothing(backend):
    boxes = jnp.array([[1.0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 2, 2], [5, 5, 4, 4]])
    assert ops.nms(boxes, jnp.ones(4), iou_threshold=0.0, backend=backend).all()


BOXES = jnp.ones((3, 4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.nms(BOXES[:, :3], BOXES[:, 0], iou_threshold=0.5), ValueError, r"\(3, 3\)"),
        (lambda: ops.nms(BOXES, jnp.ones(2), iou_threshold=0.5), ValueError, "scores has shape"),
        (lambda: ops.nms(BOXES, BOXES[:, 0], iou_threshold=1.5), ValueError, "is 1.5; .* 0 to 1"),
        (
            lambda: ops.nms(BOXES, BOXES[:, 0], iou_threshold=NO_NUMBER),
            TypeError,
            "is 'a'; .* a number",
        ),
        (lambda: ops.nms(BOXES.astype(int), BOXES[:, 0], iou_threshold=0), TypeError, "boxes has"),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
