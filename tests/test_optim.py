import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxllm
from jaxllm import training
from jaxllm.models import gpt2
from jaxllm.models.common import unstack
from jaxllm.training import optim

CONFIG = gpt2.GPT2Config(vocab_size=61, max_seq_len=16, layers=2, heads=2, width=32)


def narrow(params):
    return training.cast(params, "bfloat16")


def gradients(params, step):
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(step), len(leaves))
    return structure.unflatten(
        jax.random.normal(k, leaf.shape, jnp.bfloat16) for k, leaf in zip(keys, leaves, strict=True)
    )


def test_masters_match_optax_over_100_steps():
    start = narrow(gpt2.init(jax.random.key(0), CONFIG))
    schedule = training.warmup_cosine(1e-2, 100, warmup=10)
    options: Any = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "mask": training.decay_mask}
    # optax.chain accepts the optimizer like one of optax's.
    optimizer: Any = optim.adamw(schedule, **options, max_grad_norm=1.0)
    ours = optax.chain(optimizer)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, **options))

    @jax.jit
    def run(params):
        def step(carry, count):
            (params, state), (their_params, their_state) = carry
            wide = training.cast(gradients(params, count), "float32")
            updates, state = ours.update(wide, state, params)
            params = optax.apply_updates(params, updates)
            updates, their_state = theirs.update(wide, their_state, their_params)
            their_params = optax.apply_updates(their_params, updates)
            return ((params, state), (their_params, their_state)), None

        wide = training.cast(params, "float32")
        carry = ((params, ours.init(params)), (wide, theirs.init(wide)))
        return jax.lax.scan(step, carry, jnp.arange(100))[0]

    (params, (state,)), (expected, _) = run(start)
    assert int(state.count) == 100
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=5e-6), state.master, expected)
    assert_equal(params, narrow(state.master))


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert jax.tree.map(jax.typeof, a) == jax.tree.map(jax.typeof, b)


MIXED = {
    "weight": jnp.linspace(-1, 1, 60, dtype=jnp.bfloat16).reshape(4, 15),
    "scale": jnp.ones(7),
    "half": jnp.ones(3, jnp.float16),
    "bias": jnp.zeros(5, jnp.bfloat16),
}


def test_step_and_update_agree_on_mixed_dtypes():
    optimizer = optim.adamw(0.1, max_grad_norm=0.5)
    params: Any
    by_update: Any
    params, by_update = MIXED, MIXED
    state = other = optimizer.init(params)
    assert state.master["scale"] is None
    for count in range(3):
        grads = gradients(params, count)
        params, state, norm = optimizer.step(grads, state, params)
        np.testing.assert_allclose(norm, optax.tree_utils.tree_norm(grads), rtol=1e-2)
        updates, other = optimizer.update(training.widen(grads), other, by_update)
        by_update = optax.apply_updates(by_update, updates)
    assert jax.tree.map(jax.typeof, (params, state)) == jax.tree.map(jax.typeof, (by_update, other))
    # The compiler may fuse the two programs differently, which changes the rounding.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), state, other)
    for new, masters in ((params, state.master), (by_update, other.master)):
        for name in ("weight", "half", "bias"):
            assert_equal(new[name], masters[name].astype(new[name].dtype))


def test_narrow_updates_are_within_their_rounding_of_the_masters():
    optimizer = optim.adamw(0.1)
    params, state = MIXED, optimizer.init(MIXED)
    for count in range(5):
        updates: Any
        updates, state = optimizer.update(gradients(params, count), state, params)
        dtypes = jax.tree.map(lambda x: x.dtype.name, updates)
        wide = {"scale": "float32", "half": "float32"}  # float16 and bfloat16 promote to float32
        assert dtypes == {"weight": "bfloat16", "bias": "bfloat16", **wide}
        params: Any = optax.apply_updates(params, updates)
        for name in ("weight", "bias"):
            miss = training.widen(params[name]) - training.widen(narrow(state.master[name]))
            assert (abs(miss) <= abs(training.widen(updates[name])) / 128).all()


def test_step_matches_optax_on_float32():
    params = training.cast(MIXED, "float32")
    grads = training.cast(gradients(params, 0), "float32")
    mask = {"weight": True, "scale": False, "half": False, "bias": False}
    ours = optim.adamw(0.1, weight_decay=0.5, mask=mask)
    theirs = optax.adamw(0.1, b2=0.95, weight_decay=0.5, mask=mask)
    new, state, _ = ours.step(grads, ours.init(params), params, grad_scale=0.25)
    scaled = jax.tree.map(lambda g: 0.25 * g, grads)
    updates, _ = theirs.update(scaled, theirs.init(params), params)
    expected = optax.apply_updates(params, updates)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), new, expected)
    assert jax.tree.leaves(state.master) == []


def test_masters_keep_updates_below_bfloat16_rounding():
    # bfloat16 values near 1 are 1/128 or 1/256 apart; 400 steps of 1e-4 sum to 0.04.
    params = {"x": jnp.ones(1000, jnp.bfloat16)}
    grads = {"x": jnp.full(1000, 0.5, jnp.bfloat16)}

    def run(**options):
        optimizer = optim.adamw(1e-4, weight_decay=0.0, **options)

        @jax.jit
        def many(params):
            def step(carry, _):
                return optimizer.step(grads, carry[1], carry[0])[:2], None

            return jax.lax.scan(step, (params, optimizer.init(params)), length=400)[0]

        return many(params)

    for options in ({}, {"seed": 3}):
        new, state = run(**options)
        np.testing.assert_allclose(state.master["x"], 0.96, atol=1e-4)
        mean = float(new["x"].astype(jnp.float32).mean())
        # 0.96 lies between two bfloat16 values. The nearest is off by 0.0006, and the mean of
        # stochastically rounded values is not.
        assert abs(mean - 0.96) < (2e-3 if not options else 4e-4)
        assert len(np.unique(np.asarray(new["x"], "float32"))) == (2 if options else 1)


@pytest.mark.parametrize("skip", [True, jnp.bool_(True)])
def test_skipped_step_does_not_round_the_masters_again(skip):
    optimizer = optim.adamw(0.1, seed=3)
    params = {"weight": jnp.linspace(1, 2, 64, dtype=jnp.bfloat16)}
    grads = {"weight": jnp.ones(64, jnp.bfloat16)}
    params, state, _ = optimizer.step(grads, optimizer.init(params), params)
    after, state_after, _ = optimizer.step(grads, state, params, skip=skip)
    jax.tree.map(np.testing.assert_array_equal, (after, state_after), (params, state))


def test_update_requires_the_parameters():
    optimizer = optim.adamw(0.1)
    with pytest.raises(ValueError, match="AdamW needs the parameters"):
        optimizer.update(MIXED, optimizer.init(MIXED))


@pytest.mark.parametrize("name", ["grad_scale", "grad_norm"])
def test_clipping_takes_scalars(name):
    with pytest.raises(ValueError, match=rf"{name} has shape \(3,\); it must be a scalar"):
        optim.clipping({"x": jnp.ones(3)}, 1.0, **{name: jnp.ones(3)})


def test_clipping_returns_factor_and_norm():
    grads = {"x": jnp.array([30.0, 40.0])}
    for limit, scale, factor in (
        (1.0, 1.0, 0.02),
        (100.0, 1.0, 1.0),
        (1.0, 0.01, 0.01),
        (None, 3.0, 3.0),
    ):
        found, norm = optim.clipping(grads, limit, scale)
        np.testing.assert_allclose([found, norm], [factor, 50 * scale], rtol=1e-6)
    with pytest.raises(ValueError, match=r"max_grad_norm is -1.0; it must be above 0, or None"):
        optim.clipping(grads, -1.0)


TREE: Any = {"w1": jnp.ones((2, 3)), "w2": jnp.ones((2, 3)), "list": [jnp.ones(2), None]}
OPTIMIZERS: Any = pytest.mark.parametrize("make", [optim.adamw, training.adamw])


@OPTIMIZERS
@pytest.mark.parametrize("how", ["update", "step"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda grads: {"w2": grads["w1"], "w3": grads["w2"], "list": grads["list"]},
            "grads differs from params in structure: w1 is missing; w3 is unexpected",
        ),
        (lambda grads: grads | {"list": [grads["w1"], grads["w1"]]}, "list/1 is unexpected"),
        (lambda grads: grads | {"list": (grads["list"][0], None)}, "grads has the structure"),
        (lambda grads: grads | {"w1": {"a": grads["w1"]}}, "w1 is missing; w1/a is unexpected"),
        (lambda grads: [*grads.values()], "and 2 more"),
        (lambda grads: grads | {"w2": jnp.ones((3, 2))}, r"w2 has shape \(3, 2\); it must be"),
        (lambda grads: grads | {"w2": jnp.ones(())}, r"w2 has shape \(\); it must be"),
    ],
    ids=["names", "none", "type", "deeper", "list", "shape", "broadcast"],
)
def test_gradients_must_match_the_parameters(make, how, change, message):
    optimizer = make(0.1)
    with pytest.raises(ValueError, match=message):
        getattr(optimizer, how)(change(TREE), optimizer.init(TREE), TREE)


@OPTIMIZERS
@pytest.mark.parametrize("how", ["update", "step"])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (TREE | {"w3": jnp.ones(3)}, r"\w+ differs from params in structure: w3 is unexpected"),
        (TREE | {"w2": jnp.ones(())}, r"m\w*/w2 has shape \(\); it must be"),
    ],
    ids=["names", "broadcast"],
)
def test_states_must_match_the_parameters(make, how, other, message):
    optimizer = make(0.1)
    with pytest.raises(ValueError, match=message):
        getattr(optimizer, how)(TREE, optimizer.init(other), TREE)


@OPTIMIZERS
@pytest.mark.parametrize("how", ["update", "step"])
def test_integer_parameters_are_rejected(make, how):
    params = TREE | {"w2": jnp.ones(3, jnp.int32)}
    optimizer = make(0.1)
    with pytest.raises(TypeError, match="w2 has dtype int32; it must be a floating-point array"):
        getattr(optimizer, how)(params, optimizer.init(params), params)


def test_masters_must_match_the_parameter_dtypes():
    optimizer = optim.adamw(0.1)
    for params, found in ((narrow(MIXED), MIXED), (training.widen(MIXED), MIXED)):
        with pytest.raises(ValueError, match=r"state.master has (no|an) array for \w+, which has"):
            optimizer.step(params, optimizer.init(found), params)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"w1": True, "w2": False}, "mask differs from params in structure: list/0 is missing"),
        (TREE | {"w3": True}, "w3 is unexpected"),
        ([True] * 9, "missing"),
        ({"w1": {"a": True}, "w2": True, "list": True}, "w1 is missing; w1/a is unexpected"),
        ({"w1": np.ones(2), "w2": True, "list": True}, "mask has array.*; it must be a bool"),
        ({"w1": "False", "w2": True, "list": True}, "mask has 'False'; it must be a bool"),
        ({"w1": np.ndim, "w2": True, "list": True}, "mask has <function ndim.*; it must be a bool"),
        (dict.fromkeys(TREE, np.ndim), "mask has <function ndim.*; it must be a bool"),
    ],
    ids=["short", "long", "list", "deep", "array", "text", "function", "functions"],
)
def test_invalid_masks_are_rejected(mask, message):
    for given in (mask, lambda params: mask):
        optimizer = optim.adamw(0.1, mask=given)
        with pytest.raises((ValueError, TypeError), match=message):
            optimizer.step(TREE, optimizer.init(TREE), TREE)


def test_mask_of_unstacked_parameters_is_rejected_for_stacked_ones():
    stacked = gpt2.init(jax.random.key(0), CONFIG)
    optimizer = optim.adamw(0.1, mask=training.decay_mask(unstack(stacked)))
    with pytest.raises(ValueError, match="mask differs from params in structure: blocks/"):
        optimizer.step(stacked, optimizer.init(stacked), stacked)


class CallableMask(dict):
    """A callable pytree, like Equinox's modules, which is not a mask function."""

    def __call__(self, _):
        raise AssertionError("called")


jax.tree_util.register_pytree_with_keys(
    CallableMask,
    lambda mask: ([(jax.tree_util.DictKey(key), mask[key]) for key in sorted(mask)], None),
    lambda _, values: CallableMask(zip(("list", "w1", "w2"), values, strict=True)),
)


@pytest.mark.parametrize(
    ("mask", "decayed"),
    [
        (None, [True, True, True]),
        (True, [True, True, True]),
        (False, [False, False, False]),
        ({"w1": True, "w2": np.False_, "list": True}, [True, True, False]),  # a prefix
        ({"w1": jnp.array(False), "w2": True, "list": [False, None]}, [False, False, True]),
        (lambda params: {"w1": False, "w2": True, "list": False}, [False, False, True]),
    ],
)
def test_masks_work_as_in_optax(mask, decayed):
    zeros = jax.tree.map(jnp.zeros_like, TREE)
    for module in (optim, optax):
        optimizer = module.adamw(0.5, b1=0.9, b2=0.95, weight_decay=0.1, mask=mask)
        updates, _ = optimizer.update(zeros, optimizer.init(TREE), TREE)
        found = [float(leaf.ravel()[0]) for leaf in jax.tree.leaves(updates)]
        np.testing.assert_allclose(found, [-0.05 if x else 0.0 for x in decayed], rtol=2e-6)


def test_callable_pytree_mask_is_not_called():
    mask = CallableMask(list=True, w1=False, w2=True)
    params = CallableMask(TREE | {"list": TREE["list"][0]})
    optimizer = optim.adamw(0.5, weight_decay=0.1, mask=mask)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["w1"], 0)
    np.testing.assert_allclose(updates["w2"], -0.05, rtol=2e-6)


@OPTIMIZERS
def test_parameters_without_a_gradient_are_unchanged(make):
    """Equinox's filter_grad gives None for frozen parameters. Their state is unchanged too."""
    params = {**MIXED, "count": jnp.arange(3), "function": None}
    optimizer = make(0.1, max_grad_norm=None)
    state = first = optimizer.init(params)
    frozen = {"weight": None, "scale": None, "count": None}
    for count in range(3):
        grads = gradients({**MIXED, "function": None}, count) | frozen
        updates, _ = optimizer.update(grads, state, params)
        assert [updates[name] for name in (*frozen, "function")] == [None] * 4
        new, state, _, copy = optimizer.step(grads, state, params, copy_dtype="bfloat16")
        assert_equal({name: new[name] for name in frozen}, {name: params[name] for name in frozen})
        assert jax.tree.structure(state) == jax.tree.structure(first)
        assert copy["count"].dtype == jnp.int32
        assert copy["scale"].dtype == copy["bias"].dtype == jnp.bfloat16
        assert (new["bias"] != params["bias"]).all()
        params = new
    _, after = optimizer.update(gradients({**MIXED, "function": None}, 0) | frozen, state, params)
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, first)


@OPTIMIZERS
def test_float64_matches_optax_to_rounding(make):
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(x, "float64"), MIXED)
        params["single"] = jnp.ones(3, jnp.float32)
        ours = make(1e-3, max_grad_norm=0.5, weight_decay=0.0)
        theirs = optax.chain(
            optax.clip_by_global_norm(0.5), optax.adamw(1e-3, b2=0.95, weight_decay=0.0)
        )
        state, their_state, expected = ours.init(params), theirs.init(params), params
        types = jax.tree.map(jax.typeof, state)
        for count in range(3):
            grads = jax.tree.map(lambda p, n=count: jnp.cos(p + n), params)
            params, state, norm = ours.step(grads, state, params)
            updates, their_state = theirs.update(grads, their_state, expected)
            expected: Any = optax.apply_updates(expected, updates)
            assert jax.tree.map(jax.typeof, state) == types
        assert norm.dtype == jnp.float64
        for name, leaf in params.items():
            rtol = 1e-6 if leaf.dtype == jnp.float32 else 1e-13
            np.testing.assert_allclose(leaf, expected[name], rtol=rtol, atol=rtol)


def test_python_scalars_and_numpy_arrays_are_parameters():
    params = {"a": 1.0, "b": np.ones(3, np.float32)}
    for module in (optim, optax):
        optimizer = module.adamw(0.5, b2=0.95, weight_decay=0.1)
        updates, _ = optimizer.update({"a": 2.0, "b": np.ones(3)}, optimizer.init(params), params)
        np.testing.assert_allclose(updates["a"], -0.55, rtol=1e-6)
        np.testing.assert_allclose(updates["b"], -0.55, rtol=1e-6)
    with pytest.raises(TypeError, match="grads/n has dtype int32; it must be a floating-point"):
        optimizer = optim.adamw(0.5)
        optimizer.step(
            {"n": jnp.arange(3)}, optimizer.init({"n": jnp.arange(3)}), {"n": jnp.arange(3)}
        )


@OPTIMIZERS
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"learning_rate": np.nan}, ValueError, "learning_rate is nan; it must be finite"),
        ({"learning_rate": jnp.inf}, ValueError, "learning_rate is inf; it must be finite"),
        ({"learning_rate": "1e-2"}, TypeError, "learning_rate is '1e-2'; it must be a number"),
        ({"b1": 2.0}, ValueError, r"b1 is 2\.0; it must have 0 <= b1 < 1"),
        ({"b2": np.nan}, ValueError, "b2 is nan; it must have 0 <= b2 < 1"),
        ({"eps": np.nan}, ValueError, "eps is nan; it must be finite and at least 0"),
        (
            {"weight_decay": -1},
            ValueError,
            r"weight_decay is -1\.0; it must be finite and at least",
        ),
        ({"weight_decay": np.nan}, ValueError, "weight_decay is nan; it must be finite and at"),
        ({"max_grad_norm": np.nan}, ValueError, "max_grad_norm is nan; it must be above 0"),
    ],
)
def test_hyperparameters_out_of_range_are_rejected(make, wrong, error, message):
    with pytest.raises(error, match=message):
        make(**{"learning_rate": 0.1, **wrong})


HYPER = {"learning_rate": 0.1, "b1": 0.8, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.2}


@OPTIMIZERS
@pytest.mark.parametrize("backend", ["auto", "pallas"])
@pytest.mark.covering(("make",), ("backend",))
def test_hyperparameters_may_be_traced(make, backend):
    params = training.widen(MIXED)
    grads = training.widen(gradients(params, 1))

    def update(values):
        limit = values.pop("max_grad_norm")
        optimizer = make(**values, max_grad_norm=limit)
        return optimizer.step(grads, optimizer.init(params), params)[0]

    values = HYPER | {"max_grad_norm": 0.7}
    with jaxllm.use_backend(backend):
        traced = jax.jit(update)(values)
    expected = update(dict(values))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, traced, expected)
    if backend == "auto":  # a vmapped sweep
        several = jax.vmap(update)(jax.tree.map(lambda x: jnp.array([x, x / 2]), values))
        jax.tree.map(lambda x, y: close(x[0], y), several, expected)
        half = update({name: value / 2 for name, value in values.items()})
        jax.tree.map(lambda x, y: close(x[1], y), several, half)


@OPTIMIZERS
def test_weight_decay_may_be_a_schedule(make):
    params = {"x": jnp.ones((2, 3))}
    zeros = {"x": jnp.zeros((2, 3))}
    optimizer = make(0.5, weight_decay=lambda count: 0.1 * (count + 1), max_grad_norm=None)
    state = optimizer.init(params)
    for factor in (0.95, 0.9):
        before = params
        updates, by_update = optimizer.update(zeros, state, params)
        updated: Any = optax.apply_updates(params, updates)
        np.testing.assert_allclose(updated["x"], factor * before["x"], rtol=1e-6)
        params, state, _ = optimizer.step(zeros, state, params)
        np.testing.assert_allclose(params["x"], factor * before["x"], rtol=1e-6)
        assert_equal(by_update, state)


def test_parameters_may_have_names_of_state_fields():
    params = {"count": jnp.ones((2, 3)), "mu": jnp.ones(3), "nu": jnp.ones(3)}
    optimizer = training.adamw(0.1)
    state = optimizer.init(params)
    grads = jax.tree.map(jnp.cos, params)
    params, state, _ = optimizer.step(grads, state, params)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, optimizer.init(params))
    assert int(state[1][0].count) == 1


@OPTIMIZERS
def test_parameters_with_the_same_path_are_distinct(make):
    params = {"a/b": jnp.ones(3), "a": {"b": jnp.zeros(2)}}
    optimizer = make(0.1, weight_decay=0.0)
    new, *_ = optimizer.step(jax.tree.map(jnp.ones_like, params), optimizer.init(params), params)
    np.testing.assert_allclose(new["a/b"], 0.9, rtol=1e-5)
    np.testing.assert_allclose(new["a"]["b"], -0.1, rtol=1e-5)


def test_moments_have_the_shardings_of_the_parameters():
    mesh = jax.make_mesh((1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = jax.device_put({"a": jnp.ones((4, 2)), "b": jnp.ones(4, jnp.bfloat16)}, sharding)
    state = optim.adamw(0.1).init(params)
    for leaf in jax.tree.leaves((state.m, state.v, state.master)):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@OPTIMIZERS
def test_optimizers_work_under_strict_promotion(make):
    optimizer = make(1e-2, max_grad_norm=1.0)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        state = optimizer.init(MIXED)
        grads = gradients(MIXED, 0)
        params, state, _ = optimizer.step(grads, state, MIXED)
        optimizer.update(grads, state, params)
