// The kernel that computes dq alone, for heads of which the backward kernel has no room for dq
// (BackwardTraits::kSeparateDq). It computes the scores again, 7 GEMMs in all instead of 5; but dq
// stays in registers, and nothing is added in memory. Shaped as the forward, with two more GEMMs
// and without the online softmax:
//
//   producer warpgroup       smem                           consumer warpgroups (2)
//                                                           of 64 queries each
//   tile_counter -> work
//   TMA Q  --------------->  q_pipeline    (1 stage)   -->  s = q k^T -> p
//   TMA dout  ------------>  dout_pipeline (1 stage)   -->  dp = dout v^T, ds = p (dp - delta)
//   TMA K  --------------->  k_pipeline    (kKStages)  -->  s, dq += ds k
//   TMA V  --------------->  v_pipeline    (kVStages)  -->  dp
//                            q <--------------------------  dq
//                            q --> TMA store
//
// It needs lse and delta of the preprocess kernel, and nothing of the backward kernel, at the end
// of which it begins.
#pragma once

#include "attention/hopper/mainloop_dq.cuh"
#include "attention/hopper/tile_scheduler.cuh"
#include "common/dependent_launch.cuh"

namespace jaxllm::hopper {

template <typename T, class Traits, bool kSegments, bool kSoftcap>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    flash_attention_backward_hopper_dq_kernel(const __grid_constant__ CUtensorMap q_map,
                                              const __grid_constant__ CUtensorMap k_map,
                                              const __grid_constant__ CUtensorMap v_map,
                                              const __grid_constant__ CUtensorMap dout_map,
                                              const __grid_constant__ CUtensorMap dq_map,
                                              const __grid_constant__ DqParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& smem = *reinterpret_cast<DqSmem<T, Traits>*>(shared_memory);

  if (threadIdx.x == 0) {
    smem.q_pipeline.init(1, Traits::kConsumerThreads);
    smem.dout_pipeline.init(1, Traits::kConsumerWarps);
    smem.k_pipeline.init(1, Traits::kConsumerWarps);
    smem.v_pipeline.init(1, Traits::kConsumerWarps);
    fence_barrier_init();
  }
  __syncthreads();

  // No wait for the backward kernel: it starts this one after its own wait for the preprocess
  // kernel, and writes nothing that is read here.
  const TiledMask<Traits::kBlockM, Traits::kBlockN> mask(params.mask);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) {
      DqProducer<T, Traits> producer{smem, q_map, k_map, v_map, dout_map};
      produce_query_tiles<kSegments>(producer, params, mask);
    }
  } else {
    warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    DqConsumer<T, Traits, kSegments, kSoftcap> mainloop(smem, params, consumer);
    PipelineState<1> q_state;
    float dq[Traits::kHeadDim / 2];
    for (;;) {
      smem.q_pipeline.consumer_wait(q_state);
      q_state.advance();
      const ForwardWorkTile work = smem.work;
      if (!work.is_valid()) break;
      const TileRange key_tiles = smem.key_tiles;
      const int first_query = work.query_tile * Traits::kBlockM + consumer * 64;
      mainloop.mma(mask, work, key_tiles, first_query, dq);
      store_dq_rows(smem, params, dq_map, work, first_query, consumer, dq);
    }
    if (threadIdx.x % kWarpgroup == 0) tma_store_wait<0>();
  }
  // To the next kernel the end of this one means the end of the backward kernel too.
  wait_on_dependent_grids();
#endif
}

}  // namespace jaxllm::hopper
