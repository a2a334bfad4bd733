r"""A norm whose result is a float8 operand, and the linear layer after it.

A kernel adds the branch to the residual, normalizes the sum and writes the result in float8, as it
is and transposed: it is never in memory in more bits. So its scale is known before its elements
are. It follows from a bound. A row of :math:`D` numbers with the mean square 1 has none above
:math:`\sqrt D`, so

.. math::
    |norm(x) \cdot scale + bias| \le \sqrt D \, \max |scale| + \max |bias|

The largest element is seldom near that: of normal numbers it is 4 to 6 times the root mean square.
A scale that is :math:`2^k` times the current one costs no precision, but for elements below
:math:`2^{k-14}` of the largest.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxllm.core import partition, shards
from jaxllm.core.backend import Backend
from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.gemm import float8_counts
from jaxllm.ops.gemm.float8_linear import tensor_gradients
from jaxllm.ops.gemm.float8_operands import (
    OPERAND_DTYPE,
    Float8,
    Rotation,
    checked_weight,
    product,
)
from jaxllm.ops.norm.api import ADD_LAYER_NORM, ADD_RMS_NORM, add_layer_norm, add_rms_norm
from jaxllm.ops.quantization.api_float8 import FLOAT8_NORM
from jaxllm.ops.rotary.packed import PackedRotation
from jaxllm.ops.rounding import amax, scale_of
from jaxllm.ops.weights import Weight


class NormArrays(NamedTuple):
    """What a norm after a residual addition is computed from."""

    x: Array  # the branch, (..., D)
    residual: Array | None  # (..., D); None where nothing is added to x
    x_bias: Array | None  # (D,), that of the branch
    scale: Array  # (D,)
    bias: Array | None  # (D,); None for an RMS norm


@dataclasses.dataclass(frozen=True)
class NormOptions:
    """The static options of a norm before a float8 GEMM."""

    eps: float
    has_residual: bool
    has_bias: bool  # a layer norm; an RMS norm has none

    @property
    def name(self) -> str:
        """That of the results for a remat policy, as of the norm that is an op."""
        return "layer_norm" if self.has_bias else "rms_norm"


def normalize(
    options: NormOptions, backend: Backend, arrays: NormArrays, layouts: tuple[str, ...]
) -> tuple[list[Float8], Array, tuple]:
    """Adds a branch to the residual, and rounds the norm of the sum to float8.

    Args:
        options: The static options.
        backend: A resolved backend.
        arrays: Those of the norm.
        layouts: Of the result, ``("rows",)`` or ``("rows", "transposed")``.

    Returns:
        For each layout the values and the scale, the new residual, and what :func:`gradients`
        needs.
    """
    x, residual, x_bias, scale, bias = arrays
    bound = math.sqrt(x.shape[-1]) * amax(scale, (0,))
    bound = bound if bias is None else bound + amax(bias, (0,))
    float8_scale, is_both = scale_of(bound, OPERAND_DTYPE), len(layouts) == 2
    wanted = (True, is_both, residual is not None, is_both and options.has_bias, is_both)
    names = ("... _", "_ ...", "... _", "...", "...")
    dims = ", ".join(name for name, is_wanted in zip(names, wanted, strict=True) if is_wanted)
    rule = ShardingRule(f"... _, ... _, _, _, _, -> {dims}")
    function = shards.Function(_normalize_shard, (options, backend, is_both))
    given = (*arrays, float8_scale)
    found = iter(checkpoint_name(_on_shards(options, function, rule, backend, given), options.name))
    results: Any = (next(found) if each else None for each in wanted)
    values, transposed, h, mean, rstd = results
    h = x if residual is None else h
    rounded = [(each, float8_scale) for each in (values, transposed) if each is not None]
    return rounded, h, (h, x_bias, scale, mean, rstd)


def _normalize_shard(options, backend, is_both, x, residual, x_bias, scale, bias, float8_scale):
    rows, width = x.shape[:-1], x.shape[-1]
    x, residual = (
        None if each is None else each.reshape(math.prod(rows), width) for each in (x, residual)
    )
    arrays = (x, residual, x_bias, scale, bias, float8_scale.reshape(1))
    static = {"layout": "both" if is_both else "rows", "statistics": is_both}
    found = dispatch(FLOAT8_NORM, Direction.FORWARD, backend, *arrays, eps=options.eps, **static)
    shapes = ((*rows, width), (width, *rows), (*rows, width), rows, rows)
    given = zip(found, shapes, strict=True)
    return tuple(each.reshape(shape) for each, shape in given if each is not None)


def gradients(
    options: NormOptions, backend: Backend, saved: tuple, dout: Array, dh: Array | None
) -> tuple:
    """The gradients of :func:`normalize`'s arrays.

    Args:
        options: As there.
        backend: As there.
        saved: What it returns.
        dout: The gradient of the normalized rows.
        dh: That of the new residual, or None.
    """
    h, x_bias, *of_norm = saved
    sums = ["_ +..."] * ((x_bias is not None) + 1 + options.has_bias)
    rule = ShardingRule(f"... _, _, _, ..., ..., ... _, ... _ -> ... _, {', '.join(sums)}")
    function = shards.Function(_gradients_shard, (options, backend))
    found = iter(_on_shards(options, function, rule, backend, (h, x_bias, *of_norm, dout, dh)))
    dx = next(found)
    dresidual = dx if options.has_residual else None
    dx_bias = None if x_bias is None else next(found)
    dscale = next(found)
    return dx, dresidual, dx_bias, dscale, next(found) if options.has_bias else None


def _gradients_shard(options, backend, h, x_bias, scale, mean, rstd, dout, dh):
    direction = Direction.BACKWARD
    if options.has_bias:
        arrays = (h, x_bias, scale, mean, rstd, dout, dh)
        found = dispatch(ADD_LAYER_NORM, direction, backend, *arrays)
    else:
        found = dispatch(ADD_RMS_NORM, direction, backend, h, scale, rstd, dout, dh)
    return tuple(each for each in found if each is not None)


def _on_shards(options, function, rule, backend, arrays):
    if not partition.is_wanted(arrays):
        return function(*arrays)
    return partition.run(function, options.name, rule, arrays, is_opaque=backend != "xla")


def unrounded(options: NormOptions, arrays: NormArrays) -> tuple[Array, Array]:
    """The normalized rows in the dtype of ``x``, and the new residual, for forward mode."""
    x, residual, x_bias, scale, bias = arrays
    static: dict[str, Any] = {"eps": options.eps, "backend": "xla"}
    if options.has_bias:
        return add_layer_norm(x, residual, scale, bias, x_bias, **static)
    return add_rms_norm(x, residual, scale, **static)


def float8_norm_linear(
    norm: NormArrays,
    weight: Weight,
    bias: Array | None,
    *,
    eps: float,
    backend: Backend,
    rotation: Rotation | None = None,
) -> tuple[Array, Array]:
    """A norm and a linear layer with the precision ``"tensor"``, with a resolved backend.

    Args:
        norm: The arrays of the norm.
        weight: Of the layer, as in :func:`jaxllm.ops.linear`.
        bias: Of the layer, or None.
        eps: That of the norm.
        backend: A resolved backend.
        rotation: How the result, a projection, is rotated; None for not at all. Then its gradient
            is rotated back as it is rounded.

    Returns:
        The result of the layer, and the new residual.
    """
    weight = checked_weight(norm.x, weight, bias, "tensor", backend)
    table, rotates = (None, None) if rotation is None else (rotation[:2], rotation.options)
    arrays = *norm, weight, bias, table, float8_counts.active_probe()
    options = _Options(norm_options(norm, eps), rotates)
    return _norm_linear(*arrays, backend=backend, options=options)


@dataclasses.dataclass(frozen=True)
class _Options:
    norm: NormOptions
    rotation: PackedRotation | None

    def rotation_by(self, table: tuple[Array, Array] | None) -> Rotation | None:
        """The rotation of the result, or None."""
        return None if table is None or self.rotation is None else Rotation(*table, self.rotation)


def norm_options(norm: NormArrays, eps: float) -> NormOptions:
    """The static options of a norm with these arrays."""
    has_residual, has_bias = norm.residual is not None, norm.bias is not None
    return NormOptions(eps, has_residual=has_residual, has_bias=has_bias)


def _without_backward(options, backend, *arrays):
    *norm, weight, bias, table, _ = arrays
    (x8,), h, _ = normalize(options.norm, backend, NormArrays(*norm), ("rows",))
    return _layer(backend, x8, weight, bias, options.rotation_by(table), h.dtype), h


def _layer(backend, x8, weight, bias, rotation, dtype):
    out, _ = product(x8, weight, "tensor", backend, dtype=dtype, bias=bias)
    return out if rotation is None else checkpoint_name(rotation.forward(backend, out), "linear")


def _forward(options, backend, *arrays):
    *norm, weight, bias, table, probe = arrays
    layouts = "rows", "transposed"
    (x8, transposed), h, saved = normalize(options.norm, backend, NormArrays(*norm), layouts)
    out = _layer(backend, x8, weight, bias, options.rotation_by(table), h.dtype)
    counts = None
    if probe is not None:
        of_weight = float8_counts.of_operand(weight, tuple(range(weight.ndim)), OPERAND_DTYPE)
        counts = float8_counts.total(float8_counts.of_rounded_operand(x8[0]), of_weight)
    return (out, h), (saved, transposed, weight, bias, table, counts)


def _backward(options, backend, residuals, dout, dh):
    saved, x8, weight, bias, table, counts = residuals
    rotation = options.rotation_by(table)
    dx, dweight, dbias, counts = tensor_gradients(backend, x8, weight, bias, counts, dout, rotation)
    of_norm = gradients(options.norm, backend, saved, dx, dh)
    return *of_norm, dweight, dbias, None, counts


def _unrounded(_):
    """The norm and the layer without rounding, which forward mode differentiates."""

    def norm_linear(static: Any, *arrays: Any) -> tuple[Array, Array]:
        *norm, weight, bias, table, _ = arrays
        x, h = unrounded(static.options.norm, NormArrays(*norm))
        out = jnp.tensordot(x, weight, 1)
        out = out if bias is None else out + bias
        rotation = static.options.rotation_by(table)
        return out if rotation is None else rotation.forward("xla", out), h

    return norm_linear


_norm_linear = with_backward(
    "float8_norm_linear",
    _forward,
    _backward,
    sharding=None,
    primal=_without_backward,
    outputs=2,
    reference=_unrounded,
)
