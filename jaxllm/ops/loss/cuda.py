"""FFI calls to the CUDA loss kernels in ``cuda/loss``.

The head's product that makes the logits is XLA's, but for bfloat16 on a Hopper GPU: there it is one
of ours, whose end stores the exponentials of the logits and adds them up. ``cuda/loss/head.h`` has
the formulas. The gradient of a row is then a factor times what the row has already, and goes into
the products that follow; no kernel goes over the logits.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxllm.core import ffi
from jaxllm.ops.gemm import cuda as gemm
from jaxllm.ops.loss import head

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
_MAX_COLUMNS = 2**31 - 2**17  # counted in 32 bits, and the threads of a CTA end beyond the last
_MAX_ROWS = 2**31 - 1  # the x axis of a grid
_SUM_COLUMNS = 192  # kSoftmaxColumns in cuda/gemm/matmul_hopper.h


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


def cross_entropy_head_with_gradients_unsupported(hidden, *_, **__) -> str | None:
    """Why the kernels cannot serve a call; None if they can. The logits are in hidden's dtype."""
    return cross_entropy_unsupported(hidden)


def cross_entropy_backward_unsupported(dlogits, dloss) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if dloss.dtype != jnp.float32:
        return f"dloss has dtype {dloss.dtype}; the kernel takes float32"
    return cross_entropy_unsupported(dlogits)


def cross_entropy_forward(logits, labels, **options):
    """Returns ``losses``, one a row."""
    (losses,) = ffi.call("cross_entropy_forward", (_losses(logits),), logits, labels, **options)
    return losses


def cross_entropy_forward_with_gradient(logits, labels, scale, **options):
    """Returns ``losses`` and ``dlogits``, which takes the place of ``logits``."""
    dlogits, losses = ffi.call(
        "cross_entropy_forward_with_gradient",
        (_like(logits), _losses(logits)),
        *(logits, labels, scale),
        aliases={0: 0},
        **options,
    )
    return losses, dlogits


def cross_entropy_head_with_gradients(
    hidden, weight, labels, scale, *, transpose_weight, accumulate_dtype, **options
):
    """As :func:`jaxllm.ops.loss.head.with_gradients`."""
    arrays = (hidden, weight, labels, scale)
    if _exponentials_unsupported(hidden, weight.shape[0 if transpose_weight else 1], options):
        return head.with_gradients(
            cross_entropy_forward_with_gradient,
            *arrays,
            transpose_weight=transpose_weight,
            accumulate_dtype=accumulate_dtype,
            **options,
        )
    losses, exponentials, factors, _ = _head_exponentials(*arrays, transpose_weight, options)
    factors = factors[:, None]
    # The kernels of the head take the nearest column for a label outside the vocabulary.
    is_known = head.nan_outside(labels, options["ignore_index"], options["vocab_size"], jnp.float32)
    losses, factors = losses * is_known, factors * is_known[:, None]
    # A sum of exponentials is rounded once, after it has been multiplied by its factor.
    sums = head.hidden_gradient(exponentials, weight, transpose_weight, jnp.float32)
    dhidden = (sums * factors).astype(hidden.dtype)
    scaled = (hidden * factors).astype(hidden.dtype)
    dweight = head.weight_gradient(scaled, exponentials, transpose_weight, accumulate_dtype)
    return losses, dhidden, dweight


def _exponentials_unsupported(hidden, columns: int, options: dict) -> str | None:
    """Why the logits' product is XLA's; None if it is ours."""
    if hidden.dtype != jnp.bfloat16:
        return f"hidden has dtype {hidden.dtype}; exponentials are kept in bfloat16 alone"
    if options["label_smoothing"] or options["z_loss"]:
        return "the gradient of a smoothed label or a z-loss is no multiple of the exponentials"
    return gemm.fused_unsupported(hidden, columns)


def _head_exponentials(hidden, weight, labels, scale, transpose_weight, options):
    """Returns ``losses``, ``exponentials`` and ``factors``, as ``cuda/loss/head.h`` says.

    And whether the logits had to be made again, for rows whose label is far below their maximum.
    """
    rows, columns = len(hidden), weight.shape[0 if transpose_weight else 1]
    of_rows = jax.ShapeDtypeStruct((rows,), jnp.float32)
    results = (
        jax.ShapeDtypeStruct((rows, columns), hidden.dtype),
        of_rows,
        of_rows,
        jax.ShapeDtypeStruct((-(-columns // _SUM_COLUMNS), rows), jnp.float32),
        jax.ShapeDtypeStruct((2, rows), jnp.float32),
        jax.ShapeDtypeStruct((2 * rows + 1,), jnp.int32),
    )
    exponentials, factors, losses, *_, counts = ffi.call(
        "head_exponentials",
        results,
        *(hidden, weight, labels, scale),
        transpose_weight=transpose_weight,
        ignore_index=options["ignore_index"],
        vocab_size=options["vocab_size"],
    )
    return losses, exponentials, factors, counts[-1]


def cross_entropy_backward(dlogits, dloss):
    """Returns ``dlogits * dloss`` in the place of ``dlogits``, which is left as it is where 1."""
    (scaled,) = ffi.call(
        "cross_entropy_backward", (_like(dlogits),), dlogits, dloss, aliases={0: 0}
    )
    return scaled


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _losses(logits: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(logits.shape[:-1], jnp.float32)
