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
  const int64_t bytes_of_group = 2 * shape.keys * shape.width * element_bytes;
  const int64_t groups = std::clamp<int64_t>(kL2Bytes / std::max<int64_t>(bytes_of_group, 1), 1,
                                             shape.batch * shape.kv_heads);
  return static_cast<int>(groups * (shape.heads / shape.kv_heads));
}

template <typename T>
HeadRows<const T> read_only(HeadRows<T> rows) {
  return {rows.data, rows.row_stride};
}

// Whether this GPU and build have `kernel` and it serves a call on these arrays, which TMA must be
// able to address: heads as wide as flash_hopper_columns() says, less than 2^29 tokens, and a scale
// above zero.
template <typename T, class Kernel>
bool is_for_hopper(Kernel kernel, const FlashShape& shape, const FlashOptions& options,
                   std::initializer_list<HeadRows<const T>> arrays) {
  const auto fits = [](int64_t count) { return 0 <= count && count < int64_t{1} << 29; };
  const bool is_served = flash_hopper_columns(shape.width) > 0 && fits(shape.queries) &&
                         fits(shape.keys) && shape.keys > 0 && fits(shape.batch * shape.heads) &&
                         options.scale > 0.0f && options.softcap >= 0.0f &&
                         shape.batch <= kMaxGridSide && shape.heads <= kMaxGridSide;
  if (!is_served) return false;
  const int64_t length = std::max(shape.queries, shape.keys);
  for (const HeadRows<const T>& array : arrays) {
    if (!has_tensor_map(
            {array.data, shape.batch, length, shape.heads, shape.width, array.row_stride})) {
      return false;
    }
  }
  DeviceLimits limits;
  return find_hopper_kernel(kernel, &limits) == cudaSuccess;
}

// Boxes of `rows` tokens out of an array of `length` tokens.
template <typename T>
cudaError_t map_tokens(const FlashShape& shape, HeadRows<T> tokens, int64_t length, int64_t heads,
                       int rows, CUtensorMap* map) {
  constexpr bool kIsHalf = std::is_same_v<std::remove_const_t<T>, __half>;
  return encode_tensor_map(
      {tokens.data, shape.batch, length, heads, shape.width, tokens.row_stride},
      kIsHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rows, map);
}
template <typename T>
cudaError_t map_queries(const FlashShape& shape, HeadRows<T> tokens, int rows, CUtensorMap* map) {
  return map_tokens(shape, tokens, shape.queries, shape.heads, rows, map);
}
template <typename T>
cudaError_t map_keys(const FlashShape& shape, HeadRows<T> tokens, int rows, CUtensorMap* map) {
  return map_tokens(shape, tokens, shape.keys, shape.kv_heads, rows, map);
}

}  // namespace jaxllm::hopper
