r"""A linear layer whose GEMMs have float8 operands.

A recipe says along which indices the elements have one scale. With :math:`q_k` the rounding with
one current scale for all elements along :math:`k`, ``"row"`` is

.. math::
    h_{mn} = \sum_k q_k(x)_{mk} \, q_k(W)_{kn} + b_n \qquad out = f(h)

    dx_{mk} = \sum_n q_n(dh)_{mn} \, q_n(W)_{kn} \qquad dW = x^T dh \qquad db = \sum_m dh_{mn}

and ``"tensor"``, with one scale for each array,

.. math::
    h = q(x) \, q(W) + b \qquad dx = q(dh) \, q(W)^T \qquad dW = q(x)^T q(dh)

The scales are those of the operands themselves, so no state is kept between steps. ``h``, ``dx``
and ``dW`` are rounded once to the dtype of ``x``; before an activation so is ``h`` without the
bias. With ``"row"`` ``dW`` is that of the linear layer without float8, with unrounded operands: its
depth is the rows, along which the scales differ.
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
    Float8,
    Recipe,
    Rotation,
    bias_gradient,
    checked_weight,
    input_gradient,
    product,
    quantize,
    quantize_gradient,
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
    arrays = x, weight, bias if activation is None else None, float8_counts.active_probe()
    h = _product(*arrays, backend=backend, options=options)
    return h if activation is None else _activate(h, bias, backend=backend, options=options)


def _product_without_backward(options, backend, x, weight, bias, _):
    of_x = ("...", "D"), x.ndim - 1, ("rows",)
    (x8,) = quantize(x, *of_x, OPERAND_DTYPE, options.recipe, backend)
    return product(x8, weight, options.recipe, backend, dtype=x.dtype, bias=bias)[0]


def _product_forward(options, backend, x, weight, bias, probe):
    counts = None if probe is None else _count_operands(x, weight, options.recipe)
    if options.recipe == "row":
        out = _product_without_backward(options, backend, x, weight, bias, probe)
        return out, (x, weight, bias, counts)
    # With one scale dW is a product of the same rounded elements.
    of_x = ("...", "D"), x.ndim - 1, ("rows", "transposed")
    x8, transposed = quantize(x, *of_x, OPERAND_DTYPE, options.recipe, backend)
    out, _ = product(x8, weight, options.recipe, backend, dtype=x.dtype, bias=bias)
    return out, (transposed, weight, bias, counts)


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
    x, weight, bias, counts = residuals
    if options.recipe == "tensor":
        return tensor_gradients(backend, x, weight, bias, counts, dout)
    recipe, rows = options.recipe, dout.ndim - weight.ndim + 1
    of_dout = ("...", options.columns), rows, ("rows",), GRADIENT_DTYPES[recipe]
    (dout8,) = quantize(dout, *of_dout, recipe, backend)
    # The weight gradient's own rule shards it. XLA removes GEMMs whose results are not used.
    plain = LinearOptions(None, weight.ndim)
    # With the bias, so that the product is sharded as the layer's result is.
    _, pull = jax.vjp(lambda w: linear(x, w, bias, backend=backend, options=plain), weight)
    (dweight,) = pull(dout)
    dbias = None if bias is None else bias_gradient(dout, weight.ndim, backend)
    return _gradients(recipe, backend, weight, counts, dout, dout8, dweight, dbias)


def tensor_gradients(
    backend: Backend,
    x: Float8,
    weight: Array,
    bias: Array | None,
    counts: float8_counts.Float8Counts | None,
    dout: Array,
    rotation: Rotation | None = None,
) -> tuple:
    """The gradients of a layer's input, weight and bias with ``"tensor"``, and the counts.

    Args:
        backend: A resolved backend.
        x: The rounded input, transposed.
        weight: The weight.
        bias: The bias, or None.
        counts: Those of the forward pass, or None.
        dout: The gradient of the layer's result.
        rotation: How the result was rotated, as a projection; None for not at all.
    """
    if rotation is not None and counts is not None:  # of which elements are counted
        dout, rotation = rotation.back(backend, dout), None
    static = {"has_bias": bias is not None, "rotation": rotation}
    dout8, transposed, dbias = quantize_gradient(dout, weight.ndim, backend, **static)
    dweight = weight_gradient(x, transposed, weight.ndim, backend, dtype=dout.dtype)
    return _gradients("tensor", backend, weight, counts, dout, dout8, dweight, dbias)


def _gradients(recipe, backend, weight, counts, dout, dout8, dweight, dbias):
    dweight, dout8 = lax.optimization_barrier((dweight, dout8))  # as in gradients.wgrad
    if counts is not None:
        counts = _count_gradient(counts, dout, weight.ndim - 1, recipe)
    dx = input_gradient(dout8, weight, recipe, backend, dtype=dout.dtype)
    return dx, dweight, dbias, counts


def _unrounded(_):
    """The product of the unrounded operands, which forward mode differentiates."""

    def product(static, x, weight, bias, _):
        h = jnp.tensordot(x, weight, 1)
        return h if bias is None else h + bias

    return product


_product = with_backward(
    "linear",
    _product_forward,
    _product_backward,
    sharding=None,
    primal=_product_without_backward,
    reference=_unrounded,
)


def _activation_forward(options, backend, h, bias):
    shape = h.shape
    rows = lax.collapse(h, h.ndim - options.weight_ndim + 1)
    if bias is None:
        out = dispatch(GELU, Direction.FORWARD, backend, rows)
    else:
        out = dispatch(BIAS_GELU, Direction.FORWARD, backend, rows, bias.ravel())
    return checkpoint_name(out.reshape(shape), "linear"), (h, bias)


def _activation_backward(options, backend, residuals, dout):
    h, bias = residuals
    shape, first = dout.shape, dout.ndim - options.weight_ndim + 1
    h, dout = lax.collapse(h, first), lax.collapse(dout, first)
    offset = None if bias is None else bias.ravel()
    dh, dbias = activation_backward(backend, options.activation, h, offset, dout)
    return dh.reshape(shape), None if dbias is None else dbias.reshape(shape[first:])


def _activation_sharding(options: LinearOptions) -> ShardingRule:
    columns, bias = options.columns, options.columns.replace("F", "F'")
    return ShardingRule(f"... {columns}, {bias} -> ... {columns}; ?... {columns}", "... F")


_activate = with_backward(
    "linear", _activation_forward, _activation_backward, sharding=_activation_sharding
)
