// How threads share the rows of a (rows, width) array, a pack of 16 bytes at a time.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/launch.h"
#include "common/team.cuh"
#include "common/vector.cuh"

namespace jaxllm {

// The number of a block, counted from the last. The kernel before has written the last rows last,
// as a rule, so that they are in the L2 cache still; and the next begins with the first, which this
// one writes last.
__device__ __forceinline__ int64_t block_from_the_end() { return gridDim.x - 1 - blockIdx.x; }

// Loads a row's statistic that is wanted a tile later. Of a block that has one row the compiler
// sees that all threads load the same: it would keep that in a uniform register, and wait for it at
// once to move it there. That threadIdx.y is 0 it does not see.
__device__ __forceinline__ float load_for_later(const float* statistic) {
  return statistic[threadIdx.y];
}

// The first column of a thread's pack p.
template <typename T, class Team>
__device__ __forceinline__ int pack_column(const Team& team, int p) {
  return (team.thread() + p * team.threads()) * kPackSize<T>;
}

// Reads a thread's packs of a row, where it is one; the packs past the row's end stay as they are.
// With kExact no pack is past the end, which spares the kernel the question. With kStreams the
// accesses say, here and below, that they are the only ones to their addresses.
template <bool kExact, bool kStreams, typename T, int kPacks, class Team>
__device__ __forceinline__ void load_row(const Team& team, Pack<T> (&packs)[kPacks], const T* row,
                                         int width, bool is_row) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = pack_column<T>(team, p);
    if (!is_row || (!kExact && column >= width)) continue;
    packs[p] =
        kStreams ? load_streaming<kPackSize<T>>(row + column) : load<kPackSize<T>>(row + column);
  }
}

// Writes a pack of a row.
template <bool kStreams, typename T>
__device__ __forceinline__ void store_pack(const Pack<T>& pack, T* target) {
  if constexpr (kStreams) {
    store_streaming(target, pack);
  } else {
    store(target, pack);
  }
}

// Writes a row's mean or rstd so that it stays in the L2 cache until the rows beside it have
// theirs: 32 bytes of it that go to memory in pieces cost a read and a write each, 3% of the
// kernel's time.
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

// Adds a residual, and the bias of the columns where there is one, to a thread's packs of a row,
// and writes the sum, as it was rounded, to `h`.
template <bool kExact, bool kStreams, typename T, typename W, int kPacks, class Team>
__device__ __forceinline__ void add_and_store(const Team& team, Pack<T> (&packs)[kPacks],
                                              const T* residual, const W* bias, T* h, int width,
                                              bool is_row) {
  constexpr int kVector = kPackSize<T>;
  Pack<T> residuals[kPacks] = {};
  load_row<kExact, kStreams>(team, residuals, residual, width, is_row);
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = pack_column<T>(team, p);
    Pack<W, kVector> biases = {};
    if (bias && (kExact || column < width)) biases = load_cached<kVector>(bias + column);
    float sum[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] = packs[p][i] + biases[i] + residuals[p][i];
    packs[p] = Pack<T>::of(sum);
    if (is_row && (kExact || column < width)) store_pack<kStreams>(packs[p], h + column);
  }
}

// Reads the weights that belong to a thread's packs of a row.
template <bool kExact, typename W, int kPacks, int kVector, class Team>
__device__ __forceinline__ void load_weights(const Team& team, Pack<W, kVector> (&packs)[kPacks],
                                             const W* weights, int width) {
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int column = (team.thread() + p * team.threads()) * kVector;
    if (kExact || column < width) packs[p] = load_cached<kVector>(weights + column);
  }
}

// Tiles of consecutive rows that cp.async brings into shared memory while the threads work on the
// tile before. A thread copies what it will read itself, so nobody waits at a barrier. The block
// has kRows rows for each of its teams, of each of kStreams arrays; there are two tiles in turn.
template <class Team, typename T, int kPacks, int kRows, int kStreams>
struct TileRing {
  static constexpr int64_t bytes(int threads) {
    return int64_t{2} * kRows * kStreams * kPacks * threads * 16;
  }

  // Starts to copy a row of each array; zeros stand past the row's end, and where it is no row.
  __device__ __forceinline__ void fetch(const Team& team, int tile, int r,
                                        const T* const (&rows)[kStreams], int width, bool is_row) {
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int column = pack_column<T>(team, p);
        const bool is_inside = is_row && column < width;
        const auto target = static_cast<unsigned>(__cvta_generic_to_shared(slot(tile, r, s, p)));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target),
                     "l"(rows[s] + (is_inside ? column : 0)), "r"(is_inside ? 16 : 0)
                     : "memory");
      }
    }
  }

  // Closes the copies of a tile; wait_for_previous waits for those of the tile before it.
  __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  __device__ __forceinline__ void wait_for_previous() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  }

  __device__ __forceinline__ Pack<T> read(int tile, int r, int s, int p) const {
    Pack<T> pack;
    reinterpret_cast<int4&>(pack) = *slot(tile, r, s, p);
    return pack;
  }

  __device__ __forceinline__ int4* slot(int tile, int r, int s, int p) const {
    return memory + (((tile * kRows + r) * kStreams + s) * kPacks + p) * blockDim.x + threadIdx.x;
  }

  int4* memory;
};

// Adds the column sums of a block's threads over the rows that they visited, in a fixed order, and
// writes them as one partial row.
template <typename T, int kPacks, int kVector, class Team>
__device__ __forceinline__ void store_column_sums(const Team& team,
                                                  const float (&sums)[kPacks][kVector],
                                                  float* partial, int width) {
  if constexpr (Team::kRowsPerBlock == 1) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      const int column = pack_column<T>(team, p);
      if (column < width) store(partial + column, Pack<float, kVector>::of(sums[p]));
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
            float& column = columns[pack_column<T>(team, p) + i];
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

// Whether every row of every array can be read in packs.
template <typename T, typename... Pointers>
bool rows_are_aligned(int64_t width, Pointers... arrays) {
  return width % kPackSize<T> == 0 && aligned_16(arrays...);
}

// The threads of a block that has one row of `packs` packs, kPacks for each thread.
inline int block_threads(int64_t packs, int packs_each) {
  return static_cast<int>(divide_up(packs, 32 * packs_each) * 32);
}

// The kernels that take rows of any width and alignment have a block for each row.
inline constexpr int kAnyWidthThreads = 256;
inline int64_t any_width_blocks(int64_t rows) { return std::min(rows, int64_t{1} << 20); }

}  // namespace jaxllm
