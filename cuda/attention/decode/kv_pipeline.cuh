// The pipeline that brings a warp the keys and values of a cache: a ring of stages in shared
// memory, filled by cp.async. The warp that copies a stage reads it, so that it needs no barrier of
// the CTA.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cp_async.cuh"

namespace jaxllm::decode {

// The rows of a stage, each the bytes of a key or a value: 4 KiB, but no more rows than pay in a
// short cache.
__host__ __device__ constexpr int stage_rows(int row_bytes) {
  return row_bytes >= 128 ? 4096 / row_bytes : 32;
}

// A stage has keys or values, with their scales if the cache is int8. With three stages keys,
// values and the next keys are in flight together, which takes a CTA 227 KB of shared memory. Other
// GPUs have two.
inline constexpr int kMaxStages = 3, kMinStages = 2;
inline constexpr int kSmemForMaxStages = 227 << 10;

template <typename C>
__host__ __device__ constexpr size_t stage_bytes(int width) {
  return stage_rows(width * sizeof(C)) * (width * sizeof(C) + (sizeof(C) == 1 ? sizeof(float) : 0));
}

template <typename C>
__host__ __device__ constexpr size_t ring_bytes(int width, int stages) {
  return stages * stage_bytes<C>(width);
}

// Loads the keys, or the values, of one head: kTokens rows for each of kProducts MMAs. Lanes copy
// whole rows, which are consecutive bytes, but read 16-byte chunks of many rows at a time. So the
// chunks are swizzled:
//
//   row r   | chunk 0 ^ swizzle(r) | chunk 1 ^ swizzle(r) | ...   those read together are in
//                                                                 different banks
template <typename C, int kHeadDim, class Rows>
class KvLoader {
 public:
  static constexpr int kRowBytes = kHeadDim * sizeof(C);
  static constexpr int kRows = stage_rows(kRowBytes);
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kStageBytes = stage_bytes<C>(kHeadDim);
  static constexpr int kTokens = 16;
  static constexpr int kProducts = kRows / kTokens;

  // `cache` and `scales` are those of all sequences, `rows` says where the loader's sequence is.
  __device__ __forceinline__ KvLoader(const C* cache, const float* scales, const Rows& rows,
                                      int head, int heads)
      : rows_(rows), heads_(heads) {
    const int64_t first = rows.first() * heads + head;
    cache_ = reinterpret_cast<const char*>(cache) + first * kRowBytes + my_chunk() * 16;
    scales_ = scales + first;
  }

  // The offset in a stage of a row's bytes from `byte` on, up to the end of their chunk.
  __device__ __forceinline__ static int offset(int row, int byte) {
    return row * kRowBytes + (byte / 16 ^ swizzle(row)) * 16 + byte % 16;
  }

  __device__ __forceinline__ static float* scales(char* stage) {
    return reinterpret_cast<float*>(stage + kBytes);
  }

  // Starts copies to a stage. The MMAs' tokens begin at `first`, `first + stride`, ...; the token
  // `last` stands in for those past it, and an MMA that begins past it has nothing copied.
  __device__ __forceinline__ void load(char* stage, int first, int stride, int last) const {
    constexpr int kRowsPerCopy = 32 / kRowChunks;
    const int mine = offset(my_row(), my_chunk() * 16);
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsPerCopy) {
      const int start = first + i / kTokens * stride;
      if (i >= kTokens && start > last) break;
      const auto token = static_cast<uint32_t>(min(start + i % kTokens + my_row(), last));
      // offset(i + my_row(), ...), since rows i and my_row() have no bit in common.
      cp_async_16(stage + i * kRowBytes + (mine ^ swizzle(i) * 16),
                  cache_ + uint64_t{rows_(token)} * (heads_ * kRowBytes));
    }
    if constexpr (sizeof(C) == 1) {
#pragma unroll
      for (int i = 0; i < kRows; i += 32) {
        const int row = i + threadIdx.x % 32;
        const int token = first + row / kTokens * stride + row % kTokens;
        cp_async_4(scales(stage) + row, scales_ + uint64_t{rows_(min(token, last))} * heads_);
      }
    }
  }

 private:
  static constexpr int kRowChunks = kRowBytes / 16;

  // A lane's chunk of the rows that it copies, and its row of those that are copied at once.
  __device__ __forceinline__ static int my_chunk() { return threadIdx.x % kRowChunks; }
  __device__ __forceinline__ static int my_row() { return threadIdx.x % 32 / kRowChunks; }

  __device__ __forceinline__ static int swizzle(int row) {
    return kRowChunks >= 8 ? row / 2 % 4 * 2 ^ row % 2 * 4 : row / 2 % 4;
  }

  Rows rows_;
  const char* cache_;
  const float* scales_;
  uint32_t heads_;
};

}  // namespace jaxllm::decode
