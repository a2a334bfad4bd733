// How threads share the rows of a (rows, width) array: whole rows in registers, a pack at a time.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm {

// kLanes neighbouring lanes of a warp share a row: their sums need shuffles alone.
template <int kLanes>
struct LanesPerRow {
  static constexpr int kMaxThreads = 128;
  static constexpr int kRowsPerBlock = kMaxThreads / kLanes;

  __device__ int thread() const { return threadIdx.x % kLanes; }
  __device__ int threads() const { return kLanes; }
  __device__ int row() const { return threadIdx.x / kLanes; }

  template <int kCount>
  __device__ void sum(float (&values)[kCount]) {
    sum_over_lanes<kLanes>(values);
  }
};

// The block shares a row: its sums meet in shared memory.
struct BlockPerRow {
  static constexpr int kMaxThreads = 512;
  static constexpr int kRowsPerBlock = 1;

  __device__ int thread() const { return threadIdx.x; }
  __device__ int threads() const { return blockDim.x; }
  __device__ int row() const { return 0; }

  template <int kCount>
  __device__ void sum(float (&values)[kCount]) {
    __shared__ float scratch[2][kCount * 32];
    sum_over_block(values, scratch[turn]);
    turn ^= 1;
  }

  int turn = 0;
};

// A thread's share of a row: packs thread, thread + threads, ... of it.
template <typename T, int kPacks>
struct RowShare {
  static constexpr int kVector = kPackSize<T>;
  Pack<T, kVector> packs[kPacks];

  __device__ float operator()(int pack, int i) const { return to_float(packs[pack].values[i]); }
};

// Reads a thread's share of a row that is used once; zeros past the row's end, or all zeros where
// the row is not `valid`.
template <int kPacks, typename T, class Team>
__device__ __forceinline__ RowShare<T, kPacks> load_row(const Team& team, const T* row, int width,
                                                        bool valid) {
  constexpr int kVector = kPackSize<T>;
  RowShare<T, kPacks> share;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = (team.thread() + p * team.threads()) * kVector;
    share.packs[p] = {};
    if (valid && column < width) share.packs[p] = load_streaming<kVector>(row + column);
  }
  return share;
}

// Adds a residual to a thread's share of a row, and writes the sum, as it was rounded, to `h_row`.
template <int kPacks, typename T, class Team>
__device__ __forceinline__ void add_and_store(const Team& team, RowShare<T, kPacks>& share,
                                              const RowShare<T, kPacks>& residual, T* h_row,
                                              int width, bool valid) {
  constexpr int kVector = kPackSize<T>;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = (team.thread() + p * team.threads()) * kVector;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      share.packs[p].values[i] = from_float<T>(share(p, i) + residual(p, i));
    }
    if (valid && column < width) store(h_row + column, share.packs[p]);
  }
}

// Reads a thread's share of the weights that belong to the elements of its row share.
template <int kPacks, int kVector, typename W, class Team>
__device__ __forceinline__ void load_weights(const Team& team, const W* weights, int width,
                                             Pack<W, kVector> (&packs)[kPacks]) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = (team.thread() + p * team.threads()) * kVector;
    packs[p] = {};
    if (column < width) packs[p] = load_cached<kVector>(weights + column);
  }
}

// Adds the column sums of a block's threads over the rows that they visited, in a fixed order, and
// writes them as one partial row.
template <int kPacks, int kVector, class Team>
__device__ __forceinline__ void store_column_sums(const Team& team,
                                                  const float (&sums)[kPacks][kVector],
                                                  float* partial, int width) {
  if constexpr (Team::kRowsPerBlock == 1) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = (team.thread() + p * team.threads()) * kVector;
      if (column >= width) continue;
#pragma unroll
      for (int i = 0; i < kVector; ++i) partial[column + i] = sums[p][i];
    }
  } else {
    constexpr int kLanes = Team::kMaxThreads / Team::kRowsPerBlock;
    __shared__ float columns[kLanes * kPacks * kVector];
    for (int turn = 0; turn < Team::kRowsPerBlock; ++turn) {
      if (team.row() == turn) {
#pragma unroll
        for (int p = 0; p < kPacks; ++p) {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            float& column = columns[(team.thread() + p * kLanes) * kVector + i];
            column = turn == 0 ? sums[p][i] : column + sums[p][i];
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

// The widest row that fits the registers of a block.
inline constexpr int64_t kMaxRegisterWidth = 16384;

// Whether rows can be held in registers: not too wide, and every row of every array aligned.
template <typename T, typename... Pointers>
bool fits_registers(int64_t width, Pointers... arrays) {
  return width <= kMaxRegisterWidth && width % kPackSize<T> == 0 && aligned_16(arrays...);
}

template <class TeamType, int kElements>
struct RowStrategy {
  using Team = TeamType;
  static constexpr int kElementsPerThread = kElements;
};

// Calls `launch(strategy, threads)` with the team that suits rows of `width` elements, at most
// kMaxRegisterWidth: part of a warp, a warp, or a block of `threads`.
template <class Launch>
cudaError_t launch_by_width(int64_t width, Launch launch) {
  constexpr int kLaneThreads = LanesPerRow<32>::kMaxThreads;
  if (width <= 128) return launch(RowStrategy<LanesPerRow<16>, 8>{}, kLaneThreads);
  if (width <= 256) return launch(RowStrategy<LanesPerRow<32>, 8>{}, kLaneThreads);
  if (width <= 512) return launch(RowStrategy<LanesPerRow<32>, 16>{}, kLaneThreads);
  if (width <= 768) return launch(RowStrategy<LanesPerRow<32>, 24>{}, kLaneThreads);
  if (width <= 16 * BlockPerRow::kMaxThreads) {
    return launch(RowStrategy<BlockPerRow, 16>{}, static_cast<int>(divide_up(width, 512) * 32));
  }
  return launch(RowStrategy<BlockPerRow, 32>{}, static_cast<int>(divide_up(width, 1024) * 32));
}

// The grid of a kernel whose blocks loop over the rows of a group: as many as the device holds, or
// as the rows need.
template <class Team, class Kernel>
cudaError_t row_blocks(Kernel kernel, int threads, int64_t groups, int64_t rows, int64_t* blocks) {
  int64_t resident = 0;
  JAXLLM_RETURN_IF_ERROR(resident_blocks(kernel, threads, &resident));
  *blocks = std::min(divide_up(resident, groups), divide_up(rows, Team::kRowsPerBlock));
  return cudaSuccess;
}

// Of the kernels that take rows of any width, a block a row.
inline constexpr int kAnyWidthThreads = 256;
inline int64_t any_width_blocks(int64_t rows) { return std::min(rows, int64_t{1} << 20); }

}  // namespace jaxllm
