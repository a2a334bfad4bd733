"""One token per sequence through a Llama, with each block as one op."""

from __future__ import annotations

from jaxtyping import Array, Float, Integer

from jaxllm import ops
from jaxllm.models import llama3
from jaxllm.models.common import Params


def is_supported(config: llama3.Llama3Config) -> bool:
    """Whether :func:`llama3_forward` serves a model: one without bias, norms of heads, windows."""
    return not (config.qkv_bias or config.qk_norm or any(config.window_sizes))


def llama3_forward(
    params: Params,
    tokens: Integer[Array, " B"],
    lengths: Integer[Array, " B"],
    config: llama3.Llama3Config,
    caches: list[tuple[Array, Array]],
) -> tuple[Float[Array, "B D"], list[tuple[Array, Array]]]:
    """The input of the LM head for one more token a sequence, each block as one op.

    Only for models that :func:`is_supported` accepts.

    Args:
        params: As :func:`jaxllm.models.common.for_decoding` returns them.
        tokens: One token for each of 1 to 16 sequences.
        lengths: The tokens that each sequence has in the caches.
        config: The model's shape.
        caches: The keys and the values of each layer, (B, S, K, H).

    Returns:
        The input of the LM head, and the caches with one more token.
    """
    cos, sin = llama3.rope_table(lengths, config)
    x = ops.embed(tokens[:, None], params["wte"])[:, 0]
    written = []
    for layer, (keys, values) in zip(params["blocks"], caches, strict=True):
        norms = (layer["norm1"]["scale"], layer["norm2"]["scale"])
        attention, mlp = layer["attention"], layer["mlp"]
        linears = (attention["qkv"], attention["out"], mlp["gate_up"], mlp["down"])
        qkv, out, gate_up, down = (linear["weight"] for linear in linears)
        x, keys, values = ops.decode_block(
            x, *norms, qkv, out, gate_up, down, cos, sin, keys, values, lengths, eps=config.norm_eps
        )
        written.append((keys, values))
    return ops.rms_norm(x, **params["norm_f"], eps=config.norm_eps), written
