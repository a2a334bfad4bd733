"""The parameters of the blocks, and what ``attend`` returns: what no block reads is rejected."""

from typing import Any

import jax.numpy as jnp
import pytest

from jaxllm.ops import attention_block, ffn_block, final_norm, residual

ROWS = jnp.ones((1, 3, 8))
NORM: dict[str, Any] = {"scale": jnp.ones(8)}
QKV, OUT = {"weight": jnp.ones((8, 24))}, {"weight": jnp.ones((8, 8))}
BIAS = {"bias": jnp.ones(8)}


def attention(norm=NORM, first=(), last=(), kind: Any = "rms", more=(), **options: Any):
    weights = {"qkv": QKV | dict(first), "out": OUT | dict(last), **dict(more)}
    options = {"heads": 2} | options
    return attention_block(residual(ROWS, kind), norm, weights, **options)


def ffn(norm=NORM, first=(), last=(), kind: Any = "rms", **options: Any):
    weights = {"up": OUT | dict(first), "down": OUT | dict(last)}
    return ffn_block(residual(ROWS, kind), norm, weights, **options)


@pytest.mark.parametrize("precision", [None, "tensor"])
@pytest.mark.parametrize(("block", "layers"), [(attention, ("qkv", "out")), (ffn, ("up", "down"))])
def test_what_no_layer_or_norm_has_is_rejected(block, layers, precision):
    for name, extra in zip(("first", "last"), ({"activation": "gelu"}, {"b": 1}), strict=True):
        layer = layers[name == "last"]
        message = rf"weights\['{layer}'\] has {next(iter(extra))}; it may have weight and bias"
        with pytest.raises(ValueError, match=message):
            block(precision=precision, **{name: extra})
    with pytest.raises(TypeError, match="norm has a bias; the RMS norm of this residual has none"):
        block(norm=NORM | BIAS, precision=precision)
    with pytest.raises(ValueError, match="norm has offset; it may have scale and bias alone"):
        block(norm=NORM | {"offset": 1}, kind="layer", precision=precision)


def test_norms_of_heads_and_the_final_norm_have_no_bias_that_is_not_read():
    scale = {"scale": jnp.ones(4)}
    with pytest.raises(ValueError, match=r"weights\['q_norm'\] has bias; it may have scale alone"):
        attention(more={"q_norm": scale | BIAS, "k_norm": scale})
    with pytest.raises(TypeError, match="norm has a bias; the RMS norm of this residual has none"):
        final_norm(residual(ROWS, "rms"), NORM | BIAS)


def test_heads_that_do_not_divide_the_projection_are_rejected_before_attend_and_norms():
    scale = {"scale": jnp.ones(4)}
    message = r"qkv has shape \(1, 3, 24\); .* of 5 queries and 5 keys and values"
    for options in ({"attend": lambda q, k, v: q}, {"more": {"q_norm": scale, "k_norm": scale}}):
        with pytest.raises(ValueError, match=message):
            attention(heads=5, **options)
    wrong: Any = "2"
    with pytest.raises(TypeError, match="kv_heads is '2'; it must be an integer"):
        attention(kv_heads=wrong, attend=lambda q, k, v: q)


@pytest.mark.parametrize(
    ("attend", "error", "message"),
    [
        (lambda q, k, v: q[:, :, 0], ValueError, r"has shape \(1, 3, 4\); it must be \(1, 3, 2,"),
        (lambda q, k, v: None, TypeError, "has type NoneType; it must be a floating-point array"),
    ],
)
def test_what_attend_returns_has_the_shape_of_the_queries(attend, error, message):
    with pytest.raises(error, match=f"the result of attend {message}"):
        attention(attend=attend)


@pytest.mark.parametrize(
    ("name", "value"),
    [("scale", 0.5), ("window", 2), ("segment_ids", jnp.zeros((1, 3), int))],
)
def test_options_that_attend_would_not_use_are_rejected(name, value):
    with pytest.raises(ValueError, match=f"{name} is given beside attend; it must be None"):
        attention(attend=lambda q, k, v: q, **{name: value})


@pytest.mark.parametrize("options", [{}, {"attend": lambda q, k, v: q}])
def test_a_rotation_table_is_a_pair_with_attend_too(options):
    wrong: Any = (jnp.ones((3, 2)),) * 3
    with pytest.raises(ValueError, match="rope_table is a tuple of 3; it must be a tuple of the"):
        attention(rope_table=wrong, **options)


def test_attend_that_is_no_function_is_rejected():
    wrong: Any = "cache"
    with pytest.raises(TypeError, match="attend has type str; it must be a function"):
        attention(attend=wrong)
