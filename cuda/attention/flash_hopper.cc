// Which calls the kernels for Hopper serve, in their terms.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/flash_attention_hopper.h"
#include "attention/flash_kernels.h"

namespace jaxllm::attention {
namespace {

HopperAttention to_hopper(const FlashShape& shape, const FlashOptions& options) {
  constexpr int64_t kUnbounded = HopperAttention::kUnbounded;
  const int64_t left = options.window == 0 ? kUnbounded : options.window - 1;
  return {shape.batch,
          shape.queries,
          shape.keys,
          shape.heads,
          shape.kv_heads,
          shape.width,
          options.scale,
          left,
          options.causal ? 0 : left,
          options.query_segments,
          options.key_segments,
          options.segment_ranges};
}

template <typename T>
HeadRows<const T> read_only(HeadRows<T> rows) {
  return {rows.data, rows.row_stride};
}

}  // namespace

template <typename T>
bool forward_is_for_hopper(const ForwardCall<T>& call, const FlashShape& shape,
                           const FlashOptions& options) {
  using Kernels = FlashAttentionHopper<T>;
  const HopperAttention attention = to_hopper(shape, options);
  return options.softcap == 0.0f &&
         Kernels::serves(attention, {call.q, call.k, call.v, read_only(call.out)}) &&
         options.scratch.bytes >= int64_t{sizeof(int)} * Kernels::forward_workspace(attention);
}

template <typename T>
bool backward_is_for_hopper(const BackwardCall<T>& call, const FlashShape& shape,
                            const FlashOptions& options) {
  using Kernels = FlashAttentionHopper<T>;
  const HopperAttention attention = to_hopper(shape, options);
  const bool has_bias = options.bias.gradient != nullptr;
  return options.softcap == 0.0f &&
         Kernels::serves(attention, {call.q, call.k, call.v, call.out, call.dout,
                                     read_only(call.dq), read_only(call.dk), read_only(call.dv)}) &&
         options.scratch.bytes >= int64_t{sizeof(float)} * Kernels::backward_workspace(attention) &&
         (!has_bias || options.bias.partial_size >= Kernels::bias_partial(attention));
}

template <typename T>
cudaError_t forward_by_hopper(cudaStream_t stream, const ForwardCall<T>& call,
                              const FlashShape& shape, const FlashOptions& options) {
  return FlashAttentionHopper<T>::forward(stream, to_hopper(shape, options), call.q, call.k, call.v,
                                          call.out, call.lse,
                                          static_cast<int*>(options.scratch.data));
}

template <typename T>
cudaError_t backward_by_hopper(cudaStream_t stream, const BackwardCall<T>& call,
                               const FlashShape& shape, const FlashOptions& options) {
  return FlashAttentionHopper<T>::backward(stream, to_hopper(shape, options), call.q, call.k,
                                           call.v, call.out, call.lse, call.dout, call.dq, call.dk,
                                           call.dv, static_cast<float*>(options.scratch.data),
                                           options.bias, options.sums);
}

#define JAXLLM_INSTANTIATE(T)                                                                      \
  template bool forward_is_for_hopper(const ForwardCall<T>&, const FlashShape&,                    \
                                      const FlashOptions&);                                        \
  template bool backward_is_for_hopper(const BackwardCall<T>&, const FlashShape&,                  \
                                       const FlashOptions&);                                       \
  template cudaError_t forward_by_hopper(cudaStream_t, const ForwardCall<T>&, const FlashShape&,   \
                                         const FlashOptions&);                                     \
  template cudaError_t backward_by_hopper(cudaStream_t, const BackwardCall<T>&, const FlashShape&, \
                                          const FlashOptions&)
JAXLLM_INSTANTIATE(__nv_bfloat16);
JAXLLM_INSTANTIATE(__half);
#undef JAXLLM_INSTANTIATE

}  // namespace jaxllm::attention
