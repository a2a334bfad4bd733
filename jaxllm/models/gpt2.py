"""GPT-2: embeddings, pre-norm blocks of attention and MLP, and an LM head tied to the token table.

Parameters are a nested dict of arrays, weights ``(in, out)``, layers stacked on a leading axis::

    wte (Vp, D)  wpe (P, D)
    blocks   ln1, ln2          scale (L, D)         bias (L, D)
             attention   qkv   weight (L, D, 3D)    bias (L, 3D)
                         out   weight (L, D, D)     bias (L, D)
             mlp         up    weight (L, D, 4D)    bias (L, 4D)
                         down  weight (L, 4D, D)    bias (L, D)
    ln_f     scale (D)  bias (D)

The model computes in the dtype of its parameters; cast them first to compute in another. The
vocabulary is padded to Vp, a multiple of 128, for the GEMM that makes the
logits; the padding has rows of zeros in ``wte`` and is left out of the loss.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners"; llm.c.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from jaxllm import ops
from jaxllm.models.common import (
    Params,
    Policy,
    check_sizes,
    check_tokens,
    count,
    layers_of,
    lm_head,
    lm_head_loss,
    logits,
    pad_vocab,
    run_blocks,
)
from jaxllm.models.special_tokens import SpecialTokens

# attend(layer, q, k, v) -> out, of (B, T, N, H) and (B, T, K, H): attention with a cache.
Attend = Callable[[int, Array, Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """The shape of a GPT-2; the defaults are the 124M model's.

    Attributes:
        vocab_size: Tokens.
        max_seq_len: Positions that the position table has rows for.
        layers: Blocks.
        heads: Attention heads; they divide ``width``.
        width: The width of the residual stream.
        special_tokens: The tokens that begin, end and pad a text, by a checkpoint. They do not
            count in comparisons of configs.

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
    def kv_heads(self) -> int:
        """The number of key heads: one for each query head."""
        return self.heads

    @property
    def saved_per_token(self) -> int:
        """Elements that the blocks save for each token for the backward pass.

        The inputs of four GEMMs, two of which are norms', the projection, and GELU's derivative.
        """
        return self.layers * 14 * self.width

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

    Weights and tables are normal with standard deviation 0.02. That of the two layers of each block
    that add to the residual is 0.02/sqrt(2L); biases are zero and scales one. The padded rows
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


def block(
    h: ops.Residual, layer: Params, config: GPT2Config, attend: ops.Attend | None = None
) -> ops.Residual:
    """One block; ``attend`` takes the place of attention over the sequence, to use a cache."""
    heads, norm1, norm2 = config.heads, layer["ln1"], layer["ln2"]
    h = ops.attention_block(h, norm1, layer["attention"], heads=heads, causal=True, attend=attend)
    return ops.ffn_block(h, norm2, layer["mlp"])


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
        remat: Whether each block is recomputed in the backward pass from its input; or what else
            to save: one of ``jax.checkpoint_policies`` or
            ``jaxllm.models.common.SAVE_GEMMS``.

    Returns:
        Logits over the padded vocabulary, in the dtype of ``params``. The columns from
        ``config.vocab_size`` on are padding.

    Raises:
        TypeError: ``tokens`` is not of an integer dtype.
        ValueError: ``tokens`` is not of shape (B, T), or T is beyond ``config.max_seq_len``.
    """
    hidden, head = _hidden(params, tokens, config, remat)
    return logits(hidden, head)


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
        labels: The token that follows each token. An ignored label does not count in the mean.
            Any other label outside the vocabulary makes the loss NaN.
        config: As in :func:`forward`.
        remat: As in :func:`forward`.
        ignore_index: The label that is ignored; None for every negative label. As in
            :func:`jaxllm.ops.cross_entropy`.

    Raises:
        TypeError: ``tokens`` or ``labels`` is not of an integer dtype.
        ValueError: As in :func:`forward`, or ``labels`` differs from ``tokens`` in shape.
    """
    hidden, head = _hidden(params, tokens, config, remat)
    return lm_head_loss(head, hidden, labels, config, remat=remat, ignore_index=ignore_index)


def cached_forward(
    params: Params,
    tokens: Integer[Array, "B T"],
    positions: Integer[Array, "B T"] | None,
    config: GPT2Config,
    attend: Attend,
) -> Float[Array, "B T D"]:
    """The input of the LM head for tokens that attend to a cache.

    Args:
        params: As in :func:`forward`, stacked or as :func:`jaxllm.models.common.for_decoding`
            returns them, or their int8 form.
        tokens: The tokens.
        positions: The position of each; None for 0 to T - 1.
        config: As in :func:`forward`.
        attend: ``attend(layer, q, k, v)``, attention of queries, keys and values with the cache.
    """
    if positions is None:
        x = ops.embed(tokens, params["wte"], params["wpe"])
    else:
        x = ops.embed(tokens, params["wte"]) + params["wpe"][positions]
    h = ops.residual(x)
    for i, layer in enumerate(layers_of(params)):
        h = block(h, layer, config, lambda *qkv, i=i: attend(i, *qkv))
    return ops.final_norm(h, params["ln_f"])


def num_params(config: GPT2Config) -> int:
    """The number of elements in the parameters, with the padding of the vocabulary."""
    return count(jax.eval_shape(lambda: init(jax.random.key(0), config)))


def flops_per_token(config: GPT2Config, seq_len: int) -> int:
    """Floating-point operations of one training step, forward and backward, for one token.

    ``6 M + 12 L T D``, where M counts the parameters that a GEMM multiplies by: the weights of
    the blocks and the padded LM head, and no position table, norm or bias. Each costs a
    multiplication and an addition forward and twice that backward. The second term is attention's
    two matmuls at full length T, as if there were no causal mask. This is the convention of PaLM's
    appendix B (arXiv:2204.02311); recomputation does not count.

    Args:
        config: The shape.
        seq_len: T, tokens in a sequence.
    """
    L, D = config.layers, config.width
    weights = 12 * L * D * D + config.padded_vocab_size * D
    return 6 * weights + 12 * L * seq_len * D


def _hidden(
    params: Params, tokens: Array, config: GPT2Config, remat: bool | Policy
) -> tuple[Array, Array | ops.Quantized]:
    """The input of the LM head, (B, T, D), and the LM head."""
    check_tokens(tokens, config.max_seq_len)
    x, head = ops.tied_embed(tokens, params["wte"], params["wpe"])

    def run(h: ops.Residual, layer: Params) -> ops.Residual:
        return block(h, layer, config)

    h = run_blocks(run, ops.residual(x), params["blocks"], remat=remat)
    return ops.final_norm(h, params["ln_f"]), lm_head({**params, "wte": head})
