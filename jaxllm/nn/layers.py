"""Norms, SwiGLU and the loss of an LM head, in the form that models written by hand use."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from jaxllm import ops
from jaxllm.core.backend import Backend
from jaxllm.ops.checks import as_array, as_int32, as_integers, check_floating, check_integer


def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    backend: Backend | None = None,
) -> Float[Array, "*rows D"]:
    r"""Layer norm along the last axis, in place of ``flax.nnx.LayerNorm`` or ``equinox.nn``'s.

    .. math::
        out = \frac{x - \overline{x}}{\sqrt{\overline{(x - \overline{x})^2} + \epsilon}}
              \cdot scale + bias

    Note: ``eps`` defaults to 1e-5, as in Equinox, torch and ``jax.nn.standardize``. Flax's default
    is 1e-6: pass ``eps=norm.epsilon``. Flax gives the result the wider dtype of ``x`` and its
    parameters; here it has that of ``x``.

    Args:
        x: The rows, (..., D).
        scale: One factor per column, (D,); None for ones. Flax's ``norm.scale``, Equinox's
            ``norm.weight``.
        bias: One offset per column, (D,), in the dtype of ``scale``; None for zeros.
        eps: Added to the variance.
        backend: As in :func:`jaxllm.ops.layer_norm`. Forward mode (``jax.jvp``) and
            second derivatives need ``"xla"``.

    Returns:
        The normalized rows, in the shape and dtype of ``x``.

    Raises:
        TypeError: An array is not floating-point, or ``bias`` differs from ``scale`` in dtype.
        ValueError: ``scale`` or ``bias`` is not as wide as ``x``, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: As for :func:`jaxllm.ops.layer_norm`.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (8, 768), jnp.bfloat16)
        >>> out = jaxllm.nn.layer_norm(x, jnp.ones(768), jnp.zeros(768), eps=1e-6)
    """
    x = as_array("x", x)
    bias = None if bias is None else as_array("bias", bias)
    scale = _scale(x, scale, None if bias is None else bias.dtype)
    return ops.layer_norm(x, scale, bias, eps=eps, backend=backend)


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    eps: float = 1e-5,
    backend: Backend | None = None,
) -> Float[Array, "*rows D"]:
    r"""RMS norm along the last axis, in place of ``flax.nnx.RMSNorm`` or ``equinox.nn``'s.

    .. math::
        out = \frac{x}{\sqrt{\overline{x^2} + \epsilon}} \cdot scale

    Note: ``eps`` defaults to 1e-5, as in Equinox and Llama 3; Flax's default is 1e-6. Equinox's
    norm may have a bias: add it to the result.

    Args:
        x: The rows, (..., D).
        scale: One factor per column, (D,); None for ones.
        eps: Added to the mean square.
        backend: As in :func:`layer_norm`.

    Returns:
        The normalized rows, in the shape and dtype of ``x``.

    Raises:
        TypeError: An array is not floating-point.
        ValueError: ``scale`` is not as wide as ``x``, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: As for :func:`jaxllm.ops.rms_norm`.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (8, 768), jnp.bfloat16)
        >>> out = jaxllm.nn.rms_norm(x, jnp.ones(768), eps=1e-6)
    """
    x = as_array("x", x)
    return ops.rms_norm(x, _scale(x, scale, None), eps=eps, backend=backend)


def _scale(x: Array, scale: ArrayLike | None, dtype: jnp.dtype | None) -> Array:
    """The scale, ones in ``dtype`` for None; without a dtype in that of ``x``."""
    if scale is not None:
        return as_array("scale", scale)
    check_floating(x=x)
    return jnp.ones(x.shape[-1:], dtype or x.dtype)


def swiglu(
    gate: ArrayLike, up: ArrayLike | None = None, *, backend: Backend | None = None
) -> Float[Array, "*rows F"]:
    r"""``jax.nn.silu(gate) * up``, of two projections or of one that holds both.

    .. math::
        out = silu(gate) \cdot up \qquad silu(x) = \frac{x}{1 + e^{-x}}

    Args:
        gate: The gate projection, (..., F); without ``up`` one projection of both, (..., 2F), whose
            first F columns are the gate. That is faster: neither half is copied.
        up: The up projection, in the shape and dtype of ``gate``, or None.
        backend: As in :func:`jaxllm.ops.swiglu`. Forward mode (``jax.jvp``) and
            second derivatives need ``"xla"``.

    Returns:
        The activations, (..., F), in the dtype of ``gate``.

    Raises:
        TypeError: An array is not floating-point, or ``up`` differs from ``gate`` in dtype.
        ValueError: ``up`` differs from ``gate`` in shape, ``gate`` alone has no last axis of an
            even width, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: As for :func:`jaxllm.ops.swiglu`.

    Example:
        >>> x, w_gate, w_up = jnp.ones((8, 64)), jnp.ones((64, 172)), jnp.ones((64, 172))
        >>> out = jaxllm.nn.swiglu(x @ w_gate, x @ w_up)
        >>> same = jaxllm.nn.swiglu(x @ jnp.concatenate([w_gate, w_up], axis=1))
    """
    gate = as_array("gate", gate)
    if up is not None:
        return ops.swiglu(gate, as_array("up", up), backend=backend)
    check_floating(gate=gate)
    if gate.ndim == 0 or gate.shape[-1] % 2:
        raise ValueError(
            f"gate has shape {gate.shape}; without up it must have a last axis of an even width, 2F"
        )
    return ops.swiglu_packed(gate, backend=backend)


def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    where: ArrayLike | None = None,
    transpose_weight: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum"] = "mean",
    backend: Backend | None = None,
) -> Float[Array, ""]:
    """The cross entropy of an LM head, without all logits in memory at once.

    In place of ``optax.softmax_cross_entropy_with_integer_labels(hidden @ weight, labels)`` and the
    mean of its result. :func:`jaxllm.ops.linear_cross_entropy` says how it is computed, and has
    more options. The result is a scalar: the forward pass computes the gradients too, so the loss
    of each token would not have one.

    Args:
        hidden: The input of the LM head, (..., D).
        weight: The LM head, (D, V), in the dtype of ``hidden``; it has no bias. Flax's
            ``lm_head.kernel``.
        labels: One label per row of ``hidden``, (...), of an integer dtype. A negative one is
            ignored.
        where: Bools that broadcast to ``labels``: True for the tokens that count; None for all.
        transpose_weight: ``weight`` is (V, D), as Equinox's ``lm_head.weight`` and token tables.
        label_smoothing: The share of the target that is spread over the vocabulary, from 0 to 1.
        z_loss: The weight of the squared logsumexp.
        reduction: ``"mean"`` over the tokens that count (zero if none does), or ``"sum"``.
        backend: As in :func:`jaxllm.ops.linear_cross_entropy`. Forward mode (``jax.jvp``) and
            second derivatives need ``"xla"``.

    Returns:
        The loss in float32, a scalar.

    Raises:
        TypeError: ``hidden`` is not floating-point, ``weight`` differs from it in dtype, ``labels``
            is not of an integer dtype, or ``where`` not of bools.
        ValueError: The shapes do not fit together, or an option is out of its range.
        BackendError: The backend that was asked for cannot serve the call.

    Source: As for :func:`jaxllm.ops.linear_cross_entropy`.

    Example:
        >>> hidden, weight = jnp.ones((2, 1024, 768)), jnp.zeros((768, 50304))
        >>> labels = jnp.zeros((2, 1024), jnp.int32)
        >>> loss = jaxllm.nn.linear_cross_entropy(hidden, weight, labels, where=labels != 3)
    """
    labels = as_integers("labels", labels)
    check_integer(labels=labels)  # pyright: ignore[reportArgumentType]
    labels = as_int32(labels)
    if where is not None:
        labels = _counted(labels, as_array("where", where))
    return ops.linear_cross_entropy(
        as_array("hidden", hidden),
        as_array("weight", weight),
        labels,
        transpose_weight=transpose_weight,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
        backend=backend,
    )


def _counted(labels: Array, where: Array) -> Array:
    """The labels, -1 where they do not count."""
    if where.dtype != bool:
        raise TypeError(
            f"where has dtype {where.dtype}; it must be bool: all tokens that count have weight 1"
        )
    try:
        where = jnp.broadcast_to(where, labels.shape)
    except ValueError as error:
        raise ValueError(
            f"where has shape {where.shape}; it must broadcast to labels {labels.shape}"
        ) from error
    return jnp.where(where, labels, -1)
