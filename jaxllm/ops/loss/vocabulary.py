r"""Cross entropy where each device has the logits of a shard of the vocabulary.

A device has the columns of its shard of each row. One pass over them gives the largest logit m and
the sum s of exponentials relative to it (online softmax); one all-reduce of a few values per row
gives those of all shards:

.. math::
    m = \max_i m_i \qquad lse = m + \log \sum_i s_i\, e^{m_i - m}

The label's logit comes from the shard that has its column, and the sum of logits for label
smoothing is a sum over shards. The loss of a row is then the same on all of them. A second pass
overwrites the logits with their gradient; :mod:`jaxllm.ops.loss.reference` has its formula. XLA
compiles each pass to one kernel.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.core.backend import Backend, Call, record
from jaxllm.core.dispatch import describe
from jaxllm.core.sharding_rule import Shard
from jaxllm.ops.loss import lm_head
from jaxllm.ops.loss.labels import nan_outside


def recorded(
    stem: str, backend: Backend, arrays: tuple[Array, ...]
) -> contextlib.AbstractContextManager[None]:
    """Notes for :func:`jaxllm.explain` that no kernel computes what the functions here do."""
    reason = "a kernel needs the logits of the whole vocabulary, which is in shards"
    kernels = {"auto": ("cuda", "pallas"), "xla": ()}.get(backend, (backend,))

    def call() -> Call:
        shapes = " ".join(map(describe, arrays))
        return Call(stem, shapes, "xla", "xla", tuple((name, reason) for name in kernels))

    return record(call, f"{stem}[xla]")


def cross_entropy(logits: Array, labels: Array, shard: Shard, **options: Any) -> Array:
    """Returns ``losses``, one per row."""
    return _losses(_statistics(logits, labels, shard, **options), labels, **options)


def cross_entropy_with_gradient(
    logits: Array, labels: Array, scale: Array, shard: Shard, **options: Any
) -> tuple[Array, Array]:
    """Returns ``losses`` and ``dlogits``, the gradient of ``scale * losses.sum()``."""
    found = _statistics(logits, labels, shard, **options)
    losses = _losses(found, labels, **options)
    return losses, _gradient(found, logits, labels, scale, **options)


def linear_cross_entropy_with_gradients(
    hidden: Array,
    weight: Array,
    labels: Array,
    scale: Array,
    shard: Shard,
    transpose_weight: bool,
    accumulate_dtype: Any,
    **options: Any,
) -> tuple[Array, Array, Array]:
    """Returns ``(losses, dhidden, dweight)``; ``dhidden`` is a term of a sum over shards."""
    # The barriers keep both passes out of the GEMMs, which read the logits more than once.
    logits = lax.optimization_barrier(lm_head.logits(hidden, weight, transpose_weight))
    losses, dlogits = cross_entropy_with_gradient(logits, labels, scale, shard, **options)
    dlogits = lax.optimization_barrier(dlogits)
    dhidden = lm_head.dgrad(dlogits, weight, transpose_weight)
    return losses, dhidden, lm_head.wgrad(hidden, dlogits, transpose_weight, accumulate_dtype)


class _Statistics(NamedTuple):
    """Of each row of logits over the whole vocabulary, and the columns of this shard."""

    largest: Array
    total: Array  # of exponentials, relative to the largest logit
    target: Array  # the label's logit
    mean: Array | None  # of the logits, for label smoothing
    columns: Array
    is_padded: bool


def _statistics(
    logits: Array,
    labels: Array,
    shard: Shard,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    vocab_size: int,
) -> _Statistics:
    del ignore_index, z_loss
    width = logits.shape[-1]
    first = shard.index("V") * width
    columns = first + lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    is_padded = vocab_size < width * shard.count("V")
    of_shard = _reduce(_wide(logits), columns < vocab_size if is_padded else None, label_smoothing)
    label = jnp.clip(labels, 0, vocab_size - 1) - first
    nearest = jnp.clip(label, 0, width - 1)[..., None]
    target = _wide(jnp.take_along_axis(logits, nearest, axis=-1)[..., 0])
    is_here = (label >= 0) & (label < width)
    of_shard = jnp.stack([jnp.where(is_here, target, 0), *of_shard])
    targets, largests, totals, *sums = jnp.moveaxis(shard.of_each(of_shard, "V"), 1, 0)
    largest = largests.max(axis=0)
    total = (totals * jnp.exp(largests - largest)).sum(axis=0)
    mean = sums[0].sum(axis=0) / vocab_size if sums else None
    return _Statistics(largest, total, targets.sum(axis=0), mean, columns, is_padded)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _reduce(logits: Array, is_real: Array | None, label_smoothing: float) -> tuple[Array, ...]:
    """The largest logit of each row, the sum of exponentials, and with smoothing of logits."""
    zero = jnp.zeros((), logits.dtype)
    lowest = jnp.asarray(jnp.finfo(logits.dtype).min, logits.dtype)  # finite: no difference is NaN
    largest, totals, sums = jnp.maximum(logits, lowest), jnp.ones_like(logits), logits
    if is_real is not None:
        largest = jnp.where(is_real, largest, lowest)
        totals, sums = (jnp.where(is_real, x, 0) for x in (totals, sums))
    operands, start = (largest, totals), (lowest, zero)
    if label_smoothing:
        operands, start = (*operands, sums), (*start, zero)

    def add(a: tuple[Array, ...], b: tuple[Array, ...]) -> tuple[Array, ...]:
        (m1, s1, *sums1), (m2, s2, *sums2) = a, b
        decay = jnp.exp(-jnp.abs(m1 - m2))
        total = jnp.where(m1 >= m2, s1 + s2 * decay, s1 * decay + s2)
        return (jnp.maximum(m1, m2), total, *(x + y for x, y in zip(sums1, sums2, strict=True)))

    return tuple(lax.reduce(operands, start, add, (logits.ndim - 1,)))


@_reduce.defjvp
def _reduce_jvp(label_smoothing: float, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    """The derivative of the same in several passes; JAX has none of a reduction of tuples."""
    logits, is_real = primals

    def reduce(logits: Array) -> tuple[Array, ...]:
        real = logits if is_real is None else jnp.where(is_real, logits, -jnp.inf)
        lowest = jnp.finfo(logits.dtype).min
        largest = lax.stop_gradient(jnp.maximum(real.max(axis=-1), lowest))
        found = (largest, jnp.exp(real - largest[..., None]).sum(axis=-1))
        if label_smoothing:
            found += (logits.sum(axis=-1, where=is_real),)
        return found

    return jax.jvp(reduce, (logits,), tangents[:1])


def _losses(
    found: _Statistics,
    labels: Array,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    vocab_size: int,
) -> Array:
    log_sum = jnp.log(found.total)
    target = found.target - found.largest
    if found.mean is not None:
        mean = found.mean - found.largest
        target = (1 - label_smoothing) * target + label_smoothing * mean
    losses = log_sum - target
    if z_loss:
        losses = losses + z_loss * jnp.square(found.largest + log_sum)
    losses = losses * nan_outside(labels, ignore_index, vocab_size, losses.dtype)
    return jnp.where(labels == ignore_index, 0, losses)


def _gradient(
    found: _Statistics,
    logits: Array,
    labels: Array,
    scale: Array,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    vocab_size: int,
) -> Array:
    scales = scale * nan_outside(labels, ignore_index, vocab_size, found.total.dtype)
    scales = jnp.where(labels == ignore_index, 0, scales)
    lse = found.largest + jnp.log(found.total)
    of_exponential = scales * (1 + 2 * z_loss * lse) / found.total
    label = jnp.clip(labels, 0, vocab_size - 1)[..., None]
    derivative = jnp.exp(_wide(logits) - found.largest[..., None]) * of_exponential[..., None]
    at_label = (-scales * (1 - label_smoothing))[..., None]
    derivative += jnp.where(found.columns == label, at_label, 0)
    if label_smoothing:
        derivative -= (scales * label_smoothing / vocab_size)[..., None]
    if found.is_padded:
        derivative = jnp.where(found.columns < vocab_size, derivative, 0)
    return derivative.astype(logits.dtype)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
