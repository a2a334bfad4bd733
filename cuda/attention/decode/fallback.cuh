// The fallback of decode_attention without tensor cores: for float32, and for heads of any width.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/decode/kv_rows.cuh"
#include "attention/decode/merge.cuh"
#include "attention/decode/scheduler.cuh"
#include "common/dependent_launch.cuh"
#include "common/fast_math.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm::decode {

// A lane has columns lane, lane + 32, ..., at most kColumns of them.
template <typename T, typename C, int kColumns>
__global__ void __launch_bounds__(32 * kMinWarps)
    decode_attention_any_width_kernel(const Params<T, C> params) {
  constexpr int kWarps = kMinWarps;
  extern __shared__ __align__(128) char smem[];
  const WorkTile work = work_tile(params);
  const size_t warp_bytes = sizeof(float) * params.max_heads * params.width;
  SplitKvMerge<kWarps, 0> merge(smem + kWarps * warp_bytes, params.cluster, work.heads,
                                params.width, params.cta_columns);
  launch_dependent_grids();
  wait_on_dependent_grids();
  merge.set_sinks(params.sinks, work.sequence * params.heads + work.first_head);
  const int length = count_keys(params, params.lengths[work.sequence]);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float q[kMaxHeads][kColumns], acc[kMaxHeads][kColumns] = {};
  float largest[kMaxHeads], total[kMaxHeads] = {};
#pragma unroll
  for (int h = 0; h < kMaxHeads; ++h) {
    largest[h] = -INFINITY;
    const T* row =
        params.q + (int64_t{work.sequence} * params.heads + work.first_head + h) * params.width;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane + 32 * i;
      q[h][i] = h < work.heads && column < params.width ? to_float(row[column]) : 0.0f;
    }
  }
  const EitherKvRows rows(params, work.sequence);
  for (int token = first_key(params, length) + blockIdx.x * kWarps + warp; token < length;
       token += params.splits * kWarps) {
    const int64_t row = rows(token) * params.kv_heads + work.kv_head;
    float key[kColumns], value[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane + 32 * i;
      const bool inside = column < params.width;
      key[i] = inside ? to_float(params.k[row * params.width + column]) : 0.0f;
      value[i] = inside ? to_float(params.v[row * params.width + column]) : 0.0f;
    }
    float k_scale = params.scale * kLog2E, v_scale = 1.0f;
    if constexpr (sizeof(C) == 1) {
      k_scale *= params.k_scales[row];
      v_scale = params.v_scales[row];
    }
    float scores[kMaxHeads] = {};
#pragma unroll
    for (int h = 0; h < kMaxHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) scores[h] += q[h][i] * key[i];
    }
    sum_over_lanes<32>(scores);
#pragma unroll
    for (int h = 0; h < kMaxHeads; ++h) {
      const float score = scores[h] * k_scale, most = fmaxf(largest[h], score);
      const float factor = exp2f(largest[h] - most), weight = exp2f(score - most);
      largest[h] = most;
      total[h] = total[h] * factor + weight;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        acc[h][i] = acc[h][i] * factor + weight * v_scale * value[i];
      }
    }
  }
  float* const of_warp = reinterpret_cast<float*>(smem + warp * warp_bytes);
#pragma unroll
  for (int h = 0; h < kMaxHeads; ++h) {
    if (h >= work.heads) continue;
    if (lane == 0) merge.set_statistics(h, largest[h], total[h]);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane + 32 * i;
      if (column < params.width) of_warp[merge.column_offset(h, column)] = acc[h][i];
    }
  }
  merge.finish(smem, warp_bytes, merge_output(params, work));
}

}  // namespace jaxllm::decode
