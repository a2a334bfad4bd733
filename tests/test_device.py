"""Properties of a GPU and of the code built for it, and their consequences, without a GPU."""

import dataclasses
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

import jaxllm
from jaxllm import ops
from jaxllm.__main__ import main
from jaxllm.core import ffi

X = jnp.ones((6, 32))
SCALE = jnp.ones(32)
A100 = ffi.Device(
    capability=80, multiprocessors=108, shared_bytes=163 << 10, image=80, has_sm90a=False
)
# A build that has machine code for sm_80 alone, on an H100.
NO_IMAGE = dataclasses.replace(ffi.H100, image=0, has_sm90a=False)
WITHOUT_EXTENSION = ffi._fault


def normalize(x):
    return ops.rms_norm(x, SCALE)


@pytest.fixture
def pretend(monkeypatch):
    """Pretends that the process has GPUs, and an extension built for some architectures."""

    def set_up(*gpus, architectures="80-real"):
        facts = {"architectures": architectures, "cuda": "13.0.88", "jaxlib": "0.10.0"}
        monkeypatch.setattr(ffi, "_fault", None)
        monkeypatch.setattr(ffi, "_survey", lambda: (gpus, None))
        monkeypatch.setattr(ffi, "build_facts", lambda: facts)

    return set_up


def test_unavailable_reason_names_the_gpu_and_the_built_code(pretend):
    pretend(NO_IMAGE)
    reason = str(ffi.unavailable_reason())
    assert reason.startswith("the extension has code for sm_80; this GPU is sm_90; reinstall ")
    assert not ffi.is_available()


def test_device_without_an_image_makes_kernels_unavailable(pretend, monkeypatch):
    pretend()
    monkeypatch.setattr(ffi, "device", lambda: NO_IMAGE)
    assert "code for sm_80; this GPU is sm_90" in str(ffi.unavailable_reason())


@pytest.mark.parametrize(
    ("architectures", "capability", "wanted"),
    [
        ("80-real 90a-real", 120, "code for sm_80, sm_90a; this GPU is sm_120; "),
        ("80-real 90a-real 120-virtual", 100, "sm_90a, PTX of compute_120; this GPU is sm_100; "),
        # Without a suffix: machine code and PTX. PTX of sm_90a runs only on sm_90a.
        ("100", 90, "code for sm_100, PTX of compute_100; this GPU is sm_90; "),
        ("90a", 100, "code for sm_90a, PTX of compute_90a; this GPU is sm_100; "),
        # There is suitable PTX, but the driver does not support it.
        ("80-real 90-virtual", 120, "sm_120, whose driver is too old for PTX of CUDA 13.0.88; "),
    ],
)
def test_image_is_machine_code_or_ptx(pretend, architectures, capability, wanted):
    pretend(dataclasses.replace(NO_IMAGE, capability=capability), architectures=architectures)
    assert wanted in str(ffi.unavailable_reason())


def test_device_of_several_gpus_has_their_common_properties(pretend):
    pretend(ffi.H100, A100)
    assert ffi.device() == A100
    pretend(ffi.H100, ffi.H100)
    assert ffi.device() == ffi.H100 and ffi.no_hopper_reason() is None
    pretend(ffi.H100, NO_IMAGE)
    assert ffi.device() == dataclasses.replace(NO_IMAGE, clusters=ffi.H100.clusters)


def test_mixed_gpus_are_reported(pretend):
    pretend(ffi.H100, A100)
    assert ffi.unavailable_reason() is None
    assert "GPUs of several kinds, sm_80, sm_90," in str(ffi.no_hopper_reason())
    newer = dataclasses.replace(NO_IMAGE, capability=120)
    pretend(ffi.H100, newer, A100)
    assert "code for sm_80; of the GPUs here it has none for sm_120; " in str(
        ffi.unavailable_reason()
    )


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"has_sm90a": False}, "not built for sm_90a"),
        ({"capability": 100, "has_sm90a": False}, "needs a Hopper GPU"),
    ],
)
def test_hopper_kernels_need_the_gpu_and_its_code(pretend, changes, wanted):
    pretend(dataclasses.replace(ffi.H100, **changes))
    assert wanted in str(ffi.no_hopper_reason())


def test_auto_falls_back_without_code_for_the_gpu(pretend):
    pretend(NO_IMAGE)
    explanation = jaxllm.explain(jax.grad(lambda x: normalize(x).sum()), X)
    assert {call.on_gpu for call in explanation.calls} == {"pallas"}
    assert "    not cuda: the extension has code for sm_80; this GPU is sm_90" in str(explanation)


def test_cuda_backend_without_code_for_the_gpu_is_an_error(pretend):
    pretend(NO_IMAGE)
    wanted = "backend 'cuda' cannot serve rms_norm_forward: the extension has code for sm_80; this"
    with pytest.raises(jaxllm.BackendError, match=wanted):
        ops.rms_norm(X, SCALE, backend="cuda")


def test_kernels_of_other_libraries_do_not_need_the_extension(pretend, monkeypatch):
    pretend(NO_IMAGE)
    monkeypatch.setattr(ffi, "_loaded", {"softsign_forward"})
    assert ffi.unavailable_reason("softsign_forward") is None
    assert ffi.unavailable_reason("rms_norm_forward") is not None


def test_extension_is_available_without_a_gpu(pretend):
    pretend()
    assert ffi.device() is None
    assert ffi.unavailable_reason() is None
    (call,) = jaxllm.explain(normalize, X).calls
    assert call.on_gpu == "cuda"


def test_info_prints_the_code_for_each_gpu(pretend, capsys):
    pretend(ffi.H100, architectures="90a-real")
    main(["info"])
    lines = capsys.readouterr().out.splitlines()
    described = "sm_90, 132 SMs, 227 KiB of shared memory per CTA; runs the extension's code for"
    assert f"gpu         {described} sm_90a" in lines
    assert "hopper      its kernels run" in lines
    pretend(dataclasses.replace(ffi.H100, image=80, has_sm90a=False), architectures="80")
    main(["info"])
    lines = capsys.readouterr().out.splitlines()
    assert f"gpu         {described} sm_80" in lines
    assert "hopper      its kernels do not: the CUDA extension is not built for sm_90a" in lines


def test_info_reports_a_gpu_without_code(pretend, capsys):
    pretend(NO_IMAGE)
    main(["info"])
    printed = capsys.readouterr().out
    assert "extension   unavailable: the extension has code for sm_80; this GPU is sm_90" in printed
    assert "runs no code of the extension" in printed


class Extension:
    """A fake extension with two GPUs."""

    @staticmethod
    def device_facts(ordinal):
        known = {0: ffi.H100, 3: A100}
        if ordinal not in known:
            raise RuntimeError(f"device {ordinal}: CUDA driver version is insufficient")
        return dataclasses.asdict(known[ordinal]) | {"a fact of a later version": 1}


def survey(monkeypatch, *ordinals):
    asked = []

    def local_devices(backend):
        asked.append(backend)
        return [types.SimpleNamespace(local_hardware_id=ordinal) for ordinal in ordinals]

    monkeypatch.setattr(ffi, "_fault", None)
    monkeypatch.setattr(ffi, "_cuda", Extension)
    monkeypatch.setattr(ffi.jax, "local_devices", local_devices)
    found = ffi._survey.__wrapped__()
    assert asked == ["cuda"]
    return found


def test_devices_are_selected_by_ordinal(monkeypatch):
    assert survey(monkeypatch, 3, 0) == ((A100, ffi.H100), None)


def test_gpu_without_an_ordinal_is_unknown(monkeypatch):
    assert survey(monkeypatch, 0, None) == ((), None)


def test_extension_without_device_queries_is_not_called(monkeypatch):
    gpus, fault = survey(monkeypatch, 1)
    assert gpus == () and "device 1: CUDA driver version is insufficient" in str(fault)
    monkeypatch.setattr(ffi, "_survey", lambda: (gpus, fault))
    assert ffi.unavailable_reason() == fault
    assert ffi.device() is None


def test_import_does_not_query_devices():
    # jax.distributed.initialize must run before the first device query.
    script = (
        "import jaxllm, jaxllm.models, jaxllm.ops\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "jaxllm.core.ffi.unavailable_reason()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_outdated_extension_is_rejected():
    class Old:
        @staticmethod
        def build_facts():
            return {"jaxlib": "0.1.0"}

    class Newer(Old):
        @staticmethod
        def device_fact_names():
            return [field.name for field in dataclasses.fields(ffi.Device)]

    class Between(Old):
        @staticmethod
        def device_fact_names():
            return ["capability", "multiprocessors"]

    assert "is older than this version of jaxllm; reinstall" in str(ffi._describe_fault(Old, None))
    assert "is older than this" in str(ffi._describe_fault(Between, None))
    assert ffi._describe_fault(Newer, None) is None


@pytest.mark.skipif(WITHOUT_EXTENSION is not None, reason=str(WITHOUT_EXTENSION))
def test_extension_and_python_have_the_same_device_fields():
    assert set(ffi._cuda.device_fact_names()) == ffi._FACTS


@pytest.mark.gpu
def test_gpu_of_this_machine_has_properties_and_code():
    (gpu, *_) = ffi.devices()
    assert gpu.multiprocessors > 0 and gpu.shared_bytes >= 48 << 10
    capability = jax.local_devices(backend="cuda")[0].compute_capability
    assert gpu.capability == int(capability.replace(".", ""))
    built = {name.split("-")[0] for name in ffi.build_facts()["architectures"].split()}
    assert str(gpu.image) in {name.rstrip("af") for name in built}
    # The code for sm_90a is preferred if it exists.
    assert gpu.has_sm90a == ("90a" in built and gpu.capability == 90)


def test_shared_memory_error_has_both_sizes(monkeypatch):
    monkeypatch.setattr(ffi, "shared_needs", lambda: {"small": 1000, "large": 180 << 10})
    monkeypatch.setattr(ffi, "device", lambda: None)
    assert ffi.shared_memory_reason("large") is None
    monkeypatch.setattr(ffi, "device", lambda: A100)
    assert ffi.shared_memory_reason("small") is None
    assert ffi.shared_memory_reason("large") == (
        "the kernel takes 180.0 KiB of shared memory; this GPU has 163 KiB for a CTA"
    )


def test_traces_are_not_shared_between_gpus(pretend, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "jaxllm.ops.norm.cuda.rms_norm_forward",
        lambda x, scale, **_: seen.append(ffi.device()) or (x, x[:, 0].astype(jnp.float32)),
    )
    for gpu in (A100, ffi.H100, A100):
        pretend(gpu)
        jax.eval_shape(lambda x: ops.rms_norm(x, SCALE, backend="cuda"), X)
    assert set(seen) == {A100, ffi.H100}


def test_skip_if_declined_skips_only_for_missing_code(skip_if_declined, pretend):
    pretend(dataclasses.replace(ffi.H100, has_sm90a=False))
    with pytest.raises(pytest.skip.Exception, match="is not built for sm_90a"):
        skip_if_declined(ffi.no_hopper_reason)
    with pytest.raises(AssertionError, match="declined on every GPU: the width is odd"):
        skip_if_declined(lambda: "the width is odd")
    skip_if_declined(lambda: None)
