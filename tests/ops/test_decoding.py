"""The decode block: caches that are slices, scan, vmap and predicates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm import ops, testing
from jaxllm.core import ffi
from jaxllm.ops.block import cuda

BACKENDS = ["xla", pytest.param("cuda", marks=pytest.mark.gpu)]
L, B, D, N, K, H, F, S = 3, 2, 128, 4, 2, 64, 64, 24


def inputs(dtype="bfloat16"):
    """The residual of a token, and parameters and caches stacked over layers."""
    shapes = {
        "norm1": (L, D),
        "norm2": (L, D),
        "qkv": (L, (N + 2 * K) * H, D),
        "out": (L, D, N * H),
        "gate_up": (L, 2 * F, D),
        "down": (L, D, F),
    }
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


def block(residual, layer, angles, k_cache, v_cache, lengths, backend):
    cos, sin = angles
    arrays = {"cos": cos, "sin": sin, "k_cache": k_cache, "v_cache": v_cache, "lengths": lengths}
    return ops.decode_block(residual, **layer, **arrays, backend=backend)


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
def test_vmap_matches_separate_calls(backend):
    residual, layers, angles, caches, lengths = inputs()
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


@pytest.mark.parametrize("fits", [False, True])
def test_is_rejected_where_decode_attention_is(fits, monkeypatch):
    reason = None if fits else "it is too large"
    monkeypatch.setattr(ffi, "shared_memory_reason", {"decode_attention": reason}.get)
    residual, layers, (cos, sin), caches, lengths = inputs()
    layer, k_cache, v_cache = (of_layer(x, 0) for x in (layers, *caches))
    arrays = {"cos": cos, "sin": sin, "k_cache": k_cache, "v_cache": v_cache, "lengths": lengths}
    assert cuda.decode_block_unsupported(residual, **layer, **arrays) == reason
