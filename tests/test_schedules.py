import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm.training.schedules import NAMES, make_schedule, warmup_cosine


def rates(name, steps, **options):
    schedule = make_schedule(name, 2.0, 100, warmup=10, **options)
    return [float(schedule(step)) for step in steps]


@pytest.mark.parametrize("name", NAMES)
def test_warmup_reaches_the_peak(name):
    np.testing.assert_allclose(rates(name, (0, 4, 9, 10)), [0.2, 1.0, 2.0, 2.0], rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_schedule_ends_at_final_fraction_of_the_peak(name):
    last = 2.0 if name == "constant" else 0.5
    np.testing.assert_allclose(
        rates(name, (100, 500), final_fraction=0.25), [last, last], rtol=1e-6
    )


@pytest.mark.parametrize("name", NAMES)
def test_runs_may_have_more_steps_than_int32_counts(name):
    schedule = make_schedule(name, 2.0, 2**40, warmup=2**33)
    rates = [float(schedule(step)) for step in (2**31 - 1, 2.0**33, 2.0**40)]
    np.testing.assert_allclose(rates, [0.5, 2.0, 2.0 if name == "constant" else 0.0], rtol=1e-6)


def test_schedule_shapes():
    step, low, fall = 55, 0.2, 1.8  # the middle of the decay
    assert rates("constant", [step], final_fraction=0.1) == [2.0]
    np.testing.assert_allclose(rates("linear", [step], final_fraction=0.1), low + fall / 2)
    quarter = low + fall * (1 + math.cos(math.pi / 3)) / 2
    np.testing.assert_allclose(rates("cosine", [40], final_fraction=0.1), quarter, rtol=1e-6)
    # Constant until step 80. A quarter into the decay, 1 - sqrt has fallen by half.
    wsd = rates("wsd", (55, 80, 85, 100), final_fraction=0.1)
    np.testing.assert_allclose(wsd, [2.0, 2.0, low + fall / 2, low], rtol=1e-5)
    half = rates("wsd", (55, 62.5), final_fraction=0.0, decay_fraction=0.5)
    np.testing.assert_allclose(half, [2 - 2 * math.sqrt(0.1), 1.0], rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_peak_may_be_traced_under_strict_promotion(name):
    steps, peaks = jnp.array([3, 50, 95]), jnp.array([1.0, 2.0])

    def of_peak(peak):
        return make_schedule(name, peak, 100, warmup=10, final_fraction=0.1)(steps)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        found = jax.vmap(of_peak)(peaks)
    expected = rates(name, steps, final_fraction=0.1)
    np.testing.assert_allclose(found, np.multiply.outer([0.5, 1.0], expected), rtol=1e-6)


def test_cosine_and_linear_match_optax():
    steps = np.arange(0, 120)
    ours = rates("cosine", steps, final_fraction=0.1)
    cosine = optax.cosine_decay_schedule(2.0, 90, alpha=0.1)
    np.testing.assert_allclose(
        ours[10:], [np.asarray(cosine(s - 10)) for s in steps[10:]], rtol=1e-5
    )
    ours = rates("linear", steps, final_fraction=0.1)
    linear = optax.linear_schedule(2.0, 0.2, 90)
    np.testing.assert_allclose(
        ours[10:], [np.asarray(linear(s - 10)) for s in steps[10:]], rtol=1e-5
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup", [0, 100])
def test_warmup_of_zero_and_of_all_steps(name, warmup):
    schedule = make_schedule(name, 2.0, 100, warmup=warmup, final_fraction=0.5)
    values = [float(schedule(step)) for step in range(102)]
    assert np.isfinite(values).all()
    assert max(values) == 2.0
    assert values[0] == (2.0 if warmup == 0 else pytest.approx(0.02))
    assert values[100:] == [2.0 if name == "constant" else 1.0] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "square"}, "name is 'square'; it must be one of cosine, linear, constant, wsd"),
        ({"warmup": 11}, "must have"),
        ({"warmup": -1}, "must have"),
        ({"peak": -1.0}, "must have"),
        ({"final_fraction": 1.5}, "final_fraction 1.5"),
        ({"decay_fraction": 0}, "decay_fraction is 0"),
        ({"peak": 1e39}, r"peak is 1e\+39; it must be finite in float32"),
        ({"steps": math.inf}, "steps is inf; it must be finite"),
    ],
    ids=str,
)
def test_make_schedule_rejects_invalid_arguments(wrong, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(**{"name": "wsd", "peak": 1.0, "steps": 10, **wrong})


@pytest.mark.parametrize("name", ["peak", "steps", "warmup", "final_fraction", "decay_fraction"])
@pytest.mark.parametrize("value", ["1", None, [1.0]], ids=str)
def test_make_schedule_names_the_argument_that_is_not_a_number(name, value):
    with pytest.raises(TypeError, match=f"{name} is .*; it must be a number"):
        make_schedule(**{"name": "wsd", "peak": 1.0, "steps": 10, name: value})


def test_warmup_cosine_names_its_own_argument():
    wrong: Any = "low"
    with pytest.raises(TypeError, match="floor is 'low'; it must be a number"):
        warmup_cosine(1.0, 10, floor=wrong)
