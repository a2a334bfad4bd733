"""The feed-forward block of a transformer, and the MLP alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxllm.core import shards
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Composition, Direction, compose, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.activation.api import BIAS_ADD, swiglu_packed
from jaxllm.ops.block.attention import (
    Layer,
    add_and_normalize,
    check_branch,
    check_parameters,
    leave_to_next_norm,
    unsupported_by_layers,
    without_normalized,
)
from jaxllm.ops.block.precision import Precision, of_layers
from jaxllm.ops.block.residual import Residual, carry, check_residual, norm_arrays, pre_norm
from jaxllm.ops.checks import check_floating, check_layer, check_pre_norm, check_way_back
from jaxllm.ops.gemm.api import linear
from jaxllm.ops.gemm.float8_mlp import float8_mlp
from jaxllm.ops.gemm.float8_operands import Recipe
from jaxllm.ops.gemm.fused import (
    Normalized,
    fold_norm,
    fold_norm_backward,
    matmul_bias_gelu,
    matmul_dgelu,
    matmul_norm_backward,
    normalize,
    saves_derivative,
    wgrad_pair,
)
from jaxllm.ops.gemm.gradients import dgrad_and_wgrad, wgrad
from jaxllm.ops.weights import is_weight

# With fewer rows the partial sums of wgrad_pair cost more than the idle SMs of XLA's two GEMMs.
_MIN_PAIR_ROWS = 65536


def ffn_block(
    h: Residual,
    norm: Mapping[str, Array],
    weights: Mapping[str, Layer],
    *,
    activation: Literal["gelu", "swiglu"] = "gelu",
    precision: Precision = None,
    backend: Backend | None = None,
) -> Residual:
    r"""Feed-forward block: ``x + down(f(up(norm(x))))``.

    On a Hopper GPU a block with a layer norm, plain weights and GELU is fused, where its GEMMs are
    large enough and in 16 bits. The up-projection applies GELU and saves its derivative in its
    epilogue, and the down-projection adds bias and residual and normalizes the sum. The down dgrad
    GEMM multiplies by the derivative, and the up dgrad GEMM applies the layer norm's backward, so
    the gradient of the normalized input is never written to memory. Where shards along F would cut
    tiles of 384 columns, GELU's input is saved instead of its derivative. With the precision
    ``"tensor"`` for both layers, the norm, the activation and its gradient are written in float8;
    with SwiGLU where ``gate_up`` is in parts. Other calls run norm, GEMM and activation one by one;
    :func:`jaxllm.explain` says why.

    Args:
        h: The residual, (..., D).
        norm: The norm's ``scale``, (D,), and of a layer norm ``bias``.
        weights: With ``"gelu"`` the layers ``up``, from D to F columns, and ``down``, from F to D.
            With ``"swiglu"`` the layers ``gate_up``, from D to 2F (the gates, then what they gate;
            a weight (D, 2, F) can be sharded along F), and ``down``. Each has a ``weight`` (array,
            ``Transposed`` or ``Quantized``) and may have a ``bias``.
        activation: ``"gelu"``, the tanh form, or ``"swiglu"``.
        precision: ``"row"`` or ``"tensor"`` for float8 operands in the GEMMs of both layers, as in
            :func:`jaxllm.ops.linear`; a mapping from the names of layers for some of them; None
            for the dtype of ``h``.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The new residual.

    Raises:
        TypeError: ``h`` is no :class:`Residual`, or an array is of the wrong kind or dtype.
        ValueError: The shapes do not fit together, or the activation is unknown; or ``precision``
            has an unknown recipe or layer, or is not None for a ``Quantized`` weight.
        BackendError: The backend that was asked for cannot serve the call, or ``precision`` is not
            None and the GPU has no float8 tensor cores.

    Source: llm.c's ``gpt2_forward`` and ``gpt2_backward``; Shazeer, "GLU variants improve
    transformer" (arXiv:2002.05202).
    """
    check_residual(h)
    if activation not in ("gelu", "swiglu"):
        raise ValueError(f"activation is {activation!r}; it must be 'gelu' or 'swiglu'")
    first = "up" if activation == "gelu" else "gate_up"
    check_parameters(h, norm, weights, first, "down")
    arrays = (h, norm, weights[first], weights["down"])
    static = {"activation": activation, "recipes": of_layers(precision, first, "down")}
    return compose(_BLOCK, resolve(backend), *arrays, **static)


def _unfused(
    backend: Backend,
    h: Residual,
    norm: Mapping[str, Array],
    up: Layer,
    down: Layer,
    *,
    activation: Literal["gelu", "swiglu"],
    recipes: tuple[Recipe | None, Recipe | None] = (None, None),
) -> Residual:
    of_up, of_down = recipes
    if _is_float8_mlp(up, down, recipes, activation):
        arrays = norm_arrays(h, norm)
        hidden = jax.ShapeDtypeStruct((*h.x.shape[:-1], up["weight"].shape[-1]), h.x.dtype)
        check_branch(h, hidden, "down", down)
        layers = up["weight"], up.get("bias"), down["weight"]
        options = {"activation": activation, "eps": h.eps, "backend": backend}
        out, x = float8_mlp(arrays, *layers, **options)
        return carry(h, x, branch=(out, down.get("bias")))
    x, h = pre_norm(h, norm, backend)
    if activation == "gelu":
        hidden = linear(x, **up, activation="gelu", precision=of_up, backend=backend)
    else:
        gate_up = linear(x, **up, precision=of_up, backend=backend)
        by_parts = gate_up.ndim > x.ndim
        hidden = swiglu_packed(gate_up, by_parts=by_parts, backend=backend)
    return leave_to_next_norm(h, hidden, "down", down, of_down, backend)


def _is_float8_mlp(
    up: Layer, down: Layer, recipes: tuple[Recipe | None, Recipe | None], activation: str
) -> bool:
    """Whether the activation writes the float8 operands of the GEMMs after it."""
    if any(map(is_weight, (up["weight"], down["weight"]))) or recipes != ("tensor", "tensor"):
        return False
    columns = up["weight"].shape[1:]
    return len(columns) == 1 if activation == "gelu" else columns[:-1] == (2,)


def _unsupported(h, norm, up, down, *, activation, recipes=(None, None)) -> str | None:
    """Why the fused kernels cannot serve a call; None if they can."""
    if activation != "gelu":
        return f"the activation is {activation!r}; the fused block has GELU"
    return unsupported_by_layers(h, up, down, recipes)


def _fused(
    backend: Backend,
    h: Residual,
    norm: Mapping[str, Array],
    up: Layer,
    down: Layer,
    *,
    activation: str,
    recipes: tuple[None, None] = (None, None),
) -> Residual:
    del activation, recipes
    x, up_bias, down_bias = h.x, up.get("bias"), down.get("bias")
    check_layer("the weight of up", up["weight"], "the bias of up", up_bias, x)
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], up["weight"].shape[1]), x.dtype)
    names = ("the weight of down", down["weight"], "the bias of down", down_bias)
    check_layer(*names, hidden, "the hidden layer")
    check_way_back(*names[:2], x)
    scale = norm["scale"]
    norm_bias = check_pre_norm(x, scale, "bias", norm.get("bias"))
    up_bias = jnp.zeros(up["weight"].shape[1:], x.dtype) if up_bias is None else up_bias
    arrays = (x, h.normalized, scale, norm_bias, up["weight"], up_bias, down["weight"], down_bias)
    saves = saves_derivative(backend, x, up["weight"], up_bias, down["weight"])
    x, normalized = _ffn_block(*arrays, backend=backend, options=_FFNOptions(h.eps, saves))
    return carry(h, x, normalized=normalized)


_BLOCK = Composition("ffn_block", _fused, _unfused, _unsupported)


@dataclasses.dataclass(frozen=True)
class _FFNOptions:
    eps: float
    saves_derivative: bool


def _forward(
    options, backend, x, normalized, scale, norm_bias, up_weight, up_bias, down_weight, down_bias
):
    # Under the name of linear: a remat policy keeps the same of either.
    norm = normalized or Normalized(*checkpoint_name(normalize(backend, x, options.eps), "linear"))
    weight, bias = fold_norm(backend, scale, norm_bias, up_weight, up_bias)
    outputs = _hidden(backend, norm.x_hat, weight, bias, down_weight, options.saves_derivative)
    hidden, saved = checkpoint_name(outputs, "linear")
    arrays = (hidden, down_weight, down_bias, x, norm)
    outputs = add_and_normalize(backend, *arrays, eps=options.eps, inner="F")
    out, next_norm = checkpoint_name(outputs, "linear")
    layers = (scale, norm_bias, up_weight, up_bias, down_weight, down_bias)
    return (out, Normalized(*next_norm)), (norm.x_hat, norm.rstd, layers, hidden, saved)


def _hidden(backend, x, weight, bias, down_weight, saves):
    """The hidden layer, and what the derivative of its GELU needs."""
    options = {"saves_derivative": saves, "out_columns": down_weight.shape[1]}
    return matmul_bias_gelu(backend, x, weight, bias, **options)


def _backward(options, backend, residuals, dout, _):
    del options
    x_hat, rstd, layers, hidden, saved = residuals
    scale, norm_bias, up_weight, up_bias, down_weight, down_bias = layers
    # XLA reuses the forward's.
    folded, folded_bias = fold_norm(backend, scale, norm_bias, up_weight, up_bias)
    dh, dup_bias = matmul_dgelu(backend, dout, down_weight, saved, folded_bias)
    arrays = (x_hat, dh, hidden, dout)
    gradients = wgrad_pair(backend, *arrays, min_rows=_MIN_PAIR_ROWS, sms_of_tile=1)
    dfolded, ddown_weight, dh, dout = gradients
    dout = shards.in_one_shard(dout, "F")  # each shard along F has a term of dx
    dx, ddown_bias = matmul_norm_backward(backend, dh, folded, x_hat, rstd, dout)
    of_norm = fold_norm_backward(backend, scale, norm_bias, up_weight, dfolded, dup_bias)
    dscale, dnorm_bias, dup_weight = of_norm
    ddown_bias = None if down_bias is None else ddown_bias
    return dx, None, dscale, dnorm_bias, dup_weight, dup_bias, ddown_weight, ddown_bias


_ffn_block = with_backward(
    "ffn_block",
    _forward,
    _backward,
    sharding=ShardingRule(
        "... _, [... _ | ... | ...], _, _, _ F, F, F' _, _"
        " -> ... _, ... _, ..., ...; ?... _, ?..., ... F, ... F",
        "... F",
    ),
    outputs=2,
    reference=without_normalized,
)


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
    r"""A multilayer perceptron with one hidden layer.

    .. math::
        out = f(x W_{up} + b_{up})\, W_{down} + b_{down}

    As ``linear(linear(x, up_weight, up_bias, activation="gelu"), down_weight, down_bias)``. On a
    Hopper GPU, for large enough GEMMs in 16 bits, the up-projection saves GELU's derivative, and
    the down dgrad GEMM multiplies by it and sums the gradient of ``up_bias``. The backward pass
    keeps :math:`x W_{up}`, or there the derivative, and the hidden layer, in the dtype of ``x``.

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
        ValueError: A weight is not a matrix with as many rows as its input has columns, a bias is
            not as wide as its weight, or the activation or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``matmul_forward_cublaslt`` and ``matmul_backward``, with GELU fused.
    """
    check_floating(up_bias=up_bias)  # check_layer takes None
    check_layer("up_weight", up_weight, "up_bias", up_bias, x)
    hidden = jax.ShapeDtypeStruct((*x.shape[:-1], up_weight.shape[1]), x.dtype)
    check_layer("down_weight", down_weight, "down_bias", down_bias, hidden, "the hidden layer")
    if activation != "gelu":
        raise ValueError(f"activation is {activation!r}; it must be 'gelu'")
    backend = resolve(backend)
    saves = saves_derivative(backend, x, up_weight, up_bias, down_weight)
    arrays = (x, up_weight, up_bias, down_weight, down_bias)
    return _mlp(*arrays, backend=backend, options=_MLPOptions(saves))


@dataclasses.dataclass(frozen=True)
class _MLPOptions:
    saves_derivative: bool


def _mlp_forward(options, backend, x, up_weight, up_bias, down_weight, down_bias):
    hidden, saved = _hidden(backend, x, up_weight, up_bias, down_weight, options.saves_derivative)
    out = jnp.dot(hidden, down_weight)
    out = out if down_bias is None else out + down_bias
    out, hidden, saved = checkpoint_name((out, hidden, saved), "linear")
    return out, ((x, up_weight, up_bias, down_weight, down_bias), hidden, saved)


def _mlp_backward(_: Any, backend, residuals, dout):
    (x, up_weight, up_bias, down_weight, down_bias), hidden, saved = residuals
    ddown_bias = None
    if down_bias is not None:
        ddown_bias = dispatch(BIAS_ADD, Direction.BACKWARD, backend, dout)
    ddown_weight, dout = wgrad(hidden, dout)
    dh, dup_bias = matmul_dgelu(backend, dout, down_weight, saved, up_bias)
    return *dgrad_and_wgrad(x, up_weight, dh), dup_bias, ddown_weight, ddown_bias


_mlp = with_backward(
    "mlp",
    _mlp_forward,
    _mlp_backward,
    sharding=ShardingRule("... _, _ F, F, F' _, !_ -> ... _ +F; ... F, ... F", "... F"),
)
