"""Checks of arguments: each error names the argument, what it is and what it must be.

This package imports JAX and NumPy alone, so it has its own :func:`as_bool`, equal to that of
:mod:`jaxllm.ops.checks`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def as_bool(name: str, value: Any) -> bool:
    """The bool that an option is, or that an integer stands for, in an array too.

    Raises:
        TypeError: The value is another one, even if Python counts it as true or false.
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


def as_integer(name: str, value: Any, *, least: int | None = None) -> int:
    """The Python integer that an argument is, whatever its type.

    Offsets are computed from it, and would overflow in NumPy's int32.

    Args:
        name: The argument.
        value: Its value.
        least: The smallest valid value; None for no limit.

    Raises:
        TypeError: The value is not an integer.
        ValueError: The value is below ``least``.
    """
    try:
        found = operator.index(value)
    except TypeError as error:
        raise TypeError(f"{name} is {value!r}; it must be an integer") from error
    if least is not None and found < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
    return found


def as_list(name: str, values: Iterable[T]) -> list[T]:
    """The list of an argument that has several strings or paths.

    Raises:
        TypeError: The argument is one string or path, which has characters or none at all.
    """
    if isinstance(values, str | bytes | Path):
        raise TypeError(f"{name} is {values!r}; it must be a list, such as [{values!r}]")
    return list(values)
