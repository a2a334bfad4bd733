"""Two training steps on the CUDA kernels give the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.models import gpt2, llama3
from jaxllm.ops.block.precision import RECIPES
from jaxllm.training import cast

MODELS = {
    "gpt2": (gpt2, gpt2.GPT2Config(500, 300, layers=2, heads=4, width=256)),
    "llama3": (
        llama3,
        llama3.Llama3Config(
            500, 300, layers=2, heads=4, kv_heads=2, width=512, mlp_width=640, rope_scaling=None
        ),
    ),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "precision", [None, *(pytest.param(name, marks=pytest.mark.hopper) for name in RECIPES)]
)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_repeat_bit_for_bit(name, precision):
    model, config = MODELS[name]
    params = cast(model.init(jax.random.key(0), config), jnp.bfloat16)
    tokens = jax.random.randint(jax.random.key(1), (3, 257), 0, config.vocab_size)

    def step(params):
        batch = tokens[:, :-1], tokens[:, 1:]
        return jax.value_and_grad(model.loss)(params, *batch, config, precision=precision)

    with jaxllm.use_backend("cuda"):
        step = jax.jit(step)
        first, second = (jax.tree.map(np.asarray, step(params)) for _ in range(2))
    assert np.isfinite(first[0])
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)
