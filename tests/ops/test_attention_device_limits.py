"""Limits of the attention kernels: head widths, dtypes and the shared memory of a GPU."""

import dataclasses
import itertools
import shutil
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from op_helpers import attention_arrays

import jaxllm
from jaxllm.core import ffi
from jaxllm.ops import flash_attention
from jaxllm.ops.attention import cuda, cuda_decode


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"H": 257}, "heads are 257 wide; the kernel takes at most 256"),
        ({"N": 0, "K": 1}, "q has no heads"),
        ({"dtype": "float8_e4m3fn"}, "q has dtype float8_e4m3fn; the kernel takes"),
    ],
)
def test_cuda_kernels_give_the_reason_for_rejecting_a_call(shapes, reason, monkeypatch):
    monkeypatch.setattr("jaxllm.core.ffi.unavailable_reason", lambda *_: None)
    B, T, N, H = 1, 6, shapes.get("N", 2), shapes.get("H", 8)
    dtype = jnp.dtype(shapes.get("dtype", "bfloat16"))
    q = jax.ShapeDtypeStruct((B, T, N, H), dtype)
    k = jax.ShapeDtypeStruct((B, T, shapes.get("K", N), H), dtype)
    with pytest.raises(jaxllm.BackendError, match=reason):
        jax.eval_shape(lambda *qkv: flash_attention(*qkv, backend="cuda"), q, k, k)


# The shared memory that a CTA can use, in KiB, by compute capability.
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}


def gpu_with(shared_kib, capability=86):
    return dataclasses.replace(
        ffi.H100,
        capability=capability,
        shared_bytes=shared_kib << 10,
        has_sm90a=capability == 90,
    )


def predicates(H, dtype):
    """Reasons for rejecting a head width: of forward, backward and decode attention."""
    q, k = (jax.ShapeDtypeStruct((2, 6, heads, H), dtype) for heads in (4, 2))
    lse = jax.ShapeDtypeStruct((2, 4, 6), jnp.float32)
    one = jax.ShapeDtypeStruct((2, 4, H), dtype)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    return (
        cuda.flash_attention_unsupported(q, k, k, None, None),
        cuda.flash_attention_backward_unsupported(q, k, k, q, lse, q, None, None),
        cuda_decode.decode_attention_unsupported(one, k, k, lengths, None, None),
    )


@pytest.mark.parametrize("capability", SHARED_KIB)
def test_kernels_fit_the_shared_memory_of_every_gpu(capability, monkeypatch):
    if not ffi.is_available():
        pytest.skip(str(ffi.unavailable_reason()))
    names = ("flash_attention", "decode_attention")
    needs = {k: need for k, need in ffi.shared_needs().items() if k.startswith(names)}
    assert len(needs) == 21
    assert max(needs.values()) <= SHARED_KIB[capability] << 10
    monkeypatch.setattr(ffi, "device", lambda: gpu_with(SHARED_KIB[capability], capability))
    for dtype in ("float32", "bfloat16", "float16"):
        for H in range(1, 257):
            assert predicates(H, dtype) == (None, None, None), (dtype, H)


@pytest.mark.parametrize(
    ("kernel", "dtype", "widths", "direction"),
    [
        ("flash_attention_forward_96", "bfloat16", range(65, 97), 0),
        ("flash_attention_forward_256", "float16", range(129, 257), 0),
        ("flash_attention_backward_32", "bfloat16", range(1, 33), 1),
        ("flash_attention_backward_256", "bfloat16", range(129, 257), 1),
        ("decode_attention", "float16", (64, 128), 2),
    ],
)
def test_kernels_that_exceed_shared_memory_are_rejected(
    kernel, dtype, widths, direction, monkeypatch
):
    monkeypatch.setattr(ffi, "shared_needs", lambda: {kernel: 100 << 10})
    for shared_kib, rejected in ((99, set(widths)), (100, set())):
        monkeypatch.setattr(ffi, "device", lambda kib=shared_kib: gpu_with(kib))
        reasons = {H: predicates(H, dtype) for H in range(1, 257)}
        assert {H for H, found in reasons.items() if found[direction]} == rejected
        for H in rejected:
            assert "takes 100.0 KiB of shared memory; this GPU has 99" in reasons[H][direction]
            assert sum(reason is not None for reason in reasons[H]) == 1
    # Without a known GPU nothing is rejected.
    monkeypatch.setattr(ffi, "device", lambda: None)
    assert all(predicates(H, dtype) == (None, None, None) for H in widths)


@pytest.mark.parametrize("direction", [0, 1])
def test_float32_tiles_that_exceed_shared_memory_are_rejected(direction, monkeypatch):
    monkeypatch.setattr(ffi, "shared_needs", lambda: {"flash_attention_float32_128": 100 << 10})
    monkeypatch.setattr(ffi, "device", lambda: gpu_with(99))
    rejected = {H for H in range(1, 257) if predicates(H, "float32")[direction]}
    assert rejected == set(range(65, 129))


@pytest.mark.parametrize(
    ("H", "dtype", "softcap", "served"),
    [
        (64, "bfloat16", None, True),
        (128, "float16", None, True),
        (64, "float32", None, False),
        (96, "bfloat16", None, True),
        (8, "bfloat16", None, True),
        (128, "bfloat16", 5.0, True),
        (100, "bfloat16", None, False),
        (136, "bfloat16", None, True),
        (256, "float16", 5.0, True),
        (250, "bfloat16", None, False),
    ],
)
def test_hopper_kernels_get_a_workspace_only_where_they_run(H, dtype, softcap, served, monkeypatch):
    monkeypatch.setattr(ffi, "device", lambda: ffi.H100)
    workspaces, hopper_flags = [], []

    def call(_, results, *__, hopper, **___):
        workspaces.append(results[-1])
        hopper_flags.append(hopper)
        return results

    monkeypatch.setattr(ffi, "call", call)
    q, k, v = attention_arrays(B=2, T=200, N=4, K=2, H=H, dtype=dtype)
    options = {"causal": True, "scale": 1.0, "window": None, "softcap": softcap}
    out, lse = cuda.flash_attention_forward(q, k, v, None, **options)
    cuda.flash_attention_backward(q, k, v, out, lse, out, None, **options)
    assert [workspace.size > 0 for workspace in workspaces] == [served] * 2 == hopper_flags
    # dq in float32, and more; heads of more than 128 have no dq there.
    assert workspaces[1].size == 0 or (workspaces[1].size > q.size) == (H <= 128)


SIZES = """
#include <cstdio>
#include "attention/flash_attention.h"

int main() {
  for (long width, value_width, queries, keys, heads;
       scanf("%ld %ld %ld %ld %ld", &width, &value_width, &queries, &keys, &heads) == 5;) {
    const jaxllm::FlashShape shape{2, queries, keys, heads, 1, width, value_width};
    if (!jaxllm::flash_has_hopper_widths(shape)) return 1;
    printf("%ld %ld %ld\\n", long{jaxllm::flash_forward_scratch(shape)},
           long{jaxllm::flash_backward_scratch(shape)},
           long{jaxllm::flash_bias_partial(shape, 2, true)});
  }
}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_workspaces_are_as_large_as_the_header_says(tmp_path, monkeypatch):
    (tmp_path / "sizes.cc").write_text(SIZES)
    cuda_folder = Path(__file__).parents[2] / "cuda"
    program = tmp_path / "sizes"
    subprocess.run(
        ["nvcc", "-std=c++17", f"-I{cuda_folder}", "-o", program, tmp_path / "sizes.cc"], check=True
    )
    monkeypatch.setattr(ffi, "runs_hopper_kernels", lambda: True)
    widths = [(H, H) for H in (8, 64, 72, 96, 128, 136, 192, 200, 256)] + [(192, 128)]
    sizes = itertools.product(widths, (1, 64, 65, 301), (1, 63, 129, 517), (1, 6))
    calls = [(*of_heads, *others) for of_heads, *others in sizes]
    given = "\n".join(" ".join(map(str, call)) for call in calls)
    found = subprocess.run([program], input=given, capture_output=True, text=True, check=True)
    assert len(found.stdout.splitlines()) == len(calls)
    for (H, Hv, T, S, N), line in zip(calls, found.stdout.splitlines(), strict=True):
        q = jax.ShapeDtypeStruct((2, T, N, H), jnp.bfloat16)
        k, v = (jax.ShapeDtypeStruct((2, S, 1, width), jnp.bfloat16) for width in (H, Hv))
        partial = cuda._bias_partial(q, (N + 2) * H)
        workspaces = cuda._forward_scratch(q, v), cuda._backward_scratch(q, k, v), partial
        assert line.split() == [str(x.size) for x in workspaces], (H, Hv, T, S, N)
