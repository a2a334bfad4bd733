"""Checks of arguments that training steps and what explains them have in common."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxllm.core.precision import default_compute_dtype
from jaxllm.ops.checks import as_floating_dtype


def compute_dtype_of(compute_dtype: DTypeLike | None) -> jnp.dtype:
    """The compute dtype of an argument; None for the default one of the device.

    Raises:
        TypeError: It is not a floating dtype of 16 bits or more, or needs ``jax_enable_x64``.
    """
    given = default_compute_dtype() if compute_dtype is None else compute_dtype
    dtype = as_floating_dtype("compute_dtype", given)
    if dtype != jnp.dtype(given):
        raise TypeError(f"compute_dtype is {jnp.dtype(given)}, which needs jax_enable_x64")
    return dtype


def check_microbatches(*arrays: ArrayLike) -> None:
    """Checks that the arrays of a step have one first axis, of at least 1.

    Raises:
        TypeError: One is not an array.
        ValueError: One has no first axis, or another one than the others.
    """
    names = ["tokens", "labels", *(f"more[{i}]" for i in range(len(arrays) - 2))]
    shapes: list[Any] = [getattr(array, "shape", ()) for array in arrays]
    for name, array, shape in zip(names, arrays, shapes, strict=True):
        if not hasattr(array, "shape"):
            raise TypeError(f"{name} has type {type(array).__name__}; it must be an array")
        if not shape or shape[0] == 0:
            raise ValueError(
                f"{name} has shape {shape}; its first axis must have at least 1 microbatch"
            )
        if shape[0] != shapes[0][0]:
            raise ValueError(
                f"{name} has shape {shape}; its first axis must have {shapes[0][0]} microbatches, "
                f"as that of tokens {shapes[0]}"
            )
