"""Trains a small GPT in Flax NNX whose attention, layer norms and loss are those of jaxllm.nn.

With --plain the same model runs the attention and the norms of Flax and the loss of optax. Both
start from the same parameters and read the same batches::

    python examples/flax_nnx.py --explain
    python examples/flax_nnx.py --plain
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import small_models
from jax import Array

import jaxllm

try:
    import optax
    from flax import nnx
except ImportError as error:
    raise SystemExit(f'{error}; run: pip install "jaxllm[examples]"') from error


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    is_causal: bool = False,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    module: nnx.Module | None = None,
    **_: Any,
) -> Array:
    """Attention by jaxllm, with the arguments that ``nnx.MultiHeadAttention`` passes."""
    if (dropout_rate and not deterministic) or module is not None:
        raise ValueError("jaxllm.nn's attention has no dropout, and returns no attention weights")
    mask = None if mask is None else mask.astype(bool)  # the masks of nnx are float32 by default
    return jaxllm.nn.dot_product_attention(query, key, value, mask=mask, is_causal=is_causal)


def layer_norm(norm: nnx.LayerNorm, x: Array, *, plain: bool) -> Array:
    """The layer norm of a module."""
    if plain:
        return norm(x)
    scale, bias = norm.scale[...], norm.bias[...]  # pyright: ignore[reportOptionalSubscript]
    return jaxllm.nn.layer_norm(x, scale, bias, eps=norm.epsilon)


def cross_entropy(lm_head: nnx.Linear, hidden: Array, labels: Array, *, plain: bool) -> Array:
    """The mean cross entropy of an LM head."""
    if plain:
        logits = lm_head(hidden).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    weight = lm_head.kernel[...].astype(hidden.dtype)
    return jaxllm.nn.linear_cross_entropy(hidden, weight, labels)


class Block(nnx.Module):
    """A pre-norm block of attention and an MLP with GELU."""

    def __init__(self, width: int, heads: int, *, plain: bool, dtype: Any, rngs: nnx.Rngs):
        self.plain = plain
        self.norm1 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            heads,
            width,
            attention_fn=nnx.dot_product_attention if plain else attention,
            decode=False,
            dtype=dtype,
            rngs=rngs,
        )
        self.norm2 = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """The block of (B, T, D)."""
        x = x + self.attention(layer_norm(self.norm1, x, plain=self.plain), is_causal=True)
        return x + self.down(nnx.gelu(self.up(layer_norm(self.norm2, x, plain=self.plain))))


class GPT(nnx.Module):
    """A GPT with learned positions and an LM head of its own."""

    def __init__(self, options: argparse.Namespace, rngs: nnx.Rngs):
        width, dtype = options.width, jnp.dtype(options.dtype)
        self.plain = options.plain
        self.tokens = nnx.Embed(options.vocab_size, width, dtype=dtype, rngs=rngs)
        self.positions = nnx.Embed(options.seq_len, width, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            Block(width, options.heads, plain=options.plain, dtype=dtype, rngs=rngs)
            for _ in range(options.layers)
        )
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.lm_head = nnx.Linear(width, options.vocab_size, use_bias=False, dtype=dtype, rngs=rngs)

    def loss(self, tokens: Array, labels: Array) -> Array:
        """The mean cross entropy of (B, T) tokens."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        hidden = layer_norm(self.norm, x, plain=self.plain)
        return cross_entropy(self.lm_head, hidden, labels, plain=self.plain)


def make_step(options: argparse.Namespace) -> tuple[nnx.State, small_models.Step]:
    """The initial state, and the training step."""
    # Not jitted: XLA compiles the random numbers of 12 layers together for more than a minute.
    model = GPT(options, nnx.Rngs(options.seed))
    optimizer = nnx.Optimizer(model, optax.adamw(options.learning_rate), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, tokens, labels):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(GPT.loss)(model, tokens, labels)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    return state, step


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the model.

    Args:
        argv: The arguments; None for ``sys.argv``.
    """
    small_models.main(argv, str(__doc__), make_step)


if __name__ == "__main__":
    main()
