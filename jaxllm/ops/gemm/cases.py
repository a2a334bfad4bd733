"""Shapes of matmuls: odd ones for tests, real ones for tests on a GPU and benchmarks."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxllm.ops.gemm import reference
from jaxllm.ops.gemm.api_float8 import float8_matmul
from jaxllm.testing import Case, Normal


def _case(
    name: str,
    *shape: int,
    out: int,
    bias: bool = True,
    activation: str | None = None,
    large: bool = False,
) -> Case:
    rows, width = math.prod(shape[:-1]), shape[-1]
    inputs = {"x": Normal(shape), "weight": Normal((width, out), std=max(width, 1) ** -0.5)}
    if bias:
        inputs["bias"] = Normal((out,))
    x, weight, y = rows * width, width * out, rows * out
    # Backward: x, weight, dout (and h) in, dx and dweight out.
    return Case(
        "linear",
        name,
        inputs,
        {"activation": activation} if activation else {},
        forward_elements=x + weight + y * (2 if activation else 1),
        backward_elements=2 * (x + weight) + y * (2 if activation else 1),
        forward_flops=2 * rows * width * out,
        backward_flops=4 * rows * width * out,
        large=large,
    )


def _matmul(
    name: str,
    *shape: int,
    out: int,
    bias: bool = False,
    large: bool = False,
    timed_only: bool = False,
    transpose_a: bool = False,
    transpose_b: bool = False,
    **options: str,
) -> Case:
    """A matmul of ``shape`` and ``(shape[-1], out)``, either of which may be stored transposed."""
    rows, depth = math.prod(shape[:-1]), shape[-1]
    std = max(depth, 1) ** -0.5
    inputs = {
        "a": Normal(shape[::-1] if transpose_a else shape),
        "b": Normal((out, depth) if transpose_b else (depth, out), std=std),
    }
    if bias:
        inputs["bias"] = Normal((out,))
    flags = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    static = {name: True for name, flag in flags.items() if flag} | options
    a, b, y = rows * depth, depth * out, rows * out
    # Backward: a, b, dout (and h) in, da and db out.
    return Case(
        "matmul",
        name,
        inputs,
        static,
        forward_elements=a + b + y * (2 if "activation" in options else 1),
        backward_elements=2 * (a + b) + y * (2 if "activation" in options else 1),
        forward_flops=2 * rows * depth * out,
        backward_flops=4 * rows * depth * out,
        large=large,
        timed_only=timed_only,
    )


def _matvec(name: str, rows: int, width: int, out: int, *, large: bool = False) -> Case:
    return Case(
        "matvec",
        name,
        {"w": Normal((out, width), std=max(width, 1) ** -0.5), "x": Normal((rows, width))},
        # The matrix: what else moves is next to nothing.
        forward_elements=out * width,
        forward_flops=2 * rows * out * width,
        has_backward=False,
        large=large,
    )


_FLOAT8 = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def _float8(
    name: str,
    rows: int,
    columns: int,
    depth: int,
    formats: str = "e4m3 e4m3",
    scales: str = "rows columns",
    *,
    bias: bool = False,
    large: bool = False,
    refused_by: tuple[str, ...] = (),
) -> Case:
    """A ``float8_matmul`` in an output dtype that is the dtype under test.

    ``scales`` names the operands with a scale for each of their rows.
    """
    dtypes = [_FLOAT8[each] for each in formats.split()]
    return Case(
        "float8_matmul",
        name,
        {
            "a": Normal((rows, depth)),
            "b": Normal((columns, depth)),
            "scale_a": Normal((rows,) if "rows" in scales else (), mean=1.0, std=0.2),
            "scale_b": Normal((columns,) if "columns" in scales else (), mean=1.0, std=0.2),
            **({"bias": Normal((columns,))} if bias else {}),
        },
        has_backward=False,
        refused_by=refused_by,
        # The tensor cores accumulate with 14 bits: tests/ops/test_float8_matmul.py has the bound.
        inexact_under=(("cuda", "float32"),),
        large=large,
        call=functools.partial(_float8_matmul, dtypes),
    )


def _float8_matmul(
    dtypes: list[str], a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None, *, backend: Any
) -> Any:
    """``float8_matmul`` of arrays in the dtype under test, which is that of the output."""
    out_dtype = a.dtype.name
    a, b = (x.astype(dtype) for x, dtype in zip((a, b), dtypes, strict=True))
    if out_dtype == "float64":  # the exact result
        # Without the barrier XLA may leave out both conversions, and with them the rounding.
        a, b = (x.astype(out_dtype) for x in lax.optimization_barrier((a, b)))
        scale_a, scale_b = map(jnp.atleast_1d, (scale_a, scale_b))
        return reference.float8_matmul(a, b, scale_a, scale_b, bias, out_dtype=out_dtype)
    scale_a, scale_b = (scale.astype("float32") for scale in (scale_a, scale_b))
    return float8_matmul(a, b, scale_a, scale_b, bias, out_dtype=out_dtype, backend=backend)


def _float8_timed(name: str, rows: int, columns: int, depth: int) -> Case:
    a, b = ((size, depth) for size in (rows, columns))
    return Case(
        "float8_matmul",
        name,
        {
            "a": Normal(a, dtype="float8_e4m3fn"),
            "b": Normal(b, dtype="float8_e4m3fn"),
            "scale_a": Normal((rows,), mean=1.0, std=0.2, dtype="float32"),
            "scale_b": Normal((columns,), mean=1.0, std=0.2, dtype="float32"),
        },
        # The output is bfloat16, whatever dtype the benchmark asks for.
        forward_fixed_bytes=(rows + columns) * (depth + 4) + 2 * rows * columns,
        forward_flops=2 * rows * columns * depth,
        has_backward=False,
        large=True,
        timed_only=True,
    )


CASES = (
    _case("gpt2_124m_qkv", 65536, 768, out=2304, large=True),
    _case("gpt2_124m_up", 65536, 768, out=3072, activation="gelu", large=True),
    _case("gpt2_124m_down", 65536, 3072, out=768, large=True),
    _case("llama3_8b_up", 16384, 4096, out=14336, bias=False, large=True),
    _case("odd_large", 5003, 1003, out=777, activation="gelu", large=True),
    _case("small_tile", 2, 64, 64, out=128),
    _case("odd", 3, 5, 37, out=19),
    _case("odd_gelu", 3, 5, 37, out=19, activation="gelu"),
    _case("no_bias", 7, 24, out=40, bias=False),
    _case("no_bias_gelu", 7, 24, out=40, bias=False, activation="gelu"),
    _case("one_row", 33, out=17),
    _case("one_column", 6, 9, out=1),
    _case("inner_one", 6, 1, out=9),
    _case("no_rows", 0, 16, out=8, activation="gelu"),
    _matmul("square_4096", 4096, 4096, out=4096, large=True),
    # Timed only: a float32 sum of so many products (rows, in the gradient of b) is one chain of
    # additions, whose rounding errors may be beyond the floor.
    _matmul("square_8192", 8192, 8192, out=8192, large=True, timed_only=True),
    _matmul("gpt2_124m_up", 32768, 768, out=3072, large=True, timed_only=True),
    _matmul("small_tile", 64, 64, out=128),
    _matmul("odd", 37, 19, out=23),
    _matmul("odd_transposed_a", 37, 19, out=23, transpose_a=True),
    _matmul("odd_transposed_b", 37, 19, out=23, transpose_b=True, bias=True, activation="gelu"),
    _matmul("transposed", 136, 72, out=40, transpose_a=True, transpose_b=True, bias=True),
    _matmul("aligned_gelu", 2, 65, 136, out=200, activation="gelu"),
    _matmul("even", 130, 34, out=50, bias=True),
    _matmul("wide_result", 24, 40, out=16, bias=True, activation="gelu", out_dtype="float32"),
    _matmul("one_row", 33, out=17),
    _matmul("one_column", 6, 9, out=1, transpose_b=True),
    _matmul("inner_one", 6, 1, out=9),
    _matmul("inner_zero", 6, 0, out=9, bias=True),
    _matmul("no_rows", 0, 16, out=8, bias=True, activation="gelu"),
    _matmul("no_columns", 5, 16, out=0),
    _matvec("llama3_8b_up", 1, 4096, 14336, large=True),
    _matvec("llama3_8b_down", 1, 14336, 4096, large=True),
    _matvec("llama3_1b_head", 1, 2048, 128256, large=True),
    _matvec("rows_16", 16, 4096, 4096, large=True),
    _matvec("one_row", 1, 64, 40),
    _matvec("rows_3", 3, 200, 37),
    _matvec("rows_9", 9, 513, 16),
    _matvec("rows_16_small", 16, 1024, 48),
    _matvec("odd", 2, 5, 3),
    _matvec("no_columns", 1, 8, 0),
    _float8_timed("llama3_1b_up", 16384, 11264, 2048),
    _float8_timed("llama3_1b_head", 16384, 128256, 2048),
    _float8_timed("gpt2_124m_up", 32768, 3072, 768),
    _float8_timed("gpt2_124m_down", 32768, 768, 3072),
    _float8("square_2048", 2048, 2048, 2048, large=True),
    _float8("rows_3", 3, 8, 144),
    _float8("one_scale_each", 130, 200, 1040, scales=""),
    _float8("e4m3_e5m2", 130, 200, 144, "e4m3 e5m2", "rows"),
    _float8("e5m2_e4m3", 3, 200, 1040, "e5m2 e4m3", "columns"),
    _float8("e5m2_e5m2", 130, 8, 144, "e5m2 e5m2"),
    _float8("one_row", 1, 200, 16),
    _float8("bias", 130, 200, 144, scales="", bias=True),
    _float8("odd", 3, 7, 10, refused_by=("cuda",)),
    _float8("no_rows", 0, 8, 16),
    _float8("no_columns", 3, 0, 16),
    _float8("no_depth", 3, 8, 0, refused_by=("cuda",)),
)
