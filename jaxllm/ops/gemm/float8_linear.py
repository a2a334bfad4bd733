r"""A linear layer whose GEMMs have float8 operands.

A recipe says along which indices the elements have one scale. With :math:`q_k` the rounding with
one current scale for all elements along :math:`k`, ``"row"`` is

.. math::
    h_{mn} = \sum_k q_k(x)_{mk} \, q_k(W)_{kn} \qquad out = f(h + b)

    dx_{mk} = \sum_n q_n(dh)_{mn} \, q_n(W)_{kn} \qquad dW = x^T dh \qquad db = \sum_m dh_{mn}

and ``"tensor"``, with one scale for each array,

.. math::
    h = q(x) \, q(W) \qquad dx = q(dh) \, q(W)^T \qquad dW = q(x)^T q(dh)

The scales are those of the operands themselves, so no state is kept between steps. ``h``, ``dx``
and ``dW`` are rounded once to the dtype of ``x``. With ``"row"`` ``dW`` is that of the linear layer
without float8, with unrounded operands: its depth is the rows, along which the scales differ.
``db`` has unrounded operands. Every gradient passes the rounding as through the identity.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxllm.core.backend import Backend
from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.activation.api import BIAS_GELU, GELU
from jaxllm.ops.gemm import float8_counts
from jaxllm.ops.gemm.float8_operands import (
    GRADIENT_DTYPES,
    OPERAND_DTYPE,
    Recipe,
    checked_weight,
    input_gradient,
    product,
    quantize,
    weight_gradient,
)
from jaxllm.ops.gemm.linear import LinearOptions, activation_backward, linear
from jaxllm.ops.weights import Weight


@dataclasses.dataclass(frozen=True)
class _Options(LinearOptions):
    recipe: Recipe


def float8_linear(
    x: Array,
    weight: Weight,
    bias: Array | None,
    *,
    activation: str | None,
    recipe: Recipe,
    backend: Backend,
) -> Array:
    """``linear(..., precision=recipe)``, with a resolved backend."""
    weight = checked_weight(x, weight, bias, recipe, backend)
    options = _Options(activation, weight.ndim, recipe)
    h = _product(x, weight, float8_counts.active_probe(), backend=backend, options=options)
    if activation is None and bias is None:
        return h
    return _epilogue(h, bias, backend=backend, options=options)


def _product_without_backward(options, backend, x, weight, _):
    of_x = ("...", "D"), x.ndim - 1, ("rows",)
    (x8,) = quantize(x, *of_x, OPERAND_DTYPE, options.recipe, backend)
    return product(x8, weight, options.recipe, backend, dtype=x.dtype)[0]


def _product_forward(options, backend, x, weight, probe):
    counts = None if probe is None else _count_operands(x, weight, options.recipe)
    if options.recipe == "row":
        out = _product_without_backward(options, backend, x, weight, probe)
        return out, (x, weight, counts)
    # With one scale dW is a product of the same rounded elements.
    of_x = ("...", "D"), x.ndim - 1, ("rows", "transposed")
    x8, transposed = quantize(x, *of_x, OPERAND_DTYPE, options.recipe, backend)
    out, _ = product(x8, weight, options.recipe, backend, dtype=x.dtype)
    return out, (transposed, weight, counts)


def _count_operands(x, weight, recipe):
    axes_of_x, axes_of_weight = (x.ndim - 1,), (0,)
    if recipe == "tensor":
        axes_of_x, axes_of_weight = range(x.ndim), range(weight.ndim)
    return float8_counts.total(
        float8_counts.of_operand(x, tuple(axes_of_x), OPERAND_DTYPE),
        float8_counts.of_operand(weight, tuple(axes_of_weight), OPERAND_DTYPE),
    )


def _count_gradient(counts, dout, columns, recipe):
    axes = range(0 if recipe == "tensor" else dout.ndim - columns, dout.ndim)
    of_dout = float8_counts.of_gradient(dout, tuple(axes), GRADIENT_DTYPES[recipe])
    return float8_counts.total(counts, of_dout)


def _product_backward(options, backend, residuals, dout):
    x, weight, counts = residuals
    recipe, rows = options.recipe, dout.ndim - weight.ndim + 1
    of_dout, dtype = (("...", options.columns), rows), GRADIENT_DTYPES[recipe]
    if recipe == "tensor":
        layouts = "rows", "transposed"
        dout8, transposed = quantize(dout, *of_dout, layouts, dtype, recipe, backend)
        dweight = weight_gradient(x, transposed, weight.ndim, backend, dtype=dout.dtype)
    else:
        # The weight gradient's own rule shards it. XLA removes GEMMs whose results are not used.
        (dout8,) = quantize(dout, *of_dout, ("rows",), dtype, recipe, backend)
        plain = LinearOptions(None, weight.ndim)
        _, pull = jax.vjp(lambda w: linear(x, w, None, backend=backend, options=plain), weight)
        (dweight,) = pull(dout)
    dweight, dout8 = lax.optimization_barrier((dweight, dout8))  # as in gradients.wgrad
    if counts is not None:
        counts = _count_gradient(counts, dout, weight.ndim - 1, recipe)
    return input_gradient(dout8, weight, recipe, backend, dtype=dout.dtype)[0], dweight, counts


def _unrounded(_):
    """The product of the unrounded operands, which forward mode differentiates."""
    return lambda static, x, weight, _: jnp.tensordot(x, weight, 1)


_product = with_backward(
    "linear",
    _product_forward,
    _product_backward,
    sharding=None,
    primal=_product_without_backward,
    reference=_unrounded,
)


def _epilogue_forward(options, backend, h, bias):
    shape = h.shape
    rows = lax.collapse(h, h.ndim - options.weight_ndim + 1)
    offset = None if bias is None else bias.ravel()
    if offset is None:
        out = dispatch(GELU, Direction.FORWARD, backend, rows)
    elif options.activation is None:
        return (rows + offset).reshape(shape), (None, bias)
    else:
        out = dispatch(BIAS_GELU, Direction.FORWARD, backend, rows, offset)
    return checkpoint_name(out.reshape(shape), "linear"), (h, bias)


def _epilogue_backward(options, backend, residuals, dout):
    h, bias = residuals
    shape, first = dout.shape, dout.ndim - options.weight_ndim + 1
    h, dout = None if h is None else lax.collapse(h, first), lax.collapse(dout, first)
    offset = None if bias is None else bias.ravel()
    dh, dbias = activation_backward(backend, options.activation, h, offset, dout)
    return dh.reshape(shape), None if dbias is None else dbias.reshape(shape[first:])


def _epilogue_sharding(options: LinearOptions) -> ShardingRule:
    columns, bias = options.columns, options.columns.replace("F", "F'")
    return ShardingRule(f"... {columns}, {bias} -> ... {columns}; ?... {columns}", "... F")


_epilogue = with_backward(
    "linear", _epilogue_forward, _epilogue_backward, sharding=_epilogue_sharding
)
