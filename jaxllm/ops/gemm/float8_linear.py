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

The scales are computed before the GEMM runs on shards: their maxima are over whole rows and arrays,
also where these are sharded.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxllm.core import ffi, partition, shards
from jaxllm.core.backend import Backend, BackendError
from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.activation.api import BIAS_GELU, GELU
from jaxllm.ops.checks import check_layer
from jaxllm.ops.gemm.api_float8 import float8_matmul
from jaxllm.ops.gemm.linear import LinearOptions, activation_backward, linear
from jaxllm.ops.quantization.api_float8 import quantize_over
from jaxllm.ops.weights import Quantized, Transposed, Weight

Recipe = Literal["row", "tensor"]
RECIPES: tuple[Recipe, ...] = get_args(Recipe)

_DTYPE = jnp.float8_e4m3fn
# e4m3 has 3 bits after the leading one, and e5m2 has 2 and a wider range. Gradients of one row are
# near enough to each other for e4m3: with a scale per row, elements below 2^-19 of the largest
# become 0. Those of a whole array are not: with one scale and e5m2, below 2^-33 of the largest.
_GRADIENT_DTYPES = {"row": jnp.float8_e4m3fn, "tensor": jnp.float8_e5m2}


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
    if isinstance(weight, Quantized):
        raise ValueError(f"precision is {recipe!r}; it must be None with a Quantized weight")
    weight = weight.array.T if isinstance(weight, Transposed) else weight
    check_layer("weight", weight, "bias", bias, x, in_parts=True)
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"x has dtype {x.dtype}; with precision {recipe!r} it must be float32, bfloat16 or "
            "float16"
        )
    gpu = ffi.device()
    if gpu is not None and gpu.capability < 89 and backend != "xla":
        raise BackendError(
            f"backend {backend!r} cannot serve linear with precision {recipe!r}: this GPU, "
            f"sm_{gpu.capability}, has no float8 tensor cores (sm_89 or later); leave precision "
            "out, or use backend 'xla', which multiplies the rounded values in float16 there"
        )
    options = _Options(activation, weight.ndim, recipe)
    h = _product(x, weight, backend=backend, options=options)
    if activation is None and bias is None:
        return h
    return _epilogue(h, bias, backend=backend, options=options)


def _product_forward(options, backend, x, weight):
    columns, of_tensor = options.columns, options.recipe == "tensor"
    summed = (x.ndim - 1,), (0,)
    x8 = _quantize(x, summed[0], _DTYPE, options)
    weight8 = _quantize(weight, summed[1], _DTYPE, options)
    scales = ", " if of_tensor else f"..., {columns}"
    rule = ShardingRule(f"... D', D {columns}, {scales} -> ... {columns} +D", "... D F")
    out = _multiply(rule, backend, x.dtype, x8, weight8, summed)
    # With one scale dW is a product of the same rounded elements.
    return checkpoint_name(out, "linear"), (x8 if of_tensor else x, weight)


def _product_backward(options, backend, residuals, dout):
    x, weight = residuals
    columns, rows = options.columns, tuple(range(dout.ndim - weight.ndim + 1))
    summed = tuple(range(len(rows), dout.ndim)), tuple(range(1, weight.ndim))
    dout8 = _quantize(dout, summed[0], _GRADIENT_DTYPES[options.recipe], options)
    if options.recipe == "tensor":
        scales, rule = ", ", ShardingRule(f"... D, ... {columns}, , -> D {columns} +...", "... D F")
        dweight = _multiply(rule, backend, dout.dtype, x, dout8, (rows, rows))
    else:
        # The weight gradient's own rule shards it. XLA removes GEMMs whose results are not used.
        scales, plain = "..., D", LinearOptions(None, weight.ndim)
        _, pull = jax.vjp(lambda w: linear(x, w, None, backend=backend, options=plain), weight)
        (dweight,) = pull(dout)
    dweight, dout8 = lax.optimization_barrier((dweight, dout8))  # as in gradients.wgrad
    weight8 = _quantize(weight, summed[1], _DTYPE, options)
    rule = ShardingRule(f"... {columns}, D {columns}, {scales} -> ... D +F", "... D F")
    return _multiply(rule, backend, dout.dtype, dout8, weight8, summed), dweight


def _quantize(
    x: Array, summed: tuple[int, ...], dtype: DTypeLike, options: _Options
) -> tuple[Array, Array]:
    """Rounds an operand, with one scale along the axes that are summed over, or along all."""
    axes = summed if options.recipe == "row" else tuple(range(x.ndim))
    return quantize_over(x, dtype, axes)


def _multiply(
    rule: ShardingRule,
    backend: Backend,
    dtype: DTypeLike,
    a: tuple[Array, Array],
    b: tuple[Array, Array],
    summed: tuple[tuple[int, ...], tuple[int, ...]],
) -> Array:
    """The product of two rounded operands, with their scales, over some axes of each."""
    function = shards.Function(_multiply_shard, (backend, jnp.dtype(dtype).name, summed))
    arrays = (a[0], b[0], a[1], b[1])
    if not partition.is_wanted(arrays):
        return function(*arrays)
    return partition.run(function, "linear", rule, arrays, is_opaque=backend != "xla")


def _multiply_shard(backend, dtype, summed, a, b, scale_a, scale_b):
    (a, rows), (b, columns) = map(_k_major, (a, b), summed)
    scales = (scale.ravel() if scale.ndim else scale for scale in (scale_a, scale_b))
    out = float8_matmul(a, b, *scales, out_dtype=dtype, backend=backend)
    return out.reshape(*rows, *columns)


def _k_major(x: Array, summed: tuple[int, ...]) -> tuple[Array, tuple[int, ...]]:
    """An operand as a matrix with the summed axes last, and the shape of the others.

    XLA fuses a transpose with the rounding.
    """
    kept = tuple(axis for axis in range(x.ndim) if axis not in summed)
    rows, depth = (tuple(x.shape[axis] for axis in axes) for axes in (kept, summed))
    return x.transpose(*kept, *summed).reshape(math.prod(rows), math.prod(depth)), rows


def _unrounded(_):
    """The product of the unrounded operands, which forward mode differentiates."""
    return lambda static, x, weight: jnp.tensordot(x, weight, 1)


_product = with_backward(
    "linear", _product_forward, _product_backward, sharding=None, reference=_unrounded
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
