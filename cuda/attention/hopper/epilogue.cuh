// The epilogues: the output and lse of the forward, and dk and dv of the backward. Each leaves
// through shared memory, from where TMA stores it.
#pragma once

#include <cmath>

#include "attention/hopper/backward_traits.cuh"
#include "attention/hopper/forward_traits.cuh"
#include "common/fragment.cuh"
#include "common/tma.cuh"

namespace jaxllm::hopper {

// Divides a consumer's output by the softmax's sums, in which the sink is one more term, and stores
// it, with lse = log(sum(e^scores)).
template <typename T, class Traits, class Softmax>
__device__ __forceinline__ void store_output(ForwardSmem<T, Traits>& smem,
                                             const ForwardParams& params, const LocalMask& mask,
                                             const CUtensorMap& out_map,
                                             const ForwardWorkTile& work, int first_query,
                                             int consumer, const Softmax& softmax,
                                             const float (&o)[Traits::kValueDim / 2]) {
  const int thread = threadIdx.x % kWarpgroup;
  const int row = first_query + accumulator_row(thread);
  // The earlier tile's output has left shared memory.
  if (thread == 0) tma_store_wait_read<0>();
  const int64_t head = int64_t{work.sequence} * params.heads + work.head;
  const float sink = params.sinks.in_base_2(head);
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = softmax.row_sum[r];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    // Where a softcap bounds the scores, a row without keys has a maximum too.
    const float largest = total == 0.0f ? -INFINITY : softmax.row_max[r] * (params.scale * kLog2E);
    const attention::SoftmaxEnd end = attention::end_softmax(largest, total, sink);
    factor[r] = end.factor;
    if (thread % 4 == 0 && row + 8 * r < mask.queries) {
      params.lse[head * mask.queries + row + 8 * r] = end.lse * kLn2;
    }
  }
  const int barrier = ForwardNamedBarriers::kEpilogue + consumer;
  named_barrier_sync(barrier, kWarpgroup);
  char* const target = reinterpret_cast<char*>(smem.out(consumer));
#pragma unroll
  for (int i = 0; i < Traits::kValueDim / 2; i += 2) {
    const int r = i / 2 % 2, column = i / 4 * 8;
    const uint32_t offset = swizzled_offset(accumulator_row(thread) + 8 * r,
                                            column % kSwizzleColumns + accumulator_column(thread));
    *reinterpret_cast<uint32_t*>(target + column / kSwizzleColumns * 64 * kSwizzleRowBytes +
                                 offset) = pack_pair<T>(o[i] * factor[r], o[i + 1] * factor[r]);
  }
  fence_async_proxy();
  named_barrier_sync(barrier, kWarpgroup);
  if (thread == 0 && first_query < mask.queries) {
    for (int block = 0; block < Traits::kValueColumnBlocks; ++block) {
      tma_store_4d(out_map, smem.out(consumer) + block * 64 * kSwizzleColumns,
                   {block * kSwizzleColumns, work.head, first_query, work.sequence});
    }
    tma_store_commit();
  }
  if constexpr (Traits::kOutputInQ) {
    if (thread == 0) tma_store_wait_read<0>();
    smem.q_pipeline.empty[0].arrive();
  }
}

// Writes 64 rows of a gradient, the first or second ones, to a tile of kRows rows with the layout
// of Q, K and V; from column 8 `first_chunk` on.
template <int kRows, typename T, int kSize>
__device__ __forceinline__ void store_gradient(const float (&gradient)[kSize], float factor,
                                               T* tile, int half, int first_chunk = 0) {
  const int thread = threadIdx.x % kWarpgroup;
  const uint32_t rows = smem_address(tile) + stmatrix_offset(half, thread);
#pragma unroll
  for (int chunk = 0; chunk < kSize / 4; chunk += 2) {  // of eight columns
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = gradient + 4 * chunk + 2 * i;
      words[i] = pack_pair<T>(pair[0] * factor, pair[1] * factor);
    }
    stmatrix(stmatrix_chunk<kRows>(rows, first_chunk + chunk), words);
  }
}

// One thread: stores a consumer's rows of both gradients, unless they are all beyond the last key.
template <class Traits, typename T>
__device__ __forceinline__ void tma_store_gradients(const CUtensorMap& dk_map, const T* dk_tile,
                                                    const CUtensorMap& dv_map, const T* dv_tile,
                                                    const BackwardWorkTile& tile, int consumer,
                                                    int keys) {
  const int first_key = consumer_first_key<Traits>(tile, consumer);
  if (first_key >= keys) return;
  for (int block = 0; block < Traits::kColumnBlocks; ++block) {
    const Box box{block * kSwizzleColumns, tile.kv_head, first_key, tile.sequence};
    const int offset = (block * Traits::kBlockN + consumer * 64) * kSwizzleColumns;
    tma_store_4d(dk_map, dk_tile + offset, box);
    tma_store_4d(dv_map, dv_tile + offset, box);
  }
  tma_store_commit();
}

}  // namespace jaxllm::hopper
