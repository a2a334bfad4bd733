// The mainloop of every GEMM on Hopper: forward, dgrad and wgrad.
//
//                  stage 0   stage 1   ...                  (shared memory, kStages of A and B)
//   producer       TMA A, B  TMA A, B  ... waits for empty[s], expects the bytes at full[s]
//   consumer       wgmma     wgmma     ... waits for full[s], releases s when the *next* stage's
//                                          products are in flight
//
// The operand type T and the layout of each operand are template arguments. float8_mainloop.cuh has
// the products of 8-bit floats.
#pragma once

#include "common/pipeline.cuh"
#include "common/tensor_map.h"
#include "common/tma.cuh"
#include "gemm/hopper/tile.cuh"

namespace jaxllm::hopper {

template <typename T>
constexpr CUtensorMapDataType kTensorMapType =
    sizeof(T) == 1                     ? CU_TENSOR_MAP_DATA_TYPE_UINT8
    : std::is_same_v<T, __nv_bfloat16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

// A is (rows, depth), or (depth, rows) where it is MN-major; B is (columns, depth), or (depth,
// columns) where it is MN-major. A grouped GEMM has kProblems of both.
template <class Tile_, typename T, Major kMajorA, Major kMajorB, int kProblems = 1>
struct Mainloop {
  using Tile = Tile_;
  using Element = T;
  using State = PipelineState<Tile::kStages>;

  struct SharedStorage {
    T a[Tile::kStages][Tile::kBlockM * Tile::kBlockK];
    T b[Tile::kStages][Tile::kBlockN * Tile::kBlockK];
  };
  struct Params {
    CUtensorMap a[kProblems], b[kProblems];
  };

  static constexpr uint32_t kStageBytes =
      (Tile::kBlockM + Tile::kBlockN) * Tile::kBlockK * sizeof(T);
  // Warps that release a stage, in all CTAs that read it.
  static constexpr int kConsumerWarps =
      4 * Tile::kCluster * (Tile::kCooperative ? Tile::kConsumers : 1);

  static cudaError_t encode(const T* a, const T* b, int64_t rows, int64_t columns, int64_t depth,
                            int problem, Params* params) {
    JAXLLM_RETURN_IF_ERROR((encode_operand<kMajorA, Tile::kBlockM, Tile::kClusterN>(
        a, rows, depth, &params->a[problem])));
    return encode_operand<kMajorB, Tile::kBlockN, Tile::kClusterM>(b, columns, depth,
                                                                   &params->b[problem]);
  }

  __device__ __forceinline__ static void prefetch_maps(const Params& params) {
#pragma unroll
    for (int problem = 0; problem < kProblems; ++problem) {
      prefetch_tensor_map(params.a[problem]);
      prefetch_tensor_map(params.b[problem]);
    }
  }

  // The producer's part: one thread loads the K-blocks of a work tile. CTAs of a cluster that need
  // the same operand load a part of it each, into all of them (TMA multicast).
  __device__ __forceinline__ static void load(SharedStorage& smem,
                                              Pipeline<Tile::kStages>& pipeline, State& state,
                                              const Params& params, const WorkTile& work,
                                              int rank) {
    const int rank_m = rank % Tile::kClusterM, rank_n = rank / Tile::kClusterM;
    uint16_t same_rows = 0, same_columns = 0;  // the CTAs that need the same A, and the same B
    for (int i = 0; i < Tile::kClusterN; ++i) same_rows |= 1 << (rank_m + i * Tile::kClusterM);
    for (int i = 0; i < Tile::kClusterM; ++i) same_columns |= 1 << (i + rank_n * Tile::kClusterM);
    const CUtensorMap& a = params.a[work.problem];
    const CUtensorMap& b = params.b[work.problem];
#pragma unroll 1
    for (int k_block = work.first_k_block; k_block < work.end_k_block; ++k_block) {
      const int k = k_block * Tile::kBlockK;
      const Barrier& full = pipeline.producer_acquire(state, kStageBytes);
      load_operand<kMajorA, Tile::kBlockM, Tile::kClusterN>(smem.a[state.stage], a, work.row, k,
                                                            rank_n, same_rows, full);
      load_operand<kMajorB, Tile::kBlockN, Tile::kClusterM>(smem.b[state.stage], b, work.column, k,
                                                            rank_m, same_columns, full);
      state.advance();
    }
  }

  // A consumer's part: adds the products of a work tile to the accumulators. Calls issued() while
  // the last are in flight.
  template <class Issued>
  __device__ __forceinline__ static void mma(SharedStorage& smem, Pipeline<Tile::kStages>& pipeline,
                                             State& state, const WorkTile& work, int consumer,
                                             int lane, Accumulators<Tile>& accumulators,
                                             const Issued& issued) {
    const auto multiply = [&](uint64_t a, uint64_t b) {
#pragma unroll
      for (int k = 0; k < Tile::kBlockK / 16; ++k) {
#pragma unroll
        for (int block = 0; block < Tile::kRowBlocks; ++block) {
          wgmma<T, kMajorA, kMajorB>(accumulators[block],
                                     a + k * kStep<kMajorA> + block * kRowBlockStep,
                                     b + k * kStep<kMajorB>, true);
        }
      }
    };
    for_each_k_block(smem, pipeline, state, work, consumer, lane, accumulators, multiply, issued);
  }

 protected:
  // From a descriptor of A to that of the next 64 rows.
  static constexpr uint32_t kRowBlockStep = 64 * kSwizzleRowBytes >> 4;

  // Calls multiply(a, b) with the descriptors of each K-block's operands: it issues their products,
  // which are added to the accumulators.
  template <class Multiply, class Issued>
  __device__ __forceinline__ static void for_each_k_block(
      SharedStorage& smem, Pipeline<Tile::kStages>& pipeline, State& state, const WorkTile& work,
      int consumer, int lane, Accumulators<Tile>& accumulators, const Multiply& multiply,
      const Issued& issued) {
    const uint32_t first_row = Tile::kCooperative ? consumer * Tile::kConsumerM : 0;
#pragma unroll 1
    for (int k_block = work.first_k_block; k_block < work.end_k_block; ++k_block) {
      pipeline.consumer_wait(state);
      const uint64_t a =
          descriptor<kMajorA>(smem_address(smem.a[state.stage]) + first_row * kSwizzleRowBytes);
      const uint64_t b = descriptor<kMajorB>(smem_address(smem.b[state.stage]));
      warpgroup_arrive();
      multiply(a, b);
      warpgroup_commit_batch();
      // The products of the K-block before are done: those of this one follow without a gap.
      warpgroup_wait<1>(accumulators[0], accumulators[1]);
      if (k_block > work.first_k_block) release_previous(pipeline, state, lane);
      state.advance();
    }
    issued();
    warpgroup_wait<0>(accumulators[0], accumulators[1]);
    release_previous(pipeline, state, lane);
  }

  // The elements of a row of a box.
  static constexpr int kRowElements = kSwizzleRowBytes / sizeof(T);
  static_assert(Tile::kBlockK == kRowElements);

  // A K-major operand is one box of kExtent rows; an MN-major one is a box of 64 of the depth for
  // each 64 of kExtent. kShares CTAs load a part of each box.
  template <Major kMajor, int kExtent, int kShares>
  static constexpr int kBoxRows = (kMajor == Major::kMN ? 64 : kExtent) / kShares;

  template <Major kMajor, int kExtent, int kShares>
  static cudaError_t encode_operand(const T* data, int64_t extent, int64_t depth,
                                    CUtensorMap* map) {
    const Matrix matrix = kMajor == Major::kMN ? Matrix{data, depth, extent, sizeof(T)}
                                               : Matrix{data, extent, depth, sizeof(T)};
    return encode_matrix_map(matrix, kTensorMapType<T>, kBoxRows<kMajor, kExtent, kShares>, map,
                             kRowElements);
  }

  template <Major kMajor, int kExtent, int kShares>
  __device__ __forceinline__ static void load_operand(T* target, const CUtensorMap& map, int first,
                                                      int k, int share, uint16_t ctas,
                                                      const Barrier& full) {
    constexpr int kRows = kBoxRows<kMajor, kExtent, kShares>;
    constexpr int kBoxes = kMajor == Major::kMN ? kExtent / kRowElements : 1;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      T* const to = target + (box * 64 + share * kRows) * kRowElements;
      const int column = kMajor == Major::kMN ? first + box * kRowElements : k;
      const int row = (kMajor == Major::kMN ? k : first) + share * kRows;
      if constexpr (kShares == 1) {
        tma_load_2d(to, map, column, row, full);
      } else {
        tma_load_2d(to, map, column, row, full, ctas);
      }
    }
  }

  template <Major kMajor>
  __device__ __forceinline__ static uint64_t descriptor(uint32_t address) {
    return kMajor == Major::kMN ? mn_major_descriptor(address, 64 * kSwizzleRowBytes)
                                : k_major_descriptor(address);
  }
  template <Major kMajor>
  static constexpr uint32_t kStep =
      (kMajor == Major::kMN ? kMnMajorStepBytes : kKMajorStepBytes) >> 4;

  __device__ __forceinline__ static void release_previous(Pipeline<Tile::kStages>& pipeline,
                                                          const State& state, int lane) {
    pipeline.template consumer_release_cluster<Tile::kCluster>(state.previous_stage(), lane);
  }
};

}  // namespace jaxllm::hopper
