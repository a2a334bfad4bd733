"""``jax.export`` of both models with a symbolic batch, and the custom call checks to disable."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import kernel_table
import numpy as np
import pytest

import jaxllm
from jaxllm import export, ops, training
from jaxllm.core import ffi
from jaxllm.core.backend import BackendError
from jaxllm.inference.cache import decode_step, init_cache, prefill
from jaxllm.models import gpt2, llama3
from jaxllm.models.common import for_decoding
from jaxllm.testing import assert_close
from jaxllm.training import optim

PLATFORMS = ("cpu", "cuda")
LENGTH, MAX_LENGTH = 6, 8
MODELS = {
    "gpt2": (gpt2, gpt2.GPT2Config(vocab_size=61, max_seq_len=8, layers=2, heads=2, width=32)),
    "llama3": (
        llama3,
        llama3.Llama3Config(
            vocab_size=61, max_seq_len=8, layers=2, heads=2, kv_heads=1, width=32, mlp_width=48
        ),
    ),
}
each_model = pytest.mark.parametrize("model", MODELS)
CASES = [(model, what) for model in MODELS for what in ("forward", "loss", "prefill", "decode")]


def program_of(model, what):
    """A function of ``(params, *arrays)``, and a function from a batch size to the arrays."""
    module, config = MODELS[model]

    def rows(batch, *length):
        return jnp.arange(np.prod((batch, *length))).reshape(batch, *length) % config.vocab_size

    def labels(batch):
        return rows(batch, LENGTH).at[0, 1].set(-100)

    def cache(batch):
        empty = init_cache(config, batch, MAX_LENGTH, jnp.float32)
        keys = tuple(jnp.ones_like(x) for x in empty.keys)
        return empty._replace(keys=keys, values=keys, lengths=jnp.arange(batch, dtype=jnp.int32))

    if what == "forward":
        return lambda p, x: module.forward(p, x, config), lambda b: (rows(b, LENGTH),)
    if what == "loss":
        gradients = jax.value_and_grad(lambda p, x, y: module.loss(p, x, y, config))
        return gradients, lambda b: (rows(b, LENGTH), labels(b))
    if what == "prefill":
        return (
            lambda p, x, n, c: prefill(module, p, x, n, config, c),
            lambda b: (rows(b, LENGTH), jnp.full(b, LENGTH), cache(b)),
        )
    return lambda p, x, c: decode_step(module, p, x, config, c), lambda b: (rows(b), cache(b))


def params_of(model, what="forward"):
    module, config = MODELS[model]
    params = module.init(jax.random.key(0), config)
    return for_decoding(params) if what == "decode" else params


def any_batch(arrays, constraints=()):
    """The types of arrays, with the batch dimension replaced by a symbolic size."""
    (b,) = jax.export.symbolic_shape("b", constraints=constraints)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype), arrays)


def exported(fn, *args, platforms=PLATFORMS, checks=None):
    checks = export.disabled_checks() if checks is None else checks
    fresh = jax.jit(lambda *args: fn(*args))  # a new function, so that JAX traces it again
    return jax.export.export(fresh, platforms=platforms, disabled_checks=checks)(*args)


def custom_calls(program):
    """The custom calls of a program, without JAX's own shape assertion."""
    return set(re.findall(r"custom_call @([\w$.]+)", program.mlir_module())) - {"shape_assertion"}


@pytest.mark.parametrize(("model", "what"), CASES)
@pytest.mark.covering(("what",), ("model",))
def test_exported_model_runs_at_any_batch_size(model, what):
    fn, arrays_of = program_of(model, what)
    params = params_of(model, what)
    program = exported(fn, params, *any_batch(arrays_of(1)))
    loaded = jax.export.deserialize(program.serialize())
    for batch in (1, 3):
        arrays = arrays_of(batch)
        assert_close(loaded.call(params, *arrays), jax.jit(fn)(params, *arrays), "float32")


@pytest.mark.parametrize(("model", "what"), CASES)
def test_exported_model_has_kernels(model, what, with_kernels):
    fn, arrays_of = program_of(model, what)
    args = params_of(model, what), *any_batch(arrays_of(1), ["b <= 1024"])
    found = custom_calls(exported(fn, *args))
    assert found and found <= set(export.custom_calls())
    assert all(target.startswith("jaxllm_") for target in found)


@each_model
def test_exported_model_runs_at_any_sequence_length(model):
    module, config = MODELS[model]
    b, t = jax.export.symbolic_shape("b, t", constraints=[f"t <= {config.max_seq_len}"])
    tokens = jax.ShapeDtypeStruct((b, t), jnp.int32)
    params = params_of(model)
    program = exported(lambda p, x: module.forward(p, x, config), params, tokens)
    for shape in ((1, 3), (2, 8)):
        tokens = jnp.arange(np.prod(shape)).reshape(shape)
        expected = module.forward(params, tokens.astype(jnp.int32), config)
        assert_close(program.call(params, tokens.astype(jnp.int32)), expected, "float32")


@pytest.mark.parametrize("accumulate", [1, 2])
def test_exported_training_step_runs_at_any_batch_size(accumulate):
    module, config = MODELS["gpt2"]
    optimizer = optim.adamw(1e-3)
    step: Any = training.make_train_step(
        lambda p, x, y: module.loss(p, x, y, config), optimizer, compute_dtype="float32"
    )
    state = training.init_state(params_of("gpt2"), optimizer)
    (b,) = jax.export.symbolic_shape("b")
    tokens = jax.ShapeDtypeStruct((accumulate, b, LENGTH), jnp.int32)
    checks = export.disabled_checks()
    program = jax.export.export(step, platforms=PLATFORMS, disabled_checks=checks)(
        state, tokens, tokens
    )
    loaded = jax.export.deserialize(program.serialize())
    tokens = jnp.arange(accumulate * 2 * LENGTH, dtype=jnp.int32).reshape(accumulate, 2, LENGTH)
    actual, metrics = loaded.call(state, tokens, tokens)
    assert isinstance(actual, training.TrainState)
    assert_close(metrics, step(state, tokens, tokens)[1], "float32")


# Custom calls


def norm(x, scale):
    return ops.rms_norm(x, scale)


X, SCALE = jnp.ones((4, 256)), jnp.ones(256)


def test_disabled_checks_list_all_kernels(with_kernels):
    kernels = {f"jaxllm_{stem}" for stem in kernel_table.handlers()}
    others = {"__gpu$xla.gpu.triton", "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert set(export.custom_calls()) == kernels | others
    assert {check.is_custom_call() for check in export.disabled_checks()} == kernels | others


def test_custom_calls_include_loaded_libraries(monkeypatch):
    monkeypatch.setattr(ffi, "_loaded", {"softsign_forward"})
    assert "jaxllm_softsign_forward" in export.custom_calls()


def test_export_with_kernels_needs_disabled_checks(with_kernels):
    with pytest.raises(
        ValueError, match="custom calls whose targets have no compatibility"
    ) as info:
        exported(norm, X, SCALE, checks=[])
    assert "@jaxllm_rms_norm_forward" in str(info.value)
    assert custom_calls(exported(norm, X, SCALE)) == {"jaxllm_rms_norm_forward"}


def test_export_of_the_xla_backend_needs_no_disabled_checks(with_kernels):
    with jaxllm.use_backend("xla"):
        program = exported(norm, *any_batch((X,)), SCALE, checks=[])
    assert not custom_calls(program)


def test_bounded_batch_size_enables_kernels(with_kernels):
    assert not custom_calls(exported(norm, *any_batch((X,)), SCALE))
    program = exported(norm, *any_batch((X,), ["b <= 4096"]), SCALE)
    assert custom_calls(program) == {"jaxllm_rms_norm_forward"}
    assert_close(program.call(X, SCALE), norm(X, SCALE), "float32")


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(ffi, "unavailable_reason", lambda *_: "the CUDA extension is not built")


@pytest.mark.parametrize("backend", ["auto", "pallas"])
def test_pallas_kernels_are_exported_without_a_gpu(backend, without_kernels):
    with jaxllm.use_backend(backend):
        program = exported(norm, X, SCALE)
    assert custom_calls(program) == {"__gpu$xla.gpu.triton"}
    assert_close(program.call(X, SCALE), norm(X, SCALE), "float32")


def test_pallas_kernels_are_exported_in_a_shard_map(without_kernels):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(
        norm, mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec()), out_specs=spec
    )
    program = exported(sharded, X, SCALE)
    assert "__gpu$xla.gpu.triton" in custom_calls(program)
    assert_close(program.call(X, SCALE), norm(X, SCALE), "float32")


def test_pallas_rejects_symbolic_sizes(without_kernels):
    args = *any_batch((X,), ["b <= 4096"]), SCALE
    assert not custom_calls(exported(norm, *args))
    message = "'pallas' cannot serve rms_norm_forward: an array has a symbolic size; Pallas kernels"
    with jaxllm.use_backend("pallas"), pytest.raises(BackendError, match=message):
        exported(norm, *args)


def test_cuda_backend_exports_only_for_cuda(with_kernels):
    with jaxllm.use_backend("cuda"):
        assert custom_calls(exported(norm, X, SCALE, platforms=["cuda"]))
        message = (
            "needs an NVIDIA GPU, and this program is compiled for cpu, cuda; use backend 'auto'"
        )
        with pytest.raises(BackendError, match=message):
            exported(norm, X, SCALE)
        message = r"it would have to know whether 'b' > '\d+'; a constraint on the size may tell"
        with pytest.raises(BackendError, match=message):
            exported(norm, *any_batch((X,)), SCALE, platforms=["cuda"])


def test_cuda_backend_needs_the_extension(without_kernels):
    message = "'cuda' cannot serve rms_norm_forward: the CUDA extension is not built"
    with jaxllm.use_backend("cuda"), pytest.raises(BackendError, match=message):
        exported(norm, X, SCALE, platforms=["cuda"])


def test_symbolic_kernel_attribute_is_an_error():
    rows: Any = jax.export.symbolic_shape("b")[0]
    result = jax.ShapeDtypeStruct((4,), jnp.float32)
    with pytest.raises(TypeError, match="rows of some_kernel is b; it must be a number or a tuple"):
        jax.eval_shape(lambda x: ffi.call("some_kernel", (result,), x, rows=rows), result)


def test_example_in_docs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = Path(kernel_table.ROOT) / "docs" / "export.md"
    for example in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
        exec(compile(example, str(page), "exec"), names := {})
        assert names["logits"].shape == (3, 128, 50304)


def test_a_symbolic_length_needs_a_constraint_by_the_position_table():
    config = gpt2.GPT2Config(vocab_size=61, max_seq_len=16, layers=1, heads=2, width=32)
    params = gpt2.init(jax.random.key(0), config)

    def export_for(constraints):
        scope = jax.export.SymbolicScope(constraints)
        shape = jax.export.symbolic_shape("b, t", scope=scope)
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        return jax.export.export(jax.jit(lambda x: gpt2.forward(params, x, config)))(tokens)

    with pytest.raises(ValueError, match=r"t positions; position_table \(16, 32\) .* be certain"):
        export_for(())
    exported = export_for(("t <= 16",))
    assert exported.call(jnp.ones((2, 8), jnp.int32)).shape == (2, 8, 128)
    with pytest.raises(ValueError, match="t <= 16"):
        exported.call(jnp.ones((2, 20), jnp.int32))
