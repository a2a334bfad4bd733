"""The tests that ``make test`` runs cover those that it leaves out."""

import inspect
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import test_contract
import tiers


def parameter_sets(function):
    """The parameter sets of a test that need no GPU, as pytest makes them from its marks."""
    lists = []
    for mark in function.pytestmark:
        if mark.name == "parametrize":
            names, values = mark.args
            names = (names,) if isinstance(names, str) else names
            sets = [x if hasattr(x, "marks") else pytest.param(x) for x in values]
            for_cpu = [x for x in sets if all(mark.name != "gpu" for mark in x.marks)]
            lists.append([dict(zip(names, x.values, strict=True)) for x in for_cpu])
    return [
        {name: value for part in parts for name, value in part.items()}
        for parts in itertools.product(*lists)
    ]


def kept(function):
    (mark,) = (mark for mark in function.pytestmark if mark.name == "covering")
    sets = parameter_sets(function)
    return [sets[i] for i in sorted(tiers.cover(mark.args, sets))]


def values(sets, *names):
    """The combinations of these values in some parameter sets; ``op`` is that of the case."""
    return {tuple(x["case"].op if name == "op" else str(x[name]) for name in names) for x in sets}


def test_every_case_and_dtype_of_the_contract_is_kept():
    function = test_contract.test_matches_reference
    every, some = parameter_sets(function), kept(function)
    for names in (("case",), ("op", "backend", "dtype")):
        assert values(some, *names) == values(every, *names)
    with_kernel = [[x for x in sets if x["backend"] != "xla"] for sets in (some, every)]
    assert values(with_kernel[0], "case") == values(with_kernel[1], "case")
    assert len(some) < len(every) / 2


@pytest.mark.parametrize(
    "function",
    [
        function
        for _, function in inspect.getmembers(test_contract, inspect.isfunction)
        if any(mark.name == "covering" for mark in getattr(function, "pytestmark", []))
    ],
    ids=lambda function: function.__name__,
)
def test_every_op_and_backend_of_the_contract_is_kept(function):
    every, some = parameter_sets(function), kept(function)
    for name in every[0]:
        if name != "case":
            assert values(some, "op", name) == values(every, "op", name)


def test_dtypes_are_spread_over_cases():
    sets = [{"case": case, "dtype": dtype} for case in "abcd" for dtype in "xyz"]
    found = [sets[i] for i in sorted(tiers.cover((("case",), ("dtype",)), sets))]
    assert ["".join(x.values()) for x in found] == ["ax", "by", "cz", "dx"]


def test_slow_tests_are_left_out_and_those_for_a_gpu_kept():
    def item(a, *marks) -> Any:
        markers = {name: SimpleNamespace(args=(("a",),)) for name in marks}
        callspec = SimpleNamespace(params={"a": a})
        return SimpleNamespace(path=a, get_closest_marker=markers.get, callspec=callspec)

    same = [item(1, "covering"), item(1, "covering"), item(1, "covering", "gpu")]
    others = [item(2, "covering"), item(1, "slow", "covering"), item(1)]
    assert tiers.left_out([*same, *others]) == [others[1], same[1]]
