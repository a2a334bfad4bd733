"""Embeddings: clamped tokens, gradient accumulation and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import testing
from jaxllm.core import ffi
from jaxllm.ops import embed, tied_embed

TABLE = jnp.arange(12.0).reshape(4, 3)
POSITIONS = 100 * jnp.arange(15.0).reshape(5, 3)


def test_token_and_position_rows_are_added():
    out = embed(jnp.array([[2, 0]]), TABLE, POSITIONS)
    np.testing.assert_array_equal(out, [[[6, 107, 208], [300, 401, 502]]])


def test_tokens_outside_the_vocabulary_are_clamped_with_their_gradients():
    tokens = jnp.array([-(2**31), -1, 0, 3, 4, 2**31 - 1])
    out, pull = jax.vjp(lambda table: embed(tokens, table), TABLE)
    np.testing.assert_array_equal(out, TABLE[jnp.array([0, 0, 0, 3, 3, 3])])
    (gradient,) = pull(jnp.ones_like(out))
    np.testing.assert_array_equal(gradient, [[3.0] * 3, [0.0] * 3, [0.0] * 3, [3.0] * 3])


@pytest.mark.parametrize("tokens", [np.array([2**32]), np.array([2**31], np.uint32)])
def test_tokens_beyond_int32_read_the_last_row(tokens):
    np.testing.assert_array_equal(embed(tokens, TABLE), TABLE[-1:])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_tokens_may_be_of_any_integer_dtype(dtype):
    table = jnp.arange(300.0)[:, None]
    np.testing.assert_array_equal(embed(jnp.array([5, 99], dtype), table), [[5.0], [99.0]])


def test_gradients_are_summed_in_float32():
    tokens = jnp.zeros((64, 64), jnp.int32)
    table, positions = jnp.zeros((2, 3), jnp.bfloat16), jnp.zeros((64, 3), jnp.bfloat16)
    pull = jax.vjp(lambda *tables: embed(tokens, *tables), table, positions)[1]
    dtable, dpositions = pull(jnp.ones((64, 64, 3), jnp.bfloat16))
    # In bfloat16 a sum of ones stops at 256.
    np.testing.assert_array_equal(dtable, [[4096.0] * 3, [0.0] * 3])
    np.testing.assert_array_equal(dpositions, jnp.full((64, 3), 64.0))


def test_unused_positions_have_zero_gradient():
    pull = jax.vjp(lambda positions: embed(jnp.array([[1, 2]]), TABLE, positions), POSITIONS)[1]
    np.testing.assert_array_equal(pull(jnp.ones((1, 2, 3)))[0][:, 0], [1, 1, 0, 0, 0])


def test_more_tokens_than_positions_are_rejected():
    with pytest.raises(ValueError, match=r"tokens has shape \(2, 6\), 6 positions;.* rows for 5"):
        embed(jnp.zeros((2, 6), jnp.int32), TABLE, POSITIONS)


def test_mismatched_shapes_are_rejected():
    tokens = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(ValueError, match=r"position_table has shape \(5, 2\); it must be \(P, 3\)"):
        embed(tokens, TABLE, POSITIONS[:, :2])
    with pytest.raises(ValueError, match=r"token_table has shape \(3,\); it must be \(V, D\)"):
        embed(tokens, TABLE[0])
    with pytest.raises(ValueError, match=r"token_table has shape \(0, 3\)"):
        embed(tokens, TABLE[:0])
    with pytest.raises(ValueError, match=r"tokens has shape \(\)"):
        embed(jnp.int32(1), TABLE)


def test_invalid_dtypes_are_rejected():
    tokens = jnp.zeros((2, 3), jnp.int32)
    with pytest.raises(TypeError, match="tokens has dtype float32; it must be an integer array"):
        embed(tokens.astype(jnp.float32), TABLE)
    with pytest.raises(TypeError, match="token_table has dtype int32"):
        embed(tokens, TABLE.astype(jnp.int32))
    with pytest.raises(TypeError, match="position_table has dtype bfloat16; it must have the dtyp"):
        embed(tokens, TABLE, POSITIONS.astype(jnp.bfloat16))


BACKENDS = ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", testing.DTYPES)
@pytest.mark.parametrize(("width", "tokens"), [(3, 40), (768, 500), (8, 0)])
@pytest.mark.covering(("dtype", "backend"), ("width", "backend"), ("width", "dtype"))
def test_gradient_of_a_returned_table_is_added_to_the_embedding_gradient(
    backend, dtype, width, tokens
):
    vocabulary = 300
    keys = jax.random.split(jax.random.key(0), 4)
    table = jax.random.normal(keys[0], (vocabulary, width), dtype)
    positions = jax.random.normal(keys[1], (max(tokens, 1), width), dtype)
    # A few tokens occur often, most do not occur.
    rows = jax.random.randint(keys[2], (2, tokens), 0, 40) ** 2 % vocabulary
    lm_head = jax.random.normal(keys[3], (vocabulary, width), dtype)

    def returned(table, positions):
        out, again = tied_embed(rows, table, positions, backend=backend)
        return (out**2).sum() + (again * lm_head).sum()

    def separate(table, positions):
        out = embed(rows, table, positions, backend="xla")
        return (out**2).sum() + (table * lm_head).sum()

    found = jax.jit(jax.grad(returned, (0, 1)))(table, positions)
    wide = jax.jit(jax.grad(separate, (0, 1)))
    expected = wide(table.astype("float32"), positions.astype("float32"))
    testing.assert_close(found, expected, dtype, wide(table, positions))


def test_tied_lm_head_equals_the_token_table():
    out, table = tied_embed(jnp.array([[2, 0]]), TABLE, POSITIONS)
    np.testing.assert_array_equal(out, embed(jnp.array([[2, 0]]), TABLE, POSITIONS))
    np.testing.assert_array_equal(table, TABLE)


def skewed_tokens(count, vocabulary):
    """Tokens with the skewed frequencies of text."""
    uniform = jax.random.uniform(jax.random.key(0), (count,), minval=1e-6)
    return (vocabulary * uniform**4).astype(jnp.int32)


TOKENS = {
    "all_equal": np.full(300, 2),
    "two_runs": np.repeat([3, 1], [130, 191]),
    "exact_chunks": np.repeat(np.arange(4), 64),
    "skewed": skewed_tokens(500, 5),
}
# NumPy repeats the tokens: JAX would compile programs in each process that collects the tests.
TOKENS = {name: jnp.asarray(tokens, jnp.int32) for name, tokens in TOKENS.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
@pytest.mark.covering(("tokens",), ("backend",))
def test_gradients_of_repeated_tokens_are_summed(tokens, backend):
    table = jnp.zeros((5, 8))
    dout = jax.random.normal(jax.random.key(1), (tokens.size, 8))
    (gradient,) = jax.vjp(lambda table: embed(tokens, table, backend=backend), table)[1](dout)
    expected = np.zeros((5, 8))
    np.add.at(expected, np.asarray(tokens), np.asarray(dout, np.float64))
    testing.assert_close(gradient, expected, "float32")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["pallas", "cuda"])
@pytest.mark.parametrize("vocabulary", [50304, 300_000])
def test_gradients_of_many_repeated_tokens_are_deterministic(vocabulary, backend):
    tokens = skewed_tokens(2**16 + 77, vocabulary)
    table = jnp.zeros((vocabulary, 24), jnp.bfloat16)
    dout = jax.random.normal(jax.random.key(1), (tokens.size, 24), jnp.bfloat16)
    run = jax.jit(lambda dout: jax.vjp(lambda t: embed(tokens, t, backend=backend), table)[1](dout))
    (first,), (second,) = run(dout), run(dout)
    expected = np.zeros(table.shape)
    np.add.at(expected, np.asarray(tokens), np.asarray(dout, np.float64))
    testing.assert_close(first, expected, "bfloat16")
    np.testing.assert_array_equal(first, second)


def test_cuda_kernel_rejects_sizes_beyond_its_index_range():
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((2**20, 2**10), jnp.int32),
            ((4, 1), jnp.bfloat16),
            ((2**20 + 1, 1), jnp.bfloat16),
        )
    ]
    with pytest.raises(jaxllm.BackendError, match="fewer than 2"):
        jax.eval_shape(lambda x, t: embed(x, t, backend="cuda"), *shapes[:2])
    with pytest.raises(jaxllm.BackendError, match="token_table has 1048577 rows; the kernel takes"):
        jax.eval_shape(lambda x, t: embed(x[0], t, backend="cuda"), shapes[0], shapes[2])
