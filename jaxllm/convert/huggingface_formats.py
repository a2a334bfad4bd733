"""The names of tensors and config keys in Hugging Face ``transformers``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.convert.parameter_mapping import ParamSlice
from jaxllm.models import gpt2, llama3
from jaxllm.models.gpt2 import GPT2Config
from jaxllm.models.llama3 import Llama3Config
from jaxllm.models.special_tokens import SpecialTokens
from jaxllm.ops import RopeScaling

Config = GPT2Config | Llama3Config
LM_HEAD = "lm_head.weight"
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
            raise ValueError(f"{key} is {_shown(config[key])}; it must be an integer{allowed}")
        return value

    bos, eos, pad = map(config.get, ID_KEYS)
    all_eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return SpecialTokens(
        None if bos is None else token("bos_token_id", bos),
        tuple(token("eos_token_id", value) for value in all_eos),
        None if pad is None else token("pad_token_id", pad),
    )


def special_tokens_to_dict(tokens: SpecialTokens) -> dict[str, Any]:
    """The keys of ``config.json`` for the special ids that are not None."""
    eos = tokens.eos[0] if len(tokens.eos) == 1 else list(tokens.eos) or None
    ids = zip(ID_KEYS, (tokens.bos, eos, tokens.pad), strict=True)
    return {key: value for key, value in ids if value is not None}


def format_of(config: Config) -> Format:
    """The format of a config's architecture."""
    return FORMATS["gpt2" if isinstance(config, GPT2Config) else "llama"]


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


def _gpt2_from_dict(config: Mapping[str, Any]) -> GPT2Config:
    width = _integer(config, "n_embd")
    _expect(config, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    _expect(config, "layer_norm_epsilon", 1e-5)
    _expect(config, "n_inner", None, 4 * width)
    _expect(config, "scale_attn_weights", True)
    _expect(config, "scale_attn_by_inverse_layer_idx", False)
    _expect(config, "add_cross_attention", False)
    _expect(config, "tie_word_embeddings", True)
    return GPT2Config(
        vocab_size=_integer(config, "vocab_size"),
        max_seq_len=_integer(config, "n_positions"),
        layers=_integer(config, "n_layer"),
        heads=_integer(config, "n_head"),
        width=width,
    )


def _gpt2_to_dict(config: GPT2Config) -> dict[str, Any]:
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
    }


# Llama. Linear weights are (out, in). Rotary pairs are half a head apart, as in jaxllm's rope.


def _llama_mapping(config: Llama3Config) -> dict[str, ParamSlice]:
    rows = (slice(config.vocab_size),)
    mapping = {
        "model.embed_tokens.weight": ParamSlice("wte", rows),
        "model.norm.weight": ParamSlice("norm_f/scale"),
    }
    if not config.tied_head:
        mapping[LM_HEAD] = ParamSlice("lm_head", rows)
    # A part of the columns, and its dimensions.
    queries, keys, values = slice(-2), -2, -1
    gate, up = 0, 1
    linears = {
        "self_attn.q_proj": ("attention/qkv", queries, 3),
        "self_attn.k_proj": ("attention/qkv", keys, 2),
        "self_attn.v_proj": ("attention/qkv", values, 2),
        "self_attn.o_proj": ("attention/out", slice(None), 1),
        "mlp.gate_proj": ("mlp/gate_up", gate, 1),
        "mlp.up_proj": ("mlp/gate_up", up, 1),
        "mlp.down_proj": ("mlp/down", slice(None), 1),
    }
    for layer in range(config.layers):
        name = f"model.layers.{layer}"
        mapping[f"{name}.input_layernorm.weight"] = ParamSlice("blocks/norm1/scale", (layer,))
        mapping[f"{name}.post_attention_layernorm.weight"] = ParamSlice(
            "blocks/norm2/scale", (layer,)
        )
        for module, (path, part, columns) in linears.items():
            mapping[f"{name}.{module}.weight"] = ParamSlice(
                f"blocks/{path}/weight",
                (layer, slice(None), part),
                transposed=True,
                columns=columns,
                is_grouped=module == "self_attn.q_proj",
            )
    return mapping


def _llama_from_dict(config: Mapping[str, Any]) -> Llama3Config:
    width, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    _expect(config, "hidden_act", "silu")
    _expect(config, "attention_bias", False)
    _expect(config, "mlp_bias", False)
    if heads:
        _expect(config, "head_dim", None, width // heads)
    kv_heads = config.get("num_key_value_heads")
    theta, scaling = _rope_from_dict(config)
    return Llama3Config(
        vocab_size=_integer(config, "vocab_size"),
        max_seq_len=_integer(config, "max_position_embeddings"),
        layers=_integer(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=heads if kv_heads is None else _integer(config, "num_key_value_heads"),
        width=width,
        mlp_width=_integer(config, "intermediate_size"),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(config, "rms_norm_eps"),
    )


_ROPE_KEYS = {
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}


def _rope_from_dict(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The RoPE base and scaling. Transformers 5 has both in one key, version 4 has two keys."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters or rope_scaling is {_shown(rope)}; it must be an object")
    theta = _number({"rope_theta": 10_000.0, **config, **rope}, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope_type is {kind!r}; it must be 'default' or 'llama3'")
    factor, low, high = (_number(rope, _ROPE_KEYS[name]) for name in ("factor", "low", "high"))
    length = _integer(rope, _ROPE_KEYS["original_length"])
    if not (factor > 0 and 0 < low < high and length > 0):
        raise ValueError(
            f"the RoPE scaling has factor {factor}, low_freq_factor {low}, high_freq_factor "
            f"{high} and original_max_position_embeddings {length}; they must be above 0, and "
            "low_freq_factor below high_freq_factor"
        )
    return theta, RopeScaling(factor, low, high, length)


def _llama_to_dict(config: Llama3Config) -> dict[str, Any]:
    scaling = config.rope_scaling
    rope = scaling and {
        "rope_type": "llama3",
        **{key: getattr(scaling, name) for name, key in _ROPE_KEYS.items()},
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.norm_eps,
        # The keys of transformers 4, which version 5 reads too.
        "rope_theta": config.rope_theta,
        "rope_scaling": rope,
        "tie_word_embeddings": config.tied_head,
        # None, because the class's defaults are Llama 2's ids.
        "bos_token_id": None,
        "eos_token_id": None,
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
    "llama": Format(
        model=llama3,
        prefix="model.",
        table="model.embed_tokens.weight",
        buffers=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
        mapping=_llama_mapping,
        config_from_dict=_llama_from_dict,
        config_to_dict=_llama_to_dict,
    ),
}


def _integer(config: Mapping[str, Any], key: str) -> int:
    value = _present(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value >= 2**31:
        raise ValueError(f"{key} is {_shown(value)}; it must be an integer below 2**31")
    return value


def _number(config: Mapping[str, Any], key: str) -> float:
    value = _present(config, key)
    # JSON may have integers beyond the range of a float, and NaN.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
        raise ValueError(f"{key} is {_shown(value)}; it must be a finite number")
    return float(value)


def _shown(value: Any) -> str:
    """The repr of a value for an error message, shortened."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _present(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise ValueError(f"{key} is missing")
    return config[key]


def _expect(config: Mapping[str, Any], key: str, *wanted: Any) -> None:
    """Raises ValueError if a key has another value than ``wanted``; the first is the default."""
    value = config.get(key, wanted[0])
    if value not in wanted:
        raise ValueError(f"{key} is {_shown(value)}; it must be {' or '.join(map(repr, wanted))}")
