"""FFI calls to the CUDA loss kernels in ``cuda/loss``.

On a Hopper GPU in bfloat16, the logits of an LM head are computed by a GEMM whose epilogue stores
their exponentials and sums them. ``cuda/loss/lm_head.h`` has the formulas. The gradient of a row is
then its exponentials times a factor, which the dgrad and wgrad GEMMs apply: no kernel makes a pass
over the logits.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxllm.core import ffi
from jaxllm.ops.gemm.cuda_fused import gemm_unsupported
from jaxllm.ops.loss import lm_head
from jaxllm.ops.loss.labels import nan_outside

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_COLUMNS = (
    2**31 - 2**17
)  # 32-bit indices, and the threads of a CTA reach beyond the last column
_MAX_ROWS = 2**31 - 1  # the x axis of a grid
_SUM_COLUMNS = 192  # kSoftmaxColumns in cuda/gemm/hopper/matmul_hopper.h


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
    """Why the kernel cannot serve a call; None if it can."""
    if dloss.dtype != jnp.float32:
        return f"dloss has dtype {dloss.dtype}; the kernel takes float32"
    return cross_entropy_unsupported(dlogits)


def cross_entropy_forward(logits, labels, **options):
    """Returns ``losses``, one per row."""
    (losses,) = ffi.call("cross_entropy_forward", (_losses(logits),), logits, labels, **options)
    return losses


def cross_entropy_with_gradient(logits, labels, scale, **options):
    """Returns ``losses`` and ``dlogits``, which overwrites ``logits``."""
    dlogits, losses = ffi.call(
        "cross_entropy_forward_with_gradient",
        (_like(logits), _losses(logits)),
        *(logits, labels, scale),
        aliases={0: 0},
        **options,
    )
    return losses, dlogits


def linear_cross_entropy_with_gradients_unsupported(
    hidden, weight, *_, transpose_weight, label_smoothing, z_loss, **__
) -> str | None:
    """Why the GEMM that stores exponentials cannot serve a call; None if it can."""
    if hidden.dtype != jnp.bfloat16:
        return f"hidden has dtype {hidden.dtype}; exponentials are stored in bfloat16 only"
    if label_smoothing or z_loss:
        return "with label smoothing or z-loss the gradient is no multiple of the exponentials"
    return gemm_unsupported(hidden, weight.shape[0 if transpose_weight else 1])


def linear_cross_entropy_with_gradients(
    hidden, weight, labels, scale, *, transpose_weight, accumulate_dtype, **options
):
    """Returns ``(losses, dhidden, dweight)``."""
    arrays = (hidden, weight, labels, scale)
    losses, exponentials, factors, _ = _lm_head_softmax(*arrays, transpose_weight, options)
    factors = factors[:, None]
    # The kernels clip a label outside the vocabulary to the nearest column.
    is_known = nan_outside(labels, options["ignore_index"], options["vocab_size"], jnp.float32)
    losses, factors = losses * is_known, factors * is_known[:, None]
    # The factor is applied in float32: dhidden is rounded once.
    sums = lm_head.dgrad(exponentials, weight, transpose_weight, jnp.float32)
    dhidden = (sums * factors).astype(hidden.dtype)
    scaled = (hidden * factors).astype(hidden.dtype)
    dweight = lm_head.wgrad(scaled, exponentials, transpose_weight, accumulate_dtype)
    return losses, dhidden, dweight


def _lm_head_softmax(hidden, weight, labels, scale, transpose_weight, options):
    """Returns ``(losses, exponentials, factors, is_recomputed)``; see ``cuda/loss/lm_head.h``.

    The kernels recompute the logits if the label of a row is far below its maximum.
    """
    rows, columns = len(hidden), weight.shape[0 if transpose_weight else 1]
    per_row = jax.ShapeDtypeStruct((rows,), jnp.float32)
    results = (
        jax.ShapeDtypeStruct((rows, columns), hidden.dtype),
        per_row,
        per_row,
        jax.ShapeDtypeStruct((-(-columns // _SUM_COLUMNS), rows), jnp.float32),
        jax.ShapeDtypeStruct((2, rows), jnp.float32),
        jax.ShapeDtypeStruct((2 * rows + 1,), jnp.int32),
    )
    exponentials, factors, losses, *_, counts = ffi.call(
        "lm_head_softmax",
        results,
        *(hidden, weight, labels, scale),
        transpose_weight=transpose_weight,
        ignore_index=options["ignore_index"],
        vocab_size=options["vocab_size"],
    )
    return losses, exponentials, factors, counts[-1]


def cross_entropy_backward(dlogits, dloss):
    """Returns ``dlogits * dloss``, which overwrites ``dlogits`` where ``dloss`` is not 1."""
    (scaled,) = ffi.call(
        "cross_entropy_backward", (_like(dlogits),), dlogits, dloss, aliases={0: 0}
    )
    return scaled


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _losses(logits: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(logits.shape[:-1], jnp.float32)
