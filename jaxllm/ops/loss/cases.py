"""Loss cases: small odd shapes for tests, model shapes for GPU tests and benchmarks."""

from __future__ import annotations

import math
from typing import Any

from jaxllm.testing import Case, Integers, Normal


def _case(
    name: str,
    *shape: int,
    std: float = 1.0,
    ignored: int = 1,
    large: bool = False,
    timed_only: bool = False,
    **static: int | float | str,
) -> Case:
    vocab = int(static.get("vocab_size", shape[-1]))
    size = math.prod(shape)
    # A few labels are negative, at least -ignored: their rows are ignored.
    # Forward: logits in. With the gradient, in the same pass: logits in, dlogits out.
    return Case(
        "cross_entropy",
        name,
        {
            "logits": Normal(shape, std=std),
            "labels": Integers(shape[:-1], low=-ignored, high=vocab),
        },
        static,
        forward_elements=size,
        gradient_elements=2 * size,
        donated=("logits",),
        large=large,
        timed_only=timed_only,
    )


def _linear_case(
    name: str,
    *shape: int,
    vocab: int,
    ignored: int = 1,
    large: bool = False,
    timed_only: bool = False,
    **static: int | float | str,
) -> Case:
    matrix = (shape[-1], vocab)
    flops = 2 * math.prod(shape) * vocab
    return Case(
        "linear_cross_entropy",
        name,
        {
            "hidden": Normal(shape),
            # Logits of standard deviation 1, as early in training.
            "weight": Normal(
                matrix[::-1] if static.get("transpose_weight") else matrix,
                std=1 / math.sqrt(shape[-1]),
            ),
            "labels": Integers(shape[:-1], low=-ignored, high=int(static.get("vocab_size", vocab))),
        },
        static,
        # Forward: hidden and weight in. With gradients: those of both out as well.
        forward_elements=math.prod(shape) + math.prod(matrix),
        gradient_elements=2 * (math.prod(shape) + math.prod(matrix)),
        forward_flops=flops,
        gradient_flops=3 * flops,
        large=large,
        timed_only=timed_only,
    )


_GPT2_LM_HEAD: dict[str, Any] = {"vocab": 50304, "vocab_size": 50257, "transpose_weight": True}

CASES = (
    # The reference in float32 would take tens of GiB: tests compare fewer rows.
    _case("gpt2_124m", 32768, 50304, vocab_size=50257, large=True, timed_only=True),
    _case("gpt2_124m_fewer_rows", 4096, 50304, vocab_size=50257, large=True),
    _case("llama3_1b", 16384, 128256, large=True, timed_only=True),
    _case("llama3_1b_fewer_rows", 2000, 128256, large=True),
    _case("odd_vocabulary_large", 5003, 50257, label_smoothing=0.1, z_loss=1e-4, large=True),
    _case("padded", 2, 3, 128, vocab_size=101),
    _case("smoothed", 9, 77, label_smoothing=0.1),
    _case("z_loss", 9, 77, z_loss=1e-2),
    _case("all_options", 9, 80, label_smoothing=0.1, z_loss=1e-2, vocab_size=77, reduction="sum"),
    _case("each_row", 2, 5, 33, reduction="none"),
    _case("ignore_column_zero", 17, 5, ignored=0, ignore_index=0),
    _case("large_logits", 7, 65, std=20.0),
    _case("many_ignored_rows", 40, 7, ignored=5),
    _case("long_row", 2, 5003),
    _case("one_column", 6, 1),
    _case("one_row", 40),
    _case("no_rows", 0, 128),
    _linear_case("gpt2_124m", 32768, 768, **_GPT2_LM_HEAD, large=True, timed_only=True),
    _linear_case("gpt2_124m_fewer_rows", 5000, 768, **_GPT2_LM_HEAD, large=True),
    _linear_case("llama3_1b", 16384, 2048, vocab=128256, large=True, timed_only=True),
    _linear_case("llama3_1b_fewer_rows", 3000, 2048, vocab=128256, large=True),
    _linear_case("tied", 2, 9, 16, vocab=128, transpose_weight=True, vocab_size=101, chunk_rows=8),
    _linear_case("chunks_that_do_not_divide", 21, 12, vocab=77, chunk_rows=6),
    _linear_case("one_chunk", 13, 12, vocab=77, label_smoothing=0.1, z_loss=1e-2, reduction="sum"),
    _linear_case("no_rows", 0, 12, vocab=40),
    # Enough tiles for the GEMM that stores exponentials.
    _linear_case("wide", 300, 64, vocab=8512),
    _linear_case("wide_tied", 2, 201, 40, vocab=8512, vocab_size=8500, transpose_weight=True),
)
