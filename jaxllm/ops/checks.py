"""Checks of arguments that every op shares: each error names the argument, and both shapes."""

from __future__ import annotations

import operator
from typing import Any

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


def as_float(name: str, value: Any) -> float:
    """The number that an option is, whatever its type; raises TypeError where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {value!r}; it must be a number") from error


def as_integer(name: str, value: Any) -> int:
    """The integer that an option is, whatever its type; raises TypeError where it is none."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r}; it must be an integer") from error


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


def check_layer(
    weight_name: str,
    weight: jax.Array,
    bias_name: str,
    bias: jax.Array | None,
    x: Any,
    x_name: str = "x",
    columns: str = "D_out",
) -> None:
    """Checks a linear layer that is applied to ``x``, or to what has its shape and dtype."""
    check_floating(**{x_name: x, weight_name: weight})
    if x.ndim == 0:
        raise ValueError(f"{x_name} has shape (); it must have a last axis to multiply along")
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{weight_name} has shape {weight.shape}; it must be ({x.shape[-1]}, {columns}), with "
            f"as many rows as {x_name} {x.shape} has columns"
        )
    check_same_dtype(weight_name, weight, "x", x)
    if bias is not None:
        check_floating(**{bias_name: bias})
        why = f"the columns of {weight_name} {weight.shape}"
        check_shape(bias_name, bias, weight.shape[1:], why)
        check_same_dtype(bias_name, bias, "x", x)


def check_added_norm(
    weight_name: str,
    weight: jax.Array,
    x: Any,
    residual: jax.Array,
    scale: jax.Array,
    **biases: jax.Array | None,
) -> jax.Array:
    """Checks what is added to the product of ``x`` and ``weight``, and the norm of the sum.

    Returns the first bias, which is the norm's; zeros where it is None.
    """
    columns = f"the columns of {weight_name} {weight.shape}"
    check_floating(residual=residual, scale=scale)
    check_shape(
        "residual", residual, (*x.shape[:-1], weight.shape[1]), f"as x {x.shape} and {columns} say"
    )
    check_same_dtype("residual", residual, "x", x)
    check_shape("scale", scale, weight.shape[1:], columns)
    for name, bias in biases.items():
        if bias is not None:
            check_floating(**{name: bias})
            check_shape(name, bias, weight.shape[1:], columns)
            check_same_dtype(name, bias, "scale", scale)
    norm_bias = next(iter(biases.values()))
    return jnp.zeros_like(scale) if norm_bias is None else norm_bias


def check_pre_norm(
    x: jax.Array, scale: jax.Array, bias_name: str, bias: jax.Array | None
) -> jax.Array:
    """Checks the norm of ``x``; returns its bias, zeros where that is None."""
    why = f"the width of x {x.shape}"
    check_floating(scale=scale)
    check_shape("scale", scale, x.shape[-1:], why)
    if bias is None:
        return jnp.zeros_like(scale)
    check_floating(**{bias_name: bias})
    check_shape(bias_name, bias, x.shape[-1:], why)
    check_same_dtype(bias_name, bias, "scale", scale)
    return bias


def check_way_back(weight_name: str, weight: jax.Array, x: jax.Array) -> None:
    """Raises ValueError where a layer's result is not as wide as ``x``, which it is added to."""
    if weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{weight_name} has shape {weight.shape}; it must be ({weight.shape[0]}, "
            f"{x.shape[-1]}) for its result to be added to x {x.shape}"
        )
