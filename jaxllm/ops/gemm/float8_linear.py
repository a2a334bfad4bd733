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
from jaxllm.ops.quantization.api_float8 import FLOAT8_ROUND
from jaxllm.ops.quantization.rounding import current_scale
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


def _product_without_backward(options, backend, x, weight):
    (x8,) = _quantize(x, ("...", "D"), x.ndim - 1, ("rows",), _DTYPE, options, backend)
    return _product_of(x8, x.dtype, weight, options, backend)


def _product_forward(options, backend, x, weight):
    if options.recipe == "row":
        return _product_without_backward(options, backend, x, weight), (x, weight)
    # With one scale dW is a product of the same rounded elements.
    names, layouts = ("...", "D"), ("rows", "transposed")
    x8, transposed = _quantize(x, names, x.ndim - 1, layouts, _DTYPE, options, backend)
    return _product_of(x8, x.dtype, weight, options, backend), (transposed, weight)


def _product_of(x8, dtype, weight, options, backend):
    """``h`` of the rounded ``x``."""
    columns = options.columns
    (weight8,) = _quantize(weight, ("D", columns), 1, ("transposed",), _DTYPE, options, backend)
    scales = _scales(options, "...", columns)
    rule = ShardingRule(f"... D', {columns} D, {scales} -> ... {columns} +D", "... D F")
    out = _multiply(rule, backend, dtype, x8, weight8, (x8[0].ndim - 1, weight.ndim - 1))
    return checkpoint_name(out, "linear")


def _product_backward(options, backend, residuals, dout):
    x, weight = residuals
    columns, rows = options.columns, dout.ndim - weight.ndim + 1
    of_dout = "...", columns
    dtype = _GRADIENT_DTYPES[options.recipe]
    if options.recipe == "tensor":
        layouts = "rows", "transposed"
        dout8, transposed = _quantize(dout, of_dout, rows, layouts, dtype, options, backend)
        rule = ShardingRule(f"D ..., {columns} ..., , -> D {columns} +...", "... D F")
        kept = 1, weight.ndim - 1
        dweight = _multiply(rule, backend, dout.dtype, x, transposed, kept)
    else:
        # The weight gradient's own rule shards it. XLA removes GEMMs whose results are not used.
        (dout8,) = _quantize(dout, of_dout, rows, ("rows",), dtype, options, backend)
        plain = LinearOptions(None, weight.ndim)
        _, pull = jax.vjp(lambda w: linear(x, w, None, backend=backend, options=plain), weight)
        (dweight,) = pull(dout)
    dweight, dout8 = lax.optimization_barrier((dweight, dout8))  # as in gradients.wgrad
    (weight8,) = _quantize(weight, ("D", columns), 1, ("rows",), _DTYPE, options, backend)
    scales = _scales(options, "...", "D")
    rule = ShardingRule(f"... {columns}, D {columns}, {scales} -> ... D +F", "... D F")
    return _multiply(rule, backend, dout.dtype, dout8, weight8, (rows, 1)), dweight


def _scales(options: _Options, rows: str, columns: str) -> str:
    """The dimensions of the scales of both operands, in a :class:`ShardingRule`."""
    return f"{rows}, {columns}" if options.recipe == "row" else ", "


def _quantize(
    x: Array,
    names: tuple[str, str],
    split: int,
    layouts: tuple[str, ...],
    dtype: DTypeLike,
    options: _Options,
    backend: Backend,
) -> list[tuple[Array, Array]]:
    """Rounds an operand, with one scale per row of the result, or one.

    Args:
        x: The operand, a matrix whose rows and columns may each be several axes.
        names: In a :class:`ShardingRule`, the names of the axes that are the rows, and of those
            that are the columns.
        split: How many axes are the rows.
        layouts: Of the results: ``"rows"`` for the matrix as it is, ``"transposed"``, or with one
            scale both.
        dtype: The format.
        options: Those of the layer.
        backend: A resolved backend.

    Returns:
        For each layout the values and the scale. The transposed one has the axes of the columns
        first.
    """
    rows, columns = names
    axes, scales = tuple(range(x.ndim)), ""
    if options.recipe == "row":
        of_columns = layouts == ("transposed",)
        axes, scales = (axes[:split], columns) if of_columns else (axes[split:], rows)
    scale = current_scale(x, dtype, axes)
    results = {"rows": f"{rows} {columns}", "transposed": f"{columns} {rows}"}
    of_results = ", ".join(results[layout] for layout in layouts)
    rule = ShardingRule(f"{rows} {columns}, {scales} -> {of_results}", "... D F")
    layout = "both" if len(layouts) == 2 else layouts[0]
    function = shards.Function(_round_shard, (backend, jnp.dtype(dtype).name, layout, split))
    if not partition.is_wanted((x, scale)):
        values = function(x, scale)
    else:
        values = partition.run(function, "linear", rule, (x, scale), is_opaque=backend != "xla")
    return [(each, scale) for each in (values if layout == "both" else (values,))]


def _round_shard(backend, dtype, layout, split, x, scale):
    rows, columns = x.shape[:split], x.shape[split:]
    matrix = x.reshape(math.prod(rows), math.prod(columns))
    static = {"dtype": dtype, "layout": layout}
    direction, scale = Direction.INFERENCE, scale.reshape(-1)
    results = dispatch(FLOAT8_ROUND, direction, backend, matrix, scale, **static)
    if layout == "rows":
        return results.reshape(x.shape)
    if layout == "transposed":
        return results.reshape(*columns, *rows)
    return results[0].reshape(x.shape), results[1].reshape(*columns, *rows)


def _multiply(
    rule: ShardingRule,
    backend: Backend,
    dtype: DTypeLike,
    a: tuple[Array, Array],
    b: tuple[Array, Array],
    kept: tuple[int, int],
) -> Array:
    """The product of two rounded operands, with their scales, over all but the first axes of each.

    Both are K-major: what is summed over is last.
    """
    function = shards.Function(_multiply_shard, (backend, jnp.dtype(dtype).name, kept))
    arrays = (a[0], b[0], a[1], b[1])
    if not partition.is_wanted(arrays):
        return function(*arrays)
    return partition.run(function, "linear", rule, arrays, is_opaque=backend != "xla")


def _multiply_shard(backend, dtype, kept, a, b, scale_a, scale_b):
    rows, columns = a.shape[: kept[0]], b.shape[: kept[1]]
    depth = math.prod(a.shape[kept[0] :])
    a, b = a.reshape(math.prod(rows), depth), b.reshape(math.prod(columns), depth)
    scales = (scale.ravel() if scale.ndim else scale for scale in (scale_a, scale_b))
    out = float8_matmul(a, b, *scales, out_dtype=dtype, backend=backend)
    return out.reshape(*rows, *columns)


def _unrounded(_):
    """The product of the unrounded operands, which forward mode differentiates."""
    return lambda static, x, weight: jnp.tensordot(x, weight, 1)


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
