"""jaxllm's optimizers match optax.adamw inside every optax wrapper of a transformation."""

import functools
import importlib
import inspect
import pkgutil
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxllm import training
from jaxllm.training import optim

STEPS = 3
MASK = {"table": True, "block": {"weight": True, "bias": False}, "scale": False}
LABELS = {"table": "a", "block": "a", "scale": "b"}  # a prefix tree
FREEZE = {"table": False, "block": {"weight": False, "bias": True}, "scale": False}


def is_even(step, **_):
    return step % 2 == 0


def inject(wrapper, make):
    statics = [name for name in ("mask", "max_grad_norm") if name in make.keywords]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of inject_stateful_hyperparams
        factory = wrapper(make.func, statics, hyperparam_dtype=jnp.result_type(float))
    return factory(**make.keywords)


def average(updates, state, params=None):
    del params
    return jax.tree.map(lambda g: g.mean(0), updates), state


def per_example(wrapper):
    """Passes per-example gradients, along a leading axis, to a wrapper."""

    def update(updates, state, params=None):
        return wrapper.update(jax.tree.map(lambda g: jnp.stack([g, g]), updates), state, params)

    return optax.GradientTransformation(wrapper.init, update)


# For each wrapper, a function of the wrapper and an optimizer factory to a transformation.
WRAPPERS: dict[str, Any] = {
    "optax.MultiSteps": lambda wrapper, make: wrapper(make(), 2),
    "optax.apply_if_finite": lambda wrapper, make: wrapper(make(), 3),
    "optax.chain": lambda wrapper, make: wrapper(optax.clip_by_global_norm(1.0), make()),
    "optax.conditionally_mask": lambda wrapper, make: wrapper(make(), is_even),
    "optax.conditionally_transform": lambda wrapper, make: optax.chain(
        wrapper(make(), is_even), optax.scale(0.1)
    ),
    "optax.flatten": lambda wrapper, make: wrapper(make()),
    "optax.inject_hyperparams": inject,
    "optax.inject_stateful_hyperparams": inject,
    "optax.lookahead": lambda wrapper, make: wrapper(make(), 2, 0.5, reset_state=True),
    "optax.masked": lambda wrapper, make: optax.chain(wrapper(make(), MASK), optax.scale(0.1)),
    "optax.monitor": lambda wrapper, make: optax.chain(wrapper({"made": make()}), make()),
    "optax.multi_transform": lambda wrapper, make: wrapper(
        {"a": make(), "b": optax.sgd(0.1)}, LABELS
    ),
    "optax.named_chain": lambda wrapper, make: wrapper(
        ("made", make()), ("half", optax.scale(0.5))
    ),
    "optax.selective_transform": lambda wrapper, make: wrapper(make(), freeze_mask=FREEZE),
    "optax.with_extra_args_support": lambda wrapper, make: wrapper(make()),
    "optax.contrib.mechanize": lambda wrapper, make: wrapper(make()),
    "optax.contrib.sam": lambda wrapper, make: wrapper(make(), optax.sgd(0.05)),
    "optax.contrib.schedule_free": lambda wrapper, make: wrapper(make(), 1e-2),
    "optax.contrib.split_real_and_imaginary": lambda wrapper, make: wrapper(make()),
    "optax.experimental.aggregating.process": lambda wrapper, make: per_example(
        wrapper(
            optax.identity(), optax.GradientTransformation(optax.init_empty_state, average), make()
        )
    ),
    "optax.experimental.aggregating.add_mean_variance_to_opt": lambda wrapper, make: per_example(
        wrapper(make())
    ),
}
# These call the optimizer without parameters, which AdamW needs, optax's too.
WITHOUT_PARAMS = {
    "optax.contrib.galore": lambda wrapper, make: wrapper(1e-2, base_optimizer=make()),
    "optax.contrib.scale_by_galore": lambda wrapper, make: wrapper(base_optimizer=make()),
}
# The transformation that these take is not an optimizer.
NO_OPTIMIZER = {
    "optax.lbfgs": "a line search",
    "optax.contrib.sophia": "an estimate of the Hessian's diagonal",
}


@functools.cache
def wrappers_of_optax() -> dict[str, Any]:
    """Every public function or class of optax that takes a transformation, by its name."""
    modules = [optax]
    for module in pkgutil.walk_packages(optax.__path__, "optax."):
        if not any(part.startswith("_") or "test" in part for part in module.name.split(".")):
            modules.append(importlib.import_module(module.name))
    modules += [optax.experimental.aggregating]  # a private module under a public name
    found: dict[str, Any] = {}
    for module in modules:
        for name in sorted(vars(module)):
            value = getattr(module, name)
            if name.startswith("_") or not callable(value) or value in found.values():
                continue
            if any("GradientTransformation" in text for text in annotations(value)):
                found[f"{module.__name__}.{name}".replace("._aggregating", ".aggregating")] = value
    return found


def annotations(value) -> list[str]:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    return [str(parameter.annotation) for parameter in parameters]


def test_all_optax_wrappers_are_listed():
    known = {*WRAPPERS, *WITHOUT_PARAMS, *NO_OPTIMIZER}
    assert set(wrappers_of_optax()) <= known, "a new wrapper: add it to a table above"
    assert len(wrappers_of_optax()) >= 15


OPTIONS = {"learning_rate": 1e-2, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
MAKERS = {
    "optax": functools.partial(optax.adamw, **OPTIONS, mask=training.decay_mask),
    "optim": functools.partial(optim.adamw, **OPTIONS, mask=training.decay_mask),
    "training": functools.partial(training.adamw, **OPTIONS, max_grad_norm=None),
}


def params_of(dtype, is_complex=False):
    key = jax.random.key(0)
    params: Any = {
        "table": jax.random.normal(key, (7, 5), dtype),
        "block": {"weight": jax.random.normal(key, (5, 3), dtype), "bias": jnp.ones(3, dtype)},
        "scale": jnp.ones(5, dtype),
    }
    return params | {"phase": jnp.ones(3, jnp.complex64)} if is_complex else params


def gradients(params, step):
    """Different at each step and never tiny, so rounding does not flip the sign of a step."""
    return jax.tree.map(lambda p: (jnp.cos(p.astype(p.dtype) + step) + 1.5).astype(p.dtype), params)


def start(name, transformation, dtype):
    """The initial parameters and state, and the function that takes a step."""
    params = params_of(dtype, is_complex="imaginary" in name)
    is_pair = name == "optax.lookahead"
    if is_pair:
        params = optax.LookaheadParams.init_synced(params)

    def update(params, state, step):
        grads = gradients(params.fast if is_pair else params, step)
        if name == "optax.apply_if_finite":
            grads["scale"] = jnp.where(step == 1, jnp.nan, grads["scale"])
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return params, transformation.init(params), update


def types_of(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


KNOWN = pytest.mark.parametrize("name", [name for name in wrappers_of_optax() if name in WRAPPERS])


@KNOWN
def test_wrapped_optimizers_match_optax(name):
    wrapper, found = wrappers_of_optax()[name], {}
    for which, make in MAKERS.items():
        params, state, update = start(name, WRAPPERS[name](wrapper, make), "float32")
        update = jax.jit(update)
        for step in range(STEPS):
            params, state = update(params, state, step)
        found[which] = params
    for which in ("optim", "training"):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
            found[which],
            found["optax"],
        )


@KNOWN
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.covering(("name",), ("dtype",))
def test_dtypes_are_as_stable_as_optax(name, dtype):
    """A change of dtype after the first step would cost a second compilation."""
    wrapper, changes = wrappers_of_optax()[name], {}
    with jax.enable_x64(dtype == "float64"):
        for which, make in MAKERS.items():
            params, state, update = start(name, WRAPPERS[name](wrapper, make), dtype)
            first = types_of((params, state))
            for step in range(2):
                params, state = jax.eval_shape(update, params, state, step)
                changes[which] = changes.get(which) or types_of((params, state)) != first
    assert not changes["optim"] or changes["optax"]
    assert not changes["training"] or changes["optax"]


@pytest.mark.parametrize("name", [name for name in wrappers_of_optax() if name in WITHOUT_PARAMS])
def test_missing_parameters_are_an_error_as_in_optax(name):
    for make in MAKERS.values():
        made = WITHOUT_PARAMS[name](wrappers_of_optax()[name], make)
        params = params_of("float32")
        with pytest.raises(ValueError, match=r"params is None|current value of parameters"):
            made.update(gradients(params, 0), made.init(params), params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tree_map_params_finds_the_moments(dtype):
    """Users of optax shard the moments like the parameters with tree_map_params."""
    for make in (MAKERS["optim"], MAKERS["training"]):
        optimizer = make()
        params = params_of(dtype)
        state = optimizer.init(params)
        marked = optax.tree_utils.tree_map_params(optimizer, lambda x: x + 1, state)
        moments = [x for x in jax.tree.leaves(marked) if jnp.shape(x)]
        assert len(moments) in (8, 12)  # two moments for each of four arrays, and masters
        jax.tree.map(
            lambda new, old: np.testing.assert_array_equal(new, old + (jnp.shape(old) != ())),
            marked,
            state,
        )
