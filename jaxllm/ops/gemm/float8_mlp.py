r"""A norm and an MLP whose GEMMs have float8 operands, with one scale for each array.

With :math:`q` the rounding with the current scale of an array, as in
:mod:`jaxllm.ops.gemm.float8_linear`, :math:`r_s` that with the scale :math:`s`, :math:`f` the
activation, and :math:`x` the rounded result of the norm, as in :mod:`jaxllm.ops.gemm.float8_norm`

.. math::
    h = x \, q(W_1) + b \qquad y = r_s(f(h)) \qquad out = y \, q(W_2)

    dy = q(dout) \, q(W_2)^T \qquad dh = r_t(f'(h) \, dy) \qquad dx = dh \, q(W_1)^T

    dW_1 = x^T dh \qquad dW_2 = y^T q(dout)

The result of the activation and its gradient are never in memory in more than 8 bits. A kernel
reads ``h`` and writes the rounded result and its transpose. The GEMM that computes :math:`dy`
multiplies by the derivative, and writes the rounded gradient and its transpose. So a scale is known
before its elements are. It follows from bounds, with the maxima that the GEMM before it returns.
For GELU

.. math::
    |gelu(h)| \le \max |h| \qquad |dh| \le 1.13 \max |dy|

since :math:`|gelu'| < 1.13`; and for SwiGLU, with :math:`h = (g, u)`,

.. math::
    |silu(g) \, u| \le \max |g| \max |u| \qquad
    |dh| \le \max |dy| \max(1.1 \max |u|, \max |g|)

since :math:`|silu(g)| \le |g|` and :math:`|silu'| < 1.1`. The maximum of :math:`dy` follows from a
bound too. Of :math:`D` columns of :math:`dout`

.. math::
    |dy| \le \sqrt D \, \max |dout| \, \max_j \|W_{2,j}\|

A bound that is :math:`2^k` times the maximum costs no precision, but for small elements: e4m3 keeps
its 3 bits down to :math:`2^{k-14}` of the maximum, and e5m2 its 2 bits down to :math:`2^{k-29}`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.core import partition, shards
from jaxllm.core.backend import Backend
from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.gemm import float8_counts
from jaxllm.ops.gemm.api_float8 import FLOAT8_MATMUL_DGELU, FLOAT8_MATMUL_DSWIGLU
from jaxllm.ops.gemm.float8_norm import (
    NormArrays,
    NormOptions,
    gradients,
    norm_options,
    normalize,
    unrounded,
)
from jaxllm.ops.gemm.float8_operands import (
    GRADIENT_DTYPES,
    OPERAND_DTYPE,
    Float8,
    Recipe,
    checked_weight,
    input_gradient,
    product,
    quantize_gradient,
    quantize_weight,
    weight_gradient,
)
from jaxllm.ops.gemm.linear import column_names
from jaxllm.ops.quantization.api_float8 import FLOAT8_GELU, FLOAT8_SWIGLU
from jaxllm.ops.rounding import largest_row_norm, scale_of

_MAX_GELU_SLOPE = 1.13  # 1.1290 at 1.41
_MAX_SILU_SLOPE = 1.1  # 1.0998 at 2.4
# Rounded to e4m3, elements are at most a sixteenth larger; and the kernel wants a bound that is an
# eighth too large.
_ROUNDED_NORM = 1.2
_RECIPE: Recipe = "tensor"
_GRADIENT_DTYPE = GRADIENT_DTYPES[_RECIPE]
_OPS = {"gelu": FLOAT8_GELU, "swiglu": FLOAT8_SWIGLU}


@dataclasses.dataclass(frozen=True)
class _Options:
    activation: Literal["gelu", "swiglu"]
    norm: NormOptions

    @property
    def parts(self) -> int:
        """Of ``h``: with SwiGLU the gates, and what they gate."""
        return {"gelu": 1, "swiglu": 2}[self.activation]

    @property
    def columns(self) -> str:
        """The names of the axes of the columns of ``h``."""
        return column_names(1 + self.parts)


def float8_mlp(
    norm: NormArrays,
    up: Array,
    up_bias: Array | None,
    down: Array,
    *,
    activation: Literal["gelu", "swiglu"],
    eps: float,
    backend: Backend,
) -> tuple[Array, Array]:
    """``down(f(up(norm(h))))`` with a resolved backend, and the recipe ``"tensor"``.

    Args:
        norm: The arrays of the norm, of rows (..., D).
        up: The weight (D, F); with SwiGLU that of the gates and of what they gate, (D, 2, F).
        up_bias: What is added to each row of ``x @ up``, or None.
        down: The weight (F, D_out).
        activation: ``"gelu"``, the tanh form, or ``"swiglu"``.
        eps: That of the norm.
        backend: A resolved backend.

    Returns:
        The result, and the new residual ``h``.
    """
    x = norm.x
    up = checked_weight(x, up, up_bias, _RECIPE, backend)
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], up.shape[-1]), x.dtype)
    down = checked_weight(hidden, down, None, _RECIPE, backend)
    arrays = *norm, up, up_bias, down, float8_counts.active_probe()
    options = _Options(activation, norm_options(norm, eps))
    return _mlp(*arrays, backend=backend, options=options)


def _without_backward(options, backend, *arrays):
    *norm, up, up_bias, down, _ = arrays
    return _layers(options, backend, NormArrays(*norm), up, up_bias, down, ("rows",))[0]


def _forward(options, backend, *arrays):
    *norm, up, up_bias, down, probe = arrays
    layouts = "rows", "transposed"
    outputs, saved = _layers(options, backend, NormArrays(*norm), up, up_bias, down, layouts)
    counts = None
    if probe is not None:
        rounded = [
            float8_counts.of_operand(array, tuple(range(array.ndim)), OPERAND_DTYPE)
            for array in (up, down)
        ]
        _, x8, _, _, hidden8 = saved
        rounded += [float8_counts.of_rounded_operand(values) for values, _ in (x8, hidden8)]
        counts = float8_counts.total(*rounded)
    return outputs, (*saved, (up, up_bias, down), counts)


def _layers(
    options, backend, norm, up, up_bias, down, layouts
) -> tuple[tuple[Array, Array], tuple]:
    """The outputs, and what is saved: of the norm, ``h``, and the transposed operands."""
    (x8, *x8_transposed), residual, of_norm = normalize(options.norm, backend, norm, layouts)
    dtype = residual.dtype
    more = {"dtype": dtype, "bias": up_bias, "parts": options.parts}
    h, amax = product(x8, up, _RECIPE, backend, **more)
    hidden8, *hidden8_transposed = _activate(options, backend, h, amax, layouts)
    out, _ = product(hidden8, down, _RECIPE, backend, dtype=dtype)
    return (out, residual), (of_norm, *x8_transposed, h, amax, *hidden8_transposed)


def _backward(options, backend, residuals, dout, dresidual):
    of_norm, x8, h, amax, hidden8, (up, up_bias, down), counts = residuals
    dtype = dout.dtype
    dout8, transposed, _ = quantize_gradient(dout, 2, backend, has_bias=False)
    ddown = weight_gradient(hidden8, transposed, 2, backend, dtype=dtype)
    ddown, dout8 = lax.optimization_barrier((ddown, dout8))  # as in gradients.wgrad
    has_bias = up_bias is not None
    arrays = h, dout8, down, amax
    dh8, transposed, dup_bias = _activation_gradient(options, backend, *arrays, has_bias=has_bias)
    dup = weight_gradient(x8, transposed, up.ndim, backend, dtype=dtype)
    dup, dh8 = lax.optimization_barrier((dup, dh8))
    dx = input_gradient(dh8, up, _RECIPE, backend, dtype=dtype)
    if counts is not None:
        of_dout = float8_counts.of_gradient(dout, tuple(range(dout.ndim)), _GRADIENT_DTYPE)
        of_dh = float8_counts.of_rounded_gradient(dh8[0])
        counts = float8_counts.total(counts, of_dout, of_dh)
    of_norm = gradients(options.norm, backend, of_norm, dx, dresidual)
    return *of_norm, dup, dup_bias, ddown, counts


def _activate(options, backend, h, amax, layouts) -> list[Float8]:
    layout = "both" if len(layouts) == 2 else "rows"
    scale = scale_of(jnp.prod(amax), OPERAND_DTYPE)
    results = "... F, F ..." if layout == "both" else "... F"
    rule = ShardingRule(f"... {options.columns}, -> {results}", "... F")
    function = shards.Function(_activate_shard, (options, backend, layout))
    values = _on_shards(options, function, rule, backend, h, scale)
    return [(each, scale) for each in (values if layout == "both" else (values,))]


def _activate_shard(options, backend, layout, h, scale):
    rows, columns = h.shape[: -options.parts], h.shape[-1]
    arrays = h.reshape(math.prod(rows), options.parts * columns), scale.reshape(1)
    op, direction = _OPS[options.activation], Direction.FORWARD
    found = dispatch(op, direction, backend, *arrays, layout=layout)
    if layout == "rows":
        return found.reshape(*rows, columns)
    return found[0].reshape(*rows, columns), found[1].reshape(columns, *rows)


def _activation_gradient(
    options, backend, h, dout, down, amax, *, has_bias
) -> tuple[Float8, Float8, Array | None]:
    """The gradient of ``h`` in both layouts and of the bias, given that of the MLP's result."""
    (dout, scale_a), (down8, scale_b) = dout, quantize_weight(down, "rows", _RECIPE, backend)
    of_dout = float(jnp.finfo(_GRADIENT_DTYPE).max) * scale_a
    bound = math.sqrt(dout.shape[-1]) * of_dout * largest_row_norm(down, scale_b)
    if options.activation == "gelu":
        slope = _MAX_GELU_SLOPE
    else:
        slope = jnp.maximum(_MAX_SILU_SLOPE * amax[1], amax[0])
    scale = scale_of(_ROUNDED_NORM * bound * slope, _GRADIENT_DTYPE)
    columns = options.columns
    sums = f", {columns} +..." if has_bias else ""
    # The depth is whole: the derivative is multiplied by the sum of all products.
    names = f"... {columns}, ... _, F _, , ,"
    rule = ShardingRule(f"{names} -> ... {columns}, {columns} ...{sums}", "... F")
    function = shards.Function(_activation_gradient_shard, (options, backend, has_bias))
    arrays = h, dout, down8, scale_a, scale_b, scale
    rows, transposed, *dbias = _on_shards(options, function, rule, backend, *arrays)
    return (rows, scale), (transposed, scale), dbias[0] if has_bias else None


def _activation_gradient_shard(options, backend, has_bias, h, dout, down, *scales):
    axes = h.ndim - options.parts
    rows, columns = h.shape[:axes], h.shape[axes:]
    matrix = h.reshape(math.prod(rows), math.prod(columns))
    scale_a, scale_b, scale = (each.reshape(1) for each in scales)
    arrays = dout.reshape(len(matrix), dout.shape[-1]), down, scale_a, scale_b, matrix, scale
    op = FLOAT8_MATMUL_DGELU if options.activation == "gelu" else FLOAT8_MATMUL_DSWIGLU
    found = dispatch(op, Direction.INFERENCE, backend, *arrays, has_bias=has_bias)
    shapes = h.shape, (*columns, *rows), columns
    return tuple(x.reshape(shape) for x, shape in zip(found, shapes, strict=True) if x is not None)


def _on_shards(options, function, rule, backend, *arrays):
    if not partition.is_wanted(arrays):
        return function(*arrays)
    name, is_opaque = options.activation, backend != "xla"
    return partition.run(function, name, rule, arrays, is_opaque=is_opaque)


def _unrounded(_):
    """The MLP of unrounded operands, which forward mode differentiates."""

    def mlp(static, *arrays):
        *norm, up, up_bias, down, _ = arrays
        x, residual = unrounded(static.options.norm, NormArrays(*norm))
        h = jnp.tensordot(x, up, 1)
        h = h if up_bias is None else h + up_bias
        if static.options.activation == "gelu":
            hidden = jax.nn.gelu(h)
        else:
            hidden = jax.nn.silu(h[..., 0, :]) * h[..., 1, :]
        return jnp.dot(hidden, down), residual

    return mlp


_mlp = with_backward(
    "float8_mlp",
    _forward,
    _backward,
    sharding=None,
    primal=_without_backward,
    outputs=2,
    reference=_unrounded,
)
