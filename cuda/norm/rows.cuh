// How threads share the rows of a (rows, width) array, a pack of 16 bytes at a time.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/cp_async.cuh"
#include "common/launch.h"
#include "common/thread_group.cuh"
#include "common/vector.cuh"

namespace jaxllm {

// The index of a CTA, counted from the last. The last rows are still in the L2 cache, because most
// kernels write them last. The next kernel begins with the first rows, which this one writes last.
__device__ __forceinline__ int64_t cta_from_the_end() { return gridDim.x - 1 - blockIdx.x; }

struct RowStatistics {
  float mean, rstd;
};

// Loads a row's statistic that is used a tile later. In a CTA with one row the compiler sees that
// all threads load the same value, and would wait for it at once to move it to a uniform register.
// The index hides that: threadIdx.y is 0.
__device__ __forceinline__ float load_for_later(const float* statistic) {
  return statistic[threadIdx.y];
}

// The first column of a thread's pack p.
template <typename T, class ThreadGroup>
__device__ __forceinline__ int pack_column(const ThreadGroup& threads, int p) {
  return (threads.rank() + p * threads.size()) * kPackSize<T>;
}

// Loads a thread's packs of a row, if is_row; the packs past the row's end stay as they are. With
// kExact no pack is past the end, and the kernel does not check. With kStreaming the accesses have
// the hint, here and below, that they are the only ones to their addresses.
template <bool kExact, bool kStreaming, typename T, int kPacks, class ThreadGroup>
__device__ __forceinline__ void load_row(const ThreadGroup& threads, Pack<T> (&packs)[kPacks],
                                         const T* row, int width, bool is_row) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = pack_column<T>(threads, p);
    if (!is_row || (!kExact && column >= width)) continue;
    packs[p] =
        kStreaming ? load_streaming<kPackSize<T>>(row + column) : load<kPackSize<T>>(row + column);
  }
}

// Writes a pack of a row.
template <bool kStreaming, typename T>
__device__ __forceinline__ void store_pack(const Pack<T>& pack, T* target) {
  if constexpr (kStreaming) {
    store_streaming(target, pack);
  } else {
    store(target, pack);
  }
}

// Stores a row's mean or rstd so that it stays in the L2 cache until the neighbouring rows have
// theirs. A sector of 32 bytes that is evicted in parts costs a read and a write for each part, 3%
// of the kernel's time.
__device__ __forceinline__ void store_statistic(float* target, float value) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_last.b64 policy, 1.0;\n"
      "st.global.L2::cache_hint.f32 [%0], %1, policy;\n"
      "}" ::"l"(target),
      "f"(value)
      : "memory");
}

// Adds a residual and a bias, which may be null, to a thread's packs of a row; stores the rounded
// sum to `h`.
template <bool kExact, bool kStreaming, typename T, typename W, int kPacks, class ThreadGroup>
__device__ __forceinline__ void add_and_store(const ThreadGroup& threads, Pack<T> (&packs)[kPacks],
                                              const T* residual, const W* bias, T* h, int width,
                                              bool is_row) {
  constexpr int kVector = kPackSize<T>;
  Pack<T> residuals[kPacks] = {};
  load_row<kExact, kStreaming>(threads, residuals, residual, width, is_row);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = pack_column<T>(threads, p);
    Pack<W, kVector> biases = {};
    if (bias && (kExact || column < width)) biases = load_cached<kVector>(bias + column);
    float sum[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] = packs[p][i] + biases[i] + residuals[p][i];
    packs[p] = Pack<T>::of(sum);
    if (is_row && (kExact || column < width)) store_pack<kStreaming>(packs[p], h + column);
  }
}

// Loads the weights of a thread's packs of a row.
template <bool kExact, typename W, int kPacks, int kVector, class ThreadGroup>
__device__ __forceinline__ void load_weights(const ThreadGroup& threads,
                                             Pack<W, kVector> (&packs)[kPacks], const W* weights,
                                             int width) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = (threads.rank() + p * threads.size()) * kVector;
    if (kExact || column < width) packs[p] = load_cached<kVector>(weights + column);
  }
}

// A pipeline of two stages: cp.async loads a tile of consecutive rows into shared memory while the
// threads work on the tile before. A thread copies exactly what it reads itself, so no barrier is
// needed. A tile has kRows rows of each of kArrays arrays for each thread group of the CTA.
template <class ThreadGroup, typename T, int kPacks, int kRows, int kArrays>
struct TilePipeline {
  static constexpr int64_t bytes(int threads) {
    return int64_t{2} * kRows * kArrays * kPacks * threads * 16;
  }

  // Starts to copy a row of each of the first kArrays arrays; writes zeros past the row's end, and
  // where it is no row.
  __device__ __forceinline__ void fetch(const ThreadGroup& threads, int stage, int r,
                                        const T* const (&rows)[3], int width, bool is_row) {
#pragma unroll
    for (int s = 0; s < kArrays; ++s) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int column = pack_column<T>(threads, p);
        const bool is_inside = is_row && column < width;
        cp_async_16(slot(stage, r, s, p), rows[s] + (is_inside ? column : 0), is_inside);
      }
    }
  }

  // Closes the copies of a tile; wait_for_previous waits for the copies of the tile before it.
  __device__ __forceinline__ void commit() { cp_async_commit(); }
  __device__ __forceinline__ void wait_for_previous() { cp_async_wait<1>(); }

  __device__ __forceinline__ Pack<T> read(int stage, int r, int s, int p) const {
    Pack<T> pack;
    reinterpret_cast<int4&>(pack) = *slot(stage, r, s, p);
    return pack;
  }

  __device__ __forceinline__ int4* slot(int stage, int r, int s, int p) const {
    return smem + (((stage * kRows + r) * kArrays + s) * kPacks + p) * blockDim.x + threadIdx.x;
  }

  int4* smem;
};

// Adds the column sums of a CTA's threads in a fixed order, and stores them as one partial row.
template <typename T, int kPacks, int kVector, class ThreadGroup>
__device__ __forceinline__ void store_column_sums(const ThreadGroup& threads,
                                                  const float (&sums)[kPacks][kVector],
                                                  float* partial, int width) {
  if constexpr (ThreadGroup::kRowsPerCta == 1) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = pack_column<T>(threads, p);
      if (column < width) store(partial + column, Pack<float, kVector>::of(sums[p]));
    }
  } else {
    constexpr int kLanes = ThreadGroup::kMaxThreads / ThreadGroup::kRowsPerCta;
    __shared__ float columns[kLanes * kPacks * kVector];
    for (int row = 0; row < ThreadGroup::kRowsPerCta; ++row) {
      if (threads.row() == row) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            float& column = columns[pack_column<T>(threads, p) + i];
            column = row == 0 ? sums[p][i] : column + sums[p][i];
          }
        }
      }
      __syncthreads();
    }
    for (int column = threadIdx.x; column < width; column += blockDim.x) {
      partial[column] = columns[column];
    }
    __syncthreads();  // `columns` may be used again
  }
}

// Whether every row of every array can be loaded in packs.
template <typename T, typename... Pointers>
bool rows_are_aligned(int64_t width, Pointers... arrays) {
  return width % kPackSize<T> == 0 && aligned_16(arrays...);
}

// The kernels for rows of any width and alignment have a CTA for each row.
inline constexpr int kAnyWidthThreads = 256;
inline int64_t any_width_ctas(int64_t rows) { return std::min(rows, int64_t{1} << 20); }

}  // namespace jaxllm
