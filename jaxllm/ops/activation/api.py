"""Activations and elementwise sums."""

from __future__ import annotations

from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.op import differentiable, with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.activation import cuda, pallas, reference
from jaxllm.ops.checks import (
    as_bool,
    check_floating,
    check_floating_of_any_width,
    check_same_dtype,
    check_shape,
)

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
    r"""The Gaussian error linear unit, in the tanh form that GPT-2 uses.

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
    return _gelu(x, backend=resolve(backend))


def bias_gelu(
    x: Float[Array, "*rows D"], bias: Float[Array, " D"], *, backend: Backend | None = None
) -> Float[Array, "*rows D"]:
    """``gelu(x + bias)`` in one pass over memory.

    The backward pass recomputes from ``x``. It sums the gradient of ``bias`` in the same pass, in
    float32 and in a fixed order, so the gradient repeats bit for bit.

    Args:
        x: The rows, such as a GEMM's result; float32, bfloat16 or float16 for the kernels.
        bias: One value per column, in the dtype of ``x``.
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
    return _bias_gelu(x, bias, backend=resolve(backend))


def bias_add(
    x: Float[Array, "*rows D"], bias: Float[Array, " D"], *, backend: Backend | None = None
) -> Float[Array, "*rows D"]:
    """``x + bias``, with a gradient of the bias that repeats bit for bit.

    After a GEMM use :func:`jaxllm.ops.linear`, whose GEMM adds the bias.

    Args:
        x: The rows; float32, bfloat16 or float16 for the kernels.
        bias: One value per column, in the dtype of ``x``.
        backend: As in :func:`gelu`.

    Returns:
        The sums, in the shape and dtype of ``x``. The gradient of ``x`` is the output gradient. The
        gradient of ``bias`` is its sum over rows, in float32 and in a fixed order.

    Raises:
        TypeError: An argument is not floating-point, or ``bias`` differs from ``x`` in dtype.
        ValueError: ``bias`` is not as wide as ``x``, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``matmul_backward_bias``.
    """
    _check_bias(x, bias)
    return _bias_add(x, bias, backend=resolve(backend))


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
        The activations, in the shape and dtype of ``gate``.

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
    return _swiglu(gate, up, backend=resolve(backend))


def swiglu_packed(
    x: Float[Array, "*rows 2F"] | Float[Array, "*rows 2 F"],
    *,
    by_parts: bool = False,
    backend: Backend | None = None,
) -> Float[Array, "*rows F"]:
    """:func:`swiglu` of the halves of each row: gate is ``x[..., :F]``, up is ``x[..., F:]``.

    One projection to 2F columns computes both halves. They stay one array, and so do their
    gradients: nothing is split or copied.

    Args:
        x: The rows, of an even width; float32, bfloat16 or float16 for the kernels.
        by_parts: Whether gate and up have a dimension of their own, (..., 2, F). The elements are
            in the same order, and can be sharded along F.
        backend: As in :func:`gelu`.

    Returns:
        The activations, (..., F), in the dtype of ``x``.

    Raises:
        TypeError: ``x`` is not floating-point.
        ValueError: ``x`` has no last axis of an even width, or with ``by_parts`` is not (..., 2,
            F), or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: As for :func:`swiglu`.
    """
    check_floating(x=x)
    if as_bool("by_parts", by_parts):
        if x.ndim < 2 or x.shape[-2] != 2:
            raise ValueError(f"x has shape {x.shape}; it must be (..., 2, F), as by_parts says")
        return _swiglu_by_parts(x, backend=resolve(backend))
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(f"x has shape {x.shape}; it must have a last axis of an even width, 2F")
    return _swiglu_packed(x, backend=resolve(backend))


def relu(x: Float[Array, "*shape"], *, backend: Backend | None = None) -> Float[Array, "*shape"]:
    """The rectified linear unit, ``max(x, 0)``; its derivative at zero is zero.

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
    check_floating_of_any_width(x=x)
    return _relu(x, backend=resolve(backend))


def sigmoid(x: Float[Array, "*shape"], *, backend: Backend | None = None) -> Float[Array, "*shape"]:
    r"""The logistic function, without overflow for inputs of any size.

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
    return _sigmoid(x, backend=resolve(backend))


def add(
    x: Float[Array, "*shape"], y: Float[Array, "*shape"], *, backend: Backend | None = None
) -> Float[Array, "*shape"]:
    """``x + y`` for arrays of one shape. Both gradients are the output gradient and need no kernel.

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
    return _add(x, y, backend=resolve(backend))


def _check_bias(x: Array, bias: Array) -> None:
    check_floating(x=x, bias=bias)
    if x.ndim == 0:
        raise ValueError("x has shape (); it must have a last axis for the bias")
    check_shape("bias", bias, x.shape[-1:], f"the last axis of x {x.shape}")
    check_same_dtype("bias", bias, "x", x)


_ELEMENTWISE = ShardingRule("... -> ...")
_BIAS = ShardingRule("... F, F' -> ... F", "... F")

_gelu, _relu, _sigmoid = (
    differentiable(op, saves=lambda x, out: (x,), sharding=_ELEMENTWISE)
    for op in (GELU, RELU, SIGMOID)
)
_swiglu_packed = differentiable(
    SWIGLU_PACKED, saves=lambda x, out: (x,), sharding=ShardingRule("... _ -> ... _")
)
_bias_gelu = differentiable(BIAS_GELU, saves=lambda x, bias, out: (x, bias), sharding=_BIAS)
_swiglu = differentiable(
    SWIGLU, saves=lambda gate, up, out: (gate, up), sharding=ShardingRule("..., ... -> ...")
)


def _swiglu_by_parts_forward(_, backend, x):
    rows = lax.collapse(x, x.ndim - 2)
    out = dispatch(SWIGLU_PACKED, Direction.FORWARD, backend, rows)
    return checkpoint_name(out, "swiglu_packed"), x


def _swiglu_by_parts_backward(_, backend, x, dout):
    rows = lax.collapse(x, x.ndim - 2)
    return (dispatch(SWIGLU_PACKED, Direction.BACKWARD, backend, rows, dout).reshape(x.shape),)


_swiglu_by_parts = with_backward(
    "swiglu_packed",
    _swiglu_by_parts_forward,
    _swiglu_by_parts_backward,
    sharding=ShardingRule("... _ F -> ... F", "... F"),
)


def _bias_add_forward(_, backend, x, bias):
    out = dispatch(BIAS_ADD, Direction.FORWARD, backend, x, bias)
    return checkpoint_name(out, "bias_add"), None


def _bias_add_backward(_, backend, saved, dout):
    del saved
    return dout, dispatch(BIAS_ADD, Direction.BACKWARD, backend, dout)


def _add_forward(_, backend, x, y):
    return checkpoint_name(dispatch(ADD, Direction.FORWARD, backend, x, y), "add"), None


def _add_backward(_, backend, saved, dout):
    del backend, saved
    return dout, dout


_bias_add = with_backward("bias_add", _bias_add_forward, _bias_add_backward, sharding=_BIAS)
_add = with_backward("add", _add_forward, _add_backward, sharding=ShardingRule("..., ... -> ..."))
