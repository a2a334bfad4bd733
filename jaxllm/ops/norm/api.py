"""Layer and RMS normalization, alone and fused with the residual addition before them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.op import differentiable, with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.checks import as_finite, check_floating, check_same_dtype, check_shape
from jaxllm.ops.norm import cuda, pallas, reference

_LAYER_NORM_SHARDING = ShardingRule("... _, _, _ -> ... _; ..., ...")
LAYER_NORM = Op(
    "layer_norm", reference=reference, pallas=pallas, cuda=cuda, sharding=_LAYER_NORM_SHARDING
)
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

    Note: ``eps`` defaults to 1e-5, as in torch and ``jax.nn.standardize``; flax defaults to 1e-6.

    Args:
        x: The rows; float32, bfloat16 or float16 for the kernels.
        scale: One factor per column, in the dtype of ``x`` or float32.
        bias: One offset per column, in the dtype of ``scale``; None for no offset.
        eps: Added to the variance; finite, at least 0.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The normalized rows, in the shape and dtype of ``x``.

    Raises:
        TypeError: An argument is not floating-point, ``bias`` differs from ``scale`` in dtype, or
            ``eps`` is no number.
        ValueError: ``scale`` or ``bias`` is not as wide as ``x``, ``eps`` is not in its range, or
            the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Ba, Kiros and Hinton, "Layer Normalization" (arXiv:1607.06450); llm.c's
    ``layernorm_forward`` and ``layernorm_backward``.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (8, 768), jnp.bfloat16)
        >>> out = jaxllm.ops.layer_norm(x, jnp.ones(768), jnp.zeros(768))
    """
    bias = _check_weights(x, scale, bias)
    return _layer_norm(x, scale, bias, backend=resolve(backend), options=_options(eps))


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

    Note: ``eps`` defaults to 1e-5, as in Llama 3; flax defaults to 1e-6, and torch to the machine
    epsilon of the dtype of ``x``.

    Args:
        x: The rows; float32, bfloat16 or float16 for the kernels.
        scale: One factor per column, in the dtype of ``x`` or float32.
        eps: Added to the mean square; finite, at least 0.
        backend: As in :func:`layer_norm`.

    Returns:
        The normalized rows, in the shape and dtype of ``x``.

    Raises:
        TypeError: An argument is not floating-point, or ``eps`` is no number.
        ValueError: ``scale`` is not as wide as ``x``, ``eps`` is not in its range, or the backend
            is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (arXiv:1910.07467);
    llama3.cuda's ``rmsnorm``.
    """
    _check_weights(x, scale, None)
    return _rms_norm(x, scale, backend=resolve(backend), options=_options(eps))


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

    The residual stream is the sum that runs through a transformer: each block adds a branch to it.
    Where the branch ends in a linear layer, pass the bias of that layer as ``x_bias``. The backward
    kernel then sums its gradient over rows too, without another pass.

    Note: ``eps`` defaults to 1e-5, as in :func:`layer_norm`.

    Args:
        x: The output of the branch.
        residual: The residual stream, in the shape and dtype of ``x``. None where the stream starts
            at ``x``: nothing is added then, and ``h`` is ``x``.
        scale: As in :func:`layer_norm`.
        bias: As in :func:`layer_norm`.
        x_bias: Added to each row of ``x``, in the dtype of ``scale``; None for no bias.
        eps: As in :func:`layer_norm`.
        backend: As in :func:`layer_norm`.

    Returns:
        ``(layer_norm(h, scale, bias), h)``, where ``h = x + x_bias + residual``, rounded once, is
        the new residual stream. The backward kernel adds the gradient of ``h`` to the gradient
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
        return _layer_norm_and_x(x, scale, bias, backend=resolve(backend), options=_options(eps))
    arrays = (x, residual, x_bias, scale, bias)
    return _add_layer_norm(*arrays, backend=resolve(backend), options=_options(eps))


def add_rms_norm(
    x: Float[Array, "*rows D"],
    residual: Float[Array, "*rows D"] | None,
    scale: Float[Array, " D"],
    *,
    eps: float = 1e-5,
    backend: Backend | None = None,
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows D"]]:
    """Adds a branch to the residual stream and RMS-normalizes the sum, in one pass over memory.

    Note: ``eps`` defaults to 1e-5, as in :func:`rms_norm`.

    Args:
        x: The output of the branch.
        residual: As in :func:`add_layer_norm`.
        scale: As in :func:`rms_norm`.
        eps: As in :func:`rms_norm`.
        backend: As in :func:`layer_norm`.

    Returns:
        ``(rms_norm(h, scale), h)``, where ``h = x + residual`` is the new residual stream.

    Raises:
        TypeError: As in :func:`rms_norm`, or ``residual`` differs from ``x`` in dtype.
        ValueError: As in :func:`rms_norm`, or ``residual`` differs from ``x`` in shape.
        BackendError: The backend that was asked for cannot serve the call.
    """
    _check_weights(x, scale, None)
    _check_residual(x, residual)
    if residual is None:
        return _rms_norm_and_x(x, scale, backend=resolve(backend), options=_options(eps))
    return _add_rms_norm(x, residual, scale, backend=resolve(backend), options=_options(eps))


def _check_weights(x: Array, scale: Array, bias: Array | None) -> Array:
    """Checks the arguments that all norms share; returns the bias, zeros for None."""
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


@dataclasses.dataclass(frozen=True)
class _Options:
    eps: float


def _options(eps: float) -> _Options:
    return _Options(as_finite("eps", eps, least=0))


# Without a backward pass the statistics of the rows are not written.

_layer_norm = differentiable(
    LAYER_NORM,
    saves=lambda x, scale, bias, out, mean, rstd: (x, scale, mean, rstd),
    sharding=_LAYER_NORM_SHARDING,
    primal={"statistics": False},
)
_rms_norm = differentiable(
    RMS_NORM,
    saves=lambda x, scale, out, rstd: (x, scale, rstd),
    sharding=ShardingRule("... _, _ -> ... _; ..."),
    primal={"statistics": False},
)
_add_layer_norm = differentiable(
    ADD_LAYER_NORM,
    saves=lambda x, residual, x_bias, scale, bias, out, h, mean, rstd: (
        h,
        x_bias,
        scale,
        mean,
        rstd,
    ),
    sharding=ShardingRule("... _, ... _, _, _, _ -> ... _, ... _; ..., ..."),
    outputs=2,
    primal={"statistics": False},
    gradients=lambda dh, dx_bias, dscale, dbias: (dh, dh, dx_bias, dscale, dbias),
)
_add_rms_norm = differentiable(
    ADD_RMS_NORM,
    saves=lambda x, residual, scale, out, h, rstd: (h, scale, rstd),
    sharding=ShardingRule("... _, ... _, _ -> ... _, ... _; ..."),
    outputs=2,
    primal={"statistics": False},
    gradients=lambda dh, dscale: (dh, dh, dscale),
)


# Without a residual there is no sum to compute, but h = x still has two gradients to add: through
# the norm, and directly. So the forward is the plain norm and the backward the fused op.


def _layer_norm_and_x_forward(options, backend, x, scale, bias):
    results = dispatch(LAYER_NORM, Direction.FORWARD, backend, x, scale, bias, eps=options.eps)
    out, mean, rstd = checkpoint_name(results, "layer_norm")
    return (out, x), (x, None, scale, mean, rstd)


def _layer_norm_and_x_backward(_, backend, saved, dout, dh):
    dx, _, *others = dispatch(ADD_LAYER_NORM, Direction.BACKWARD, backend, *saved, dout, dh)
    return dx, *others


def _rms_norm_and_x_forward(options, backend, x, scale):
    results = dispatch(RMS_NORM, Direction.FORWARD, backend, x, scale, eps=options.eps)
    out, rstd = checkpoint_name(results, "rms_norm")
    return (out, x), (x, scale, rstd)


def _rms_norm_and_x_backward(_, backend, saved, dout, dh):
    return dispatch(ADD_RMS_NORM, Direction.BACKWARD, backend, *saved, dout, dh)


_layer_norm_and_x = with_backward(
    "add_layer_norm",
    _layer_norm_and_x_forward,
    _layer_norm_and_x_backward,
    sharding=_LAYER_NORM_SHARDING,
    primal=lambda options, backend, x, *weights: (
        _layer_norm(x, *weights, backend=backend, options=options),
        x,
    ),
    outputs=2,
)
_rms_norm_and_x = with_backward(
    "add_rms_norm",
    _rms_norm_and_x_forward,
    _rms_norm_and_x_backward,
    sharding=ShardingRule("... _, _ -> ... _; ..."),
    primal=lambda options, backend, x, scale: (
        _rms_norm(x, scale, backend=backend, options=options),
        x,
    ),
    outputs=2,
)
