"""The ids of tokens that mean something to a model."""

from __future__ import annotations

from typing import NamedTuple


class SpecialTokens(NamedTuple):
    """The ids that a model's checkpoint names, beside its parameters.

    Attributes:
        bos: The id before a text; None where none is named.
        eos: Each id that ends what the model writes.
        pad: The id that fills short texts up; None where none is named.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
