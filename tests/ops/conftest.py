"""Fixtures that several test files share."""

import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jaxllm.core import dispatch, ffi


@pytest.fixture
def pretend_cudnn(monkeypatch):
    """Lets programs that call cuDNN be traced and lowered without a GPU."""
    version_check = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"
    monkeypatch.setattr(version_check, lambda: 91000)
    monkeypatch.setattr("jaxllm.ops.attention.xla._no_cudnn", lambda *_: None)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)


@pytest.fixture
def on_hopper(with_kernels, with_hopper_gpus, monkeypatch):
    """Traces as a process does that has the CUDA extension and an H100; needs neither."""
    monkeypatch.setattr(ffi, "device", lambda: ffi.H100)


@pytest.fixture
def fused_form(monkeypatch):
    """Gives blocks their fused form under every backend and for any sizes."""
    monkeypatch.setattr(dispatch, "_unfused_reason", lambda *_: None)


@pytest.fixture(params=["fused", "unfused"])
def form(request):
    """Runs a test of a block with a layer norm in both forms."""
    if request.param == "fused":
        request.getfixturevalue("fused_form")
    return request.param


# Ops with a kernel for Hopper GPUs alone. In a process without such a GPU they are traced for one.
HOPPER_ONLY = ("float8_matmul",)


@pytest.fixture(autouse=True)
def hopper_kernels_are_traced_for_an_h100(request, monkeypatch):
    values = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    runs = request.node.get_closest_marker("gpu")
    if not runs and getattr(values.get("case"), "op", "") in HOPPER_ONLY:
        monkeypatch.setattr(ffi, "device", lambda: ffi.H100)
