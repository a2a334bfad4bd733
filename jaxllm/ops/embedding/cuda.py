"""FFI calls to the CUDA embedding kernels in ``cuda/embedding``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxllm.core import ffi

_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

# Sizes of the backward's workspaces, which cuda/embedding/embed.h describes.
_MIN_BUCKETS = 256
_MAX_WIDTH = 2**21 - 32  # 32 columns per CTA along the y axis of a grid
_MAX_KEYS = 1024  # buckets, and slots of a bucket
_TILES = 64
_CHUNK = 64


def embed_unsupported(tokens, token_table, position_table, *_) -> str | None:
    """Why the kernel cannot serve a call; None if it can."""
    if token_table.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(dtype).name for dtype in _DTYPES)
        return f"token_table has dtype {token_table.dtype}; the kernel takes {names}"
    if token_table.shape[0] > _MAX_KEYS**2:
        return f"token_table has {token_table.shape[0]} rows; the kernel takes {_MAX_KEYS**2}"
    if token_table.shape[1] > _MAX_WIDTH:
        return f"token_table has rows of {token_table.shape[1]}; the kernel takes {_MAX_WIDTH}"
    if tokens.size >= 2**30:
        return f"tokens has {tokens.size} elements; the kernel takes fewer than 2**30"
    return None


embed_backward_unsupported = embed_unsupported


def embed_forward(tokens, token_table, position_table):
    """Returns ``out``."""
    width = token_table.shape[1]
    if position_table is None:
        position_table = jnp.zeros((0, width), token_table.dtype)
    result = jax.ShapeDtypeStruct((*tokens.shape, width), token_table.dtype)
    return ffi.call("embed_forward", (result,), tokens, token_table, position_table)[0]


def embed_backward(tokens, token_table, position_table, dout, dlm_head):
    """As :func:`jaxllm.ops.embedding.reference.embed_backward`; ``dlm_head`` is overwritten."""
    vocabulary, width = token_table.shape
    positions = 0 if position_table is None else position_table.shape[0]
    buckets = _MIN_BUCKETS
    while vocabulary > buckets * _MAX_KEYS:
        buckets *= 2
    slots = -(-vocabulary // buckets)
    results = (
        jax.ShapeDtypeStruct((vocabulary, width), token_table.dtype),
        jax.ShapeDtypeStruct((positions, width), token_table.dtype),
        jax.ShapeDtypeStruct((_TILES, buckets), jnp.int32),
        jax.ShapeDtypeStruct((tokens.size, 2), jnp.int32),
        jax.ShapeDtypeStruct((tokens.size,), jnp.int32),
        jax.ShapeDtypeStruct((buckets * slots + 1,), jnp.int32),
        jax.ShapeDtypeStruct((tokens.size // _CHUNK, width), jnp.float32),
    )
    aliases = {} if dlm_head is None else {2: 0}
    if dlm_head is None:
        dlm_head = jnp.zeros((0, width), token_table.dtype)
    options = {"buckets": buckets, "slots": slots, "aliases": aliases}
    gradients = ffi.call("embed_backward", results, tokens, dout, dlm_head, **options)
    dtoken_table, dposition_table, *_ = gradients
    return dtoken_table, None if position_table is None else dposition_table
