// The strategies that flash attention has: each serves every shape and option, of its types. What
// they find written before they begin is in flash_prepare.h.
#pragma once

#include "attention/flash_attention.h"

namespace jaxllm::attention {

template <typename T>
struct ForwardCall {
  HeadRows<const T> q, k, v;  // of rotary embeddings k has turned already, and q has not
  HeadRows<T> out;
  float* lse;
};

template <typename T>
struct BackwardCall {
  HeadRows<const T> q, k, v, out, dout;  // q and k have turned already
  const float *lse, *delta;
  HeadRows<T> dq, dk, dv;
};

// Tensor cores by mma.sync: bfloat16 and float16. The gradients of heads up to this width turn
// back; those of wider ones do not.
inline constexpr int64_t kMmaMaxTurningWidth = 128;
template <typename T>
cudaError_t forward_by_mma(cudaStream_t stream, const ForwardCall<T>& call, const FlashShape& shape,
                           const FlashOptions& options);
template <typename T>
cudaError_t backward_by_mma(cudaStream_t stream, const BackwardCall<T>& call,
                            const FlashShape& shape, const FlashOptions& options);

// Tensor cores by wgmma (Hopper): bfloat16 and float16, of the calls that these say. q has turned
// already in the forward too, gradients do not turn back, and delta is not read. The backward sees
// to the gradient of a bias too, as no other does.
template <typename T>
bool forward_is_for_hopper(const ForwardCall<T>& call, const FlashShape& shape,
                           const FlashOptions& options);
template <typename T>
bool backward_is_for_hopper(const BackwardCall<T>& call, const FlashShape& shape,
                            const FlashOptions& options);
template <typename T>
cudaError_t forward_by_hopper(cudaStream_t stream, const ForwardCall<T>& call,
                              const FlashShape& shape, const FlashOptions& options);
template <typename T>
cudaError_t backward_by_hopper(cudaStream_t stream, const BackwardCall<T>& call,
                               const FlashShape& shape, const FlashOptions& options);

// Tensor cores by mma.sync: q, k and v in float8.
cudaError_t forward_of_float8(cudaStream_t stream, HeadRows<const __nv_fp8_e4m3> q,
                              HeadRows<const __nv_fp8_e4m3> k, HeadRows<const __nv_fp8_e4m3> v,
                              const float* q_scale, const float* k_scale, const float* v_scale,
                              const FlashShape& shape, const FlashOptions& options,
                              HeadRows<__nv_bfloat16> out);

// CUDA cores: float. q has turned already in the forward too, and gradients do not turn back.
cudaError_t forward_by_float32(cudaStream_t stream, const ForwardCall<float>& call,
                               const FlashShape& shape, const FlashOptions& options);
cudaError_t backward_by_float32(cudaStream_t stream, const BackwardCall<float>& call,
                                const FlashShape& shape, const FlashOptions& options);

}  // namespace jaxllm::attention
