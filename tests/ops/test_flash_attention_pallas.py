"""The Pallas kernels of flash attention: tiles, masks, lowering and rejected calls."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import attention_arrays

import jaxllm
from jaxllm.ops import flash_attention
from jaxllm.ops.attention import pallas_flash, pallas_flash_blocks, reference
from jaxllm.ops.attention.pallas_flash_blocks import Tile, Tiles
from jaxllm.testing import assert_close, lower_for_cuda

# Tiles so small that short sequences have many.
SMALL_TILES = Tiles(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))


def both_passes(module, q, k, v, segment_ids=None, /, **options):
    """``(out, lse, dq, dk, dv)`` of an implementation."""
    static = {"causal": False, "scale": 0.25, "window": None, "softcap": None} | options
    shape = (*q.shape[:-1], v.shape[-1])
    dout = jnp.cos(jnp.arange(math.prod(shape))).reshape(shape).astype(q.dtype)

    @jax.jit
    def run(q, k, v, dout):
        out, lse = module.flash_attention_forward(q, k, v, segment_ids, **static)
        arrays = (q, k, v, out, lse, dout, segment_ids)
        return out, lse, *module.flash_attention_backward(*arrays, **static)

    return run(q, k, v, dout)


def pallas_passes(q, k, v, segment_ids=None, /, **options):
    options |= {"tiles": SMALL_TILES, "interpret": jax.default_backend() != "gpu"}
    return both_passes(pallas_flash, q, k, v, segment_ids, **options)


def check_small_tiles(q, k, v, segment_ids=None, **options):
    with jax.enable_x64(True):
        wide_q, wide_k, wide_v = (jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v))
        expected = both_passes(reference, wide_q, wide_k, wide_v, segment_ids, **options)
        expected = [np.asarray(x) for x in expected]
    narrow = both_passes(reference, q, k, v, segment_ids, **options)
    found = pallas_passes(q, k, v, segment_ids, **options)
    assert_close(found, expected, q.dtype, narrow)


@pytest.mark.parametrize(("T", "S"), [(64, 64), (49, 83), (83, 49)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": 20},
        {"window": 5, "softcap": 2.0},
        {"causal": True, "window": 34, "scale": -0.25},
    ],
)
@pytest.mark.covering(("options",), ("T", "S"))
def test_pallas_matches_reference_with_whole_and_partial_tiles(T, S, options):
    q, k, v = attention_arrays(T=T, S=S, K=2, H=16)
    check_small_tiles(q, k, v, **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pallas_matches_reference_with_segments(dtype):
    of_query = np.sort(np.random.default_rng(0).integers(6, size=(2, 70)), axis=1)
    of_key = np.sort(np.random.default_rng(1).integers(1, 7, size=(2, 90)), axis=1)
    segments = (jnp.array(of_query, jnp.int32), jnp.array(of_key, jnp.int32))
    q, k, v = attention_arrays(T=70, S=90, K=1, H=40, dtype=dtype)
    check_small_tiles(q, k, v, segments)
    check_small_tiles(q, k, v, segments, causal=True)


@pytest.mark.parametrize("Hv", [8, 16, 40])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": 5, "softcap": 2.0}])
@pytest.mark.covering(("Hv",), ("options",))
def test_pallas_matches_reference_with_values_of_another_width(Hv, options):
    q, k, v = attention_arrays(T=49, S=83, K=2, H=24, Hv=Hv)
    check_small_tiles(q, k, v, **options)


@pytest.mark.parametrize("by", ["window", "segments"])
def test_pallas_does_not_read_masked_tiles(by):
    q, k, v = attention_arrays(T=16, S=64)
    hidden = jnp.arange(64)[None, :, None, None] < 32
    k, v = (jnp.where(hidden, jnp.nan, x) for x in (k, v))
    if by == "window":
        results = pallas_passes(q, k, v, causal=True, window=8)
    else:
        segments = (jnp.ones((2, 16), jnp.int32), (jnp.arange(64) // 32).repeat(2).reshape(64, 2).T)
        results = pallas_passes(q, k, v, segments)
    out, lse, dq, dk, dv = results
    assert all(np.isfinite(x).all() for x in (out, lse, dq))
    assert all(np.isfinite(x).all() and not x[:, :32].any() for x in (dk, dv))


@pytest.mark.parametrize(("T", "S"), [(40, 40), (23, 61), (61, 23), (1, 50)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 7, 30, 70])
def test_pallas_visits_exactly_the_visible_tiles(T, S, causal, window):
    q, k = (jax.ShapeDtypeStruct((1, length, 1, 16), jnp.float32) for length in (T, S))
    problem = pallas_flash_blocks.Problem.of(q, k, k, causal, 1.0, window, None, True)
    seen = np.asarray(reference._mask(T, S, causal, window, None))
    tile = Tile(8, 4, 1, 1)
    for size, their_size, mask, bounds_of in (
        (tile.queries, tile.keys, seen, pallas_flash_blocks.visible_keys),
        (tile.keys, tile.queries, seen.T, pallas_flash_blocks.seeing_queries),
    ):
        for i in range(-(-len(mask) // size)):
            visits = []
            pallas_flash_blocks.walk(
                lambda rows, _, edge, to=visits: to.append((int(rows.start) // rows.size, edge)),
                bounds_of(jnp.int32(i), None, problem, tile), their_size, mask.shape[1], None,
                loop=lambda start, stop, body, carry: [body(j, carry) for j in range(start, stop)],
            )  # fmt: skip
            rows = mask[i * size : (i + 1) * size]
            cut = [rows[:, j : j + their_size] for j in range(0, mask.shape[1], their_size)]
            assert [j for j, _ in visits] == sorted({j for j, _ in visits})
            for j, block in enumerate(cut):
                edge = dict(visits).get(j)
                assert (edge is not None) == block.any()
                if edge is False:
                    assert block.all() and block.shape[1] == their_size


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ({"T": 1024, "H": 64}, {"causal": True}),
        ({"T": 1000, "S": 2100, "H": 128, "K": 1}, {"causal": True, "window": 300}),
        ({"T": 77, "H": 256}, {"softcap": 20.0, "window": 9}),
        ({"T": 1, "S": 300, "H": 96}, {"causal": True, "scale": -1.0}),
        ({"T": 9, "H": 5}, {"causal": True, "segment_ids": np.zeros((2, 9), np.int32)}),
        ({"T": 300, "H": 192, "Hv": 128}, {"causal": True}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.covering(("options",), ("dtype",))
def test_pallas_lowers_to_three_kernels_for_a_gpu(shapes, options, dtype):
    def gradient(*qkv):
        total = lambda *qkv: flash_attention(*qkv, **options, backend="pallas").sum()  # noqa: E731
        return jax.grad(total, argnums=(0, 1, 2))(*qkv)

    program = lower_for_cuda(gradient, *attention_arrays(**shapes, dtype=dtype))
    for name in ("forward", "backward_keys", "backward_queries"):
        assert program.count(f'name = "_{name}_kernel"') == 1


def test_pallas_does_not_materialize_scores():
    q, k, v = (jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.bfloat16) for _ in range(3))
    segments = jnp.zeros((1, 4096), jnp.int32)

    def gradient(backend):
        options = {"causal": True, "segment_ids": segments, "backend": backend}
        return jax.grad(lambda *qkv: flash_attention(*qkv, **options).sum(), argnums=(0, 1, 2))

    assert "4096x4096" in lower_for_cuda(gradient("xla"), q, k, v)
    assert "4096x4096" not in lower_for_cuda(gradient("pallas"), q, k, v)


def test_pallas_gives_the_reason_for_rejecting_a_call():
    q = jax.ShapeDtypeStruct((1, 4, 2, 257), jnp.bfloat16)
    call = lambda q: flash_attention(q, q, q, backend="pallas")  # noqa: E731
    with pytest.raises(jaxllm.BackendError, match="heads are 257 wide; the kernel takes at most"):
        jax.eval_shape(call, q)
    with jax.enable_x64(True), pytest.raises(jaxllm.BackendError, match="q has dtype float64"):
        call(jnp.zeros((1, 4, 2, 8), jnp.float64))
