r"""A head around the loss kernels of one backend: products by XLA, the loss by the kernels.

With logits :math:`z = h W`, :math:`dh = dz\, W^T` and :math:`dW = h^T dz`. With
``transpose_weight`` the weight is stored as :math:`W^T`, (V, D).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
