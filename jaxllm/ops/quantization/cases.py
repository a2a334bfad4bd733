"""Quantization cases: small odd shapes for tests, model shapes for GPU tests and benchmarks."""

from __future__ import annotations

import math

from jaxllm.testing import Case, Integers, Normal


def _quantize(name: str, *shape: int, group_size: int = 64, large: bool = False) -> Case:
    size = math.prod(shape)
    return Case(
        "quantize",
        name,
        {"w": Normal(shape)},
        {"group_size": group_size},
        forward_elements=size,
        forward_fixed_bytes=size + 4 * size // group_size,
        has_backward=False,
        large=large,
    )


def _quantized(*shape: int, group_size: int) -> dict[str, Integers | Normal]:
    scales = Normal((*shape[:-1], shape[-1] // group_size), mean=0.02, std=0.003, dtype="float32")
    return {"q": Integers(shape, 128, low=-127, dtype="int8"), "scales": scales}


def _dequantize(name: str, *shape: int, group_size: int = 64, large: bool = False) -> Case:
    size = math.prod(shape)
    return Case(
        "dequantize",
        name,
        _quantized(*shape, group_size=group_size),
        forward_fixed_bytes=5 * size + 4 * size // group_size,
        has_backward=False,
        large=large,
    )


def _matmul(
    op: str, name: str, rows: int, width: int, out: int, *, group_size: int = 64, large=False
) -> Case:
    size = out * width
    return Case(
        op,
        name,
        {
            **_quantized(out, width, group_size=group_size),
            "x": Normal((rows, width), std=max(width, 1) ** -0.5),
        },
        # Only the matrix: the rows are negligible.
        forward_fixed_bytes=size + 4 * size // group_size,
        forward_flops=2 * rows * size,
        has_backward=False,
        large=large,
    )


CASES = (
    _quantize("llama3_8b_up", 14336, 4096, large=True),
    _quantize("rows", 5, 128),
    _quantize("small_groups", 3, 48, group_size=16),
    _quantize("odd_groups", 2, 7, 15, group_size=5),
    _quantize("whole_rows", 3, 37, group_size=37),
    _quantize("no_rows", 0, 64),
    _dequantize("llama3_8b_up", 14336, 4096, large=True),
    _dequantize("rows", 5, 128),
    _dequantize("small_groups", 3, 48, group_size=16),
    _dequantize("odd_groups", 2, 7, 15, group_size=5),
    _dequantize("no_rows", 0, 64),
    _matmul("quantized_matvec", "llama3_8b_up", 1, 4096, 14336, large=True),
    _matmul("quantized_matvec", "llama3_8b_down", 1, 14336, 4096, large=True),
    _matmul("quantized_matvec", "llama3_1b_head", 1, 2048, 128256, large=True),
    _matmul("quantized_matvec", "rows_2_odd", 2, 4160, 4099, large=True),
    _matmul("quantized_matvec", "rows_2_long_groups", 2, 14336, 2048, group_size=256, large=True),
    _matmul("quantized_matvec", "rows_16", 16, 4096, 4096, large=True),
    _matmul("quantized_matvec", "one_row", 1, 128, 40),
    _matmul("quantized_matvec", "rows_3", 3, 192, 37),
    _matmul("quantized_matvec", "rows_16_small", 16, 512, 16),
    _matmul("quantized_matvec", "small_groups", 2, 96, 19, group_size=16),
    _matmul("quantized_matvec", "long_groups", 9, 512, 24, group_size=512),
    _matmul("quantized_matvec", "no_columns", 1, 64, 0),
    _matmul("quantized_matmul", "prompt", 2048, 4096, 14336, large=True),
    _matmul("quantized_matmul", "rows", 21, 128, 40),
    _matmul("quantized_matmul", "odd_groups", 3, 30, 7, group_size=5),
    _matmul("quantized_matmul", "no_rows", 0, 64, 8),
)
