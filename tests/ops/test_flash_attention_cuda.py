"""The CUDA kernels of flash attention: exactness, and Hopper against portable kernels."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import attention_arrays, attention_gradients, document_ids

from jaxllm.core import ffi
from jaxllm.ops import flash_attention, repeat_kv, rope_table, softmax
from jaxllm.ops.attention import cuda, reference
from jaxllm.testing import error, lower_for_cuda, tolerance


@pytest.mark.parametrize("segments", [False, True])
def test_lowered_program_calls_the_cuda_kernels(segments, with_kernels):
    q, k, v = attention_arrays(N=4, K=2, dtype="bfloat16")
    segment_ids = jnp.zeros((2, 6), jnp.int32) if segments else None
    options = {"causal": True, "window": 3, "softcap": 5, "segment_ids": segment_ids}
    program = lower_for_cuda(
        lambda q, k, v: attention_gradients(q, k, v, **options, backend="cuda"), q, k, v
    )
    for direction, operands in (("forward", 3), ("backward", 6)):
        (call,) = (
            line for line in program.splitlines() if f"@jaxllm_flash_attention_{direction}(" in line
        )
        arguments = call[call.index("(") + 1 : call.index(")")]
        assert len(arguments.split(",")) == operands + 2 * segments
        assert "left = 2 : i64" in call
        assert "right = 0 : i64" in call
        assert "softcap = 5.000000e+00 : f32" in call


def unfused_attention(
    q, k, v, *, causal=False, scale=None, window=None, softcap=None, segment_ids=None
):
    """Attention as separate ops, each with outputs in the dtype of ``q``."""
    (T, N, H), (S, K) = q.shape[1:], k.shape[1:3]
    k, v = (repeat_kv(x, N // K, backend="xla") for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * (H**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    mask = reference._mask(T, S, causal, window, segment_ids)
    mask = mask[:, 0] if mask.ndim == 5 else mask
    weights = softmax(jnp.where(mask, scores, -jnp.inf), backend="xla")
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def check_cuda_kernels(q, k, v, but=(), **options):
    """Checks that out, dq, dk and dv have at most twice the error of unfused attention."""
    dtype = q.dtype.name
    # Computed outside of jit: inside, XLA might skip the rounding to bfloat16.
    shape = (*q.shape[:-1], v.shape[-1])
    dout = jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=0)
    def run(attention, q, k, v, dout):
        out, pull = jax.vjp(lambda *qkv: attention(*qkv, **options), q, k, v)
        return out, *pull(dout.astype(out.dtype))

    # On a CPU: on an H200, without autotuning, XLA's float64 dq was wrong for 1100 tokens.
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v)]
        exact = run(reference.flash_attention, *wide, jnp.asarray(np.asarray(dout)))
        exact = jax.tree.map(np.asarray, exact)
    with jax.default_matmul_precision("highest"):
        plain = run(unfused_attention, q, k, v, dout)
    found = run(functools.partial(flash_attention, backend="cuda"), q, k, v, dout)
    for name, a, e, p in zip(("out", "dq", "dk", "dv"), found, exact, plain, strict=True):
        if name in but:
            continue
        # In float32 both errors depend mostly on the order of summation.
        allowed = tolerance(dtype) if dtype == "float32" else 2 * error(p, e)
        assert error(a, e) <= min(allowed, tolerance(dtype)), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("H", [32, 40, 64, 96, 128, 160, 200, 256])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((301, 301), {"causal": True}),
        ((301, 301), {}),
        ((97, 517), {"causal": True, "window": 90}),
        ((517, 97), {"causal": True}),
        ((517, 301), {"window": (200, 30)}),
        ((301, 517), {"window": (None, 70)}),
        ((301, 301), {"window": (90, None)}),
        ((517, 301), {"window": 70, "softcap": 3.0}),
        ((301, 517), {"segments": True, "scale": -0.1}),
        ((301, 301), {"segments": True, "causal": True, "softcap": 5.0, "window": 99}),
        ((301, 301), {"segments": True, "causal": True}),
        ((301, 517), {"segments": True, "window": 120}),
    ],
)
def test_cuda_kernels_are_exact_for_any_head_dim(dtype, H, lengths, options):
    T, S = lengths
    q, k, v = attention_arrays(T=T, S=S, N=6, K=2, H=H, dtype=dtype)
    options = dict(options)
    if options.pop("segments", False):
        options["segment_ids"] = (document_ids(2, T), document_ids(2, S))

    check_cuda_kernels(q, k, v, **options)


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("N", "K"), [(6, 2), (3, 3)])
@pytest.mark.parametrize(
    ("lengths", "options"),
    [
        ((301, 301), {"causal": True}),
        ((301, 301), {}),
        ((1, 77), {"causal": True}),
        ((97, 517), {"causal": True, "window": 90}),
        ((517, 97), {"causal": True}),
        ((517, 301), {"window": (200, 30)}),
        ((301, 517), {"window": (None, 70), "scale": 0.2}),
        ((301, 517), {"segments": True}),
        ((301, 301), {"segments": True, "causal": True}),
        ((301, 517), {"segments": True, "window": 120}),
        ((1100, 1100), {"causal": True}),
    ],
)
def test_hopper_kernels_are_exact_for_narrow_values(dtype, N, K, lengths, options):
    T, S = lengths
    q, k, v = attention_arrays(T=T, S=S, N=N, K=K, H=192, Hv=128, dtype=dtype)
    options = dict(options)
    if options.pop("segments", False):
        options["segment_ids"] = (document_ids(2, T), document_ids(2, S))
    check_cuda_kernels(q, k, v, **options)


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_key_leaves_queries_and_keys_no_gradient(dtype):
    # Its probability is 1 whatever the score. What is left comes from the rounding of delta.
    q, k, v = attention_arrays(T=70, S=1, N=6, K=2, H=192, Hv=128, dtype=dtype)
    check_cuda_kernels(q, k, v, but=("dq", "dk"))
    dq, dk, _ = attention_gradients(q, k, v, backend="cuda")
    assert abs(dq).max() < 1e-4
    assert abs(dk).max() < 1e-4


@pytest.mark.hopper
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_narrow_values_repeat_bit_for_bit(segments, causal):
    q, k, v = attention_arrays(T=1500, N=16, K=8, H=192, Hv=128, dtype="bfloat16")
    ids = jnp.arange(1500)[None].repeat(2, 0) // 400 if segments else None
    options = {"causal": causal, "segment_ids": ids, "backend": "cuda"}
    found = attention_gradients(q, k, v, **options)
    for _ in range(5):
        for x, y in zip(found, attention_gradients(q, k, v, **options), strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.hopper
def test_narrow_values_with_sinks_and_rotation_match_the_reference():
    q, k, v = attention_arrays(T=200, N=4, K=2, H=192, Hv=128, dtype="bfloat16")
    sinks = jnp.array([0.5, -1.0, 3.0, -jnp.inf])
    table = rope_table(jnp.arange(200), 64, theta=1e4)

    def run(backend):
        def fn(q, k, v, sinks):
            options = {"causal": True, "rope_table": table, "return_lse": True}
            out, lse = flash_attention(q, k, v, sinks, **options, backend=backend)
            return out.astype(jnp.float32).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), out

        return jax.jit(jax.grad(fn, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, sinks)

    found, expected = run("cuda"), run("pallas")
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert error(x, y) < tolerance("bfloat16")


@pytest.mark.hopper
def test_narrow_values_with_no_queries_have_zero_gradients():
    q, k, v = attention_arrays(T=3, H=192, Hv=128, dtype="bfloat16")
    q = q[:, :0]
    for x in attention_gradients(q, k, v, backend="cuda"):
        assert not x.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("H", [64, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rise", [-40.0, 0.5, 6.0, 12.0, 25.0])
def test_online_softmax_is_exact_for_scores_that_rise_between_tiles(dtype, H, causal, rise):
    check_scores_that_rise(dtype, H, H, causal, rise)


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rise", [-40.0, 0.5, 6.0, 12.0, 25.0])
def test_online_softmax_is_exact_for_narrow_values(dtype, rise):
    check_scores_that_rise(dtype, 192, 128, True, rise)


def check_scores_that_rise(dtype, H, Hv, causal, rise):
    q, k, v = attention_arrays(T=700, N=2, K=2, H=H, Hv=Hv, dtype="float32")
    # Scores rise by ``rise`` powers of two per 64 keys towards key 0, which kernels visit last.
    towards_first = jnp.arange(700)[::-1, None] / 64 * rise * np.log(2)
    q = q.at[..., 0].set(1.0)
    k = k.at[..., 0].set(towards_first * H**0.5)
    # dq is not compared: its terms cancel, and the large column of k leaves no precision.
    check_cuda_kernels(*(x.astype(dtype) for x in (q, k, v)), but=("dq",), causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("H", [64, 128, 256])
# The scores are within the softcap, in some warps beyond it, and in all warps. Warps of the Hopper
# kernels compute the tanh in one way or the other.
# And of the larger two, one in bfloat16 is computed with a row's maxima, and the other without.
@pytest.mark.parametrize("softcap", [500.0, 50.0, 30.0, 2.5, 0.3])
@pytest.mark.parametrize("scale", [None, -0.1])
def test_softcap_is_exact_for_scores_within_and_beyond_it(dtype, H, softcap, scale):
    q, k, v = attention_arrays(T=300, N=2, K=2, H=H, dtype=dtype)
    check_cuda_kernels(q, k, v, causal=True, softcap=softcap, scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize("softcap", [50.0, 30.0, 80.0])
@pytest.mark.parametrize("size", [2.0**-30, 2.0**40])
def test_softcap_serves_rows_at_both_ends_of_its_range(H, softcap, size):
    T = 300
    q, k, v = attention_arrays(T=T, N=3, K=3, H=H, dtype="float32")
    # Of three heads the scores are near -softcap, near softcap, and rise from the one to the other.
    towards = jnp.stack([-jnp.ones(T), jnp.ones(T), jnp.linspace(-1, 1, T)], axis=1)
    k = k.at[..., 0].set(towards * softcap * 3 * H**0.5)
    q = q.at[..., 0].set(1.0)
    q, k, v = (x.astype("bfloat16") for x in (q, k, v * size))
    found = flash_attention(q, k, v, softcap=softcap, backend="cuda")
    expected = reference.flash_attention(
        *(x.astype("float32") for x in (q, k, v)),
        causal=False, scale=H**-0.5, window=None, softcap=softcap,
    )  # fmt: skip
    assert error(found / size, expected / size) < tolerance("bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rows_without_keys_have_the_lse_of_their_sink_under_a_softcap(dtype):
    q, k, v = attention_arrays(T=150, S=90, N=2, K=2, H=64, dtype=dtype)
    sinks = jnp.array([-300.0, 2.0])
    out, lse = flash_attention(
        q, k, v, causal=True, softcap=50.0, sinks=sinks, return_lse=True, backend="cuda"
    )
    assert not out[:, :60].any()
    rows = jnp.broadcast_to(sinks[:, None], lse[:, :, :60].shape)
    np.testing.assert_allclose(lse[:, :, :60], rows, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_huge_scores_and_rows_without_keys_stay_finite(dtype):
    q, k, v = attention_arrays(T=150, S=90, H=64, dtype=dtype)
    options = {"causal": True, "backend": "cuda"}
    out = flash_attention(1e4 * q, k, v, **options)
    assert not out[:, :60].any()
    assert np.isfinite(np.asarray(out, np.float32)).all()
    for x in attention_gradients(1e4 * q, k, v, **options):
        assert np.isfinite(np.asarray(x, np.float32)).all()


@pytest.mark.hopper
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("H", [24, 64, 72, 96, 120, 128, 136, 192, 248, 256])
def test_hopper_kernels_match_portable_kernels(H, softcap, segments, monkeypatch):
    q, k, v = attention_arrays(B=2, T=700, N=4, K=2, H=H, dtype="bfloat16")
    ids = jnp.arange(700)[None].repeat(2, 0) // 150 if segments else None
    options = {"causal": True, "segment_ids": ids, "softcap": softcap, "backend": "cuda"}

    def run():
        return flash_attention(q, k, v, **options), *attention_gradients(q, k, v, **options)

    found = run()
    monkeypatch.setattr(cuda, "_is_for_hopper", lambda *_: False)
    jax.clear_caches()
    expected = run()
    for x, y in zip(found, expected, strict=True):
        assert error(x, y) < tolerance("bfloat16")
    # Other tile sizes round differently, so equal bits would mean that the same kernel ran.
    assert any((x != y).any() for x, y in zip(found, expected, strict=True))


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("H", [64, 80, 128, 192, 256])
# T > S has queries without keys, and an odd number of tiles has a middle tile.
@pytest.mark.parametrize(("T", "S"), [(1900, 1900), (1024, 1024), (1700, 1100), (900, 1550)])
def test_backward_in_halves_matches_portable_kernels(dtype, H, T, S, monkeypatch):
    # More key tiles than SMs, so each SM takes several, and fewer than 16 tiles per SM.
    tiles, gpu = -(-S // (128 if H <= 128 else 64)), ffi.device()
    assert gpu is not None
    K = 2 * gpu.multiprocessors // tiles + 1
    assert gpu.multiprocessors < K * tiles < 16 * gpu.multiprocessors
    q, k, v = attention_arrays(B=1, T=T, S=S, N=2 * K, K=K, H=H, dtype=dtype)
    found = attention_gradients(q, k, v, causal=True, backend="cuda")
    again = attention_gradients(q, k, v, causal=True, backend="cuda")
    for x, y in zip(found, again, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
    monkeypatch.setattr(cuda, "_is_for_hopper", lambda *_: False)
    jax.clear_caches()
    expected = attention_gradients(q, k, v, causal=True, backend="cuda")
    for x, y in zip(found, expected, strict=True):
        assert error(x, y) < tolerance(dtype)
    assert any((x != y).any() for x, y in zip(found, expected, strict=True))


# Limits set by environment variables, and the tests whose kernels then choose differently.
SMALLER_GPUS = {
    ("JAXLLM_MAX_SHARED_KIB", 99): "any_head_dim and (160 or 200 or 256) or ignore_keys",
    ("JAXLLM_MAX_SHARED_KIB", 163): "any_head_dim and 256 or ignore_keys",
    ("JAXLLM_MAX_SMS", 14): "any_head_dim and (64 or 128) or ignore_keys or halves",
}


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("variable", "value"), SMALLER_GPUS)
def test_kernels_pass_on_simulated_smaller_gpus(variable, value):
    def run(*command):
        return subprocess.run(
            [sys.executable, *command],
            env=os.environ | {variable: str(value)},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )

    facts = run("-c", "from jaxllm.core import ffi; print(ffi.device())")
    gpu = ffi.device()
    assert gpu is not None
    if "SHARED" in variable:
        fact = f"shared_bytes={min(value << 10, gpu.shared_bytes)},"
    else:
        fact = f"multiprocessors={min(value, gpu.multiprocessors)},"
    assert fact in facts.stdout, facts
    names = f"({SMALLER_GPUS[variable, value]}) and bfloat16 and not pallas"
    others = ("test_flash_attention_packed.py", "test_decode_attention.py")
    files = [__file__, *(str(Path(__file__).with_name(name)) for name in others)]
    options = [
        "-q",
        "-n0",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-m",
        "gpu",
        "-k",
        names,
    ]
    tests = run("-m", "pytest", *options, *files)
    assert tests.returncode == 0, tests.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", tests.stdout)[0]) > 20, tests.stdout[-4000:]
