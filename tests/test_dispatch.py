"""The backend switch, the cache key, cross-lowering, errors and explain()."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxllm
from jaxllm import ops, testing
from jaxllm.__main__ import main
from jaxllm.core import ffi
from jaxllm.core.backend import resolve

X = jax.random.normal(jax.random.key(0), (6, 32))
SCALE = jnp.linspace(0.5, 1.5, 32)
ON_GPU = jax.default_backend() == "gpu"


def normalize(x, scale):
    return ops.rms_norm(x, scale)


def test_the_innermost_request_wins():
    assert resolve() == "auto"
    with jaxllm.use_backend("pallas"):
        assert resolve() == "pallas"
        with jaxllm.use_backend("xla"):
            assert resolve() == "xla"
            assert resolve("cuda") == "cuda"
        assert resolve() == "pallas"
    assert resolve() == "auto"


def test_the_request_ends_when_the_block_raises():
    with pytest.raises(KeyError), jaxllm.use_backend("pallas"):
        raise KeyError
    assert resolve() == "auto"


@pytest.mark.parametrize("name", ["triton", "", "CUDA", 3])
def test_an_unknown_backend_is_named(name):
    with pytest.raises(ValueError, match=r"backend is .*must be one of auto, cuda, pallas, xla"):
        ops.rms_norm(X, SCALE, backend=name)
    with pytest.raises(ValueError, match=r"backend is .*must be one of auto, cuda, pallas, xla"):
        jaxllm.use_backend(name).__enter__()


def test_an_unknown_backend_in_the_environment_is_named():
    script = "import jax.numpy as jnp, jaxllm; jaxllm.ops.rms_norm(jnp.ones((2, 4)), jnp.ones(4))"
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"JAXLLM_BACKEND": "gpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the environment variable JAXLLM_BACKEND is 'gpu'; it must be one of" in result.stderr


def test_switching_retraces_and_switching_back_hits_the_cache():
    # JAX 0.12 imports Pallas's interpreters when the first kernel needs one, and that makes every
    # jitted function trace once more.
    ops.rms_norm(X, SCALE, backend="pallas")
    traces = []

    @jax.jit
    def fn(x, scale):
        traces.append(resolve())
        return normalize(x, scale)

    first = fn(X, SCALE)
    with jaxllm.use_backend("pallas"):
        second = fn(X, SCALE)
        fn(X, SCALE)
    fn(X, SCALE)
    with jaxllm.use_backend("pallas"):
        fn(X, SCALE)
    assert traces == ["auto", "pallas"]
    np.testing.assert_allclose(first, second, rtol=1e-5)


def test_a_pullback_keeps_the_backend_of_its_forward():
    with jaxllm.use_backend("pallas"):
        _, pull = jax.vjp(normalize, X, SCALE)
    assert {call.on_gpu for call in jaxllm.explain(pull, X).calls} == {"pallas"}
    _, pull = jax.vjp(lambda x, scale: ops.rms_norm(x, scale, backend="xla"), X, SCALE)
    with jaxllm.use_backend("pallas"):
        assert {call.on_gpu for call in jaxllm.explain(pull, X).calls} == {"xla"}


def test_an_argument_beats_the_block_inside_jit():
    with jaxllm.use_backend("pallas"):
        explanation = jaxllm.explain(
            jax.jit(lambda x, s: ops.rms_norm(x, s, backend="xla")), X, SCALE
        )
    assert [call.on_gpu for call in explanation.calls] == ["xla"]


@pytest.mark.no_gpu
def test_cuda_without_a_gpu_says_so():
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    with pytest.raises(
        jaxllm.BackendError, match=r"rms_norm_forward: it needs an NVIDIA GPU.*compiled for cpu"
    ):
        ops.rms_norm(X, SCALE, backend="cuda")
    with pytest.raises(jaxllm.BackendError, match="it needs an NVIDIA GPU"):
        jax.vmap(lambda x: ops.rms_norm(x, SCALE, backend="cuda"))(X)


def test_cuda_without_the_extension_says_how_to_build_it(monkeypatch):
    monkeypatch.setattr(ffi, "_fault", ffi._describe_fault(None, ImportError("x", name="y")))
    with pytest.raises(jaxllm.BackendError, match="nvcc"):
        ops.layer_norm(X, SCALE, backend="cuda")


def test_auto_passes_over_what_cannot_serve_and_explains_it(monkeypatch):
    missing = ModuleNotFoundError("No module named 'jaxllm._cuda'", name="jaxllm._cuda")
    monkeypatch.setattr(ffi, "_fault", ffi._describe_fault(None, missing))
    explanation = jaxllm.explain(normalize, X, SCALE)
    (call,) = explanation.calls
    assert (call.stem, call.on_gpu, call.fallback) == ("rms_norm_forward", "pallas", "xla")
    assert call.rejected[0][0] == "cuda" and "is not built" in call.rejected[0][1]
    assert "not cuda: the CUDA extension is not built; reinstall" in str(explanation)


def test_an_extension_of_a_newer_jaxlib_is_refused():
    class Extension:
        @staticmethod
        def build_facts():
            return {"jaxlib": "99.1.0"}

    assert "built for jaxlib 99.1.0, newer than" in str(ffi._describe_fault(Extension, None))


def test_unsupported_dtypes_are_named():
    with jax.enable_x64(True), pytest.raises(jaxllm.BackendError, match=r"x has dtype float64"):
        ops.rms_norm(jnp.ones((2, 4), jnp.float64), jnp.ones(4), backend="pallas")


@pytest.mark.parametrize("backend", ["pallas", "auto"])
def test_second_derivatives_exist_under_xla_alone(backend):
    def second(fn):
        first = jax.grad(lambda x: jnp.sum(fn(x) ** 3))
        return jax.grad(lambda x: jnp.sum(first(x) ** 2))(X)

    expected = second(lambda x: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * SCALE)
    found = second(lambda x: ops.rms_norm(x, SCALE, backend="xla"))
    testing.assert_close(found, expected, "float32")
    with pytest.raises(jaxllm.BackendError, match=r"a derivative of rms_norm_\w+: .*backend 'xla'"):
        second(lambda x: ops.rms_norm(x, SCALE, backend=backend))


def gradients_in_a_shard_map(backend, **options):
    """Of rows that are each device's own, and a scale that all share; there is one device."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def gradients(x, scale):
        def loss(x, scale):
            return jnp.sum(ops.rms_norm(x, scale, backend=backend) ** 3)

        return jax.grad(loss, (0, 1))(x, scale)

    specs = P("d"), P()
    return jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=specs, **options)


@pytest.mark.parametrize("options", [{}, {"check_vma": False}], ids=["tracked", "untracked"])
def test_gradients_in_a_shard_map(options):
    expected = jax.grad(lambda *a: jnp.sum(normalize(*a) ** 3), (0, 1))(X, SCALE)
    backends = ["auto", "xla"]
    if options or jax.default_backend() == "gpu":  # not for Pallas's interpreter: see below
        backends.append("pallas")
    for backend in backends:
        found = jax.jit(gradients_in_a_shard_map(backend, **options))(X, SCALE)
        testing.assert_close(found, expected, "float32")


def test_a_shard_map_that_tracks_is_refused_by_the_interpreter():
    program = gradients_in_a_shard_map("pallas")
    assert "pallas_call" in str(jax.make_jaxpr(program)(X, SCALE))  # for a GPU
    wanted = "backend 'pallas' cannot serve rms_norm_forward: .* for cpu; .* check_vma=False"
    with pytest.raises(jaxllm.BackendError, match=wanted):
        jax.jit(program).trace(X, SCALE).lower(lowering_platforms=("cpu",))


@pytest.mark.parametrize("kind", [int, np.int64, np.float32, np.float64])
def test_an_option_may_be_a_number_of_any_type(kind):
    """XLA reads an attribute by its exact type; a kernel that is told an int reads no float."""
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    labels, one = jnp.arange(6), kind(1)
    programs = [
        lambda x, s: ops.rms_norm(x, s, eps=one),
        lambda x, s: ops.add_layer_norm(x, x, s, eps=one),
        lambda x, _: ops.cross_entropy(x, labels, z_loss=one, label_smoothing=one),
        lambda x, _: ops.adamw_update(x, x, x, x, step=1, lr=1, b1=kind(0), eps=one),
        lambda x, _: ops.softmax(x, scale=one),
    ]
    plain = [
        lambda x, s: ops.rms_norm(x, s, eps=1.0),
        lambda x, s: ops.add_layer_norm(x, x, s, eps=1.0),
        lambda x, _: ops.cross_entropy(x, labels, z_loss=1.0, label_smoothing=1.0),
        lambda x, _: ops.adamw_update(x, x, x, x, step=1, lr=1, b1=0.0, eps=1.0),
        lambda x, _: ops.softmax(x, scale=1.0),
    ]
    with jaxllm.use_backend("cuda"):
        for program, wanted in zip(programs, plain, strict=True):
            found = testing.lower_for_cuda(program, X, SCALE)
            assert "@jaxllm_" in found
            assert found == testing.lower_for_cuda(wanted, X, SCALE)


@pytest.mark.parametrize(
    ("name", "option", "message"),
    [
        ("flash_attention", {"window": 2.5}, "window is 2.5; it must be an integer"),
        ("repeat_kv", {"groups": 1.5}, "groups is 1.5; it must be an integer"),
        ("quantize", {"group_size": 4.0}, "group_size is 4.0; it must be an integer"),
        ("histogram", {"bins": 2.7}, "bins is 2.7; it must be an integer"),
        ("softmax", {"scale": "large"}, "scale is 'large'; it must be a number"),
    ],
)
def test_options_that_are_no_such_number_are_refused(name, option, message):
    x = jnp.ones((1, 4, 2, 8))
    arrays = {"flash_attention": [x, x, x], "histogram": [jnp.arange(3)]}.get(name, [x])
    with pytest.raises(TypeError, match=message):
        getattr(ops, name)(*arrays, **option)


def test_arrays_of_numpy_are_taken_as_jax_takes_them():
    x: Any = np.linspace(-1, 1, 12).reshape(3, 4)  # float64, which JAX makes float32
    numbers: Any = np.array([1, 2, 2])
    with jaxllm.use_backend("pallas"):
        assert ops.histogram(numbers, bins=3).tolist() == [0, 1, 2]
        assert ops.matmul(x, x.T).dtype == jnp.float32
        np.testing.assert_allclose(ops.global_norm([x]), np.linalg.norm(x), rtol=1e-6)
        np.testing.assert_allclose(jax.grad(ops.gelu)(1.0), 1.0829641, rtol=1e-6)


def test_explain_lists_the_final_program_only():
    def loss(x, scale):
        def body(x, _):
            return jax.checkpoint(lambda x: ops.rms_norm(x, scale))(x), None

        return jax.lax.scan(body, x, length=3)[0].sum()

    stems = [call.stem for call in jaxllm.explain(jax.grad(loss), X, SCALE).calls]
    assert sorted(set(stems)) == ["rms_norm_backward", "rms_norm_forward"]
    again = [call.stem for call in jaxllm.explain(jax.jit(jax.grad(loss)), X, SCALE).calls]
    assert again == stems  # the caches of the first trace hide nothing


def test_explain_of_no_ops_is_a_bare_header():
    assert str(jaxllm.explain(jnp.sin, X)).splitlines() == ["op  shapes  on a GPU  fallback"]


def test_a_named_scope_marks_the_op_in_profiles():
    lowered = jax.jit(lambda x, s: ops.rms_norm(x, s, backend="xla")).lower(X, SCALE)
    assert "rms_norm_forward[xla]" in str(lowered.compile().as_text())


def test_info_tells_versions_devices_and_the_choice(capsys):
    main(["info"])
    printed = capsys.readouterr().out
    for word in ("jaxllm", "jaxlib", "device", "extension", "auto"):
        assert word in printed
    if not ON_GPU:
        assert "auto        xla, because the default device is a cpu" in printed


def test_info_reports_an_unknown_backend_of_the_environment(monkeypatch, capsys):
    monkeypatch.setattr("jaxllm.core.backend._DEFAULT", "gpu")
    main(["info"])
    printed = capsys.readouterr().out
    assert "backend     the environment variable JAXLLM_BACKEND is 'gpu'; it must be" in printed
    assert "auto        " in printed


def test_lowering_for_a_gpu_ignores_the_local_device():
    with jaxllm.use_backend("auto"):
        text = testing.lower_for_cuda(normalize, X, SCALE)
    assert ("@jaxllm_rms_norm_forward" in text) == ffi.is_available()
    assert ("triton" in text) != ffi.is_available()
