"""GPT-2: embeddings, pre-norm blocks of attention and MLP, and a head tied to the token table.

Parameters are a nested dict of arrays, weights ``(in, out)``, layers stacked on a leading axis::

    wte (Vp, D)  wpe (P, D)
    blocks   ln1, ln2          scale (L, D)         bias (L, D)
             attention   qkv   weight (L, D, 3D)    bias (L, 3D)
                         out   weight (L, D, D)     bias (L, D)
             mlp         up    weight (L, D, 4D)    bias (L, 4D)
                         down  weight (L, 4D, D)    bias (L, D)
    ln_f     scale (D)  bias (D)

The model computes in the dtype of its parameters; cast them first to compute in another. The
vocabulary is padded to Vp, a multiple of 128, for the sake of the matrix product that makes the
logits; the padding has rows of zeros in ``wte`` and is left out of the loss.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners"; llm.c.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from jaxllm import ops
from jaxllm.models.blocks import (
    Params,
    Policy,
    check_sizes,
    check_tokens,
    count,
    head_loss,
    head_of,
    layers_of,
    logits,
    next_logits,
    pad_vocab,
    project,
    run_blocks,
)
from jaxllm.models.cache import (
    KVCache,
    attend_prompt,
    attend_token,
    check_prompts,
    make_cache,
)
from jaxllm.models.special_tokens import SpecialTokens


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """The shape of a GPT-2; the defaults are the 124M model's.

    Attributes:
        vocab_size: Tokens.
        max_seq_len: Positions that the position table has rows for.
        layers: Blocks.
        heads: Attention heads; they divide ``width``.
        width: The residual stream's width.
        special_tokens: What a checkpoint names as the begin, the ends and the padding of a text.
            Configs that differ in nothing else are equal.

    Raises:
        ValueError: A size is below 1, or ``heads`` does not divide ``width``.
    """

    vocab_size: int = 50257
    max_seq_len: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    special_tokens: SpecialTokens = dataclasses.field(default=SpecialTokens(), compare=False)

    def __post_init__(self):
        check_sizes(
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
            layers=self.layers,
            heads=self.heads,
            width=self.width,
        )
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.width // self.heads

    @property
    def padded_vocab_size(self) -> int:
        """``vocab_size`` rounded up to a multiple of 128: the rows of the token table."""
        return pad_vocab(self.vocab_size)


PRESETS = {
    "d6": GPT2Config(layers=6, heads=6, width=384),
    "d12": GPT2Config(layers=12, heads=12, width=768),  # 124M
    "d24": GPT2Config(layers=24, heads=16, width=1024),  # 350M
    "d36": GPT2Config(layers=36, heads=20, width=1280),  # 774M
    "d48": GPT2Config(layers=48, heads=25, width=1600),  # 1558M
}


def init(key: PRNGKeyArray, config: GPT2Config) -> Params:
    """Random parameters in float32, as llm.c and GPT-2 draw them.

    Weights and tables are normal with deviation 0.02, but for the two projections of each block
    that add to the residual stream, 0.02/sqrt(2L); biases are zero and scales one. The padded rows
    of ``wte`` are zero, and their gradient is too.

    Args:
        key: A JAX random key.
        config: The shape.
    """
    L, D = config.layers, config.width
    keys = iter(jax.random.split(key, 6))

    def normal(*shape: int, std: float = 0.02) -> Array:
        return std * jax.random.normal(next(keys), shape, jnp.float32)

    def zeros(*shape: int) -> Array:
        return jnp.zeros(shape, jnp.float32)

    def linear(d_in: int, d_out: int, std: float = 0.02) -> Params:
        return {"weight": normal(L, d_in, d_out, std=std), "bias": zeros(L, d_out)}

    def norm(*shape: int) -> Params:
        return {"scale": jnp.ones(shape, jnp.float32), "bias": zeros(*shape)}

    residual_std = 0.02 / math.sqrt(2 * L)
    padding = config.padded_vocab_size - config.vocab_size
    return {
        "wte": jnp.pad(normal(config.vocab_size, D), ((0, padding), (0, 0))),
        "wpe": normal(config.max_seq_len, D),
        "blocks": {
            "ln1": norm(L, D),
            "attention": {"qkv": linear(D, 3 * D), "out": linear(D, D, residual_std)},
            "ln2": norm(L, D),
            "mlp": {"up": linear(D, 4 * D), "down": linear(4 * D, D, residual_std)},
        },
        "ln_f": norm(D),
    }


def forward(
    params: Params,
    tokens: Integer[Array, "B T"],
    config: GPT2Config,
    *,
    remat: bool | Policy = False,
) -> Float[Array, "B T Vp"]:
    """The logits of the token after each token.

    Args:
        params: As :func:`init` makes them, in the dtype to compute in.
        tokens: Integers; those outside the vocabulary are clamped as in :func:`jaxllm.ops.embed`.
        config: The shape that ``params`` was made with.
        remat: Recompute each block in the backward pass, and keep its input alone; or what else
            to keep, as one of ``jax.checkpoint_policies`` or
            ``jaxllm.models.blocks.SAVE_PRODUCTS``.

    Returns:
        Logits over the padded vocabulary, in the dtype of ``params``. The columns from
        ``config.vocab_size`` on mean nothing.

    Raises:
        TypeError: ``tokens`` is not of an integer dtype.
        ValueError: ``tokens`` is not of shape (B, T), or T is beyond ``config.max_seq_len``.
    """
    hidden, table = _hidden(params, tokens, config, remat)
    return logits(hidden, head_of({**params, "wte": table}))


def loss(
    params: Params,
    tokens: Integer[Array, "B T"],
    labels: Integer[Array, "B T"],
    config: GPT2Config,
    *,
    remat: bool | Policy = False,
    ignore_index: int | None = None,
) -> Float[Array, ""]:
    """The mean cross entropy of the labels, in float32.

    Args:
        params: As in :func:`forward`.
        tokens: As in :func:`forward`.
        labels: The token that follows each token. A label that is ignored leaves its place out of
            the mean; any other one outside the vocabulary makes the loss NaN.
        config: As in :func:`forward`.
        remat: As in :func:`forward`.
        ignore_index: The label that is ignored; None for every negative label. As in
            :func:`jaxllm.ops.cross_entropy`.

    Raises:
        TypeError: ``tokens`` or ``labels`` is not of an integer dtype.
        ValueError: As in :func:`forward`, or ``labels`` differs from ``tokens`` in shape.
    """
    hidden, table = _hidden(params, tokens, config, remat)
    # The inputs of four products, two of which are norms', queries, keys and values, GELU's slope.
    kept = 0 if remat else config.layers * 14 * config.width
    return head_loss(
        {**params, "wte": table}, hidden, labels, config.vocab_size, kept, ignore_index
    )


def empty_cache(config: GPT2Config, batch: int, room: int, dtype: DTypeLike) -> KVCache:
    """A cache for :func:`prefill`, of ``batch`` sequences of at most ``room`` tokens.

    Args:
        config: The model's shape.
        batch: Sequences.
        room: Tokens of each, prompt and all.
        dtype: That of the model's parameters, or int8.
    """
    return make_cache(config.layers, batch, room, config.heads, config.head_width, dtype)


def prefill(
    params: Params,
    tokens: Integer[Array, "B T"],
    lengths: Integer[Array, " B"],
    config: GPT2Config,
    cache: KVCache,
) -> tuple[Float[Array, "B Vp"], KVCache]:
    """Reads prompts into an empty cache, as :func:`jaxllm.models.llama3.prefill` does."""
    check_prompts(tokens, lengths, config.max_seq_len, cache)
    x, cache = _cached(params, tokens, params["wpe"], config, cache, attend_prompt)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    cache = cache._replace(lengths=lengths.astype(jnp.int32))
    return next_logits(last, head_of(params)), cache


def decode_step(
    params: Params, tokens: Integer[Array, " B"], config: GPT2Config, cache: KVCache
) -> tuple[Float[Array, "B Vp"], KVCache]:
    """Reads one more token of each sequence, as :func:`jaxllm.models.llama3.decode_step` does."""
    # One sequence at a time has its position's row.
    positions = params["wpe"][cache.lengths][:, None]
    x, cache = _cached(params, tokens[:, None], positions, config, cache, attend_token)
    cache = cache._replace(lengths=cache.lengths + 1)
    return next_logits(x[:, 0], head_of(params)), cache


def num_params(config: GPT2Config) -> int:
    """How many numbers the parameters hold, the padding of the vocabulary included."""
    return count(jax.eval_shape(lambda: init(jax.random.key(0), config)))


def flops_per_token(config: GPT2Config, seq_len: int) -> int:
    """Floating-point operations of one training step, forward and backward, for one token.

    ``6 M + 12 L T D``, where M counts the parameters that are factors of a matrix product (the
    weights of the blocks and the padded head; no position table, norm or bias), each of which costs
    a multiplication and an addition forward and twice that backward; and the second term is the two
    products of attention at full length T, as if there were no causal mask. This is the convention
    of PaLM's appendix B (arXiv:2204.02311); recomputation does not count.

    Args:
        config: The shape.
        seq_len: T, tokens in a sequence.
    """
    L, D = config.layers, config.width
    factors = 12 * L * D * D + config.padded_vocab_size * D
    return 6 * factors + 12 * L * seq_len * D


def _cached(
    params: Params, tokens: Array, positions: Array, config: GPT2Config, cache: KVCache, attend
) -> tuple[Array, KVCache]:
    """What the head is applied to, (B, T, D), of tokens that see a cache, and the new cache."""
    layers = layers_of(params)
    next_norms = [*(layer["ln1"] for layer in layers[1:]), params["ln_f"]]
    if positions.ndim == 2:
        residual = ops.embed(tokens, params["wte"], positions)
    else:
        residual = ops.embed(tokens, params["wte"]) + positions
    x = ops.layer_norm(residual, **layers[0]["ln1"])
    B, T, _ = x.shape
    for i, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
        attention = layer["attention"]
        parts = jnp.split(project(x, **attention["qkv"]), 3, axis=-1)
        q, k, v = (part.reshape(B, T, config.heads, config.head_width) for part in parts)
        attended, cache = attend(cache, i, q, k, v)
        attended = attended.reshape(B, T, config.width)
        x, residual = _add_layer(residual, attended, attention["out"], layer["ln2"])
        hidden = project(x, **layer["mlp"]["up"], activation="gelu")
        x, residual = _add_layer(residual, hidden, layer["mlp"]["down"], next_norm)
    return x, cache


def _hidden(
    params: Params, tokens: Array, config: GPT2Config, remat: bool | Policy
) -> tuple[Array, Array]:
    """What the head is applied to, of shape (B, T, D), and the token table for the head."""
    check_tokens(tokens, config.max_seq_len)

    def block(stream: Stream, layer: Params) -> Stream:
        stream = _attend(stream, layer["ln1"], **layer["attention"], heads=config.heads)
        return _think(stream, layer["ln2"], **layer["mlp"])

    x, table = ops.embed(tokens, params["wte"], params["wpe"], returns_table=True)
    blocks = params["blocks"]
    first = blocks[0] if isinstance(blocks, list) else blocks
    # The ops that take an int8 weight do not hand on a norm.
    normed = ops.normed_rows(x) if "weight" in first["mlp"]["up"] else None
    x, _ = run_blocks(block, (x, normed), blocks, remat=remat)
    return ops.layer_norm(x, **params["ln_f"]), table


Stream = tuple[Array, ops.NormedRows | None]  # between the halves of blocks


def _attend(stream: Stream, norm: Params, qkv: Params, out: Params, heads: int) -> Stream:
    """The stream plus what the heads read of its norm."""
    x, normed = stream
    if "weight" in qkv:
        layers = (qkv["weight"], qkv["bias"], out["weight"], out["bias"])
        arrays = (x, norm["scale"], norm["bias"], *layers)
        sums: Any = ops.pre_norm_self_attention(*arrays, heads=heads, causal=True, normed=normed)
        return sums
    qkv_rows = project(ops.layer_norm(x, **norm), **qkv)
    attended = ops.flash_attention_packed(qkv_rows, heads, causal=True)
    return x + project(attended, **out), None


def _think(stream: Stream, norm: Params, up: Params, down: Params) -> Stream:
    """The stream plus the MLP of its norm."""
    x, normed = stream
    if "weight" in up:
        layers = (up["weight"], up["bias"], down["weight"], down["bias"])
        sums: Any = ops.pre_norm_mlp(x, norm["scale"], norm["bias"], *layers, normed=normed)
        return sums
    hidden = project(ops.layer_norm(x, **norm), **up, activation="gelu")
    return x + project(hidden, **down), None


def _add_layer(residual: Array, x: Array, linear: Params, norm: Params) -> tuple[Array, Array]:
    """Adds a linear layer of ``x`` to the stream; returns the stream's norm, and the stream."""
    # The bias is added with the residual: the norm's backward pass gives its gradient for nothing.
    if "weight" in linear:
        weight, bias = linear["weight"], linear["bias"]
        return ops.linear_add_layer_norm(x, weight, residual, **norm, x_bias=bias)
    product = project(x, **{name: array for name, array in linear.items() if name != "bias"})
    return ops.add_layer_norm(product, residual, **norm, x_bias=linear["bias"])
