"""The two GEMMs of a linear layer's backward pass, dgrad and wgrad, by XLA.

GEMMs write the dtype of their operands: they accumulate in float32 whatever they write, and a
float32 result would cost a pass over memory to round it. For float32 operands the precision is
JAX's ``jax_default_matmul_precision``.
"""

from __future__ import annotations

from jax import Array, lax


def dgrad(dout: Array, weight: Array) -> Array:
    """Returns ``dx = dout @ weight.T``."""
    return lax.dot_general(dout, weight, (((dout.ndim - 1,), (1,)), ((), ())))


def wgrad(x: Array, dout: Array) -> tuple[Array, Array]:
    """Returns ``dweight = x.T @ dout`` over all rows, and ``dout``, which is ready only after it.

    Nothing in a backward pass depends on the gradient of a weight. XLA would schedule it last, and
    keep ``x`` and ``dout`` of many layers until then.
    """
    rows = tuple(range(x.ndim - 1))
    return lax.optimization_barrier((lax.dot_general(x, dout, ((rows, rows), ((), ()))), dout))


def dgrad_and_wgrad(x: Array, weight: Array, dout: Array) -> tuple[Array, Array]:
    """Returns ``(dx, dweight)``."""
    dweight, dout = wgrad(x, dout)
    return dgrad(dout, weight), dweight
