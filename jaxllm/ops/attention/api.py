"""Attention over whole sequences and caches, and its parts: softmax, repetition of key heads."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer, Num

from jaxllm.core import vma
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Op, dispatch
from jaxllm.ops import streams
from jaxllm.ops.attention import (
    cuda,
    cuda_decode,
    pallas,
    pallas_decode,
    pallas_flash,
    reference,
    reference_decode,
    xla,
)
from jaxllm.ops.checks import (
    as_float,
    as_integer,
    check_floating,
    check_integer,
    check_layer,
    check_pre_norm,
    check_same_dtype,
    check_shape,
    check_way_back,
)
from jaxllm.ops.gemm import products
from jaxllm.ops.gemm.api import LINEAR
from jaxllm.ops.norm.api import normalize

FLASH_ATTENTION = Op(
    "flash_attention",
    reference=reference,
    xla=xla,
    pallas=pallas_flash,
    cuda=cuda,
    # The Pallas kernels come last: no row of the benchmarks has measured them on a GPU yet.
    preference=("cuda", "xla", "pallas"),
)
DECODE_ATTENTION = Op(
    "decode_attention", reference=reference_decode, pallas=pallas_decode, cuda=cuda_decode
)
FLASH_ATTENTION_PACKED = Op(
    "flash_attention_packed",
    reference=reference,
    xla=xla,
    pallas=pallas_flash,
    cuda=cuda,
    preference=FLASH_ATTENTION.preference,
)
# Its forward is that of the op above.
SELF_ATTENTION = Op(
    "self_attention",
    reference=reference,
    xla=xla,
    pallas=pallas_flash,
    cuda=cuda,
    preference=FLASH_ATTENTION.preference,
)
# Made of others, but for what its backward gets from the product after attention.
PRE_NORM_SELF_ATTENTION = Op(
    "pre_norm_self_attention",
    reference=reference,
    xla=xla,
    pallas=pallas_flash,
    cuda=cuda,
    preference=FLASH_ATTENTION.preference,
)
FLASH_ATTENTION_FLOAT8 = Op("flash_attention_float8", reference=reference, cuda=cuda)
SOFTMAX = Op("softmax", reference=reference, pallas=pallas, cuda=cuda)
REPEAT_KV = Op("repeat_kv", reference=reference, pallas=pallas, cuda=cuda)


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    segment_ids: Integer[Array, "B T"]
    | tuple[Integer[Array, "B T"], Integer[Array, "B S"]]
    | None = None,
    rope_table: tuple[Float[Array, "*#B T R"], Float[Array, "*#B T R"]] | None = None,
    interleaved: bool = False,
    backend: Backend | None = None,
) -> Float[Array, "B T N H"]:
    r"""Scaled dot-product attention, of any number of query heads to a key head.

    .. math::
        out_t = \sum_s softmax_s\!\left( scale \cdot q_t \cdot k_s \right) v_s

    Query head n reads key head ``n // (N // K)``. The softmax is float32 whatever the dtype of
    ``q``; between the passes an op keeps its inputs, its output, and one float32 a query and head.

    Which keys a query sees is counted from the end of both sequences, so that the last query
    stands at the last key: query t stands at position ``p = t + S - T``. All of the conditions
    that are asked for must hold. A query that sees no key gives zeros, and has no gradient.

    Args:
        q: The queries; float32, bfloat16 or float16 for the kernels.
        k: The keys, in the dtype of ``q``; K divides N.
        v: The values, in the shape and dtype of ``k``.
        causal: Query t sees the keys ``s <= p`` alone.
        scale: Multiplies the products; None for ``1/sqrt(H)``.
        window: Query t sees the keys ``|p - s| < window`` alone: with ``causal`` the ``window``
            most recent keys, its own position included; without it ``window - 1`` on either side.
        softcap: Bounds each scaled product ``a`` smoothly to ``softcap * tanh(a / softcap)``.
        segment_ids: A query sees the keys of its own segment alone. One array for queries and keys
            alike (T must equal S), or a pair, the queries' and the keys'; used as int32.
        rope_table: Turns ``q`` and ``k`` first, as :func:`jaxllm.ops.rope` does: the cosines and
            sines that :func:`jaxllm.ops.rope_table` makes, (T, R) or (B, T, R), float32 for the
            kernels. T must equal S. They are constants: their gradients are zero.
        interleaved: Whether the columns that turn as a pair are neighbours.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        What each query read, in the shape and dtype of ``q``.

    Raises:
        TypeError: An array is of the wrong kind, or ``k`` or ``v`` differs from ``q`` in dtype.
        ValueError: The shapes do not fit together, N is not a multiple of K, ``window`` is below 1
            or ``softcap`` not above 0, ``rope_table`` comes with T other than S, or the backend is
            unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Dao, "FlashAttention-2" (arXiv:2307.08691); Ainslie et al., "GQA" (arXiv:2305.13245);
    llm.c's ``attention_forward`` and ``attention_backward``.

    Example:
        >>> q = jax.random.normal(jax.random.key(0), (2, 1024, 12, 64), jnp.bfloat16)
        >>> out = jaxllm.ops.flash_attention(q, q, q, causal=True)
    """
    _check_arrays(q, k, v)
    segment_ids = _check_segment_ids(q, k, segment_ids)
    rope_table = _check_rope_table(q, k, rope_table)
    options = _options(causal, scale, window, softcap, q.shape[-1], interleaved)
    return _flash_attention(q, k, v, segment_ids, rope_table, options, resolve(backend))


def flash_attention_packed(
    qkv: Float[Array, "B T (N+2*K)*H"],
    heads: int,
    kv_heads: int | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    rope_table: tuple[Float[Array, "*#B T R"], Float[Array, "*#B T R"]] | None = None,
    interleaved: bool = False,
    backend: Backend | None = None,
) -> Float[Array, "B T N*H"]:
    """:func:`flash_attention` of one projection that holds queries, keys and values.

    The CUDA kernels read the three where they stand, and write their gradients into one array: no
    slice, transpose or concatenation passes over memory.

    Args:
        qkv: For each token the N queries, then the K keys, then the K values, each of width H;
            float32, bfloat16 or float16 for the kernels.
        heads: N.
        kv_heads: K, which divides N; None for N.
        causal: As in :func:`flash_attention`, as are the arguments that follow.
        scale: None for ``1/sqrt(H)``.
        window: How many keys a query sees.
        softcap: A bound on the scores.
        segment_ids: A query sees the keys of its own segment alone.
        rope_table: Cosines and sines that turn queries and keys first.
        interleaved: Whether the columns that turn as a pair are neighbours.
        backend: As in :func:`flash_attention`.

    Returns:
        What each query read, head after head, in the dtype of ``qkv``.

    Raises:
        TypeError: An array is of the wrong kind.
        ValueError: The columns of ``qkv`` are not N + 2K heads, N is not a multiple of K, or as in
            :func:`flash_attention`.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``attention_forward``, whose input is packed the same way.

    Example:
        >>> qkv = jax.random.normal(jax.random.key(0), (2, 1024, 3 * 768), jnp.bfloat16)
        >>> out = jaxllm.ops.flash_attention_packed(qkv, 12, causal=True)
    """
    heads = as_integer("heads", heads)
    kv_heads = heads if kv_heads is None else as_integer("kv_heads", kv_heads)
    _check_projection(qkv, heads, kv_heads)
    B, T, columns = qkv.shape
    H = columns // (heads + 2 * kv_heads)
    q = jax.ShapeDtypeStruct((B, T, heads, H), qkv.dtype)
    segments = _check_segment_ids(q, q, segment_ids)
    rope_table = _check_rope_table(q, q, rope_table)
    options = (*_options(causal, scale, window, softcap, H, interleaved), heads, kv_heads)
    return _flash_attention_packed(qkv, segments, rope_table, options, resolve(backend))


def self_attention(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D P"],
    bias: Float[Array, " P"],
    heads: int,
    kv_heads: int | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    backend: Backend | None = None,
) -> Float[Array, "B T N*H"]:
    r"""The attention of a sequence to itself: a projection to queries, keys and values, and theirs.

    .. math::
        out = attention(qkv) \qquad qkv = x W + b

    As ``flash_attention_packed(linear(x, weight, bias), heads, kv_heads, ...)``, whose backends it
    has, and keeps for the backward pass what those two keep. But as one op it need not read the
    gradient of ``qkv`` again for that of ``bias``: on a Hopper GPU, in 16 bits and with heads 64 or
    128 wide, the CUDA kernels of the backward add it up on their way, in a fixed order. There the
    keys' part of it is zero, as it is but for rounding (a vector added to all keys changes no
    probability), and the values' part the sum of the gradient that comes in.

    The projection after attention is not part of it; nor are a softcap and rotary embeddings.

    Args:
        x: The tokens; float32, bfloat16 or float16 for the kernels.
        weight: The matrix, in the dtype of ``x``; its ``P = (N + 2K) H`` columns are the N queries,
            then the K keys, then the K values.
        bias: One offset a column of ``weight``, in the dtype of ``x``.
        heads: N.
        kv_heads: K, which divides N; None for N.
        causal: As in :func:`flash_attention`, as are the arguments that follow.
        scale: None for ``1/sqrt(H)``.
        window: How many keys a query sees.
        segment_ids: A query sees the keys of its own segment alone.
        backend: As in :func:`flash_attention`; the projection's products are XLA's.

    Returns:
        What each query read, head after head, in the dtype of ``x``.

    Raises:
        TypeError: An array is of the wrong kind, or differs from ``x`` in dtype.
        ValueError: ``x`` is not (B, T, D), ``weight`` does not fit it, ``bias`` is not as wide as
            ``weight``, or as in :func:`flash_attention_packed`.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``matmul_forward``, ``attention_forward`` and their gradients.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (2, 1024, 768), jnp.bfloat16)
        >>> weight, bias = jnp.zeros((768, 3 * 768), x.dtype), jnp.zeros(3 * 768, x.dtype)
        >>> out = jaxllm.ops.self_attention(x, weight, bias, 12, causal=True)
    """
    segments, options = _check_self_attention(
        x, weight, bias, heads, kv_heads, causal, scale, window, segment_ids
    )
    return _self_attention(x, weight, bias, segments, options, resolve(backend))


def pre_norm_self_attention(
    x: Float[Array, "B T D"],
    scale: Float[Array, " D"],
    norm_bias: Float[Array, " D"] | None,
    weight: Float[Array, "D P"],
    bias: Float[Array, " P"],
    out_weight: Float[Array, "N*H D"],
    out_bias: Float[Array, " D"] | None = None,
    *,
    heads: int,
    kv_heads: int | None = None,
    causal: bool = False,
    attention_scale: float | None = None,
    window: int | None = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    eps: float = 1e-5,
    normed: streams.NormedRows | None = None,
    backend: Backend | None = None,
) -> Float[Array, "B T D"] | tuple[Float[Array, "B T D"], streams.NormedRows]:
    r"""The first half of a pre-norm block: the residual stream plus attention to its layer norm.

    .. math::
        out = x + attention(n W + b)\, W_{out} + b_{out} \qquad n = \mathrm{layer\_norm}(x)

    As :func:`jaxllm.ops.pre_norm_mlp` is the second: as ``x + linear(self_attention(layer_norm(x,
    scale, norm_bias), weight, bias, heads, ...), out_weight, out_bias)``, with all that
    :func:`self_attention` fuses. As one op it can do more, as it does under ``"cuda"`` for large
    products in 16 bits on a Hopper GPU: the kernel of the product after attention adds bias and
    stream, before the one rounding, and with ``normed`` normalizes the sum; and that of the
    product that is the gradient of the normalized rows goes on to the gradient of :math:`x`, along
    the norm and along the stream. And attention's backward
    has what it needs beside the gradient of attention's output, its product with that output in
    each head and its sums over rows, of the very product that makes it: for many sequences of a
    multiple of 128 tokens, and heads that are 64 wide and share no keys.

    Args:
        x: The stream; float32, bfloat16 or float16 for the kernels.
        scale: The norm's factor of each column, in the dtype of ``x`` or float32.
        norm_bias: The norm's offset of each column, in the dtype of ``scale``; None for no offset.
        weight: As in :func:`self_attention`.
        bias: As in :func:`self_attention`.
        out_weight: The matrix after attention, back to the stream's width, in the dtype of ``x``.
        out_bias: One offset a column of ``out_weight``, in the dtype of ``x``; None for no offset.
        heads: As in :func:`self_attention`, as are the arguments that follow.
        kv_heads: How many heads of keys and values there are.
        causal: Whether a query sees no later keys.
        attention_scale: What :func:`self_attention` calls ``scale``.
        window: How many keys a query sees.
        segment_ids: A query sees the keys of its own segment alone.
        eps: Added to the variance.
        normed: As in :func:`jaxllm.ops.pre_norm_mlp`.
        backend: As in :func:`self_attention`.

    Returns:
        As :func:`jaxllm.ops.pre_norm_mlp` does.

    Raises:
        TypeError: As in :func:`self_attention` and :func:`jaxllm.ops.pre_norm_mlp`.
        ValueError: As in :func:`self_attention` and :func:`jaxllm.ops.layer_norm`, ``out_weight``
            has not as many columns as ``x``, or ``normed`` is not of the shape of ``x``.
        BackendError: The backend that was asked for cannot serve the call.

    Source: llm.c's ``layernorm_forward``, ``matmul_forward``, ``attention_forward`` and their
    gradients.
    """
    segments, options = _check_self_attention(
        x, weight, bias, heads, kv_heads, causal, attention_scale, window, segment_ids
    )
    *_, N, K = options
    columns = weight.shape[1] // (N + 2 * K) * N
    attended = jax.ShapeDtypeStruct((*x.shape[:2], columns), x.dtype)
    check_layer("out_weight", out_weight, "out_bias", out_bias, attended, "what attention reads")
    check_way_back("out_weight", out_weight, x)
    norm_bias = check_pre_norm(x, scale, "norm_bias", norm_bias)
    streams.check_normed(normed, x)
    arrays = (x, normed, scale, norm_bias, weight, bias, out_weight, out_bias, segments)
    static = (options, as_float("eps", eps), resolve(backend))
    out, next_normed = _pre_norm_self_attention(*arrays, *static)
    return out if normed is None else (out, next_normed)


def _check_self_attention(
    x, weight, bias, heads, kv_heads, causal, scale, window, segment_ids
) -> tuple[Any, tuple]:
    """Checks a projection and what is asked of its attention; returns segments and options."""
    heads = as_integer("heads", heads)
    kv_heads = heads if kv_heads is None else as_integer("kv_heads", kv_heads)
    check_floating(x=x, bias=bias)
    if x.ndim != 3:
        raise ValueError(f"x has shape {x.shape}; it must be (B, T, D)")
    check_layer("weight", weight, "bias", bias, x, columns="P")
    qkv: Any = jax.ShapeDtypeStruct((*x.shape[:2], weight.shape[1]), x.dtype)
    _check_projection(qkv, heads, kv_heads)
    H = weight.shape[1] // (heads + 2 * kv_heads)
    segments = _check_segment_ids(qkv, qkv, segment_ids)
    options = (*_options(causal, scale, window, None, H, False), heads, kv_heads)
    return segments, options


def flash_attention_float8(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    q_scale: Float[Array, " N"],
    k_scale: Float[Array, " K"],
    v_scale: Float[Array, " K"],
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    segment_ids: Integer[Array, "B T"]
    | tuple[Integer[Array, "B T"], Integer[Array, "B S"]]
    | None = None,
    backend: Backend | None = None,
) -> Float[Array, "B T N H"]:
    """:func:`flash_attention` of queries, keys and values in float8; for inference alone.

    What stands for a head is ``q * q_scale``, and likewise of keys and values. With
    ``q_scale[n] = abs(q[:, :, n]).max() / 448`` before the division and rounding no element is lost
    beyond the range of the type.

    The error comes from rounding the inputs: e4m3 has three bits after the leading one, so that an
    element is off by up to 1/16 of itself, and of normal inputs the result by 4 to 5 percent in the
    Euclidean norm. What is computed from the rounded inputs is as exact as with bfloat16: they are
    multiplied as they are, and the weights of the values and the result rounded to bfloat16.

    Args:
        q: The queries; float8_e4m3fn for the kernel.
        k: The keys, in the dtype of ``q``; K divides N.
        v: The values, in the shape and dtype of ``k``.
        q_scale: What each head of the queries is to be multiplied by, float32.
        k_scale: Likewise of the keys.
        v_scale: Likewise of the values.
        causal: As in :func:`flash_attention`, as are the arguments that follow.
        scale: None for ``1/sqrt(H)``.
        window: How many keys a query sees.
        softcap: A bound on the scores.
        segment_ids: A query sees the keys of its own segment alone.
        backend: As in :func:`flash_attention`; there is no Pallas kernel.

    Returns:
        What each query read, in bfloat16.

    Raises:
        TypeError: An array is of the wrong kind, ``k`` or ``v`` differs from ``q`` in dtype, or a
            scale is not float32.
        ValueError: As in :func:`flash_attention`, or a scale has another shape than its heads.
        BackendError: The backend that was asked for cannot serve the call.

    Source: CUDA-Learn-Notes' ``flash_attn_2`` in f8.
    """
    _check_arrays(q, k, v)
    for name, array, heads in (("q", q_scale, q), ("k", k_scale, k), ("v", v_scale, k)):
        check_shape(f"{name}_scale", array, heads.shape[2:3], f"the heads of {name}")
        if array.dtype != jnp.float32:
            raise TypeError(f"{name}_scale has dtype {array.dtype}; it must be float32")
    segment_ids = _check_segment_ids(q, k, segment_ids)
    options = _static(_options(causal, scale, window, softcap, q.shape[-1], False))
    del options["interleaved"]
    arrays = (q, k, v, q_scale, k_scale, v_scale, segment_ids)
    return dispatch(FLASH_ATTENTION_FLOAT8, "", resolve(backend), *arrays, **options)


def decode_attention(
    q: Float[Array, "B N H"],
    k_cache: Num[Array, "B S K H"],
    v_cache: Num[Array, "B S K H"],
    lengths: Integer[Array, " B"],
    k_scales: Float[Array, "B S K"] | None = None,
    v_scales: Float[Array, "B S K"] | None = None,
    *,
    scale: float | None = None,
    backend: Backend | None = None,
) -> Float[Array, "B N H"]:
    r"""Attention of one query a sequence to a cache of keys and values, as decoding has it.

    .. math::
        out = \sum_{s < length} softmax_s\!\left( scale \cdot q \cdot k_s \right) v_s

    Query head n reads key head ``n // (N // K)``; the query heads of a key head share one read of
    it. The caches have room for S tokens, and sequence b has its first ``lengths[b]`` of them. For
    inference alone: there is no derivative.

    Args:
        q: The queries; float32, bfloat16 or float16 for the kernels.
        k_cache: The keys, in the dtype of ``q``, or int8 with ``k_scales``; K divides N.
        v_cache: The values, in the shape and dtype of ``k_cache``.
        lengths: How many tokens of the cache each sequence has, used as int32 and as if it were
            within 0 and S. A sequence without any gives zeros.
        k_scales: Of an int8 cache: what each token's key head is multiplied by; float32 for the
            kernels.
        v_scales: Likewise for the values.
        scale: Multiplies the products; None for ``1/sqrt(H)``.
        backend: As in :func:`flash_attention`.

    Returns:
        What each query read, in the shape and dtype of ``q``.

    Raises:
        TypeError: An array is of the wrong kind, a cache is neither int8 nor of the dtype of ``q``,
            or scales are missing or not wanted.
        ValueError: The shapes do not fit together, N is not a multiple of K, or the backend is
            unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Dao et al., "Flash-Decoding for long-context inference"; CUDA-Learn-Notes' split-KV
    ``flash_attn``.

    Example:
        >>> q = jax.random.normal(jax.random.key(0), (2, 32, 128), jnp.bfloat16)
        >>> cache = jax.random.normal(jax.random.key(1), (2, 1024, 8, 128), jnp.bfloat16)
        >>> out = jaxllm.ops.decode_attention(q, cache, cache, jnp.array([1000, 17]))
    """
    _check_cache(q, k_cache, v_cache, lengths)
    quantized = k_cache.dtype == jnp.int8
    for name, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
        if (scales is not None) != quantized:
            wanted = "given" if quantized else "None"
            raise TypeError(f"{name} must be {wanted} with caches of dtype {k_cache.dtype}")
        if scales is not None:
            check_floating(**{name: scales})
            check_shape(name, scales, k_cache.shape[:3], f"one a head of k_cache {k_cache.shape}")
    scale = q.shape[-1] ** -0.5 if scale is None else as_float("scale", scale)
    arrays = (q, k_cache, v_cache, lengths.astype(jnp.int32), k_scales, v_scales)
    return dispatch(DECODE_ATTENTION, "", resolve(backend), *arrays, scale=scale)


def softmax(
    x: Float[Array, "*rows S"],
    *,
    scale: float = 1.0,
    causal: bool = False,
    backend: Backend | None = None,
) -> Float[Array, "*rows S"]:
    r"""The softmax along the last axis, of scores or of anything else.

    .. math::
        out_s = \frac{e^{scale \cdot x_s - m}}{\sum_r e^{scale \cdot x_r - m}}
        \qquad m = \max_r scale \cdot x_r

    In float32 whatever the dtype of ``x``. Between the passes the op keeps its output alone.

    Args:
        x: The scores; float32, bfloat16 or float16 for the kernels.
        scale: Multiplies the scores.
        causal: ``x`` is (..., T, S), the scores of T queries and S keys, and query t sees the keys
            ``s <= t + S - T`` alone: the last query stands at the last key, as in
            :func:`flash_attention`. All else is zero, the whole row of a query that sees no key
            (T above S). What ``x`` holds in those places does not matter.
        backend: As in :func:`flash_attention`.

    Returns:
        The probabilities, in the shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` is not floating-point.
        ValueError: ``x`` has no last axis, or ``causal`` and no axis before it, or the backend is
            unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (arXiv:1805.02867);
    llm.c's ``softmax_forward_kernel5`` and ``softmax_autoregressive_backward``.

    Example:
        >>> scores = jax.random.normal(jax.random.key(0), (2, 12, 1024, 1024), jnp.bfloat16)
        >>> p = jaxllm.ops.softmax(scores, scale=0.125, causal=True)
    """
    check_floating(x=x)
    wanted = 2 if causal else 1
    if x.ndim < wanted:
        axes = "(..., T, S)" if causal else "(..., S)"
        raise ValueError(f"x has shape {x.shape}; it must be {axes}")
    return _softmax(x, (as_float("scale", scale), bool(causal)), resolve(backend))


def repeat_kv(
    x: Float[Array, "*B S K H"], groups: int, *, backend: Backend | None = None
) -> Float[Array, "*B S N H"]:
    """Repeats each key or value head for the query heads that share it: ``N = K * groups``.

    Head n of the result is head ``n // groups`` of ``x``; the gradient of a head is the sum of
    those of its copies, in float32. :func:`flash_attention` shares key heads without copies.

    Args:
        x: Keys or values; float32, bfloat16 or float16 for the kernels.
        groups: The number of query heads to a key head.
        backend: As in :func:`flash_attention`.

    Returns:
        The repeated heads, in the dtype of ``x``.

    Raises:
        TypeError: ``x`` is not floating-point.
        ValueError: ``x`` has less than two axes, ``groups`` is below 1, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Ainslie et al., "GQA" (arXiv:2305.13245); llama3.cuda's ``repeat_interleave``.
    """
    check_floating(x=x)
    if x.ndim < 2:
        raise ValueError(f"x has shape {x.shape}; it must be (..., K, H)")
    groups = as_integer("groups", groups)
    if groups < 1:
        raise ValueError(f"groups is {groups}; it must be at least 1")
    return _repeat_kv(x, groups, resolve(backend))


def _check_arrays(q: Array, k: Array, v: Array) -> None:
    check_floating(q=q, k=k, v=v)
    if q.ndim != 4 or q.shape[-1] == 0:
        raise ValueError(f"q has shape {q.shape}; it must be (B, T, N, H) with H at least 1")
    B, _, N, H = q.shape
    if k.ndim != 4 or (k.shape[0], k.shape[3]) != (B, H):
        raise ValueError(
            f"k has shape {k.shape}; it must be ({B}, S, K, {H}), with the batch and the head "
            f"width of q {q.shape}"
        )
    check_shape("v", v, k.shape, "the shape of k")
    K = k.shape[2]
    if K == 0 or N % K:
        raise ValueError(
            f"k has shape {k.shape}, {K} heads; their number must divide that of q {q.shape}, {N}"
        )
    check_same_dtype("k", k, "q", q)
    check_same_dtype("v", v, "q", q)


def _check_cache(q: Array, k_cache: Array, v_cache: Array, lengths: Array) -> None:
    check_floating(q=q)
    if q.ndim != 3 or q.shape[-1] == 0:
        raise ValueError(f"q has shape {q.shape}; it must be (B, N, H) with H at least 1")
    B, N, H = q.shape
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype not in (jnp.int8, q.dtype):
            raise TypeError(
                f"{name} has dtype {cache.dtype}; it must be int8, or {q.dtype} as q is"
            )
    if k_cache.ndim != 4 or (k_cache.shape[0], k_cache.shape[3]) != (B, H):
        raise ValueError(
            f"k_cache has shape {k_cache.shape}; it must be ({B}, S, K, {H}), with the batch and "
            f"the head width of q {q.shape}"
        )
    check_shape("v_cache", v_cache, k_cache.shape, "the shape of k_cache")
    check_same_dtype("v_cache", v_cache, "k_cache", k_cache)
    K = k_cache.shape[2]
    if K == 0 or N % K:
        raise ValueError(
            f"k_cache has shape {k_cache.shape}, {K} heads; their number must divide that of q "
            f"{q.shape}, {N}"
        )
    check_integer(lengths=lengths)
    check_shape("lengths", lengths, (B,), f"one a sequence of q {q.shape}")


def _check_segment_ids(q, k, segment_ids) -> tuple[Array, Array] | None:
    """Returns the segments of the queries and of the keys, or None."""
    if segment_ids is None:
        return None
    if isinstance(segment_ids, tuple):
        if len(segment_ids) != 2:
            raise ValueError(
                f"segment_ids is a tuple of {len(segment_ids)}; it must be one array, or a pair of "
                "the queries' and the keys'"
            )
        of_query, of_key = segment_ids
    elif q.shape[1] != k.shape[1]:
        raise ValueError(
            f"segment_ids is one array, but q {q.shape} and k {k.shape} differ in length; it must "
            "be a pair, of shapes (B, T) and (B, S)"
        )
    else:
        of_query = of_key = segment_ids
    check_integer(**{"segment_ids": of_query, "segment_ids of the keys": of_key})
    check_shape("segment_ids", of_query, q.shape[:2], f"batch and length of q {q.shape}")
    check_shape("segment_ids of the keys", of_key, k.shape[:2], f"batch and length of k {k.shape}")
    return of_query.astype(jnp.int32), of_key.astype(jnp.int32)


def _check_projection(qkv: Array, heads: int, kv_heads: int) -> None:
    check_floating(qkv=qkv)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"heads is {heads}; it must be a multiple of kv_heads, {kv_heads}, above 0"
        )
    parts = heads + 2 * kv_heads
    if qkv.ndim != 3 or qkv.shape[-1] % parts or qkv.shape[-1] == 0:
        raise ValueError(
            f"qkv has shape {qkv.shape}; it must be (B, T, {parts}*H), with H at least 1, of "
            f"{heads} queries and {kv_heads} keys and values"
        )


def _check_rope_table(q, k, rope_table) -> tuple[Array, Array] | None:
    """Returns the cosines and sines, or None."""
    if rope_table is None:
        return None
    if not isinstance(rope_table, tuple) or len(rope_table) != 2:
        raise ValueError("rope_table is no pair; it must be the cosines and the sines")
    if q.shape[1] != k.shape[1]:
        raise ValueError(
            f"rope_table has one position for a query and its key, but q {q.shape} and k {k.shape} "
            "differ in length; turn them by rope before"
        )
    cos, sin = rope_table
    check_floating(**{"cos of rope_table": cos, "sin of rope_table": sin})
    B, T, _, H = q.shape
    if cos.ndim not in (2, 3) or cos.shape[:-1] not in ((T,), (B, T)) or 2 * cos.shape[-1] > H:
        raise ValueError(
            f"cos of rope_table has shape {cos.shape}; it must be ({T}, R) or ({B}, {T}, R), with "
            f"R at most {H // 2}, half the width of a head"
        )
    check_shape("sin of rope_table", sin, cos.shape, "the shape of cos")
    check_same_dtype("sin of rope_table", sin, "cos", cos)
    return jnp.asarray(cos), jnp.asarray(sin)


def _options(
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    width: int,
    interleaved: bool,
) -> tuple:
    """The options that all forms share, for _static."""
    window = None if window is None else as_integer("window", window)
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; it must be at least 1")
    softcap = None if softcap is None else as_float("softcap", softcap)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}; it must be above 0")
    scale = width**-0.5 if scale is None else as_float("scale", scale)
    return bool(causal), scale, window, softcap, bool(interleaved)


def _static(options: tuple) -> dict[str, bool | int | float | None]:
    names = ("causal", "scale", "window", "softcap", "interleaved", "heads", "kv_heads")
    return dict(zip(names, options, strict=False))


@functools.partial(vma.custom_vjp, nondiff_argnums=(5, 6))
def _flash_attention(q, k, v, segment_ids, rope_table, options, backend):
    return _flash_attention_forward(q, k, v, segment_ids, rope_table, options, backend)[0]


def _flash_attention_forward(q, k, v, segment_ids, rope_table, options, backend):
    arrays = (q, k, v, segment_ids, rope_table)
    outputs = dispatch(FLASH_ATTENTION, "forward", backend, *arrays, **_static(options))
    out, lse = checkpoint_name(outputs, "flash_attention")
    return out, (q, k, v, out, lse, segment_ids, rope_table)


def _flash_attention_backward(options, backend, residuals, dout):
    q, k, v, out, lse, segment_ids, rope_table = residuals
    arrays = (q, k, v, out, lse, dout, segment_ids, rope_table)
    return *dispatch(FLASH_ATTENTION, "backward", backend, *arrays, **_static(options)), None, None


_flash_attention.defvjp(_flash_attention_forward, _flash_attention_backward)


@functools.partial(vma.custom_vjp, nondiff_argnums=(3, 4))
def _flash_attention_packed(qkv, segment_ids, rope_table, options, backend):
    return _flash_attention_packed_forward(qkv, segment_ids, rope_table, options, backend)[0]


def _flash_attention_packed_forward(qkv, segment_ids, rope_table, options, backend):
    arrays = (qkv, segment_ids, rope_table)
    outputs = dispatch(FLASH_ATTENTION_PACKED, "forward", backend, *arrays, **_static(options))
    out, lse = checkpoint_name(outputs, "flash_attention")
    return out, (qkv, out, lse, segment_ids, rope_table)


def _flash_attention_packed_backward(options, backend, residuals, dout):
    qkv, out, lse, segment_ids, rope_table = residuals
    arrays = (qkv, out, lse, dout, segment_ids, rope_table)
    dqkv = dispatch(FLASH_ATTENTION_PACKED, "backward", backend, *arrays, **_static(options))
    return dqkv, None, None


_flash_attention_packed.defvjp(_flash_attention_packed_forward, _flash_attention_packed_backward)


@functools.partial(vma.custom_vjp, nondiff_argnums=(4, 5))
def _self_attention(x, weight, bias, segment_ids, options, backend):
    return _self_attention_forward(x, weight, bias, segment_ids, options, backend)[0]


def _self_attention_forward(x, weight, bias, segment_ids, options, backend):
    qkv = jnp.dot(x, weight) + bias
    out, kept = _attend_to_projection(qkv, segment_ids, options, backend)
    return out, (x, weight, *kept)


def _attend_to_projection(qkv, segment_ids, options, backend):
    # Under the names of the two ops, so that a policy keeps of this one what it keeps of those.
    qkv = checkpoint_name(qkv, "linear")
    arrays = (qkv, segment_ids, None)
    outputs = dispatch(FLASH_ATTENTION_PACKED, "forward", backend, *arrays, **_static(options))
    out, lse = checkpoint_name(outputs, "flash_attention")
    return out, (qkv, out, lse, segment_ids)


def _self_attention_backward(options, backend, residuals, dout):
    x, weight, qkv, out, lse, segment_ids = residuals
    arrays = (qkv, out, lse, dout, segment_ids, None)
    dqkv, dbias = dispatch(SELF_ATTENTION, "backward", backend, *arrays, **_static(options))
    return *products.factor_gradients(x, weight, dqkv), dbias, None


_self_attention.defvjp(_self_attention_forward, _self_attention_backward)


@functools.partial(vma.custom_vjp, nondiff_argnums=(9, 10, 11))
def _pre_norm_self_attention(
    x, normed, scale, norm_bias, weight, bias, out_weight, out_bias, segment_ids,
    options, eps, backend,
):  # fmt: skip
    arrays = (x, normed, scale, norm_bias, weight, bias, out_weight, out_bias, segment_ids)
    return _pre_norm_self_attention_forward(*arrays, options, eps, backend)[0]


def _pre_norm_self_attention_forward(
    x, normed, scale, norm_bias, weight, bias, out_weight, out_bias, segment_ids,
    options, eps, backend,
):  # fmt: skip
    of_x = normed or checkpoint_name(normalize(x, eps, backend), "linear")
    arrays = (x, weight, bias, of_x, scale, norm_bias)
    qkv = dispatch(LINEAR, "normed_forward", backend, *arrays)
    attended, of_attention = _attend_to_projection(qkv, segment_ids, options, backend)
    arrays = (attended, out_weight, out_bias, x)
    if normed is None:
        out, next_normed = dispatch(LINEAR, "residual_forward", backend, *arrays), None
    else:
        outputs = dispatch(LINEAR, "norm_forward", backend, *arrays, normed, eps=eps)
        out, next_normed = outputs[0], streams.NormedRows(*outputs[1])
    of_norm = (of_x.rows, of_x.rstd, scale, norm_bias)
    layers = (weight, bias, out_weight, out_bias)
    outputs = checkpoint_name((out, next_normed), "linear")
    return outputs, (of_norm, layers, of_attention)


def _pre_norm_self_attention_backward(options, eps, backend, residuals, cotangents):
    del eps
    dout, _ = cotangents
    of_norm, (weight, bias, out_weight, out_bias), of_attention = residuals
    qkv, attended, lse, segment_ids = of_attention
    arrays = (qkv, attended, lse, dout, out_weight, segment_ids, None)
    dqkv, dbias = dispatch(
        PRE_NORM_SELF_ATTENTION, "backward", backend, *arrays, **_static(options)
    )
    rows, *_ = of_norm
    arrays = (rows, dqkv, attended, dout)
    gradients = dispatch(LINEAR, "weight_gradients", backend, *arrays)
    dweight, dout_weight, dqkv, dout = gradients
    arrays = (dqkv, weight, bias, dweight, dbias, *of_norm, dout)
    gradients = dispatch(LINEAR, "normed_backward", backend, *arrays)
    dx, dscale, dnorm_bias, dweight, dout_bias = gradients
    dout_bias = None if out_bias is None else dout_bias
    return dx, None, dscale, dnorm_bias, dweight, dbias, dout_weight, dout_bias, None


_pre_norm_self_attention.defvjp(
    _pre_norm_self_attention_forward,
    _pre_norm_self_attention_backward,
    definition=streams.without_normed,
)


@functools.partial(vma.custom_vjp, nondiff_argnums=(1, 2))
def _softmax(x, options, backend):
    return _softmax_forward(x, options, backend)[0]


def _softmax_forward(x, options, backend):
    scale, causal = options
    out = dispatch(SOFTMAX, "forward", backend, x, scale=scale, causal=causal)
    out = checkpoint_name(out, "softmax")
    return out, out


def _softmax_backward(options, backend, out, dout):
    scale, causal = options
    return (dispatch(SOFTMAX, "backward", backend, out, dout, scale=scale, causal=causal),)


@functools.partial(vma.custom_vjp, nondiff_argnums=(1, 2))
def _repeat_kv(x, groups, backend):
    return _repeat_kv_forward(x, groups, backend)[0]


def _repeat_kv_forward(x, groups, backend):
    out = dispatch(REPEAT_KV, "forward", backend, x, groups=groups)
    return checkpoint_name(out, "repeat_kv"), None


def _repeat_kv_backward(groups, backend, _, dout):
    return (dispatch(REPEAT_KV, "backward", backend, dout, groups=groups),)


_softmax.defvjp(_softmax_forward, _softmax_backward)
_repeat_kv.defvjp(_repeat_kv_forward, _repeat_kv_backward)
