"""Blocks with float8 GEMMs: the values of linear layers with that precision, layer by layer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from op_helpers import attention_block_arrays, ffn_block_arrays, random_arrays, with_gradients

import jaxllm
from jaxllm.ops import (
    Quantized,
    attention_block,
    ffn_block,
    flash_attention_packed,
    layer_norm,
    linear,
    quantize,
    residual,
    rms_norm,
    rope_table,
    swiglu_packed,
)

FLOAT8 = ["row", "tensor"]


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("precision", "of_up", "of_down"),
    [
        ("row", "row", "row"),
        ({"up": "tensor"}, "tensor", None),
        ({"up": "row"}, "row", None),
        ({"up": None, "down": "tensor"}, None, "tensor"),
        ({}, None, None),
    ],
)
def test_ffn_block_is_made_of_linear_layers_of_its_precision(precision, of_up, of_down):
    arrays = ffn_block_arrays()

    def block(x, norm, weights):
        return ffn_block(residual(x), norm, weights, precision=precision).x

    def by_layer(x, norm, weights):
        hidden = layer_norm(x, **norm)
        hidden = linear(hidden, **weights["up"], activation="gelu", precision=of_up)
        down = weights["down"]
        return x + linear(hidden, down["weight"], precision=of_down) + down["bias"]

    found, expected = (with_gradients(fn, arrays) for fn in (block, by_layer))
    # The order of the last sums differs, and that alone.
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6, atol=1e-6)
    assert_equal(found[1], expected[1])


@pytest.mark.parametrize("precision", ["row", {"gate_up": "tensor"}, {"down": "tensor"}])
def test_swiglu_block_with_columns_in_parts_is_made_of_its_layers(precision):
    by_name: Any = dict.fromkeys(("gate_up", "down"), "row") if precision == "row" else precision
    x, scale, gate_up, down = random_arrays((2, 3, 32), (32,), (32, 128), (64, 32))
    arrays = (x, scale, gate_up.reshape(32, 2, 64), down)

    def block(x, scale, gate_up, down):
        layers = {"gate_up": {"weight": gate_up}, "down": {"weight": down}}
        options = {"activation": "swiglu", "precision": precision}
        return ffn_block(residual(x, "rms"), {"scale": scale}, layers, **options).x

    def by_layer(x, scale, gate_up, down):
        hidden = linear(rms_norm(x, scale), gate_up, precision=by_name.get("gate_up"))
        hidden = swiglu_packed(hidden, by_parts=True)
        return x + linear(hidden, down, precision=by_name.get("down"))

    found, expected = (with_gradients(fn, arrays) for fn in (block, by_layer))
    if jax.default_backend() == "cpu":
        assert_equal(found, expected)
    # XLA on a GPU adds the residual in another fusion of each.
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), found, expected
    )


@pytest.mark.parametrize(
    ("precision", "of_qkv", "of_out"),
    [("row", "row", "row"), ({"out": "tensor"}, None, "tensor"), ({"qkv": "row"}, "row", None)],
)
@pytest.mark.parametrize("rotates", [False, True])
def test_attention_block_is_made_of_linear_layers_of_its_precision(
    precision, of_qkv, of_out, rotates
):
    x, norm, weights = attention_block_arrays(4, 2)
    width = weights["out"]["weight"].shape[0] // 4
    table = rope_table(jnp.arange(x.shape[1]), width, theta=1e4) if rotates else None
    options = {"causal": True, "rope_table": table}

    def block(x, norm, weights):
        static = {"heads": 4, "kv_heads": 2, "precision": precision, **options}
        return attention_block(residual(x), norm, weights, **static).x

    def by_layer(x, norm, weights):
        qkv = linear(layer_norm(x, **norm), **weights["qkv"], precision=of_qkv)
        out = flash_attention_packed(qkv, 4, 2, **options)
        layer = weights["out"]
        return x + linear(out, layer["weight"], precision=of_out) + layer["bias"]

    found, expected = (with_gradients(fn, (x, norm, weights)) for fn in (block, by_layer))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6, atol=1e-6)
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        # Without float8, attention's backward sums the gradient of the bias.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def of_ffn(x, precision=None, **layers):
    names = {"up": jnp.ones((32, 128), x.dtype), "down": jnp.ones((128, 32), x.dtype), **layers}
    weights = {name: {"weight": weight} for name, weight in names.items()}
    return ffn_block(residual(x), {"scale": jnp.ones(32, x.dtype)}, weights, precision=precision).x


def of_attention(x, precision=None):
    weights = {"qkv": {"weight": jnp.ones((32, 96))}, "out": {"weight": jnp.ones((32, 32))}}
    return attention_block(
        residual(x), {"scale": jnp.ones(32)}, weights, heads=2, precision=precision
    ).x


@pytest.mark.parametrize("block", [of_ffn, of_attention])
def test_unknown_precisions_and_layers_are_rejected(block):
    fn = functools.partial(block, jnp.ones((2, 3, 32)))
    with pytest.raises(ValueError, match="precision is 'fp8'; it must be 'row', 'tensor', None or"):
        fn("fp8")
    with pytest.raises(TypeError, match="precision is of type bool; it must be 'row', 'tensor'"):
        fn(True)
    with pytest.raises(ValueError, match="precision names 'gate'; the layers are"):
        fn({"gate": "row"})
    with pytest.raises(ValueError, match=r"precision\['(up|out)'\] is 'fp8'; it must be 'row'"):
        fn({"up" if block is of_ffn else "out": "fp8"})


def test_quantized_weight_is_rejected():
    quantized = Quantized(*quantize(jnp.ones((32, 128)), group_size=16))
    x = jnp.ones((2, 3, 32))
    with pytest.raises(ValueError, match="precision is 'row'; it must be None with a Quantized"):
        of_ffn(x, {"down": "row"}, down=quantized)
    assert of_ffn(x, {"up": "row"}, down=quantized).shape == x.shape


@pytest.mark.parametrize("precision", FLOAT8)
def test_explain_tells_why_a_block_is_not_fused(on_hopper, precision):
    x = jax.ShapeDtypeStruct((64, 256, 32), "bfloat16")

    def total(x):
        return of_ffn(x, precision).astype(jnp.float32).sum()

    calls = jaxllm.explain(jax.value_and_grad(total), x).calls
    (block,) = (call for call in calls if call.stem == "ffn_block")
    ((_, reason),) = block.rejected
    assert reason == (
        "a layer's GEMMs have float8 operands; those of the fused block have the dtype of h"
    )
    products = [call for call in calls if call.stem.startswith("float8_matmul")]
    assert len(products) == (4 if precision == "row" else 6)
    assert {call.on_gpu for call in products} == {"cuda"}
