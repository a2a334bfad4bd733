"""Documents in rows of tokens: segment ids, positions and ignored labels, from data to training."""

from typing import Any

import numpy as np
import optax
import pytest

from jaxllm import data, training

END, T = 0, 12


def by_hand(row):
    """The segment ids and positions of a row, token by token."""
    segment_ids, positions, segment, position = [], [], 0, 0
    for token in row:
        segment_ids.append(segment)
        positions.append(position)
        position += 1
        if token == END:
            segment, position = segment + 1, 0
    return segment_ids, positions


@pytest.fixture
def dataset():
    """Documents of 0 to 20 tokens, so that some are empty and some longer than a row."""
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(1, 50, n), END] for n in rng.integers(0, 21, 60)]
    return data.Dataset((np.concatenate(documents).astype(np.uint16),))


def test_documents_of_a_row_are_those_found_token_by_token():
    rows = [
        [5, 6, END, 7, END, END, 8, 9],  # an empty document
        [1, 2, 3, 4, 5, 6, 7, 8],  # no end
        [END, 1, 2, 3, 4, 5, 6, END],  # at both ends of the row
        [END] * 8,
    ]
    segment_ids, positions = data.find_documents(np.array(rows), END)
    assert segment_ids.dtype == positions.dtype == np.int32
    for row, *found in zip(rows, segment_ids.tolist(), positions.tolist(), strict=True):
        assert tuple(found) == by_hand(row), row
    assert segment_ids[0].tolist() == [0, 0, 0, 1, 1, 2, 3, 3]
    assert positions[0].tolist() == [0, 1, 2, 0, 1, 0, 0, 1]


def test_documents_of_many_rows_have_the_shape_of_the_tokens():
    tokens = np.random.default_rng(1).integers(0, 4, (3, 5, T))
    segment_ids, positions = data.find_documents(tokens, END)
    assert segment_ids.shape == positions.shape == tokens.shape
    for index in np.ndindex(3, 5):
        found = segment_ids[index].tolist(), positions[index].tolist()
        assert found == by_hand(tokens[index])
    empty = data.find_documents(tokens[..., :0], END)
    assert [x.shape for x in empty] == [(3, 5, 0)] * 2


@pytest.mark.parametrize("order", ["shuffled", "llmc"])
def test_batches_have_the_documents_of_their_rows(dataset, order):
    def read(**options):
        if order == "llmc":
            return data.batch_in_order(dataset, 6, T, index=1, **options)
        return data.batch(dataset, 6, T, seed=0, step=1, **options)

    tokens, labels, segment_ids, positions = read(end_of_text=END)
    assert all(map(np.array_equal, (tokens, labels), read()))
    assert (tokens[:, -1] != END).any()  # a document that goes on in another row
    for row, *found in zip(tokens, segment_ids.tolist(), positions.tolist(), strict=True):
        assert tuple(found) == by_hand(row)
    of_rows = read(end_of_text=END, rows=range(2, 5))
    whole = (tokens, labels, segment_ids, positions)
    assert all(np.array_equal(part, x[2:5]) for part, x in zip(of_rows, whole, strict=True))

    same, kept, *documents = read(end_of_text=END, ignore_next_document=True)
    assert all(map(np.array_equal, (same, *documents), (tokens, segment_ids, positions)))
    assert np.array_equal(kept, np.where(tokens == END, -1, labels))
    assert kept.dtype == labels.dtype


def test_labels_of_the_next_document_get_the_ignored_index():
    tokens, labels = np.array([[4, END, END, 5]]), np.array([[END, END, 5, 6]])
    found = data.ignore_next_document(tokens, labels, END, ignore_index=99)
    assert found.tolist() == [[END, 99, 99, 6]]
    assert labels.tolist() == [[END, END, 5, 6]]
    for dtype in ("uint8", "uint16", "uint32"):
        found = data.ignore_next_document(tokens, labels.astype(dtype), END)
        assert found.tolist() == [[END, -1, -1, 6]] and found.dtype == "int32"


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"end_of_text": 0.5}, TypeError, r"end_of_text is 0\.5; it must be an integer"),
        ({"ignore_index": -1.5}, TypeError, r"ignore_index is -1\.5; it must be an integer"),
        ({"ignore_index": -(2**40)}, ValueError, "ignore_index is .*; it must be an int32"),
        ({"labels": np.ones((1, 2), "int8"), "ignore_index": -200}, ValueError, "labels are int8"),
        ({"labels": np.ones(2, int)}, ValueError, r"labels has shape \(2,\).* \(1, 2\)"),
        ({"labels": np.full((1, 2), 2**31, np.uint32)}, ValueError, "labels has 2147483648"),
    ],
    ids=str,
)
def test_labels_that_would_change_are_rejected(wrong, error, message):
    right = {"tokens": np.ones((1, 2), int), "labels": np.ones((1, 2), int), "end_of_text": END}
    with pytest.raises(error, match=message):
        data.ignore_next_document(**{**right, **wrong})


def test_document_arguments_that_do_not_fit_are_rejected(dataset):
    with pytest.raises(ValueError, match="end_of_text is -1; it must be at least 0"):
        data.find_documents(np.zeros((1, 3), int), -1)
    misfits: Any = ([[1, END]], "type list"), (np.ones((1, 2)), "dtype float64")
    for tokens, found in misfits:
        with pytest.raises(TypeError, match=f"tokens has {found}; it must be an integer array"):
            data.find_documents(tokens, END)
        with pytest.raises(TypeError, match=f"tokens has {found}; it must be an integer array"):
            data.ignore_next_document(tokens, tokens, END)
    with pytest.raises(ValueError, match=r"tokens has shape \(\); it must have one axis or more"):
        data.find_documents(np.array(1), END)
    with pytest.raises(ValueError, match="ignore_next_document is True; it needs end_of_text"):
        data.batch(dataset, 1, T, seed=0, step=0, ignore_next_document=True)


# Training


def loss_of(params, tokens, labels, segment_ids, positions):
    """A mean over the labels that count, to which each array contributes."""
    terms = params["a"] * tokens + params["b"] ** 2 * (segment_ids + 3 * positions)
    counted = labels >= 0
    return (terms * counted).sum() / counted.sum()


def params_of():
    return {"a": np.float32(0.5), "b": np.float32(0.25)}


def test_a_step_passes_documents_to_the_loss_of_each_microbatch(dataset):
    documents = {"end_of_text": END, "ignore_next_document": True}
    batch = data.batch(dataset, 6, T, seed=0, step=0, **documents)
    step = training.make_train_step(loss_of, optax.sgd(1e-3), compute_dtype="float32")
    found = []
    for accumulate in (1, 3):
        state = training.init_state(params_of(), optax.sgd(1e-3))
        state, metrics = step(state, *(x.reshape(accumulate, -1, T) for x in batch))
        found.append([*state.params.values(), metrics["loss"], metrics["grad_norm"]])
    np.testing.assert_allclose(found[0][2], loss_of(params_of(), *batch), rtol=1e-5)
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_mean_loss_evaluates_documents(dataset):
    evaluate = training.make_eval_step(loss_of, compute_dtype="float32")
    documents = {"end_of_text": END, "ignore_next_document": True}
    sizes = {"batch_size": 4, "seq_len": T}
    found = training.mean_loss(evaluate, params_of(), dataset, **sizes, batches=3, **documents)
    batches = [data.batch(dataset, 4, T, seed=0, step=i, **documents) for i in range(3)]
    whole = map(np.concatenate, zip(*batches, strict=True))
    assert found == pytest.approx(float(loss_of(params_of(), *whole)), rel=1e-5)


def test_explain_halt_passes_documents_to_the_loss():
    def loss(params, tokens, labels, segment_ids):
        return params["a"] / (1 - segment_ids.max()) + 0 * (tokens + labels).sum()

    tokens = np.zeros((2, 1, 3), np.int32)
    segment_ids = np.array([[[0, 0, 0]], [[0, 1, 1]]])
    text = training.explain_halt(loss, params_of(), tokens, tokens, segment_ids)
    assert "microbatch 1: loss inf" in text and "microbatch 0" not in text
