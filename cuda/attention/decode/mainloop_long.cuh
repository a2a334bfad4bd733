// The kernel of decode_attention for long caches: a cluster of CTAs for a key head, one CTA per SM
// on half of the SMs, which read as fast as all of them would.
//
// No warp waits for another warp. A warp loads its own stages of keys and values, and its keys are
// one stage ahead of its values: to compute weights takes longer than to add values, and meanwhile
// the values of the tokens before arrive:
//
//   stages   k0 | k1 v0 | k2 v1 | ... | v_last
//
// The work after the last value, when memory is idle, is short. A warp sends its accumulator of 16
// columns, unmerged, to the CTA of the cluster that merges and writes these columns. It has sent
// the statistics long before.
#pragma once

#include <type_traits>

#include "attention/decode/kv_rows.cuh"
#include "attention/decode/merge.cuh"
#include "attention/decode/mma.cuh"
#include "attention/decode/scheduler.cuh"
#include "common/cluster.cuh"
#include "common/convert_int8.cuh"
#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "common/fast_math.cuh"
#include "common/fragment.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm::decode {

// C is the type of the cache.
template <typename C, int kHeadDimension>
struct LongTraits {
  static constexpr int kHeadDim = kHeadDimension, kTokenBytes = kHeadDim * sizeof(C);
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kHeads = 4;  // at most, of a key head
  static constexpr int kStageBytes = 8192, kTokens = kStageBytes / kTokenBytes;
  static constexpr int kProducts = kTokens / 16;
  // Of a warp. With three, some CTAs get still less of the bandwidth that they share with others,
  // and the last CTA ends later.
  static constexpr int kStages = 2;
  static constexpr int kGroups = kHeadDim / 16;  // of the columns
  static constexpr int kCtas = kMaxCluster;      // of a cluster; of these kGroups merge
  static constexpr int kMessages = kCtas * kWarps;
  static constexpr int kSums = 16 * kHeads;                // of a message
  static constexpr int kMergers = kThreads / kSums;        // threads that merge a result
  static constexpr int kPerMerger = kMessages / kMergers;  // messages
  static_assert(kTokenBytes >= 128 && kGroups <= kCtas);
};

template <class Traits>
struct LongSmem {
  char stages[Traits::kWarps][Traits::kStages][Traits::kStageBytes];
  // Messages, which each warp of the cluster sends every CTA. The padding puts those that mergers
  // read together in different banks.
  float sums[Traits::kMessages][Traits::kSums + 32 / Traits::kMergers];
  float2 statistics[Traits::kMessages][Traits::kHeads];
  hopper::Barrier statistics_full, sums_full;
};

// Its CTAs come in clusters of kCtas, which an image below sm_90 cannot have: there it is empty,
// and the launcher chooses decode_attention_kernel.
template <bool kPaged, typename T, typename C, int kHeadDim>
__global__ void __launch_bounds__(LongTraits<C, kHeadDim>::kThreads, 1)
    decode_attention_long_kernel(const Params<T, C> params) {
#if __CUDA_ARCH__ >= 900
  using Traits = LongTraits<C, kHeadDim>;
  constexpr bool kInt8 = sizeof(C) == 1;
  constexpr int kTokens = Traits::kTokens, kTokenBytes = Traits::kTokenBytes;
  constexpr int kProducts = Traits::kProducts, kGroups = Traits::kGroups;
  constexpr int kPerLoad = 16 / sizeof(C), kLoads = kHeadDim / (4 * kPerLoad);  // columns of a key
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<LongSmem<Traits>*>(memory);
  const uint32_t sequence = blockIdx.z, kv_head = blockIdx.y;
  if (params.overlap) wait_on_dependent_grids();

  // The length and the queries are loaded before the keys: behind them they would come later.
  // Neither compiler nor assembler moves these loads past the barrier of the warp below.
  const int length = params.lengths[sequence];
  // Columns of query lane / 4; of the last query, if there are fewer.
  uint32_t q[kLoads][kPerLoad / 2];
  const uint32_t my_query = min(threadIdx.x % 32 / 4, static_cast<uint32_t>(params.group) - 1);
  const uint32_t my_head = sequence * params.heads + kv_head * params.group + my_query;
  const T* const query = params.q + uint64_t{my_head} * kHeadDim + threadIdx.x % 4 * kPerLoad;
  load_query(q, query);
  // The lanes copy 128 consecutive bytes of a token, but read a chunk of 16 bytes of eight tokens
  // at a time. So chunk i of token t is swizzled to i ^ t % 8: then those are in different banks.
  constexpr int kTokensAtOnce = 4;
  const uint32_t my_token = threadIdx.x % 32 / 8, my_chunk = threadIdx.x % 8;
  const uint32_t stride = params.kv_heads * kTokenBytes;  // from a token to the next
  int first = (blockIdx.x * Traits::kWarps + threadIdx.x / 32) * kTokens;
  const KvRows<kPaged> rows(params, sequence);
  const uint64_t my_offset =
      uint64_t(rows.first()) * stride + kv_head * kTokenBytes + my_chunk * 16;
  const int my_target = my_token * kTokenBytes + (my_chunk ^ my_token) * 16;
  char* const ring = shared.stages[threadIdx.x / 32][0];
  // Loads a stage of keys or values, the tokens from `start` on. Tokens from `end` on are zeros,
  // unless all are `whole`.
  const auto load = [&](auto whole, const C* cache, char* stage, int start, int end) {
    const uint32_t token = start + my_token;
    const char* const of_sequence = reinterpret_cast<const char*>(cache) + my_offset;
    const char* from = of_sequence + uint64_t{rows(token)} * stride;
#pragma unroll
    for (int i = 0; i < kTokens; i += kTokensAtOnce) {
      if (kPaged && i > 0) from = of_sequence + uint64_t{rows(token + i)} * stride;
      char* const to = stage + (my_target ^ i % 8 * 16) + i * kTokenBytes;
#pragma unroll
      for (int at = 0; at < kTokenBytes; at += 128) {
        if constexpr (decltype(whole)::value) {
          cp_async_16(to + at, from + at);
        } else {
          cp_async_16(to + at, from + at, static_cast<int>(token) + i < end);
        }
      }
      if (!kPaged) from += kTokensAtOnce * stride;
    }
  };
  __syncwarp();
  // The first keys do not wait for the length, unless a window makes them depend on it: the score
  // of a key past it is dropped, whatever its value.
  const bool loaded_early = params.window == 0 && first + kTokens <= params.length;
  if (loaded_early) {
    load(std::true_type{}, params.k, ring, first, 0);
    cp_async_commit();
  }
  if (params.overlap || params.clusters > 1) launch_dependent_grids();
  // A compiler fence on `lane`, so that what follows is computed after the loads.
  int lane = threadIdx.x % 32;
  opaque(lane);
  const int r = lane / 4, c = lane % 4;
  const int last = count_keys(params, length) - 1;
  if (params.window != 0) first += first_key(params, last + 1);
  const int step = params.splits * Traits::kWarps * kTokens;  // from a step's tokens to the next
  // The scales of tokens lane, lane + 32, ... of a stage.
  constexpr int kScales = kInt8 ? kTokens / 32 : 1;
  float key_scales[kScales], value_scales[kScales];
  const auto load_scales = [&](int start) {
    if constexpr (kInt8) {
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        // These loads depend on the length. The assembler may wait for loads in flight together as
        // for one; then the length would come with the last of them, behind the keys.
        const int token = min(start + 32 * i + lane, max(last, 0));
        const int64_t row = (rows.first() + rows(token)) * params.kv_heads + kv_head;
        key_scales[i] = params.k_scales[row], value_scales[i] = params.v_scales[row];
      }
    }
  };
  load_scales(first);
  // A step has kTokens tokens for each warp that reads the key head. The warp loads the keys of
  // step 0; then the keys of a step and the values of the one before, in alternation; and the
  // values of the last step: two items for each step in which it has tokens, and two even if it has
  // none.
  struct Item {
    bool of_keys;
    int start;  // its first token
  };
  const auto item_at = [&](int index) -> Item {
    const int start = first + (index + 1) / 2 * step;
    const bool of_keys = index == 0 || (index % 2 == 1 && start <= last);
    return {of_keys, of_keys ? start : start - step};
  };
  const auto load_item = [&](int index, char* stage) {
    if (index < 2 || first + index / 2 * step <= last) {
      const Item item = item_at(index);
      load(std::false_type{}, item.of_keys ? params.k : params.v, stage, item.start, last + 1);
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int i = loaded_early; i < Traits::kStages; ++i) load_item(i, ring + i * Traits::kStageBytes);
  if (threadIdx.x == 0) {
    shared.statistics_full.init(1);
    shared.sums_full.init(1);
    hopper::fence_barrier_init();
  }
  __syncwarp();
  if (threadIdx.x == 0) {
    shared.statistics_full.arrive_and_expect(sizeof(shared.statistics));
    shared.sums_full.arrive_and_expect(Traits::kMessages * Traits::kSums * sizeof(float));
  }
  hopper::cluster_arrive_relaxed();

  // The lane's first token of an MMA's keys; its other one is 8 further. Tokens of lanes that read
  // together are in different banks.
  const int key = r / 2 + r % 2 * 4;
  // The token of a stage's values whose address the lane gives to ldmatrix_transposed, in the order
  // of the weights (see `key`). With 16-bit elements the instruction loads the tokens of an MMA, of
  // two groups of eight columns; with int8, of two MMAs, of pairs of columns.
  const int value_row = lane % 8 / 2 + lane % 2 * 4;
  const int value_token = value_row + (kInt8 ? lane / 8 : lane / 16) * 8;

  const int rank = hopper::cluster_rank(), message = rank * Traits::kWarps + threadIdx.x / 32;
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {};  // of heads 2c and 2c + 1
  float acc[kGroups][4] = {};  // of two columns, and of heads 2c and 2c + 1
  // Of the step whose values come next, and of the step after it, if its keys have come.
  uint32_t weights[kProducts][2] = {}, next_weights[kProducts][2] = {};
  float factors[2] = {}, next_factors[2] = {};
  const auto take_next_weights = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factors[i] = next_factors[i];
#pragma unroll
      for (int n = 0; n < kProducts; ++n) weights[n][i] = next_weights[n][i];
    }
  };
  char* stage = ring;
#pragma unroll 1
  for (int index = 0;; ++index) {
    const auto [of_keys, start] = item_at(index);
    cp_async_wait<Traits::kStages - 1>();
    __syncwarp();
    // Of tokens `key` (the first two) and key + 8 of an MMA, heads 2c and 2c + 1.
    float scores[kProducts][4];
    if (of_keys) {
      const char* const keys = stage + key * kTokenBytes;
#pragma unroll
      for (int n = 0; n < kProducts; ++n) {
        float halves[2][4] = {};
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          const char* chunk = keys + n * 16 * kTokenBytes + ((c + j * 4) ^ key) * 16;
          uint32_t low[4], high[4];
          load_words(low, chunk);
          load_words(high, chunk + 8 * kTokenBytes);
          multiply_keys<T, C>(halves, low, high, q[j]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = n * 16 + key + i / 2 * 8;
          float scale = params.scale * kLog2E;
          if constexpr (kInt8) {
            scale *= __shfl_sync(kFullWarp, key_scales[n / 2], token % 32);
          }
          const float score = (halves[0][i] + halves[1][i]) * scale;
          scores[n][i] = start + token <= last ? score : -INFINITY;
        }
      }
    } else {
      const bool last_item = index % 2 == 1;
      if (last_item) take_next_weights();
      if (__any_sync(kFullWarp, factors[0] != 1.0f || factors[1] != 1.0f)) {
        rescale(acc, factors);
      }
      const char* const values = stage + value_token * kTokenBytes;
#pragma unroll
      for (int n = 0; n < kProducts; n += kInt8 ? 2 : 1) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const int chunk = kInt8 ? g : g * 2 + lane / 8 % 2;
          uint32_t words[4];
          ldmatrix_transposed(
              words, smem_address(values + n * 16 * kTokenBytes + (chunk ^ value_row) * 16));
          if constexpr (kInt8) {
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              const uint32_t low = __byte_perm(words[2 * m], 0, 0x3120);
              const uint32_t high = __byte_perm(words[2 * m + 1], 0, 0x3120);
              mma_m16n8k16<T>(acc[g],
                              {convert_int8x2<T>(low, false), convert_int8x2<T>(low, true),
                               convert_int8x2<T>(high, false), convert_int8x2<T>(high, true)},
                              weights[n + m][0], weights[n + m][1]);
            }
          } else {
            mma_m16n8k16<T>(acc[g], {words[0], words[1], words[2], words[3]}, weights[n][0],
                            weights[n][1]);
          }
        }
      }
      if (last_item) break;
    }
    __syncwarp();
    load_item(index + Traits::kStages, stage);
    stage += Traits::kStageBytes;
    if (stage == ring + Traits::kStages * Traits::kStageBytes) stage = ring;
    if (!of_keys) continue;

    take_next_weights();
    online_softmax(scores, largest, total, next_factors, finite_or_zero);
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float scale = 1.0f;
        if constexpr (kInt8) {
          const int token = n * 16 + key + 8 * t;
          scale = __shfl_sync(kFullWarp, value_scales[n / 2], token % 32);
          if (start + token > last) scale = 0.0f;  // it may be NaN
        }
        next_weights[n][t] = movmatrix_transposed(
            pack_pair<T>(scores[n][2 * t] * scale, scores[n][2 * t + 1] * scale));
      }
    }
    load_scales(start + step);
    if (start + step > last) {
      sum_over_groups<4>(total);
      hopper::cluster_wait();
      // Lane 4 r + c sends CTA r the statistics of heads 2c and 2c + 1.
      if (r < kGroups && c < Traits::kHeads / 2) {
        hopper::store_remote(r, &shared.statistics[message][2 * c],
                             Pack<float>::of({largest[0], total[0], largest[1], total[1]}),
                             shared.statistics_full);
      }
    }
  }

  // Epilogue: sends each CTA the sums of its columns, and merges those of this CTA.
  if (c < Traits::kHeads / 2) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      hopper::store_remote(g, &shared.sums[message][(r * 2 + c) * 4], Pack<float>::of(acc[g]),
                           shared.sums_full);
    }
  }
  if (rank >= kGroups) return;
  const int result = threadIdx.x / Traits::kMergers, merger = threadIdx.x % Traits::kMergers;
  const int head = result / 4 % 2 * 2 + result % 2;  // of the result
  const float sink = params.sinks.in_base_2(sequence * params.heads + kv_head * params.group +
                                            min(head, params.group - 1));
  float2 statistics[Traits::kPerMerger];
  float most = -INFINITY, total_and_sum[2] = {};
  shared.statistics_full.wait(0);
#pragma unroll
  for (int i = 0; i < Traits::kPerMerger; ++i) {
    statistics[i] = shared.statistics[merger + Traits::kMergers * i][head];
    most = fmaxf(most, statistics[i].x);
  }
#pragma unroll
  for (int offset = 1; offset < Traits::kMergers; offset *= 2) {
    most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, offset));
  }
#pragma unroll
  for (int i = 0; i < Traits::kPerMerger; ++i) {
    statistics[i].x = weight_of_part(statistics[i].x, most);
    total_and_sum[0] += statistics[i].x * statistics[i].y;
  }
  shared.sums_full.wait(0);
#pragma unroll
  for (int i = 0; i < Traits::kPerMerger; ++i) {
    total_and_sum[1] += statistics[i].x * shared.sums[merger + Traits::kMergers * i][result];
  }
  sum_over_lanes<Traits::kMergers>(total_and_sum);
  const int first_head = kv_head * params.group;
  const WorkTile work = {static_cast<int>(sequence), static_cast<int>(kv_head), first_head,
                         params.group};
  const int row = result / 8, second = result / 2 % 2;
  const int column = kInt8 ? row * 2 + second : row + second * 8;
  if (merger == 0 && head < work.heads) {
    merge_output(params, work)
        .write(head, rank * 16 + column, kHeadDim, total_and_sum[1], most, total_and_sum[0], sink);
  }
#endif
}

}  // namespace jaxllm::decode
