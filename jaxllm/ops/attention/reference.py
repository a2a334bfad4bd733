r"""Attention in ``jax.numpy``, and its derivative by hand.

For one head, with :math:`c` the softcap (if any) and :math:`M` the mask,

.. math::
    a = scale \cdot q k^T \qquad s = c \tanh(a / c) \qquad
    lse_t = \log \sum_{s \in M_t} e^{s_{ts}} \qquad p = e^{s - lse}\,[M] \qquad out = p\,v

so that, with :math:`dp = dout\,v^T` and the softmax's own rule
:math:`ds = p\,(dp - \sum_s p\,dp)`, whose sum over keys is :math:`\delta = \sum_H out \cdot dout`,

.. math::
    da = p\,(dp - \delta)\,(1 - (s/c)^2) \qquad
    dq = scale \cdot da\,k \qquad dk = scale \cdot da^T q \qquad dv = p^T dout

A key head that serves several query heads gets the sum of their gradients. A query that sees no
key has :math:`out = 0` and :math:`lse = -\infty`, and no gradient.

A bias :math:`b` is added to the scores after the softcap, :math:`s = c \tanh(a / c) + b`, so that
:math:`db = ds`, summed over the sequences or heads that share an element of it. Of a score
:math:`-\infty` both are zero, as if the mask hid the key.

Where :math:`lse` is a result too and has a gradient, :math:`\partial lse / \partial s = p` adds
:math:`p\,dlse` to :math:`ds`: the backward takes :math:`\delta - dlse` for :math:`\delta`.

A sink is a score :math:`z` of a head, and no key: it joins the denominator of each query's softmax,

.. math::
    lse = \log\left( e^z + \sum_{s \in M_t} e^{s_{ts}} \right) \qquad
    dz = \sum_t e^{z - lse_t}\,(dlse_t - \delta_t)

and all that is said above holds with this :math:`lse`.

The scores are held in memory, (B, N, T, S) in float32 (float64 for float64 inputs), so
memory grows with T S. The precision of float32 matmuls is JAX's ``jax_default_matmul_precision``.

With rotary embeddings q and k rotate first, and dq and dk rotate back: see the family ``rotary``.

``self_attention`` takes q, k and v from a projection :math:`x W + b`, so that :math:`db`, the sum
over all tokens of their gradients, need not be read off these: where each query sees a key, itself
at least, and neither a softcap nor rotary embeddings are between,

.. math::
    db_q = \sum_t dq_t \qquad db_k = \sum_s dk_s = 0 \qquad db_v = \sum_s dv_s = \sum_t dout_t

A vector added to all keys of a head adds one number to all scores of a query, which changes no
:math:`p`; and the :math:`p` of a query add up to one. The reference and most implementations sum
rows all the same.

``softmax`` is the middle of that by itself, :math:`out = p` of scores :math:`s = scale \cdot x`, so

.. math::
    dx = scale \cdot out\,(dout - \sum_s out\,dout)

and ``repeat_kv`` copies each key head for its query heads, so that its gradient is their sum.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jaxllm.core.precision import wide_dtype
from jaxllm.ops.attention import packing, sink
from jaxllm.ops.rotary.reference import rope_backward, rope_forward
from jaxllm.ops.window import Window, sides


def _wide(x: Array) -> Array:
    return x.astype(wide_dtype(x.dtype))


def _group(x: Array, kv_heads: int) -> Array:
    """(B, T, N, H) -> (B, T, K, G, H): query heads beside the key head that they share."""
    B, T, N, H = x.shape
    return _wide(x).reshape(B, T, kv_heads, N // kv_heads, H)


def _scores(q: Array, k: Array, scale: float, softcap: float | None) -> Array:
    """The scores of grouped queries, (B, K, G, T, S), before the mask."""
    scores = scale * jnp.einsum("btkgh,bskh->bkgts", q, k)
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _bias_of_groups(bias: Array, kv_heads: int) -> Array:
    """(1 or B, 1 or N, T, S) -> (., ., ., T, S), to broadcast to grouped scores."""
    B, N, T, S = bias.shape
    return _wide(bias).reshape(B, *((1, 1) if N == 1 else (kv_heads, N // kv_heads)), T, S)


def _normalize(scores: Array, sinks: Array | float = -jnp.inf) -> tuple[Array, Array]:
    """The softmax of scores along their last axis, and the logarithm of what it divides by.

    A sink joins that; -inf is none. A row without either, all of it -inf, has zeros and -inf.
    """
    largest = lax.stop_gradient(jnp.maximum(scores.max(axis=-1, initial=-jnp.inf), sinks))
    # A row without keys would compute -inf - -inf.
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    weights = jnp.exp(scores - largest[..., None])
    total = weights.sum(axis=-1) + jnp.exp(sinks - largest)
    # Of no keys the logarithm would be -inf too, and its derivative no number.
    some = jnp.where(total == 0, 1, total)
    lse = jnp.where(total == 0, -jnp.inf, largest + jnp.log(some))
    return weights / some[..., None], lse


def _mask(T: int, S: int, causal: bool, window: Window, segment_ids) -> Array:
    """Which query sees which key, to broadcast to (B, K, G, T, S)."""
    # The last query stands at the last key, whatever the lengths.
    distance = jnp.arange(T)[:, None] + (S - T) - jnp.arange(S)[None, :]
    mask = jnp.ones((T, S), bool)
    left, right = sides(causal, window)
    if left is not None:
        mask &= distance <= left
    if right is not None:
        mask &= distance >= -right
    if segment_ids is not None:
        of_query, of_key = segment_ids
        mask = mask & (of_query[:, :, None] == of_key[:, None, :])[:, None, None]
    return mask


def flash_attention(
    q,
    k,
    v,
    sinks=None,
    bias=None,
    *,
    causal=False,
    scale=None,
    window=None,
    softcap=None,
    segment_ids=None,
    rope_table=None,
    interleaved=False,
    return_lse=False,
):
    """The reference implementation of ``flash_attention``, for JAX to differentiate."""
    if segment_ids is not None and not isinstance(segment_ids, tuple):
        segment_ids = (segment_ids, segment_ids)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = {"causal": causal, "scale": scale, "window": window, "softcap": softcap}
    rope_table = lax.stop_gradient(rope_table)
    arrays = (q, k, v, segment_ids, rope_table, sinks)
    out, lse = flash_attention_forward(*arrays, **options, interleaved=interleaved, bias=bias)
    return (out, lse) if return_lse else out


def flash_attention_forward(
    q, k, v, segment_ids, rope_table=None, sinks=None,
    *, causal, scale, window, softcap, interleaved=False, bias=None,
):  # fmt: skip
    """Returns ``(out, lse)``.

    ``segment_ids`` is None or a pair, of the queries and of the keys; ``rope_table`` is None or a
    pair, the cosines and the sines; ``sinks`` is None or (N,).
    """
    if rope_table is not None:
        q, k = rope_forward(q, k, *rope_table, interleaved=interleaved)
    B, T, N, _ = q.shape
    mask = _mask(T, k.shape[1], causal, window, segment_ids)
    scores = _scores(_group(q, k.shape[2]), _wide(k), scale, softcap)
    if bias is not None:
        scores = scores + _bias_of_groups(bias, k.shape[2])
    of_heads = -jnp.inf if sinks is None else _wide(sinks).reshape(k.shape[2], -1, 1)
    weights, lse = _normalize(jnp.where(mask, scores, -jnp.inf), of_heads)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, _wide(v))
    return out.reshape(B, T, N, v.shape[-1]).astype(q.dtype), lse.reshape(B, N, T)


def flash_attention_backward(
    q, k, v, out, lse, dout, segment_ids, rope_table=None, dlse=None, sinks=None,
    *, causal, scale, window, softcap, interleaved=False, bias=None,
):  # fmt: skip
    """Returns ``(dq, dk, dv)``, and ``dbias`` and ``dsinks`` where there are biases and sinks.

    ``dlse`` is the gradient of ``lse``, None where it has none.
    """
    if rope_table is not None:
        q, k = rope_forward(q, k, *rope_table, interleaved=interleaved)
    B, T, N, _ = q.shape
    S, K = k.shape[1:3]
    wide_q, wide_k, dout = _group(q, K), _wide(k), _group(dout, K)
    mask = _mask(T, S, causal, window, segment_ids)
    scores = _scores(wide_q, wide_k, scale, softcap)
    biased = scores
    if bias is not None:
        biased = scores + _bias_of_groups(bias, K)
        mask = mask & (biased != -jnp.inf)
    # The mask comes before exp: a row without keys has lse = -inf, and exp(inf) is no number.
    p = jnp.exp(jnp.where(mask, biased - lse.reshape(B, K, N // K, T, 1), -jnp.inf))
    delta = jnp.einsum("btkgh,btkgh->bkgt", _group(out, K), dout)
    if dlse is not None:
        delta = delta - dlse.reshape(delta.shape)
    dp = jnp.einsum("btkgh,bskh->bkgts", dout, _wide(v))
    dscores = dbias = p * (dp - delta[..., None])
    if softcap is not None:
        dscores = dscores * (1 - (scores / softcap) ** 2)
    dq = scale * jnp.einsum("bkgts,bskh->btkgh", dscores, wide_k)
    dk = scale * jnp.einsum("bkgts,btkgh->bskh", dscores, wide_q)
    dv = jnp.einsum("bkgts,btkgh->bskh", p, dout)
    dq = dq.reshape(q.shape)
    if rope_table is not None:
        dq, dk = rope_backward(dq, dk, *rope_table, interleaved=interleaved)
    gradients = [dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)]
    if bias is not None:
        shared = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
        dbias = dbias.reshape(B, N, T, S).sum(axis=shared, keepdims=True)
        gradients.append(dbias.astype(bias.dtype))
    if sinks is not None:
        gradients.append(sink.gradient_by_delta(lse, delta.reshape(lse.shape), sinks))
    return tuple(gradients)


def flash_attention_bias_forward(q, k, v, bias, *rest, **options):
    """Returns ``(out, lse)``; ``bias`` is (1 or B, 1 or N, T, S)."""
    return flash_attention_forward(q, k, v, *rest, bias=bias, **options)


def flash_attention_bias_backward(q, k, v, bias, *rest, **options):
    """Returns ``(dq, dk, dv, dbias)``, and ``dsinks`` where there are sinks."""
    return flash_attention_backward(q, k, v, *rest, bias=bias, **options)


def flash_attention_packed(qkv, *, heads, kv_heads=None, sinks=None, return_lse=False, **options):
    """The reference implementation of ``flash_attention_packed``, for JAX to differentiate."""
    q, k, v = packing.split(qkv, heads, kv_heads or heads)
    out, lse = flash_attention(q, k, v, sinks, **options, return_lse=True)
    return (packing.rows(out), lse) if return_lse else packing.rows(out)


flash_attention_packed_forward = packing.forward(flash_attention_forward)
flash_attention_packed_backward = packing.backward(flash_attention_backward)


self_attention_backward = packing.backward_with_bias(flash_attention_packed_backward)


def flash_attention_float8(q, k, v, q_scale, k_scale, v_scale, segment_ids, **options):
    """Returns ``out``, in bfloat16."""
    pairs = ((q, q_scale), (k, k_scale), (v, v_scale))
    q, k, v = (x.astype(jnp.float32) * scale[:, None] for x, scale in pairs)
    out, _ = flash_attention_forward(q, k, v, segment_ids, **options)
    return out.astype(jnp.bfloat16)


def softmax(x, *, scale=1.0, causal=False):
    """The reference implementation of ``softmax``, for JAX to differentiate."""
    return softmax_forward(x, scale=scale, causal=causal)


def softmax_forward(x, *, scale, causal):
    """Returns ``out``."""
    scores = scale * _wide(x)
    if causal:
        T, S = x.shape[-2:]
        scores = jnp.where(_mask(T, S, causal, None, None), scores, -jnp.inf)
    return _normalize(scores)[0].astype(x.dtype)


def softmax_backward(out, dout, *, scale, causal):
    """Returns ``dx``; where the mask hides a key, ``out`` is zero, and so is ``dx``."""
    wide_out, wide_dout = _wide(out), _wide(dout)
    delta = (wide_out * wide_dout).sum(axis=-1, keepdims=True)
    return (scale * wide_out * (wide_dout - delta)).astype(out.dtype)


def repeat_kv(x, *, groups):
    """The reference implementation of ``repeat_kv``, for JAX to differentiate."""
    return repeat_kv_forward(x, groups=groups)


def repeat_kv_forward(x, *, groups):
    """Returns ``out``."""
    return jnp.repeat(x, groups, axis=-2)


def repeat_kv_backward(dout, *, groups):
    """Returns ``dx``."""
    *outer, N, H = dout.shape
    heads = _wide(dout).reshape(*outer, N // groups, groups, H)
    return heads.sum(axis=-2).astype(dout.dtype)
