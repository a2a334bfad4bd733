"""Shapes of matrix products: odd ones for tests, real ones for tests on a GPU and benchmarks."""

from __future__ import annotations

import dataclasses
import math

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
    """A product of ``shape`` and ``(shape[-1], out)``, of which either may be stored turned."""
    rows, depth = math.prod(shape[:-1]), shape[-1]
    std = max(depth, 1) ** -0.5
    inputs = {
        "a": Normal(shape[::-1] if transpose_a else shape),
        "b": Normal((out, depth) if transpose_b else (depth, out), std=std),
    }
    if bias:
        inputs["bias"] = Normal((out,))
    turns = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    static = {name: True for name, turned in turns.items() if turned} | options
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


def _mlp(name: str, *shape: int, hidden: int, out: int | None = None, large: bool = False) -> Case:
    rows, width = math.prod(shape[:-1]), shape[-1]
    out = width if out is None else out
    inputs = {
        "x": Normal(shape),
        "up_weight": Normal((width, hidden), std=max(width, 1) ** -0.5),
        "up_bias": Normal((hidden,)),
        "down_weight": Normal((hidden, out), std=hidden**-0.5),
        "down_bias": Normal((out,)),
    }
    weights = (width + out) * hidden
    # Forward: h and the hidden layer out, the latter in again. Backward: x, both, dout and the
    # weights in, dh out and in, dx and the weights' gradients out.
    return Case(
        "mlp",
        name,
        inputs,
        forward_elements=rows * (width + 3 * hidden + out) + weights,
        backward_elements=rows * (2 * width + 4 * hidden + out) + 2 * weights,
        forward_flops=2 * rows * weights,
        backward_flops=4 * rows * weights,
        large=large,
    )


def _norm(width: int, *, after: str | None, weights: str | None = None) -> dict[str, Normal]:
    """The inputs that are added to a product, and those of the norm after it."""
    weight = Normal((width,), mean=1.0, dtype=weights)
    inputs = {"scale": weight, "bias": weight}
    return inputs | ({after: weight} if after else {})


def _linear_add_layer_norm(
    name: str,
    *shape: int,
    out: int,
    bias: bool = True,
    weights: str | None = None,
    large: bool = False,
) -> Case:
    rows, width = math.prod(shape[:-1]), shape[-1]
    inputs = {
        "x": Normal(shape),
        "weight": Normal((width, out), std=max(width, 1) ** -0.5),
        "residual": Normal((*shape[:-1], out)),
    }
    x, weight, y = rows * width, width * out, rows * out
    # Forward: x, weight and residual in, the sum and its norm out. Backward: x, weight, the sum and
    # the gradients of both outputs in, those of x, weight and residual out.
    return Case(
        "linear_add_layer_norm",
        name,
        inputs | _norm(out, after="x_bias" if bias else None, weights=weights),
        forward_elements=x + weight + 3 * y,
        backward_elements=2 * (x + weight) + 4 * y,
        forward_flops=2 * rows * width * out,
        backward_flops=4 * rows * width * out,
        saves_more=True,
        large=large,
    )


def _pre_norm_mlp(
    name: str, *shape: int, hidden: int, bias: bool = True, large: bool = False
) -> Case:
    mlp = _mlp(name, *shape, hidden=hidden, large=large)
    x, *layers = mlp.inputs.items()
    if not bias:
        layers = [layer for layer in layers if layer[0] != "down_bias"]
    norm = {"scale": Normal(shape[-1:], mean=1.0), "bias": Normal(shape[-1:])}
    y = math.prod(shape)
    # Beside what mlp moves: the norm out and the stream in; the norm, the stream and its gradient
    # in.
    return dataclasses.replace(
        mlp,
        op="pre_norm_mlp",
        inputs=dict([x]) | norm | dict(layers),
        forward_elements=mlp.forward_elements + 2 * y,
        backward_elements=mlp.backward_elements + 2 * y,
        saves_more=True,
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
    # Timed only: a float32 sum of so many products (of the gradient of b the rows) is one chain of
    # additions, whose rounding errors may be beyond the floor.
    _matmul("square_8192", 8192, 8192, out=8192, large=True, timed_only=True),
    _matmul("gpt2_124m_up", 32768, 768, out=3072, large=True, timed_only=True),
    _matmul("small_tile", 64, 64, out=128),
    _matmul("odd", 37, 19, out=23),
    _matmul("odd_turned_a", 37, 19, out=23, transpose_a=True),
    _matmul("odd_turned_b", 37, 19, out=23, transpose_b=True, bias=True, activation="gelu"),
    _matmul("turned", 136, 72, out=40, transpose_a=True, transpose_b=True, bias=True),
    _matmul("aligned_gelu", 2, 65, 136, out=200, activation="gelu"),
    _matmul("even", 130, 34, out=50, bias=True),
    _matmul("wide_result", 24, 40, out=16, bias=True, activation="gelu", out_dtype="float32"),
    _matmul("one_row", 33, out=17),
    _matmul("one_column", 6, 9, out=1, transpose_b=True),
    _matmul("inner_one", 6, 1, out=9),
    _matmul("inner_zero", 6, 0, out=9, bias=True),
    _matmul("no_rows", 0, 16, out=8, bias=True, activation="gelu"),
    _matmul("no_columns", 5, 16, out=0),
    _mlp("gpt2_124m", 32768, 768, hidden=3072, large=True),
    _mlp("odd_large", 5003, 1003, hidden=777, out=501, large=True),
    _mlp("aligned_large", 5003, 1000, hidden=1992, out=504, large=True),
    _mlp("small_tile", 2, 64, 64, hidden=128),
    _mlp("odd", 3, 5, 37, hidden=19, out=23),
    _mlp("one_row", 33, hidden=17),
    _mlp("hidden_one", 6, 9, hidden=1),
    _mlp("no_rows", 0, 16, hidden=8),
    _linear_add_layer_norm("gpt2_124m_out", 32768, 768, out=768, large=True),
    _linear_add_layer_norm("gpt2_124m_down", 32768, 3072, out=768, large=True),
    _linear_add_layer_norm("odd_large", 5003, 1003, out=777, large=True),
    _linear_add_layer_norm("aligned_large", 5003, 1000, out=1000, large=True),
    _linear_add_layer_norm("no_bias_large", 5003, 200, out=1000, bias=False, large=True),
    _linear_add_layer_norm("small_tile", 2, 64, 64, out=128),
    _linear_add_layer_norm("odd", 3, 5, 37, out=19),
    _linear_add_layer_norm("no_bias", 7, 24, out=40, bias=False),
    _linear_add_layer_norm("float32_weights", 7, 24, out=40, weights="float32"),
    _linear_add_layer_norm("one_row", 33, out=17),
    _linear_add_layer_norm("no_rows", 0, 16, out=8),
    _pre_norm_mlp("gpt2_124m", 32768, 768, hidden=3072, large=True),
    _pre_norm_mlp("odd_large", 5003, 777, hidden=1003, large=True),
    _pre_norm_mlp("aligned_large", 5003, 1000, hidden=1992, large=True),
    _pre_norm_mlp("small_tile", 2, 64, 64, hidden=128),
    _pre_norm_mlp("odd", 3, 5, 37, hidden=19),
    _pre_norm_mlp("no_bias", 7, 24, hidden=40, bias=False),
    _pre_norm_mlp("one_row", 33, hidden=17),
    _pre_norm_mlp("no_rows", 0, 16, hidden=8),
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
)
