"""The names of tensors and config keys in Hugging Face ``transformers``."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxllm.convert import huggingface_llama
from jaxllm.convert.config_keys import expect, integer, shown
from jaxllm.convert.parameter_mapping import ParamSlice
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import check_config_type
from jaxllm.models.gpt2 import GPT2Config
from jaxllm.models.llama3 import Llama3Config
from jaxllm.models.special_tokens import SpecialTokens
from jaxllm.ops.checks import as_integer

Config = GPT2Config | Llama3Config
LM_HEAD = huggingface_llama.LM_HEAD
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class Format:
    """The format of one architecture.

    Attributes:
        model: The jaxllm module of the model, with ``init``.
        prefix: The prefix of every tensor name except the LM head's. Checkpoints of the bare model
            omit it.
        table: The name of the token embedding table.
        buffers: Matches names of buffers, without the prefix, in older checkpoints. They are not
            parameters.
        mapping: The parameter slice of each tensor, by a config. A tied LM head has none.
        config_from_dict: Converts the keys of ``config.json`` to a jaxllm config.
        config_to_dict: Converts a jaxllm config to the keys of ``config.json``.
    """

    model: Any
    prefix: str
    table: str
    buffers: re.Pattern[str]
    mapping: Callable[[Any], dict[str, ParamSlice]]
    config_from_dict: Callable[[Mapping[str, Any]], Any]
    config_to_dict: Callable[[Any], dict[str, Any]]


def special_tokens_from_dict(config: Mapping[str, Any]) -> SpecialTokens:
    """The special ids in a ``config.json`` or a ``generation_config.json``.

    Raises:
        ValueError: An id is not an integer; ``eos_token_id`` may also be a list of integers.
    """

    def token(key: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            allowed = " or a list of them" if key == "eos_token_id" else ""
            raise ValueError(f"{key} is {shown(config[key])}; it must be an integer{allowed}")
        return value

    bos, eos, pad = map(config.get, ID_KEYS)
    all_eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return SpecialTokens(
        None if bos is None else token("bos_token_id", bos),
        tuple(token("eos_token_id", value) for value in all_eos),
        None if pad is None else token("pad_token_id", pad),
    )


def special_tokens_to_dict(tokens: SpecialTokens) -> dict[str, Any]:
    """The keys of ``config.json`` for the special ids that are not None.

    Raises:
        TypeError: ``tokens`` are not :class:`SpecialTokens`, or not of integers.
    """
    if not isinstance(tokens, SpecialTokens):
        raise TypeError(f"special_tokens is {tokens!r}; it must be SpecialTokens")
    if np.ndim(tokens.eos) != 1:
        raise TypeError(f"eos is {tokens.eos!r}; it must be a tuple of integers")
    eos = [as_integer("eos", token) for token in tokens.eos]
    ids = {"bos": tokens.bos, "pad": tokens.pad}
    bos, pad = (None if x is None else as_integer(name, x) for name, x in ids.items())
    values = zip(ID_KEYS, (bos, eos[0] if len(eos) == 1 else eos or None, pad), strict=True)
    return {key: value for key, value in values if value is not None}


def format_of(config: Config) -> Format:
    """The format of a config's architecture.

    Raises:
        TypeError: ``config`` is of another type.
        ValueError: No architecture has the options of the config.
    """
    check_config_type(config, GPT2Config, Llama3Config)
    is_gpt2 = isinstance(config, GPT2Config)
    return FORMATS["gpt2" if is_gpt2 else huggingface_llama.model_type_of(config)]


def has_tied_head(config: Config) -> bool:
    """Whether the LM head shares the token embedding table."""
    return isinstance(config, GPT2Config) or config.tied_head


# GPT-2. Conv1D weights are (in, out), like jaxllm's.


def _gpt2_mapping(config: GPT2Config) -> dict[str, ParamSlice]:
    mapping = {
        "transformer.wte.weight": ParamSlice("wte", (slice(config.vocab_size),)),
        "transformer.wpe.weight": ParamSlice("wpe"),
        "transformer.ln_f.weight": ParamSlice("ln_f/scale"),
        "transformer.ln_f.bias": ParamSlice("ln_f/bias"),
    }
    norms = {"ln_1": "ln1", "ln_2": "ln2"}
    linears = {
        "attn.c_attn": "attention/qkv",
        "attn.c_proj": "attention/out",
        "mlp.c_fc": "mlp/up",
        "mlp.c_proj": "mlp/down",
    }
    for layer in range(config.layers):
        for names, weight in ((norms, "scale"), (linears, "weight")):
            for module, path in names.items():
                name = f"transformer.h.{layer}.{module}"
                columns = 3 if path == "attention/qkv" else 1
                for kind, parameter in (("weight", weight), ("bias", "bias")):
                    target = ParamSlice(f"blocks/{path}/{parameter}", (layer,), columns=columns)
                    mapping[f"{name}.{kind}"] = target
    return mapping


# The attribute_map of GPT2Config in transformers: other names for the same settings.
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def _gpt2_from_dict(config: Mapping[str, Any]) -> GPT2Config:
    for alias, key in _GPT2_ALIASES.items():
        value = config.get(alias, config.get(key))
        if config.get(key, value) != value:
            raise ValueError(
                f"{key} is {shown(config[key])} and {alias} is {shown(value)}; the two are names "
                "of one setting, and must be equal"
            )
    aliased = {key: config[alias] for alias, key in _GPT2_ALIASES.items() if alias in config}
    config = {**aliased, **config}
    width = integer(config, "n_embd")
    expect(config, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    expect(config, "layer_norm_epsilon", 1e-5)
    expect(config, "n_inner", None, 4 * width)
    expect(config, "scale_attn_weights", True)
    expect(config, "scale_attn_by_inverse_layer_idx", False)
    expect(config, "add_cross_attention", False)
    expect(config, "is_causal", True)
    expect(config, "tie_word_embeddings", True)
    return GPT2Config(
        vocab_size=integer(config, "vocab_size"),
        max_seq_len=integer(config, "n_positions"),
        layers=integer(config, "n_layer"),
        heads=integer(config, "n_head"),
        width=width,
    )


_GPT2_END = 50256  # what transformers takes for a missing bos_token_id or eos_token_id


def _gpt2_to_dict(config: GPT2Config) -> dict[str, Any]:
    is_default = config.vocab_size > _GPT2_END  # it is GPT-2's vocabulary, perhaps padded
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_embd": config.width,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        **({} if is_default else {"bos_token_id": None, "eos_token_id": None}),
    }


FORMATS = {
    "gpt2": Format(
        model=gpt2,
        prefix="transformer.",
        table="transformer.wte.weight",
        buffers=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
        mapping=_gpt2_mapping,
        config_from_dict=_gpt2_from_dict,
        config_to_dict=_gpt2_to_dict,
    ),
    **{
        model_type: Format(
            model=llama3,
            prefix="model.",
            table="model.embed_tokens.weight",
            buffers=re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
            mapping=huggingface_llama.mapping,
            config_from_dict=functools.partial(huggingface_llama.config_from_dict, model_type),
            config_to_dict=huggingface_llama.config_to_dict,
        )
        for model_type in huggingface_llama.ARCHITECTURES
    },
}
