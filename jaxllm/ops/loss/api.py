"""Cross entropy of logits, and what it has in common with that of an LM head."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from jaxllm.core import promotion
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.sharding_rule import Shard, ShardingRule
from jaxllm.ops.checks import (
    as_finite,
    as_float,
    as_integer,
    check_floating,
)
from jaxllm.ops.loss import cuda, pallas, reference, vocabulary
from jaxllm.ops.loss.labels import check_labels, normalize_labels

Reduction = Literal["mean", "sum", "none"]


CROSS_ENTROPY = Op("cross_entropy", reference=reference, pallas=pallas, cuda=cuda)
CROSS_ENTROPY_WITH_GRADIENT = Op(
    "cross_entropy_with_gradient", reference=reference, pallas=pallas, cuda=cuda
)


def cross_entropy(
    logits: Float[Array, "*rows V"],
    labels: Integer[Array, "*rows"],
    *,
    ignore_index: int | None = None,
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

    An ignored row has loss zero and gradient zero (NaN where its logits have NaN or +inf), and does
    not count in the mean. By default every negative label is ignored: -1, and the -100 of torch and
    Hugging Face. An ``ignore_index`` is the only ignored label, as in torch. Any other label
    outside ``0 <= label < vocab_size`` makes the loss and the gradient of its row NaN, and trains
    no other column. With ``jax.debug_nans(True)`` such a label is an error that names the label;
    inside a loop or ``jax.vmap`` it is JAX's own error.

    Args:
        logits: The rows; float32, bfloat16 or float16 for the kernels. If the loss is
            differentiated, its forward pass overwrites the logits with their gradient; XLA copies
            them first if they are still used. Logits up to 1e38 give a finite loss.
        labels: One column index per row, of any integer dtype.
        ignore_index: The label of the rows to ignore, inside or outside the vocabulary, greater
            than the smallest and less than the largest int32; None for every negative label.
        label_smoothing: The share of the target that is spread over all columns, from 0 to 1.
        z_loss: The weight of the squared ``lse``, which keeps logits from drifting; finite.
        vocab_size: The number of real columns; columns from there on are padding, excluded from
            the softmax, with gradient zero. None for all.
        reduction: ``"mean"`` over the rows that are not ignored (zero if all are), ``"sum"``, or
            ``"none"`` for the loss of each row.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The loss in float32: a scalar, or one per row where ``reduction`` is ``"none"``.

    Raises:
        TypeError: ``logits`` is not floating-point, ``labels`` not of an integer dtype, or an
            option no number that is known while the program is traced.
        ValueError: ``labels`` is not one per row of ``logits``, an option is out of its range, the
            backend is unknown, or a label is outside the vocabulary and not ignored while
            ``jax_debug_nans`` is set.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``fused_classifier``; Szegedy et al., "Rethinking the Inception Architecture
    for Computer Vision" (arXiv:1512.00567) for label smoothing; Chowdhery et al., "PaLM"
    (arXiv:2204.02311) for the z-loss.

    Example:
        >>> logits = jnp.zeros((2, 50304), jnp.bfloat16)
        >>> loss = jaxllm.ops.cross_entropy(logits, jnp.array([3, -1]), vocab_size=50257)
    """
    check_floating(logits=logits)
    if logits.ndim == 0:
        raise ValueError("logits has shape (); it must have a last axis, the vocabulary")
    check_labels(labels, "logits", logits)
    vocab_size = check_options(
        logits.shape[-1], f"logits {logits.shape}", label_smoothing, vocab_size
    )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it must be one of mean, sum, none")
    logits = jnp.asarray(logits)  # NumPy's too, in the dtype that JAX has for it
    labels, ignore_index = normalize_labels(labels, ignore_index, vocab_size)
    options = make_options(reduction, ignore_index, label_smoothing, z_loss, vocab_size)
    factor = make_factor(labels, logits.dtype, options)
    return _cross_entropy(logits, labels, factor, backend=resolve(backend), options=options)


def check_options(width: int, what: str, label_smoothing: float, vocab_size: int | None) -> int:
    """Checks the options of both losses; returns ``vocab_size``, which None sets to the width."""
    vocab_size = width if vocab_size is None else as_integer("vocab_size", vocab_size)
    if not 1 <= vocab_size <= width:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be from 1 to {width}, the columns of {what}"
        )
    if not 0 <= as_float("label_smoothing", label_smoothing) <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be from 0 to 1")
    return vocab_size


@dataclasses.dataclass(frozen=True)
class LossOptions:
    """The static options of both losses."""

    reduction: Reduction
    ignore_index: int
    label_smoothing: float
    z_loss: float
    vocab_size: int
    shard: Shard | None = None  # where the vocabulary is in shards: the one to compute

    @property
    def of_rows(self) -> dict[str, Any]:
        """The options of the implementations, which return one loss per row."""
        names = ("ignore_index", "label_smoothing", "z_loss", "vocab_size")
        return {name: getattr(self, name) for name in names}


def make_options(
    reduction: Reduction, ignore_index: int, label_smoothing: float, z_loss: float, vocab_size: int
) -> LossOptions:
    """The options, with Python numbers."""
    return LossOptions(
        reduction,
        as_integer("ignore_index", ignore_index),
        as_float("label_smoothing", label_smoothing),
        as_finite("z_loss", z_loss),
        as_integer("vocab_size", vocab_size),
    )


@promotion.by_default
def make_factor(labels: Array, dtype: DTypeLike, options: LossOptions) -> Array:
    """The factor of each row's loss: 1, or for the mean one over the rows that are not ignored.

    It is of all rows, so it is computed before a shard is.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    if options.reduction != "mean":
        return jnp.ones((), wide)
    return 1 / jnp.maximum(jnp.sum(labels != options.ignore_index), 1).astype(wide)


def _reduce(losses: Array, factor: Array, reduction: Reduction) -> Array:
    return losses if reduction == "none" else losses.sum() * factor


def split_factor(factor: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """The factors by which the forward and the backward multiply the gradient.

    A float16 gradient divided by the number of rows would underflow in the forward, before the
    backward can multiply it by the loss scale. So for float16 the backward divides.
    """
    one = jnp.ones_like(factor)
    return (one, factor) if dtype == jnp.float16 else (factor, one)


def row_losses(options, backend, logits, labels):
    """The loss of each row."""
    op, arrays = CROSS_ENTROPY, (logits, labels)
    if options.shard is not None:
        with vocabulary.recorded(op.stem(Direction.FORWARD), backend, arrays):
            return vocabulary.cross_entropy(*arrays, options.shard, **options.of_rows)
    return dispatch(op, Direction.FORWARD, backend, *arrays, **options.of_rows)


def _cross_entropy_loss(options, backend, logits, labels, factor):
    losses = row_losses(options, backend, logits, labels)
    return _reduce(losses, factor, options.reduction)


def _cross_entropy_forward(options, backend, logits, labels, factor):
    now, later = split_factor(factor, logits.dtype)
    op, arrays = CROSS_ENTROPY_WITH_GRADIENT, (logits, labels, now)
    if options.shard is not None:
        on_shard = vocabulary.cross_entropy_with_gradient
        with vocabulary.recorded(op.name, backend, arrays):
            results = on_shard(*arrays, options.shard, **options.of_rows)
    else:
        results = dispatch(op, Direction.INFERENCE, backend, *arrays, **options.of_rows)
    losses, dlogits = checkpoint_name(results, "cross_entropy")
    return _reduce(losses, factor, options.reduction), (dlogits, later)


def _cross_entropy_backward(_, backend, saved, dloss):
    dlogits, later = saved
    dlogits = dispatch(CROSS_ENTROPY, Direction.BACKWARD, backend, dlogits, later * dloss)
    return dlogits, None, None


def _cross_entropy_on_shard(function, shard, logits, labels, factor):
    if shard.over("V"):
        options, backend = function.static
        function = function._replace(static=(dataclasses.replace(options, shard=shard), backend))
    return function(logits, labels, factor)


def _cross_entropy_sharding(options: LossOptions) -> ShardingRule:
    result = "..." if options.reduction == "none" else "+..."
    dims = f"... V, ..., _ -> {result}; ... V, _"
    return ShardingRule(dims, "... V", local=_cross_entropy_on_shard)


_cross_entropy = with_backward(
    "cross_entropy",
    _cross_entropy_forward,
    _cross_entropy_backward,
    sharding=_cross_entropy_sharding,
    primal=_cross_entropy_loss,
)
