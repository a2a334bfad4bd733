import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxllm
from jaxllm import data, training
from jaxllm.models import gpt2
from jaxllm.models.common import stack, unstack
from jaxllm.training import optim

V, T, D = 61, 16, 8
CONFIG = gpt2.GPT2Config(vocab_size=V, max_seq_len=T, layers=2, heads=2, width=32)


def gpt2_loss(params, tokens, labels):
    return gpt2.loss(params, tokens, labels, CONFIG)


def toy_params():
    """A bigram model, which compiles quickly."""
    table, head = 0.5 * jax.random.normal(jax.random.key(0), (2, V, D))
    return {"table": table, "head": head.T, "bias": jnp.zeros(V)}


def toy_loss(params, tokens, labels):
    table = params["table"]
    # A one-hot matmul: on a GPU, XLA sums the gradient of table[tokens] in no fixed order.
    rows = jax.nn.one_hot(tokens, V, dtype=table.dtype) @ table
    logits = rows @ params["head"] + params["bias"]
    scores = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(scores, labels[..., None], axis=-1))


def fresh_state(optimizer):
    return training.init_state(toy_params(), optimizer)


def tokens_and_labels(*shape, seed=0):
    tokens = np.random.default_rng(seed).integers(0, V, (*shape, T + 1), np.int32)
    return tokens[..., :-1], tokens[..., 1:]


def assert_trees_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("backend", ["auto", "pallas"])
def test_x64_mode_does_not_change_dtypes(backend):
    with jax.enable_x64(True), jaxllm.use_backend(backend):
        optimizer = training.adamw(1e-2)
        state = training.init_state(gpt2.init(jax.random.key(0), CONFIG), optimizer)
        step = training.make_train_step(gpt2_loss, optimizer, compute_dtype="float32")
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(state)]
        assert jnp.float64 not in dtypes
        for _ in range(2):
            state, metrics = step(state, *tokens_and_labels(1, 2))
        assert [leaf.dtype for leaf in jax.tree.leaves(state)] == dtypes
        assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize(
    ("form", "blocks"), [(stack, ["blocks"]), (unstack, ["blocks/0", "blocks/1"])]
)
def test_decay_mask_selects_gpt2_matrices(form, blocks):
    params = form(gpt2.init(jax.random.key(0), CONFIG))
    mask = training.decay_mask(params)
    decayed = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, value in jax.tree_util.tree_leaves_with_path(mask)
        if value
    }
    weights = itertools.product(blocks, ("attention/qkv", "attention/out", "mlp/up", "mlp/down"))
    assert decayed == {"wte", "wpe", *(f"{block}/{name}/weight" for block, name in weights)}


class Model(NamedTuple):
    blocks: Any
    scale: Any


@pytest.mark.parametrize("outer", [lambda x: x, lambda x: (x,), lambda x: [{"model": x}]])
@pytest.mark.parametrize("kind", [lambda **of: of, Model])
def test_decay_mask_in_nested_containers(kind, outer):
    """Containers around the blocks do not affect the mask."""
    layer = {"weight": jnp.ones((4, 2, 2)), "bias": jnp.ones((4, 2)), "none": None}
    stacked = outer(kind(blocks=layer, scale=jnp.ones(2)))
    decays = {"weight": True, "bias": False, "none": None}
    assert training.decay_mask(stacked) == outer(kind(blocks=decays, scale=False))
    apart = {"weight": jnp.ones((2, 2)), "bias": np.ones(2), "none": None}
    unstacked = outer(kind(blocks=[apart, apart], scale=jax.eval_shape(lambda: jnp.ones(2))))
    assert training.decay_mask(unstacked) == outer(kind(blocks=[decays, decays], scale=False))
    numbered = outer(kind(blocks={"0": apart, "1": apart}, scale=jnp.ones(2)))
    expected = outer(kind(blocks={"0": decays, "1": decays}, scale=False))
    assert training.decay_mask(numbered) == expected


def test_weight_decay_applies_only_to_matrices():
    params: Any = {
        "wte": jnp.ones((3, 2)),
        "blocks": {"weight": jnp.ones((4, 2, 2)), "bias": jnp.ones((4, 2))},
        "scale": jnp.ones(2),
    }
    optimizer = training.adamw(0.5, weight_decay=0.1)
    updates, _ = optimizer.update(
        jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params
    )
    expected: Any = {"wte": -0.05, "blocks": {"weight": -0.05, "bias": 0.0}, "scale": 0.0}
    jax.tree.map(lambda u, e: np.testing.assert_allclose(u, e, rtol=1e-6), updates, expected)


def test_adamw_first_step_is_clipped_sign_descent():
    # The first step is lr * g / (|g| + eps), so an eps of the size of the clipped gradient makes
    # the clipping visible.
    params: Any = {"x": jnp.zeros(2)}
    optimizer = training.adamw(1.0, eps=1.0, max_grad_norm=1.0)
    grads: Any = {"x": jnp.array([30.0, 40.0])}
    updates: Any = optimizer.update(grads, optimizer.init(params), params)[0]
    np.testing.assert_allclose(updates["x"], [-0.6 / 1.6, -0.8 / 1.8], rtol=1e-5)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
@pytest.mark.parametrize("rate", [1e-2, training.warmup_cosine(1e-2, 30, warmup=3)])
def test_in_place_adamw_matches_optax(rate, max_grad_norm):
    optimizer: Any = training.adamw(rate, max_grad_norm=max_grad_norm)
    # Without `step`, the optimizer is an ordinary optax transformation.
    plain = optax.GradientTransformation(optimizer.init, optimizer.update)
    states = []
    for each in (optimizer, plain):
        step = training.make_train_step(toy_loss, each, compute_dtype="float32")
        state = fresh_state(each)
        for seed in range(5):
            state, metrics = step(state, *tokens_and_labels(2, 3, seed=seed))
        states.append((state, metrics))
    ours, theirs = states
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert jax.tree.map(jax.typeof, ours) == jax.tree.map(jax.typeof, theirs)
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(compare, ours, theirs)


def test_warmup_cosine_values():
    schedule = training.warmup_cosine(2.0, 110, warmup=10, floor=0.1)
    values = [float(schedule(step)) for step in (0, 4, 9, 10, 60, 110, 500)]
    np.testing.assert_allclose(values, [0.2, 1.0, 2.0, 2.0, 1.1, 0.2, 0.2], rtol=1e-6)
    assert float(training.warmup_cosine(2.0, 10)(0)) == 2.0
    assert np.isfinite(float(training.warmup_cosine(2.0, 10, warmup=10)(10)))


@pytest.mark.parametrize("wrong", [{"peak": -1}, {"warmup": 11}, {"warmup": -1}, {"floor": 2}])
def test_warmup_cosine_rejects_invalid_arguments(wrong):
    with pytest.raises(ValueError, match="must have"):
        training.warmup_cosine(**{"peak": 1.0, "steps": 10, **wrong})


def test_step_reports_loss_norm_and_learning_rate():
    schedule = training.warmup_cosine(1e-3, 10, warmup=4)
    optimizer = training.adamw(schedule)
    step = training.make_train_step(
        toy_loss, optimizer, learning_rate=schedule, compute_dtype="float32"
    )
    tokens, labels = tokens_and_labels(1, 3)
    loss, grads = jax.value_and_grad(toy_loss)(toy_params(), tokens[0], labels[0])
    norm = np.sqrt(sum(float(jnp.sum(jnp.square(g))) for g in jax.tree.leaves(grads)))

    state, metrics = step(fresh_state(optimizer), tokens, labels)
    assert set(metrics) == {"loss", "grad_norm", "learning_rate"}
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)
    np.testing.assert_allclose(metrics["learning_rate"], 0.25e-3, rtol=1e-6)
    assert int(state.step) == 1
    _, metrics = step(state, tokens, labels)
    np.testing.assert_allclose(metrics["learning_rate"], 0.5e-3, rtol=1e-6)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulation_equals_one_large_batch(accumulate):
    # SGD: Adam would turn the rounding error of a tiny gradient into a full step.
    optimizer = optax.sgd(1.0)
    step = training.make_train_step(toy_loss, optimizer, compute_dtype="float32")
    tokens, labels = tokens_and_labels(accumulate, 2)
    split, split_metrics = step(fresh_state(optimizer), tokens, labels)
    whole, whole_metrics = step(
        fresh_state(optimizer), tokens.reshape(1, -1, T), labels.reshape(1, -1, T)
    )
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(split_metrics[name], whole_metrics[name], rtol=1e-5)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
        split.params,
        whole.params,
    )


def test_bfloat16_compute_keeps_float32_state():
    seen = set()

    def spy(params, tokens, labels):
        seen.update(leaf.dtype.name for leaf in jax.tree.leaves(params))
        return toy_loss(params, tokens, labels)

    optimizer = training.adamw(1e-3)
    step = training.make_train_step(spy, optimizer, compute_dtype="bfloat16")
    state, metrics = step(fresh_state(optimizer), *tokens_and_labels(2, 2))
    assert seen == {"bfloat16"}
    floating = {
        leaf.dtype.name
        for leaf in jax.tree.leaves((state, metrics))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    }
    assert floating == {"float32"}
    evaluate = training.make_eval_step(spy, compute_dtype="bfloat16")
    tokens, labels = tokens_and_labels(2)
    half = evaluate(state.params, tokens, labels)
    full = training.make_eval_step(toy_loss, compute_dtype="float32")(state.params, tokens, labels)
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, full, rtol=1e-2)
    assert float(half) != float(full)


def test_parameters_are_cast_once_per_step():
    optimizer = training.adamw(1e-3)
    step = training.make_train_step(toy_loss, optimizer, compute_dtype="bfloat16")
    jaxpr = str(jax.make_jaxpr(step)(fresh_state(optimizer), *tokens_and_labels(3, 2)))
    # Before the scan over microbatches, not in each iteration.
    assert "scan[" in jaxpr
    for shape in (f"{V},{D}", f"{D},{V}"):
        assert jaxpr.count(f":bf16[{shape}] = convert_element_type") == 1


def test_state_is_donated():
    optimizer = training.adamw(1e-3)
    state = fresh_state(optimizer)
    step = training.make_train_step(toy_loss, optimizer)
    step(state, *tokens_and_labels(1, 2))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_loss_decreases_and_resumed_run_is_bit_identical(tmp_path):
    """Steps 0-29 equal steps 0-14 followed by 15-29 from a copy of the state."""
    data.write_shard(tmp_path / "x.bin", np.arange(600) % 13)
    dataset = data.open_dataset(tmp_path / "*.bin")
    schedule = training.warmup_cosine(1e-2, 30, warmup=3)
    optimizer = training.adamw(schedule)

    def run(state, steps):
        # A new step function for each part, as after a restart.
        step_fn = training.make_train_step(gpt2_loss, optimizer, learning_rate=schedule)
        losses = []
        for step in steps:
            tokens, labels = data.batch(dataset, 4, 16, seed=7, step=step)
            state, metrics = step_fn(state, tokens[None], labels[None])
            losses.append(float(metrics["loss"]))
        return state, losses

    def start():
        return training.init_state(gpt2.init(jax.random.key(0), CONFIG), optimizer)

    whole, losses = run(start(), range(30))
    assert losses[0] > 3.5 and losses[-1] < 1.0
    half, first = run(start(), range(15))
    stored = jax.tree.map(np.array, half)
    resumed, second = run(jax.tree.map(jnp.asarray, stored), range(15, 30))
    assert first + second == losses
    assert_trees_equal(resumed, whole)


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("cpu", None),
    ],
)
def test_model_flops_utilization_uses_the_device_peak(kind, peak):
    assert training.peak_flops(kind) == peak
    found = training.model_flops_utilization(3e12, 0.1, kind)
    assert found == (None if peak is None else pytest.approx(3e13 / peak))


@pytest.mark.parametrize("make", [training.adamw, optim.adamw, optax.adamw])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.covering(("make",), ("accumulate",))
def test_copy_of_the_parameters_does_not_change_steps(make, accumulate):
    # The copy has the compute dtype, to which each step would cast the parameters.
    step = training.make_train_step(toy_loss, make(1e-2), compute_dtype="bfloat16")
    batch = tokens_and_labels(accumulate, 4)
    plain, copied = (
        training.init_state(toy_params(), make(1e-2), copy_dtype=dtype)
        for dtype in (None, "bfloat16")
    )
    for _ in range(3):
        (plain, expected), (copied, metrics) = step(plain, *batch), step(copied, *batch)
        assert plain.copy is None
        # On a GPU, XLA may fuse the cast with later ops, which changes the rounding.
        exact = jax.default_backend() == "cpu"
        assert_close = functools.partial(
            np.testing.assert_allclose, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-5
        )
        jax.tree.map(assert_close, copied.params, plain.params)
        assert_trees_equal(copied.copy, training.cast(copied.params, "bfloat16"))
        jax.tree.map(assert_close, metrics, expected)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (
            (1, 4),
            r"labels has shape \(4, 2, 16\); its first axis must have 1 microbatches, as that",
        ),
        ((2, 1), r"labels has shape \(1, 2, 16\); its first axis must have 2 microbatches"),
        (
            (2, 2, 2, 3),
            r"more\[1\] has shape \(3, 2, 16\); its first axis must have 2 microbatches",
        ),
        ((0, 0), r"tokens has shape \(0, 2, 16\); its first axis must have at least 1 microbatch"),
    ],
)
def test_step_rejects_arrays_of_other_microbatches(counts, message):
    optimizer = optax.sgd(0.1)
    step = training.make_train_step(
        lambda params, *arrays: toy_loss(params, *arrays[:2]), optimizer
    )
    arrays = [tokens_and_labels(count, 2)[0] for count in counts]
    with pytest.raises(ValueError, match=message):
        step(fresh_state(optimizer), *arrays)


@pytest.mark.parametrize(
    ("copy_dtype", "compute_dtype"), [("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_step_rejects_a_copy_that_has_not_the_compute_dtype(copy_dtype, compute_dtype):
    optimizer = training.adamw(1e-2)
    step = training.make_train_step(toy_loss, optimizer, compute_dtype=compute_dtype)
    params = {"a": jnp.arange(3), **toy_params()}  # an integer array is in the copy as it is
    state = jax.eval_shape(
        lambda: training.init_state(params, optax.sgd(0.1), copy_dtype=copy_dtype)
    )
    message = f"state.copy has dtype {copy_dtype} and compute_dtype is {compute_dtype}"
    with pytest.raises(ValueError, match=message):
        step.lower(state, *tokens_and_labels(1, 2))


@pytest.mark.parametrize("dtype", ["int8", "float32", "float8_e4m3fn"])
def test_copies_are_bfloat16_or_float16(dtype):
    with pytest.raises(TypeError, match=f"copy_dtype is {dtype}; it must be bfloat16, float16 or"):
        training.init_state(toy_params(), optax.sgd(0.1), copy_dtype=dtype)


@pytest.mark.parametrize("wrong", [None, optax.adamw])
def test_what_is_no_optimizer_is_rejected(wrong):
    for make in (training.init_state, training.make_train_step):
        first: Any = toy_params() if make is training.init_state else toy_loss
        with pytest.raises(TypeError, match=r"optimizer is .*; it must be a jaxllm"):
            make(first, wrong)


def test_step_rejects_parameters_in_the_place_of_a_state():
    step = training.make_train_step(toy_loss, optax.sgd(0.1))
    with pytest.raises(TypeError, match="state has type dict; it must be a TrainState"):
        step(toy_params(), *tokens_and_labels(1, 2))


def test_whether_to_detect_anomalies_is_a_bool():
    wrong: Any = "False"
    with pytest.raises(TypeError, match="detect_anomalies has 'False'; it must be a bool"):
        training.init_state(toy_params(), optax.sgd(0.1), detect_anomalies=wrong)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"loss_fn": None}, TypeError, "loss_fn is None; it must be a function"),
        ({"learning_rate": np.nan}, ValueError, "learning_rate is nan; it must be finite"),
        ({"learning_rate": "1"}, TypeError, "learning_rate is '1'; it must be a number"),
        ({"compute_dtype": "int32"}, TypeError, "compute_dtype is int32; it must be a floating"),
        ({"compute_dtype": "float8_e5m2"}, TypeError, "it must be a floating dtype of 16 bits"),
        ({"compute_dtype": "float64"}, TypeError, "is float64, which needs jax_enable_x64"),
        ({"compute_dtype": "fp32"}, TypeError, "compute_dtype is 'fp32'; it must be a dtype"),
        ({"float8_counts": "no"}, TypeError, "float8_counts has 'no'; it must be a bool"),
        ({"overlap": None}, TypeError, "overlap has None; it must be a bool"),
        ({"shardings": {}}, TypeError, "shardings has type dict; it must be a TrainState"),
    ],
)
def test_make_train_step_rejects_invalid_arguments(wrong, error, message):
    with pytest.raises(error, match=message):
        training.make_train_step(**{"loss_fn": toy_loss, "optimizer": optax.sgd(0.1), **wrong})


@pytest.mark.parametrize("make", [training.make_train_step, training.make_eval_step])
@pytest.mark.parametrize(
    ("loss", "kind"), [((jnp.ones(()), 1), "tuple"), (None, "NoneType"), (0.5, "float")]
)
def test_losses_that_are_no_arrays_are_named(make, loss, kind):
    is_step = make is training.make_train_step
    step = make(lambda *_: loss, *([optax.sgd(0.1)] if is_step else []))
    first = fresh_state(optax.sgd(0.1)) if is_step else toy_params()
    with pytest.raises(TypeError, match=f"loss_fn returns {kind}; it must return an array"):
        step(first, *tokens_and_labels(1, 2))


@pytest.mark.parametrize(
    ("loss", "message"),
    [(jnp.ones(3), r"float32 of shape \(3,\)"), (jnp.int32(1), r"int32 of shape \(\)")],
)
def test_step_rejects_losses_without_a_gradient(loss, message):
    step = training.make_train_step(lambda *_: loss, optax.sgd(0.1))
    with pytest.raises(TypeError, match=f"loss_fn returns {message}; it must return a scalar"):
        step(fresh_state(optax.sgd(0.1)), *tokens_and_labels(1, 2))


@pytest.mark.parametrize(
    ("rate", "error", "message"),
    [(jnp.ones(3), ValueError, r"has shape \(3,\)"), (None, TypeError, "has type NoneType")],
)
def test_step_names_a_schedule_that_gives_no_scalar(rate, error, message):
    step = training.make_train_step(toy_loss, optax.sgd(0.1), learning_rate=lambda count: rate)
    with pytest.raises(error, match=f"learning_rate {message}; it must be"):
        step.lower(fresh_state(optax.sgd(0.1)), *tokens_and_labels(1, 2))


MAKE: Any = training.adamw
INJECTED = optax.inject_hyperparams(MAKE)(0.1)


@pytest.mark.parametrize(
    ("optimizer", "other", "message"),
    [
        (training.adamw(0.1), optax.sgd(0.1), "a tuple without the moments .* what init returns"),
        (training.adamw(0.1), INJECTED, "InjectStateful.* with more than the moments of Adam and"),
        (training.adamw(0.1), optax.MultiSteps(MAKE(0.1), 2), "more than the moments"),
        (optim.adamw(0.1), optax.sgd(0.1), "type tuple; it must be .* which init returns"),
        (optax.adam(0.1), optax.sgd(0.1), r"state.opt_state is .* of another .*ScaleByAdamState"),
        (INJECTED, training.adamw(0.1), r"state.opt_state is .* of another .*InjectStateful"),
        # Lion would take the moments, and return its own state.
        (optax.lion(0.1), optax.adamw(0.1), r"state.opt_state is .* of another .*ScaleByLionState"),
    ],
)
def test_state_of_another_optimizer_is_an_error(optimizer, other, message):
    step = training.make_train_step(toy_loss, optimizer)
    with pytest.raises(TypeError, match=message):
        step.lower(fresh_state(other), *tokens_and_labels(1, 2))


def test_update_names_the_state_of_another_optimizer():
    params = {"w": jnp.ones(3)}
    state = training.adamw(0.1).init(params)
    message = "state is that of another optimizer: it has the structure .*; it must have that of"
    with pytest.raises(TypeError, match=message):
        training.adamw(0.1, max_grad_norm=None).update(params, state, params)


def test_mean_loss_reads_every_window_once():
    dataset = data.Dataset((np.arange(8 * 5 + 1), np.arange(100, 100 + 8 * 2 + 1)))
    read = []

    def evaluate(params, tokens, labels):
        np.testing.assert_array_equal(labels[:, :-1], tokens[:, 1:])
        read.extend(tokens[:, 0].tolist())
        return jnp.float32(params + tokens[:, 0].mean())

    starts = [*range(0, 40, 8), 100, 108]
    for batch_size in (1, 2, 7, 9):  # of seven windows
        read.clear()
        loss = training.mean_loss(evaluate, 1.0, dataset, batch_size=batch_size, seq_len=8)
        assert sorted(read) == starts
        assert loss == pytest.approx(1 + np.mean(starts))
    for batches, count in ((2, 4), (9, 6)):  # full batches only
        read.clear()
        training.mean_loss(evaluate, 1.0, dataset, batch_size=2, seq_len=8, batches=batches)
        assert len(set(read)) == len(read) == count


def test_mean_loss_of_a_uniform_model_is_log_vocab_size():
    dataset = data.Dataset((np.arange(3 * T + 1) % V,))
    params = jax.tree.map(jnp.zeros_like, toy_params())
    evaluate = training.make_eval_step(toy_loss)
    loss = training.mean_loss(evaluate, params, dataset, batch_size=1, seq_len=T)
    assert loss == pytest.approx(np.log(V), rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"batches": 0}, ValueError, "batches is 0"),
        ({"batch_size": 0}, ValueError, "batch_size is 0"),
        ({"seq_len": 0}, ValueError, "seq_len 0"),
        ({"seq_len": 99}, ValueError, "one window of 99 needs 100"),
        ({"batches": 1.5}, TypeError, r"batches is 1\.5; it must be an integer"),
        ({"batch_size": 2.0}, TypeError, r"batch_size is 2\.0; it must be an integer"),
        ({"seq_len": "8"}, TypeError, "seq_len is '8'; it must be an integer"),
    ],
)
def test_mean_loss_rejects_invalid_arguments(wrong, error, message):
    dataset = data.Dataset((np.arange(50),))
    with pytest.raises(error, match=message):
        training.mean_loss(
            lambda *_: jnp.zeros(()), {}, dataset, **{"batch_size": 1, "seq_len": 8, **wrong}
        )


def test_mean_loss_rejects_losses_that_are_no_scalars():
    dataset = data.Dataset((np.arange(50),))
    with pytest.raises(ValueError, match=r"evaluate returns shape \(2,\); it must return a scalar"):
        training.mean_loss(lambda *_: jnp.zeros(2), {}, dataset, batch_size=2, seq_len=8)


def test_measured_matmul_flops_grow_with_size():
    small, large = (training.measured_matmul_flops("float32", size=n, repeats=3) for n in (8, 256))
    assert 0 < small < large < 1e15


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"size": 0}, ValueError, "size is 0; it must be at least 1"),
        ({"repeats": 0}, ValueError, "repeats is 0; it must be at least 1"),
        ({"repeats": 2.5}, TypeError, "repeats is 2.5; it must be an integer"),
        ({"dtype": "int8"}, TypeError, "dtype is int8; it must be a floating dtype"),
    ],
)
def test_measured_matmul_flops_rejects_invalid_arguments(wrong, error, message):
    with pytest.raises(error, match=message):
        training.measured_matmul_flops(**wrong)


def test_model_flops_utilization_needs_a_time():
    with pytest.raises(ValueError, match="seconds is 0; it must be above 0"):
        training.model_flops_utilization(1e12, 0, "NVIDIA H200")


@pytest.fixture
def no_compilation_cache():
    """Disables JAX's compilation cache, and restores it afterwards."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("no_compilation_cache")
def test_keep_compiled_caches_programs(tmp_path):
    events = []

    def record(event, **_):
        events.append(event)

    x = jnp.arange(5.0)
    training.keep_compiled(tmp_path / "compiled")
    jax.monitoring.register_event_listener(record)
    try:
        for found in (False, True):
            # A new function each time, so that JAX's in-memory cache does not have it.
            assert jax.jit(lambda x: 3 * x + 1)(x).tolist() == [1, 4, 7, 10, 13]
            assert ("/jax/compilation_cache/cache_hits" in events) == found
    finally:
        jax.monitoring.unregister_event_listener(record)
    assert any((tmp_path / "compiled").iterdir())


@pytest.mark.usefixtures("no_compilation_cache")
def test_keep_compiled_respects_an_existing_cache_folder(tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    training.keep_compiled(tmp_path / "other")
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "mine")


@pytest.mark.slow  # tests/sharded/test_models.py trains on more meshes
def test_four_devices_train_like_one():
    root = Path(__file__).parent.parent
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    run = subprocess.run(
        [sys.executable, str(root / "tests" / "several_devices.py")],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root), "XLA_FLAGS": flags},
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found.keys() == {"gpt2", "llama3"}
    for of_model in found.values():
        np.testing.assert_allclose(of_model["four"], of_model["one"], rtol=1e-5)
        assert of_model["apart"] < 1e-4
