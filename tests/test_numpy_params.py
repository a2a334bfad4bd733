"""Inference with parameters and caches in NumPy's arrays, as a file is read into."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.inference.cache import decode_step, init_cache, prefill
from jaxllm.inference.paged_cache import init_paged_cache
from jaxllm.inference.quantize import quantize_params
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import for_decoding, unstack

GPT2 = gpt2.GPT2Config(vocab_size=11, max_seq_len=8, layers=1, heads=2, width=16)
LLAMA3 = llama3.Llama3Config(
    vocab_size=11, max_seq_len=8, layers=1, heads=4, kv_heads=2, width=16, mlp_width=24
)
MODELS: list[Any] = [pytest.param(gpt2, GPT2, id="gpt2"), pytest.param(llama3, LLAMA3, id="llama3")]
TOKENS: Any = np.array([[1, 2, 3], [4, 5, 0]], "int32")
LENGTHS: Any = np.array([3, 2], "int32")


def as_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def int8(params):
    return quantize_params(params, group_size=2)


@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.parametrize("form", [for_decoding, int8], ids=["for_decoding", "int8"])
@pytest.mark.parametrize("laid_out", [lambda x: x, unstack], ids=["stacked", "list"])
def test_other_forms_of_numpy_parameters_are_those_of_jax_arrays(model, config, form, laid_out):
    params = laid_out(model.init(jax.random.key(0), config))
    jax.tree.map(np.testing.assert_array_equal, form(as_numpy(params)), form(params))


@pytest.mark.parametrize(("model", "config"), MODELS)
def test_compiled_steps_may_hold_numpy_parameters(model, config):
    params = model.init(jax.random.key(0), config)

    def step(params):
        def logits(tokens, cache):
            return decode_step(model, params, tokens, config, cache)[0]

        return jax.make_jaxpr(logits)(LENGTHS, init_cache(config, 2, 8, "float32")).out_avals

    assert step(as_numpy(params)) == step(params)


@pytest.mark.parametrize(
    "cache",
    [init_cache(GPT2, 2, 8, "float32"), init_paged_cache(GPT2, [8, 8], 4, "float32")],
    ids=["one_piece", "pages"],
)
def test_caches_may_be_numpy_arrays(cache):
    params = gpt2.init(jax.random.key(0), GPT2)

    def run(form):
        _, filled = prefill(gpt2, params, TOKENS, LENGTHS, GPT2, form(cache))
        return decode_step(gpt2, params, jnp.array([1, 2]), GPT2, form(filled))[0]

    np.testing.assert_array_equal(run(as_numpy), run(lambda cache: cache))
