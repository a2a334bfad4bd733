"""The dtypes and donation of a training state, and the weights of microbatches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm import data, ops, training
from jaxllm.training import optim

V, T, D = 31, 12, 8
SMOOTH = {"label_smoothing": 0.1, "z_loss": 1e-2}


def params_of(dtype="float32"):
    """A bigram model, which compiles quickly."""
    table, head = 0.5 * jax.random.normal(jax.random.key(0), (2, V, D), dtype)
    return {"table": table, "head": head.T, "bias": jnp.zeros(V, dtype)}


def logits_of(params, tokens):
    rows = jax.nn.one_hot(tokens, V, dtype=params["table"].dtype) @ params["table"]
    out = rows @ params["head"]
    return out + jnp.broadcast_to(params["bias"], out.shape)


def loss_fn(params, tokens, labels, **options):
    return ops.cross_entropy(logits_of(params, tokens), labels, **options)


def naive_loss(params, tokens, labels):
    """The mean over the labels, which is 0 / 0 without labels."""
    losses = ops.cross_entropy(logits_of(params, tokens), labels, reduction="none")
    return losses.sum() / (labels >= 0).sum()


def batch(*counts, B=3, ignored=-1, seed=0):
    """Tokens and labels of a step, with ``counts[i]`` valid labels in microbatch i."""
    rng = np.random.default_rng(seed)
    tokens, labels = rng.integers(0, V, (2, len(counts), B, T), np.int32)
    for of, count in zip(labels, counts, strict=True):
        of.ravel()[rng.permutation(of.size)[count:]] = ignored
    return tokens, labels


def as_one(tokens, labels):
    return tokens.reshape(1, -1, T), labels.reshape(1, -1, T)


assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)


def descend(loss, tokens, labels, detect_anomalies=False, **options):
    """One SGD step. Adam would turn the rounding error of a tiny gradient into a full step."""
    optimizer = optax.sgd(1.0)
    step = training.make_train_step(loss, optimizer, compute_dtype="float32", **options)
    return step(
        training.init_state(params_of(), optimizer, detect_anomalies=detect_anomalies),
        tokens,
        labels,
    )


@pytest.mark.parametrize("counts", [(36, 1, 9), (36, 0, 2)])
@pytest.mark.parametrize("ignored", [-1, -100])
def test_accumulated_step_equals_one_large_batch(counts, ignored):
    loss = functools.partial(loss_fn, **SMOOTH)
    tokens, labels = batch(*counts, ignored=ignored)
    found, metrics = descend(loss, tokens, labels, detect_anomalies=True)
    expected, one = descend(loss, *as_one(tokens, labels), detect_anomalies=True)
    jax.tree.map(assert_close, found.params, expected.params)
    # The metrics and the anomaly detector's values are those of the whole step too.
    for name in ("loss", "grad_norm"):
        assert_close(metrics[name], one[name])
    jax.tree.map(assert_close, found.anomaly, expected.anomaly)
    assert found.anomaly is not None
    assert_close(found.anomaly.losses[0], metrics["loss"])
    assert_close(found.anomaly.norms[0], metrics["grad_norm"])


def test_equal_weights_average_over_microbatches():
    tokens, labels = batch(36, 1, 9)
    found, metrics = descend(loss_fn, tokens, labels, microbatch_weights="equal")
    gradient = jax.value_and_grad(loss_fn)
    losses, grads = zip(*map(functools.partial(gradient, params_of()), tokens, labels), strict=True)
    mean = jax.tree.map(lambda *each: sum(each) / 3, *grads)
    assert_close(metrics["loss"], np.mean(losses))
    assert_close(metrics["grad_norm"], optax.tree_utils.tree_norm(mean))
    jax.tree.map(lambda new, old, g: assert_close(new, old - g), found.params, params_of(), mean)
    _, weighted = descend(loss_fn, tokens, labels)
    assert abs(weighted["loss"] - metrics["loss"]) > 1e-2
    assert weighted["grad_norm"] < 0.8 * metrics["grad_norm"]


def test_equal_label_counts_have_bit_identical_weights():
    tokens, labels = batch(7, 7, 7)
    states = [
        descend(loss_fn, tokens, labels, microbatch_weights=weights)
        for weights in ("labels", "equal")
    ]
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize("detect_anomalies", [False, True])
def test_microbatch_without_labels_adds_nothing(detect_anomalies):
    tokens, labels = batch(36, 0, 9)
    assert np.isnan(naive_loss(params_of(), tokens[1], labels[1]))
    found, metrics = descend(naive_loss, tokens, labels, detect_anomalies=detect_anomalies)
    expected, one = descend(loss_fn, *as_one(tokens, labels))
    assert_close(metrics["loss"], one["loss"])
    jax.tree.map(assert_close, found.params, expected.params)
    assert not metrics.get("halted_at", 0)
    none, metrics = descend(loss_fn, *batch(0, 0), detect_anomalies=detect_anomalies)
    assert metrics["loss"] == metrics["grad_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, none.params, params_of())


def test_nonfinite_loss_of_a_microbatch_with_labels_halts():
    tokens, labels = batch(36, 1)
    labels[1][labels[1] >= 0] = V  # outside of the vocabulary
    _, metrics = descend(loss_fn, tokens, labels, detect_anomalies=True)
    assert metrics["halted_at"] == 1


def test_weight_function_supports_other_ignored_labels():
    loss = functools.partial(loss_fn, ignore_index=0)
    tokens, labels = batch(36, 4, 9, ignored=0)
    one, expected = descend(loss, *as_one(tokens, labels))
    found, metrics = descend(loss, tokens, labels, microbatch_weights=lambda y: (y != 0).sum())
    assert_close(metrics["loss"], expected["loss"])
    jax.tree.map(assert_close, found.params, one.params)


@pytest.mark.parametrize("wrong", ["tokens", None, 3])
def test_unknown_microbatch_weights_are_rejected(wrong):
    with pytest.raises(ValueError, match=r"microbatch_weights is .*; it must be 'labels', 'equal'"):
        training.make_train_step(loss_fn, optax.sgd(1.0), microbatch_weights=wrong)


def test_weight_of_a_microbatch_that_is_no_scalar_is_rejected():
    with pytest.raises(ValueError, match=r"returns shape \(3,\); it must return a scalar"):
        descend(loss_fn, *batch(36, 9), microbatch_weights=lambda y: (y >= 0).sum(axis=-1))


@pytest.mark.parametrize("make", [optim.adamw, training.adamw])
def test_accumulated_step_from_a_bfloat16_copy_equals_one_batch(make):
    tokens, labels = batch(36, 1, 9)
    found = {}
    for name, of in (("many", (tokens, labels)), ("one", as_one(tokens, labels))):
        optimizer = make(1e-2, eps=1.0)
        step = training.make_train_step(loss_fn, optimizer, compute_dtype="bfloat16")
        state = training.init_state(params_of(), optimizer, copy_dtype="bfloat16")
        found[name] = step(state, *of)
    rough = functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=1e-4)
    for name in ("loss", "grad_norm"):
        rough(found["many"][1][name], found["one"][1][name])
    jax.tree.map(rough, found["many"][0].params, found["one"][0].params)


def test_mean_loss_weights_batches_by_label_count(monkeypatch):
    batches = [tuple(x[0] for x in batch(count, seed=count)) for count in (36, 3, 0)]
    monkeypatch.setattr(data, "batch", lambda *_, step, **__: batches[step])
    dataset = data.Dataset((np.arange(3 * 3 * T + 1),))
    evaluate = training.make_eval_step(naive_loss, compute_dtype="float32")
    options: Any = {"batch_size": 3, "seq_len": T}
    found = training.mean_loss(evaluate, params_of(), dataset, **options)
    tokens, labels = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert found == pytest.approx(float(loss_fn(params_of(), tokens, labels)), rel=1e-6)
    batches[:] = [batches[2]] * 3
    assert training.mean_loss(evaluate, params_of(), dataset, **options) == 0


def injected(factory):
    return optax.inject_hyperparams(factory, hyperparam_dtype=jnp.float32)(learning_rate=1e-2)


falling: Any = optim.adamw(optax.linear_schedule(1e-2, 0, 5))
clipped: Any = training.adamw(1e-2)
OPTIMIZERS: dict[str, Any] = {
    "training": clipped,
    "optim": optim.adamw(1e-2),
    "chained": optax.chain(falling),
    "adamw": optax.adamw(1e-2),
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-2),
    "steps": optax.MultiSteps(optax.adamw(1e-2), 2),
    "injected": injected(optax.adamw),
    "injected-ours": injected(optim.adamw),
    "finite": optax.apply_if_finite(clipped, 2),
    "schedule-free": optax.contrib.schedule_free(optax.adamw(1e-2, b1=0.0), 1e-2),
    "sam": optax.contrib.sam(optax.adamw(1e-2), optax.sgd(0.1)),
    "mechanize": optax.contrib.mechanize(optax.adamw(1e-2)),
    "mechanize-ours": optax.contrib.mechanize(falling),
    "noise": optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(0)), optax.sgd(0.1)),
}


NARROW = [name for name in OPTIMIZERS if "mechanize" not in name]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in OPTIMIZERS), *((name, "bfloat16") for name in NARROW)],
)
@pytest.mark.covering(("name",), ("dtype",))
def test_step_keeps_the_dtypes_of_the_initial_state(name, dtype):
    """Otherwise the second step compiles again, and a checkpoint does not match the first state."""
    optimizer = OPTIMIZERS[name]
    step = training.make_train_step(loss_fn, optimizer, compute_dtype="float32")
    for detect_anomalies in (False, True):
        state = training.init_state(params_of(dtype), optimizer, detect_anomalies=detect_anomalies)
        types = jax.tree.map(jax.typeof, state)
        after, _ = jax.eval_shape(step, state, *batch(9, 4))
        assert jax.tree.map(jax.typeof, after) == types
        means = [leaf.dtype for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (V, D)]
        assert jnp.float32 in means or name in ("noise", "adafactor")
        if name in ("training", "finite", "optim"):
            assert set(means) == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in NARROW])
def test_optimizers_that_reject_wider_gradients_are_an_error(name):
    """Optax's Mechanic clamps a dot product of gradients with bounds of the parameters' dtype."""
    optimizer, params = OPTIMIZERS[name], params_of("bfloat16")
    with pytest.raises(TypeError, match="clamp requires arguments to have the same dtypes"):
        optimizer.update(training.widen(params), optimizer.init(params), params)
    with pytest.raises(
        TypeError, match=r"does not accept float32 gradients .*float32\. lax\.clamp"
    ):
        training.init_state(params, optimizer)


@pytest.mark.parametrize("leaf", ["relu", jax.nn.relu])
def test_init_state_names_a_leaf_that_is_no_array(leaf):
    with pytest.raises(TypeError, match=r"params/layer/act is .*; it must be an array or a number"):
        training.init_state({"layer": {"act": leaf, "scale": 1.0}}, optax.sgd(0.1))


@pytest.mark.parametrize("leaf", [3, True, np.arange(3), 1j, jax.random.key(0)])
def test_step_names_a_parameter_without_a_gradient(leaf):
    step = training.make_train_step(loss_fn, optax.sgd(0.1))
    state = training.init_state({"layer": [leaf]}, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"state\.params/layer/0 has dtype .*; it must be a float"):
        step(state, *batch(9, 4))


def test_numbers_and_numpy_arrays_are_parameters():
    params = {"scale": 0.5, "shift": np.float32(2.0), "weight": np.ones(3, np.float32)}
    state = training.init_state(params, optim.adamw(0.1), copy_dtype="bfloat16")
    step = training.make_train_step(
        lambda p, *_: jnp.stack([x.sum() for x in p.values()]).sum(),
        optim.adamw(0.1),
        compute_dtype="bfloat16",
    )
    after, metrics = step(state, *batch(9, 4))
    assert metrics["loss"] == 5.5
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)


@pytest.mark.parametrize("name", ["adamw", "sam", "chained"])
def test_step_compiles_once(name):
    traces = []

    def counted(*args):
        traces.append(args)
        return loss_fn(*args)

    step = training.make_train_step(counted, OPTIMIZERS[name], compute_dtype="float32")
    state = training.init_state(params_of("bfloat16"), OPTIMIZERS[name])
    state, _ = step(state, *batch(9, 4, seed=0))
    of_first = len(traces)
    for seed in (1, 2):
        state, _ = step(state, *batch(9, 4, seed=seed))
    assert len(traces) == of_first > 0


def keeps_value():
    """A transformation whose state is the ``value`` of the last update."""

    def update(updates, state, params=None, *, value, **_):
        del state, params
        return updates, value

    made: Any = optax.GradientTransformationExtraArgs
    return made(lambda params: jnp.float32(0), update)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda made: optax.chain(falling, made),
        lambda made: optax.MultiSteps(made, 1),
        lambda made: optax.inject_hyperparams(lambda _: made)(1.0),
    ],
)
@pytest.mark.covering(("wrap",), ("dtype",))
def test_optimizers_with_extra_arguments_get_the_loss_of_the_step(wrap, dtype):
    optimizer: Any = wrap(keeps_value())
    step = training.make_train_step(loss_fn, optimizer, compute_dtype="float32")
    state = training.init_state(params_of(dtype), optimizer)
    after, metrics = step(state, *batch(9, 4))
    assert metrics["loss"] in [x for x in jax.tree.leaves(after.opt_state) if not x.shape]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_optimizers_that_need_a_function_of_the_parameters_are_an_error(dtype):
    optimizer, params = optax.scale_by_backtracking_linesearch(3), params_of(dtype)
    step = training.make_train_step(loss_fn, optimizer, compute_dtype="float32")
    with pytest.raises(TypeError, match=r"needs arguments that a training .* and 'value_fn'"):
        step.lower(training.init_state(params, optimizer), *batch(9, 4))


def test_manually_built_state_keeps_its_dtypes():
    optimizer = optax.adamw(1e-2)
    params = params_of("bfloat16")
    state = training.TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    step = training.make_train_step(loss_fn, optimizer, compute_dtype="float32")
    after, _ = jax.eval_shape(step, state, *batch(9, 4))
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)


def test_parameters_that_share_an_array_are_copied():
    table = params_of()["table"]
    params = {"table": table, "head": table, "bias": np.zeros(V, np.float32)}

    def tied_loss(params, tokens, labels):
        return loss_fn(params | {"head": params["head"].T}, tokens, labels)

    step = training.make_train_step(tied_loss, optax.sgd(0.1), compute_dtype="float32")
    state = training.init_state(params, optax.sgd(0.1))
    state, metrics = step(state, *batch(9, 4))
    assert np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(params["bias"], 0)


def test_step_does_not_donate_the_hyperparameters_of_the_caller():
    given = {"rate": jnp.float32(0.1), "key": jax.random.key(0), "factors": jnp.ones(1)}
    optimizer = optax.chain(
        optax.add_noise(0.01, 0.5, given["key"]),
        optax.inject_hyperparams(optax.scale)(step_size=given["factors"]),
        optax.inject_hyperparams(optax.sgd)(learning_rate=given["rate"]),
    )
    step = training.make_train_step(loss_fn, optimizer, compute_dtype="float32")
    for _ in range(2):
        step(training.init_state(params_of(), optimizer), *batch(9, 4))
    assert not any(x.is_deleted() for x in given.values())


def test_float64_parameters_train_in_float64():
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: x.astype("float64"), params_of())
        for optimizer in (training.adamw(1e-2), optim.adamw(1e-2), optax.adamw(1e-2)):
            step = training.make_train_step(loss_fn, optimizer, compute_dtype="float64")
            state = training.init_state(params, optimizer)
            after, _ = jax.eval_shape(step, state, *batch(9, 4))
            assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
            floating = [x.dtype for x in jax.tree.leaves(state) if x.shape]
            assert set(floating) == {jnp.dtype("float64")}


@pytest.mark.parametrize("optimizer", [training.adamw(1e-2), optim.adamw(1e-2), optax.sgd(0.1)])
def test_step_is_traced_under_strict_promotion(optimizer):
    step = training.make_train_step(
        loss_fn, optimizer, compute_dtype="bfloat16", max_loss_z=3.0, learning_rate=1e-2
    )
    state = training.init_state(
        params_of(), optimizer, copy_dtype="bfloat16", detect_anomalies=True
    )
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.eval_shape(step, state, *batch(9, 4))
