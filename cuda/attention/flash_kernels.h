// The kernels of flash attention, by the instructions that multiply, and the passes before them.
// Each supports every shape and option for its types, except those for Hopper, and a bias on the
// scores.
#pragma once

#include "attention/flash_attention.h"

namespace jaxllm::attention {

// Fills options.segment_ranges, if there are segments.
cudaError_t compute_segment_ranges(cudaStream_t stream, const FlashShape& shape,
                                   const FlashOptions& options);

// delta = rowsum(dout * out) - dlse, of each head of each query: the kernels compute the gradient
// of the scores as p * (dp - delta).
template <typename T>
cudaError_t compute_delta(cudaStream_t stream, const FlashBackward<T>& call);

// Tensor cores by mma.sync: bfloat16, float16, and the forward of float8. The caller rotates k, and
// q of a backward. The kernels rotate q of a forward, and dq and dk of heads up to this width; the
// caller rotates those of wider heads.
inline constexpr int64_t kMmaMaxRotaryWidth = 128;
template <typename T, typename Stored>
cudaError_t forward_by_mma(cudaStream_t stream, const FlashForward<T, Stored>& call);
template <typename T>
cudaError_t backward_by_mma(cudaStream_t stream, const FlashBackward<T>& call);

// The same with a bias on the scores, and its gradient.
template <typename T>
cudaError_t biased_forward_by_mma(cudaStream_t stream, const FlashForward<T>& call);
template <typename T>
cudaError_t biased_backward_by_mma(cudaStream_t stream, const FlashBackward<T>& call);

// Tensor cores by wgmma (Hopper): bfloat16 and float16, the calls for which ..._is_for_hopper is
// true. The caller rotates q, k, dq and dk, and does not compute delta. The backward also computes
// the gradient of a bias, which no other kernel does, where heads are 64 or 128 wide.
inline bool hopper_sums_bias(const FlashShape& shape, const FlashOptions& options) {
  return options.bias.gradient != nullptr && (shape.width == 64 || shape.width == 128);
}
template <typename T>
bool forward_is_for_hopper(const FlashForward<T>& call);
template <typename T>
bool backward_is_for_hopper(const FlashBackward<T>& call);
template <typename T>
cudaError_t forward_by_hopper(cudaStream_t stream, const FlashForward<T>& call);
template <typename T>
cudaError_t backward_by_hopper(cudaStream_t stream, const FlashBackward<T>& call);

// CUDA cores: float, with a bias on the scores too. The caller rotates q, k, dq and dk.
cudaError_t forward_by_float32(cudaStream_t stream, const FlashForward<float>& call);
cudaError_t backward_by_float32(cudaStream_t stream, const FlashBackward<float>& call);

}  // namespace jaxllm::attention
