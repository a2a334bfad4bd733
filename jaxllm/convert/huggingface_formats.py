"""What Hugging Face ``transformers`` calls the parts of our models: tensors and config keys."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.convert.places import Place
from jaxllm.models import gpt2, llama3
from jaxllm.models.gpt2 import GPT2Config
from jaxllm.models.llama3 import Llama3Config
from jaxllm.models.special_tokens import SpecialTokens
from jaxllm.ops import RopeScaling

Config = GPT2Config | Llama3Config
HEAD = "lm_head.weight"
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class Format:
    """One architecture.

    Attributes:
        model: Our module, with ``init``.
        prefix: Begins every name but the head's; a checkpoint of the bare model leaves it out.
        table: The name of the token table.
        buffers: Names, without the prefix, of what older checkpoints hold and no parameter is.
        places: Where each tensor of a config's model belongs, but for a tied head.
        config_from_dict: Our config from the keys of ``config.json``.
        config_to_dict: The reverse.
    """

    model: Any
    prefix: str
    table: str
    buffers: re.Pattern[str]
    places: Callable[[Any], dict[str, Place]]
    config_from_dict: Callable[[Mapping[str, Any]], Any]
    config_to_dict: Callable[[Any], dict[str, Any]]


def special_tokens_from_dict(config: Mapping[str, Any]) -> SpecialTokens:
    """The ids in the contents of a ``config.json`` or a ``generation_config.json``.

    Raises:
        ValueError: One is no integer, or in ``eos_token_id`` no list of them.
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
    """The keys of ``config.json`` for the ids that there are."""
    eos = tokens.eos[0] if len(tokens.eos) == 1 else list(tokens.eos) or None
    ids = zip(ID_KEYS, (tokens.bos, eos, tokens.pad), strict=True)
    return {key: value for key, value in ids if value is not None}


def format_of(config: Config) -> Format:
    """The architecture that a config belongs to."""
    return FORMATS["gpt2" if isinstance(config, GPT2Config) else "llama"]


def has_tied_head(config: Config) -> bool:
    """Whether the head is a second name of the token table."""
    return isinstance(config, GPT2Config) or config.tied_head


# GPT-2. Its Conv1D weights are (in, out), as ours are.


def _gpt2_places(config: GPT2Config) -> dict[str, Place]:
    places = {
        "transformer.wte.weight": Place("wte", (slice(config.vocab_size),)),
        "transformer.wpe.weight": Place("wpe"),
        "transformer.ln_f.weight": Place("ln_f/scale"),
        "transformer.ln_f.bias": Place("ln_f/bias"),
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
            for theirs, ours in names.items():
                name = f"transformer.h.{layer}.{theirs}"
                places[f"{name}.weight"] = Place(f"blocks/{ours}/{weight}", (layer,))
                places[f"{name}.bias"] = Place(f"blocks/{ours}/bias", (layer,))
    return places


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


# Llama. Its Linear weights are (out, in), and rotary pairs half-split, as in our rope.


def _llama_places(config: Llama3Config) -> dict[str, Place]:
    rows = (slice(config.vocab_size),)
    places = {
        "model.embed_tokens.weight": Place("wte", rows),
        "model.norm.weight": Place("norm_f/scale"),
    }
    if not config.tied_head:
        places[HEAD] = Place("head", rows)
    q, k, v = _side_by_side(*config.qkv_widths)
    gate, up = _side_by_side(config.mlp_width, config.mlp_width)
    everything = slice(None)
    linears = {
        "self_attn.q_proj": ("attention/qkv", q),
        "self_attn.k_proj": ("attention/qkv", k),
        "self_attn.v_proj": ("attention/qkv", v),
        "self_attn.o_proj": ("attention/out", everything),
        "mlp.gate_proj": ("mlp/gate_up", gate),
        "mlp.up_proj": ("mlp/gate_up", up),
        "mlp.down_proj": ("mlp/down", everything),
    }
    for layer in range(config.layers):
        name = f"model.layers.{layer}"
        places[f"{name}.input_layernorm.weight"] = Place("blocks/norm1/scale", (layer,))
        places[f"{name}.post_attention_layernorm.weight"] = Place("blocks/norm2/scale", (layer,))
        for theirs, (ours, columns) in linears.items():
            index = (layer, slice(None), columns)
            place = Place(f"blocks/{ours}/weight", index, transposed=True)
            places[f"{name}.{theirs}.weight"] = place
    return places


def _side_by_side(*widths: int) -> list[slice]:
    """The columns of arrays that stand side by side in one."""
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    return [slice(end - width, end) for width, end in zip(widths, ends, strict=True)]


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
    """The base and the scaling; transformers 5 writes both under one key, version 4 did not."""
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
            f"the scaling of rope has factor {factor}, low_freq_factor {low}, high_freq_factor "
            f"{high} and original_max_position_embeddings {length}; they must be above 0, and the "
            "low one less than the high one"
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
        # As version 4 has it; version 5 reads it too.
        "rope_theta": config.rope_theta,
        "rope_scaling": rope,
        "tie_word_embeddings": config.tied_head,
        # Of the tokenizer, which the parameters do not know; the class's defaults are Llama 2's.
        "bos_token_id": None,
        "eos_token_id": None,
    }


FORMATS = {
    "gpt2": Format(
        model=gpt2,
        prefix="transformer.",
        table="transformer.wte.weight",
        buffers=re.compile(r"h\.\d+\.attn\.(bias|masked_bias)"),
        places=_gpt2_places,
        config_from_dict=_gpt2_from_dict,
        config_to_dict=_gpt2_to_dict,
    ),
    "llama": Format(
        model=llama3,
        prefix="model.",
        table="model.embed_tokens.weight",
        buffers=re.compile(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
        places=_llama_places,
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
    # A JSON file may have integers that no float holds, and NaN.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e300:
        raise ValueError(f"{key} is {_shown(value)}; it must be a finite number")
    return float(value)


def _shown(value: Any) -> str:
    """A value for a message, of which a file may have any length."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _present(config: Mapping[str, Any], key: str) -> Any:
    if key not in config:
        raise ValueError(f"{key} is missing")
    return config[key]


def _expect(config: Mapping[str, Any], key: str, *wanted: Any) -> None:
    """Refuses a model that differs from ours; what is not said is as a rule the first of these."""
    value = config.get(key, wanted[0])
    if value not in wanted:
        raise ValueError(f"{key} is {_shown(value)}; it must be {' or '.join(map(repr, wanted))}")
