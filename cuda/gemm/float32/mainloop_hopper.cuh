// The float32 GEMM on Hopper: TMA loads the K-blocks, so the threads do nothing but multiply, and
// full and empty barriers replace those of the CTA.
//
// A K-major a stays K-major in shared memory: a thread loads four steps of K of each of its eight
// rows at once. The 128-byte swizzle puts the rows of a warp into different banks.
#pragma once

#include "common/hopper_launch.h"
#include "common/pipeline.cuh"
#include "common/tensor_map.h"
#include "common/tma.cuh"
#include "gemm/float32/epilogue.cuh"
#include "gemm/float32/mainloop.cuh"

namespace jaxllm {
namespace {

struct Float32HopperTile {
  static constexpr int kBlockM = 128, kBlockN = 256, kBlockK = 32, kStages = 4;
  static constexpr int kWarpM = 64, kWarpN = 64, kThreads = 256;
  static constexpr int kThreadRows = 8, kColumnQuads = 4;
  static constexpr int kStageBytes = (kBlockM + kBlockN) * kBlockK * 4;
  // Thread 0 refills a stage so many K-blocks later: by then all warps have released it.
  static constexpr int kRefillLag = 2;
};

struct Float32HopperSmem {
  using Tile = Float32HopperTile;
  float a[Tile::kStages][Tile::kBlockM * Tile::kBlockK];
  float b[Tile::kStages][Tile::kBlockK * Tile::kBlockN];
  hopper::Pipeline<Tile::kStages> pipeline;
};

// Loads four steps of K, from k on, of a thread's eight rows of a. `first` is its first row of the
// K-block.
template <bool kMnMajorA>
__device__ __forceinline__ void load_rows(float (&into)[4][Float32HopperTile::kThreadRows],
                                          const float* first, int k, int swizzle) {
  using Tile = Float32HopperTile;
  if constexpr (kMnMajorA) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_quads<32>(reinterpret_cast<float (&)[Tile::kThreadRows / 4][4]>(into[i]),
                     first + (k + i) * Tile::kBlockM);
    }
  } else {
    const float* const from = first + (k ^ swizzle);
#pragma unroll
    for (int i = 0; i < Tile::kThreadRows; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(from + i * 8 * Tile::kBlockK);
      into[0][i] = four.x, into[1][i] = four.y, into[2][i] = four.z, into[3][i] = four.w;
    }
  }
}

template <bool kMnMajorA>
__global__ void __launch_bounds__(Float32HopperTile::kThreads, 1)
    matmul_float32_hopper_kernel(const __grid_constant__ CUtensorMap a_map,
                                 const __grid_constant__ CUtensorMap b_map,
                                 const __grid_constant__ GemmParams<float> params) {
#if __CUDA_ARCH__ >= 900
  using namespace hopper;
  using Tile = Float32HopperTile;
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  auto& smem = *reinterpret_cast<Float32HopperSmem*>(smem_bytes);
  const auto [tile_row, tile_column] = tile_origin<Tile>(params);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int k_blocks = static_cast<int>((params.a.depth + Tile::kBlockK - 1) / Tile::kBlockK);

  const auto load_stage = [&, row = static_cast<int>(tile_row),
                           column = static_cast<int>(tile_column)](int k_block) {
    const int stage = k_block % Tile::kStages, k = k_block * Tile::kBlockK;
    Barrier& full = smem.pipeline.full[stage];
    full.arrive_and_expect(Tile::kStageBytes);
    tma_load_2d(smem.a[stage], a_map, kMnMajorA ? row : k, kMnMajorA ? k : row, full);
    tma_load_2d(smem.b[stage], b_map, column, k, full);
  };
  if (threadIdx.x == 0) {
    smem.pipeline.init(1, Tile::kThreads / 32);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int k_block = 0; k_block < min(Tile::kStages, k_blocks); ++k_block) load_stage(k_block);
  }

  const int row = warp / 4 * Tile::kWarpM + (kMnMajorA ? lane / 4 * 4 : lane / 4);
  const int column = warp % 4 * Tile::kWarpN + lane % 4 * 4;
  // TMA has put chunk c of four floats of row r at c ^ (r % 8).
  const int a_offset = kMnMajorA ? row : row * Tile::kBlockK, swizzle = row % 8 * 4;
  float accumulator[Tile::kThreadRows][Tile::kColumnQuads][4] = {};
  float a[2][4][Tile::kThreadRows], b[2][Tile::kColumnQuads][4];
  PipelineState<Tile::kStages> state;
  const float* block_a = smem.a[0] + a_offset;
  const float* block_b = smem.b[0] + column;  // of the step of K at hand
  int k_block = 0, k0 = 0;
  if (k_blocks > 0) {
    smem.pipeline.consumer_wait(state);
    load_rows<kMnMajorA>(a[0], block_a, 0, swizzle);
    load_quads<16>(b[0], block_b);
  }
  // Eight steps of K at once: a comes in fours, of which the registers hold two.
#pragma unroll 1
  while (k_block < k_blocks) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (k < 7) {
        if (k == 3) load_rows<kMnMajorA>(a[1], block_a, k0 + 4, swizzle);
        load_quads<16>(b[(k + 1) % 2], block_b + (k + 1) * Tile::kBlockN);
      } else {
        k0 += 8;
        block_b += 8 * Tile::kBlockN;
        if (k0 == Tile::kBlockK) {
          // All of this stage is in registers. Past the last K-block the next stage may hold
          // anything: nothing multiplies it.
          smem.pipeline.consumer_release(state.stage);
          state.advance();
          ++k_block;
          const int done = k_block - Tile::kRefillLag;
          if (threadIdx.x == 0 && done >= 0 && done + Tile::kStages < k_blocks) {
            smem.pipeline.empty[done % Tile::kStages].wait(done / Tile::kStages & 1);
            load_stage(done + Tile::kStages);
          }
          if (k_block < k_blocks) smem.pipeline.consumer_wait(state);
          block_a = smem.a[state.stage] + a_offset;
          block_b = smem.b[state.stage] + column;
          k0 = 0;
        }
        load_rows<kMnMajorA>(a[0], block_a, k0, swizzle);
        load_quads<16>(b[0], block_b);
      }
#pragma unroll
      for (int i = 0; i < Tile::kThreadRows; ++i) {
#pragma unroll
        for (int j = 0; j < 4 * Tile::kColumnQuads; ++j) {
          float& c = accumulator[i][j / 4][j % 4];
          c = fmaf(a[k / 4][k % 4][i], b[k % 2][j / 4][j % 4], c);
        }
      }
    }
  }
  float32_epilogue(params, accumulator, tile_row + row, tile_column + column,
                   [](int i) { return kMnMajorA ? i / 4 * 32 + i % 4 : i * 8; });
#endif
}

// Encodes boxes of `extent` x kBlockK of an operand.
inline cudaError_t encode_float32_map(const GemmOperand<float>& operand, bool mn_major, int extent,
                                      CUtensorMap* map) {
  constexpr int kBlockK = Float32HopperTile::kBlockK;
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  if (mn_major) {
    return encode_matrix_map({operand.data, operand.depth, operand.extent, 4}, kType, kBlockK, map,
                             extent, CU_TENSOR_MAP_SWIZZLE_NONE);
  }
  return encode_matrix_map({operand.data, operand.extent, operand.depth, 4}, kType, extent, map,
                           kBlockK);
}

// b is MN-major. Returns cudaErrorNotSupported where the GPU is not a Hopper or TMA cannot address
// an operand.
template <bool kMnMajorA>
cudaError_t launch_matmul_float32_hopper(cudaStream_t stream, const GemmParams<float>& params) {
  using Tile = Float32HopperTile;
  const auto kernel = matmul_float32_hopper_kernel<kMnMajorA>;
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(find_hopper_kernel(kernel, &limits));
  CUtensorMap a_map, b_map;
  JAXLLM_RETURN_IF_ERROR(encode_float32_map(params.a, kMnMajorA, Tile::kBlockM, &a_map));
  JAXLLM_RETURN_IF_ERROR(encode_float32_map(params.b, true, Tile::kBlockN, &b_map));
  return launch_tiles<Tile>(stream, kernel, sizeof(Float32HopperSmem), params, a_map, b_map);
}

}  // namespace
}  // namespace jaxllm
