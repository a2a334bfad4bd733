"""The int8 form of a model's parameters: each weight as a ``Quantized``, the rest as it is."""

from __future__ import annotations

import jax
from jax import Array

from jaxllm import ops
from jaxllm.models.common import Params, in_usual_order, lm_head, map_weights
from jaxllm.ops.checks import as_integer


def quantize_params(params: Params, *, group_size: int = 64) -> Params:
    """Rounds the matrices of a GPT-2 or a Llama 3 to int8, one scale a group along the input.

    Both models take the result wherever they take parameters, but cannot be trained with it. The
    matrices of the blocks and the LM head are rounded. An LM head that is tied to the token table
    becomes an array of its own; the table stays as it is. Cast to the compute dtype
    first: the scales stay float32.

    Args:
        params: As a model's ``init`` makes them, stacked or in a list.
        group_size: Weights to a scale; it divides each matrix's input width. A power of two from 64
            on is fastest.

    Returns:
        The parameters with a :class:`jaxllm.ops.Quantized` instead of each ``weight`` and of
        ``lm_head``.

    Raises:
        TypeError: ``group_size`` is no integer.
        ValueError: ``group_size`` is below 1, a matrix's input width is not a multiple of it, or
            the parameters are int8 already.
    """
    group_size = as_integer("group_size", group_size, least=1)
    head = lm_head(params)
    if isinstance(head, ops.Quantized):
        raise ValueError("params are int8 already; lm_head is a Quantized")

    def rounded(name: str, weight: Array | ops.Transposed) -> ops.Quantized:
        is_transposed = isinstance(weight, ops.Transposed)
        matrix = weight.array if is_transposed else weight.swapaxes(-1, -2)
        if matrix.shape[-1] % group_size:
            raise ValueError(
                f"{name} has shape {matrix.shape}, (..., out, in); group_size {group_size} must "
                f"divide its input width {matrix.shape[-1]}"
            )
        return ops.Quantized(*ops.quantize(matrix, group_size=group_size))

    blocks = params["blocks"]
    if isinstance(blocks, list):
        layers = enumerate(map(in_usual_order, blocks))
        blocks = [map_weights(rounded, layer, f"blocks.{i}") for i, layer in layers]
    else:
        blocks = map_weights(rounded, in_usual_order(blocks, is_stacked=True), "blocks")
    return {**params, "blocks": blocks, "lm_head": rounded("lm_head", ops.Transposed(head))}


def size_in_bytes(params: Params) -> int:
    """The memory that parameters take, in any form."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))
