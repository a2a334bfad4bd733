// Matrix products in true float32 on Hopper: as in gemm/matmul_float32.cuh, but the copy engine
// brings the slices, so that the threads have nothing to do but multiply, and barriers of single
// slices take the place of the block's.
//
// A straight a, with the depth along its rows, lies so in shared memory too: a thread reads four
// steps of the depth of each of its rows at once. Swizzled, the rows of a warp are in different
// banks.
#pragma once

#include "common/hopper_launch.h"
#include "common/pipeline.cuh"
#include "common/tensor_map.h"
#include "common/tma.cuh"
#include "gemm/matmul_float32.cuh"

namespace jaxllm {
namespace {

struct Float32HopperTile {
  static constexpr int kRows = 128, kColumns = 256, kDepth = 32, kStages = 4;
  static constexpr int kWarpRows = 64, kWarpColumns = 64;
  static constexpr int kThreads = 256;
  static constexpr int kThreadRows = 8, kColumnQuads = 4;
  static constexpr int kStageBytes = (kRows + kColumns) * kDepth * 4;
  // A slice's buffer is filled anew by who is so many slices past it: then all are done with it.
  static constexpr int kLag = 2;
};

struct Float32HopperShared {
  using Tile = Float32HopperTile;
  float a[Tile::kStages][Tile::kRows * Tile::kDepth];
  float b[Tile::kStages][Tile::kDepth * Tile::kColumns];
  hopper::Barrier full[Tile::kStages], empty[Tile::kStages];
};

// Reads of a slice of a four steps of the depth, from `depth` on, of the eight rows of a thread.
// `first` points to its first row's.
template <bool kTurnA>
__device__ __forceinline__ void load_rows(float (&into)[4][Float32HopperTile::kThreadRows],
                                          const float* first, int depth, int swizzle) {
  using Tile = Float32HopperTile;
  if constexpr (kTurnA) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int quad = 0; quad < Tile::kThreadRows / 4; ++quad) {
        const float* const from = first + (depth + k) * Tile::kRows + quad * 32;
        *reinterpret_cast<float4*>(&into[k][4 * quad]) = *reinterpret_cast<const float4*>(from);
      }
    }
  } else {
    const float* const from = first + (depth ^ swizzle);
#pragma unroll
    for (int i = 0; i < Tile::kThreadRows; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(from + i * 8 * Tile::kDepth);
      into[0][i] = four.x, into[1][i] = four.y, into[2][i] = four.z, into[3][i] = four.w;
    }
  }
}

// Reads of a slice of b one step of the depth of the 16 columns of a thread.
__device__ __forceinline__ void load_columns(float (&into)[Float32HopperTile::kColumnQuads][4],
                                             const float* first) {
#pragma unroll
  for (int quad = 0; quad < Float32HopperTile::kColumnQuads; ++quad) {
    *reinterpret_cast<float4*>(into[quad]) = *reinterpret_cast<const float4*>(first + quad * 16);
  }
}

template <bool kTurnA>
__global__ void __launch_bounds__(Float32HopperTile::kThreads, 1)
    matmul_float32_hopper_kernel(const __grid_constant__ CUtensorMap a_map,
                                 const __grid_constant__ CUtensorMap b_map,
                                 const __grid_constant__ Float32Matmul call) {
#if __CUDA_ARCH__ >= 900
  using namespace hopper;
  using Tile = Float32HopperTile;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<Float32HopperShared*>(shared_memory);
  const auto [tile_row, tile_column] = tile_origin<Tile>(call);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int steps = static_cast<int>((call.a.depth + Tile::kDepth - 1) / Tile::kDepth);

  const auto copy = [&, row = static_cast<int>(tile_row),
                     column = static_cast<int>(tile_column)](int step) {
    const int stage = step % Tile::kStages, depth = step * Tile::kDepth;
    Barrier& full = shared.full[stage];
    full.arrive_and_expect(Tile::kStageBytes);
    tma_load_2d(shared.a[stage], a_map, kTurnA ? row : depth, kTurnA ? depth : row, full);
    tma_load_2d(shared.b[stage], b_map, column, depth, full);
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      shared.full[stage].init(1);
      shared.empty[stage].init(Tile::kThreads / 32);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int step = 0; step < min(Tile::kStages, steps); ++step) copy(step);
  }

  const int row = warp / 4 * Tile::kWarpRows + (kTurnA ? lane / 4 * 4 : lane / 4);
  const int column = warp % 4 * Tile::kWarpColumns + lane % 4 * 4;
  // The copy engine has put chunk c of four of row r's numbers to c ^ (r % 8).
  const int a_offset = kTurnA ? row : row * Tile::kDepth, swizzle = row % 8 * 4;
  float sums[Tile::kThreadRows][Tile::kColumnQuads][4] = {};
  float a[2][4][Tile::kThreadRows], b[2][Tile::kColumnQuads][4];
  PipelineState<Tile::kStages> ring;
  const float* of_a = shared.a[0] + a_offset;
  const float* of_b = shared.b[0] + column;  // of the step of the depth at hand
  int step = 0, depth = 0;
  if (steps > 0) {
    shared.full[0].wait(0);
    load_rows<kTurnA>(a[0], of_a, 0, swizzle);
    load_columns(b[0], of_b);
  }
  // Eight steps of the depth a turn: a's numbers come in fours, of which two are held.
#pragma unroll 1
  while (step < steps) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k < 7) {
        if (k == 3) load_rows<kTurnA>(a[1], of_a, depth + 4, swizzle);
        load_columns(b[(k + 1) % 2], of_b + (k + 1) * Tile::kColumns);
      } else {
        depth += 8;
        of_b += 8 * Tile::kColumns;
        if (depth == Tile::kDepth) {
          // All of this slice is in registers. On to the next one; past the last it may be any.
          arrive_as_warp(shared.empty[ring.stage]);
          ring.advance();
          ++step;
          if (threadIdx.x == 0 && step >= Tile::kLag && step - Tile::kLag + Tile::kStages < steps) {
            const int done = step - Tile::kLag;
            shared.empty[done % Tile::kStages].wait(done / Tile::kStages & 1);
            copy(done + Tile::kStages);
          }
          if (step < steps) shared.full[ring.stage].wait(ring.phase);
          of_a = shared.a[ring.stage] + a_offset;
          of_b = shared.b[ring.stage] + column;
          depth = 0;
        }
        load_rows<kTurnA>(a[0], of_a, depth, swizzle);
        load_columns(b[0], of_b);
      }
#pragma unroll
      for (int i = 0; i < Tile::kThreadRows; ++i) {
#pragma unroll
        for (int j = 0; j < 4 * Tile::kColumnQuads; ++j) {
          float& sum = sums[i][j / 4][j % 4];
          sum = fmaf(a[k / 4][k % 4][i], b[k % 2][j / 4][j % 4], sum);
        }
      }
    }
  }
  store_tile(call, sums, tile_row + row, tile_column + column,
             [](int i) { return kTurnA ? i / 4 * 32 + i % 4 : i * 8; });
#endif
}

// Encodes boxes of an operand: `size` of its side by the tile's depth.
inline cudaError_t encode_float32_map(const Float32Operand& operand, bool turned, int size,
                                      CUtensorMap* map) {
  constexpr int kDepth = Float32HopperTile::kDepth;
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  if (turned) {
    return encode_matrix_map({operand.data, operand.depth, operand.size, 4}, kType, kDepth, map,
                             size, CU_TENSOR_MAP_SWIZZLE_NONE);
  }
  return encode_matrix_map({operand.data, operand.size, operand.depth, 4}, kType, size, map,
                           kDepth);
}

// b has the depth across its rows. Returns cudaErrorNotSupported where the GPU is no Hopper, or the
// copy engine cannot address a factor.
template <bool kTurnA>
cudaError_t launch_matmul_float32_hopper(cudaStream_t stream, Float32Matmul call) {
  using Tile = Float32HopperTile;
  const auto kernel = matmul_float32_hopper_kernel<kTurnA>;
  constexpr int kBytes = sizeof(Float32HopperShared);
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(find_hopper_kernel(kernel, &limits));
  CUtensorMap a_map, b_map;
  JAXLLM_RETURN_IF_ERROR(encode_float32_map(call.a, kTurnA, Tile::kRows, &a_map));
  JAXLLM_RETURN_IF_ERROR(encode_float32_map(call.b, true, Tile::kColumns, &b_map));
  const int64_t row_tiles = divide_up(call.a.size, Tile::kRows);
  const int64_t tiles = row_tiles * divide_up(call.b.size, Tile::kColumns);
  if (tiles >= int64_t{1} << 31) return cudaErrorNotSupported;
  call.row_tiles = static_cast<int>(row_tiles);
  const Launch launch{dim3(static_cast<unsigned>(tiles)), dim3(Tile::kThreads), kBytes};
  return launch_kernel(stream, kernel, launch, a_map, b_map, call);
}

}  // namespace
}  // namespace jaxllm
