"""Shapes of a block's call: odd ones for tests, real ones for tests on a GPU and benchmarks."""

from __future__ import annotations

from jaxllm.testing import Case, Integers, Normal


def _block(
    name: str, batch: int, width: int, heads: int, kv_heads: int, mlp_width: int, room: int,
    *, int8: bool = False, group_size: int = 64, large: bool = False,
) -> Case:  # fmt: skip
    H = width // heads
    cache = (batch, room, kv_heads, H)

    def matrix(rows: int, columns: int):
        if not int8:
            return Normal((rows, columns), std=columns**-0.5)
        scale = columns**-0.5 / 64
        scales = Normal((rows, columns // group_size), scale, scale / 8, dtype="float32")
        return Integers((rows, columns), 128, low=-127, dtype="int8"), scales

    shapes = {
        "qkv": (width + 2 * kv_heads * H, width),
        "out": (width, width),
        "gate_up": (2 * mlp_width, width),
        "down": (width, mlp_width),
    }
    weights = sum(rows * columns for rows, columns in shapes.values())
    of_cache = 2 * batch * room * kv_heads * H
    return Case(
        "decode_block",
        name,
        {
            "residual": Normal((batch, width)),
            "norm1": Normal((width,), mean=1.0, std=0.1),
            "norm2": Normal((width,), mean=1.0, std=0.1),
            **{name: matrix(*shape) for name, shape in shapes.items()},
            "cos": Normal((batch, H // 2), std=0.7, dtype="float32"),
            "sin": Normal((batch, H // 2), std=0.7, dtype="float32"),
            "k_cache": Normal(cache),
            "v_cache": Normal(cache),
            "lengths": Integers((batch,), room + 1, low=room - 1 if large else 0),
        },
        # Weights and caches in.
        forward_elements=of_cache if int8 else weights + of_cache,
        forward_fixed_bytes=weights + 4 * weights // group_size if int8 else 0,
        donated=("k_cache", "v_cache"),
        has_backward=False,
        large=large,
    )


CASES = (
    _block("llama3_1b", 1, 2048, 32, 8, 8192, 2048, large=True),
    _block("llama3_1b_int8", 1, 2048, 32, 8, 8192, 2048, int8=True, large=True),
    _block("llama3_8b", 1, 4096, 32, 8, 14336, 2048, large=True),
    _block("llama3_8b_int8", 1, 4096, 32, 8, 14336, 2048, int8=True, large=True),
    _block("llama3_1b_batch_8", 8, 2048, 32, 8, 8192, 600, large=True),
    _block("one_sequence", 1, 256, 4, 2, 192, 20),
    _block("sequences_3", 3, 256, 4, 1, 128, 33),
    _block("int8", 2, 128, 2, 1, 192, 9, int8=True),
    _block("int8_small_groups", 5, 96, 3, 3, 48, 12, int8=True, group_size=16),
    _block("odd", 2, 30, 3, 1, 14, 7),
    _block("sequences_16", 16, 128, 2, 2, 64, 5),
)
