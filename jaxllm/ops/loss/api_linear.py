"""Cross entropy of an LM head, whose logits are computed chunk by chunk."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.export
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from jaxllm.core import promotion, shards, vma
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.checks import (
    as_bool,
    as_floating_dtype,
    as_integer,
    check_floating,
    check_same_dtype,
    check_shape,
)
from jaxllm.ops.loss import cuda, lm_head, vocabulary
from jaxllm.ops.loss.api import (
    CROSS_ENTROPY_WITH_GRADIENT,
    LossOptions,
    check_options,
    make_factor,
    make_options,
    row_losses,
    split_factor,
)
from jaxllm.ops.loss.labels import check_labels, normalize_labels

_TILE_ROWS = 128
# So few chunks are unrolled: a loop copies its carry, and adds the first weight gradient to zeros.
_FEW_CHUNKS = 4


def _parts(
    backend, hidden, weight, labels, scale, *, transpose_weight, accumulate_dtype, **options
):
    logits = lm_head.logits(hidden, weight, transpose_weight)
    arrays = (logits, labels, scale)
    op = CROSS_ENTROPY_WITH_GRADIENT
    losses, dlogits = dispatch(op, Direction.INFERENCE, backend, *arrays, **options)
    dhidden = lm_head.dgrad(dlogits, weight, transpose_weight)
    return losses, dhidden, lm_head.wgrad(hidden, dlogits, transpose_weight, accumulate_dtype)


# Returns (losses, dhidden, dweight), the last in accumulate_dtype.
LINEAR_CROSS_ENTROPY_WITH_GRADIENTS = Op(
    "linear_cross_entropy_with_gradients", cuda=cuda, parts=_parts
)


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
    r"""Cross entropy of the logits ``hidden @ weight``, which are computed chunk by chunk.

    For each chunk of rows a GEMM computes the logits, the kernel of :func:`cross_entropy`
    overwrites them with their gradient, and two more GEMMs compute the gradients of ``hidden`` and
    ``weight``. So the forward pass computes all gradients, and the backward pass only multiplies
    them by the gradient of the loss. In bfloat16 on a Hopper GPU, without label smoothing and
    z-loss, a CUDA GEMM stores exponentials instead of logits in its epilogue and sums them, so that
    no kernel makes a pass over the logits. Where ``weight`` is sharded along V, each device
    computes the logits of its columns; XLA's kernels then read them once and overwrite them once.

    Args:
        hidden: The input of the LM head; float32, bfloat16 or float16 for the kernels.
        weight: The LM head, in the dtype of ``hidden``.
        labels: As in :func:`cross_entropy`.
        transpose_weight: ``weight`` is (V, D), as a token table is.
        ignore_index: As in :func:`cross_entropy`.
        label_smoothing: As in :func:`cross_entropy`.
        z_loss: As in :func:`cross_entropy`.
        vocab_size: As in :func:`cross_entropy`; the gradients of the weights of padding are zero.
        reduction: ``"mean"`` over the rows that are not ignored, or ``"sum"``.
        chunk_rows: The maximum number of rows per chunk. With None the logits of a chunk are, on
            each device, as large as the whole weight, or 320 MiB if that is more. A symbolic number
            of rows, of ``jax.export``, is one chunk.
        accumulate_dtype: The dtype in which the gradient of the weight is summed over chunks;
            within a chunk it is always float32. None for float32, with one exception: bfloat16 for
            a bfloat16 weight if there is one chunk only, or if the sum would take more than half a
            GiB in float32. The sum is then the returned gradient and needs no memory of its own.
        backend: As in :func:`cross_entropy`, for the kernels; XLA runs the other GEMMs.

    Returns:
        The loss in float32, a scalar.

    Raises:
        TypeError: ``hidden`` is not floating-point, ``weight`` differs from it in dtype,
            ``labels`` is not of an integer dtype, or an option is of the wrong kind.
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
    transpose_weight = as_bool("transpose_weight", transpose_weight)
    width = weight.shape[0 if transpose_weight else 1]
    shape = (hidden.shape[-1], width)
    wanted = shape[::-1] if transpose_weight else shape
    check_shape("weight", weight, wanted, f"the last axis of hidden {hidden.shape} and V")
    check_labels(labels, "hidden", hidden)
    what = f"weight {weight.shape}"
    vocab_size = check_options(width, what, label_smoothing, vocab_size)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be one of mean, sum")
    chunk_rows = None if chunk_rows is None else as_integer("chunk_rows", chunk_rows, least=1)
    hidden, weight = jnp.asarray(hidden), jnp.asarray(weight)
    if accumulate_dtype is not None:
        accumulate_dtype = as_floating_dtype("accumulate_dtype", accumulate_dtype)
    is_given, chunk_rows = chunk_rows is not None, chunk_rows or _chunk_rows(weight, width)
    labels, ignore_index = normalize_labels(labels, ignore_index, vocab_size)
    is_one_chunk = jax.export.is_symbolic_dim(labels.size) or labels.size <= chunk_rows
    options = _LinearOptions(
        loss=make_options(reduction, ignore_index, label_smoothing, z_loss, vocab_size),
        transpose_weight=transpose_weight,
        chunk_rows=chunk_rows,
        whole_rows=labels.size if is_given and isinstance(labels.size, int) else None,
        accumulate_dtype=accumulate_dtype or jnp.dtype(_accumulate_dtype(weight, is_one_chunk)),
        weight_dtype=weight.dtype,
    )
    factor = make_factor(labels, hidden.dtype, options.loss)
    arrays = (hidden, weight, labels, factor)
    return _linear_cross_entropy(*arrays, backend=resolve(backend), options=options)


def _chunk_rows(weight: Array, width: int) -> int:
    """The default of ``chunk_rows``: large for fast GEMMs, but the logits need memory."""
    most = max(320 * 2**20, weight.nbytes) // (width * weight.dtype.itemsize)
    return most // _TILE_ROWS * _TILE_ROWS or most


@promotion.by_default
def _accumulate_dtype(weight: Array, is_one_chunk: bool) -> DTypeLike:
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    is_large = weight.size * wide.itemsize > 2**29
    # The range of float16 is too small for a sum over all rows.
    is_narrow = weight.dtype == jnp.bfloat16 and (is_one_chunk or is_large)
    return weight.dtype if is_narrow else wide


@dataclasses.dataclass(frozen=True)
class _LinearOptions:
    loss: LossOptions
    transpose_weight: bool
    chunk_rows: int
    whole_rows: int | None  # that chunk_rows is a part of; None where it is of a shard's rows
    accumulate_dtype: Any
    weight_dtype: Any


def _over_chunks(
    step: Callable[[Array, Array, Array, Any], Any],
    hidden: Array,
    labels: Array,
    options: _LinearOptions,
    carry: Any,
) -> Any:
    """Folds ``step(hidden, labels, first_row, carry)`` over chunks of rows of one size.

    If the size does not divide the rows, the first two chunks overlap. The first ignores the shared
    rows, and the second overwrites their results. A smaller last chunk would run after the loop,
    and XLA would allocate its logits in addition to the loop's.
    """
    rows = labels.shape[0]
    carry = vma.vary(carry, vma.axes_of((hidden, labels)))  # a loop keeps the type of its carry
    if rows == 0:
        return carry
    if jax.export.is_symbolic_dim(rows):  # the number of chunks is unknown
        return step(hidden, labels, jnp.zeros((), jnp.int32), carry)
    chunk_rows = options.chunk_rows
    if shards.is_inside() and options.whole_rows is not None:
        chunk_rows = math.ceil(chunk_rows * rows / options.whole_rows)
    chunks = math.ceil(rows / chunk_rows)
    # The smallest size for this number of chunks, as a multiple of a GEMM's tile.
    size = min(rows, chunk_rows, math.ceil(rows / chunks / _TILE_ROWS) * _TILE_ROWS)
    shared = chunks * size - rows

    def visit(i: Array | int, carry: Any) -> Any:
        first_row = jnp.maximum(i * size - shared, 0)
        x, y = (lax.dynamic_slice_in_dim(array, first_row, size) for array in (hidden, labels))
        if shared:
            is_shared = (i == 0) & (jnp.arange(size) >= size - shared)
            y = jnp.where(is_shared, options.loss.ignore_index, y)
        return step(x, y, first_row, carry)

    if chunks > _FEW_CHUNKS:
        return lax.fori_loop(0, chunks, visit, carry)
    carry = visit(0, carry)
    for i in range(1, chunks):
        # The logits of only one chunk at a time. In JAX 0.10 all that a barrier returns varies
        # along the axes of any of it, so gradients that vary along more axes must stay out.
        if jax.__version_info__ >= (0, 11) or vma.axes_of(carry) == vma.axes_of((hidden, labels)):
            hidden, labels, carry = lax.optimization_barrier((hidden, labels, carry))
        else:
            loss, *gradients = carry
            hidden, labels, loss = lax.optimization_barrier((hidden, labels, loss))
            carry = (loss, *gradients)
        carry = visit(i, carry)
    return carry


def _linear_cross_entropy_loss(options, backend, hidden, weight, labels, factor):
    hidden, labels = _flat(hidden, labels)

    def step(x, y, _, loss):
        logits = lm_head.logits(x, weight, options.transpose_weight)
        return loss + row_losses(options.loss, backend, logits, y).sum()

    return factor * _over_chunks(step, hidden, labels, options, jnp.zeros_like(factor))


def _flat(hidden: Array, labels: Array) -> tuple[Array, Array]:
    """The rows in one dimension."""
    return hidden.reshape(labels.size, hidden.shape[-1]), labels.reshape(-1)


def _linear_cross_entropy_forward(options, backend, hidden, weight, labels, factor):
    shape = hidden.shape
    hidden, labels = _flat(hidden, labels)

    def step(x, y, first_row, carry):
        loss, dhidden, dweight = carry
        op, arrays = LINEAR_CROSS_ENTROPY_WITH_GRADIENTS, (x, weight, y, now)
        if shard is not None:
            on_shard = vocabulary.linear_cross_entropy_with_gradients
            with vocabulary.recorded(op.name, backend, arrays):
                losses, dx, dw = on_shard(*arrays, shard, **static)
        else:
            losses, dx, dw = dispatch(op, Direction.INFERENCE, backend, *arrays, **static)
        dhidden = lax.dynamic_update_slice_in_dim(dhidden, dx, first_row, axis=0)
        # XLA adds in the epilogue of the GEMM, in place.
        return loss + losses.sum(), dhidden, dweight + dw

    shard = options.loss.shard
    static = options.loss.of_rows | {
        "transpose_weight": options.transpose_weight,
        "accumulate_dtype": options.accumulate_dtype,
    }
    now, later = split_factor(factor, hidden.dtype)
    sums = jnp.zeros(weight.shape, options.accumulate_dtype)
    # Of a shard of the vocabulary the loss is that of all shards; the gradients are its own.
    gradients = vma.vary((jnp.zeros_like(hidden), sums), vma.axes_of((hidden, weight, labels)))
    carry = (jnp.zeros_like(factor), *gradients)
    loss, dhidden, dweight = _over_chunks(step, hidden, labels, options, carry)
    if shards.is_inside():
        if options.weight_dtype == jnp.bfloat16:
            dweight = dweight.astype(options.weight_dtype)  # half the bytes to sum over shards
        # XLA would delay dweight's GEMM to the end of the backward, beside the last collectives. On
        # every device these would wait until the GEMM leaves the SMs of each.
        dhidden, dweight = lax.optimization_barrier((dhidden, dweight))
    gradients = (dhidden.reshape(shape), dweight)
    dhidden, dweight = checkpoint_name(gradients, "linear_cross_entropy")
    return factor * loss, (dhidden, dweight, later)


def _linear_cross_entropy_backward(options, backend, saved, dloss):
    del backend
    dhidden, dweight, later = saved
    # Usually by 1, a constant: XLA removes the multiplication, but a kernel would copy the arrays.
    dloss = later * dloss
    dhidden = (dhidden * dloss).astype(dhidden.dtype)
    return dhidden, (dweight * dloss).astype(options.weight_dtype), None, None


def _linear_on_shard(function, shard, hidden, weight, labels, factor):
    if shard.over("V"):
        options, backend = function.static
        if options.whole_rows is None:  # the logits of a chunk are as large as on one device
            chunk_rows = options.chunk_rows * shard.count("V")
            options = dataclasses.replace(options, chunk_rows=chunk_rows)
        of_loss = dataclasses.replace(options.loss, shard=shard)
        options = dataclasses.replace(options, loss=of_loss)
        function = function._replace(static=(options, backend))
    return function(hidden, weight, labels, factor)


def _linear_sharding(options: _LinearOptions) -> ShardingRule:
    """``dhidden`` is summed over the vocabulary once, after the loop over chunks."""
    weight = "V _" if options.transpose_weight else "_ V"
    return ShardingRule(
        f"... _, {weight}, ..., _ -> +...; ... _ +V, {weight} +... =1, _",
        "... V",
        backward_on_shards=False,
        local=_linear_on_shard,
    )


_linear_cross_entropy = with_backward(
    "linear_cross_entropy",
    _linear_cross_entropy_forward,
    _linear_cross_entropy_backward,
    sharding=_linear_sharding,
    primal=_linear_cross_entropy_loss,
)
