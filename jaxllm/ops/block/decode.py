"""A block of a Llama for one token per sequence, which decoding runs as one op."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.sharding_rule import WHOLE, ShardingRule
from jaxllm.ops.activation.api import swiglu_packed
from jaxllm.ops.attention.api_decode import decode_attention
from jaxllm.ops.block import cuda
from jaxllm.ops.checks import (
    as_finite,
    as_int32,
    check_floating,
    check_floating_of_any_width,
    check_integer,
    check_same_dtype,
    check_shape,
    is_certain,
)
from jaxllm.ops.gemm.api import FEW_ROWS, linear
from jaxllm.ops.norm.api import rms_norm
from jaxllm.ops.pages import check_table, count_keys, places_of
from jaxllm.ops.rotary.api import rope
from jaxllm.ops.weights import Quantized, Transposed
from jaxllm.ops.window import Window, is_ring, last_tokens

Matrix = Transposed | Quantized


def decode_block(
    residual: Float[Array, "B D"],
    norm1: Float[Array, " D"],
    norm2: Float[Array, " D"],
    qkv: Matrix,
    out: Matrix,
    gate_up: Matrix,
    down: Matrix,
    cos: Float[Array, "B R"],
    sin: Float[Array, "B R"],
    k_cache: Float[Array, "B S K H"],
    v_cache: Float[Array, "B S K H"],
    lengths: Integer[Array, " B"],
    qkv_bias: Float[Array, " P"] | None = None,
    q_norm: Float[Array, " H"] | None = None,
    k_norm: Float[Array, " H"] | None = None,
    block_table: Integer[Array, "B M"] | None = None,
    *,
    window: Window = None,
    eps: float = 1e-5,
    backend: Backend | None = None,
) -> tuple[Float[Array, "B D"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    r"""One block of a Llama, for one token of each of 1 to 16 sequences.

    .. math::
        h = x + W_{out}\, attention(rope(W_{qkv}\, norm_1(x) + b_{qkv})) \qquad
        out = h + W_{down}\, swiglu(W_{gate\_up}\, norm_2(h))

    At batch 1 the matvecs of a block are so short that the kernels between them count. So norms,
    rotation, activation and residual additions are fused with the matvecs, and each matvec begins
    to read its weights while the one before it ends. Norms of heads have a kernel of their own,
    which rotates too. For inference: it has no derivative.

    Args:
        residual: The residual stream, x; float32, bfloat16 or float16 for the kernels.
        norm1: The scale of the RMS norm before attention, in the dtype of ``residual``.
        norm2: The scale of the RMS norm before the feed-forward layers.
        qkv: The matrix ((N + 2K) H, D) of queries, keys and values: a :class:`Transposed` in the
            dtype of ``residual``, or a :class:`Quantized`; all four matrices are of one form.
        out: The matrix (D, N H) after attention.
        gate_up: The matrix (2F, D) of gates, and then of what they gate.
        down: The matrix (D, F).
        cos: Cosines of the tokens' positions, as :func:`jaxllm.ops.rope_table` makes them; R is
            H / 2; float32 for the kernels.
        sin: Their sines.
        k_cache: Keys, of at most S tokens; written in place where it is donated. With a
            ``block_table`` a pool of pages, (P, page, K, H), which all sequences share.
        v_cache: Values, likewise.
        lengths: The tokens that each sequence has; a full cache gets no more, but for a ring.
        qkv_bias: One offset a row of ``qkv``, in the dtype of ``residual``, as in Qwen2; None for
            none.
        q_norm: The scale of an RMS norm of each query head, before the rotation, in the dtype of
            ``residual``, as in Qwen3; None for no norm. It comes with ``k_norm``.
        k_norm: The scale of an RMS norm of each key head.
        block_table: The pages of each sequence in order, (B, M), then P, which is no page; as in
            :class:`jaxllm.inference.paged_cache.PagedKVCache`. Without a window the results have
            the bits of a cache in one piece with M * page slots. None for such a cache.
        window: How many tokens the query sees, itself included, as in Mistral, or a pair as in
            :func:`decode_attention`; None for all. Caches in one piece have at most as many slots.
            If they have as many they are a ring: token t is in slot ``t % window``, and the new one
            replaces the oldest.
        eps: Added to the mean squares; finite, at least 0.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        ``(out, k_cache, v_cache)``: the new residual, and the caches with one more token.

    Raises:
        TypeError: An array is of the wrong kind or dtype.
        ValueError: The shapes do not fit together, ``eps`` is not in its range, or the backend is
            unknown.
        BackendError: The backend that was asked for cannot serve the call.
    """
    check_floating(residual=residual)
    if residual.ndim != 2 or is_certain(lambda: not 1 <= residual.shape[0] <= FEW_ROWS):
        raise ValueError(
            f"residual has shape {residual.shape}; it must be (B, D) with B from 1 to {FEW_ROWS}"
        )
    B, D = residual.shape
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_floating(**{name: cache})
        check_same_dtype(name, cache, "residual", residual)
    in_pages = block_table is not None
    if k_cache.ndim != 4 or (not in_pages and k_cache.shape[0] != B) or k_cache.shape[-1] % 2:
        wanted = "(P, page, K, H)" if in_pages else f"({B}, S, K, H)"
        raise ValueError(f"k_cache has shape {k_cache.shape}; it must be {wanted}, H even")
    check_shape("v_cache", v_cache, k_cache.shape, "the shape of k_cache")
    _, _, K, H = k_cache.shape
    _check_matrices(residual, K * H, {"qkv": qkv, "out": out, "gate_up": gate_up, "down": down})
    for name, norm in (("norm1", norm1), ("norm2", norm2)):
        check_floating(**{name: norm})
        check_shape(name, norm, (D,), f"one a column of residual {residual.shape}")
    for name, table in (("cos", cos), ("sin", sin)):
        check_floating(**{name: table})
        check_shape(name, table, (B, H // 2), "one a sequence and pair of a head's columns")
    check_integer(lengths=lengths)
    check_shape("lengths", lengths, (B,), f"one a sequence of residual {residual.shape}")
    _check_extras(residual, _rows(qkv), H, qkv_bias, q_norm, k_norm)
    arrays = (residual, norm1, norm2, qkv, out, gate_up, down, cos, sin, k_cache, v_cache)
    arrays = (*arrays, as_int32(lengths), qkv_bias, q_norm, k_norm)
    seen = last_tokens(window)
    if block_table is None:
        options: dict[str, Any] = {"ring": is_ring("k_cache", k_cache.shape[1], seen)}
        options["window"] = None  # a ring has no other tokens
    else:
        check_table(block_table, k_cache, f"residual {residual.shape}", B)
        block_table = as_int32(block_table)
        options = {"ring": False, "window": seen}
    options["eps"] = as_finite("eps", eps, least=0)
    arrays = (*arrays, block_table)
    return dispatch(DECODE_BLOCK, Direction.INFERENCE, resolve(backend), *arrays, **options)


def _rows(matrix: Matrix) -> int:
    return (matrix.q if isinstance(matrix, Quantized) else matrix.array).shape[0]


def _check_extras(
    residual: Array,
    outputs: int,
    width: int,
    qkv_bias: Array | None,
    q_norm: Array | None,
    k_norm: Array | None,
) -> None:
    extras = {
        "qkv_bias": (qkv_bias, outputs, "one a row of qkv"),
        "q_norm": (q_norm, width, "one a column of a query head"),
        "k_norm": (k_norm, width, "one a column of a key head"),
    }
    for name, (array, size, why) in extras.items():
        if array is None:
            continue
        check_floating(**{name: array})
        check_same_dtype(name, array, "residual", residual)
        check_shape(name, array, (size,), why)
    if (q_norm is None) != (k_norm is None):
        missing = "q_norm" if q_norm is None else "k_norm"
        raise ValueError(f"{missing} is None; q_norm and k_norm must both be given, or neither")


def _check_matrices(residual: Array, kv_width: int, matrices: dict[str, Matrix]) -> None:
    D, qkv = residual.shape[1], matrices["qkv"]
    shapes = {}
    for name, matrix in matrices.items():
        if not isinstance(matrix, Transposed | Quantized):
            found = type(matrix).__name__
            raise TypeError(f"{name} is of type {found}; it must be a Transposed or a Quantized")
        if type(matrix) is not type(qkv):
            raise TypeError(f"{name} and qkv must be both Transposed, or both Quantized")
        if isinstance(matrix, Transposed):
            check_floating(**{name: matrix.array})
            check_same_dtype(name, matrix.array, "residual", residual)
            shapes[name] = _matrix_shape(name, matrix.array)
            continue
        q, scales = matrix.q, matrix.scales
        check_integer(**{name: q})
        check_floating_of_any_width(**{f"the scales of {name}": scales})
        if q.dtype != jnp.int8:
            raise TypeError(f"{name} has dtype {q.dtype}; it must be int8 beside its scales")
        shapes[name] = _matrix_shape(name, q)
        _, groups = _matrix_shape(f"the scales of {name}", scales)
        if scales.shape[:-1] != q.shape[:-1] or not groups or q.shape[-1] % groups:
            raise ValueError(f"the scales of {name} have shape {scales.shape}; it is {q.shape}")
        assert isinstance(qkv, Quantized)
        if q.shape[-1] // groups != qkv.q.shape[-1] // qkv.scales.shape[-1]:
            raise ValueError(f"{name} and qkv have groups of unequal lengths")
    heads_width = shapes["qkv"][0] - 2 * kv_width
    wanted = {
        "qkv": (shapes["qkv"][0], D),
        "out": (D, heads_width),
        "gate_up": (2 * shapes["down"][-1], D),
        "down": (D, shapes["down"][-1]),
    }
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise ValueError(
                f"{name} has shape {shapes[name]}; with residual {residual.shape} and key heads of "
                f"{kv_width} columns it must be {shape}"
            )
    if heads_width <= 0 or heads_width % kv_width:
        raise ValueError(
            f"qkv has shape {shapes['qkv']}; with key heads of {kv_width} columns it must have "
            "as many for keys and values, and a multiple of that for queries"
        )


def _matrix_shape(name: str, array: Array) -> tuple[int, ...]:
    if array.ndim != 2:
        raise ValueError(f"{name} has shape {array.shape}; it must have two dimensions")
    return array.shape


def _parts(
    backend, residual, norm1, norm2, qkv, out, gate_up, down, cos, sin, k_cache, v_cache, lengths,
    qkv_bias, q_norm, k_norm, block_table, *, ring, window, eps,
):  # fmt: skip
    """Returns ``(out, k_cache, v_cache)``: what the block is made of."""
    B = residual.shape[0]
    S, K, H = k_cache.shape[1:]

    def matmul(matrix: Matrix, x: Array, bias: Array | None = None) -> Array:
        return linear(x, matrix, bias, backend=backend)

    def norm(x: Array, scale: Array) -> Array:
        return rms_norm(x, scale, eps=eps, backend=backend)

    heads = matmul(qkv, norm(residual, norm1), qkv_bias).reshape(B, 1, -1, H)
    N = heads.shape[2] - 2 * K
    q, k, v = jnp.split(heads, [N, N + K], axis=2)
    if q_norm is not None:
        q, k = norm(q, q_norm), norm(k, k_norm)
    q, k = rope(q, k, cos[:, None], sin[:, None], backend=backend)
    if block_table is not None:
        places = tuple(x[:, 0] for x in places_of(lengths[:, None], block_table, k_cache))
        keys = count_keys(lengths, block_table, k_cache)
    else:
        slots = jnp.where(lengths < 0, lengths, lengths % S) if ring else lengths
        places, keys = (jnp.arange(B), slots), lengths + 1
    k_cache, v_cache = (
        cache.at[places].set(x[:, 0], mode="drop", wrap_negative_indices=False)
        for cache, x in ((k_cache, k), (v_cache, v))
    )
    attended = decode_attention(
        q[:, 0], k_cache, v_cache, keys, block_table=block_table, window=window, backend=backend
    )
    hidden = matmul(out, attended.reshape(B, -1)) + residual
    activated = swiglu_packed(matmul(gate_up, norm(hidden, norm2)), backend=backend)
    return matmul(down, activated) + hidden, k_cache, v_cache


def _sharding(*arrays: Any, **_: Any) -> ShardingRule:
    if arrays[-1] is not None:  # all sequences write to one pool
        return WHOLE
    return ShardingRule(
        "B _, _, _, _ _, _ _, _ _, _ _, B _, B _, B _ _ _, B _ _ _, B, _, _, _, _ _"
        " -> B _, B _ _ _, B _ _ _",
        "B",
    )


DECODE_BLOCK = Op("decode_block", cuda=cuda, parts=_parts, sharding=_sharding)
