"""Labels: which are ignored, and which are outside the vocabulary."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jaxllm.ops.checks import as_int32, as_integer, check_integer, check_shape

_INT32 = np.iinfo(np.int32)


def check_labels(labels: Array, name: str, rows: Array) -> None:
    """Raises TypeError or ValueError where labels are no integers, or not one per row."""
    check_integer(labels=labels)
    check_shape("labels", labels, rows.shape[:-1], f"the rows of {name} {rows.shape}")


def normalize_labels(labels: Array, ignore_index: int | None, vocab_size: int) -> tuple[Array, int]:
    """Returns the labels in int32, and the one value of them that is ignored."""
    columns = as_int32(labels)
    if ignore_index is None:
        columns, ignore_index = jnp.maximum(columns, -1), -1
    ignore_index = as_integer("ignore_index", ignore_index)
    # The smallest and largest int32 stand for all labels beyond them.
    if not _INT32.min < ignore_index < _INT32.max:
        raise ValueError(
            f"ignore_index is {ignore_index}; it must be from {_INT32.min + 1} to {_INT32.max - 1}"
        )
    is_debugged = jax.config.jax_debug_nans  # type: ignore[attr-defined]
    if is_debugged and not isinstance(columns, Tracer):
        _refuse_outside(labels, columns, ignore_index, vocab_size)
    return columns, ignore_index


def _refuse_outside(labels: Array, columns: Array, ignore_index: int, vocab_size: int) -> None:
    """Raises ValueError where a label is outside the vocabulary and not ignored."""
    if not columns.is_fully_addressable:  # other processes have some; those give NaN
        return
    indices = np.argwhere(is_outside(columns, ignore_index, vocab_size))
    if len(indices):
        first = tuple(map(int, indices[0]))
        raise ValueError(
            f"labels{list(first)} is {labels[first]}; it must be from 0 to {vocab_size - 1}, or be "
            f"ignored ({len(indices)} of {labels.size} labels are neither)"
        )


def is_outside(labels: Array, ignore_index: int, vocab_size: int) -> Array:
    """Whether each label is outside the vocabulary and not ignored."""
    return (labels != ignore_index) & ((labels < 0) | (labels >= vocab_size))


def nan_outside(labels: Array, ignore_index: int, vocab_size: int, dtype: Any) -> Array:
    """NaN for each row whose label is outside the vocabulary and not ignored, 1 for the others."""
    signs = jnp.where(is_outside(labels, ignore_index, vocab_size), -1, 1).astype(dtype)
    return jnp.sqrt(signs)  # jax_debug_nans would find a constant NaN in every call
