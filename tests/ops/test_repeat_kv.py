"""Repeating key and value heads for grouped-query attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import BACKENDS

from jaxllm.ops import repeat_kv


@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_heads_are_adjacent(backend):
    x = jax.random.normal(jax.random.key(0), (2, 3, 2, 8))
    out = repeat_kv(x, 3, backend=backend)
    for n in range(6):
        np.testing.assert_array_equal(out[:, :, n], x[:, :, n // 3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_head_gradients_are_summed_in_float32(backend):
    # In bfloat16 1 + 2^-8 + 2^-8 is 1.
    dout = jnp.array([1.0, 2**-8, 2**-8], jnp.bfloat16)[None, None, :, None].repeat(8, axis=3)
    _, pull = jax.vjp(lambda x: repeat_kv(x, 3, backend=backend), dout[:, :, :1])
    np.testing.assert_array_equal(pull(dout)[0], jnp.full((1, 1, 1, 8), 1 + 2**-7, jnp.bfloat16))


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match=r"x has shape \(3,\); it must be \(\.\.\., K, H\)"):
        repeat_kv(jnp.zeros(3), 2)
    with pytest.raises(ValueError, match="groups is 0; it must be at least 1"):
        repeat_kv(jnp.zeros((3, 4)), 0)
    with pytest.raises(TypeError, match="x has dtype int32; it must be a floating-point array"):
        repeat_kv(jnp.zeros((3, 4), jnp.int32), 2)
