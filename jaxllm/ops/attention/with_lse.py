"""Attention that returns the logarithm of the softmax's denominator, and attention sinks.

The derivative of either needs no kernel of its own. With ``dlse`` the gradient of ``lse``, the
softmax's rule becomes ``ds = p * (dp - (delta - dlse))``, so a backward kernel subtracts ``dlse``
from ``delta`` and does the rest as before.

A sink changes ``out`` and ``lse``, and nothing else that a backward kernel reads: see
:mod:`jaxllm.ops.attention.sink`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from jaxllm.core import shards
from jaxllm.core.backend import Backend
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.attention import context, packing


def make_rule(
    op: Op, op_of_piece: Op, *, sharding: ShardingRule | Callable[[Any], ShardingRule]
) -> Callable[..., Any]:
    """The function of an op of attention that returns ``(out, lse)``, with its derivative rule.

    Args:
        op: The op: of queries, keys and values, or of a projection that holds them.
        op_of_piece: The op of queries, keys and values, for a sequence in shards.
        sharding: How the op may be sharded, of the arrays that the function takes; or a function
            of the options.

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
        of_heads = () if sinks is None else (sinks,)
        out, lse = attend(*given, segments, table, *of_heads, **dataclasses.asdict(options))
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
        # Without these the call is that of attention without them.
        more = (dlse, sinks) if sinks is not None else () if dlse is None else (dlse,)
        arrays = (*given, out, lse, dout, segments, table, *more)
        found = attend(*arrays, **dataclasses.asdict(options))
        found = found if isinstance(found, tuple | list) else (found,)
        *gradients, dsinks = found if sinks is not None else (*found, None)
        return (*gradients, None, None, dsinks)

    return with_backward(op.name, forward, backward, sharding=sharding, outputs=2)
