"""Rotary cases: small odd shapes for tests, model shapes for GPU tests and benchmarks."""

from __future__ import annotations

import math

from jaxllm.testing import Case, Normal


def _case(
    name: str,
    rows: tuple[int, ...],
    heads: tuple[int, int],
    width: int,
    *,
    pairs: int | None = None,
    table_per_sequence: bool = False,
    interleaved: bool = False,
    large: bool = False,
) -> Case:
    """A call with ``rows`` (*B, T) and ``heads`` (N, K); ``pairs`` None rotates every column.

    The tables are random: the op is linear in its input for any tables.
    """
    q, k = ((*rows, count, width) for count in heads)
    table_rows = rows if table_per_sequence else rows[-1:]
    table = Normal((*table_rows, pairs or width // 2), dtype="float32", constant=True)
    # Forward and backward: queries and keys in and out.
    moved = 2 * (math.prod(q) + math.prod(k))
    return Case(
        "rope",
        name,
        {"q": Normal(q), "k": Normal(k), "cos": table, "sin": table},
        {"interleaved": interleaved},
        forward_elements=moved,
        backward_elements=moved,
        large=large,
    )


_LLAMA3_8B = ((4, 4096), (32, 8), 128)

CASES = (
    _case("llama3_8b", *_LLAMA3_8B, large=True),
    _case("llama3_8b_interleaved", *_LLAMA3_8B, interleaved=True, large=True),
    _case("quarter_of_a_head", (3, 1021), (71, 1), 64, pairs=8, large=True),
    _case("two_sequences", (2, 5), (4, 2), 32),
    _case("two_sequences_interleaved", (2, 5), (4, 2), 32, interleaved=True),
    _case("position_ids", (2, 3), (3, 1), 16, table_per_sequence=True),
    _case("odd_pairs", (2, 4), (3, 5), 6),
    _case("odd_pairs_interleaved", (2, 4), (3, 5), 6, interleaved=True),
    _case("unrotated_columns", (2, 4), (2, 1), 32, pairs=8),
    _case("unrotated_columns_interleaved", (2, 4), (2, 1), 32, pairs=8, interleaved=True),
    _case("odd_width", (2, 4), (2, 1), 7, pairs=2),
    _case("one_pair", (3,), (1, 1), 2),
    _case("no_rows", (0, 4), (2, 1), 8),
)
