// How a warp brings keys or values of a cache to shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cp_async.cuh"
#include "common/mma.cuh"

namespace jaxllm {

// The rows of a step of a warp, each the bytes of a key or a value: 4 KiB, but no more rows than
// are worth a step of a short cache.
__host__ __device__ constexpr int step_rows(int row_bytes) {
  return row_bytes >= 128 ? 4096 / row_bytes : 32;
}

// A step of keys or of values lies in a slot, with their scales where the numbers are int8. A warp
// has a ring of slots. Three, where a CTA may have 227 KB of shared memory: keys, values and the
// next keys are on their way together. Two on other GPUs.
inline constexpr int kMostSlots = 3, kFewerSlots = 2;
inline constexpr int kBytesForMostSlots = 227 << 10;

template <typename C>
__host__ __device__ constexpr size_t slot_bytes(int width) {
  return step_rows(width * sizeof(C)) * (width * sizeof(C) + (sizeof(C) == 1 ? sizeof(float) : 0));
}

template <typename C>
__host__ __device__ constexpr size_t ring_bytes(int width, int slots) {
  return slots * slot_bytes<C>(width);
}

// The keys of a step, or the values, of one head: rows of 16-byte chunks, kTokens rows for each of
// kProducts products. The lanes copy whole rows, as memory likes it, and read chunks of many rows
// at a time. So in row r chunk c lies at c ^ turn(r): then those lie in different banks.
template <typename C, int kWidth>
class CacheStep {
 public:
  static constexpr int kRowBytes = kWidth * sizeof(C);
  static constexpr int kRows = step_rows(kRowBytes);
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kSlotBytes = slot_bytes<C>(kWidth);
  static constexpr int kTokens = 16;
  static constexpr int kProducts = kRows / kTokens;

  // `cache` and `scales` are those of all sequences, of which one begins at row `first_row`, and
  // `heads` rows lead from a token to the next.
  __device__ __forceinline__ CacheStep(const C* cache, const float* scales, int64_t first_row,
                                       int heads)
      : cache_(reinterpret_cast<const char*>(cache) + first_row * kRowBytes + my_chunk() * 16),
        scales_(scales + first_row),
        heads_(heads) {}

  // Where the bytes of a row from `byte` on lie; they do not go beyond their chunk.
  __device__ __forceinline__ static int offset(int row, int byte) {
    return row * kRowBytes + (byte / 16 ^ turn(row)) * 16 + byte % 16;
  }

  // The scales of a slot.
  __device__ __forceinline__ static float* scales(char* slot) {
    return reinterpret_cast<float*>(slot + kBytes);
  }

  // Starts to copy to a slot: the products' tokens begin at `first`, `first + apart`, ...; past
  // `last` stands the last one again, or nothing where a product has none.
  __device__ __forceinline__ void fetch(char* slot, int first, int apart, int last) const {
    constexpr int kRowsPerCopy = 32 / kRowChunks;
    const int mine = offset(my_row(), my_chunk() * 16);
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsPerCopy) {
      const int start = first + i / kTokens * apart;
      if (i >= kTokens && start > last) break;
      const auto token = static_cast<uint32_t>(min(start + i % kTokens + my_row(), last));
      // offset(i + my_row(), ...), since rows i and my_row() have no bit in common.
      cp_async_16(slot + i * kRowBytes + (mine ^ turn(i) * 16),
                  cache_ + uint64_t{token} * (heads_ * kRowBytes));
    }
    if constexpr (sizeof(C) == 1) {
#pragma unroll
      for (int i = 0; i < kRows; i += 32) {
        const int row = i + threadIdx.x % 32;
        const int token = first + row / kTokens * apart + row % kTokens;
        cp_async_4(scales(slot) + row, scales_ + int64_t{min(token, last)} * heads_);
      }
    }
  }

 private:
  static constexpr int kRowChunks = kRowBytes / 16;

  // A lane's chunk of the rows that it copies, and which of the rows that are copied at once.
  __device__ __forceinline__ static int my_chunk() { return threadIdx.x % kRowChunks; }
  __device__ __forceinline__ static int my_row() { return threadIdx.x % 32 / kRowChunks; }

  __device__ __forceinline__ static int turn(int row) {
    return kRowChunks >= 8 ? row / 2 % 4 * 2 ^ row % 2 * 4 : row / 2 % 4;
  }

  const char* cache_;
  const float* scales_;
  uint32_t heads_;
};

}  // namespace jaxllm
