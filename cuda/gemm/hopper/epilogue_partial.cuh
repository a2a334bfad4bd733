// The accumulators of a part of a tile, in float32 and in their own order, for StreamKScheduler. A
// second kernel adds the parts of a tile.
//
//   part         consumer, warp, row block (of 64), half (row 0 or 8), 8 columns: 64 floats each
//   64 floats    8 rows x 8 columns, two neighbours in each lane
#pragma once

#include "gemm/hopper/epilogue.cuh"

namespace jaxllm::hopper {

struct NoStorage {
  __device__ __forceinline__ void init() {}
};

template <class Tile, typename T>
struct EpiloguePartial : EpilogueWarp<Tile, T, NoStorage> {
  static constexpr int kPartSize = Tile::kBlockM * Tile::kBlockN;

  struct Params {
    float* partial;  // (parts, kPartSize)
  };

  const Params& params;

  // Where the 64 floats of a part begin that have columns 8 j to 8 j + 7.
  __host__ __device__ __forceinline__ static constexpr int offset(int consumer, int warp,
                                                                  int row_block, int half, int j) {
    return ((((consumer * 4 + warp) * Tile::kRowBlocks + row_block) * 2 + half) *
                (Tile::kBlockN / 8) +
            j) *
           64;
  }

  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& work,
                                        const WorkTile&, bool) const {
    float* const out = params.partial + int64_t{work.part} * kPartSize +
                       offset(this->consumer, this->warp, 0, 0, 0) + 2 * this->lane;
    for_each_subtile<Tile>([&](const Subtile<Tile>& subtile) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int at = offset(0, 0, subtile.row_block(), half, 8 * subtile.column_block() + j);
          *reinterpret_cast<float2*>(out + at) =
              accumulator_pair<Tile>(accumulators, subtile, j, half);
        }
      }
    });
  }
};

}  // namespace jaxllm::hopper
