"""Losses: ignored labels, padding, extreme logits, chunks and errors."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

import jaxllm.core.ffi
from jaxllm.ops import cross_entropy, linear_cross_entropy
from jaxllm.ops.loss import cuda
from jaxllm.testing import assert_close, error, lower_for_cuda

LOGITS = jax.random.normal(jax.random.key(0), (6, 8))
LABELS = jnp.array([0, 3, 7, 2, 2, 5])

BACKENDS = ["xla", "pallas", pytest.param("cuda", marks=pytest.mark.gpu)]


def each(logits, labels, **options):
    return cross_entropy(logits, labels, reduction="none", **options)


def gradient(logits, labels, **options):
    return jax.grad(lambda z: cross_entropy(z, labels, **options))(logits)


def test_loss_is_the_negative_log_probability_of_the_label():
    expected = -jnp.log(jax.nn.softmax(LOGITS))[jnp.arange(6), LABELS]
    assert error(each(LOGITS, LABELS), expected) < 1e-6
    assert error(cross_entropy(LOGITS, LABELS, reduction="sum"), expected.sum()) < 1e-6
    assert error(cross_entropy(LOGITS, LABELS), expected.mean()) < 1e-6


@pytest.mark.parametrize("ignore_index", [-1, 2, -100])
def test_ignored_rows_have_zero_loss_and_gradient(ignore_index):
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


def test_mean_is_zero_if_all_rows_are_ignored():
    labels = jnp.full(6, -1)
    assert float(cross_entropy(LOGITS, labels)) == 0
    assert not gradient(LOGITS, labels).any()


def test_label_smoothing_mixes_in_a_uniform_target():
    target = 0.9 * jax.nn.one_hot(LABELS, 8) + 0.1 / 8
    expected = -(target * jax.nn.log_softmax(LOGITS)).sum(-1)
    assert error(each(LOGITS, LABELS, label_smoothing=0.1), expected) < 1e-6


def test_z_loss_adds_the_squared_logsumexp():
    lse = jax.nn.logsumexp(LOGITS, axis=-1)
    expected = each(LOGITS, LABELS) + 0.3 * lse**2
    assert error(each(LOGITS, LABELS, z_loss=0.3), expected) < 1e-6


@pytest.mark.parametrize("padding", [0.0, 1e4, jnp.inf, jnp.nan])
def test_padding_columns_do_not_change_loss_or_gradient(padding):
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    padded = jnp.concatenate([LOGITS, jnp.full((6, 3), padding)], axis=1)
    losses = each(padded, LABELS, vocab_size=8, **options)
    np.testing.assert_allclose(losses, each(LOGITS, LABELS, **options), rtol=1e-6)
    dlogits = gradient(padded, LABELS, vocab_size=8, **options)
    assert not dlogits[:, 8:].any()
    assert error(dlogits[:, :8], gradient(LOGITS, LABELS, **options)) < 1e-6


def test_huge_logits_are_exact():
    logits = jnp.array([[1e4, 1e4 - 1, -1e4], [-1e4, -1e4, -1e4], [1e4, -1e4, 0.0]])
    losses = each(logits, jnp.array([1, 2, 1]))
    expected = [1 + np.log1p(np.exp(-1)), np.log(3), 2e4]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    dlogits = gradient(logits, jnp.array([1, 2, 1]), reduction="sum")
    # The reference implementation has lse in float32: 1e4 to within 1e-3.
    np.testing.assert_allclose(dlogits.sum(axis=-1), 0, atol=2e-3)
    np.testing.assert_allclose(dlogits[2], [1, -1, 0], atol=1e-6)


def test_loss_is_float32_and_gradient_has_the_dtype_of_the_logits():
    logits = LOGITS.astype(jnp.bfloat16)
    assert cross_entropy(logits, LABELS).dtype == jnp.float32
    assert each(logits, LABELS).dtype == jnp.float32
    assert gradient(logits, LABELS).dtype == jnp.bfloat16


def test_mismatched_shapes_and_dtypes_are_rejected():
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
        ({"z_loss": float("nan")}, "z_loss is nan; it must be finite"),
        ({"reduction": "average"}, "reduction is 'average'; it must be one of mean, sum, none"),
    ],
)
def test_out_of_range_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        cross_entropy(LOGITS, LABELS, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 7.5}, "vocab_size is 7.5; it must be an integer"),
        ({"label_smoothing": "a"}, "label_smoothing is 'a'; it must be a number"),
    ],
)
def test_options_of_other_types_are_rejected(options, message):
    with pytest.raises(TypeError, match=message):
        cross_entropy(LOGITS, LABELS, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loss_scale_prevents_float16_underflow(dtype, backend):
    # Divided by the number of rows, the gradient of a column is below the smallest normal float16.
    logits = jnp.zeros((64, 16384), dtype)
    labels = jnp.zeros(64, jnp.int32)
    options = {"backend": backend}
    scaled = jax.grad(lambda z: 2.0**14 * cross_entropy(z, labels, **options))(logits)
    np.testing.assert_allclose(scaled[:, 1:], 2.0**14 / 64 / 16384, rtol=1e-2)


def test_gradient_overwrites_the_logits():
    def loss(hidden):
        return cross_entropy(hidden * 2, LABELS, backend="cuda")

    if not jaxllm.core.ffi.is_available():
        pytest.skip(str(jaxllm.core.ffi.unavailable_reason()))
    program = lower_for_cuda(jax.value_and_grad(loss), LOGITS)
    for target in ("forward_with_gradient", "backward"):
        (line,) = [x for x in program.splitlines() if f"@jaxllm_cross_entropy_{target}(" in x]
        assert "output_operand_alias" in line
        assert "operand_index = 0" in line
    # Without differentiation no gradient is written.
    program = lower_for_cuda(loss, LOGITS)
    assert "@jaxllm_cross_entropy_forward(" in program
    assert "gradient" not in program


@pytest.mark.parametrize("factor", [1.0, -3.0])
def test_logits_remain_usable_after_the_loss(factor):
    def loss(logits):
        return factor * cross_entropy(logits, LABELS) + (logits**2).sum()

    expected = factor * gradient(LOGITS, LABELS) + 2 * LOGITS
    assert error(jax.jit(jax.grad(loss))(LOGITS), expected) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [64, 61])
def test_slice_of_logits_is_not_overwritten(backend, width):
    # XLA may pass a slice as a view, and then the gradient has a buffer of its own.
    many = jax.random.normal(jax.random.key(5), (37, width), jnp.bfloat16)
    labels = jnp.arange(24) % width

    @jax.jit
    def run(many):
        part, whole = many[3:27], jnp.stack([many, 2 * many])
        of_part = gradient(part, labels, backend=backend, reduction="sum")
        of_whole = gradient(whole[1, 3:27], labels, backend=backend, reduction="sum")
        return of_part, of_whole, whole

    of_part, of_whole, whole = run(many)
    for actual, logits in ((of_part, many[3:27]), (of_whole, 2 * many[3:27])):
        expected = gradient(logits.astype(jnp.float32), labels, backend="xla", reduction="sum")
        assert error(actual, expected) < 1e-2
    np.testing.assert_array_equal(whole[0], many)


@pytest.mark.gpu
@pytest.mark.xdist_group("beyond 31 bits")
@pytest.mark.parametrize("backend", ["cuda", "pallas"])
def test_more_than_2_to_the_31_elements(backend):
    rows, width = 32768, 65792
    assert rows * width > 2**31
    last = np.array([0, 1, rows // 2, rows - 2, rows - 1])
    labels = jax.random.randint(jax.random.key(1), (rows,), 0, width)

    def make():
        return jax.random.normal(jax.random.key(0), (rows, width), jnp.bfloat16)

    some = make()[last]

    # The logits are computed inside jit, so that their buffer can be overwritten.
    @jax.jit
    def run():
        losses, pull = jax.vjp(lambda z: each(z, labels, backend=backend), make())
        return losses[last], pull(jnp.full(rows, 2.0))[0][last]

    losses, dlogits = run()
    expected, pull = jax.vjp(lambda z: each(z, labels[last], backend="xla"), some.astype("float32"))
    assert error(losses, expected) < 1e-5
    assert error(dlogits, pull(jnp.full(len(last), 2.0))[0]) < 1e-2


# linear_cross_entropy

HIDDEN = jax.random.normal(jax.random.key(2), (5, 4, 8))
LM_HEAD = jax.random.normal(jax.random.key(3), (8, 24))
NEXT = jax.random.randint(jax.random.key(4), (5, 4), -1, 24)


def linear_gradients(**options):
    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, NEXT, **options)

    weight = LM_HEAD.T if options.get("transpose_weight") else LM_HEAD
    return jax.value_and_grad(loss, argnums=(0, 1))(HIDDEN, weight)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk_rows", [1, 7, 8, 20, 1000])
@pytest.mark.covering(("chunk_rows",), ("backend",))
def test_chunk_size_does_not_change_loss_or_gradients(chunk_rows, backend):
    expected = linear_gradients(chunk_rows=20, backend="xla")
    actual = linear_gradients(chunk_rows=chunk_rows, backend=backend)
    assert_close(actual, expected, "float32")


def test_transposed_weight_gives_the_same_loss_and_gradients():
    loss, (dhidden, dweight) = linear_gradients()
    other, (dhidden_too, dtable) = linear_gradients(transpose_weight=True)
    assert error(other, loss) < 1e-6
    assert error(dhidden_too, dhidden) < 1e-6
    assert error(dtable.T, dweight) < 1e-6


def test_only_one_chunk_of_logits_is_materialized():
    jaxpr = str(jax.make_jaxpr(lambda: linear_gradients(chunk_rows=8))())
    assert "8,24]" in jaxpr
    assert "20,24]" not in jaxpr and "5,4,24]" not in jaxpr


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((50304, 768), "bfloat16", "float32"),
        ((128256, 2048), "bfloat16", "bfloat16"),
        ((128256, 2048), "float16", "float32"),
        ((128256, 2048), "float32", "float32"),
    ],
)
def test_float32_accumulator_is_used_where_small_or_needed(shape, dtype, expected):
    rows = 16384
    hidden = jax.ShapeDtypeStruct((rows, shape[1]), dtype)
    weight = jax.ShapeDtypeStruct(shape, dtype)

    def sums(**options):
        program = jax.make_jaxpr(
            jax.grad(
                lambda h, w: linear_cross_entropy(
                    h, w, jnp.zeros(rows, jnp.int32), transpose_weight=True, **options
                ),
                argnums=(0, 1),
            )
        )(hidden, weight)
        (loop,) = [e for e in program.eqns if e.primitive.name == "scan"]
        (carry,) = [v.aval for v in loop.outvars if v.aval.shape == shape]
        return carry.dtype

    assert sums() == jnp.dtype(expected)
    assert sums(accumulate_dtype="float32") == jnp.float32


@pytest.mark.parametrize(
    ("dtype", "chunk_rows", "expected"),
    [
        ("bfloat16", 300, "bfloat16"),
        ("bfloat16", 299, "float32"),
        ("float16", 300, "float32"),
        ("float32", 300, "float32"),
    ],
)
def test_single_chunk_uses_no_float32_accumulator(dtype, chunk_rows, expected):
    hidden = jax.ShapeDtypeStruct((3, 100, 8), dtype)
    weight = jax.ShapeDtypeStruct((24, 8), dtype)
    labels = jnp.zeros((3, 100), jnp.int32)

    def loss(h, w):
        return linear_cross_entropy(h, w, labels, transpose_weight=True, chunk_rows=chunk_rows)

    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(hidden, weight)
    every = equations(program.jaxpr)
    matmuls = [e.outvars[0].aval for e in every if e.primitive.name == "dot_general"]
    assert {m.dtype for m in matmuls if m.shape == weight.shape} == {jnp.dtype(expected)}


def test_mismatched_lm_head_arguments_are_rejected():
    with pytest.raises(ValueError, match=r"weight has shape \(5, 24\); it must be \(8, 24\)"):
        linear_cross_entropy(HIDDEN, LM_HEAD[:5], NEXT)
    with pytest.raises(ValueError, match=r"labels has shape \(4,\); it must be \(5, 4\)"):
        linear_cross_entropy(HIDDEN, LM_HEAD, NEXT[0])
    with pytest.raises(TypeError, match="weight has dtype bfloat16; it must have the dtype of hid"):
        linear_cross_entropy(HIDDEN, LM_HEAD.astype(jnp.bfloat16), NEXT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "none"}, "reduction is 'none'; it must be one of mean, sum"),
        ({"chunk_rows": 0}, "chunk_rows is 0; it must be at least 1"),
        ({"vocab_size": 25}, r"vocab_size is 25; it must be from 1 to 24, the columns of weight"),
        ({"label_smoothing": -1.0}, "label_smoothing is -1.0; it must be from 0 to 1"),
    ],
)
def test_out_of_range_lm_head_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(HIDDEN, LM_HEAD, NEXT, **options)


@pytest.mark.parametrize("dtype", ["int32", "float8_e4m3fn", "no dtype"])
def test_an_accumulate_dtype_that_holds_no_gradient_is_rejected(dtype):
    with pytest.raises(TypeError, match=f"accumulate_dtype is '?{dtype}'?; it must be a "):
        linear_cross_entropy(HIDDEN, LM_HEAD, NEXT, accumulate_dtype=dtype)


@pytest.mark.filterwarnings("error")
def test_float64_arrays_of_numpy_are_used_as_float32():
    logits: Any = np.asarray(LOGITS, np.float64)
    labels: Any = np.asarray(LABELS)
    assert cross_entropy(logits, labels) == cross_entropy(LOGITS, LABELS)


# linear_cross_entropy in bfloat16 on a Hopper GPU: no kernel makes a pass over the logits

VOCAB, COLUMNS = 8500, 8512  # with 300 rows: enough tiles for the CUDA GEMM


NOT_KNOWN = [np.array([1, 0]), "traced"]


@pytest.mark.parametrize(
    ("loss", "name", "value"),
    [
        (loss, "label_smoothing", x)
        for loss in (cross_entropy, linear_cross_entropy)
        for x in (None, "much", *NOT_KNOWN)
    ]
    + [
        (loss, "vocab_size", x)
        for loss in (cross_entropy, linear_cross_entropy)
        for x in ("all", 2.5, *NOT_KNOWN)
    ]
    + [(linear_cross_entropy, "transpose_weight", x) for x in NOT_KNOWN],
)
def test_errors_of_options_name_the_option(loss, name, value):
    arrays = [jnp.ones((2, 3)), jnp.ones((3, 3))] if loss is linear_cross_entropy else [jnp.eye(2)]

    def run(value):
        return loss(*arrays, jnp.zeros(2, jnp.int32), **{name: value})

    is_traced = isinstance(value, str) and value == "traced"
    with pytest.raises(TypeError, match=f"^{name} (is|has) .*; it must be "):
        jax.jit(run)(1) if is_traced else run(value)


def lm_head_arrays(scale=1.0, rows=300, width=64, dtype="bfloat16", transpose_weight=True):
    keys = jax.random.split(jax.random.key(6), 3)
    hidden = scale * jax.random.normal(keys[0], (rows, width))
    shape = (COLUMNS, width) if transpose_weight else (width, COLUMNS)
    weight = jax.random.normal(keys[1], shape) / np.sqrt(width)
    labels = jax.random.randint(keys[2], (rows,), 0, VOCAB)
    return hidden.astype(dtype), weight.astype(dtype), labels


def lm_head_gradients(hidden, weight, labels, **options):
    def loss(h, w):
        return linear_cross_entropy(h, w, labels, vocab_size=VOCAB, **options)

    return jax.value_and_grad(loss, argnums=(0, 1))(hidden, weight)


def exact_lm_head_gradients(hidden, weight, labels, **options):
    """The loss and gradients of the same values, computed in float32."""
    with jax.default_matmul_precision("highest"):
        wide = (hidden.astype(jnp.float32), weight.astype(jnp.float32))
        return lm_head_gradients(*wide, labels, backend="xla", **options)


def lm_head_kernels(arrays, **options):
    """The kernels that the lowered gradient program calls."""
    options = {"transpose_weight": True, "backend": "cuda"} | options
    program = lower_for_cuda(lambda *a: lm_head_gradients(*a, **options), *arrays)
    return set(re.findall(r"@jaxllm_(\w+)", program))


@pytest.mark.parametrize("transpose_weight", [True, False])
def test_hopper_makes_no_pass_over_the_logits(on_hopper, transpose_weight):
    options = {"transpose_weight": transpose_weight}
    arrays = jax.eval_shape(lambda: lm_head_arrays(**options))
    assert lm_head_kernels(arrays, **options) == {"lm_head_softmax"}


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"dtype": "float16"}, {}),
        ({"dtype": "float32"}, {}),
        ({"rows": 64}, {}),
        ({"width": 60}, {}),
        ({}, {"label_smoothing": 0.1}),
        ({}, {"z_loss": 1e-4}),
    ],
)
def test_other_lm_heads_run_the_cross_entropy_kernel(on_hopper, sizes, options):
    arrays = jax.eval_shape(lambda: lm_head_arrays(**sizes))
    assert lm_head_kernels(arrays, **options) == {"cross_entropy_forward_with_gradient"}


@pytest.mark.gpu
@pytest.mark.parametrize("transpose_weight", [True, False])
@pytest.mark.parametrize("scale", [0.0, 0.1, 10.0, 100.0, 1e4])
def test_lm_head_loss_is_exact_for_large_logits(scale, transpose_weight):
    # At scale 10 some rows have losses above 50, at 100 nearly all rows.
    options = {"transpose_weight": transpose_weight}
    arrays = lm_head_arrays(scale, **options)
    loss, gradients = lm_head_gradients(*arrays, backend="cuda", **options)
    expected, exact = exact_lm_head_gradients(*arrays, **options)
    reference = lm_head_gradients(*arrays, backend="xla", **options)[1]
    assert error(loss, expected) < 1e-5
    assert_close(gradients, exact, "bfloat16", reference)
    padding = gradients[1] if transpose_weight else gradients[1].T
    assert not padding[VOCAB:].any()


@pytest.mark.gpu
def test_lm_head_loss_is_exact_for_confident_predictions():
    # The logit of each label is about 12 above the others. The mean loss is 2e-4, which 1 + loss
    # keeps to 1e-3 in float32.
    _, weight, labels = lm_head_arrays()
    of_labels = weight[labels].astype(jnp.float32)
    hidden = 24 * of_labels / jnp.linalg.norm(of_labels, axis=1, keepdims=True)
    arrays = (hidden.astype("bfloat16"), weight, labels)
    loss, gradients = lm_head_gradients(*arrays, transpose_weight=True, backend="cuda")
    expected, exact = exact_lm_head_gradients(*arrays, transpose_weight=True)
    reference = lm_head_gradients(*arrays, transpose_weight=True, backend="xla")[1]
    assert 1e-4 < expected < 1e-3
    assert error(loss, expected) < 1e-3
    assert_close(gradients, exact, "bfloat16", reference)


@pytest.mark.gpu
def test_lm_head_loss_skips_ignored_rows():
    hidden, weight, labels = lm_head_arrays(10.0)
    ignored = jnp.arange(300) % 3 == 0
    for label, ignore_index in ((-7, -7), (-100, None)):
        options = {"transpose_weight": True, "ignore_index": ignore_index}
        arrays = (hidden, weight, jnp.where(ignored, label, labels))
        loss, gradients = lm_head_gradients(*arrays, backend="cuda", **options)
        expected, exact = exact_lm_head_gradients(*arrays, **options)
        assert error(loss, expected) < 1e-5
        assert_close(gradients, exact, "bfloat16")
        assert not gradients[0][ignored].any()


@pytest.mark.gpu
@pytest.mark.parametrize("outside", [VOCAB, COLUMNS + 5, -1])
def test_lm_head_row_of_a_label_outside_the_vocabulary_is_nan(outside):
    hidden, weight, labels = lm_head_arrays()
    options = {"transpose_weight": True, "ignore_index": -7, "reduction": "sum"}
    _, exact = exact_lm_head_gradients(hidden, weight, labels, **options)
    arrays = (hidden, weight, labels.at[1].set(outside))
    loss, (dhidden, dweight) = lm_head_gradients(*arrays, backend="cuda", **options)
    assert np.isnan(loss)
    assert np.isnan(dhidden[1].astype("float32")).all()
    assert np.isnan(dweight[:VOCAB].astype("float32")).all()
    rest = jnp.arange(300) != 1
    assert_close(dhidden[rest], exact[0][rest], "bfloat16")


@pytest.mark.gpu
def test_vmap_of_lm_head_matches_separate_calls_and_is_deterministic():
    hidden, weight, labels = lm_head_arrays()
    hidden = jnp.stack([hidden, 30 * hidden])

    @jax.jit
    def run(hidden):
        return jax.vmap(
            lambda h: lm_head_gradients(h, weight, labels, transpose_weight=True, backend="cuda")
        )(hidden)

    together, again = run(hidden), run(hidden)
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    for i in range(2):
        one = exact_lm_head_gradients(hidden[i], weight, labels, transpose_weight=True)
        assert_close(jax.tree.map(lambda x, i=i: x[i], together), one, "bfloat16")


@pytest.mark.hopper
@pytest.mark.parametrize("transpose_weight", [True, False])
def test_ignored_rows_are_zero_and_do_not_trigger_recomputed_logits(transpose_weight):
    hidden, weight, labels = lm_head_arrays(0.1, transpose_weight=transpose_weight)
    # Padding rows have logits of some thousands, and one row has NaN.
    is_padding = jnp.arange(len(labels)) % 3 == 0
    hidden = jnp.where(is_padding[:, None], 1e4 * hidden, hidden).at[3].set(jnp.inf)
    options = {"ignore_index": -1, "vocab_size": weight.shape[0 if transpose_weight else 1]}

    def run(labels):
        scale = jnp.float32(1)
        return cuda._lm_head_softmax(hidden, weight, labels, scale, transpose_weight, options)

    *_, is_redone = run(jnp.where(is_padding, 0, labels))
    assert is_redone == 1  # if not ignored, these rows trigger the recomputation
    losses, exponentials, factors, is_redone = run(jnp.where(is_padding, -1, labels))
    assert is_redone == 0
    assert (exponentials[is_padding] == 0).all()
    assert (losses[is_padding] == 0).all() and (factors[is_padding] == 0).all()
    rest = ~is_padding
    exact = cross_entropy(
        jnp.dot(
            hidden[rest].astype("float32"),
            (weight.T if transpose_weight else weight).astype("float32"),
            precision="highest",
        ),
        labels[rest],
        reduction="none",
    )
    assert error(losses[rest], exact) < 1e-5
