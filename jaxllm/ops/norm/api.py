"""Layer and RMS normalization, alone and fused with the residual addition before them."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxllm.core import vma
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Op, dispatch
from jaxllm.ops import streams
from jaxllm.ops.checks import as_float, check_floating, check_same_dtype, check_shape
from jaxllm.ops.norm import cuda, pallas, reference

LAYER_NORM = Op("layer_norm", reference=reference, pallas=pallas, cuda=cuda)
RMS_NORM = Op("rms_norm", reference=reference, pallas=pallas, cuda=cuda)
ADD_LAYER_NORM = Op("add_layer_norm", reference=reference, pallas=pallas, cuda=cuda)
ADD_RMS_NORM = Op("add_rms_norm", reference=reference, pallas=pallas, cuda=cuda)


def layer_norm(
    x: Float[Array, "*rows D"],
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-5,
    backend: Backend | None = None,
) -> Float[Array, "*rows D"]:
    r"""Normalizes each row to zero mean and unit variance, then scales and shifts it.

    .. math::
        out = \frac{x - \overline{x}}{\sqrt{\overline{(x - \overline{x})^2} + \epsilon}}
              \cdot scale + bias

    Mean and variance are two-pass and float32 whatever the dtype of ``x``. The gradients of
    ``scale`` and ``bias`` are summed in a fixed order, so they repeat bit for bit.

    Args:
        x: The rows; float32, bfloat16 or float16 for the kernels.
        scale: One factor a column, in the dtype of ``x`` or float32.
        bias: One offset a column, in the dtype of ``scale``; None for no offset.
        eps: Added to the variance.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The normalized rows, in the shape and dtype of ``x``.

    Raises:
        TypeError: An argument is not floating-point, or ``bias`` differs from ``scale`` in dtype.
        ValueError: ``scale`` or ``bias`` is not as wide as ``x``, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450); llm.c's
    ``layernorm_forward`` and ``layernorm_backward``.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (8, 768), jnp.bfloat16)
        >>> out = jaxllm.ops.layer_norm(x, jnp.ones(768), jnp.zeros(768))
    """
    bias = _check_weights(x, scale, bias)
    return _layer_norm(x, scale, bias, as_float("eps", eps), resolve(backend))


def normed_rows(
    x: Float[Array, "*rows D"], *, eps: float = 1e-5, backend: Backend | None = None
) -> streams.NormedRows:
    """Normalizes the stream that a stack of pre-norm blocks begins with.

    Args:
        x: The stream; float32, bfloat16 or float16 for the kernels.
        eps: As in :func:`layer_norm`.
        backend: As in :func:`layer_norm`.

    Returns:
        What :func:`jaxllm.ops.pre_norm_self_attention` and :func:`jaxllm.ops.pre_norm_mlp` take as
        ``normed``. Those ops give it no gradient: theirs go along ``x``.

    Raises:
        TypeError: ``x`` is not floating-point.
        ValueError: ``x`` is a scalar, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.
    """
    check_floating(x=x)
    if x.ndim == 0:
        raise ValueError("x has shape (); it must have a last axis to normalize over")
    backend = resolve(backend)
    if backend != "xla":  # kernels have no derivative; a second derivative goes along the rows too
        x = lax.stop_gradient(x)
    return normalize(x, as_float("eps", eps), backend)


def normalize(x: Array, eps: float, backend: Backend) -> streams.NormedRows:
    """The rows of ``x`` normalized, without scale and bias, by a resolved backend."""
    ones = jnp.ones(x.shape[-1:], x.dtype)
    arrays = (x, ones, jnp.zeros_like(ones))
    return streams.NormedRows(*dispatch(LAYER_NORM, "forward", backend, *arrays, eps=eps))


def rms_norm(
    x: Float[Array, "*rows D"],
    scale: Float[Array, " D"],
    *,
    eps: float = 1e-5,
    backend: Backend | None = None,
) -> Float[Array, "*rows D"]:
    r"""Divides each row by its root mean square, then scales it.

    .. math::
        out = \frac{x}{\sqrt{\overline{x^2} + \epsilon}} \cdot scale

    Args:
        x: The rows; float32, bfloat16 or float16 for the kernels.
        scale: One factor a column, in the dtype of ``x`` or float32.
        eps: Added to the mean square.
        backend: As in :func:`layer_norm`.

    Returns:
        The normalized rows, in the shape and dtype of ``x``.

    Raises:
        TypeError: An argument is not floating-point.
        ValueError: ``scale`` is not as wide as ``x``, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467);
    llama3.cuda's ``rmsnorm``.
    """
    _check_weights(x, scale, None)
    return _rms_norm(x, scale, as_float("eps", eps), resolve(backend))


def add_layer_norm(
    x: Float[Array, "*rows D"],
    residual: Float[Array, "*rows D"] | None,
    scale: Float[Array, " D"],
    bias: Float[Array, " D"] | None = None,
    x_bias: Float[Array, " D"] | None = None,
    *,
    eps: float = 1e-5,
    backend: Backend | None = None,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """Adds a branch to the residual stream and normalizes the sum, in one pass over memory.

    A branch that ends in a linear layer may leave that layer's bias to this op, as ``x_bias``: its
    gradient is a sum over rows that the backward pass has in hand, and costs no pass of its own.

    Args:
        x: What a block computed.
        residual: The stream it is added to, in the shape and dtype of ``x``; None where the stream
            begins with ``x``. Nothing is added then, but the gradient along the stream is.
        scale: As in :func:`layer_norm`.
        bias: As in :func:`layer_norm`.
        x_bias: What to add to each row of ``x``, in the dtype of ``scale``; None for nothing.
        eps: As in :func:`layer_norm`.
        backend: As in :func:`layer_norm`.

    Returns:
        ``(layer_norm(h, scale, bias), h)`` where ``h = x + x_bias + residual``, rounded once, is
        the new stream. The backward pass folds the gradient that arrives along ``h`` into the one
        through the norm.

    Raises:
        TypeError: As in :func:`layer_norm`, or ``residual`` differs from ``x`` in dtype.
        ValueError: As in :func:`layer_norm`, ``residual`` differs from ``x`` in shape, or there is
            an ``x_bias`` and no ``residual``.
        BackendError: The backend that was asked for cannot serve the call.
    """
    bias = _check_weights(x, scale, bias)
    _check_residual(x, residual)
    if x_bias is not None:
        _check_bias("x_bias", x_bias, x, scale)
        if residual is None:
            raise ValueError("x_bias is given and residual is None; it is added with a residual")
    if residual is None:
        return _first_layer_norm(x, scale, bias, as_float("eps", eps), resolve(backend))
    return _add_layer_norm(x, residual, x_bias, scale, bias, as_float("eps", eps), resolve(backend))


def add_rms_norm(
    x: Float[Array, "*rows D"],
    residual: Float[Array, "*rows D"] | None,
    scale: Float[Array, " D"],
    *,
    eps: float = 1e-5,
    backend: Backend | None = None,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """Adds a branch to the residual stream and RMS-normalizes the sum, in one pass over memory.

    Args:
        x: What a block computed.
        residual: As in :func:`add_layer_norm`.
        scale: As in :func:`rms_norm`.
        eps: As in :func:`rms_norm`.
        backend: As in :func:`layer_norm`.

    Returns:
        ``(rms_norm(h, scale), h)`` where ``h = x + residual`` is the new stream.

    Raises:
        TypeError: As in :func:`rms_norm`, or ``residual`` differs from ``x`` in dtype.
        ValueError: As in :func:`rms_norm`, or ``residual`` differs from ``x`` in shape.
        BackendError: The backend that was asked for cannot serve the call.
    """
    _check_weights(x, scale, None)
    _check_residual(x, residual)
    if residual is None:
        return _first_rms_norm(x, scale, as_float("eps", eps), resolve(backend))
    return _add_rms_norm(x, residual, scale, as_float("eps", eps), resolve(backend))


def _check_weights(x: Array, scale: Array, bias: Array | None) -> Array:
    """Checks the arguments that all norms share; returns the bias, zeros where there is none."""
    check_floating(x=x, scale=scale)
    if x.ndim == 0:
        raise ValueError("x has shape (); it must have a last axis to normalize over")
    check_shape("scale", scale, x.shape[-1:], f"the last axis of x {x.shape}")
    if bias is None:
        return jnp.zeros_like(scale)
    _check_bias("bias", bias, x, scale)
    return bias


def _check_bias(name: str, bias: Array, x: Array, scale: Array) -> None:
    check_floating(**{name: bias})
    check_shape(name, bias, x.shape[-1:], f"the last axis of x {x.shape}")
    check_same_dtype(name, bias, "scale", scale)


def _check_residual(x: Array, residual: Array | None) -> None:
    if residual is None:
        return
    check_floating(residual=residual)
    check_shape("residual", residual, x.shape, "the shape of x")
    check_same_dtype("residual", residual, "x", x)


# Outputs and residuals carry the op's name, so that a remat policy such as
# jax.checkpoint_policies.save_only_these_names("layer_norm") keeps them and no kernel runs twice.
# Without a backward nobody asks for the rows' statistics, and they are not written.


@functools.partial(vma.custom_vjp, nondiff_argnums=(3, 4))
def _layer_norm(x, scale, bias, eps, backend):
    arrays = (x, scale, bias)
    return dispatch(LAYER_NORM, "forward", backend, *arrays, eps=eps, statistics=False)[0]


def _layer_norm_forward(x, scale, bias, eps, backend):
    outputs = dispatch(LAYER_NORM, "forward", backend, x, scale, bias, eps=eps)
    out, mean, rstd = checkpoint_name(outputs, "layer_norm")
    return out, (x, scale, mean, rstd)


def _layer_norm_backward(eps, backend, residuals, dout):
    return dispatch(LAYER_NORM, "backward", backend, *residuals, dout)


@functools.partial(vma.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(x, scale, eps, backend):
    return dispatch(RMS_NORM, "forward", backend, x, scale, eps=eps, statistics=False)[0]


def _rms_norm_forward(x, scale, eps, backend):
    outputs = dispatch(RMS_NORM, "forward", backend, x, scale, eps=eps)
    out, rstd = checkpoint_name(outputs, "rms_norm")
    return out, (x, scale, rstd)


def _rms_norm_backward(eps, backend, residuals, dout):
    return dispatch(RMS_NORM, "backward", backend, *residuals, dout)


@functools.partial(vma.custom_vjp, nondiff_argnums=(5, 6))
def _add_layer_norm(x, residual, x_bias, scale, bias, eps, backend):
    arrays = (x, residual, x_bias, scale, bias)
    return dispatch(ADD_LAYER_NORM, "forward", backend, *arrays, eps=eps, statistics=False)[:2]


def _add_layer_norm_forward(x, residual, x_bias, scale, bias, eps, backend):
    arrays = (x, residual, x_bias, scale, bias)
    outputs = dispatch(ADD_LAYER_NORM, "forward", backend, *arrays, eps=eps)
    out, h, mean, rstd = checkpoint_name(outputs, "add_layer_norm")
    return (out, h), (h, x_bias, scale, mean, rstd)


def _add_layer_norm_backward(eps, backend, residuals, cotangents):
    gradients = dispatch(ADD_LAYER_NORM, "backward", backend, *residuals, *cotangents)
    dx, dx_bias, dscale, dbias = gradients
    return dx, dx, dx_bias, dscale, dbias


# Where the stream begins there is no sum, but two gradients that meet.


@functools.partial(vma.custom_vjp, nondiff_argnums=(3, 4))
def _first_layer_norm(x, scale, bias, eps, backend):
    return _layer_norm(x, scale, bias, eps, backend), x


def _first_layer_norm_forward(x, scale, bias, eps, backend):
    out, (x, scale, *statistics) = _layer_norm_forward(x, scale, bias, eps, backend)
    return (out, x), (x, None, scale, *statistics)


def _first_layer_norm_backward(eps, backend, residuals, cotangents):
    dx, _, *of_weights = dispatch(ADD_LAYER_NORM, "backward", backend, *residuals, *cotangents)
    return dx, *of_weights


@functools.partial(vma.custom_vjp, nondiff_argnums=(2, 3))
def _first_rms_norm(x, scale, eps, backend):
    return _rms_norm(x, scale, eps, backend), x


def _first_rms_norm_forward(x, scale, eps, backend):
    out, kept = _rms_norm_forward(x, scale, eps, backend)
    return (out, x), kept


def _first_rms_norm_backward(eps, backend, residuals, cotangents):
    return dispatch(ADD_RMS_NORM, "backward", backend, *residuals, *cotangents)


@functools.partial(vma.custom_vjp, nondiff_argnums=(3, 4))
def _add_rms_norm(x, residual, scale, eps, backend):
    arrays = (x, residual, scale)
    return dispatch(ADD_RMS_NORM, "forward", backend, *arrays, eps=eps, statistics=False)[:2]


def _add_rms_norm_forward(x, residual, scale, eps, backend):
    outputs = dispatch(ADD_RMS_NORM, "forward", backend, x, residual, scale, eps=eps)
    out, h, rstd = checkpoint_name(outputs, "add_rms_norm")
    return (out, h), (h, scale, rstd)


def _add_rms_norm_backward(eps, backend, residuals, cotangents):
    dx, dscale = dispatch(ADD_RMS_NORM, "backward", backend, *residuals, *cotangents)
    return dx, dx, dscale


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)
_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)
streams.defvjp(_add_layer_norm, _add_layer_norm_forward, _add_layer_norm_backward)
streams.defvjp(_add_rms_norm, _add_rms_norm_forward, _add_rms_norm_backward)
streams.defvjp(_first_layer_norm, _first_layer_norm_forward, _first_layer_norm_backward)
streams.defvjp(_first_rms_norm, _first_rms_norm_forward, _first_rms_norm_backward)
