"""Reductions of whole arrays: empty arrays, NaN, accumulation, histograms and errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import ops
from jaxllm.core.backend import BackendError

BACKENDS = ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_arrays_reduce_to_the_identity(backend):
    nothing = jnp.zeros((3, 0), jnp.bfloat16)
    assert ops.reduce_sum(nothing, backend=backend) == 0
    assert ops.dot(nothing, nothing, backend=backend) == 0
    assert ops.reduce_max(nothing, backend=backend) == -jnp.inf


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("size", "index"), [(1000, 0), (1000, 999), (2**17, 5), (2**17, 99_999)])
def test_maximum_propagates_nan(backend, size, index):
    x = jax.random.normal(jax.random.key(0), (size,)).at[index].set(jnp.nan)
    assert jnp.isnan(ops.reduce_max(x, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_maximum_may_be_negative_or_infinite(backend):
    x = -1.0 - jnp.arange(777.0)
    assert ops.reduce_max(x, backend=backend) == -1
    assert ops.reduce_max(x.at[700].set(jnp.inf), backend=backend) == jnp.inf
    assert ops.reduce_max(jnp.full(9, -jnp.inf), backend=backend) == -jnp.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_maxima_share_the_gradient(backend):
    x = jnp.array([1.0, 3.0, 2.0, 3.0])
    dx = jax.grad(lambda x: ops.reduce_max(x, backend=backend))(x)
    assert dx.tolist() == [0, 0.5, 0, 0.5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_bfloat16_are_float32(backend):
    # In bfloat16 a sum of ones stops at 256.
    x = jnp.ones(3000, jnp.bfloat16)
    for total in (ops.reduce_sum(x, backend=backend), ops.dot(x, x, backend=backend)):
        assert total.dtype == jnp.float32
        assert total == 3000


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bins", [1, 2, 255, 256, 257, 4096])
def test_histogram_matches_numpy(backend, bins):
    x = jax.random.randint(jax.random.key(bins), (5000,), -bins, 2 * bins)
    inside = np.asarray(x)[(x >= 0) & (x < bins)]
    expected = np.bincount(inside, minlength=bins)
    np.testing.assert_array_equal(ops.histogram(x, bins=bins, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_integers_are_in_no_bin(backend):
    x = jnp.array([-(2**31), 2**31 - 1, -1, 300, 299, 0, 0])
    counts = ops.histogram(x, bins=300, backend=backend)
    assert counts[0] == 2 and counts[299] == 1 and counts.sum() == 3


def test_pallas_histogram_rejects_too_many_bins():
    with pytest.raises(BackendError, match="5000 bins; the kernel takes at most 4096"):
        ops.histogram(jnp.zeros(3, int), bins=5000, backend="pallas")


@pytest.mark.gpu
@pytest.mark.xdist_group("large 0")
def test_more_than_2_to_the_31_elements():
    size = 2**31 + 1000

    def runs(dtype, *lengths):  # no indexing, whose indices would be int64
        return jnp.concatenate([jnp.full(length, value, dtype) for value, length in lengths])

    x = runs(jnp.bfloat16, (0.5, size - 1), (3, 1))
    assert ops.reduce_max(x, backend="cuda") == 3
    assert ops.reduce_sum(x, backend="cuda") == pytest.approx(size / 2, rel=1e-6)
    assert ops.dot(x, x, backend="cuda") == pytest.approx(size / 4, rel=1e-6)
    del x
    numbers = runs(jnp.int32, (300, 2**30), (7, size - 2**30 - 1), (2, 1))
    counts = ops.histogram(numbers, bins=400, backend="cuda")
    expected = np.zeros(400, np.int64)
    expected[[2, 7, 300]] = 1, size - 2**30 - 1, 2**30
    np.testing.assert_array_equal(counts, expected)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.reduce_sum(jnp.ones(3, int)), TypeError, "x has dtype int32"),
        (lambda: ops.reduce_max(jnp.ones(3, bool)), TypeError, "x has dtype bool"),
        (lambda: ops.dot(jnp.ones(3), jnp.ones(4)), ValueError, r"b has shape \(4,\).*\(3,\)"),
        (lambda: ops.dot(jnp.ones(3), jnp.ones(3, jnp.bfloat16)), TypeError, "b has dtype bf"),
        (lambda: ops.histogram(jnp.ones(3), bins=4), TypeError, "x has dtype float32"),
        (lambda: ops.histogram(jnp.ones(3, int), bins=0), ValueError, "bins is 0"),
        (lambda: ops.histogram(jnp.ones(3, int), bins=2**31), ValueError, "bins is 2147483648"),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_histogram_may_have_more_bins_than_the_dtype_has_values(dtype):
    x = jnp.array([0, 3, 3, 127], dtype)
    counts = ops.histogram(x, bins=300)
    assert np.flatnonzero(counts).tolist() == [0, 3, 127]
    assert int(counts.sum()) == 4


def test_histogram_does_not_count_integers_beyond_int32():
    x: Any = np.array([2**32, -(2**32)])
    assert not ops.histogram(x, bins=3).any()
