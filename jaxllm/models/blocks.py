"""What the models share: how a stack of blocks is run, and which tokens they take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

Params = dict[str, Any]
Policy = Callable[..., bool]  # one of jax.checkpoint_policies

# Keeps what matrix products and attention gave, and computes norms, rotations and activations
# again: memory for little time. The names are those that the ops give their outputs.
SAVE_PRODUCTS = jax.checkpoint_policies.save_only_these_names("linear", "flash_attention")


def run_blocks(
    block: Callable[[Any, Any], Any],
    carry: Any,
    layers: Any,
    *,
    remat: bool | Policy = False,
    unroll: bool = False,
) -> Any:
    """Runs a block once for each layer.

    Args:
        block: ``block(carry, layer) -> carry``.
        carry: What goes into the first block.
        layers: The blocks' parameters, stacked on a leading axis.
        remat: Whether each block is computed again in the backward pass, or what to keep of it.
        unroll: Whether the blocks are written one after another, or run by ``lax.scan``.

    Returns:
        What comes out of the last block.
    """

    def step(carry, layer):
        return block(carry, layer), None

    if remat:
        # A scan keeps its body from being merged with its recomputation; no barrier is needed.
        policy = None if remat is True else remat
        step = jax.checkpoint(step, prevent_cse=unroll, policy=policy)
    if not unroll:
        return jax.lax.scan(step, carry, layers)[0]
    for layer in _unstack(layers):
        carry, _ = step(carry, layer)
    return carry


def _unstack(stacked: Any) -> list[Any]:
    """The layers apart. The gradient of lax.split is one concatenation; that of an index would be
    an array of all layers, padded with zeros, for each layer.
    """
    parts = jax.tree.map(lambda x: jax.lax.split(x, (1,) * len(x)), stacked)
    structure = jax.tree.structure(stacked)
    by_layer = zip(*structure.flatten_up_to(parts), strict=True)
    return [structure.unflatten([x[0] for x in layer]) for layer in by_layer]


def shift_norms(norms: Params, last: Params) -> tuple[Params, Params]:
    """The norms of a stack whose blocks end with the norm that comes next.

    A norm fuses with the residual addition before it, which is the last of the block before.

    Args:
        norms: The norms that blocks begin with, stacked.
        last: The norm after all blocks.

    Returns:
        ``(first, following)``: the norm before all blocks, and for each block the one that follows,
        stacked.
    """
    first = jax.tree.map(lambda layers: layers[0], norms)
    following = jax.tree.map(
        lambda layers, last: jnp.concatenate([layers[1:], last[None]]), norms, last
    )
    return first, following


def check_tokens(tokens: Array, max_seq_len: int) -> None:
    """Checks what goes into a model.

    Raises:
        TypeError: ``tokens`` is not of an integer dtype.
        ValueError: ``tokens`` is not of shape (B, T), or T is beyond ``max_seq_len``.
    """
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"tokens has dtype {tokens.dtype}; it must be an integer array")
    if tokens.ndim != 2:
        raise ValueError(f"tokens has shape {tokens.shape}; it must be (B, T)")
    if tokens.shape[1] > max_seq_len:
        raise ValueError(
            f"tokens has shape {tokens.shape}, sequences of {tokens.shape[1]}; the model has "
            f"max_seq_len {max_seq_len}"
        )


def check_sizes(**sizes: int) -> None:
    """Raises ValueError with the name of a size that is below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be >= 1")


def pad_vocab(vocab_size: int) -> int:
    """``vocab_size`` rounded up to a multiple of 128, for the product that makes the logits."""
    return -(-vocab_size // 128) * 128


def count(shapes: Any) -> int:
    """How many numbers the arrays of a structure hold."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
