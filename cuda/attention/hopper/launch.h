// What the launchers of both directions share: which calls the Hopper kernels serve, and their
// tensor maps.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "attention/flash_kernels.h"
#include "attention/mask.cuh"
#include "common/head_order.cuh"
#include "common/hopper_launch.h"
#include "common/tensor_map.h"

namespace jaxllm::hopper {

inline constexpr int64_t kMaxTiles = int64_t{1} << 30;
// The part of the L2 cache for what the heads at work at one time share.
inline constexpr int64_t kL2Bytes = 32 << 20;
inline constexpr int64_t kMaxGridSide = 65535;

// How many query heads alternate where a CTA takes query tiles: as many as have K and V in the L2
// cache together, and those that share keys with them.
inline int query_heads_at_a_time(const FlashShape& shape, int64_t element_bytes) {
  const int64_t bytes_of_group = shape.keys * (shape.width + shape.value_width) * element_bytes;
  const int64_t groups = std::clamp<int64_t>(kL2Bytes / std::max<int64_t>(bytes_of_group, 1), 1,
                                             shape.batch * shape.kv_heads);
  return static_cast<int>(groups * (shape.heads / shape.kv_heads));
}

// The order of the heads of q and dq.
inline HeadOrder order_of_queries(const FlashShape& shape, const FlashOptions& options) {
  const int64_t group = options.by_parts ? shape.heads / shape.kv_heads : 1;
  return {static_cast<int>(group), static_cast<int>(shape.kv_heads)};
}

template <typename T>
HeadRows<const T> read_only(HeadRows<T> rows) {
  return {rows.data, rows.row_stride};
}

// Whether this GPU and build have `kernel` and it serves a call on these arrays, which TMA must be
// able to address: heads as wide as flash_has_hopper_widths() says, less than 2^29 tokens, and a
// scale above zero; a softcap only where values are as wide as keys. `arrays` are as wide as q,
// `value_arrays` as v.
template <typename T, class Kernel>
bool is_for_hopper(Kernel kernel, const FlashShape& shape, const FlashOptions& options,
                   std::initializer_list<HeadRows<const T>> arrays,
                   std::initializer_list<HeadRows<const T>> value_arrays) {
  const auto fits = [](int64_t count) { return 0 <= count && count < int64_t{1} << 29; };
  const bool is_served = flash_has_hopper_widths(shape) && fits(shape.queries) &&
                         fits(shape.keys) && shape.keys > 0 && fits(shape.batch * shape.heads) &&
                         options.scale > 0.0f && options.softcap >= 0.0f &&
                         (options.softcap == 0.0f || shape.value_width == shape.width) &&
                         shape.batch <= kMaxGridSide && shape.heads <= kMaxGridSide;
  if (!is_served) return false;
  const int64_t length = std::max(shape.queries, shape.keys);
  const auto is_addressable = [&](const HeadRows<const T>& array, int64_t width) {
    return has_tensor_map({array.data, shape.batch, length, shape.heads, width, array.row_stride});
  };
  for (const HeadRows<const T>& array : arrays) {
    if (!is_addressable(array, shape.width)) return false;
  }
  for (const HeadRows<const T>& array : value_arrays) {
    if (!is_addressable(array, shape.value_width)) return false;
  }
  DeviceLimits limits;
  return find_hopper_kernel(kernel, &limits) == cudaSuccess;
}

// Boxes of `rows` tokens out of an array of `length` tokens.
template <typename T>
cudaError_t map_tokens(HeadRows<T> tokens, int64_t batch, int64_t length, int64_t heads,
                       int64_t width, int rows, CUtensorMap* map) {
  constexpr bool kIsHalf = std::is_same_v<std::remove_const_t<T>, __half>;
  return encode_tensor_map(
      {tokens.data, batch, length, heads, width, tokens.row_stride},
      kIsHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rows, map);
}
// Of q or k; of out or v; and of their gradients.
template <typename T>
cudaError_t map_queries(const FlashShape& s, HeadRows<T> tokens, int rows, CUtensorMap* map) {
  return map_tokens(tokens, s.batch, s.queries, s.heads, s.width, rows, map);
}
template <typename T>
cudaError_t map_keys(const FlashShape& s, HeadRows<T> tokens, int rows, CUtensorMap* map) {
  return map_tokens(tokens, s.batch, s.keys, s.kv_heads, s.width, rows, map);
}
template <typename T>
cudaError_t map_outputs(const FlashShape& s, HeadRows<T> tokens, int rows, CUtensorMap* map) {
  return map_tokens(tokens, s.batch, s.queries, s.heads, s.value_width, rows, map);
}
template <typename T>
cudaError_t map_values(const FlashShape& s, HeadRows<T> tokens, int rows, CUtensorMap* map) {
  return map_tokens(tokens, s.batch, s.keys, s.kv_heads, s.value_width, rows, map);
}

}  // namespace jaxllm::hopper
