"""Meshes and the shardings of arrays: what types tell, and what XLA chose."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer  # type: ignore[attr-defined]
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

# Mesh axes that shard the rows of activations, and never their columns: before XLA compiles, only
# the name of an Auto axis tells.
ROW_AXES = ("data", "fsdp", "context")


def config_value(name: str) -> Any:
    """One of JAX's settings, in this context."""
    return jax.config.values[name]


def mesh_of(arrays: Sequence[Any]) -> Any:
    """The mesh of the arrays' types, or the one in the context."""
    for x in arrays:
        mesh = jax.typeof(x).sharding.mesh if isinstance(x, jax.Array) else None
        if mesh is not None and not mesh.empty:
            return mesh
    return jax.sharding.get_abstract_mesh()


def is_eager(arrays: Sequence[Any]) -> bool:
    """Whether the arrays have values, on several devices: XLA shards a call in a jit alone."""
    if any(isinstance(x, Tracer) for x in arrays):
        return False
    return any(isinstance(x, jax.Array) and len(x.sharding.device_set) > 1 for x in arrays)


def explicit_sharding(x: Any) -> NamedSharding | None:
    """The sharding that an array's type has, if it has one."""
    sharding = jax.typeof(x).sharding
    return sharding if not sharding.mesh.empty and sharding.mesh.explicit_axes else None


def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of a shape, a dtype and, where the type has one, a sharding."""
    sharding = like.sharding
    is_explicit = isinstance(sharding, NamedSharding) and bool(sharding.mesh.explicit_axes)
    return jnp.zeros(like.shape, like.dtype, device=sharding if is_explicit else None)


def full_spec(spec: P, rank: int) -> P:
    """The same spec with an entry for each dimension."""
    return P(*spec, *(None,) * (rank - len(spec)))


def reshard(x: Any, mesh: Any, spec: P) -> Any:
    """The array with another sharding in its type."""
    have, full = jax.typeof(x).sharding, full_spec(spec, x.ndim)
    if not have.mesh.empty and full_spec(have.spec, x.ndim) == full:
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, full))


def whole(x: Any) -> Any:
    """The array in a type without shards, for an addition that JAX refuses in two shardings."""
    sharding = None if x is None else explicit_sharding(x)
    return x if sharding is None else reshard(x, sharding.mesh, P())


def placed(tree: Any, shardings: Any) -> Any:
    """The arrays of a tree in shardings of meshes: types have them, or on Auto axes XLA is told."""

    def place(x: Any, of: NamedSharding) -> Any:
        if of.mesh.explicit_axes:
            return reshard(x, of.mesh, of.spec)
        return jax.lax.with_sharding_constraint(x, of)

    return jax.tree.map(place, tree, shardings)


def decode(sharding: Any, shape: Sequence[int], mesh: Any) -> tuple[tuple[str, ...], ...]:
    """The mesh axes of each dimension, of a sharding that XLA chose.

    Where it is along no whole axes, or uneven, there are none.
    """
    if sharding is None:
        return ((),) * len(shape)
    # Of a shape that any number of shards divides: JAX raises for an uneven sharding.
    indices = sharding.devices_indices_map(tuple(size * mesh.size for size in shape))
    of_device = np.vectorize(lambda d, dim: indices[d][dim].start or 0, otypes=[int])
    return tuple(
        _axes_of(of_device(mesh.devices, dim), size, mesh) for dim, size in enumerate(shape)
    )


def _axes_of(first: np.ndarray, size: int, mesh: Any) -> tuple[str, ...]:
    """The axes along which a dimension is sharded.

    Args:
        first: Each device's first index, times the number of devices.
        size: The size of the dimension.
        mesh: The mesh.
    """
    devices = mesh.devices.shape
    along = [k for k in range(first.ndim) if (first != first.take([0], k)).any()]
    for order in itertools.permutations(along) if along else ():
        parts = math.prod(devices[k] for k in order)
        place = np.zeros_like(first)
        for k in order:
            others = [j for j in range(first.ndim) if j != k]
            place = place * devices[k] + np.expand_dims(np.arange(devices[k]), others)
        if size % parts == 0 and (place * (size * mesh.size // parts) == first).all():
            return tuple(mesh.axis_names[k] for k in order)
    return ()
