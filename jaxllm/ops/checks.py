"""Checks of arguments that every op shares: each error names the argument, and both shapes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxllm.core.precision import is_random_key

_LARGEST = float(jnp.finfo(jnp.float32).max)


def is_certain(condition: Callable[[], bool]) -> bool:
    """Whether a condition on sizes holds, whatever the values of symbolic ones."""
    try:
        return bool(condition())
    except jax.errors.InconclusiveDimensionOperation:
        return False


def check_floating(**arrays: jax.Array) -> None:
    """Raises TypeError where an argument is not an array of a floating dtype of 16 bits or more.

    JAX promotes no narrower dtype, so the reference implementations cannot compute with one.
    """
    check_floating_of_any_width(**arrays)
    for name, array in arrays.items():
        if jnp.finfo(array.dtype).bits < 16:
            raise TypeError(
                f"{name} has dtype {array.dtype}; it must be a floating-point array of 16 bits or "
                "more"
            )


def check_floating_of_any_width(**arrays: jax.Array) -> None:
    """Raises TypeError where an argument is not an array of a floating dtype, float8 included."""
    _check_kind(arrays, jnp.floating, "a floating-point array")


def check_integer(**arrays: jax.Array) -> None:
    """Raises TypeError where an argument is not an array of an integer dtype."""
    _check_kind(arrays, jnp.integer, "an integer array")


def _check_kind(arrays: dict[str, jax.Array], kind: type, wanted: str) -> None:
    for name, array in arrays.items():
        dtype = getattr(array, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, kind):
            found = f"dtype {dtype}" if dtype is not None else f"type {type(array).__name__}"
            raise TypeError(f"{name} has {found}; it must be {wanted}")


def as_array(name: str, value: Any) -> jax.Array:
    """The array that an argument is, whatever its type.

    Raises TypeError where it is none, and ValueError where it has an integer that JAX has no dtype
    for.
    """
    try:
        if value is None:  # older JAX makes NaN of it
            raise TypeError("None is no array")
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise TypeError(f"{name} has type {kind}; it must be an array of numbers") from error
    except OverflowError as error:
        kind = jax.dtypes.canonicalize_dtype(int)
        raise ValueError(f"{name} has an integer that is beyond {kind}, JAX's default") from error


def as_integers(name: str, value: Any) -> Any:
    """:func:`as_array`, but NumPy's where JAX would cut 64-bit integers: see :func:`as_int32`."""
    if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
        try:
            found = np.asarray(value)
        except (TypeError, ValueError):  # as_array says why it is none
            found = None
        if found is not None and found.dtype.kind in "iu":
            return found
    return as_array(name, value)


def as_float(name: str, value: Any) -> float:
    """The number that an option is, whatever its type; raises TypeError where it is none."""
    try:
        if isinstance(value, str | bytes):  # which float() would read
            raise TypeError("a string")
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {value!r}; it must be a number") from error
    except OverflowError as error:  # an int, of more than 308 digits
        raise ValueError(f"{name} is beyond the range of float64") from error


def as_finite(name: str, value: Any, *, least: float = -math.inf) -> float:
    """:func:`as_float`; raises ValueError where float32, the kernels' dtype, has no such number."""
    number = as_float(name, value)
    _check_finite(name, number, least)
    return number


def _check_finite(name: str, number: float, least: float = -math.inf) -> None:
    if not (abs(number) <= _LARGEST and number >= least):
        wanted = "finite in float32" if least == -math.inf else f"finite and at least {least:g}"
        raise ValueError(f"{name} is {number}; it must be {wanted}")


def as_dtype(name: str, value: Any) -> np.dtype:
    """The dtype that JAX has for an option; raises TypeError where it is none."""
    try:
        return jax.dtypes.canonicalize_dtype(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r}; it must be a dtype") from error


def as_floating_dtype(name: str, value: Any) -> np.dtype:
    """:func:`as_dtype`; raises TypeError where it is no floating dtype of 16 bits or more."""
    dtype = as_dtype(name, value)
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits < 16:
        raise TypeError(f"{name} is {dtype}; it must be a floating dtype of 16 bits or more")
    return dtype


def as_integer(name: str, value: Any, *, least: int | None = None) -> int:
    """The integer that an option is, whatever its type.

    Raises TypeError where it is none, and ValueError where it is below ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r}; it must be an integer") from error
    if least is not None and number < least:
        raise ValueError(f"{name} is {number}; it must be at least {least}")
    return number


def as_bool(name: str, value: Any) -> bool:
    """The bool that an option is, or that an integer stands for, in an array too.

    Raises TypeError for another value, also for one that Python would count as true or false.
    """
    if isinstance(value, bool):
        return value
    try:
        known = np.asarray(value)
        if known.ndim or known.dtype.kind not in "biu":
            raise TypeError("no bool")
    except (TypeError, ValueError) as error:  # a traced value is none that NumPy takes
        raise TypeError(f"{name} has {value!r}; it must be a bool, and no traced one") from error
    return bool(known)


def as_number(name: str, value: Any) -> Any:
    """:func:`as_float`; a traced scalar in float32, or in float64 where JAX has that."""
    if isinstance(value, Tracer):
        if value.shape:
            raise ValueError(f"{name} has shape {value.shape}; it must be a scalar")
        return value.astype(float)
    return as_float(name, value)


def as_finite_number(name: str, value: Any, *, least: float = -math.inf) -> Any:
    """:func:`as_number`; raises ValueError for a known one that is not finite or is too low."""
    number = as_number(name, value)
    if isinstance(number, float):
        _check_finite(name, number, least)
    return number


def as_decay(name: str, value: Any) -> Any:
    """:func:`as_number`, of a running mean: at least 0 and below 1 where it is not traced."""
    number = as_number(name, value)
    if isinstance(number, float) and not 0 <= number < 1:
        raise ValueError(f"{name} is {number}; it must have 0 <= {name} < 1")
    return number


def as_scalar(name: str, value: Any) -> jax.Array:
    """:func:`as_array`; raises ValueError where that is no scalar."""
    array = as_array(name, value)
    if array.shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be a scalar")
    return array


def check_key(key: Any) -> None:
    """Raises TypeError or ValueError where ``key`` is no single key of ``jax.random``."""
    dtype, is_typed = getattr(key, "dtype", None), is_random_key(key)
    if not is_typed and dtype != jnp.uint32:
        found = f"dtype {dtype}" if dtype is not None else f"type {type(key).__name__}"
        raise TypeError(f"key has {found}; it must be one of jax.random.key")
    if key.ndim != (0 if is_typed else 1):
        raise ValueError(f"key has shape {key.shape}; it must be a single key")
    if not is_typed:
        try:
            jax.random.wrap_key_data(key)
        except TypeError as error:  # of another length
            raise ValueError(f"key has shape {key.shape}; it must be a single key") from error


def as_int32(integers: Any) -> jax.Array:
    """Integers clipped to int32.

    A plain cast would turn 2^32 + 3 into 3. NumPy arrays are clipped by NumPy, because without
    64-bit types JAX casts them when it gets them.
    """
    found, wanted = jnp.iinfo(integers.dtype), jnp.iinfo(jnp.int32)
    if found.max > wanted.max:
        clip: Any = np.clip if isinstance(integers, np.ndarray | np.generic) else jnp.clip
        integers = clip(integers, max(wanted.min, found.min), wanted.max)
    return jnp.asarray(integers).astype(jnp.int32)


def check_shape(name: str, array: jax.Array, shape: tuple[int, ...], why: str) -> None:
    """Raises ValueError where a shape is not ``shape``; ``why`` says where that is from."""
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}, {why}")


def check_same_dtype(name: str, array: jax.Array, other_name: str, other: jax.Array) -> None:
    """Raises TypeError where two arguments differ in dtype."""
    if array.dtype != other.dtype:
        raise TypeError(
            f"{name} has dtype {array.dtype}; it must have the dtype of {other_name}, {other.dtype}"
        )


def leaf_names(tree: Any) -> list[str]:
    """The paths of a tree's leaves, such as ``"blocks/mlp/weight"``; "" for a tree that is one."""
    return [_name(path) for path in _paths(tree)]


def leaves_like(
    name: str, tree: Any, like: Any, like_name: str, *, optional: bool = False
) -> list[Any]:
    """The leaves of a tree that must have the structure of another.

    Args:
        name: What the tree is called.
        tree: The tree.
        like: The other one.
        like_name: What that is called.
        optional: Whether a leaf may be None.

    Raises:
        ValueError: The structures differ; the message names the leaves.
    """
    try:
        leaves = jax.tree.structure(like).flatten_up_to(tree)
    except (TypeError, ValueError) as error:
        raise _mismatch(name, tree, like, like_name, optional=optional) from error
    if not all(_is_leaf(leaf) or (optional and leaf is None) for leaf in leaves):
        raise _mismatch(name, tree, like, like_name, optional=optional)
    return leaves


def mask_leaves(name: str, mask: Any, like: Any, like_name: str) -> list[bool]:
    """The bool that a mask has for each leaf of a tree.

    Args:
        name: What the mask is called.
        mask: A tree of bools with the structure of the other, or a prefix of it; None for True.
        like: The other tree.
        like_name: What that is called.

    Raises:
        TypeError: A leaf of the mask is no bool that is known while the program is traced.
        ValueError: The mask is no prefix of the other tree; the message names the leaves.
    """
    found: list[Any] = []
    try:
        jax.tree.map(
            lambda leaf, part: found.extend([leaf] * len(jax.tree.leaves(part))),
            True if mask is None else mask,
            like,
        )
    except (TypeError, ValueError) as error:
        raise _mismatch(name, mask, like, like_name, is_prefix=True) from error
    return [as_bool(name, leaf) for leaf in found]


def _is_leaf(value: Any) -> bool:
    return jax.tree_util.treedef_is_leaf(jax.tree.structure(value))


def _name(path: Iterable[Any]) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def _paths(tree: Any, *, with_none: bool = False) -> list[tuple]:
    is_leaf = (lambda x: x is None) if with_none else None
    return [path for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]


def _mismatch(
    name: str,
    tree: Any,
    like: Any,
    like_name: str,
    *,
    optional: bool = False,
    is_prefix: bool = False,
) -> ValueError:
    """The error that says in which leaves two trees differ."""
    wanted = _paths(like)
    found = _paths(tree, with_none=optional)
    if optional:
        empty = set(_paths(like, with_none=True)) - set(wanted)
        found = [path for path in found if path not in empty or path in _paths(tree)]

    def is_covered(path: tuple, by: list[tuple]) -> bool:
        return any(path[: len(other)] == other if is_prefix else path == other for other in by)

    faults = [f"{_name(path)} is missing" for path in wanted if not is_covered(path, found)]
    expected = {path[:n] for path in wanted for n in range(len(path) + 1)}
    if not is_prefix:
        expected = set(wanted)
    faults += [f"{_name(path)} is unexpected" for path in found if path not in expected]
    if len(faults) > 5:
        faults[5:] = [f"and {len(faults) - 5} more"]
    # The root has no name, and containers of two types may have the same names in them.
    if () in (*found, *wanted) or not faults:
        found, wanted = jax.tree.structure(tree), jax.tree.structure(like)
        begin = "a prefix of " if is_prefix else ""
        return ValueError(
            f"{name} has the structure {found}; it must be {begin}that of {like_name}, {wanted}"
        )
    return ValueError(f"{name} differs from {like_name} in structure: {'; '.join(faults)}")


def check_layer(
    weight_name: str,
    weight: jax.Array,
    bias_name: str,
    bias: jax.Array | None,
    x: Any,
    x_name: str = "x",
    columns: str = "D_out",
    *,
    in_parts: bool = False,
) -> None:
    """Checks a linear layer that is applied to ``x``, or to what has its shape and dtype.

    With ``in_parts`` the columns may have several dimensions.
    """
    check_floating(**{x_name: x, weight_name: weight})
    if x.ndim == 0:
        raise ValueError(f"{x_name} has shape (); it must have a last axis to multiply along")
    fits = 2 <= weight.ndim <= 4 if in_parts else weight.ndim == 2
    if not fits or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"{weight_name} has shape {weight.shape}; it must be ({x.shape[-1]}, {columns}), with "
            f"as many rows as {x_name} {x.shape} has columns"
        )
    check_same_dtype(weight_name, weight, "x", x)
    if bias is not None:
        check_floating(**{bias_name: bias})
        why = f"the columns of {weight_name} {weight.shape}"
        check_shape(bias_name, bias, weight.shape[1:], why)
        check_same_dtype(bias_name, bias, "x", x)


def check_pre_norm(
    x: jax.Array, scale: jax.Array, bias_name: str, bias: jax.Array | None
) -> jax.Array:
    """Checks the norm of ``x``; returns its bias, zeros where that is None."""
    why = f"the width of x {x.shape}"
    check_floating(scale=scale)
    check_shape("scale", scale, x.shape[-1:], why)
    if bias is None:
        return jnp.zeros_like(scale)
    check_floating(**{bias_name: bias})
    check_shape(bias_name, bias, x.shape[-1:], why)
    check_same_dtype(bias_name, bias, "scale", scale)
    return bias


def check_way_back(weight_name: str, weight: jax.Array, x: jax.Array) -> None:
    """Raises ValueError where a layer's result is not as wide as ``x``, which it is added to."""
    if weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{weight_name} has shape {weight.shape}; it must be ({weight.shape[0]}, "
            f"{x.shape[-1]}) for its result to be added to x {x.shape}"
        )
