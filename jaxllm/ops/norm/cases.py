"""Normalization cases: small odd shapes for tests, model shapes for GPU tests and benchmarks."""

from __future__ import annotations

import functools
import math

from jaxllm.testing import Case, Normal


def _case(
    op: str,
    name: str,
    *shape: int,
    large: bool = False,
    weights: str | None = None,
    x_bias: bool = False,
    first: bool = False,
) -> Case:
    x, weight = Normal(shape, mean=0.5), Normal(shape[-1:], mean=1.0, dtype=weights)
    fused = op.startswith("add_")
    inputs = {"x": x} | ({"residual": None if first else x} if fused else {}) | {"scale": weight}
    if op.endswith("layer_norm"):
        inputs["bias"] = Normal(shape[-1:], dtype=weights)
    if x_bias:
        inputs["x_bias"] = Normal(shape[-1:], dtype=weights)
    size = math.prod(shape)
    # Forward: x (and residual) in, out (and h) out. Without a residual h is x.
    # Backward: x, dout (and dh) in, dx out.
    return Case(
        op,
        name,
        inputs,
        forward_elements=(4 if fused and not first else 2) * size,
        backward_elements=(4 if fused else 3) * size,
        saves_more=True,
        large=large,
    )


_OPS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")

CASES = tuple(
    case
    for op in _OPS
    for case in (
        _case(op, "gpt2_124m", 65536, 768, large=True),
        _case(op, "llama3_8b", 16384, 4096, large=True),
        _case(op, "gpt2_1558m", 16384, 1600, large=True),
        _case(op, "widest", 33, 16384, large=True),
        _case(op, "wider_than_registers", 5, 33000, large=True),
        _case(op, "many_odd_rows", 5003, 1000, large=True),
        _case(op, "gpt2_row", 3, 3, 768),
        _case(op, "odd_width", 5, 77),
        _case(op, "float32_weights", 7, 256, weights="float32"),
        _case(op, "odd_rows_wide", 19, 3000),
        _case(op, "head_width", 3, 5, 2, 64),
        _case(op, "one_column", 6, 1),
        _case(op, "one_row", 40),
        _case(op, "no_rows", 0, 128),
    )
)

_x_bias_case = functools.partial(_case, "add_layer_norm", x_bias=True)

CASES += (
    _x_bias_case("x_bias_gpt2_124m", 65536, 768, large=True),
    _x_bias_case("x_bias_gpt2_1558m", 16384, 1600, large=True),
    _x_bias_case("x_bias_widest", 33, 16384, large=True),
    _x_bias_case("x_bias_wider_than_registers", 5, 33000, large=True),
    _x_bias_case("x_bias_row", 2, 3, 768),
    _x_bias_case("x_bias_odd_width", 5, 77),
    _x_bias_case("x_bias_odd_rows_wide", 19, 1032),
    _x_bias_case("x_bias_float32", 7, 256, weights="float32"),
    _x_bias_case("x_bias_no_rows", 0, 128),
)

CASES += tuple(
    case
    for op in ("add_layer_norm", "add_rms_norm")
    for case in (
        _case(op, "first_gpt2_124m", 65536, 768, first=True, large=True),
        _case(op, "first_row", 2, 3, 768, first=True),
        _case(op, "first_odd_width", 5, 77, first=True),
        _case(op, "first_float32_weights", 7, 256, weights="float32", first=True),
        _case(op, "first_no_rows", 0, 128, first=True),
    )
)
