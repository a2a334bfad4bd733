"""Pallas-Triton loss kernels.

A program has one row and makes two passes over its blocks of columns. The first sums the
exponentials, relative to the largest logit so far (online softmax). The second overwrites the
logits with their gradient. Arithmetic is float32.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxllm.ops.pallas_call import pallas_call

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_BLOCK = 4096  # columns per block
_WARPS = 8
_MAX_COLUMNS = 2**30  # 32-bit indices, in blocks that are powers of two
_MAX_ROWS = 2**31 - 1  # the x axis of a grid


def cross_entropy_unsupported(logits, *_, **__) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if logits.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"logits has dtype {logits.dtype}; the kernel takes {names}"
    *rows, width = logits.shape
    if width > _MAX_COLUMNS:
        return f"logits has {width} columns; the kernel takes at most {_MAX_COLUMNS}"
    if math.prod(rows) > _MAX_ROWS:
        return f"logits has {math.prod(rows)} rows; the kernel takes at most {_MAX_ROWS}"
    return None


cross_entropy_with_gradient_unsupported = cross_entropy_unsupported


def cross_entropy_backward_unsupported(dlogits, dloss) -> str | None:
    """Always None: XLA multiplies."""
    del dlogits, dloss


def cross_entropy_forward(logits, labels, *, interpret=False, **options):
    """Returns ``losses``, one per row."""
    if logits.size == 0:
        return jnp.zeros(labels.shape, jnp.float32)
    row, one, _ = _specs(logits)
    losses = pallas_call(
        functools.partial(_forward_kernel, **options),
        grid=labels.size,
        in_specs=[row, one],
        out_specs=one,
        out_shape=jax.ShapeDtypeStruct((labels.size,), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=2),
        interpret=interpret,
    )(_rows(logits), labels.reshape(-1))
    return losses.reshape(labels.shape)


def cross_entropy_with_gradient(logits, labels, scale, *, interpret=False, **options):
    """Returns ``losses`` and ``dlogits``, which overwrites ``logits``."""
    if logits.size == 0:
        return jnp.zeros(labels.shape, jnp.float32), logits
    row, one, same = _specs(logits)
    rows = _rows(logits)
    dlogits, losses = pallas_call(
        functools.partial(_with_gradient_kernel, width=logits.shape[-1], **options),
        grid=labels.size,
        in_specs=[row, one, same],
        out_specs=[row, one],
        out_shape=[
            jax.ShapeDtypeStruct(rows.shape, rows.dtype),
            jax.ShapeDtypeStruct((labels.size,), jnp.float32),
        ],
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=2),
        interpret=interpret,
    )(rows, labels.reshape(-1), scale.reshape(1))
    return losses.reshape(labels.shape), dlogits.reshape(logits.shape)


def cross_entropy_backward(dlogits, dloss, *, interpret=False):
    """Returns ``dlogits * dloss``, with one ``dloss`` or one per row."""
    del interpret
    # XLA removes the multiplication where dloss is a constant 1, as it usually is, and fuses it
    # otherwise. A kernel that writes only where dloss is not 1 needs its result to alias its
    # operand, which XLA does not guarantee.
    factors = dloss.reshape(*dloss.shape, *[1] * (dlogits.ndim - dloss.ndim))
    return (dlogits.astype(jnp.float32) * factors).astype(dlogits.dtype)


def _forward_kernel(logits_ref, labels_ref, losses_ref, **options):
    losses_ref[0] = _loss(logits_ref, labels_ref[0], **options)[0]


def _with_gradient_kernel(
    logits_ref, labels_ref, scale_ref, dlogits_ref, losses_ref,
    *, width, ignore_index, label_smoothing, z_loss, vocab_size,
):  # fmt: skip
    given = labels_ref[0]
    loss, largest, total, label = _loss(
        logits_ref, given, ignore_index, label_smoothing, z_loss, vocab_size
    )
    losses_ref[0] = loss
    scale = jnp.where(given == label, scale_ref[0], jnp.nan)  # NaN outside the vocabulary
    scale = jnp.where(given == ignore_index, 0.0, scale)
    of_exponential = scale * (1 + 2 * z_loss * (largest + jnp.log(total))) / total
    at_label, everywhere = -scale * (1 - label_smoothing), -scale * label_smoothing / vocab_size

    def write(i, _):
        here, columns = _block(logits_ref, i)
        real = columns < vocab_size
        x = plgpu.load(logits_ref.at[here], mask=real, other=-jnp.inf).astype(jnp.float32)
        derivative = jnp.exp(x - largest) * of_exponential + everywhere
        derivative += jnp.where(columns == label, at_label, 0.0)
        derivative = jnp.where(real, derivative, 0.0).astype(dlogits_ref.dtype)
        plgpu.store(dlogits_ref.at[here], derivative, mask=columns < width)

    _each_block(logits_ref, width, write, None)


def _loss(logits_ref, given, ignore_index, label_smoothing, z_loss, vocab_size):
    """The loss of a row, its largest logit, the sum of exponentials, and the clipped label."""
    label = jnp.clip(given, 0, vocab_size - 1)

    def add(i, sums):
        largest, total, logits, target = sums
        here, columns = _block(logits_ref, i)
        real = columns < vocab_size
        x = plgpu.load(logits_ref.at[here], mask=real, other=-jnp.inf).astype(jnp.float32)
        higher = jnp.maximum(largest, jnp.max(x))
        total = total * jnp.exp(largest - higher) + jnp.sum(jnp.exp(x - higher))
        target += jnp.sum(jnp.where(columns == label, x, 0.0))
        if label_smoothing:
            logits += jnp.sum(jnp.where(real, x, 0.0))
        return higher, total, logits, target

    zero = jnp.float32(0)
    lowest = jnp.float32(jnp.finfo(jnp.float32).min)  # finite, so that no difference is NaN
    start = (lowest, zero, zero, zero)
    largest, total, logits, target = _each_block(logits_ref, vocab_size, add, start)
    log_sum = jnp.log(total)
    lse = largest + log_sum
    mean = logits / vocab_size
    target = (1 - label_smoothing) * (target - largest)
    if label_smoothing:
        target += label_smoothing * (mean - largest)
    loss = log_sum - target + z_loss * lse * lse
    loss = jnp.where(given == label, loss, jnp.nan)  # NaN outside the vocabulary
    return jnp.where(given == ignore_index, 0.0, loss), largest, total, label


def _each_block(ref, width, body, start):
    """Folds ``body`` over the blocks of the first ``width`` columns."""
    return lax.fori_loop(0, pl.cdiv(width, _block_width(ref.shape[0])), body, start)


def _block(ref, i):
    """Block ``i`` of a row as a slice, and its columns."""
    block = _block_width(ref.shape[0])
    return pl.ds(i * block, block), i * block + jnp.arange(block)


def _block_width(width: int) -> int:
    return min(pl.next_power_of_2(width), _BLOCK)


def _rows(logits: jax.Array) -> jax.Array:
    return logits.reshape(-1, logits.shape[-1])


def _specs(logits: jax.Array) -> tuple[pl.BlockSpec, ...]:
    """The block specs of a row in whole blocks, of one value per row, and of a shared value."""
    block = _block_width(logits.shape[-1])
    width = pl.cdiv(logits.shape[-1], block) * block
    return (
        pl.BlockSpec((None, width), lambda i: (i, 0)),
        pl.BlockSpec((1,), lambda i: (i,)),
        pl.BlockSpec((1,), lambda i: (0,)),
    )
