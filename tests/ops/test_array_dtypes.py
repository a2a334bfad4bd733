"""Array arguments of every op: what is no array of a dtype that the op takes is rejected."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_contract import FIRST_CASES

from jaxllm import nn, ops, testing

# These copy, compare or widen float8 numbers.
TAKE_FLOAT8 = {"relu", "reduce_max", "repeat_kv"}
WIDENED = {"scales", "k_scales", "v_scales"}


def call_with(case, place, array):
    """Traces an op whose leaf in one place is another array, or none."""
    leaves, tree = jax.tree.flatten(testing.input_types(case, "float32"))

    def call(*leaves):
        given = tree.unflatten([*leaves[:place], array, *leaves[place + 1 :]])
        return (case.call or getattr(ops, case.op))(*given, **case.static, backend="xla")

    return jax.eval_shape(call, *leaves)


def floating_leaves(case):
    """The argument, the place and the shape of each floating leaf of the inputs."""
    paths, _ = jax.tree_util.tree_flatten_with_path(testing.input_types(case, "float32"))
    names = list(case.inputs)
    for place, (path, leaf) in enumerate(paths):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            yield names[path[0].idx], place, leaf.shape


# The case of float8_matmul casts its arrays; tests/ops/test_float8_matmul.py has its errors.
@pytest.mark.parametrize("case", [c for c in FIRST_CASES if c.op != "float8_matmul"], ids=str)
def test_what_is_no_array_of_16_bit_or_wider_floats_is_rejected(case):
    for name, place, shape in floating_leaves(case):
        wrong = [jnp.zeros(shape, "bool"), jnp.zeros(shape, "complex64"), np.full(shape, "a")]
        if case.op not in TAKE_FLOAT8 and name not in WIDENED:
            wrong += [jnp.zeros(shape, "float8_e4m3fn"), jnp.zeros(shape, "float8_e5m2")]
        if case.op == "float8_matmul":  # its case casts the arrays
            wrong = [np.full(shape, "a")]
        for array in wrong:
            with pytest.raises(TypeError, match="; it must be"):
                call_with(case, place, array)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("token_table", lambda x: ops.embed(jnp.zeros(2, int), x)),
        ("x", lambda x: ops.residual(x)),
        ("y", lambda x: ops.residual(jnp.ones(x.shape)).add(x)),
        (
            "k",
            lambda x: ops.rope(jnp.ones((1, 3, 1, 4)), x[None, :, None], *[jnp.ones((3, 2))] * 2),
        ),
        ("query", lambda x: nn.dot_product_attention(*[x[:, None]] * 3)),
        ("bias", lambda x: nn.dot_product_attention(*[jnp.ones((3, 1, 4))] * 3, bias=x[:, :3])),
        ("x", lambda x: nn.layer_norm(x)),
        ("gate", lambda x: nn.swiglu(x)),
    ],
)
def test_float8_arguments_are_rejected_by_name(name, call, dtype):
    message = f"^{name} has dtype {dtype}; it must be a floating-point array of 16 bits or more"
    with pytest.raises(TypeError, match=message):
        call(jnp.ones((3, 4), dtype))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (ops.relu, [0, 1, 1, 1]),
        (ops.reduce_max, [0, 0, 0.5, 0.5]),
        (lambda x: ops.repeat_kv(x[:, None], 3), [3, 3, 3, 3]),
    ],
)
def test_float8_arrays_have_gradients_where_an_op_takes_them(call, expected, dtype):
    x = jnp.array([-1, 0.5, 2, 2], dtype)
    dx = jax.grad(lambda x: call(x).astype(jnp.float32).sum())(x)
    assert dx.dtype == dtype
    np.testing.assert_array_equal(dx.astype(jnp.float32), expected)


def test_an_mlp_needs_a_bias_of_its_hidden_layer():
    x, up, down = jnp.ones((3, 4)), jnp.ones((4, 8)), jnp.ones((8, 4))
    missing: Any = None
    with pytest.raises(TypeError, match="up_bias has type NoneType; it must be a floating-point"):
        ops.mlp(x, up, missing, down)
