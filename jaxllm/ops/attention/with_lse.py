"""Attention that returns the logarithm of the softmax's denominator, and attention sinks.

The derivative of either needs no kernel of its own. With ``dlse`` the gradient of ``lse``, the
softmax's rule becomes ``ds = p * (dp - (delta - dlse))``, so a backward kernel subtracts ``dlse``
from ``delta`` and does the rest as before.

A sink is a key of one head with a score of its own and the value zero. The kernels do not see it:
from their ``out`` and ``lse`` follow ``out * sigmoid(lse - sink)`` and ``logaddexp(lse, sink)``.
A backward kernel that is given those two computes the gradients of queries, keys and values with
the sink: its probabilities are ``exp(s - lse)``, and its ``delta`` the sum of ``dout * out``. What
is left is the sink's own gradient, with ``dp`` zero: ``exp(sink - lse) * (dlse - delta)``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxllm.core import shards
from jaxllm.core.backend import Backend
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.attention import context, packing


def make_rule(op: Op, op_of_piece: Op, *, sharding: ShardingRule) -> Callable[..., Any]:
    """The function of an op of attention that returns ``(out, lse)``, with its derivative rule.

    Args:
        op: The op: of queries, keys and values, or of a projection that holds them.
        op_of_piece: The op of queries, keys and values, for a sequence in shards.
        sharding: How the op may be sharded, of the arrays that the function takes.

    Returns:
        ``fn(*given, segments, rope_table, sinks, backend=, options=)``, where ``given`` are the
        arrays before the segments, a bias the last of them, and anything after them may be None.
    """

    def implementation(direction: Direction, backend: Backend, given: Any) -> Callable[..., Any]:
        shard = shards.current_shard()
        q, k = given[:2] if op is op_of_piece else given * 2
        if not context.is_needed(shard, q, k):
            return functools.partial(dispatch, op, direction, backend)
        in_context, on_projection = {
            Direction.FORWARD: (context.forward, packing.forward),
            Direction.BACKWARD: (context.backward, packing.backward),
        }[direction]
        attend = functools.partial(in_context, op_of_piece, backend, shard)
        if len(given) > 3:  # a bias too
            return lambda q, k, v, bias, *rest, **options: attend(
                q, k, v, *rest, bias=bias, **options
            )
        return attend if op is op_of_piece else on_projection(attend)

    def forward(options: Any, backend: Backend, *arrays: Any) -> tuple[Any, Any]:
        *given, segments, table, sinks = arrays
        attend = implementation(Direction.FORWARD, backend, given)
        out, lse = attend(*given, segments, table, **dataclasses.asdict(options))
        if sinks is not None:
            out, lse = _with_sinks(out, lse, sinks)
        out, lse = checkpoint_name((out, lse), "flash_attention")
        return (out, lse), (arrays, out, lse)

    def backward(
        options: Any, backend: Backend, residuals: Any, dout: Array, dlse: Array | None
    ) -> tuple:
        (*given, segments, table, sinks), out, lse = residuals
        if dlse is not None:
            # The lse of a query without keys is constant; of it the caller's own derivative may
            # be no number, and times a probability of zero it would still be none.
            dlse = jnp.where(lse == -jnp.inf, 0, dlse)
        attend = implementation(Direction.BACKWARD, backend, given)
        # Without a gradient of lse the call is that of attention without it.
        more = () if dlse is None else (dlse,)
        arrays = (*given, out, lse, dout, segments, table, *more)
        found = attend(*arrays, **dataclasses.asdict(options))
        found = found if isinstance(found, tuple | list) else (found,)
        dsinks = None if sinks is None else _sinks_gradient(out, lse, dout, dlse, sinks)
        return (*found, None, None, dsinks)

    return with_backward(op.name, forward, backward, sharding=sharding, outputs=2)


def _heads(x: Array, lse: Array) -> Array:
    """``out`` or its gradient as (B, T, N, H), in the dtype of ``lse``."""
    B, N, T = lse.shape
    return x.reshape(B, T, N, math.prod(x.shape[2:]) // N).astype(lse.dtype)


def _with_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """``(out, lse)`` of a softmax whose denominators have one more term each."""
    sinks = sinks.astype(lse.dtype)[:, None]
    # Of a query without keys lse is -inf, as a sink may be that is switched off.
    share = jnp.where(lse == -jnp.inf, 0, jax.nn.sigmoid(lse - sinks))
    scaled = _heads(out, lse) * share.swapaxes(1, 2)[..., None]
    return scaled.astype(out.dtype).reshape(out.shape), jnp.logaddexp(lse, sinks)


def _sinks_gradient(out: Array, lse: Array, dout: Array, dlse: Array | None, sinks: Array) -> Array:
    """The gradient of the sinks, of the results with them."""
    delta = (_heads(out, lse) * _heads(dout, lse)).sum(axis=-1).swapaxes(1, 2)
    dscores = -delta if dlse is None else dlse - delta
    wide = sinks.astype(lse.dtype)[:, None]
    p = jnp.where(lse == -jnp.inf, 0, jnp.exp(wide - lse))
    return (p * dscores).sum(axis=(0, 2)).astype(sinks.dtype)
