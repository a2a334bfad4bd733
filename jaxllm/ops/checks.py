"""Checks of arguments that every op shares: each error names the argument, and both shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def check_floating(**arrays: jax.Array) -> None:
    """Raises TypeError where an argument is not an array of a floating dtype."""
    _check_kind(arrays, jnp.floating, "a floating-point array")


def check_integer(**arrays: jax.Array) -> None:
    """Raises TypeError where an argument is not an array of an integer dtype."""
    _check_kind(arrays, jnp.integer, "an integer array")


def _check_kind(arrays: dict[str, jax.Array], kind: type, wanted: str) -> None:
    for name, array in arrays.items():
        dtype = getattr(array, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, kind):
            found = f"dtype {dtype}" if dtype is not None else f"type {type(array).__name__}"
            raise TypeError(f"{name} has {found}; it must be {wanted}")


def check_shape(name: str, array: jax.Array, shape: tuple[int, ...], why: str) -> None:
    """Raises ValueError where a shape is not ``shape``; ``why`` says where that is from."""
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}, {why}")


def check_same_dtype(name: str, array: jax.Array, other_name: str, other: jax.Array) -> None:
    """Raises TypeError where two arguments differ in dtype."""
    if array.dtype != other.dtype:
        raise TypeError(
            f"{name} has dtype {array.dtype}; it must have the dtype of {other_name}, {other.dtype}"
        )
