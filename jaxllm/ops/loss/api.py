"""The loss of a language model, from its logits or from what they are made of."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from jaxllm.core import promotion, vma
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Op, dispatch
from jaxllm.ops.checks import (
    as_float,
    as_integer,
    check_floating,
    check_integer,
    check_same_dtype,
    check_shape,
)
from jaxllm.ops.loss import cuda, head, pallas, reference

# The kernels of the one op serve both.
CROSS_ENTROPY = LINEAR_CROSS_ENTROPY = Op(
    "cross_entropy", reference=reference, pallas=pallas, cuda=cuda
)

Reduction = Literal["mean", "sum", "none"]
_INT32 = np.iinfo(np.int32)


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

    An ignored row has loss zero and gradient zero, and does not count in the mean. By default every
    negative label is ignored: -1, and the -100 of torch and Hugging Face. An ``ignore_index`` is
    the only ignored label, as in torch. Any other label outside ``0 <= label < vocab_size`` makes
    loss and gradient of its row NaN, and never trains another column. With
    ``jax.debug_nans(True)`` such a label is an error. The error names the label, but inside a loop
    or ``jax.vmap`` it is JAX's own.

    Args:
        logits: The rows; float32, bfloat16 or float16 for the kernels. Where the loss is
            differentiated, the gradient is computed with it and written over the logits; XLA copies
            them first if anything else still needs them. Logits up to 1e38 give a finite loss.
        labels: A column for each row, of any integer dtype.
        ignore_index: The label of the rows to ignore, inside or outside the vocabulary, between the
            least and the greatest int32; None for every negative label.
        label_smoothing: The share of the target that is spread over all columns, from 0 to 1.
        z_loss: The weight of the squared ``lse``, which keeps logits from drifting.
        vocab_size: How many columns are real; those from there on are padding, left out of the
            softmax, with gradient zero. None for all.
        reduction: ``"mean"`` over the rows that are not ignored (zero if all are), ``"sum"``, or
            ``"none"`` for the loss of each row.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The loss in float32: a scalar, or one a row where ``reduction`` is ``"none"``.

    Raises:
        TypeError: ``logits`` is not floating-point or ``labels`` not of an integer dtype.
        ValueError: ``labels`` is not shaped as the rows of ``logits``, an option is out of its
            range, the backend is unknown, or a label is outside the vocabulary and not ignored
            while ``jax_debug_nans`` is set.
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
    _check_labels(labels, "logits", logits)
    vocab_size = _check_options(
        logits.shape[-1], f"logits {logits.shape}", label_smoothing, vocab_size
    )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it must be one of mean, sum, none")
    labels, ignore_index = _rows_to_learn(labels, ignore_index, vocab_size)
    options = _options(ignore_index, label_smoothing, z_loss, vocab_size)
    return _cross_entropy(logits, labels, reduction, options, resolve(backend))


def linear_cross_entropy(
    hidden: Float[Array, "*rows D"],
    weight: Float[Array, "D V"] | Float[Array, "V D"],
    labels: Integer[Array, "*rows"],
    *,
    transpose_weight: bool = False,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    chunk_rows: int | None = None,
    accumulate_dtype: DTypeLike | None = None,
    backend: Backend | None = None,
) -> Float[Array, ""]:
    r"""Cross entropy of the logits ``hidden @ weight``, which never exist all at once.

    The rows go through in chunks: a product makes the logits of a chunk, the kernel of
    :func:`cross_entropy` puts their gradient in their place, and two more products turn that into
    the gradients of ``hidden`` and ``weight``. So all gradients are there when the loss is, and the
    backward pass only multiplies them by the gradient of the loss. In bfloat16 on a Hopper GPU,
    without smoothing and z-loss, the first product is one of our own and stores exponentials in the
    place of logits, which no kernel need go over then.

    Args:
        hidden: What the head is applied to, in float32, bfloat16 or float16 for the kernels.
        weight: The head, in the dtype of ``hidden``.
        labels: As in :func:`cross_entropy`.
        transpose_weight: ``weight`` is (V, D), as a token table is.
        ignore_index: As in :func:`cross_entropy`.
        label_smoothing: As in :func:`cross_entropy`.
        z_loss: As in :func:`cross_entropy`.
        vocab_size: As in :func:`cross_entropy`; the gradients of the weights of padding are zero.
        reduction: ``"mean"`` over the rows that are not ignored, or ``"sum"``.
        chunk_rows: Rows in a chunk, at most. None for as many as make its logits as large as the
            weight, or 320 MiB if that is more. A symbolic number of rows, of ``jax.export``, is one
            chunk.
        accumulate_dtype: What the gradient of the weight is summed in from chunk to chunk; within
            one it is always float32. None for float32, but for bfloat16 where the weight is of that
            and there is one chunk only, or float32 would take more than half a GiB: the sum is then
            the gradient that is returned, and needs no memory of its own.
        backend: As in :func:`cross_entropy`, for the kernels; other matrices XLA multiplies.

    Returns:
        The loss in float32, a scalar.

    Raises:
        TypeError: ``hidden`` is not floating-point, ``weight`` differs from it in dtype, or
            ``labels`` is not of an integer dtype.
        ValueError: ``weight`` or ``labels`` does not fit ``hidden`` in shape, or as in
            :func:`cross_entropy`.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Hsu et al., "Liger Kernel" (arXiv:2410.10989) for gradients chunk by chunk in the
    forward pass; llm.c's ``fused_classifier``.

    Example:
        >>> hidden = jnp.ones((2, 1024, 768), jnp.bfloat16)
        >>> table = jnp.zeros((50304, 768), jnp.bfloat16)
        >>> labels = jnp.zeros((2, 1024), jnp.int32)
        >>> loss = jaxllm.ops.linear_cross_entropy(hidden, table, labels, transpose_weight=True)
    """
    check_floating(hidden=hidden, weight=weight)
    if hidden.ndim == 0 or weight.ndim != 2:
        raise ValueError(
            f"hidden has shape {hidden.shape} and weight {weight.shape}; they must be (..., D) and "
            "a matrix"
        )
    check_same_dtype("weight", weight, "hidden", hidden)
    width = weight.shape[0 if transpose_weight else 1]
    shape = (hidden.shape[-1], width)
    wanted = shape[::-1] if transpose_weight else shape
    check_shape("weight", weight, wanted, f"the last axis of hidden {hidden.shape} and V")
    _check_labels(labels, "hidden", hidden)
    what = f"weight {weight.shape}"
    vocab_size = _check_options(width, what, label_smoothing, vocab_size)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be one of mean, sum")
    chunk_rows = None if chunk_rows is None else as_integer("chunk_rows", chunk_rows)
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; it must be at least 1")
    chunk_rows = chunk_rows or _chunk_rows(weight, width)
    labels, ignore_index = _rows_to_learn(labels, ignore_index, vocab_size)
    is_one_chunk = jax.export.is_symbolic_dim(labels.size) or labels.size <= chunk_rows
    how = _Chunked(
        reduction=reduction,
        options=_options(ignore_index, label_smoothing, z_loss, vocab_size),
        transpose_weight=transpose_weight,
        chunk_rows=chunk_rows,
        accumulate_dtype=jnp.dtype(accumulate_dtype or _accumulate_dtype(weight, is_one_chunk)),
        weight_dtype=weight.dtype,
        backend=resolve(backend),
    )
    rows = hidden.reshape(labels.size, hidden.shape[-1])
    return _linear_cross_entropy(rows, weight, labels.reshape(-1), how)


def _chunk_rows(weight: Array, width: int) -> int:
    """Larger chunks make better products, and smaller ones need less memory."""
    most = max(320 * 2**20, weight.nbytes) // (width * weight.dtype.itemsize)
    return most // _TILE_ROWS * _TILE_ROWS or most


@promotion.by_default
def _accumulate_dtype(weight: Array, is_one_chunk: bool) -> DTypeLike:
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    is_large = weight.size * wide.itemsize > 2**29
    # Float16 has not the range for a sum over all rows.
    is_narrow = weight.dtype == jnp.bfloat16 and (is_one_chunk or is_large)
    return weight.dtype if is_narrow else wide


def _check_labels(labels: Array, name: str, rows: Array) -> None:
    check_integer(labels=labels)
    check_shape("labels", labels, rows.shape[:-1], f"the rows of {name} {rows.shape}")


def _rows_to_learn(labels: Array, ignore_index: int | None, vocab_size: int) -> tuple[Array, int]:
    """The labels in int32, and the one of them whose rows are ignored."""
    columns = _as_int32(labels)
    if ignore_index is None:
        columns, ignore_index = jnp.maximum(columns, -1), -1
    ignore_index = as_integer("ignore_index", ignore_index)
    # The ends of int32 stand for all labels beyond them.
    if not _INT32.min < ignore_index < _INT32.max:
        raise ValueError(
            f"ignore_index is {ignore_index}; it must be from {_INT32.min + 1} to {_INT32.max - 1}"
        )
    is_debugged = jax.config.jax_debug_nans  # type: ignore[attr-defined]
    if is_debugged and not isinstance(columns, Tracer):
        _refuse_outside(labels, columns, ignore_index, vocab_size)
    return columns, ignore_index


def _as_int32(labels: Any) -> Array:
    """The labels in int32; what int32 does not hold becomes its nearest value.

    A plain cast would turn 2^32 + 3 into column 3. NumPy's labels are clipped by NumPy, because
    without 64-bit types JAX casts them on arrival.
    """
    found = jnp.iinfo(labels.dtype)
    if found.max > _INT32.max:
        clip: Any = np.clip if isinstance(labels, np.ndarray | np.generic) else jnp.clip
        labels = clip(labels, max(_INT32.min, found.min), _INT32.max)
    return jnp.asarray(labels).astype(jnp.int32)


def _refuse_outside(labels: Array, columns: Array, ignore_index: int, vocab_size: int) -> None:
    """Raises ValueError where a label is no column of the vocabulary and is not ignored."""
    if not columns.is_fully_addressable:  # another process has some; the NaN remains
        return
    places = np.argwhere(head.is_outside(columns, ignore_index, vocab_size))
    if len(places):
        first = tuple(map(int, places[0]))
        raise ValueError(
            f"labels{list(first)} is {labels[first]}; it must be from 0 to {vocab_size - 1}, or be "
            f"ignored ({len(places)} of {labels.size} labels are neither)"
        )


def _check_options(width: int, what: str, label_smoothing: float, vocab_size: int | None) -> int:
    """Checks the options that both losses have; returns ``vocab_size``, the width if it is None."""
    vocab_size = width if vocab_size is None else vocab_size
    if not 1 <= vocab_size <= width:
        raise ValueError(
            f"vocab_size is {vocab_size}; it must be from 1 to {width}, the columns of {what}"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be from 0 to 1")
    return vocab_size


def _options(
    ignore_index: int, label_smoothing: float, z_loss: float, vocab_size: int
) -> tuple[int, float, float, int]:
    """The options that both losses have, for _static."""
    return (
        as_integer("ignore_index", ignore_index),
        as_float("label_smoothing", label_smoothing),
        as_float("z_loss", z_loss),
        as_integer("vocab_size", vocab_size),
    )


def _static(options: tuple) -> dict[str, int | float]:
    names = ("ignore_index", "label_smoothing", "z_loss", "vocab_size")
    return dict(zip(names, options, strict=True))


# What makes the loss of the losses of the rows: a factor, and a sum unless each row is wanted.


def _factor(labels: Array, dtype: DTypeLike, reduction: Reduction, options: tuple) -> Array:
    """What each row's loss is multiplied by: 1, or one over the rows that count."""
    wide = jnp.promote_types(dtype, jnp.float32)
    if reduction != "mean":
        return jnp.ones((), wide)
    return 1 / jnp.maximum(jnp.sum(labels != options[0]), 1).astype(wide)


def _reduce(losses: Array, factor: Array, reduction: Reduction) -> Array:
    return losses if reduction == "none" else losses.sum() * factor


def _split(factor: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """The part of a factor for the forward to multiply the gradient by, and the backward's.

    Float16 has too few exponents for a gradient that is divided by the rows: what a loss scale is
    to save would be lost before the backward sees that.
    """
    one = jnp.ones_like(factor)
    return (one, factor) if dtype == jnp.float16 else (factor, one)


@functools.partial(vma.custom_vjp, nondiff_argnums=(2, 3, 4))
def _cross_entropy(logits, labels, reduction, options, backend):
    losses = dispatch(CROSS_ENTROPY, "forward", backend, logits, labels, **_static(options))
    return _reduce(losses, _factor(labels, logits.dtype, reduction, options), reduction)


def _cross_entropy_forward(logits, labels, reduction, options, backend):
    factor = _factor(labels, logits.dtype, reduction, options)
    now, later = _split(factor, logits.dtype)
    arrays, static = (logits, labels, now), _static(options)
    outputs = dispatch(CROSS_ENTROPY, "forward_with_gradient", backend, *arrays, **static)
    losses, dlogits = checkpoint_name(outputs, "cross_entropy")
    return _reduce(losses, factor, reduction), (dlogits, later)


def _cross_entropy_backward(reduction, options, backend, residuals, dloss):
    dlogits, later = residuals
    return dispatch(CROSS_ENTROPY, "backward", backend, dlogits, later * dloss), None


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


# linear_cross_entropy


_TILE_ROWS = 128
# Unrolled: without the copies of a loop, and the first gradient of the weight is added to nothing.
_FEW_CHUNKS = 4


class _Chunked(NamedTuple):
    """The static options of a call."""

    reduction: Reduction
    options: tuple
    transpose_weight: bool
    chunk_rows: int
    accumulate_dtype: Any
    weight_dtype: Any
    backend: Backend


def _over_chunks(
    step: Callable[[Array, Array, Array, Any], Any],
    hidden: Array,
    labels: Array,
    how: _Chunked,
    carry: Any,
) -> Any:
    """Folds ``step(hidden, labels, first_row, carry)`` over chunks of rows, all of one size.

    Where the rows are no multiple of it, the first two chunks overlap. The first ignores the rows
    that they share, and the second writes over what it left there: a last chunk of another size
    would stand behind the loop, and XLA would hold its logits beside the loop's.
    """
    rows = labels.shape[0]
    carry = vma.vary(carry, vma.axes_of((hidden, labels)))  # a loop's stays of one type
    if rows == 0:
        return carry
    if jax.export.is_symbolic_dim(rows):  # nobody knows how many chunks
        return step(hidden, labels, jnp.zeros((), jnp.int32), carry)
    chunks = math.ceil(rows / how.chunk_rows)
    # As many chunks, but no larger than they must be; products like multiples of a tile.
    size = min(rows, how.chunk_rows, math.ceil(rows / chunks / _TILE_ROWS) * _TILE_ROWS)
    shared = chunks * size - rows

    def visit(i: Array | int, carry: Any) -> Any:
        first_row = jnp.maximum(i * size - shared, 0)
        x, y = (lax.dynamic_slice_in_dim(array, first_row, size) for array in (hidden, labels))
        if shared:
            is_shared = (i == 0) & (jnp.arange(size) >= size - shared)
            y = jnp.where(is_shared, how.options[0], y)
        return step(x, y, first_row, carry)

    if chunks > _FEW_CHUNKS:
        return lax.fori_loop(0, chunks, visit, carry)
    carry = visit(0, carry)
    for i in range(1, chunks):
        # One chunk's logits at a time.
        hidden, labels, carry = lax.optimization_barrier((hidden, labels, carry))
        carry = visit(i, carry)
    return carry


@functools.partial(vma.custom_vjp, nondiff_argnums=(3,))
def _linear_cross_entropy(hidden, weight, labels, how):
    def step(x, y, _, loss):
        arrays = (head.logits(x, weight, how.transpose_weight), y)
        return loss + dispatch(CROSS_ENTROPY, "forward", how.backend, *arrays, **static).sum()

    static = _static(how.options)
    factor = _factor(labels, hidden.dtype, how.reduction, how.options)
    return factor * _over_chunks(step, hidden, labels, how, jnp.zeros_like(factor))


def _linear_cross_entropy_forward(hidden, weight, labels, how):
    def step(x, y, first_row, carry):
        loss, dhidden, dweight = carry
        losses, dx, dw = dispatch(
            CROSS_ENTROPY, "head_with_gradients", how.backend, x, weight, y, now, **static
        )
        dhidden = lax.dynamic_update_slice_in_dim(dhidden, dx, first_row, axis=0)
        # XLA adds in the product's own epilogue, in place.
        return loss + losses.sum(), dhidden, dweight + dw

    static = _static(how.options)
    static |= {"transpose_weight": how.transpose_weight, "accumulate_dtype": how.accumulate_dtype}
    factor = _factor(labels, hidden.dtype, how.reduction, how.options)
    now, later = _split(factor, hidden.dtype)
    sums = jnp.zeros(weight.shape, how.accumulate_dtype)
    carry = (jnp.zeros_like(factor), jnp.zeros_like(hidden), sums)
    loss, *gradients = _over_chunks(step, hidden, labels, how, carry)
    dhidden, dweight = checkpoint_name(tuple(gradients), "linear_cross_entropy")
    return factor * loss, (dhidden, dweight, later)


def _linear_cross_entropy_backward(how, residuals, dloss):
    dhidden, dweight, later = residuals
    # Mostly by 1, a constant that XLA takes away: a kernel would read and write all of it.
    dloss = later * dloss
    return (dhidden * dloss).astype(dhidden.dtype), (dweight * dloss).astype(how.weight_dtype), None


_linear_cross_entropy.defvjp(_linear_cross_entropy_forward, _linear_cross_entropy_backward)
