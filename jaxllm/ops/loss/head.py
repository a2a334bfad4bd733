r"""A head around the loss kernels of one backend: products by XLA, the loss by the kernels.

With logits :math:`z = h W`, :math:`dh = dz\, W^T` and :math:`dW = h^T dz`. With
``transpose_weight`` the weight is stored as :math:`W^T`, (V, D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def logits(hidden: Array, weight: Array, transpose_weight: bool) -> Array:
    """Returns ``hidden @ weight``, of (rows, D) and (D, V)."""
    return _contract(hidden, 1, weight, 1 if transpose_weight else 0)


def hidden_gradient(
    dlogits: Array, weight: Array, transpose_weight: bool, dtype: Any = None
) -> Array:
    """Returns ``dlogits @ weight.T``."""
    return _contract(dlogits, 1, weight, 0 if transpose_weight else 1, dtype)


def weight_gradient(hidden: Array, dlogits: Array, transpose_weight: bool, dtype: Any) -> Array:
    """Returns ``hidden.T @ dlogits``, as the weight is stored."""
    factors = (dlogits, 0, hidden, 0) if transpose_weight else (hidden, 0, dlogits, 0)
    return _contract(*factors, dtype)


def is_outside(labels: Array, ignore_index: int, vocab_size: int) -> Array:
    """Whether a label is no column of the vocabulary, and its row is not left out either."""
    return (labels != ignore_index) & ((labels < 0) | (labels >= vocab_size))


def nan_outside(labels: Array, ignore_index: int, vocab_size: int, dtype: Any) -> Array:
    """NaN for each row whose label is neither in the vocabulary nor ignored, 1 for the others."""
    signs = jnp.where(is_outside(labels, ignore_index, vocab_size), -1, 1).astype(dtype)
    return jnp.sqrt(signs)  # no constant NaN, which jax_debug_nans would find in every call


def with_gradients(
    cross_entropy_forward_with_gradient: Callable[..., Any],
    hidden: Array,
    weight: Array,
    labels: Array,
    scale: Array,
    *,
    transpose_weight: bool,
    accumulate_dtype: Any,
    **options: Any,
) -> tuple[Array, Array, Array]:
    """Returns ``(losses, dhidden, dweight)``, given a backend's kernel and its options.

    ``dweight`` is of ``accumulate_dtype``.
    """
    z = logits(hidden, weight, transpose_weight)
    losses, dlogits = cross_entropy_forward_with_gradient(z, labels, scale, **options)
    dhidden = hidden_gradient(dlogits, weight, transpose_weight)
    return losses, dhidden, weight_gradient(hidden, dlogits, transpose_weight, accumulate_dtype)


def _contract(a: Array, a_axis: int, b: Array, b_axis: int, dtype: Any = None) -> Array:
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=dtype)
