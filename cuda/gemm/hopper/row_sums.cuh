// Reductions of whole rows across CTAs, in an epilogue.
//
// The tiles of a row are with several SMs at the same time (RowAtOnceScheduler). A tile leaves its
// part of two sums of each row in global memory, and every tile of the row then adds up all parts:
//
//   tile 0   sums -> |st|          all tiles: ld parts 0, 1, ... until none is the sentinel
//   tile 1   sums -> |st|
//
// The workspace is filled with a sentinel beforehand. docs/waits.md says why this cannot deadlock.
#pragma once

#include "gemm/hopper/epilogue_source.cuh"

namespace jaxllm::hopper {

// Bits of a NaN that no arithmetic makes; each byte is 0xff, so that cudaMemsetAsync can write it.
inline constexpr uint32_t kRowSumSentinel = 0xffffffff;

struct RowSumParams {
  const float* rstd;  // of each row
  float* sums;        // by tile, warp and row: two each
  int rows, columns, column_tiles;
};

// A warp of an epilogue that reduces rows. It has 32 rows of a tile, 16 of each row block, and lane
// i keeps what belongs to the i-th of them.
template <class Tile, typename T>
struct EpilogueRows : EpilogueSource<Tile, T> {
  static constexpr int kRowSums = 64;  // floats of a warp in a tile: two sums of 32 rows

  float rstd;  // of the lane's row

  static int64_t workspace_floats(const GemmShape& shape) {
    constexpr int64_t kClusterRows = Tile::kBlockM * Tile::kClusterM;
    return divide_up(shape.rows, kClusterRows) * kClusterRows *
           divide_up(shape.columns, Tile::kBlockN) * 2;
  }

  static RowSumParams to_row_params(const GemmShape& shape, const float* rstd, float* sums) {
    static_assert(Tile::kClusterN == 1);
    return {rstd, sums, static_cast<int>(shape.rows), static_cast<int>(shape.columns),
            static_cast<int>(divide_up(shape.columns, Tile::kBlockN))};
  }

  __device__ __forceinline__ int row_of_lane(const WorkTile& work) const {
    return this->row(work, {this->lane / kSubtileRows}) + this->lane % kSubtileRows;
  }

  __device__ __forceinline__ void load_rstd(const RowSumParams& params, const WorkTile& work) {
    const int row = row_of_lane(work);
    rstd = row < params.rows ? __ldg(params.rstd + row) : 1.0f;
  }

  // A lane's value as the accumulators have rows: that of row lane / 4, or (`half`) 8 below, of a
  // row block.
  __device__ __forceinline__ float value_of_row(float value, int row_block, int half) const {
    return __shfl_sync(0xffffffff, value, kSubtileRows * row_block + 8 * half + this->lane / 4);
  }

  // Adds up what the four lanes of a row have of it.
  __device__ __forceinline__ static float sum_over_lanes_of_row(float sum) {
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    return sum + __shfl_xor_sync(0xffffffff, sum, 2);
  }

  // Leaves this tile's two sums of each row; the four lanes of a row have both.
  __device__ __forceinline__ void leave_row_sums(const RowSumParams& params, const WorkTile& work,
                                                 const float (&first)[Tile::kRowBlocks][2],
                                                 const float (&second)[Tile::kRowBlocks][2]) const {
    if (this->lane % 4 > 0) return;
    float* const of_tile =
        sums_of_warp(params, work) + work.column / Tile::kBlockN * 4 * kRowSums + this->lane;
#pragma unroll
    for (int block = 0; block < Tile::kRowBlocks; ++block) {
      asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                       of_tile + block * (kRowSums / 2)),
                   "f"(first[block][0]), "f"(second[block][0]), "f"(first[block][1]),
                   "f"(second[block][1])
                   : "memory");
    }
  }

  // Calls visit(two sums, tile) for what each tile of a row has left of the lane's row, in the
  // order of the columns.
  template <class Visit>
  __device__ __forceinline__ void visit_row_sums(const RowSumParams& params, const WorkTile& work,
                                                 const Visit& visit) const {
    const float* const mine = sums_of_warp(params, work) +
                              this->lane / kSubtileRows * (kRowSums / 2) + this->lane % 8 * 4 +
                              this->lane / 8 % 2 * 2;
    constexpr int kAtOnce = 4;
    for (int first = 0; first < params.column_tiles; first += kAtOnce) {
      float2 sums[kAtOnce] = {};
      bool is_missing;
      do {
        is_missing = false;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i >= params.column_tiles) break;
          asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
                       : "=f"(sums[i].x), "=f"(sums[i].y)
                       : "l"(mine + (first + i) * 4 * kRowSums)
                       : "memory");
        }
#pragma unroll
        for (const float2& sum : sums) {
          is_missing |= __float_as_uint(sum.x) == kRowSumSentinel ||
                        __float_as_uint(sum.y) == kRowSumSentinel;
        }
        // A fraction of what a load takes: time for the CTA's other warps.
        if (is_missing) __nanosleep(64);
      } while (is_missing);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < params.column_tiles) visit(sums[i], first + i);
      }
    }
    __syncwarp();
  }

 private:
  // The warp's sums in the tiles of a row, from the first column on, 4 kRowSums apart.
  __device__ __forceinline__ float* sums_of_warp(const RowSumParams& params,
                                                 const WorkTile& work) const {
    const int64_t first_tile = int64_t{work.row / Tile::kBlockM} * params.column_tiles;
    return params.sums + (first_tile * 4 + this->warp) * kRowSums;
  }
};

}  // namespace jaxllm::hopper
