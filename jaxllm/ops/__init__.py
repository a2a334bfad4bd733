"""The ops: arrays in, arrays out, one derivative rule each, three implementations behind each."""

from jaxllm.ops.activation.api import (
    add,
    bias_add,
    bias_gelu,
    gelu,
    relu,
    sigmoid,
    swiglu,
    swiglu_packed,
)
from jaxllm.ops.attention.api import (
    decode_attention,
    flash_attention,
    flash_attention_float8,
    flash_attention_packed,
    pre_norm_self_attention,
    repeat_kv,
    self_attention,
    softmax,
)
from jaxllm.ops.decoding.api import decode_block
from jaxllm.ops.embedding.api import embed
from jaxllm.ops.gemm.api import (
    linear,
    linear_add_layer_norm,
    matmul,
    matvec,
    mlp,
    pre_norm_mlp,
)
from jaxllm.ops.loss.api import cross_entropy, linear_cross_entropy
from jaxllm.ops.norm.api import add_layer_norm, add_rms_norm, layer_norm, normed_rows, rms_norm
from jaxllm.ops.optimizer.api import adamw_update, global_norm
from jaxllm.ops.quantization.api import (
    dequantize,
    quantize,
    quantized_matmul,
    quantized_matvec,
)
from jaxllm.ops.reduction.api import dot, histogram, reduce_max, reduce_sum
from jaxllm.ops.rotary.api import RopeScaling, rope, rope_table
from jaxllm.ops.streams import NormedRows
from jaxllm.ops.vision.api import nms

__all__ = [
    "NormedRows",
    "RopeScaling",
    "adamw_update",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "bias_add",
    "bias_gelu",
    "cross_entropy",
    "decode_attention",
    "decode_block",
    "dequantize",
    "dot",
    "embed",
    "flash_attention",
    "flash_attention_float8",
    "flash_attention_packed",
    "gelu",
    "global_norm",
    "histogram",
    "layer_norm",
    "linear",
    "linear_add_layer_norm",
    "linear_cross_entropy",
    "matmul",
    "matvec",
    "mlp",
    "nms",
    "normed_rows",
    "pre_norm_mlp",
    "pre_norm_self_attention",
    "quantize",
    "quantized_matmul",
    "quantized_matvec",
    "reduce_max",
    "reduce_sum",
    "relu",
    "repeat_kv",
    "rms_norm",
    "rope",
    "rope_table",
    "self_attention",
    "sigmoid",
    "softmax",
    "swiglu",
    "swiglu_packed",
]
