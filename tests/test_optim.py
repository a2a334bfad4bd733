import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm import optim, training
from jaxllm.models import gpt2

CONFIG = gpt2.GPT2Config(vocab_size=61, max_seq_len=16, layers=2, heads=2, width=32)


def narrow(params):
    return training.cast(params, "bfloat16")


def gradients(params, step):
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(step), len(leaves))
    return structure.unflatten(
        jax.random.normal(k, leaf.shape, jnp.bfloat16) for k, leaf in zip(keys, leaves, strict=True)
    )


def test_masters_are_those_of_optax_over_a_hundred_steps():
    start = narrow(gpt2.init(jax.random.key(0), CONFIG))
    schedule = training.warmup_cosine(1e-2, 100, warmup=10)
    options: Any = {"b1": 0.9, "b2": 0.95, "weight_decay": 0.1, "mask": training.decay_mask}
    # chain takes ours like one of optax's own.
    optimizer: Any = optim.adamw(schedule, **options, max_grad_norm=1.0)
    ours = optax.chain(optimizer)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, **options))

    @jax.jit
    def run(params):
        def step(carry, count):
            (params, state), (their_params, their_state) = carry
            grads = gradients(params, count)
            updates, state = ours.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            wide = training.cast(grads, "float32")
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
    params, by_update = MIXED, MIXED
    state = other = optimizer.init(params)
    assert state.master["scale"] is None
    for count in range(3):
        grads = gradients(params, count)
        params, state, norm = optimizer.step(grads, state, params)
        np.testing.assert_allclose(norm, optax.tree_utils.tree_norm(grads), rtol=1e-2)
        updates, other = optimizer.update(grads, other, by_update)
        by_update = optax.apply_updates(by_update, updates)
    assert_equal(params, by_update)
    assert_equal(state, other)
    for name in ("weight", "half", "bias"):
        assert_equal(params[name], state.master[name].astype(params[name].dtype))


def test_the_step_is_optax_on_float32():
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


def test_small_steps_are_not_lost():
    # A bfloat16 near 1 moves by 1/128 at least; 400 steps of 1e-4 are five of those.
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
        # 0.96 lies between two bfloat16: the nearest is off by 0.0006, the mean of random ones not.
        assert abs(mean - 0.96) < (2e-3 if not options else 4e-4)
        assert len(np.unique(np.asarray(new["x"], "float32"))) == (2 if options else 1)


def test_update_wants_the_parameters():
    optimizer = optim.adamw(0.1)
    with pytest.raises(ValueError, match="AdamW needs the parameters"):
        optimizer.update(MIXED, optimizer.init(MIXED))


def test_clipping():
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
