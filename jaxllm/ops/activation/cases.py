"""Shapes of activation calls: odd ones for tests, real ones for tests on a GPU and benchmarks."""

from __future__ import annotations

import math

from jaxllm.testing import Case, Normal


def _case(name: str, *shape: int, std: float = 1.0, large: bool = False) -> Case:
    size = math.prod(shape)
    # Forward: x in, out out. Backward: x and dout in, dx out.
    return Case(
        "gelu",
        name,
        {"x": Normal(shape, std=std)},
        forward_elements=2 * size,
        backward_elements=3 * size,
        large=large,
    )


CASES = (
    _case("gpt2_124m", 65536, 3072, large=True),
    _case("gpt2_1558m", 16384, 6400, large=True),
    _case("odd_size_large", 33554467, large=True),
    _case("gpt2_row", 2, 3, 3072),
    _case("odd_size", 3, 37),
    _case("saturated", 500, std=20.0),
    _case("one_element", 1),
    _case("scalar"),
    _case("no_elements", 0, 8),
)
