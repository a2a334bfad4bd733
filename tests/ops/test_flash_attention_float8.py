"""Flash attention of float8 inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import attention_arrays, document_ids

import jaxllm
from jaxllm.ops import flash_attention, flash_attention_float8
from jaxllm.testing import error, lower_for_cuda, tolerance


def in_float8(x):
    """``x`` quantized to float8 with one scale per head, and the scales."""
    scale = jnp.abs(x).max(axis=(0, 1, 3)) / 448
    return (x / scale[:, None]).astype(jnp.float8_e4m3fn), scale


def float8_attention(q, k, v, **options):
    (q, q_scale), (k, k_scale), (v, v_scale) = (in_float8(x) for x in (q, k, v))
    return flash_attention_float8(q, k, v, q_scale, k_scale, v_scale, **options)


def test_float8_error_is_within_the_documented_range():
    q, k, v = attention_arrays(B=1, T=512, N=4, K=2, H=64)
    out = float8_attention(q, 3 * k, 5 * v, causal=True, backend="xla")
    expected = flash_attention(q, 3 * k, 5 * v, causal=True)
    lost = jnp.linalg.norm(out - expected) / jnp.linalg.norm(expected)
    assert out.dtype == jnp.bfloat16
    assert 0.03 < lost < 0.08


def test_float8_requires_one_scale_per_head():
    q, k, v = (x.astype(jnp.float8_e4m3fn) for x in attention_arrays(N=4, K=2))
    four, two = jnp.ones(4), jnp.ones(2)
    with pytest.raises(ValueError, match=r"k_scale has shape \(4,\); it must be \(2,\)"):
        flash_attention_float8(q, k, v, four, four, two)
    with pytest.raises(TypeError, match="v_scale has dtype bfloat16; it must be float32"):
        flash_attention_float8(q, k, v, four, two, two.astype(jnp.bfloat16))


def test_float8_lowers_to_its_cuda_kernel(with_kernels):
    q, k, v = attention_arrays(N=4, K=2)
    program = lower_for_cuda(lambda *x: float8_attention(*x, backend="cuda"), q, k, v)
    assert "@jaxllm_flash_attention_float8(" in program
    with pytest.raises(jaxllm.BackendError, match="q has dtype float32; the kernel takes float8"):
        flash_attention_float8(q, k, v, jnp.ones(4), jnp.ones(2), jnp.ones(2), backend="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("H", [30, 64, 128, 192])
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": 50}, {"softcap": 3.0}])
def test_float8_kernel_matches_reference_within_bfloat16_tolerance(H, options):
    q, k, v = attention_arrays(T=130, S=170, N=4, K=2, H=H)
    found, expected = (float8_attention(q, k, v, **options, backend=b) for b in ("cuda", "xla"))
    assert error(found, expected) <= tolerance("bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("segments", [False, True])
def test_vmap_uses_the_scales_of_each_call(segments):
    calls = [
        attention_arrays(T=70, S=90, N=4, K=2, H=64),
        [x * 3 for x in attention_arrays(T=70, S=90, N=4, K=2, H=64)],
    ]
    # The calls have equal float8 values and different scales.
    q, k, v = (jnp.stack(x) for x in zip(*calls, strict=True))
    ids = (document_ids(2, 70), document_ids(2, 90)) if segments else None
    fn = functools.partial(float8_attention, segment_ids=ids, causal=True, backend="cuda")
    mapped = jax.vmap(fn)(q, k, v)
    for i, call in enumerate(calls):
        np.testing.assert_array_equal(
            np.asarray(mapped[i], np.float32), np.asarray(fn(*call), np.float32)
        )


def test_scales_that_are_no_arrays_are_rejected():
    q = in_float8(jnp.ones((1, 2, 1, 16)))[0]
    with pytest.raises(TypeError, match="k_scale has type float; it must be a floating-point ar"):
        flash_attention_float8(q, q, q, jnp.ones(1), 1.0, jnp.ones(1))  # type: ignore[arg-type]
