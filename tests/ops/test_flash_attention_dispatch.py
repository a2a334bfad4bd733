"""Which implementation of flash attention runs: CUDA, cuDNN, Pallas or the reference."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import attention_arrays

import jaxllm
from jaxllm.core import ffi
from jaxllm.ops import flash_attention, flash_attention_packed
from jaxllm.ops.attention import pallas_flash, xla
from jaxllm.testing import lower_for_cuda


def cudnn_calls(fn, *args):
    """The cuDNN custom calls of the lowered CUDA program, without value names."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return [
        line.split(" = ")[1].split("(")[0] + line[line.index("{") :]
        for line in text.splitlines()
        if "__cudnn" in line
    ]


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
def test_cudnn_calls_match_dot_product_attention(pretend_cudnn, causal, window):
    q, k, v = attention_arrays(T=16, N=4, K=2, H=64, dtype="bfloat16")

    def gradient(attention):
        return jax.grad(lambda *qkv: attention(*qkv).sum(), argnums=(0, 1, 2))

    ours = gradient(lambda *qkv: flash_attention(*qkv, causal=causal, window=window, backend="xla"))
    theirs = gradient(
        lambda *qkv: jax.nn.dot_product_attention(
            *qkv,
            is_causal=causal,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
    )
    calls = cudnn_calls(ours, q, k, v)
    assert len(calls) == 2
    assert calls == cudnn_calls(theirs, q, k, v)


def test_cudnn_results_have_the_expected_shapes_and_dtypes(pretend_cudnn):
    q, k, v = attention_arrays(T=16, N=4, K=2, H=64, dtype="float16")
    options = {"causal": True, "scale": 0.125, "window": None, "softcap": None}
    out, lse = jax.eval_shape(lambda: xla.flash_attention_forward(q, k, v, None, **options))
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((2, 4, 16), jnp.float32)
    arguments = (q, k, v, out, lse, out, None)
    gradients = jax.eval_shape(lambda *a: xla.flash_attention_backward(*a, **options), *arguments)
    assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]


@pytest.mark.parametrize(
    ("shapes", "options", "reason"),
    [
        ({"dtype": "float32"}, {}, "q has dtype float32; cuDNN's attention takes bfloat16 and"),
        ({"H": 12}, {}, "heads are 12 wide"),
        ({"H": 264}, {}, "heads are 264 wide"),
        ({"H": 192, "Hv": 96}, {}, "queries and keys are 192 wide and values 96"),
        ({"B": 0}, {}, "q or k has no elements"),
        ({"T": 1}, {}, "needs two keys or more"),
        ({"T": 4, "S": 6}, {"causal": True}, "so 4 queries need 4 keys, not 6"),
        ({}, {"scale": -0.5}, "scale is -0.5; cuDNN's attention takes scales above zero"),
        ({}, {"window": 3}, "window needs a causal mask"),
        ({}, {"softcap": 3.0}, "no softcap"),
        ({}, {"segment_ids": np.zeros((2, 6), np.int32)}, "no segment ids"),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_calls_that_cudnn_rejects_fall_back_to_the_reference(
    pretend_cudnn, shapes, options, reason, backward
):
    q, k, v = attention_arrays(**{"dtype": "bfloat16"} | shapes)
    fn = lambda *qkv: flash_attention(*qkv, **options, backend="xla").sum()  # noqa: E731
    calls = jaxllm.explain(jax.grad(fn) if backward else fn, q, k, v).calls
    call = calls[-1]
    assert call.stem == f"flash_attention_{'backward' if backward else 'forward'}"
    assert call.on_gpu == call.fallback == "xla"
    ((rejected, why),) = call.rejected
    assert rejected == "xla-gpu"
    assert reason in why


@pytest.mark.no_gpu
def test_cudnn_is_rejected_without_a_gpu():
    q, k, v = attention_arrays(dtype="bfloat16")
    (call,) = jaxllm.explain(lambda *qkv: flash_attention(*qkv, backend="xla"), q, k, v).calls
    assert dict(call.rejected)["xla-gpu"].startswith("this process has no NVIDIA GPU")


@pytest.mark.parametrize(("capability", "width"), [("8.0", 128), ("9.0", 256), ("10.0", 256)])
def test_cudnn_serves_heads_up_to_a_width_by_gpu(capability, width, monkeypatch):
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    monkeypatch.setattr(xla.cudnn, "check_cudnn_version", lambda: 91000)
    assert xla._no_cudnn(width, width) is None
    if width < 256:
        reason = str(xla._no_cudnn(136, 136))
        assert "heads are 136 wide; cuDNN's attention takes at most 128" in reason
    else:
        assert xla._no_cudnn(192, 128) is None
        monkeypatch.setattr(xla.cudnn, "check_cudnn_version", lambda: 90800)
        assert "need cuDNN 9.10 and a Hopper GPU" in str(xla._no_cudnn(192, 128))


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}])
def test_auto_picks_cudnn_by_benchmark_and_cuda_kernels_where_cudnn_rejects(
    pretend_cudnn, options, monkeypatch
):
    monkeypatch.setattr("jaxllm.core.ffi.unavailable_reason", lambda *_: None)
    q, k, v = attention_arrays(dtype="bfloat16")
    grad = jax.grad(lambda *qkv: flash_attention(*qkv, causal=True, **options).sum())
    for call in jaxllm.explain(grad, q, k, v).calls:
        assert call.fallback == "xla"
        if options:
            assert (call.on_gpu, call.rejected) == ("cuda", ())
        else:
            assert call.on_gpu == "xla-gpu"
            assert "benchmarks/results" in dict(call.rejected)["cuda"]


@pytest.mark.parametrize(
    ("shapes", "options", "picked"),
    [
        ({}, {}, "xla-gpu"),
        ({}, {"softcap": 3.0}, "pallas"),
        ({}, {"segment_ids": np.zeros((2, 6), np.int32)}, "pallas"),
        ({"dtype": "float32"}, {}, "pallas"),
        ({"H": 264}, {}, "xla"),
    ],
)
def test_without_the_extension_auto_picks_cudnn_and_then_pallas(
    pretend_cudnn, shapes, options, picked, monkeypatch
):
    monkeypatch.setattr("jaxllm.core.ffi.unavailable_reason", lambda *_: "not built")
    monkeypatch.setattr(ffi, "compute_capabilities", lambda: ("9.0",))
    q, k, v = attention_arrays(**{"dtype": "bfloat16"} | shapes)
    grad = jax.grad(lambda *qkv: flash_attention(*qkv, causal=True, **options).sum())
    calls = jaxllm.explain(grad, q, k, v).calls
    assert [call.on_gpu for call in calls] == [picked, picked]
    order = ["cuda", "xla-gpu", "pallas", "xla"]
    assert [name for name, _ in calls[0].rejected] == order[: order.index(picked)]


@pytest.mark.parametrize(
    ("capabilities", "is_hopper"),
    [(["9.0"], True), (["9.0", "9.0"], True), (["9.0", "8.0"], False), (["10.0"], False)],
)
def test_hopper_gpus_are_known_without_the_extension(capabilities, is_hopper, monkeypatch):
    gpus = [types.SimpleNamespace(compute_capability=of) for of in capabilities]
    monkeypatch.setattr(jax, "devices", lambda *_: gpus)
    assert (pallas_flash.flash_attention_slower() is None) == is_hopper


@pytest.mark.no_gpu
def test_auto_leaves_attention_to_pallas_on_hopper_gpus_alone(pretend_cudnn, monkeypatch):
    monkeypatch.setattr("jaxllm.core.ffi.unavailable_reason", lambda *_: "not built")
    q, k, v = attention_arrays(dtype="float32")
    packed = jnp.zeros((2, 6, 3 * 4 * 8))
    plain = jax.grad(lambda *qkv: flash_attention(*qkv).sum())
    of_packed = jax.grad(lambda x: flash_attention_packed(x, 4, causal=True).sum())
    calls = jaxllm.explain(plain, q, k, v).calls + jaxllm.explain(of_packed, packed).calls
    assert [call.on_gpu for call in calls] == 4 * ["xla"]
    assert all("has run on no others" in dict(call.rejected)["pallas"] for call in calls)
    (call,) = jaxllm.explain(lambda q: flash_attention(q, k, v, backend="pallas"), q).calls
    assert call.on_gpu == "pallas"


def gradients_with_a_bias(q, k, v, bias):
    total = lambda q, k, v, bias: flash_attention(q, k, v, None, bias).sum()  # noqa: E731
    return jax.grad(total, argnums=(0, 1, 2, 3))(q, k, v, bias)


def arrays_with_a_bias(dtype="bfloat16"):
    return *attention_arrays(dtype=dtype), jnp.zeros((1, 4, 6, 6))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_auto_picks_pallas_for_a_bias_on_hopper_gpus(dtype, on_hopper):
    calls = jaxllm.explain(gradients_with_a_bias, *arrays_with_a_bias(dtype)).calls
    assert [(call.stem, call.on_gpu, call.rejected) for call in calls] == [
        ("flash_attention_bias_forward", "pallas", ()),
        ("flash_attention_bias_backward", "pallas", ()),
    ]


@pytest.mark.parametrize(
    "capabilities", [["8.0"], ["8.6"], ["10.0"], ["12.0"], ["9.0", "8.0"], []], ids=str
)
def test_auto_picks_cuda_for_a_bias_on_other_gpus(capabilities, with_kernels, monkeypatch):
    least = min((int(of.replace(".", "")) for of in capabilities), default=None)
    gpu = least and dataclasses.replace(ffi.H100, capability=least, has_sm90a=False)
    monkeypatch.setattr(ffi, "device", lambda: gpu)
    monkeypatch.setattr(ffi, "compute_capabilities", lambda: tuple(capabilities))
    arrays = arrays_with_a_bias()
    explanation = jaxllm.explain(gradients_with_a_bias, *arrays)
    why = "its tiles are for the shared memory of Hopper GPUs, and it has run on no others"
    assert [(call.stem, call.on_gpu, call.rejected) for call in explanation.calls] == [
        ("flash_attention_bias_forward", "cuda", (("pallas", why),)),
        ("flash_attention_bias_backward", "cuda", (("pallas", why),)),
    ]
    assert why in str(explanation)
    program = lower_for_cuda(gradients_with_a_bias, *arrays)
    for direction in ("forward", "backward"):
        assert program.count(f"@jaxllm_flash_attention_bias_{direction}(") == 1
    assert "triton" not in program


@pytest.mark.parametrize(("capability", "picked"), [("9.0", "pallas"), ("8.0", "xla")])
def test_without_the_extension_auto_picks_pallas_for_a_bias_on_hopper_gpus_alone(
    capability, picked, monkeypatch
):
    monkeypatch.setattr(ffi, "unavailable_reason", lambda *_: "not built")
    monkeypatch.setattr(ffi, "compute_capabilities", lambda: (capability,))
    calls = jaxllm.explain(gradients_with_a_bias, *arrays_with_a_bias()).calls
    assert [call.on_gpu for call in calls] == [picked, picked]
    order = ["pallas", "cuda", "xla"]
    for call in calls:
        assert [name for name, _ in call.rejected] == order[: order.index(picked)]


@pytest.mark.parametrize(
    ("width", "picked"),
    [(width, "cuda") for width in (32, 64, 80, 96, 128, 192, 256)]
    + [(width, "xla-gpu") for width in (40, 72, 136)],
)
def test_auto_picks_hopper_kernels_where_benchmarks_are_faster(
    pretend_cudnn, width, picked, monkeypatch
):
    monkeypatch.setattr("jaxllm.core.ffi.unavailable_reason", lambda *_: None)
    monkeypatch.setattr("jaxllm.core.ffi.device", lambda: ffi.H100)
    qkv = attention_arrays(H=width, dtype="bfloat16")
    packed = jnp.zeros((2, 6, 3 * 4 * width), jnp.bfloat16)
    plain = jax.grad(lambda *qkv: flash_attention(*qkv, causal=True).sum())
    of_packed = jax.grad(lambda x: flash_attention_packed(x, 4, causal=True).sum())
    calls = jaxllm.explain(plain, *qkv).calls + jaxllm.explain(of_packed, packed).calls
    assert [call.on_gpu for call in calls] == 4 * [picked]


def test_auto_picks_hopper_kernels_for_the_latent_widths(pretend_cudnn, on_hopper):
    qkv = attention_arrays(H=192, Hv=128, dtype="bfloat16")
    grad = jax.grad(lambda *qkv: flash_attention(*qkv, causal=True).sum())
    assert [call.on_gpu for call in jaxllm.explain(grad, *qkv).calls] == ["cuda", "cuda"]


def test_cuda_backend_runs_kernels_that_auto_rejects(pretend_cudnn, monkeypatch):
    monkeypatch.setattr("jaxllm.core.ffi.unavailable_reason", lambda *_: None)
    q, k, v = attention_arrays(dtype="bfloat16")
    (call,) = jaxllm.explain(lambda *qkv: flash_attention(*qkv, backend="cuda"), q, k, v).calls
    assert (call.on_gpu, call.rejected) == ("cuda", ())
