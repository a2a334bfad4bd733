// Flash attention, backward, on Hopper. A CTA has a key tile, and goes over the query tiles that
// see it, of all heads that share the keys. Keys are the rows of the accumulators, so that p and ds
// are left operands in registers:
//
//   s = k q^T       p = 2^(c s - lse)         dv += p dout
//   dp = v dout^T   ds = p (dp - delta)       dk += ds q        dq += ds^T k
//
//   producer warpgroup            smem                          consumer warpgroups (64 keys each)
//   thread 0   tickets ------->   work_pipeline  (2)       -->  all below
//              TMA K, V ------>   k_, v_pipeline (1 or 2)  -->  s, dp         (V <- dv, at the end)
//              TMA Q, lse ---->   q_pipeline     (2 or 3)  -->  s, dk
//              TMA dout, delta>   dout_pipeline  (2 or 3)  -->  dp, dv
//                                 ds_pipeline    <------------  ds
//                                     |         dq = ds^T k     (dq warpgroup, or the consumers)
//   warps 1, 2 bulk_reduce_add <- dq_pipeline  (1 or 2)  <----  dq
//   64 threads TMA store       <- dq_store_pipeline  <--------  dq of the last key tile, converted
//
// With heads wider than 128 the consumers share 64 keys, and a kernel of its own computes dq:
// mainloop_backward_hdim256.cuh, mainloop_backward_hdim192_128.cuh and kernel_dq.cuh.
//
// dk and dv stay in registers. dq is accumulated in global memory (dq_accumulator.cuh). The kernels
// of preprocess_backward.cuh run before and after.
//
// Five GEMMs, where a separate kernel for dq needs seven: with heads of 128 it would have to run at
// 90% of the tensor cores' peak to be as fast as this one at 65%. The price is 4 bytes through the
// L2 cache for each query, head, column and key tile: about 1.5 TB/s where the GEMMs are at their
// best. With 64 keys to a tile, those of heads wider than 128, it is twice as much, and too much.
//
// What to change for a head dimension, a mask or an operand type: docs/hopper_attention.md.
//
// Source: Dao, "FlashAttention-2" (arXiv:2307.08691); Shah et al., "FlashAttention-3"
// (arXiv:2407.08608).
#pragma once

#include "attention/hopper/mainloop_backward_dq.cuh"
#include "attention/hopper/mainloop_backward_hdim128.cuh"
#include "attention/hopper/mainloop_backward_hdim192_128.cuh"
#include "attention/hopper/mainloop_backward_hdim256.cuh"
#include "attention/hopper/mainloop_backward_hdim64.cuh"
#include "common/dependent_launch.cuh"

namespace jaxllm::hopper {

// Takes tickets until there are none, hands their work tiles on, and loads what they need.
template <bool kSegments, typename T, class Traits>
__device__ __forceinline__ void produce_backward(BackwardSmem<T, Traits>& smem,
                                                 const BackwardParams& params,
                                                 const CUtensorMap& q_map, const CUtensorMap& k_map,
                                                 const CUtensorMap& v_map,
                                                 const CUtensorMap& dout_map) {
  const TiledMask<Traits::kBlockM, Traits::kBlockN> mask(params.mask);
  BackwardProducer<T, Traits> producer{smem, params, q_map, k_map, v_map, dout_map};
  PipelineState<2> work_state;
  int ticket = atomicAdd(params.tile_counter, 1);
  while (ticket < params.tiles) {
    BackwardWorkTile tile = backward_work_tile(params, mask.key_tiles(), ticket);
    tile.query_tiles = visible_query_tiles<kSegments>(params, mask, tile.sequence, tile.key_tile);
    publish_work(smem, work_state, tile);
    producer.load(tile);
    ticket = atomicAdd(params.tile_counter, 1);
  }
  publish_work(smem, work_state, {0, 0, -1, {0, 0}});
}

template <typename T, class Traits, bool kSegments, bool kSoftcap>
__global__ void __launch_bounds__(Traits::kThreads, 1) flash_attention_backward_hopper_kernel(
    const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
    const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap dout_map,
    const __grid_constant__ CUtensorMap dk_map, const __grid_constant__ CUtensorMap dv_map,
    const __grid_constant__ CUtensorMap dq_map, const __grid_constant__ BackwardParams params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& smem = *reinterpret_cast<BackwardSmem<T, Traits>*>(shared_memory);

  if (threadIdx.x == 0) {
    smem.k_pipeline.init(1, Traits::kKReleases);
    smem.v_pipeline.init(1, Traits::kVReleases);
    smem.q_pipeline.init(1, Traits::kConsumerThreads);
    smem.dout_pipeline.init(1, Traits::kConsumerThreads);
    smem.p_pipeline.init(Traits::kDsWarps, Traits::kDsWarps);
    smem.ds_pipeline.init(Traits::kDsWarps, Traits::kDsReaders);
    // Every thread arrives: TMA may write next where it wrote or read.
    smem.dq_pipeline.init(Traits::kDqWarps * 32, 1);
    for (Barrier& full : smem.dq_sum_full) full.init(1);
    smem.dq_store_pipeline.init(Traits::kDqWarps * 32, Traits::kDqStoreThreads);
    smem.work_pipeline.init(1, Traits::kWorkReaders);
    smem.consumers.init(Traits::kConsumerWarps);
    fence_barrier_init();
  }
  wait_on_dependent_grids();
  if constexpr (Traits::kSeparateDq) launch_dependent_grids();  // the kernel for dq
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) produce_backward<kSegments>(smem, params, q_map, k_map, v_map, dout_map);
    if constexpr (!Traits::kSeparateDq) {
      const int stage = static_cast<int>(threadIdx.x) / 32 - 1;
      if (threadIdx.x % 32 == 0 && stage >= 0 && stage < Traits::kDqStages) {
        accumulate_dq<kSegments>(smem, params, stage);
      }
    }
    if constexpr (Traits::kStoresDq) {
      const int store_thread =
          static_cast<int>(threadIdx.x) - (kWarpgroup - Traits::kDqStoreThreads);
      if (store_thread >= 0) store_dq<kSegments>(smem, params, dq_map, store_thread);
    }
  } else if (warpgroup > Traits::kConsumers) {
    if constexpr (Traits::kHasDqWarpgroup) {
      warpgroup_reg_dealloc<Traits::kDqRegisters>();
      backward_mma_dq<kSegments>(smem, params);
    }
  } else {
    warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    if constexpr (Traits::kHasDqWarpgroup) {
      backward_mma_hdim64<kSegments, kSoftcap>(smem, params, dk_map, dv_map, warpgroup - 1);
    } else if constexpr (Traits::kSplitsGradients) {
      if (warpgroup == 1) {
        backward_mma_dv<kSegments>(smem, params, dv_map);
      } else {
        backward_mma_dk(smem, params, dk_map);
      }
    } else if constexpr (Traits::kSeparateDq) {
      if (warpgroup == 1) {
        backward_mma_hdim256<0, kSegments, kSoftcap>(smem, params, dk_map);
      } else {
        backward_mma_hdim256<1, kSegments, kSoftcap>(smem, params, dv_map);
      }
    } else {
      backward_mma_hdim128<kSegments, kSoftcap>(smem, params, dk_map, dv_map, warpgroup - 1);
    }
  }
#endif
}

}  // namespace jaxllm::hopper
