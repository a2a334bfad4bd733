"""Elementwise activations."""

from __future__ import annotations

import functools

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxllm.backend import Backend, resolve
from jaxllm.dispatch import Op, dispatch
from jaxllm.ops.activation import reference
from jaxllm.ops.checks import check_floating

GELU = Op("gelu", reference=reference)


def gelu(x: Float[Array, "*shape"], *, backend: Backend | None = None) -> Float[Array, "*shape"]:
    r"""The Gaussian error linear unit, in the form with tanh that GPT-2 uses.

    .. math::
        out = \tfrac{1}{2} x \left( 1 + \tanh\left( \sqrt{2/\pi}\,(x + 0.044715 x^3) \right) \right)

    Computed in float32 whatever the dtype of ``x``; the backward pass recomputes from ``x``.

    Args:
        x: Any shape; float32, bfloat16 or float16 for the kernels.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The activations, in the shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` is not floating-point.
        ValueError: The backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415); llm.c's
    ``gelu_forward`` and ``gelu_backward``.

    Example:
        >>> out = jaxllm.ops.gelu(jnp.linspace(-3.0, 3.0, 7))
    """
    check_floating(x=x)
    return _gelu(x, resolve(backend))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gelu(x, backend):
    return _gelu_forward(x, backend)[0]


def _gelu_forward(x, backend):
    return checkpoint_name(dispatch(GELU, "forward", backend, x), "gelu"), x


def _gelu_backward(backend, x, dout):
    return (dispatch(GELU, "backward", backend, x, dout),)


_gelu.defvjp(_gelu_forward, _gelu_backward)
