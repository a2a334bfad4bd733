"""What the contract leaves open of the embeddings: clamped tokens, accumulation, and the errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.ops import embed

TABLE = jnp.arange(12.0).reshape(4, 3)
POSITIONS = 100 * jnp.arange(15.0).reshape(5, 3)


def test_rows_of_both_tables_are_added():
    out = embed(jnp.array([[2, 0]]), TABLE, POSITIONS)
    np.testing.assert_array_equal(out, [[[6, 107, 208], [300, 401, 502]]])


def test_tokens_outside_the_vocabulary_are_clamped_with_their_gradients():
    tokens = jnp.array([-(2**31), -1, 0, 3, 4, 2**31 - 1])
    out, pull = jax.vjp(lambda table: embed(tokens, table), TABLE)
    np.testing.assert_array_equal(out, TABLE[jnp.array([0, 0, 0, 3, 3, 3])])
    (gradient,) = pull(jnp.ones_like(out))
    np.testing.assert_array_equal(gradient, [[3.0] * 3, [0.0] * 3, [0.0] * 3, [3.0] * 3])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_tokens_may_be_of_any_integer_dtype(dtype):
    table = jnp.arange(300.0)[:, None]
    np.testing.assert_array_equal(embed(jnp.array([5, 99], dtype), table), [[5.0], [99.0]])


def test_gradients_add_up_in_float32():
    tokens = jnp.zeros((64, 64), jnp.int32)
    table, positions = jnp.zeros((2, 3), jnp.bfloat16), jnp.zeros((64, 3), jnp.bfloat16)
    pull = jax.vjp(lambda *tables: embed(tokens, *tables), table, positions)[1]
    dtable, dpositions = pull(jnp.ones((64, 64, 3), jnp.bfloat16))
    # 4096 ones added in bfloat16 stop at 256.
    np.testing.assert_array_equal(dtable, [[4096.0] * 3, [0.0] * 3])
    np.testing.assert_array_equal(dpositions, jnp.full((64, 3), 64.0))


def test_positions_that_were_not_read_have_gradient_zero():
    pull = jax.vjp(lambda positions: embed(jnp.array([[1, 2]]), TABLE, positions), POSITIONS)[1]
    np.testing.assert_array_equal(pull(jnp.ones((1, 2, 3)))[0][:, 0], [1, 1, 0, 0, 0])


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(ValueError, match=r"tokens has shape \(2, 6\), 6 positions;.* rows for 5"):
        embed(jnp.zeros((2, 6), jnp.int32), TABLE, POSITIONS)


def test_shapes_that_do_not_fit_are_refused():
    tokens = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"position_table has shape \(5, 2\); it must be \(P, 3\)"):
        embed(tokens, TABLE, POSITIONS[:, :2])
    with pytest.raises(ValueError, match=r"token_table has shape \(3,\); it must be \(V, D\)"):
        embed(tokens, TABLE[0])
    with pytest.raises(ValueError, match=r"token_table has shape \(0, 3\)"):
        embed(tokens, TABLE[:0])
    with pytest.raises(ValueError, match=r"tokens has shape \(\)"):
        embed(jnp.int32(1), TABLE)


def test_dtypes_that_do_not_fit_are_refused():
    tokens = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(TypeError, match="tokens has dtype float32; it must be an integer array"):
        embed(tokens.astype(jnp.float32), TABLE)
    with pytest.raises(TypeError, match="token_table has dtype int32"):
        embed(tokens, TABLE.astype(jnp.int32))
    with pytest.raises(TypeError, match="position_table has dtype bfloat16; it must have the dtyp"):
        embed(tokens, TABLE, POSITIONS.astype(jnp.bfloat16))


@pytest.mark.parametrize("backend", ["cuda", "pallas"])
def test_kernels_that_are_not_there_are_named(backend):
    tokens = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(jaxllm.BackendError, match="embed_forward has no " + backend + " kernel"):
        embed(tokens, TABLE, backend=backend)


def test_auto_passes_over_kernels_that_are_not_there():
    tokens = jnp.zeros((2, 3), jnp.int32)
    calls = jaxllm.explain(lambda x: embed(tokens, x), TABLE).calls
    assert calls[0].on_gpu == "xla"
    reasons = dict(calls[0].passed_over)
    assert reasons["cuda"].startswith("embed_forward has no cuda kernel")
    assert reasons["pallas"].startswith("embed_forward has no pallas kernel")
