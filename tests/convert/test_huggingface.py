"""Conversion between our GPT-2 parameters and Hugging Face's names, without torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.convert.huggingface import gpt2_from_huggingface, gpt2_to_huggingface
from jaxllm.models.gpt2 import GPT2Config, init

CONFIG = GPT2Config(vocab_size=61, max_seq_len=16, layers=3, heads=2, width=32)


@pytest.fixture(scope="module")
def params():
    """Random in every array, biases and scales too, so that no two are alike."""
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), CONFIG))
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    random = tree.unflatten(
        [jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)]
    )
    return random | {"wte": random["wte"].at[CONFIG.vocab_size :].set(0)}


@pytest.fixture
def state_dict(params):
    return gpt2_to_huggingface(params, CONFIG)


def test_there_and_back_changes_no_bit(params, state_dict):
    back = gpt2_from_huggingface(state_dict, CONFIG)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(back), strict=True):
        assert after.dtype == jnp.float32
        np.testing.assert_array_equal(before, after)


def test_names_and_shapes_are_those_of_the_state_dict(state_dict):
    assert len(state_dict) == 2 + 12 * CONFIG.layers + 2 + 1
    assert state_dict["transformer.wte.weight"].shape == (61, 32)
    assert state_dict["transformer.wpe.weight"].shape == (16, 32)
    assert state_dict["transformer.h.2.attn.c_attn.weight"].shape == (32, 96)
    assert state_dict["transformer.h.0.mlp.c_proj.weight"].shape == (128, 32)
    assert all(array.dtype == np.float32 for array in state_dict.values())
    np.testing.assert_array_equal(
        state_dict["lm_head.weight"], state_dict["transformer.wte.weight"]
    )


def test_each_layer_keeps_its_place(params, state_dict):
    for layer in range(CONFIG.layers):
        np.testing.assert_array_equal(
            state_dict[f"transformer.h.{layer}.mlp.c_fc.bias"],
            params["blocks"]["mlp"]["up"]["bias"][layer],
        )


def test_bfloat16_parameters_come_out_in_float32(params):
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    converted = gpt2_to_huggingface(half, CONFIG)["transformer.wpe.weight"]
    np.testing.assert_array_equal(converted, half["wpe"].astype(jnp.float32))


def test_the_head_may_be_left_out_but_not_untied(params, state_dict):
    del state_dict["lm_head.weight"]
    np.testing.assert_array_equal(gpt2_from_huggingface(state_dict, CONFIG)["wte"], params["wte"])
    state_dict["lm_head.weight"] = state_dict["transformer.wte.weight"] + 1
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from transformer\.wte\.weight"):
        gpt2_from_huggingface(state_dict, CONFIG)


def test_a_missing_tensor_is_named(state_dict):
    del state_dict["transformer.h.1.ln_2.bias"]
    with pytest.raises(ValueError, match=r"transformer\.h\.1\.ln_2\.bias is missing"):
        gpt2_from_huggingface(state_dict, CONFIG)


def test_an_unexpected_tensor_is_named(state_dict):
    state_dict["transformer.h.3.ln_2.bias"] = np.zeros(32, np.float32)
    with pytest.raises(ValueError, match=r"transformer\.h\.3\.ln_2\.bias is unexpected"):
        gpt2_from_huggingface(state_dict, CONFIG)


def test_a_misshapen_tensor_is_named_with_both_shapes(state_dict):
    name = "transformer.h.0.mlp.c_fc.weight"
    state_dict[name] = state_dict[name].T
    message = r"h\.0\.mlp\.c_fc\.weight has shape \(128, 32\); it must be \(32, 128\)"
    with pytest.raises(ValueError, match=message):
        gpt2_from_huggingface(state_dict, CONFIG)


def test_parameters_of_another_shape_are_refused(params):
    with pytest.raises(ValueError, match=r"wpe has shape \(16, 32\); it must be \(17, 32\)"):
        gpt2_to_huggingface(params, GPT2Config(61, 17, 3, 2, 32))
    without = {name: value for name, value in params.items() if name != "ln_f"}
    with pytest.raises(ValueError, match="ln_f/scale is missing"):
        gpt2_to_huggingface(without, CONFIG)
