"""The backend switch, the cache key, cross-lowering, errors and explain()."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxllm
from jaxllm import ffi, ops, testing
from jaxllm.__main__ import main
from jaxllm.backend import resolve

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
    assert (call.stem, call.on_gpu, call.elsewhere) == ("rms_norm_forward", "pallas", "xla")
    assert call.passed_over[0][0] == "cuda" and "is not built" in call.passed_over[0][1]
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
    assert str(jaxllm.explain(jnp.sin, X)).splitlines() == ["op  shapes  on a GPU  elsewhere"]


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


def test_lowering_for_a_gpu_ignores_the_local_device():
    with jaxllm.use_backend("auto"):
        text = testing.lower_for_cuda(normalize, X, SCALE)
    assert ("@jaxllm_rms_norm_forward" in text) == ffi.is_available()
    assert ("triton" in text) != ffi.is_available()
