"""The two tiers of the tests: all of them, and fewer that cover them.

``pytest`` runs all tests (``make test-all``, ``make test-gpu``). ``pytest --covering``
(``make test``) leaves out:

- without a GPU, the tests that need one, which are skipped otherwise;
- the tests with the marker ``slow``: faster tests run the same code;
- of a test with the marker ``covering``, the parameter sets that cover nothing new. For example,
  ``covering(("case", "backend"), ("op", "backend", "dtype"))`` keeps parameter sets until each pair
  of a case and a backend has run, and each triple of an op, a backend and a dtype. ``op`` is the op
  of the parameter ``case`` or ``call``. ``kernel`` is the parameter ``backend``; a set under the
  backend ``xla``, which is the reference implementation, has none.

tests/ops/test_tiers.py checks that what is kept is a cover.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

Axes = tuple[str, ...]


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests that ``--covering`` leaves out on any machine.

    Parameter sets for a GPU cover nothing for the others, and are kept.
    """
    away, functions = [], collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow"):
            away.append(item)
        elif item.get_closest_marker("covering") and not item.get_closest_marker("gpu"):
            functions[item.path, getattr(item, "originalname", "")].append(item)
    for group in functions.values():
        marker = group[0].get_closest_marker("covering")
        kept = cover(marker.args, [item.callspec.params for item in group])
        away += [item for i, item in enumerate(group) if i not in kept]
    return away


def cover(each_axes: Sequence[Axes], sets: Sequence[Mapping[str, Any]]) -> set[int]:
    """The indices of parameter sets that have all combinations of values that ``sets`` have.

    Those with the most new combinations are taken first, so the dtypes are spread over the cases.
    """
    combinations = [
        {(axes, values) for axes in each_axes if (values := values_of(each, axes)) is not None}
        for each in sets
    ]
    kept, seen = set(), set()
    for new in range(len(each_axes), 0, -1):
        for i, some in enumerate(combinations):
            if len(some - seen) >= new:
                kept.add(i)
                seen |= some
    return kept


def values_of(parameters: Mapping[str, Any], axes: Axes) -> tuple[str, ...] | None:
    """The values of a parameter set along some axes, as texts: not all can be hashed.

    None where it has no ``kernel`` and that is one of the axes.
    """
    case = parameters.get("case", parameters.get("call"))
    backend = parameters.get("backend")
    if "kernel" in axes and backend == "xla":
        return None
    known = {"op": getattr(case, "op", None), "kernel": backend, **parameters}
    return tuple(str(known[axis]) for axis in axes)
