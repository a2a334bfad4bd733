"""Llama and models like it in Hugging Face ``transformers``: names of tensors and config keys.

Linear weights are (out, in). Rotary pairs are half a head apart, as in jaxllm's rope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.convert.config_keys import expect, integer, number, shown
from jaxllm.convert.parameter_mapping import ParamSlice
from jaxllm.models.llama3 import Llama3Config
from jaxllm.ops import RopeScaling

LM_HEAD = "lm_head.weight"
# By the model_type of config.json.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What transformers takes for a key that is missing.
_HEAD_DIMS = {"qwen3": 128}
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_SLIDING_WINDOW, _MAX_WINDOW_LAYERS = 4096, 28
_MANY_LAYERS = 10_000
_FULL, _SLIDING = "full_attention", "sliding_attention"


def model_type_of(config: Llama3Config) -> str:
    """The ``model_type`` of the architecture that has the options of a config.

    A bias of queries, keys and values means Qwen2, their norms mean Qwen3, and a window without
    either means Mistral. A Mistral without a window has the tensors and results of a Llama. It is
    written as a Llama, unless ``width`` is not a multiple of ``heads``: transformers rejects such a
    Llama.

    Raises:
        ValueError: No architecture has these options.
    """
    if config.qkv_bias and config.qk_norm:
        raise ValueError(
            "the config has qkv_bias and qk_norm; Qwen2 has the former alone, Qwen3 the latter"
        )
    if config.qkv_bias:
        return "qwen2"
    if config.qk_norm:
        return "qwen3"
    return "mistral" if any(config.window_sizes) or config.width % config.heads else "llama"


# Tensors.


def mapping(config: Llama3Config) -> dict[str, ParamSlice]:
    """The parameter slice of each tensor."""
    rows = (slice(config.vocab_size),)
    found = {
        "model.embed_tokens.weight": ParamSlice("wte", rows),
        "model.norm.weight": ParamSlice("norm_f/scale"),
    }
    if not config.tied_head:
        found[LM_HEAD] = ParamSlice("lm_head", rows)
    for layer in range(config.layers):
        for module, target in _of_layer(config, layer).items():
            found[f"model.layers.{layer}.{module}"] = target
    return found


def _of_layer(config: Llama3Config, layer: int) -> dict[str, ParamSlice]:
    found = {
        "input_layernorm.weight": ParamSlice("blocks/norm1/scale", (layer,)),
        "post_attention_layernorm.weight": ParamSlice("blocks/norm2/scale", (layer,)),
    }
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
    for module, (path, part, columns) in linears.items():
        options = {"columns": columns, "is_grouped": module == "self_attn.q_proj"}
        found[f"{module}.weight"] = ParamSlice(
            f"blocks/{path}/weight", (layer, slice(None), part), transposed=True, **options
        )
        if config.qkv_bias and path == "attention/qkv":
            found[f"{module}.bias"] = ParamSlice(f"blocks/{path}/bias", (layer, part), **options)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            target = ParamSlice(f"blocks/attention/{name}/scale", (layer,))
            found[f"self_attn.{name}.weight"] = target
    return found


# From config.json.


def config_from_dict(model_type: str, config: Mapping[str, Any]) -> Llama3Config:
    """Converts the keys of ``config.json``, those of transformers 4 and 5.

    Args:
        model_type: A key of :data:`ARCHITECTURES`.
        config: The contents.

    Raises:
        ValueError: A key is missing or invalid, or has a value that jaxllm's model does not
            support. The message has the key and its value.
    """
    width, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    layers = integer(config, "num_hidden_layers")
    expect(config, "hidden_act", "silu")
    expect(config, "attention_bias", model_type == "qwen2")
    expect(config, "mlp_bias", False)
    # Not null, which some attention implementations of transformers take for false.
    expect(config, "is_causal", True)
    expect(config, "tie_word_embeddings", False, True, None)
    kv_heads = {"num_key_value_heads": _KV_HEADS.get(model_type, heads), **config}
    if kv_heads["num_key_value_heads"] is None:  # null, of every architecture
        kv_heads["num_key_value_heads"] = heads
    theta, scaling = _rope_from_dict(config)
    return Llama3Config(
        vocab_size=integer(config, "vocab_size"),
        max_seq_len=integer(config, "max_position_embeddings"),
        layers=layers,
        heads=heads,
        kv_heads=integer(kv_heads, "num_key_value_heads"),
        width=width,
        mlp_width=integer(config, "intermediate_size"),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=number(config, "rms_norm_eps"),
        head_dim=_head_dim_from_dict(model_type, config, width, heads),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        window=_window_from_dict(model_type, config, layers),
    )


def _head_dim_from_dict(
    model_type: str, config: Mapping[str, Any], width: int, heads: int
) -> int | None:
    """The width of a head; None where it is ``width / heads``."""
    default = _HEAD_DIMS.get(model_type)
    if config.get("head_dim", default) is None:
        return None
    head_dim = integer({"head_dim": default, **config}, "head_dim")
    return None if head_dim * heads == width else head_dim


def _window_from_dict(
    model_type: str, config: Mapping[str, Any], layers: int
) -> int | tuple[int | None, ...] | None:
    """The sliding window: one for all layers, or one for each."""
    size, first = _sliding_window(model_type, config)
    types = config.get("layer_types")
    if types is None:
        if size is None or first >= layers:
            return None
        if first <= 0:
            return size
        if layers > _MANY_LAYERS:  # of a wrong config; the tuple may exceed memory
            raise ValueError(f"num_hidden_layers is {layers}; it must be at most {_MANY_LAYERS}")
        return (None,) * first + (size,) * (layers - first)
    is_sliding = _are_sliding(types, layers)
    if any(is_sliding) and size is None:
        raise ValueError(
            f"layer_types is {shown(types)}; without a sliding window it must be {_FULL!r} for all"
        )
    if model_type == "mistral" and any(of_layer != (size is not None) for of_layer in is_sliding):
        raise ValueError(
            f"layer_types is {shown(types)}; a mistral with sliding_window {size} has one type"
        )
    return tuple(size if of_layer else None for of_layer in is_sliding)


def _sliding_window(model_type: str, config: Mapping[str, Any]) -> tuple[int | None, int]:
    """The size of the window, and the first layer that has it where there are no layer_types."""
    if model_type == "llama":
        if config.get("use_sliding_window", True):
            expect(config, "sliding_window", None)
        return None, 0
    is_qwen = model_type != "mistral"
    if is_qwen:
        expect(config, "use_sliding_window", False, True)
        if not config.get("use_sliding_window", False):
            return None, 0
    if config.get("sliding_window", _SLIDING_WINDOW) is None:
        return None, 0
    keys = {"sliding_window": _SLIDING_WINDOW, "max_window_layers": _MAX_WINDOW_LAYERS, **config}
    size = integer(keys, "sliding_window")
    if size < 1:
        raise ValueError(f"sliding_window is {size}; it must be at least 1, or null")
    if not is_qwen:
        expect(config, "use_sliding_window", True)
        return size, 0
    return size, integer(keys, "max_window_layers")


def _are_sliding(types: Any, layers: int) -> list[bool]:
    """Which layers have a sliding window, by ``layer_types``."""
    if not isinstance(types, list) or len(types) != layers:
        raise ValueError(
            f"layer_types is {shown(types)}; it must be a list of one for each of {layers} layers"
        )
    for of_layer in types:
        if of_layer not in (_FULL, _SLIDING):
            raise ValueError(
                f"layer_types has {shown(of_layer)}; each must be {_FULL!r} or {_SLIDING!r}"
            )
    return [of_layer == _SLIDING for of_layer in types]


_ROPE_KEYS = {
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "original_length": "original_max_position_embeddings",
}


def _rope_from_dict(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The RoPE base and scaling. Transformers 5 has both in one key, version 4 has two keys.

    As in transformers 5, ``rope_scaling`` has precedence, and then ``rope_parameters`` has no
    effect. The original length is ``original_max_position_embeddings`` of the top level, else of
    the dict, else ``max_position_embeddings``.
    """
    name = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(name) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"{name} is {shown(rope)}; it must be an object")
    if nested := [key for key, value in rope.items() if isinstance(value, dict)]:
        raise ValueError(f"{name} has {shown(nested[0])}; it must be one for all layers")
    expect({**config, **rope}, "partial_rotary_factor", 1.0, None)
    theta = number({"rope_theta": 10_000.0, **config, **rope}, "rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise ValueError(f"rope_type is {kind!r}; it must be 'default' or 'llama3'")
    key = _ROPE_KEYS["original_length"]
    lengths = rope if config.get(key) is None else {**rope, key: config[key]}
    if key not in lengths:
        lengths = {key: integer(config, "max_position_embeddings")}
    values = {field: number(rope, _ROPE_KEYS[field]) for field in ("factor", "low", "high")}
    length = integer(lengths, key)
    try:
        return theta, RopeScaling(**values, original_length=length)
    except ValueError as error:  # it has the names of fields, which differ from the keys
        keys = ", ".join(f"{_ROPE_KEYS[field]} {value}" for field, value in values.items())
        raise ValueError(f"{name} has {keys} and {key} {length}: {error}") from error


# To config.json.


def config_to_dict(config: Llama3Config) -> dict[str, Any]:
    """Converts a config to the keys of ``config.json`` that transformers 4 and 5 read.

    Raises:
        ValueError: No architecture has the options of the config.
    """
    model_type, scaling = model_type_of(config), config.rope_scaling
    rope = scaling and {
        "rope_type": "llama3",
        **{key: getattr(scaling, name) for name, key in _ROPE_KEYS.items()},
    }
    # A Qwen2 of transformers 4 has no key for the width of a head.
    has_head_dim = model_type != "qwen2" or config.head_dim is not None
    biases = {} if model_type == "qwen2" else {"attention_bias": False}
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        **({"head_dim": config.head_width} if has_head_dim else {}),
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "hidden_act": "silu",
        **biases,
        **({"mlp_bias": False} if model_type == "llama" else {}),
        **_window_to_dict(model_type, config),
        "rms_norm_eps": config.norm_eps,
        # The keys of transformers 4, which version 5 reads too.
        "rope_theta": config.rope_theta,
        "rope_scaling": rope,
        "tie_word_embeddings": config.tied_head,
        # None, because the defaults of some classes are the ids of their first models.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _window_to_dict(model_type: str, config: Llama3Config) -> dict[str, Any]:
    """The keys of the sliding window."""
    sizes = config.window_sizes - {None}
    if len(sizes) > 1 or (model_type == "mistral" and len(config.window_sizes) > 1):
        alike = "all layers" if model_type == "mistral" else "all layers that have one"
        raise ValueError(
            f"window is {shown(config.window)}; {ARCHITECTURES[model_type]} has one size for "
            f"{alike}"
        )
    size = next(iter(sizes), None)
    if model_type == "llama":
        return {}
    if model_type == "mistral":
        return {"sliding_window": size}
    windows = config.windows
    first = next((i for i, window in enumerate(windows) if window is not None), config.layers)
    return {
        "use_sliding_window": size is not None,
        "sliding_window": size,
        # Version 4.5x and later read layer_types; earlier versions read max_window_layers.
        "max_window_layers": first,
        "layer_types": [_FULL if window is None else _SLIDING for window in windows],
    }
