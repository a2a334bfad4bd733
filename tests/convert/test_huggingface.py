"""Conversion between jaxllm parameters and Hugging Face state dicts, without torch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.convert.huggingface import (
    config_from_dict,
    config_to_dict,
    from_state_dict,
    to_state_dict,
)
from jaxllm.convert.huggingface_formats import Config, format_of
from jaxllm.models import gpt2, llama3
from jaxllm.models.special_tokens import SpecialTokens
from jaxllm.ops import RopeScaling

GPT2 = gpt2.GPT2Config(vocab_size=61, max_seq_len=16, layers=3, heads=2, width=32)
LLAMA = llama3.Llama3Config(
    vocab_size=61, max_seq_len=16, layers=3, heads=4, kv_heads=2, width=32, mlp_width=40
)
TIED = dataclasses.replace(LLAMA, tied_head=True)
NAMES: dict[str, Config] = {"gpt2": GPT2, "llama": LLAMA, "tied": TIED}


def random_params(config):
    """Random parameters, biases and scales too, so that no two arrays are equal."""
    init = format_of(config).model.init
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), config))
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    random = tree.unflatten(
        [jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)]
    )
    tables = {"wte", "lm_head"} & set(random)
    return random | {name: random[name].at[config.vocab_size :].set(0) for name in tables}


def assert_equal(params, others):
    assert jax.tree.structure(params) == jax.tree.structure(others)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def all_params():
    return {name: random_params(config) for name, config in NAMES.items()}


@pytest.fixture(params=NAMES)
def case(request, all_params):
    return all_params[request.param], NAMES[request.param]


@pytest.fixture
def gpt2_state_dict(all_params):
    return to_state_dict(all_params["gpt2"], GPT2)


@pytest.fixture
def llama_state_dict(all_params):
    return to_state_dict(all_params["llama"], LLAMA)


def test_round_trip_is_bit_identical(case):
    params, config = case
    assert_equal(from_state_dict(to_state_dict(params, config), config), params)


def test_gpt2_names_and_shapes_match_transformers(gpt2_state_dict):
    assert len(gpt2_state_dict) == 2 + 12 * GPT2.layers + 2 + 1
    assert gpt2_state_dict["transformer.wte.weight"].shape == (61, 32)
    assert gpt2_state_dict["transformer.wpe.weight"].shape == (16, 32)
    assert gpt2_state_dict["transformer.h.2.attn.c_attn.weight"].shape == (32, 96)
    assert gpt2_state_dict["transformer.h.0.mlp.c_proj.weight"].shape == (128, 32)
    assert all(array.dtype == np.float32 for array in gpt2_state_dict.values())
    np.testing.assert_array_equal(
        gpt2_state_dict["lm_head.weight"], gpt2_state_dict["transformer.wte.weight"]
    )


def test_llama_names_and_shapes_match_transformers(llama_state_dict):
    assert len(llama_state_dict) == 1 + 9 * LLAMA.layers + 2
    expected = {
        "self_attn.q_proj": (32, 32),
        "self_attn.k_proj": (16, 32),
        "self_attn.v_proj": (16, 32),
        "self_attn.o_proj": (32, 32),
        "mlp.gate_proj": (40, 32),
        "mlp.up_proj": (40, 32),
        "mlp.down_proj": (32, 40),
        "input_layernorm": (32,),
        "post_attention_layernorm": (32,),
    }
    for name, shape in expected.items():
        assert llama_state_dict[f"model.layers.2.{name}.weight"].shape == shape
    assert llama_state_dict["model.embed_tokens.weight"].shape == (61, 32)
    assert llama_state_dict["lm_head.weight"].shape == (61, 32)
    assert all(array.flags.c_contiguous for array in llama_state_dict.values())


def test_layers_keep_their_order(all_params, gpt2_state_dict, llama_state_dict):
    qkv = all_params["llama"]["blocks"]["attention"]["qkv"]["weight"]
    for layer in range(3):
        np.testing.assert_array_equal(
            gpt2_state_dict[f"transformer.h.{layer}.mlp.c_fc.bias"],
            all_params["gpt2"]["blocks"]["mlp"]["up"]["bias"][layer],
        )
        np.testing.assert_array_equal(
            llama_state_dict[f"model.layers.{layer}.self_attn.v_proj.weight"].T,
            qkv[layer, :, -1].reshape(32, 16),
        )


def test_state_dict_of_bfloat16_parameters_is_float32(case):
    params, config = case
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    converted = to_state_dict(half, config)
    assert all(array.dtype == np.float32 for array in converted.values())
    assert_equal(from_state_dict(converted, config, dtype="bfloat16"), half)


def test_tied_lm_head_may_be_omitted_but_must_match(all_params):
    for name, table in (("gpt2", "transformer.wte.weight"), ("tied", "model.embed_tokens.weight")):
        state_dict = to_state_dict(all_params[name], NAMES[name])
        np.testing.assert_array_equal(state_dict.pop("lm_head.weight"), state_dict[table])
        assert_equal(from_state_dict(state_dict, NAMES[name]), all_params[name])
        state_dict["lm_head.weight"] = state_dict[table] + 1
        with pytest.raises(ValueError, match=rf"lm_head\.weight differs from {table}"):
            from_state_dict(state_dict, NAMES[name])


def test_untied_lm_head_is_required(llama_state_dict):
    del llama_state_dict["lm_head.weight"]
    with pytest.raises(ValueError, match=r"lm_head\.weight is missing"):
        from_state_dict(llama_state_dict, LLAMA)


def test_bare_names_and_old_buffers_are_accepted(case):
    """A bare model's state dict has no prefix, and the first GPT-2 checkpoints have buffers."""
    params, config = case
    buffers = {
        "transformer.h.0.attn.bias": np.ones((1, 1, 16, 16), np.uint8),
        "transformer.h.2.attn.masked_bias": np.float32(-1e4),
        "model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
        "model.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    first = "transformer." if isinstance(config, gpt2.GPT2Config) else "model."
    state_dict = to_state_dict(params, config)
    state_dict |= {name: array for name, array in buffers.items() if name.startswith(first)}
    assert_equal(from_state_dict(state_dict, config), params)
    bare = {name.removeprefix(first): array for name, array in state_dict.items()}
    assert_equal(from_state_dict(bare, config), params)


def test_missing_tensor_is_an_error(gpt2_state_dict, llama_state_dict):
    del gpt2_state_dict["transformer.h.1.ln_2.bias"]
    with pytest.raises(ValueError, match=r"transformer\.h\.1\.ln_2\.bias is missing"):
        from_state_dict(gpt2_state_dict, GPT2)
    del llama_state_dict["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        from_state_dict(llama_state_dict, LLAMA)


def test_unexpected_tensor_is_an_error(gpt2_state_dict, llama_state_dict):
    gpt2_state_dict["transformer.h.3.ln_2.bias"] = np.zeros(32, np.float32)
    with pytest.raises(ValueError, match=r"transformer\.h\.3\.ln_2\.bias is unexpected"):
        from_state_dict(gpt2_state_dict, GPT2)
    llama_state_dict["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    with pytest.raises(ValueError, match=r"self_attn\.q_proj\.bias is unexpected"):
        from_state_dict(llama_state_dict, LLAMA)


def test_wrong_shape_error_has_both_shapes(gpt2_state_dict, llama_state_dict):
    name = "transformer.h.0.mlp.c_fc.weight"
    gpt2_state_dict[name] = gpt2_state_dict[name].T
    message = r"h\.0\.mlp\.c_fc\.weight has shape \(128, 32\); it must be \(32, 128\)"
    with pytest.raises(ValueError, match=message):
        from_state_dict(gpt2_state_dict, GPT2)
    name = "model.layers.2.self_attn.k_proj.weight"
    llama_state_dict[name] = np.zeros((32, 32), np.float32)
    message = r"self_attn\.k_proj\.weight has shape \(32, 32\); it must be \(16, 32\)"
    with pytest.raises(ValueError, match=message):
        from_state_dict(llama_state_dict, LLAMA)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_state_dict_of_another_dtype_is_rejected(gpt2_state_dict, dtype):
    name = "transformer.ln_f.weight"
    state_dict = {**gpt2_state_dict, name: gpt2_state_dict[name].astype(dtype)}
    with pytest.raises(ValueError, match=f"{name} has dtype {dtype}; it must be a floating dtype"):
        from_state_dict(state_dict, GPT2)


class Bfloat16Tensor:
    """As a bfloat16 tensor of torch, whose dtype is not NumPy's."""

    dtype = "torch.bfloat16"

    def __array__(self, *_, **__):
        raise TypeError("Got unsupported ScalarType BFloat16")


@pytest.mark.parametrize(
    ("array", "kind", "message"),
    [
        ([1] * 32, ValueError, "has dtype int64; it must be a floating dtype"),
        (Bfloat16Tensor(), TypeError, "has type Bfloat16Tensor, .*BFloat16; it must be a NumPy ar"),
    ],
    ids=["integers", "bfloat16"],
)
def test_arrays_of_other_libraries_are_checked(gpt2_state_dict, array, kind, message):
    state_dict: dict[str, Any] = {**gpt2_state_dict, "transformer.ln_f.weight": array}
    with pytest.raises(kind, match=rf"transformer\.ln_f\.weight {message}"):
        from_state_dict(state_dict, GPT2)


@pytest.mark.parametrize(("vocab_size", "is_null"), [(50256, True), (50257, False)])
def test_a_gpt2_without_the_id_50256_has_no_default_ids(vocab_size, is_null):
    """Transformers takes 50256 for a missing bos_token_id or eos_token_id of a GPT-2."""
    config = dataclasses.replace(GPT2, vocab_size=vocab_size)
    keys = ("bos_token_id", "eos_token_id")
    assert [key in config_to_dict(config) for key in keys] == [is_null, is_null]
    config = dataclasses.replace(config, special_tokens=SpecialTokens(eos=(3,)))
    assert config_to_dict(config)["eos_token_id"] == 3


def test_objects_of_transformers_are_no_dicts():
    given: Any = object()
    with pytest.raises(TypeError, match="config has type object; it must be a dict: the contents"):
        config_from_dict(given)
    with pytest.raises(TypeError, match="state_dict has type object; it must be a dict: arrays by"):
        from_state_dict(given, GPT2)


def test_error_lists_at_most_ten_faults(llama_state_dict):
    with pytest.raises(ValueError) as caught:
        from_state_dict(dict(list(llama_state_dict.items())[:15]), LLAMA)
    assert str(caught.value).count("is missing") == 10
    assert str(caught.value).endswith("; and 5 more")


@pytest.mark.parametrize("convert", [from_state_dict, to_state_dict])
def test_config_of_another_type_is_rejected(convert):
    config: Any = {"model_type": "llama"}
    for call in (lambda: convert({}, config), lambda: config_to_dict(config)):
        with pytest.raises(
            TypeError, match="config has type dict; it must be GPT2Config or Llama3"
        ):
            call()


def test_parameters_that_differ_from_the_config_are_rejected(all_params):
    params = all_params["gpt2"]
    with pytest.raises(ValueError, match=r"wpe has shape \(16, 32\); it must be \(17, 32\)"):
        to_state_dict(params, dataclasses.replace(GPT2, max_seq_len=17))
    without = {name: value for name, value in params.items() if name != "ln_f"}
    with pytest.raises(ValueError, match="ln_f/scale is missing"):
        to_state_dict(without, GPT2)
    with pytest.raises(ValueError, match="head is unexpected"):
        to_state_dict(all_params["llama"], TIED)


@pytest.mark.parametrize(
    "config",
    [*NAMES.values(), *gpt2.PRESETS.values(), *llama3.PRESETS.values()],
    ids=[*NAMES, *(f"gpt2-{name}" for name in gpt2.PRESETS), *llama3.PRESETS],
)
def test_config_round_trip(config):
    assert config_from_dict(config_to_dict(config)) == config


# The config.json of Llama 3.2 1B, without keys that do not affect the shape.
LLAMA_3_2_1B = {
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
}


# The same of three models of others.
OTHERS = {
    "mistral-7b-v0.1": {
        "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
        "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip


def llama_config(contents):
    config = config_from_dict(contents)
    assert isinstance(config, llama3.Llama3Config)
    return config


def test_published_configs_equal_the_presets():
    assert config_from_dict(LLAMA_3_2_1B) == llama3.PRESETS["3.2-1b"]
    # The RoPE keys of transformers 5.
    together = {"rope_theta": LLAMA_3_2_1B["rope_theta"], **LLAMA_3_2_1B["rope_scaling"]}
    rest = {k: v for k, v in LLAMA_3_2_1B.items() if not k.startswith("rope_")}
    assert config_from_dict({**rest, "rope_parameters": together}) == llama3.PRESETS["3.2-1b"]
    plain = llama_config({**rest, "rope_parameters": {"rope_theta": 1e4}})
    assert plain.rope_scaling is None
    assert plain.rope_theta == 10_000.0
    for name, contents in OTHERS.items():
        assert config_from_dict(contents) == llama3.PRESETS[name]
    shape = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12}
    assert config_from_dict({"model_type": "gpt2", **shape}) == gpt2.PRESETS["d12"]


def test_missing_num_key_value_heads_defaults_to_heads():
    without = {k: v for k, v in LLAMA_3_2_1B.items() if k != "num_key_value_heads"}
    assert llama_config(without).kv_heads == 32


def test_rope_scaling_values_are_read():
    scaling = {**LLAMA_3_2_1B["rope_scaling"], "factor": 2, "low_freq_factor": 1.5}
    config = llama_config({**LLAMA_3_2_1B, "rope_scaling": scaling})
    assert config.rope_scaling == RopeScaling(2.0, 1.5, 4.0, 8192)
    written = config_to_dict(config)["rope_scaling"]
    assert written == scaling


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"model_type": "gemma"},
            "model_type is 'gemma'; it must be 'gpt2' or 'llama' or 'mistral'",
        ),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
        ({"attention_bias": True}, "attention_bias is True; it must be False"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be False or"),
        ({"head_dim": 63}, "head_dim is 63; it must be even and at least 2"),
        ({"num_key_value_heads": 5}, "heads 32 is not a multiple of kv_heads 5"),
        ({"hidden_size": "2048"}, "hidden_size is '2048'; it must be an integer"),
        ({"num_attention_heads": 0}, "heads is 0"),
        ({"rope_theta": None}, "rope_theta is None; it must be a finite number"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"quantization_config": {"bits": 4}}, "quantized checkpoints are not supported"),
    ],
)
def test_unsupported_models_are_rejected(changed, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict({**LLAMA_3_2_1B, **changed})


def test_missing_key_is_an_error():
    for key in ("hidden_size", "rms_norm_eps", "vocab_size"):
        with pytest.raises(ValueError, match=f"{key} is missing"):
            config_from_dict({k: v for k, v in LLAMA_3_2_1B.items() if k != key})
    with pytest.raises(ValueError, match="activation_function is 'relu'; it must be 'gelu_new'"):
        config_from_dict({**config_to_dict(GPT2), "activation_function": "relu"})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"is_causal": False}, "is_causal is False; it must be True"),
        ({"is_causal": None}, "is_causal is None; it must be True"),
        ({"per_layer_config": {"0": {"n_head": 1}}}, "per_layer_config is .*; it must be None"),
        ({"hidden_size": 64}, "n_embd is 32 and hidden_size is 64; the two are names of one"),
        ({"num_attention_heads": 4}, "n_head is 2 and num_attention_heads is 4; the two are"),
        ({"num_hidden_layers": None}, "n_layer is 3 and num_hidden_layers is None; the two are"),
        ({"max_position_embeddings": 8}, "n_positions is 16 and max_position_embeddings is 8"),
    ],
)
def test_unsupported_settings_of_gpt2_are_named(changed, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict({**config_to_dict(GPT2), **changed})


def test_gpt2_sizes_may_have_the_other_names_of_transformers():
    names = {
        "n_embd": "hidden_size",
        "n_positions": "max_position_embeddings",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
    }
    contents = config_to_dict(GPT2)
    renamed = {names.get(key, key): value for key, value in contents.items()}
    assert config_from_dict(renamed) == config_from_dict(contents | renamed) == GPT2
