"""What the peers compute: ops of torch, Liger, cut-cross-entropy, optax and tokamax.

Each has the name, the arrays and the options of one of our ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxllm.ops.window import sides

# The peers of each op. Liger has no fused add + layer norm.
PEERS: dict[str, tuple[str, ...]] = {
    "layer_norm": ("torch.compile", "liger", "torch eager"),
    "rms_norm": ("torch.compile", "liger", "torch eager"),
    "add_layer_norm": ("torch.compile", "torch eager"),
    "add_rms_norm": ("torch.compile", "liger", "torch eager"),
    "softmax": ("torch.compile", "liger", "torch eager"),
    "repeat_kv": ("torch.compile", "torch eager"),
    "gelu": ("torch.compile", "torch eager"),
    "bias_gelu": ("torch.compile", "torch eager"),
    "bias_add": ("torch.compile", "torch eager"),
    "swiglu": ("torch.compile", "liger", "torch eager"),
    "swiglu_packed": ("torch.compile", "torch eager"),
    "relu": ("torch.compile", "torch eager"),
    "sigmoid": ("torch.compile", "torch eager"),
    "add": ("torch.compile", "torch eager"),
    "matmul": ("torch.compile", "torch eager"),
    "float8_matmul": ("cublaslt", "torch rowwise"),
    "linear": ("torch.compile", "torch eager"),
    "mlp": ("torch.compile", "torch eager"),
    "self_attention": ("torch.compile", "torch eager"),
    "attention_block": ("torch.compile", "torch eager"),
    "ffn_block": ("torch.compile", "torch eager"),
    "cross_entropy": ("torch.compile", "liger"),
    "linear_cross_entropy": ("torch.compile", "liger", "cut-cross-entropy"),
    "adamw_update": ("torch fused",),
    "global_norm": ("torch.compile", "torch eager"),
    "reduce_sum": ("torch.compile", "torch eager"),
    "reduce_max": ("torch.compile", "torch eager"),
    "dot": ("torch.compile", "torch eager"),
    "histogram": ("torch eager",),
    "nms": ("torchvision",),
    "embed": ("torch.compile", "torch eager"),
    "rope": ("torch.compile", "liger", "torch eager"),
}


def _optax_adamw(param, grad, m, v, *, step, lr, copy_dtype=None, seed=None):
    """``adamw_update`` as one writes it with optax; its defaults are ours."""
    import optax

    if seed is not None:
        raise ValueError("optax has no random rounding")
    optimizer = optax.adamw(lr, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    state: Any = optimizer.init(param)
    state = (optax.ScaleByAdamState(jax.numpy.int32(step - 1), m, v), *state[1:])
    updates, state = optimizer.update(grad, state, param)
    adam = state[0]
    param = optax.apply_updates(param, updates)
    if copy_dtype is None:
        return param, adam.mu, adam.nu
    return param, adam.mu, adam.nu, jax.tree.map(lambda x: x.astype(copy_dtype), param)


def _bincount(x, *, bins):
    """``histogram`` of integers that are all in a bin."""
    return jax.numpy.bincount(x.reshape(-1), length=bins)


def _tokamax_attention(implementation, q, k, v, *, causal=False, **options):
    """``flash_attention`` of tokamax, for the options ``causal`` and ``scale``."""
    import tokamax

    return tokamax.dot_product_attention(
        q, k, v, is_causal=causal, implementation=implementation, **options
    )


def _flash_attention_3(q, k, v, *, causal=False, window=None, scale=None):
    """``flash_attention`` of FlashAttention-3, as flash_attn3_jax has it."""
    import flash_attn3_jax

    left, right = (-1 if side is None else side for side in sides(causal, window))
    return flash_attn3_jax.flash_mha(
        q, k, v, softmax_scale=scale, is_causal=causal, window_size=(left, -1 if causal else right)
    )


def _flash_attention_3_in_order(q, k, v, *, causal=False, scale=None):
    """The same with its deterministic backward, which flash_attn3_jax has and never asks for."""
    from flash_attn3_jax import flash

    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def forward(q, k, v):
        out, lse = flash._flash_mha_fwd(q, k, v, scale, causal, (-1, -1))
        return out, (q, k, v, out, lse)

    def backward(saved, dout):
        q, k, v, out, lse = saved
        B, T, N, _ = q.shape
        statistic = jax.ShapeDtypeStruct((B, N, -(-T // 128) * 128), jax.numpy.float32)
        results = (*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)), *[statistic] * 2)
        nothing = jax.numpy.zeros(0, jax.numpy.int32)
        found = jax.ffi.ffi_call("flash_mha_bwd", results)(
            dout, q, k, v, out, lse, *[nothing] * 4,
            max_seqlen_q_val=T, max_seqlen_q_has_value=True,
            max_seqlen_k_val=k.shape[1], max_seqlen_k_has_value=True,
            softmax_scale_val=float(scale), softmax_scale_has_value=True,
            is_causal=causal, window_size_left=-1, window_size_right=-1,
            softcap=0.0, deterministic=True, sm_margin=0,
        )  # fmt: skip
        return tuple(found[:3])

    attend = jax.custom_vjp(lambda q, k, v: forward(q, k, v)[0])
    attend.defvjp(forward, backward)
    return attend(q, k, v)


def _is_in_window(distance, causal, window):
    """Which keys so far before a query it sees; for the arrays of any library."""
    left, right = sides(causal, window)
    seen = distance == distance
    if left is not None:
        seen = seen & (distance <= left)
    if right is not None:
        seen = seen & (-distance <= right)
    return seen


def _masked_cudnn(q, k, v, *, causal=False, window=None, segment_ids=None, scale=None):
    """``flash_attention`` by cuDNN, with a mask array, for windows and segments."""
    if window is None and segment_ids is None:
        raise ValueError("without a window or segments cuDNN needs no mask: see xla")
    distance = jax.numpy.arange(q.shape[1])[:, None] - jax.numpy.arange(k.shape[1])
    mask = _is_in_window(distance, causal, window)[None, None]
    if segment_ids is not None:
        mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    return jax.nn.dot_product_attention(q, k, v, mask=mask, scale=scale, implementation="cudnn")


# Peers that are JAX functions with the op's arguments; they run in the process of our backends.
JAX_PEERS: dict[str, dict[str, Callable[..., Any]]] = {
    "adamw_update": {"optax": _optax_adamw},
    "histogram": {"jnp.bincount": _bincount},
    "flash_attention": {
        "tokamax mosaic": functools.partial(_tokamax_attention, "mosaic"),
        "tokamax triton": functools.partial(_tokamax_attention, "triton"),
        "cudnn with a mask": _masked_cudnn,
        "flash-attention-3": _flash_attention_3,
        "flash-attention-3 in order": _flash_attention_3_in_order,
    },
}

_EPS = 1e-5


def torch_ops() -> dict[str, Callable[..., Any]]:
    """The ops as one writes them in torch."""
    import torch
    import torch.nn.functional as F
    from torch.utils._pytree import tree_leaves  # torch.compile knows nothing of jax.tree

    def layer_norm(x, scale, bias):
        return F.layer_norm(x, scale.shape, scale, bias, _EPS)

    def rms_norm(x, scale):
        return F.rms_norm(x, scale.shape, scale, _EPS)

    def add_layer_norm(x, residual, scale, bias, x_bias=None):
        h = (x if x_bias is None else x + x_bias) + residual
        return layer_norm(h, scale, bias), h

    def add_rms_norm(x, residual, scale):
        h = x + residual
        return rms_norm(h, scale), h

    def softmax(x, scale=1.0, causal=False):
        if causal:
            T, S = x.shape[-2:]
            seen = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
            x = x.masked_fill(~seen, -torch.inf)
        return F.softmax(scale * x, dim=-1)

    def repeat_kv(x, groups):
        return x.repeat_interleave(groups, dim=-2)

    def gelu(x):
        return F.gelu(x, approximate="tanh")

    def bias_gelu(x, bias):
        return gelu(x + bias)

    def bias_add(x, bias):
        return x + bias

    def swiglu(gate, up):
        return F.silu(gate) * up

    def swiglu_packed(x):
        return swiglu(*x.chunk(2, dim=-1))

    def relu(x):
        return F.relu(x)

    def sigmoid(x):
        return F.sigmoid(x)

    def add(x, y):
        return x + y

    def matmul(a, b, bias=None, *, transpose_a=False, transpose_b=False, activation=None):
        h = F.linear(a.mT if transpose_a else a, b if transpose_b else b.mT, bias)
        return h if activation is None else gelu(h)

    def linear(x, weight, bias=None, activation=None):
        h = F.linear(x, weight.T, bias)
        return h if activation is None else gelu(h)

    def mlp(x, up_weight, up_bias, down_weight, down_bias):
        return linear(linear(x, up_weight, up_bias, "gelu"), down_weight, down_bias)

    def mask_of(T, window, causal, segment_ids, device):
        """The mask that broadcasts to (B, N, T, T); None where a flag of torch's says it all."""
        if window is None and segment_ids is None:
            return None
        positions = torch.arange(T, device=device)
        distance = positions[:, None] - positions
        mask = _is_in_window(distance, causal, window)
        if segment_ids is not None:
            mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
        return mask

    def usual_order(x):
        """Columns in parts, (..., N/K + 2, K, H), as queries, keys and values."""
        queries, rest = x[..., :-2, :, :].transpose(-3, -2), x[..., -2:, :, :]
        return torch.cat([part.flatten(-3) for part in (queries, rest)], dim=-1)

    def self_attention(
        x, weight, bias=None, *, heads, kv_heads=None,
        causal=False, scale=None, window=None, segment_ids=None,
    ):  # fmt: skip
        kv_heads = heads if kv_heads is None else kv_heads
        if weight.dim() == 4:
            weight, bias = (None if of is None else usual_order(of) for of in (weight, bias))
        qkv = linear(x, weight, bias).unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        mask = mask_of(x.shape[1], window, causal, segment_ids, x.device)
        out = F.scaled_dot_product_attention(
            q, k, v, mask,
            is_causal=causal and mask is None, scale=scale, enable_gqa=kv_heads != heads,
        )  # fmt: skip
        return out.transpose(1, 2).flatten(2)

    def pre_norm(x, norm, kind):
        return layer_norm(x, **norm) if kind == "layer" else rms_norm(x, **norm)

    def attention_block(x, norm, weights, *, kind, **options):
        attended = self_attention(pre_norm(x, norm, kind), **weights["qkv"], **options)
        return x + linear(attended, **weights["out"])

    def ffn_block(x, norm, weights, *, kind, activation="gelu"):
        rows = pre_norm(x, norm, kind)
        if activation == "swiglu":
            hidden = swiglu_packed(linear(rows, **weights["gate_up"]))
        else:
            hidden = linear(rows, **weights["up"], activation=activation)
        return x + linear(hidden, **weights["down"])

    def cross_entropy(logits, labels, *, vocab_size=None):
        logits = logits[..., :vocab_size].float()
        return F.cross_entropy(logits.flatten(0, -2), _labels(labels), ignore_index=-1)

    def linear_cross_entropy(hidden, weight, labels, *, transpose_weight=False, vocab_size=None):
        logits = F.linear(hidden, weight if transpose_weight else weight.T)
        return cross_entropy(logits, labels, vocab_size=vocab_size)

    def global_norm(tree):
        return torch.nn.utils.get_total_norm(tree_leaves(tree))

    def reduce_sum(x):
        return x.sum(dtype=torch.float32)

    def reduce_max(x):
        return x.max()

    def dot(a, b):
        return torch.dot(a.flatten(), b.flatten())

    def histogram(x, *, bins):  # of int64, as torch's random integers are
        return torch.bincount(x.flatten(), minlength=bins)

    def embed(tokens, token_table, position_table=None):
        out = F.embedding(tokens, token_table)
        return out if position_table is None else out + position_table[: tokens.shape[-1]]

    def rope(q, k, cos, sin, interleaved=False):
        return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)

    def rotate(x, cos, sin, interleaved):
        # In the layout B T N H each position's row of a table serves all heads.
        cos, sin = cos[:, None, :], sin[:, None, :]
        wide = x.float()
        a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, dim=-1)
        rotated = (a * cos - b * sin, a * sin + b * cos)
        joined = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
        return joined.to(x.dtype)

    norms = (layer_norm, rms_norm, add_layer_norm, add_rms_norm)
    activations = (gelu, bias_gelu, bias_add, swiglu, swiglu_packed, relu, sigmoid, add)
    others = (global_norm, softmax, repeat_kv, embed, rope)
    gemms = (matmul, linear, mlp)
    blocks = (self_attention, attention_block, ffn_block)
    losses = (cross_entropy, linear_cross_entropy)
    reductions = (reduce_sum, reduce_max, dot, histogram)
    groups = (norms, activations, others, gemms, blocks, losses, reductions)
    return {fn.__name__: fn for group in groups for fn in group}


def cublaslt_ops() -> dict[str, Callable[..., Any]]:
    """The GEMM of cuBLASLt alone, through torch, with one scale for each operand."""
    return {"float8_matmul": lambda a, b, *scales: _scaled_mm(a, b, *(s[0] for s in scales))}


def torch_rowwise_ops() -> dict[str, Callable[..., Any]]:
    """A GEMM of torch with a scale for each row and column."""
    return {"float8_matmul": lambda a, b, s_a, s_b: _scaled_mm(a, b, s_a[:, None], s_b[None])}


def _scaled_mm(a, b, scale_a, scale_b):
    import torch

    options: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    return torch._scaled_mm(a, b.T, scale_a, scale_b, **options)  # pyright: ignore


def _labels(labels: Any) -> Any:
    """Labels in one dimension; ignored ones become -1, the peers' ``ignore_index``."""
    return labels.flatten().clamp(min=-1)


def torchvision_ops() -> dict[str, Callable[..., Any]]:
    """Torchvision's ops."""
    from torchvision.ops import nms

    # It returns the indices of the boxes that it keeps.
    return {"nms": nms}


def liger_ops() -> dict[str, Callable[..., Any]]:
    """Liger's kernels."""
    # With "llama" only the root mean square is float32. In-place operation would overwrite the
    # cotangents, which the next repetition needs; the bytes moved are the same.
    import torch
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.softmax import LigerSoftmaxFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def layer_norm(x, scale, bias):
        return LigerLayerNormFunction.apply(x, scale, bias, _EPS)

    def rms_norm(x, scale):
        return LigerRMSNormFunction.apply(x, scale, _EPS, 0.0, "llama", False)

    def add_rms_norm(x, residual, scale):
        return LigerFusedAddRMSNormFunction.apply(x, residual, scale, _EPS, 0.0, "llama", False)

    def softmax(x, scale=1.0, causal=False):
        if causal or scale != 1.0:
            raise NotImplementedError("Liger's softmax has neither a scale nor a mask")
        return LigerSoftmaxFunction.apply(x)

    def swiglu(gate, up):
        # Its backward writes the gradients over gate and up, which the next repetition reads: the
        # values become meaningless, but the bytes moved are the same.
        return LigerSiLUMulFunction.apply(gate, up)

    # Both include the padding of the vocabulary in the softmax; the bytes moved are the same.
    def cross_entropy(logits, labels, *, vocab_size=None):
        labels = _labels(labels)
        return LigerCrossEntropyFunction.apply(logits, labels, None, -1)[0]

    def linear_cross_entropy(hidden, weight, labels, *, transpose_weight=False, vocab_size=None):
        weight = weight if transpose_weight else weight.T
        labels = _labels(labels)
        return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels, None, None, -1)[0]

    def rope(q, k, cos, sin, interleaved=False):
        if interleaved:
            raise NotImplementedError("Liger's rope is half-split")
        # It works in place, so true rotations keep the values bounded over many repetitions. It
        # takes heads before positions, here as a transposed view.
        cos, sin = true_rotation(cos)
        q, k = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    @functools.cache  # not part of what is timed
    def true_rotation(angles):
        both = torch.cat((angles, angles), -1)[None]
        return both.cos(), both.sin()

    norms = (layer_norm, rms_norm, add_rms_norm)
    others = (softmax, swiglu, rope, cross_entropy, linear_cross_entropy)
    return {fn.__name__: fn for fn in (*norms, *others)}


def cut_cross_entropy_ops() -> dict[str, Callable[..., Any]]:
    """The one op of Apple's cut-cross-entropy."""
    from cut_cross_entropy import linear_cross_entropy as cut

    # The softmax includes the padding of the vocabulary. Small gradients are skipped, which is the
    # library's default.
    def linear_cross_entropy(hidden, weight, labels, *, transpose_weight=False, vocab_size=None):
        weight = weight if transpose_weight else weight.T
        return cut(hidden, weight, _labels(labels), ignore_index=-1)

    return {"linear_cross_entropy": linear_cross_entropy}
