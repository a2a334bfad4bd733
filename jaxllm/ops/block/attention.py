"""The attention block of a transformer, and attention of a sequence to its own projection."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Integer

from jaxllm.core import shards
from jaxllm.core.backend import Backend, resolve
from jaxllm.core.dispatch import Composition, Direction, compose, dispatch
from jaxllm.core.op import with_backward
from jaxllm.core.sharding_rule import ShardingRule
from jaxllm.ops.attention import context, packing
from jaxllm.ops.attention.api import (
    FLASH_ATTENTION,
    FLASH_ATTENTION_PACKED,
    SELF_ATTENTION,
    flash_attention_packed,
)
from jaxllm.ops.attention.arguments import (
    PackedOptions,
    check_packed,
    check_packed_table,
    check_projection,
    check_rope_table,
    head_width,
)
from jaxllm.ops.attention.packing import is_by_parts, rows, split
from jaxllm.ops.attention.rotated import rotation_of, takes_rotated
from jaxllm.ops.block.precision import Precision, of_layers
from jaxllm.ops.block.residual import (
    Residual,
    carry,
    check_keys,
    check_norm,
    check_residual,
    norm_arrays,
    pre_norm,
)
from jaxllm.ops.checks import (
    as_integer,
    check_floating,
    check_layer,
    check_pre_norm,
    check_shape,
    check_way_back,
)
from jaxllm.ops.gemm.api import linear
from jaxllm.ops.gemm.float8_norm import float8_norm_linear
from jaxllm.ops.gemm.float8_operands import Recipe, Rotation, checked_weight
from jaxllm.ops.gemm.fused import (
    Normalized,
    fold_norm,
    fold_norm_backward,
    gemm_unsupported,
    matmul_bias,
    matmul_delta,
    matmul_norm_backward,
    matmul_residual,
    matmul_residual_norm,
    normalize,
    wgrad_pair,
)
from jaxllm.ops.gemm.gradients import dgrad_and_wgrad
from jaxllm.ops.gemm.linear import in_rows
from jaxllm.ops.norm.api import rms_norm
from jaxllm.ops.rotary.api import rope
from jaxllm.ops.weights import is_weight
from jaxllm.ops.window import Window

Layer = Mapping[str, Any]  # "weight", a Weight, and where there is one "bias"
Attend = Callable[[Array, Array, Array], Array]


def attention_block(
    h: Residual,
    norm: Mapping[str, Array],
    weights: Mapping[str, Layer],
    *,
    heads: int,
    kv_heads: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    rope_table: tuple[Array, Array] | None = None,
    attend: Attend | None = None,
    precision: Precision = None,
    backend: Backend | None = None,
) -> Residual:
    r"""Attention block: ``x + out(attention(qkv(norm(x))))``.

    On a Hopper GPU a block with a layer norm, plain weights, no rotation and no norms of heads is
    fused, where its GEMMs are large enough and in 16 bits. The out-projection adds bias and
    residual and normalizes the sum in its epilogue. The qkv dgrad GEMM applies the layer norm's
    backward in its epilogue, and the out-projection's dgrad GEMM computes attention's delta. With
    the precision ``"tensor"`` for ``qkv`` the norm is written in float8. Other calls run norm, GEMM
    and attention one by one; :func:`jaxllm.explain` says why.

    Args:
        h: The residual, (B, T, D).
        norm: The norm's ``scale``, (D,), and of a layer norm ``bias``.
        weights: ``qkv``, a layer from D to (N + 2K) H columns (queries, keys, values), and ``out``,
            one from N H to D. Each has a ``weight`` (array, ``Transposed`` or ``Quantized``) and
            may have a ``bias``. A ``qkv`` weight (D, N/K + 2, K, H) has its columns in parts, as in
            :func:`jaxllm.ops.flash_attention_packed`, and can be sharded along K. With ``q_norm``
            and ``k_norm``, each with a ``scale`` (H,), an RMS norm of each query head and of each
            key head, with the ``eps`` of ``h``, comes before the rotation, as in Qwen3.
        heads: N, query heads.
        kv_heads: K, key heads, which divide N; None for N.
        causal: As in :func:`jaxllm.ops.flash_attention`, as are the options that follow.
        scale: None for ``1/sqrt(H)``.
        window: How many keys a query sees, or how many on each side of it.
        segment_ids: A query sees the keys of its own segment alone.
        rope_table: Cosines and sines that rotate queries and keys.
        attend: ``attend(q, k, v) -> out`` of (B, T, N, H), (B, T, K, H) and (B, T, K, H), after
            rotation, instead of attention over the sequence; to use a cache, for example. It has
            its own mask and scale: ``causal`` is not used then, and ``scale``, ``window`` and
            ``segment_ids`` must be None.
        precision: ``"row"`` or ``"tensor"`` for float8 operands in the GEMMs of both layers, as in
            :func:`jaxllm.ops.linear`; a mapping from the names of layers for some of them; None
            for the dtype of ``h``. Attention itself stays in that dtype.
        backend: ``"cuda"``, ``"pallas"``, ``"xla"`` or ``"auto"``; None for the surrounding choice.

    Returns:
        The new residual.

    Raises:
        TypeError: ``h`` is no :class:`Residual`, ``attend`` no function, or an array is of the
            wrong kind or dtype.
        ValueError: The shapes do not fit together, an option is out of range, or one is given that
            ``attend`` would not use; or ``precision`` has an unknown recipe or layer, or is not
            None for a ``Quantized`` weight.
        BackendError: The backend that was asked for cannot serve the call, or ``precision`` is not
            None and the GPU has no float8 tensor cores.

    Source: Vaswani et al., "Attention is all you need"; Xiong et al., "On layer normalization in
    the transformer architecture" (arXiv:2002.04745); llm.c's ``gpt2_forward``, ``gpt2_backward``.
    """
    check_residual(h)
    check_parameters(h, norm, weights, "qkv", "out")
    head_norms = _head_norms(weights)
    heads = as_integer("heads", heads)
    kv_heads = heads if kv_heads is None else as_integer("kv_heads", kv_heads)
    arrays = (h, norm, weights["qkv"], weights["out"], head_norms, segment_ids, rope_table)
    if attend is not None:
        _check_attend(attend, scale=scale, window=window, segment_ids=segment_ids)
    attention: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads}
    attention |= {"causal": causal, "scale": scale, "window": window}
    static = {**attention, "attend": attend, "recipes": of_layers(precision, "qkv", "out")}
    return compose(_BLOCK, resolve(backend), *arrays, **static)


def check_parameters(h: Residual, norm: object, weights: Any, *layers: str) -> None:
    """Raises TypeError or ValueError where a block's parameters lack a part, or have another."""
    check_norm(h, norm)
    check_keys("weights", weights, *layers)
    for name in layers:
        check_keys(f"weights[{name!r}]", weights[name], "weight", others=("bias",))


def _check_attend(attend: object, **options: Any) -> None:
    """Raises TypeError or ValueError where ``attend``, or an option that it replaces, is wrong."""
    if not callable(attend):
        raise TypeError(f"attend has type {type(attend).__name__}; it must be a function")
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{name} is given beside attend; it must be None, because attend(q, k, v) takes "
                "the place of the attention that would use it"
            )


def _head_norms(weights: Mapping[str, Any]) -> tuple[Array, Array] | None:
    """The scales of the norms of query heads and key heads; None without these norms."""
    names = ("q_norm", "k_norm")
    if not any(name in weights for name in names):
        return None
    check_keys("weights", weights, *names)
    for name in names:
        check_keys(f"weights[{name!r}]", weights[name], "scale", others=())
    return weights["q_norm"]["scale"], weights["k_norm"]["scale"]


def _unfused(
    backend: Backend,
    h: Residual,
    norm: Mapping[str, Array],
    qkv: Layer,
    out: Layer,
    head_norms: tuple[Array, Array] | None,
    segment_ids: Array | None,
    rope_table: tuple[Array, Array] | None,
    *,
    heads: int,
    kv_heads: int,
    attend: Attend | None,
    recipes: tuple[Recipe | None, Recipe | None] = (None, None),
    **options: Any,
) -> Residual:
    of_qkv, of_out = recipes
    options |= {"segment_ids": segment_ids, "backend": backend}
    is_plain = not is_weight(qkv["weight"]) and qkv.get("bias") is not None
    is_plain = is_plain and head_norms is None and rope_table is None
    if of_qkv == "tensor":
        arrays, layer = norm_arrays(h, norm), (qkv["weight"], qkv.get("bias"))
        rotation = None  # of the layer's result
        if attend is None and head_norms is None and rope_table is not None:
            rotation = _rotation(h.x, qkv, rope_table, heads, kv_heads, **options)
        static = {"eps": h.eps, "backend": backend, "rotation": rotation}
        packed, x = float8_norm_linear(arrays, *layer, **static)
        rope_table = rope_table if rotation is None else None
        h = carry(h, x)
    else:
        x, h = pre_norm(h, norm, backend)
        if attend is None and is_plain and of_qkv is None:
            attended = self_attention(x, qkv["weight"], qkv["bias"], heads, kv_heads, **options)
            return leave_to_next_norm(h, attended, "out", out, of_out, backend)
        packed = linear(x, **qkv, precision=of_qkv, backend=backend)
    if head_norms is not None or attend is not None:
        check_projection(packed, heads, kv_heads)
    if head_norms is not None:
        packed = _normalize_heads(packed, *head_norms, heads, kv_heads, h.eps, backend)
    if attend is None:
        options["rope_table"] = rope_table
        attended = flash_attention_packed(packed, heads, kv_heads, **options)
    else:
        q, k, v = split(packed, heads, kv_heads)
        if (table := check_rope_table(q, k, rope_table)) is not None:
            q, k = rope(q, k, *table, backend=backend)
        found = attend(q, k, v)
        check_floating(**{"the result of attend": found})
        check_shape("the result of attend", found, q.shape, "the shape of the queries")
        attended = rows(found)
    return leave_to_next_norm(h, attended, "out", out, of_out, backend)


def _rotation(
    x: Array, layer: Layer, rope_table: Any, heads: int, kv_heads: int,
    *, segment_ids, backend: Backend, **options: Any,
) -> Rotation | None:  # fmt: skip
    """The rotation that a layer applies to its projection; None where attention rotates."""
    weight, bias = layer["weight"], layer.get("bias")
    columns = checked_weight(x, weight, bias, "tensor", backend).shape[1:]
    qkv: Any = jax.ShapeDtypeStruct((*x.shape[:-1], *columns), x.dtype)
    static = {"softcap": None, "interleaved": False, **options}
    segments, packed = check_packed(qkv, heads, kv_heads, segment_ids, **static)
    table = check_packed_table(qkv, packed, rope_table)
    arrays = (qkv, segments, packed, backend)
    if table is None or not takes_rotated(FLASH_ATTENTION_PACKED, *arrays):
        return None
    return Rotation(*table, rotation_of(qkv, packed))


def _normalize_heads(
    qkv: Array, q_scale: Array, k_scale: Array, heads: int, kv_heads: int, eps: float, backend
) -> Array:
    """A projection, in either shape, whose query heads and key heads are normalized."""
    if is_by_parts(qkv):
        parts = qkv
    else:  # both shapes have the N queries first, then the K keys and the K values
        H = qkv.shape[-1] // (heads + 2 * kv_heads)
        parts = qkv.reshape(*qkv.shape[:2], heads // kv_heads + 2, kv_heads, H)
    q, k, v = jax.lax.split(parts, (parts.shape[2] - 2, 1, 1), axis=2)
    q = rms_norm(q, q_scale, eps=eps, backend=backend)
    k = rms_norm(k, k_scale, eps=eps, backend=backend)
    return jnp.concatenate([q, k, v], axis=2).reshape(qkv.shape)


def _unsupported(
    h, norm, qkv, out, head_norms, segment_ids, rope_table, *, attend, recipes=(None, None), **_
) -> str | None:
    """Why the fused kernels cannot serve a call; None if they can."""
    del segment_ids
    if head_norms is not None:
        return "queries and keys have norms; the fused block has none between qkv and attention"
    if attend is not None or rope_table is not None:
        return "attention rotates queries and keys, or is the caller's; the fused block has neither"
    if reason := unsupported_by_layers(h, qkv, out, recipes):
        return reason
    if qkv["weight"].ndim == 4 and qkv["weight"].shape[1] != 3:
        return "several queries share a key head, and the columns of qkv are in parts"
    return None


def unsupported_by_layers(h, first: Layer, last: Layer, recipes) -> str | None:
    """Why a block of a norm and two layers is not fused; None if it may be."""
    if any(recipes):
        return "a layer's GEMMs have float8 operands; those of the fused block have the dtype of h"
    if h.kind != "layer":
        return f"the block begins with the norm {h.kind!r}; the fused block has a layer norm"
    if is_weight(first["weight"]) or is_weight(last["weight"]):
        return "a weight is transposed or in int8"
    rows, *columns = first["weight"].shape
    weight = jax.ShapeDtypeStruct((rows, math.prod(columns)), first["weight"].dtype)
    return gemm_unsupported(h.x, weight)


def leave_to_next_norm(
    h: Residual,
    x: Array,
    name: str,
    layer: Layer,
    recipe: Recipe | None,
    backend: Backend | None,
) -> Residual:
    """The residual plus a layer of ``x``; the next norm's kernel adds it, and the layer's bias."""
    check_branch(h, x, name, layer)
    branch = linear(x, layer["weight"], precision=recipe, backend=backend)
    check_shape(f"the result of {name}", branch, h.x.shape, "as the residual")
    return carry(h, h.x, branch=(branch, layer.get("bias")))


def check_branch(h: Residual, x: Array | jax.ShapeDtypeStruct, name: str, layer: Layer) -> None:
    """Checks a layer of ``x`` whose result is added to the residual."""
    weight, bias = layer["weight"], layer.get("bias")
    if not is_weight(weight):
        names = (f"the weight of {name}", weight, f"the bias of {name}", bias)
        check_layer(*names, x, f"the input of {name}")
        check_way_back(*names[:2], h.x)


def _fused(
    backend: Backend,
    h: Residual,
    norm: Mapping[str, Array],
    qkv: Layer,
    out: Layer,
    _: None,
    segment_ids: Array | None,
    __: None,
    *,
    heads: int,
    kv_heads: int,
    attend: None,
    recipes: tuple[None, None] = (None, None),
    **options: Any,
) -> Residual:
    del attend, recipes
    x = h.x
    check_floating(x=x)
    if x.ndim != 3:
        raise ValueError(f"h has shape {x.shape}; it must be (B, T, D)")
    weight, bias = qkv["weight"], qkv.get("bias")
    names = ("the weight of qkv", weight, "the bias of qkv", bias)
    check_layer(*names, x, columns="P", in_parts=True)
    of_qkv: Any = jax.ShapeDtypeStruct((*x.shape[:2], *weight.shape[1:]), x.dtype)
    attention = {"softcap": None, "interleaved": False, **options}
    segments, packed = check_packed(of_qkv, heads, kv_heads, segment_ids, **attention)
    columns = packed.heads * head_width(of_qkv, packed)
    attended = jax.ShapeDtypeStruct((*x.shape[:2], columns), x.dtype)
    names = ("the weight of out", out["weight"], "the bias of out", out.get("bias"))
    check_layer(*names, attended, "what attention reads")
    check_way_back(*names[:2], x)
    scale = norm["scale"]
    norm_bias = check_pre_norm(x, scale, "bias", norm.get("bias"))
    bias = jnp.zeros(weight.shape[1:], x.dtype) if bias is None else bias
    arrays = (x, h.normalized, scale, norm_bias, weight, bias, out["weight"], out.get("bias"))
    block_options = _BlockOptions(packed, h.eps, is_by_parts(of_qkv))
    x, normalized = _attention_block(*arrays, segments, backend=backend, options=block_options)
    return carry(h, x, normalized=normalized)


_BLOCK = Composition("attention_block", _fused, _unfused, _unsupported)


@dataclasses.dataclass(frozen=True)
class _BlockOptions:
    attention: PackedOptions
    eps: float
    by_parts: bool


def _forward(
    options, backend, x, normalized, scale, norm_bias, weight, bias, out_weight, out_bias, segments
):
    # Under the names of the ops that it is made of: a remat policy keeps the same of either.
    norm = normalized or Normalized(*checkpoint_name(normalize(backend, x, options.eps), "linear"))
    folded = fold_norm(backend, scale, norm_bias, *in_rows(weight, bias))
    qkv = matmul_bias(backend, norm.x_hat, *folded).reshape(*x.shape[:2], *weight.shape[1:])
    attended, saved = _attend(backend, qkv, segments, options.attention)
    arrays = (attended, out_weight, out_bias, x, norm)
    outputs = add_and_normalize(backend, *arrays, eps=options.eps, inner="K")
    out, next_norm = checkpoint_name(outputs, "linear")
    layers = (scale, norm_bias, weight, bias, out_weight, out_bias)
    return (out, Normalized(*next_norm)), (norm.x_hat, norm.rstd, layers, saved)


def add_and_normalize(backend, x, weight, bias, residual, norm, *, eps: float, inner: str):
    """``residual`` plus a layer of ``x``, and the layer norm of the sum.

    One kernel, but where ``x`` is sharded along the dimension ``inner`` that is summed over: the
    norm is of the whole sum.
    """
    if not shards.current_shard().over(inner):
        return matmul_residual_norm(backend, x, weight, bias, residual, norm, eps=eps)
    bias = None if bias is None else shards.in_one_shard(bias, inner)
    term = matmul_residual(backend, x, weight, bias, shards.in_one_shard(residual, inner))
    out = shards.sum_over(term, inner)
    return out, tuple(normalize(backend, out, eps))


def _attend(backend, qkv, segments, options):
    """Attention of a projection, and what its backward needs."""
    qkv = checkpoint_name(qkv, "linear")
    static = dataclasses.asdict(options)
    arrays = (qkv, segments, None)
    if context.is_needed(shard := shards.current_shard(), qkv, qkv):
        attend = functools.partial(context.forward, FLASH_ATTENTION, backend, shard)
        outputs = packing.forward(attend)(*arrays, **static)
    else:
        outputs = dispatch(FLASH_ATTENTION_PACKED, Direction.FORWARD, backend, *arrays, **static)
    out, lse = checkpoint_name(outputs, "flash_attention")
    return out, (qkv, out, lse, segments)


def _attend_backward(backend, saved, dout, delta, row_sums, options):
    """The gradients of a projection, and of its bias."""
    qkv, out, lse, segments = saved
    static = dataclasses.asdict(options)
    arrays = (qkv, out, lse, dout, delta, row_sums, segments, None)
    if context.is_needed(shard := shards.current_shard(), qkv, qkv):
        attend = functools.partial(context.backward, FLASH_ATTENTION, backend, shard)
        return packing.backward_with_bias(packing.backward(attend))(*arrays, **static)
    return dispatch(SELF_ATTENTION, Direction.BACKWARD, backend, *arrays, **static)


def _backward(options, backend, residuals, dout, _):
    x_hat, rstd, layers, saved = residuals
    scale, norm_bias, weight, bias, out_weight, out_bias = layers
    _, attended, *_ = saved
    attention, columns = options.attention, weight.shape[1:]
    heads = {"heads": attention.heads, "kv_heads": attention.kv_heads}
    if options.by_parts:  # of a shard
        heads = {"heads": (columns[0] - 2) * columns[1], "kv_heads": columns[1]}
    weight, bias = in_rows(weight, bias)
    dattended, delta, row_sums = matmul_delta(backend, dout, out_weight, attended, **heads)
    dqkv, dbias = _attend_backward(backend, saved, dattended, delta, row_sums, attention)
    dqkv, dbias = lax.collapse(dqkv, 2), dbias.ravel()
    arrays = (x_hat, dqkv, attended, dout)
    gradients = wgrad_pair(backend, *arrays, min_rows=0, sms_of_tile=2)
    dfolded, dout_weight, dqkv, dout = gradients
    folded, _ = fold_norm(backend, scale, norm_bias, weight, bias)  # XLA reuses the forward's
    dout = shards.in_one_shard(dout, "K")  # each shard along K has a term of dx
    dx, dout_bias = matmul_norm_backward(backend, dqkv, folded, x_hat, rstd, dout)
    of_norm = fold_norm_backward(backend, scale, norm_bias, weight, dfolded, dbias)
    dscale, dnorm_bias, dweight = of_norm
    dout_bias = None if out_bias is None else dout_bias
    dweight, dbias = dweight.reshape(x_hat.shape[-1], *columns), dbias.reshape(columns)
    return dx, None, dscale, dnorm_bias, dweight, dbias, dout_weight, dout_bias, None


def without_normalized(block: Callable[..., Any]) -> Callable[..., Any]:
    """What forward mode differentiates: the tangent goes along x, so the block normalizes it."""

    def of_x(static: Any, x: Array, normalized: Normalized | None, *rest: Any) -> Any:
        out, _ = block(static, x, None, *rest)
        _, next_norm = block(static, x, normalized, *rest)
        return out, jax.tree.map(jax.lax.stop_gradient, next_norm)

    return of_x


def _sharded(options: _BlockOptions | _SelfAttentionOptions) -> str:
    """The names along which a projection may be sharded; one key head has no shards."""
    return "B T K" if options.by_parts and options.attention.kv_heads > 1 else "B T"


def _block_sharding(options: _BlockOptions) -> ShardingRule:
    columns, heads, rows = ("_ K _", "K", "K'") if options.by_parts else ("_", "_", "_")
    return ShardingRule(
        f"B T _, [B T _ | B T | B T], _, _, _ {columns}, {columns}, {rows} _, _, [B T | B T]"
        f" -> B T _, B T _, B T, B T; ?B T _, ?B T, B T {columns}, B T {heads}, B {heads} T",
        _sharded(options),
    )


_attention_block = with_backward(
    "attention_block",
    _forward,
    _backward,
    sharding=_block_sharding,
    outputs=2,
    reference=without_normalized,
)


def self_attention(
    x: Float[Array, "B T D"],
    weight: Float[Array, "D P"] | Float[Array, "D N/K+2 K H"],
    bias: Float[Array, " P"] | Float[Array, "N/K+2 K H"],
    heads: int,
    kv_heads: int | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    segment_ids: Integer[Array, "B T"] | None = None,
    backend: Backend | None = None,
) -> Float[Array, "B T N*H"]:
    r"""The attention of a sequence to a projection of itself.

    .. math::
        out = attention(qkv) \qquad qkv = x W + b

    As ``flash_attention_packed(linear(x, weight, bias), heads, kv_heads, ...)``, with the same
    residuals. On a Hopper GPU, in 16 bits and with heads 64 or 128 wide, attention's backward
    kernels also sum the gradient of ``bias``, in a fixed order. There the part of the keys is zero,
    as it is but for rounding (a vector added to all keys changes no probability), and the part of
    the values is the sum of ``dout``. There is no softcap, no rotation and no out-projection.

    Args:
        x: The tokens; float32, bfloat16 or float16 for the kernels.
        weight: The matrix, in the dtype of ``x``; its ``P = (N + 2K) H`` columns are the N queries,
            then the K keys, then the K values; or in parts, as in :func:`flash_attention_packed`.
        bias: One offset a column of ``weight``, in the dtype of ``x``.
        heads: N.
        kv_heads: K, which divides N; None for N.
        causal: As in :func:`flash_attention`, as are the arguments that follow.
        scale: None for ``1/sqrt(H)``.
        window: How many keys a query sees, or how many on each side of it.
        segment_ids: A query sees the keys of its own segment alone.
        backend: As in :func:`flash_attention`; the projection's GEMMs are XLA's.

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
    check_floating(x=x, bias=bias)
    if x.ndim != 3:
        raise ValueError(f"x has shape {x.shape}; it must be (B, T, D)")
    check_layer("weight", weight, "bias", bias, x, columns="P", in_parts=True)
    qkv: Any = jax.ShapeDtypeStruct((*x.shape[:2], *weight.shape[1:]), x.dtype)
    segments, options = check_packed(
        qkv, heads, kv_heads, segment_ids,
        causal=causal, scale=scale, window=window, softcap=None, interleaved=False,
    )  # fmt: skip
    arrays, by_parts = (x, weight, bias, segments), is_by_parts(qkv)
    options = _SelfAttentionOptions(options, by_parts)
    return _self_attention(*arrays, backend=resolve(backend), options=options)


@dataclasses.dataclass(frozen=True)
class _SelfAttentionOptions:
    attention: PackedOptions
    by_parts: bool


def _self_attention_forward(options, backend, x, weight, bias, segments):
    matrix, _ = in_rows(weight, None)
    qkv = (jnp.dot(x, matrix) + bias.ravel()).reshape(*x.shape[:2], *weight.shape[1:])
    out, saved = _attend(backend, qkv, segments, options.attention)
    return out, (x, weight, saved)


def _self_attention_backward(options, backend, residuals, dout):
    x, weight, saved = residuals
    dqkv, dbias = _attend_backward(backend, saved, dout, None, None, options.attention)
    matrix, _ = in_rows(weight, None)
    dx, dweight = dgrad_and_wgrad(x, matrix, lax.collapse(dqkv, 2))
    return dx, dweight.reshape(weight.shape), dbias, None


def _self_attention_sharding(options: _SelfAttentionOptions) -> ShardingRule:
    columns, heads = ("_ K _", "K") if options.by_parts else ("_", "_")
    return ShardingRule(
        f"B T _, _ {columns}, {columns}, [B T | B T] -> B T {heads}; B T {columns}, B {heads} T",
        _sharded(options),
    )


_self_attention = with_backward(
    "self_attention",
    _self_attention_forward,
    _self_attention_backward,
    sharding=_self_attention_sharding,
)
