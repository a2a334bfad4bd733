"""Blocks in ``jax.numpy``, for JAX to differentiate: what each of them computes.

They are those without a ``precision``: JAX would not find the derivatives of float8 layers.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxllm.ops.activation.reference import swiglu_packed_forward
from jaxllm.ops.attention.reference import flash_attention_packed
from jaxllm.ops.gemm.reference import linear
from jaxllm.ops.norm.reference import layer_norm, rms_norm


def _norm(x, norm, kind, eps):
    if kind == "layer":
        return layer_norm(
            x, norm["scale"], norm.get("bias", jnp.zeros_like(norm["scale"])), eps=eps
        )
    return rms_norm(x, norm["scale"], eps=eps)


def attention_block(
    x, norm, weights, *, kind="layer", eps=1e-5, heads, kv_heads=None, precision=None, **options
):
    """``x + out(attention(qkv(norm(x))))``; ``q_norm`` and ``k_norm`` are norms of heads."""
    assert precision is None
    qkv = linear(_norm(x, norm, kind, eps), **weights["qkv"])
    if "q_norm" in weights:
        kv_heads = kv_heads or heads
        parts = qkv.reshape(*qkv.shape[:2], heads // kv_heads + 2, kv_heads, -1)
        q, k, v = jnp.split(parts, (heads // kv_heads, heads // kv_heads + 1), axis=2)
        q = rms_norm(q, weights["q_norm"]["scale"], eps=eps)
        k = rms_norm(k, weights["k_norm"]["scale"], eps=eps)
        qkv = jnp.concatenate([q, k, v], axis=2).reshape(qkv.shape)
    out = flash_attention_packed(qkv, heads=heads, kv_heads=kv_heads, **options)
    return _add(x, out, weights["out"])


def ffn_block(x, norm, weights, *, kind="layer", eps=1e-5, activation="gelu", precision=None):
    """``x + down(f(up(norm(x))))``; with ``"swiglu"`` one matrix gives both gate and up."""
    assert precision is None
    normalized = _norm(x, norm, kind, eps)
    if activation == "gelu":
        hidden = linear(normalized, **weights["up"], activation="gelu")
    else:
        hidden = swiglu_packed_forward(linear(normalized, **weights["gate_up"]))
    return _add(x, hidden, weights["down"])


def _add(x, branch, layer):
    """The GEMM's result is rounded, and then the sum."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    total = x.astype(wide) + jnp.dot(branch, layer["weight"]).astype(wide)
    bias = layer.get("bias")
    return (total if bias is None else total + bias.astype(wide)).astype(x.dtype)


def self_attention(x, weight, bias, *, heads, kv_heads=None, **options):
    """Attention of the columns of ``x @ weight + bias``."""
    qkv = linear(x, weight, bias)
    return flash_attention_packed(qkv, heads=heads, kv_heads=kv_heads, **options)


def mlp(x, up_weight, up_bias, down_weight, down_bias=None, *, activation):
    """Two linear layers with an activation between them."""
    return linear(linear(x, up_weight, up_bias, activation=activation), down_weight, down_bias)
