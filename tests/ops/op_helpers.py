"""Inputs, unfused compositions of ops and checks that several test files share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.core import ffi
from jaxllm.ops import flash_attention, flash_attention_packed, float8_quantize, linear
from jaxllm.ops.rounding import round_to_float8, scale_of
from jaxllm.testing import assert_close, cotangents_like, error

BACKENDS = ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)]
FLASH_BACKENDS = ["xla", "pallas"]

# A linear layer large enough for the fused GEMM on an H100: 132 tiles of 128 rows.
LARGE_LINEAR = {"rows": 132 * 128, "hidden": 192, "out": 64}


def random_arrays(*shapes, dtype="float32"):
    """Random arrays; matrices keep the scale of what they multiply."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [
        (jax.random.normal(key, shape) / (shape[0] ** 0.5 if len(shape) == 2 else 1)).astype(dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def attention_arrays(B=2, T=6, N=4, H=8, S=None, K=None, Hv=None, dtype="float32"):
    """Random q, k and v."""
    shapes = ((B, T, N, H), (B, S or T, K or N, H), (B, S or T, K or N, Hv or H))
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


def attention_by_hand(q, k, v, visible, scale=None):
    """Attention in NumPy, one query of one head at a time; q and k have the same heads."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for b, t, n in np.ndindex(q.shape[0], q.shape[1], q.shape[2]):
        seen = [s for s in range(k.shape[1]) if visible(b, t, s)]
        if seen:
            scores = np.array([scale * q[b, t, n] @ k[b, s, n] for s in seen])
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights @ v[b, seen, n] / weights.sum()
    return out


def attention_gradients(q, k, v, **options):
    """dq, dk and dv of a weighted sum of the output."""

    def total(q, k, v):
        out = flash_attention(q, k, v, **options)
        # The indices are float32 because the largest float16 is 65504.
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return (out * weights.astype(out.dtype)).sum()

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(q, k, v)


def packed_arrays(N, K, H=8, B=2, T=6, dtype="float32"):
    """q, k and v, and the packed array of all three."""
    qkv = attention_arrays(B=B, T=T, N=N, K=K, H=H, dtype=dtype)
    return qkv, jnp.concatenate([x.reshape(B, T, -1) for x in qkv], axis=-1)


def projection_arrays(N, K, H=8, B=2, T=6, D=5, dtype="float32"):
    """The input, weight and bias of a QKV projection."""
    columns = (N + 2 * K) * H
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((B, T, D), (D, columns), (columns,))
    x, weight, bias = (jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True))
    return [array.astype(dtype) for array in (x, weight / D**0.5, bias)]


def attention_block_arrays(N, K, H=8, B=2, T=6, D=5, dtype="float32"):
    """The input, norm and layers of an attention block."""
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = ((N * H, D), (D,), (D,), (D,))
    more = [jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True)]
    more[0] /= (N * H) ** 0.5
    out_weight, scale, norm_bias, out_bias = (array.astype(dtype) for array in more)
    x, weight, bias = projection_arrays(N, K, H, B, T, D, dtype)
    layers = {
        "qkv": {"weight": weight, "bias": bias},
        "out": {"weight": out_weight, "bias": out_bias},
    }
    return x, {"scale": scale, "bias": norm_bias}, layers


def ffn_block_arrays(dtype="float32", rows=3, width=5, hidden=6):
    """The input, norm and layers of a feed-forward block."""
    arrays = mlp_arrays(dtype, rows=rows, width=width, hidden=hidden, out=width)
    x, up_weight, up_bias, down_weight, down_bias = arrays
    scale, bias = jax.random.normal(jax.random.key(1), (2, width)).astype(dtype)
    layers = {
        "up": {"weight": up_weight, "bias": up_bias},
        "down": {"weight": down_weight, "bias": down_bias},
    }
    return x, {"scale": 1 + scale, "bias": bias}, layers


def assert_normalized(h, dtype="float32"):
    """Checks that a residual carries the layer norm of its own array."""
    x = np.asarray(h.x, np.float64)
    mean = x.mean(-1)
    rstd = (x.var(-1) + h.eps) ** -0.5
    expected = (x - mean[..., None]) * rstd[..., None], mean, rstd
    assert_close(tuple(h.normalized), expected, dtype)


def linear_then_attention(x, weight, bias, heads, kv_heads, backend=None, **options):
    """Self-attention as two separate ops."""
    qkv = linear(x, weight, bias, backend=backend)
    return flash_attention_packed(qkv, heads, kv_heads, **options, backend=backend)


def with_gradients(fn, arrays):
    """The output of ``fn`` and the gradients of all its arguments."""
    out, pull = jax.vjp(fn, *arrays)
    return out, pull(cotangents_like(out))


def jit_with_gradients(fn, arrays):
    """:func:`with_gradients` in one program, of cotangents that are drawn outside of it."""

    @jax.jit
    def run(arrays, cotangents):
        out, pull = jax.vjp(fn, *arrays)
        return out, pull(cotangents)

    return run(arrays, cotangents_like(jax.eval_shape(fn, *arrays)))


def in_float64(fn, arrays):
    """:func:`jit_with_gradients` of the arrays in float64."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        return jax.tree.map(np.asarray, jit_with_gradients(fn, wide))


def document_ids(B, length):
    """Segment ids of consecutive documents; the boundaries differ between sequences."""
    return jnp.array([[(5 * i + 37 * b) // length for i in range(length)] for b in range(B)])


def mlp_arrays(dtype="float32", rows=3, width=4, hidden=6, out=5):
    """The input, weights and biases of a two-layer MLP."""
    shapes = ((rows, width), (width, hidden), (hidden,), (hidden, out), (out,))
    keys = jax.random.split(jax.random.key(0), 5)
    return [
        (jax.random.normal(key, shape) / max(len(shape) * shape[0] ** 0.5, 1)).astype(dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def check_fused(op, unfused, arrays, dtype):
    """Checks that a fused CUDA op is as exact as the unfused ops, and deterministic."""

    def run(fn, backend, arrays):
        return with_gradients(lambda *a: fn(*a, backend=backend), arrays)

    fused, again = (run(op, "cuda", arrays) for _ in range(2))
    expected = run(unfused, "xla", jax.tree.map(lambda x: x.astype("float32"), arrays))
    assert_close(fused, expected, dtype, run(unfused, "xla", arrays))
    for a, b in zip(jax.tree.leaves(fused), jax.tree.leaves(again), strict=True):
        assert error(a, b) == 0


def pretend_sms(monkeypatch, sms, gpu: ffi.Device | None = ffi.H100):
    """Makes predicates and workspace sizes see a GPU with at most ``sms`` SMs."""
    assert gpu is not None
    sms, clusters = min(sms, gpu.multiprocessors), min(sms // 2, gpu.clusters)
    smaller = dataclasses.replace(gpu, multiprocessors=sms, clusters=clusters)
    monkeypatch.setattr(ffi, "device", lambda: smaller)
    return smaller


def rounded(x, dtype=jnp.float8_e4m3fn, bound=None):
    """``x`` rounded to float8, in float32: with its current scale, or that of a bound."""
    if bound is None:
        values, scale = float8_quantize(x, dtype, axis=None)
    else:
        scale = scale_of(bound, dtype)
        values = round_to_float8(x, scale, dtype)
    return values.astype(jnp.float32) * scale


def distance(found, expected):
    """The norm of the difference over that of what is expected."""
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)
