// The backward's mainloop for a head dimension of 192 or 256. dk and dv of 64 keys take half of the
// registers of both consumers, so these share the keys: consumer 0 has the first 128 columns of the
// gradients, consumer 1 the others. Each computes one of the two matrices of a step of 64 queries,
// and hands it to the other one in shared memory, rounded:
//
//   consumer 0    s -> p  ----.                  dv += p dout    dk += ds q    dq = ds^T k
//   consumer 1    dp      --> ds, with p  ---->  dv += p dout    dk += ds q    dq = ds^T k
//
// A kernel of its own may compute dq instead: mainloop_backward_dkdv.cuh.
//
// With 256 columns Q and dout have one stage. dout is released after dv and Q after dk, so the next
// ones arrive while dq is computed and stored.
#pragma once

#include <cmath>

#include "attention/hopper/mainloop_backward.cuh"
#include "common/fragment.cuh"

namespace jaxllm::hopper {

// Reads what store_left_operand wrote.
template <class Traits, int kWords>
__device__ __forceinline__ void load_left_operand(uint32_t (&operand)[kWords], uint32_t rows) {
#pragma unroll
  for (int j = 0; j < kWords; j += 4) {
    ldmatrix(*reinterpret_cast<uint32_t (*)[4]>(operand + j),
             stmatrix_chunk<Traits::kBlockN>(rows, j / 2));
  }
}

// Stores the gradients of a work tile, of which this consumer has its columns.
template <int kConsumer, typename T, class Traits, int kSize>
__device__ __forceinline__ void store_shared_key_gradients(
    BackwardSmem<T, Traits>& smem, const BackwardParams& params, const CUtensorMap& gradient_map,
    const BackwardWorkTile& tile, const float (&dk)[kSize], const float (&dv)[kSize]) {
  constexpr int kBlockN = Traits::kBlockN, kFirstBlock = 2 * kConsumer;
  // Both consumers have read K and V, which the gradients replace.
  named_barrier_sync(BackwardNamedBarriers::kConsumers, Traits::kConsumers * kWarpgroup);
  store_gradient<Traits::kBlockN>(dk, params.scale, smem.k[0], /*half=*/0, kFirstBlock * 8);
  store_gradient<Traits::kBlockN>(dv, 1.0f, smem.v[0], /*half=*/0, kFirstBlock * 8);
  fence_async_proxy();
  named_barrier_sync(BackwardNamedBarriers::kConsumers, Traits::kConsumers * kWarpgroup);
  if (threadIdx.x % kWarpgroup == 0) {  // consumer 0 stores dk, and consumer 1 dv
    const T* const gradient = kConsumer == 0 ? smem.k[0] : smem.v[0];
    for (int block = 0; block < Traits::kColumnBlocks; ++block) {
      tma_store_4d(gradient_map, gradient + block * kBlockN * kSwizzleColumns,
                   {block * kSwizzleColumns, tile.kv_head, tile.key_tile * kBlockN, tile.sequence});
    }
    tma_store_commit();
    tma_store_wait_read<0>();
    smem.k_pipeline.empty[0].arrive();
    smem.v_pipeline.empty[0].arrive();
  }
}

template <int kConsumer, bool kSegments, bool kSoftcap, typename T, class Traits>
__device__ __forceinline__ void backward_mma_hdim256(BackwardSmem<T, Traits>& smem,
                                                     const BackwardParams& params,
                                                     const CUtensorMap& gradient_map) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  constexpr int kFirstBlock = 2 * kConsumer;  // of the consumer's columns
  constexpr int kOwnColumns = kConsumer == 0 ? 128 : Traits::kHeadDim - 128;
  constexpr int kColumnBlockBytesN = kBlockN * kSwizzleRowBytes;
  const TiledMask<kBlockM, kBlockN> mask(params.mask);
  const int group = params.heads / params.kv_heads;
  const int thread = threadIdx.x % kWarpgroup;
  const float scale_log2 = params.score_scale * float{M_LOG2E};

  const uint64_t k_operand = k_major_descriptor(smem_address(smem.k[0]));
  const uint64_t v_operand = k_major_descriptor(smem_address(smem.v[0]));
  const T* const shared_p = smem.ds + kBlockN * kBlockM;
  const uint64_t p_operand = k_major_descriptor(smem_address(shared_p));
  const uint64_t ds_operand = k_major_descriptor(smem_address(smem.ds));
  // dq = ds^T k.
  const uint64_t ds_mn_operand = mn_major_descriptor(smem_address(smem.ds), kColumnBlockBytesN);
  const uint64_t k_mn_operand = mn_major_descriptor(
      smem_address(smem.k[0]) + kFirstBlock * kColumnBlockBytesN, kColumnBlockBytesN);
  const uint32_t p_rows = smem_address(shared_p) + stmatrix_offset(0, thread);
  const uint32_t ds_rows = smem_address(smem.ds) + stmatrix_offset(0, thread);

  PipelineState<1> kv_state, state;  // of a work tile, and of a step
  PipelineState<Traits::kQStages> q_state;
  PipelineState<Traits::kDoutStages> dout_state;
  float dk[kOwnColumns / 2], dv[kOwnColumns / 2];

  PipelineState<2> work_state;
  BackwardWorkTile tile = next_work(smem, work_state);
  while (tile.is_valid()) {
    const ScoreMask<Rows::kKeys, kSegments, kBlockM, kBlockN> score_mask(
        params.segments, mask, tile.sequence, tile.key_tile * kBlockN);
    const int steps = group * tile.query_tiles.size();
#pragma unroll
    for (int j = 0; j < kOwnColumns / 2; ++j) dk[j] = dv[j] = 0.0f;
    warpgroup_fence_operand(dk);
    warpgroup_fence_operand(dv);

    smem.v_pipeline.consumer_wait(kv_state);
    smem.k_pipeline.consumer_wait(kv_state);
    kv_state.advance();
    int query_tile = tile.query_tiles.begin;
    for (int step = 0; step < steps; ++step) {
      float scores[kBlockM / 2], dq[kOwnColumns / 2];  // s or dp
      uint32_t words[kBlockM / 4];                     // p or ds
      const T* const q = smem.q[q_state.stage];
      const T* const dout = smem.dout[dout_state.stage];
      const T* const own_q = q + kFirstBlock * kBlockM * kSwizzleColumns;
      const T* const own_dout = dout + kFirstBlock * kBlockM * kSwizzleColumns;
      if constexpr (kConsumer == 0) {
        smem.q_pipeline.consumer_wait(q_state);
        start_scores<Traits>(scores, k_operand, q);
        warpgroup_wait<0>(scores);
        if constexpr (kSoftcap) cap_scores(scores, params.softcap);
        score_mask.apply(scores, query_tile, query_tile * kBlockM);
        exponentiate(scores, scale_log2, smem.lse[q_state.stage]);
        pack_accumulator<T>(scores, words);
        smem.p_pipeline.producer_acquire(state);
        store_left_operand<Traits>(words, p_rows);
        fence_async_proxy();
        arrive_as_warp(smem.p_pipeline.full[0]);
        smem.dout_pipeline.consumer_wait(dout_state);
        start_gradient<Traits>(dv, words, own_dout);
        smem.ds_pipeline.consumer_wait(state);
        start_gradient<Traits>(dk, ds_operand, own_q);
      } else {
        smem.dout_pipeline.consumer_wait(dout_state);
        start_scores<Traits>(scores, v_operand, dout);
        smem.p_pipeline.consumer_wait(state);
        load_left_operand<Traits>(words, p_rows);
        float p[kBlockM / 2];
#pragma unroll
        for (int j = 0; j < kBlockM / 4; ++j) {
          const float2 pair = unpack_pair<T>(words[j]);
          p[2 * j] = pair.x, p[2 * j + 1] = pair.y;
        }
        warpgroup_wait<0>(scores);
        differentiate_softmax(p, scores, smem.delta[dout_state.stage]);
        smem.q_pipeline.consumer_wait(q_state);
        if constexpr (kSoftcap) {
          differentiate_softcap(p, scores, scale_log2, smem.lse[q_state.stage]);
        }
        pack_accumulator<T>(scores, words);
        smem.ds_pipeline.producer_acquire(state);
        store_left_operand<Traits>(words, ds_rows);
        fence_async_proxy();
        arrive_as_warp(smem.ds_pipeline.full[0]);
        start_gradient<Traits>(dv, p_operand, own_dout);
        smem.ds_pipeline.consumer_wait(state);
        start_gradient<Traits>(dk, words, own_q);
      }
      warpgroup_arrive();
#pragma unroll
      for (int i = 0; i < kBlockN / 16; ++i) {
        const uint64_t offset = i * kMnMajorStepBytes >> 4;
        wgmma<T, Major::kMN, Major::kMN>(dq, ds_mn_operand + offset, k_mn_operand + offset, i > 0);
      }
      warpgroup_commit_batch();
      warpgroup_wait<2>();  // for dv
      smem.dout_pipeline.empty[dout_state.stage].arrive();
      if constexpr (kConsumer == 1) smem.p_pipeline.consumer_release(0);
      warpgroup_wait<1>();  // for dk
      smem.q_pipeline.empty[q_state.stage].arrive();
      warpgroup_wait<0>(dq);
      smem.ds_pipeline.consumer_release(0);
      smem.dq_pipeline.producer_acquire(state);
      store_dq_accumulator(dq, smem.dq[kFirstBlock]);
      fence_async_proxy();
      smem.dq_pipeline.full[0].arrive();
      state.advance();
      q_state.advance();
      dout_state.advance();
      if (++query_tile == tile.query_tiles.end) query_tile = tile.query_tiles.begin;
    }
    warpgroup_wait<0>(dk, dv);
    store_shared_key_gradients<kConsumer>(smem, params, gradient_map, tile, dk, dv);
    tile = next_work(smem, work_state);
  }
  if (thread == 0) tma_store_wait<0>();
}

}  // namespace jaxllm::hopper
