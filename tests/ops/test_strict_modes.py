"""Every op and both models under JAX's strict modes: promotion, 64-bit types, ``disable_jit``.

Tracing or lowering finds what a mode forbids, so most of these tests run no program.
"""

import contextlib
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_contract import FIRST_CASES, differentiate, op_under, traced_under_each_backend

import jaxllm
from jaxllm import nn, testing, training
from jaxllm.core import dispatch
from jaxllm.inference import generate, quantize
from jaxllm.inference.cache import decode_step, init_cache, prefill
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import for_decoding, unstack
from jaxllm.ops.block.residual import carry
from jaxllm.training import optim

EACH = traced_under_each_backend(FIRST_CASES)
# disable_jit does not change Pallas kernels, so a few ops are enough for Pallas.
# The blocks are made of other ops.
RUN = [
    pytest.param(
        case,
        backend,
        id=f"{case}-{backend}",
        marks=pytest.mark.slow if case.op.endswith("_block") else (),
    )
    for case in FIRST_CASES
    for backend in ("xla", "pallas")
    if backend == "xla" or case.op in ("layer_norm", "cross_entropy", "quantized_matvec")
]


@contextlib.contextmanager
def strict():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def everything(case, backend):
    """The op and its gradients, as one function of its inputs.

    The cotangent depends on the output: for ones, softmax's gradient is only rounding errors.
    """

    def run(*inputs):
        out, pull = differentiate(op_under(case, backend), inputs)
        if not case.has_backward:
            return out
        return out, pull(jax.tree.map(jnp.sin, out))

    return run


def program(fn, *args):
    """The text of a traced function without memory addresses."""
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(fn)(*args)))


@pytest.mark.parametrize(("case", "backend"), EACH)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.covering(("op", "backend"), ("dtype",))
def test_strict_promotion_changes_no_program(case, backend, dtype):
    inputs = testing.input_types(case, dtype)
    expected = program(everything(case, backend), *inputs)
    with strict():
        assert program(everything(case, backend), *inputs) == expected


ROWS, SCALE, WEIGHT = jnp.ones((2, 3, 8)), jnp.ones(8), jnp.ones((8, 5))
HEADS = jnp.ones((2, 6, 2, 8))
LENGTHS = jnp.array([4, 0], jnp.int32)
LABELS = jnp.array([[0, 1, -1], [2, 3, 4]])
FUNCTIONS = {
    "layer_norm": lambda: nn.layer_norm(ROWS.astype("bfloat16"), SCALE, SCALE),
    "layer_norm_bias": lambda: nn.layer_norm(ROWS.astype("bfloat16"), None, SCALE),
    "rms_norm": lambda: nn.rms_norm(ROWS.astype("bfloat16"), SCALE),
    "swiglu": lambda: nn.swiglu(ROWS, ROWS),
    "swiglu_packed": lambda: nn.swiglu(ROWS),
    "loss": lambda: nn.linear_cross_entropy(
        ROWS, WEIGHT, LABELS, where=jnp.array([True, False, True])
    ),
    "loss_of_long_labels": lambda: nn.linear_cross_entropy(
        ROWS, WEIGHT, np.asarray(LABELS, "uint64"), where=np.ones((2, 1), bool)
    ),
} | {
    f"attention_{name}": functools.partial(
        nn.dot_product_attention, *[HEADS.astype("bfloat16")] * 3, **options
    )
    for name, options in {
        "plain": {},
        "causal": {"is_causal": True, "local_window_size": 2, "return_residual": True},
        "query_lengths": {"query_seq_lengths": LENGTHS},
        "key_lengths": {"key_value_seq_lengths": LENGTHS, "is_causal": True},
        "both_lengths": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
        "bias": {"bias": jnp.ones((2, 1, 6, 6)), "key_value_seq_lengths": LENGTHS},
        "bias_and_residual": {"bias": jnp.ones((), "bfloat16"), "return_residual": True},
    }.items()
}


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("backend", ["auto", "xla", "pallas"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.covering(("name", "x64"), ("backend",))
def test_strict_promotion_changes_no_result_of_nn(name, backend, x64):
    with jaxllm.use_backend(backend):
        expected = jax.eval_shape(FUNCTIONS[name])
        with strict(), jax.enable_x64(x64):
            assert jax.eval_shape(FUNCTIONS[name]) == expected


@pytest.mark.parametrize("name", FUNCTIONS)
def test_disable_jit_changes_no_result_of_nn(name):
    with jaxllm.use_backend("xla"):
        expected = FUNCTIONS[name]()
        with jax.disable_jit(), strict():
            testing.assert_close(FUNCTIONS[name](), expected, "bfloat16")


def test_strict_promotion_changes_no_residual():
    x, bias = jnp.ones((2, 3, 8), jnp.bfloat16), jnp.ones(8, jnp.bfloat16)
    h = carry(jaxllm.ops.residual(x), x, branch=(x, bias))
    expected = h.x
    with strict():
        assert (h.x == expected).all()
        assert (h.add(x).x == expected + x).all()


@pytest.mark.parametrize("backend", ["auto", "xla", "pallas"])
def test_strict_promotion_causes_no_recompilation(backend):
    x = jnp.ones((3, 5))
    op = functools.partial(jaxllm.ops.layer_norm, x, x[0], x[0], backend=backend)
    compiled = dispatch._run._cache_size  # pyright: ignore[reportAttributeAccessIssue]
    op()  # JAX compiles a Pallas program at the first call and at the second
    expected, misses = op(), compiled()
    with strict():
        assert (op() == expected).all()
    assert compiled() == misses


@pytest.mark.parametrize("given", ["learning_rate", "weight_decay", "mask"])
def test_user_functions_keep_the_users_promotion_rules(given):
    params = {"w": jnp.ones((3, 4))}

    def function(_):
        mistaken = jnp.ones((3, 4)) * jnp.ones(4)  # broadcasts
        return {"w": True} if given == "mask" else mistaken[0, 0]

    optimizer = optim.adamw(**{"learning_rate": 1e-3, given: function})
    state = optimizer.init(params)
    optimizer.update(params, state, params)
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match="rank_promotion"):
        optimizer.update(params, state, params)
    optimizer.update(params, state, params)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.op) for case in FIRST_CASES if case.has_backward]
)
def test_jvp_works_under_strict_promotion(case):
    inputs = testing.input_types(case, "bfloat16")
    tangents = jax.tree.map(tangent_type, inputs)
    with strict():
        jax.eval_shape(lambda p, t: jax.jvp(op_under(case, "xla"), p, t), inputs, tangents)


def tangent_type(x):
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(x.shape, x.dtype if floating else jax.dtypes.float0)


@pytest.mark.parametrize(
    ("case", "backend"), [values for values in EACH if values.values[1] != "cuda"]
)
@pytest.mark.covering(("op", "backend"))
def test_x64_changes_no_output_type_of_an_op(case, backend):
    # Lowering runs Pallas kernels through the interpreter; test_contract.py lowers them for a GPU.
    inputs, run = testing.input_types(case, "float32"), everything(case, backend)
    expected = jax.eval_shape(run, *inputs)
    with jax.enable_x64(True):
        lowered = jax.jit(run).lower(*inputs)
    found = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info)
    assert found == expected


@pytest.mark.parametrize(("case", "backend"), RUN)
def test_disable_jit_changes_no_value(case, backend):
    inputs, run = testing.make_inputs(case, "float32"), everything(case, backend)
    expected = jax.jit(run)(*inputs)
    with jax.disable_jit():
        actual = run(*inputs)
    testing.assert_close(actual, expected, "float32", what=str(case))


GPT2 = gpt2.GPT2Config(vocab_size=61, max_seq_len=24, layers=2, heads=2, width=32)
LLAMA3 = llama3.Llama3Config(
    vocab_size=61, max_seq_len=24, layers=2, heads=2, kv_heads=1, width=32, mlp_width=64
)
MODELS = [pytest.param(gpt2, GPT2, id="gpt2"), pytest.param(llama3, LLAMA3, id="llama3")]
BACKENDS = ["xla", "pallas"]


def loss_and_gradients(model, config, remat, params, tokens):
    """The loss, updates and optimizer state of one training step."""

    def loss(params):
        return model.loss(params, tokens, jnp.roll(tokens, -1, axis=1), config, remat=remat)

    value, gradients = jax.value_and_grad(loss)(params)
    optimizer = optim.adamw(1e-3)
    return value, optimizer.update(gradients, optimizer.init(params), params)


def decode(model, config, params, tokens):
    """The logits after a prompt and one more token."""
    params = for_decoding(params)
    cache = init_cache(config, 2, 24, params["wte"].dtype)
    logits, cache = prefill(model, params, tokens, jnp.array([9, 16]), config, cache)
    return decode_step(model, params, jnp.argmax(logits, axis=-1), config, cache)


def programs(model, config):
    return (
        functools.partial(loss_and_gradients, model, config, False),
        functools.partial(loss_and_gradients, model, config, True),
        lambda params, tokens: loss_and_gradients(model, config, False, unstack(params), tokens),
        lambda params, tokens: model.forward(params, tokens, config),
        functools.partial(decode, model, config),
    )


def arguments(model, config, dtype):
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), config))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)
    return params, jax.ShapeDtypeStruct((2, 16), jnp.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.covering(("model", "backend"), ("dtype",))
def test_strict_promotion_changes_no_output_type_of_a_model(model, config, dtype, backend):
    args = arguments(model, config, dtype)
    with jaxllm.use_backend(backend):
        for fn in programs(model, config):
            expected = jax.eval_shape(fn, *args)
            with strict():
                assert jax.eval_shape(fn, *args) == expected
    with strict():
        jax.eval_shape(lambda: model.init(jax.random.key(0), config))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.covering(("model",), ("backend",))
def test_models_run_under_x64(model, config, backend):
    # With x64 the tokens of a caller are int64.
    params, tokens = arguments(model, config, jnp.float32)
    tokens = jax.ShapeDtypeStruct(tokens.shape, jnp.int64)
    with jaxllm.use_backend(backend), jax.enable_x64(True):
        for fn in programs(model, config)[-2:]:
            logits, *_ = jax.tree.leaves(jax.jit(fn).lower(params, tokens).out_info)
            assert logits.dtype == jnp.float32
        fn = functools.partial(jax.value_and_grad(model.loss), config=config)
        value, gradients = jax.jit(fn).lower(params, tokens, tokens).out_info
        assert value.dtype == jnp.float32
        assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


# Llama runs without jit in the last test too.
@pytest.mark.parametrize(
    ("model", "config"),
    [MODELS[0], pytest.param(llama3, LLAMA3, id="llama3", marks=pytest.mark.slow)],
)
def test_disable_jit_changes_no_loss(model, config):
    params = model.init(jax.random.key(0), config)
    tokens = jax.random.randint(jax.random.key(1), (1, 8), 0, config.vocab_size)
    fn = functools.partial(jax.value_and_grad(model.loss), config=config)
    with jaxllm.use_backend("xla"):
        expected = jax.jit(fn)(params, tokens, tokens)
        with jax.disable_jit():
            actual = fn(params, tokens, tokens)
    testing.assert_close(actual, expected, "float32")


def train(model, config, optimizer):
    """The loss after two steps of two microbatches each."""

    def loss(params, tokens, labels):
        return model.loss(params, tokens, labels, config)

    step = training.make_train_step(loss, optimizer, compute_dtype="float32")
    state = training.init_state(model.init(jax.random.key(0), config), optimizer)
    tokens = jax.random.randint(jax.random.key(1), (2, 1, 8), 0, config.vocab_size, jnp.int32)
    for _ in range(2):
        state, metrics = step(state, tokens, tokens)
    return metrics["loss"]


def complete(model, config, params):
    """Sampled and greedy completions of two prompts."""
    prompts = [[3, 1, 4], [1, 5]]
    options: dict[str, Any] = {"top_k": 5, "top_p": 0.9, "key": jax.random.key(2)}
    sampled = generate.complete(model, params, prompts, config=config, max_new_tokens=3, **options)
    greedy = generate.complete(
        model, params, prompts, config=config, max_new_tokens=3, temperature=0.0
    )
    return [tokens.tolist() for tokens in (*sampled, *greedy)]


# One layer: without jit each operation of each layer is a program.
ONE_LAYER = [
    pytest.param(gpt2, dataclasses.replace(GPT2, layers=1), id="gpt2"),
    pytest.param(llama3, dataclasses.replace(LLAMA3, layers=1, window=2), id="llama3"),
]
MODES = {"strict": strict, "disable_jit": jax.disable_jit, "x64": lambda: jax.enable_x64(True)}


@functools.cache
def everything_of(model, config):
    """The losses with each optimizer, and the completions of the int8 model."""
    losses = [train(model, config, optimizer(1e-2)) for optimizer in (optim.adamw, training.adamw)]
    params = model.init(jax.random.key(0), config)
    return losses, complete(model, config, quantize.quantize_params(params, group_size=32))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("model", "config"), ONE_LAYER)
@pytest.mark.covering(("model",), ("mode",))
def test_training_and_generation_are_the_same_in_each_mode(model, config, mode):
    losses, tokens = everything_of(model, config)
    with MODES[mode]():
        actual = everything_of.__wrapped__(model, config)
    testing.assert_close(actual[0], losses, "float32")
    assert actual[1] == tokens
