// The mainloop of GEMMs with 8-bit floats, e4m3 or e5m2. Both operands are K-major: the tensor
// cores take no others.
//
// The tensor cores keep some 14 bits of a sum of products of 8-bit floats. So they add up
// kPromotedBlocks K-blocks, and the warpgroup adds these partial sums in float32:
//
//   consumer 0   wgmma wgmma wgmma wgmma | sums += partial | wgmma wgmma wgmma wgmma | ...
//   consumer 1   wgmma wgmma | sums += partial | wgmma wgmma wgmma wgmma | sums += partial | ...
//
// While one consumer of a cooperative tile adds, the tensor cores have the products of the other:
// the first sum of consumer 1 is of half as many K-blocks. Where both added at the same time, GEMMs
// of Llama 3.2 1B took 3 to 15% more time on an H100.
//
// Tiles of which a consumer has two row blocks leave no registers for partial sums. The tensor
// cores add up kWholeDepth at most. Of a depth up to twice that the epilogue keeps the sums of the
// first half, in bfloat16 (EpilogueScaledHalves).
//
// Of 8192 products of positive numbers the sum was too small by, on an H100:
//
//   promoted every   128      256      512      2048    never (cuBLASLt, fast accumulation)
//                    0.026%   0.089%   0.30%    2.5%    6.6%
//
// A sum of both signs is larger or smaller by chance, and the rounding to 8 bits, some 2.6% of each
// factor, hides the difference.
#pragma once

#include <cuda_fp8.h>

#include "gemm/hopper/mainloop.cuh"

namespace jaxllm::hopper {

inline constexpr int64_t kWholeDepth = 1024;
// Where the epilogue rounds to 8 bits they add up a depth up to this: its rounding hides more.
inline constexpr int64_t kWholeDepthOfFloat8 = 2048;

// A is (rows, depth) of type A, B (columns, depth) of type B. The epilogue rounds to Out.
template <class Tile, typename A, typename B, typename Out>
struct Float8Mainloop : Mainloop<Tile, uint8_t, Major::kK, Major::kK> {
  using Base = Mainloop<Tile, uint8_t, Major::kK, Major::kK>;
  using Element = Out;
  using typename Base::SharedStorage, typename Base::State;
  static constexpr int kPromotedBlocks = 4;  // 512 of the depth
  static constexpr int kWgmmaDepth = 32;
  static constexpr int kStep = kWgmmaDepth >> 4;  // of a descriptor, in units of 16 bytes

  // As Mainloop's.
  template <class Issued>
  __device__ __forceinline__ static void mma(SharedStorage& smem, Pipeline<Tile::kStages>& pipeline,
                                             State& state, const WorkTile& work, int consumer,
                                             int lane, Accumulators<Tile>& accumulators,
                                             const Issued& issued) {
    if constexpr (Tile::kRowBlocks == 1) {
      mma_promoted(smem, pipeline, state, work, consumer, lane, accumulators, issued);
    } else {
      const auto multiply = [&](uint64_t a, uint64_t b) {
#pragma unroll
        for (int k = 0; k < Tile::kBlockK / kWgmmaDepth; ++k) {
#pragma unroll
          for (int block = 0; block < Tile::kRowBlocks; ++block) {
            wgmma_float8<A, B>(accumulators[block], a + k * kStep + block * Base::kRowBlockStep,
                               b + k * kStep, true);
          }
        }
      };
      Base::for_each_k_block(smem, pipeline, state, work, consumer, lane, accumulators, multiply,
                             issued);
    }
  }

  // As mma(), of a depth up to twice kWholeDepth. Calls put_aside(accumulators, row_block) for the
  // sums of its first half: one row block leaves the accumulators while the tensor cores have the
  // products of the other.
  //
  //   row block 0   ... wgmma |         put_aside | wgmma |           | wgmma ...
  //   row block 1   ...       | wgmma |                   | put_aside | wgmma ...
  template <class PutAside, class Issued>
  __device__ __forceinline__ static void mma_in_halves(
      SharedStorage& smem, Pipeline<Tile::kStages>& pipeline, State& state, const WorkTile& work,
      int lane, Accumulators<Tile>& accumulators, const PutAside& put_aside, const Issued& issued) {
    static_assert(Tile::kRowBlocks == 2 && !Tile::kCooperative);
    uint64_t a, b;
    const auto wait = [&] {
      pipeline.consumer_wait(state);
      a = k_major_descriptor(smem_address(smem.a[state.stage]));
      b = k_major_descriptor(smem_address(smem.b[state.stage]));
    };
    const auto multiply = [&](int block, bool adds) {
      warpgroup_arrive();
#pragma unroll
      for (int k = 0; k < Tile::kBlockK / kWgmmaDepth; ++k) {
        wgmma_float8<A, B>(accumulators[block], a + k * kStep + block * Base::kRowBlockStep,
                           b + k * kStep, adds || k > 0);
      }
      warpgroup_commit_batch();
    };
    const auto multiply_both = [&] {
      wait();
      multiply(0, true);
      multiply(1, true);
      // The products of the K-block before are done: those of this one follow without a gap.
      warpgroup_wait<2>();
      Base::release_previous(pipeline, state, lane);
      state.advance();
    };
    // Of a depth beyond kWholeDepth a half has four K-blocks or more.
    const int half = (work.first_k_block + work.end_k_block + 1) / 2;
    wait();
    multiply(0, false);
    multiply(1, false);
    state.advance();
#pragma unroll 1
    for (int k_block = work.first_k_block + 1; k_block < half - 1; ++k_block) multiply_both();
    // Out of the loop: else the compiler cannot tell whose products are in flight.
    multiply_both();
    warpgroup_wait<1>(accumulators[0]);
    put_aside(accumulators[0], 0);
    wait();
    multiply(0, false);
    warpgroup_wait<1>(accumulators[1]);
    Base::release_previous(pipeline, state, lane);
    put_aside(accumulators[1], 1);
    multiply(1, false);
    state.advance();
#pragma unroll 1
    for (int k_block = half + 1; k_block < work.end_k_block; ++k_block) multiply_both();
    issued();
    warpgroup_wait<0>(accumulators[0], accumulators[1]);
    Base::release_previous(pipeline, state, lane);
  }

 private:
  template <class Issued>
  __device__ __forceinline__ static void mma_promoted(
      SharedStorage& smem, Pipeline<Tile::kStages>& pipeline, State& state, const WorkTile& work,
      int consumer, int lane, Accumulators<Tile>& accumulators, const Issued& issued) {
    const uint32_t first_row = Tile::kCooperative ? consumer * Tile::kConsumerM : 0;
    float partial[Tile::kBlockN / 2];
#pragma unroll
    for (float& value : partial) value = 0.0f;
    int blocks = Tile::kCooperative && consumer == 1 ? kPromotedBlocks / 2 : kPromotedBlocks;
    int end = work.first_k_block;
#pragma unroll 1
    while (end < work.end_k_block) {
      const int first = end;
      end = min(first + blocks, work.end_k_block);
      blocks = kPromotedBlocks;
#pragma unroll 1
      for (int k_block = first; k_block < end; ++k_block) {
        pipeline.consumer_wait(state);
        const uint64_t a =
            k_major_descriptor(smem_address(smem.a[state.stage]) + first_row * kSwizzleRowBytes);
        const uint64_t b = k_major_descriptor(smem_address(smem.b[state.stage]));
        warpgroup_arrive();
#pragma unroll
        for (int k = 0; k < Tile::kBlockK / kWgmmaDepth; ++k) {
          wgmma_float8<A, B>(partial, a + k * kStep, b + k * kStep, k_block > first || k > 0);
        }
        warpgroup_commit_batch();
        // The products of the K-block before are done: those of this one follow without a gap.
        warpgroup_wait<1>(partial);
        if (k_block > first) Base::release_previous(pipeline, state, lane);
        state.advance();
      }
      if (end == work.end_k_block) issued();
      warpgroup_wait<0>(partial);
      Base::release_previous(pipeline, state, lane);
#pragma unroll
      for (int i = 0; i < Tile::kBlockN / 2; ++i) accumulators[0][i] += partial[i];
    }
  }
};

}  // namespace jaxllm::hopper
