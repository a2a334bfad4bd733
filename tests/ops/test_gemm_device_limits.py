"""Limits of the GEMM kernels: SMs, clusters, workspaces and array sizes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from op_helpers import ffn_block_arrays, pretend_sms

import jaxllm
from jaxllm import ops
from jaxllm.core import ffi
from jaxllm.ops.gemm import cuda, cuda_fused, fused


# row_tiles: the most tiles of a row that can wait for one another. fits: whether the two wgrads of
# GPT-2's attention, 48 tiles, run in one kernel.
@pytest.mark.parametrize(
    ("sms", "row_tiles", "fits"),
    [
        (148, 48, True),
        (132, 48, True),
        (114, 48, True),
        (78, 39, False),
        (60, 30, False),
        (14, 7, False),
    ],
)
def test_predicates_depend_on_the_sm_count(monkeypatch, sms, row_tiles, fits):
    gpu = dataclasses.replace(ffi.H100, multiprocessors=148, clusters=74)
    pretend_sms(monkeypatch, sms, gpu)

    def rows(count, width=3072):
        return jax.ShapeDtypeStruct((count, width), jnp.bfloat16)

    fused, row = cuda_fused.gemm_unsupported, cuda_fused.row_gemm_unsupported
    assert fused(rows(128 * sms), 192) is None
    assert f"too few to fill {sms} SMs" in str(fused(rows(128 * (sms - 1)), 192))
    assert row(rows(65536), 768) is None
    assert row(rows(65536), row_tiles * 192) is None
    reason = row(rows(65536), row_tiles * 192 + 8)
    assert f"no more than {row_tiles} run at once" in str(reason)
    arrays = [rows(65536, width) for width in (768, 2304, 768, 768)]
    for sms_of_tile, expected in ((2, fits), (1, sms >= 48)):
        options = {"min_rows": 0, "sms_of_tile": sms_of_tile}
        assert (cuda_fused.wgrad_pair_unsupported(*arrays, **options) is None) == expected


@pytest.mark.parametrize(("sms", "groups"), [(132, 16), (114, 14), (78, 9), (60, 7), (14, 1)])
def test_workspaces_are_sized_for_the_ctas_of_the_gpu(monkeypatch, sms, groups):
    pretend_sms(monkeypatch, sms)
    workspaces = []

    def call(stem, results, *arrays, **_):
        workspaces.extend(x.shape for x in results if x.dtype == jnp.float32)
        return [jnp.zeros(x.shape, x.dtype) for x in results]

    monkeypatch.setattr(ffi, "call", call)
    rows, weight = jnp.ones((256, 768), jnp.bfloat16), jnp.ones((768, 64), jnp.bfloat16)
    dout, rstd = jnp.ones((256, 64), jnp.bfloat16), jnp.ones(256)
    cuda_fused.matmul_norm_backward(dout, weight, rows, rstd, rows)
    assert workspaces.pop(0) == (16 * groups, 768)
    workspaces.clear()
    cuda_fused.wgrad_pair(rows, dout, rows, rows, min_rows=0, sms_of_tile=1)  # 3 and 12 tiles
    assert workspaces == [(sms + 3 + 12, 256, 192)]


# In tiles of 128 x 192, for 132 SMs, and for 14.
@pytest.mark.parametrize(
    ("shape", "tiles", "is_split", "is_split_on_14"),
    [
        ((768, 768, 32768), 24, True, False),
        ((768, 2304, 32768), 72, False, False),  # narrow tiles keep 108 of 132 SMs busy
        ((768, 3072, 32768), 96, True, False),
        ((768, 768, 4096), 24, True, False),
        ((768, 768, 4080), 24, False, False),
        ((1, 8, 4096), 1, True, True),
        ((256, 576, 4096), 6, True, True),
        ((2304, 1536, 4096), 144, False, False),  # two waves of narrow tiles, the second of 42
        (
            (300, 9592, 4112),
            150,
            True,
            False,
        ),  # more tiles than SMs, in tiles of 256 rows half full
        ((2048, 2048, 16384), 176, False, False),  # two waves of narrow tiles, and both are full
        ((2048, 3072, 16384), 256, False, False),  # of wide ones
        ((16384, 11264, 4096), 7552, False, False),
        ((8, 50688, 4096), 264, True, False),  # in tiles of 256 rows, which are half as full
        ((8, 50696, 4096), 265, False, False),  # more than two waves
        ((0, 8, 4096), 0, False, False),
        ((8, 0, 4096), 0, False, False),
    ],
)
def test_float8_gemms_that_leave_sms_idle_are_split(
    monkeypatch, shape, tiles, is_split, is_split_on_14
):
    for sms, expected in ((132, is_split), (14, is_split_on_14)):
        pretend_sms(monkeypatch, sms)
        assert cuda.split_tiles(*shape) == (sms + tiles if expected else 0)


def test_float8_gemms_are_not_split_on_an_unknown_gpu_or_with_symbolic_sizes(monkeypatch):
    (rows,) = jax.export.symbolic_shape("rows")
    pretend_sms(monkeypatch, 132)
    assert cuda.split_tiles(rows, 768, 4096) == 0
    monkeypatch.setattr(ffi, "device", lambda: None)
    assert cuda.split_tiles(768, 768, 4096) == 0


def test_hopper_kernels_are_rejected_without_a_gpu(monkeypatch):
    monkeypatch.setattr(ffi, "device", lambda: None)
    x = jax.ShapeDtypeStruct((65536, 768), jnp.bfloat16)
    for reason in (
        cuda_fused.gemm_unsupported(x, 768),
        cuda_fused.row_gemm_unsupported(x, 768),
        cuda_fused.wgrad_pair_unsupported(x, x, x, x, min_rows=0, sms_of_tile=1),
    ):
        assert "this process has no NVIDIA GPU" in str(reason)


def test_hopper_kernels_are_rejected_without_clusters(monkeypatch):
    gpu = dataclasses.replace(ffi.H100, multiprocessors=1, clusters=0)
    monkeypatch.setattr(ffi, "device", lambda: gpu)
    x = jax.ShapeDtypeStruct((65536, 768), jnp.bfloat16)
    assert "no two SMs" in str(cuda_fused.gemm_unsupported(x, 768))
    assert "no two SMs" in str(cuda_fused.row_gemm_unsupported(x, 768))


def shape_of(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_size_limits_apply_to_the_arrays_of_each_kernel():
    # The sizes are GPT-2's with 32 sequences of 8192 tokens. The limit of 2^31 elements applies to
    # the operands of a kernel, and not to matmuls that XLA runs.
    rows, narrow, wide = shape_of(2**18, 768), shape_of(768, 3072), shape_of(2**18, 3072)
    huge, of_huge = shape_of(2**18, 2**13), shape_of(768, 2**13)
    too_large, too_wide = f"{2**31} elements", "x has rows of 131072"

    def accepts(fn, *arrays, **options):
        jax.eval_shape(functools.partial(fn, **options), *arrays)

    def rejects(reason, *call, **options):
        with pytest.raises(jaxllm.BackendError, match=reason):
            accepts(*call, **options)

    def on_pallas(fn):
        return functools.partial(fn, "pallas")

    accepts(on_pallas(fused.wgrad_pair), rows, huge, rows, huge, min_rows=0, sms_of_tile=1)
    linear = functools.partial(ops.linear, backend="pallas")
    accepts(linear, rows, of_huge)
    accepts(linear, rows, narrow, activation="gelu")
    rejects(too_large, linear, rows, of_huge, activation="gelu")
    accepts(jax.grad(lambda x, w: linear(x, w).sum().astype("float32")), rows, of_huge)
    dgelu = on_pallas(fused.matmul_dgelu)
    accepts(dgelu, rows, shape_of(3072, 768), wide, shape_of(3072))
    rejects(too_large, dgelu, rows, shape_of(2**13, 768), huge, shape_of(2**13))

    wider, row = shape_of(4, 2**17), shape_of(4, dtype="float32")
    four, other = shape_of(4, 768), shape_of(768, 2**17)
    backward = on_pallas(fused.matmul_norm_backward)
    accepts(backward, wider, shape_of(768, 2**17), four, row, four)
    rejects(too_wide, backward, four, shape_of(2**17, 768), wider, row, wider)
    forward = functools.partial(on_pallas(fused.matmul_residual_norm), eps=1e-5)
    accepts(forward, wider, shape_of(2**17, 768), None, four, (four, row, row))
    rejects(too_wide, forward, four, other, None, wider, (wider, row, row))
    accepts(on_pallas(fused.matmul_residual), four, other, None, wider)


def test_norm_kernel_of_a_block_rejects_a_scale_of_another_16_bit_dtype(with_kernels):
    x, norm, layers = jax.eval_shape(lambda: ffn_block_arrays("bfloat16"))
    norm = jax.tree.map(lambda a: shape_of(*a.shape, dtype="float16"), norm)

    def run(x, norm, layers):
        return ops.ffn_block(ops.residual(x), norm, layers, backend="cuda").x

    with pytest.raises(jaxllm.BackendError, match="dtype float16"):
        jax.eval_shape(run, x, norm, layers)
