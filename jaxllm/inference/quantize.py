"""The int8 form of a model's parameters: each matrix as numbers and scales, the rest as it is."""

from __future__ import annotations

import jax
from jax import Array

from jaxllm import ops
from jaxllm.models.blocks import Params


def quantize_params(params: Params, *, group_size: int = 64) -> Params:
    """Rounds the matrices of a GPT-2 or a Llama 3 to int8, one scale a group along the input.

    Both models take the result wherever they take parameters, but cannot be trained with it. The
    matrices of the blocks and the head are rounded; a head that is tied to the token table becomes
    an array of its own, since the table stays as it is. Cast to the dtype to compute in before:
    the scales stay float32.

    Args:
        params: As a model's ``init`` makes them, stacked or in a list.
        group_size: Weights to a scale; it divides each matrix's input width. A power of two from 64
            on is fastest.

    Returns:
        The parameters with ``weight_q``, int8 (..., out, in), and ``weight_scales``, float32 (...,
        out, in / group_size), in the place of each ``weight``, and with a ``head`` likewise.

    Raises:
        ValueError: A matrix's input width is not a multiple of ``group_size``, or the parameters
            are int8 already.
    """
    head = params.get("head", params["wte"])
    if isinstance(head, dict):
        raise ValueError("params are int8 already; head has weight_q")

    def rounded(name: str, matrix: Array) -> Params:
        if matrix.shape[-1] % group_size:
            raise ValueError(
                f"{name} has shape {matrix.shape}, (..., out, in); group_size {group_size} must "
                f"divide its input width {matrix.shape[-1]}"
            )
        q, scales = ops.quantize(matrix, group_size=group_size)
        return {"weight_q": q, "weight_scales": scales}

    def walk(tree: Params, path: str) -> Params:
        found: Params = {}
        for key, value in tree.items():
            name = f"{path}.{key}"
            if isinstance(value, dict):
                found[key] = walk(value, name)
            elif key == "weight":
                found |= rounded(name, value.swapaxes(-1, -2))
            elif key == "weight_t":
                found |= rounded(name, value)
            else:
                found[key] = value
        return found

    blocks = params["blocks"]
    if isinstance(blocks, list):
        blocks = [walk(layer, f"blocks.{i}") for i, layer in enumerate(blocks)]
    else:
        blocks = walk(blocks, "blocks")
    return {**params, "blocks": blocks, "head": rounded("head", head)}


def size_in_bytes(params: Params) -> int:
    """The memory that parameters take, in whatever form."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))
