"""Attention over whole sequences."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, overload

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Direction, Op, dispatch
from jaxllm.core.op import differentiable
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.attention import context, cuda, packing, pallas_flash, reference, with_lse, xla
from jaxllm.ops.attention.arguments import (
    AttentionOptions,
    check_arrays,
    check_arrays_of_any_width,
    check_bias,
    check_packed,
    check_packed_table,
    check_rope_table,
    check_segment_ids,
    check_sinks,
    make_options,
)
from jaxllm.ops.attention.packing import is_by_parts
from jaxllm.ops.attention.rotated import rotation_of, takes_rotated
from jaxllm.ops.checks import as_bool, check_floating, check_shape
from jaxllm.ops.rotary.packed import rope_packed
from jaxllm.ops.window import Window


def _op(name: str) -> Op:
    return Op(name, reference, xla=xla, pallas=pallas_flash, cuda=cuda)


FLASH_ATTENTION = _op("flash_attention")
FLASH_ATTENTION_PACKED = _op("flash_attention_packed")
# With a bias on the scores. Pallas's kernels take half the time of the CUDA kernels on an H100. On
# other GPUs flash_attention_bias_slower rejects them, and the CUDA kernels run.
FLASH_ATTENTION_BIAS = Op(
    "flash_attention_bias",
    reference,
    pallas=pallas_flash,
    cuda=cuda,
    preference=("pallas", "cuda", "xla"),
)
# The backward of packed attention with the gradient of the projection's bias.
SELF_ATTENTION = _op("self_attention")
FLASH_ATTENTION_FLOAT8 = Op(
    "flash_attention_float8",
    reference=reference,
    cuda=cuda,
    sharding=ShardingRule("B T N H, B S N H, B S N H, N, N, N, [B T | B S] -> B T N H", "B N"),
)


@overload
def flash_attention(
    q: Array, k: Array, v: Array, sinks: Array | None = None, bias: Array | None = None, *,
    causal: bool = False, scale: float | None = None, window: Window = None,
    softcap: float | None = None, segment_ids: Array | tuple[Array, Array] | None = None,
    rope_table: tuple[Array, Array] | None = None, interleaved: bool = False,
    return_lse: Literal[False] = False, backend: Backend | None = None,
) -> Array: ...  # fmt: skip


@overload
def flash_attention(
    q: Array, k: Array, v: Array, sinks: Array | None = None, bias: Array | None = None, *,
    causal: bool = False, scale: float | None = None, window: Window = None,
    softcap: float | None = None, segment_ids: Array | tuple[Array, Array] | None = None,
    rope_table: tuple[Array, Array] | None = None, interleaved: bool = False,
    return_lse: Literal[True], backend: Backend | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N T S"] | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    segment_ids: Integer[Array, "B T"]
    | tuple[Integer[Array, "B T"], Integer[Array, "B S"]]
    | None = None,
    rope_table: tuple[Float[Array, "*#B T R"], Float[Array, "*#B T R"]] | None = None,
    interleaved: bool = False,
    return_lse: bool = False,
    backend: Backend | None = None,
) -> Float[Array, "B T N Hv"] | tuple[Float[Array, "B T N Hv"], Float[Array, "B N T"]]:
    r"""Scaled dot-product attention, of any number of query heads to a key head.

    .. math::
        out_t = \sum_s softmax_s\!\left( scale \cdot q_t \cdot k_s \right) v_s

    Query head n reads key head ``n // (N // K)``. The softmax is float32 whatever the dtype of
    ``q``; between the passes an op keeps its inputs, its output, and one float32 a query and head.

    Which keys a query sees is counted from the end of both sequences, so that the last query
    stands at the last key: query t stands at position ``p = t + S - T``. All of the conditions
    that are asked for must hold. A query that sees no key gives zeros, and has no gradient.
    Keys and values that no query sees must be finite too: infinity times a weight of zero is NaN.

    ``lse`` is the logarithm of the sum of the exponentials of each query's scores: with the scale,
    the softcap and the bias, over the keys that it sees, and -inf if there are none. Attention over
    two parts of the keys merges to attention over all of them, gradients included: with
    ``lse = jnp.logaddexp(lse_1, lse_2)`` it is the sum of ``jnp.exp(lse_i - lse) * out_i``. A query
    without a key in either part has to be left out: the difference is no number.

    A sink is one more score, of a head and without a key: its exponential joins the denominator of
    each query's softmax, so that the weights of the keys add up to less than one.

    Args:
        q: The queries; float32, bfloat16 or float16 for the kernels.
        k: The keys, in the dtype of ``q``; K divides N.
        v: The values, in the dtype of ``k`` and its shape but for the width of a head, as in
            multi-head latent attention. Of widths that differ the CUDA kernels take 192 and 128, in
            bfloat16 and float16, on Hopper GPUs, without a softcap or a bias.
        sinks: The sink of each query head, float32 or in the dtype of ``q``; neither ``scale`` nor
            ``softcap`` changes it. The CUDA kernels add it as they divide by the denominator.
            Pallas's and cuDNN's do not: there it costs one elementwise pass over the output, which
            rounds it once more, and a read of the output and its gradient in the backward.
        bias: Added to the scores after ``scale`` and ``softcap``, as by ALiBi and T5; (B, N, T, S),
            where B and N may be 1 for all sequences or heads, float32 or in the dtype of ``q``. A
            key with the bias -inf is not seen. Its gradient is summed in float32. ``"auto"``
            runs Pallas's kernels on Hopper GPUs, and the CUDA kernels on others. ``"cuda"`` runs
            its kernels for every GPU, not those for Hopper. Both hold a block of the scores at a
            time, and ``"xla"`` all of them.
        causal: Query t sees the keys ``s <= p`` alone.
        scale: Multiplies the scores; None for ``1/sqrt(H)``.
        window: Query t sees the keys ``|p - s| < window`` alone: with ``causal`` the ``window``
            most recent keys, its own position included; without it ``window - 1`` on either side.
            A pair ``(left, right)`` stands for the keys ``p - left <= s <= p + right``; None is a
            side without an end.
        softcap: Bounds each scaled product ``a`` smoothly to ``softcap * tanh(a / softcap)``.
        segment_ids: A query sees the keys of its own segment alone. One array for queries and keys
            alike (T must equal S), or a tuple, the queries' and the keys'; used as int32.
        rope_table: Rotates ``q`` and ``k`` first, as :func:`jaxllm.ops.rope` does: the cosines and
            sines that :func:`jaxllm.ops.rope_table` makes, (T, R) or (B, T, R), float32 for the
            kernels. T must equal S. They are constants: their gradients are zero.
        interleaved: Whether the columns that rotate as a pair are neighbours.
        return_lse: Whether to return ``lse`` too. Both results may be differentiated; cuDNN cannot
            serve the gradient of ``lse``.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        What each query read, in the shape and dtype of ``q`` but as wide as ``v``; with
        ``return_lse`` the pair of that and ``lse``, (B, N, T) in float32 (float64 of float64
        arrays), which includes the sinks.

    Raises:
        TypeError: An array is of the wrong kind, ``k`` or ``v`` differs from ``q`` in dtype, or
            ``sinks`` or ``bias`` is neither float32 nor in the dtype of ``q``, or an option is of
            another type, or traced.
        ValueError: The shapes do not fit together, N is not a multiple of K, ``window`` is below 1
            or a side of it below 0, ``scale`` or ``softcap`` is not finite, ``softcap`` is not
            above 0, ``rope_table`` comes with T other than S, or the backend is unknown.
        BackendError: The backend that was asked for cannot serve the call.

    Source: Dao, "FlashAttention-2" (arXiv:2307.08691); Ainslie et al., "GQA" (arXiv:2305.13245);
    DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434), for values narrower than keys;
    Xiao et al., "Attention sinks" (arXiv:2309.17453), learned as in gpt-oss (arXiv:2508.10925);
    Press et al., "ALiBi" (arXiv:2108.12409); Raffel et al., "T5" (arXiv:1910.10683);
    llm.c's ``attention_forward`` and ``attention_backward``.

    Example:
        >>> q = jax.random.normal(jax.random.key(0), (2, 1024, 12, 64), jnp.bfloat16)
        >>> out = jaxllm.ops.flash_attention(q, q, q, causal=True)
    """
    # Where the CUDA kernels are asked for, they say themselves which dtypes they take.
    check = check_arrays_of_any_width if resolve(backend) == "cuda" else check_arrays
    check(q, k, v)
    arrays = (q, k, v, check_segment_ids(q, k, segment_ids), check_rope_table(q, k, rope_table))
    options = make_options(causal, scale, window, softcap, q.shape[-1], interleaved)
    return_lse = as_bool("return_lse", return_lse)
    check_sinks(sinks, q.shape[2], q.dtype)
    if bias is not None:
        results = _attend_with_bias(*arrays, sinks, bias, resolve(backend), options)
        return results if return_lse else results[0]
    is_one = 1 in (q.shape[1], k.shape[1])
    if sinks is None and not return_lse:
        attend = _flash_attention_of_one if is_one else _flash_attention
        return attend(*arrays, backend=resolve(backend), options=options)
    attend = _flash_attention_of_one_with_lse if is_one else _flash_attention_with_lse
    results = attend(*arrays, sinks, backend=resolve(backend), options=options)
    return results if return_lse else results[0]


@overload
def flash_attention_packed(
    qkv: Array, heads: int, kv_heads: int | None = None, *,
    causal: bool = False, scale: float | None = None, window: Window = None,
    softcap: float | None = None, segment_ids: Array | None = None,
    rope_table: tuple[Array, Array] | None = None, interleaved: bool = False,
    sinks: Array | None = None, bias: Array | None = None, return_lse: Literal[False] = False,
    backend: Backend | None = None,
) -> Array: ...  # fmt: skip


@overload
def flash_attention_packed(
    qkv: Array, heads: int, kv_heads: int | None = None, *,
    causal: bool = False, scale: float | None = None, window: Window = None,
    softcap: float | None = None, segment_ids: Array | None = None,
    rope_table: tuple[Array, Array] | None = None, interleaved: bool = False,
    sinks: Array | None = None, bias: Array | None = None, return_lse: Literal[True],
    backend: Backend | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


def flash_attention_packed(
    qkv: Float[Array, "B T (N+2*K)*H"] | Float[Array, "B T N/K+2 K H"],
    heads: int,
    kv_heads: int | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    rope_table: tuple[Float[Array, "*#B T R"], Float[Array, "*#B T R"]] | None = None,
    interleaved: bool = False,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N T T"] | None = None,
    return_lse: bool = False,
    backend: Backend | None = None,
) -> Float[Array, "B T N*H"] | tuple[Float[Array, "B T N*H"], Float[Array, "B N T"]]:
    """:func:`flash_attention` of one projection that holds queries, keys and values.

    The CUDA kernels read the three where they stand, and write their gradients into one array: no
    slice, transpose or concatenation passes over memory.

    Args:
        qkv: For each token the N queries, then the K keys, then the K values, each of width H;
            float32, bfloat16 or float16 for the kernels. Or in N/K + 2 parts of K heads: the first
            query of each key head, the second of each, ..., the keys, the values; it can be sharded
            along K. The kernels for Hopper read queries in parts where they stand; those for other
            GPUs copy them first.
        heads: N.
        kv_heads: K, which divides N; None for N.
        causal: As in :func:`flash_attention`, as are the arguments that follow.
        scale: None for ``1/sqrt(H)``.
        window: How many keys a query sees, or how many on each side of it.
        softcap: A bound on the scores.
        segment_ids: A query sees the keys of its own segment alone.
        rope_table: Cosines and sines that rotate queries and keys first. On a Hopper GPU a kernel
            writes the rotated heads over ``qkv``, which XLA copies first where it is still needed.
            The backward pass does not rotate queries and keys again.
        interleaved: Whether the columns that rotate as a pair are neighbours.
        sinks: As in :func:`flash_attention`, in the order of the heads of the output.
        bias: As in :func:`flash_attention`, likewise; XLA copies queries, keys and values first.
        return_lse: As in :func:`flash_attention`.
        backend: As in :func:`flash_attention`.

    Returns:
        What each query read, head after head, in the dtype of ``qkv``; with ``return_lse`` the pair
        of that and ``lse``, (B, N, T) in float32.

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
    segments, options = check_packed(
        qkv, heads, kv_heads, segment_ids,
        causal=causal, scale=scale, window=window, softcap=softcap, interleaved=interleaved,
    )  # fmt: skip
    rope_table, backend = check_packed_table(qkv, options, rope_table), resolve(backend)
    return_lse = as_bool("return_lse", return_lse)
    check_sinks(sinks, options.heads, qkv.dtype)
    if bias is not None:
        given = dataclasses.asdict(options)
        parts = packing.split(qkv, given.pop("heads"), given.pop("kv_heads"))
        results = _attend_with_bias(
            *parts, segments, rope_table, sinks, bias, backend, AttentionOptions(**given)
        )
        out, lse = packing.rows(results[0]), results[1]
        return (out, lse) if return_lse else out
    if rope_table is not None and takes_rotated(
        FLASH_ATTENTION_PACKED, qkv, segments, options, backend
    ):
        qkv = rope_packed(qkv, *rope_table, backend=backend, options=rotation_of(qkv, options))
        rope_table = None
    arrays, by_parts = (qkv, segments, rope_table), is_by_parts(qkv)
    if sinks is None and not return_lse:
        attend = _flash_attention_by_parts if by_parts else _flash_attention_packed
        return attend(*arrays, backend=backend, options=options)
    attend = _flash_attention_by_parts_with_lse if by_parts else _flash_attention_packed_with_lse
    results = attend(*arrays, sinks, backend=backend, options=options)
    return results if return_lse else results[0]


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
    window: Window = None,
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
        window: How many keys a query sees, or how many on each side of it.
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
    check_arrays_of_any_width(q, k, v)
    check_shape("v", v, k.shape, "the shape of k")
    for name, array, heads in (("q", q_scale, q), ("k", k_scale, k), ("v", v_scale, k)):
        check_floating(**{f"{name}_scale": array})
        check_shape(f"{name}_scale", array, heads.shape[2:3], f"the heads of {name}")
        if array.dtype != jnp.float32:
            raise TypeError(f"{name}_scale has dtype {array.dtype}; it must be float32")
    arrays = (q, k, v, q_scale, k_scale, v_scale, check_segment_ids(q, k, segment_ids))
    options = make_options(causal, scale, window, softcap, q.shape[-1], False)
    static = {"causal": options.causal, "scale": options.scale}
    static |= {"window": options.window, "softcap": options.softcap}
    op, direction = FLASH_ATTENTION_FLOAT8, Direction.INFERENCE
    return dispatch(op, direction, resolve(backend), *arrays, **static)


def _attend_with_bias(q, k, v, segments, table, sinks, bias, backend, options):
    """Returns ``(out, lse)`` of arrays that are checked but for the bias."""
    check_bias(bias, q, k)
    is_one = 1 in (q.shape[1], k.shape[1])
    attend = _flash_attention_with_bias[bias.shape[0] == 1, bias.shape[1] == 1, is_one]
    return attend(q, k, v, bias, segments, table, sinks, backend=backend, options=options)


def _dout_first(arrays: tuple, position: int) -> tuple:
    """The arrays of the backward, which takes dout before the segments and the rotation table."""
    *saved, dout = arrays
    return (*saved[:position], dout, *saved[position:])


def _forward_on_shards(function, shard, q, k, v, segments, table):
    if not context.is_needed(shard, q, k):
        return function(q, k, v, segments, table)
    options, backend = function.static
    attend = functools.partial(context.forward, FLASH_ATTENTION, backend, shard)
    out, lse = attend(q, k, v, segments, table, **dataclasses.asdict(options))
    return out, (q, k, v, out, lse, segments, table)


def _backward_on_shards(function, shard, residuals, dout):
    (q, k, v, out, lse, segments, table), _ = residuals
    if not context.is_needed(shard, q, k):
        return function(residuals, dout)
    options, backend = function.static
    attend = functools.partial(context.backward, FLASH_ATTENTION, backend, shard)
    return attend(q, k, v, out, lse, dout, segments, table, **dataclasses.asdict(options))


def _packed_forward_on_shards(function, shard, qkv, segments, table):
    if not context.is_needed(shard, qkv, qkv):
        return function(qkv, segments, table)
    options, backend = function.static
    attend = functools.partial(context.forward, FLASH_ATTENTION, backend, shard)
    found = packing.forward(attend)(qkv, segments, table, **dataclasses.asdict(options))
    return found[0], (qkv, *found, segments, table)


def _packed_backward_on_shards(function, shard, residuals, dout):
    (qkv, out, lse, segments, table), _ = residuals
    if not context.is_needed(shard, qkv, qkv):
        return function(residuals, dout)
    options, backend = function.static
    attend = functools.partial(context.backward, FLASH_ATTENTION, backend, shard)
    arrays = (qkv, out, lse, dout, segments, table)
    return (packing.backward(attend)(*arrays, **dataclasses.asdict(options)),)


# T is the name of both sequences, so that one mesh axis may shard queries and keys. Segments and
# rotation tables have no gradient.
_SHARDING = ShardingRule(
    "B T N H, B T N H, B T N Hv, [B T | B T], [B T R | B T R] -> B T N Hv; B N T",
    "B T N",
    broadcast="N",
    local=_forward_on_shards,
    local_backward=_backward_on_shards,
)
_flash_attention, _flash_attention_of_one = (
    differentiable(
        FLASH_ATTENTION,
        saves=lambda q, k, v, segments, table, out, lse: (q, k, v, out, lse, segments, table),
        sharding=sharding,
        arrange=lambda *saved_and_dout: _dout_first(saved_and_dout, 5),
    )
    # One query or one key is no sequence to shard, whatever the other's length.
    for sharding in (_SHARDING, dataclasses.replace(_SHARDING, sharded="B N"))
)


def _packed_sharding(*, by_parts: bool, has_lse: bool):
    """The sharding of attention over a projection, by its options."""

    def sharding(options) -> ShardingRule:
        qkv, out, sinks = ("B T _ N _", "B T N", "N") if by_parts else ("B T P", "B T E", "_")
        arrays = f"{qkv}, [B T | B T], [B T R | B T R]"
        is_split = by_parts and options.kv_heads > 1  # one key head has no shards
        sharded = "B T N" if is_split else "B T"
        if has_lse:
            return ShardingRule(f"{arrays}, {sinks} -> {out}, B N T", sharded)
        return ShardingRule(
            f"{arrays} -> {out}; B N T",
            sharded,
            local=_packed_forward_on_shards,
            local_backward=_packed_backward_on_shards,
        )

    return sharding


_flash_attention_packed, _flash_attention_by_parts = (
    differentiable(
        FLASH_ATTENTION_PACKED,
        saves=lambda qkv, segments, table, out, lse: (qkv, out, lse, segments, table),
        sharding=_packed_sharding(by_parts=by_parts, has_lse=False),
        arrange=lambda *saved_and_dout: _dout_first(saved_and_dout, 3),
        name="flash_attention",
    )
    for by_parts in (False, True)
)
_flash_attention_with_lse, _flash_attention_of_one_with_lse = (
    with_lse.make_rule(
        FLASH_ATTENTION,
        FLASH_ATTENTION,
        sharding=ShardingRule(
            "B T N H, B T N H, B T N Hv, [B T | B T], [B T R | B T R], N -> B T N Hv, B N T",
            sharded,
            broadcast="N",
        ),
    )
    for sharded in ("B T N", "B N")
)
_flash_attention_packed_with_lse, _flash_attention_by_parts_with_lse = (
    with_lse.make_rule(
        FLASH_ATTENTION_PACKED,
        FLASH_ATTENTION,
        sharding=_packed_sharding(by_parts=by_parts, has_lse=True),
    )
    for by_parts in (False, True)
)
# Sequences and heads may share the bias. Each query has a row of it, for all keys.
_flash_attention_with_bias = {
    (one_sequence, one_head, is_one): with_lse.make_rule(
        FLASH_ATTENTION_BIAS,
        FLASH_ATTENTION_BIAS,
        sharding=ShardingRule(
            "B T N H, B T N H, B T N Hv, "
            f"{'_' if one_sequence else 'B'} {'_' if one_head else 'N'} T _, "
            "[B T | B T], [B T R | B T R], N -> B T N Hv, B N T",
            "B N" if is_one else "B T N",
            broadcast="N",
        ),
    )
    for one_sequence in (False, True)
    for one_head in (False, True)
    for is_one in (False, True)
}
