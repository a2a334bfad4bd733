"""GPT-2: embeddings, pre-norm blocks of attention and MLP, and an LM head tied to the token table.

Parameters are a nested dict of arrays, weights ``(in, out)``, layers stacked on a leading axis::

    wte (Vp, D)  wpe (P, D)
    blocks   ln1, ln2          scale (L, D)              bias (L, D)
             attention   qkv   weight (L, D, 3, N, H)    bias (L, 3, N, H)
                         out   weight (L, N H, D)        bias (L, D)
             mlp         up    weight (L, D, 4D)         bias (L, 4D)
                         down  weight (L, 4D, D)         bias (L, D)
    ln_f     scale (D)  bias (D)

for N heads of width H: ``qkv`` can be sharded along its heads.

The model computes in the dtype of its parameters; cast them first to compute in another. The
vocabulary is padded to Vp, a multiple of 128, for the GEMM that makes the
logits; the padding has rows of zeros in ``wte`` and is left out of the loss.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners"; llm.c.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from jaxllm import ops
from jaxllm.models import common
from jaxllm.models.common import Attend, Params, Policy
from jaxllm.models.special_tokens import SpecialTokens


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
        TypeError: A size is no integer, or ``special_tokens`` no ``SpecialTokens``.
        ValueError: A size is below 1, or ``heads`` does not divide ``width``.
    """

    vocab_size: int = 50257
    max_seq_len: int = 1024
    layers: int = 12
    heads: int = 12
    width: int = 768
    special_tokens: SpecialTokens = dataclasses.field(default=SpecialTokens(), compare=False)

    def __post_init__(self):
        common.check_config(self, "vocab_size", "max_seq_len", "layers", "heads", "width")
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
        return common.pad_vocab(self.vocab_size)


PRESETS = {
    "d6": GPT2Config(layers=6, heads=6, width=384),
    "d12": GPT2Config(layers=12, heads=12, width=768),  # 124M
    "d24": GPT2Config(layers=24, heads=16, width=1024),  # 350M
    "d36": GPT2Config(layers=36, heads=20, width=1280),  # 774M
    "d48": GPT2Config(layers=48, heads=25, width=1600),  # 1558M
}


_NAMES = ("wte", "wpe", "blocks", "ln_f")
_OF_BLOCK = ("ln1", "attention/qkv", "attention/out", "ln2", "mlp/up", "mlp/down")


def init(key: PRNGKeyArray, config: GPT2Config) -> Params:
    """Random parameters, as :class:`jaxllm.models.common.Initializer` draws them.

    Args:
        key: A JAX random key.
        config: The shape.

    Raises:
        TypeError: ``key`` is no random key, or ``config`` no :class:`GPT2Config`.
        ValueError: ``key`` is not a single one.
    """
    common.check_config_type(config, GPT2Config)
    L, D, qkv = config.layers, config.width, (3, config.heads, config.head_width)
    draw = common.Initializer(key, 6, L, bias=True)
    return {
        "wte": draw.table(config.vocab_size, D),
        "wpe": draw.normal(config.max_seq_len, D),
        "blocks": {
            "ln1": draw.norm(L, D),
            "attention": {"qkv": draw.linear(D, qkv), "out": draw.linear(D, D, residual=True)},
            "ln2": draw.norm(L, D),
            "mlp": {"up": draw.linear(D, 4 * D), "down": draw.linear(4 * D, D, residual=True)},
        },
        "ln_f": draw.norm(D),
    }


def block(
    h: ops.Residual,
    layer: Params,
    config: GPT2Config,
    attend: ops.Attend | None = None,
    precision: ops.Precision = None,
    segment_ids: Array | None = None,
) -> ops.Residual:
    """One block; ``attend`` takes the place of attention over the sequence, to use a cache.

    With ``segment_ids``, (B, T), a token attends only to tokens of its own segment.
    """
    attention = {"heads": config.heads, "causal": True, "attend": attend}
    attention |= {"segment_ids": segment_ids}
    first, second = common.by_block(precision, layer)
    h = ops.attention_block(h, layer["ln1"], layer["attention"], **attention, precision=first)
    return ops.ffn_block(h, layer["ln2"], layer["mlp"], precision=second)


def forward(
    params: Params,
    tokens: Integer[Array, "B T"],
    config: GPT2Config,
    *,
    remat: bool | Policy = False,
    precision: ops.Precision = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    positions: Integer[Array, "B T"] | None = None,
) -> Float[Array, "B T Vp"]:
    """The logits of the token after each token.

    Args:
        params: As :func:`init` makes them, in the dtype to compute in.
        tokens: Integers; those outside the vocabulary are clamped as in :func:`jaxllm.ops.embed`.
        config: The shape that ``params`` was made with.
        remat: Whether each block is recomputed in the backward pass from its input; or what else
            to save: one of ``jax.checkpoint_policies`` or
            ``jaxllm.models.common.SAVE_GEMMS``.
        precision: ``"row"`` or ``"tensor"`` for float8 operands in the GEMMs of the blocks' linear
            layers, as in :func:`jaxllm.ops.linear`; or a mapping from the names of layers, as in
            ``{"up": "row", "down": "row"}``. None for the dtype of ``params``. The rest stays in
            that dtype, the LM head too.
        segment_ids: The document of each token, for rows that hold several: a token attends only
            to tokens with its own id. :func:`jaxllm.data.find_documents` computes them. None if
            each row is one document.
        positions: The position of each token, which for packed documents begins at 0 in each. It
            selects the row of the position table, clamped to ``config.max_seq_len - 1``. None for
            0 to T - 1.

    Returns:
        Logits over the padded vocabulary, in the dtype of ``params``. The columns from
        ``config.vocab_size`` on are padding.

    Raises:
        TypeError: ``tokens``, ``segment_ids`` or ``positions`` is not of an integer dtype, or
            ``remat`` no bool and no policy, or ``config`` no ``GPT2Config``.
        ValueError: ``tokens`` is not of shape (B, T), or T is beyond ``config.max_seq_len``; or
            ``segment_ids`` or ``positions`` differs from ``tokens`` in shape; or ``precision`` has
            an unknown recipe or layer; or ``params`` are those of another model, or do not have the
            layers, heads, tokens or positions of ``config``.
        BackendError: ``precision`` is not None and the GPU has no float8 tensor cores.
    """
    documents = segment_ids, positions
    hidden, head = _hidden(params, tokens, config, remat, precision, documents)
    return common.logits(hidden, head)


def loss(
    params: Params,
    tokens: Integer[Array, "B T"],
    labels: Integer[Array, "B T"],
    config: GPT2Config,
    *,
    remat: bool | Policy = False,
    precision: ops.Precision = None,
    ignore_index: int | None = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    positions: Integer[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """The mean cross entropy of the labels, in float32.

    Args:
        params: As in :func:`forward`.
        tokens: As in :func:`forward`.
        labels: The token that follows each token. An ignored label does not count in the mean.
            Any other label outside the vocabulary makes the loss NaN.
        config: As in :func:`forward`.
        remat: As in :func:`forward`.
        precision: As in :func:`forward`.
        ignore_index: The label that is ignored; None for every negative label. As in
            :func:`jaxllm.ops.cross_entropy`.
        segment_ids: As in :func:`forward`.
        positions: As in :func:`forward`.

    Raises:
        TypeError: As in :func:`forward`, or ``labels`` is not of an integer dtype.
        ValueError: As in :func:`forward`, or ``labels`` differs from ``tokens`` in shape.
        BackendError: As in :func:`forward`.
    """
    documents = segment_ids, positions
    hidden, head = _hidden(params, tokens, config, remat, precision, documents)
    return common.lm_head_loss(head, hidden, labels, config, remat=remat, ignore_index=ignore_index)


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

    Raises:
        TypeError: ``config`` is no ``GPT2Config``.
        ValueError: ``params`` are those of another model, or do not have the layers, heads, tokens
            or positions of ``config``.
    """
    check_params(params, config)
    if positions is None:
        x = ops.embed(tokens, params["wte"], params["wpe"])
    else:
        # Traced positions are no index of a NumPy array.
        x = ops.embed(tokens, params["wte"]) + jnp.asarray(params["wpe"])[positions]
    h = ops.residual(x)
    for i, layer in enumerate(common.layers_of(params)):
        h = block(h, layer, config, lambda *qkv, i=i: attend(i, *qkv))
    return ops.final_norm(h, params["ln_f"])


def check_params(params: Params, config: GPT2Config) -> None:
    """Checks that parameters are those of a config.

    Raises:
        TypeError: The config is of another model family.
        ValueError: The parameters are, or they do not have the layers, heads, tokens or positions
            of the config.
    """
    common.check_family(params, config, GPT2Config, _NAMES, _OF_BLOCK)
    common.check_params(params, config)
    rows = params["wpe"].shape[0]
    if rows < config.max_seq_len:
        raise ValueError(
            f"params has {rows} positions; config has max_seq_len {config.max_seq_len}"
        )


def num_params(config: GPT2Config) -> int:
    """The number of elements in the parameters, with the padding of the vocabulary."""
    return common.num_params(_shapes(config))


def flops_per_token(config: GPT2Config, seq_len: int) -> int:
    """Operations of one training step for one token: :func:`jaxllm.models.common.flops_per_token`.

    Args:
        config: The shape.
        seq_len: T, tokens in a sequence.
    """
    common.check_config_type(config, GPT2Config)
    lm_head = config.padded_vocab_size * config.width
    attention = config.layers * seq_len * config.width
    return common.flops_per_token(_shapes(config), lm_head, attention)


def _shapes(config: GPT2Config) -> Params:
    return jax.eval_shape(lambda: init(jax.random.key(0), config))


def _hidden(
    params: Params,
    tokens: Array,
    config: GPT2Config,
    remat: bool | Policy,
    precision: ops.Precision,
    documents: tuple[Array | None, Array | None],
) -> tuple[Array, Array | ops.Quantized]:
    """The input of the LM head, (B, T, D), and the LM head."""
    check_params(params, config)
    common.check_tokens(tokens, config.max_seq_len)
    segment_ids, positions = common.check_documents(tokens, *documents)
    if positions is None:
        x, head = ops.tied_embed(tokens, params["wte"], params["wpe"])
    else:
        x, head = ops.tied_embed(tokens, params["wte"])
        # An embedding too: XLA's gradient of an indexed array has no fixed order of summation.
        x += ops.embed(positions, params["wpe"])

    def run(h: ops.Residual, layer: Params) -> ops.Residual:
        return block(h, layer, config, precision=precision, segment_ids=segment_ids)

    h = common.run_blocks(run, ops.residual(x), params["blocks"], remat=remat)
    return ops.final_norm(h, params["ln_f"]), common.lm_head({**params, "wte": head})
