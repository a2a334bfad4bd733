"""Checked values of a ``config.json``: each error names the key and its value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def integer(config: Mapping[str, Any], key: str) -> int:
    """The value of a key that must be an integer below 2**31."""
    value = present(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value >= 2**31:
        raise ValueError(f"{key} is {shown(value)}; it must be an integer below 2**31")
    return value


def number(config: Mapping[str, Any], key: str) -> float:
    """The value of a key that must be a finite number."""
    value = present(config, key)
    # JSON may have integers beyond the range of a float, and NaN.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
        raise ValueError(f"{key} is {shown(value)}; it must be a finite number")
    return float(value)


def present(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key that must not be missing."""
    if key not in config:
        raise ValueError(f"{key} is missing")
    return config[key]


def expect(config: Mapping[str, Any], key: str, *wanted: Any) -> None:
    """Raises ValueError if a key has another value than ``wanted``; the first is the default."""
    value = config.get(key, wanted[0])
    if value not in wanted:
        raise ValueError(f"{key} is {shown(value)}; it must be {' or '.join(map(repr, wanted))}")


def shown(value: Any) -> str:
    """The repr of a value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
