"""Activations and sums: what stands between two matrix products."""

from __future__ import annotations

import functools

from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxllm.core import vma
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Op, dispatch
from jaxllm.ops.activation import cuda, pallas, reference
from jaxllm.ops.checks import check_floating, check_same_dtype, check_shape

GELU = Op("gelu", reference=reference, pallas=pallas, cuda=cuda)
BIAS_GELU = Op("bias_gelu", reference=reference, pallas=pallas, cuda=cuda)
BIAS_ADD = Op("bias_add", reference=reference, pallas=pallas, cuda=cuda)
SWIGLU = Op("swiglu", reference=reference, pallas=pallas, cuda=cuda)
SWIGLU_PACKED = Op(
    "swiglu_packed",
    reference=reference,
    pallas=pallas,
    cuda=cuda,
    # On an H200 XLA beats Triton's backward by 6%, and loses 3% to its forward.
    preference=("cuda", "xla", "pallas"),
)
RELU = Op("relu", reference=reference, pallas=pallas, cuda=cuda)
SIGMOID = Op("sigmoid", reference=reference, pallas=pallas, cuda=cuda)
ADD = Op("add", reference=reference, pallas=pallas, cuda=cuda)


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
    return _unary(x, GELU, resolve(backend))


def bias_gelu(
    x: Float[Array, "*rows D"], bias: Float[Array, " D"], *, backend: Backend | None = None
) -> Float[Array, "*rows D"]:
    """``gelu(x + bias)`` in one pass over memory.

    The backward pass recomputes from ``x`` and sums the gradient of ``bias`` in the same pass, in
    float32 and in a fixed order, so that it repeats bit for bit.

    Args:
        x: The rows, as a matrix product leaves them; float32, bfloat16 or float16 for the kernels.
        bias: One offset a column, in the dtype of ``x``.
        backend: As in :func:`gelu`.

    Returns:
        The activations, in the shape and dtype of ``x``.

    Raises:
        TypeError: An argument is not floating-point, or ``bias`` differs from ``x`` in dtype.
        ValueError: ``bias`` is not as wide as ``x``, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: As for :func:`gelu`; llm.c's ``matmul_backward_bias``.
    """
    _check_bias(x, bias)
    return _bias_gelu(x, bias, resolve(backend))


def bias_add(
    x: Float[Array, "*rows D"], bias: Float[Array, " D"], *, backend: Backend | None = None
) -> Float[Array, "*rows D"]:
    """``x + bias``, with a gradient of the bias that repeats bit for bit.

    After a matrix product use :func:`jaxllm.ops.linear`, where the product itself adds the bias.

    Args:
        x: The rows; float32, bfloat16 or float16 for the kernels.
        bias: One offset a column, in the dtype of ``x``.
        backend: As in :func:`gelu`.

    Returns:
        The sums, in the shape and dtype of ``x``. The gradient of ``x`` is that of the sums; that
        of ``bias`` is its sum over rows, in float32 and in a fixed order.

    Raises:
        TypeError: An argument is not floating-point, or ``bias`` differs from ``x`` in dtype.
        ValueError: ``bias`` is not as wide as ``x``, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``matmul_backward_bias``.
    """
    _check_bias(x, bias)
    return _bias_add(x, bias, resolve(backend))


def swiglu(
    gate: Float[Array, "*shape"], up: Float[Array, "*shape"], *, backend: Backend | None = None
) -> Float[Array, "*shape"]:
    r"""The gated linear unit of Llama.

    .. math::
        out = silu(gate) \cdot up \qquad silu(x) = \frac{x}{1 + e^{-x}}

    Computed in float32 whatever the dtype; the backward pass recomputes from the inputs.

    Args:
        gate: Any shape; float32, bfloat16 or float16 for the kernels.
        up: In the shape and dtype of ``gate``.
        backend: As in :func:`gelu`.

    Returns:
        The products, in the shape and dtype of ``gate``.

    Raises:
        TypeError: An argument is not floating-point, or ``up`` differs from ``gate`` in dtype.
        ValueError: ``up`` differs from ``gate`` in shape, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Shazeer, "GLU Variants Improve Transformer" (arXiv:2002.05202); llama3.cuda's
    ``swiglu``.
    """
    check_floating(gate=gate, up=up)
    check_shape("up", up, gate.shape, "the shape of gate")
    check_same_dtype("up", up, "gate", gate)
    return _swiglu(gate, up, resolve(backend))


def swiglu_packed(
    x: Float[Array, "*rows 2F"], *, backend: Backend | None = None
) -> Float[Array, "*rows F"]:
    """:func:`swiglu` of the halves of each row: gate is ``x[..., :F]``, up is ``x[..., F:]``.

    One projection to 2F columns gives both; neither they nor their gradients, which are written as
    one array, are ever copied apart.

    Args:
        x: The rows, of an even width; float32, bfloat16 or float16 for the kernels.
        backend: As in :func:`gelu`.

    Returns:
        The products, half as wide as ``x``, in its dtype.

    Raises:
        TypeError: ``x`` is not floating-point.
        ValueError: ``x`` has no last axis of an even width, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: As for :func:`swiglu`.
    """
    check_floating(x=x)
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(f"x has shape {x.shape}; it must have a last axis of an even width, 2F")
    return _unary(x, SWIGLU_PACKED, resolve(backend))


def relu(x: Float[Array, "*shape"], *, backend: Backend | None = None) -> Float[Array, "*shape"]:
    """The rectified linear unit, ``max(x, 0)``; its slope at zero is zero.

    Args:
        x: Any shape; float32, bfloat16 or float16 for the kernels.
        backend: As in :func:`gelu`.

    Returns:
        The activations, in the shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` is not floating-point.
        ValueError: The backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: CUDA-Learn-Notes' ``relu``.
    """
    check_floating(x=x)
    return _unary(x, RELU, resolve(backend))


def sigmoid(x: Float[Array, "*shape"], *, backend: Backend | None = None) -> Float[Array, "*shape"]:
    r"""The logistic function, for inputs however large of either sign.

    .. math::
        out = \frac{1}{1 + e^{-x}}

    Computed in float32 whatever the dtype of ``x``; the backward pass recomputes from ``x``.

    Args:
        x: Any shape; float32, bfloat16 or float16 for the kernels.
        backend: As in :func:`gelu`.

    Returns:
        The activations, in the shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` is not floating-point.
        ValueError: The backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: CUDA-Learn-Notes' ``sigmoid``.
    """
    check_floating(x=x)
    return _unary(x, SIGMOID, resolve(backend))


def add(
    x: Float[Array, "*shape"], y: Float[Array, "*shape"], *, backend: Backend | None = None
) -> Float[Array, "*shape"]:
    """``x + y`` of arrays of one shape; both gradients are that of the sum, and cost nothing.

    Args:
        x: Any shape; float32, bfloat16 or float16 for the kernels.
        y: In the shape and dtype of ``x``.
        backend: As in :func:`gelu`.

    Returns:
        The sums, in the shape and dtype of ``x``.

    Raises:
        TypeError: An argument is not floating-point, or ``y`` differs from ``x`` in dtype.
        ValueError: ``y`` differs from ``x`` in shape, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``residual_forward``; CUDA-Learn-Notes' ``elementwise_add``.
    """
    check_floating(x=x, y=y)
    check_shape("y", y, x.shape, "the shape of x")
    check_same_dtype("y", y, "x", x)
    return _add(x, y, resolve(backend))


def _check_bias(x: Array, bias: Array) -> None:
    check_floating(x=x, bias=bias)
    if x.ndim == 0:
        raise ValueError("x has shape (); it must have a last axis for the bias")
    check_shape("bias", bias, x.shape[-1:], f"the last axis of x {x.shape}")
    check_same_dtype("bias", bias, "x", x)


# The rule of every op with one input, which is all that its backward needs.


@functools.partial(vma.custom_vjp, nondiff_argnums=(1, 2))
def _unary(x, op, backend):
    return _unary_forward(x, op, backend)[0]


def _unary_forward(x, op, backend):
    return checkpoint_name(dispatch(op, "forward", backend, x), op.name), x


def _unary_backward(op, backend, x, dout):
    return (dispatch(op, "backward", backend, x, dout),)


@functools.partial(vma.custom_vjp, nondiff_argnums=(2,))
def _bias_gelu(x, bias, backend):
    return _bias_gelu_forward(x, bias, backend)[0]


def _bias_gelu_forward(x, bias, backend):
    out = checkpoint_name(dispatch(BIAS_GELU, "forward", backend, x, bias), "bias_gelu")
    return out, (x, bias)


def _bias_gelu_backward(backend, residuals, dout):
    return dispatch(BIAS_GELU, "backward", backend, *residuals, dout)


@functools.partial(vma.custom_vjp, nondiff_argnums=(2,))
def _bias_add(x, bias, backend):
    return _bias_add_forward(x, bias, backend)[0]


def _bias_add_forward(x, bias, backend):
    return checkpoint_name(dispatch(BIAS_ADD, "forward", backend, x, bias), "bias_add"), None


def _bias_add_backward(backend, _, dout):
    return dout, dispatch(BIAS_ADD, "backward", backend, dout)


@functools.partial(vma.custom_vjp, nondiff_argnums=(2,))
def _swiglu(gate, up, backend):
    return _swiglu_forward(gate, up, backend)[0]


def _swiglu_forward(gate, up, backend):
    out = checkpoint_name(dispatch(SWIGLU, "forward", backend, gate, up), "swiglu")
    return out, (gate, up)


def _swiglu_backward(backend, residuals, dout):
    return dispatch(SWIGLU, "backward", backend, *residuals, dout)


@functools.partial(vma.custom_vjp, nondiff_argnums=(2,))
def _add(x, y, backend):
    return _add_forward(x, y, backend)[0]


def _add_forward(x, y, backend):
    return checkpoint_name(dispatch(ADD, "forward", backend, x, y), "add"), None


def _add_backward(backend, _, dout):
    return dout, dout


_unary.defvjp(_unary_forward, _unary_backward)
_bias_gelu.defvjp(_bias_gelu_forward, _bias_gelu_backward)
_bias_add.defvjp(_bias_add_forward, _bias_add_backward)
_swiglu.defvjp(_swiglu_forward, _swiglu_backward)
_add.defvjp(_add_forward, _add_backward)
