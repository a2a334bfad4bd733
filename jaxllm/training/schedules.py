"""Learning rate schedules by name, for optax and :mod:`jaxllm.training.optim`.

Each schedule rises linearly to the peak, which it reaches at step ``warmup - 1``. It then falls to
``final_fraction * peak`` at step ``steps``, and stays there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxllm.ops.checks import as_finite_number, as_float, as_number

Schedule = Callable[[ArrayLike], Float[Array, ""]]

# shape(progress, stable): 1 at the peak, 0 at the end. `progress` goes from 0 to 1 after the
# warm-up; `stable` is the progress at which wsd begins to decay.
_SHAPES: dict[str, Callable[[Array, float], Array]] = {
    "cosine": lambda progress, _: 0.5 * (1 + jnp.cos(jnp.pi * progress)),
    "linear": lambda progress, _: 1 - progress,
    "constant": lambda progress, _: jnp.ones_like(progress),
    # Warmup-stable-decay: constant, then 1 - sqrt.
    "wsd": lambda progress, stable: (
        1 - jnp.sqrt(jnp.clip((progress - stable) / max(1 - stable, 1e-9), 0, 1))
    ),
}
NAMES = tuple(_SHAPES)


def make_schedule(
    name: str,
    peak: float | Array,
    steps: int,
    *,
    warmup: int = 0,
    final_fraction: float = 0.0,
    decay_fraction: float = 0.2,
) -> Schedule:
    """Makes a schedule by name.

    Args:
        name: The shape after the warm-up. ``"cosine"``: half a cosine. ``"linear"``: a line.
            ``"constant"``: the peak until the end. ``"wsd"``: the peak, and then 1 - sqrt over the
            last ``decay_fraction`` of the run.
        peak: The highest rate, a number or a traced scalar.
        steps: The number of steps in the run.
        warmup: The number of steps in the warm-up.
        final_fraction: The final rate as a share of the peak. Not used by ``"constant"``.
        decay_fraction: The share of the steps over which ``"wsd"`` decays.

    Returns:
        A function from the step, counted from 0, to the rate.

    Raises:
        TypeError: An argument but the name is not a number.
        ValueError: The name is unknown, the warm-up is longer than the run, or a number is out of
            range.

    Source: llm.c's ``schedulers.h``. The 1 - sqrt decay is from Hägele et al., "Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations" (arXiv:2405.18392).
    """
    if name not in _SHAPES:
        raise ValueError(f"name is {name!r}; it must be one of {', '.join(NAMES)}")
    highest = as_number("peak", peak)
    numbers = {
        "steps": steps,
        "warmup": warmup,
        "final_fraction": final_fraction,
        "decay_fraction": decay_fraction,
    }
    for argument, value in numbers.items():
        as_float(argument, value)
    is_sound = isinstance(highest, Tracer) or 0 <= highest < math.inf
    if not (is_sound and 0 <= warmup <= steps and 0 <= final_fraction <= 1):
        raise ValueError(
            f"peak {peak}, warmup {warmup}, steps {steps} and final_fraction {final_fraction} must "
            "have 0 <= peak < inf, 0 <= warmup <= steps and 0 <= final_fraction <= 1"
        )
    if not 0 < decay_fraction <= 1:
        raise ValueError(f"decay_fraction is {decay_fraction}; it must be above 0 and at most 1")
    for argument, value in {"peak": highest, **numbers}.items():
        as_finite_number(argument, value)
    # Integers beyond int32 would overflow in a comparison with an array.
    last, warm = float(steps), float(warmup)
    after = max(last - warm, 1)
    stable = max(last * (1 - decay_fraction) - warm, 0) / after

    def schedule(step: ArrayLike) -> Float[Array, ""]:
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - warm) / after, 0, 1)
        progress = jnp.where(step >= last, 1.0, progress)  # even if warmup is steps
        share = _SHAPES[name](progress, stable)
        falling = peak * (final_fraction + (1 - final_fraction) * share)
        return jnp.where(step < warm, peak * (step + 1) / max(warm, 1), falling)

    return schedule


def warmup_cosine(
    peak: float | Array, steps: int, *, warmup: int = 0, floor: float = 0.1
) -> Schedule:
    """A linear warm-up and a cosine decay, :func:`make_schedule` with ``"cosine"``.

    Args:
        peak: The highest rate.
        steps: The number of steps in the run.
        warmup: The number of steps in the warm-up.
        floor: The final rate as a share of the peak.

    Returns:
        A function from the step, counted from 0, to the rate.

    Raises:
        TypeError: As in :func:`make_schedule`.
        ValueError: As in :func:`make_schedule`.
    """
    as_float("floor", floor)
    return make_schedule("cosine", peak, steps, warmup=warmup, final_fraction=floor)
