// Every FFI handler: the table of contents of the C++ side.
#pragma once

#include "xla/ffi/api/c_api.h"

// The FFI target is "jaxllm_" and the first name; the handler is the second.
#define JAXLLM_HANDLERS(HANDLER)                                                \
  HANDLER(add_forward, AddForward)                                              \
  HANDLER(bias_add_forward, BiasAddForward)                                     \
  HANDLER(bias_add_backward, BiasAddBackward)                                   \
  HANDLER(bias_gelu_forward, BiasGeluForward)                                   \
  HANDLER(bias_gelu_backward, BiasGeluBackward)                                 \
  HANDLER(gelu_forward, GeluForward)                                            \
  HANDLER(gelu_backward, GeluBackward)                                          \
  HANDLER(relu_forward, ReluForward)                                            \
  HANDLER(relu_backward, ReluBackward)                                          \
  HANDLER(sigmoid_forward, SigmoidForward)                                      \
  HANDLER(sigmoid_backward, SigmoidBackward)                                    \
  HANDLER(swiglu_forward, SwigluForward)                                        \
  HANDLER(swiglu_backward, SwigluBackward)                                      \
  HANDLER(swiglu_packed_forward, SwigluPackedForward)                           \
  HANDLER(swiglu_packed_backward, SwigluPackedBackward)                         \
  HANDLER(layer_norm_forward, LayerNormForward)                                 \
  HANDLER(layer_norm_backward, LayerNormBackward)                               \
  HANDLER(add_layer_norm_forward, AddLayerNormForward)                          \
  HANDLER(add_layer_norm_backward, AddLayerNormBackward)                        \
  HANDLER(rms_norm_forward, RmsNormForward)                                     \
  HANDLER(rms_norm_backward, RmsNormBackward)                                   \
  HANDLER(add_rms_norm_forward, AddRmsNormForward)                              \
  HANDLER(add_rms_norm_backward, AddRmsNormBackward)                            \
  HANDLER(decode_attention, DecodeAttention)                                    \
  HANDLER(decode_block, DecodeBlock)                                            \
  HANDLER(matvec, Matvec)                                                       \
  HANDLER(quantize, Quantize)                                                   \
  HANDLER(dequantize, Dequantize)                                               \
  HANDLER(quantized_matvec, QuantizedMatvec)                                    \
  HANDLER(flash_attention_forward, FlashAttentionForward)                       \
  HANDLER(flash_attention_backward, FlashAttentionBackward)                     \
  HANDLER(flash_attention_packed_forward, FlashAttentionPackedForward)          \
  HANDLER(flash_attention_packed_backward, FlashAttentionPackedBackward)        \
  HANDLER(self_attention_backward, SelfAttentionBackward)                       \
  HANDLER(flash_attention_float8, FlashAttentionFloat8)                         \
  HANDLER(softmax_forward, SoftmaxForward)                                      \
  HANDLER(softmax_backward, SoftmaxBackward)                                    \
  HANDLER(repeat_kv_forward, RepeatKvForward)                                   \
  HANDLER(repeat_kv_backward, RepeatKvBackward)                                 \
  HANDLER(cross_entropy_forward, CrossEntropyForward)                           \
  HANDLER(cross_entropy_forward_with_gradient, CrossEntropyForwardWithGradient) \
  HANDLER(cross_entropy_backward, CrossEntropyBackward)                         \
  HANDLER(head_exponentials, HeadExponentials)                                  \
  HANDLER(adamw_update, AdamwUpdate)                                            \
  HANDLER(global_norm, GlobalNorm)                                              \
  HANDLER(matmul, Matmul)                                                       \
  HANDLER(matmul_bias_gelu, MatmulBiasGelu)                                     \
  HANDLER(matmul_scale, MatmulScale)                                            \
  HANDLER(layer_with_norm, LayerWithNorm)                                       \
  HANDLER(layer_without_norm, LayerWithoutNorm)                                 \
  HANDLER(matmul_norm, MatmulNorm)                                              \
  HANDLER(matmul_norm_gradient, MatmulNormGradient)                             \
  HANDLER(matmul_head_sums, MatmulHeadSums)                                     \
  HANDLER(matmul_residual, MatmulResidual)                                      \
  HANDLER(weight_gradients, WeightGradients)                                    \
  HANDLER(embed_forward, EmbedForward)                                          \
  HANDLER(embed_backward, EmbedBackward)                                        \
  HANDLER(reduce_sum_forward, ReduceSumForward)                                 \
  HANDLER(reduce_max_forward, ReduceMaxForward)                                 \
  HANDLER(dot_forward, DotForward)                                              \
  HANDLER(histogram, Histogram)                                                 \
  HANDLER(nms, Nms)                                                             \
  HANDLER(rope_forward, RopeForward)                                            \
  HANDLER(rope_backward, RopeBackward)

namespace jaxllm {

#define JAXLLM_DECLARE(name, Handler) extern "C" XLA_FFI_Error* Handler(XLA_FFI_CallFrame*);
JAXLLM_HANDLERS(JAXLLM_DECLARE)
#undef JAXLLM_DECLARE

}  // namespace jaxllm
