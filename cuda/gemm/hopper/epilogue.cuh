// What the epilogues of Hopper's GEMMs share. An epilogue is a type, in a file of its own:
//
//   Arguments                    what its caller gives
//   Params                       what the kernel gets: tensor maps, pointers, sizes
//   SharedStorage                its shared memory
//   to_params()                  Arguments -> Params, on the host
//   prefetch_source(work)        before a warp's first tile
//   begin(work, accumulators)    before a tile's mainloop: what the products are added to
//   store(accumulators, work, next, has_next)
//   finish()                     after a warp's last tile
//
// Each warp of a consumer works by itself on its rows, a subtile of 16 rows x 64 columns after the
// other. A subtile is rounded into a buffer in shared memory, and one lane has TMA store it. An
// epilogue with a source, an array that is added to the result, has TMA load its subtiles ahead
// into the same buffers.
//
//            columns 0-63  64-127  128-191          subtile = 2 column block + row block
//   rows     +-----------+-------+--------+
//   0-15     | warp 0: 0 |   2   |   4    |         row block 0: warp w has rows 16 w to 16 w + 15
//   ...      | warp 1-3  |       |        |
//   64-79    | warp 0: 1 |   3   |   5    |         row block 1
//   ...      +-----------+-------+--------+
//
// An epilogue must take no longer than the mainloop of the other consumer's tile. It is bound by
// latency, with four warps at work.
#pragma once

#include "common/launch.h"
#include "gemm/hopper/mainloop.cuh"
#include "gemm/hopper/tile_scheduler.cuh"

namespace jaxllm::hopper {

inline constexpr int kSubtileRows = 16;
inline constexpr int kSubtileSize = kSubtileRows * kSwizzleColumns;
inline constexpr int kSubtileBuffers = 4;  // of a warp

template <class Tile, typename T, int kBuffers = kSubtileBuffers>
struct SubtileStorage {
  T buffers[Tile::kConsumers][4][kBuffers][kSubtileSize];
  Barrier loaded[Tile::kConsumers][4][kBuffers];  // a subtile of the source has arrived

  __device__ __forceinline__ void init() {
    for (auto& of_consumer : loaded) {
      for (auto& of_warp : of_consumer) {
        for (Barrier& barrier : of_warp) barrier.init(1);
      }
    }
  }
};

template <class Tile>
struct Subtile {
  int index;

  __device__ __forceinline__ int row_block() const { return index % Tile::kRowBlocks; }
  __device__ __forceinline__ int column_block() const { return index / Tile::kRowBlocks; }
};

template <class Tile, class Visit>
__device__ __forceinline__ void for_each_subtile(const Visit& visit) {
#pragma unroll
  for (int index = 0; index < Tile::kSubtiles; ++index) visit(Subtile<Tile>{index});
}

// A lane has 16 pairs of neighbours of a subtile: of columns 8 j to 8 j + 7, in row lane / 4
// (`half` 0) and in the row 8 below. This is where the accumulators have the first of a pair.
__device__ __forceinline__ constexpr int accumulator_index(int column_block, int j, int half) {
  return 4 * (8 * column_block + j) + 2 * half;
}

template <class Tile>
__device__ __forceinline__ float2 accumulator_pair(const Accumulators<Tile>& accumulators,
                                                   const Subtile<Tile>& subtile, int j, int half) {
  const int at = accumulator_index(subtile.column_block(), j, half);
  return {accumulators[subtile.row_block()][at], accumulators[subtile.row_block()][at + 1]};
}

// A branch that is always taken. Within one basic block the assembler orders as it likes: it would
// begin with the first stage of many batches, for which there are no registers.
__device__ __forceinline__ void end_basic_block(int at_least_zero) {
  asm volatile(
      "{\n"
      ".reg .pred always;\n"
      "setp.ge.s32 always, %0, 0;\n"
      "AGAIN: @always bra NEXT;\n"
      "nanosleep.u32 1;\n"
      "bra AGAIN;\n"
      "NEXT:\n"
      "}\n" ::"r"(at_least_zero));
}

// ---- Visits of a subtile in shared memory, two columns of 8 x 8 matrices at a time. `row` is what
// EpilogueWarp::matrix_row() returns for the buffer.

// Writes value(j, half) for each pair.
template <typename T, class Value>
__device__ __forceinline__ void write_subtile(uint32_t row, const Value& value) {
#pragma unroll
  for (int first = 0; first < 8; first += 2) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = value(first + i / 2, i % 2);
      words[i] = pack_pair<T>(pair.x, pair.y);
    }
    stmatrix(row ^ 16 * first, words);
  }
}

// Calls visit(j, half, pair) for each pair.
template <typename T, class Visit>
__device__ __forceinline__ void read_subtile(uint32_t row, const Visit& visit) {
#pragma unroll
  for (int first = 0; first < 8; first += 2) {
    uint32_t words[4];
    ldmatrix(words, row ^ 16 * first);
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(first + i / 2, i % 2, unpack_pair<T>(words[i]));
  }
}

// Replaces each pair by change(j, half, pair).
template <typename T, class Change>
__device__ __forceinline__ void change_subtile(uint32_t row, const Change& change) {
  uint32_t words[4], next[4];
  ldmatrix(next, row);
#pragma unroll
  for (int first = 0; first < 8; first += 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = next[i];
    // Ahead of the stores, which the compiler must take for stores to the same place.
    if (first < 6) ldmatrix(next, row ^ 16 * (first + 2));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 changed = change(first + i / 2, i % 2, unpack_pair<T>(words[i]));
      words[i] = pack_pair<T>(changed.x, changed.y);
    }
    stmatrix(row ^ 16 * first, words);
  }
}

// ---- A warp of a consumer, and the defaults of an epilogue, which derives from it.

template <class Tile, typename T, class Storage = SubtileStorage<Tile, T>>
struct EpilogueWarp {
  using SharedStorage = Storage;
  static constexpr bool kTakesHalves = false;  // of the depth: Float8Mainloop::mma_in_halves()

  SharedStorage& smem;
  const int consumer, warp, lane;

  // How the parts of the result that a warp does not store itself are mapped for TMA.
  static cudaError_t encode_subtiles(const T* data, const GemmShape& shape, CUtensorMap* map) {
    return encode_matrix_map({data, shape.rows, shape.columns}, kTensorMapType<T>, kSubtileRows,
                             map);
  }

  // Whether the kernel has anything to do.
  template <class Params>
  __device__ __forceinline__ static bool is_wanted(const Params&) {
    return true;
  }
  __device__ __forceinline__ void prefetch_source(const WorkTile&) {}
  // A product that need not add would do without these zeros. But the compiler cannot tell that it
  // does not read them: it would keep the accumulators of a tile until the next.
  __device__ __forceinline__ void begin(const WorkTile&, Accumulators<Tile>& accumulators) {
#pragma unroll
    for (auto& of_block : accumulators) {
#pragma unroll
      for (float& value : of_block) value = 0.0f;
    }
  }
  __device__ __forceinline__ void finish() {}

  // The part of a tile that the consumer has.
  __device__ __forceinline__ WorkTile own(WorkTile work) const {
    if (Tile::kCooperative) work.row += consumer * Tile::kConsumerM;
    return work;
  }

  // The first row and column of a subtile.
  __device__ __forceinline__ int row(const WorkTile& work, const Subtile<Tile>& subtile) const {
    return work.row + subtile.row_block() * 64 + warp * kSubtileRows;
  }
  __device__ __forceinline__ int column(const WorkTile& work, const Subtile<Tile>& subtile) const {
    return work.column + subtile.column_block() * kSwizzleColumns;
  }

  __device__ __forceinline__ T* buffer(int index) const {
    return smem.buffers[consumer][warp][index];
  }
  __device__ __forceinline__ Barrier& loaded(int index) const {
    return smem.loaded[consumer][warp][index];
  }

  // The row of a subtile's matrices that the lane names to ldmatrix and stmatrix, those of columns
  // 0 to 15: rows 0 to 7 of the first eight columns, rows 8 to 15 of them, and both of the next
  // eight. For columns 8 j to 8 j + 15, j even, the address ^ 16 j.
  __device__ __forceinline__ uint32_t matrix_row(const T* subtile) const {
    const uint32_t row = lane % 8, half = lane / 8 % 2, odd = lane / 16;
    return smem_address(subtile) + (row + 8 * half) * kSwizzleRowBytes + (odd ^ row) * 16;
  }

  // A buffer for a subtile, once TMA has read what it had. As many buffers are used in turn as
  // divide the subtiles of a tile, so that the sequence goes on from tile to tile.
  __device__ __forceinline__ T* acquire_buffer(const Subtile<Tile>& subtile) const {
    constexpr int kBuffers = Tile::kSubtiles % 4 == 0 ? 4 : Tile::kSubtiles % 3 == 0 ? 3 : 2;
    static_assert(kBuffers <= kSubtileBuffers);
    static_assert(Tile::kSubtiles % kBuffers == 0);
    if (lane == 0) tma_store_wait_read<kBuffers - 1>();
    __syncwarp();
    return buffer(subtile.index % kBuffers);
  }

  // Has TMA store a buffer that the warp has written.
  __device__ __forceinline__ void store_buffer(const CUtensorMap& map, const T* from,
                                               const WorkTile& work,
                                               const Subtile<Tile>& subtile) const {
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      tma_store_2d(map, from, column(work, subtile), row(work, subtile));
      tma_store_commit();
    }
  }

  // One lane's task: has TMA load a subtile into a buffer.
  __device__ __forceinline__ void load_buffer(const CUtensorMap& map, int index,
                                              const WorkTile& work,
                                              const Subtile<Tile>& subtile) const {
    loaded(index).arrive_and_expect(kSubtileSize * sizeof(T));
    tma_load_2d(buffer(index), map, column(work, subtile), row(work, subtile), loaded(index));
  }
};

// ---- The bias of a tile's columns: of each 64, two in each lane.

template <class Tile, typename T>
struct BiasFragment {
  uint32_t pairs[Tile::kColumnBlocks];

  // Zeros beyond the matrix, and where there is no bias.
  __device__ __forceinline__ void load(const T* bias, const WorkTile& work, int columns, int lane) {
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      const int column = work.column + block * kSwizzleColumns + 2 * lane;
      pairs[block] = 0;
      if (bias != nullptr && column < columns) {
        pairs[block] = __ldg(reinterpret_cast<const uint32_t*>(bias + column));
      }
    }
  }

  // That of the lane's pair among columns 8 j to 8 j + 7 of a column block.
  __device__ __forceinline__ float2 pair(int column_block, int j, int lane) const {
    return unpack_pair<T>(__shfl_sync(0xffffffff, pairs[column_block], 4 * j + lane % 4));
  }

  // Starts the accumulators with the bias of a tile: none is left for its end.
  __device__ __forceinline__ static void load_and_fill(const T* bias, const WorkTile& work,
                                                       int columns, int lane,
                                                       Accumulators<Tile>& accumulators) {
    BiasFragment fragment;
    fragment.load(bias, work, columns, lane);
    fragment.fill(accumulators, lane);
  }

  __device__ __forceinline__ void fill(Accumulators<Tile>& accumulators, int lane) const {
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 bias = pair(block, j, lane);
#pragma unroll
        for (auto& of_block : accumulators) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            of_block[accumulator_index(block, j, half)] = bias.x;
            of_block[accumulator_index(block, j, half) + 1] = bias.y;
          }
        }
      }
    }
  }
};

}  // namespace jaxllm::hopper
