"""Whether attention of a projection reads it rotated: a kernel has written over it before."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxllm.core.backend import Backend
from jaxllm.core.dispatch import Direction, Op, choose
from jaxllm.ops.attention import cuda
from jaxllm.ops.attention.arguments import PackedOptions
from jaxllm.ops.attention.packing import is_by_parts
from jaxllm.ops.rotary.packed import PackedRotation


def takes_rotated(
    op: Op, qkv: Any, segments: Any, options: PackedOptions, backend: Backend
) -> bool:
    """Whether attention of a projection runs on kernels that read it rotated.

    Args:
        op: Attention of a projection.
        qkv: The projection, or what has its shape and dtype.
        segments: Those of queries and keys, or None.
        options: As :func:`check_packed` returns them.
        backend: A resolved backend.
    """
    # Without shardings, under some of which JAX cannot split a projection.
    qkv, segments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (qkv, segments))
    arrays, static = (qkv, segments, None), dataclasses.asdict(options)
    found, _ = choose(op, Direction.FORWARD, backend, *arrays, **static)
    return found == "cuda" and cuda.reads_rotated(qkv, options.heads, options.kv_heads)


def rotation_of(qkv: Any, options: PackedOptions) -> PackedRotation:
    """How a projection rotates."""
    heads = options.heads, options.kv_heads
    return PackedRotation(*heads, options.interleaved, by_parts=is_by_parts(qkv))
