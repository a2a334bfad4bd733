"""Shapes of attention calls: odd ones for tests, real ones for tests on a GPU and benchmarks."""

from __future__ import annotations

from typing import Any

from jaxllm.testing import Case, Normal


def _case(
    name: str,
    batch: int,
    length: int,
    heads: int,
    width: int,
    *,
    keys: int | None = None,
    kv_heads: int | None = None,
    std: float = 1.0,
    large: bool = False,
    **static: Any,
) -> Case:
    keys, kv_heads = length if keys is None else keys, kv_heads or heads
    q, kv = (batch, length, heads, width), (batch, keys, kv_heads, width)
    of_q, of_kv = batch * length * heads * width, batch * keys * kv_heads * width
    # Two products of (T, H) and (S, H) forward, five backward; a causal mask leaves half of them.
    products = 2 * of_q * keys // (2 if static.get("causal") else 1)
    return Case(
        "flash_attention",
        name,
        {"q": Normal(q, std=std), "k": Normal(kv), "v": Normal(kv)},
        static,
        # Forward: q, k, v in, out out. Backward: those and dout in, dq, dk, dv out.
        forward_elements=2 * (of_q + of_kv),
        backward_elements=4 * (of_q + of_kv),
        forward_flops=2 * products,
        backward_flops=5 * products,
        large=large,
    )


CASES = (
    _case("gpt2_124m", 32, 1024, 12, 64, causal=True, large=True),
    _case("gpt2_1558m", 8, 1024, 25, 64, causal=True, large=True),
    _case("llama3_8b", 1, 8192, 32, 128, kv_heads=8, causal=True, large=True),
    _case("bidirectional", 8, 2048, 16, 64, large=True),
    _case("long_window", 1, 8192, 16, 128, causal=True, window=1024, large=True),
    _case("causal", 2, 7, 3, 8, causal=True),
    _case("odd_head_width", 2, 7, 3, 5, causal=True),
    _case("grouped", 1, 9, 6, 8, kv_heads=2, causal=True),
    _case("cross", 2, 5, 4, 16, keys=11, kv_heads=1),
    _case("causal_more_keys", 1, 4, 2, 8, keys=9, causal=True),
    _case("causal_more_queries", 1, 9, 2, 8, keys=4, causal=True),
    _case("causal_window", 2, 16, 2, 8, causal=True, window=3),
    _case("symmetric_window", 2, 16, 2, 8, keys=19, window=3),
    _case("softcap", 1, 12, 4, 8, kv_heads=2, std=3.0, causal=True, softcap=2.0),
    _case("scale", 1, 12, 2, 8, causal=True, scale=0.5),
    _case("beyond_a_tile", 1, 131, 2, 64, kv_heads=1, causal=True),
    _case("wide_heads", 1, 70, 2, 128),
    _case("one_query", 2, 1, 2, 8, keys=5, causal=True),
    _case("no_batch", 0, 8, 2, 8, causal=True),
    _case("no_keys", 2, 3, 2, 8, keys=0),
)
