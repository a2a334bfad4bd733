"""Arrays in a ``jax.shard_map`` that keeps track of the mesh axes along which values vary.

There (``check_vma``, the default) the type of an array says along which axes its values differ from
device to device. JAX's own operations bring their operands to one type by themselves; kernels know
nothing of it, and JAX asks of a ``custom_vjp`` that the gradient of an argument has the argument's
type. So arguments are brought to one type before either, by ``jax.lax.pcast``. Its transpose is a
sum over devices: the gradient of weights that all devices share is added up over them, as JAX does
it everywhere else. Outside of such a ``shard_map`` nothing happens.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import ManualAxisType

Axes = frozenset[Any]
_ARRAYS = (jax.Array, np.ndarray)


def axes_of(tree: Any) -> Axes:
    """The axes along which any array of a tree varies."""
    return frozenset().union(*(_axes(leaf) for leaf in jax.tree.leaves(tree)))


def vary(tree: Any, axes: Axes) -> Any:
    """The same arrays, as varying along these axes at least; what is no array stays as it is."""

    def cast(leaf: Any) -> Any:
        missing = tuple(sorted(axes - _axes(leaf))) if isinstance(leaf, _ARRAYS) else ()
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree) if axes else tree


def vary_like(tree: Any, like: Any) -> Any:
    """The same arrays, each varying along the axes of its counterpart, an array or its type."""
    return jax.tree.map(lambda leaf, other: vary(leaf, _axes(other)), tree, like)


def alike(tree: Any) -> Any:
    """The same arrays, each varying along the axes along which any of them does."""
    return vary(tree, axes_of(tree))


def shapes(structs: Any, arrays: Any) -> Any:
    """The shapes and dtypes of results that vary along the axes along which any array does."""
    axes = axes_of(arrays)
    if not axes:
        return structs
    kind = ManualAxisType(varying=axes)
    make = functools.partial(jax.ShapeDtypeStruct, manual_axis_type=kind)
    return jax.tree.map(lambda struct: make(struct.shape, struct.dtype), structs)


def _axes(leaf: Any) -> Axes:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        kind = leaf.manual_axis_type
        return kind.varying if kind is not None else frozenset()
    return jax.typeof(leaf).manual_axis_type.varying if isinstance(leaf, _ARRAYS) else frozenset()
