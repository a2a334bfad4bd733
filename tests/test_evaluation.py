"""llm.c's eval files, packed by hand, and the accuracy of a model with known answers."""

import dataclasses
import struct
from typing import Any, cast

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxllm.models import gpt2
from jaxllm.training import evaluation, parallel

CONFIG = gpt2.GPT2Config(vocab_size=40, max_seq_len=24, layers=1, heads=2, width=16)
QUESTIONS = [
    ([1, 2, 3], [[4], [5, 6], [7, 8, 9], [1]], 2),
    ([9], [[9, 9], [8], [7], [30, 31, 32, 33]], 0),
    ([5, 5], [[6, 7], [6, 8], [6, 9], [6, 10]], 3),
]


def header(*words):
    return struct.pack("<256i", *words, *[0] * (256 - len(words)))


def example(index, context, completions, label):
    words = [index, label, len(completions), len(context), *context]
    for completion in completions:
        words += [len(completion), *completion]
    words = [65535, 2 * (len(words) + 2), *words]
    return struct.pack(f"<{len(words)}H", *words)


def eval_bytes(questions=QUESTIONS):
    examples = [example(i, *question) for i, question in enumerate(questions)]
    return header(20240522, 1, len(examples), max(map(len, examples))) + b"".join(examples)


@pytest.fixture
def path(tmp_path):
    (tmp_path / "eval.bin").write_bytes(eval_bytes())
    return tmp_path / "eval.bin"


def test_read_questions_reads_all_examples(path):
    questions = evaluation.read_questions(path)
    found = [(q.context.tolist(), [c.tolist() for c in q.completions], q.label) for q in questions]
    assert found == QUESTIONS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((0, "<i", 20240520), "magic number 20240520; an eval file has 20240522"),
        ((4, "<i", 2), "version 2; .* has version 1"),
        ((8, "<i", 2), "words after the last of 2 examples; expected none"),
        ((8, "<i", 4), "example 3, .*: the file ends after 0 words"),
        ((12, "<i", 8), "is 40 bytes long; the header's longest is 8"),
        ((1024, "<H", 7), "example 0, at byte 1024: begins with 7; it must begin with 65535"),
        ((1026, "<H", 36), "has 40 bytes in its parts; its header has 36"),
        ((1028, "<H", 1), "has the index 1"),
        ((1030, "<H", 4), "the label is 4; there are 4 completions"),
        ((1034, "<H", 900), "example 0.* bytes in its parts"),
    ],
)
def test_invalid_files_are_rejected(path, change, message):
    offset, form, value = change
    raw = bytearray(path.read_bytes())
    struct.pack_into(form, raw, offset, value)
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=message) as caught:
        evaluation.read_questions(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("cut", [1, 2, 8])
def test_truncated_files_are_rejected(path, cut):
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=r"bytes (long|in its parts)"):
        evaluation.read_questions(path)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: 8 * x, gpt2.init(jax.random.key(1), CONFIG))


@pytest.fixture(scope="module")
def answers(params):
    """The completions with the lowest mean loss, computed one token at a time."""
    next_scores = jax.jit(lambda tokens: gpt2.forward(params, tokens, CONFIG)[0])

    def mean_loss(context, completion):
        row = np.zeros((1, CONFIG.max_seq_len), np.int32)
        row[0, : len(context) + len(completion)] = [*context, *completion]
        scores = next_scores(row)[len(context) - 1 :, : CONFIG.vocab_size]
        return np.mean([-jax.nn.log_softmax(s)[t] for s, t in zip(scores, completion)])  # noqa: B905

    losses = [[mean_loss(q[0], c) for c in q[1]] for q in QUESTIONS]
    assert all(min(np.diff(sorted(of_one))) > 1e-4 for of_one in losses)
    return [int(np.argmin(of_one)) for of_one in losses]


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_answer_is_the_completion_with_the_lowest_mean_loss(path, params, answers, batch_size):
    questions = evaluation.read_questions(path)

    def score(labels):
        labelled = [q._replace(label=x) for q, x in zip(questions, labels, strict=True)]
        return evaluation.accuracy(
            gpt2.forward, params, labelled, config=CONFIG, batch_size=batch_size
        )

    assert score(answers) == 1
    assert score([answers[0], *((a + 1) % 4 for a in answers[1:])]) == pytest.approx(1 / 3)
    assert score([(a + 1) % 4 for a in answers]) == 0


def test_nan_losses_answer_no_question(path, params):
    questions = [q._replace(label=0) for q in evaluation.read_questions(path)]
    broken = jax.tree.map(lambda x: x * np.nan, params)
    options = {"config": CONFIG, "batch_size": 5}
    assert evaluation.accuracy(gpt2.forward, broken, questions, **options) == 0


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"label": 2}, ValueError, r"questions\[1\] has the label 2 and 2 completions"),
        ({"label": -1}, ValueError, r"questions\[1\] has the label -1 and 2 completions"),
        ({"completions": ()}, ValueError, r"questions\[1\] has the label 0 and 0 completions"),
        ({"context": np.array([-1])}, ValueError, "questions has token -1; it must be at least 0"),
        ({"context": np.array([[1]])}, ValueError, r"tokens of shape \(1, 1\); they must have one"),
        ({"context": np.array([0.5])}, TypeError, "questions has tokens of dtype float64"),
    ],
)
def test_questions_without_an_answer_are_rejected(changed, error, message):
    question = evaluation.Question(np.array([1]), (np.array([2]), np.array([3])), 0)
    with pytest.raises(error, match=message):
        evaluation.check_questions([question, question._replace(**changed)], CONFIG)


@pytest.mark.parametrize(
    ("batch_size", "error", "message"),
    [
        (0, ValueError, "batch_size is 0; it must be at least 1"),
        (-1, ValueError, "batch_size is -1; it must be at least 1"),
        (2.0, TypeError, r"batch_size is 2\.0; it must be an integer"),
    ],
)
def test_batch_sizes_that_are_no_counts_are_rejected(batch_size, error, message):
    question = evaluation.Question(np.array([1]), (np.array([2]), np.array([3])), 0)
    with pytest.raises(error, match=message):
        evaluation.accuracy(gpt2.forward, {}, [question], config=CONFIG, batch_size=batch_size)


def sharding_of(**sizes):
    sizes = {axis: sizes.get(axis, 1) for axis in parallel.AXES}
    mesh = AbstractMesh(tuple(sizes.values()), parallel.AXES)
    return parallel.batch_sharding(cast(Any, mesh), accumulate=False)


def test_batches_that_a_sharding_does_not_divide_are_rejected():
    question = evaluation.Question(np.array([1]), (np.array([2]), np.array([3])), 0)
    options = {"config": CONFIG, "batch_size": 3, "sharding": sharding_of(data=2)}
    with pytest.raises(ValueError, match="the batch size is 3; it must be a multiple of 2"):
        evaluation.accuracy(gpt2.forward, {}, [question], **options)


def test_rows_are_as_long_as_the_devices_along_context_divide():
    long = dataclasses.replace(CONFIG, max_seq_len=1000)
    assert evaluation._padded_length(65, long, None) == 128
    assert evaluation._padded_length(65, long, sharding_of(context=3)) == 192
    assert evaluation._padded_length(998, long, sharding_of(context=3)) == 999
    with pytest.raises(ValueError, match="questions has 1000 tokens in one example; 3 devices"):
        evaluation._padded_length(1000, long, sharding_of(context=3))
    question = evaluation.Question(np.zeros(1000, int), (np.array([1]),), 0)
    evaluation.check_questions([question], long)
    with pytest.raises(ValueError, match="questions has 1000 tokens in one example; 3 devices"):
        evaluation.check_questions([question], long, sharding=sharding_of(context=3))


def test_unscorable_questions_are_rejected():
    question = evaluation.Question(np.arange(20), (np.arange(4), np.arange(6)), 0)
    beyond = evaluation.Question(np.array([1]), (np.array([2]), np.array([40])), 0)
    with pytest.raises(ValueError, match="questions has token 40; the model has vocab_size 40"):
        evaluation.check_questions([beyond], CONFIG)
    with pytest.raises(
        ValueError, match="questions has 25 tokens in one example; the model has max_seq_len 24"
    ):
        evaluation.accuracy(gpt2.forward, {}, [question], config=CONFIG, batch_size=2)
    empty = question._replace(context=np.arange(0))
    with pytest.raises(ValueError, match="empty context"):
        evaluation.accuracy(gpt2.forward, {}, [empty], config=CONFIG, batch_size=2)
    with pytest.raises(ValueError, match="questions is empty"):
        evaluation.accuracy(gpt2.forward, {}, [], config=CONFIG, batch_size=2)
