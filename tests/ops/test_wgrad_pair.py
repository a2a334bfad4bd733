"""The kernel that computes the wgrads of two linear layers."""

import functools

import jax
import pytest
from op_helpers import pretend_sms

from jaxllm.core import ffi
from jaxllm.ops.gemm import cuda_fused
from jaxllm.ops.gemm.fused import wgrad_pair
from jaxllm.testing import assert_close, error, lower_for_cuda

# As the attention block calls it.
OPTIONS = {"min_rows": 0, "sms_of_tile": 2}


def operands_of_two_layers(dtype, rows, *widths):
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, (rows, width), dtype)
        for key, width in zip(keys, widths, strict=True)
    ]


def wgrads(x, dout, other_x, other_dout):
    """The two weight gradients, in plain ``jax.numpy``."""
    return x.T @ dout, other_x.T @ other_dout


@pytest.mark.parametrize("backend", ["xla", "pallas", "auto"])
def test_parts_compute_both_wgrads(backend):
    arrays = operands_of_two_layers("float32", 11, 3, 5, 7, 2)
    found = wgrad_pair(backend, *arrays, **OPTIONS)
    assert_close(found, (*wgrads(*arrays), arrays[1], arrays[3]), "float32")


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({}, True),
        ({"rows": 8191}, False),
        ({"dtype": "float32"}, False),
        ({"widths": (768, 2300, 768, 768)}, False),
        # Each weight alone has enough tiles for a kernel; or the tiles would be half empty.
        ({"widths": (1536, 4608, 1536, 1536)}, False),
        ({"widths": (384, 1152, 384, 384)}, False),
    ],
)
def test_one_kernel_computes_two_small_wgrads(on_hopper, changed, fits):
    sizes = {"dtype": "bfloat16", "rows": 8192, "widths": (768, 2304, 768, 768)} | changed
    arrays = jax.eval_shape(
        lambda: operands_of_two_layers(sizes["dtype"], sizes["rows"], *sizes["widths"])
    )
    program = lower_for_cuda(functools.partial(wgrad_pair, "cuda", **OPTIONS), *arrays)
    assert program.count("@jaxllm_wgrad_pair(") == fits
    assert program.count("dot_general") == (0 if fits else 2)


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("rows", "widths"),
    [
        (1, (8, 8, 8, 8)),
        (63, (256, 192, 264, 200)),
        (1000, (768, 2304, 768, 768)),
        (8192, (1032, 776, 8, 1544)),
        (33000, (768, 2304, 768, 768)),
        # On an H200: as many tiles as SMs; then CTAs that compute the stream-K remainders of three
        # tiles each, while the remainders of eight other tiles are split.
        (5000, (2816, 1152, 2816, 1152)),
        (4100, (2560, 1920, 8, 8)),
    ],
)
def test_one_kernel_computes_two_wgrads_of_any_size(
    monkeypatch, skip_if_declined, dtype, rows, widths
):
    for name in ("MIN_FILLED", "MIN_WGRAD_ROWS"):
        monkeypatch.setattr(cuda_fused, f"_{name}", 0)
    options = OPTIONS | {"sms_of_tile": 1}
    arrays = operands_of_two_layers(dtype, rows, *widths)
    skip_if_declined(lambda: cuda_fused.wgrad_pair_unsupported(*arrays, **options))
    fn = functools.partial(wgrad_pair, "cuda", **options)
    found, again = (jax.jit(fn)(*arrays)[:2] for _ in range(2))
    wide = [x.astype("float32") for x in arrays]
    expected = wgrads(*wide)
    assert_close(found, expected, dtype, wgrads(*arrays))
    for a, b in zip(found, again, strict=True):
        assert error(a, b) == 0


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("sms", "widths"), [(114, (768, 2304, 768, 768)), (14, (248, 576, 200, 384))]
)
def test_wgrad_kernel_stays_within_the_workspace_of_a_smaller_gpu(
    monkeypatch, skip_if_declined, sms, widths
):
    for name in ("MIN_FILLED", "MIN_WGRAD_ROWS"):
        monkeypatch.setattr(cuda_fused, f"_{name}", 0)
    options = OPTIONS | {"sms_of_tile": 1}
    gpu = pretend_sms(monkeypatch, sms, ffi.device())
    arrays = operands_of_two_layers("bfloat16", 5000, *widths)
    skip_if_declined(lambda: cuda_fused.wgrad_pair_unsupported(*arrays, **options))
    found = jax.jit(lambda *a: wgrad_pair("cuda", *a, **options))(*arrays)[:2]
    assert gpu.multiprocessors <= sms
    expected = wgrads(*(x.astype("float32") for x in arrays))
    assert_close(found, expected, "bfloat16", wgrads(*arrays))
