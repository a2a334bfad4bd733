"""Llama 3, 3.1 and 3.2, and models like them (Mistral, Qwen2, Qwen2.5, Qwen3): pre-norm blocks of
grouped-query attention and a gated MLP, with rotary positions.

Parameters are a nested dict of arrays, weights ``(in, out)``, layers stacked on a leading axis; of
N query heads and K key heads of width H::

    wte (Vp, D)
    blocks   norm1, norm2          scale (L, D)
             attention   qkv       weight (L, D, N/K + 2, K, H)    queries, keys, values
                                   bias (L, N/K + 2, K, H)         with qkv_bias
                         q_norm    scale (L, H)                    with qk_norm
                         k_norm    scale (L, H)                    with qk_norm
                         out       weight (L, N H, D)
             mlp         gate_up   weight (L, D, 2, F)             gate, up
                         down      weight (L, F, D)
    norm_f   scale (D)
    lm_head (Vp, D)   where it is not tied to wte

One GEMM computes queries, keys and values, and one computes gate and up. The columns of ``qkv``
are in parts of K heads, the first query of each key head, the second of each, ..., the keys and the
values: so ``qkv`` can be sharded along its key heads, and ``gate_up`` along F. The model computes
in the dtype of its parameters; cast them first to compute in another. The vocabulary is padded to
Vp as in :mod:`jaxllm.models.gpt2`.

Stacked layers run in one ``lax.scan`` if all have the same attention window. If not, each run of
consecutive layers with the same window is a scan of its own, since a window is a static option of
the attention kernels. A window as long as the sequence is none.

Source: Grattafiori et al., "The Llama 3 Herd of Models" (arXiv:2407.21783); llama3.cuda. Jiang et
al., "Mistral 7B" (arXiv:2310.06825); Qwen team, "Qwen2.5 Technical Report" (arXiv:2412.15115) and
"Qwen3 Technical Report" (arXiv:2505.09388).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer, PRNGKeyArray

from jaxllm import ops
from jaxllm.models import common
from jaxllm.models.common import Attend, Params, Policy
from jaxllm.models.special_tokens import SpecialTokens
from jaxllm.ops.checks import as_bool, as_float, as_integer

_SCALING = ops.RopeScaling(factor=8.0)  # Llama 3.1's


@dataclasses.dataclass(frozen=True)
class Llama3Config:
    """The shape of a Llama 3, or of a model like it; the defaults are the 3.1 8B model's.

    Attributes:
        vocab_size: Tokens.
        max_seq_len: The longest sequence.
        layers: Blocks.
        heads: Query heads. Without ``head_dim`` they divide ``width``.
        kv_heads: Key and value heads; they divide ``heads``.
        width: The width of the residual stream.
        mlp_width: The width inside the MLP.
        tied_head: Whether the LM head is the token table.
        rope_theta: The base of the rotary frequencies.
        rope_scaling: How low frequencies are stretched; None for not at all.
        norm_eps: Added to the mean square in each norm.
        head_dim: H, the width of a head, which is even; None for ``width / heads``. Read
            :attr:`head_width`, which is never None.
        qkv_bias: Whether queries, keys and values have a bias, as in Qwen2.
        qk_norm: Whether an RMS norm of each query head and key head comes before the rotation, as
            in Qwen3.
        window: The number of most recent keys that a query sees, its own included, as in Mistral;
            None for all keys. A tuple has one for each layer, and becomes its entry if all are
            equal.
        special_tokens: Those that begin, end and pad a text; not part of comparisons of configs.

    Raises:
        TypeError: ``tied_head``, ``qkv_bias`` or ``qk_norm`` is no bool, a size or a window no
            integer, ``rope_theta`` or ``norm_eps`` no number, ``rope_scaling`` no ``RopeScaling``,
            or ``special_tokens`` no ``SpecialTokens``.
        ValueError: A size or a window is below 1, a head's width is not even and whole,
            ``kv_heads`` does not divide ``heads``, ``rope_theta`` or ``norm_eps`` is not above 0
            and finite, or ``window`` is a tuple of another length than ``layers``.
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
    head_dim: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    window: int | tuple[int | None, ...] | None = None
    special_tokens: SpecialTokens = dataclasses.field(default=SpecialTokens(), compare=False)

    def __post_init__(self):
        sizes = ("vocab_size", "max_seq_len", "layers", "heads", "kv_heads", "width", "mlp_width")
        common.check_config(self, *sizes)
        for name in ("tied_head", "qkv_bias", "qk_norm"):
            self._set(name, as_bool(name, getattr(self, name)))
        if self.head_dim is not None:
            self._set("head_dim", as_integer("head_dim", self.head_dim))
        self._set("window", _as_window(self.window))
        if not isinstance(self.rope_scaling, ops.RopeScaling | None):
            found = type(self.rope_scaling).__name__
            raise TypeError(f"rope_scaling has type {found}; it must be RopeScaling, or None")
        if self.head_dim is not None and (self.head_dim < 2 or self.head_dim % 2):
            raise ValueError(
                f"head_dim is {self.head_dim}; it must be even and at least 2: the columns of a "
                "head rotate in pairs"
            )
        if self.head_dim is None and self.width % (2 * self.heads):
            raise ValueError(
                f"width {self.width} is not a multiple of twice heads {self.heads}; the columns of "
                "a head rotate in pairs"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        for name in ("rope_theta", "norm_eps"):
            number = as_float(name, getattr(self, name))
            if not 0 < number < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0, and finite")
            self._set(name, number)
        if isinstance(self.window, tuple) and len(self.window) != self.layers:
            raise ValueError(
                f"window has {len(self.window)} entries; it must have one for each of the "
                f"{self.layers} layers"
            )
        for window in self.window_sizes:
            if window is not None and window < 1:
                raise ValueError(f"window is {self.window}; it must be at least 1, or None")
        if isinstance(self.window, tuple) and len(self.window_sizes) == 1:
            # So that equal models have equal configs, and one compilation.
            self._set("window", self.window[0])

    def _set(self, name: str, value: Any) -> None:
        # A config is hashable: its fields are Python's numbers and tuples, not arrays and lists.
        object.__setattr__(self, name, value)

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.width // self.heads if self.head_dim is None else self.head_dim

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None for a layer whose queries see all keys before them."""
        return self.window if isinstance(self.window, tuple) else (self.window,) * self.layers

    @property
    def window_sizes(self) -> set[int | None]:
        """The windows that layers have; None for all keys."""
        return set(self.window) if isinstance(self.window, tuple) else {self.window}

    @property
    def qkv_widths(self) -> tuple[int, int, int]:
        """The columns of all queries, keys and values of a token."""
        kv_width = self.kv_heads * self.head_width
        return self.heads * self.head_width, kv_width, kv_width

    @property
    def saved_per_token(self) -> int:
        """Elements saved per token: inputs of GEMMs and norms, the projection, gate and up."""
        queries, keys, values = self.qkv_widths
        attention = 2 * queries + keys + values  # the projection, and the output of attention
        # Attention reads the normalized projection.
        attention += (queries + keys + values) * self.qk_norm
        return self.layers * (4 * self.width + attention + 3 * self.mlp_width)

    def attention_columns(self, seq_len: int) -> int:
        """Columns of queries times the keys that each sees, without a causal mask: of all layers.

        ``L T N H`` without a window; a layer with a window counts it instead of T.

        Args:
            seq_len: T, tokens in a sequence.
        """
        keys = (seq_len if window is None else min(seq_len, window) for window in self.windows)
        return self.qkv_widths[0] * sum(keys)

    @property
    def padded_vocab_size(self) -> int:
        """``vocab_size`` rounded up to a multiple of 128: the rows of the token table."""
        return common.pad_vocab(self.vocab_size)


def _as_window(window: Any) -> int | tuple[int | None, ...] | None:
    """The windows of a config, as Python integers."""
    if isinstance(window, tuple | list):
        return tuple(None if size is None else as_integer("window", size) for size in window)
    return None if window is None else as_integer("window", window)


_8B = Llama3Config()
_70B = dataclasses.replace(_8B, layers=80, heads=64, width=8192, mlp_width=28672)
_405B = dataclasses.replace(_8B, layers=126, heads=128, width=16384, mlp_width=53248)
_1B = dataclasses.replace(
    _8B, layers=16, width=2048, mlp_width=8192, tied_head=True, rope_scaling=ops.RopeScaling(32.0)
)
_FIRST = {"max_seq_len": 8192, "rope_scaling": None}  # Llama 3, before 3.1
_SMALL = dataclasses.replace(_1B, **_FIRST)
_MISTRAL = dataclasses.replace(
    _8B, vocab_size=32000, max_seq_len=32768, rope_theta=10_000.0, rope_scaling=None
)
_QWEN = dataclasses.replace(
    _8B, vocab_size=151936, rope_theta=1e6, rope_scaling=None, norm_eps=1e-6, tied_head=True
)
_QWEN25 = dataclasses.replace(_QWEN, layers=28, kv_heads=2, qkv_bias=True)
_QWEN3 = dataclasses.replace(_QWEN, max_seq_len=40960, layers=28, heads=16, qk_norm=True)

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
    "mistral-7b-v0.1": dataclasses.replace(_MISTRAL, window=4096),
    "mistral-7b-v0.3": dataclasses.replace(_MISTRAL, vocab_size=32768, rope_theta=1e6),
    "qwen2.5-0.5b": dataclasses.replace(
        _QWEN25, max_seq_len=32768, layers=24, heads=14, width=896, mlp_width=4864
    ),
    "qwen2.5-1.5b": dataclasses.replace(_QWEN25, heads=12, width=1536, mlp_width=8960),
    "qwen2.5-7b": dataclasses.replace(
        _QWEN25,
        vocab_size=152064,
        heads=28,
        kv_heads=4,
        width=3584,
        mlp_width=18944,
        tied_head=False,
    ),
    "qwen3-0.6b": dataclasses.replace(_QWEN3, width=1024, mlp_width=3072, head_dim=128),
    "qwen3-1.7b": dataclasses.replace(_QWEN3, width=2048, mlp_width=6144),
    "qwen3-4b": dataclasses.replace(
        _QWEN3, layers=36, heads=32, width=2560, mlp_width=9728, head_dim=128
    ),
    "qwen3-8b": dataclasses.replace(
        _QWEN3, layers=36, heads=32, width=4096, mlp_width=12288, tied_head=False
    ),
}


_NAMES = ("wte", "blocks", "norm_f")
_OF_BLOCK = ("norm1", "attention/qkv", "attention/out", "norm2", "mlp/gate_up", "mlp/down")


def init(key: PRNGKeyArray, config: Llama3Config) -> Params:
    """Random parameters, as :class:`jaxllm.models.common.Initializer` draws them.

    Args:
        key: A JAX random key.
        config: The shape.

    Raises:
        TypeError: ``key`` is no random key, or ``config`` no :class:`Llama3Config`.
        ValueError: ``key`` is not a single one.
    """
    common.check_config_type(config, Llama3Config)
    L, D, F, H = config.layers, config.width, config.mlp_width, config.head_width
    qkv = (config.heads // config.kv_heads + 2, config.kv_heads, H)
    draw = common.Initializer(key, 6, L, bias=False)
    table = draw.table(config.vocab_size, D)
    attention = {
        "qkv": draw.linear(D, qkv),
        "out": draw.linear(config.heads * H, D, residual=True),
    }
    if config.qkv_bias:
        attention["qkv"]["bias"] = jnp.zeros((L, *qkv), jnp.float32)
    if config.qk_norm:
        attention |= {"q_norm": draw.norm(L, H), "k_norm": draw.norm(L, H)}
    params = {
        "wte": table,
        "blocks": {
            "norm1": draw.norm(L, D),
            "attention": attention,
            "norm2": draw.norm(L, D),
            "mlp": {"gate_up": draw.linear(D, (2, F)), "down": draw.linear(F, D, residual=True)},
        },
        "norm_f": draw.norm(D),
    }
    return params if config.tied_head else {**params, "lm_head": draw.table(config.vocab_size, D)}


def block(
    h: ops.Residual,
    layer: Params,
    config: Llama3Config,
    rope_table: tuple[Array, Array],
    attend: ops.Attend | None = None,
    precision: ops.Precision = None,
    segment_ids: Array | None = None,
    window: int | None = None,
) -> ops.Residual:
    """One block; ``attend`` takes the place of attention over the sequence, to use a cache.

    With ``segment_ids``, (B, T), a token attends only to tokens of its own segment. ``window`` is
    that of the layer, from ``config.windows``.
    """
    attention: dict[str, Any] = {"heads": config.heads, "kv_heads": config.kv_heads, "causal": True}
    attention |= {"rope_table": rope_table, "attend": attend, "segment_ids": segment_ids}
    attention |= {"window": window}
    first, second = common.by_block(precision, layer)
    h = ops.attention_block(h, layer["norm1"], layer["attention"], **attention, precision=first)
    return ops.ffn_block(h, layer["norm2"], layer["mlp"], activation="swiglu", precision=second)


def forward(
    params: Params,
    tokens: Integer[Array, "B T"],
    config: Llama3Config,
    *,
    remat: bool | Policy = False,
    precision: ops.Precision = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    positions: Integer[Array, "B T"] | None = None,
) -> Float[Array, "B T Vp"]:
    """The logits of the token after each token, as :func:`jaxllm.models.gpt2.forward`.

    ``positions`` are the positions by which queries and keys rotate; they are not clamped.
    """
    hidden = _hidden(params, tokens, config, remat, precision, (segment_ids, positions))
    return common.logits(hidden, common.lm_head(params))


def loss(
    params: Params,
    tokens: Integer[Array, "B T"],
    labels: Integer[Array, "B T"],
    config: Llama3Config,
    *,
    remat: bool | Policy = False,
    precision: ops.Precision = None,
    ignore_index: int | None = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    positions: Integer[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """The mean cross entropy of the labels, in float32, as :func:`jaxllm.models.gpt2.loss`."""
    hidden = _hidden(params, tokens, config, remat, precision, (segment_ids, positions))
    head = common.lm_head(params)
    return common.lm_head_loss(head, hidden, labels, config, remat=remat, ignore_index=ignore_index)


def cached_forward(
    params: Params,
    tokens: Integer[Array, "B T"],
    positions: Integer[Array, "B T"] | None,
    config: Llama3Config,
    attend: Attend,
) -> Float[Array, "B T D"]:
    """As :func:`jaxllm.models.gpt2.cached_forward`."""
    check_params(params, config)
    positions = jnp.arange(tokens.shape[1]) if positions is None else positions
    table = rope_table(positions, config)
    h = ops.residual(ops.embed(tokens, params["wte"]), "rms", eps=config.norm_eps)
    for i, layer in enumerate(common.layers_of(params)):
        h = block(h, layer, config, table, lambda *qkv, i=i: attend(i, *qkv))
    return ops.final_norm(h, params["norm_f"])


def check_params(params: Params, config: Llama3Config) -> None:
    """Checks that parameters are those of a config.

    Raises:
        TypeError: The config is of another model family.
        ValueError: The parameters are, or they do not have the layers, heads, tokens or options of
            the config.
    """
    common.check_family(params, config, Llama3Config, _NAMES, _OF_BLOCK)
    common.check_params(params, config)
    blocks = params["blocks"]
    attention = (blocks[0] if isinstance(blocks, list) else blocks)["attention"]
    for option, name, holder in (
        ("qk_norm", "q_norm", attention),
        ("qkv_bias", "bias", attention["qkv"]),
    ):
        if (name in holder) != getattr(config, option):
            found = f"has {name!r}" if name in holder else f"has no {name!r}"
            wanted = getattr(config, option)
            raise ValueError(f"params {found} in attention; config.{option} is {wanted}")
    if not config.tied_head and "lm_head" not in params:
        raise ValueError("params has no 'lm_head'; config.tied_head is False")


def num_params(config: Llama3Config) -> int:
    """The number of elements in the parameters, with the padding of the vocabulary."""
    return common.num_params(_shapes(config))


def flops_per_token(config: Llama3Config, seq_len: int) -> int:
    """Operations of one training step for one token: :func:`jaxllm.models.common.flops_per_token`.

    A layer with a window has attention to ``min(T, window)`` keys.

    Args:
        config: The shape.
        seq_len: T, tokens in a sequence.
    """
    common.check_config_type(config, Llama3Config)
    lm_head = config.padded_vocab_size * config.width
    attention = config.attention_columns(seq_len)
    return common.flops_per_token(_shapes(config), lm_head, attention)


def _shapes(config: Llama3Config) -> Params:
    return jax.eval_shape(lambda: init(jax.random.key(0), config))


def rope_table(positions: Array, config: Llama3Config) -> tuple[Array, Array]:
    """The cosines and sines that rotate queries and keys at these positions."""
    return ops.rope_table(
        positions, config.head_width, theta=config.rope_theta, scaling=config.rope_scaling
    )


def _hidden(
    params: Params,
    tokens: Array,
    config: Llama3Config,
    remat: bool | Policy,
    precision: ops.Precision,
    documents: tuple[Array | None, Array | None],
) -> Array:
    """The input of the LM head, (B, T, D)."""
    check_params(params, config)
    common.check_tokens(tokens, config.max_seq_len)
    segment_ids, positions = common.check_documents(tokens, *documents)
    positions = jnp.arange(tokens.shape[1]) if positions is None else positions
    table = rope_table(positions, config)

    h = ops.residual(ops.embed(tokens, params["wte"]), "rms", eps=config.norm_eps)
    windows = tuple(common.window_within(window, tokens.shape[1]) for window in config.windows)
    for window, layers in _runs(params["blocks"], windows):

        def run(h: ops.Residual, layer: Params, window: int | None = window) -> ops.Residual:
            options: Any = {"precision": precision, "segment_ids": segment_ids, "window": window}
            return block(h, layer, config, table, **options)

        h = common.run_blocks(run, h, layers, remat=remat)
    return ops.final_norm(h, params["norm_f"])


def _runs(blocks: Any, windows: tuple[int | None, ...]) -> Iterator[tuple[int | None, Any]]:
    """The runs of consecutive layers with the same window: the window, and their parameters."""
    start = 0
    for window, run in itertools.groupby(windows):
        end = start + len(list(run))
        if end - start == len(windows):
            yield window, blocks
        elif isinstance(blocks, list):
            yield window, blocks[start:end]
        else:
            yield window, jax.tree.map(lambda x, a=start, b=end: x[a:b], blocks)
        start = end
