r"""Layers around the kernels of one backend: products by XLA, the rest by kernels.

With :math:`h = x W`, :math:`out = f(h + b)` and :math:`dh = dout \cdot f'(h + b)` (:math:`f' = 1`
without an activation)

.. math::
    dx = dh\, W^T \qquad dW = x^T dh \qquad db = \sum_{rows} dh

The functions take the module that holds a backend's activations, and its options. One kernel gives
``dh`` and ``db`` together. ``mlp`` is two such layers, the first with the activation.

Where a residual is added to a layer's product and the sum is normalized, the norm's kernels do all
but the products: the gradient of the sum is that of the product, of the residual, and, added up
over rows, of the layer's bias.

Where a norm precedes a layer, its scale :math:`s` and bias :math:`t` belong to the layer:
:math:`(s \hat x + t) W + b = \hat x W' + b'` with :math:`W' = diag(s) W` and :math:`b' = b + t W`.
What is kept, and what fused kernels see of the norm, is :math:`\hat x` alone. With
:math:`M = \hat x^T dh` the gradients are

.. math::
    dW = diag(s) M + t\, db^T \qquad ds = \sum_{columns} W \odot M \qquad dt = W db

so that no sum over rows is left of the norm's.

Without an activation XLA adds the bias in the GEMM's epilogue, but only a bias that is an argument
of the program: one that is computed, or cut out of an array of all layers, costs a pass over the
output. With an activation the GEMM writes ``h``, without the bias, which is what the backward
keeps, and one kernel makes ``out`` of it.

Products are written in the dtype of their factors: a GEMM accumulates in float32 whatever it
writes, and a float32 result would cost a pass over memory to round it. What XLA multiplies float32
factors with is JAX's ``jax_default_matmul_precision``.

``matmul`` is one such layer whose product is the backend's own, of factors as they are or turned.
With ``A`` and ``B`` for the factors after they have been turned, :math:`dA = dh\, B^T` and
:math:`dB = A^T dh` are two more products of the kind, and the gradient of a factor that is stored
turned is the transpose of that: the factors of its product change places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxllm.ops.gemm import slopes


def forward(kernels: Any, x, weight, bias, activation, **options):
    """Returns ``(out, h)``; without an activation ``h`` is None."""
    h = jnp.dot(x, weight)
    if activation is None:
        return (h if bias is None else h + bias), None
    if bias is None:
        return kernels.gelu_forward(h, **options), h
    return kernels.bias_gelu_forward(h, bias, **options), h


def backward(kernels: Any, x, weight, bias, h, dout, activation, **options):
    """Returns ``(dx, dweight, dbias)``."""
    dh, dbias = dout, None
    if activation is None and bias is not None:
        dbias = kernels.bias_add_backward(dout, **options)
    elif activation is not None and bias is None:
        dh = kernels.gelu_backward(h, dout, **options)
    elif activation is not None:
        dh, dbias = kernels.bias_gelu_backward(h, bias, dout, **options)
    return *factor_gradients(x, weight, dh), dbias


def factor_gradients(x, weight, dout):
    """Returns ``dx = dout @ weight.T`` and ``dweight = x.T @ dout`` over all rows."""
    dweight, dout = weight_gradient_first(x, dout)
    dx = lax.dot_general(dout, weight, (((dout.ndim - 1,), (1,)), ((), ())))
    return dx, dweight


def weight_gradient_first(x, dout):
    """Returns ``dweight``, and a ``dout`` that is there only after it.

    Nothing in a backward pass waits for the gradient of a weight. XLA would leave it for later, and
    keep ``x`` and ``dout`` of many layers until then.
    """
    rows = tuple(range(x.ndim - 1))
    return lax.optimization_barrier((lax.dot_general(x, dout, ((rows, rows), ((), ()))), dout))


def weight_gradients(x, dout, other_x, other_dout):
    """As :func:`weight_gradient_first` for two layers with as many rows.

    Returns:
        ``(dweight, other_dweight, dout, other_dout)``.
    """
    other_dweight, other_dout = weight_gradient_first(other_x, other_dout)
    dweight, dout = weight_gradient_first(x, dout)
    return dweight, other_dweight, dout, other_dout


def mlp_forward(
    kernels: Any,
    x,
    up_weight,
    up_bias,
    down_weight,
    down_bias,
    *,
    activation,
    keeps_slope=False,
    **options,
):
    """Returns ``(out, h, slope, hidden)``: ``h`` before bias and activation, ``hidden`` after them.

    What is kept is ``h`` or, with ``keeps_slope``, the activation's slope, as slopes.py says; the
    other is None.
    """
    hidden, *kept = hidden_layer(kernels, x, up_weight, up_bias, activation, keeps_slope, **options)
    out, _ = forward(kernels, hidden, down_weight, down_bias, None, **options)
    return out, *kept, hidden


def hidden_layer(kernels: Any, x, weight, bias, activation, keeps_slope, **options):
    """Returns ``(hidden, h, slope)``, one of the latter None."""
    hidden, h = forward(kernels, x, weight, bias, activation, **options)
    if not keeps_slope:
        return hidden, h, None
    slope, _ = kernels.bias_gelu_backward(h, bias, jnp.ones_like(hidden), **options)
    return hidden, None, slopes.pack(slope)


def mlp_backward(kernels: Any, arrays, activation, **options):
    """Returns the gradients of ``x``, of ``up``'s weight and bias, and of ``down``'s."""
    x, up_weight, up_bias, down_weight, down_bias, h, slope, hidden, dout = arrays
    dhidden, *ddown = backward(kernels, hidden, down_weight, down_bias, None, dout, None, **options)
    if slope is not None:
        # What is behind the activation is a layer without one.
        dhidden = (dhidden * slopes.unpack(slope, like=dhidden)).astype(x.dtype)
        h, activation = None, None
    return (*backward(kernels, x, up_weight, up_bias, h, dhidden, activation, **options), *ddown)


def linear_add_layer_norm_forward(norms: Any, x, weight, residual, *of_norm, **options):
    """Returns ``(out, total, mean, rstd)``: ``total`` is the sum that is normalized."""
    return norms.add_layer_norm_forward(jnp.dot(x, weight), residual, *of_norm, **options)


def linear_add_layer_norm_backward(norms: Any, arrays, **options):
    """Returns the gradients of ``x, weight, residual, x_bias, scale, bias``."""
    x, weight, *of_norm = arrays
    dtotal, *others = norms.add_layer_norm_backward(*of_norm, **options)
    return *factor_gradients(x, weight, dtotal), dtotal, *others


def residual_forward(x, weight, bias, residual):
    """Returns ``x @ weight + bias + residual``; the product is rounded, and then the sum."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    total = jnp.dot(x, weight).astype(wide) + residual.astype(wide)
    return (total if bias is None else total + bias.astype(wide)).astype(residual.dtype)


def norm_forward(norms: Any, x, weight, bias, residual, *, eps, **options):
    """Returns ``out = x @ weight + bias + residual``, and its rows normalized, mean and rstd."""
    out = residual_forward(x, weight, bias, residual)
    return out, normalize(norms, out, eps=eps, **options)


def normalize(norms: Any, x, *, eps, **options):
    """Returns the rows of ``x`` normalized, without scale and bias, and their mean and rstd."""
    ones = jnp.ones(x.shape[-1:], x.dtype)
    return norms.layer_norm_forward(x, ones, jnp.zeros_like(ones), eps=eps, **options)


def normed_forward(x, weight, bias, normed, scale, norm_bias):
    """Returns a layer of the norm of ``x``, given what :func:`normalize` returns of it.

    The layer's bias stays as it is, an argument, so that the GEMM adds it.
    """
    _, mean, rstd = normed
    wide = jnp.promote_types(x.dtype, jnp.float32)
    # Of x, and not of the normalized rows, which have been rounded.
    rows = (x.astype(wide) - mean[..., None]) * rstd[..., None]
    out = (rows * scale.astype(wide) + norm_bias.astype(wide)).astype(x.dtype)
    return jnp.dot(out, weight) + bias


def normed_backward(
    kernels: Any,
    norms: Any,
    dout,
    weight,
    bias,
    dweight,
    dbias,
    rows,
    rstd,
    scale,
    norm_bias,
    dtotal,
    **options,
):
    """The backward of a layer after a norm, of that norm, and of a residual around both.

    Args:
        kernels: The module of a backend's activations.
        norms: That of its norms.
        dout: The gradient of the layer's output, or of its product, before an activation.
        weight: The layer's.
        bias: The layer's, for kernels that make it part of what the forward made.
        dweight: ``rows.T @ dout``, the gradient of the weight with the norm's scale.
        dbias: The sum of ``dout`` over rows, the gradient of the layer's bias.
        rows: What the norm made, without scale and bias, of the residual.
        rstd: Of the residual.
        scale: The norm's.
        norm_bias: The norm's.
        dtotal: The gradient of what the residual is added to.
        **options: The backend's.

    Returns:
        ``(dx, dscale, dnorm_bias, dweight, dtotal_sum)``: ``dx`` is the gradient of the residual,
        and the last the sum of ``dtotal`` over rows, the gradient of a bias in that sum.
    """
    del bias
    dnormed = lax.dot_general(dout, weight, (((dout.ndim - 1,), (1,)), ((), ())))
    # Of rows that are normalized the mean is zero and rstd one, but for what eps keeps of them; and
    # the chain rule through the norm is linear in rstd.
    statistics = (jnp.zeros_like(rstd), jnp.ones_like(rstd))
    drows, *_ = norms.layer_norm_backward(rows, scale, *statistics, dnormed, **options)
    wide = jnp.promote_types(dtotal.dtype, jnp.float32)
    dx = dtotal.astype(wide) + rstd[..., None].astype(wide) * drows.astype(wide)
    of_layer = without_norm(scale, norm_bias, weight, dweight, dbias)
    return dx.astype(dtotal.dtype), *of_layer, kernels.bias_add_backward(dtotal, **options)


def with_norm(scale, norm_bias, weight, bias) -> tuple[Any, Any]:
    """Returns a layer's weight and bias with the scale and the bias of the norm before it."""
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    scaled = scale.astype(wide)[:, None] * weight.astype(wide)
    offset = jnp.dot(norm_bias.astype(weight.dtype), weight, preferred_element_type=wide)
    # XLA would make them anew in each kernel that reads them.
    layer = (scaled.astype(weight.dtype), (bias.astype(wide) + offset).astype(weight.dtype))
    return lax.optimization_barrier(layer)


def without_norm(scale, norm_bias, weight, dweight, dbias):
    """The gradients of a layer and of the norm before it, given those of :func:`with_norm`'s.

    Returns:
        ``(dscale, dnorm_bias, dweight)``; that of the layer's bias is ``dbias``.
    """
    wide = jnp.promote_types(weight.dtype, jnp.float32)
    wide_dweight, wide_dbias = dweight.astype(wide), dbias.astype(wide)
    dscale = jnp.sum(weight.astype(wide) * wide_dweight, axis=1)
    of_weight = scale.astype(wide)[:, None] * wide_dweight
    of_weight += norm_bias.astype(wide)[:, None] * wide_dbias
    dnorm_bias = jnp.dot(weight, dbias)
    return (
        dscale.astype(scale.dtype),
        dnorm_bias.astype(scale.dtype),
        of_weight.astype(weight.dtype),
    )


def pre_norm_mlp_forward(
    kernels: Any,
    norms: Any,
    arrays,
    *,
    activation,
    eps,
    keeps_slope=False,
    **options,
):
    """The second half of a pre-norm block.

    Returns:
        ``(out, next_normed, rows, rstd, h, slope, hidden)``: ``next_normed`` is ``out`` as
        :func:`normalize` returns it, None where ``x`` does not come so; ``rows`` and ``rstd`` are
        those of ``x``, the others as :func:`mlp_forward` returns them.
    """
    x, normed, scale, bias, up_weight, up_bias, down_weight, down_bias = arrays
    rows, _, rstd = normed or normalize(norms, x, eps=eps, **options)
    up = with_norm(scale, bias, up_weight, up_bias)
    hidden, *kept = hidden_layer(kernels, rows, *up, activation, keeps_slope, **options)
    down = (hidden, down_weight, down_bias, x)
    if normed is None:
        out, next_normed = residual_forward(*down), None
    else:
        out, next_normed = norm_forward(norms, *down, eps=eps, **options)
    return out, next_normed, rows, rstd, *kept, hidden


def pre_norm_mlp_backward(kernels: Any, norms: Any, arrays, activation, **options):
    """Returns the gradients of ``x``, of the norm's scale and bias, and of both layers."""
    rows, rstd, scale, bias, up_weight, up_bias, down_weight, h, slope, hidden, dout = arrays
    ddown_weight, dout = weight_gradient_first(hidden, dout)
    dhidden = lax.dot_general(dout, down_weight, (((dout.ndim - 1,), (1,)), ((), ())))
    _, offset = with_norm(scale, bias, up_weight, up_bias)
    of_hidden = (h, slope, offset, dhidden, activation)
    dh, dup_bias = hidden_layer_backward(kernels, *of_hidden, **options)
    dweight, dh = weight_gradient_first(rows, dh)
    arrays = (dh, up_weight, up_bias, dweight, dup_bias, rows, rstd, scale, bias, dout)
    gradients = normed_backward(kernels, norms, *arrays, **options)
    dx, dscale, dbias, dup_weight, ddown_bias = gradients
    return dx, dscale, dbias, dup_weight, dup_bias, ddown_weight, ddown_bias


def hidden_layer_backward(kernels: Any, h, slope, bias, dhidden, activation, **options):
    """Returns the gradients of the hidden layer's product and of its bias."""
    del activation  # there is one
    if slope is None:
        return kernels.bias_gelu_backward(h, bias, dhidden, **options)
    dh = (dhidden * slopes.unpack(slope, like=dhidden)).astype(dhidden.dtype)
    return dh, kernels.bias_add_backward(dh, **options)


def matmul_slower(*_, **__) -> str:
    """Why ``auto`` leaves calls of ``matmul`` to XLA, rather than to a backend's own product."""
    return "XLA's own product, by cuBLAS, takes the fastest of many kernels for each shape"


def matmul_backward(kernels: Any, multiply: Callable, a, b, bias, h, dout, turns, **options):
    """Returns ``(da, db, dbias)``.

    ``multiply(a, b, transpose_a, transpose_b)`` is the backend's product; ``turns`` says whether
    ``a`` and whether ``b`` is stored turned. There is an activation where there is an ``h``.
    """
    dbias = None
    if bias is None:
        dh = dout if h is None else kernels.gelu_backward(h, dout, **options)
    elif h is None:
        dh, dbias = dout, kernels.bias_add_backward(dout, **options).astype(bias.dtype)
    else:
        dh, dbias = kernels.bias_gelu_backward(h, bias.astype(h.dtype), dout, **options)
        dbias = dbias.astype(bias.dtype)
    dh = dh.astype(a.dtype)
    turn_a, turn_b = turns
    da = multiply(b, dh, turn_b, True) if turn_a else multiply(dh, b, False, not turn_b)
    db = multiply(dh, a, True, turn_a) if turn_b else multiply(a, dh, not turn_a, False)
    return da, db, dbias
