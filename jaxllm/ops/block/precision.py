"""Which GEMMs of a block have float8 operands, by the names of its layers."""

from __future__ import annotations

from collections.abc import Mapping

from jaxllm.ops.gemm.float8_operands import RECIPES, Recipe

Precision = Recipe | Mapping[str, Recipe | None] | None
"""How the linear layers of a block are multiplied: one recipe for all, or one by the name of each.

A recipe is what ``precision`` is of :func:`jaxllm.ops.linear`. Layers that are not named, and those
whose recipe is None, are multiplied in the dtype of their input.
"""


def of_layers(precision: Precision, *names: str) -> tuple[Recipe | None, ...]:
    """The recipe of each of these layers, which are all that a block has.

    Raises:
        TypeError: ``precision`` is neither a name, a mapping nor None.
        ValueError: A recipe is unknown, or ``precision`` names another layer.
    """
    check_precision(precision, *names)
    if isinstance(precision, Mapping):
        return tuple(precision.get(name) for name in names)
    return (precision,) * len(names)


def check_precision(precision: object, *names: str) -> None:
    """Raises as :func:`of_layers`."""
    wanted = ", ".join(map(repr, RECIPES))
    if precision is None or precision in RECIPES:
        return
    if isinstance(precision, str):
        raise ValueError(f"precision is {precision!r}; it must be {wanted}, None or a mapping")
    if not isinstance(precision, Mapping):
        raise TypeError(
            f"precision is of type {type(precision).__name__}; it must be {wanted}, None or a "
            "mapping from names of layers"
        )
    for name, recipe in precision.items():
        if name not in names:
            raise ValueError(f"precision names {name!r}; the layers are {', '.join(names)}")
        if recipe is not None and recipe not in RECIPES:
            raise ValueError(f"precision[{name!r}] is {recipe!r}; it must be {wanted} or None")
