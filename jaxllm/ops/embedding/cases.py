"""Embedding cases: small odd shapes for tests, model shapes for GPU tests and benchmarks."""

from __future__ import annotations

import math

import numpy as np

from jaxllm.testing import Case, Integers, Normal


def _case(
    name: str,
    *tokens: int,
    vocab: int,
    width: int,
    positions: int | None = None,
    overshoot: int = 0,
    skew: int = 1,
    large: bool = False,
) -> Case:
    inputs: dict[str, Normal | Integers] = {
        "tokens": Integers(tokens, low=-overshoot, high=vocab + overshoot, skew=skew),
        "token_table": Normal((vocab, width)),
    }
    if positions is not None:
        inputs["position_table"] = Normal((positions, width))
    size = math.prod(tokens) * width
    tables = (vocab + (positions or 0)) * width
    rows_read = _distinct(math.prod(tokens), vocab, skew) + (tokens[-1] if positions else 0)
    # Forward: each distinct row of a table in, one row per token out. Backward: dout in, the
    # gradients of the tables out.
    return Case(
        "embed",
        name,
        inputs,
        forward_elements=size + rows_read * width,
        backward_elements=size + tables,
        large=large,
    )


def _distinct(tokens: int, vocab: int, skew: int) -> int:
    """The expected number of distinct rows that this many tokens read."""
    share = np.diff(np.linspace(0, 1, vocab + 1) ** (1 / skew))  # of the tokens, per row
    return round(float(np.sum(1 - (1 - share) ** tokens)))


CASES = (
    _case("gpt2_124m", 64, 1024, vocab=50304, width=768, positions=1024, large=True),
    _case("gpt2_124m_text", 64, 1024, vocab=50304, width=768, positions=1024, skew=4, large=True),
    _case("gpt2_1558m", 16, 1024, vocab=50304, width=1600, positions=1024, large=True),
    _case("llama3_8b", 2, 8192, vocab=128256, width=4096, large=True),
    _case("one_hot_token", 64, 1024, vocab=1, width=768, positions=1024, large=True),
    _case("gpt2_row", 2, 5, vocab=37, width=768, positions=5),
    _case("unread_positions", 3, 7, vocab=11, width=40, positions=12),
    _case("no_positions", 3, 7, vocab=11, width=40),
    _case("odd_width", 2, 9, vocab=5, width=77, positions=9),
    _case("one_column", 2, 3, vocab=4, width=1, positions=3),
    _case("one_axis", 13, vocab=6, width=24, positions=13),
    _case("three_axes", 2, 3, 4, vocab=6, width=24, positions=4),
    _case("beyond_the_vocabulary", 4, 8, vocab=6, width=16, positions=8, overshoot=3),
    _case("no_tokens", 0, 8, vocab=6, width=16, positions=8),
    _case("no_positions_read", 2, 0, vocab=6, width=16, positions=8),
)
