"""One token per sequence through a Llama, with each block as one op."""

from __future__ import annotations

from jaxtyping import Array, Float, Integer

from jaxllm import ops
from jaxllm.models import llama3
from jaxllm.models.common import Params


def llama3_forward(
    params: Params,
    tokens: Integer[Array, " B"],
    lengths: Integer[Array, " B"],
    config: llama3.Llama3Config,
    caches: list[tuple[Array, Array]],
    block_table: Integer[Array, "B M"] | None = None,
) -> tuple[Float[Array, "B D"], list[tuple[Array, Array]]]:
    """The input of the LM head for one more token a sequence, each block as one op.

    Args:
        params: As :func:`jaxllm.models.common.for_decoding` returns them.
        tokens: One token for each of 1 to 16 sequences.
        lengths: The tokens that each sequence has in the caches.
        config: The model's shape.
        caches: The keys and the values of each layer, (B, S, K, H), as
            :func:`jaxllm.inference.cache.init_cache` makes them: a ring for a layer with a window;
            or with a block table pools of pages.
        block_table: That of a :class:`jaxllm.inference.paged_cache.PagedKVCache`.

    Returns:
        The input of the LM head, and the caches with one more token.

    Raises:
        ValueError: ``params`` do not have the layers or options of ``config``.
    """
    llama3.check_params(params, config)
    cos, sin = llama3.rope_table(lengths, config)
    x = ops.embed(tokens[:, None], params["wte"])[:, 0]
    written = []
    layers = zip(params["blocks"], caches, config.windows, strict=True)
    for layer, (keys, values), window in layers:
        norms = (layer["norm1"]["scale"], layer["norm2"]["scale"])
        attention, mlp = layer["attention"], layer["mlp"]
        linears = (attention["qkv"], attention["out"], mlp["gate_up"], mlp["down"])
        qkv, out, gate_up, down = (linear["weight"] for linear in linears)
        arrays = (x, *norms, qkv, out, gate_up, down, cos, sin, keys, values, lengths)
        options = {"qkv_bias": attention["qkv"].get("bias"), "block_table": block_table}
        if config.qk_norm:
            options |= {name: attention[name]["scale"] for name in ("q_norm", "k_norm")}
        x, keys, values = ops.decode_block(*arrays, **options, window=window, eps=config.norm_eps)
        written.append((keys, values))
    return ops.rms_norm(x, **params["norm_f"], eps=config.norm_eps), written
