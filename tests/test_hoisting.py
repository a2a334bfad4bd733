"""A step that accumulates gradients rounds its weights to float8 once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import eval_jaxpr  # type: ignore[attr-defined]
from jaxprs import equations

from jaxllm import training
from jaxllm.core.hoisting import hoist_rounding
from jaxllm.models import llama3
from jaxllm.models.common import unstack
from jaxllm.training import step as training_step

F8 = "float8_e4m3fn"
CONFIG = llama3.Llama3Config(
    vocab_size=64, max_seq_len=32, layers=1, heads=2, kv_heads=1, width=48, mlp_width=80
)
B, T = 2, 16


def rounded(jaxpr):
    """The shapes of what equations convert to float8."""
    return [
        eqn.outvars[0].aval.shape
        for eqn in equations(jaxpr)
        if eqn.primitive.name == "convert_element_type" and "float8" in str(eqn.params["new_dtype"])
    ]


def in_loops(found):
    """The same of the bodies of loops."""
    loops = [eqn.params["jaxpr"] for eqn in equations(found) if eqn.primitive.name == "scan"]
    assert loops
    return [shape for loop in loops for shape in rounded(loop)]


def total(step, xs):
    return jax.lax.scan(lambda sum, x: (sum + step(x), None), jnp.zeros((4, 30000)), xs)[0]


def test_what_is_rounded_of_fixed_arguments_is_rounded_before_the_loop():
    def product(weights, x):
        w = weights["w"].T
        scale = jnp.abs(w).max() / 448
        x8, w8 = (x / 3).astype(F8), (w / scale).astype(F8)
        return x8.astype(jnp.float32) @ w8.astype(jnp.float32).T * scale

    key = jax.random.key(0)
    weights = {"w": jax.random.normal(key, (6, 30000))}  # in float32 too large to be kept
    xs = jax.random.normal(key, (3, 4, 6))

    def as_written(weights, xs):
        return total(lambda x: product(weights, x), xs)

    def hoisted(weights, xs):
        return total(hoist_rounding(product, weights, xs[0]), xs)

    programs = (jax.make_jaxpr(run)(weights, xs) for run in (as_written, hoisted))
    assert list(map(in_loops, programs)) == [[(4, 6), (30000, 6)], [(4, 6)]]
    for run in (hoisted, jax.jit(hoisted)):
        np.testing.assert_array_equal(run(weights, xs), jax.jit(as_written)(weights, xs))


def test_without_float8_the_function_stays_as_it_is():
    def function(weights, x):
        return (jnp.sin(weights).sum() * x).sum()

    weights = x = jnp.ones(3)
    found = jax.make_jaxpr(lambda x: hoist_rounding(function, weights, x)(x))(x)
    primitives = [eqn.primitive.name for eqn in found.jaxpr.eqns]
    assert primitives == [
        eqn.primitive.name for eqn in jax.make_jaxpr(lambda x: function(weights, x))(x).jaxpr.eqns
    ]


def test_effects_stay_in_the_loop(capfd):
    def function(weights, x):
        jax.debug.print("weights {}", weights[0].astype(int), ordered=True)
        return weights.astype(F8).astype(jnp.float32) * x

    weights, xs = jnp.full(4, 3.0), jnp.ones((2, 4))

    @jax.jit
    def run(weights, xs):
        step = hoist_rounding(function, weights, xs[0])
        return jax.lax.map(step, xs)

    np.testing.assert_array_equal(run(weights, xs), jnp.full((2, 4), 3.0))
    jax.effects_barrier()
    assert capfd.readouterr().out == "weights 3\n" * 2


def program_and_arguments(precision, hoist):
    """A training step of three microbatches, traced, and its arguments."""
    optimizer = training.adamw(1e-3, max_grad_norm=1.0)
    state = training.init_state(unstack(llama3.init(jax.random.key(0), CONFIG)), optimizer)

    def loss(params, tokens, labels):
        return llama3.loss(params, tokens, labels, CONFIG, precision=precision)

    # In float32: XLA may leave out roundings to bfloat16, and does so by what is in one fusion.
    options = {"compute_dtype": "float32", "float8_counts": True}
    step = training.make_train_step(loss, optimizer, **options)
    tokens = jax.random.randint(jax.random.key(1), (3, B, T + 1), 0, CONFIG.vocab_size)
    arguments = state, tokens[..., :-1], tokens[..., 1:].at[0, 0].set(-1)
    with pytest.MonkeyPatch.context() as patch:
        if not hoist:
            patch.setattr(
                training_step, "hoist_rounding", lambda f, fixed, *_: lambda *args: f(fixed, *args)
            )
        return jax.make_jaxpr(step)(*arguments), arguments


@pytest.mark.parametrize("precision", ["row", "tensor"])
def test_a_step_rounds_weights_before_its_loop(precision):
    hoisted, _ = program_and_arguments(precision, True)
    as_written, _ = program_and_arguments(precision, False)
    hoisted, as_written = map(in_loops, (hoisted, as_written))
    of_tokens = [shape for shape in as_written if B * T in shape or shape[:2] == (B, T)]
    assert hoisted == of_tokens
    # Forward and backward: the projection, its output, and two of the MLP.
    assert len(as_written) - len(of_tokens) >= 2 * 4


def test_a_step_computes_the_same():
    results = []
    for hoist in (True, False):
        program, arguments = program_and_arguments("tensor", hoist)
        run = jax.jit(functools.partial(eval_jaxpr, program.jaxpr))
        results.append(run(program.consts, *jax.tree.leaves(arguments)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
