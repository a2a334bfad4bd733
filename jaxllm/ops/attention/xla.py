"""cuDNN's fused attention, as JAX ships it: the ``xla`` backend on an NVIDIA GPU.

``jax.nn.dot_product_attention(implementation="cudnn")`` is not enough here. It rounds the
log-sum-exp that it returns to the dtype of the output, which in bfloat16 spoils every probability
that a backward pass recomputes from it; and its own backward belongs to its own forward, while an
op here keeps its residuals and pairs any forward with any backward. So both directions call the
functions underneath, in :func:`_forward` and :func:`_backward` alone. They are
the same in JAX 0.10, 0.11 and 0.12, but for one option.

cuDNN's backward may add up ``dq`` in any order, so its last bits can differ between runs.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from jaxllm.core import ffi
from jaxllm.ops.attention import packing, sink
from jaxllm.ops.rotary.reference import rope_backward, rope_forward

# The custom calls of the two directions, without a bias and without dropout.
TARGETS = tuple(cudnn.get_custom_call_name(False, False, backward) for backward in (False, True))
_DTYPES = (jnp.bfloat16, jnp.float16)
_MAX_HEAD_WIDTH, MAX_HEAD_WIDTH_BEFORE_HOPPER = 256, 128
# Of keys and values: the one pair that differs and that this module leaves to cuDNN.
_LATENT_WIDTHS = (192, 128)
_LEAST_VERSION_FOR_LATENT_WIDTHS = 91000


def flash_attention_unsupported(
    q, k, v, segment_ids, rope_table=None, sinks=None,
    *, causal, scale, window, softcap, interleaved=False,
) -> str | None:  # fmt: skip
    """Why cuDNN cannot serve a forward; None if it can."""
    T, S, H = q.shape[1], k.shape[1], q.shape[3]
    if any(array.dtype not in _DTYPES for array in (q, k, v)):
        return f"q has dtype {q.dtype}; cuDNN's attention takes bfloat16 and float16"
    if H > _MAX_HEAD_WIDTH or H % 8:
        return f"heads are {H} wide; cuDNN's attention takes multiples of 8 up to {_MAX_HEAD_WIDTH}"
    if v.shape[3] != H and (H, v.shape[3]) != _LATENT_WIDTHS:
        wide, narrow = _LATENT_WIDTHS
        return (
            f"queries and keys are {H} wide and values {v.shape[3]}; of widths that differ cuDNN's "
            f"attention takes {wide} and {narrow} alone here"
        )
    if 0 in q.shape or 0 in k.shape:
        return "q or k has no elements"
    if S == 1:
        return "cuDNN's attention needs two keys or more"
    if not scale > 0:
        # With -0.1 and a causal mask its output is not finite.
        return f"scale is {scale}; cuDNN's attention takes scales above zero here"
    if softcap is not None:
        return "cuDNN's attention has no softcap here"
    if segment_ids is not None:
        return "cuDNN's attention takes no segment ids here"
    if causal and T != S:
        return f"cuDNN's causal mask starts at the first key, so {T} queries need {T} keys, not {S}"
    if window is not None and not causal:
        return "cuDNN's window needs a causal mask"
    return _no_cudnn(H, v.shape[3])


def flash_attention_backward_unsupported(
    q, k, v, out, lse, dout, segment_ids, rope_table=None, dlse=None, sinks=None, **options
) -> str | None:
    """Why cuDNN cannot serve a backward; None if it can."""
    if dlse is not None:
        # It computes rowsum(dout * out) by itself, and JAX has no operand to subtract dlse by.
        return "lse has a gradient; cuDNN's attention takes that of the output alone"
    return flash_attention_unsupported(q, k, v, segment_ids, rope_table, **options)


def _no_cudnn(width: int, value_width: int) -> str | None:
    """Why this process has no cuDNN to trace for; JAX asks for it as soon as it traces the call."""
    capabilities = ffi.compute_capabilities()
    if not capabilities:
        return "this process has no NVIDIA GPU, and JAX traces cuDNN's attention only beside one"
    oldest = min(int(capability.partition(".")[0]) for capability in capabilities)
    if oldest < 8:
        return "cuDNN's attention needs an Ampere GPU (compute capability 8.0) or a newer one"
    if oldest < 9 and width > MAX_HEAD_WIDTH_BEFORE_HOPPER:
        return (
            f"heads are {width} wide; cuDNN's attention takes at most "
            f"{MAX_HEAD_WIDTH_BEFORE_HOPPER} before Hopper GPUs"
        )
    try:
        version = cudnn.check_cudnn_version()
    except RuntimeError as error:
        return f"JAX finds no cuDNN: {error}"
    if value_width != width and (oldest < 9 or version < _LEAST_VERSION_FOR_LATENT_WIDTHS):
        return "values of another width need cuDNN 9.10 and a Hopper GPU, or newer ones"
    return None


def flash_attention_forward(
    q, k, v, segment_ids, rope_table=None, sinks=None,
    *, causal, scale, window, softcap, interleaved=False,
):  # fmt: skip
    """Returns ``(out, lse)``."""
    if rope_table is not None:
        q, k = rope_forward(q, k, *rope_table, interleaved=interleaved)
    out, lse = _forward(q, k, v, _mask_type(causal), scale, window)
    return sink.join(out, lse, sinks)


def flash_attention_backward(
    q, k, v, out, lse, dout, segment_ids, rope_table=None, dlse=None, sinks=None,
    *, causal, scale, window, softcap, interleaved=False,
):  # fmt: skip
    """Returns ``(dq, dk, dv)``, and ``dsinks`` where there are sinks."""
    if rope_table is not None:
        q, k = rope_forward(q, k, *rope_table, interleaved=interleaved)
    dq, dk, dv = _backward(q, k, v, out, lse, dout, _mask_type(causal), scale, window)
    if rope_table is not None:
        dq, dk = rope_backward(dq, dk, *rope_table, interleaved=interleaved)
    return dq, dk, dv, *sink.gradients(out, lse, dout, dlse, sinks)


flash_attention_packed_unsupported = packing.unsupported(flash_attention_unsupported)
flash_attention_packed_backward_unsupported = packing.unsupported(
    flash_attention_backward_unsupported
)
flash_attention_packed_forward = packing.forward(flash_attention_forward)
flash_attention_packed_backward = packing.backward(flash_attention_backward)
self_attention_backward_unsupported = packing.unsupported_with_bias(
    flash_attention_packed_backward_unsupported
)
self_attention_backward = packing.backward_with_bias(flash_attention_packed_backward)


def _mask_type(causal: bool) -> cudnn.MaskType:
    return cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK


def _forward(q, k, v, mask_type: cudnn.MaskType, scale: float, window: int | None) -> Any:
    # cuDNN's window counts the query's own position, as ours does: it sees (t - window, t].
    # The second result is the natural logarithm, with the scale inside: (B, N, T), float32.
    forward = functools.partial(
        cudnn.dot_product_attention,
        scale=scale,
        mask_type=mask_type,
        sliding_window_length=window,
        return_residual=True,
    )
    return _with_joined_batch(forward, q, k, v)


def _backward(q, k, v, out, lse, dout, mask_type: cudnn.MaskType, scale: float, window: int | None):
    # JAX has no public way to run the backward kernel without its forward before it; this is the
    # primitive that the forward's own derivative rule binds, with the same arguments.
    options = {}
    if "score_mod" in inspect.signature(cudnn.dot_product_attention).parameters:
        options["score_mod"] = None  # from JAX 0.12 on

    def backward(q, k, v, out, lse, dout):
        absent = jnp.zeros(0, q.dtype)  # no bias, sequence lengths, offsets or page tables
        return cudnn._dot_product_attention_bwd_p_wrapper.bind(
            q,
            k,
            v,
            *[absent] * 7,
            lse,
            out,
            dout,
            scale=scale,
            seed=42,  # of the dropout that there is not
            dropout_rate=0.0,
            variadic_args=(False, False),  # neither a bias nor its gradient
            mask_type=mask_type,
            layout=cudnn.AttentionLayout.BTNH.value,
            sliding_window_length=window,
            **options,
        )

    return _with_joined_batch(backward, q, k, v, out, lse, dout)


def _with_joined_batch(call, *arrays) -> tuple[jax.Array, ...]:
    """``call(*arrays)``; under ``jax.vmap`` the mapped axis joins that of the sequences.

    JAX's own rule takes values for as wide as keys.
    """
    joined = jax.custom_batching.custom_vmap(lambda *arrays: tuple(call(*arrays)))

    @joined.def_vmap
    def _(size, flags, *arrays):
        of_all = [
            x if flag else jnp.broadcast_to(x, (size, *x.shape))
            for x, flag in zip(arrays, flags, strict=True)
        ]
        batch = of_all[0].shape[1]
        results = joined(*(x.reshape(size * batch, *x.shape[2:]) for x in of_all))
        apart = tuple(x.reshape(size, batch, *x.shape[1:]) for x in results)
        return apart, (True,) * len(apart)

    return joined(*arrays)
