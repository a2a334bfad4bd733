import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm import ops, training
from jaxllm.training import optim
from jaxllm.training.anomaly import WINDOW, detect_anomaly, init_anomaly_state, nonfinite

V, T, D = 61, 16, 8


def toy_params():
    table, head = 0.5 * jax.random.normal(jax.random.key(0), (2, V, D))
    return {"table": table, "head": head.T, "blocks": {"bias": jnp.zeros((3, V))}}


def toy_loss(params, tokens, labels):
    """If all labels are 60, the gradient of one element of layer 1's bias is infinite."""
    table, bias = params["table"], params["blocks"]["bias"]
    # A one-hot matmul: on a GPU, XLA sums the gradient of table[tokens] in no fixed order.
    rows = jax.nn.one_hot(tokens, V, dtype=table.dtype) @ table
    logits = rows @ params["head"] + bias.sum(0)
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    loss = -jnp.mean(jnp.take_along_axis(scores, labels[..., None], axis=-1))
    return loss + _zero_with_gradient(bias[1, 4], jnp.where(jnp.all(labels == 60), jnp.inf, 0.0))


@jax.custom_vjp
def _zero_with_gradient(x, gradient):
    """Zero, with ``gradient`` as its derivative by x."""
    return 0.0 * x


_zero_with_gradient.defvjp(
    lambda x, gradient: (0.0 * x, gradient),
    lambda gradient, g: (gradient.astype(g.dtype), None),
)


def run_detector(values, **limits):
    """Passes (loss, norm) pairs to the detector: the last state, the skips and the metrics."""

    def step(state, inputs):
        number, loss, norm = inputs
        state, skip, metrics = detect_anomaly(state, number, loss, norm, **limits)
        return state, (skip, metrics)

    losses, norms = jnp.asarray(values, jnp.float32).T
    numbers = jnp.arange(1, len(values) + 1)
    initial = init_anomaly_state()
    state, (skips, metrics) = jax.lax.scan(step, initial, (numbers, losses, norms))
    return state, np.asarray(skips), jax.tree.map(np.asarray, metrics)


def test_z_scores_use_a_window_of_128_steps():
    values = np.random.default_rng(0).normal(3, 2, (300, 2)).astype(np.float32)
    _, skips, metrics = run_detector(values)
    assert WINDOW == 128
    assert not skips.any()
    for column, name in enumerate(("loss_z", "norm_z")):
        x = values[:, column].astype(np.float64)
        assert np.isnan(metrics[name][:128]).all()
        wanted = [
            (x[i] - x[i - 127 : i + 1].mean()) / x[i - 127 : i + 1].std() for i in range(128, 300)
        ]
        np.testing.assert_allclose(metrics[name][128:], wanted, atol=1e-4)


@pytest.mark.parametrize("name", ["max_loss_z", "max_norm_z"])
def test_outliers_are_skipped_once_the_window_is_full(name):
    values = np.random.default_rng(1).normal(3, 0.1, (200, 2))
    column = 0 if name == "max_loss_z" else 1
    for i in (100, 128, 150, 160):
        values[i, column] = 9
    values[170, 1 - column] = 9  # this limit is None
    values[180, column] = -9  # low values are no outliers
    _, skips, metrics = run_detector(values, **{name: 4.0})
    assert np.flatnonzero(skips).tolist() == [128, 150, 160]
    assert np.flatnonzero(metrics["skipped"]).tolist() == [128, 150, 160]
    assert not metrics["halted_at"].any()


def test_constant_values_are_not_outliers():
    _, skips, metrics = run_detector(np.full((140, 2), 0.1), max_loss_z=3.0, max_norm_z=3.0)
    assert not skips.any()
    assert (metrics["loss_z"][128:] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 1])
def test_nonfinite_step_halts_permanently(bad, column):
    values = np.ones((10, 2))
    values[6, column] = bad
    values[8, 1 - column] = np.nan
    state, skips, metrics = run_detector(values)
    assert skips.tolist() == [False] * 6 + [True] * 4
    assert metrics["halted_at"].tolist() == [0] * 6 + [7] * 4
    assert not metrics["skipped"].any()
    assert int(state.halted_at) == 7 and int(state.count) == 6
    assert np.isfinite(state.losses).all() and np.isfinite(state.norms).all()


def float8_counts(elements, underflow, overflow):
    pairs = (jnp.asarray(pair, jnp.float32) for pair in (elements, underflow, overflow))
    return ops.Float8Counts(*pairs)


def test_float8_overflow_halts_and_underflow_beyond_its_limit_skips():
    state, ones = init_anomaly_state(), jnp.ones(())
    detect = functools.partial(detect_anomaly, state, 5, ones, ones)
    few, many = (float8_counts((100, 100), (1, lost), (0, 0)) for lost in (2, 30))
    for counts, limit, skips in ((few, 0.1, False), (many, 0.1, True), (many, None, False)):
        _, skip, metrics = detect(float8_counts=counts, max_underflow=limit)
        assert (bool(skip), bool(metrics["skipped"]), int(metrics["halted_at"])) == (
            skips,
            skips,
            0,
        )
    infinite = float8_counts((100, 100), (1, 2), (0, 1))
    updated, skip, metrics = detect(float8_counts=infinite)
    assert bool(skip) and int(metrics["halted_at"]) == int(updated.halted_at) == 5


def float8_loss(params, tokens, labels):
    rows = jax.nn.one_hot(tokens, V, dtype=params["table"].dtype) @ params["table"]
    logits = ops.linear(rows, params["head"], precision="tensor") + params["blocks"]["bias"].sum(0)
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(scores, labels[..., None], axis=-1))


@pytest.mark.parametrize(("accumulate", "limits"), [(1, [None]), (3, [0.9, 1e-3])])
def test_step_reports_the_float8_counts_of_its_microbatches(accumulate, limits):
    optimizer = training.adamw(1e-2)
    params = toy_params()
    params["head"] = params["head"].at[:4].multiply(2.0**-20)
    tokens, labels = next(batches(accumulate))
    counted = jax.jit(jax.grad(ops.count_float8(float8_loss)))
    probe = ops.Float8Counts.zeros()
    found = [counted(probe, params, *each) for each in zip(tokens, labels, strict=True)]
    elements, underflow, _ = (np.sum(each, axis=0) for each in zip(*found, strict=True))
    assert underflow[0] >= accumulate * 4 * V
    make = functools.partial(training.make_train_step, float8_loss, optimizer)
    options = {"compute_dtype": "float32", "float8_counts": True}
    for limit in limits:
        is_skipped = limit == 1e-3
        step = make(**options, max_underflow=limit)
        own = jax.tree.map(jnp.copy, params)
        state = training.init_state(own, optimizer, detect_anomalies=True)
        state, metrics = step(state, tokens, labels)
        np.testing.assert_allclose(metrics["float8_underflow"], underflow[0] / elements[0])
        share = metrics["float8_gradient_underflow"]
        np.testing.assert_allclose(share, underflow[1] / elements[1], atol=1e-3)
        assert metrics["float8_overflow"] == 0 and bool(metrics["skipped"]) == is_skipped
        is_same = (state.params["table"] == params["table"]).all()
        assert bool(is_same) == is_skipped
    with pytest.raises(ValueError, match=r"max_underflow is 0\.1 and float8_counts False"):
        make(max_underflow=0.1)
    with pytest.raises(ValueError, match=r"max_underflow is 0\.1 and float8_counts None"):
        detect_anomaly(init_anomaly_state(), *jnp.ones(3), max_underflow=0.1)


@pytest.mark.parametrize(
    ("limit", "error", "message"),
    [
        ({"max_loss_z": np.nan}, ValueError, "max_loss_z is nan; it must be above 0, or None"),
        ({"max_norm_z": -1}, ValueError, r"max_norm_z is -1\.0; it must be above 0, or None"),
        ({"max_norm_z": "3"}, TypeError, "max_norm_z is '3'; it must be a number"),
        ({"max_underflow": np.nan}, ValueError, "max_underflow is nan; it must be a share from 0"),
        ({"max_underflow": 5}, ValueError, r"max_underflow is 5\.0; it must be a share from 0"),
    ],
)
def test_limits_out_of_range_are_rejected(limit, error, message):
    with pytest.raises(error, match=message):
        training.make_train_step(toy_loss, optax.sgd(0.1), float8_counts=True, **limit)
    with pytest.raises(error, match=message):
        detect_anomaly(
            init_anomaly_state(), *jnp.ones(3), float8_counts=ops.Float8Counts.zeros(), **limit
        )


@pytest.mark.parametrize("name", ["max_loss_z", "max_norm_z", "max_underflow"])
def test_limits_need_a_detector(name):
    optimizer = optax.sgd(0.1)
    options: dict[str, Any] = {name: 0.5, "float8_counts": True}
    step = training.make_train_step(toy_loss, optimizer, **options)
    message = rf"{name} is 0\.5, .* no anomaly detector; .* init_state\(detect_anomalies=True\)"
    with pytest.raises(ValueError, match=message):
        step(training.init_state(toy_params(), optimizer), *next(batches()))


def test_float8_counts_of_a_microbatch_without_labels_do_not_halt():
    optimizer, params = training.adamw(1e-2), toy_params()
    tokens, labels = next(batches(2))
    labels[1] = -1

    def loss(params, tokens, labels):
        factor = jnp.where((labels < 0).all(), jnp.inf, 1.0)
        return float8_loss(params | {"head": params["head"] * factor}, tokens, labels)

    options = {"compute_dtype": "float32", "float8_counts": True}
    step = training.make_train_step(loss, optimizer, **options)
    state = training.init_state(params, optimizer, detect_anomalies=True)
    _, metrics = step(state, tokens, labels)
    assert metrics["halted_at"] == 0 and metrics["float8_overflow"] == 0


def batches(accumulate=1):
    rng = np.random.default_rng(0)
    while True:
        tokens = rng.integers(0, V - 1, (accumulate, 3, T + 1), np.int32)
        yield tokens[..., :-1], tokens[..., 1:].copy()


OPTIMIZERS = pytest.mark.parametrize(
    "optimizer",
    [training.adamw(1e-2), optax.adamw(1e-2), training.adamw(1e-2, max_grad_norm=None)],
    ids=["ours", "optax", "unclipped"],
)


@OPTIMIZERS
@pytest.mark.parametrize("copy_dtype", [None, "bfloat16"])
@pytest.mark.covering(("optimizer",), ("copy_dtype",))
def test_halted_run_keeps_parameters_and_names_nonfinite_tensors(optimizer, copy_dtype):
    dtype = copy_dtype or "float32"
    step = training.make_train_step(toy_loss, optimizer, compute_dtype=dtype)
    state = training.init_state(
        toy_params(), optimizer, copy_dtype=copy_dtype, detect_anomalies=True
    )
    source = batches(2)
    for _ in range(3):
        state, metrics = step(state, *next(source))
    assert metrics["halted_at"] == 0
    good = jax.tree.map(np.array, state)
    bad_tokens, bad_labels = next(source)
    bad_labels[1] = 60
    state, metrics = step(state, bad_tokens, bad_labels)
    assert metrics["halted_at"] == 4
    state, metrics = step(state, *next(source))  # the host reads halted_at late
    assert metrics["halted_at"] == 4
    jax.tree.map(np.testing.assert_array_equal, state.params, good.params)
    jax.tree.map(np.testing.assert_array_equal, state.copy, good.copy)
    for name in ("mu", "nu"):
        found, wanted = (optax.tree_utils.tree_get(s.opt_state, name) for s in (state, good))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    report = training.explain_halt(
        toy_loss, state.params, bad_tokens, bad_labels, compute_dtype=dtype
    )
    first, second = report.splitlines()
    assert first.startswith("microbatch 1: loss 4")
    assert second == f"gradient of blocks/1/bias: 0 NaN and 1 infinite of {V}"


def test_explain_halt_names_nonfinite_parameters():
    params = toy_params()
    params["head"] = params["head"].at[2, 3:5].set(jnp.nan)
    tokens, labels = next(batches())
    report = training.explain_halt(toy_loss, params, tokens, labels, compute_dtype="float32")
    assert report.splitlines()[0] == f"parameter head: 2 NaN and 0 infinite of {V * D}"
    assert "microbatch 0: loss nan" in report
    fine = training.explain_halt(toy_loss, toy_params(), tokens, labels, compute_dtype="float32")
    assert fine.startswith("each microbatch is finite by itself")


@pytest.mark.parametrize(
    ("labels", "compute_dtype", "error", "message"),
    [
        (1, None, ValueError, "labels has shape .*; its first axis must have 2 microbatches"),
        (2, "int32", TypeError, "compute_dtype is int32; it must be a floating dtype"),
        (2, "float64", TypeError, "compute_dtype is float64, which needs jax_enable_x64"),
    ],
)
def test_explain_halt_rejects_what_a_step_rejects(labels, compute_dtype, error, message):
    arrays = np.zeros((2, 1, 3), np.int32), np.zeros((labels, 1, 3), np.int32)
    with pytest.raises(error, match=message):
        training.explain_halt(toy_loss, toy_params(), *arrays, compute_dtype=compute_dtype)


def test_nonfinite_counts_numbers_as_arrays_of_one_element():
    assert nonfinite({"scale": np.nan}) == ["scale: 1 NaN and 0 infinite of 1"]


@pytest.mark.parametrize(
    "blocks",
    [{"0": {"a": jnp.ones((3, 4)), "b": jnp.full(5, jnp.nan)}}, {"b": jnp.float32(jnp.nan)}],
    ids=["layers", "scalar"],
)
def test_blocks_that_are_not_stacked_are_named_by_their_paths(blocks):
    (report,) = nonfinite({"blocks": blocks})
    assert report in (
        "blocks/0/b: 5 NaN and 0 infinite of 5",
        "blocks/b: 1 NaN and 0 infinite of 1",
    )


def ends_at_two(value):
    return lambda count: jnp.where(count < 2, value, jnp.nan)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (training.adamw, {"learning_rate": ends_at_two(1e-2)}),
        (optim.adamw, {"learning_rate": 1e-2, "weight_decay": ends_at_two(0.1)}),
        (optax.adamw, {"learning_rate": ends_at_two(1e-2)}),
    ],
    ids=["ours", "masters", "optax"],
)
def test_schedule_that_is_not_finite_halts_the_run(make, options):
    optimizer, rate = make(**options), None
    if make is optax.adamw:  # whose schedules are known only from the metrics
        rate = options["learning_rate"]
    step = training.make_train_step(
        toy_loss, optimizer, compute_dtype="float32", learning_rate=rate
    )
    state = training.init_state(toy_params(), optimizer, detect_anomalies=True)
    for _ in range(2):
        state, metrics = step(state, *next(batches()))
    assert metrics["halted_at"] == 0
    before = jax.tree.map(np.array, state.params)
    for _ in range(2):
        state, metrics = step(state, *next(batches()))
    assert metrics["halted_at"] == 3 and np.isfinite(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, state.params, before)


@pytest.mark.parametrize("make", [training.adamw, optim.adamw])
@pytest.mark.parametrize("copy_dtype", [None, "bfloat16"])
@pytest.mark.covering(("make",), ("copy_dtype",))
def test_steps_after_skipped_ones_are_those_of_optax(make, copy_dtype):
    """The bias correction and the schedule count the steps that were taken."""

    def schedule(count):
        return 1e-2 / (1 + count)

    mask = training.decay_mask if make is training.adamw else None
    ours = make(schedule, max_grad_norm=None)
    theirs = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=mask)
    dtype = copy_dtype or "float32"
    results = []
    for optimizer, skips in ((ours, 3), (theirs, 3), (theirs, 0)):
        step = training.make_train_step(
            toy_loss, optimizer, compute_dtype=dtype, max_norm_z=3.0, learning_rate=schedule
        )
        state = training.init_state(
            toy_params(), optimizer, copy_dtype=copy_dtype, detect_anomalies=True
        )
        rates = []
        for count in range(skips + 2):
            anomaly = init_anomaly_state()
            if count < skips:  # a full window of other norms, which makes this one an outlier
                anomaly = anomaly._replace(norms=-jnp.ones(WINDOW), count=jnp.int32(WINDOW))
            state, metrics = step(state._replace(anomaly=anomaly), *next(batches()))
            assert bool(metrics["skipped"]) == (count < skips)
            rates.append(float(metrics["learning_rate"]))
        np.testing.assert_allclose(rates, [1e-2] * (skips + 1) + [5e-3])
        results.append(state.params)
    for found in results[1:]:
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
        jax.tree.map(close, found, results[0])


@OPTIMIZERS
def test_skipped_step_keeps_parameters_and_moments(optimizer):
    step = training.make_train_step(
        toy_loss, optimizer, compute_dtype="float32", max_norm_z=3.0, max_loss_z=50.0
    )
    state = training.init_state(toy_params(), optimizer, detect_anomalies=True)
    # Norms that vary by 0.1 %, so that any other norm is an outlier.
    batch = next(batches())
    for _ in range(3):
        state, metrics = step(state, *batch)
    norm = float(metrics["grad_norm"])
    assert state.anomaly is not None
    full = state.anomaly._replace(
        norms=jnp.asarray(
            norm * (1 + 1e-3 * np.random.default_rng(0).normal(size=WINDOW)), "float32"
        ),
        count=jnp.int32(WINDOW),
    )
    state = state._replace(anomaly=full)
    before = jax.tree.map(np.array, state)
    tokens, labels = (x.copy() for x in batch)
    tokens[:], labels[:] = 1, 2  # one label for all tokens: a large gradient
    state, metrics = step(state, tokens, labels)
    assert metrics["norm_z"] > 3 and metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, before.params)
    for name in ("mu", "nu"):
        found, wanted = (optax.tree_utils.tree_get(s.opt_state, name) for s in (state, before))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert int(state.step) == 4


@OPTIMIZERS
def test_detector_does_not_change_finite_steps(optimizer):
    source, states = batches(2), []
    data = [next(source) for _ in range(4)]
    for detect_anomalies in (False, True):
        step = training.make_train_step(toy_loss, optimizer, compute_dtype="float32")
        state = training.init_state(toy_params(), optimizer, detect_anomalies=detect_anomalies)
        for batch in data:
            state, metrics = step(state, *batch)
        states.append((state.params, metrics["loss"], metrics["grad_norm"]))
    # On a GPU, XLA fuses a step with a detector differently, so it rounds differently.
    exact = jax.default_backend() == "cpu"
    assert_close = functools.partial(
        np.testing.assert_allclose, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7
    )
    jax.tree.map(assert_close, *states)
