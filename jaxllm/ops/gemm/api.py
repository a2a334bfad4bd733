"""Matrix products with what belongs to them in a network: bias, activation, residual and norm."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxllm.core import vma
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Op, dispatch
from jaxllm.ops import streams
from jaxllm.ops.checks import (
    as_float,
    check_added_norm,
    check_floating,
    check_layer,
    check_pre_norm,
    check_same_dtype,
    check_shape,
    check_way_back,
    is_certain,
)
from jaxllm.ops.gemm import cuda, pallas, reference

LINEAR = Op("linear", reference=reference, pallas=pallas, cuda=cuda)
MLP = Op("mlp", reference=reference, pallas=pallas, cuda=cuda)
LINEAR_ADD_LAYER_NORM = Op("linear_add_layer_norm", reference=reference, pallas=pallas, cuda=cuda)
PRE_NORM_MLP = Op("pre_norm_mlp", reference=reference, pallas=pallas, cuda=cuda)
MATMUL = Op("matmul", reference=reference, pallas=pallas, cuda=cuda)
MATVEC = Op("matvec", reference=reference, pallas=pallas, cuda=cuda)

_MAX_ROWS = 16  # of matvec's x


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
    r"""A matrix product, with the bias and the activation that may follow it.

    .. math::
        out = f(A B + bias)

    Sums are float32, in the CUDA kernels one chain along the depth. ``"cuda"`` and ``"pallas"``
    compute the product themselves, and those of the gradients, of any sizes, with bias and
    activation in the same kernel; ``"auto"`` leaves all of it to XLA. The gradient of ``bias`` is
    summed in a fixed order. With an activation the backward pass keeps :math:`A B`, of the size of
    the output; without one it keeps the inputs alone.

    Args:
        a: The left factor, ``(..., M, K)``, or ``(K, M)`` with ``transpose_a``; float32, bfloat16
            or float16 for the kernels.
        b: The right factor, ``(K, N)``, or ``(N, K)`` with ``transpose_b``, in the dtype of ``a``.
        bias: One offset a column of the output, in the dtype of ``a``; None for no offset.
        transpose_a: Whether ``a`` is stored turned.
        transpose_b: Whether ``b`` is stored turned.
        activation: ``"gelu"`` for the tanh form of :func:`jaxllm.ops.gelu`; None for none.
        out_dtype: The dtype of the output; None for that of ``a``.
        precision: How float32 factors are multiplied: None in float32, ``"tf32"`` rounded to TF32's
            10 bits, on tensor cores where there are any. It says nothing of other dtypes.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The product, ``(..., M, N)``.

    Raises:
        TypeError: An argument is not floating-point, or differs from ``a`` in dtype.
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
    dtype = jax.dtypes.canonicalize_dtype(a.dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"out_dtype is {dtype}; it must be a floating dtype")
    options = (
        ("transpose_a", bool(transpose_a)),
        ("transpose_b", bool(transpose_b)),
        ("activation", activation),
        ("out_dtype", dtype.name),
        ("precision", precision),
    )
    flat = a if transpose_a else a.reshape(math.prod(rows), depth)
    out: Any = _matmul(flat, b, bias, options, resolve(backend))
    return out.reshape(*rows, columns)


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

    XLA computes the products, which accumulate in float32, and the backend's kernels the
    activation, its gradient, and the gradient of ``bias``, which is summed in a fixed order and so
    repeats bit for bit; but for a large product in 16 bits that a bias and an activation follow:
    there one CUDA kernel computes all three on a Hopper GPU. With an activation the backward pass
    keeps :math:`xW`, of the size of the output; without one it keeps the inputs alone.

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
    check_layer("weight", weight, "bias", bias, x)
    _check_option("activation", activation, None, "gelu")
    return _linear(x, weight, bias, activation, resolve(backend))


def mlp(
    x: Float[Array, "*rows D"],
    up_weight: Float[Array, "D F"],
    up_bias: Float[Array, " F"],
    down_weight: Float[Array, "F D_out"],
    down_bias: Float[Array, " D_out"] | None = None,
    *,
    activation: Literal["gelu"] = "gelu",
    backend: Backend | None = None,
) -> Float[Array, "*rows D_out"]:
    r"""A multilayer perceptron with one hidden layer: two linear layers, an activation between.

    .. math::
        out = f(x W_{up} + b_{up})\, W_{down} + b_{down}

    As ``linear(linear(x, up_weight, up_bias, activation="gelu"), down_weight, down_bias)``, whose
    backends it has; but as one op it can apply the activation's slope, and add up the gradient of
    ``up_bias``, in the kernel of the product before, as it does under ``"cuda"`` for large products
    in 16 bits on a Hopper GPU. The backward pass keeps :math:`x W_{up}`, or there the activation's
    slope, and the activations, all in the dtype of ``x``.

    Args:
        x: The rows; float32, bfloat16 or float16 for the kernels.
        up_weight: The matrix to the hidden width F, ``(D, F)``, in the dtype of ``x``.
        up_bias: One offset a column of the hidden layer, in the dtype of ``x``.
        down_weight: The matrix from the hidden width, ``(F, D_out)``, in the dtype of ``x``.
        down_bias: One offset a column of the output, in the dtype of ``x``; None for no offset.
        activation: ``"gelu"``, the tanh form of :func:`jaxllm.ops.gelu`.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The rows of the output, in the dtype of ``x``.

    Raises:
        TypeError: An argument is not floating-point, or differs from ``x`` in dtype.
        ValueError: A weight is not a matrix with as many rows as what it is applied to has columns,
            a bias is not as wide as its weight, or the activation or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``matmul_forward_cublaslt`` and ``matmul_backward``, with GELU fused.
    """
    check_layer("up_weight", up_weight, "up_bias", up_bias, x)
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], up_weight.shape[1]), x.dtype)
    check_layer("down_weight", down_weight, "down_bias", down_bias, hidden, "the hidden layer")
    _check_option("activation", activation, "gelu")
    return _mlp(x, up_weight, up_bias, down_weight, down_bias, activation, resolve(backend))


def linear_add_layer_norm(
    x: Float[Array, "*rows D_in"],
    weight: Float[Array, "D_in D_out"],
    residual: Float[Array, "*rows D_out"],
    scale: Float[Array, " D_out"],
    bias: Float[Array, " D_out"] | None = None,
    x_bias: Float[Array, " D_out"] | None = None,
    *,
    eps: float = 1e-5,
    backend: Backend | None = None,
) -> tuple[Float[Array, "*rows D_out"], Float[Array, "*rows D_out"]]:
    r"""A linear layer whose result is added to the residual stream, and the norm of the sum.

    .. math::
        h = x W + x\_bias + residual \qquad out = \mathrm{layer\_norm}(h)

    As ``add_layer_norm(linear(x, weight), residual, scale, bias, x_bias)``, whose backends it has.
    As one op it can add bias and residual in the kernel of the product, before the one rounding, as
    it does under ``"cuda"`` for a large product in 16 bits on a Hopper GPU; the norm then need not
    read the residual, nor write the sum. The backward pass keeps what that of the two ops does.

    Args:
        x: The rows; float32, bfloat16 or float16 for the kernels.
        weight: The matrix, ``(in, out)``, in the dtype of ``x``.
        residual: The stream, as wide as ``weight``, in the dtype of ``x``.
        scale: The norm's factor of each column, in the dtype of ``x`` or float32.
        bias: The norm's offset of each column, in the dtype of ``scale``; None for no offset.
        x_bias: The layer's offset of each column, in the dtype of ``scale``; None for no offset.
        eps: Added to the variance.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        ``(out, h)`` in the dtype of ``x``: the normalized rows, and the new stream.

    Raises:
        TypeError: An argument is not floating-point, ``weight`` or ``residual`` differs from ``x``
            in dtype, or ``bias`` or ``x_bias`` from ``scale``.
        ValueError: ``weight`` is not a matrix with as many rows as ``x`` has columns, another
            argument does not fit the product in shape, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``matmul_forward`` and ``fused_residual_forward5``.
    """
    check_layer("weight", weight, "x_bias", None, x)
    bias = check_added_norm("weight", weight, x, residual, scale, bias=bias, x_bias=x_bias)
    arrays = (x, weight, residual, x_bias, scale, bias)
    return _linear_add_layer_norm(*arrays, as_float("eps", eps), resolve(backend))


def pre_norm_mlp(
    x: Float[Array, "*rows D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None,
    up_weight: Float[Array, "D F"],
    up_bias: Float[Array, " F"],
    down_weight: Float[Array, "F D"],
    down_bias: Float[Array, " D"] | None = None,
    *,
    activation: Literal["gelu"] = "gelu",
    eps: float = 1e-5,
    normed: streams.NormedRows | None = None,
    backend: Backend | None = None,
) -> Float[Array, "*rows D"] | tuple[Float[Array, "*rows D"], streams.NormedRows]:
    r"""The second half of a pre-norm block: the residual stream plus an MLP of its layer norm.

    .. math::
        out = x + f(n W_{up} + b_{up})\, W_{down} + b_{down} \qquad n = \mathrm{layer\_norm}(x)

    As ``x + mlp(layer_norm(x, scale, bias), up_weight, up_bias, down_weight, down_bias)``, with all
    that :func:`mlp` fuses. The norm's scale and bias are multiplied into the layer after it. As one
    op it can do more, as it does under ``"cuda"`` for large products in 16 bits on a Hopper GPU:
    the kernel of the last product adds bias and stream, before the one rounding, and with
    ``normed`` normalizes the sum; and in the backward pass the kernel of the product that
    is the gradient of the normalized rows goes on to that of :math:`x`, along the norm and along
    the stream, so that the former is never written. The backward pass keeps what those of the parts
    do, but for :math:`x`, of which it keeps the normalized rows.

    Args:
        x: The stream; float32, bfloat16 or float16 for the kernels.
        scale: The norm's factor of each column, in the dtype of ``x`` or float32.
        bias: The norm's offset of each column, in the dtype of ``scale``; None for no offset.
        up_weight: As in :func:`mlp`.
        up_bias: As in :func:`mlp`.
        down_weight: The matrix from the hidden width back to the stream's, in the dtype of ``x``.
        down_bias: As in :func:`mlp`.
        activation: As in :func:`mlp`.
        eps: Added to the variance.
        normed: What the op that made ``x`` has returned beside it, or :func:`normed_rows` of it, of
            the same ``eps``: then the op returns the like of its result too, and a kernel need not
            write the result itself, if nobody but the next op reads it. None, and ``x`` is
            normalized here.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The new stream, in the dtype of ``x``; where there is a ``normed``, a pair of it and of its
        :class:`NormedRows`. Gradients go along the stream alone.

    Raises:
        TypeError: As in :func:`mlp` and :func:`jaxllm.ops.layer_norm`, or ``normed`` is no
            :class:`NormedRows`, or differs from ``x`` in dtype.
        ValueError: As in :func:`mlp` and :func:`jaxllm.ops.layer_norm`, ``down_weight`` has not as
            many columns as ``x``, or ``normed`` is not of the shape of ``x``.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``layernorm_forward``, ``matmul_forward_cublaslt`` and their gradients.
    """
    check_layer("up_weight", up_weight, "up_bias", up_bias, x)
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], up_weight.shape[1]), x.dtype)
    check_layer("down_weight", down_weight, "down_bias", down_bias, hidden, "the hidden layer")
    check_way_back("down_weight", down_weight, x)
    bias = check_pre_norm(x, scale, "bias", bias)
    streams.check_normed(normed, x)
    _check_option("activation", activation, "gelu")
    arrays = (x, normed, scale, bias, up_weight, up_bias, down_weight, down_bias)
    out, next_normed = _pre_norm_mlp(*arrays, activation, as_float("eps", eps), resolve(backend))
    return out if normed is None else (out, next_normed)


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
    if x.ndim != 2 or is_certain(lambda: not 1 <= x.shape[0] <= _MAX_ROWS):
        raise ValueError(
            f"x has shape {x.shape}; it must be (K,), or (R, K) with R from 1 to {_MAX_ROWS}"
        )
    return dispatch(MATVEC, "", resolve(backend), w, x)


def _check_option(name: str, value: object, *known: object) -> None:
    if value not in known:
        wanted = " or ".join(map(repr, known))
        raise ValueError(f"{name} is {value!r}; it must be {wanted}")


@functools.partial(vma.custom_vjp, nondiff_argnums=(3, 4))
def _matmul(a, b, bias, options, backend):
    return _matmul_forward(a, b, bias, options, backend)[0]


def _matmul_forward(a, b, bias, options, backend):
    outputs = dispatch(MATMUL, "forward", backend, a, b, bias, **dict(options))
    out, h = checkpoint_name(outputs, "matmul")
    return out, (a, b, bias, h)


def _matmul_backward(options, backend, residuals, dout):
    return dispatch(MATMUL, "backward", backend, *residuals, dout, **dict(options))


_matmul.defvjp(_matmul_forward, _matmul_backward)


@functools.partial(vma.custom_vjp, nondiff_argnums=(3, 4))
def _linear(x, weight, bias, activation, backend):
    return _linear_forward(x, weight, bias, activation, backend)[0]


def _linear_forward(x, weight, bias, activation, backend):
    outputs = dispatch(LINEAR, "forward", backend, x, weight, bias, activation=activation)
    out, h = checkpoint_name(outputs, "linear")
    return out, (x, weight, bias, h)


def _linear_backward(activation, backend, residuals, dout):
    return dispatch(LINEAR, "backward", backend, *residuals, dout, activation=activation)


_linear.defvjp(_linear_forward, _linear_backward)


@functools.partial(vma.custom_vjp, nondiff_argnums=(5, 6))
def _mlp(x, up_weight, up_bias, down_weight, down_bias, activation, backend):
    return _mlp_forward(x, up_weight, up_bias, down_weight, down_bias, activation, backend)[0]


def _mlp_forward(x, up_weight, up_bias, down_weight, down_bias, activation, backend):
    arrays = (x, up_weight, up_bias, down_weight, down_bias)
    outputs = dispatch(MLP, "forward", backend, *arrays, activation=activation)
    # The same name as linear's: a policy that keeps products keeps these.
    out, *kept = checkpoint_name(outputs, "linear")
    return out, (*arrays, *kept)


def _mlp_backward(activation, backend, residuals, dout):
    return dispatch(MLP, "backward", backend, *residuals, dout, activation=activation)


_mlp.defvjp(_mlp_forward, _mlp_backward)


@functools.partial(vma.custom_vjp, nondiff_argnums=(6, 7))
def _linear_add_layer_norm(x, weight, residual, x_bias, scale, bias, eps, backend):
    arrays = (x, weight, residual, x_bias, scale, bias)
    options = {"eps": eps, "statistics": False}
    return dispatch(LINEAR_ADD_LAYER_NORM, "forward", backend, *arrays, **options)[:2]


def _linear_add_layer_norm_forward(x, weight, residual, x_bias, scale, bias, eps, backend):
    arrays = (x, weight, residual, x_bias, scale, bias)
    outputs = dispatch(LINEAR_ADD_LAYER_NORM, "forward", backend, *arrays, eps=eps)
    # The same name again: a policy that keeps products makes none of it twice.
    out, total, mean, rstd = checkpoint_name(outputs, "linear")
    return (out, total), (x, weight, total, x_bias, scale, mean, rstd)


def _linear_add_layer_norm_backward(eps, backend, residuals, cotangents):
    return dispatch(LINEAR_ADD_LAYER_NORM, "backward", backend, *residuals, *cotangents)


streams.defvjp(
    _linear_add_layer_norm, _linear_add_layer_norm_forward, _linear_add_layer_norm_backward
)


@functools.partial(vma.custom_vjp, nondiff_argnums=(8, 9, 10))
def _pre_norm_mlp(
    x, normed, scale, bias, up_weight, up_bias, down_weight, down_bias, activation, eps, backend
):
    arrays = (x, normed, scale, bias, up_weight, up_bias, down_weight, down_bias)
    return _pre_norm_mlp_forward(*arrays, activation, eps, backend)[0]


def _pre_norm_mlp_forward(
    x, normed, scale, bias, up_weight, up_bias, down_weight, down_bias, activation, eps, backend
):
    of_up = (scale, bias, up_weight, up_bias)
    arrays = (x, normed, *of_up, down_weight, down_bias)
    options = {"activation": activation, "eps": eps}
    outputs = dispatch(PRE_NORM_MLP, "forward", backend, *arrays, **options)
    # The same name again: a policy that keeps products makes none of it twice.
    out, next_normed, rows, rstd, *kept = checkpoint_name(outputs, "linear")
    if next_normed is not None:
        next_normed = streams.NormedRows(*next_normed)
    return (out, next_normed), ((rows, rstd, *of_up, down_weight, *kept), down_bias)


def _pre_norm_mlp_backward(activation, eps, backend, residuals, cotangents):
    del eps
    dout, _ = cotangents
    arrays, down_bias = residuals
    gradients = dispatch(PRE_NORM_MLP, "backward", backend, *arrays, dout, activation=activation)
    dx, *others, ddown_bias = gradients
    return dx, None, *others, None if down_bias is None else ddown_bias


_pre_norm_mlp.defvjp(
    _pre_norm_mlp_forward,
    _pre_norm_mlp_backward,
    definition=streams.without_normed,
)
