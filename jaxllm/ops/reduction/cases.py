"""Reduction cases: small odd shapes for tests, long arrays for GPU tests and benchmarks."""

from __future__ import annotations

import math

from jaxllm.testing import Case, Integers, Normal

_LONG = 2**28
_MOST_BINS_OF_PALLAS = 4096
# The memory traffic of the backward in input sizes: reduce_sum writes dx; reduce_max reads x and
# writes dx; dot reads a and b and writes both gradients.
_BACKWARD = {"reduce_sum": 1, "reduce_max": 2, "dot": 4}


def _reduce(op: str, name: str, *shape: int, large: bool = False, timed_only: bool = False) -> Case:
    # With a nonzero mean the sum is not small compared with its terms.
    names = ("a", "b") if op == "dot" else ("x",)
    size = math.prod(shape)
    return Case(
        op,
        name,
        {name: Normal(shape, mean=0.5) for name in names},
        forward_elements=len(names) * size,
        backward_elements=_BACKWARD[op] * size,
        large=large,
        timed_only=timed_only,
    )


def _histogram(
    name: str,
    bins: int,
    *shape: int,
    low: int = 0,
    high: int | None = None,
    skew: int = 1,
    large: bool = False,
    timed_only: bool = False,
) -> Case:
    return Case(
        "histogram",
        name,
        {"x": Integers(shape, bins if high is None else high, low=low, skew=skew)},
        {"bins": bins},
        refused_by=("pallas",) if bins > _MOST_BINS_OF_PALLAS else (),
        forward_fixed_bytes=4 * math.prod(shape),
        has_backward=False,
        large=large,
        timed_only=timed_only,
    )


CASES = (
    *(
        case
        for op in _BACKWARD
        for case in (
            _reduce(op, "long", _LONG, large=True, timed_only=True),
            _reduce(op, "odd_long", 2**24 + 77, large=True),
            _reduce(op, "matrix", 3, 256),
            _reduce(op, "odd_width", 5, 77),
            _reduce(op, "many_chunks", 41, 1003),
            _reduce(op, "scalar"),
            _reduce(op, "nothing", 0, 3),
        )
    ),
    _histogram("bins_256", 256, _LONG, large=True, timed_only=True),
    _histogram("bins_256_one_hot", 256, _LONG, low=7, high=8, large=True, timed_only=True),
    _histogram("bins_65536", 65536, _LONG, large=True, timed_only=True),
    _histogram("bins_65536_one_hot", 65536, _LONG, low=7, high=8, large=True, timed_only=True),
    _histogram("long_skewed", 256, 2**22 + 7, skew=4, large=True),
    _histogram("long_one_hot", 1000, 2**22 + 7, low=999, high=1000, large=True),
    _histogram("more_bins_than_a_block_holds", 65536, 2**22 + 7, large=True),
    _histogram("one_hot_in_many_bins", 65536, 2**22 + 7, low=65535, high=65536, large=True),
    _histogram("a_million_bins", 10**6, 2**22 + 7, low=-5, high=10**6 + 5, large=True),
    _histogram("matrix", 10, 3, 256),
    _histogram("out_of_range", 7, 5, 77, low=-3, high=12),
    _histogram("one_bin", 1, 100, high=2),
    _histogram("mostly_empty", 300, 41),
    _histogram("nothing", 5, 0),
)
