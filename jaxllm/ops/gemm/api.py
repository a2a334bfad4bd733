"""Linear layers and matrix multiplication."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.activation.api import gelu
from jaxllm.ops.checks import (
    as_bool,
    as_floating_dtype,
    check_floating,
    check_layer,
    check_same_dtype,
    check_shape,
    is_certain,
)
from jaxllm.ops.gemm import cuda, pallas, reference
from jaxllm.ops.gemm.float8_linear import float8_linear
from jaxllm.ops.gemm.float8_operands import RECIPES, Recipe
from jaxllm.ops.gemm.linear import LinearOptions, activation_backward
from jaxllm.ops.gemm.linear import linear as _linear
from jaxllm.ops.quantization.api import quantized_matmul, quantized_matvec
from jaxllm.ops.weights import Quantized, Transposed, Weight

MATMUL = Op(
    "matmul",
    reference=reference,
    pallas=pallas,
    cuda=cuda,
    # cuBLAS picks the fastest of many kernels for each shape: see benchmarks/results.
    preference=("xla", "cuda", "pallas"),
)
MATVEC = Op(
    "matvec",
    reference=reference,
    pallas=pallas,
    cuda=cuda,
    sharding=ShardingRule("M K', R K' -> R M +K", "M R K"),
)

FEW_ROWS = 16  # the most for which matvec reads its matrix once


def matmul(
    a: Float[Array, "*rows K"],
    b: Float[Array, "K N"],
    bias: Float[Array, " N"] | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    activation: Literal["gelu"] | None = None,
    out_dtype: DTypeLike | None = None,
    precision: Literal["tf32"] | None = None,
    backend: Backend | None = None,
) -> Float[Array, "*rows N"]:
    r"""A matrix product, with an optional bias and activation in its epilogue.

    .. math::
        out = f(A B + bias)

    Accumulation is float32. ``"cuda"`` and ``"pallas"`` run GEMM kernels of their own, for the
    output and for the gradients, of any sizes. ``"auto"`` leaves the GEMMs to XLA. The gradient of
    ``bias`` is summed in a fixed order. With an activation the backward pass keeps :math:`A B`, of
    the size of the output; without one it keeps only the inputs.

    Args:
        a: The left factor, ``(..., M, K)``, or ``(K, M)`` with ``transpose_a``; float32, bfloat16
            or float16 for the kernels.
        b: The right factor, ``(K, N)``, or ``(N, K)`` with ``transpose_b``, in the dtype of ``a``.
        bias: One offset a column of the output, in the dtype of ``a``; None for no offset.
        transpose_a: Whether ``a`` is stored transposed.
        transpose_b: Whether ``b`` is stored transposed.
        activation: ``"gelu"`` for the tanh form of :func:`jaxllm.ops.gelu`; None for none.
        out_dtype: The dtype of the output; None for that of ``a``.
        precision: How float32 factors are multiplied: None in float32, ``"tf32"`` rounded to TF32's
            10 bits, on tensor cores where there are any. It has no effect on other dtypes.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The product, ``(..., M, N)``.

    Raises:
        TypeError: An argument is not floating-point, or differs from ``a`` in dtype,
            ``transpose_a`` or ``transpose_b`` is no bool that is known while the program is traced,
            or ``out_dtype`` is no floating dtype of 16 bits or more.
        ValueError: The factors do not fit together, ``bias`` is not as wide as the output, or the
            activation, the precision or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``matmul_forward_kernel4``; CUDA-Learn-Notes' ``sgemm`` and ``hgemm``.

    Example:
        >>> a, b = jnp.ones((8, 768), jnp.bfloat16), jnp.ones((3072, 768), jnp.bfloat16)
        >>> out = jaxllm.ops.matmul(a, b, transpose_b=True, out_dtype=jnp.float32)
    """
    check_floating(a=a, b=b)
    check_same_dtype("b", b, "a", a)
    transpose_a = as_bool("transpose_a", transpose_a)
    transpose_b = as_bool("transpose_b", transpose_b)
    if a.ndim == 0 or (transpose_a and a.ndim != 2):
        wanted = "(K, M), as transpose_a says" if transpose_a else "(..., K)"
        raise ValueError(f"a has shape {a.shape}; it must be {wanted}")
    *rows, depth = a.shape[::-1] if transpose_a else a.shape
    if b.ndim != 2 or b.shape[1 if transpose_b else 0] != depth:
        wanted = f"(N, {depth}), as transpose_b says," if transpose_b else f"({depth}, N)"
        raise ValueError(
            f"b has shape {b.shape}; it must be {wanted} to be multiplied by a {a.shape}"
        )
    columns = b.shape[0 if transpose_b else 1]
    if bias is not None:
        check_floating(bias=bias)
        check_shape("bias", bias, (columns,), f"the columns of the product of a and b {b.shape}")
        check_same_dtype("bias", bias, "a", a)
    _check_option("activation", activation, None, "gelu")
    _check_option("precision", precision, None, "tf32")
    dtype = as_floating_dtype("out_dtype", a.dtype if out_dtype is None else out_dtype)
    options = _MatmulOptions(transpose_a, transpose_b, activation, dtype.name, precision)
    flat = a if transpose_a else a.reshape(math.prod(rows), depth)
    out = _matmul(flat, b, bias, backend=resolve(backend), options=options)
    return out.reshape(*rows, columns)


def linear(
    x: Float[Array, "*rows D_in"],
    weight: Weight,
    bias: Float[Array, " D_out"] | None = None,
    *,
    activation: Literal["gelu"] | None = None,
    precision: Recipe | None = None,
    backend: Backend | None = None,
) -> Float[Array, "*rows D_out"]:
    r"""A linear layer: a matrix product, a bias, and an activation.

    .. math::
        out = f(x W + b)

    The GEMM is XLA's, with float32 accumulation, and the backend has the kernels of the activation,
    of its gradient, and of the gradient of ``bias``, which is summed in a fixed order. On a Hopper
    GPU one CUDA kernel does a large GEMM in 16 bits with its bias and activation. With an
    activation the backward pass keeps :math:`xW`, of the size of the output; without one it keeps
    only the inputs.

    A :class:`Transposed` or :class:`Quantized` weight is for inference and has no derivative. For
    up to 16 rows a kernel reads it once (:func:`matvec`, :func:`quantized_matvec`).

    With a ``precision`` GEMMs have float8 operands, by :func:`float8_matmul`, with current scales.
    With ``"row"`` these are the GEMMs of :math:`xW` and of the gradient of ``x``. Each row of the
    left operand and each column of the right one has a scale, and is rounded to float8_e4m3fn: each
    element is off by at most :math:`2^{-4}` of its magnitude, or by :math:`2^{-10}` times its scale
    where that is more. With ``"tensor"`` it is the GEMM of the gradient of ``weight`` too, with one
    scale for each array. The gradient of the output is rounded to float8_e5m2, and is off by at
    most :math:`2^{-3}` of its magnitude, or by :math:`2^{-17}` times the scale; the other operands
    are rounded to float8_e4m3fn. Products are rounded once to the dtype of ``x``: with ``bias``, or
    with an activation before both. The gradient of ``bias`` has unrounded operands. Float8 tensor
    cores are in GPUs from sm_89 on.

    Args:
        x: The rows; float32, bfloat16 or float16 for the kernels.
        weight: The matrix, ``(in, out)``, in the dtype of ``x``; or a :class:`Transposed` or
            :class:`Quantized` of ``(out, in)``. Columns in parts, ``(in, parts, columns)`` or
            ``(in, parts, heads, width)``, may be sharded along each part's columns or heads; the
            output then has these dimensions.
        bias: One offset a column of the output, in the dtype of ``x``; None for no offset.
        activation: ``"gelu"`` for the tanh form of :func:`jaxllm.ops.gelu`; None for none.
        precision: ``"row"`` for float8 operands with one scale per row, ``"tensor"`` with one per
            array; None for the dtype of ``x``.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.
            ``"pallas"`` has no float8 GEMM.

    Returns:
        The rows of the output, in the dtype of ``x``.

    Raises:
        TypeError: An argument is not floating-point, or differs from ``x`` in dtype; or ``x`` is
            not float32, bfloat16 or float16 and ``precision`` is not None.
        ValueError: ``weight`` is not a matrix with as many rows as ``x`` has columns, ``bias`` is
            not as wide as ``weight``, or the activation, the precision or the backend is unknown.
            ``precision`` is not None and ``weight`` is a :class:`Quantized`.
        BackendError: The backend that was asked for cannot serve the call, or ``precision`` is not
            None and the GPU has no float8 tensor cores, or the gradient is differentiated.

    Source: llm.c's ``matmul_forward`` and ``matmul_backward``.

    Example:
        >>> x = jnp.ones((8, 768), jnp.bfloat16)
        >>> weight, bias = jnp.ones((768, 3072), jnp.bfloat16), jnp.zeros(3072, jnp.bfloat16)
        >>> out = jaxllm.ops.linear(x, weight, bias, activation="gelu")
    """
    _check_option("activation", activation, None, "gelu")
    _check_option("precision", precision, None, *RECIPES)
    if precision is not None:
        static = {"activation": activation, "recipe": precision, "backend": resolve(backend)}
        return float8_linear(x, weight, bias, **static)
    if isinstance(weight, Transposed | Quantized):
        return _inference_linear(x, weight, bias, activation, backend)
    check_layer("weight", weight, "bias", bias, x, in_parts=True)
    options = LinearOptions(activation, weight.ndim)
    return _linear(x, weight, bias, backend=resolve(backend), options=options)


def matvec(
    w: Float[Array, "M K"], x: Float[Array, "*R K"], *, backend: Backend | None = None
) -> Float[Array, "*R M"]:
    r"""A matrix times a few rows: reads the matrix once.

    .. math::
        out_m = \sum_k w_{mk} x_k

    The sums are float32. For inference: it has no derivative.

    Args:
        w: The matrix, ``(out, in)``, in the dtype of ``x``.
        x: One row, or 1 to 16; float32, bfloat16 or float16 for the kernels.
        backend: As in :func:`linear`.

    Returns:
        The result, in the dtype of ``x``.

    Raises:
        TypeError: An argument is not floating-point, or ``w`` differs from ``x`` in dtype.
        ValueError: ``w`` is not a matrix as wide as ``x``, ``x`` has no row or more than 16, or the
            backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: CUDA-Learn-Notes' ``sgemv``; KuiperLLama's ``matmul_kernel_cu_fp32``.

    Example:
        >>> jaxllm.ops.matvec(jnp.arange(1.0, 10.0).reshape(3, 3), jnp.array([1.0, 1.0, -1.0]))
        Array([0., 3., 6.], dtype=float32)
    """
    check_floating(w=w, x=x)
    check_same_dtype("w", w, "x", x)
    if w.ndim != 2 or x.ndim == 0 or w.shape[1] != x.shape[-1]:
        raise ValueError(
            f"w has shape {w.shape}; it must be (M, K) with rows as wide as x {x.shape}"
        )
    if x.ndim == 1:
        return matvec(w, x[None], backend=backend)[0]
    if x.ndim != 2 or is_certain(lambda: not 1 <= x.shape[0] <= FEW_ROWS):
        raise ValueError(
            f"x has shape {x.shape}; it must be (K,), or (R, K) with R from 1 to {FEW_ROWS}"
        )
    return dispatch(MATVEC, Direction.INFERENCE, resolve(backend), w, x)


def _inference_linear(
    x: Array,
    weight: Transposed | Quantized,
    bias: Array | None,
    activation: str | None,
    backend: Backend | None,
) -> Array:
    check_floating(x=x)
    if x.ndim == 0:
        raise ValueError("x has shape (); it must have a last axis to multiply along")
    if bias is not None:
        matrix = weight.q if isinstance(weight, Quantized) else weight.array
        check_floating(bias=bias)
        check_shape("bias", bias, matrix.shape[:1], f"the rows of weight {matrix.shape}")
        check_same_dtype("bias", bias, "x", x)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    few = is_certain(lambda: 1 <= rows.shape[0] <= FEW_ROWS)
    if isinstance(weight, Quantized):
        product = quantized_matvec if few else quantized_matmul
        out = product(weight.q, weight.scales, rows, backend=backend)
    elif few:
        out = matvec(weight.array, rows, backend=backend)
    else:
        out = linear(rows, weight.array.T, backend=backend)
    if bias is not None:
        out = out + bias[None, :]
    if activation is not None:
        out = gelu(out, backend=backend)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _check_option(name: str, value: object, *known: object) -> None:
    if value not in known:
        wanted = " or ".join(map(repr, known))
        raise ValueError(f"{name} is {value!r}; it must be {wanted}")


@dataclasses.dataclass(frozen=True)
class _MatmulOptions:
    transpose_a: bool
    transpose_b: bool
    activation: str | None
    out_dtype: str
    precision: str | None


def _matmul_forward(options, backend, a, b, bias):
    static = dataclasses.asdict(options)
    outputs = dispatch(MATMUL, Direction.FORWARD, backend, a, b, bias, **static)
    out, h = checkpoint_name(outputs, "matmul")
    return out, (a, b, bias, h)


def _matmul_backward(options, backend, residuals, dout):
    """With A and B after transposition: :math:`dA = dh B^T` and :math:`dB = A^T dh`.

    The gradient of an operand that is stored transposed is the transpose: its GEMM's operands swap.
    """
    a, b, bias, h = residuals
    dh, dbias = activation_backward(backend, options.activation, h, bias, dout)
    dh = dh.astype(a.dtype)
    dbias = None if dbias is None else dbias.astype(bias.dtype)

    def multiply(x, y, transpose_x, transpose_y):
        static = {"transpose_a": transpose_x, "transpose_b": transpose_y, "activation": None}
        static |= {"out_dtype": a.dtype.name, "precision": options.precision}
        return dispatch(MATMUL, Direction.FORWARD, backend, x, y, None, **static)[0]

    ta, tb = options.transpose_a, options.transpose_b
    da = multiply(b, dh, tb, True) if ta else multiply(dh, b, False, not tb)
    db = multiply(dh, a, True, ta) if tb else multiply(a, dh, not ta, False)
    return da, db, dbias


def _matmul_sharding(options: _MatmulOptions) -> ShardingRule:
    a = "K' M" if options.transpose_a else "M K'"
    b = "N K" if options.transpose_b else "K N"
    return ShardingRule(f"{a}, {b}, N' -> M N; ?M N", "M N")


_matmul = with_backward("matmul", _matmul_forward, _matmul_backward, sharding=_matmul_sharding)
