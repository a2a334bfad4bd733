"""The forms that the weight of a linear layer may have."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float, Int8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transposed:
    """A weight stored by its outputs, as decoding reads it fastest; for inference.

    Attributes:
        array: ``(..., out, in)``.
    """

    array: Float[Array, "*L D_out D_in"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """A weight in int8, stored by its outputs, with scales along the input; for inference.

    Attributes:
        q: ``(..., out, in)``, as :func:`jaxllm.ops.quantize` rounds it.
        scales: One for each group of ``in / groups`` elements of a row, ``(..., out, groups)``.
    """

    q: Int8[Array, "*L D_out D_in"]
    scales: Float[Array, "*L D_out G"]


Weight = Array | Transposed | Quantized


def is_weight(node: object) -> bool:
    """Whether a node of a parameter tree is a weight in a form of its own."""
    return isinstance(node, Transposed | Quantized)


for _form, _fields in ((Transposed, ("array",)), (Quantized, ("q", "scales"))):
    jax.export.register_pytree_node_serialization(
        _form,
        serialized_name=f"jaxllm.{_form.__name__}",
        serialize_auxdata=lambda aux: b"",
        deserialize_auxdata=lambda data: (),
    )
