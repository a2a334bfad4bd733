// The tile of kernels that write 8-bit floats: as a matrix, transposed, or both. Each element is
// computed once. The transposition goes through shared memory, in words of four rows:
//
//                 8 columns                              a word: 4 rows of a column
//            +---------------+                          +---+
//   4 rows   | of one thread |   -> registers, bytes -> |   | x 8 columns -> shared memory
//            +---------------+      permuted            +---+
//
//   shared memory -> 16 rows of a column at once -> a row of the transposed matrix
#pragma once

#include "common/float8.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm::float8 {

constexpr int kThreads = 256;
constexpr int kPack = 8;          // neighbours in a row, of one thread
constexpr int kRowsOfThread = 4;  // as many bytes as a word
constexpr int kTileColumns = 64;
constexpr int kPacksOfRow = kTileColumns / kPack;  // threads that share a row of a tile
constexpr int kTileRows = kThreads / kPacksOfRow * kRowsOfThread;
constexpr int kColumnWords = kTileRows / kRowsOfThread;
constexpr int kSharedWords = kTileColumns * kColumnWords + kPacksOfRow * 4;

// The place of a word of a column in shared memory. In a store a warp writes 4 words of each of 8
// columns, which are kPack columns apart. Their places are shifted by 4 banks each: no two lanes
// share a bank.
__device__ __forceinline__ int word_index(int column, int word) {
  return column * kColumnWords + column / kPack * 4 + word;
}

// The bytes of four words as a matrix, transposed.
__device__ __forceinline__ void transpose_bytes(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t left_top = __byte_perm(rows[0], rows[1], 0x5140);
  const uint32_t left_bottom = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t right_top = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t right_bottom = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(left_top, left_bottom, 0x5410);
  columns[1] = __byte_perm(left_top, left_bottom, 0x7632);
  columns[2] = __byte_perm(right_top, right_bottom, 0x5410);
  columns[3] = __byte_perm(right_top, right_bottom, 0x7632);
}

// The rounded elements of a thread: kRowsOfThread rows of kPack bytes.
struct Words {
  uint32_t of[kPack / 4][kRowsOfThread];

  template <typename Float8>
  __device__ __forceinline__ void set_row(int i, const float (&quotients)[kPack]) {
#pragma unroll
    for (int j = 0; j < kPack; j += 4) {
      of[j / 4][i] = round_pair<Float8>(quotients[j], quotients[j + 1]) |
                     round_pair<Float8>(quotients[j + 2], quotients[j + 3]) << 16;
    }
  }
};

// Adds the sums of the lanes of a warp that have the same columns, kPacksOfRow lanes apart.
__device__ __forceinline__ void store_sums_of_warp(const float (&sums)[kPack], float* to) {
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    float sum = sums[j];
#pragma unroll
    for (int lanes = kPacksOfRow; lanes < 32; lanes *= 2) {
      sum += __shfl_xor_sync(kFullWarp, sum, lanes);
    }
    if (threadIdx.x % 32 < kPacksOfRow) to[j] = sum;
  }
}

// A tile of a matrix that has tiles_of_row(columns) of them in a row, and the part of one thread.
// Tile `index` follows the one before in its row.
struct Tile {
  int64_t rows, columns;  // of the matrix
  int64_t first_row, first_column;
  int pack, group;

  __host__ __device__ static int64_t tiles_of_row(int64_t columns) {
    return (columns + kTileColumns - 1) / kTileColumns;
  }
  static int64_t partial_rows(int64_t rows) { return divide_up(rows, kTileRows); }
  static int64_t count(int64_t rows, int64_t columns) {
    return partial_rows(rows) * tiles_of_row(columns);
  }

  __device__ __forceinline__ Tile(int64_t rows, int64_t columns, unsigned index = blockIdx.x)
      : rows(rows), columns(columns) {
    const int64_t of_row = tiles_of_row(columns);
    first_row = index / of_row * kTileRows;
    first_column = index % of_row * kTileColumns;
    pack = threadIdx.x % kPacksOfRow;
    group = threadIdx.x / kPacksOfRow;
  }

  __device__ __forceinline__ int64_t row() const { return first_row + group * kRowsOfThread; }
  __device__ __forceinline__ int64_t column() const { return first_column + pack * kPack; }
  __device__ __forceinline__ bool has_row(int i) const {
    return row() + i < rows && column() < columns;
  }

  // Loads the thread's rows of a matrix with `stride` elements from row to row.
  template <typename T>
  __device__ __forceinline__ void load(const T* from, int64_t stride,
                                       Pack<T, kPack> (&packs)[kRowsOfThread]) const {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      packs[i] = has_row(i) ? jaxllm::load<kPack>(from + (row() + i) * stride + column())
                            : Pack<T, kPack>{};
    }
  }

  __device__ __forceinline__ void store(const Words& words, uint8_t* to, int64_t stride) const {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      if (!has_row(i)) continue;
      uint2* const at = reinterpret_cast<uint2*>(to + (row() + i) * stride + column());
      *at = {words.of[0][i], words.of[1][i]};
    }
  }

  // Stores the sums of the tile's columns as a row of `partial`, of kResults matrices beside each
  // other; `sums` are those of the thread's rows. The order of the additions depends on the shape
  // alone: the lanes of a warp that have the same columns add theirs, and then the warps.
  template <int kResults>
  __device__ __forceinline__ void store_sums(
      const float (&sums)[kResults][kPack], float (&shared)[kThreads / 32][kResults * kTileColumns],
      float* partial) const {
#pragma unroll
    for (int k = 0; k < kResults; ++k) {
      store_sums_of_warp(sums[k], &shared[threadIdx.x / 32][k * kTileColumns + pack * kPack]);
    }
    __syncthreads();
    partial += first_row / kTileRows * kResults * columns;
    for (int i = threadIdx.x; i < kResults * kTileColumns; i += kThreads) {
      const int64_t column = first_column + i % kTileColumns;
      if (column >= columns) continue;
      float sum = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kThreads / 32; ++warp) sum += shared[warp][i];
      partial[i / kTileColumns * columns + column] = sum;
    }
  }

  // The first half of the transposition; __syncthreads() comes before the second.
  __device__ __forceinline__ void stage_transposed(const Words& words, uint32_t* shared) const {
#pragma unroll
    for (int half = 0; half < kPack / 4; ++half) {
      uint32_t of_columns[4];
      transpose_bytes(words.of[half], of_columns);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        shared[word_index(pack * kPack + half * 4 + j, group)] = of_columns[j];
      }
    }
  }

  // Stores the transposed tile: `to` is (columns, rows).
  __device__ __forceinline__ void store_transposed(const uint32_t* shared, uint8_t* to) const {
    constexpr int kChunks = kColumnWords / 4;  // of 16 rows
    for (int i = threadIdx.x; i < kTileColumns * kChunks; i += kThreads) {
      const int of_tile = i / kChunks, chunk = i % kChunks;
      const int64_t to_row = first_column + of_tile, to_column = first_row + chunk * 16;
      if (to_row >= columns || to_column >= rows) continue;
      *reinterpret_cast<uint4*>(to + to_row * rows + to_column) =
          *reinterpret_cast<const uint4*>(&shared[word_index(of_tile, chunk * 4)]);
    }
  }
};

// Whether the tiles serve a matrix; the transposed one where it is wanted.
inline bool serves(int64_t rows, int64_t columns, bool transposed) {
  return columns % kPack == 0 && (!transposed || rows % 16 == 0);
}

}  // namespace jaxllm::float8
