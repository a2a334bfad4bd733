r"""A gated MLP without biases whose GEMMs have float8 operands, with one scale for each array.

With :math:`q` the rounding with the current scale of an array, as in
:mod:`jaxllm.ops.gemm.float8_linear`, and :math:`r_s` that with the scale :math:`s`

.. math::
    (g, u) = q(x) \, q(W_1) \qquad y = r_s(silu(g) \odot u) \qquad out = y \, q(W_2)

    dy = q(dout) \, q(W_2)^T \qquad d(g, u) = r_t(swiglu'(g, u) \, dy)
    \qquad dx = d(g, u) \, q(W_1)^T

    dW_1 = q(x)^T d(g, u) \qquad dW_2 = y^T q(dout)

SwiGLU and its gradient are never in memory in more than 8 bits: a kernel reads ``g``, ``u`` and
``dy`` and writes the rounded result and its transpose. So a scale is known before its elements are.
It follows from bounds, with the maxima that the GEMMs before it return:

.. math::
    |silu(g) \, u| \le \max |g| \max |u| \qquad
    |d(g, u)| \le \max |dy| \max(1.1 \max |u|, \max |g|)

since :math:`|silu(g)| \le |g|` and :math:`|silu'| < 1.1`. A bound that is :math:`2^k` times the
maximum costs no precision, but for small elements: e4m3 keeps its 3 bits down to :math:`2^{k-14}`
of the maximum, and e5m2 its 2 bits down to :math:`2^{k-29}`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxllm.core import partition, shards
from jaxllm.core.backend import Backend
from jaxllm.core.dispatch import Direction, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.gemm import float8_counts
from jaxllm.ops.gemm.float8_operands import (
    GRADIENT_DTYPES,
    OPERAND_DTYPE,
    Float8,
    Recipe,
    checked_weight,
    input_gradient,
    product,
    quantize,
    weight_gradient,
)
from jaxllm.ops.quantization.api_float8 import FLOAT8_SWIGLU
from jaxllm.ops.rounding import scale_of

_MAX_SILU_SLOPE = 1.1  # 1.0998 at 2.4
_RECIPE: Recipe = "tensor"
_GRADIENT_DTYPE = GRADIENT_DTYPES[_RECIPE]


def float8_mlp(x: Array, gate_up: Array, down: Array, *, backend: Backend) -> Array:
    """``down(swiglu(gate_up(x)))`` with a resolved backend, and the recipe ``"tensor"``.

    Args:
        x: The rows, (..., D).
        gate_up: The weight of the gates and of what they gate, (D, 2, F).
        down: The weight (F, D_out).
        backend: A resolved backend.
    """
    gate_up = checked_weight(x, gate_up, None, _RECIPE, backend)
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], gate_up.shape[2]), x.dtype)
    down = checked_weight(hidden, down, None, _RECIPE, backend)
    return _mlp(x, gate_up, down, float8_counts.active_probe(), backend=backend)


def _without_backward(_, backend, x, gate_up_weight, down_weight, __):
    return _layers(backend, x, gate_up_weight, down_weight, ("rows",))[0]


def _forward(_, backend, x, gate_up_weight, down_weight, probe):
    layouts, weights = ("rows", "transposed"), (gate_up_weight, down_weight)
    out, saved = _layers(backend, x, *weights, layouts)
    counts = None
    if probe is not None:
        rounded = [
            float8_counts.of_operand(array, tuple(range(array.ndim)), OPERAND_DTYPE)
            for array in (x, *weights)
        ]
        hidden8: Any = saved[-1]
        counts = float8_counts.total(*rounded, float8_counts.of_rounded_operand(hidden8[0]))
    return out, (*saved, weights, counts)


def _layers(backend, x, gate_up_weight, down_weight, layouts):
    """The output, and of the gates and of the operands that are transposed what is saved."""
    of_x = ("...", "D"), x.ndim - 1, layouts
    x8, *x8_transposed = quantize(x, *of_x, OPERAND_DTYPE, _RECIPE, backend)
    gate_up, amax = product(x8, gate_up_weight, _RECIPE, backend, dtype=x.dtype, parts=2)
    hidden8, *hidden8_transposed = _swiglu(backend, gate_up, amax, layouts)
    out, _ = product(hidden8, down_weight, _RECIPE, backend, dtype=x.dtype)
    return out, (*x8_transposed, gate_up, amax, *hidden8_transposed)


def _backward(_, backend, residuals, dout):
    x8, gate_up, amax, hidden8, (gate_up_weight, down_weight), counts = residuals
    dtype, of_dout = dout.dtype, (("...", "F"), dout.ndim - 1, ("rows", "transposed"))
    dout8, transposed = quantize(dout, *of_dout, _GRADIENT_DTYPE, _RECIPE, backend)
    ddown = weight_gradient(hidden8, transposed, 2, backend, dtype=dtype)
    ddown, dout8 = lax.optimization_barrier((ddown, dout8))  # as in gradients.wgrad
    dhidden, of_dhidden = input_gradient(dout8, down_weight, _RECIPE, backend, dtype=dtype, parts=1)
    dgate_up8, transposed = _swiglu_backward(backend, gate_up, dhidden, amax, of_dhidden)
    dgate_up = weight_gradient(x8, transposed, 3, backend, dtype=dtype)
    dgate_up, dgate_up8 = lax.optimization_barrier((dgate_up, dgate_up8))
    dx, _ = input_gradient(dgate_up8, gate_up_weight, _RECIPE, backend, dtype=dtype)
    if counts is not None:
        of_dout = float8_counts.of_gradient(dout, tuple(range(dout.ndim)), _GRADIENT_DTYPE)
        of_gate_up = float8_counts.of_rounded_gradient(dgate_up8[0])
        counts = float8_counts.total(counts, of_dout, of_gate_up)
    return dx, dgate_up, ddown, counts


def _swiglu(backend, gate_up, amax, layouts) -> list[Float8]:
    layout = "both" if len(layouts) == 2 else "rows"
    scale = scale_of(amax[0] * amax[1], OPERAND_DTYPE)
    results = "... F, F ..." if layout == "both" else "... F"
    rule = ShardingRule(f"... _ F, -> {results}", "... F")
    function = shards.Function(_swiglu_shard, (backend, layout))
    values = _on_shards(function, rule, backend, gate_up, scale)
    return [(each, scale) for each in (values if layout == "both" else (values,))]


def _swiglu_shard(backend, layout, gate_up, scale):
    rows, columns = gate_up.shape[:-2], gate_up.shape[-1]
    matrix = gate_up.reshape(math.prod(rows), 2 * columns)
    arrays = matrix, scale.reshape(1)
    found = dispatch(FLOAT8_SWIGLU, Direction.FORWARD, backend, *arrays, layout=layout)
    if layout == "rows":
        return found.reshape(*rows, columns)
    return found[0].reshape(*rows, columns), found[1].reshape(columns, *rows)


def _swiglu_backward(backend, gate_up, dhidden, amax, of_dhidden) -> list[Float8]:
    slope = jnp.maximum(_MAX_SILU_SLOPE * amax[1], amax[0])
    scale = scale_of(of_dhidden[0] * slope, _GRADIENT_DTYPE)
    rule = ShardingRule("... _ F, ... F, -> ... _ F, _ F ...", "... F")
    function = shards.Function(_swiglu_backward_shard, (backend,))
    return [(each, scale) for each in _on_shards(function, rule, backend, gate_up, dhidden, scale)]


def _swiglu_backward_shard(backend, gate_up, dhidden, scale):
    rows, columns = gate_up.shape[:-2], gate_up.shape[-1]
    count = math.prod(rows)
    matrices = gate_up.reshape(count, 2 * columns), dhidden.reshape(count, columns)
    arrays = *matrices, scale.reshape(1)
    values, transposed = dispatch(FLOAT8_SWIGLU, Direction.BACKWARD, backend, *arrays)
    return values.reshape(gate_up.shape), transposed.reshape(2, columns, *rows)


def _on_shards(function, rule, backend, *arrays):
    if not partition.is_wanted(arrays):
        return function(*arrays)
    return partition.run(function, "swiglu", rule, arrays, is_opaque=backend != "xla")


def _unrounded(_):
    """The MLP of unrounded operands, which forward mode differentiates."""

    def mlp(static, x, gate_up, down, _):
        h = jnp.tensordot(x, gate_up, 1)
        hidden = jax.nn.silu(h[..., 0, :]) * h[..., 1, :]
        return jnp.dot(hidden, down)

    return mlp


_mlp = with_backward(
    "float8_mlp",
    _forward,
    _backward,
    sharding=None,
    primal=_without_backward,
    reference=_unrounded,
)
