"""The ops: arrays in, arrays out, one derivative rule each, three implementations behind each."""

from jaxllm.ops.activation.api import gelu
from jaxllm.ops.attention.api import flash_attention
from jaxllm.ops.embedding.api import embed
from jaxllm.ops.gemm.api import linear
from jaxllm.ops.loss.api import cross_entropy
from jaxllm.ops.norm.api import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from jaxllm.ops.rotary.api import RopeScaling, rope, rope_table

__all__ = [
    "RopeScaling",
    "add_layer_norm",
    "add_rms_norm",
    "cross_entropy",
    "embed",
    "flash_attention",
    "gelu",
    "layer_norm",
    "linear",
    "rms_norm",
    "rope",
    "rope_table",
]
