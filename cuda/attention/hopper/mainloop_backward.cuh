// What the backward's mainloops share: the producer, and the GEMMs of a consumer. With keys as rows
// of the accumulators, p and ds are the left operands of their GEMMs as they stand in registers.
#pragma once

#include "attention/hopper/dq_accumulator.cuh"
#include "attention/hopper/epilogue.cuh"
#include "attention/hopper/mask.cuh"
#include "attention/hopper/softmax.cuh"

namespace jaxllm::hopper {

// The producer's part: one thread loads a work tile's K and V, and Q and dout of its query tiles.
// With two stages of K, K comes before the first Q, else after it.
template <typename T, class Traits>
struct BackwardProducer {
  BackwardSmem<T, Traits>& smem;
  const BackwardParams& params;
  const CUtensorMap &q_map, &k_map, &v_map, &dout_map;
  PipelineState<Traits::kKvStages> k_state = {}, v_state = {};
  PipelineState<Traits::kQStages> q_state = {};
  PipelineState<Traits::kDoutStages> dout_state = {};

  // A tile of K or of V, which has kSize elements.
  template <int kSize>
  __device__ __forceinline__ static void load_kv(Pipeline<Traits::kKvStages>& pipeline,
                                                 PipelineState<Traits::kKvStages>& state,
                                                 T (*stages)[kSize], const CUtensorMap& map,
                                                 const BackwardWorkTile& tile) {
    const Barrier& full = pipeline.producer_acquire(state, kSize * sizeof(T));
#pragma unroll 1
    for (int block = 0; block < kSize / (Traits::kBlockN * kSwizzleColumns); ++block) {
      tma_load_4d(
          stages[state.stage] + block * Traits::kBlockN * kSwizzleColumns, map,
          {block * kSwizzleColumns, tile.kv_head, tile.key_tile * Traits::kBlockN, tile.sequence},
          full);
    }
    state.advance();
  }

  // A tile of Q with the lse, or of dout with the delta, of each row.
  template <int kStages, int kSize>
  __device__ __forceinline__ static void load_query_tile(Pipeline<kStages>& pipeline,
                                                         PipelineState<kStages>& state,
                                                         T (*stages)[kSize],
                                                         float (*row_stages)[Traits::kBlockM],
                                                         const CUtensorMap& map, const float* rows,
                                                         int sequence, int head, int query) {
    constexpr int kRowBytes = Traits::kBlockM * sizeof(float);
    const Barrier& full = pipeline.producer_acquire(state, kSize * sizeof(T) + kRowBytes);
#pragma unroll 1
    for (int block = 0; block < kSize / (Traits::kBlockM * kSwizzleColumns); ++block) {
      tma_load_4d(stages[state.stage] + block * Traits::kBlockM * kSwizzleColumns, map,
                  {block * kSwizzleColumns, head, query, sequence}, full);
    }
    bulk_load(row_stages[state.stage], rows, kRowBytes, full);
    state.advance();
  }

  __device__ __forceinline__ void load(const BackwardWorkTile& tile) {
    const int padded_queries =
        TiledMask<Traits::kBlockM, Traits::kBlockN>(params.mask).query_tiles() * Traits::kBlockM;
    const int group = params.heads / params.kv_heads;
    const auto load_k = [&] { load_kv(smem.k_pipeline, k_state, smem.k, k_map, tile); };
    if (Traits::kKvStages > 1) load_k();
    bool has_v = false;
    const auto load_v = [&] {
      if (Traits::kKvStages == 1) load_k();
      load_kv(smem.v_pipeline, v_state, smem.v, v_map, tile);
      has_v = true;
    };
    for (int head = tile.kv_head * group; head < (tile.kv_head + 1) * group; ++head) {
      const int64_t rows = (int64_t{tile.sequence} * params.heads + head) * padded_queries;
      for (int i = tile.query_tiles.begin; i < tile.query_tiles.end; ++i) {
        const int query = i * Traits::kBlockM;
        load_query_tile(smem.q_pipeline, q_state, smem.q, smem.lse, q_map,
                        params.lse + rows + query, tile.sequence, params.q_order.place(head),
                        query);
        load_query_tile(smem.dout_pipeline, dout_state, smem.dout, smem.delta, dout_map,
                        params.delta + rows + query, tile.sequence, head, query);
        if (!has_v) load_v();
      }
    }
    if (!has_v) load_v();
  }
};

// Starts s = k q^T or dp = v dout^T, for as many queries as `result` has columns. kDepth is the
// width of what it multiplies.
template <class Traits, int kDepth = Traits::kHeadDim, typename T, int kSize>
__device__ __forceinline__ void start_scores(float (&result)[kSize], uint64_t rows,
                                             const T* queries) {
  constexpr int kColumnBlockBytesN = Traits::kBlockN * kSwizzleRowBytes;
  constexpr int kColumnBlockBytesM = Traits::kBlockM * kSwizzleRowBytes;
  const uint64_t columns = k_major_descriptor(smem_address(queries));
  warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    const int within = step % 4 * kKMajorStepBytes;
    wgmma<T, Major::kK, Major::kK>(result, rows + ((step / 4 * kColumnBlockBytesN + within) >> 4),
                                   columns + ((step / 4 * kColumnBlockBytesM + within) >> 4),
                                   step > 0);
  }
  warpgroup_commit_batch();
}

// Starts dv += p dout or dk += ds q, for as many queries as `left` has columns.
template <class Traits, typename T, int kSize, int kWords>
__device__ __forceinline__ void start_gradient(float (&gradient)[kSize],
                                               const uint32_t (&left)[kWords], const T* queries) {
  const uint64_t rows =
      mn_major_descriptor(smem_address(queries), Traits::kBlockM * kSwizzleRowBytes);
  warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < kWords / 4; ++step) {
    wgmma<T, Major::kMN>(gradient, left + 4 * step, rows + (step * kMnMajorStepBytes >> 4));
  }
  warpgroup_commit_batch();
}

// The same with the left operand in shared memory, where a row has the queries of a step.
template <class Traits, typename T, int kSize>
__device__ __forceinline__ void start_gradient(float (&gradient)[kSize], uint64_t left,
                                               const T* queries) {
  const uint64_t rows =
      mn_major_descriptor(smem_address(queries), Traits::kBlockM * kSwizzleRowBytes);
  warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < Traits::kBlockM / 16; ++step) {
    wgmma<T, Major::kK, Major::kMN>(gradient, left + (step * kKMajorStepBytes >> 4),
                                    rows + (step * kMnMajorStepBytes >> 4), true);
  }
  warpgroup_commit_batch();
}

// Writes 64 rows of ds or p to shared memory, for dq, which sums over the keys of both consumers,
// or for a consumer that did not compute them. `rows` is the address of this thread's row.
template <class Traits, int kWords>
__device__ __forceinline__ void store_left_operand(const uint32_t (&operand)[kWords],
                                                   uint32_t rows) {
#pragma unroll
  for (int j = 0; j < kWords; j += 4) {
    const int chunk = j / 2;  // of eight queries
    stmatrix(stmatrix_chunk<Traits::kBlockN>(rows, chunk),
             *reinterpret_cast<const uint32_t (*)[4]>(operand + j));
  }
}

// Reads what store_left_operand wrote.
template <class Traits, int kWords>
__device__ __forceinline__ void load_left_operand(uint32_t (&operand)[kWords], uint32_t rows) {
#pragma unroll
  for (int j = 0; j < kWords; j += 4) {
    ldmatrix(*reinterpret_cast<uint32_t (*)[4]>(operand + j),
             stmatrix_chunk<Traits::kBlockN>(rows, j / 2));
  }
}

// Whether the first half of a head's first query tile sees none of a consumer's keys.
template <class Traits, class Mask>
__device__ __forceinline__ bool begins_with_second_half(const Mask& mask,
                                                        const BackwardWorkTile& tile,
                                                        int consumer) {
  const int second_half = tile.query_tiles.begin * Traits::kBlockM + Traits::kBlockM / 2;
  return second_half <= mask.first_query(consumer_first_key<Traits>(tile, consumer));
}

}  // namespace jaxllm::hopper
