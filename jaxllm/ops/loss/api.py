"""The loss of a language model."""

from __future__ import annotations

import functools
from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from jaxllm.backend import Backend, resolve
from jaxllm.dispatch import Op, dispatch
from jaxllm.ops.checks import check_floating, check_integer, check_shape
from jaxllm.ops.loss import reference

CROSS_ENTROPY = Op("cross_entropy", reference=reference)

Reduction = Literal["mean", "sum", "none"]


def cross_entropy(
    logits: Float[Array, "*rows V"],
    labels: Integer[Array, "*rows"],
    *,
    ignore_index: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    reduction: Reduction = "mean",
    backend: Backend | None = None,
) -> Float[Array, ""] | Float[Array, "*rows"]:
    r"""Cross entropy of the softmax of each row of logits against a label.

    With :math:`lse = \log \sum_v e^{z_v}` over the V' = ``vocab_size`` columns of a row, label
    smoothing :math:`\epsilon` and z-loss weight :math:`\lambda`

    .. math::
        loss = lse - (1 - \epsilon)\, z_{label} - \frac{\epsilon}{V'} \sum_v z_v + \lambda\, lse^2

    A row whose label is ``ignore_index`` has loss zero and gradient zero, and does not count in
    the mean. Any other label outside ``0 <= label < vocab_size`` counts as the nearest column:
    0 if it is negative, ``vocab_size - 1`` if it is too large.

    Args:
        logits: The rows; float32, bfloat16 or float16 for the kernels. Finite logits of any size
            give a finite loss.
        labels: A column for each row; used as int32.
        ignore_index: The label of the rows to leave out; may lie inside or outside the vocabulary.
        label_smoothing: The share of the target that is spread over all columns, from 0 to 1.
        z_loss: The weight of the squared ``lse``, which keeps logits from drifting.
        vocab_size: How many columns are real; those from there on are padding, left out of the
            softmax, with gradient zero. None for all.
        reduction: ``"mean"`` over the rows that count (zero if none does), ``"sum"``, or
            ``"none"`` for the loss of each row.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The loss in float32: a scalar, or one a row where ``reduction`` is ``"none"``.

    Raises:
        TypeError: ``logits`` is not floating-point or ``labels`` not of an integer dtype.
        ValueError: ``labels`` is not shaped as the rows of ``logits``, an option is out of its
            range, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``fused_classifier``; Szegedy et al., "Rethinking the Inception Architecture
    for Computer Vision" (arXiv:1512.00567) for label smoothing; Chowdhery et al., "PaLM"
    (arXiv:2204.02311) for the z-loss.

    Example:
        >>> logits = jnp.zeros((2, 50304), jnp.bfloat16)
        >>> loss = jaxllm.ops.cross_entropy(logits, jnp.array([3, -1]), vocab_size=50257)
    """
    check_floating(logits=logits)
    check_integer(labels=labels)
    if logits.ndim == 0:
        raise ValueError("logits has shape (); it must have a last axis, the vocabulary")
    check_shape("labels", labels, logits.shape[:-1], f"the rows of logits {logits.shape}")
    width = logits.shape[-1]
    vocab_size = width if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= width:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be from 1 to {width}, the columns of logits "
            f"{logits.shape}"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be from 0 to 1")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it must be one of mean, sum, none")
    labels = labels.astype(jnp.int32)
    options = (ignore_index, label_smoothing, z_loss, vocab_size)
    losses = cast(Array, _cross_entropy(logits, labels, options, resolve(backend)))
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / jnp.maximum(jnp.sum(labels != ignore_index), 1)


def _static(options: tuple) -> dict[str, int | float]:
    names = ("ignore_index", "label_smoothing", "z_loss", "vocab_size")
    return dict(zip(names, options, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _cross_entropy(logits, labels, options, backend):
    return _cross_entropy_forward(logits, labels, options, backend)[0]


def _cross_entropy_forward(logits, labels, options, backend):
    outputs = dispatch(CROSS_ENTROPY, "forward", backend, logits, labels, **_static(options))
    losses, lse = checkpoint_name(outputs, "cross_entropy")
    return losses, (logits, labels, lse)


def _cross_entropy_backward(options, backend, residuals, dlosses):
    arrays = (*residuals, dlosses)
    return dispatch(CROSS_ENTROPY, "backward", backend, *arrays, **_static(options)), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)
