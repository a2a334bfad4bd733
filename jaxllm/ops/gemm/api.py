"""Matrix products with what belongs to them in a network: bias and activation."""

from __future__ import annotations

import functools
from typing import Literal

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxllm.backend import Backend, resolve
from jaxllm.dispatch import Op, dispatch
from jaxllm.ops.checks import check_floating, check_same_dtype, check_shape
from jaxllm.ops.gemm import cuda, pallas, reference

LINEAR = Op("linear", reference=reference, pallas=pallas, cuda=cuda)
MATVEC = Op("matvec", reference=reference, pallas=pallas, cuda=cuda)

_MAX_ROWS = 16  # of matvec's x


def linear(
    x: Float[Array, "*rows D_in"],
    weight: Float[Array, "D_in D_out"],
    bias: Float[Array, " D_out"] | None = None,
    *,
    activation: Literal["gelu"] | None = None,
    backend: Backend | None = None,
) -> Float[Array, "*rows D_out"]:
    r"""A linear layer: a matrix product, a bias, and the activation after them.

    .. math::
        out = f(x W + b)

    XLA computes the products under every backend, and they accumulate in float32; the backend's
    kernels compute the activation, its gradient, and the gradient of ``bias``, which is summed in a
    fixed order and so repeats bit for bit. With an activation the backward pass keeps :math:`xW`,
    of the size of the output; without one it keeps the inputs alone.

    Args:
        x: The rows; float32, bfloat16 or float16 for the kernels.
        weight: The matrix, ``(in, out)``, in the dtype of ``x``.
        bias: One offset a column of the output, in the dtype of ``x``; None for no offset.
        activation: ``"gelu"`` for the tanh form of :func:`jaxllm.ops.gelu`; None for none.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The rows of the output, in the dtype of ``x``.

    Raises:
        TypeError: An argument is not floating-point, or differs from ``x`` in dtype.
        ValueError: ``weight`` is not a matrix with as many rows as ``x`` has columns, ``bias`` is
            not as wide as ``weight``, or the activation or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``matmul_forward`` and ``matmul_backward``.

    Example:
        >>> x = jnp.ones((8, 768), jnp.bfloat16)
        >>> weight, bias = jnp.ones((768, 3072), jnp.bfloat16), jnp.zeros(3072, jnp.bfloat16)
        >>> out = jaxllm.ops.linear(x, weight, bias, activation="gelu")
    """
    check_floating(x=x, weight=weight)
    if x.ndim == 0:
        raise ValueError("x has shape (); it must have a last axis to multiply along")
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"weight has shape {weight.shape}; it must be ({x.shape[-1]}, D_out), with as many "
            f"rows as x {x.shape} has columns"
        )
    check_same_dtype("weight", weight, "x", x)
    if bias is not None:
        check_floating(bias=bias)
        check_shape("bias", bias, weight.shape[1:], f"the columns of weight {weight.shape}")
        check_same_dtype("bias", bias, "x", x)
    if activation not in (None, "gelu"):
        raise ValueError(f"activation is {activation!r}; it must be None or 'gelu'")
    return _linear(x, weight, bias, activation, resolve(backend))


def matvec(
    w: Float[Array, "M K"], x: Float[Array, "*R K"], *, backend: Backend | None = None
) -> Float[Array, "*R M"]:
    r"""The product of a matrix and a few rows, which reads the matrix once.

    .. math::
        out_m = \sum_k w_{mk} x_k

    The sums are float32. For inference alone: there is no derivative.

    Args:
        w: The matrix, ``(out, in)``, in the dtype of ``x``.
        x: One row, or 1 to 16; float32, bfloat16 or float16 for the kernels.
        backend: As in :func:`linear`.

    Returns:
        The products, in the dtype of ``x``.

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
    if x.ndim != 2 or not 1 <= x.shape[0] <= _MAX_ROWS:
        raise ValueError(
            f"x has shape {x.shape}; it must be (K,), or (R, K) with R from 1 to {_MAX_ROWS}"
        )
    return dispatch(MATVEC, "", resolve(backend), w, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _linear(x, weight, bias, activation, backend):
    return _linear_forward(x, weight, bias, activation, backend)[0]


def _linear_forward(x, weight, bias, activation, backend):
    outputs = dispatch(LINEAR, "forward", backend, x, weight, bias, activation=activation)
    out, h = checkpoint_name(outputs, "linear")
    return out, (x, weight, bias, h)


def _linear_backward(activation, backend, residuals, dout):
    return dispatch(LINEAR, "backward", backend, *residuals, dout, activation=activation)


_linear.defvjp(_linear_forward, _linear_backward)
