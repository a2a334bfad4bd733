"""Token and position embeddings."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from jaxllm.core import partition
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.derivatives import map_together
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.checks import (
    as_int32,
    check_floating,
    check_integer,
    check_same_dtype,
    is_certain,
)
from jaxllm.ops.embedding import cuda, pallas, reference

EMBED = Op("embed", reference=reference, pallas=pallas, cuda=cuda)


def embed(
    tokens: Integer[Array, "*B T"],
    token_table: Float[Array, "V D"],
    position_table: Float[Array, "P D"] | None = None,
    *,
    backend: Backend | None = None,
) -> Float[Array, "*B T D"]:
    r"""Looks up the row of each token in a table and adds the row of its position.

    .. math::
        out_{bt} = wte_{tokens_{bt}} + wpe_t

    A token below 0 reads row 0 and one beyond the vocabulary reads the last row, as with
    ``jnp.take(mode="clip")``. The gradient of ``token_table`` is summed in float32, by the kernels
    in a fixed order, and has the dtype of the table. The gradient of ``position_table`` is zero for
    positions from T on.

    Args:
        tokens: Row indices of ``token_table``, of any integer dtype; used as int32.
        token_table: One row per token; float32, bfloat16 or float16 for the kernels.
        position_table: One row per position, in the dtype of ``token_table``; the first T are read.
            None for no positions.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The embeddings, in the dtype of ``token_table``.

    Raises:
        TypeError: ``tokens`` is not of an integer dtype, a table is not floating-point, or
            ``position_table`` differs from ``token_table`` in dtype.
        ValueError: ``tokens`` has no axis, a table is not a matrix, ``token_table`` has no rows,
            the tables differ in width, T is beyond the last row of ``position_table``, or the
            backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``encoder_forward`` and ``encoder_backward``.

    Example:
        >>> tokens = jnp.array([[1, 0, 2]])
        >>> out = jaxllm.ops.embed(tokens, jnp.ones((50304, 768)), jnp.zeros((1024, 768)))
    """
    arrays = _check_arrays(tokens, token_table, position_table)
    return _embed(*arrays, backend=resolve(backend))


def tied_embed(
    tokens: Integer[Array, "*B T"],
    token_table: Float[Array, "V D"],
    position_table: Float[Array, "P D"] | None = None,
    *,
    backend: Backend | None = None,
) -> tuple[Float[Array, "*B T D"], Float[Array, "V D"]]:
    """:func:`embed`, and the table as the LM head: their gradients are summed in one array.

    For a model whose LM head is tied to the token table. The backward kernel of the embedding adds
    to the gradient of ``lm_head`` in place, which saves passes over a (V, D) array.

    Args:
        tokens: As in :func:`embed`.
        token_table: As in :func:`embed`.
        position_table: As in :func:`embed`.
        backend: As in :func:`embed`.

    Returns:
        ``(embeddings, lm_head)``, where ``lm_head`` is ``token_table``.

    Raises:
        TypeError: As in :func:`embed`.
        ValueError: As in :func:`embed`.
        BackendError: The backend that was asked for cannot serve the call.

    Example:
        >>> x, lm_head = jaxllm.ops.tied_embed(jnp.array([[1, 0, 2]]), jnp.ones((50304, 768)))
        >>> logits = x @ lm_head.T
    """
    arrays = _check_arrays(tokens, token_table, position_table)
    if partition.is_wanted(arrays):
        # Both gradients are sums over devices. XLA adds them first, and communicates one sum.
        return _embed(*arrays, backend=resolve(backend)), token_table
    return _tied_embed(*arrays, token_table, backend=resolve(backend))


def _check_arrays(
    tokens: Array, token_table: Array, position_table: Array | None
) -> tuple[Array, Array, Array | None]:
    """Checks the arguments; returns them with ``tokens`` in int32."""
    check_integer(tokens=tokens)
    check_floating(token_table=token_table)
    if tokens.ndim == 0:
        raise ValueError("tokens has shape (); it must have a last axis, the positions")
    if token_table.ndim != 2 or token_table.shape[0] == 0:
        raise ValueError(
            f"token_table has shape {token_table.shape}; it must be (V, D) with V at least 1"
        )
    if position_table is not None:
        _check_position_table(tokens, token_table, position_table)
    return as_int32(tokens), token_table, position_table


def _check_position_table(tokens: Array, token_table: Array, position_table: Array) -> None:
    check_floating(position_table=position_table)
    check_same_dtype("position_table", position_table, "token_table", token_table)
    width, length = token_table.shape[1], tokens.shape[-1]
    if position_table.ndim != 2 or position_table.shape[1] != width:
        raise ValueError(
            f"position_table has shape {position_table.shape}; it must be (P, {width}), "
            f"as wide as token_table {token_table.shape}"
        )
    rows = position_table.shape[0]
    if not is_certain(lambda: length <= rows):  # a symbolic length needs a constraint
        raise ValueError(
            f"tokens has shape {tokens.shape}, {length} positions; position_table "
            f"{position_table.shape} has rows for {rows}: they must be certain to be enough"
        )


def _embed_forward(shard, backend, tokens, token_table, position_table):
    arrays = (tokens, token_table, position_table)
    positions = _positions_of_shard(shard, tokens, position_table)
    if shard is None or not shard.over("V"):
        out = dispatch(EMBED, Direction.FORWARD, backend, tokens, token_table, positions)
    else:
        out = _embed_of_shard(shard, backend, tokens, token_table, positions)
    return checkpoint_name(out, "embed"), arrays


def _embed_backward(shard, backend, arrays, dout, dlm_head=None):
    tokens, token_table, position_table = arrays
    positions = _positions_of_shard(shard, tokens, position_table)
    if shard is not None and shard.over("V"):
        # The kernels read all of dout: what belongs to other shards is zero.
        tokens, is_here = _rows_of_shard(shard, tokens, token_table)
        dout = jnp.where(is_here[..., None], dout, 0)
    arrays = (tokens, token_table, positions, dout, dlm_head)
    dtable, dpositions = dispatch(EMBED, Direction.BACKWARD, backend, *arrays)
    if dpositions is not None and positions is not position_table:
        whole = jnp.zeros_like(position_table)
        first = _first_position(shard, tokens)
        dpositions = lax.dynamic_update_slice_in_dim(whole, dpositions, first, axis=0)
    return None, dtable, dpositions


def _first_position(shard, tokens):
    return shard.index("T") * tokens.shape[-1]


def _positions_of_shard(shard, tokens, position_table):
    """The rows of the positions that a shard of the sequence has."""
    if shard is None or position_table is None or not shard.over("T"):
        return position_table
    first, count = _first_position(shard, tokens), tokens.shape[-1]
    return lax.dynamic_slice_in_dim(position_table, first, count, axis=0)


def _tied_embed_forward(shard, backend, tokens, token_table, position_table, lm_head):
    out, arrays = _embed_forward(shard, backend, tokens, token_table, position_table)
    outputs = out, lm_head
    return map_together(outputs) if backend == "xla" else outputs, arrays


def _tied_embed_backward(shard, backend, arrays, dout, dlm_head):
    """The gradient of the table has that of the LM head in it, which then has none of its own.

    Not under ``jax.vmap``, where each member adds to the former, and dlm_head may be the sum of
    those of all members already.
    """
    backward = functools.partial(_embed_backward, shard, backend)
    if dlm_head is None or backend == "xla":
        return *backward(arrays, dout, dlm_head), None

    @jax.custom_batching.custom_vmap
    def gradients(arrays, dout, dlm_head):
        return backward(arrays, dout, dlm_head)[1:], jnp.zeros_like(dlm_head)

    @gradients.def_vmap
    def _(size, is_mapped, arrays, dout, dlm_head):
        *axes, _ = jax.tree.map(lambda flag: 0 if flag else None, is_mapped)
        # Of what is mapped, all may be dlm_head: the size is needed then.
        each = jax.vmap(lambda *given: backward(*given)[1:], axes, axis_size=size)
        of_embedding = each(arrays, dout)
        flags = jax.tree.map(lambda _: True, of_embedding)
        return (of_embedding, dlm_head), (flags, is_mapped[-1])

    of_embedding, of_lm_head = gradients(arrays, dout, dlm_head)
    return None, *of_embedding, of_lm_head


def _embed_of_shard(shard, backend, tokens, token_table, position_table):
    """Of the tokens of other shards zeros; the first shard adds the positions."""
    tokens, is_here = _rows_of_shard(shard, tokens, token_table)
    out = dispatch(EMBED, Direction.FORWARD, backend, tokens, token_table, None)
    out = jnp.where(is_here[..., None], out, 0)
    if position_table is None:
        return out
    wide = jnp.promote_types(out.dtype, jnp.float32)
    positions = jnp.where(shard.index("V") == 0, position_table[: tokens.shape[-1]], 0)
    return (out.astype(wide) + positions.astype(wide)).astype(out.dtype)


def _rows_of_shard(shard, tokens, token_table):
    """The row of each token in the shard of the table that has it, and whether it is this shard.

    The tokens of other shards are spread over the rows of this one as they are over those of
    theirs: the backward kernels are slower where many tokens share a row.
    """
    rows = token_table.shape[0]
    tokens = jnp.clip(tokens, 0, rows * shard.count("V") - 1)
    return tokens % rows, tokens // rows == shard.index("V")


def _on_shard(function, shard, *arrays):
    if shard.over("V", "T"):
        _, backend = function.static
        function = function._replace(static=(shard, backend))
    return function(*arrays)


# The gradient of the positions is a sum over V: each token is in one shard.
_SHARDING = ShardingRule(
    "... T, V _, _ _ -> ... T _ +V", "... T V", local=_on_shard, local_backward=_on_shard
)
_embed = with_backward("embed", _embed_forward, _embed_backward, sharding=_SHARDING)
_tied_embed = with_backward(
    "tied_embed",
    _tied_embed_forward,
    _tied_embed_backward,
    sharding=None,  # see tied_embed
    outputs=2,
    maps_together=False,
)
