"""Projections whose columns are in parts against the same in the usual order."""

import functools

import jax
import jax.numpy as jnp
import pytest
from op_helpers import BACKENDS

from jaxllm import ops, testing
from jaxllm.models.common import merge_heads
from jaxllm.testing import Normal

B, T, D, F = 2, 24, 32, 48
HEADS = [(4, 4), (6, 2), (3, 1)]
H = 16


def drawn(shapes, seed=0):
    case = testing.Case("", "", {name: Normal(shape) for name, shape in shapes.items()})
    return dict(zip(shapes, testing.make_inputs(case, "float32", seed), strict=True))


def value_and_gradients(fn, arrays):
    out, pullback = jax.vjp(fn, arrays)
    dout = drawn({"dout": out.shape}, seed=1)["dout"]
    return out, *pullback(dout)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", [(2, F), (3, 4, H)])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.covering(
    ("columns", "activation", "bias"), ("columns", "backend"), ("activation", "bias", "backend")
)
def test_linear_has_the_dimensions_of_its_columns(columns, activation, bias, backend):
    arrays = drawn({"x": (B, T, D), "weight": (D, *columns), "bias": columns})
    linear = functools.partial(ops.linear, activation=activation, backend=backend)

    def usual(arrays):
        weight = arrays["weight"].reshape(D, -1)
        out = linear(arrays["x"], weight, arrays["bias"].ravel() if bias else None)
        return out.reshape(B, T, *columns)

    def by_parts(arrays):
        return linear(arrays["x"], arrays["weight"], arrays["bias"] if bias else None)

    found, wanted = (value_and_gradients(fn, arrays) for fn in (by_parts, usual))
    testing.assert_close(found, wanted, "float32")


@pytest.mark.parametrize("backend", BACKENDS)
def test_swiglu_of_parts(backend):
    arrays = drawn({"x": (B, T, 2, F)})
    swiglu = functools.partial(ops.swiglu_packed, backend=backend)
    found = value_and_gradients(lambda of: swiglu(of["x"], by_parts=True), arrays)
    wanted = value_and_gradients(lambda of: swiglu(of["x"].reshape(B, T, 2 * F)), arrays)
    testing.assert_close(found, wanted, "float32")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.covering(("heads", "backend"), ("rotates", "backend"), ("heads", "rotates"))
def test_attention_of_parts(heads, kv_heads, rotates, backend):
    arrays = drawn({"qkv": (B, T, heads // kv_heads + 2, kv_heads, H)})
    table = ops.rope_table(jnp.arange(T), H, theta=1e4) if rotates else None
    attend = functools.partial(
        ops.flash_attention_packed, heads=heads, kv_heads=kv_heads, causal=True,
        rope_table=table, backend=backend,
    )  # fmt: skip
    found = value_and_gradients(lambda of: attend(of["qkv"]), arrays)
    wanted = value_and_gradients(lambda of: attend(merge_heads(of["qkv"])), arrays)
    testing.assert_close(found, wanted, "float32")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.covering(("heads", "backend"), ("kind", "rotates", "backend"), ("heads", "kind"))
def test_an_attention_block_of_parts(heads, kv_heads, kind, rotates, backend):
    columns = (heads // kv_heads + 2, kv_heads, H)
    shapes = {"x": (B, T, D), "scale": (D,), "qkv": (D, *columns), "bias": columns}
    arrays = drawn(shapes | {"out": (heads * H, D)})
    table = ops.rope_table(jnp.arange(T), H, theta=1e4) if rotates else None

    def block(arrays, order):
        norm = {"scale": arrays["scale"]}
        norm |= {"bias": jnp.zeros(D)} if kind == "layer" else {}
        qkv = {"weight": order(arrays["qkv"]), "bias": order(arrays["bias"])}
        weights = {"qkv": qkv, "out": {"weight": arrays["out"]}}
        heads_of = {"heads": heads, "kv_heads": kv_heads}
        h = ops.residual(arrays["x"], kind)
        return ops.attention_block(
            h, norm, weights, **heads_of, causal=True, rope_table=table, backend=backend
        ).x

    found = value_and_gradients(lambda of: block(of, lambda x: x), arrays)
    wanted = value_and_gradients(lambda of: block(of, merge_heads), arrays)
    testing.assert_close(found, wanted, "float32")


@pytest.mark.parametrize("columns", [(4, 2, H), (3, 3, H), (4, 3, 0), (96, 1)])
def test_parts_that_do_not_fit_the_heads(columns):
    with pytest.raises(ValueError, match=r"qkv has shape .* it must be"):
        ops.flash_attention_packed(jnp.zeros((B, T, *columns)), 6, 3)


def test_swiglu_of_parts_needs_two():
    with pytest.raises(ValueError, match=r"x has shape \(4, 3, 8\).*\(\.\.\., 2, F\)"):
        ops.swiglu_packed(jnp.zeros((4, 3, 8)), by_parts=True)
