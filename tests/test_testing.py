"""The error that the tests of ops compare by."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import testing

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("actual", "expected", "found"),
    [
        ([1.0, INF, -INF, NAN], [1.0, INF, -INF, NAN], 0),
        ([1.0, INF], [1.0, -INF], INF),
        ([1.0, NAN], [1.0, INF], INF),
        ([1.0, 2.0], [1.0, NAN], INF),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0], [[1.0]], INF),
        ([0.0, 0.5], [0.0, 0.0], 0.5),
        ([], [], 0),
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_numbers_that_are_not_finite_must_be_the_same(actual, expected, found, large, monkeypatch):
    monkeypatch.setattr(testing, "_LARGE", 0 if large else 100)
    assert testing.error(jnp.asarray(actual, jnp.bfloat16), np.asarray(expected)) == found


def test_integers_and_bools_are_compared():
    assert testing.error(np.array([1, 4]), np.array([1, 2])) == 1
    assert testing.error(np.array([True, False]), np.array([True, False])) == 0
