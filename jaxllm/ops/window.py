"""Windows of attention: how far from its own position a query sees.

A query at position p sees the keys from ``p - left`` to ``p + right``::

    keys   . . . # # # p # # . . .        left = 3, right = 2, the window (3, 2)
    keys   # # # # # # p . . . . .        no left, right = 0, a causal mask
    keys   . . . . # # p # # . . .        left = right = 2, the window 3

An integer counts the query's own position: ``w`` stands for ``(w - 1, w - 1)``.
"""

from __future__ import annotations

from jaxllm.ops.checks import as_integer, is_certain

Window = int | tuple[int | None, int | None] | None

_MOST_TOKENS = 2**31 - 1  # of a sequence: positions are int32


def sides(causal: bool, window: Window) -> tuple[int | None, int | None]:
    """``(left, right)``, None on a side where nothing but the ends of the keys ends the window."""
    if isinstance(window, tuple):
        left, right = window
    else:
        left = right = None if window is None else window - 1
    return left, 0 if causal else right


def shortest(causal: bool, window: Window) -> tuple[bool, Window]:
    """The same mask in its shortest form: only a window with unequal sides stays a pair."""
    left, right = sides(causal, window)
    size = None if left is None else left + 1
    if right == 0:
        return True, size
    return False, size if left == right else (left, right)


def check_window(window: object) -> Window:
    """The window that an option is; a side beyond the longest sequence is None.

    Raises:
        TypeError: It is no integer and no pair of integers.
        ValueError: It does not have the query's own position.
    """
    if window is None:
        return None
    if not isinstance(window, tuple | list):
        size = as_integer("window", window, least=1)
        return size if size <= _MOST_TOKENS else None
    if len(window) != 2:
        raise ValueError(f"window is {window!r}; it must be an integer or a pair, (left, right)")
    left, right = (None if side is None else as_integer("window", side) for side in window)
    if min(left or 0, right or 0) < 0:
        raise ValueError(f"window is {window!r}; left and right must be at least 0, or None")
    left, right = (None if (side or 0) >= _MOST_TOKENS else side for side in (left, right))
    return left, right


def last_tokens(window: object) -> int | None:
    """How many tokens the last query of a sequence sees, itself included; None for all.

    Raises:
        TypeError: As :func:`check_window`.
        ValueError: Likewise.
    """
    left, _ = sides(True, check_window(window))
    return None if left is None else left + 1


def is_ring(holder: str, slots: int, window: int | None) -> bool:
    """Whether a cache with so many slots holds the tokens of a window only.

    Args:
        holder: What has the slots, for the error message.
        slots: Those of a sequence.
        window: As of :func:`last_tokens`.

    Raises:
        ValueError: It has more slots: attention to it would see tokens before the window.
    """
    if window is None or is_certain(lambda: slots < window):
        return False
    if not is_certain(lambda: slots == window):
        raise ValueError(
            f"{holder} has {slots} slots; with a window of {window} it must have at most as many, "
            "as init_cache makes it"
        )
    return True
