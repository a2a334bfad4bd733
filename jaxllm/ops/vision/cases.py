"""Vision cases: few boxes for tests, a detector's number for GPU tests and benchmarks."""

from __future__ import annotations

from jaxllm.testing import Boxes, Case, Normal


def _nms(
    name: str,
    count: int,
    *,
    field: float,
    side: float,
    iou_threshold: float = 0.5,
    inclusive: bool = False,
    large: bool = False,
) -> Case:
    return Case(
        "nms",
        name,
        {"boxes": Boxes((count, 4), field=field, side=side), "scores": Normal((count,))},
        {"iou_threshold": iou_threshold, "inclusive": inclusive},
        has_backward=False,
        large=large,
    )


CASES = (
    _nms("detector", 10000, field=1000.0, side=100.0, large=True),
    _nms("detector_crowded", 10000, field=200.0, side=100.0, large=True),
    _nms("some", 130, field=50.0, side=40.0),
    _nms("odd_count", 77, field=30.0, side=40.0, iou_threshold=0.25),
    _nms("inclusive", 200, field=12.0, side=8.0, inclusive=True),
    _nms("apart", 40, field=1000.0, side=3.0),
    _nms("one", 1, field=10.0, side=10.0),
    _nms("none", 0, field=10.0, side=10.0),
)
