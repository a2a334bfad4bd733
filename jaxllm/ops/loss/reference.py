r"""Losses in ``jax.numpy``: the reference implementations, with hand-written gradients.

For one row of logits :math:`z` over a vocabulary of :math:`V` columns with label :math:`y`,
:math:`lse = \log \sum_v e^{z_v}`, label smoothing :math:`\epsilon` and z-loss weight
:math:`\lambda`, cross entropy against the smoothed label is

.. math::
    loss = lse - (1 - \epsilon)\, z_y - \frac{\epsilon}{V} \sum_v z_v + \lambda\, lse^2

and :math:`\partial lse / \partial z_v = p_v = e^{z_v - lse}` gives

.. math::
    dz_v = dloss \left( (1 + 2 \lambda\, lse)\, p_v - (1 - \epsilon)\,[v = y]
           - \frac{\epsilon}{V} \right)

Ignored rows have loss zero and gradient zero; padding columns have gradient zero. A row with any
other label outside the vocabulary has loss NaN and gradient NaN. Arithmetic is float32 (float64 for
float64 logits).

The implementations take one ``ignore_index``: ``cross_entropy`` replaces all ignored labels by that
value.

Loss and gradient need the same inputs, so one pass computes both. If a loss is differentiated, its
forward overwrites the logits with ``dlogits`` for a known ``dloss``, and the backward multiplies
them by the actual one.

For an LM head, :math:`z = h W`, the chain rule adds two GEMMs. The second is a sum over rows, so
the rows can be processed in chunks:

.. math::
    dh = dz\, W^T \qquad dW = h^T dz
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jaxllm.ops.loss.labels import nan_outside


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _columns(logits: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)


def cross_entropy(
    logits,
    labels,
    *,
    ignore_index=None,
    label_smoothing=0.0,
    z_loss=0.0,
    vocab_size=None,
    reduction="mean",
):
    """``cross_entropy`` for JAX to differentiate, without a hand-written gradient."""
    if ignore_index is None:
        labels, ignore_index = jnp.maximum(labels.astype(jnp.int32), -1), -1
    losses = cross_entropy_forward(
        logits,
        labels,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        vocab_size=logits.shape[-1] if vocab_size is None else vocab_size,
    )
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / jnp.maximum(jnp.sum(labels != ignore_index), 1)


def cross_entropy_forward(logits, labels, *, ignore_index, label_smoothing, z_loss, vocab_size):
    """Returns ``losses``, one per row."""
    losses, _ = _losses_and_lse(logits, labels, label_smoothing, z_loss, vocab_size)
    # As a factor, so that JAX's derivative is NaN too.
    losses = losses * nan_outside(labels, ignore_index, vocab_size, losses.dtype)
    return jnp.where(labels == ignore_index, 0, losses)


def cross_entropy_with_gradient(
    logits, labels, scale, *, ignore_index, label_smoothing, z_loss, vocab_size
):
    """Returns ``losses`` and ``dlogits``, the gradient of ``scale * losses.sum()``."""
    losses, lse = _losses_and_lse(logits, labels, label_smoothing, z_loss, vocab_size)
    columns = _columns(logits)
    real = columns < vocab_size
    label = jnp.clip(labels, 0, vocab_size - 1)
    p = jnp.exp(jnp.where(real, _wide(logits) - lse[..., None], -jnp.inf))
    derivative = p * (1 + 2 * z_loss * lse[..., None])
    derivative = derivative - jnp.where(columns == label[..., None], 1 - label_smoothing, 0)
    derivative = derivative - label_smoothing / vocab_size
    ignored = labels == ignore_index
    factors = nan_outside(labels, ignore_index, vocab_size, losses.dtype)
    scales = jnp.where(ignored, 0, scale * factors)
    dlogits = jnp.where(real, derivative * scales[..., None], 0).astype(logits.dtype)
    return jnp.where(ignored, 0, losses * factors), dlogits


def cross_entropy_backward(dlogits, dloss):
    """Returns ``dlogits * dloss``, with one ``dloss`` or one per row."""
    return (_wide(dlogits) * dloss[..., None]).astype(dlogits.dtype)


def linear_cross_entropy(hidden, weight, labels, *, transpose_weight=False, **options):
    """``linear_cross_entropy`` for JAX to differentiate, without a hand-written gradient."""
    options = {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT}
    logits = jnp.dot(hidden, weight.T if transpose_weight else weight)
    return cross_entropy(logits, labels, **options)


# Options of linear_cross_entropy that do not change its value.
_WITHOUT_EFFECT = ("chunk_rows", "accumulate_dtype")


def _losses_and_lse(logits, labels, label_smoothing, z_loss, vocab_size):
    """The losses, also of ignored rows, and ``lse``."""
    real = _columns(logits) < vocab_size
    wide = jnp.where(real, _wide(logits), -jnp.inf)
    largest = lax.stop_gradient(wide.max(axis=-1))
    # Subtract the largest logit first: for logits near 1e4, float32 has their differences with
    # smaller errors than the difference of lse and a logit.
    wide = wide - largest[..., None]
    log_sum = jnp.log(jnp.exp(wide).sum(axis=-1))
    label = jnp.clip(labels, 0, vocab_size - 1)
    # From the original logits, so that XLA does not write the shifted ones to memory.
    target = _wide(jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]) - largest
    if label_smoothing:
        mean = jnp.where(real, wide, 0).sum(axis=-1) / vocab_size
        target = (1 - label_smoothing) * target + label_smoothing * mean
    losses = log_sum - target
    lse = largest + log_sum
    if z_loss:
        losses = losses + z_loss * lse * lse
    return losses, lse
