"""``explain`` lists the kernels of a program: all of them, and no others."""

import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.core import Tracer
from ops.test_contract import FIRST_CASES, LARGE_CASES, traced_with_gradients

import jaxllm
from jaxllm import testing, training
from jaxllm.core import ffi
from jaxllm.inference.cache import decode_step, init_cache, prefill
from jaxllm.inference.quantize import quantize_params
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import for_decoding, unstack

GPT2 = gpt2.PRESETS["d6"]
LLAMA3 = llama3.PRESETS["d6"]
MODELS = [pytest.param(gpt2, GPT2, id="gpt2"), pytest.param(llama3, LLAMA3, id="llama3")]


@pytest.fixture(autouse=True)
def on_a_hopper_gpu(with_kernels, with_hopper_gpus, monkeypatch):
    monkeypatch.setattr(ffi, "device", lambda: ffi.H100)


def assert_explained(fn, *args):
    """The rows of ``explain`` are the custom calls of the program for an NVIDIA GPU."""
    explanation = jaxllm.explain(fn, *args)
    found = Counter(kernel for call in explanation.calls for kernel in call.kernels)
    program = testing.lower_for_cuda(fn, *args)
    called = Counter(re.findall(r"custom_call @jaxllm_(\w+)\(", program))
    assert found == called
    for call in explanation.calls:
        assert bool(call.kernels) == (call.on_gpu == "cuda"), call
        for kernel in call.kernels:
            assert kernel in str(explanation)


def shapes(fn, *args):
    return jax.eval_shape(lambda *a: training.cast(fn(*a), jnp.bfloat16), *args)


@pytest.mark.parametrize("case", [*FIRST_CASES, *LARGE_CASES], ids=str)
@pytest.mark.parametrize("backend", ["auto", "cuda"])
@pytest.mark.covering(("case",), ("op", "backend"))
def test_rows_are_the_custom_calls_of_an_op(case, backend):
    if "cuda" in case.refused_by and backend == "cuda":
        return
    function = case.call or getattr(jaxllm.ops, case.op)
    fn = functools.partial(function, **case.static, backend=backend)
    inputs = testing.input_types(case, "bfloat16")
    if case.has_backward:
        assert_explained(traced_with_gradients(fn), *inputs)
    else:
        assert_explained(fn, *inputs)


@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.parametrize("unrolled", [False, True], ids=["scan", "unrolled"])
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.covering(("model", "unrolled"), ("remat",))
def test_rows_are_the_custom_calls_of_a_training_step(model, config, unrolled, remat):
    def init(key):
        params = model.init(key, config)
        return unstack(params) if unrolled else params

    params = shapes(init, jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((32, 1024), jnp.int32)

    def step(params, tokens):
        return jax.value_and_grad(model.loss)(params, tokens, tokens, config, remat=remat)

    assert_explained(step, params, tokens)


@pytest.mark.parametrize(("model", "config"), MODELS)
@pytest.mark.parametrize("form", ["plain", "decoding", "int8"])
@pytest.mark.parametrize("batch", [1, 40])
@pytest.mark.covering(("model",), ("form",), ("batch",))
def test_rows_are_the_custom_calls_of_prefill_and_decode(model, config, form, batch):
    forms = {"plain": lambda p: p, "decoding": for_decoding, "int8": quantize_params}
    params = shapes(lambda key: model.init(key, config), jax.random.key(0))
    params = jax.eval_shape(forms[form], params)
    cache = jax.eval_shape(lambda: init_cache(config, batch, 512, jnp.bfloat16))
    tokens = jax.ShapeDtypeStruct((batch, 256), jnp.int32)
    each = jax.ShapeDtypeStruct((batch,), jnp.int32)
    assert_explained(
        lambda p, t, n, c: prefill(model, p, t, n, config, c), params, tokens, each, cache
    )
    assert_explained(lambda p, t, c: decode_step(model, p, t, config, c), params, each, cache)


@pytest.mark.parametrize("is_jitted", [False, True])
def test_arguments_that_are_no_arrays_are_static(is_jitted):
    config = gpt2.GPT2Config(vocab_size=61, layers=1, heads=2, width=16, max_seq_len=8)
    params = jax.eval_shape(lambda: gpt2.init(jax.random.key(0), config))
    tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)

    def forward(params, tokens, *, config, backend):
        with jaxllm.use_backend(backend):
            return gpt2.forward(params, tokens, config)

    of_arrays: Any = forward
    fn = jax.jit(of_arrays, static_argnames=("config", "backend")) if is_jitted else of_arrays
    for backend in ("auto", "xla"):
        static = {"config": config, "backend": backend}
        expected = jaxllm.explain(functools.partial(of_arrays, **static), params, tokens)
        assert expected.calls
        assert str(jaxllm.explain(fn, params, tokens, **static)) == str(expected)


@pytest.mark.parametrize("eps", [1e-6, np.float32(1e-6)], ids=["python", "numpy"])
def test_options_are_passed_as_in_a_call(eps):
    x = jax.ShapeDtypeStruct((2, 8), jnp.bfloat16)
    (call,) = jaxllm.explain(jaxllm.ops.rms_norm, x, jnp.ones(8), eps=eps).calls
    assert call.stem == "rms_norm_forward"


def test_so_are_positional_arguments():
    def norm(name, x, eps):
        assert isinstance(eps, Tracer)  # a number is traced, as jit does
        return getattr(jaxllm.ops, name)(x, jnp.ones(8)) + eps

    explanation = jaxllm.explain(norm, "rms_norm", jax.ShapeDtypeStruct((2, 8), "float32"), 1e-6)
    assert [call.stem for call in explanation.calls] == ["rms_norm_forward"]


def test_a_jitted_function_knows_its_static_arguments():
    def norm(name, x, dtype, rows):
        assert isinstance(x, Tracer)
        return getattr(jaxllm.ops, name)(x[:rows], jnp.ones(8)).astype(dtype)

    x = jax.ShapeDtypeStruct((2, 8), "float32")
    fn = jax.jit(norm, static_argnums=(0, 2, 3))
    explanation = jaxllm.explain(fn, "rms_norm", x, jnp.bfloat16, 1)
    assert [call.shapes for call in explanation.calls] == ["f32[1,8] f32[8]"]


def test_static_arguments_need_not_be_hashable():
    def norm(names, options, x):
        assert isinstance(options["scale"], Tracer)
        return getattr(jaxllm.ops, names[0])(x, options["scale"])

    options = {"scale": jax.ShapeDtypeStruct((8,), "float32"), "name": "a string, which is static"}
    explanation = jaxllm.explain(norm, ["rms_norm"], options, jnp.ones((2, 8)))
    assert [call.stem for call in explanation.calls] == ["rms_norm_forward"]
