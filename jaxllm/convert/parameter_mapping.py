"""Parameter mapping: which slice of which jaxllm parameter a tensor of another format holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jaxllm import ops
from jaxllm.models.common import Params, stack

Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class ParamSlice:
    """The slice of a jaxllm parameter that corresponds to one tensor of another format.

    Attributes:
        path: The parameter's path, such as ``"blocks/mlp/down/weight"``.
        index: The slice: a layer, rows, columns.
        transposed: Whether the tensor is the transpose of the slice.
        columns: The number of the slice's last dimensions that are one dimension of the tensor.
        is_grouped: Whether the columns are queries, (N/K, K, H), which the tensor has in the usual
            order, (K, N/K, H).
    """

    path: str
    index: tuple[int | slice, ...] = ()
    transposed: bool = False
    columns: int = 1
    is_grouped: bool = False

    def view(self, param: Any) -> Any:
        """The slice in the order of the tensor. A view if ``param`` is a NumPy array."""
        part = param[self.index]
        part = part.swapaxes(-3, -2) if self.is_grouped else part
        return np.moveaxis(part, 0, -1) if self.transposed else part

    def shape(self, param_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor, for a parameter of shape ``param_shape``."""
        return self._merge(self.view(np.broadcast_to(np.float32(0), param_shape)).shape)

    def _merge(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape with the columns as one dimension."""
        end = len(shape) - self.transposed
        start = end - self.columns
        return (*shape[:start], math.prod(shape[start:end]), *shape[end:])

    def nbytes(self, param: Any) -> int:
        """The size of the tensor in bytes, in the dtype of the parameter."""
        return math.prod(self.shape(param.shape)) * param.dtype.itemsize

    def copy(self, param: ArrayLike, dtype: DTypeLike | None = None) -> np.ndarray:
        """Copies the tensor to host memory, contiguous. Only the slice leaves the device."""
        whole = dataclasses.replace(self, index=())
        part = whole.view(np.asarray(jnp.asarray(param)[self.index]))
        return np.array(part, dtype, order="C").reshape(self._merge(part.shape))


def check_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype that parameters are converted to.

    Raises:
        TypeError: It is not a floating dtype, or JAX would make a narrower one of it.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError as error:
        raise TypeError(f"dtype is {dtype!r}; it must be a floating dtype") from error
    if not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"dtype is {found}; it must be a floating dtype")
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise TypeError(f"dtype is {found}, which needs jax_enable_x64")
    return found


def check_shapes(found: Shapes, wanted: Shapes) -> None:
    """Checks that names and shapes are the wanted ones.

    Raises:
        ValueError: They differ. The message has the first ten differences.
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
    mapping: Mapping[str, ParamSlice],
    shapes: Shapes,
    dtype: DTypeLike,
) -> Params:
    """Assembles jaxllm parameters from tensors that are read one at a time.

    Elements that no tensor covers are zero. Host memory holds at most one parameter and one tensor
    at a time, in addition to the arrays that JAX keeps there.

    Args:
        read: The function from a tensor's name to the tensor.
        mapping: The parameter slice of each tensor.
        shapes: The shapes of the parameters by path.
        dtype: The dtype of the parameters.

    Returns:
        The parameters.
    """
    names: dict[str, list[str]] = {path: [] for path in shapes}
    for name, target in mapping.items():
        names[target.path].append(name)
    flat = {}
    for path, shape in shapes.items():
        array = np.zeros(shape, dtype)
        for name in names[path]:
            part = mapping[name].view(array)
            part[...] = read(name).reshape(part.shape)
        flat[path] = jnp.asarray(array)
    return unflatten(flat)


def stacked_arrays(params: Params, name: str = "params") -> dict[str, Any]:
    """The parameters of a model by path. Blocks in a list are stacked.

    Args:
        params: The parameters, or a tree of the same structure. The blocks are stacked or in a
            list.
        name: The name of the tree in error messages.

    Returns:
        The arrays by path.

    Raises:
        ValueError: ``params`` is not a nested dict of arrays; it has the decoding layout, which no
            file format has; or the layers in the list differ.
    """
    if not isinstance(params, dict) or "blocks" not in params:
        raise ValueError(f"{name} has no 'blocks'; it must be a dict from the model's init")
    if isinstance(params["blocks"], tuple):
        params = params | {"blocks": list(params["blocks"])}
    try:
        arrays = flatten(stack(params))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}['blocks'] is a list of layers that differ: {error}") from error
    for path, array in arrays.items():
        if isinstance(array, ops.Transposed):
            raise ValueError(
                f"{name} is in the layout of for_decoding, with a Transposed {path}; pass the "
                "original parameters"
            )
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise ValueError(
                f"{name}: {path} is of type {type(array).__name__}; it must be an array"
            )
    return arrays


def flatten(tree: Params, prefix: str = "") -> dict[str, Any]:
    """The arrays of a nested dict, by paths such as ``"blocks/mlp/down/weight"``.

    A :class:`jaxllm.ops.Quantized` gives two arrays, at ``".../q"`` and ``".../scales"``.
    """
    flat = {}
    for name, value in tree.items():
        path = prefix + name
        if isinstance(value, ops.Quantized):
            value = {"q": value.q, "scales": value.scales}
        flat |= flatten(value, f"{path}/") if isinstance(value, dict) else {path: value}
    return flat


def unflatten(flat: Mapping[str, Any]) -> Params:
    """The nested dict of arrays that :func:`flatten` gives by path."""
    tree: Params = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    return {name: _with_quantized(node) for name, node in tree.items()}


def _with_quantized(node: Any) -> Any:
    """Makes a Quantized of each dict with its two arrays."""
    if not isinstance(node, dict):
        return node
    if node.keys() == {"q", "scales"}:
        return ops.Quantized(**node)
    return {name: _with_quantized(value) for name, value in node.items()}
