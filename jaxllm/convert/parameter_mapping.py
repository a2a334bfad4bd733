"""Where another format keeps the numbers of our parameters, read in either direction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxllm.models.blocks import Params, stack

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Place:
    """The part of one of our arrays that a tensor of another format holds.

    Attributes:
        path: The names that lead to the array, such as ``"blocks/mlp/down/weight"``.
        index: The part: a layer, rows, columns.
        transposed: Whether the tensor is the part's transpose.
    """

    path: str
    index: tuple[int | slice, ...] = ()
    transposed: bool = False

    def of(self, array: Any) -> Any:
        """The part of an array, as the tensor lies; a view where NumPy gives one."""
        part = array[self.index]
        return part.T if self.transposed else part

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor, if that of our array is ``ours``."""
        return self.of(np.broadcast_to(np.float32(0), ours)).shape

    def nbytes(self, array: Any) -> int:
        """The bytes of the tensor in the dtype of our array."""
        return math.prod(self.shape(array.shape)) * array.dtype.itemsize

    def copy(self, array: ArrayLike, dtype: DTypeLike | None = None) -> np.ndarray:
        """The tensor, in the machine's memory and contiguous. An array on a device is cut there."""
        part = np.asarray(jnp.asarray(array)[self.index])
        return np.array(part.T if self.transposed else part, dtype, order="C")


def check(found: Shapes, wanted: Shapes) -> None:
    """Raises ValueError unless names and shapes are the wanted ones; the message names the first
    ten faults.
    """
    faults = [f"{name} is missing" for name in wanted if name not in found]
    faults += [f"{name} is unexpected" for name in found if name not in wanted]
    faults += [
        f"{name} has shape {tuple(found[name])}; it must be {shape}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != shape
    ]
    if len(faults) > 10:
        faults[10:] = [f"and {len(faults) - 10} more"]
    if faults:
        raise ValueError("; ".join(faults))


def assemble(
    read: Callable[[str], np.ndarray],
    places: Mapping[str, Place],
    ours: Shapes,
    dtype: DTypeLike,
) -> Params:
    """Our parameters from tensors that are read one at a time; what no tensor holds is zero.

    No more than one of our arrays and one tensor are in the machine's memory at a time, beside what
    JAX keeps there.

    Args:
        read: Gives a tensor by its name.
        places: Where each tensor belongs.
        ours: The shapes of our arrays by path.
        dtype: The dtype of our arrays.
    """
    names: dict[str, list[str]] = {path: [] for path in ours}
    for name, place in places.items():
        names[place.path].append(name)
    flat = {}
    for path, shape in ours.items():
        array = np.zeros(shape, dtype)
        for name in names[path]:
            places[name].of(array)[...] = read(name)
        flat[path] = jnp.asarray(array)
    return unflatten(flat)


def arrays_of(params: Params, name: str = "params") -> dict[str, Any]:
    """The arrays of a model by their paths; blocks in a list are stacked.

    Args:
        params: The parameters, or what is shaped like them, with the blocks stacked or in a list.
        name: What the message calls them.

    Raises:
        ValueError: They are no nested dict of arrays; or are in the form for decoding, which no
            file holds; or the layers in the list differ.
    """
    if not isinstance(params, dict) or "blocks" not in params:
        raise ValueError(f"{name} has no 'blocks'; it must be a dict as the model's init makes it")
    if isinstance(params["blocks"], tuple):
        params = params | {"blocks": list(params["blocks"])}
    try:
        arrays = flatten(stack(params))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}['blocks'] is a list of layers that differ: {error}") from error
    for path, array in arrays.items():
        if path.endswith("/weight_t"):
            raise ValueError(
                f"{name} is as for_decoding makes it, with {path}; give the parameters before that"
            )
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(
                f"{name}: {path} is of type {type(array).__name__}; it must be an array"
            )
    return arrays


def flatten(tree: Params, prefix: str = "") -> dict[str, Any]:
    """The arrays of a nested dict by their paths."""
    flat = {}
    for name, value in tree.items():
        path = prefix + name
        flat |= flatten(value, f"{path}/") if isinstance(value, dict) else {path: value}
    return flat


def unflatten(flat: Mapping[str, Any]) -> Params:
    """The nested dict whose arrays have these paths."""
    tree: Params = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return tree
