// Mainloop of the float32 GEMM on CUDA cores: cp.async loads K-blocks of a and b into a pipeline of
// kStages stages, and each thread multiplies a tile of its own in registers.
//
// In shared memory both operands are MN-major, so a thread loads four neighbours of either at once.
// The fragments of step k + 1 load while those of step k multiply: the FFMAs of a thread wait for
// nothing else.
#pragma once

#include <cstdint>

#include "common/cp_async.cuh"
#include "gemm/gemm_loader.cuh"

namespace jaxllm {
namespace {

// A warp has 8 x 4 threads. A thread has kRowQuads x kColumnQuads quads of 4 x 4 outputs, 32 rows
// and 16 columns apart:
//
//   columns    0..3   4..7   8..11  12..15 | 16..19 ...
//   rows 0..3  lane 0 lane 1 lane 2 lane 3 | lane 0
//   rows 4..7  lane 4 ...
template <int kBlockM_, int kBlockN_, int kWarpM_, int kWarpN_, int kBlockK_, int kStages_,
          int kMinCtas_>
struct Float32Tile {
  static constexpr int kBlockM = kBlockM_, kBlockN = kBlockN_, kBlockK = kBlockK_;
  static constexpr int kWarpM = kWarpM_, kWarpN = kWarpN_, kStages = kStages_;
  static constexpr int kMinCtas = kMinCtas_;  // that run on an SM at once
  static constexpr int kRowQuads = kWarpM / 32, kColumnQuads = kWarpN / 16;
  static constexpr int kWarpsN = kBlockN / kWarpN;
  static constexpr int kThreads = kBlockM / kWarpM * kWarpsN * 32;
  // Padded by four: copies of single elements then have few bank conflicts.
  static constexpr int kStrideA = kBlockM + 4, kStrideB = kBlockN + 4;
  static constexpr int kStageFloats = kBlockK * (kStrideA + kStrideB);
  static constexpr int kSmemBytes = kStages * kStageFloats * 4;

  using Accumulator = float[4 * kRowQuads][kColumnQuads][4];
  template <int kExtent, int kStride, bool kMnMajor>
  using Loader = KBlockLoader<float, kExtent, kBlockK, kStride, kThreads, kMnMajor,
                              /*kTranspose=*/!kMnMajor, /*kSingles=*/true>;
};

// Loads kQuads quads of a row, kApart floats apart.
template <int kApart, int kQuads>
__device__ __forceinline__ void load_quads(float (&quads)[kQuads][4], const float* row) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    *reinterpret_cast<float4*>(quads[i]) = *reinterpret_cast<const float4*>(row + i * kApart);
  }
}

template <class Tile>
struct Float32Fragments {
  float a[Tile::kRowQuads][4], b[Tile::kColumnQuads][4];
};

// Adds to the accumulator the products of a thread whose first output is (row, column) of the tile.
template <class Tile, bool kMnMajorA, bool kMnMajorB>
__device__ __forceinline__ void float32_mainloop(const GemmParams<float>& params,
                                                 const TileOrigin& origin, int row, int column,
                                                 float* stages,
                                                 typename Tile::Accumulator& accumulator) {
  typename Tile::template Loader<Tile::kBlockM, Tile::kStrideA, kMnMajorA> load_a(params.a,
                                                                                  origin.row);
  typename Tile::template Loader<Tile::kBlockN, Tile::kStrideB, kMnMajorB> load_b(params.b,
                                                                                  origin.column);
  const auto load_stage = [&](int k_block, int stage) {
    float* const block_a = stages + stage * Tile::kStageFloats;
    load_a.load_next(block_a, int64_t{k_block} * Tile::kBlockK);
    load_b.load_next(block_a + Tile::kBlockK * Tile::kStrideA, int64_t{k_block} * Tile::kBlockK);
  };

  const int k_blocks = static_cast<int>((params.a.depth + Tile::kBlockK - 1) / Tile::kBlockK);
#pragma unroll 1
  for (int k_block = 0; k_block < Tile::kStages - 1; ++k_block) {
    if (k_block < k_blocks) load_stage(k_block, k_block);
    cp_async_commit();
  }
  cp_async_wait<Tile::kStages - 2>();
  __syncthreads();

  Float32Fragments<Tile> fragments[2];
  const auto load_fragments = [&](Float32Fragments<Tile>& into, int stage, int k) {
    const float* const block_a = stages + stage * Tile::kStageFloats;
    const float* const block_b = block_a + Tile::kBlockK * Tile::kStrideA;
    load_quads<32>(into.a, block_a + k * Tile::kStrideA + row);
    load_quads<16>(into.b, block_b + k * Tile::kStrideB + column);
  };
  int stage = 0, free_stage = Tile::kStages - 1;
  load_fragments(fragments[0], stage, 0);
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    if (k_block + Tile::kStages - 1 < k_blocks) {
      load_stage(k_block + Tile::kStages - 1, free_stage);
    }
    cp_async_commit();
    free_stage = stage;
#pragma unroll
    for (int k = 0; k < Tile::kBlockK; ++k) {
      if (k == Tile::kBlockK - 1) {
        // All threads have the last fragments of this stage, and the next stage is full.
        cp_async_wait<Tile::kStages - 2>();
        __syncthreads();
        stage = stage + 1 == Tile::kStages ? 0 : stage + 1;
      }
      const Float32Fragments<Tile>& now = fragments[k % 2];
      load_fragments(fragments[(k + 1) % 2], stage, (k + 1) % Tile::kBlockK);
#pragma unroll
      for (int i = 0; i < 4 * Tile::kRowQuads; ++i) {
#pragma unroll
        for (int j = 0; j < 4 * Tile::kColumnQuads; ++j) {
          float& c = accumulator[i][j / 4][j % 4];
          c = fmaf(now.a[i / 4][i % 4], now.b[j / 4][j % 4], c);
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxllm
