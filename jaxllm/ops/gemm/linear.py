"""The derivative rule of a linear layer, whose weight is a matrix or in parts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.activation.api import BIAS_ADD, BIAS_GELU, GELU
from jaxllm.ops.gemm.fused import matmul_bias_gelu
from jaxllm.ops.gemm.gradients import dgrad_and_wgrad


@dataclasses.dataclass(frozen=True)
class LinearOptions:
    """The static options of a linear layer."""

    activation: str | None
    weight_ndim: int  # above 2 where the columns are in parts

    @property
    def columns(self) -> str:
        """As :func:`column_names`."""
        return column_names(self.weight_ndim)


def column_names(weight_ndim: int) -> str:
    """The names of the dimensions of a weight's columns; they are sharded along F."""
    return {2: "F", 3: "_ F", 4: "_ F _"}[weight_ndim]


def in_rows(weight: Array, bias: Array | None) -> tuple[Array, Array | None]:
    """A layer whose columns may be in parts as a matrix and a vector."""
    return lax.collapse(weight, 1), None if bias is None else bias.ravel()


def _forward(options, backend, x, weight, bias):
    columns, arrays = weight.shape[1:], (x, weight, bias)
    weight, bias = in_rows(weight, bias)
    if options.activation is None:
        h = jnp.dot(x, weight)
        # XLA adds a bias in the GEMM's epilogue where it is an argument of the program.
        out, saved = (h if bias is None else h + bias), None
    elif bias is None:
        saved = jnp.dot(x, weight)
        out = dispatch(GELU, Direction.FORWARD, backend, saved)
    else:
        more = {"saves_derivative": False, "out_columns": 0}
        out, saved = matmul_bias_gelu(backend, x, weight, bias, **more)
    shape = (*x.shape[:-1], *columns)
    outputs = jax.tree.map(lambda y: y.reshape(shape), (out, saved))
    out, saved = checkpoint_name(outputs, "linear")
    return out, (*arrays, saved)


def _backward(options, backend, residuals, dout):
    x, weight, bias, h = residuals
    columns, rows = weight.shape[1:], x.ndim - 1
    weight, bias = in_rows(weight, bias)
    h, dout = None if h is None else lax.collapse(h, rows), lax.collapse(dout, rows)
    dh, dbias = activation_backward(backend, options.activation, h, bias, dout)
    dx, dweight = dgrad_and_wgrad(x, weight, dh)
    dbias = None if dbias is None else dbias.reshape(columns)
    return dx, dweight.reshape(x.shape[-1], *columns), dbias


def activation_backward(backend, activation, h, bias, dout):
    """Returns the gradients of ``h`` and ``bias`` in ``out = f(h + bias)``."""
    if activation is None:
        if bias is None:
            return dout, None
        return dout, dispatch(BIAS_ADD, Direction.BACKWARD, backend, dout)
    if bias is None:
        return dispatch(GELU, Direction.BACKWARD, backend, h, dout), None
    return dispatch(BIAS_GELU, Direction.BACKWARD, backend, h, bias.astype(h.dtype), dout)


def _sharding(options: LinearOptions) -> ShardingRule:
    columns, bias = options.columns, options.columns.replace("F", "F'")
    if options.activation is not None:  # it is of a whole sum
        return ShardingRule(
            f"... D', D {columns}, {bias} -> ... {columns}; ?... {columns}", "... F"
        )
    return ShardingRule(f"... D', D {columns}, !{bias} -> ... {columns} +D", "... D F")


linear = with_backward("linear", _forward, _backward, sharding=_sharding)
