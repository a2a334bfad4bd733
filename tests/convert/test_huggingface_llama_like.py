"""Mistral, Qwen2 and Qwen3, as the model of Llama 3 with options: against Hugging Face's."""

import copy
import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_huggingface import assert_equal, random_params

from jaxllm.convert import huggingface, llama2c
from jaxllm.convert.huggingface import (
    config_from_dict,
    config_to_dict,
    from_state_dict,
    to_state_dict,
)
from jaxllm.inference.generate import complete
from jaxllm.models import llama3
from jaxllm.models.llama3 import Llama3Config
from jaxllm.testing import error

# 20 tokens are four windows.
T, WINDOW = 20, 5
BASE = Llama3Config(
    vocab_size=61, max_seq_len=64, layers=3, heads=4, kv_heads=2, width=32, mlp_width=40,
    rope_theta=100.0, rope_scaling=None,
)  # fmt: skip
QWEN2 = dataclasses.replace(BASE, qkv_bias=True)
QWEN3 = dataclasses.replace(BASE, qk_norm=True, head_dim=12)
TIED = {"tied_head": True}
# The configs, and the model that each is in transformers.
CONFIGS = {
    "nemo": (dataclasses.replace(BASE, head_dim=12), "llama"),
    # transformers rejects a Llama whose width is not a multiple of its heads.
    "narrow": (dataclasses.replace(BASE, width=30, head_dim=12), "mistral"),
    "mistral": (dataclasses.replace(BASE, window=WINDOW), "mistral"),
    "mistral_head_dim_tied": (dataclasses.replace(BASE, window=3, head_dim=12, **TIED), "mistral"),
    "qwen2": (QWEN2, "qwen2"),
    "qwen2_tied_windows": (
        dataclasses.replace(QWEN2, window=(None, WINDOW, WINDOW), **TIED),
        "qwen2",
    ),
    "qwen3_tied": (dataclasses.replace(QWEN3, **TIED), "qwen3"),
    "qwen3_windows": (dataclasses.replace(QWEN3, window=(WINDOW, None, WINDOW)), "qwen3"),
}


EQUAL_WINDOWS = [
    dataclasses.replace(config, window=(window,) * 3)
    for config in (BASE, QWEN2, QWEN3)
    for window in (WINDOW, None)
]


@pytest.mark.parametrize("config", EQUAL_WINDOWS)
def test_equal_windows_round_trip(config):
    assert config_from_dict(config_to_dict(config)) == config


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param][0]


def test_a_config_is_of_its_architecture(config):
    (model_type,) = (kind for of, kind in CONFIGS.values() if of is config)
    contents = config_to_dict(config)
    assert contents["model_type"] == model_type
    assert contents["architectures"] == [
        {"qwen2": "Qwen2", "qwen3": "Qwen3"}.get(model_type, model_type.title()) + "ForCausalLM"
    ]
    assert config_from_dict(json.loads(json.dumps(contents))) == config


def test_state_dict_round_trip_is_bit_identical(config):
    params = random_params(config)
    state_dict = to_state_dict(params, config)
    assert ("model.layers.2.self_attn.q_proj.bias" in state_dict) == config.qkv_bias
    assert ("model.layers.2.self_attn.k_norm.weight" in state_dict) == config.qk_norm
    assert_equal(from_state_dict(state_dict, config), params)


def test_file_round_trip_is_bit_identical(config, tmp_path):
    params = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), random_params(config))
    huggingface.save(tmp_path / "a", params, config)
    back, found = huggingface.load(tmp_path / "a")
    assert found == config
    assert_equal(back, params)
    huggingface.save(tmp_path / "b", back, found)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


# Against transformers.


def their_config(transformers, config):
    """The config of transformers, by its own arguments."""
    options: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_seq_len,
        "hidden_size": config.width,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.head_dim is not None:
        options["head_dim"] = config.head_dim
    if not (config.qkv_bias or config.qk_norm):
        if config.window is None and config.width % config.heads == 0:
            return transformers.LlamaConfig(**options)
        return transformers.MistralConfig(**options, sliding_window=config.window)
    if config.window is not None:
        options |= {"use_sliding_window": True, "sliding_window": WINDOW}
        types = ["sliding_attention" if w else "full_attention" for w in config.windows]
        # transformers derives the types of Qwen2 from max_window_layers.
        options |= {"max_window_layers": 1} if config.qkv_bias else {"layer_types": types}
    if config.qkv_bias:
        return transformers.Qwen2Config(**options)
    return transformers.Qwen3Config(**options)


@functools.cache
def their_model(name):
    """A model of transformers with random biases and scales, and its parameters here."""
    import torch
    import transformers

    config = CONFIGS[name][0]
    torch.manual_seed(0)
    theirs = their_config(transformers, config)
    model = transformers.AutoModelForCausalLM.from_config(theirs).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 * torch.randn_like(parameter))
    state_dict = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return model, from_state_dict(state_dict, config)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_loss_and_every_gradient_agree_with_huggingface(huggingface, name):
    torch, _ = huggingface
    config = CONFIGS[name][0]
    model, params = their_model(name)
    assert config_from_dict(model.config.to_dict()) == config
    tokens = jax.random.randint(jax.random.key(2), (2, T), 0, config.vocab_size)
    labels = jax.random.randint(jax.random.key(3), (2, T), 0, config.vocab_size)
    labels = labels.at[1, 13:].set(-1)

    model.zero_grad()
    logits = model(torch.from_numpy(np.array(tokens)).long()).logits
    expected_loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(np.array(labels)).long().flatten(), ignore_index=-1
    )
    expected_loss.backward()

    ours = jax.jit(lambda p: llama3.forward(p, tokens, config))(params)
    assert error(ours[..., : config.vocab_size], logits.detach().numpy()) <= 1e-4
    gradient = jax.jit(jax.value_and_grad(lambda p: llama3.loss(p, tokens, labels, config)))
    value, gradients = gradient(params)
    assert error(value, expected_loss.item()) <= 1e-4
    gradients = to_state_dict(gradients, config)
    for key, parameter in model.named_parameters():
        found = error(gradients[key], parameter.grad.numpy())
        assert found <= 1e-4, f"{key}: {found:.3g}"
    if config.window is not None:  # the comparison would otherwise say nothing of it
        whole = llama3.forward(params, tokens, dataclasses.replace(config, window=None))
        assert error(ours, whole) > 1e-2
    per_layer = 9 + 3 * config.qkv_bias + 2 * config.qk_norm
    count = len(list(model.named_parameters()))
    assert count == 2 + per_layer * config.layers + (not config.tied_head)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_huggingface(huggingface, name):
    """The prompt and the new tokens are several windows each."""
    torch, _ = huggingface
    config = CONFIGS[name][0]
    model, params = their_model(name)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0
    )[0, len(prompt) :]
    out = complete(
        llama3, params, [prompt, prompt[:3]], config=config, max_new_tokens=40, temperature=0
    )
    assert out[0].tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 3  # not the same token over and over


@pytest.mark.parametrize("name", CONFIGS)
def test_folders_go_both_ways(request, name, tmp_path):
    torch, transformers = request.getfixturevalue("huggingface")
    config = CONFIGS[name][0]
    params = random_params(config)
    huggingface.save(tmp_path / "ours", params, config)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    assert type(model).__name__ == config_to_dict(config)["architectures"][0]
    expected = to_state_dict(params, config)
    theirs = {key: tensor.numpy() for key, tensor in model.state_dict().items()}
    assert theirs.keys() == expected.keys()
    for key, array in expected.items():
        np.testing.assert_array_equal(theirs[key], array)
    tokens = np.arange(T)[None] % config.vocab_size
    ours = llama3.forward(params, jnp.asarray(tokens), config)[..., : config.vocab_size]
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)).logits.numpy()
    assert error(ours, logits) <= 1e-4
    model.save_pretrained(tmp_path / "theirs")
    back, found = huggingface.load(tmp_path / "theirs")
    assert found == config
    assert_equal(back, params)


# The RoPE keys of config.json, of which transformers 4 and 5 have different ones.

PLAIN = {"rope_type": "default", "rope_theta": 300.0}
NOWHERE = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = NOWHERE | {"original_max_position_embeddings": 16}
TOP = {"original_max_position_embeddings": 32}
ROPES = {
    "scaling_over_parameters": {"rope_scaling": SCALED, "rope_parameters": PLAIN},
    "plain_over_scaled": {"rope_scaling": PLAIN, "rope_parameters": SCALED},
    "over_an_unsupported_one": {"rope_scaling": SCALED, "rope_parameters": {"rope_type": "yarn"}},
    "empty_scaling": {"rope_scaling": {}, "rope_parameters": SCALED | {"rope_theta": 50.0}},
    "theta_of_the_top": {"rope_theta": 50.0, "rope_scaling": SCALED, "rope_parameters": PLAIN},
    "theta_of_the_dict": {"rope_theta": 50.0, "rope_scaling": SCALED | {"rope_theta": 200.0}},
    "length_of_the_top": {"rope_parameters": SCALED} | TOP,
    "length_only_at_the_top": {"rope_scaling": NOWHERE} | TOP,
    "length_of_the_model": {"rope_parameters": NOWHERE},
    "length_without_scaling": {"rope_parameters": PLAIN} | TOP,
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_rope_keys_have_the_precedence_of_transformers(huggingface, rope):
    torch, transformers = huggingface
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    contents = {k: v for k, v in config_to_dict(BASE).items() if not k.startswith("rope_")}
    # transformers changes the dicts that it gets.
    theirs = transformers.LlamaConfig(**copy.deepcopy(contents | rope))
    expected = rotary(theirs)(torch.zeros(1), torch.arange(T)[None])
    config = config_from_dict(contents | rope)
    assert isinstance(config, Llama3Config)
    for table, their_table in zip(llama3.rope_table(jnp.arange(T), config), expected, strict=True):
        np.testing.assert_allclose(table, their_table[0, :, : table.shape[-1]], atol=1e-5)


def test_a_null_length_at_the_top_counts_for_none():
    contents = config_to_dict(BASE) | {"rope_parameters": SCALED}
    assert config_from_dict(contents | dict.fromkeys(TOP)) == config_from_dict(contents)


# The config.json of published models, without keys that do not affect the shape.

MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NEMO = MISTRAL_7B | {
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 1024000,
    "num_hidden_layers": 40,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 131072,
}
QWEN25_05B = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": [151645, 151643],
}
QWEN3_06B = {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
    "eos_token_id": 151645,
}


@pytest.mark.parametrize(
    ("contents", "expected", "eos", "count"),
    [
        (MISTRAL_7B, {"window": 4096, "head_width": 128}, (2,), 7_241_732_096),
        (NEMO, {"window": None, "head_width": 128}, (2,), 12_247_782_400),
        (
            QWEN25_05B,
            {"window": None, "head_width": 64, "qkv_bias": True},
            (151645, 151643),
            494_032_768,
        ),
        (
            QWEN3_06B,
            {"window": None, "head_width": 128, "qk_norm": True},
            (151645,),
            596_049_920,
        ),
    ],
    ids=["mistral-7b", "nemo", "qwen2.5-0.5b", "qwen3-0.6b"],
)
def test_published_configs_have_the_known_number_of_parameters(contents, expected, eos, count):
    config = config_from_dict(contents)
    assert isinstance(config, Llama3Config)
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.special_tokens.eos == eos
    assert llama3.num_params(config) == count
    assert config_from_dict(config_to_dict(config)) == config
    # The RoPE keys of transformers 5.
    rest = {k: v for k, v in contents.items() if not k.startswith("rope_")}
    rope = {"rope_theta": contents["rope_theta"], "rope_type": "default"}
    assert config_from_dict({**rest, "rope_parameters": rope}) == config


def window_of(contents, **changed):
    config = config_from_dict({**contents, **changed})
    assert isinstance(config, Llama3Config)
    return config.window


def test_windows_of_qwen_are_by_number_or_by_type():
    on: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "num_hidden_layers": 4}
    for contents in (QWEN25_05B, QWEN3_06B):
        window = functools.partial(window_of, contents, **on)
        assert window(max_window_layers=4) is None
        assert window(max_window_layers=0) == 8
        assert window(max_window_layers=3) == (None, None, None, 8)
        types = ["sliding_attention", "full_attention"] * 2
        assert window(layer_types=types) == (8, None, 8, None)
        assert window(layer_types=types[:1] * 4) == 8
        assert window(layer_types=types[1:2] * 4) is None
        assert window_of(contents, **on | {"use_sliding_window": False}) is None
        assert window_of(contents, **on | {"sliding_window": None}) is None


def test_missing_keys_have_the_defaults_of_transformers():
    def without(contents, *keys):
        config = config_from_dict({k: v for k, v in contents.items() if k not in keys})
        assert isinstance(config, Llama3Config)
        return config

    assert without(MISTRAL_7B, "sliding_window").window == 4096
    assert without(QWEN3_06B, "head_dim").head_width == 128
    assert without(NEMO, "head_dim").head_width == 160
    for contents, kv_heads in ((MISTRAL_7B, 8), (QWEN25_05B, 32), (QWEN3_06B, 32)):
        heads = contents | {"num_attention_heads": 64, "head_dim": 64}
        assert without(heads, "num_key_value_heads").kv_heads == kv_heads
        assert without(heads | {"num_key_value_heads": None}).kv_heads == 64
    assert without(QWEN25_05B, "use_sliding_window").window is None
    on = QWEN25_05B | {"use_sliding_window": True, "num_hidden_layers": 30}
    assert without(on, "sliding_window", "max_window_layers").window == (None,) * 28 + (4096,) * 2


FULL, SLIDING = ["full_attention"], ["sliding_attention"]


@pytest.mark.parametrize(
    ("contents", "changed", "message"),
    [
        (QWEN3_06B, {"attention_bias": True}, "attention_bias is True; it must be False"),
        (QWEN25_05B, {"attention_bias": False}, "attention_bias is False; it must be True"),
        (MISTRAL_7B, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
        (MISTRAL_7B, {"head_dim": 33}, "head_dim is 33; it must be even"),
        (MISTRAL_7B, {"head_dim": "64"}, "head_dim is '64'; it must be an integer"),
        (MISTRAL_7B, {"sliding_window": 0}, "sliding_window is 0; it must be at least 1, or null"),
        (MISTRAL_7B, {"sliding_window": 1.5}, r"sliding_window is 1\.5; it must be an integer"),
        (
            MISTRAL_7B,
            {"use_sliding_window": False},
            "use_sliding_window is False; it must be True",
        ),
        (
            MISTRAL_7B,
            {"layer_types": FULL * 16 + SLIDING * 16},
            "layer_types is .*; a mistral with sliding_window 4096 has one type",
        ),
        (
            MISTRAL_7B | {"model_type": "llama"},
            {},
            "sliding_window is 4096; it must be None",
        ),
        (QWEN3_06B, {"layer_types": FULL}, r"layer_types is \['full_.*; it must be a list of one"),
        (
            QWEN3_06B,
            {"layer_types": ["chunked_attention"] * 28},
            "layer_types has 'chunked_attention'; each must be 'full_attention' or",
        ),
        (
            QWEN3_06B,
            {"layer_types": SLIDING * 28},
            "layer_types is .*; without a sliding window it must be 'full_attention' for all",
        ),
        (QWEN3_06B, {"use_sliding_window": "yes"}, "use_sliding_window is 'yes'; it must be False"),
        (
            QWEN3_06B,
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type is 'yarn'; it must be 'default' or 'llama3'",
        ),
        (
            QWEN3_06B,
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters has 'full_attention'; it must be one for all layers",
        ),
        (
            QWEN3_06B,
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5; it must be 1.0",
        ),
        (QWEN25_05B, {"is_causal": False}, "is_causal is False; it must be True"),
        (QWEN25_05B, {"is_causal": None}, "is_causal is None; it must be True"),
        (
            QWEN3_06B,
            {"per_layer_config": {"1": {"rms_norm_eps": 1.0}}},
            r"per_layer_config is \{'1': .*; it must be None",
        ),
        (
            QWEN25_05B,
            {"use_sliding_window": True, "num_hidden_layers": 2**30},
            "num_hidden_layers is 1073741824; it must be at most 10000",
        ),
        (MISTRAL_7B, {"model_type": "mixtral"}, "model_type is 'mixtral'; it must be 'gpt2' or"),
    ],
)
def test_unsupported_settings_are_named(contents, changed, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict({**contents, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"qkv_bias": True, "qk_norm": True}, "the config has qkv_bias and qk_norm"),
        ({"window": (None, 5, 5)}, r"window is \(None, 5, 5\); MistralForCausalLM has one size"),
        (
            {"window": (4, 5, 5), "qk_norm": True},
            r"window is \(4, 5, 5\); Qwen3ForCausalLM has one",
        ),
    ],
)
def test_configs_without_an_architecture_are_rejected(changed, message, tmp_path):
    config = dataclasses.replace(BASE, **changed)
    with pytest.raises(ValueError, match=message):
        huggingface.save(tmp_path / "out", random_params_of(config), config)
    assert not (tmp_path / "out").exists()


def random_params_of(config):
    return llama3.init(jax.random.key(0), config)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"head_dim": 12}, "head_dim is 12; the format has width / heads alone"),
        ({"qkv_bias": True}, "qkv_bias is True; the format has no key for it"),
        ({"qk_norm": True}, "qk_norm is True; the format has no key for it"),
        ({"window": 5}, "window is 5; the format has no key for it"),
    ],
)
def test_llama2c_has_no_such_options(changed, message, tmp_path):
    config = dataclasses.replace(BASE, **changed)
    with pytest.raises(ValueError, match=message):
        llama2c.save(tmp_path / "out.bin", random_params_of(config), config)
    assert not list(tmp_path.iterdir())
