"""Flash attention of values whose heads have another width than those of queries and keys."""

import dataclasses
import functools
import math

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import (
    FLASH_BACKENDS,
    attention_arrays,
    attention_by_hand,
    attention_gradients,
    in_float64,
    jit_with_gradients,
)

import jaxllm
from jaxllm import export, nn
from jaxllm.core import ffi
from jaxllm.core.backend import BackendError
from jaxllm.ops import flash_attention, flash_attention_float8
from jaxllm.ops.attention import reference
from jaxllm.testing import assert_close, error, lower_for_cuda

# Its own attention, or cuDNN's where the process has a GPU.
XLA = ("xla", "xla-gpu")
BACKENDS = [*FLASH_BACKENDS, pytest.param("cuda", marks=pytest.mark.hopper)]


def latent_arrays(dtype="bfloat16", **shapes):
    """Random q, k and v in the widths of DeepSeek's multi-head latent attention."""
    return attention_arrays(H=192, Hv=128, **shapes, dtype=dtype)


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
@pytest.mark.parametrize("Hv", [1, 5, 32])
@pytest.mark.covering(("Hv",), ("backend",))
def test_output_is_as_wide_as_the_values(Hv, backend):
    q, k, v = attention_arrays(N=4, K=4, Hv=Hv)
    out, lse = flash_attention(q, k, v, causal=True, return_lse=True, backend=backend)
    assert (out.shape, lse.shape) == ((2, 6, 4, Hv), (2, 4, 6))
    # The default scale is that of the width of q and k.
    expected = attention_by_hand(q, k, v, lambda _, t, s: s <= t, scale=8**-0.5)
    assert error(out, expected) < 1e-6


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
def test_narrow_values_match_values_padded_with_zeros(backend):
    q, k, v = attention_arrays(T=20, N=4, K=2, Hv=5)
    padded = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, 3)))
    options = {"causal": True, "window": 7, "softcap": 2.0, "backend": backend}
    out = flash_attention(q, k, v, **options)
    assert error(out, flash_attention(q, k, padded, **options)[..., :5]) < 1e-6

    def total(padded, q, k, v):
        v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, 3))) if padded else v
        return (flash_attention(q, k, v, **options)[..., :5] ** 2).sum()

    found, expected = (
        jax.grad(functools.partial(total, padded), argnums=(0, 1, 2))(q, k, v)
        for padded in (False, True)
    )
    for x, y in zip(found, expected, strict=True):
        assert error(x, y) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("T", "S", "N", "K"), [(65, 65, 3, 3), (47, 83, 4, 1), (131, 70, 4, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.covering(("backend", "dtype"), ("backend", "T"), ("backend", "causal"))
def test_latent_widths_match_the_reference_in_float64(T, S, N, K, dtype, causal, backend):
    arrays = latent_arrays(dtype, T=T, S=S, N=N, K=K)
    fn = functools.partial(reference.flash_attention, causal=causal)
    expected, same_dtype = in_float64(fn, arrays), jit_with_gradients(fn, arrays)
    found = jit_with_gradients(
        functools.partial(flash_attention, causal=causal, backend=backend), arrays
    )
    assert_close(found, expected, dtype, same_dtype)


@pytest.mark.hopper
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {},
        {"causal": True, "window": 300},
        {"causal": True, "segment_ids": jnp.repeat(jnp.arange(4), 275)[None].repeat(2, 0)},
    ],
    ids=["causal", "all", "window", "segments"],
)
def test_latent_widths_match_the_reference_over_many_tiles(options):
    arrays = latent_arrays("bfloat16", T=1100, S=1100, N=4, K=2)
    fn = functools.partial(reference.flash_attention, **options)
    expected, same_dtype = in_float64(fn, arrays), jit_with_gradients(fn, arrays)
    attend = functools.partial(flash_attention, **options, backend="cuda")
    found, again = (jit_with_gradients(attend, arrays) for _ in range(2))
    assert_close(found, expected, "bfloat16", same_dtype)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (1, None, 2)])
@pytest.mark.covering(("backend",), ("axes",))
def test_vmap_matches_a_loop(axes, backend):
    arrays = latent_arrays(B=6, T=33, N=2, K=1)
    size, count = 2, 3
    given = [
        x[:size] if axis is None else jnp.moveaxis(x.reshape(count, size, *x.shape[1:]), 0, axis)
        for x, axis in zip(arrays, axes, strict=True)
    ]

    def run(q, k, v):
        return jit_with_gradients(functools.partial(flash_attention, causal=True, backend=backend),
                                  (q, k, v))  # fmt: skip

    found = jax.vmap(run, axes)(*given)
    for i in range(count):
        one = [x if a is None else jnp.take(x, i, a) for x, a in zip(given, axes, strict=True)]
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(run(*one)), strict=True):
            assert error(x[i], y) < 1e-2


def test_program_for_hopper_reads_the_arrays_as_they_are(on_hopper):
    q, k, v = latent_arrays(T=70, N=4, K=2)
    run = functools.partial(attention_gradients, causal=True, backend="cuda")
    program = lower_for_cuda(run, q, k, v)
    for direction in ("forward", "backward"):
        (call,) = (
            line for line in program.splitlines() if f"@jaxllm_flash_attention_{direction}(" in line
        )
        assert "hopper = true" in call
    for op in ("stablehlo.pad", "stablehlo.concatenate", "stablehlo.transpose"):
        assert op not in program
    assert "2x70x4x128xbf16" in program  # the output


def test_program_for_hopper_has_a_symbolic_batch(on_hopper):
    (b,) = jax.export.symbolic_shape("b")
    arrays = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in latent_arrays()]
    run = functools.partial(attention_gradients, causal=True, backend="cuda")
    program = jax.export.export(
        jax.jit(run), platforms=("cuda",), disabled_checks=export.disabled_checks()
    )(*arrays)
    assert "@jaxllm_flash_attention_backward" in program.mlir_module()


@pytest.mark.parametrize(
    ("shapes", "options", "picked", "reason"),
    [
        (
            {"Hv": 64},
            {},
            "pallas",
            "192 wide and values 64; of widths that differ the kernels take 192 and",
        ),
        ({"H": 128, "Hv": 192}, {}, "pallas", "128 wide and values 192; of widths that differ"),
        ({"dtype": "float32"}, {}, "pallas", "the kernels for that take bfloat16 and float16"),
        ({}, {"softcap": 3.0}, "pallas", "the kernels for that take no softcap"),
        ({}, {"scale": -0.5}, "pallas", "scale is -0.5; the kernels for values of another width"),
        ({"B": 65536}, {}, "xla-gpu", "it may have 65535 sequences and heads here"),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_calls_that_the_cuda_kernels_reject_run_elsewhere(
    shapes, options, picked, reason, backward, pretend_cudnn, on_hopper
):
    arrays = functools.partial(
        attention_arrays, **{"H": 192, "Hv": 128, "dtype": "bfloat16"} | shapes
    )
    q, k, v = jax.eval_shape(arrays)
    fn = lambda *qkv: flash_attention(*qkv, **options).sum()  # noqa: E731
    call = jaxllm.explain(jax.grad(fn) if backward else fn, q, k, v).calls[-1]
    assert call.on_gpu == picked
    assert reason in dict(call.rejected)["cuda"]
    with pytest.raises(BackendError, match="backend 'cuda' cannot serve flash_attention"):
        jax.eval_shape(functools.partial(flash_attention, **options, backend="cuda"), q, k, v)


def test_call_with_a_bias_runs_pallas_kernels(on_hopper):
    q, k, v = latent_arrays()
    bias = jnp.zeros((1, 4, 6, 6))
    (call,) = jaxllm.explain(flash_attention, q, k, v, None, bias).calls
    assert call.on_gpu == "pallas"
    with pytest.raises(BackendError, match="the kernels for that take no bias"):
        flash_attention(q, k, v, None, bias, backend="cuda")


def test_other_gpus_reject_narrow_values(with_kernels, monkeypatch):
    q, k, v = latent_arrays()
    a100 = dataclasses.replace(ffi.H100, capability=80, has_sm90a=False)
    monkeypatch.setattr(ffi, "device", lambda: a100)
    (call,) = jaxllm.explain(flash_attention, q, k, v).calls
    assert call.on_gpu in XLA
    assert "the kernel needs a Hopper GPU" in dict(call.rejected)["cuda"]


def test_cudnn_takes_the_latent_widths(pretend_cudnn):
    q, k, v = latent_arrays()
    grad = jax.grad(lambda *qkv: flash_attention(*qkv, backend="xla").sum(), argnums=(0, 1, 2))
    assert [call.on_gpu for call in jaxllm.explain(grad, q, k, v).calls] == ["xla-gpu"] * 2
    shapes = jax.eval_shape(grad, q, k, v)
    assert [x.shape for x in shapes] == [x.shape for x in (q, k, v)]


def test_functions_of_one_width_reject_others():
    q, k, v = attention_arrays(Hv=5)
    with pytest.raises(ValueError, match=r"value has shape .*; it must be \(2, 6, 4, 8\)"):
        nn.dot_product_attention(q, k, v)
    q, k, v = (x.astype(jnp.float8_e4m3fn) for x in (q, k, v))
    with pytest.raises(ValueError, match=r"v has shape .*; it must be \(2, 6, 4, 8\)"):
        flash_attention_float8(q, k, v, *[jnp.ones(4)] * 3)


@pytest.mark.parametrize("backend", FLASH_BACKENDS)
def test_parts_of_the_keys_merge_to_all_of_them(backend):
    q, k, v = attention_arrays(T=9, S=30, Hv=5)
    run = functools.partial(flash_attention, return_lse=True, backend=backend)
    parts = [run(q, k[:, part], v[:, part]) for part in (slice(0, 11), slice(11, 30))]
    lse = functools.reduce(jnp.logaddexp, [lse for _, lse in parts])
    shares = [jnp.exp(one - lse).swapaxes(1, 2)[..., None] * out for out, one in parts]
    merged = shares[0] + shares[1]
    assert error(merged, run(q, k, v)[0]) < 1e-6
    assert math.prod(merged.shape) == 2 * 9 * 4 * 5
