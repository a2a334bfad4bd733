// The product of a matrix and up to sixteen rows of x, on tensor cores.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/mma.cuh"
#include "common/widen.cuh"
#include "gemm/matvec_ring.cuh"

namespace jaxllm {

constexpr int kManyRowsWarps = 8, kManyRowsStages = 4;

// x is the other factor of the tensor cores, eight rows of it a fragment. In what order the columns
// are multiplied does not matter: lane 4 r + c takes 16 neighbouring bytes of rows r and r + 8 of a
// tile, and what they are multiplied with of row r of x.
template <int kFragments, typename T, typename W, class Epilogue>
__global__ void __launch_bounds__(32 * kManyRowsWarps, 2)
    matvec_many_rows_kernel(const MatvecArguments<T, W> a, const Epilogue epilogue) {
  constexpr int kPerLane = 16 / sizeof(W);
  __shared__ float4 partial[2][kManyRowsWarps][kFragments][32];
  __shared__ float squares[8 * kFragments][kManyRowsWarps];
  extern __shared__ __align__(128) char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
  const int width = a.width, rows = a.rows;
  Piece* rings = reinterpret_cast<Piece*>(memory);
  launch_dependent_grids();
  const MatrixTeam team = {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), warp,
                           kManyRowsWarps};
  MatrixRing<kManyRowsStages, MatvecArguments<T, W>, Epilogue> ring(a, epilogue, team,
                                                                    rings + warp * kManyRowsStages);
  ring.fill();
  wait_on_dependent_grids();
  const T* x = a.x;
  if (a.norm != nullptr) {
    x = normalize(a, reinterpret_cast<T*>(rings + kManyRowsWarps * kManyRowsStages), &squares[0][0],
                  kManyRowsWarps);
  }

  int buffer = 0;
  for (int tile = team.first_tile; tile < ring.tiles; tile += team.stride, buffer ^= 1) {
    float sums[kFragments][4] = {};
    for (int at = warp; at < ring.pieces; at += kManyRowsWarps) {
      // x, of which each sixteen bytes of the matrix need one row's share.
      uint32_t factors[2][kFragments][kPerLane / 2] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = (at * 8 + half * 4 + c) * kPerLane;
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          if (f * 8 + r >= rows || column >= width) continue;
#pragma unroll
          for (int i = 0; i < kPerLane / 8; ++i) {
            const uint4 found =
                *reinterpret_cast<const uint4*>(x + (f * 8 + r) * width + column + 8 * i);
            uint32_t* factor = factors[half][f] + 4 * i;
            factor[0] = found.x, factor[1] = found.y, factor[2] = found.z, factor[3] = found.w;
          }
        }
      }
      const Piece& piece = ring.next();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t words[2][4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint4 found =
              *reinterpret_cast<const uint4*>(piece.bytes + Piece::place(r + 8 * h, half * 4 + c));
          words[h][0] = found.x, words[h][1] = found.y;
          words[h][2] = found.z, words[h][3] = found.w;
        }
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          const uint32_t* factor = factors[half][f];
          float products[4] = {};
          float (&target)[4] = sizeof(W) == 1 ? products : sums[f];
#pragma unroll
          for (int i = 0; i < kPerLane; i += 4) {
            mma_m16n8k16<T>(target,
                            {neighbours<T, W>(words[0], i), neighbours<T, W>(words[1], i),
                             neighbours<T, W>(words[0], i + 2), neighbours<T, W>(words[1], i + 2)},
                            factor[i / 2], factor[i / 2 + 1]);
          }
          if constexpr (sizeof(W) == 1) {
            // The products are sums over the four lanes of a row, all of one group.
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              sums[f][i] += piece.scales[r + i / 2 * 8][half] * products[i];
            }
          }
        }
      }
    }

#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      partial[buffer][warp][f][lane] = make_float4(sums[f][0], sums[f][1], sums[f][2], sums[f][3]);
    }
    __syncthreads();
    // A thread for each pair and row of x. Lane 4 r + c has rows 2 c and 2 c + 1 of x.
    for (int i = threadIdx.x; i < 64 * kFragments; i += 32 * kManyRowsWarps) {
      const int f = i / 64, of_pair = i % 64 / 8, column = i % 8, row = f * 8 + column;
      const int64_t pair = int64_t{tile} * kTilePairs + of_pair;
      if (row >= rows || pair >= epilogue.pairs()) continue;
      float first = 0.0f, second = 0.0f;
#pragma unroll
      for (int w = 0; w < kManyRowsWarps; ++w) {
        const float* of_lane =
            reinterpret_cast<const float*>(&partial[buffer][w][f][4 * of_pair + column / 2]);
        first += of_lane[column % 2];
        second += of_lane[2 + column % 2];
      }
      if (a.norm != nullptr) {
        const float factor = rstd(a, squares[row], kManyRowsWarps);
        first *= factor;
        second *= factor;
      }
      epilogue.store(pair, row, first, second);
    }
  }
}

}  // namespace jaxllm
