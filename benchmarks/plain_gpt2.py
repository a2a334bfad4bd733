"""The baseline: GPT-2 and its training step in plain JAX and optax, without jaxllm.

It is what an experienced JAX user would write: bfloat16 compute with float32 parameters, cuDNN's
attention, stacked layers, donated state. It does not change, so that every version of the library
is measured against the same program.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of the model, and how its layers are run.

    Attributes:
        layers: Blocks.
        heads: Attention heads.
        width: The residual stream's width.
        max_seq_len: Positions.
        vocab_size: Rows of the token table; 50304 is GPT-2's 50257 rounded up.
        unrolled: Whether the layers are unrolled instead of run by a ``lax.scan``.
        attention: The ``implementation`` of ``jax.nn.dot_product_attention``.
        dtype: The compute dtype.
    """

    layers: int = 12
    heads: int = 12
    width: int = 768
    max_seq_len: int = 1024
    vocab_size: int = 50304
    unrolled: bool = False
    attention: Literal["xla", "cudnn"] = "cudnn"
    dtype: str = "bfloat16"


def init(key: jax.Array, config: Config) -> Params:
    """Random float32 parameters, as GPT-2 draws them; blocks are stacked on the first axis."""
    L, D = config.layers, config.width
    keys = iter(jax.random.split(key, 6))

    def normal(*shape: int, std: float = 0.02) -> jax.Array:
        return std * jax.random.normal(next(keys), shape, jnp.float32)

    residual_std = 0.02 / math.sqrt(2 * L)
    return {
        "wte": normal(config.vocab_size, D),
        "wpe": normal(config.max_seq_len, D),
        "blocks": {
            "ln1_scale": jnp.ones((L, D)),
            "ln1_bias": jnp.zeros((L, D)),
            "qkv_weight": normal(L, D, 3 * D),
            "qkv_bias": jnp.zeros((L, 3 * D)),
            "out_weight": normal(L, D, D, std=residual_std),
            "out_bias": jnp.zeros((L, D)),
            "ln2_scale": jnp.ones((L, D)),
            "ln2_bias": jnp.zeros((L, D)),
            "up_weight": normal(L, D, 4 * D),
            "up_bias": jnp.zeros((L, 4 * D)),
            "down_weight": normal(L, 4 * D, D, std=residual_std),
            "down_bias": jnp.zeros((L, D)),
        },
        "ln_f_scale": jnp.ones(D),
        "ln_f_bias": jnp.zeros(D),
    }


def _layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    variance = jnp.square(x32 - mean).mean(-1, keepdims=True)
    normal = (x32 - mean) * jax.lax.rsqrt(variance + 1e-5)
    return (normal * scale + bias).astype(x.dtype)


def _block(x: jax.Array, p: Params, config: Config) -> jax.Array:
    B, T, D = x.shape
    y = _layer_norm(x, p["ln1_scale"], p["ln1_bias"])
    qkv = y @ p["qkv_weight"] + p["qkv_bias"]
    q, k, v = (
        part.reshape(B, T, config.heads, D // config.heads) for part in jnp.split(qkv, 3, axis=-1)
    )
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=config.attention)
    x = x + y.reshape(B, T, D) @ p["out_weight"] + p["out_bias"]
    y = _layer_norm(x, p["ln2_scale"], p["ln2_bias"])
    y = jax.nn.gelu(y @ p["up_weight"] + p["up_bias"], approximate=True)
    return x + y @ p["down_weight"] + p["down_bias"]


def loss(params: Params, tokens: jax.Array, labels: jax.Array, config: Config) -> jax.Array:
    """The mean cross entropy of the labels, in float32."""
    params = jax.tree.map(lambda p: p.astype(config.dtype), params)
    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    if config.unrolled:
        # lax.split's gradient is one concatenation; indexing's is one padded array per layer.
        layers = jax.tree.map(lambda p: jax.lax.split(p, (1,) * config.layers), params["blocks"])
        for i in range(config.layers):
            layer = {name: parts[i][0] for name, parts in layers.items()}
            x = _block(x, layer, config)
    else:
        x, _ = jax.lax.scan(lambda x, p: (_block(x, p, config), None), x, params["blocks"])
    x = _layer_norm(x, params["ln_f_scale"], params["ln_f_bias"])
    logits = (x @ params["wte"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def _decayed(params: Params) -> Params:
    """The mask of weight decay: tables and weights."""
    blocks = {name: name.endswith("weight") for name in params["blocks"]}
    return {name: name in ("wte", "wpe") for name in params} | {"blocks": blocks}


def make_step(config: Config) -> tuple[Callable[[jax.Array], Any], Callable[..., Any]]:
    """Makes ``init_state(key)`` and the jitted ``step(state, tokens, labels) -> (state, loss)``."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(6e-4, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1, mask=_decayed),
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
