"""FFI calls to the CUDA loss kernels in ``cuda/loss``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm import ffi

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def cross_entropy_unsupported(logits, *_, **__) -> str | None:
    """Why the kernels cannot serve a call, in either direction; None if they can."""
    if logits.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"logits has dtype {logits.dtype}; the kernel takes {names}"
    return None


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
