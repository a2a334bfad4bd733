"""NaN and infinity propagate on every backend as in the reference implementation.

Hardware maximum instructions ignore NaN, and so did kernels that used them.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_contract import FEW_CASES, implementations, op_under, parameters, program

from jaxllm import testing, training

# A query does not depend on masked keys. A kernel skips masked tiles, which the reference
# implementation multiplies by zero, so the kernel may be finite where the reference is NaN.
MASKED = (
    "flash_attention",
    "flash_attention_packed",
    "self_attention",
    "attention_block",
    "decode_attention",
    "decode_block",
)


def floating_inputs(inputs):
    """The indices of leaves that are floating-point and have elements."""
    leaves = enumerate(jax.tree.leaves(inputs))
    return [i for i, x in leaves if x.size and jnp.issubdtype(x.dtype, jnp.floating)]


# Only the cuda backend has separate kernels by dtype.
KERNELS = (("pallas", "float32"), ("cuda", "float32"), ("cuda", "bfloat16"))


def sweep(cases):
    return [
        parameters(case, dtype, backend)
        for case in cases
        for backend, dtype in KERNELS
        if backend in implementations(case)
        and (backend, dtype) not in case.inexact_under
        and floating_inputs(testing.input_types(case, dtype))
    ]


def with_element(inputs, leaf, change):
    """The inputs with one element of a leaf replaced by ``change(element)``."""
    leaves, tree = jax.tree.flatten(inputs)
    flat = np.array(leaves[leaf]).reshape(-1)
    index = 2 * flat.size // 3  # not the first token of a sequence, which only attends to itself
    flat[index] = change(flat[index])
    leaves[leaf] = jnp.asarray(flat.reshape(leaves[leaf].shape))
    return tree.unflatten(leaves)


def arrays_of(run, inputs):
    return [np.asarray(x) for x in jax.tree.leaves(run(inputs))]


def reference_on_cpu(run):
    """A program of the reference implementation, on the CPU."""

    def on_cpu(inputs):
        cpu = jax.devices("cpu")[0]
        with jax.default_device(cpu):
            return arrays_of(run, jax.tree.map(lambda x: jax.device_put(x, cpu), inputs))

    return on_cpu


def depends_on(run, inputs, leaf):
    """Masks of the output and gradient elements that depend on the element made NaN."""
    with jax.enable_x64(True):
        wide = training.cast(jax.tree.map(np.asarray, inputs), jnp.float64)
        before, after = run(wide), run(with_element(wide, leaf, lambda x: x + 1))
        return [a != b for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize(("case", "dtype", "backend"), sweep(FEW_CASES))
@pytest.mark.covering(("op", "backend", "dtype"))
def test_nan_propagates_as_in_the_reference(case, dtype, backend):
    inputs = testing.make_inputs(case, dtype)
    run = program(op_under(case, backend))
    reference = reference_on_cpu(program(op_under(case, "xla")))
    nans = 0
    for leaf in floating_inputs(inputs):
        poisoned = with_element(inputs, leaf, lambda _: np.nan)
        expected = reference(poisoned)
        must = [np.isnan(e) for e in map(widened, expected)]
        if case.op in MASKED:
            must = [m & d for m, d in zip(must, depends_on(reference, inputs, leaf), strict=True)]
        elif is_causal_softmax(case):
            # Kernels write 0 for masked elements, even if they are NaN.
            seen = reference(inputs)[0] > 0
            must = [m & seen for m in must]
        actual = arrays_of(run, poisoned)
        for i, (a, e, m) in enumerate(zip(actual, expected, must, strict=True)):
            # A kernel may sum bias gradients over tokens, or write zero for those of keys.
            may = np.ones_like(m) if case.op in MASKED else np.isnan(widened(e))
            assert_nan_pattern(a, e, m, may, what=f"{case}, input {leaf} is NaN, array {i}")
            nans += np.count_nonzero(m)
    assert nans or case.op == "nms", f"{case} has NaN nowhere: this checks nothing"


def is_causal_softmax(case):
    return case.op == "softmax" and case.static.get("causal", False)


def widened(x):
    return x.astype(np.float64)


def assert_nan_pattern(actual, expected, must, may, what):
    """Checks that NaN is where it ``must`` be, and only where it ``may`` be."""
    if not jnp.issubdtype(expected.dtype, jnp.floating):
        # Rounding to integers may be off by one; booleans must be equal.
        slack = 0 if expected.dtype == bool else 1
        difference = abs(widened(actual) - widened(expected))
        assert difference.size == 0 or difference.max() <= slack, what
        return
    found = np.isnan(widened(actual))
    lost, new = np.count_nonzero(must & ~found), np.count_nonzero(found & ~may)
    assert not lost, f"{what}: {lost} of {np.count_nonzero(must)} NaN are lost"
    assert not new, f"{what}: {new} NaN beside {np.count_nonzero(may)}"


@pytest.mark.parametrize(
    ("case", "dtype", "backend"),
    sweep(c for c in FEW_CASES if c.op not in MASKED and not is_causal_softmax(c)),
)
@pytest.mark.covering(("op", "backend", "dtype"))
def test_infinity_propagates_as_in_the_reference(case, dtype, backend):
    inputs = testing.make_inputs(case, dtype)
    fn, xla = jax.jit(op_under(case, backend)), jax.jit(op_under(case, "xla"))
    reference = reference_on_cpu(lambda inputs: xla(*inputs))
    for leaf, value in itertools.product(floating_inputs(inputs), (np.inf, -np.inf)):
        poisoned = with_element(inputs, leaf, lambda _, value=value: value)
        actual = [np.asarray(x) for x in jax.tree.leaves(fn(*poisoned))]
        expected = reference(poisoned)
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            what = f"{case}, input {leaf} is {value}, array {i}"
            np.testing.assert_array_equal(np.isfinite(widened(a)), np.isfinite(widened(e)), what)
