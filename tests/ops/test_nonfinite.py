"""NaN in gives NaN out, and infinity what the definition makes of it, under every backend.

Hardware maxima pass over NaN, and so did kernels that were made with them.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_contract import FEW_CASES, implementations, op_under, parameters, program

from jaxllm import testing, training

# Here a query does not hang on all keys, and a kernel leaves out whole tiles that the definition
# multiplies by zero: it may be finite there.
MASKED = (
    "flash_attention",
    "flash_attention_packed",
    "self_attention",
    "pre_norm_self_attention",
    "decode_attention",
    "decode_block",
)


def floating_inputs(inputs):
    """The number of each leaf that is floating-point and has elements."""
    leaves = enumerate(jax.tree.leaves(inputs))
    return [i for i, x in leaves if x.size and jnp.issubdtype(x.dtype, jnp.floating)]


# The kernels of a dtype differ under cuda alone.
KERNELS = (("pallas", "float32"), ("cuda", "float32"), ("cuda", "bfloat16"))


def sweep(cases):
    return [
        parameters(case, dtype, backend)
        for case in cases
        for backend, dtype in KERNELS
        if backend in implementations(case)
        and (backend, dtype) not in case.inexact_under
        and floating_inputs(jax.eval_shape(functools.partial(testing.make_inputs, case, dtype)))
    ]


def with_element(inputs, leaf, change):
    """The inputs, with one element within a leaf replaced by ``change`` of it."""
    leaves, tree = jax.tree.flatten(inputs)
    flat = np.array(leaves[leaf]).reshape(-1)
    place = 2 * flat.size // 3  # not the first token of a sequence, which attends to itself alone
    flat[place] = change(flat[place])
    leaves[leaf] = jnp.asarray(flat.reshape(leaves[leaf].shape))
    return tree.unflatten(leaves)


def arrays_of(run, inputs):
    return [np.asarray(x) for x in jax.tree.leaves(run(inputs))]


def definition_of(case):
    """A function of inputs that runs the definition, forward and backward, on the CPU."""
    run = program(op_under(case, "xla"))

    def on_cpu(inputs):
        cpu = jax.devices("cpu")[0]
        with jax.default_device(cpu):
            return arrays_of(run, jax.tree.map(lambda x: jax.device_put(x, cpu), inputs))

    return on_cpu


def depends_on(case, inputs, leaf):
    """Which elements of outputs and gradients change with the element that is made NaN."""
    with jax.enable_x64(True):
        run = definition_of(case)
        wide = training.cast(jax.tree.map(np.asarray, inputs), jnp.float64)
        before, after = run(wide), run(with_element(wide, leaf, lambda x: x + 1))
        return [a != b for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize(("case", "dtype", "backend"), sweep(FEW_CASES))
def test_nan_comes_out_where_the_definition_has_it(case, dtype, backend):
    inputs = testing.make_inputs(case, dtype)
    run, definition = program(op_under(case, backend)), definition_of(case)
    nans = 0
    for leaf in floating_inputs(inputs):
        poisoned = with_element(inputs, leaf, lambda _: np.nan)
        expected = definition(poisoned)
        must = [np.isnan(e) for e in map(widened, expected)]
        if case.op in MASKED:
            must = [m & d for m, d in zip(must, depends_on(case, inputs, leaf), strict=True)]
        elif is_causal_softmax(case):
            seen = definition(inputs)[0] > 0  # what is masked is 0 for a kernel, NaN or not
            must = [m & seen for m in must]
        actual = arrays_of(run, poisoned)
        for i, (a, e, m) in enumerate(zip(actual, expected, must, strict=True)):
            # Attention's bias gradients may be sums over tokens, or made without those of keys.
            may = np.ones_like(m) if case.op in MASKED else np.isnan(widened(e))
            assert_alike(a, e, m, may, what=f"{case}, input {leaf} is NaN, array {i}")
            nans += np.count_nonzero(m)
    assert nans or case.op == "nms", f"{case} has NaN nowhere: this checks nothing"


def is_causal_softmax(case):
    return case.op == "softmax" and case.static.get("causal", False)


def widened(x):
    return x.astype(np.float64)


def assert_alike(actual, expected, must, may, what):
    """NaN wherever it must be, and nowhere that it may not be."""
    if not jnp.issubdtype(expected.dtype, jnp.floating):
        # Rounded to integers a number may be one off; but what NaN decides on is decided.
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
def test_infinity_gives_what_the_definition_makes_of_it(case, dtype, backend):
    inputs = testing.make_inputs(case, dtype)
    fn, definition = jax.jit(op_under(case, backend)), definition_of(case)
    for leaf, value in itertools.product(floating_inputs(inputs), (np.inf, -np.inf)):
        poisoned = with_element(inputs, leaf, lambda _, value=value: value)
        actual = [np.asarray(x) for x in jax.tree.leaves(fn(*poisoned))]
        expected = definition(poisoned)[: len(actual)]  # without the gradients
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            what = f"{case}, input {leaf} is {value}, array {i}"
            np.testing.assert_array_equal(np.isfinite(widened(a)), np.isfinite(widened(e)), what)
