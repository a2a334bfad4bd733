r"""A linear layer whose forward and dgrad GEMMs have float8 operands.

The recipe ``"row"``, with :math:`q_k` the rounding to float8_e4m3fn with one current scale for all
elements along the index :math:`k`:

.. math::
    h_{mn} = \sum_k q_k(x)_{mk} \, q_k(W)_{kn} \qquad out = f(h + b)

    dx_{mk} = \sum_n q_n(dh)_{mn} \, q_n(W)_{kn} \qquad dW = x^T dh \qquad db = \sum_m dh_{mn}

The scales are those of the operands themselves, so no state is kept between steps. ``h`` and ``dx``
are rounded once to the dtype of ``x``. ``dW`` and ``db`` are those of the linear layer without
float8, with unrounded operands. Every gradient passes the rounding as through the identity.

The scales are computed before the GEMM runs on shards: their maxima are over whole rows, also where
these are sharded.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

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

# For gradients too: their elements have 3 bits after the leading one, where float8_e5m2 has 2. One
# scale per row covers their range. Elements below 2^-18 of the largest of their row become 0.
_DTYPE = jnp.float8_e4m3fn


def float8_linear(
    x: Array, weight: Weight, bias: Array | None, *, activation: str | None, backend: Backend
) -> Array:
    """``linear(..., precision="row")``, with a resolved backend."""
    if isinstance(weight, Quantized):
        raise ValueError("precision is 'row'; it must be None with a Quantized weight")
    weight = weight.array.T if isinstance(weight, Transposed) else weight
    check_layer("weight", weight, "bias", bias, x, in_parts=True)
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"x has dtype {x.dtype}; with precision 'row' it must be float32, bfloat16 or float16"
        )
    gpu = ffi.device()
    if gpu is not None and gpu.capability < 89 and backend != "xla":
        raise BackendError(
            f"backend {backend!r} cannot serve linear with precision 'row': this GPU, "
            f"sm_{gpu.capability}, has no float8 tensor cores (sm_89 or later); leave precision "
            "out, or use backend 'xla', which multiplies the rounded values in float16 there"
        )
    options = LinearOptions(activation, weight.ndim)
    h = _product(x, weight, backend=backend, options=options)
    if activation is None and bias is None:
        return h
    return _epilogue(h, bias, backend=backend, options=options)


def _product_forward(options, backend, x, weight):
    columns = options.columns
    rule = ShardingRule(f"... D', {columns} D, ..., {columns} -> ... {columns} +D", "... D F")
    # K-major: a weight is stored by its inputs, and XLA fuses the transpose with the rounding.
    out = _multiply(rule, backend, x, jnp.moveaxis(weight, 0, -1), x.ndim - 1, weight.ndim - 1)
    return checkpoint_name(out, "linear"), (x, weight)


def _product_backward(options, backend, residuals, dout):
    x, weight = residuals
    columns = options.columns
    # The weight gradient's own rule shards it. XLA removes the GEMMs whose results are not used.
    plain = LinearOptions(None, weight.ndim)
    _, pull = jax.vjp(lambda w: linear(x, w, None, backend=backend, options=plain), weight)
    dweight, dout = lax.optimization_barrier((*pull(dout), dout))  # as in gradients.wgrad
    rule = ShardingRule(f"... {columns}, D {columns}, ..., D -> ... D +F", "... D F")
    return _multiply(rule, backend, dout, weight, x.ndim - 1, 1), dweight


def _multiply(rule: ShardingRule, backend: Backend, a: Array, b: Array, rows: int, columns: int):
    """The product of ``a`` and ``b``, rounded over the axes after ``rows`` and ``columns``."""
    a8, scale_a = quantize_over(a, _DTYPE, tuple(range(rows, a.ndim)))
    b8, scale_b = quantize_over(b, _DTYPE, tuple(range(columns, b.ndim)))
    function = shards.Function(_multiply_rows, (backend, a.dtype.name))
    arrays = (a8, b8, scale_a, scale_b)
    if not partition.is_wanted(arrays):
        return function(*arrays)
    return partition.run(function, "linear", rule, arrays, is_opaque=backend != "xla")


def _multiply_rows(backend, dtype, a, b, scale_a, scale_b):
    rows, columns = scale_a.shape, scale_b.shape
    depth = math.prod(a.shape[len(rows) :])
    a, b = a.reshape(math.prod(rows), depth), b.reshape(math.prod(columns), depth)
    scales = scale_a.ravel(), scale_b.ravel()
    out = float8_matmul(a, b, *scales, out_dtype=dtype, backend=backend)
    return out.reshape(*rows, *columns)


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
