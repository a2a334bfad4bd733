r"""``linear`` around the kernels of one backend: the products are XLA's, the rest is the kernels'.

With :math:`h = x W`, :math:`out = f(h + b)` and :math:`dh = dout \cdot f'(h + b)` (:math:`f' = 1`
without an activation)

.. math::
    dx = dh\, W^T \qquad dW = x^T dh \qquad db = \sum_{rows} dh

The functions take the module that holds a backend's activations, and its options. One kernel gives
``dh`` and ``db`` together.

Without an activation XLA adds the bias in the GEMM's epilogue, where it costs nothing. It has no
epilogue with an activation: there the GEMM writes ``h``, without the bias, which is what the
backward keeps, and one kernel makes ``out`` of it.

Products are written in the dtype of their factors: a GEMM accumulates in float32 whatever it
writes, and a float32 result would cost a pass over memory to round it. What XLA multiplies float32
factors with is JAX's ``jax_default_matmul_precision``.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax


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
    rows = tuple(range(x.ndim - 1))
    dx = lax.dot_general(dh, weight, (((dh.ndim - 1,), (1,)), ((), ())))
    dweight = lax.dot_general(x, dh, ((rows, rows), ((), ())))
    return dx, dweight, dbias
