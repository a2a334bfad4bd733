"""What the contract leaves open of the losses: labels, padding, stability, and the errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm.ops import cross_entropy
from jaxllm.testing import error

LOGITS = jax.random.normal(jax.random.key(0), (6, 8))
LABELS = jnp.array([0, 3, 7, 2, 2, 5])


def each(logits, labels, **options):
    return cross_entropy(logits, labels, reduction="none", **options)


def gradient(logits, labels, **options):
    return jax.grad(lambda z: cross_entropy(z, labels, **options))(logits)


def test_it_is_minus_the_logarithm_of_the_label_s_probability():
    expected = -jnp.log(jax.nn.softmax(LOGITS))[jnp.arange(6), LABELS]
    assert error(each(LOGITS, LABELS), expected) < 1e-6
    assert error(cross_entropy(LOGITS, LABELS, reduction="sum"), expected.sum()) < 1e-6
    assert error(cross_entropy(LOGITS, LABELS), expected.mean()) < 1e-6


@pytest.mark.parametrize("ignore_index", [-1, 2, -100])
def test_ignored_rows_count_nowhere(ignore_index):
    ignored = np.array([False, True, False, True, False, False])
    labels = jnp.where(ignored, ignore_index, jnp.where(LABELS == 2, 1, LABELS))
    options = {"ignore_index": ignore_index}
    losses = each(LOGITS, labels, **options)
    assert not losses[ignored].any()
    mean = cross_entropy(LOGITS, labels, **options)
    assert error(mean, cross_entropy(LOGITS[~ignored], labels[~ignored])) < 1e-6
    dlogits = gradient(LOGITS, labels, **options)
    assert not dlogits[ignored].any()
    assert error(dlogits[~ignored], gradient(LOGITS[~ignored], labels[~ignored])) < 1e-6


def test_if_all_rows_are_ignored_the_mean_is_zero():
    labels = jnp.full(6, -1)
    assert float(cross_entropy(LOGITS, labels)) == 0
    assert not gradient(LOGITS, labels).any()


def test_label_smoothing_mixes_in_an_even_target():
    target = 0.9 * jax.nn.one_hot(LABELS, 8) + 0.1 / 8
    expected = -(target * jax.nn.log_softmax(LOGITS)).sum(-1)
    assert error(each(LOGITS, LABELS, label_smoothing=0.1), expected) < 1e-6


def test_z_loss_adds_the_squared_logarithm_of_the_sum():
    lse = jax.nn.logsumexp(LOGITS, axis=-1)
    expected = each(LOGITS, LABELS) + 0.3 * lse**2
    assert error(each(LOGITS, LABELS, z_loss=0.3), expected) < 1e-6


@pytest.mark.parametrize("padding", [0.0, 1e4, jnp.inf, jnp.nan])
def test_columns_of_padding_have_no_influence(padding):
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    padded = jnp.concatenate([LOGITS, jnp.full((6, 3), padding)], axis=1)
    losses = each(padded, LABELS, vocab_size=8, **options)
    np.testing.assert_allclose(losses, each(LOGITS, LABELS, **options), rtol=1e-6)
    dlogits = gradient(padded, LABELS, vocab_size=8, **options)
    assert not dlogits[:, 8:].any()
    assert error(dlogits[:, :8], gradient(LOGITS, LABELS, **options)) < 1e-6


def test_labels_outside_the_vocabulary_count_as_the_nearest_column():
    labels = jnp.array([-2, -100, 6, 7, 2**31 - 1, 5])
    clamped = jnp.array([0, 0, 5, 5, 5, 5])
    options = {"vocab_size": 6}
    np.testing.assert_array_equal(each(LOGITS, labels, **options), each(LOGITS, clamped, **options))
    np.testing.assert_array_equal(
        gradient(LOGITS, labels, **options), gradient(LOGITS, clamped, **options)
    )


def test_huge_logits_are_exact_to_the_last_digits():
    logits = jnp.array([[1e4, 1e4 - 1, -1e4], [-1e4, -1e4, -1e4], [1e4, -1e4, 0.0]])
    losses = each(logits, jnp.array([1, 2, 1]))
    expected = [1 + np.log1p(np.exp(-1)), np.log(3), 2e4]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    dlogits = gradient(logits, jnp.array([1, 2, 1]), reduction="sum")
    # The backward pass has lse in float32, 1e4 to within 1e-3.
    np.testing.assert_allclose(dlogits.sum(axis=-1), 0, atol=2e-3)
    np.testing.assert_allclose(dlogits[2], [1, -1, 0], atol=1e-6)


def test_the_loss_is_float32_and_the_gradient_is_of_the_logits_dtype():
    logits = LOGITS.astype(jnp.bfloat16)
    assert cross_entropy(logits, LABELS).dtype == jnp.float32
    assert each(logits, LABELS).dtype == jnp.float32
    assert gradient(logits, LABELS).dtype == jnp.bfloat16


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"labels has shape \(5,\); it must be \(6,\)"):
        cross_entropy(LOGITS, LABELS[:5])
    with pytest.raises(ValueError, match=r"logits has shape \(\)"):
        cross_entropy(jnp.float32(1), jnp.int32(1))
    with pytest.raises(TypeError, match="labels has dtype float32; it must be an integer array"):
        cross_entropy(LOGITS, LABELS.astype(jnp.float32))
    with pytest.raises(TypeError, match="logits has dtype int32"):
        cross_entropy(LOGITS.astype(jnp.int32), LABELS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 9}, "vocab_size is 9; it must be from 1 to 8"),
        ({"vocab_size": 0}, "vocab_size is 0; it must be from 1 to 8"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5; it must be from 0 to 1"),
        ({"reduction": "average"}, "reduction is 'average'; it must be one of mean, sum, none"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(LOGITS, LABELS, **options)


@pytest.mark.parametrize("backend", ["cuda", "pallas"])
def test_kernels_that_are_not_there_are_named(backend):
    with pytest.raises(
        jaxllm.BackendError, match="cross_entropy_forward has no " + backend + " kernel"
    ):
        cross_entropy(LOGITS, LABELS, backend=backend)


def test_auto_passes_over_kernels_that_are_not_there():
    calls = jaxllm.explain(lambda x: cross_entropy(x, LABELS), LOGITS).calls
    assert calls[0].on_gpu == "xla"
    reasons = dict(calls[0].passed_over)
    assert reasons["cuda"].startswith("cross_entropy_forward has no cuda kernel")
    assert reasons["pallas"].startswith("cross_entropy_forward has no pallas kernel")
