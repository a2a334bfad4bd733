"""The ops: arrays in, arrays out, one derivative rule each, three implementations of each."""

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
    flash_attention,
    flash_attention_float8,
    flash_attention_packed,
)
from jaxllm.ops.attention.api_decode import decode_attention
from jaxllm.ops.attention.api_softmax import repeat_kv, softmax
from jaxllm.ops.block.attention import Attend, attention_block, self_attention
from jaxllm.ops.block.decode import decode_block
from jaxllm.ops.block.ffn import ffn_block, mlp
from jaxllm.ops.block.precision import Precision
from jaxllm.ops.block.residual import Residual, final_norm, residual
from jaxllm.ops.embedding.api import embed, tied_embed
from jaxllm.ops.gemm.api import linear, matmul, matvec
from jaxllm.ops.gemm.api_float8 import float8_matmul
from jaxllm.ops.gemm.float8_counts import Float8Counts, count_float8
from jaxllm.ops.loss.api import cross_entropy
from jaxllm.ops.loss.api_linear import linear_cross_entropy
from jaxllm.ops.norm.api import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from jaxllm.ops.optimizer.api import adamw_update, global_norm
from jaxllm.ops.quantization.api import (
    dequantize,
    quantize,
    quantized_matmul,
    quantized_matvec,
)
from jaxllm.ops.quantization.api_float8 import float8_quantize
from jaxllm.ops.reduction.api import dot, histogram, reduce_max, reduce_sum
from jaxllm.ops.rotary.api import RopeScaling, rope, rope_table
from jaxllm.ops.vision.api import nms
from jaxllm.ops.weights import Quantized, Transposed

__all__ = [
    "Attend",
    "Float8Counts",
    "Precision",
    "Quantized",
    "Residual",
    "RopeScaling",
    "Transposed",
    "adamw_update",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "attention_block",
    "bias_add",
    "bias_gelu",
    "count_float8",
    "cross_entropy",
    "decode_attention",
    "decode_block",
    "dequantize",
    "dot",
    "embed",
    "ffn_block",
    "final_norm",
    "flash_attention",
    "flash_attention_float8",
    "flash_attention_packed",
    "float8_matmul",
    "float8_quantize",
    "gelu",
    "global_norm",
    "histogram",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "matmul",
    "matvec",
    "mlp",
    "nms",
    "quantize",
    "quantized_matmul",
    "quantized_matvec",
    "reduce_max",
    "reduce_sum",
    "relu",
    "repeat_kv",
    "residual",
    "rms_norm",
    "rope",
    "rope_table",
    "self_attention",
    "sigmoid",
    "softmax",
    "swiglu",
    "swiglu_packed",
    "tied_embed",
]
