"""Float8 operands and their GEMMs, on sharded arrays too: what layers with float8 are made of.

With one scale, an array of one device is quantized by one op. Otherwise the scales are computed
before a GEMM runs on shards: their maxima are over whole rows and arrays, also where these are
sharded.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxllm.core import ffi, partition, shards
from jaxllm.core.backend import Backend, BackendError
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.activation.api import BIAS_ADD
from jaxllm.ops.checks import check_layer
from jaxllm.ops.gemm.api_float8 import FLOAT8_MATMUL_AMAX, float8_matmul
from jaxllm.ops.gemm.linear import column_names
from jaxllm.ops.quantization.api_float8 import (
    FLOAT8_ROPE_BACKWARD,
    FLOAT8_ROUND,
    FLOAT8_SCALE_AND_ROUND,
)
from jaxllm.ops.rotary.packed import ROPE_PACKED, PackedRotation
from jaxllm.ops.rounding import amax, current_scale
from jaxllm.ops.weights import Quantized, Transposed, Weight

Recipe = Literal["row", "tensor"]
RECIPES: tuple[Recipe, ...] = get_args(Recipe)
Float8 = tuple[Array, Array]  # the values of an operand, and its scale or scales

# e4m3 has 3 bits after the leading one, and e5m2 has 2 and a wider range. Gradients of one row are
# near enough to each other for e4m3: with a scale per row, elements below 2^-19 of the largest
# become 0. Those of a whole array are not: with one scale and e5m2, below 2^-33 of the largest.
OPERAND_DTYPE = jnp.float8_e4m3fn
GRADIENT_DTYPES = {"row": jnp.float8_e4m3fn, "tensor": jnp.float8_e5m2}


def checked_weight(
    x: Array | jax.ShapeDtypeStruct,
    weight: Weight,
    bias: Array | None,
    recipe: Recipe,
    backend: Backend,
) -> Array:
    """The weight of a layer with float8 operands as an array.

    Raises:
        TypeError: An array is not float32, bfloat16 or float16, or differs from ``x`` in dtype.
        ValueError: The shapes do not fit together, or the weight is a ``Quantized``.
        BackendError: The GPU has no float8 tensor cores.
    """
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
    return weight


def quantize(
    x: Array,
    names: tuple[str, str],
    split: int,
    layouts: tuple[str, ...],
    dtype: DTypeLike,
    recipe: Recipe,
    backend: Backend,
) -> list[Float8]:
    """Rounds an operand, with one scale per row of the result, or one.

    Args:
        x: The operand, a matrix whose rows and columns may each be several axes.
        names: In a :class:`ShardingRule`, the names of the axes that are the rows, and of those
            that are the columns.
        split: How many axes are the rows.
        layouts: Of the results: ``"rows"`` for the matrix as it is, ``"transposed"``, or with one
            scale both.
        dtype: The format.
        recipe: That of the layer.
        backend: A resolved backend.

    Returns:
        For each layout the values and the scale. The transposed one has the axes of the columns
        first.
    """
    rows, columns = names
    layout = "both" if len(layouts) == 2 else layouts[0]
    static = {"dtype": jnp.dtype(dtype).name, "layout": layout}
    if recipe == "tensor" and not partition.is_wanted((x,)):
        values, transposed, _, scale = _quantize(backend, split, x, **static)
        found = {"rows": values, "transposed": transposed}
        return [(found[layout], scale) for layout in layouts]
    axes, scales = tuple(range(x.ndim)), ""
    if recipe == "row":
        of_columns = layouts == ("transposed",)
        axes, scales = (axes[:split], columns) if of_columns else (axes[split:], rows)
    scale = current_scale(x, dtype, axes)
    results = {"rows": f"{rows} {columns}", "transposed": f"{columns} {rows}"}
    of_results = ", ".join(results[layout] for layout in layouts)
    rule = ShardingRule(f"{rows} {columns}, {scales} -> {of_results}", "... D F")
    values = _round(rule, backend, split, x, scale, **static)
    return [(each, scale) for each in (values if layout == "both" else (values,))]


class Rotation(NamedTuple):
    """The rotation of a projection's queries and keys, as a part of the layer that computes it."""

    cos: Array
    sin: Array
    options: PackedRotation

    def forward(self, backend: Backend, qkv: Array) -> Array:
        """The rotated projection."""
        return self._run(ROPE_PACKED, Direction.FORWARD, backend, qkv)

    def back(self, backend: Backend, dqkv: Array) -> Array:
        """The gradient of the projection, of that of the rotated one."""
        return self._run(ROPE_PACKED, Direction.BACKWARD, backend, dqkv)

    def back_and_round(self, backend: Backend, dqkv: Array, *, has_bias: bool) -> Any:
        """``(values, transposed, sums, scale)`` of it, as matrices."""
        static, direction = {"has_bias": has_bias}, Direction.INFERENCE
        return self._run(FLOAT8_ROPE_BACKWARD, direction, backend, dqkv, **static)

    def _run(self, op: Op, direction: Direction, backend: Backend, x: Array, **static: Any) -> Any:
        arrays, static = (x, self.cos, self.sin), self.options.static | static
        return dispatch(op, direction, backend, *arrays, **static)


def quantize_gradient(
    dout: Array,
    weight_ndim: int,
    backend: Backend,
    *,
    has_bias: bool,
    rotation: Rotation | None = None,
) -> tuple[Float8, Float8, Array | None]:
    """Rounds the gradient of a layer's result with one scale.

    Args:
        dout: The gradient, of rows and the columns of a weight.
        weight_ndim: The axes of the weight.
        backend: A resolved backend.
        has_bias: Whether the layer has a bias.
        rotation: Of the result, which the gradient is rotated back by first; or None.

    Returns:
        The rounded matrix, the transposed one, and the gradient of the bias, the sum of the
        unrounded rows, or None. All are of one pass over ``dout``.
    """
    columns, dtype = column_names(weight_ndim), GRADIENT_DTYPES["tensor"]
    static = {"dtype": jnp.dtype(dtype).name, "layout": "both", "has_bias": has_bias}
    split = 1 - weight_ndim
    if rotation is not None and not partition.is_wanted((dout, *rotation[:2])):
        found: Any = rotation.back_and_round(backend, dout, has_bias=has_bias)
        values, transposed, sums, scale = _in_axes(dout, split, *found)
        return (values, scale), (transposed, scale), sums
    dout = dout if rotation is None else rotation.back(backend, dout)
    if not partition.is_wanted((dout,)):
        values, transposed, sums, scale = _quantize(backend, split, dout, **static)
        return (values, scale), (transposed, scale), sums
    scale = current_scale(dout, dtype, tuple(range(dout.ndim)))
    of_sums = f", {columns} +..." if has_bias else ""
    rule = ShardingRule(f"... {columns}, -> ... {columns}, {columns} ...{of_sums}", "... F")
    found: Any = _round(rule, backend, split, dout, scale, **static)
    return (found[0], scale), (found[1], scale), found[2] if has_bias else None


def _quantize(backend, split, x, **static) -> Any:
    """``(values, transposed, sums, scale)`` of an array of one device; None for what is not."""
    rows, columns = x.shape[:split], x.shape[split:]
    matrix = x.reshape(math.prod(rows), math.prod(columns))
    found = dispatch(FLOAT8_SCALE_AND_ROUND, Direction.INFERENCE, backend, matrix, **static)
    return _in_axes(x, split, *found)


def _in_axes(x, split, *found_and_scale) -> Any:
    """Rounded matrices, sums and scale of ``x`` in its axes."""
    rows, columns = x.shape[:split], x.shape[split:]
    *found, scale = found_and_scale
    shapes = x.shape, (*columns, *rows), columns
    pairs = zip(found, shapes, strict=True)
    results = (None if each is None else each.reshape(shape) for each, shape in pairs)
    return *results, scale.reshape(())


def _round(rule, backend, split, x, scale, **static):
    function = shards.Function(_round_shard, (backend, split, tuple(static.items())))
    if not partition.is_wanted((x, scale)):
        return function(x, scale)
    return partition.run(function, "linear", rule, (x, scale), is_opaque=backend != "xla")


def _round_shard(backend, split, static, x, scale):
    rows, columns = x.shape[:split], x.shape[split:]
    arrays = x.reshape(math.prod(rows), math.prod(columns)), scale.reshape(-1)
    static = dict(static)
    found = dispatch(FLOAT8_ROUND, Direction.INFERENCE, backend, *arrays, **static)
    found = found if static["layout"] == "both" else (found,)
    shapes = {"rows": [x.shape], "transposed": [(*columns, *rows)]}
    shapes["both"] = shapes["rows"] + shapes["transposed"]
    wanted = shapes[static["layout"]] + ([columns] if static.get("has_bias") else [])
    results: Any = tuple(map(jnp.reshape, found, wanted))
    return results if len(results) > 1 else results[0]


def product(
    x: Float8,
    weight: Array,
    recipe: Recipe,
    backend: Backend,
    *,
    dtype: DTypeLike,
    bias: Array | None = None,
    parts: int | None = None,
) -> tuple[Array, Array | None]:
    """The rounded ``x`` times the weight, plus the bias; with ``parts`` as :func:`multiply`."""
    columns = column_names(weight.ndim)
    weight8 = quantize_weight(weight, "transposed", recipe, backend)
    scales = f"..., {columns}" if recipe == "row" else ", "
    of_bias = columns.replace("F", "F'")
    rule = ShardingRule(f"... D', {columns} D, {scales}, !{of_bias} -> ... {columns} +D", "... D F")
    kept = x[0].ndim - 1, weight.ndim - 1
    results = multiply(rule, backend, x, weight8, kept, dtype=dtype, bias=bias, parts=parts)
    return checkpoint_name(results, "linear")


def input_gradient(
    dout: Float8, weight: Array, recipe: Recipe, backend: Backend, *, dtype: DTypeLike
) -> Array:
    """The gradient of a layer's input."""
    columns = column_names(weight.ndim)
    weight8 = quantize_weight(weight, "rows", recipe, backend)
    scales = "..., D" if recipe == "row" else ", "
    rule = ShardingRule(f"... {columns}, D {columns}, {scales}, -> ... D +F", "... D F")
    kept = dout[0].ndim - weight.ndim + 1, 1
    return multiply(rule, backend, dout, weight8, kept, dtype=dtype)[0]


def quantize_weight(weight: Array, layout: str, recipe: Recipe, backend: Backend) -> Float8:
    """Rounds a weight, as it is, ``"rows"``, or ``"transposed"``.

    With one scale, on one device, one op does both: XLA keeps one of the equal calls of the forward
    and the backward pass.
    """
    is_whole = recipe == "tensor" and not partition.is_wanted((weight,))
    layouts = ("rows", "transposed") if is_whole else (layout,)
    of_weight = ("D", column_names(weight.ndim)), 1, layouts
    found = quantize(weight, *of_weight, OPERAND_DTYPE, recipe, backend)
    return found[layouts.index(layout)]


def weight_gradient(
    x: Float8, dout: Float8, weight_ndim: int, backend: Backend, *, dtype: DTypeLike
) -> Array:
    """The gradient of a weight, of operands that are transposed and have one scale each."""
    columns = column_names(weight_ndim)
    rule = ShardingRule(f"D ..., {columns} ..., , , -> D {columns} +...", "... D F")
    return multiply(rule, backend, x, dout, (1, weight_ndim - 1), dtype=dtype)[0]


def bias_gradient(dout: Array, weight_ndim: int, backend: Backend) -> Array:
    """The gradient of a bias: the sum of the unrounded rows."""
    columns = column_names(weight_ndim)
    function = shards.Function(_bias_gradient_shard, (backend, dout.ndim - weight_ndim + 1))
    if not partition.is_wanted((dout,)):
        return function(dout)
    rule = ShardingRule(f"... {columns} -> {columns} +...", "... F")
    return partition.run(function, "linear", rule, (dout,), is_opaque=backend != "xla")


def _bias_gradient_shard(backend, rows, dout):
    dbias = dispatch(BIAS_ADD, Direction.BACKWARD, backend, lax.collapse(dout, rows))
    return dbias.reshape(dout.shape[rows:])


def multiply(
    rule: ShardingRule,
    backend: Backend,
    a: Float8,
    b: Float8,
    kept: tuple[int, int],
    *,
    dtype: DTypeLike,
    bias: Array | None = None,
    parts: int | None = None,
) -> tuple[Array, Array | None]:
    """The product of two rounded operands over all but the first axes of each, plus a bias.

    Args:
        rule: The names of the axes of the operands, of their scales, of the bias and of the
            product.
        backend: A resolved backend.
        a: The operand whose first axes are the rows of the product. It is K-major: what is summed
            over is last.
        b: Likewise for the columns.
        kept: How many axes of ``a`` and of ``b`` are those of the product.
        dtype: That of the product.
        bias: Of the axes that ``b`` keeps, in ``dtype``, or None.
        parts: 1 for the largest absolute value of the product; 2 for that of each half of the
            columns, whose first axis is 2; None for none.

    Returns:
        The product, and float32 maxima of shape ``(parts,)``, or None.
    """
    arrays = (a[0], b[0], a[1], b[1], bias)
    is_sharded = partition.is_wanted(arrays)
    of_shard = None if is_sharded else parts
    function = shards.Function(_multiply_shard, (backend, jnp.dtype(dtype).name, kept, of_shard))
    if not is_sharded:
        return function(*arrays)
    out, _ = partition.run(function, "linear", rule, arrays, is_opaque=backend != "xla")
    if parts is None:
        return out, None
    axis = kept[0] if parts == 2 else out.ndim
    return out, amax(out, tuple(i for i in range(out.ndim) if i != axis)).reshape(parts)


def _multiply_shard(backend, dtype, kept, parts, a, b, scale_a, scale_b, bias):
    rows, columns = a.shape[: kept[0]], b.shape[: kept[1]]
    depth = math.prod(a.shape[kept[0] :])
    a, b = a.reshape(math.prod(rows), depth), b.reshape(math.prod(columns), depth)
    bias = None if bias is None else bias.ravel()
    largest = None
    if parts is None:
        scale_a, scale_b = (x.ravel() if x.ndim else x for x in (scale_a, scale_b))
        out = float8_matmul(a, b, scale_a, scale_b, bias, out_dtype=dtype, backend=backend)
    else:
        arrays, static = (a, b, scale_a.ravel(), scale_b.ravel(), bias), {"out_dtype": dtype}
        direction = Direction.INFERENCE
        out, largest = dispatch(
            FLOAT8_MATMUL_AMAX, direction, backend, *arrays, **static, parts=parts
        )
    return out.reshape(*rows, *columns), largest
