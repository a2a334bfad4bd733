// The launchers: what comes before and after the kernels, and which of them serve a call.
#include <type_traits>

#include "activation/bias.h"
#include "attention/flash_attention.h"
#include "attention/flash_block.cuh"
#include "attention/flash_kernels.h"
#include "attention/flash_prepare.h"
#include "rotary/rope.h"

namespace jaxllm {
namespace attention {
namespace {

RopeShape rope_shape(const FlashShape& shape, const FlashRope& rope) {
  return {shape.batch,    shape.queries, rope.tables, shape.heads,
          shape.kv_heads, shape.width,   rope.pairs};
}

// Turns queries and keys into the workspace, or the keys alone. A key is read by the blocks of many
// queries, so that to turn it in each of them would cost more than to write it once.
template <typename T>
cudaError_t turn(cudaStream_t stream, const FlashShape& shape, const FlashRope& rope,
                 bool with_queries, HeadRows<const T>& q, HeadRows<const T>& k) {
  if (rope.cos == nullptr) return cudaSuccess;
  RopeShape sizes = rope_shape(shape, rope);
  T* turned = static_cast<T*>(rope.turned);
  const HeadRows<T> turned_k{turned, shape.kv_heads * shape.width};
  const HeadRows<T> turned_q{turned + shape.batch * shape.keys * shape.kv_heads * shape.width,
                             shape.heads * shape.width};
  if (!with_queries) sizes.q_heads = 0;
  JAXLLM_RETURN_IF_ERROR(Rope<T>::rotate(stream, q, k, rope.cos, rope.sin, turned_q, turned_k,
                                         rope.interleaved, /*inverse=*/false, sizes));
  k = {turned_k.data, turned_k.row_stride};
  if (with_queries) q = {turned_q.data, turned_q.row_stride};
  return cudaSuccess;
}

// Turns gradients back where they stand.
template <typename T>
cudaError_t turn_back(cudaStream_t stream, const FlashShape& shape, const FlashRope& rope,
                      HeadRows<T> dq, HeadRows<T> dk) {
  if (rope.cos == nullptr) return cudaSuccess;
  return Rope<T>::rotate(stream, {dq.data, dq.row_stride}, {dk.data, dk.row_stride}, rope.cos,
                         rope.sin, dq, dk, rope.interleaved, /*inverse=*/true,
                         rope_shape(shape, rope));
}

// The gradient of a bias of the projection whose rows' gradients begin with those of the queries.
template <typename T>
cudaError_t sum_rows(cudaStream_t stream, const FlashShape& shape, const FlashBias& bias,
                     HeadRows<T> dq) {
  if (bias.gradient == nullptr || bias.groups == 0) return cudaSuccess;
  const int64_t rows = shape.batch / bias.groups * shape.queries, width = dq.row_stride;
  const int64_t partial_rows = bias.partial_size / (bias.groups * width);
  if (rows > 0 && partial_rows == 0) return cudaErrorInvalidValue;
  return BiasAdd<T>::backward(stream, dq.data, static_cast<T*>(bias.gradient), bias.partial,
                              bias.groups, rows, width, partial_rows);
}

bool is_served(const FlashShape& shape, const FlashOptions& options) {
  return is_supported(shape) &&
         (options.rope.cos == nullptr ||
          (shape.queries == shape.keys && options.rope.tables > 0 &&
           shape.batch % options.rope.tables == 0 && 2 * options.rope.pairs <= shape.width)) &&
         (options.bias.gradient == nullptr ||
          (shape.queries == shape.keys && options.rope.cos == nullptr));
}

}  // namespace
}  // namespace attention

template <typename T>
cudaError_t FlashAttention<T>::forward(cudaStream_t stream, HeadRows<const T> q,
                                       HeadRows<const T> k, HeadRows<const T> v,
                                       const FlashShape& shape, const FlashOptions& options,
                                       HeadRows<T> out, float* lse) {
  using namespace attention;
  constexpr bool kIsFloat = std::is_same_v<T, float>;
  if (shape.batch * shape.queries == 0) return cudaSuccess;
  if (!is_served(shape, options)) return cudaErrorInvalidValue;
  JAXLLM_RETURN_IF_ERROR(find_segment_ranges(stream, shape, options));
  bool is_for_hopper = false;
  if constexpr (!kIsFloat) {
    is_for_hopper = forward_is_for_hopper<T>({q, k, v, out, lse}, shape, options);
  }
  // Hopper's kernels would gain nothing by turning queries on load: on an H200 it takes them as
  // long as the pass does with 4096 causal tokens (4 x 32 heads of 128: 907 us and 909), and 4%
  // longer with 1024 (8 x 32 heads of 64).
  JAXLLM_RETURN_IF_ERROR(
      turn(stream, shape, options.rope, /*with_queries=*/kIsFloat || is_for_hopper, q, k));
  const ForwardCall<T> call{q, k, v, out, lse};
  if constexpr (kIsFloat) {
    return forward_by_float32(stream, call, shape, options);
  } else if (is_for_hopper) {
    return forward_by_hopper(stream, call, shape, options);
  } else {
    return forward_by_mma(stream, call, shape, options);
  }
}

template <typename T>
cudaError_t FlashAttention<T>::backward(cudaStream_t stream, HeadRows<const T> q,
                                        HeadRows<const T> k, HeadRows<const T> v,
                                        HeadRows<const T> out, const float* lse,
                                        HeadRows<const T> dout, const FlashShape& shape,
                                        const FlashOptions& options, HeadRows<T> dq, HeadRows<T> dk,
                                        HeadRows<T> dv, float* delta) {
  using namespace attention;
  if (shape.batch == 0) return sum_rows(stream, shape, options.bias, dq);
  if (!is_served(shape, options)) return cudaErrorInvalidValue;
  JAXLLM_RETURN_IF_ERROR(find_segment_ranges(stream, shape, options));
  JAXLLM_RETURN_IF_ERROR(turn(stream, shape, options.rope, /*with_queries=*/true, q, k));
  const BackwardCall<T> call{q, k, v, out, dout, lse, delta, dq, dk, dv};
  if constexpr (!std::is_same_v<T, float>) {
    if (backward_is_for_hopper(call, shape, options)) {
      JAXLLM_RETURN_IF_ERROR(backward_by_hopper(stream, call, shape, options));
      return turn_back(stream, shape, options.rope, dq, dk);
    }
  }
  JAXLLM_RETURN_IF_ERROR(find_delta<T>(stream, out, dout, shape, delta));
  if constexpr (std::is_same_v<T, float>) {
    JAXLLM_RETURN_IF_ERROR(backward_by_float32(stream, call, shape, options));
    JAXLLM_RETURN_IF_ERROR(turn_back(stream, shape, options.rope, dq, dk));
  } else {
    JAXLLM_RETURN_IF_ERROR(backward_by_mma(stream, call, shape, options));
    if (shape.width > kMmaMaxTurningWidth) {
      JAXLLM_RETURN_IF_ERROR(turn_back(stream, shape, options.rope, dq, dk));
    }
  }
  return sum_rows(stream, shape, options.bias, dq);
}

cudaError_t FlashAttentionFloat8::forward(cudaStream_t stream, HeadRows<const __nv_fp8_e4m3> q,
                                          HeadRows<const __nv_fp8_e4m3> k,
                                          HeadRows<const __nv_fp8_e4m3> v, const float* q_scale,
                                          const float* k_scale, const float* v_scale,
                                          const FlashShape& shape, const FlashOptions& options,
                                          HeadRows<__nv_bfloat16> out) {
  using namespace attention;
  if (shape.batch * shape.queries == 0) return cudaSuccess;
  if (!is_served(shape, options) || options.rope.cos != nullptr) return cudaErrorInvalidValue;
  JAXLLM_RETURN_IF_ERROR(find_segment_ranges(stream, shape, options));
  return forward_of_float8(stream, q, k, v, q_scale, k_scale, v_scale, shape, options, out);
}

template struct FlashAttention<float>;
template struct FlashAttention<__nv_bfloat16>;
template struct FlashAttention<__half>;

}  // namespace jaxllm
