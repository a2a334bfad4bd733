import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm import training
from jaxllm.training.anomaly import WINDOW, judge, new_guard

V, T, D = 61, 16, 8


def toy_params():
    table, head = 0.5 * jax.random.normal(jax.random.key(0), (2, V, D))
    return {"table": table, "head": head.T, "blocks": {"bias": jnp.zeros((3, V))}}


def toy_loss(params, tokens, labels):
    """Where all labels are 60, the gradient of one number in layer 1's bias is infinite."""
    table, bias = params["table"], params["blocks"]["bias"]
    # A product, since XLA on a GPU adds up the gradient of table[tokens] in no fixed order.
    rows = jax.nn.one_hot(tokens, V, dtype=table.dtype) @ table
    logits = rows @ params["head"] + bias.sum(0)
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    loss = -jnp.mean(jnp.take_along_axis(scores, labels[..., None], axis=-1))
    return loss + _flat(bias[1, 4], jnp.where(jnp.all(labels == 60), jnp.inf, 0.0))


@jax.custom_vjp
def _flat(x, slope):
    """Zero, whose derivative is said to be ``slope``."""
    return 0.0 * x


_flat.defvjp(lambda x, slope: (0.0 * x, slope), lambda slope, g: (slope.astype(g.dtype), None))


def judged(values, **limits):
    """What the guard says of one value after another, as loss and norm."""

    def step(guard, inputs):
        number, loss, norm = inputs
        guard, skip, metrics = judge(guard, number, loss, norm, **limits)
        return guard, (skip, metrics)

    losses, norms = jnp.asarray(values, jnp.float32).T
    numbers = jnp.arange(1, len(values) + 1)
    guard, (skips, metrics) = jax.lax.scan(step, new_guard(), (numbers, losses, norms))
    return guard, np.asarray(skips), jax.tree.map(np.asarray, metrics)


def test_z_scores_are_those_of_the_last_128():
    values = np.random.default_rng(0).normal(3, 2, (300, 2)).astype(np.float32)
    _, skips, metrics = judged(values)
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
    values[170, 1 - column] = 9  # not asked about
    values[180, column] = -9  # low values are welcome
    _, skips, metrics = judged(values, **{name: 4.0})
    assert np.flatnonzero(skips).tolist() == [128, 150, 160]
    assert np.flatnonzero(metrics["skipped"]).tolist() == [128, 150, 160]
    assert not metrics["halted_at"].any()


def test_equal_values_are_no_outliers():
    _, skips, metrics = judged(np.full((140, 2), 0.1), max_loss_z=3.0, max_norm_z=3.0)
    assert not skips.any()
    assert (metrics["loss_z"][128:] == 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 1])
def test_the_first_step_that_is_not_finite_halts_for_good(bad, column):
    values = np.ones((10, 2))
    values[6, column] = bad
    values[8, 1 - column] = np.nan
    guard, skips, metrics = judged(values)
    assert skips.tolist() == [False] * 6 + [True] * 4
    assert metrics["halted_at"].tolist() == [0] * 6 + [7] * 4
    assert not metrics["skipped"].any()
    assert int(guard.halted_at) == 7 and int(guard.count) == 6
    assert np.isfinite(guard.losses).all() and np.isfinite(guard.norms).all()


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
def test_a_halted_run_keeps_its_parameters_and_names_the_tensors(optimizer, copy_dtype):
    dtype = copy_dtype or "float32"
    step = training.make_train_step(toy_loss, optimizer, compute_dtype=dtype)
    state = training.init_state(toy_params(), optimizer, copy_dtype=copy_dtype, guarded=True)
    source = batches(2)
    for _ in range(3):
        state, metrics = step(state, *next(source))
    assert metrics["halted_at"] == 0
    good = jax.tree.map(np.array, state)
    bad_tokens, bad_labels = next(source)
    bad_labels[1] = 60
    state, metrics = step(state, bad_tokens, bad_labels)
    assert metrics["halted_at"] == 4
    state, metrics = step(state, *next(source))  # the host has not noticed yet
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


def test_parameters_that_are_not_finite_are_named():
    params = toy_params()
    params["head"] = params["head"].at[2, 3:5].set(jnp.nan)
    tokens, labels = next(batches())
    report = training.explain_halt(toy_loss, params, tokens, labels, compute_dtype="float32")
    assert report.splitlines()[0] == f"parameter head: 2 NaN and 0 infinite of {V * D}"
    assert "microbatch 0: loss nan" in report
    fine = training.explain_halt(toy_loss, toy_params(), tokens, labels, compute_dtype="float32")
    assert fine.startswith("each microbatch is finite by itself")


@OPTIMIZERS
def test_a_skipped_step_leaves_parameters_and_moments(optimizer):
    step = training.make_train_step(
        toy_loss, optimizer, compute_dtype="float32", max_norm_z=3.0, max_loss_z=50.0
    )
    state = training.init_state(toy_params(), optimizer, guarded=True)
    # Norms that are all but equal, so that any other is an outlier.
    batch = next(batches())
    for _ in range(3):
        state, metrics = step(state, *batch)
    norm = float(metrics["grad_norm"])
    assert state.guard is not None
    full = state.guard._replace(
        norms=jnp.asarray(
            norm * (1 + 1e-3 * np.random.default_rng(0).normal(size=WINDOW)), "float32"
        ),
        count=jnp.int32(WINDOW),
    )
    state = state._replace(guard=full)
    before = jax.tree.map(np.array, state)
    tokens, labels = (x.copy() for x in batch)
    tokens[:], labels[:] = 1, 2  # one lesson, repeated: a steep gradient
    state, metrics = step(state, tokens, labels)
    assert metrics["norm_z"] > 3 and metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, before.params)
    for name in ("mu", "nu"):
        found, wanted = (optax.tree_utils.tree_get(s.opt_state, name) for s in (state, before))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert int(state.step) == 4


@OPTIMIZERS
def test_a_guard_changes_nothing_where_nothing_is_wrong(optimizer):
    source, states = batches(2), []
    data = [next(source) for _ in range(4)]
    for guarded in (False, True):
        step = training.make_train_step(toy_loss, optimizer, compute_dtype="float32")
        state = training.init_state(toy_params(), optimizer, guarded=guarded)
        for batch in data:
            state, metrics = step(state, *batch)
        states.append((state.params, metrics["loss"], metrics["grad_norm"]))
    # On a GPU, XLA fuses a step with a guard in its own way, and rounds in other places.
    exact = jax.default_backend() == "cpu"
    assert_close = functools.partial(
        np.testing.assert_allclose, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-7
    )
    jax.tree.map(assert_close, *states)
