"""RoPE: layouts, tables, scaling, Hugging Face parity and errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import testing
from jaxllm.core import ffi
from jaxllm.ops import RopeScaling, rope, rope_table

Q = jax.random.normal(jax.random.key(0), (2, 6, 4, 8))
K = jax.random.normal(jax.random.key(1), (2, 6, 2, 8))
COS, SIN = rope_table(jnp.arange(6), 8, theta=100.0)
BACKENDS = ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_matches_complex_multiplication(interleaved):
    rotated, _ = rope(Q, K, COS, SIN, interleaved=interleaved)
    (a, b), (rotated_a, rotated_b) = sides(Q, interleaved), sides(rotated, interleaved)
    expected = (a + 1j * b) * jnp.exp(1j * jnp.arctan2(SIN, COS))[:, None, :]
    testing.assert_close((rotated_a, rotated_b), (expected.real, expected.imag), "float32")


def sides(x, interleaved):
    """The first and the second column of every pair."""
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :4], x[..., 4:])


def test_scores_depend_only_on_relative_position():
    q, k = (jnp.broadcast_to(x[:, :1, :1], (2, 6, 1, 8)) for x in (Q, K))
    q, k = rope(q, k, COS, SIN)
    scores = jnp.einsum("btnh,bsnh->bts", q, k)
    testing.assert_close(scores[:, :-1, :-1], scores[:, 1:, 1:], "float32")
    assert testing.error(scores[:, 0, 1:], scores[:, 0, :-1]) > 0.01


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_may_be_rotated_without_keys(backend):
    rotated, pull = jax.vjp(lambda q: rope(q, None, COS, SIN, backend=backend), Q)
    expected, pull_both = jax.vjp(lambda q: rope(q, K, COS, SIN, backend="xla")[0], Q)
    testing.assert_close(rotated, expected, "float32")
    testing.assert_close(pull(Q), pull_both(Q), "float32")


@pytest.mark.parametrize("backend", BACKENDS)
def test_columns_beyond_the_table_are_unchanged(backend):
    q = Q.astype(jnp.bfloat16).at[0, 0, 0, 6:].set(jnp.inf)
    rotated = rope(q, None, COS[:, :2], SIN[:, :2], backend=backend)
    np.testing.assert_array_equal(rotated[..., 4:], q[..., 4:])
    assert not np.array_equal(rotated[..., :4], q[..., :4])


@pytest.mark.gpu
def test_more_sequences_than_the_maximum_grid_size():
    q = jax.random.normal(jax.random.key(0), (70001, 3, 1, 16))
    tables = rope_table(jnp.arange(3), 16, theta=100.0)
    expected = rope(q, None, *tables, backend="xla")
    testing.assert_close(rope(q, None, *tables, backend="cuda"), expected, "float32")


def test_backward_applies_the_inverse_rotation():
    pull = jax.vjp(lambda q, k: rope(q, k, COS, SIN), Q, K)[1]
    testing.assert_close(pull(rope(Q, K, COS, SIN)), (Q, K), "float32")


def test_tables_accept_positions_of_any_shape():
    positions = jnp.array([[0, 3], [7, 100]])
    cos, sin = rope_table(positions, 6, theta=10.0)
    angles = np.asarray(positions)[..., None] * 10.0 ** (-np.arange(3) / 3)
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-5)


def test_scaling_changes_only_low_frequencies():
    position = jnp.array([1])
    angles = jnp.arctan2(*rope_table(position, 128, theta=5e5)[::-1])[0]
    scaled = jnp.arctan2(*rope_table(position, 128, theta=5e5, scaling=RopeScaling())[::-1])[0]
    rotations = 8192 * angles / (2 * np.pi)  # over the original length
    fast, slow = rotations > 4, rotations < 1
    np.testing.assert_array_equal(scaled[fast], angles[fast])
    np.testing.assert_allclose(scaled[slow], angles[slow] / 8, rtol=1e-5)
    between = ~fast & ~slow
    assert between.any()
    assert (scaled[between] < angles[between]).all()
    assert (scaled[between] > angles[between] / 8).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"factor": 0.0}, "factor is 0.0; it must be above 0, and finite"),
        ({"factor": float("inf")}, "factor is inf; it must be above 0, and finite"),
        ({"low": -1.0}, "low is -1.0; it must be above 0"),
        ({"high": float("nan")}, "high is nan; it must be above 0"),
        ({"low": 4.0}, "low is 4.0; it must be below high, which is 4.0"),
        ({"original_length": 0}, "original_length is 0; it must be an integer, at least 1"),
        ({"original_length": 8192.0}, "original_length is 8192.0; it must be an integer"),
    ],
)
def test_invalid_scaling_is_rejected(changed, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**changed)


@pytest.mark.parametrize("number", [np.float32, np.array, jnp.asarray])
def test_scaling_of_array_scalars_has_the_hash_of_numbers(number):
    of_scalars = RopeScaling(*map(number, (8.0, 1.0, 4.0)), original_length=jnp.int32(8192))
    assert hash(of_scalars) == hash(RopeScaling())
    assert {type(x) for x in dataclasses.astuple(of_scalars)} == {float, int}


def test_scaling_of_another_type_is_rejected():
    with pytest.raises(TypeError, match="factor is '8'; it must be a number"):
        RopeScaling(factor="8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scaling has type float; it must be a RopeScaling"):
        rope_table(jnp.arange(3), 8, theta=10.0, scaling=8.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta": 0.0}, "theta is 0.0; it must be above 0"),
        ({"theta": -1.0}, "theta is -1.0; it must be above 0"),
        ({"theta": float("nan")}, "theta is nan; it must be finite"),
        ({"theta": float("inf")}, "theta is inf; it must be finite"),
        ({"head_dim": -2}, "head_dim is -2; it must be even"),
    ],
)
def test_angles_that_are_no_numbers_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        rope_table(jnp.arange(3), **({"head_dim": 8, "theta": 10.0} | options))


def huggingface_rope(torch, transformers, positions, rope_scaling):
    """The cos and sin tables of Hugging Face's Llama, and the function that applies them."""
    from transformers.models.llama import modeling_llama

    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=rope_scaling,
    )
    embedding = modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = embedding(torch.zeros(1), torch.from_numpy(positions)[None])
    return cos, sin, modeling_llama.apply_rotary_pos_emb


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("theirs", "ours"), [(None, None), (LLAMA3_SCALING, RopeScaling())], ids=["plain", "llama3"]
)
def test_matches_hugging_face(huggingface, theirs, ours):
    torch, transformers = huggingface
    positions = np.array([0, 1, 2, 777, 4096, 20000])
    hf_cos, hf_sin, apply = huggingface_rope(torch, transformers, positions, theirs)
    cos, sin = rope_table(jnp.asarray(positions), 64, theta=500000.0, scaling=ours)
    # Half a float32 rounding of a frequency rotates position 20,000 by 0.001.
    for table, hf_table in ((cos, hf_cos), (sin, hf_sin)):
        np.testing.assert_allclose(table, hf_table[0, :, :32].numpy(), atol=3e-3)
        np.testing.assert_allclose(table[:4], hf_table[0, :4, :32].numpy(), atol=1e-4)

    q = np.random.default_rng(0).normal(size=(2, 6, 4, 64)).astype(np.float32)
    torch_q = torch.from_numpy(q)
    hf_q, _ = apply(torch_q, torch_q, hf_cos, hf_sin, unsqueeze_dim=2)
    cos, sin = (jnp.asarray(table[0, :, :32].numpy()) for table in (hf_cos, hf_sin))
    testing.assert_close(rope(jnp.asarray(q), None, cos, sin), hf_q.numpy(), "float32")


def test_mismatched_shapes_are_rejected():
    with pytest.raises(ValueError, match=r"q has shape \(6, 8\)"):
        rope(Q[0, :, 0], None, COS, SIN)
    with pytest.raises(
        ValueError, match=r"k has shape \(2, 6, 2, 6\); it must be that of q \(2, 6"
    ):
        rope(Q, K[..., :6], COS, SIN)
    with pytest.raises(ValueError, match=r"cos has shape \(5, 4\); with q \(2, 6, 4, 8\)"):
        rope(Q, K, COS[:5], SIN[:5])
    with pytest.raises(ValueError, match=r"cos has shape \(6, 8\), 8 pairs of columns"):
        rope(Q, K, jnp.ones((6, 8)), jnp.ones((6, 8)))
    with pytest.raises(ValueError, match=r"sin has shape \(6, 3\); it must be \(6, 4\)"):
        rope(Q, K, COS, SIN[:, :3])
    with pytest.raises(ValueError, match="head_dim is 7; it must be even"):
        rope_table(jnp.arange(3), 7, theta=10.0)


def test_mismatched_dtypes_are_rejected():
    with pytest.raises(TypeError, match="k has dtype bfloat16; it must have the dtype of q"):
        rope(Q, K.astype(jnp.bfloat16), COS, SIN)
    with pytest.raises(TypeError, match="sin has dtype bfloat16; it must have the dtype of cos"):
        rope(Q, K, COS, SIN.astype(jnp.bfloat16))
    with pytest.raises(TypeError, match="positions has dtype float32; it must be an integer array"):
        rope_table(jnp.arange(3.0), 8, theta=10.0)
    with pytest.raises(TypeError, match=r"head_dim is 8\.0; it must be an integer"):
        rope_table(jnp.arange(3), 8.0, theta=10.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="theta is 'a'; it must be a number"):
        rope_table(jnp.arange(3), 8, theta="a")  # type: ignore[arg-type]


def test_cuda_kernel_rejects_bfloat16_tables():
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    with pytest.raises(jaxllm.BackendError, match="cos has dtype bfloat16; the kernel takes flo"):
        rope(Q, K, *(table.astype(jnp.bfloat16) for table in (COS, SIN)), backend="cuda")
