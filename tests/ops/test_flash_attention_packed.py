"""Flash attention of a packed QKV projection, and RoPE inside attention."""

import functools

import jax
import jax.numpy as jnp
import pytest
from op_helpers import (
    FLASH_BACKENDS,
    attention_arrays,
    packed_arrays,
)

from jaxllm.ops import (
    flash_attention,
    flash_attention_packed,
    rope,
    rope_table,
)
from jaxllm.testing import error, lower_for_cuda, tolerance


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
@pytest.mark.parametrize(("N", "K"), [(3, 3), (4, 2)])
@pytest.mark.covering(("N",), ("backend",))
def test_packed_qkv_matches_separate_q_k_v(N, K, backend):
    (q, k, v), qkv = packed_arrays(N, K)
    options = {"causal": True, "backend": backend}
    out, pull = jax.vjp(lambda x: flash_attention_packed(x, N, K, **options), qkv)
    expected, pull_unpacked = jax.vjp(lambda *x: flash_attention(*x, **options), q, k, v)
    assert out.shape == (2, 6, N * 8)
    assert error(out, expected.reshape(out.shape)) <= tolerance("float32")
    dout = jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
    wanted = [x.reshape(2, 6, -1) for x in pull_unpacked(dout.reshape(expected.shape))]
    assert error(pull(dout)[0], jnp.concatenate(wanted, axis=-1)) <= tolerance("float32")


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.covering(("interleaved",), ("backend",))
def test_rope_inside_attention_matches_the_rope_op(interleaved, backend):
    q, k, v = attention_arrays(N=4, K=2)
    angles = rope_table(jnp.arange(3, 9), 8, theta=100.0)

    def inside(q, k, v):
        options = {"rope_table": angles, "interleaved": interleaved, "backend": backend}
        return flash_attention(q, k, v, causal=True, **options)

    def before(q, k, v):
        q, k = rope(q, k, *angles, interleaved=interleaved)
        return flash_attention(q, k, v, causal=True)

    found, expected = (
        jax.jit(jax.value_and_grad(lambda *x: jnp.sin(fn(*x)).sum(), (0, 1, 2)))(q, k, v)  # noqa: B023
        for fn in (inside, before)
    )
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert error(a, e) <= tolerance("float32")


def test_rope_table_may_differ_by_sequence_and_has_zero_gradient():
    _, qkv = packed_arrays(2, 1)
    positions = jnp.array([[0, 1, 2, 0, 1, 2], [5, 6, 7, 8, 9, 10]])
    angles = rope_table(positions, 6, theta=100.0)
    run = lambda qkv, angles: flash_attention_packed(qkv, 2, 1, rope_table=angles)  # noqa: E731
    out = run(qkv, angles)
    for b in range(2):
        alone = run(qkv[b : b + 1], jax.tree.map(lambda x: x[b], angles))  # noqa: B023
        assert error(out[b], alone[0]) <= tolerance("float32")
    gradients = jax.grad(lambda angles: run(qkv, angles).sum())(angles)
    assert not any(x.any() for x in gradients)


def test_mismatched_projections_and_rope_tables_are_rejected():
    (q, k, v), qkv = packed_arrays(4, 2)
    with pytest.raises(ValueError, match="heads is 4; it must be a multiple of kv_heads, 3, above"):
        flash_attention_packed(qkv, 4, 3)
    with pytest.raises(ValueError, match=r"qkv has shape \(2, 6, 64\); it must be \(B, T, 9\*H\)"):
        flash_attention_packed(qkv, 3)
    with pytest.raises(TypeError, match="qkv has dtype int32"):
        flash_attention_packed(qkv.astype(jnp.int32), 4, 2)
    cos, sin = rope_table(jnp.arange(6), 8, theta=100.0)
    for table, found in ((cos, "is of type"), ([cos, sin], "is of type list"), ((cos,), "is a t")):
        with pytest.raises(
            ValueError, match=f"rope_table {found}.*; it must be a tuple of the cos"
        ):
            flash_attention_packed(qkv, 4, 2, rope_table=table)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"cos of rope_table has shape \(5, 4\); it must be \(6, R"
    ):
        flash_attention(q, k, v, rope_table=(cos[:5], sin[:5]))
    with pytest.raises(ValueError, match=r"sin of rope_table has shape \(6, 3\)"):
        flash_attention(q, k, v, rope_table=(cos, sin[:, :3]))
    with pytest.raises(ValueError, match="differ in length; rotate them by rope before"):
        flash_attention(q[:, 1:], k, v, rope_table=(cos, sin))


@pytest.mark.parametrize("rotated", [False, True])
def test_cuda_kernels_read_and_write_packed_qkv_without_copies(rotated, with_kernels):
    _, qkv = packed_arrays(4, 2, H=16, dtype="bfloat16")
    angles = rope_table(jnp.arange(6), 16, theta=100.0) if rotated else None

    def gradient(qkv, angles):
        run = lambda qkv: flash_attention_packed(  # noqa: E731
            qkv, 4, 2, rope_table=angles, causal=True, backend="cuda"
        )
        out, pull = jax.vjp(run, qkv)
        return pull(out)[0]

    program = lower_for_cuda(gradient, qkv, angles)
    for direction, operands in (("forward", 1), ("backward", 4)):
        (call,) = (
            line
            for line in program.splitlines()
            if f"@jaxllm_flash_attention_packed_{direction}(" in line
        )
        arguments = call[call.index("(") + 1 : call.index(")")]
        assert len(arguments.split(",")) == operands + 2 * rotated
        assert "heads = 4 : i64" in call
        assert f"rope = {str(rotated).lower()}" in call
    for copy in ("slice", "concatenate", "transpose", "pad"):
        assert f"stablehlo.{copy}" not in program


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("H", [16, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize(("pairs", "interleaved"), [(2, False), (2, True), (8, False), (8, True)])
def test_cuda_kernels_rotate_heads_of_any_head_dim(dtype, H, pairs, interleaved):
    """RoPE rotates all columns of a head, or an eighth of them."""
    _, qkv = packed_arrays(4, 2, H=H, T=150, dtype=dtype)
    angles = rope_table(jnp.arange(150), 2 * (H // pairs), theta=1000.0)
    options = {"rope_table": angles, "interleaved": interleaved, "causal": True}

    # Computed outside of jit: inside, XLA might skip the rounding to bfloat16.
    dout = jax.random.normal(jax.random.key(1), (2, 150, 4 * H), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=2)
    def run(qkv, dout, backend):
        attention = functools.partial(flash_attention_packed, heads=4, kv_heads=2, backend=backend)
        out, pull = jax.vjp(lambda qkv: attention(qkv, **options), qkv)
        return out, pull(dout.astype(out.dtype))[0]

    with jax.default_matmul_precision("highest"):
        expected = run(qkv.astype(jnp.float32), dout, "xla")
        plain = run(qkv, dout, "xla")
    found = run(qkv, dout, "cuda")
    for a, e, p in zip(found, expected, plain, strict=True):
        assert error(a, e) <= tolerance(dtype, error(p, e))
