"""``decode_block`` in ``jax.numpy``: composed.py has the formulas."""

from __future__ import annotations

import functools

from jaxllm.ops.attention import reference_decode as attention
from jaxllm.ops.decoding import composed
from jaxllm.ops.gemm import reference as gemm
from jaxllm.ops.quantization import reference as quantization

decode_block = functools.partial(
    composed.block, gemm.matvec, quantization.quantized_matvec, attention.decode_attention
)
