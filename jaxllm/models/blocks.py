"""What the models share: how a stack of blocks is run, and which tokens they take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm import ops
from jaxllm.ops.checks import is_certain

Params = dict[str, Any]
FEW_ROWS = 16  # that a product reads its matrix once for
_MANY_ROWS = 4096  # that the head takes at once: for fewer the op knows better
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


def project(
    x: Array,
    *,
    weight: Array | None = None,
    weight_t: Array | None = None,
    weight_q: Array | None = None,
    weight_scales: Array | None = None,
    bias: Array | None = None,
    activation: Literal["gelu"] | None = None,
) -> Array:
    """A linear layer in whatever form its weight has.

    Args:
        x: The rows.
        weight: The weight, ``(in, out)``, as it is trained.
        weight_t: Or transposed, ``(out, in)``, as it is decoded with (see :func:`for_decoding`).
        weight_q: Or as int8, ``(out, in)``, as :mod:`jaxllm.inference.quantize` makes it.
        weight_scales: With ``weight_q``: the scales of its groups.
        bias: One offset a column of the output.
        activation: As in :func:`jaxllm.ops.linear`.
    """
    if weight is not None:
        return ops.linear(x, weight, bias, activation=activation)
    rows = x.reshape(-1, x.shape[-1])
    few = is_certain(lambda: 1 <= rows.shape[0] <= FEW_ROWS)
    if weight_q is not None and weight_scales is not None:
        product = ops.quantized_matvec if few else ops.quantized_matmul
        out = product(weight_q, weight_scales, rows)
    else:
        assert weight_t is not None, "a linear layer without a weight"
        out = ops.matvec(weight_t, rows) if few else ops.linear(rows, weight_t.T)
    if bias is not None:
        out = out + bias[None, :]
    if activation is not None:
        out = ops.gelu(out)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def head_of(params: Params) -> Array | Params:
    """The head's matrix, one row a token, or its int8 form: the token table where it is tied."""
    return params["head"] if "head" in params else params["wte"]


def logits(x: Array, head: Array | Params) -> Array:
    """The logits of what comes out of the last norm."""
    return project(x, **head) if isinstance(head, dict) else ops.linear(x, head.T)


def next_logits(x: Array, head: Array | Params) -> Array:
    """:func:`logits` of one place a sequence, (B, D), for decoding: they have no derivative."""
    return project(x, **head) if isinstance(head, dict) else project(x, weight_t=head)


def head_loss(
    params: Params,
    hidden: Array,
    labels: Array,
    vocab_size: int,
    kept: int,
    ignore_index: int | None = None,
) -> Float[Array, ""]:
    """The mean cross entropy of the labels, of what comes out of the last norm.

    Args:
        params: The model's parameters.
        hidden: What the head is applied to, (B, T, D).
        labels: The token that follows each token.
        vocab_size: Without the padding.
        kept: Numbers that the blocks keep of each token for the backward pass. The fewer chunks of
            rows, the faster their products: the logits of one may take two fifths as much.
        ignore_index: As in :func:`jaxllm.ops.cross_entropy`.
    """
    head = widen(head_of(params), params["wte"].dtype)
    rows = 2 * labels.size * kept // (5 * head.shape[0])
    return ops.linear_cross_entropy(
        hidden,
        head,
        labels,
        transpose_weight=True,
        ignore_index=ignore_index,
        vocab_size=vocab_size,
        chunk_rows=rows if is_certain(lambda: rows >= _MANY_ROWS) else None,
    )


def widen(table: Array | Params, dtype: Any) -> Array:
    """A table as an array, whether or not it is int8."""
    if isinstance(table, dict):
        return ops.dequantize(table["weight_q"], table["weight_scales"]).astype(dtype)
    return table


def for_decoding(params: Params) -> Params:
    """The parameters as decoding reads them fastest: each layer apart, each weight by its outputs.

    :func:`jaxllm.inference.generate.complete` does this itself; do it before, to do it once for
    many calls.

    Args:
        params: A model's parameters, or their int8 form.

    Returns:
        Parameters for ``prefill`` and ``decode_step``, of which ``blocks`` is a list of layers.
    """

    def turn(tree: Params) -> Params:
        return {
            "weight_t" if key == "weight" else key: (
                turn(value) if isinstance(value, dict) else value.T if key == "weight" else value
            )
            for key, value in tree.items()
        }

    return {**params, "blocks": [turn(layer) for layer in layers_of(params)]}


def layers_of(params: Params) -> list[Params]:
    """The blocks' parameters, a layer at a time."""
    blocks = params["blocks"]
    return blocks if isinstance(blocks, list) else unstack(params)["blocks"]


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
    if is_certain(lambda: tokens.shape[1] > max_seq_len):
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
