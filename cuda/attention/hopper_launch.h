// What the launchers of attention's Hopper kernels share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "attention/band.cuh"
#include "attention/flash_attention_hopper.h"
#include "common/hopper_launch.h"
#include "common/tensor_map.h"

namespace jaxllm {

inline constexpr int64_t kMaxTiles = int64_t{1} << 30;
// Of the L2 cache, for what the heads at work at one time have in common.
inline constexpr int64_t kCachedBytes = 32 << 20;

inline bool is_served(const HopperAttention& a) {
  const auto fits = [](int64_t count) { return 0 <= count && count < HopperAttention::kUnbounded; };
  return (a.width == 64 || a.width == 128) && fits(a.queries) && fits(a.keys) && a.keys > 0 &&
         fits(a.batch * a.heads) &&
         (a.heads == 0 || (a.kv_heads > 0 && a.heads % a.kv_heads == 0)) && a.scale > 0.0f &&
         a.left >= 0 && a.right >= 0;
}

inline Band to_band(const HopperAttention& a) {
  const auto clamp = [](int64_t bound) {
    return static_cast<int>(std::min(bound, HopperAttention::kUnbounded));
  };
  return {static_cast<int>(a.queries), static_cast<int>(a.keys), clamp(a.left), clamp(a.right)};
}

template <typename T>
cudaError_t map_tokens(const HopperAttention& a, HeadRows<T> tokens, int64_t length, int64_t heads,
                       int rows, CUtensorMap* map) {
  constexpr bool kIsHalf = std::is_same_v<std::remove_const_t<T>, __half>;
  return encode_tensor_map(
      {tokens.data, a.batch, length, heads, a.width, tokens.row_stride},
      kIsHalf ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rows, map);
}

// Boxes of `rows` tokens out of an array like q.
template <typename T>
cudaError_t map_queries(const HopperAttention& a, HeadRows<T> tokens, int rows, CUtensorMap* map) {
  return map_tokens(a, tokens, a.queries, a.heads, rows, map);
}

// Boxes of `rows` tokens out of an array like k.
template <typename T>
cudaError_t map_keys(const HopperAttention& a, HeadRows<T> tokens, int rows, CUtensorMap* map) {
  return map_tokens(a, tokens, a.keys, a.kv_heads, rows, map);
}

// Whether the kernels may read and write packs of 16 bytes.
template <typename T>
bool is_aligned(HeadRows<T> tokens) {
  return reinterpret_cast<std::uintptr_t>(tokens.data) % 16 == 0 && tokens.row_stride % 8 == 0;
}

}  // namespace jaxllm
