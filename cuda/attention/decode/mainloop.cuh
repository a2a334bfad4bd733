// The kernel of decode_attention for short parts of a cache, and for up to eight query heads of a
// key head, on tensor cores.
//
// The scores of 16 keys are a product of keys and queries (see mma.cuh). The product of values and
// weights gives the columns of the result as rows. Lane 4 r + c has:
//
//   q k^T   keys r and r + 8, heads 2c and 2c + 1
//   p v     columns r kPerLane, r kPerLane + 1, ... of a part of the head, heads 2c and 2c + 1
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "attention/decode/kv_pipeline.cuh"
#include "attention/decode/kv_rows.cuh"
#include "attention/decode/merge.cuh"
#include "attention/decode/mma.cuh"
#include "attention/decode/scheduler.cuh"
#include "common/convert_int8.cuh"
#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "common/fast_math.cuh"
#include "common/fragment.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm::decode {

// Keys or values of a step: see `load` below.
template <int kNumber>
using Item = std::integral_constant<int, kNumber>;

template <int kWarps, int kStages, bool kPaged, typename T, typename C, int kHeadDim>
__global__ void __launch_bounds__(32 * kWarps, kMaxWarps / kWarps)
    decode_attention_kernel(const Params<T, C> params) {
  using Rows = KvRows<kPaged>;
  using Loader = KvLoader<C, kHeadDim, Rows>;
  constexpr int kPerLoad = 16 / sizeof(C);           // columns of a key
  constexpr int kLoads = kHeadDim / (4 * kPerLoad);  // of a key, by each of four lanes
  constexpr int kPerLane = kHeadDim % (8 * kPerLoad) ? kPerLoad / 2 : kPerLoad;  // of a value
  constexpr int kParts = kHeadDim / (8 * kPerLane);  // of a value, by each of eight lanes
  constexpr int kWords = kPerLane * sizeof(C) / 4, kLaneBytes = kPerLane * sizeof(C);
  constexpr int kTokens = Loader::kTokens, kProducts = Loader::kProducts;
  static_assert(kLoads * 4 * kPerLoad == kHeadDim && kParts * 8 * kPerLane == kHeadDim);
  extern __shared__ __align__(128) char smem[];  // the warps' rings, then SplitKvMerge's memory
  const WorkTile work = work_tile(params);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
  // The wait takes 0.1 us even if there is no kernel to wait for, of the kernel's 5 to 11.
  if (params.overlap || params.clusters > 1) launch_dependent_grids();
  if (params.overlap) wait_on_dependent_grids();

  // All warps load the length and the queries before any warp loads keys: behind the keys they
  // would come a microsecond later.
  const int length = params.lengths[work.sequence];
  uint32_t q[kLoads][kPerLoad / 2] = {};
  if (r < work.heads) {
    const uint32_t head = work.sequence * params.heads + work.first_head + r;
    const T* row = params.q + uint64_t{head} * kHeadDim + c * kPerLoad;
    load_query(q, row);
  }
  __syncthreads();

  const Rows rows(params, work.sequence);
  // The warps of all splits take the tokens of an MMA in rotation; a step has kProducts of them.
  const int stride = params.splits * kWarps * kTokens, step = kProducts * stride;
  int first = (blockIdx.x * kWarps + warp) * kTokens;
  const Loader keys(params.k, params.k_scales, rows, work.kv_head, params.kv_heads);
  const Loader values(params.v, params.v_scales, rows, work.kv_head, params.kv_heads);
  char* const ring = smem + warp * ring_bytes<C>(kHeadDim, kStages);
  // The first keys do not wait for the length, unless a window makes them depend on it: the score
  // of a key past it is dropped, whatever its value. A value past it would be multiplied by zero,
  // and might be NaN.
  if (params.window == 0 && first < params.length) {
    keys.load(ring, first, stride, params.length - 1);
  }
  cp_async_commit();
  const int last = count_keys(params, length) - 1;
  if (params.window != 0) {
    first += first_key(params, last + 1);
    if (first <= last) keys.load(ring, first, stride, last);
    cp_async_commit();
  }
  // Starts to load an item: 2 s are the keys of step s from the present one, 2 s + 1 its values.
  const auto load = [&](auto item, char* stage) {
    constexpr int kItem = decltype(item)::value;
    const int start = first + kItem / 2 * step;
    if (start <= last) (kItem % 2 ? values : keys).load(stage, start, stride, last);
    cp_async_commit();
  };
  load(Item<1>{}, ring + Loader::kStageBytes);
  if constexpr (kStages == 3) load(Item<2>{}, ring + 2 * Loader::kStageBytes);
  SplitKvMerge<kWarps, kHeadDim> merge(smem + kWarps * ring_bytes<C>(kHeadDim, kStages),
                                       params.cluster, work.heads, kHeadDim, params.cta_columns);

  merge.set_sinks(params.sinks, work.sequence * params.heads + work.first_head);

  // The offsets in a stage of chunks c and c + 4 of row r, and of a value's part of rows 2c and
  // 2c + 1. All else that the lane reads is at constant distances from them.
  const int key_chunks[2] = {Loader::offset(r, c * 16),
                             Loader::offset(r, c * 16 + 64 % Loader::kRowBytes)};
  const int value_parts[2] = {Loader::offset(2 * c, r * kLaneBytes),
                              Loader::offset(2 * c + 1, r * kLaneBytes)};

  // Of heads 2c and 2c + 1.
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
  float acc[kParts][kPerLane / 2][4] = {};
  char* stage = ring;
  const auto advance = [&] {
    stage += Loader::kStageBytes;
    if (stage == ring + kStages * Loader::kStageBytes) stage = ring;
  };
  for (; first <= last; first += step) {
    cp_async_wait<kStages - 1>();
    __syncwarp();
    // Of tokens r (the first two) and r + 8, heads 2c and 2c + 1.
    float scores[kProducts][4];
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
      const int token = first + n * stride;
      float halves[2][4] = {};
      if (n == 0 || token <= last) {
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          const char* row =
              stage + key_chunks[j % 2] + j / 2 * 128 + n * kTokens * Loader::kRowBytes;
          uint32_t low[4], high[4];
          load_words(low, row);
          load_words(high, row + 8 * Loader::kRowBytes);
          multiply_keys<T, C>(halves, low, high, q[j]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = r + i / 2 * 8;
        float scale = params.scale * kLog2E;
        if constexpr (sizeof(C) == 1) scale *= Loader::scales(stage)[n * kTokens + row];
        scores[n][i] = token + row <= last ? (halves[0][i] + halves[1][i]) * scale : -INFINITY;
      }
    }
    __syncwarp();
    load(Item<kStages>{}, stage);
    advance();

    float factors[2];
    online_softmax(scores, largest, total, factors, [](float most) { return most; });
    if (__any_sync(kFullWarp, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) rescale(acc[p], factors);
    }
    cp_async_wait<kStages - 1>();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
      if (n > 0 && first + n * stride > last) break;
      uint32_t weights[2];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float scale = 1.0f;
        if constexpr (sizeof(C) == 1) scale = Loader::scales(stage)[n * kTokens + r + 8 * t];
        weights[t] = movmatrix_transposed(
            pack_pair<T>(scores[n][2 * t] * scale, scores[n][2 * t + 1] * scale));
      }
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        uint32_t value[4][kWords];  // of tokens 2c, 2c + 1, 2c + 8, 2c + 9
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          load_words(value[t], stage + value_parts[t % 2] + p * 8 * kLaneBytes +
                                   (n * kTokens + t / 2 * 8) * Loader::kRowBytes);
        }
#pragma unroll
        for (int i = 0; i < kPerLane / 2; ++i) {
          mma_m16n8k16<T>(acc[p][i],
                          {column_pair<T, C>(value[0], value[1], 2 * i),
                           column_pair<T, C>(value[0], value[1], 2 * i + 1),
                           column_pair<T, C>(value[2], value[3], 2 * i),
                           column_pair<T, C>(value[2], value[3], 2 * i + 1)},
                          weights[0], weights[1]);
        }
      }
    }
    __syncwarp();
    load(Item<kStages + 1>{}, stage);
    advance();
  }

  // Epilogue. The sums overwrite the ring, for which a warp without keys may still have a copy in
  // flight.
  sum_over_groups<4>(total);
  cp_async_wait<0>();
  __syncwarp();
  float* const of_warp = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = 2 * c + h;
    if (head >= work.heads) continue;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < kPerLane / 2; i += 2) {
        const float *low = acc[p][i] + h, *high = acc[p][i + 1] + h;  // two columns of either
        store(of_warp + merge.column_offset(head, (p * 8 + r) * kPerLane + 2 * i),
              Pack<float>::of({low[0], low[2], high[0], high[2]}));
      }
    }
    if (r == 0) merge.set_statistics(head, largest[h], total[h]);
  }
  merge.finish(smem, ring_bytes<C>(kHeadDim, kStages), merge_output(params, work));
}

}  // namespace jaxllm::decode
