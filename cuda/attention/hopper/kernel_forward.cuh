// Flash attention, forward, on Hopper. Warp-specialized and persistent, as FlashAttention-3:
//
//   producer warpgroup       smem                            consumer warpgroups (2 to 4)
//   (one thread)                                             of 64 queries each
//                            full[s] ------------------->    consumer_wait
//   tile_counter -> work
//   TMA Q  --------------->  q_pipeline   (1 stage)  ---->   s = q k^T
//   TMA K  --------------->  k_pipeline   (kStages)  ---->     mask, online softmax -> p
//   TMA V  --------------->  v_pipeline   (kStages)  ---->   o += p v
//                            <------------------- empty[s]   consumer_release
//                            out <------------------------   o / sum, lse
//                            out --> TMA store
//
// Two wgmma are in flight: the scores of the next key tile, and p v of the present one. Meanwhile
// the threads take the maxima of the new scores, or with a softcap compute the weights. The
// consumers pass an order barrier (ping-pong), so that one computes exponentials while another has
// the tensor cores:
//
//   consumer 0   | s1  p0 v0 |  softmax 1  | s2  p1 v1 |  softmax 2  |
//   consumer 1   |           | s1  p0 v0   | softmax 1 | s2  p1 v1   |
//
// What to change for a head dimension, a mask or an operand type: docs/hopper_attention.md.
//
// Source: Shah et al., "FlashAttention-3" (arXiv:2407.08608).
#pragma once

#include "attention/hopper/epilogue.cuh"
#include "attention/hopper/mainloop_forward.cuh"
#include "attention/hopper/tile_scheduler.cuh"
#include "common/dependent_launch.cuh"

namespace jaxllm::hopper {

template <typename T, class Traits, bool kSegments, bool kSoftcap>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    flash_attention_forward_hopper_kernel(const __grid_constant__ CUtensorMap q_map,
                                          const __grid_constant__ CUtensorMap k_map,
                                          const __grid_constant__ CUtensorMap v_map,
                                          const __grid_constant__ CUtensorMap out_map,
                                          const __grid_constant__ ForwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& smem = *reinterpret_cast<ForwardSmem<T, Traits>*>(shared_memory);

  if (threadIdx.x == 0) {
    prefetch_tensor_map(q_map);
    prefetch_tensor_map(k_map);
    prefetch_tensor_map(v_map);
    prefetch_tensor_map(out_map);
    smem.q_pipeline.init(1, Traits::kConsumerThreads);
    smem.k_pipeline.init(1, Traits::kConsumerWarps);
    smem.v_pipeline.init(1, Traits::kConsumerWarps);
    fence_barrier_init();
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) {
      const TiledMask<Traits::kBlockM, Traits::kBlockN> mask(params.mask);
      ForwardProducer<T, Traits> producer{smem, q_map, k_map, v_map};
      wait_on_dependent_grids();  // which sets the tile counter to zero
      produce_query_tiles<kSegments>(producer, params, mask);
    }
  } else {
    warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    const TiledMask<Traits::kBlockM, Traits::kBlockN> mask(params.mask);
    ForwardConsumer<T, Traits, kSegments, kSoftcap> mainloop(smem, params, consumer);
    PipelineState<Traits::kStages> k_state, v_state;
    PipelineState<1> q_state;
    float o[Traits::kValueDim / 2];
    mainloop.mma_init();
    for (;;) {
      smem.q_pipeline.consumer_wait(q_state);
      q_state.advance();
      const ForwardWorkTile work = smem.work;
      if (!work.is_valid()) break;
      const TileRange key_tiles = smem.key_tiles;
      const int first_query = work.query_tile * Traits::kBlockM + consumer * 64;
      typename decltype(mainloop)::Softmax softmax;
      mainloop.mma(mask, work, key_tiles, first_query, k_state, v_state, softmax, o);
      store_output(smem, params, mask, out_map, work, first_query, consumer, softmax, o);
    }
    mainloop.mma_tail();
    if (threadIdx.x % kWarpgroup == 0) tma_store_wait<0>();
  }
#endif
}

}  // namespace jaxllm::hopper
