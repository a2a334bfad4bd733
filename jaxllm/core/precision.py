"""The dtypes of training: what is computed in, and what is kept and summed in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike


def wide_dtype(x: ArrayLike | DTypeLike) -> Any:
    """What sums and means of an array, or of a dtype, are kept in: float32, but float64 of that."""
    dtype = jnp.result_type(x)
    return dtype if dtype == jnp.float64 else jnp.dtype(jnp.float32)


def is_floating(x: ArrayLike) -> bool:
    """Whether an array, or a number, is of a floating dtype."""
    return jnp.issubdtype(getattr(x, "dtype", None) or jnp.result_type(x), jnp.floating)


def is_random_key(x: Any) -> bool:
    """Whether an array, or its type, is one of ``jax.random.key``; raw uint32 keys are not."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def default_compute_dtype() -> str:
    """``"bfloat16"`` where JAX runs on a GPU, ``"float32"`` on other devices."""
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"


def cast(tree: Any, dtype: DTypeLike) -> Any:
    """The floating-point arrays of a structure in another dtype, the other arrays as they are."""

    def convert(x: Any) -> Any:
        if not is_floating(x):
            return x
        return x.astype(dtype) if hasattr(x, "astype") else jnp.asarray(x, dtype)  # a number

    return jax.tree.map(convert, tree)


def widen(tree: Any) -> Any:
    """The floating-point arrays of a structure in :func:`wide_dtype`, the others as they are."""

    def convert(x: ArrayLike) -> ArrayLike:
        return jnp.asarray(x, wide_dtype(x)) if is_floating(x) else x

    return jax.tree.map(convert, tree)
