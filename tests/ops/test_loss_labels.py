"""Labels: valid ones, ignored ones, and those that make a row NaN."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models import gpt2, llama3
from jaxllm.ops import cross_entropy, linear_cross_entropy
from jaxllm.ops.loss import reference
from jaxllm.testing import error

ROWS, WIDTH, VOCAB, COLUMNS = 9, 6, 7, 8  # the last column is padding
LOGITS = jax.random.normal(jax.random.key(0), (ROWS, COLUMNS))
HIDDEN = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
WEIGHT = jax.random.normal(jax.random.key(2), (WIDTH, COLUMNS))
KNOWN: Any = np.array([0, 3, 6, 2, 2, 5, 1, 4, 6])
SOME = np.array([1, 4, 8])  # rows whose labels a test replaces
REST = np.setdiff1d(np.arange(ROWS), SOME)

BACKENDS = ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIONS = [{}, {"label_smoothing": 0.1, "z_loss": 0.01}]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_option = pytest.mark.parametrize("options", OPTIONS, ids=["plain", "smoothed"])


def with_labels(*some, dtype: Any = np.int32) -> Any:
    labels = KNOWN.astype(dtype)
    labels[SOME] = some
    return labels


def of_logits(labels, logits=LOGITS, **options):
    """The loss, and its gradient with respect to the logits."""
    options = {"vocab_size": VOCAB, **options}
    return jax.value_and_grad(lambda z: cross_entropy(z, labels, **options))(logits)


def of_hidden(labels, hidden=HIDDEN, **options):
    """The loss, and its gradients with respect to hidden states and weight."""
    options = {"vocab_size": VOCAB, **options}
    loss = functools.partial(linear_cross_entropy, **options)
    return jax.value_and_grad(loss, argnums=(0, 1))(hidden, WEIGHT, labels)


def each_row(labels, **options):
    return cross_entropy(LOGITS, labels, vocab_size=VOCAB, reduction="none", **options)


@each_backend
@each_option
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("some", [(-1, -1, -1), (-100, -100, -100), (-1, -100, -(2**31))])
@pytest.mark.covering(("backend", "reduction"), ("some",), ("options",))
def test_every_negative_label_is_ignored(some, reduction, options, backend):
    options = options | {"reduction": reduction, "backend": backend}
    labels = with_labels(*some)
    loss, dlogits = of_logits(jnp.array(labels), **options)
    expected, of_rest = of_logits(jnp.array(labels[REST]), LOGITS[REST], **options)
    assert error(loss, expected) < 1e-6
    assert error(dlogits[REST], of_rest) < 1e-6
    assert not dlogits[SOME].any()
    assert error(cross_entropy(LOGITS, labels, vocab_size=VOCAB, **options), expected) < 1e-6


@each_backend
@pytest.mark.parametrize("chunk_rows", [2, 9])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_lm_head_ignores_every_negative_label(reduction, chunk_rows, backend):
    options = {"reduction": reduction, "backend": backend, "chunk_rows": chunk_rows}
    labels = with_labels(-1, -100, -7)
    loss, (dhidden, dweight) = of_hidden(jnp.array(labels), **options)
    expected, (of_rest, of_weight) = of_hidden(jnp.array(labels[REST]), HIDDEN[REST], **options)
    assert error(loss, expected) < 1e-6
    assert error(dhidden[REST], of_rest) < 1e-5
    assert error(dweight, of_weight) < 1e-5
    assert not dhidden[SOME].any()
    alone = linear_cross_entropy(HIDDEN, WEIGHT, labels, vocab_size=VOCAB, **options)
    assert error(alone, expected) < 1e-6


@each_backend
@pytest.mark.parametrize("ignore_index", [-100, -1, 3, VOCAB, VOCAB + 5])
def test_explicit_ignore_index_is_the_only_ignored_label(ignore_index, backend):
    labels = np.where(ignore_index == KNOWN, 0, KNOWN)
    labels[SOME] = [ignore_index, -5, ignore_index]
    options = {"ignore_index": ignore_index, "backend": backend}
    losses = each_row(jnp.array(labels), **options)
    assert not losses[SOME[::2]].any()
    assert np.flatnonzero(np.isnan(losses)).tolist() == [SOME[1]]
    labels[SOME[1]] = 0
    loss, dlogits = of_logits(jnp.array(labels), **options)
    assert not dlogits[SOME[::2]].any()
    others = np.setdiff1d(np.arange(ROWS), SOME[::2])
    expected, of_others = of_logits(jnp.array(labels[others]), LOGITS[others], backend=backend)
    assert error(loss, expected) < 1e-6
    assert error(dlogits[others], of_others) < 1e-6


@each_backend
@each_option
@pytest.mark.parametrize("label", [VOCAB, VOCAB + 5, 2**31 - 1])
def test_label_outside_the_vocabulary_makes_only_its_row_nan(label, options, backend):
    options = options | {"backend": backend}
    labels = jnp.array(with_labels(label, label, -1))
    losses = each_row(labels, **options)
    assert np.flatnonzero(np.isnan(losses)).tolist() == SOME[:2].tolist()
    loss, dlogits = of_logits(labels, reduction="sum", **options)
    assert np.isnan(loss)
    assert np.isnan(dlogits[SOME[:2], :VOCAB]).all()
    assert not dlogits[:, VOCAB:].any() and not dlogits[SOME[2]].any()
    _, of_rest = of_logits(labels[REST], LOGITS[REST], reduction="sum", **options)
    np.testing.assert_array_equal(dlogits[REST], of_rest)
    # The mean counts rows with invalid labels too.
    _, of_mean = of_logits(labels, **options)
    assert error(of_mean[REST], dlogits[REST] / (ROWS - 1)) < 1e-6


@each_backend
@pytest.mark.parametrize("chunk_rows", [2, 9])
@pytest.mark.parametrize("label", [VOCAB, VOCAB + 5])
def test_lm_head_row_of_a_label_outside_the_vocabulary_is_nan(label, chunk_rows, backend):
    options = {"chunk_rows": chunk_rows, "backend": backend}
    labels = jnp.array(with_labels(label, -1, -1))
    assert np.isnan(linear_cross_entropy(HIDDEN, WEIGHT, labels, vocab_size=VOCAB, **options))
    loss, (dhidden, dweight) = of_hidden(labels, reduction="sum", **options)
    assert np.isnan(loss)
    assert np.isnan(dhidden[SOME[0]]).all() and not dhidden[SOME[1:]].any()
    assert np.isnan(dweight[:, :VOCAB]).all()
    _, (of_rest, _) = of_hidden(labels[REST], HIDDEN[REST], reduction="sum", **options)
    assert error(dhidden[REST], of_rest) < 1e-6


def test_reference_has_the_same_gradient():
    labels = jnp.array(with_labels(VOCAB, -100, -1))
    dlogits = jax.grad(reference.cross_entropy)(LOGITS, labels, vocab_size=VOCAB)
    _, expected = of_logits(labels, backend="xla")
    assert np.isnan(dlogits[SOME[0], :VOCAB]).all()
    assert not dlogits[SOME[1:]].any()
    assert error(dlogits[REST], expected[REST]) < 1e-6


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32"])
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_labels_may_have_any_integer_dtype(array, dtype):
    ignored = 0 if dtype.startswith("u") else -100
    labels = with_labels(ignored, ignored, ignored, dtype=dtype)
    expected = each_row(jnp.array(labels, jnp.int32))
    np.testing.assert_array_equal(each_row(array(labels)), expected)
    # The largest value is outside the vocabulary, even if it wraps around as an int32.
    labels[SOME] = np.iinfo(dtype).max
    assert np.flatnonzero(np.isnan(each_row(array(labels)))).tolist() == SOME.tolist()


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_labels_may_have_4_bits(dtype):
    labels = jnp.asarray(KNOWN).astype(dtype)
    np.testing.assert_array_equal(each_row(labels), each_row(jnp.asarray(KNOWN, jnp.int32)))
    assert np.isnan(each_row(jnp.full(ROWS, 7, dtype))).all()


@pytest.mark.parametrize(("dtype", "label"), [("int64", 2**32 + 3), ("uint64", 2**64 - 1)])
@pytest.mark.parametrize("x64", [False, True])
def test_64_bit_labels_do_not_wrap_around(x64, dtype, label):
    labels = with_labels(label, label, 2, dtype=dtype)
    with jax.enable_x64(x64):
        for given in (labels, jnp.asarray(labels)) if x64 else (labels,):
            losses = each_row(given)
            assert np.flatnonzero(np.isnan(losses)).tolist() == SOME[:2].tolist()
            _, dlogits = of_logits(given, reduction="sum")
            assert np.isnan(dlogits[SOME[:2], :VOCAB]).all()
            assert np.isfinite(dlogits[REST]).all()


def test_negative_64_bit_labels_are_ignored():
    labels = with_labels(-(2**32) + 3, -(2**63), -100, dtype=np.int64)
    with jax.enable_x64(True):
        for given in (labels, jnp.asarray(labels)):
            assert not each_row(given)[SOME].any()


@pytest.mark.parametrize("ignore_index", [-(2**31), 2**31 - 1, 2**40])
def test_reserved_ignore_index_is_rejected(ignore_index):
    message = f"ignore_index is {ignore_index}; it must be from -2147483647 to 2147483646"
    with pytest.raises(ValueError, match=message):
        cross_entropy(LOGITS, KNOWN, ignore_index=ignore_index)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(HIDDEN, WEIGHT, KNOWN, ignore_index=ignore_index)


# Under jax.debug_nans


def test_debug_nans_names_the_invalid_label():
    message = r"labels\[4\] is 12; it must be from 0 to 6, or be ignored \(2 of 9 labels are neith"
    labels = jnp.array(with_labels(-1, 12, 7))
    with jax.debug_nans(True):
        for run in (each_row, jax.jit(each_row), of_logits, of_hidden, jax.jit(of_hidden)):
            with pytest.raises(ValueError, match=message):
                run(labels)
        # The message has the index and the value that were passed.
        square: Any = np.full((3, 3), 2**32 + 3)
        with pytest.raises(ValueError, match=r"labels\[0, 0\] is 4294967299; .* \(9 of 9"):
            cross_entropy(LOGITS.reshape(3, 3, COLUMNS), square)
        with pytest.raises(ValueError, match=r"labels\[4\] is -5; it must be from 0 to 6"):
            each_row(with_labels(-100, -5, -100), ignore_index=-100)


def test_debug_nans_accepts_valid_labels():
    labels = jnp.array(with_labels(-1, -100, 6))
    expected = of_logits(labels), of_hidden(labels)
    with jax.debug_nans(True):
        for run in (lambda f: f, jax.jit):
            actual = run(of_logits)(labels), run(of_hidden)(labels)
            assert error(actual[0][0], expected[0][0]) < 1e-6
            assert error(actual[1][0], expected[1][0]) < 1e-6


def test_debug_nans_finds_an_invalid_label_inside_a_loop():
    labels = jnp.array(with_labels(-1, 12, 7))
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        jax.block_until_ready(jax.lax.map(lambda _: of_logits(labels), jnp.arange(2)))


# The models


def gpt2_model():
    config = gpt2.GPT2Config(vocab_size=61, max_seq_len=16, layers=1, heads=2, width=16)
    return gpt2, config


def llama3_model():
    config = llama3.Llama3Config(
        vocab_size=61, max_seq_len=16, layers=1, heads=2, kv_heads=1, width=16, mlp_width=16
    )
    return llama3, config


@pytest.mark.parametrize("make", [gpt2_model, llama3_model])
def test_model_loss_handles_ignored_and_invalid_labels(make):
    module, config = make()
    params = module.init(jax.random.key(0), config)
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, config.vocab_size)
    labels = jax.random.randint(jax.random.key(2), (2, 8), 0, config.vocab_size)
    ignored = jnp.arange(16).reshape(2, 8) % 3 == 0
    run = jax.jit(
        jax.value_and_grad(
            lambda p, y, index: module.loss(p, tokens, y, config, ignore_index=index)
        ),
        static_argnums=2,
    )

    losses = cross_entropy(
        module.forward(params, tokens, config), labels, vocab_size=config.vocab_size,
        reduction="none",
    )  # fmt: skip
    expected = losses[~ignored].mean()
    _, gradients = run(params, jnp.where(ignored, -1, labels), None)
    for label, index in ((-100, None), (-100, -100)):
        loss, found = run(params, jnp.where(ignored, label, labels), index)
        assert error(loss, expected) < 1e-6
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_array_equal(a, b)
    for label, index in ((config.vocab_size, None), (1000, None), (-1, -100)):
        loss, found = run(params, labels.at[0, 2].set(label), index)
        assert np.isnan(loss)
        assert np.isnan(found["wte"]).any()
