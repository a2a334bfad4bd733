"""The derivative of ops that return a norm's output and the stream that it normalizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero


def defvjp(op: Any, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """``op.defvjp``, but ``backward`` gets None along a stream that nobody but the norm reads.

    So it is after the last block. JAX by itself would have zeros of the stream's size written, for
    a kernel to read and to add.

    Args:
        op: A ``custom_vjp`` that returns ``(out, stream)``.
        forward: As ``op.defvjp`` takes it.
        backward: As ``op.defvjp`` takes it; the cotangents are ``(dout, dstream)``.
    """

    def forward_of_values(*args: Any) -> Any:
        return forward(*jax.tree.map(_value, args))

    def backward_of_given(*args: Any) -> Any:
        *others, cotangents = args
        dout, dstream = (None if isinstance(ct, SymbolicZero) else ct for ct in cotangents)
        if dout is None:
            like: Any = cotangents[0]
            dout = jnp.zeros(like.shape, like.dtype)
        return backward(*others, (dout, dstream))

    op.defvjp(forward_of_values, backward_of_given, symbolic_zeros=True)


def _value(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, CustomVJPPrimal) else leaf
