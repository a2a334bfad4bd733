"""Activation cases: small odd shapes for tests, model shapes for GPU tests and benchmarks."""

from __future__ import annotations

import math

from jaxllm.testing import Case, Normal


def _unary(op: str, name: str, *shape: int, std: float = 1.0, large: bool = False) -> Case:
    size = math.prod(shape)
    # Forward: x in, out out. Backward: x and dout in, dx out.
    return Case(
        op,
        name,
        {"x": Normal(shape, std=std)},
        forward_elements=2 * size,
        backward_elements=3 * size,
        large=large,
    )


def _biased(op: str, name: str, *shape: int, std: float = 1.0, large: bool = False) -> Case:
    size = math.prod(shape)
    # Backward of bias_add: dout in; the gradient of x is dout.
    return Case(
        op,
        name,
        {"x": Normal(shape, std=std), "bias": Normal(shape[-1:])},
        forward_elements=2 * size,
        backward_elements=(3 if op == "bias_gelu" else 1) * size,
        large=large,
    )


def _swiglu(name: str, *shape: int, std: float = 1.0, large: bool = False) -> Case:
    size = math.prod(shape)
    return Case(
        "swiglu",
        name,
        {"gate": Normal(shape, std=std), "up": Normal(shape)},
        forward_elements=3 * size,
        backward_elements=5 * size,
        large=large,
    )


def _packed(name: str, *shape: int, large: bool = False) -> Case:
    size = math.prod(shape)  # of the packed input; the output has half of it
    return Case(
        "swiglu_packed",
        name,
        {"x": Normal(shape)},
        forward_elements=3 * size // 2,
        backward_elements=5 * size // 2,
        large=large,
    )


def _add(name: str, *shape: int, large: bool = False) -> Case:
    return Case(
        "add",
        name,
        {"x": Normal(shape), "y": Normal(shape)},
        forward_elements=3 * math.prod(shape),
        large=large,
    )


CASES = (
    _unary("gelu", "gpt2_124m", 32768, 3072, large=True),
    _unary("gelu", "gpt2_1558m", 16384, 6400, large=True),
    _unary("gelu", "odd_size_large", 33554467, large=True),
    _unary("relu", "gpt2_124m", 32768, 3072, large=True),
    _unary("sigmoid", "gpt2_124m", 32768, 3072, large=True),
    _unary("gelu", "gpt2_row", 2, 3, 3072),
    _unary("gelu", "one_element", 1),
    *(
        case
        for op in ("gelu", "relu", "sigmoid")
        for case in (
            _unary(op, "odd_size", 3, 37),
            _unary(op, "saturated", 500, std=50.0),
            _unary(op, "scalar"),
            _unary(op, "no_elements", 0, 8),
        )
    ),
    _biased("bias_gelu", "gpt2_124m", 32768, 3072, large=True),
    _biased("bias_gelu", "many_odd_rows", 5003, 1000, large=True),
    _biased("bias_add", "gpt2_124m_residual", 65536, 768, large=True),
    _biased("bias_add", "gpt2_124m_mlp", 32768, 3072, large=True),
    _biased("bias_add", "many_odd_rows", 5003, 1000, large=True),
    *(
        case
        for op in ("bias_gelu", "bias_add")
        for case in (
            _biased(op, "gpt2_row", 2, 3, 768),
            _biased(op, "odd_width", 45, 77),
            _biased(op, "odd_rows", 45, 264, std=20.0),
            _biased(op, "one_column", 6, 1),
            _biased(op, "one_row", 40),
            _biased(op, "no_rows", 0, 128),
            _biased(op, "no_columns", 3, 0),
        )
    ),
    _swiglu("llama3_8b", 16384, 14336, large=True),
    _swiglu("odd_size_large", 33554467, large=True),
    _swiglu("llama3_row", 2, 3, 512),
    _swiglu("odd_size", 3, 37),
    _swiglu("saturated", 500, std=50.0),
    _swiglu("scalar"),
    _swiglu("no_elements", 0, 8),
    _packed("llama3_8b", 16384, 28672, large=True),
    _packed("odd_width_large", 5003, 2006, large=True),
    _packed("llama3_row", 2, 3, 1024),
    _packed("odd_width", 3, 74),
    _packed("half_of_four", 5, 40),  # the second half does not begin at a multiple of 16 bytes
    _packed("one_column", 4, 2),
    _packed("one_row", 80),
    _packed("no_rows", 0, 16),
    _packed("no_columns", 3, 0),
    _add("gpt2_124m", 65536, 768, large=True),
    _add("llama3_8b", 16384, 14336, large=True),
    _add("gpt2_row", 2, 3, 768),
    _add("odd_size", 3, 37),
    _add("scalar"),
    _add("no_elements", 0, 8),
)
