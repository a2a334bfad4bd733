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
) -> Any:
    """Runs a block once for each layer.

    Args:
        block: ``block(carry, layer) -> carry``.
        carry: What goes into the first block.
        layers: What belongs to each block: stacked on a leading axis, for ``lax.scan``; or a list,
            whose blocks are written one after another.
        remat: Whether each block is computed again in the backward pass, or what to keep of it.

    Returns:
        What comes out of the last block.
    """
    unrolled = isinstance(layers, list)

    def step(carry, layer):
        return block(carry, layer), None

    if remat:
        # A scan keeps its body from being merged with its recomputation; no barrier is needed.
        policy = None if remat is True else remat
        step = jax.checkpoint(step, prevent_cse=unrolled, policy=policy)
    if not unrolled:
        return jax.lax.scan(step, carry, layers)[0]
    for layer in layers:
        carry, _ = step(carry, layer)
    return carry


def with_next_norms(blocks: Any, name: str, last: Params) -> tuple[Params, Any]:
    """The layers of a stack whose blocks end with the norm that comes next.

    A norm fuses with the residual addition before it, which is the last of the block before.

    Args:
        blocks: The blocks' parameters, stacked or in a list.
        name: What the norm that a block begins with is called.
        last: The norm after all blocks.

    Returns:
        ``(first, layers)``: the norm before all blocks, and what :func:`run_blocks` takes, each
        layer of which is ``(block, norm)`` with the norm that follows the block.
    """
    if isinstance(blocks, list):
        norms = [*(block[name] for block in blocks), last]
        return norms[0], list(zip(blocks, norms[1:], strict=True))
    first = jax.tree.map(lambda layers: layers[0], blocks[name])
    following = jax.tree.map(
        lambda layers, last: jnp.concatenate([layers[1:], last[None]]), blocks[name], last
    )
    return first, (blocks, following)


def unstack(params: Params) -> Params:
    """A model's parameters with the blocks in a list, which a model runs one after another.

    XLA compiles such a model for longer, and the program is faster: no layer's weights are cut out
    of an array, nor their gradients put into one, and each GEMM sees its own bias.

    Args:
        params: The parameters, as a model's ``init`` makes them. Those without a layer axis are
            not copied.

    Returns:
        The same with a list under ``"blocks"``; :func:`stack` is the way back.
    """
    leaves, structure = jax.tree.flatten(params["blocks"])
    layers = zip(*map(list, leaves), strict=True)  # a list of an array is its rows
    return params | {"blocks": [structure.unflatten(layer) for layer in layers]}


def stack(params: Params) -> Params:
    """A model's parameters with the blocks stacked on a leading axis, which a model runs by a scan.

    Args:
        params: As :func:`unstack` returns them; stacked ones are returned as they are.
    """
    blocks = params["blocks"]
    if not isinstance(blocks, list):
        return params
    return params | {"blocks": jax.tree.map(lambda *layers: jnp.stack(layers), *blocks)}


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
