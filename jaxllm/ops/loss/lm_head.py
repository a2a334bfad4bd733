r"""The GEMMs of the LM head, by XLA.

With logits :math:`z = h W` the gradients are :math:`dh = dz\, W^T` (dgrad) and
:math:`dW = h^T dz` (wgrad). With ``transpose_weight`` the weight is stored as :math:`W^T`, (V, D).
"""

from __future__ import annotations

from typing import Any

from jax import Array, lax


def logits(hidden: Array, weight: Array, transpose_weight: bool) -> Array:
    """Returns ``hidden @ weight``, of (rows, D) and (D, V)."""
    return _contract(hidden, 1, weight, 1 if transpose_weight else 0)


def dgrad(dlogits: Array, weight: Array, transpose_weight: bool, dtype: Any = None) -> Array:
    """Returns ``dlogits @ weight.T``."""
    return _contract(dlogits, 1, weight, 0 if transpose_weight else 1, dtype)


def wgrad(hidden: Array, dlogits: Array, transpose_weight: bool, dtype: Any) -> Array:
    """Returns ``hidden.T @ dlogits``, in the layout of the weight."""
    factors = (dlogits, 0, hidden, 0) if transpose_weight else (hidden, 0, dlogits, 0)
    return _contract(*factors, dtype)


def _contract(a: Array, a_axis: int, b: Array, b_axis: int, dtype: Any = None) -> Array:
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=dtype)
