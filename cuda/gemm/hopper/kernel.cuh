// The GEMM kernel of Hopper, made of a mainloop, a tile scheduler and an epilogue:
//
//   producer warpgroup   one thread:  for each tile:  Mainloop::load
//   consumer 0           for each tile:  begin  mma ->      store (epilogue)   mma ->
//   consumer 1                           ...        mma ->  store              ...
//                                                   ^ the order barriers: ping-pong
//
// A new epilogue is a file like epilogue_bias.cuh, and a launch_gemm<Gemm<...>>() that names it.
#pragma once

#include <climits>

#include "common/cluster.cuh"
#include "common/dependent_launch.cuh"
#include "common/hopper_launch.h"
#include "gemm/hopper/epilogue.cuh"

namespace jaxllm::hopper {

template <class Mainloop_, template <class> class Scheduler_,
          template <class, typename> class Epilogue_>
struct Gemm {
  using Mainloop = Mainloop_;
  using Tile = typename Mainloop::Tile;
  using Scheduler = Scheduler_<Tile>;
  using Epilogue = Epilogue_<Tile, typename Mainloop::Element>;

  struct SharedStorage {
    typename Mainloop::SharedStorage mainloop;
    typename Epilogue::SharedStorage epilogue;
    Pipeline<Tile::kStages> pipeline;
    Barrier order[Tile::kConsumers];  // ping-pong: whose mainloop it is
  };
  struct Params {
    typename Mainloop::Params mainloop;
    typename Epilogue::Params epilogue;
    typename Scheduler::Params scheduler;
  };
  static_assert(sizeof(SharedStorage) <= 232448);
};

template <class Gemm>
__device__ __forceinline__ void produce(typename Gemm::SharedStorage& smem,
                                        const typename Gemm::Params& params, int rank) {
  typename Gemm::Mainloop::State state;
  typename Gemm::Scheduler scheduler(params.scheduler, rank);
  for (; scheduler.is_valid(); scheduler.advance(1)) {
    Gemm::Mainloop::load(smem.mainloop, smem.pipeline, state, params.mainloop, scheduler.work(),
                         rank);
  }
}

template <class Gemm>
__device__ __forceinline__ void consume(typename Gemm::SharedStorage& smem,
                                        const typename Gemm::Params& params, int rank,
                                        int consumer) {
  using Mainloop = typename Gemm::Mainloop;
  using Tile = typename Gemm::Tile;
  constexpr bool kPingPong = !Tile::kCooperative;
  const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
  const int warp = __shfl_sync(0xffffffff, thread / 32, 0);
  typename Gemm::Epilogue epilogue{{smem.epilogue, consumer, warp, lane}, params.epilogue};
  typename Mainloop::State state;
  typename Gemm::Scheduler scheduler(params.scheduler, rank);
  uint32_t order_phase = consumer == 0;  // the first consumer need not wait for the second
  if (kPingPong && consumer == 1) {
    scheduler.advance(1);
    state.advance(params.scheduler.k_blocks);
  }
  if (scheduler.is_valid()) epilogue.prefetch_source(scheduler.work());
  while (scheduler.is_valid()) {
    const WorkTile work = scheduler.work();
    float accumulators[Tile::kRowBlocks][Tile::kBlockN / 2];
    epilogue.begin(work, accumulators);
#pragma unroll
    for (auto& of_block : accumulators) warpgroup_fence_operand(of_block);
    if constexpr (kPingPong) {
      // Also because a barrier tells only the present phase from the one before: a consumer that
      // waits at a stage must not be further ahead.
      smem.order[consumer].wait(order_phase);
      order_phase ^= 1;
    }
    const auto issued = [&] {
      if (kPingPong && thread == 0) smem.order[consumer ^ 1].arrive();
    };
    if constexpr (Gemm::Epilogue::kTakesHalves) {
      const auto put_aside = [&](auto& of_block, int block) {
        epilogue.put_aside(of_block, block);
      };
      Mainloop::mma_in_halves(smem.mainloop, smem.pipeline, state, work, lane, accumulators,
                              put_aside, issued);
    } else {
      Mainloop::mma(smem.mainloop, smem.pipeline, state, work, consumer, lane, accumulators,
                    issued);
    }
    if constexpr (kPingPong) state.advance(params.scheduler.k_blocks);  // the other consumer's tile
    scheduler.advance(kPingPong ? Tile::kConsumers : 1);
    epilogue.store(accumulators, work, scheduler.work(), scheduler.is_valid());
  }
  epilogue.finish();
  if (lane == 0) tma_store_wait<0>();
}

template <class Gemm>
__global__ void __launch_bounds__(Gemm::Tile::kThreads, 1)
    matmul_hopper_kernel(const __grid_constant__ typename Gemm::Params params) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Tile = typename Gemm::Tile;
  if (!Gemm::Epilogue::is_wanted(params.epilogue)) return;
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& smem = *reinterpret_cast<typename Gemm::SharedStorage*>(shared_memory);
  if (threadIdx.x == 0) {
    Gemm::Mainloop::prefetch_maps(params.mainloop);
    smem.pipeline.init(1, Gemm::Mainloop::kConsumerWarps);
    smem.epilogue.init();
    for (Barrier& barrier : smem.order) barrier.init(1);
    fence_barrier_init();
  }
  if constexpr (Tile::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  // Of a second kernel that adds partial sums: its CTAs come as these go, and wait for all of them.
  launch_dependent_grids();

  const int rank = blockIdx.x % Tile::kCluster;
  const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
  if (warp < 4) {
    warpgroup_reg_dealloc<Tile::kProducerRegisters>();
    if (threadIdx.x == 0) produce<Gemm>(smem, params, rank);
    __syncwarp();
  } else {
    warpgroup_reg_alloc<Tile::kConsumerRegisters>();
    consume<Gemm>(smem, params, rank, warp / 4 - 1);
  }
  // No CTA leaves while another of the cluster may still write to its shared memory.
  if constexpr (Tile::kCluster > 1) {
    cluster_arrive();
    cluster_wait();
  }
#endif
}

// How many clusters of a kernel run at once; cudaErrorNotSupported if it does not run.
template <class Gemm>
cudaError_t find_clusters(int* clusters) {
  using Tile = typename Gemm::Tile;
  const auto kernel = matmul_hopper_kernel<Gemm>;
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(find_hopper_kernel(kernel, &limits));
  // Not every SM has a neighbour to form a cluster with.
  JAXLLM_RETURN_IF_ERROR(find_resident_clusters(kernel, Tile::kCluster, Tile::kThreads,
                                                sizeof(typename Gemm::SharedStorage), clusters));
  return *clusters > 0 ? cudaSuccess : cudaErrorNotSupported;
}

// Launches a CTA for each SM, or as many clusters as there are.
template <class Gemm>
cudaError_t launch_clusters(cudaStream_t stream, int64_t clusters,
                            const typename Gemm::Params& params) {
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(clusters) * Gemm::Tile::kCluster);
  launch.block = dim3(Gemm::Tile::kThreads);
  launch.shared = sizeof(typename Gemm::SharedStorage);
  launch.cluster = Gemm::Tile::kCluster;
  launch.cooperative = Gemm::Scheduler::kCooperativeLaunch;
  return launch_kernel(stream, matmul_hopper_kernel<Gemm>, launch, params);
}

// In how many row tiles, of clusters, the concurrent tiles lie. If B stays in the L2 cache, few:
// then all columns of a row are written at about the same time. GPT-2's GEMMs before GELU and
// before attention took 2 to 3% less time so on an H100. Else B is read again for each group of row
// tiles, and the more of them the better.
// Of 8-bit floats a deep B does not stay either way. The operands of the concurrent tiles are the
// fewer bytes the nearer these are to a square: 4 row tiles took 3 to 6% less time than 16.
inline int group_m_of(const GemmShape& shape, int64_t element_bytes) {
  constexpr int64_t kCachedBytes = int64_t{16} << 20, kDeep = 8192;
  if (element_bytes == 1 && shape.depth >= kDeep) return 4;
  return shape.columns * shape.depth * element_bytes <= kCachedBytes ? 4 : 16;
}

// Runs a GEMM on at most `*clusters` clusters, and returns there how many there are.
template <class Gemm, typename T = typename Gemm::Mainloop::Element>
cudaError_t launch_gemm(cudaStream_t stream, const GemmShape& shape, const T* a, const T* b,
                        const typename Gemm::Epilogue::Arguments& arguments,
                        int64_t* clusters = nullptr) {
  int found = 0;
  JAXLLM_RETURN_IF_ERROR(find_clusters<Gemm>(&found));
  typename Gemm::Params params;
  JAXLLM_RETURN_IF_ERROR(
      Gemm::Mainloop::encode(a, b, shape.rows, shape.columns, shape.depth, 0, &params.mainloop));
  JAXLLM_RETURN_IF_ERROR(Gemm::Epilogue::to_params(shape, arguments, &params.epilogue));
  int64_t count = clusters == nullptr ? found : std::min<int64_t>(found, *clusters);
  JAXLLM_RETURN_IF_ERROR(
      Gemm::Scheduler::plan(shape, group_m_of(shape, sizeof(T)), &params.scheduler, &count));
  if (clusters != nullptr) *clusters = count;
  return launch_clusters<Gemm>(stream, count, params);
}

}  // namespace jaxllm::hopper
