"""Token and position embeddings."""

from __future__ import annotations

import functools
from typing import Literal, overload

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from jaxllm.core import vma
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Op, dispatch
from jaxllm.ops.checks import check_floating, check_integer, check_same_dtype, is_certain
from jaxllm.ops.embedding import cuda, pallas, reference

EMBED = Op("embed", reference=reference, pallas=pallas, cuda=cuda)


@overload
def embed(
    tokens: Integer[Array, "*B T"],
    token_table: Float[Array, "V D"],
    position_table: Float[Array, "P D"] | None = None,
    *,
    returns_table: Literal[False] = False,
    backend: Backend | None = None,
) -> Float[Array, "*B T D"]: ...
@overload
def embed(
    tokens: Integer[Array, "*B T"],
    token_table: Float[Array, "V D"],
    position_table: Float[Array, "P D"] | None = None,
    *,
    returns_table: Literal[True],
    backend: Backend | None = None,
) -> tuple[Float[Array, "*B T D"], Float[Array, "V D"]]: ...
def embed(
    tokens: Integer[Array, "*B T"],
    token_table: Float[Array, "V D"],
    position_table: Float[Array, "P D"] | None = None,
    *,
    returns_table: bool = False,
    backend: Backend | None = None,
) -> Float[Array, "*B T D"] | tuple[Float[Array, "*B T D"], Float[Array, "V D"]]:
    r"""Looks up each token's row of a table and adds the row of its position.

    .. math::
        out_{bt} = wte_{tokens_{bt}} + wpe_t

    A token below 0 reads row 0 and one beyond the vocabulary reads the last row, as
    ``jnp.take(mode="clip")`` has it. The gradient of ``token_table`` adds up in float32, with
    the kernels in a fixed order, and is returned in the table's dtype; that of ``position_table``
    is zero for the positions from T on.

    Args:
        tokens: Row numbers of ``token_table``; used as int32.
        token_table: One row a token; float32, bfloat16 or float16 for the kernels.
        position_table: One row a position, of which the first T are read, in the dtype of
            ``token_table``; None for no positions.
        returns_table: Whether to return ``token_table`` too, for whatever else reads it, such as a
            head that is tied to it. The gradient that comes back along it is added to in its place,
            which saves passes over memory.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The embeddings, in the dtype of ``token_table``; with ``returns_table`` a pair of them and
        of ``token_table``.

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
    arrays = (tokens.astype(jnp.int32), token_table, position_table)
    if returns_table:
        return _embed_and_table(*arrays, resolve(backend))
    return _embed(*arrays, resolve(backend))


def _check_position_table(tokens: Array, token_table: Array, position_table: Array) -> None:
    check_floating(position_table=position_table)
    check_same_dtype("position_table", position_table, "token_table", token_table)
    width, length = token_table.shape[1], tokens.shape[-1]
    if position_table.ndim != 2 or position_table.shape[1] != width:
        raise ValueError(
            f"position_table has shape {position_table.shape}; it must be (P, {width}), "
            f"as wide as token_table {token_table.shape}"
        )
    if is_certain(lambda: length > position_table.shape[0]):
        raise ValueError(
            f"tokens has shape {tokens.shape}, {length} positions; position_table "
            f"{position_table.shape} has rows for {position_table.shape[0]}"
        )


@functools.partial(vma.custom_vjp, nondiff_argnums=(3,))
def _embed(tokens, token_table, position_table, backend):
    return _embed_forward(tokens, token_table, position_table, backend)[0]


def _embed_forward(tokens, token_table, position_table, backend):
    out = dispatch(EMBED, "forward", backend, tokens, token_table, position_table)
    return checkpoint_name(out, "embed"), (tokens, token_table, position_table)


def _embed_backward(backend, residuals, dout):
    return None, *dispatch(EMBED, "backward", backend, *residuals, dout, None)


_embed.defvjp(_embed_forward, _embed_backward)


@functools.partial(vma.custom_vjp, nondiff_argnums=(3,))
def _embed_and_table(tokens, token_table, position_table, backend):
    return _embed_forward(tokens, token_table, position_table, backend)[0], token_table


def _embed_and_table_forward(tokens, token_table, position_table, backend):
    out, residuals = _embed_forward(tokens, token_table, position_table, backend)
    return (out, token_table), residuals


def _embed_and_table_backward(backend, residuals, cotangents):
    return None, *dispatch(EMBED, "backward", backend, *residuals, *cotangents)


_embed_and_table.defvjp(_embed_and_table_forward, _embed_and_table_backward)
