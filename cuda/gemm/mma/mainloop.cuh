// Mainloop of the tensor-core GEMM for sm_80: cp.async loads K-blocks of a and b into a pipeline of
// kStages stages, and mma.sync multiplies them, in 16 bits or in TF32.
//
// A K-block in shared memory has the major of its operand in global memory. The padding puts the
// eight rows that ldmatrix reads 16 bytes of into different banks:
//
//   K-major                                MN-major
//   kExtent rows of kBlockK + 16 bytes     kBlockK rows of kExtent + 8 elements
#pragma once

#include <cstdint>

#include "common/cp_async.cuh"
#include "common/fragment.cuh"
#include "common/mma.cuh"
#include "gemm/gemm_loader.cuh"

namespace jaxllm {
namespace {

// A CTA tile of 128 x 128, and 64 x 64 of it for each of four warps.
template <typename T>
struct MmaTile {
  static constexpr int kExtent = 128, kBlockM = kExtent, kBlockN = kExtent;
  static constexpr int kWarpM = 64, kWarpN = 64, kThreads = 128, kStages = 4;
  static constexpr int kBlockK = 64 / sizeof(T);
  static constexpr int kMmaK = 32 / sizeof(T);
  static constexpr int kVector = 16 / sizeof(T);  // elements of a 16-byte copy
  static constexpr int kMmasM = kWarpM / 16, kMmasN = kWarpN / 8;

  // From one row of a K-block to the next, and of all its rows, in elements.
  __host__ __device__ static constexpr int stride(bool mn_major) {
    return mn_major ? kExtent + 8 : kBlockK + kVector;
  }
  __host__ __device__ static constexpr int block_elements(bool mn_major) {
    return (mn_major ? kBlockK : kExtent) * stride(mn_major);
  }
  static constexpr int smem_bytes(bool mn_major_a, bool mn_major_b) {
    return kStages * (block_elements(mn_major_a) + block_elements(mn_major_b)) * int{sizeof(T)};
  }

  using Accumulator = float[kMmasM][kMmasN][4];
  template <bool kMnMajor>
  using Loader = KBlockLoader<T, kExtent, kBlockK, stride(kMnMajor), kThreads, kMnMajor,
                              /*kTranspose=*/false, /*kSingles=*/false>;
};

// To the nearest TF32, which has 10 bits of mantissa.
__device__ __forceinline__ uint32_t round_to_tf32(float x) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}

// Loads 16 of the extent by one MMA's K: four matrices of 8 x 16 bytes.
//
//            a:  k ->               b:  k ->
//   extent   0 2                    0 1
//            1 3                    2 3
template <bool kMnMajor, bool kIsA, typename T>
__device__ __forceinline__ void load_fragment(uint32_t (&fragment)[4], const T* block, int mn,
                                              int k) {
  using Tile = MmaTile<T>;
  constexpr int kStride = Tile::stride(kMnMajor);
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 4 && kMnMajor) {  // ldmatrix transposes 16-bit elements only
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int mn_half = kIsA ? i % 2 : i / 2, k_half = kIsA ? i / 2 : i % 2;
      fragment[i] = __float_as_uint(
          block[(k + k_half * 4 + lane % 4) * kStride + mn + mn_half * 8 + lane / 4]);
    }
  } else {
    const int low_bit = lane / 8 % 2, high_bit = lane / 16;
    const int mn_half = kIsA ? low_bit : high_bit, k_half = kIsA ? high_bit : low_bit;
    if constexpr (kMnMajor) {
      ldmatrix_transposed(
          fragment, smem_address(block + (k + k_half * 8 + lane % 8) * kStride + mn + mn_half * 8));
    } else {
      ldmatrix(fragment, smem_address(block + (mn + mn_half * 8 + lane % 8) * kStride + k +
                                      k_half * Tile::kVector));
    }
  }
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (uint32_t& word : fragment) word = round_to_tf32(__uint_as_float(word));
  }
}

// Adds to the accumulator the product of this warp's rows and columns of the CTA tile.
template <bool kMnMajorA, bool kMnMajorB, typename T>
__device__ __forceinline__ void mma_mainloop(const GemmParams<T>& params, const TileOrigin& origin,
                                             int warp_row, int warp_column, T* stages,
                                             typename MmaTile<T>::Accumulator& accumulator) {
  using Tile = MmaTile<T>;
  constexpr int kBlockA = Tile::block_elements(kMnMajorA);
  constexpr int kStage = kBlockA + Tile::block_elements(kMnMajorB);
  const int64_t depth = params.a.depth;
  const int k_blocks = static_cast<int>((depth + Tile::kBlockK - 1) / Tile::kBlockK);
  typename Tile::template Loader<kMnMajorA> load_a(params.a, origin.row);
  typename Tile::template Loader<kMnMajorB> load_b(params.b, origin.column);
  const auto load_stage = [&](int k_block) {
    if (k_block < k_blocks) {
      T* const stage = stages + k_block % Tile::kStages * kStage;
      load_a.load_next(stage, int64_t{k_block} * Tile::kBlockK);
      load_b.load_next(stage + kBlockA, int64_t{k_block} * Tile::kBlockK);
    }
    cp_async_commit();
  };

#pragma unroll 1
  for (int k_block = 0; k_block < Tile::kStages - 1; ++k_block) load_stage(k_block);
#pragma unroll 1
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    cp_async_wait<Tile::kStages - 2>();
    __syncthreads();
    load_stage(k_block + Tile::kStages - 1);
    const T* const block_a = stages + k_block % Tile::kStages * kStage;
    const T* const block_b = block_a + kBlockA;
#pragma unroll
    for (int k = 0; k < Tile::kBlockK; k += Tile::kMmaK) {
      uint32_t a[Tile::kMmasM][4], b[Tile::kMmasN / 2][4];
#pragma unroll
      for (int i = 0; i < Tile::kMmasM; ++i) {
        load_fragment<kMnMajorA, true>(a[i], block_a, warp_row + 16 * i, k);
      }
#pragma unroll
      for (int j = 0; j < Tile::kMmasN / 2; ++j) {
        load_fragment<kMnMajorB, false>(b[j], block_b, warp_column + 16 * j, k);
      }
#pragma unroll
      for (int i = 0; i < Tile::kMmasM; ++i) {
#pragma unroll
        for (int j = 0; j < Tile::kMmasN; ++j) {
          const uint32_t b0 = b[j / 2][j % 2 * 2], b1 = b[j / 2][j % 2 * 2 + 1];
          if constexpr (sizeof(T) == 4) {
            mma_m16n8k8_tf32(accumulator[i][j], a[i], b0, b1);
          } else {
            mma_m16n8k16<T>(accumulator[i][j], a[i], b0, b1);
          }
        }
      }
    }
  }
  cp_async_wait_all();
}

}  // namespace
}  // namespace jaxllm
