"""Llama 3, 3.1 and 3.2: pre-norm blocks of grouped-query attention and a gated MLP, with rotary
positions.

Parameters are a nested dict of arrays, weights ``(in, out)``, layers stacked on a leading axis; of
N query heads and K key heads of width H::

    wte (Vp, D)
    blocks   norm1, norm2          scale (L, D)
             attention   qkv       weight (L, D, (N + 2K) H)    queries, keys, values
                         out       weight (L, N H, D)
             mlp         gate_up   weight (L, D, 2F)            gate, up
                         down      weight (L, F, D)
    norm_f   scale (D)
    head (Vp, D)   where it is not tied to wte

What one product can make stands in one array: queries, keys and values; gate and up. The model
computes in the dtype of its parameters; cast them first to compute in another. The vocabulary is
padded to Vp as in :mod:`jaxllm.models.gpt2`.

Source: Grattafiori et al., "The Llama 3 Herd of Models" (arXiv:2407.21783); llama3.cuda.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from jaxllm import ops
from jaxllm.models.blocks import (
    FEW_ROWS,
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
    with_next_norms,
)
from jaxllm.models.cache import (
    KVCache,
    attend_prompt,
    attend_token,
    check_prompts,
    make_cache,
)
from jaxllm.models.special_tokens import SpecialTokens
from jaxllm.ops.checks import is_certain

_SCALING = ops.RopeScaling(factor=8.0)  # Llama 3.1's


@dataclasses.dataclass(frozen=True)
class Llama3Config:
    """The shape of a Llama 3; the defaults are the 3.1 8B model's.

    Attributes:
        vocab_size: Tokens.
        max_seq_len: The longest sequence.
        layers: Blocks.
        heads: Query heads; they divide ``width`` into parts of an even width.
        kv_heads: Key and value heads; they divide ``heads``.
        width: The residual stream's width.
        mlp_width: The width inside the MLP.
        tied_head: Whether the head is the token table.
        rope_theta: The base of the rotary frequencies.
        rope_scaling: How slow frequencies are stretched; None to leave them.
        norm_eps: Added to the mean square in each norm.
        special_tokens: What a checkpoint names as the begin, the ends and the padding of a text.
            Configs that differ in nothing else are equal.

    Raises:
        ValueError: A size is below 1, a head's width is not even and whole, ``kv_heads`` does not
            divide ``heads``, or ``rope_theta`` or ``norm_eps`` is not above 0.
    """

    vocab_size: int = 128256
    max_seq_len: int = 131072
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    width: int = 4096
    mlp_width: int = 14336
    tied_head: bool = False
    rope_theta: float = 500_000.0
    rope_scaling: ops.RopeScaling | None = _SCALING
    norm_eps: float = 1e-5
    special_tokens: SpecialTokens = dataclasses.field(default=SpecialTokens(), compare=False)

    def __post_init__(self):
        check_sizes(
            vocab_size=self.vocab_size,
            max_seq_len=self.max_seq_len,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            width=self.width,
            mlp_width=self.mlp_width,
        )
        if self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} is not a multiple of twice heads {self.heads}; the columns of "
                "a head turn in pairs"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        for name in ("rope_theta", "norm_eps"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.width // self.heads

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """The columns of all queries, keys and values of a token."""
        kv_width = self.kv_heads * self.head_width
        return self.width, kv_width, kv_width

    @property
    def padded_vocab_size(self) -> int:
        """``vocab_size`` rounded up to a multiple of 128: the rows of the token table."""
        return pad_vocab(self.vocab_size)


_8B = Llama3Config()
_70B = dataclasses.replace(_8B, layers=80, heads=64, width=8192, mlp_width=28672)
_405B = dataclasses.replace(_8B, layers=126, heads=128, width=16384, mlp_width=53248)
_1B = Llama3Config(
    layers=16,
    width=2048,
    mlp_width=8192,
    tied_head=True,
    rope_scaling=ops.RopeScaling(factor=32.0),
)
_FIRST = {"max_seq_len": 8192, "rope_scaling": None}  # Llama 3, before 3.1
_SMALL = dataclasses.replace(_1B, **_FIRST)

PRESETS = {
    # Of no published model, to train from scratch: the depth and width of GPT-2's d6 and d12.
    "d6": dataclasses.replace(_SMALL, layers=6, heads=6, kv_heads=2, width=384, mlp_width=1024),
    "d12": dataclasses.replace(_SMALL, layers=12, heads=12, kv_heads=4, width=768, mlp_width=2048),
    "3-8b": dataclasses.replace(_8B, **_FIRST),
    "3-70b": dataclasses.replace(_70B, **_FIRST),
    "3.1-8b": _8B,
    "3.1-70b": _70B,
    "3.1-405b": _405B,
    "3.2-1b": _1B,
    "3.2-3b": dataclasses.replace(_1B, layers=28, heads=24, width=3072),
}


def init(key: PRNGKeyArray, config: Llama3Config) -> Params:
    """Random parameters in float32, drawn as :func:`jaxllm.models.gpt2.init` draws them.

    Weights and tables are normal with deviation 0.02, but for the two projections of each block
    that add to the residual stream, 0.02/sqrt(2L); scales are one. The padded rows of ``wte`` and
    ``head`` are zero, and their gradients are too.

    Args:
        key: A JAX random key.
        config: The shape.
    """
    L, D, F = config.layers, config.width, config.mlp_width
    keys = iter(jax.random.split(key, 6))

    def normal(*shape: int, std: float = 0.02) -> Array:
        return std * jax.random.normal(next(keys), shape, jnp.float32)

    def table() -> Array:
        padding = config.padded_vocab_size - config.vocab_size
        return jnp.pad(normal(config.vocab_size, D), ((0, padding), (0, 0)))

    def linear(d_in: int, d_out: int, std: float = 0.02) -> Params:
        return {"weight": normal(L, d_in, d_out, std=std)}

    def norm(*shape: int) -> Params:
        return {"scale": jnp.ones(shape, jnp.float32)}

    residual_std = 0.02 / math.sqrt(2 * L)
    params = {
        "wte": table(),
        "blocks": {
            "norm1": norm(L, D),
            "attention": {
                "qkv": linear(D, sum(config.qkv_widths)),
                "out": linear(D, D, residual_std),
            },
            "norm2": norm(L, D),
            "mlp": {"gate_up": linear(D, 2 * F), "down": linear(F, D, residual_std)},
        },
        "norm_f": norm(D),
    }
    return params if config.tied_head else {**params, "head": table()}


def forward(
    params: Params,
    tokens: Integer[Array, "B T"],
    config: Llama3Config,
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
    return logits(_hidden(params, tokens, config, remat), head_of(params))


def loss(
    params: Params,
    tokens: Integer[Array, "B T"],
    labels: Integer[Array, "B T"],
    config: Llama3Config,
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
    hidden = _hidden(params, tokens, config, remat)
    # The inputs of four products and two norms, queries, keys and values, gate and up.
    of_block = 5 * config.width + sum(config.qkv_widths) + 3 * config.mlp_width
    kept = 0 if remat else config.layers * of_block
    return head_loss(params, hidden, labels, config.vocab_size, kept, ignore_index)


def empty_cache(config: Llama3Config, batch: int, room: int, dtype: DTypeLike) -> KVCache:
    """A cache for :func:`prefill`, of ``batch`` sequences of at most ``room`` tokens.

    Args:
        config: The model's shape.
        batch: Sequences.
        room: Tokens of each, prompt and all.
        dtype: That of the model's parameters, or int8.
    """
    return make_cache(config.layers, batch, room, config.kv_heads, config.head_width, dtype)


def prefill(
    params: Params,
    tokens: Integer[Array, "B T"],
    lengths: Integer[Array, " B"],
    config: Llama3Config,
    cache: KVCache,
) -> tuple[Float[Array, "B Vp"], KVCache]:
    """Reads prompts into an empty cache.

    Args:
        params: As in :func:`forward`, or their int8 form, or what
            :func:`jaxllm.models.blocks.for_decoding` makes of either.
        tokens: The prompts, padded at their ends; what with does not matter.
        lengths: The tokens of each prompt, from 1 to T.
        config: The shape that ``params`` was made with.
        cache: Of :func:`empty_cache`.

    Returns:
        The logits of the token after each prompt, and the cache.

    Raises:
        TypeError: As in :func:`forward`.
        ValueError: As in :func:`forward`, or ``lengths`` or the cache is of another number of
            sequences, or T is more than the cache has room for.
    """
    check_prompts(tokens, lengths, config.max_seq_len, cache)
    positions = jnp.arange(tokens.shape[1])
    x, cache = _cached(params, tokens, positions, config, cache, attend_prompt)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    cache = cache._replace(lengths=lengths.astype(jnp.int32))
    return next_logits(last, head_of(params)), cache


def decode_step(
    params: Params, tokens: Integer[Array, " B"], config: Llama3Config, cache: KVCache
) -> tuple[Float[Array, "B Vp"], KVCache]:
    """Reads one more token of each sequence.

    Args:
        params: As in :func:`prefill`.
        tokens: The tokens that follow what is in the cache.
        config: The shape that ``params`` was made with.
        cache: Of :func:`prefill`, or of the step before; it must have room.

    Returns:
        The logits of the token after each, and the cache with the tokens in it.
    """
    blocks = params["blocks"]
    turned = isinstance(blocks, list) and "weight" not in blocks[0]["attention"]["qkv"]
    few = is_certain(lambda: 1 <= tokens.shape[0] <= FEW_ROWS)
    if turned and few and not cache.quantized:
        x, cache = _decode_blocks(params, tokens, config, cache)
    else:
        positions = cache.lengths[:, None]
        x, cache = _cached(params, tokens[:, None], positions, config, cache, attend_token)
        x = x[:, 0]
    cache = cache._replace(lengths=cache.lengths + 1)
    return next_logits(x, head_of(params)), cache


def _decode_blocks(
    params: Params, tokens: Array, config: Llama3Config, cache: KVCache
) -> tuple[Array, KVCache]:
    """What the head is applied to, (B, D), of one token a sequence, and the new cache.

    What :func:`_cached` computes, of parameters that are laid out for decoding: a block a call.
    """

    def matrix(linear: Params) -> Array | tuple[Array, Array]:
        if "weight_t" in linear:
            return linear["weight_t"]
        return linear["weight_q"], linear["weight_scales"]

    cos, sin = _angles(cache.lengths, config)
    x = ops.embed(tokens[:, None], params["wte"])[:, 0]
    keys, values = [], []
    for layer, k_cache, v_cache in zip(params["blocks"], cache.keys, cache.values, strict=True):
        attention, mlp = layer["attention"], layer["mlp"]
        x, k_cache, v_cache = ops.decode_block(
            x,
            layer["norm1"]["scale"],
            layer["norm2"]["scale"],
            matrix(attention["qkv"]),
            matrix(attention["out"]),
            matrix(mlp["gate_up"]),
            matrix(mlp["down"]),
            cos,
            sin,
            k_cache,
            v_cache,
            cache.lengths,
            eps=config.norm_eps,
        )
        keys.append(k_cache)
        values.append(v_cache)
    x = ops.rms_norm(x, **params["norm_f"], eps=config.norm_eps)
    return x, cache._replace(keys=tuple(keys), values=tuple(values))


def _cached(
    params: Params, tokens: Array, positions: Array, config: Llama3Config, cache: KVCache, attend
) -> tuple[Array, KVCache]:
    """What the head is applied to, (B, T, D), of tokens that see a cache, and the new cache."""
    layers = layers_of(params)
    next_norms = [*(layer["norm1"] for layer in layers[1:]), params["norm_f"]]
    angles = _angles(positions, config)
    residual = ops.embed(tokens, params["wte"])
    x = ops.rms_norm(residual, **layers[0]["norm1"], eps=config.norm_eps)
    for i, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):

        def attend_layer(qkv, i=i):
            nonlocal cache
            # The cache has keys that are turned already, and heads apart.
            parts = jnp.split(qkv, np.cumsum(config.qkv_widths)[:2], axis=-1)
            heads = (config.heads, config.kv_heads, config.kv_heads)
            q, k, v = (
                x.reshape(*x.shape[:2], n, config.head_width)
                for x, n in zip(parts, heads, strict=True)
            )
            q, k = ops.rope(q, k, *angles)
            out, cache = attend(cache, i, q, k, v)
            return out.reshape(*out.shape[:2], config.width)

        residual, x = _block(residual, x, layer, next_norm, config, attend_layer)
    return x, cache


def _angles(positions: Array, config: Llama3Config) -> tuple[Array, Array]:
    return ops.rope_table(
        positions, config.head_width, theta=config.rope_theta, scaling=config.rope_scaling
    )


def num_params(config: Llama3Config) -> int:
    """How many numbers the parameters hold, the padding of the vocabulary included."""
    return count(jax.eval_shape(lambda: init(jax.random.key(0), config)))


def flops_per_token(config: Llama3Config, seq_len: int) -> int:
    """Floating-point operations of one training step, forward and backward, for one token.

    ``6 M + 12 L T D``, as :func:`jaxllm.models.gpt2.flops_per_token` counts them: M has the weights
    of the blocks and the padded head, and no token table that is not the head.

    Args:
        config: The shape.
        seq_len: T, tokens in a sequence.
    """
    L, D = config.layers, config.width
    factors = L * D * (sum(config.qkv_widths) + D + 3 * config.mlp_width)
    factors += config.padded_vocab_size * D
    return 6 * factors + 12 * L * seq_len * D


def _hidden(params: Params, tokens: Array, config: Llama3Config, remat: bool | Policy) -> Array:
    """What the head is applied to, of shape (B, T, D)."""
    check_tokens(tokens, config.max_seq_len)
    # Each block ends with the norm that comes next, fused with its last residual addition: norm1 of
    # the following block, or norm_f after the last. So the first norm1 stands before all blocks.
    first_norm, layers = with_next_norms(params["blocks"], "norm1", params["norm_f"])
    angles = _angles(jnp.arange(tokens.shape[1]), config)

    def attend(qkv):
        return ops.flash_attention_packed(
            qkv, config.heads, config.kv_heads, causal=True, rope_table=angles
        )

    def block(carry, inputs):
        residual, x = carry
        layer, next_norm = inputs
        return _block(residual, x, layer, next_norm, config, attend)

    residual = ops.embed(tokens, params["wte"])
    x, residual = ops.add_rms_norm(residual, None, **first_norm, eps=config.norm_eps)
    _, x = run_blocks(block, (residual, x), layers, remat=remat)
    return x


def _block(
    residual: Array,
    x: Array,
    layer: Params,
    next_norm: Params,
    config: Llama3Config,
    attend: Callable[[Array], Array],
) -> tuple[Array, Array]:
    """One block, from the residual stream and its normalization to the next of either.

    ``attend`` makes what the heads read, side by side, of queries, keys and values side by side.
    """
    attention, mlp, eps = layer["attention"], layer["mlp"], config.norm_eps
    x = attend(project(x, **attention["qkv"]))
    x = project(x, **attention["out"])
    x, residual = ops.add_rms_norm(x, residual, **layer["norm2"], eps=eps)
    x = ops.swiglu_packed(project(x, **mlp["gate_up"]))
    x = project(x, **mlp["down"])
    x, residual = ops.add_rms_norm(x, residual, **next_norm, eps=eps)
    return residual, x
