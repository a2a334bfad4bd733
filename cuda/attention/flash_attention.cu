// Chooses the kernels that serve a call, and runs the passes before and after them.
#include <climits>
#include <type_traits>

#include "activation/bias.h"
#include "attention/flash_attention.h"
#include "attention/flash_kernels.h"
#include "common/launch.h"
#include "rotary/rope.h"

namespace jaxllm {
namespace attention {
namespace {

// Without a rotation no pair of columns rotates, and heads are copied.
RopeShape rope_shape(const FlashShape& shape, const FlashRope& rope) {
  return {shape.batch,    shape.queries, rope.tables, shape.heads,
          shape.kv_heads, shape.width,   rope.pairs};
}

// The query heads that stand apart in q and dq: those of one key head, where they are by parts.
int group_of(const FlashShape& shape, const FlashOptions& options) {
  return options.by_parts ? static_cast<int>(shape.heads / shape.kv_heads) : 1;
}

// The parts of the workspace `arranged`: keys, queries, and gradients of the queries.
template <typename T>
HeadRows<T> arranged_keys(const FlashShape& s, const FlashOptions& options) {
  return {static_cast<T*>(options.arranged), s.kv_heads * s.width};
}
template <typename T>
HeadRows<T> arranged_queries(const FlashShape& s, const FlashOptions& options) {
  const int64_t keys = s.batch * s.keys * s.kv_heads * s.width;
  return {static_cast<T*>(options.arranged) + keys, s.heads * s.width};
}
template <typename T>
HeadRows<T> query_gradients(const FlashShape& s, const FlashOptions& options) {
  const HeadRows<T> queries = arranged_queries<T>(s, options);
  return {queries.data + s.batch * s.queries * queries.row_stride, queries.row_stride};
}

// Whether heads pass through the workspace. The kernels for Hopper read and write queries by parts
// where they stand.
bool arranges(const FlashOptions& options, bool is_for_hopper) {
  return options.rope.cos != nullptr || (options.by_parts && !is_for_hopper);
}

// Rotates queries and keys of a call into the workspace, or the keys alone, and puts queries into
// the usual order. Many CTAs read a key: to rotate it in each of them would cost more than to write
// it once.
template <class Call>
cudaError_t arrange_inputs(cudaStream_t stream, Call& call, bool with_queries) {
  using T = std::remove_const_t<std::remove_pointer_t<decltype(call.q.data)>>;
  const FlashShape& shape = call.shape;
  const FlashRope& rope = call.options.rope;
  const bool rotates = rope.cos != nullptr;
  RopeShape sizes = rope_shape(shape, rope);
  sizes.q_group = group_of(shape, call.options);
  const HeadRows<T> k = arranged_keys<T>(shape, call.options);
  const HeadRows<T> q = arranged_queries<T>(shape, call.options);
  if (!with_queries) sizes.q_heads = 0;
  if (!rotates) sizes.k_heads = 0;
  JAXLLM_RETURN_IF_ERROR(Rope<T>::rotate(stream, call.q, call.k, rope.cos, rope.sin, q, k,
                                         rope.interleaved, /*inverse=*/false, sizes));
  if (rotates) call.k = {k.data, k.row_stride};
  if (with_queries) {
    call.q = {q.data, q.row_stride};
    call.options.by_parts = false;
  }
  return cudaSuccess;
}

// Rotates gradients by the negative angles, dk in place and dq from where the kernels wrote it; and
// puts dq into parts where it is by parts.
template <typename T>
cudaError_t arrange_gradients(cudaStream_t stream, const FlashBackward<T>& call, HeadRows<T> dq) {
  const FlashRope& rope = call.options.rope;
  RopeShape sizes = rope_shape(call.shape, rope);
  sizes.q_out_group = group_of(call.shape, call.options);
  if (rope.cos == nullptr) sizes.k_heads = 0;
  return Rope<T>::rotate(stream, {dq.data, dq.row_stride}, {call.dk.data, call.dk.row_stride},
                         rope.cos, rope.sin, call.dq, call.dk, rope.interleaved,
                         /*inverse=*/true, sizes);
}

// The gradient of the bias of a packed projection, the gradients of whose rows begin at dq.
template <typename T>
cudaError_t compute_bias_gradient(cudaStream_t stream, const FlashBackward<T>& call) {
  const FlashBias& bias = call.options.bias;
  if (bias.gradient == nullptr || bias.groups == 0) return cudaSuccess;
  const int64_t rows = call.shape.batch / bias.groups * call.shape.queries;
  const int64_t width = call.dq.row_stride;
  const int64_t partial_rows = bias.partial_size / (bias.groups * width);
  if (rows > 0 && partial_rows == 0) return cudaErrorInvalidValue;
  return BiasAdd<T>::backward(stream, call.dq.data, static_cast<T*>(bias.gradient), bias.partial,
                              bias.groups, rows, width, partial_rows);
}

bool fits(const FlashShape& shape, const FlashScoreBias& bias) {
  return bias.data == nullptr || (bias.sequences > 0 && shape.batch % bias.sequences == 0 &&
                                  (bias.heads == 1 || bias.heads == shape.heads));
}

bool is_served(const FlashShape& shape, const FlashOptions& options) {
  const bool rotates = options.rope.cos != nullptr, has_bias = options.bias.gradient != nullptr;
  return shape.width <= kFlashMaxWidth && shape.value_width <= kFlashMaxWidth &&
         shape.queries <= kFlashMaxLength && shape.keys <= kFlashMaxLength &&
         shape.batch <= INT_MAX && shape.heads <= INT_MAX && shape.heads > 0 &&
         shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0 &&
         (!rotates ||
          (shape.queries == shape.keys && options.rope.tables > 0 &&
           shape.batch % options.rope.tables == 0 && 2 * options.rope.pairs <= shape.width)) &&
         (!options.by_parts ||
          (shape.queries == shape.keys && !has_bias && options.score_bias.data == nullptr)) &&
         (!has_bias || (shape.queries == shape.keys && !rotates)) &&
         fits(shape, options.score_bias);
}

}  // namespace
}  // namespace attention

template <typename T, typename Stored>
cudaError_t flash_attention_forward(cudaStream_t stream, FlashForward<T, Stored> call) {
  using namespace attention;
  constexpr bool kIsFloat = std::is_same_v<T, float>, kIsFloat8 = !std::is_same_v<T, Stored>;
  const FlashShape& shape = call.shape;
  const FlashOptions& options = call.options;
  if (shape.batch * shape.queries == 0) return cudaSuccess;
  if (!is_served(shape, options)) return cudaErrorInvalidValue;
  const bool has_score_bias = options.score_bias.data != nullptr;
  if (kIsFloat8 && (options.rope.cos != nullptr || has_score_bias)) return cudaErrorInvalidValue;
  JAXLLM_RETURN_IF_ERROR(compute_segment_ranges(stream, shape, options));
  bool is_for_hopper = false;
  if constexpr (!kIsFloat && !kIsFloat8) {
    is_for_hopper = !has_score_bias && forward_is_for_hopper(call);
  }
  if (shape.value_width != shape.width && !is_for_hopper) return cudaErrorNotSupported;
  // The kernels for Hopper gain nothing from rotating queries on load. On an H200 that takes as
  // long as the pass with 4096 causal tokens (4 x 32 heads of 128: 907 us and 909), and 4% longer
  // with 1024 (8 x 32 heads of 64).
  if constexpr (!kIsFloat8) {
    if (arranges(options, is_for_hopper)) {
      const bool by_parts = options.by_parts;
      const bool with_queries = kIsFloat || is_for_hopper || by_parts;
      JAXLLM_RETURN_IF_ERROR(arrange_inputs(stream, call, with_queries));
      if (by_parts) call.options.rope.cos = nullptr;  // no kernel is to rotate them again
    }
  }
  if constexpr (kIsFloat) {
    return forward_by_float32(stream, call);
  } else {
    if constexpr (!kIsFloat8) {
      if (is_for_hopper) return forward_by_hopper(stream, call);
      if (has_score_bias) return biased_forward_by_mma(stream, call);
    }
    return forward_by_mma(stream, call);
  }
}

template <typename T>
cudaError_t flash_attention_backward(cudaStream_t stream, FlashBackward<T> call) {
  using namespace attention;
  const FlashShape& shape = call.shape;
  const FlashScoreBias& score_bias = call.options.score_bias;
  const bool has_score_bias = score_bias.data != nullptr;
  if (shape.batch == 0) {
    if (has_score_bias) {  // a bias that sequences share has elements without any
      const int64_t rows = score_bias.sequences * score_bias.heads * shape.queries;
      const size_t bytes = rows * shape.keys * (score_bias.is_float32 ? sizeof(float) : sizeof(T));
      JAXLLM_RETURN_IF_ERROR(cudaMemsetAsync(score_bias.gradient, 0, bytes, stream));
    }
    return compute_bias_gradient(stream, call);
  }
  if (!is_served(shape, call.options)) return cudaErrorInvalidValue;
  if (call.dlse != nullptr && call.options.bias.gradient != nullptr) return cudaErrorInvalidValue;
  JAXLLM_RETURN_IF_ERROR(compute_segment_ranges(stream, shape, call.options));
  bool is_for_hopper = false;
  if constexpr (!std::is_same_v<T, float>) {
    is_for_hopper = !has_score_bias && backward_is_for_hopper(call);
  }
  if (shape.value_width != shape.width && !is_for_hopper) return cudaErrorNotSupported;
  const bool is_arranged = arranges(call.options, is_for_hopper);
  FlashBackward<T> arranged = call;  // what the kernels compute
  if (is_arranged) {
    JAXLLM_RETURN_IF_ERROR(arrange_inputs(stream, arranged, /*with_queries=*/true));
    if (call.options.by_parts) {
      arranged.dq = query_gradients<T>(shape, call.options);
      arranged.options.rope.cos = nullptr;  // no kernel is to rotate gradients
    }
  }
  const auto arrange_back = [&] {
    return is_arranged ? arrange_gradients(stream, call, arranged.dq) : cudaSuccess;
  };
  if constexpr (std::is_same_v<T, float>) {
    JAXLLM_RETURN_IF_ERROR(compute_delta(stream, arranged));
    JAXLLM_RETURN_IF_ERROR(backward_by_float32(stream, arranged));
    JAXLLM_RETURN_IF_ERROR(arrange_back());
  } else {
    if (is_for_hopper) {
      JAXLLM_RETURN_IF_ERROR(backward_by_hopper(stream, arranged));
      JAXLLM_RETURN_IF_ERROR(arrange_back());
      return hopper_sums_bias(shape, call.options) ? cudaSuccess
                                                   : compute_bias_gradient(stream, call);
    }
    JAXLLM_RETURN_IF_ERROR(compute_delta(stream, arranged));
    JAXLLM_RETURN_IF_ERROR(has_score_bias ? biased_backward_by_mma(stream, arranged)
                                          : backward_by_mma(stream, arranged));
    // Other gradients are rotated by the kernels.
    if (call.options.by_parts || shape.width > kMmaMaxRotaryWidth) {
      JAXLLM_RETURN_IF_ERROR(arrange_back());
    }
  }
  return compute_bias_gradient(stream, call);
}

template cudaError_t flash_attention_forward(cudaStream_t, FlashForward<float>);
template cudaError_t flash_attention_forward(cudaStream_t, FlashForward<__nv_bfloat16>);
template cudaError_t flash_attention_forward(cudaStream_t, FlashForward<__half>);
template cudaError_t flash_attention_forward(cudaStream_t,
                                             FlashForward<__nv_bfloat16, __nv_fp8_e4m3>);
template cudaError_t flash_attention_backward(cudaStream_t, FlashBackward<float>);
template cudaError_t flash_attention_backward(cudaStream_t, FlashBackward<__nv_bfloat16>);
template cudaError_t flash_attention_backward(cudaStream_t, FlashBackward<__half>);

}  // namespace jaxllm
