// One query of each head against a long cache: a block on half of the multiprocessors, which read
// as fast as all of them would, and a cluster of blocks for a key head.
//
// Each warp reads its own items, keys and values, and no warp waits for another. Its keys are an
// item ahead of its values: while weights are worked out, which takes longer than adding up values,
// those of the tokens before come. And what comes after the last value, when memory has nothing to
// do, is short: a warp sends its sums of 16 columns, just as it has them, to that block of the
// cluster which adds up and writes these columns. The statistics beside them it has sent long
// before.
#pragma once

#include <type_traits>

#include "attention/decode_arguments.cuh"
#include "attention/decode_merge.cuh"
#include "attention/decode_scores.cuh"
#include "common/cluster.cuh"
#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "common/fragment.cuh"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"
#include "common/widen.cuh"

namespace jaxllm::hopper {

// C is the type of the cache.
template <typename C, int kHeadWidth>
struct LongShape {
  static constexpr int kWidth = kHeadWidth, kTokenBytes = kWidth * sizeof(C);
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kHeads = 4;  // at most, of a key head
  static constexpr int kItemBytes = 8192, kItem = kItemBytes / kTokenBytes;  // tokens
  static constexpr int kProducts = kItem / 16;
  // Items of a warp that are on their way. With three, memory serves blocks that share a way to it
  // with more others still later, and the last one ends later.
  static constexpr int kDepth = 2;
  static constexpr int kGroups = kWidth / 16;  // of the columns
  static constexpr int kBlocks = kMaxCluster;  // of a cluster; of these kGroups add up
  static constexpr int kMessages = kBlocks * kWarps;
  static constexpr int kSums = 16 * kHeads;            // of a message
  static constexpr int kSharers = kThreads / kSums;    // threads that add up a result
  static constexpr int kShare = kMessages / kSharers;  // messages of each
  static_assert(kTokenBytes >= 128 && kGroups <= kBlocks);
};

template <class Shape>
struct LongShared {
  char items[Shape::kWarps][Shape::kDepth][Shape::kItemBytes];
  // Messages of sums and statistics, which each warp of the cluster sends every block. So padded
  // those that sharers read together lie in different banks.
  float sums[Shape::kMessages][Shape::kSums + 32 / Shape::kSharers];
  float2 statistics[Shape::kMessages][Shape::kHeads];
  Barrier statistics_here, sums_here;
};

// What scores are told from, where a part of the softmax may be without keys.
__device__ __forceinline__ float finite(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

// Its blocks come in clusters of kBlocks, which an image below sm_90 cannot have: there it is
// empty, and the launcher takes another.
template <typename T, typename C, int kWidth>
__global__ void __launch_bounds__(LongShape<C, kWidth>::kThreads, 1)
    decode_attention_long_kernel(const Arguments<T, C> a) {
#if __CUDA_ARCH__ >= 900
  using Shape = LongShape<C, kWidth>;
  constexpr bool kInt8 = sizeof(C) == 1;
  constexpr int kItem = Shape::kItem, kTokenBytes = Shape::kTokenBytes;
  constexpr int kProducts = Shape::kProducts, kGroups = Shape::kGroups;
  constexpr int kPerLoad = 16 / sizeof(C), kLoads = kWidth / (4 * kPerLoad);  // columns of a key
  extern __shared__ __align__(1024) char memory[];
  auto& shared = *reinterpret_cast<LongShared<Shape>*>(memory);
  const uint32_t sequence = blockIdx.z, kv_head = blockIdx.y;
  if (a.overlap) wait_on_dependent_grids();

  // The length and the queries are asked for before keys, lest they come behind them: no compiler
  // or assembler moves these loads beyond the barrier of the warp below.
  const int length = a.lengths[sequence];
  // Columns of query lane / 4: kPerLoad from (lane % 4 + 4 j) kPerLoad on. The last query stands in
  // for those that there are not.
  uint32_t q[kLoads][kPerLoad / 2];
  const uint32_t my_query = min(threadIdx.x % 32 / 4, static_cast<uint32_t>(a.group) - 1);
  const uint32_t my_head = sequence * a.heads + kv_head * a.group + my_query;
  const T* const query = a.q + uint64_t{my_head} * kWidth + threadIdx.x % 4 * kPerLoad;
  load_columns(q, query);
  // The lanes copy 128 bytes of a token, as memory likes it, and read a chunk of 16 bytes of eight
  // tokens at a time. So chunk i of token t lies at i ^ t % 8: then those lie in different banks.
  constexpr int kTokensAtOnce = 4;
  const uint32_t my_token = threadIdx.x % 32 / 8, my_chunk = threadIdx.x % 8;
  const uint32_t stride = a.kv_heads * kTokenBytes;  // from a token to the next
  const int first = (blockIdx.x * Shape::kWarps + threadIdx.x / 32) * kItem;
  const uint64_t my_offset = uint64_t{sequence} * (a.rows_of_sequence * kTokenBytes) +
                             (kv_head * kTokenBytes + my_chunk * 16);
  const int my_place = my_token * kTokenBytes + (my_chunk ^ my_token) * 16;
  char* const ring = shared.items[threadIdx.x / 32][0];
  // The item from `start` on, of keys or values; tokens from `end` on are zeros, if there may be
  // such.
  const auto fetch = [&](auto whole, const C* cache, char* slot, int start, int end) {
    const uint32_t token = start + my_token;
    const char* from = reinterpret_cast<const char*>(cache) + my_offset + uint64_t{token} * stride;
#pragma unroll
    for (int i = 0; i < kItem; i += kTokensAtOnce) {
      char* const to = slot + (my_place ^ i % 8 * 16) + i * kTokenBytes;
#pragma unroll
      for (int at = 0; at < kTokenBytes; at += 128) {
        if constexpr (decltype(whole)::value) {
          cp_async_16(to + at, from + at);
        } else {
          cp_async_16(to + at, from + at, static_cast<int>(token) + i < end);
        }
      }
      from += kTokensAtOnce * stride;
    }
  };
  __syncwarp();
  // The first keys do not wait for the length: the score of a key past it is dropped, whatever
  // stands there.
  const bool asked_early = first + kItem <= a.length;
  if (asked_early) {
    fetch(std::true_type{}, a.k, ring, first, 0);
    cp_async_commit();
  }
  if (a.overlap || a.clusters > 1) launch_dependent_grids();
  // What follows is to be worked out after that, and so begins from what the compiler cannot know.
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));
  const int r = lane / 4, c = lane % 4;
  const int last = count_keys(a, length) - 1;
  const int between = a.splits * Shape::kWarps * kItem;  // from a row's tokens to the next
  // The scales of tokens lane, lane + 32, ... of an item.
  constexpr int kScales = kInt8 ? kItem / 32 : 1;
  float key_scales[kScales], value_scales[kScales];
  const auto load_scales = [&](int start) {
    if constexpr (kInt8) {
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        // Told from the length, which is there then: the assembler may count loads that are on
        // their way together as one, and the length would come with the last of them, behind the
        // keys.
        const int64_t token = min(start + 32 * i + lane, max(last, 0));
        const int64_t at = sequence * a.rows_of_sequence + token * a.kv_heads + kv_head;
        key_scales[i] = a.k_scales[at], value_scales[i] = a.v_scales[at];
      }
    }
  };
  load_scales(first);
  // A row is kItem tokens for each warp that reads the key head. The warp's items are: keys of row
  // 0; then keys of a row and values of the one before it, in turn; and values of the last row.
  // There are two for each row in which it has tokens, and two even if it has none.
  struct Item {
    bool of_keys;
    int start;  // its first token
  };
  const auto item_at = [&](int index) -> Item {
    const int start = first + (index + 1) / 2 * between;
    const bool of_keys = index == 0 || (index % 2 == 1 && start <= last);
    return {of_keys, of_keys ? start : start - between};
  };
  const auto ask = [&](int index, char* slot) {
    if (index < 2 || first + index / 2 * between <= last) {
      const Item item = item_at(index);
      fetch(std::false_type{}, item.of_keys ? a.k : a.v, slot, item.start, last + 1);
    }
    cp_async_commit();
  };
#pragma unroll 1
  for (int i = asked_early; i < Shape::kDepth; ++i) ask(i, ring + i * Shape::kItemBytes);
  if (threadIdx.x == 0) {
    shared.statistics_here.init(1);
    shared.sums_here.init(1);
    fence_barrier_init();
  }
  __syncwarp();
  if (threadIdx.x == 0) {
    shared.statistics_here.arrive_and_expect(sizeof(shared.statistics));
    shared.sums_here.arrive_and_expect(Shape::kMessages * Shape::kSums * sizeof(float));
  }
  cluster_arrive_relaxed();

  // The first token of a product's keys for the lane; tokens of lanes that read together are in
  // different banks. The other one is eight further.
  const int key = r / 2 + r % 2 * 4;
  // The token of an item's values that the lane names to `ldmatrix_transposed`, in the order
  // of the weights: see `key`. Of 16 bits that loads tokens 0 to 7 and 8 to 15, the first eight
  // columns of each and then the others; of int8, in pairs of columns, the tokens of two products.
  const int value_row = lane % 8 / 2 + lane % 2 * 4;
  const int value_token = value_row + (kInt8 ? lane / 8 : lane / 16) * 8;

  const int rank = cluster_rank(), message = rank * Shape::kWarps + threadIdx.x / 32;
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {};  // of heads 2c and 2c + 1
  float sums[kGroups][4] = {};  // of two columns, and of heads 2c and 2c + 1
  // Of the row whose values come next, and of the row after it, where its keys have come.
  uint32_t weights[kProducts][2] = {}, next_weights[kProducts][2] = {};
  float factors[2] = {}, next_factors[2] = {};
  const auto turn_to_next = [&] {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      factors[i] = next_factors[i];
#pragma unroll
      for (int n = 0; n < kProducts; ++n) weights[n][i] = next_weights[n][i];
    }
  };
  char* slot = ring;
#pragma unroll 1
  for (int index = 0;; ++index) {
    const auto [of_keys, start] = item_at(index);
    cp_async_wait<Shape::kDepth - 1>();
    __syncwarp();
    // Of tokens `key` (the first two) and key + 8 of a product, heads 2c and 2c + 1.
    float scores[kProducts][4];
    if (of_keys) {
      const char* const keys = slot + key * kTokenBytes;
#pragma unroll
      for (int n = 0; n < kProducts; ++n) {
        // Two sums, since a product waits for the one before it that adds to the same.
        float halves[2][4] = {};
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          const char* chunk = keys + n * 16 * kTokenBytes + ((c + j * 4) ^ key) * 16;
          uint32_t low[4], high[4];
          read_words(low, chunk);
          read_words(high, chunk + 8 * kTokenBytes);
#pragma unroll
          for (int i = 0; i < kPerLoad; i += 4) {
            mma_m16n8k16<T>(halves[i / 4 % 2],
                            {neighbours<T, C>(low, i), neighbours<T, C>(high, i),
                             neighbours<T, C>(low, i + 2), neighbours<T, C>(high, i + 2)},
                            q[j][i / 2], q[j][i / 2 + 1]);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = n * 16 + key + i / 2 * 8;
          float scale = a.scale * kLog2E;
          if constexpr (kInt8) {
            scale *= __shfl_sync(kFullWarp, key_scales[n / 2], token % 32);
          }
          const float score = (halves[0][i] + halves[1][i]) * scale;
          scores[n][i] = start + token <= last ? score : -INFINITY;
        }
      }
    } else {
      const bool last_item = index % 2 == 1;
      if (last_item) turn_to_next();
      if (__any_sync(kFullWarp, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[g][i] *= factors[i % 2];
        }
      }
      const char* const values = slot + value_token * kTokenBytes;
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
              mma_m16n8k16<T>(sums[g],
                              {widen_two<T>(low, false), widen_two<T>(low, true),
                               widen_two<T>(high, false), widen_two<T>(high, true)},
                              weights[n + m][0], weights[n + m][1]);
            }
          } else {
            mma_m16n8k16<T>(sums[g], {words[0], words[1], words[2], words[3]}, weights[n][0],
                            weights[n][1]);
          }
        }
      }
      if (last_item) break;
    }
    __syncwarp();
    ask(index + Shape::kDepth, slot);
    slot += Shape::kItemBytes;
    if (slot == ring + Shape::kDepth * Shape::kItemBytes) slot = ring;
    if (!of_keys) continue;

    turn_to_next();
    weigh_scores(scores, largest, total, next_factors, finite);
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float scale = 1.0f;
        if constexpr (kInt8) {
          const int token = n * 16 + key + 8 * t;
          scale = __shfl_sync(kFullWarp, value_scales[n / 2], token % 32);
          if (start + token > last) scale = 0.0f;  // it may be no number
        }
        next_weights[n][t] = movmatrix_transposed(
            pack_pair<T>(scores[n][2 * t] * scale, scores[n][2 * t + 1] * scale));
      }
    }
    load_scales(start + between);
    if (start + between > last) {
      sum_over_groups<4>(total);
      cluster_wait();
      // Lane 4 r + c tells block r of heads 2c and 2c + 1.
      if (r < kGroups && c < Shape::kHeads / 2) {
        store_remote(r, &shared.statistics[message][2 * c],
                     Pack<float>::of({largest[0], total[0], largest[1], total[1]}),
                     shared.statistics_here);
      }
    }
  }

  if (c < Shape::kHeads / 2) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      store_remote(g, &shared.sums[message][(r * 2 + c) * 4], Pack<float>::of(sums[g]),
                   shared.sums_here);
    }
  }
  if (rank >= kGroups) return;
  const int result = threadIdx.x / Shape::kSharers, share = threadIdx.x % Shape::kSharers;
  const int head = result / 4 % 2 * 2 + result % 2;  // that of the result
  float2 statistics[Shape::kShare];
  float found = -INFINITY, total_and_sum[2] = {};
  shared.statistics_here.wait(0);
#pragma unroll
  for (int i = 0; i < Shape::kShare; ++i) {
    statistics[i] = shared.statistics[share + Shape::kSharers * i][head];
    found = fmaxf(found, statistics[i].x);
  }
#pragma unroll
  for (int offset = 1; offset < Shape::kSharers; offset *= 2) {
    found = fmaxf(found, __shfl_xor_sync(kFullWarp, found, offset));
  }
#pragma unroll
  for (int i = 0; i < Shape::kShare; ++i) {
    statistics[i].x = weight_of_part(statistics[i].x, found);
    total_and_sum[0] += statistics[i].x * statistics[i].y;
  }
  shared.sums_here.wait(0);
#pragma unroll
  for (int i = 0; i < Shape::kShare; ++i) {
    total_and_sum[1] += statistics[i].x * shared.sums[share + Shape::kSharers * i][result];
  }
  sum_over_lanes<Shape::kSharers>(total_and_sum);
  const int first_head = kv_head * a.group;
  const Place place = {static_cast<int>(sequence), static_cast<int>(kv_head), first_head, a.group};
  const int row = result / 8, second = result / 2 % 2;
  const int column = kInt8 ? row * 2 + second : row + second * 8;
  if (share == 0 && head < place.heads) {
    target_of(a, place).write(head, rank * 16 + column, kWidth, total_and_sum[1], found,
                              total_and_sum[0]);
  }
#endif
}

}  // namespace jaxllm::hopper
