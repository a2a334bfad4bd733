"""Decode attention: cache lengths, windows, sinks, int8 caches, caches in pages, and errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import ops, testing

BACKENDS: list[Any] = ["xla", "pallas"]


def inputs(seed=0, B=3, N=6, K=2, S=40, H=16, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(keys[0], (B, N, H), dtype)
    k, v = (jax.random.normal(key, (B, S, K, H), dtype) for key in keys[1:])
    return q, k, v


def poison(k, v, lengths, window=None):
    """Keys and values that are NaN behind the lengths, and before the window."""
    token, end = jnp.arange(k.shape[1]), lengths[:, None]
    hidden = token >= end
    if window is not None:
        hidden |= token < end - window
    k, v = (jnp.where(hidden[..., None, None], jnp.nan, x) for x in (k, v))
    return k, v


def exact(q, k, v, lengths, **options):
    """The reference implementation in float64."""
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v))
        return ops.decode_attention(q, k, v, lengths, backend="xla", **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 1, 6, 39, 40, 99, 2**31 - 1, 2**40, (4, 2), (None, 1)])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.covering(("window", "with_sinks"), ("with_sinks", "backend"))
def test_matches_the_last_row_of_flash_attention(with_sinks, window, backend):
    q, k, v = inputs()
    sinks = jnp.linspace(-4.0, 6.0, 6) if with_sinks else None
    options: Any = {"sinks": sinks, "window": window}
    out = ops.decode_attention(q, k, v, jnp.array([40, 7, 1]), backend=backend, **options)
    for b, length in enumerate((40, 7, 1)):
        one = slice(b, b + 1)
        expected = ops.flash_attention(
            q[one, None], k[one, :length], v[one, :length], causal=True, backend="xla", **options
        )
        testing.assert_close(out[b], expected[0, 0], "float32")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("lengths", "window"), [((5, 0, 39), None), ((25, 0, 39), 7)])
def test_keys_that_are_not_seen_do_not_change_the_output(lengths, window, backend):
    q, k, v = inputs()
    lengths = jnp.array(lengths)
    options: Any = {"window": window, "backend": backend}
    out = ops.decode_attention(q, *poison(k, v, lengths, window), lengths, **options)
    np.testing.assert_array_equal(out, ops.decode_attention(q, k, v, lengths, **options))
    np.testing.assert_array_equal(out[1], jnp.zeros_like(out[1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_of_any_size_leave_finite_outputs(backend):
    q, k, v = inputs()
    lengths = jnp.array([40, 7, 0])
    sinks = jnp.array([-jnp.inf, -1e30, -200.0, 0.0, 200.0, 1e30])
    out = ops.decode_attention(q, k, v, lengths, sinks=sinks, backend=backend)
    without = ops.decode_attention(q, k, v, lengths, backend=backend)
    testing.assert_close(out[:, :3], without[:, :3], "float32")
    np.testing.assert_array_equal(out[:, 5], jnp.zeros_like(out[:, 5]))
    np.testing.assert_array_equal(out[2], jnp.zeros_like(out[2]))
    assert np.isfinite(out).all()


# Shapes (batch, heads, kv_heads, max_length, head_dim) for which the CUDA kernels differ. First:
# one CTA per head; clusters whose partial results a second kernel merges; any head_dim. Then long
# caches with one cluster per head: both head widths, two sequences, a max_length that ends within
# the tokens of a CTA, more heads than the kernel or a CTA takes, merged clusters. Last: sizes that
# a build without sm_90 code computed wrongly on a Hopper GPU.
SHAPES = [
    (1, 6, 2, 200, 64),
    (1, 8, 2, 8192, 64),
    (1, 3, 3, 900, 40),
    (1, 32, 8, 8192, 128),
    (1, 16, 8, 8192, 64),
    (2, 16, 4, 8192, 128),
    (1, 24, 8, 9000, 128),
    (1, 40, 8, 8192, 128),
    (1, 48, 4, 9000, 128),
    (1, 4, 1, 65536, 64),
    (1, 32, 8, 512, 128),
    (1, 32, 8, 2048, 128),
    (2, 16, 4, 1000, 128),
]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "pallas"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "max_length", "head_dim"), SHAPES)
def test_kernels_ignore_keys_past_the_length(
    backend, dtype, batch, heads, kv_heads, max_length, head_dim
):
    for length in (0, 1, 100, max_length // 2 + 3, max_length - 1, max_length):
        q, k, v = inputs(B=batch, N=heads, K=kv_heads, S=max_length, H=head_dim, dtype=dtype)
        lengths = jnp.array([length, max_length - length][:batch])
        out = ops.decode_attention(q, *poison(k, v, lengths), lengths, backend=backend)
        np.testing.assert_array_equal(out, ops.decode_attention(q, k, v, lengths, backend=backend))
        testing.assert_close(out, exact(q, k, v, lengths), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "pallas"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "max_length", "head_dim"), SHAPES)
def test_kernels_ignore_keys_outside_of_a_window(
    backend, dtype, batch, heads, kv_heads, max_length, head_dim
):
    q, k, v = inputs(B=batch, N=heads, K=kv_heads, S=max_length, H=head_dim, dtype=dtype)
    sinks = jnp.linspace(-3.0, 5.0, heads)
    for length, window in ((0, 5), (max_length, 1), (max_length - 3, 90), (max_length, 4500)):
        lengths = jnp.array([length, max_length // 2][:batch])
        options: Any = {"sinks": sinks, "window": window}
        arrays = (q, *poison(k, v, lengths, window), lengths)
        out = ops.decode_attention(*arrays, backend=backend, **options)
        testing.assert_close(out, exact(q, k, v, lengths, **options), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("batch", "heads", "kv_heads", "max_length", "head_dim"), SHAPES)
def test_cuda_kernels_give_pages_the_bits_of_one_piece(
    dtype, batch, heads, kv_heads, max_length, head_dim
):
    rng, of_q = np.random.default_rng(0), "bfloat16" if dtype == "int8" else dtype
    sinks = jnp.linspace(-3.0, 5.0, heads)
    for page, window in ((16, None), (7, 300), (256, None), (1, 40)):
        pages = -(-max_length // page)
        S = pages * page
        q, k, v = inputs(B=batch, N=heads, K=kv_heads, S=S, H=head_dim, dtype=of_q)
        scales = []
        if dtype == "int8":
            k, v = (jnp.asarray(rng.integers(-127, 128, k.shape), jnp.int8) for _ in range(2))
            scales = [jnp.asarray(rng.uniform(0.01, 0.02, k.shape[:3]), jnp.float32)] * 2
        table = jnp.asarray(rng.permutation(batch * pages + 2)[: batch * pages])
        table = table.reshape(batch, pages)
        options: Any = {"sinks": sinks, "window": window, "backend": "cuda"}
        in_one = [in_pages(x, page, table) for x in (k, v, *scales)]
        for length in (S, S // 2 + 1, 0):
            lengths = jnp.array([length, S - length][:batch])
            expected = ops.decode_attention(q, k, v, lengths, *scales, **options)
            # Behind the tokens the table may have anything.
            unused = jnp.arange(pages) * page >= lengths[:, None]
            wild = jnp.where(unused, -5, table)
            out = ops.decode_attention(
                q, in_one[0], in_one[1], lengths, *in_one[2:], block_table=wild, **options
            )
            np.testing.assert_array_equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "pallas"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_ignore_keys_past_the_length_of_a_long_int8_cache(backend, dtype):
    rng = np.random.default_rng(0)
    q, *_ = inputs(B=1, N=32, K=8, S=1, H=128, dtype=dtype)
    k, v = (jnp.asarray(rng.integers(-127, 128, (1, 8192, 8, 128)), jnp.int8) for _ in range(2))
    scales = [jnp.asarray(rng.uniform(0.005, 0.015, (1, 8192, 8)), jnp.float32) for _ in range(2)]
    for length in (0, 1, 100, 4099, 8191, 8192):
        hidden = (jnp.arange(8192) >= length)[:, None]
        poisoned = [jnp.where(hidden, jnp.nan, x) for x in scales]
        lengths = jnp.array([length])
        out = ops.decode_attention(q, k, v, lengths, *poisoned, backend=backend)
        whole = ops.decode_attention(q, k, v, lengths, *scales, backend=backend)
        np.testing.assert_array_equal(out, whole)
        with jax.enable_x64(True):
            wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (q, *scales)]
            expected = ops.decode_attention(wide[0], k, v, lengths, *wide[1:], backend="xla")
        testing.assert_close(out, expected, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_are_clamped_to_the_cache(backend):
    arrays = inputs()
    out = ops.decode_attention(*arrays, jnp.array([99, -4, 40]), backend=backend)
    expected = ops.decode_attention(*arrays, jnp.array([40, 0, 40]), backend=backend)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_int8_cache_matches_dequantized_cache(backend):
    q, k, v = inputs()
    lengths = jnp.array([40, 7, 1])
    scales = [abs(x).max(axis=-1) / 127 for x in (k, v)]
    rounded = [
        jnp.round(x / s[..., None]).astype(jnp.int8) for x, s in zip((k, v), scales, strict=True)
    ]
    out = ops.decode_attention(q, rounded[0], rounded[1], lengths, *scales, backend=backend)
    wide = [x * s[..., None] for x, s in zip(rounded, scales, strict=True)]
    expected = ops.decode_attention(q, wide[0], wide[1], lengths, backend="xla")
    testing.assert_close(out, expected, "float32")
    exact = ops.decode_attention(q, k, v, lengths, backend="xla")
    assert testing.error(out, exact) < 0.02


def in_pages(x, page, table):
    """The rows of sequences, (B, S, ...), in a pool of pages; pages that no table names are NaN."""
    rows = x.reshape(table.shape[0], table.shape[1], page, *x.shape[2:])
    nothing = 0 if x.dtype == jnp.int8 else jnp.nan
    pool = jnp.full((table.size + 2, *rows.shape[2:]), nothing, x.dtype)
    return pool.at[table].set(rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("page", "pages"), [(16, 9), (8, 5), (1, 30), (3, 47), (256, 2)])
@pytest.mark.covering(("page",), ("dtype", "backend"))
def test_a_cache_in_pages_gives_the_bits_of_one_in_one_piece(page, pages, dtype, backend):
    S, rng = page * pages, np.random.default_rng(0)
    q, k, v = inputs(S=S, dtype="float32" if dtype == "int8" else dtype)
    table = jnp.asarray(rng.permutation(3 * pages + 2)[: 3 * pages].reshape(3, pages))
    scales = []
    if dtype == "int8":
        k, v = (jnp.asarray(rng.integers(-127, 128, k.shape), jnp.int8) for _ in range(2))
        scales = [jnp.asarray(rng.uniform(0.01, 0.02, k.shape[:3]), jnp.float32) for _ in range(2)]
    lengths = jnp.array([S, S // 2 + 1, 0])
    expected = ops.decode_attention(q, k, v, lengths, *scales, backend=backend)
    arrays = [in_pages(x, page, table) for x in (k, v)]
    more = [in_pages(x, page, table) for x in scales]
    options: Any = {"block_table": table, "backend": backend}
    out = ops.decode_attention(q, arrays[0], arrays[1], lengths, *more, **options)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_and_sinks_of_pages_give_the_bits_of_one_piece(backend):
    q, k, v = inputs(S=60)
    table = jnp.asarray(np.random.default_rng(0).permutation(17)[:15].reshape(3, 5))
    pools = [in_pages(x, 12, table) for x in (k, v)]
    given: Any = {"sinks": jnp.linspace(-2.0, 3.0, 6), "window": 20, "backend": backend}
    lengths = jnp.array([60, 31, 9])
    expected = ops.decode_attention(q, k, v, lengths, **given)
    out = ops.decode_attention(q, pools[0], pools[1], lengths, block_table=table, **given)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("in_one_pool", [False, True])
def test_vmap_of_sinks_and_pages_matches_single_calls(in_one_pool, backend):
    q, k, v = (x.reshape(2, 2, *x.shape[1:]) for x in inputs(B=4, S=24))
    rng = np.random.default_rng(0)
    tables = jnp.asarray(np.stack([rng.permutation(6).reshape(2, 3) for _ in range(2)]))
    lengths, sinks = jnp.array([[24, 3], [0, 17]]), jnp.linspace(-2.0, 3.0, 12).reshape(2, 6)
    pools = [x.reshape(2, 6, 8, *x.shape[3:]) for x in (k, v)]
    if in_one_pool:
        pools = [x[0] for x in pools]

    def attend(q, k, v, lengths, table, sinks):
        options: Any = {"block_table": table, "sinks": sinks, "window": 11, "backend": backend}
        return ops.decode_attention(q, k, v, lengths, **options)

    axes = (0, *(None if in_one_pool else 0,) * 2, 0, 0, 0)
    out = jax.vmap(attend, axes)(q, pools[0], pools[1], lengths, tables, sinks)
    for i in range(2):
        k, v = (x if in_one_pool else x[i] for x in pools)
        one = attend(q[i], k, v, lengths[i], tables[i], sinks[i])
        testing.assert_close(out[i], one, "float32")


@pytest.mark.parametrize("backend", BACKENDS)
def test_entries_of_the_block_table_behind_the_length_are_not_read(backend):
    q, k, v = inputs(B=2, S=12)
    k, v = (x[0].reshape(3, 4, *x.shape[2:]) for x in (k, v))
    given = [jnp.array(table) for table in ([[1, 0, 99], [2, -7, 99]], [[1, 0, 0], [2, 0, 0]])]
    out, expected = (
        ops.decode_attention(q, k, v, jnp.array([8, 3]), block_table=table, backend=backend)
        for table in given
    )
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (jnp.ones((3, 2)), TypeError, "block_table has dtype float32; it must be an integer"),
        (jnp.ones(3, int), ValueError, r"block_table has shape \(3,\); it must be \(3, M\)"),
        (jnp.ones((2, 2), int), ValueError, r"block_table has shape \(2, 2\); it must be \(3, M\)"),
    ],
)
def test_wrong_block_tables_are_errors(table, error, message):
    q, k, v = inputs()
    with pytest.raises(error, match=message):
        ops.decode_attention(q, k, v, jnp.ones(3, int), block_table=table)


def test_a_pool_without_pages_is_an_error_where_some_are_named():
    (q, k, v), table = inputs(S=4), jnp.zeros((3, 1), int)
    with pytest.raises(ValueError, match=r"k_cache has shape \(0, 4, 2, 16\), no page"):
        ops.decode_attention(q, k[:0], v[:0], jnp.ones(3, int), block_table=table)
    with pytest.raises(ValueError, match=r"k_cache has shape .* must be \(P, page, K, 16\)"):
        ops.decode_attention(q, k[..., :3], v, jnp.ones(3, int), block_table=table)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_without_pages_gives_zeros(backend):
    q, k, v = inputs(S=4)
    table = jnp.zeros((3, 0), int)
    out = ops.decode_attention(
        q, k[:0], v[:0], jnp.zeros(3, int), block_table=table, backend=backend
    )
    np.testing.assert_array_equal(out, jnp.zeros_like(q))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": jnp.ones((3, 6))}, ValueError, r"q has shape \(3, 6\)"),
        ({"q": jnp.ones((3, 5, 16))}, ValueError, r"k_cache has shape .* 2 heads; .* divide"),
        ({"q": jnp.ones((2, 6, 16))}, ValueError, r"k_cache has shape .* must be \(2, S, K, 16\)"),
        ({"v": jnp.ones((3, 41, 2, 16))}, ValueError, "v_cache has shape .* the shape of k_cache"),
        ({"k": jnp.ones((3, 40, 2, 16), jnp.bfloat16)}, TypeError, "k_cache has dtype bfloat16"),
        ({"k": jnp.ones((3, 40, 2, 16), jnp.int8)}, TypeError, "v_cache has dtype float32"),
        ({"v": None}, TypeError, "v_cache has type NoneType; it must be int8, or float32"),
        ({"lengths": jnp.ones(3)}, TypeError, "lengths has dtype float32"),
        ({"lengths": jnp.ones(4, int)}, ValueError, r"lengths has shape \(4,\)"),
        ({"k_scales": jnp.ones((3, 40, 2))}, TypeError, "k_scales must be None"),
        ({"sinks": jnp.ones(2)}, ValueError, r"sinks has shape \(2,\)"),
        ({"sinks": jnp.ones(6, jnp.bfloat16)}, TypeError, "sinks has dtype bfloat16"),
        ({"window": 0}, ValueError, "window is 0"),
        ({"window": 1.5}, TypeError, "window"),
        ({"window": (1, -1)}, ValueError, r"window is \(1, -1\)"),
    ],
)
def test_invalid_arguments_are_rejected(change, error, message):
    names = ("q", "k_cache", "v_cache")
    given: Any = dict(zip(names, inputs(), strict=True)) | {"lengths": jnp.ones(3, int)}
    given |= {f"{name}_cache" if name in ("k", "v") else name: x for name, x in change.items()}
    with pytest.raises(error, match=message):
        ops.decode_attention(**given)


def test_int8_cache_without_scales_is_rejected():
    q, k, _ = inputs()
    cache = k.astype(jnp.int8)
    with pytest.raises(TypeError, match="k_scales must be given"):
        ops.decode_attention(q, cache, cache, jnp.ones(3, int))
    with pytest.raises(ValueError, match=r"v_scales has shape \(3, 40\)"):
        ops.decode_attention(
            q, cache, cache, jnp.ones(3, int), jnp.ones((3, 40, 2)), jnp.ones((3, 40))
        )


@pytest.mark.parametrize("lengths", [np.full(3, 2**32), np.full(3, 2**31, np.uint32)])
def test_lengths_beyond_int32_are_those_of_a_full_cache(lengths):
    q, k, v = inputs()
    full = ops.decode_attention(q, k, v, jnp.full(3, 40))
    np.testing.assert_array_equal(ops.decode_attention(q, k, v, lengths), full)
