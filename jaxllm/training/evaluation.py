"""Multiple-choice evaluation, such as HellaSwag, from llm.c's eval files.

The model's answer is the completion with the lowest mean loss per token, given the context.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm import ops
from jaxllm.data.llmc_header import HEADER_BYTES, read_header
from jaxllm.ops.checks import as_integer
from jaxllm.training import loader, parallel

MAGIC = 20240522
VERSION = 1
START = 65535  # the word before each example


class Question(NamedTuple):
    """One multiple-choice example.

    Attributes:
        context: The tokens before the answer.
        completions: The tokens of each possible answer.
        label: The index of the correct completion.
    """

    context: np.ndarray
    completions: tuple[np.ndarray, ...]
    label: int


def read_questions(path: str | Path) -> list[Question]:
    """Reads an eval file of llm.c, such as ``hellaswag_val.bin``.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not an eval file, or an example contradicts its header.
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
            f"{path}: {len(words) - start} words after the last of {count} examples; expected none"
        )
    return questions


def accuracy(
    forward: Callable[..., Float[Array, "B T Vp"]],
    params: Any,
    questions: Sequence[Question],
    *,
    config: Any,
    batch_size: int,
    sharding: jax.NamedSharding | None = None,
) -> float:
    """The share of questions that a model answers correctly.

    Args:
        forward: ``forward(params, tokens, config) -> logits``, a causal model such as
            ``jaxllm.models.gpt2.forward``. A new function object triggers a recompilation.
        params: The model's parameters, in the compute dtype.
        questions: The questions from :func:`read_questions`.
        config: The model's config.
        batch_size: The number of completions in a batch.
        sharding: The sharding of the batches, of shape (B, T), for sharded parameters. See
            :func:`jaxllm.training.parallel.batch_sharding`.

    Returns:
        The accuracy, between 0 and 1. A question with a NaN loss counts as wrong.

    Raises:
        TypeError: ``batch_size`` is not an integer, or as in :func:`check_questions`.
        ValueError: ``batch_size`` is below 1, the sharding does not divide it, or the model cannot
            read the questions; see :func:`check_questions`.
    """
    batch_size = as_integer("batch_size", batch_size, least=1)
    if sharding is not None:
        loader.check_batch_size(sharding, batch_size, ndim=2)
    questions = list(questions)
    check_questions(questions, config, sharding=sharding)
    rows = _rows(questions)
    seq_len = _padded_length(_longest(rows), config, sharding)
    means = []
    for batch in _batches(rows, batch_size, seq_len):
        tokens, labels = batch if sharding is None else parallel.put(sharding, batch)
        means.append(_mean_losses(params, tokens, labels, forward=forward, config=config))
    losses = np.concatenate(parallel.to_host(means))[: len(rows)]
    ends = np.cumsum([len(q.completions) for q in questions])[:-1]
    right = [
        not np.isnan(of_one).any() and int(np.argmin(of_one)) == q.label
        for q, of_one in zip(questions, np.split(losses, ends), strict=True)
    ]
    return float(np.mean(right))


def check_questions(
    questions: Sequence[Question], config: Any, *, sharding: jax.NamedSharding | None = None
) -> None:
    """Checks that a model can read the questions.

    Args:
        questions: The questions from :func:`read_questions`.
        config: The model's config.
        sharding: As in :func:`accuracy`.

    Raises:
        TypeError: A label or a token is not an integer.
        ValueError: There are no questions, or tokens have not one axis; or a question is longer
            than ``config.max_seq_len``, or than what the devices along the sequence divide of it,
            has a token outside of the vocabulary, has an empty context or completion, or has a
            label that is not the index of a completion.
    """
    if not questions:
        raise ValueError("questions is empty; it must have at least one question")
    for number, question in enumerate(questions):
        label, count = as_integer("label", question.label), len(question.completions)
        if not 0 <= label < count:
            raise ValueError(
                f"questions[{number}] has the label {label} and {count} completions; the label "
                "must be the index of one"
            )
    rows = _rows(questions)
    if wrong := [np.shape(part) for row in rows for part in row if np.ndim(part) != 1]:
        raise ValueError(f"questions has tokens of shape {wrong[0]}; they must have one axis")
    if any(not len(part) for row in rows for part in row):
        raise ValueError("questions has an empty context or completion; each needs a token")
    if (longest := _longest(rows)) > config.max_seq_len:
        raise ValueError(
            f"questions has {longest} tokens in one example; the model has max_seq_len "
            f"{config.max_seq_len}"
        )
    _padded_length(longest, config, sharding)  # raises where the mesh leaves no room
    parts = [np.asarray(part) for row in rows for part in row]
    if others := [part.dtype for part in parts if not np.issubdtype(part.dtype, np.integer)]:
        raise TypeError(f"questions has tokens of dtype {others[0]}; they must be integers")
    if (least := min(int(part.min()) for part in parts)) < 0:
        raise ValueError(f"questions has token {least}; it must be at least 0")
    if (largest := max(int(part.max()) for part in parts)) >= config.vocab_size:
        raise ValueError(
            f"questions has token {largest}; the model has vocab_size {config.vocab_size}"
        )


def _rows(questions: Sequence[Question]) -> list[tuple[np.ndarray, np.ndarray]]:
    """One ``(context, completion)`` pair for each completion."""
    return [(q.context, completion) for q in questions for completion in q.completions]


def _longest(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> int:
    """The longest model input of any row. The last token of a row is only a label."""
    return max(len(context) + len(completion) - 1 for context, completion in rows)


def _padded_length(longest: int, config: Any, sharding: jax.NamedSharding | None) -> int:
    """The length of each batch's rows; rounding to 64 limits the number of shapes across files."""
    context = 1
    if sharding is not None:
        context = loader.count_parts(sharding, loader.axes_of_batch(sharding, 2)[-1])
    unit, most = math.lcm(64, context), config.max_seq_len // context * context
    if longest > most:
        raise ValueError(
            f"questions has {longest} tokens in one example; {context} devices along context "
            f"divide {most} of the model's max_seq_len {config.max_seq_len}"
        )
    return min(-(-longest // unit) * unit, most)


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
    """Tokens and labels, (batch_size, seq_len). Labels outside of the completion are -1."""
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
    """Reads the example at word ``start``; also returns the start of the next example."""

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
        raise fault(f"is {size} bytes long; the header's longest is {longest}")
    if label >= completions:
        raise fault(f"the label is {label}; there are {completions} completions")
    end, position, parts = start + size // 2, start + 5, []
    for _ in range(1 + completions):
        length = int(words[position]) if position < len(words) else 0
        parts.append(words[position + 1 : position + 1 + length])
        position += 1 + length
    if position != end or end > len(words):
        raise fault(
            f"has {2 * (position - start)} bytes in its parts; its header has {size}, and the file "
            f"has {2 * (len(words) - start)} more"
        )
    return Question(parts[0], tuple(parts[1:]), label), end
