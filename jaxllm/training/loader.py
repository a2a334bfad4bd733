"""Loads batches in shards: each process reads only the sequences of its devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from jaxllm.core.sharding_rule import axes_of_entry
from jaxllm.ops.checks import as_integer


def check_batch_size(
    sharding: jax.NamedSharding, batch_size: int, *, ndim: int | None = None
) -> None:
    """Checks that a batch can be split evenly.

    Args:
        sharding: The sharding from :func:`jaxllm.training.parallel.batch_sharding`, or another one
            of arrays of shape (accumulate, B, T) or (B, T).
        batch_size: B, the sequences of a global microbatch.
        ndim: The number of dimensions of these arrays; None for that of the sharding's spec.

    Raises:
        TypeError: ``sharding`` is no ``NamedSharding``.
        ValueError: The spec does not fit the arrays, or the number of parts does not divide the
            batch size.
    """
    axes = axes_of_batch(sharding, ndim)[-2]
    parts = count_parts(sharding, axes)
    if batch_size % parts:
        shown = " x ".join(f"{axis}={sharding.mesh.shape[axis]}" for axis in axes)
        raise ValueError(
            f"the batch size is {batch_size}; it must be a multiple of {parts}, the devices of the "
            f"mesh ({shown})"
        )


def check_seq_len(sharding: jax.NamedSharding, seq_len: int, *, ndim: int | None = None) -> None:
    """Checks that sequences can be split evenly.

    Args:
        sharding: As in :func:`check_batch_size`.
        seq_len: T, the tokens of a sequence.
        ndim: As in :func:`check_batch_size`.

    Raises:
        TypeError: As in :func:`check_batch_size`.
        ValueError: The spec does not fit the arrays, or the number of parts does not divide the
            length.
    """
    axes = axes_of_batch(sharding, ndim)[-1]
    parts = count_parts(sharding, axes)
    if seq_len % parts:
        raise ValueError(
            f"sequences have {seq_len} tokens; it must be a multiple of {parts}, the devices of "
            f"the mesh along {' x '.join(axes)}"
        )


def axes_of_batch(sharding: Any, ndim: int | None = None) -> list[tuple[str, ...]]:
    """The mesh axes of each dimension of a batch.

    Args:
        sharding: As in :func:`check_batch_size`.
        ndim: As in :func:`check_batch_size`. Dimensions beyond those of the spec are not sharded.

    Raises:
        TypeError: ``sharding`` is no ``NamedSharding``.
        ValueError: The spec has more than ``ndim`` dimensions, or an unconstrained one.
    """
    if not isinstance(sharding, jax.NamedSharding):
        raise TypeError(
            f"sharding has type {type(sharding).__name__}; it must be a jax.NamedSharding, such as "
            "batch_sharding returns"
        )
    spec = sharding.spec
    ndim = max(len(spec), 2) if ndim is None else ndim
    if len(spec) > ndim or P.UNCONSTRAINED in spec:
        raise ValueError(
            f"sharding has {spec}; it must have at most {ndim} dimensions, those of the batch, "
            "each with names of mesh axes or None"
        )
    return [*map(axes_of_entry, spec), *[()] * (ndim - len(spec))]


def count_parts(sharding: jax.NamedSharding, axes: tuple[str, ...]) -> int:
    """The number of parts of a dimension that is sharded along these axes."""
    return math.prod(sharding.mesh.shape[axis] for axis in axes)


def load_batch(
    sharding: jax.NamedSharding,
    shape: tuple[int, ...],
    read: Callable[[range], tuple[np.ndarray, ...]],
) -> tuple[Int[Array, "*A B T"], ...]:
    """Reads a batch in shards: each process reads only the sequences of its devices.

    The global batch does not depend on the mesh or on the number of processes.

    Args:
        sharding: As in :func:`check_batch_size`.
        shape: The shape of the global tokens, (accumulate, B, T) or (B, T).
        read: ``read(rows) -> (tokens, labels)``, the sequences with these numbers, of shape
            (len(rows), T). More arrays of this shape may follow, such as segment ids. The numbers
            count through all microbatches, from 0 to accumulate * B - 1. For example
            :func:`jaxllm.data.batch` with its argument ``rows``.

    Returns:
        ``(tokens, labels)`` and what else ``read`` returns, as global arrays of the shape and
        sharding.

    Raises:
        TypeError: ``sharding`` is no ``NamedSharding``, or ``shape`` has no integers.
        ValueError: ``shape`` has another number of dimensions, or fewer than the sharding's spec,
            a size below 0, or no microbatch; the devices of the mesh do not divide B, or those
            along ``context`` T; or ``read`` returns arrays of another shape than (len(rows), T).
    """
    shape = tuple(as_integer("shape", size) for size in shape)
    if len(shape) not in (2, 3) or 0 in shape[:-2] or min(shape) < 0:
        raise ValueError(
            f"shape is {shape}; it must be (accumulate, B, T) or (B, T), with at least 1 microbatch"
        )
    *leading, size, length = shape
    check_batch_size(sharding, size, ndim=len(shape))
    check_seq_len(sharding, length, ndim=len(shape))
    found: dict[tuple[int, int], list[np.ndarray]] = {}

    def read_rows(rows: range) -> tuple[np.ndarray, ...]:
        arrays, wanted = read(rows), (len(rows), length)
        if wrong := [np.shape(array) for array in arrays if np.shape(array) != wanted]:
            raise ValueError(f"read({rows}) returns an array of shape {wrong[0]}, not {wanted}")
        return arrays

    def read_part(index: Any) -> list[np.ndarray]:
        start, stop, _ = index[-2].indices(size)
        if (start, stop) not in found:
            microbatches = range(*leading or (1,))
            rows = [read_rows(range(i * size + start, i * size + stop)) for i in microbatches]
            found[start, stop] = [
                np.stack(of) if leading else of[0] for of in zip(*rows, strict=True)
            ]
        return found[start, stop]

    def shard(index: Any, which: int) -> np.ndarray:
        # With context, a part of each sequence.
        return read_part(index)[which][(*index[:-2], ..., index[-1])]

    first = next(iter(sharding.addressable_devices_indices_map(shape).values()))
    return tuple(
        jax.make_array_from_callback(
            shape, sharding, lambda index, which=which: shard(index, which)
        )
        for which in range(len(read_part(first)))
    )
