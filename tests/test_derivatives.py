"""Derivatives of ops: forward mode, which other backends than ``xla`` refuse, and mixed modes."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxllm
from jaxllm import ops, testing
from jaxllm.core import derivatives
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.models import gpt2, llama3

X, V = jax.random.normal(jax.random.key(0), (2, 3, 5))
SCALE, OFFSET = 1 + jax.random.normal(jax.random.key(1), (2, 5)) / 4


def op(x, scale=SCALE):
    return ops.rms_norm(x, scale, backend="xla")


def formula(x, scale=SCALE):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def total(fn):
    return lambda x: jnp.sin(fn(x)).sum()


def repeated(fn):
    """``fn`` twice over, in a loop that is rematerialized."""
    return lambda x: jax.lax.scan(lambda x, _: (jax.checkpoint(fn)(x), None), x, None, length=2)[0]


def hessian_product(fn, x, v):
    return jax.jvp(jax.grad(fn), (x,), (v,))[1]


def transposed(fn):
    return lambda v: jax.linear_transpose(fn, V)(v)[0]


TRANSFORMATIONS = {
    "jvp": lambda fn: jax.jvp(fn, (X,), (V,)),
    "jvp_of_the_scale": lambda fn: jax.jvp(functools.partial(fn, X), (SCALE,), (OFFSET,)),
    "jacfwd": lambda fn: jax.jacfwd(fn)(X),
    "linearize": lambda fn: jax.linearize(fn, X)[1](V),
    "hessian": lambda fn: jax.hessian(total(fn))(X),
    "jacfwd_of_jacfwd": lambda fn: jax.jacfwd(jax.jacfwd(total(fn)))(X),
    "grad_of_jvp": lambda fn: jax.grad(lambda x: jax.jvp(total(fn), (x,), (V,))[1])(X),
    "grad_of_grad": lambda fn: jax.grad(lambda x: jnp.vdot(jax.grad(total(fn))(x), V))(X),
    "third_derivative": lambda fn: jax.jvp(
        lambda x: hessian_product(total(fn), x, V), (X,), (V,)
    ),
    "vmap_of_jvp": lambda fn: jax.vmap(lambda x, v: jax.jvp(fn, (x,), (v,)))(X, V),
    "vmap_of_jvp_over_tangents": lambda fn: jax.vmap(lambda v: jax.jvp(fn, (X,), (v,)))(
        jnp.stack([V, X])
    ),
    "jvp_of_vmap": lambda fn: jax.jvp(jax.vmap(fn), (X,), (V,)),
    "grad_of_vmap": lambda fn: jax.grad(
        lambda scale: total(jax.vmap(lambda x: fn(x, scale)))(X)
    )(SCALE),
    "grad_of_vmap_of_vmap": lambda fn: jax.grad(
        lambda scale: total(jax.vmap(jax.vmap(lambda x: fn(x, scale))))(X[:, None])
    )(SCALE),
    "vmap_of_hessian": lambda fn: jax.vmap(jax.hessian(total(fn)))(X),
    "scan_and_remat": lambda fn: hessian_product(total(repeated(fn)), X, V),
    "repeated_transposition": lambda fn: transposed(transposed(transposed(
        jax.linearize(fn, X)[1]
    )))(V),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_under_xla_every_mix_of_modes_is_that_of_the_formula(name):
    run = TRANSFORMATIONS[name]
    expected = jax.jit(lambda: run(formula))()
    testing.assert_close(jax.jit(lambda: run(op))(), expected, "float32")


@pytest.mark.parametrize("name", ["jvp", "linearize", "hessian"])
def test_forward_mode_needs_no_jit(name):
    run = TRANSFORMATIONS[name]
    expected = jax.jit(lambda: run(formula))()
    testing.assert_close(run(op), expected, "float32")
    with jax.disable_jit(), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        testing.assert_close(run(op), expected, "float32")


@pytest.mark.parametrize("check_vma", [True, False])
def test_forward_mode_in_a_shard_map(check_vma):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def run(fn):
        mapped = jax.shard_map(
            fn, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), check_vma=check_vma
        )
        along = jax.jvp(mapped, (X, SCALE), (V, OFFSET))
        return along, hessian_product(total(functools.partial(mapped, X)), SCALE, OFFSET)

    found, expected = (jax.jit(functools.partial(run, fn))() for fn in (op, formula))
    testing.assert_close(found, expected, "float32")


FORWARD_MODE = {
    "jvp": lambda fn: jax.jvp(fn, (X,), (V,)),
    "jitted": lambda fn: jax.jvp(jax.jit(fn), (X,), (V,)),
    "in_jit": lambda fn: jax.jit(lambda v: jax.jvp(fn, (X,), (v,)))(V),
    "jacfwd": lambda fn: jax.jacfwd(fn)(X),
    "linearize": lambda fn: jax.linearize(fn, X)[1](V),
    "hessian": lambda fn: jax.hessian(total(fn))(X),
    "scan": lambda fn: jax.jvp(repeated(fn), (X,), (V,)),
}


@pytest.mark.parametrize("backend", ["auto", "pallas"])
@pytest.mark.parametrize("name", FORWARD_MODE)
def test_other_backends_say_what_to_do_in_forward_mode(name, backend):
    with pytest.raises(jaxllm.BackendError, match="use backend 'xla'") as caught:
        FORWARD_MODE[name](lambda x: ops.rms_norm(x, SCALE, backend=backend))
    message = str(caught.value).partition("\n")[0]  # then JAX's note on tracebacks
    assert "cannot serve" in message and "rms_norm" in message and ". " not in message


@pytest.mark.parametrize("backend", ["auto", "pallas"])
def test_watching_for_forward_mode_leaves_reverse_mode_alone(backend):
    def fn(x, scale=SCALE):
        return ops.rms_norm(x, scale, backend=backend)

    for run in (
        lambda fn: jax.grad(total(repeated(fn)))(X),
        lambda fn: jax.vmap(jax.grad(total(fn)))(X),
        TRANSFORMATIONS["grad_of_vmap"],
    ):
        testing.assert_close(jax.jit(lambda run=run: run(fn))(), run(formula), "float32")


def test_integer_and_absent_arguments_have_no_tangents():
    logits, moved = jax.random.normal(jax.random.key(2), (2, 4, 7))
    labels = jnp.array([3, -1, 0, 6])

    def formula(logits):
        losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1)[:, 0]
        return (losses * (labels >= 0)).sum() / 3

    expected = jax.jvp(formula, (logits,), (moved,))
    without = np.zeros(labels.shape, jax.dtypes.float0)
    loss = functools.partial(ops.cross_entropy, backend="xla")
    testing.assert_close(jax.jvp(loss, (logits, labels), (moved, without)), expected, "float32")

    weight = jax.random.normal(jax.random.key(3), (5, 4))
    found = jax.jvp(lambda x: ops.linear(x, weight, None, backend="xla"), (X,), (V,))
    testing.assert_close(found, (X @ weight, V @ weight), "float32")


def test_the_tables_of_rope_have_neither_gradients_nor_tangents():
    q = jax.random.normal(jax.random.key(2), (1, 3, 2, 4))
    tables = ops.rope_table(jnp.arange(3), 4, theta=1e4)
    rope = functools.partial(ops.rope, q, q, backend="xla")
    _, (dq, dk) = jax.jvp(rope, tables, tables)
    assert not dq.any() and not dk.any()
    gradients = jax.grad(lambda tables: jnp.sum(rope(*tables)[0] ** 3))(tables)
    assert not any(x.any() for x in gradients)


@jax.custom_jvp
def kernel(x):
    return jnp.sin(x)


kernel.defjvps(None)


class Shipped:
    """What JAX has for a GPU instead of a reference; differentiated, it gives zeros."""

    @staticmethod
    def sine(x):
        return kernel(x)


class Sine:
    @staticmethod
    def sine(x):
        return jnp.sin(x)


def test_what_jax_ships_for_a_gpu_has_the_derivative_of_the_reference():
    sine = functools.partial(dispatch, Op("sine", Sine, xla=Shipped), Direction.INFERENCE, "xla")
    program = str(jax.make_jaxpr(lambda x: jax.jvp(sine, (x,), (x,)))(X))
    assert "platform_index" in program and program.count("cos") == 2  # for each platform
    testing.assert_close(jax.jvp(sine, (X,), (V,)), (jnp.sin(X), V * jnp.cos(X)), "float32")


class Static(NamedTuple):
    backend: str


def two_outputs(symbolic_zeros):
    """``(2 a, 3 b)`` of a pair, and a list of what cotangents its rule has got."""
    seen = []
    fn = derivatives.custom_vjp(lambda static, pair: (2 * pair[0], 3 * pair[1]))

    def forward(static, pair):
        a, b = (getattr(x, "value", x) for x in pair)
        return (2 * a, 3 * b), None

    def backward(static, _, cotangents):
        seen.append([type(ct) is SymbolicZero for ct in cotangents])
        return ((2 * cotangents[0], None),)

    fn.defvjp(forward, backward, symbolic_zeros=symbolic_zeros)
    return fn, seen


@pytest.mark.parametrize("symbolic_zeros", [True, False])
@pytest.mark.parametrize("backend", ["xla", "auto"])
def test_a_rule_gets_symbolic_zeros_where_it_asks_for_them(backend, symbolic_zeros):
    fn, seen = two_outputs(symbolic_zeros)
    of_row = jax.grad(lambda pair: fn(Static(backend), pair)[0].sum())
    for gradients in (of_row((SCALE, SCALE)), jax.vmap(of_row)((X[0], X[0]))):
        assert (gradients[0] == 2).all() and (gradients[1] == 0).all()
        assert seen.pop() == [False, symbolic_zeros]


GPT2 = gpt2.GPT2Config(vocab_size=61, max_seq_len=16, layers=2, heads=2, width=16)
LLAMA3 = llama3.Llama3Config(
    vocab_size=61, max_seq_len=16, layers=2, heads=2, kv_heads=1, width=16, mlp_width=32
)
MODELS = [pytest.param(gpt2, GPT2, id="gpt2"), pytest.param(llama3, LLAMA3, id="llama3")]


@pytest.mark.parametrize(("model", "config"), MODELS)
def test_forward_mode_of_a_loss_agrees_with_its_gradient(model, config):
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 61)
    params = model.init(jax.random.key(0), config)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    along = [jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]

    @jax.jit
    def run(params, along):
        loss = functools.partial(model.loss, tokens=tokens, labels=tokens, config=config)
        return jax.jvp(loss, (params,), (along,))[1], jax.grad(loss)(params)

    with jaxllm.use_backend("xla"):
        change, gradient = run(params, tree.unflatten(along))
    testing.assert_close(change, sum(map(jnp.vdot, jax.tree.leaves(gradient), along)), "float32")


def test_second_derivatives_go_through_ffn_blocks():
    up, down = (jax.random.normal(jax.random.key(i), (5, 5)) for i in (3, 4))
    bias = jnp.zeros(5)

    def fused(x):
        h = ops.residual(x)
        norm = {"scale": SCALE, "bias": OFFSET}
        layers = {"up": {"weight": up, "bias": bias}, "down": {"weight": down, "bias": bias}}
        for _ in range(2):
            h = ops.ffn_block(h, norm, layers, backend="xla")
        return jnp.sin(h.x).sum()

    def formula(x):
        for _ in range(2):
            rows = x - x.mean(-1, keepdims=True)
            rows = rows * jax.lax.rsqrt((rows * rows).mean(-1, keepdims=True) + 1e-5)
            x = x + jax.nn.gelu((rows * SCALE + OFFSET) @ up, approximate=True) @ down
        return jnp.sin(x).sum()

    def curvatures(fn):
        return (
            hessian_product(fn, X, V),
            jax.grad(lambda x: jnp.vdot(jax.grad(fn)(x), V))(X),
            jax.grad(lambda x: jax.jvp(fn, (x,), (V,))[1])(X),
        )

    found, expected = (jax.jit(functools.partial(curvatures, fn))() for fn in (fused, formula))
    for actual, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("remat", [False, True])
def test_forward_mode_costs_reverse_mode_no_memory(remat):
    def memory(backend):
        def block(x, weight):
            out, x = ops.add_layer_norm(x, x, SCALE, backend=backend)
            return out + ops.linear(x, weight, None, activation="gelu", backend=backend), None

        def loss(weights):
            x = jnp.tile(X, (100, 1, 1))
            x, _ = jax.lax.scan(jax.checkpoint(block) if remat else block, x, weights)
            return jnp.sum(x * x)

        with jax.default_device(jax.devices("cpu")[0]):
            program = jax.jit(jax.grad(loss)).lower(jnp.ones((8, 5, 5))).compile()
        analysis = program.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert memory("xla") <= memory("auto")  # on a CPU the same program, by jax.custom_vjp
