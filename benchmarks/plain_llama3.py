"""The baseline: Llama 3 and its training step in plain JAX and optax, without jaxllm.

In the style of ``plain_gpt2.py``: bfloat16 compute with float32 parameters, cuDNN's attention,
stacked layers, donated state. It does not change, so that every version of the library is measured
against the same program.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of the model, and how its layers are run; the defaults are Llama 3.2 1B's.

    Attributes:
        layers: Blocks.
        heads: Query heads.
        kv_heads: Key and value heads.
        width: The residual stream's width.
        mlp_width: The width inside the MLP.
        vocab_size: Rows of the token table, which is also the LM head.
        rope_theta: The base of the rotary frequencies.
        rope_factor: The divisor of low frequencies, as in Llama 3.1; 1 for no scaling.
        unrolled: Whether the layers are unrolled instead of run by a ``lax.scan``.
        attention: The ``implementation`` of ``jax.nn.dot_product_attention``.
        dtype: The compute dtype.
    """

    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    width: int = 2048
    mlp_width: int = 8192
    vocab_size: int = 128256
    rope_theta: float = 500_000.0
    rope_factor: float = 32.0
    unrolled: bool = False
    attention: Literal["xla", "cudnn"] = "cudnn"
    dtype: str = "bfloat16"


def init(key: jax.Array, config: Config) -> Params:
    """Random float32 parameters, drawn as GPT-2's; blocks are stacked on the first axis."""
    L, D, F = config.layers, config.width, config.mlp_width
    kv_width = D // config.heads * config.kv_heads
    keys = iter(jax.random.split(key, 8))

    def normal(*shape: int, std: float = 0.02) -> jax.Array:
        return std * jax.random.normal(next(keys), shape, jnp.float32)

    residual_std = 0.02 / math.sqrt(2 * L)
    return {
        "wte": normal(config.vocab_size, D),
        "blocks": {
            "norm1_scale": jnp.ones((L, D)),
            "q_weight": normal(L, D, D),
            "k_weight": normal(L, D, kv_width),
            "v_weight": normal(L, D, kv_width),
            "out_weight": normal(L, D, D, std=residual_std),
            "norm2_scale": jnp.ones((L, D)),
            "gate_weight": normal(L, D, F),
            "up_weight": normal(L, D, F),
            "down_weight": normal(L, F, D, std=residual_std),
        },
        "norm_f_scale": jnp.ones(D),
    }


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    normal = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + 1e-5)
    return (normal * scale).astype(x.dtype)


def _rope_table(T: int, config: Config) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, (T, 1, H/2), with the frequencies of Llama 3.1."""
    H = config.width // config.heads
    frequencies = config.rope_theta ** -(np.arange(0, H, 2) / H)
    # Frequencies with more than 4 periods in the 8192 positions of the first training stay.
    periods = 8192 * frequencies / (2 * np.pi)
    kept = np.clip((periods - 1) / (4 - 1), 0, 1)
    frequencies *= kept + (1 - kept) / config.rope_factor
    angles = jnp.arange(T)[:, None, None] * frequencies.astype(np.float32)
    return jnp.cos(angles), jnp.sin(angles)


def _rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _block(x: jax.Array, p: Params, table: tuple[jax.Array, jax.Array], config: Config):
    B, T, D = x.shape
    y = _rms_norm(x, p["norm1_scale"])
    q, k, v = (
        (y @ p[f"{name}_weight"]).reshape(B, T, -1, D // config.heads) for name in ("q", "k", "v")
    )
    q, k = _rope(q, *table), _rope(k, *table)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=config.attention)
    x = x + y.reshape(B, T, D) @ p["out_weight"]
    y = _rms_norm(x, p["norm2_scale"])
    y = jax.nn.silu(y @ p["gate_weight"]) * (y @ p["up_weight"])
    return x + y @ p["down_weight"]


def loss(params: Params, tokens: jax.Array, labels: jax.Array, config: Config) -> jax.Array:
    """The mean cross entropy of the labels, in float32."""
    params = jax.tree.map(lambda p: p.astype(config.dtype), params)
    table = _rope_table(tokens.shape[1], config)
    x = params["wte"][tokens]
    if config.unrolled:
        # lax.split's gradient is one concatenation; indexing's is one padded array per layer.
        layers = jax.tree.map(lambda p: jax.lax.split(p, (1,) * config.layers), params["blocks"])
        for i in range(config.layers):
            layer = {name: parts[i][0] for name, parts in layers.items()}
            x = _block(x, layer, table, config)
    else:
        x, _ = jax.lax.scan(lambda x, p: (_block(x, p, table, config), None), x, params["blocks"])
    x = _rms_norm(x, params["norm_f_scale"])
    logits = (x @ params["wte"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _decayed(params: Params) -> Params:
    """The mask of weight decay: the table and the weights."""
    blocks = {name: name.endswith("weight") for name in params["blocks"]}
    return {name: name == "wte" for name in params} | {"blocks": blocks}


def make_step(config: Config) -> tuple[Callable[[jax.Array], Any], Callable[..., Any]]:
    """Makes ``init_state(key)`` and the jitted ``step(state, tokens, labels) -> (state, loss)``."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(1e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=_decayed),
    )

    def init_state(key: jax.Array) -> Any:
        params = init(key, config)
        return params, optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens: jax.Array, labels: jax.Array) -> Any:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, tokens, labels, config)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return init_state, step
