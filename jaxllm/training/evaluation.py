"""Questions with several answers, such as HellaSwag's, in llm.c's files: reading and scoring them.

The model's answer is the completion whose tokens have the lowest mean loss after the context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm import ops
from jaxllm.convert.llmc_header import HEADER_BYTES, read_header

MAGIC, VERSION = 20240522, 1
START = 65535  # stands before each example


class Question(NamedTuple):
    """One example.

    Attributes:
        context: Tokens.
        completions: The tokens of each answer.
        label: The place of the right one.
    """

    context: np.ndarray
    completions: tuple[np.ndarray, ...]
    label: int


def read_questions(path: str | Path) -> list[Question]:
    """Reads an eval file of llm.c, such as ``hellaswag_val.bin``.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no such file, or an example is not what it announces.
    """
    path = Path(path)
    header = read_header(path, "an eval file", {MAGIC: [VERSION]})
    count, longest = header[2:4].tolist()
    if path.stat().st_size % 2:
        raise ValueError(f"{path}: {path.stat().st_size} bytes long; it must be an even number")
    words = np.fromfile(path, "<u2", offset=HEADER_BYTES)
    questions, start = [], 0
    for index in range(count):
        question, end = _read_question(words, start, index, longest, path)
        questions.append(question)
        start = end
    if start != len(words):
        raise ValueError(
            f"{path}: {len(words) - start} words after the last example; its header announces "
            f"{count} examples and nothing more"
        )
    return questions


def accuracy(
    forward: Callable[..., Float[Array, "B T Vp"]],
    params: Any,
    questions: Sequence[Question],
    *,
    config: Any,
    batch_size: int,
) -> float:
    """The share of the questions that a model answers rightly.

    Args:
        forward: ``forward(params, tokens, config)``, the logits of a causal model, such as
            ``jaxllm.models.gpt2.forward``. Pass the same function each time, or it is recompiled.
        params: The model's parameters, in the dtype to compute in.
        questions: As :func:`read_questions` gives them.
        config: The model's config.
        batch_size: Completions that the model reads at a time.

    Raises:
        ValueError: See :func:`check_questions`.
    """
    check_questions(questions, config)
    rows = _rows(questions)
    longest = _longest(rows)
    # One shape for all batches, and few for the files that there are.
    seq_len = min(-(-longest // 64) * 64, config.max_seq_len)
    means = [
        _mean_losses(params, tokens, labels, forward=forward, config=config)
        for tokens, labels in _batches(rows, batch_size, seq_len)
    ]
    losses = np.concatenate(jax.device_get(means))[: len(rows)]
    ends = np.cumsum([len(q.completions) for q in questions])[:-1]
    right = [
        int(np.argmin(of_one)) == q.label
        for q, of_one in zip(questions, np.split(losses, ends), strict=True)
    ]
    return float(np.mean(right))


def check_questions(questions: Sequence[Question], config: Any) -> None:
    """Refuses questions that a model cannot read.

    Args:
        questions: As :func:`read_questions` gives them.
        config: The model's config.

    Raises:
        ValueError: There are none, or one of them is longer than the model's longest sequence, has
            a token beyond its vocabulary, or an empty context or completion.
    """
    if not questions:
        raise ValueError("questions is empty; it must have at least one")
    rows = _rows(questions)
    if any(not len(part) for row in rows for part in row):
        raise ValueError("questions has an empty context or completion; none may be")
    if (longest := _longest(rows)) > config.max_seq_len:
        raise ValueError(
            f"questions has one of {longest} tokens; the model has max_seq_len {config.max_seq_len}"
        )
    if (largest := max(int(part.max()) for row in rows for part in row)) >= config.vocab_size:
        raise ValueError(
            f"questions has token {largest}; the model has vocab_size {config.vocab_size}"
        )


def _rows(questions: Sequence[Question]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each completion, with the context before it."""
    return [(q.context, completion) for q in questions for completion in q.completions]


def _longest(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
    """The most tokens of a row that the model reads: the last one is a label alone."""
    return max(len(context) + len(completion) - 1 for context, completion in rows)


@functools.partial(jax.jit, static_argnames=("forward", "config"))
def _mean_losses(
    params: Any, tokens: Int[Array, "B T"], labels: Int[Array, "B T"], *, forward, config
) -> Float[Array, " B"]:
    logits = forward(params, tokens, config)
    losses = ops.cross_entropy(logits, labels, vocab_size=config.vocab_size, reduction="none")
    return jnp.sum(losses, axis=-1) / jnp.maximum(jnp.sum(labels >= 0, axis=-1), 1)


def _batches(
    rows: Sequence[tuple[np.ndarray, np.ndarray]], batch_size: int, seq_len: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Tokens and labels, (batch_size, seq_len); labels are -1 but where a completion is."""
    for first in range(0, len(rows), batch_size):
        tokens = np.zeros((batch_size, seq_len), np.int32)
        labels = np.full_like(tokens, -1)
        for i, (context, completion) in enumerate(rows[first : first + batch_size]):
            row = np.concatenate([context, completion]).astype(np.int32)
            tokens[i, : len(row) - 1] = row[:-1]
            labels[i, len(context) - 1 : len(row) - 1] = completion
        yield tokens, labels


def _read_question(
    words: np.ndarray, start: int, index: int, longest: int, path: Path
) -> tuple[Question, int]:
    """The example that begins at a word, and where the next one does."""

    def fault(found: str) -> ValueError:
        return ValueError(f"{path}: example {index}, at byte {HEADER_BYTES + 2 * start}: {found}")

    head = words[start : start + 5].tolist()
    if len(head) < 5:
        raise fault(f"the file ends after {len(head)} words; it must have 5 of header")
    mark, size, number, label, completions = head
    if mark != START:
        raise fault(f"begins with {mark}; it must begin with {START}")
    if number != index:
        raise fault(f"has the index {number}")
    if size % 2 or size > longest:
        raise fault(f"is {size} bytes long; the longest one announced is {longest}")
    if label >= completions:
        raise fault(f"the label is {label}; there are {completions} completions")
    end, place, parts = start + size // 2, start + 5, []
    for _ in range(1 + completions):
        length = int(words[place]) if place < len(words) else 0
        parts.append(words[place + 1 : place + 1 + length])
        place += 1 + length
    if place != end or end > len(words):
        raise fault(
            f"is {2 * (place - start)} bytes long by its parts; it announces {size}, and the file "
            f"has {2 * (len(words) - start)} more"
        )
    return Question(parts[0], tuple(parts[1:]), label), end
