"""What keeps bad steps out of a run, decided on the device: no step waits for the host.

A step whose loss or gradient norm is not finite halts the run: neither it nor any step after it
changes the parameters, so that the host, which learns of it a step later, finds them as they were.
A step whose loss or gradient norm is far above those before it is skipped, and the run goes on.

How far is told by the z-score, the distance from the mean in standard deviations, among the last
128 steps, this one included::

    z = (x - mean) / deviation

Source: llm.c's ``outlier_detector.h``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxllm.core import promotion
from jaxllm.core.precision import cast, default_compute_dtype
from jaxllm.models.blocks import unstack

WINDOW = 128


class Guard(NamedTuple):
    """What the guard remembers.

    Attributes:
        losses: The losses of the last steps; step i is at place i modulo the window.
        norms: Likewise the norms of the gradients.
        count: The finite steps so far.
        halted_at: The number of the first step whose loss or norm was not finite, counted from 1; 0
            while there is none.
    """

    losses: Float[Array, " W"]
    norms: Float[Array, " W"]
    count: Int[Array, ""]
    halted_at: Int[Array, ""]


jax.export.register_namedtuple_serialization(Guard, serialized_name="jaxllm.Guard")


def new_guard() -> Guard:
    """The guard before the first step."""
    # Arrays of their own, for a step that donates them all.
    return Guard(
        jnp.zeros(WINDOW), jnp.zeros(WINDOW), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    )


@promotion.by_default
def judge(
    guard: Guard,
    step: Int[Array, ""],
    loss: Float[Array, ""],
    norm: Float[Array, ""],
    *,
    max_loss_z: float | None = None,
    max_norm_z: float | None = None,
) -> tuple[Guard, Bool[Array, ""], dict[str, Float[Array, ""]]]:
    """Decides whether a step may change the parameters.

    Args:
        guard: What there is from the steps before.
        step: The number of this one, counted from 1.
        loss: Its loss.
        norm: The norm of its gradients.
        max_loss_z: Skip a step whose loss has a larger z-score; None for none. No step is skipped
            before the window is full.
        max_norm_z: Likewise for the norm.

    Returns:
        ``(guard, skip, metrics)``: the guard for the next step, whether to leave the parameters as
        they are, and float32 scalars to log: ``loss_z`` and ``norm_z``, NaN until the window is
        full; ``skipped``, 1 where they were too large; and ``halted_at``, as in :class:`Guard`.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(norm) & (guard.halted_at == 0)
    place, full = guard.count % WINDOW, guard.count >= WINDOW
    losses, norms = guard.losses.at[place].set(loss), guard.norms.at[place].set(norm)
    loss_z, norm_z = (
        jnp.where(full, z_score(window, x), jnp.nan)
        for window, x in ((losses, loss), (norms, norm))
    )
    outlier = jnp.zeros((), bool)
    for z, limit in ((loss_z, max_loss_z), (norm_z, max_norm_z)):
        if limit is not None:
            outlier |= z > limit
    halted_at = jnp.where((guard.halted_at == 0) & ~finite, step, guard.halted_at)
    metrics = {
        "loss_z": loss_z,
        "norm_z": norm_z,
        "skipped": (finite & outlier).astype(jnp.float32),
        "halted_at": halted_at.astype(jnp.float32),
    }
    updated = Guard(
        jnp.where(finite, losses, guard.losses),
        jnp.where(finite, norms, guard.norms),
        guard.count + finite,
        halted_at,
    )
    return updated, ~finite | outlier, metrics


def z_score(window: Float[Array, " W"], x: Float[Array, ""]) -> Float[Array, ""]:
    """How many standard deviations a value is above the mean of a window; 0 if all are equal."""
    mean, deviation = jnp.mean(window), jnp.std(window)
    differ = deviation > 1e-6 * jnp.abs(mean)  # by more than the rounding of a mean
    return jnp.where(differ, (x - mean) / deviation, 0.0)


def explain_halt(
    loss_fn: Callable[..., Float[Array, ""]],
    params: Any,
    tokens: ArrayLike,
    labels: ArrayLike,
    *,
    compute_dtype: DTypeLike | None = None,
) -> str:
    """What is not finite in the step at which a guarded run halted.

    Args:
        loss_fn: As in :func:`jaxllm.training.make_train_step`.
        params: The parameters that the step found, which a guarded state still has.
        tokens: The step's, of shape (accumulate, B, T).
        labels: Likewise.
        compute_dtype: As in :func:`jaxllm.training.make_train_step`.

    Returns:
        Lines that name each parameter that is not finite, and of each microbatch that is not finite
        the loss and each parameter whose gradient is not.
    """
    dtype = jnp.dtype(compute_dtype or default_compute_dtype())
    lines = [f"parameter {fault}" for fault in nonfinite(params)]
    gradients = jax.jit(jax.value_and_grad(loss_fn))
    for i, microbatch in enumerate(zip(jnp.asarray(tokens), jnp.asarray(labels), strict=True)):
        loss, grads = gradients(cast(params, dtype), *microbatch)
        faults = [f"gradient of {fault}" for fault in nonfinite(grads)]
        if faults or not jnp.isfinite(loss):
            lines += [f"microbatch {i}: loss {float(loss)}", *faults]
    if not lines:
        lines = ["each microbatch is finite by itself: the sum or the norm of the gradients is not"]
    return "\n".join(lines)


def nonfinite(params: Any) -> list[str]:
    """The arrays that hold a NaN or an infinity, and how many; layers counted one by one."""
    if isinstance(params, dict) and isinstance(params.get("blocks"), dict):
        params = unstack(params)
    counts = jax.jit(
        lambda tree: jax.tree.map(lambda x: (jnp.isnan(x).sum(), jnp.isinf(x).sum()), tree)
    )
    paths = jax.tree_util.tree_leaves_with_path(params)
    found = jax.tree.leaves(jax.device_get(counts(params)))
    return [
        f"{jax.tree_util.keystr(path, simple=True, separator='/')}: {nans} NaN and {infinities} "
        f"infinite of {x.size}"
        for (path, x), nans, infinities in zip(paths, found[::2], found[1::2], strict=True)
        if nans or infinities
    ]
