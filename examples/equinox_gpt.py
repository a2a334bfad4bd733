"""Trains a small GPT in Equinox whose attention, layer norms and loss are those of jaxllm.nn.

With --plain the same model runs the attention of jax.nn, the norms of Equinox and the loss of
optax. Both start from the same parameters and read the same batches::

    python examples/equinox_gpt.py --explain
    python examples/equinox_gpt.py --plain
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import small_models
from jax import Array

import jaxllm

try:
    import equinox as eqx
    import optax
except ImportError as error:
    raise SystemExit(f'{error}; run: pip install "jaxllm[examples]"') from error


def each_token(layer: Callable, x: Array) -> Array:
    """Applies a layer of Equinox, which takes one token, to (B, T, ...)."""
    return jax.vmap(jax.vmap(layer))(x)


def layer_norm(norm: eqx.nn.LayerNorm, x: Array, *, plain: bool) -> Array:
    """The layer norm of a module."""
    if plain:
        return each_token(norm, x)
    return jaxllm.nn.layer_norm(x, norm.weight, norm.bias, eps=norm.eps)


def cross_entropy(lm_head: eqx.nn.Linear, hidden: Array, labels: Array, *, plain: bool) -> Array:
    """The mean cross entropy of an LM head."""
    if plain:
        logits = each_token(lm_head, hidden).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return jaxllm.nn.linear_cross_entropy(hidden, lm_head.weight, labels, transpose_weight=True)


class Block(eqx.Module):
    """A pre-norm block of attention and an MLP with GELU."""

    norm1: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    norm2: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)
    plain: bool = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, plain: bool, key: Array):
        keys = jax.random.split(key, 4)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.qkv = eqx.nn.Linear(width, 3 * width, key=keys[0])
        self.out = eqx.nn.Linear(width, width, key=keys[1])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[2])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[3])
        self.heads, self.plain = heads, plain

    def __call__(self, x: Array) -> Array:
        """The block of (B, T, D)."""
        x = x + self.attention(layer_norm(self.norm1, x, plain=self.plain))
        hidden = each_token(self.up, layer_norm(self.norm2, x, plain=self.plain))
        return x + each_token(self.down, jax.nn.gelu(hidden))

    def attention(self, x: Array) -> Array:
        """Causal attention of (B, T, D)."""
        attend = jax.nn if self.plain else jaxllm.nn
        qkv = each_token(self.qkv, x).reshape(*x.shape[:2], 3, self.heads, -1)
        query, key, value = jnp.unstack(qkv, axis=2)
        out = attend.dot_product_attention(query, key, value, is_causal=True)
        return each_token(self.out, out.reshape(x.shape))


class GPT(eqx.Module):
    """A GPT with learned positions and an LM head of its own."""

    tokens: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    lm_head: eqx.nn.Linear
    plain: bool = eqx.field(static=True)

    def __init__(self, options: argparse.Namespace, key: Array):
        width, plain = options.width, options.plain
        keys = jax.random.split(key, 3 + options.layers)
        self.tokens = eqx.nn.Embedding(options.vocab_size, width, key=keys[0])
        self.positions = eqx.nn.Embedding(options.seq_len, width, key=keys[1])
        self.blocks = [Block(width, options.heads, plain=plain, key=key) for key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)
        self.lm_head = eqx.nn.Linear(width, options.vocab_size, use_bias=False, key=keys[2])
        self.plain = plain

    def loss(self, tokens: Array, labels: Array) -> Array:
        """The mean cross entropy of (B, T) tokens."""
        positions = jax.vmap(self.positions)(jnp.arange(tokens.shape[1]))
        x = each_token(self.tokens, tokens) + positions
        for block in self.blocks:
            x = block(x)
        hidden = layer_norm(self.norm, x, plain=self.plain)
        return cross_entropy(self.lm_head, hidden, labels, plain=self.plain)


def make_step(options: argparse.Namespace) -> tuple[Any, small_models.Step]:
    """The initial state, and the training step."""
    optimizer = optax.adamw(options.learning_rate)

    @jax.jit
    def create(key: Array) -> tuple[Any, optax.OptState]:
        model: Any = GPT(options, key)
        return model, optimizer.init(model)

    def loss_fn(model: GPT, tokens: Array, labels: Array) -> Array:
        cast = jax.tree.map(lambda x: x.astype(options.dtype), model)
        return cast.loss(tokens, labels)

    # All leaves of this model are arrays. Where some are functions, use the eqx.filter_... forms.
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, tokens, labels):
        model, optimizer_state = state
        loss, gradients = jax.value_and_grad(loss_fn)(model, tokens, labels)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, model)
        return (eqx.apply_updates(model, updates), optimizer_state), loss

    return create(jax.random.key(options.seed)), step


def main(argv: Sequence[str] | None = None) -> None:
    """Trains the model.

    Args:
        argv: The arguments; None for ``sys.argv``.
    """
    small_models.main(argv, str(__doc__), make_step)


if __name__ == "__main__":
    main()
