"""Learning rates over a run, by name, as optax and :mod:`jaxllm.training.optim` take them.

Each rises linearly over the warm-up, so that step ``warmup - 1`` has the peak, and goes from there
to a share of the peak, which step ``steps`` and all after it have.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike
from jaxtyping import Array, Float

Schedule = Callable[[ArrayLike], Float[Array, ""]]

# The share of the way from the peak (1) to the end (0), by the progress after the warm-up (0 to 1)
# and the share of it that has passed when wsd begins to fall.
_SHAPES: dict[str, Callable[[Array, float], Array]] = {
    "cosine": lambda progress, _: 0.5 * (1 + jnp.cos(jnp.pi * progress)),
    "linear": lambda progress, _: 1 - progress,
    "constant": lambda progress, _: jnp.ones_like(progress),
    # Warm-up, stable, decay: flat, then down as one minus a root.
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
    """A schedule by its name.

    Args:
        name: ``"cosine"``: down along half a cosine; ``"linear"``: down along a line;
            ``"constant"``: the peak to the end; ``"wsd"``: the peak, and for the last part of the
            run down as one minus a root.
        peak: The highest rate, a number or a traced scalar.
        steps: The length of the run.
        warmup: The steps of the rise.
        final_fraction: The last rate, as a share of the peak; without effect on ``"constant"``.
        decay_fraction: The last part of the run, as a share of all steps, in which ``"wsd"`` falls.

    Returns:
        A function from the step, counted from 0, to the rate.

    Raises:
        ValueError: The name is unknown, the warm-up is longer than the run, or a number is out of
            its range.

    Source: llm.c's ``schedulers.h``; Hägele et al., "Scaling Laws and Compute-Optimal Training
    Beyond Fixed Training Durations" (arXiv:2405.18392) for the root.
    """
    if name not in _SHAPES:
        raise ValueError(f"name is {name!r}; it must be one of {', '.join(NAMES)}")
    is_sound = isinstance(peak, Tracer) or 0 <= float(peak) < math.inf
    if not (is_sound and 0 <= warmup <= steps and 0 <= final_fraction <= 1):
        raise ValueError(
            f"peak {peak}, warmup {warmup}, steps {steps} and final_fraction {final_fraction} must "
            "have 0 <= peak < inf, 0 <= warmup <= steps and 0 <= final_fraction <= 1"
        )
    if not 0 < decay_fraction <= 1:
        raise ValueError(f"decay_fraction is {decay_fraction}; it must be above 0 and at most 1")
    after = max(steps - warmup, 1)
    stable = max(steps * (1 - decay_fraction) - warmup, 0) / after

    def schedule(step: ArrayLike) -> Float[Array, ""]:
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - warmup) / after, 0, 1)
        share = _SHAPES[name](progress, stable)
        falling = peak * (final_fraction + (1 - final_fraction) * share)
        return jnp.where(step < warmup, peak * (step + 1) / max(warmup, 1), falling)

    return schedule


def warmup_cosine(
    peak: float | Array, steps: int, *, warmup: int = 0, floor: float = 0.1
) -> Schedule:
    """:func:`make_schedule` of ``"cosine"``, falling to a share of the peak.

    Args:
        peak: The highest rate.
        steps: The length of the run.
        warmup: The steps of the rise.
        floor: The lowest rate after the rise, as a share of the peak.

    Raises:
        ValueError: As :func:`make_schedule` says.
    """
    return make_schedule("cosine", peak, steps, warmup=warmup, final_fraction=floor)
