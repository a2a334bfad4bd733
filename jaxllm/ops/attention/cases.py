"""Shapes of attention calls: odd ones for tests, real ones for tests on a GPU and benchmarks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from jaxllm.testing import Case, Integers, Normal


def _attention(
    name: str,
    batch: int,
    length: int,
    heads: int,
    width: int,
    *,
    keys: int | None = None,
    kv_heads: int | None = None,
    value_width: int | None = None,
    std: float = 1.0,
    sinks: bool = False,
    bias: tuple[int, int] | None = None,  # for how many sequences and heads
    large: bool = False,
    timed_only: bool = False,
    **static: Any,
) -> Case:
    keys, kv_heads = length if keys is None else keys, kv_heads or heads
    values = width if value_width is None else value_width
    query_heads, key_heads = batch * length * heads, batch * keys * kv_heads
    # Of (T, H) and (S, H) there is one matmul forward and three backward, and of values one and
    # two; a causal mask leaves half of them.
    matmul_of_column = 2 * query_heads * keys // (2 if static.get("causal") else 1)
    inputs: dict[str, Any] = {
        "q": Normal((batch, length, heads, width), std=std),
        "k": Normal((batch, keys, kv_heads, width)),
        "v": Normal((batch, keys, kv_heads, values)),
    }
    if sinks or bias:
        inputs["sinks"] = Normal((heads,), dtype="float32") if sinks else None
    if bias:
        inputs["bias"] = Normal((*bias, length, keys))
    return Case(
        "flash_attention",
        name,
        inputs,
        static,
        # Forward: q, k, v in, out out. Backward: those and dout in, dq, dk, dv out.
        forward_elements=(width + values) * (query_heads + key_heads),
        backward_elements=2 * (width + values) * (query_heads + key_heads),
        forward_flops=(width + values) * matmul_of_column,
        backward_flops=(3 * width + 2 * values) * matmul_of_column,
        # Its kernels for values of another width are for one pair, 16 bits and Hopper GPUs.
        refused_by=("cuda",) if values != width else (),
        large=large,
        timed_only=timed_only,
    )


def _projection(
    name: str,
    batch: int,
    length: int,
    heads: int,
    width: int,
    *,
    kv_heads: int | None = None,
    by_parts: bool = False,
    large: bool = False,
    timed_only: bool = False,
    **static: Any,
) -> Case:
    kv_heads = kv_heads or heads
    of_q, of_qkv = batch * length * heads * width, batch * length * (heads + 2 * kv_heads) * width
    columns = ((heads + 2 * kv_heads) * width,)
    if by_parts:
        columns = (heads // kv_heads + 2, kv_heads, width)
    matmul = 2 * of_q * length // (2 if static.get("causal") else 1)
    return Case(
        "flash_attention_packed",
        name,
        {"qkv": Normal((batch, length, *columns))},
        {"heads": heads, "kv_heads": kv_heads, **static},
        # Forward: qkv in, out out. Backward: those and dout in, dqkv out.
        forward_elements=of_qkv + of_q,
        backward_elements=2 * of_qkv + 2 * of_q,
        forward_flops=2 * matmul,
        backward_flops=5 * matmul,
        large=large,
        timed_only=timed_only,
    )


def _angles(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """A rotary table of some shape (..., T, R), of cosines and sines."""
    *groups, T, R = shape
    angles = np.arange(T)[:, None] * 10_000.0 ** -(np.arange(R) / R)
    angles = angles + np.arange(math.prod(groups)).reshape(*groups, 1, 1)
    return np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)


def _packed(batch: int, *lengths: int) -> np.ndarray:
    """The segments of documents of these lengths, one after the other."""
    segments = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    return np.broadcast_to(segments, (batch, sum(lengths)))


def _scattered(batch: int, length: int, segments: int, seed: int) -> np.ndarray:
    """Segments in no order at all."""
    return np.random.default_rng(seed).integers(segments, size=(batch, length), dtype=np.int32)


def _softmax(
    name: str,
    *shape: int,
    std: float = 1.0,
    large: bool = False,
    timed_only: bool = False,
    **static: Any,
) -> Case:
    size = kept = math.prod(shape)
    if static.get("causal"):
        T, S = shape[-2:]
        kept = math.prod(shape[:-2]) * sum(max(0, t + 1 + S - T) for t in range(T))
    # A kernel need not read what the mask hides, but it writes the zeros there.
    # Forward: x in, out out. Backward: out and dout in, dx out.
    return Case(
        "softmax",
        name,
        {"x": Normal(shape, std=std)},
        static,
        forward_elements=kept + size,
        backward_elements=2 * kept + size,
        large=large,
        timed_only=timed_only,
    )


def _decode(
    name: str,
    batch: int,
    length: int,
    heads: int,
    width: int,
    *,
    kv_heads: int | None = None,
    int8: bool = False,
    full: bool = False,
    page: int | None = None,  # then the length is that of whole pages
    sinks: bool = False,
    large: bool = False,
    **static: Any,
) -> Case:
    kv_heads = kv_heads or heads
    cache = (batch, length, kv_heads, width)
    if page is not None:
        cache = (batch * length // page, page, kv_heads, width)
    # Some sequences may have no token, some more than the cache holds.
    lengths = Integers((batch,), length + 1, low=length) if full else Integers((batch,), length + 3)
    of_cache = Integers(cache, 128, low=-127, dtype="int8") if int8 else Normal(cache)
    inputs: dict[str, Any] = {
        "q": Normal((batch, heads, width)),
        "k_cache": of_cache,
        "v_cache": of_cache,
        "lengths": lengths,
    }
    if int8:
        scales = Normal(cache[:3], mean=0.02, std=0.003, dtype="float32")
        inputs |= {"k_scales": scales, "v_scales": scales}
    if page or sinks:
        inputs |= {x: inputs.get(x) for x in ("k_scales", "v_scales", "block_table")}
    if page is not None:  # where speed does not matter sequences share some
        table = (batch, length // page)
        inputs["block_table"] = Integers(table, cache[0], distinct=large)
    if sinks:
        inputs["sinks"] = Normal((heads,), std=3.0, dtype="float32")
    # The caches in, whose share of all that moves is all but the whole.
    size = 2 * math.prod(cache)
    return Case(
        "decode_attention",
        name,
        inputs,
        static,
        forward_elements=0 if int8 else size,
        forward_fixed_bytes=size + 4 * size // width if int8 else 0,
        has_backward=False,
        large=large,
    )


def _repeat_kv(name: str, *shape: int, groups: int, large: bool = False) -> Case:
    size = math.prod(shape)
    # Forward: x in, its copies out. Backward: the copies' gradients in, dx out.
    return Case(
        "repeat_kv",
        name,
        {"x": Normal(shape)},
        {"groups": groups},
        forward_elements=(1 + groups) * size,
        backward_elements=(1 + groups) * size,
        large=large,
    )


CASES = (
    _attention("gpt2_124m", 32, 1024, 12, 64, causal=True, large=True),
    _attention("gpt2_1558m", 8, 1024, 25, 64, causal=True, large=True),
    # The reference holds all scores: shorter sequences are compared.
    _attention("llama3_8b", 1, 8192, 32, 128, kv_heads=8, causal=True, large=True, timed_only=True),
    _attention("llama3_8b_short", 1, 2048, 32, 128, kv_heads=8, causal=True, large=True),
    _attention("bidirectional", 8, 2048, 16, 64, large=True),
    _attention(
        "llama3_8b_batch_4", 4, 4096, 32, 128, kv_heads=8, causal=True, large=True, timed_only=True
    ),
    _attention(
        "llama3_8b_long", 1, 16384, 32, 128, kv_heads=8, causal=True, large=True, timed_only=True
    ),
    _attention(
        "llama3_8b_window",
        4,
        4096,
        32,
        128,
        kv_heads=8,
        causal=True,
        window=1024,
        large=True,
        timed_only=True,
    ),
    _attention(
        "llama3_8b_documents",
        4,
        4096,
        32,
        128,
        kv_heads=8,
        causal=True,
        large=True,
        timed_only=True,
        segment_ids=_packed(4, 113, 228, 341, 455, 569, 683, 796, 911),
    ),
    _attention(
        "long_window", 1, 8192, 16, 128, causal=True, window=1024, large=True, timed_only=True
    ),
    _attention("phi3_mini", 4, 4096, 32, 96, causal=True, large=True, timed_only=True),
    _attention("width_192", 4, 4096, 16, 192, causal=True, large=True, timed_only=True),
    _attention("gemma_7b", 4, 4096, 16, 256, causal=True, large=True, timed_only=True),
    _attention("width_32", 8, 2048, 16, 32, causal=True, large=True, timed_only=True),
    _attention(
        "deepseek_v3", 4, 4096, 16, 192, value_width=128, causal=True, large=True, timed_only=True
    ),
    _attention("t5_base", 8, 1024, 12, 64, bias=(1, 12), large=True, timed_only=True),
    _attention("phi2", 4, 2048, 32, 80, causal=True, large=True, timed_only=True),
    _attention(
        "gemma2_27b",
        4,
        4096,
        32,
        128,
        kv_heads=16,
        causal=True,
        softcap=50.0,
        large=True,
        timed_only=True,
    ),
    _attention(
        "gemma2_9b",
        4,
        4096,
        16,
        256,
        kv_heads=8,
        causal=True,
        softcap=50.0,
        large=True,
        timed_only=True,
    ),
    _attention(
        "softcap_few_keys", 32, 1024, 12, 64, causal=True, softcap=50.0, large=True, timed_only=True
    ),
    _attention(
        "softcap_documents",
        4,
        4096,
        32,
        64,
        causal=True,
        softcap=50.0,
        large=True,
        timed_only=True,
        segment_ids=_packed(4, 113, 228, 341, 455, 569, 683, 796, 911),
    ),
    _attention(
        "llama3_8b_sinks",
        4,
        4096,
        32,
        128,
        kv_heads=8,
        causal=True,
        sinks=True,
        large=True,
        timed_only=True,
    ),
    _attention(
        "gpt_oss",
        1,
        8192,
        64,
        64,
        kv_heads=8,
        causal=True,
        window=128,
        sinks=True,
        large=True,
        timed_only=True,
    ),
    _attention("window", 1, 4096, 4, 128, causal=True, window=1024, large=True),
    _attention("causal", 2, 7, 3, 8, causal=True),
    _attention("odd_head_width", 2, 7, 3, 5, causal=True),
    _attention("grouped", 1, 9, 6, 8, kv_heads=2, causal=True),
    _attention("cross", 2, 5, 4, 16, keys=11, kv_heads=1),
    _attention("causal_more_keys", 1, 4, 2, 8, keys=9, causal=True),
    _attention("causal_more_queries", 1, 9, 2, 8, keys=4, causal=True),
    _attention("causal_window", 2, 16, 2, 8, causal=True, window=3),
    _attention("symmetric_window", 2, 16, 2, 8, keys=19, window=3),
    _attention("two_sided_window", 2, 16, 2, 8, keys=19, window=(5, 2)),
    _attention("window_to_the_left", 1, 9, 2, 8, keys=4, window=(None, 2)),
    _attention("two_sided_window_64", 1, 400, 2, 64, keys=450, kv_heads=1, window=(150, 40)),
    _attention("window_to_the_right_128", 1, 300, 2, 128, keys=270, window=(60, None)),
    _attention("softcap", 1, 12, 4, 8, kv_heads=2, std=3.0, causal=True, softcap=2.0),
    _attention("scale", 1, 12, 2, 8, causal=True, scale=0.5),
    _attention("beyond_a_tile", 1, 131, 2, 64, kv_heads=1, causal=True),
    _attention("wide_heads", 1, 70, 2, 128),
    _attention("softcap_64", 1, 200, 4, 64, kv_heads=2, std=3.0, causal=True, softcap=4.0),
    _attention("softcap_128", 1, 180, 2, 128, keys=150, std=2.0, softcap=20.0),
    _attention("head_width_40", 1, 150, 4, 40, kv_heads=2, causal=True),
    _attention("head_width_80", 1, 90, 2, 80, keys=150),
    _attention("head_width_96", 1, 33, 2, 96, keys=50, causal=True),
    _attention("head_width_256", 1, 20, 2, 256, keys=37, kv_heads=1, causal=True),
    _attention(
        "all_options",
        1,
        150,
        3,
        24,
        keys=201,
        kv_heads=1,
        std=3.0,
        causal=True,
        window=67,
        softcap=5.0,
        scale=0.3,
    ),
    _attention("negative_scale", 1, 35, 2, 8, window=20, scale=-0.5),
    _attention(
        "packed_documents",
        2,
        150,
        2,
        8,
        kv_heads=1,
        causal=True,
        segment_ids=_packed(2, 3, 70, 1, 64, 12),
    ),
    # Some queries have a segment that no key has.
    _attention(
        "scattered_segments",
        2,
        21,
        2,
        8,
        keys=40,
        window=9,
        softcap=4.0,
        segment_ids=(_scattered(2, 21, 5, seed=0), _scattered(2, 40, 4, seed=1)),
    ),
    _attention("rope", 2, 70, 4, 16, kv_heads=2, causal=True, rope_table=_angles(70, 8)),
    _attention("rope_128", 1, 70, 2, 128, kv_heads=1, causal=True, rope_table=_angles(70, 64)),
    # A table for each sequence, of pairs that are neighbours and fewer than fill a head.
    _attention("rope_odd", 2, 9, 2, 13, window=5, rope_table=_angles(2, 9, 5), interleaved=True),
    # With all optional arrays of the backward's handler.
    _attention(
        "lse",
        2,
        40,
        4,
        64,
        kv_heads=2,
        causal=True,
        segment_ids=_packed(2, 13, 27),
        rope_table=_angles(40, 32),
        return_lse=True,
    ),
    _attention(
        "lse_128", 1, 70, 2, 128, keys=90, kv_heads=1, causal=True, window=30, return_lse=True
    ),
    # Some queries have a segment that no key has.
    _attention(
        "sinks",
        2,
        21,
        4,
        8,
        keys=40,
        kv_heads=2,
        sinks=True,
        window=9,
        softcap=4.0,
        segment_ids=(_scattered(2, 21, 5, seed=0), _scattered(2, 40, 4, seed=1)),
        return_lse=True,
    ),
    _attention("sinks_64", 1, 131, 2, 64, kv_heads=1, sinks=True, causal=True),
    _attention("sinks_128", 2, 70, 4, 128, keys=90, kv_heads=2, sinks=True, window=(30, 9)),
    _attention("bias", 2, 21, 4, 8, keys=40, kv_heads=2, bias=(2, 4), causal=True),
    _attention("bias_of_heads", 2, 131, 2, 64, kv_heads=1, bias=(1, 2), return_lse=True),
    _attention(
        "bias_all_options",
        2,
        40,
        4,
        16,
        kv_heads=2,
        sinks=True,
        bias=(2, 1),
        window=(30, 4),
        softcap=4.0,
        scale=-0.3,
        segment_ids=_scattered(2, 40, 3, seed=0),
        rope_table=_angles(40, 4),
        return_lse=True,
    ),
    _attention("bias_of_all", 3, 17, 2, 8, keys=20, bias=(1, 1), causal=True, window=9),
    _attention("narrow_values", 2, 7, 3, 8, value_width=5, causal=True),
    _attention("wide_values", 1, 9, 6, 8, keys=11, kv_heads=2, value_width=40, return_lse=True),
    _attention("latent", 1, 131, 4, 192, kv_heads=2, value_width=128, causal=True),
    _attention("latent_cross", 2, 33, 2, 192, keys=50, value_width=128),
    _attention(
        "latent_all_options",
        2,
        70,
        4,
        192,
        kv_heads=2,
        value_width=128,
        sinks=True,
        causal=True,
        window=37,
        softcap=20.0,
        scale=0.1,
        segment_ids=_packed(2, 3, 40, 27),
        rope_table=_angles(70, 32),
        return_lse=True,
    ),
    _attention("narrow_values_bias", 2, 21, 4, 24, kv_heads=2, value_width=16, bias=(1, 4)),
    _attention("narrow_values_no_keys", 2, 3, 2, 8, keys=0, value_width=5),
    _attention("one_query", 2, 1, 2, 8, keys=5, causal=True),
    _attention("no_batch", 0, 8, 2, 8, causal=True),
    _attention("no_keys", 2, 3, 2, 8, keys=0),
    _decode("llama3_8b", 1, 8192, 32, 128, kv_heads=8, full=True, large=True),
    _decode("llama3_8b_batch_32", 32, 8192, 32, 128, kv_heads=8, full=True, large=True),
    _decode("llama3_8b_int8", 1, 8192, 32, 128, kv_heads=8, full=True, int8=True, large=True),
    _decode("llama3_1b", 1, 2048, 32, 64, kv_heads=8, full=True, large=True),
    _decode("llama3_8b_pages", 1, 8192, 32, 128, kv_heads=8, full=True, page=16, large=True),
    _decode(
        "llama3_8b_batch_32_pages", 32, 8192, 32, 128, kv_heads=8, full=True, page=16, large=True
    ),
    _decode("gpt_oss", 8, 4096, 64, 64, kv_heads=8, full=True, sinks=True, window=128, large=True),
    _decode("ragged", 9, 1500, 12, 64, kv_heads=4, large=True),
    _decode("ragged_int8", 9, 1500, 12, 64, kv_heads=4, int8=True, large=True),
    _decode("grouped", 5, 70, 6, 64, kv_heads=2),
    _decode("heads_128", 3, 200, 8, 128, kv_heads=2),
    _decode("many_to_one", 2, 33, 20, 64, kv_heads=1),
    _decode("odd_width", 3, 21, 3, 5),
    _decode("width_96", 3, 40, 4, 96, kv_heads=2, scale=-0.3),
    _decode("width_256", 2, 18, 2, 256),
    _decode("int8", 4, 90, 6, 64, kv_heads=2, int8=True),
    _decode("int8_128", 3, 50, 4, 128, kv_heads=1, int8=True),
    _decode("int8_odd_width", 3, 30, 2, 24, int8=True),
    _decode("one_token", 2, 1, 4, 64, kv_heads=2),
    _decode("pages", 3, 96, 6, 64, kv_heads=2, page=16),
    _decode("pages_of_odd_size", 2, 35, 2, 24, page=7, scale=-0.3),
    _decode("pages_int8", 4, 64, 4, 128, kv_heads=1, page=32, int8=True),
    _decode("sinks", 3, 70, 6, 64, kv_heads=2, sinks=True),
    _decode("window", 4, 200, 8, 128, kv_heads=2, window=37),
    _decode("window_of_one", 3, 40, 3, 64, window=(0, 5)),
    _decode("window_int8", 3, 150, 4, 64, kv_heads=2, window=90, int8=True, sinks=True),
    _decode("window_odd_width", 3, 50, 3, 24, window=20, sinks=True),
    _decode("window_in_pages", 3, 96, 6, 64, kv_heads=2, page=16, window=33, sinks=True),
    _decode("no_batch", 0, 8, 2, 64),
    _decode("no_tokens", 2, 0, 2, 64),
    # What the models' projections are, beside the plain form of the same shapes.
    _projection("gpt2_124m", 32, 1024, 12, 64, causal=True, large=True),
    _projection(
        "llama3_1b",
        4,
        4096,
        32,
        64,
        kv_heads=8,
        causal=True,
        large=True,
        timed_only=True,
        rope_table=_angles(4096, 32),
    ),
    _projection(
        "llama3_8b",
        4,
        4096,
        32,
        128,
        kv_heads=8,
        causal=True,
        large=True,
        timed_only=True,
        rope_table=_angles(4096, 64),
    ),
    _projection("causal", 2, 7, 3, 8, causal=True),
    _projection("grouped", 2, 70, 4, 16, kv_heads=2, causal=True, rope_table=_angles(70, 8)),
    _projection("odd_head_width", 1, 9, 3, 5, kv_heads=1, window=4),
    _projection("two_sided_window", 1, 300, 2, 64, kv_heads=1, window=(None, 70)),
    _projection("beyond_a_tile", 1, 131, 2, 64, kv_heads=1, causal=True, softcap=5.0),
    *(
        _projection(
            name,
            2,
            150,
            6,
            32,
            kv_heads=2,
            by_parts=by_parts,
            causal=True,
            window=67,
            softcap=5.0,
            scale=0.3,
            segment_ids=_packed(2, 3, 70, 1, 64, 12),
            rope_table=_angles(2, 150, 8),
            interleaved=True,
        )
        for name, by_parts in (("all_options", False), ("by_parts_all_options", True))
    ),
    _projection(
        "lse",
        2,
        40,
        4,
        64,
        kv_heads=2,
        by_parts=True,
        causal=True,
        segment_ids=_packed(2, 13, 27),
        rope_table=_angles(40, 32),
        return_lse=True,
    ),
    _projection("wide_heads", 1, 20, 2, 192, kv_heads=1, rope_table=_angles(20, 96)),
    _projection(
        "by_parts_64",
        2,
        1000,
        12,
        64,
        kv_heads=4,
        by_parts=True,
        causal=True,
        large=True,
        rope_table=_angles(1000, 32),
    ),
    _projection(
        "by_parts_128",
        1,
        2048,
        8,
        128,
        kv_heads=2,
        by_parts=True,
        causal=True,
        large=True,
        rope_table=_angles(2048, 64),
        window=700,
    ),
    _projection(
        "by_parts_documents",
        2,
        1000,
        12,
        64,
        kv_heads=4,
        by_parts=True,
        causal=True,
        large=True,
        segment_ids=_packed(2, 3, 570, 1, 64, 362),
        rope_table=_angles(2, 1000, 32),
    ),
    _projection(
        "by_parts",
        2,
        70,
        6,
        64,
        kv_heads=2,
        by_parts=True,
        causal=True,
        rope_table=_angles(70, 32),
    ),
    _projection(
        "by_parts_wide", 1, 20, 4, 192, kv_heads=1, by_parts=True, rope_table=_angles(20, 96)
    ),
    _projection("by_parts_unrotated", 2, 33, 4, 64, kv_heads=2, by_parts=True, causal=True),
    _projection("by_parts_no_groups", 2, 33, 3, 8, by_parts=True, causal=True),
    _projection("no_batch", 0, 8, 2, 8, causal=True),
    _projection("no_tokens", 2, 0, 2, 8, causal=True, rope_table=_angles(0, 4)),
    _softmax(
        "gpt2_124m", 32, 12, 1024, 1024, scale=0.125, causal=True, large=True, timed_only=True
    ),
    _softmax("plain_4096", 32768, 4096, large=True, timed_only=True),
    _softmax("vocabulary", 1024, 50304, large=True),
    _softmax("gpt2_124m_batch_2", 2, 12, 1024, 1024, scale=0.125, causal=True, large=True),
    _softmax("plain_4096_fewer", 2048, 4096, large=True),
    _softmax("odd_causal_large", 7, 1023, 1023, causal=True, large=True),
    _softmax("odd_plain_large", 3001, 5001, std=5.0, large=True),
    _softmax("beyond_registers_large", 300, 40003, causal=True, large=True),
    _softmax("causal", 2, 3, 7, 7, causal=True),
    _softmax("plain", 5, 77),
    _softmax("aligned_causal", 2, 64, 64, scale=0.125, causal=True),
    _softmax("causal_more_keys", 2, 5, 33, causal=True),
    _softmax("causal_more_queries", 2, 9, 4, causal=True),
    _softmax("causal_beyond_a_warp", 1, 3, 2304, causal=True),
    _softmax("negative_scale", 3, 40, scale=-2.0),
    _softmax("no_scale", 3, 40, scale=0.0),
    _softmax("large_scores", 64, 130, std=100.0),
    _softmax("router", 11, 8),
    _softmax("narrow_odd", 5, 51),
    _softmax("long_rows", 2, 5003),
    _softmax("beyond_registers", 2, 20011),
    _softmax("beyond_shared_memory", 3, 60001, causal=True),
    _softmax("one_key", 6, 1),
    _softmax("one_row", 40),
    _softmax("no_rows", 0, 128),
    _softmax("no_keys", 3, 0),
    _repeat_kv("llama3_8b", 4, 4096, 8, 128, groups=4, large=True),
    _repeat_kv("odd_large", 3, 1001, 5, 77, groups=3, large=True),
    _repeat_kv("grouped", 2, 5, 3, 16, groups=4),
    _repeat_kv("odd", 2, 5, 3, 7, groups=3),
    _repeat_kv("one_group", 1, 4, 2, 8, groups=1),
    _repeat_kv("one_head", 2, 3, 1, 64, groups=8),
    _repeat_kv("wide_heads", 1, 2, 2, 2056, groups=2),
    _repeat_kv("one_column", 1, 3, 2, 1, groups=5),
    _repeat_kv("no_keys", 2, 0, 3, 16, groups=2),
)
