"""Anomaly detection: skip outlier steps, halt on a step that is not finite.

The decision is made on the device, inside the jitted step, so no step waits for the host.

- A step whose loss or gradient norm is NaN or infinite halts the run, and so does one that rounds
  such an element to float8, or whose learning rate or weight decay is such by a schedule. That step
  and all later ones leave the parameters unchanged. The host reads ``halted_at`` one step later and
  finds the parameters as they were before the bad step.
- A step whose loss or gradient norm is an outlier is skipped, and the run continues. So is one in
  which float8 loses too large a share of the elements to zero.

The outlier test is a z-score over a window of the last 128 steps, the current step included::

    z = (x - mean) / standard_deviation

Source: llm.c's ``outlier_detector.h``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxllm import ops
from jaxllm.core import promotion
from jaxllm.core.precision import cast
from jaxllm.models.common import unstack
from jaxllm.ops.checks import as_number
from jaxllm.training.arguments import check_microbatches, compute_dtype_of

WINDOW = 128


class AnomalyState(NamedTuple):
    """The anomaly detector's state.

    Attributes:
        losses: Ring buffer of the losses of the last W finite steps.
        norms: Ring buffer of the gradient norms of the same steps.
        count: The number of finite steps so far, an int32 scalar.
        halted_at: The first step whose loss, norm, float8 operands or scheduled hyperparameters
            were not finite, counted from 1; 0 if there was none.
    """

    losses: Float[Array, " W"]
    norms: Float[Array, " W"]
    count: Int[Array, ""]
    halted_at: Int[Array, ""]


jax.export.register_namedtuple_serialization(AnomalyState, serialized_name="jaxllm.AnomalyState")


def init_anomaly_state() -> AnomalyState:
    """The detector's state before the first step."""
    # Four separate arrays: a training step donates each of them.
    return AnomalyState(
        jnp.zeros(WINDOW), jnp.zeros(WINDOW), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    )


def check_limits(
    *,
    max_loss_z: float | None = None,
    max_norm_z: float | None = None,
    max_underflow: float | None = None,
) -> None:
    """Checks the limits of :func:`detect_anomaly` that are not traced.

    Raises:
        TypeError: A limit is not a number.
        ValueError: A z-score is not above 0, or ``max_underflow`` is not from 0 to 1.
    """
    for name, limit in (("max_loss_z", max_loss_z), ("max_norm_z", max_norm_z)):
        number = None if limit is None else as_number(name, limit)
        if isinstance(number, float) and not number > 0:
            raise ValueError(f"{name} is {number}; it must be above 0, or None for no limit")
    share = None if max_underflow is None else as_number("max_underflow", max_underflow)
    if isinstance(share, float) and not 0 <= share <= 1:
        raise ValueError(
            f"max_underflow is {share}; it must be a share from 0 to 1, or None for no limit"
        )


@promotion.by_default
def detect_anomaly(
    state: AnomalyState,
    step: Int[Array, ""],
    loss: Float[Array, ""],
    norm: Float[Array, ""],
    *,
    max_loss_z: float | None = None,
    max_norm_z: float | None = None,
    float8_counts: ops.Float8Counts | None = None,
    max_underflow: float | None = None,
    hyperparameters: Sequence[ArrayLike] = (),
) -> tuple[AnomalyState, Bool[Array, ""], dict[str, Float[Array, ""]]]:
    """Decides whether a step may change the parameters.

    Args:
        state: The detector's state after the previous step.
        step: The number of the current step, counted from 1.
        loss: The loss of the current step.
        norm: The gradient norm of the current step.
        max_loss_z: Skip the step if the z-score of its loss is larger, above 0; None disables the
            test. No step is skipped before the window is full.
        max_norm_z: The same for the gradient norm.
        float8_counts: Those of the step: one with an overflow is not finite. None without float8.
        max_underflow: Skip the step if a larger share of the elements that it rounds to float8
            became zero, of inputs and weights or of gradients; None disables the test. Needs
            ``float8_counts``.
        hyperparameters: Scalars that schedules give for the step, such as the learning rate: a step
            with one that is not finite halts the run.

    Returns:
        ``(state, skip, metrics)``: the state for the next step; whether to leave the parameters
        unchanged; and float32 scalars to log. The metrics are ``loss_z`` and ``norm_z`` (NaN until
        the window is full), ``skipped`` (1 for an outlier, else 0) and ``halted_at``, as in
        :class:`AnomalyState`.

    Raises:
        TypeError: A limit is not a number.
        ValueError: A limit is out of range, or ``max_underflow`` is given without
            ``float8_counts``.
    """
    check_limits(max_loss_z=max_loss_z, max_norm_z=max_norm_z, max_underflow=max_underflow)
    if max_underflow is not None and float8_counts is None:
        raise ValueError(f"max_underflow is {max_underflow} and float8_counts None; it needs them")
    finite = jnp.isfinite(loss) & jnp.isfinite(norm) & (state.halted_at == 0)
    if float8_counts is not None:
        finite &= float8_counts.overflow.sum() == 0
    for value in hyperparameters:
        finite &= jnp.isfinite(value)
    slot, full = state.count % WINDOW, state.count >= WINDOW
    losses, norms = state.losses.at[slot].set(loss), state.norms.at[slot].set(norm)
    loss_z, norm_z = (
        jnp.where(full, z_score(window, x), jnp.nan)
        for window, x in ((losses, loss), (norms, norm))
    )
    outlier = jnp.zeros((), bool)
    for z, limit in ((loss_z, max_loss_z), (norm_z, max_norm_z)):
        if limit is not None:
            outlier |= z > limit
    if float8_counts is not None and max_underflow is not None:
        outlier |= float8_counts.underflow_share.max() > max_underflow
    halted_at = jnp.where((state.halted_at == 0) & ~finite, step, state.halted_at)
    metrics = {
        "loss_z": loss_z,
        "norm_z": norm_z,
        "skipped": (finite & outlier).astype(jnp.float32),
        "halted_at": halted_at.astype(jnp.float32),
    }
    updated = AnomalyState(
        jnp.where(finite, losses, state.losses),
        jnp.where(finite, norms, state.norms),
        state.count + finite,
        halted_at,
    )
    return updated, ~finite | outlier, metrics


def z_score(window: Float[Array, " W"], x: Float[Array, ""]) -> Float[Array, ""]:
    """``(x - mean) / standard_deviation`` over a window; 0 if all values of the window are equal.

    A standard deviation below 1e-6 of the mean is rounding error and counts as 0.
    """
    mean, deviation = jnp.mean(window), jnp.std(window)
    differ = deviation > 1e-6 * jnp.abs(mean)
    return jnp.where(differ, (x - mean) / deviation, 0.0)


def explain_halt(
    loss_fn: Callable[..., Float[Array, ""]],
    params: Any,
    tokens: ArrayLike,
    labels: ArrayLike,
    *more: ArrayLike,
    compute_dtype: DTypeLike | None = None,
) -> str:
    """Names the tensors that are not finite in the step at which a run halted.

    Args:
        loss_fn: As in :func:`jaxllm.training.make_train_step`.
        params: The parameters before that step. A halted :class:`~jaxllm.training.TrainState`
            still has them.
        tokens: The tokens of that step, (accumulate, B, T).
        labels: The labels of that step, (accumulate, B, T).
        *more: What else that step got.
        compute_dtype: As in :func:`jaxllm.training.make_train_step`.

    Returns:
        One line for each parameter that is not finite. Then, for each microbatch that is not
        finite, its loss and one line for each gradient that is not finite.

    Raises:
        TypeError: ``compute_dtype`` is as in :func:`jaxllm.training.make_train_step`.
        ValueError: The arrays differ in the number of microbatches.
    """
    dtype = compute_dtype_of(compute_dtype)
    arrays = [jnp.asarray(array) for array in (tokens, labels, *more)]
    check_microbatches(*arrays)
    lines = [f"parameter {fault}" for fault in nonfinite(params)]
    gradients = jax.jit(jax.value_and_grad(loss_fn))
    for i, microbatch in enumerate(zip(*arrays, strict=True)):
        loss, grads = gradients(cast(params, dtype), *microbatch)
        faults = [f"gradient of {fault}" for fault in nonfinite(grads)]
        if faults or not jnp.isfinite(loss):
            lines += [f"microbatch {i}: loss {float(loss)}", *faults]
    if not lines:
        lines = [
            "each microbatch is finite by itself: the sum or the norm of the gradients is not, or "
            "a float8 operand, or what a schedule gave"
        ]
    return "\n".join(lines)


def nonfinite(params: Any) -> list[str]:
    """Describes each array that has a NaN or an infinity.

    Args:
        params: A pytree of arrays. Stacked ``blocks`` are reported layer by layer.

    Returns:
        Lines such as ``"blocks/1/bias: 0 NaN and 1 infinite of 64"``.
    """
    if isinstance(params, dict) and isinstance(params.get("blocks"), dict):
        # A model of another library may have blocks that are not stacked.
        sizes = {jnp.shape(x)[:1] for x in jax.tree.leaves(params["blocks"])}
        params = unstack(params) if len(sizes) == 1 and () not in sizes else params
    counts = jax.jit(
        lambda tree: jax.tree.map(lambda x: (jnp.isnan(x).sum(), jnp.isinf(x).sum()), tree)
    )
    paths = jax.tree_util.tree_leaves_with_path(params)
    found = jax.tree.leaves(jax.device_get(counts(params)))
    return [
        f"{jax.tree_util.keystr(path, simple=True, separator='/')}: {nans} NaN and {infinities} "
        f"infinite of {jnp.size(x)}"
        for (path, x), nans, infinities in zip(paths, found[::2], found[1::2], strict=True)
        if nans or infinities
    ]
