"""A norm and the layer after it with float8 operands: formulas, bounds, transforms, blocks."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import attention_block_arrays, distance, ffn_block_arrays, rounded

import jaxllm
from jaxllm import testing
from jaxllm.ops import (
    attention_block,
    ffn_block,
    final_norm,
    layer_norm,
    residual,
    rms_norm,
)
from jaxllm.ops.gemm.float8_norm import NormArrays, float8_norm_linear

E5M2 = jnp.float8_e5m2
WIDTH, EPS = 64, 1e-5
NORMS = ("layer", "rms")
each_norm = pytest.mark.parametrize("norm", NORMS)
each_backend = pytest.mark.parametrize(
    "backend", ["xla", pytest.param("auto", marks=pytest.mark.hopper)]
)
NAMES = ("x", "residual", "x_bias", "scale", "norm_bias", "weight", "bias")


def arrays(norm, dtype="float32", rows=(2, 16), columns=(3, 40), adds=True):
    """The arrays of the rule by name, and the gradients of its outputs."""
    generator = np.random.default_rng(0)

    def draw(*shape, scale=1.0, mean=0.0):
        x = mean + scale * generator.standard_normal(shape, np.float32)
        return jnp.asarray(x).astype(dtype)

    given = {
        "x": draw(*rows, WIDTH, scale=0.3),
        "residual": draw(*rows, WIDTH) if adds else None,
        "x_bias": draw(WIDTH) if adds and norm == "layer" else None,
        "scale": draw(WIDTH, scale=0.2, mean=1.0),
        "norm_bias": draw(WIDTH, scale=0.1) if norm == "layer" else None,
        "weight": draw(WIDTH, *columns, scale=0.1),
        "bias": draw(*columns),
    }
    return given, (draw(*rows, *columns), draw(*rows, WIDTH))


def layer(backend="auto"):
    """The rule as a function of its arrays by name."""

    def fn(given):
        norm = NormArrays(*(given[name] for name in NAMES[:5]))
        return float8_norm_linear(norm, *(given[name] for name in NAMES[5:]), **static)

    static = {"eps": EPS, "backend": backend}
    return fn


def with_gradients(fn, given, cotangents):
    (out, h), pull = jax.vjp(fn, given)
    return {"out": out, "h": h, **pull(cotangents)[0]}


def norm_of(x, residual, x_bias, scale, norm_bias):
    """The norm of the sum in float32, and the sum as it is rounded."""
    if residual is None:
        h = x
    else:
        wide = [each.astype(jnp.float32) for each in (x, x_bias, residual) if each is not None]
        h = sum(wide[1:], wide[0]).astype(x.dtype)
    wide, scale = h.astype(jnp.float32), scale.astype(jnp.float32)
    if norm_bias is None:
        return rms_norm(wide, scale, eps=EPS, backend="xla"), h
    bias = norm_bias.astype(jnp.float32)
    return layer_norm(wide, scale, bias, eps=EPS, backend="xla"), h


def by_formulas(given, cotangents):
    """What the modules' docstrings say, in float32 but for what is rounded."""
    weight, bias, dtype = given["weight"], given["bias"], given["x"].dtype
    of_norm = {name: given[name] for name in NAMES[:5]}
    dout, dh = cotangents
    normalized, h = norm_of(**of_norm)
    largest = [abs(given[name]).max() for name in ("scale", "norm_bias") if given[name] is not None]
    bound = math.sqrt(WIDTH) * largest[0].astype(jnp.float32) + sum(largest[1:])
    x8 = rounded(normalized, bound=bound).reshape(-1, WIDTH)
    w8, dout8 = rounded(weight).reshape(WIDTH, -1), rounded(dout, E5M2).reshape(len(x8), -1)
    out = (x8 @ w8 + bias.astype(jnp.float32).ravel()).astype(dtype)
    dx = (dout8 @ w8.T).astype(dtype).reshape(h.shape)

    def norm(h, scale, norm_bias):
        given = {"residual": None, "x_bias": None, "scale": scale, "norm_bias": norm_bias}
        return norm_of(h, **given)[0]

    _, pull = jax.vjp(norm, h.astype(jnp.float32), given["scale"], given["norm_bias"])
    dsum, dscale, dnorm_bias = pull(dx.astype(jnp.float32))
    dsum = dsum + dh.astype(jnp.float32)
    dh_sum, adds = dsum.astype(dtype), given["residual"] is not None
    return {
        "out": out.reshape(*h.shape[:-1], *bias.shape),
        "h": h,
        "x": dh_sum,
        "residual": dh_sum if adds else None,
        "x_bias": None if given["x_bias"] is None else dsum.sum((0, 1)).astype(dtype),
        "scale": dscale,
        "norm_bias": dnorm_bias,
        "weight": (x8.T @ dout8).astype(dtype).reshape(weight.shape),
        "bias": dout.astype(jnp.float32).sum((0, 1)).astype(dtype),
    }


@each_backend
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("adds", [True, False])
@each_norm
@pytest.mark.covering(("norm", "adds", "backend"), ("norm", "dtype", "backend"))
def test_results_are_those_of_the_formulas(norm, adds, dtype, backend):
    given, cotangents = arrays(norm, dtype, adds=adds)
    found = with_gradients(layer(backend), given, cotangents)
    for name, expected in by_formulas(given, cotangents).items():
        result = found[name]
        if expected is None:
            assert result is None, name
            continue
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype), name
        # An element that differs in its last bit may be rounded to another float8 number.
        assert distance(result, expected) < 0.01, name


@each_norm
def test_no_element_exceeds_the_bound(norm):
    x = jnp.zeros((4, WIDTH)).at[0, 3].set(1e3).at[1, :2].set(5.0).at[2].set(-1.0)
    scale = jnp.linspace(0.1, 3.0, WIDTH)
    bias = jnp.linspace(-2.0, 0.5, WIDTH) if norm == "layer" else None
    given = {"residual": None, "x_bias": None, "scale": scale, "norm_bias": bias}
    largest = abs(norm_of(x, **given)[0]).max()
    bound = math.sqrt(WIDTH) * 3.0 + (0.0 if bias is None else 2.0)
    assert bound / 40 < largest <= bound


@each_norm
def test_zeros_give_the_bias_alone_and_an_empty_batch_no_rows(norm):
    given, _ = arrays(norm)
    zero = {**given, "x": 0 * given["x"], "residual": None, "x_bias": None}
    zero["norm_bias"] = None if norm == "rms" else 0 * given["norm_bias"]
    out, h = layer()(zero)
    np.testing.assert_array_equal(out, jnp.broadcast_to(given["bias"], out.shape))
    assert not h.any()
    of_none = {**given, "x": given["x"][:0], "residual": given["residual"][:0]}
    out, h = layer()(of_none)
    assert out.shape == (0, 16, 3, 40)
    assert h.shape == (0, 16, WIDTH)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@each_norm
def test_nonfinite_elements_stay_visible_in_their_rows_alone(norm, special):
    given, cotangents = arrays(norm)
    lost = ~np.isfinite(layer()({**given, "x": given["x"].at[1, 2, 3].set(special)})[0])
    assert lost[1, 2].all()
    assert lost.sum() == 3 * 40
    dout = cotangents[0].at[1, 2, 0, 3].set(special)
    found = with_gradients(layer(), given, (dout, cotangents[1]))
    lost = ~np.isfinite(found["x"])
    assert lost[1, 2].all()
    assert lost.sum() == WIDTH
    assert not np.isfinite(found["weight"][:, 0, 3]).any()
    assert np.isfinite(found["weight"]).sum() == WIDTH * (3 * 40 - 1)


@each_backend
@each_norm
def test_results_repeat_bit_for_bit(norm, backend):
    given, cotangents = arrays(norm, "bfloat16")
    run = jax.jit(functools.partial(with_gradients, layer(backend)))
    for a, b in zip(*(jax.tree.leaves(run(given, cotangents)) for _ in range(2)), strict=True):
        np.testing.assert_array_equal(a, b)


@each_norm
def test_transforms_give_the_values_of_plain_calls(norm):
    given, _ = arrays(norm)

    def loss(given):
        out, h = layer()(given)
        return (out * jnp.cos(jnp.arange(40.0))).sum() + jnp.sin(h).sum()

    plain = jax.value_and_grad(loss)
    wanted = jax.tree.leaves(plain(given))
    for fn in (jax.jit(plain), jax.jit(jax.value_and_grad(jax.checkpoint(loss)))):
        for a, b in zip(jax.tree.leaves(fn(given)), wanted, strict=True):
            assert distance(a, b) < 0.01
    is_mapped = {name: 0 if name in ("x", "residual") else None for name in given}
    axes = {name: axis if given[name] is not None else None for name, axis in is_mapped.items()}
    found = jax.tree.leaves(jax.vmap(plain, (axes,))(given))
    each = [
        jax.tree.leaves(plain({**given, "x": given["x"][i], "residual": given["residual"][i]}))
        for i in range(2)
    ]
    for a, *b in zip(found, *each, strict=True):
        assert distance(a, np.stack(b)) < 0.01


def test_without_a_use_of_the_residual_its_gradient_is_that_of_the_norm():
    given, (dout, dh) = arrays("rms")
    alone = jax.grad(lambda x: (layer()({**given, "x": x})[0] * dout).sum())(given["x"])
    both = with_gradients(layer(), given, (dout, 0 * dh))["x"]
    np.testing.assert_array_equal(alone, both)


@each_norm
def test_forward_mode_differentiates_without_rounding(norm):
    given, _ = arrays(norm)
    x = given["x"]

    def unrounded(x):
        named = {**given, "x": x}
        normalized, h = norm_of(*(named[name] for name in NAMES[:5]))
        return jnp.tensordot(normalized, given["weight"], 1) + given["bias"], h

    found = jax.jvp(lambda x: layer("xla")({**given, "x": x}), (x,), (x,))[1]
    for a, b in zip(found, jax.jvp(unrounded, (x,), (x,))[1], strict=True):
        testing.assert_close(a, b, "float32")


@each_norm
def test_the_residual_and_a_float8_operand_alone_are_saved(norm):
    given, _ = arrays(norm, rows=(4, 64))
    kept = jax.tree.leaves(jax.vjp(layer(), given)[1])
    large = [(leaf.shape, leaf.dtype.name) for leaf in kept if leaf.size > 1000]
    assert sorted(large) == sorted(
        [
            ((4, 64, WIDTH), "float32"),
            ((WIDTH, 4, 64), "float8_e4m3fn"),
            (given["weight"].shape, "float32"),
        ]
    )


def stems(fn, *arrays):
    return {call.stem for call in jaxllm.explain(fn, *arrays).calls}


def test_blocks_run_it_with_tensor_and_norm_and_layer_one_by_one_otherwise():
    x, norm, weights = attention_block_arrays(4, 2)

    def attention(precision):
        options = {"heads": 4, "kv_heads": 2, "precision": precision}
        return stems(lambda x: attention_block(residual(x), norm, weights, **options).x, x)

    x_of_ffn, norm_of_ffn, layers = ffn_block_arrays()

    def ffn(precision):
        return stems(
            lambda x: ffn_block(residual(x), norm_of_ffn, layers, precision=precision).x, x_of_ffn
        )

    for block, first in ((attention, "qkv"), (ffn, "up")):
        found = block("tensor")
        assert "float8_norm_forward" in found
        assert "layer_norm_forward" not in found
        for precision in ("row", {first: "row"}):
            found = block(precision)
            assert "float8_norm_forward" not in found
            assert "layer_norm_forward" in found
    assert "float8_norm_forward" in attention({"qkv": "tensor"})
    assert "float8_norm_forward" not in attention({"out": "tensor"})


@pytest.mark.parametrize("precision", [None, "row", "tensor"])
@each_norm
def test_a_bias_left_to_the_next_norm_is_added_whatever_follows(norm, precision):
    generator = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(generator.standard_normal(shape, np.float32))

    x, scale = draw(2, 16, 32), 1 + 0.1 * draw(32)
    of_norm = {"scale": scale, **({"bias": draw(32)} if norm == "layer" else {})}
    layers = {
        "gate_up": {"weight": draw(32, 2, 48)},
        "down": {"weight": draw(48, 32), "bias": 5 * draw(32)},
    }
    of_attention = {"qkv": {"weight": draw(32, 96)}, "out": {"weight": draw(32, 32)}}
    h = ffn_block(residual(x, norm), of_norm, layers, activation="swiglu", precision=precision)
    assert h.branch is not None
    plain: Any = layer_norm if norm == "layer" else rms_norm
    wanted = plain(h.x, **of_norm)
    testing.assert_close(final_norm(h, of_norm), wanted, "float32")
    options: Any = {"heads": 2, "precision": precision}
    found = attention_block(h, of_norm, of_attention, **options)
    wanted = attention_block(residual(h.x, norm), of_norm, of_attention, **options)
    assert distance(found.x, wanted.x) < 0.01


def test_wrong_norms_are_rejected():
    x, norm, weights = attention_block_arrays(4, 2)
    options = {"heads": 4, "kv_heads": 2, "precision": "tensor"}
    with pytest.raises(ValueError, match="scale has shape"):
        attention_block(residual(x), {**norm, "scale": norm["scale"][:-1]}, weights, **options)
    with pytest.raises(TypeError, match="bias"):
        attention_block(residual(x, "rms"), norm, weights, **options)
