"""The decode block: caches that are slices or rings, scan, vmap, predicates and errors."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import ops, testing
from jaxllm.core import ffi
from jaxllm.ops.block import cuda

BACKENDS = ["xla", pytest.param("cuda", marks=pytest.mark.gpu)]
L, B, D, N, K, H, F, S = 3, 2, 128, 4, 2, 64, 64, 24


def inputs(dtype="bfloat16", extras=False):
    """The residual of a token, and parameters and caches stacked over layers.

    With ``extras`` also a bias of qkv, and the norms of heads.
    """
    shapes = {
        "norm1": (L, D),
        "norm2": (L, D),
        "qkv": (L, (N + 2 * K) * H, D),
        "out": (L, D, N * H),
        "gate_up": (L, 2 * F, D),
        "down": (L, D, F),
    }
    if extras:
        shapes |= {"qkv_bias": (L, (N + 2 * K) * H), "q_norm": (L, H), "k_norm": (L, H)}
    keys = iter(jax.random.split(jax.random.key(0), 20))
    layers = {
        name: jax.random.normal(next(keys), shape, dtype) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    layers |= {name: ops.Transposed(layers[name]) for name in ("qkv", "out", "gate_up", "down")}
    residual = jax.random.normal(next(keys), (B, D), dtype)
    cos, sin = (jax.random.normal(next(keys), (B, H // 2)) for _ in range(2))
    caches = [jax.random.normal(next(keys), (L, B, S, K, H), dtype) for _ in range(2)]
    lengths = jnp.array([S - 1, 5])
    return residual, layers, (cos, sin), caches, lengths


def block(residual, layer, angles, k_cache, v_cache, lengths, backend, **options):
    cos, sin = angles
    arrays = {"cos": cos, "sin": sin, "k_cache": k_cache, "v_cache": v_cache, "lengths": lengths}
    return ops.decode_block(residual, **layer, **arrays, **options, backend=backend)


def of_layer(stacked, i):
    return jax.tree.map(lambda x: x[i], stacked)


def one_by_one(residual, layers, angles, caches, lengths):
    """The output and caches of each layer in sequence, on arrays that are not slices."""
    results = []
    for i in range(L):
        layer, k_cache, v_cache = (of_layer(x, i) for x in (layers, *caches))
        results.append(block(residual, layer, angles, k_cache, v_cache, lengths, "xla"))
        residual = results[-1][0]
    return jax.tree.map(lambda *x: jnp.stack(x), *results)


def assert_like(found, expected):
    testing.assert_close(found[0], expected[0], "bfloat16")
    # Only the entry of the new token changes.
    for cache, of_cache in zip(found[1:], expected[1:], strict=True):
        testing.assert_close(cache, of_cache, "bfloat16")
        for b, length in enumerate(inputs()[-1].tolist()):
            rest = np.arange(S) != length
            was, is_now = (np.asarray(x, np.float32)[..., b, :, :, :] for x in (of_cache, cache))
            np.testing.assert_array_equal(is_now[..., rest, :, :], was[..., rest, :, :])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("computed", [False, True])
def test_caches_may_be_slices(backend, computed):
    residual, layers, angles, caches, lengths = inputs()

    @jax.jit
    def run(residual, layers, caches):
        # The whole array is an output too, so XLA must keep it.
        whole = [cache + cache.dtype.type(0.5) for cache in caches] if computed else caches
        results = [
            block(residual, of_layer(layers, i), angles, whole[0][i], whole[1][i], lengths, backend)
            for i in range(L)
        ]
        return jax.tree.map(lambda *x: jnp.stack(x), *results), whole

    found, whole = run(residual, layers, caches)
    # The array that the caches are slices of is unchanged.
    for cache, before in zip(whole, caches, strict=True):
        before = before + before.dtype.type(0.5 if computed else 0.0)
        found_cache, expected_cache = (np.asarray(x, np.float32) for x in (cache, before))
        np.testing.assert_array_equal(found_cache, expected_cache)
    for i in range(L):
        expected = block(
            residual, of_layer(layers, i), angles, whole[0][i], whole[1][i], lengths, "xla"
        )
        assert_like(of_layer(found, i), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_caches_may_be_slices_of_one_array(backend):
    residual, layers, angles, caches, lengths = inputs()
    both = jnp.stack(caches)
    layer = of_layer(layers, 1)

    @jax.jit
    def run(both):
        return block(residual, layer, angles, both[0, 1], both[1, 1], lengths, backend)

    expected = block(residual, layer, angles, caches[0][1], caches[1][1], lengths, "xla")
    assert_like(run(both), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scan_over_layers_matches_separate_calls(backend):
    residual, layers, angles, caches, lengths = inputs()

    @jax.jit
    def run(residual, layers, caches):
        def step(residual, of_layer):
            layer, k_cache, v_cache = of_layer
            out, *caches = block(residual, layer, angles, k_cache, v_cache, lengths, backend)
            return out, (out, *caches)

        return jax.lax.scan(step, residual, (layers, *caches))[1]

    expected = one_by_one(residual, layers, angles, caches, lengths)
    found = run(residual, layers, caches)
    testing.assert_close(found, expected, "bfloat16")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extras", [False, True])
def test_vmap_matches_separate_calls(backend, extras):
    residual, layers, angles, caches, lengths = inputs(extras=extras)
    fn = functools.partial(block, angles=angles, lengths=lengths, backend=backend)

    @jax.jit
    def run(residual, layers, caches):
        # Two of three layers: each cache is a slice of an array that is itself a slice.
        layers, caches = jax.tree.map(lambda x: x[1:], (layers, caches))
        mapped = jax.vmap(lambda layer, k, v: fn(residual, layer, k_cache=k, v_cache=v))
        return mapped(layers, *caches)

    found = run(residual, layers, caches)
    for i in range(1, L):
        k_cache, v_cache = (cache[i] for cache in caches)
        layer = of_layer(layers, i)
        expected = block(residual, layer, angles, k_cache, v_cache, lengths, "xla")
        assert_like(of_layer(found, i - 1), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_and_norms_of_heads_are_those_of_the_formula(backend):
    residual, layers, _, caches, lengths = inputs("float32", extras=True)
    layer, k_cache, v_cache = (of_layer(x, 0) for x in (layers, *caches))
    no_rotation = jnp.ones((B, H // 2)), jnp.zeros((B, H // 2))
    _, keys, values = block(residual, layer, no_rotation, k_cache, v_cache, lengths, backend)
    x = residual / jnp.sqrt((residual**2).mean(-1, keepdims=True) + 1e-5) * layer["norm1"]
    with jax.default_matmul_precision("highest"):
        heads = (x @ layer["qkv"].array.T + layer["qkv_bias"]).reshape(B, N + 2 * K, H)
    k, v = heads[:, N : N + K], heads[:, N + K :]
    k = k / jnp.sqrt((k**2).mean(-1, keepdims=True) + 1e-5) * layer["k_norm"]
    new = jnp.arange(B), lengths
    for found, expected in ((keys[new], k), (values[new], v)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extras", [False, True])
def test_ring_has_the_attention_of_its_last_tokens_in_order(backend, extras):
    residual, layers, angles, caches, _ = inputs(extras=extras)
    layer, *ring = (of_layer(x, 0) for x in (layers, *caches))
    keys, values = ring
    lengths = jnp.array([2 * S + 5, S])  # of all tokens: their last S - 1 and the new one are seen
    out, *found = block(residual, layer, angles, keys, values, lengths, backend, window=S)
    # The same tokens in order in a plain cache, whose last slot is free.
    order = (lengths[:, None] + 1 + jnp.arange(S)) % S
    keys, values = (jnp.take_along_axis(x, order[:, :, None, None], axis=1) for x in ring)
    full = jnp.full(B, S - 1)
    expected, *appended = block(residual, layer, angles, keys, values, full, "xla")
    testing.assert_close(out, expected, "bfloat16")
    for cache, of_cache in zip(found, appended, strict=True):
        in_order = jnp.take_along_axis(cache, order[:, :, None, None], axis=1)
        testing.assert_close(in_order, of_cache, "bfloat16")


PAGE, PAGES = 8, 9
TABLE = jnp.array([[4, 0, 7], [2, 5, PAGES]])  # S slots of the first sequence, 16 of the second


def in_pages(cache):
    """The pool with the tokens of a cache in one piece, in the pages of TABLE."""
    pool = jnp.full((PAGES, PAGE, K, H), 7, cache.dtype)
    tokens = cache.reshape(B, S // PAGE, PAGE, K, H)
    return pool.at[TABLE].set(tokens, mode="drop")


def assert_same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extras", [False, True])
def test_pages_have_the_bits_of_a_cache_in_one_piece(backend, extras):
    residual, layers, angles, caches, _ = inputs(extras=extras)
    layer, keys, values = (of_layer(x, 0) for x in (layers, *caches))
    run = jax.jit(functools.partial(block, backend=backend))
    of_token, pools = (residual, layer, angles), (in_pages(keys), in_pages(values))
    for of_both in ((S - 1, 5), (0, 15)):
        lengths = jnp.array(of_both)
        expected, *written = run(*of_token, keys, values, lengths)
        found, *stored = run(*of_token, *pools, lengths, block_table=TABLE)
        assert_same_bits((found, *stored), (expected, *map(in_pages, written)))
    # The second sequence has no page for token 16: it attends to the others, and nothing is stored.
    full = jnp.array([3, 16])
    found, *stored = run(*of_token, *pools, full, block_table=TABLE)
    _, *written = run(*of_token, *pools, full.at[1].set(-1), block_table=TABLE)
    assert_same_bits(stored, written)
    assert np.isfinite(np.asarray(found, np.float32)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_window_of_pages_is_that_of_a_ring(backend):
    residual, layers, angles, caches, lengths = inputs()
    layer, keys, values = (of_layer(x, 0) for x in (layers, *caches))
    window, options = 4, {"block_table": TABLE, "window": 4}
    pools = in_pages(keys), in_pages(values)
    found, *_ = block(residual, layer, angles, *pools, lengths, backend, **options)
    last = lengths[:, None] - 1
    tokens = jnp.maximum(last - (last - jnp.arange(window)) % window, 0)  # the last of each slot
    keys, values = (
        jnp.take_along_axis(x, tokens[:, :, None, None], axis=1) for x in (keys, values)
    )
    expected, *_ = block(residual, layer, angles, keys, values, lengths, "xla", window=window)
    testing.assert_close(found, expected, "bfloat16")


def test_wrong_extras_raise_errors_that_name_them():
    residual, layers, angles, caches, lengths = inputs(extras=True)
    layer, keys, values = (of_layer(x, 0) for x in (layers, *caches))

    def call(changes=None, **options):
        changed = layer | (changes or {})
        return block(residual, changed, angles, keys, values, lengths, "xla", **options)

    columns = (N + 2 * K) * H
    with pytest.raises(ValueError, match=rf"qkv_bias has shape \(3,\); it must be \({columns},\)"):
        call({"qkv_bias": jnp.ones(3, "bfloat16")})
    with pytest.raises(
        TypeError, match="qkv_bias has dtype float32; it must have the dtype of residual"
    ):
        call({"qkv_bias": jnp.ones(columns)})
    with pytest.raises(ValueError, match=rf"k_norm has shape \(2,\); it must be \({H},\)"):
        call({"k_norm": jnp.ones(2, "bfloat16")})
    with pytest.raises(ValueError, match="k_norm is None; q_norm and k_norm must both be given"):
        call({"k_norm": None})
    with pytest.raises(ValueError, match=rf"block_table has shape \(3, 1\); it must be \({B}, M\)"):
        call(block_table=jnp.zeros((3, 1), int))
    with pytest.raises(TypeError, match="block_table has dtype float32"):
        call(block_table=jnp.zeros((B, 1)))
    with pytest.raises(ValueError, match="window is 0; it must be at least 1"):
        call(window=0)
    with pytest.raises(TypeError, match=r"window is 2\.5; it must be an integer"):
        call(window=2.5)
    scales = ops.Quantized(jnp.ones(layer["down"].array.shape, "int8"), jnp.ones(()))
    weights: Any
    for weights, message in (
        ({"down": ops.Transposed(residual[0, 0])}, r"down has shape \(\); it must have two dim"),
        ({"out": ops.Transposed(residual[0])}, r"out has shape \(.*,\); it must have two dim"),
        (
            dict.fromkeys(("qkv", "out", "gate_up", "down"), scales),
            r"the scales of qkv has shape \(\); it must have two dimensions",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call(weights)
    weights = {"qkv": ops.Transposed(cast(Any, [[1.0]]))}
    with pytest.raises(TypeError, match="qkv has type list; it must be a floating-point array"):
        call(weights)
    with pytest.raises(ValueError, match=f"with a window of {S - 1} it must have at most as many"):
        call(window=S - 1)
    wider, plain = (np.asarray(x[0], np.float32) for x in (call(window=S + 1), call()))
    np.testing.assert_array_equal(wider, plain)


@pytest.mark.parametrize("fits", [False, True])
def test_is_rejected_where_decode_attention_is(fits, monkeypatch):
    reason = None if fits else "it is too large"
    monkeypatch.setattr(ffi, "shared_memory_reason", {"decode_attention": reason}.get)
    residual, layers, (cos, sin), caches, lengths = inputs()
    layer, k_cache, v_cache = (of_layer(x, 0) for x in (layers, *caches))
    arrays = {"cos": cos, "sin": sin, "k_cache": k_cache, "v_cache": v_cache, "lengths": lengths}
    assert cuda.decode_block_unsupported(residual, **layer, **arrays) == reason
