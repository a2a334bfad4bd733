"""Loads batches in shards: each process reads only the sequences of its devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int


def check_batch_size(sharding: jax.NamedSharding, batch_size: int) -> None:
    """Checks that a batch can be split evenly.

    Args:
        sharding: The sharding from :func:`jaxllm.training.parallel.batch_sharding`.
        batch_size: B, the sequences of a global microbatch.

    Raises:
        ValueError: The number of parts does not divide the batch size.
    """
    axes = sharding.spec[-2]
    parts = math.prod(sharding.mesh.shape[axis] for axis in axes)
    if batch_size % parts:
        shown = " x ".join(f"{axis}={sharding.mesh.shape[axis]}" for axis in axes)
        raise ValueError(
            f"the batch size is {batch_size}; it must be a multiple of {parts}, the devices of the "
            f"mesh ({shown})"
        )


def load_batch(
    sharding: jax.NamedSharding,
    shape: tuple[int, ...],
    read: Callable[[range], tuple[np.ndarray, ...]],
) -> tuple[Int[Array, "*A B T"], ...]:
    """Reads a batch in shards: each process reads only the sequences of its devices.

    The global batch does not depend on the mesh or on the number of processes.

    Args:
        sharding: The sharding from :func:`jaxllm.training.parallel.batch_sharding`.
        shape: The shape of the global tokens, (accumulate, B, T) or (B, T).
        read: ``read(rows) -> (tokens, labels)``, the sequences with these numbers, of shape
            (len(rows), T). More arrays of this shape may follow, such as segment ids. The numbers
            count through all microbatches, from 0 to accumulate * B - 1. For example
            :func:`jaxllm.data.batch` with its argument ``rows``.

    Returns:
        ``(tokens, labels)`` and what else ``read`` returns, as global arrays of the shape and
        sharding.

    Raises:
        ValueError: The devices of the mesh do not divide B, or those along ``context`` T.
    """
    *leading, size, length = shape
    check_batch_size(sharding, size)
    context = sharding.mesh.shape["context"] if sharding.spec[-1] == "context" else 1
    if length % context:
        raise ValueError(
            f"sequences have {length} tokens; it must be a multiple of {context}, the devices of "
            f"the mesh along context"
        )
    found: dict[tuple[int, int], list[np.ndarray]] = {}

    def read_part(index: Any) -> list[np.ndarray]:
        start, stop, _ = index[-2].indices(size)
        if (start, stop) not in found:
            rows = [read(range(i * size + start, i * size + stop)) for i in range(*leading or (1,))]
            found[start, stop] = [
                np.stack(of) if leading else of[0] for of in zip(*rows, strict=True)
            ]
        return found[start, stop]

    def shard(index: Any, which: int) -> np.ndarray:
        return read_part(index)[which][..., index[-1]]  # with context, a part of each sequence

    first = next(iter(sharding.addressable_devices_indices_map(shape).values()))
    return tuple(
        jax.make_array_from_callback(
            shape, sharding, lambda index, which=which: shard(index, which)
        )
        for which in range(len(read_part(first)))
    )
