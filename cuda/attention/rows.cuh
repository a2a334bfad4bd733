// How threads share rows that begin at any address, a pack of 16 bytes at a time.
//
// A row of odd width does not begin where a pack may. So packs are counted from the aligned address
// at or before the row's first element: the first pack and the last may lie partly outside of the
// row, and are then moved one element at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/reduce.cuh"
#include "common/reduce_max.cuh"
#include "common/vector.cuh"

namespace jaxllm {

// Teams: the threads that share a row. Thread t of a team holds packs t, t + threads, ... of it.

// kLanes neighbouring lanes of a warp share a row, and a block is one warp: the next row begins as
// soon as one is finished.
template <int kLanes>
struct LanesPerRow {
  static constexpr int kMaxThreads = 32;
  static constexpr int kRowsPerBlock = 32 / kLanes;

  __device__ int thread() const { return threadIdx.x % kLanes; }
  __device__ int threads() const { return kLanes; }
  __device__ int row() const { return threadIdx.x / kLanes; }

  __device__ float sum(float value) {
    float values[1] = {value};
    sum_over_lanes<kLanes>(values);
    return values[0];
  }
  __device__ float max(float value) { return max_over_lanes<kLanes>(value); }
};

// The block shares a row: its sums meet in shared memory.
struct BlockPerRow {
  static constexpr int kMaxThreads = 512;
  static constexpr int kRowsPerBlock = 1;

  __device__ int thread() const { return threadIdx.x; }
  __device__ int threads() const { return blockDim.x; }
  __device__ int row() const { return 0; }

  __device__ float sum(float value) {
    float values[1] = {value};
    sum_over_block(values, scratch());
    return values[0];
  }
  __device__ float max(float value) { return max_over_block(value, scratch()); }

  // Two arrays in turn, as the reductions ask.
  __device__ float* scratch() {
    __shared__ float memory[2][32];
    turn ^= 1;
    return memory[turn];
  }

  int turn = 0;
};

// How many elements `row` lies behind the aligned address from which its packs are counted.
template <typename T>
__device__ __forceinline__ int elements_past_aligned(const T* row) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(row) % 16 / sizeof(T));
}

// Whether all arrays begin equally far behind an aligned address, and so all their rows do.
template <typename First, typename... Rest>
bool equally_aligned(First first, Rest... rest) {
  const auto past = [](auto pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16; };
  return ((past(rest) == past(first)) && ...);
}

// The packs of a row that one thread works on at once, and how much of the row counts: the columns
// below `seen`. Where the packs are not `aligned`, none is moved as a whole.
template <typename T, typename Index>
struct RowPart {
  static constexpr int kVector = kPackSize<T>;

  // The team works from the column `start` on, which is negative where that is before the row.
  template <class Team>
  __device__ __forceinline__ RowPart(const Team& team, Index start, Index seen, Index width,
                                     bool aligned)
      : first(start + team.thread() * kVector),
        stride(team.threads() * kVector),
        seen(seen),
        width(width),
        aligned(aligned) {}

  // The first column of pack p.
  __device__ __forceinline__ Index column(int p) const { return first + p * stride; }

  // Whether any of pack p is seen, whether element i of it is, and whether all of it is.
  __device__ __forceinline__ bool sees(int p) const { return column(p) < seen; }
  __device__ __forceinline__ bool sees(int p, int i) const {
    return column(p) + i >= 0 && column(p) + i < seen;
  }
  __device__ __forceinline__ bool sees_all(int p) const {
    return column(p) >= 0 && column(p) + kVector <= seen;
  }

  // Reads the packs of which anything is seen, with zeros for what lies outside of the row.
  template <int kPacks>
  __device__ __forceinline__ void load(Pack<T> (&packs)[kPacks], const T* row) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!sees(p)) continue;
      if (is_whole(p)) {
        packs[p] = load_streaming<kVector>(row + column(p));
        continue;
      }
      float values[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        values[i] = is_inside(p, i) ? to_float(row[column(p) + i]) : 0.0f;
      }
      packs[p] = Pack<T>::of(values);
    }
  }

  // Writes what lies in the row of pack p.
  __device__ __forceinline__ void store(int p, const Pack<T>& pack, T* row) const {
    if (is_whole(p)) {
      store_streaming(row + column(p), pack);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (is_inside(p, i)) row[column(p) + i] = from_float<T>(pack[i]);
    }
  }

  // Writes zeros to the packs, of kPacks, of which nothing is seen.
  template <int kPacks>
  __device__ __forceinline__ void clear_unseen(T* row) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!sees(p)) store(p, Pack<T>{}, row);
    }
  }

  __device__ __forceinline__ bool is_whole(int p) const {
    return aligned && column(p) >= 0 && column(p) + kVector <= width;
  }
  __device__ __forceinline__ bool is_inside(int p, int i) const {
    return column(p) + i >= 0 && column(p) + i < width;
  }

  Index first;
  int stride;
  Index seen, width;
  bool aligned;
};

}  // namespace jaxllm
