// GEMV of up to 16 rows of x on tensor cores.
#pragma once

#include "common/convert_int8.cuh"
#include "common/dependent_launch.cuh"
#include "common/mma.cuh"
#include "gemm/matvec/pipeline.cuh"

namespace jaxllm {

constexpr int kMatvecMmaWarps = 8, kMatvecMmaStages = 4;

// The weights are the MMA's `a`, 16 rows of a tile; x is its `b`, eight rows of it a fragment. An
// MMA may take the columns of K in any order, so lane 4 r + c takes chunk c, 16 neighbouring bytes,
// of weight rows r and r + 8, and the elements of row r of x that these multiply.
template <int kFragments, typename T, typename W, class Epilogue>
__global__ void __launch_bounds__(32 * kMatvecMmaWarps, 2)
    matvec_mma_kernel(const MatvecParams<T, W> p, const Epilogue epilogue) {
  constexpr int kPerLane = 16 / sizeof(W);
  __shared__ float4 partial[2][kMatvecMmaWarps][kFragments][32];
  __shared__ float squares[8 * kFragments][kMatvecMmaWarps];
  extern __shared__ __align__(128) char smem[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
  const int width = p.width, rows = p.rows;
  MatvecStage* stages = reinterpret_cast<MatvecStage*>(smem);
  launch_dependent_grids();
  const KSlice slice = {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), warp,
                        kMatvecMmaWarps};
  MatvecPipeline<kMatvecMmaStages, MatvecParams<T, W>, Epilogue> pipeline(
      p, epilogue, slice, stages + warp * kMatvecMmaStages);
  pipeline.fill();
  wait_on_dependent_grids();
  const T* x = p.x;
  if (p.norm != nullptr) {
    x = scale_rows(p, reinterpret_cast<T*>(stages + kMatvecMmaWarps * kMatvecMmaStages),
                   &squares[0][0], kMatvecMmaWarps);
  }

  int buffer = 0;
  for (int tile = slice.first_tile; tile < pipeline.tiles; tile += slice.tile_stride, buffer ^= 1) {
    float accumulator[kFragments][4] = {};
    for (int k_block = warp; k_block < pipeline.k_blocks; k_block += kMatvecMmaWarps) {
      Pack<T, kPerLane> factors[2][kFragments] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = (k_block * 8 + half * 4 + c) * kPerLane;
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          if (f * 8 + r >= rows || column >= width) continue;
          factors[half][f] = load<kPerLane>(x + int64_t{f * 8 + r} * width + column);
        }
      }
      const MatvecStage& stage = pipeline.next();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 words[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          words[h] = *reinterpret_cast<const uint4*>(stage.bytes +
                                                     MatvecStage::offset(r + 8 * h, half * 4 + c));
        }
        const uint32_t *low = &words[0].x, *high = &words[1].x;
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          const uint32_t* factor = factors[half][f].words;
          float products[4] = {};
          float (&target)[4] = sizeof(W) == 1 ? products : accumulator[f];
#pragma unroll
          for (int i = 0; i < kPerLane; i += 4) {
            mma_m16n8k16<T>(target,
                            {row_pair<T, W>(low, i), row_pair<T, W>(high, i),
                             row_pair<T, W>(low, i + 2), row_pair<T, W>(high, i + 2)},
                            factor[i / 2], factor[i / 2 + 1]);
          }
          if constexpr (sizeof(W) == 1) {
            // The four lanes of a row, whose products the MMA has added, have one group.
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              accumulator[f][i] += stage.scales[r + i / 2 * 8][half] * products[i];
            }
          }
        }
      }
    }

#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      partial[buffer][warp][f][lane] = reinterpret_cast<const float4&>(accumulator[f]);
    }
    __syncthreads();
    // A thread for each pair and row of x. Lane 4 r + c has rows 2 c and 2 c + 1 of x.
    for (int i = threadIdx.x; i < 64 * kFragments; i += 32 * kMatvecMmaWarps) {
      const int f = i / 64, tile_pair = i % 64 / 8, column = i % 8, row = f * 8 + column;
      const int64_t pair = int64_t{tile} * kTilePairs + tile_pair;
      if (row >= rows || pair >= epilogue.pairs()) continue;
      float first = 0.0f, second = 0.0f;
#pragma unroll
      for (int w = 0; w < kMatvecMmaWarps; ++w) {
        const float* share =
            reinterpret_cast<const float*>(&partial[buffer][w][f][4 * tile_pair + column / 2]);
        first += share[column % 2];
        second += share[2 + column % 2];
      }
      if (p.norm != nullptr) {
        const float factor = rstd(p, squares[row], kMatvecMmaWarps);
        first *= factor;
        second *= factor;
      }
      epilogue.store(pair, row, first, second);
    }
  }
}

}  // namespace jaxllm
