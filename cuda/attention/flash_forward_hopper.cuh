// A block has one warpgroup that copies and two to four that multiply. The copier brings tiles of
// k and v into rings of buffers, as far ahead as there is room; each multiplier holds 64 queries
// and their part of the output, and walks over the tiles of keys with the online softmax:
//
//   s = q k^T    m' = max(m, max s)    p = 2^(c (s - m'))    o = o 2^(c (m - m')) + p v
//
// with c = scale log2(e). The multipliers take turns at the tensor cores, so that one computes
// exponentials while another multiplies. A turn is the scores of the next tile and p v of the
// present one: while the latter runs, the threads have the maxima of the former to take.
//
// In bfloat16 m stays what it was, and o with it, as long as no row's weights in a tile have a sum
// beyond 2^16: it has the exponents of float32, and numbers above one as precise as those below.
// The weights of a tile that is beyond are computed anew.
//
// Source: Shah et al., "FlashAttention-3" (arXiv:2407.08608).
#pragma once

#include <cmath>
#include <type_traits>

#include "attention/band.cuh"
#include "attention/hopper_launch.h"
#include "attention/segment_tiles.cuh"
#include "common/dependent_launch.cuh"
#include "common/fast_math.cuh"
#include "common/pipeline.cuh"
#include "common/tile_order.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

// For other GPUs the kernel is empty, and nothing uses what comes here.
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#pragma nv_diag_suppress 177
#endif

namespace jaxllm::hopper {

template <int kHeadWidth, int kWarpgroups, int kKeysOfTile, int kBuffers>
struct ForwardShape {
  static constexpr int kWidth = kHeadWidth;
  static constexpr int kMultipliers = kWarpgroups;
  static constexpr int kQueries = kMultipliers * 64;
  static constexpr int kKeys = kKeysOfTile;
  static constexpr int kStages = kBuffers;
  static constexpr int kSlabs = kWidth / kSwizzleColumns;
  static constexpr int kThreads = (kMultipliers + 1) * kWarpgroup;
  // Together those that the block starts with: all 64K of a multiprocessor, as far as they can be
  // dealt out evenly in units of eight.
  static constexpr int kCopierRegisters = kMultipliers == 3 ? 32 : 24;
  static constexpr int kMultiplierRegisters = kMultipliers == 2   ? 240
                                              : kMultipliers == 3 ? 160
                                                                  : 112;
  // Each warp of each multiplier says that it is done with a buffer that the tensor cores read; and
  // what threads read themselves each of them gives back, lest racecheck see a race: it does not
  // follow the others of a warp to the one that arrives for it.
  static constexpr int kWarps = kMultipliers * 4;
  static constexpr int kReaders = kMultipliers * kWarpgroup;
};

// Three or four warpgroups share each load of k and v where the output leaves registers for them.
// Four have only enough for half a tile of keys; but where a row has few keys they win, by what
// they have to do beside each other while each begins and ends its tile. On an H200 the causal
// forward of 384 heads takes three 160 us and four 147 us with 1024 keys; of 48 heads with 4096
// keys 229 and 260 us.
using Wide = ForwardShape<128, 2, 128, 2>;
using NarrowLong = ForwardShape<64, 3, 128, 3>;
using NarrowShort = ForwardShape<64, 4, 64, 4>;

// A tile of queries of one head.
struct ForwardTile {
  int query_tile, head, sequence;
};

template <typename T, typename Shape>
struct ForwardShared {
  static constexpr int kWidth = Shape::kWidth;
  T q[Shape::kMultipliers][64 * kWidth];
  T k[Shape::kStages][Shape::kKeys * kWidth];
  T v[Shape::kStages][Shape::kKeys * kWidth];
  T out[Shape::kMultipliers][64 * kWidth];
  Barrier q_full, q_empty;
  Barrier k_full[Shape::kStages], k_empty[Shape::kStages];
  Barrier v_full[Shape::kStages], v_empty[Shape::kStages];
  // These come with q. query_tile is -1 after the last.
  ForwardTile place;
  TileRange keys_seen;
};

struct ForwardArguments {
  Band band;
  int batch, heads, kv_heads, query_tiles, tiles, heads_at_a_time;
  float scale;
  float* lse;
  int* counter;
  Segments segments;
};

// The order of the tiles: those with most keys first, so that the last to be taken are short; but
// only so many heads at a time as have their keys and values in the L2 cache together, and those of
// the last sequences first, which it is likeliest to have from the product that wrote them. Heads
// that share keys are neighbours.
__device__ __forceinline__ ForwardTile decode_tile(const ForwardArguments& a, int tile) {
  const int heads = a.batch * a.heads;
  const TilePlace place = place_tile(tile, heads, a.query_tiles, a.heads_at_a_time);
  const int head = heads - 1 - place.row;
  return {a.query_tiles - 1 - place.column, head % a.heads, head / a.heads};
}

// Numbers of the named barriers; 0 is __syncthreads'.
constexpr int kTurnBarrier = 1;   // + multiplier: its turn at the tensor cores
constexpr int kStoreBarrier = 5;  // + multiplier: its part of the output is in shared memory

template <bool kSegments, typename T, typename Shape>
__device__ __forceinline__ void copy_forward(ForwardShared<T, Shape>& shared,
                                             const ForwardArguments& a, const CUtensorMap& q_map,
                                             const CUtensorMap& k_map, const CUtensorMap& v_map) {
  constexpr int kTileBytes = Shape::kKeys * Shape::kWidth * sizeof(T);
  const TiledBand<Shape::kQueries, Shape::kKeys> band(a.band);
  PipelineState<Shape::kStages> k_ring, v_ring;
  PipelineState<1> q_ring;

  wait_on_dependent_grids();  // which sets the counter to zero
  int tile = blockIdx.x;
  while (tile < a.tiles) {
    const int next_tile = gridDim.x + atomicAdd(a.counter, 1);  // long before it is needed
    const ForwardTile place = decode_tile(a, tile);
    const int kv_head = place.head / (a.heads / a.kv_heads);
    const TileRange range =
        kSegments ? a.segments.of_queries[place.sequence * a.query_tiles + place.query_tile]
                  : band.keys_of(place.query_tile);

    const auto load_keys = [&](int key_tile) {
      const Barrier& full = shared.k_full[k_ring.stage];
      shared.k_empty[k_ring.stage].wait(k_ring.phase ^ 1);
      shared.k_full[k_ring.stage].arrive_and_expect(kTileBytes);
      for (int slab = 0; slab < Shape::kSlabs; ++slab) {
        tma_load_4d(shared.k[k_ring.stage] + slab * Shape::kKeys * kSwizzleColumns, k_map,
                    {slab * kSwizzleColumns, kv_head, key_tile * Shape::kKeys, place.sequence},
                    full);
      }
      k_ring.advance();
    };
    const auto load_values = [&](int key_tile) {
      const Barrier& full = shared.v_full[v_ring.stage];
      shared.v_empty[v_ring.stage].wait(v_ring.phase ^ 1);
      shared.v_full[v_ring.stage].arrive_and_expect(kTileBytes);
      for (int slab = 0; slab < Shape::kSlabs; ++slab) {
        tma_load_4d(shared.v[v_ring.stage] + slab * Shape::kKeys * kSwizzleColumns, v_map,
                    {slab * kSwizzleColumns, kv_head, key_tile * Shape::kKeys, place.sequence},
                    full);
      }
      v_ring.advance();
    };

    if (range.size() > 0) load_keys(range.end - 1);
    shared.q_empty.wait(q_ring.phase ^ 1);
    shared.place = place;
    shared.keys_seen = range;
    shared.q_full.arrive_and_expect(Shape::kQueries * Shape::kWidth * sizeof(T));
    for (int multiplier = 0; multiplier < Shape::kMultipliers; ++multiplier) {
      for (int slab = 0; slab < Shape::kSlabs; ++slab) {
        tma_load_4d(shared.q[multiplier] + slab * 64 * kSwizzleColumns, q_map,
                    {slab * kSwizzleColumns, place.head,
                     place.query_tile * Shape::kQueries + multiplier * 64, place.sequence},
                    shared.q_full);
      }
    }
    q_ring.advance();
    // In the order in which they are used: the scores are a tile ahead.
#pragma unroll 1
    for (int left = range.size(); left > 0; --left) {
      if (left > 1) load_keys(range.begin + left - 2);
      load_values(range.begin + left - 1);
    }
    tile = next_tile;
  }
  shared.q_empty.wait(q_ring.phase ^ 1);
  shared.place.query_tile = -1;
  shared.q_full.arrive();
}

// The running softmax of a thread's two rows.
template <typename T, int kKeys, int kWidth>
struct SoftmaxRows {
  float largest[2] = {-INFINITY, -INFINITY};  // of the row's scores, not yet scaled
  float total[2] = {0.0f, 0.0f};              // of this thread's columns
  float origin[2], correction[2];             // of the present tile

  // Takes the scores' maxima. In two parts for each row, so that no operation waits for the last.
  __device__ __forceinline__ void raise(const float (&s)[kKeys / 2], float scale_log2) {
    float part[2][2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      part[row][0] = fmaxf(largest[row], s[2 * row]);
      part[row][1] = s[2 * row + 1];
    }
#pragma unroll
    for (int i = 4; i < kKeys / 2; i += 4) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int b = 0; b < 2; ++b) part[row][b] = fmaxf(part[row][b], s[i + 2 * row + b]);
      }
    }
    float highest[2] = {fmaxf(part[0][0], part[0][1]), fmaxf(part[1][0], part[1][1])};
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        highest[row] = fmaxf(highest[row], __shfl_xor_sync(0xffffffff, highest[row], lane));
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // A row without keys so far: -inf - -inf is no number.
      origin[row] = highest[row] == -INFINITY ? 0.0f : highest[row] * scale_log2;
      correction[row] = exp2_fast(fmaf(largest[row], scale_log2, -origin[row]));
      largest[row] = highest[row];
    }
  }

  // Turns scores into weights, rounded, adds these up, and corrects the output for new maxima. All
  // in one pass: an exponential takes eight clocks, in which there is room for the rest.
  template <bool kCorrects>
  __device__ __forceinline__ void exponentiate(const float (&s)[kKeys / 2], float scale_log2,
                                               uint32_t (&p)[kKeys / 4], float (&o)[kWidth / 2],
                                               float (&sums)[2]) const {
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < kKeys / 2; i += 4) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float weight[2];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          weight[b] = exp2_fast(fmaf(s[i + 2 * row + b], scale_log2, -origin[row]));
          sum[row][b] += weight[b];
        }
        p[i / 2 + row] = pack_pair<T>(weight[0], weight[1]);
      }
      if constexpr (kCorrects) {
        constexpr int kStep = 4 * kWidth / kKeys;
#pragma unroll
        for (int j = 0; j < kStep; ++j) {
          const int k = i / 4 * kStep + j;
          o[k] *= correction[k / 2 % 2];
        }
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) sums[row] = sum[row][0] + sum[row][1];
  }

  // The weights of a tile whose maxima have been taken, and have an effect on the output.
  __device__ __forceinline__ void weigh_anew(const float (&s)[kKeys / 2], float scale_log2,
                                             uint32_t (&p)[kKeys / 4], float (&o)[kWidth / 2]) {
    float sums[2];
    exponentiate<true>(s, scale_log2, p, o, sums);
#pragma unroll
    for (int row = 0; row < 2; ++row) total[row] = fmaf(total[row], correction[row], sums[row]);
  }

  // The weights of the first tile, whose maxima have been taken.
  __device__ __forceinline__ void weigh_first(const float (&s)[kKeys / 2], float scale_log2,
                                              uint32_t (&p)[kKeys / 4], float (&o)[kWidth / 2]) {
    exponentiate<false>(s, scale_log2, p, o, total);
  }

  // The weights of a later tile, by the maxima of those before; or, where these will not do, by its
  // own.
  __device__ __forceinline__ void weigh(const float (&s)[kKeys / 2], float scale_log2,
                                        uint32_t (&p)[kKeys / 4], float (&o)[kWidth / 2]) {
    constexpr float kMost = 65536.0f;
    float sums[2];
    exponentiate<false>(s, scale_log2, p, o, sums);
    // Also where a sum is no number, and where a row has had no keys.
    const bool is_beyond =
        !(fmaxf(sums[0], sums[1]) <= kMost) || fminf(largest[0], largest[1]) == -INFINITY;
    if (__any_sync(0xffffffff, is_beyond)) {
      raise(s, scale_log2);
      weigh_anew(s, scale_log2, p, o);
    } else {
      total[0] += sums[0];
      total[1] += sums[1];
    }
  }
};

// Of the tiles of keys that a block visits, those that the 64 queries from `first_query` on see; an
// empty range ends with them.
template <int kQueries, int kKeys>
__device__ __forceinline__ TileRange own_part(const TiledBand<kQueries, kKeys>& band,
                                              const TileRange& all, int first_query) {
  const TileRange nothing{all.end, all.end};
  if (all.size() == 0 || first_query >= band.queries) return nothing;
  const TileRange own = intersect(all, TiledBand<64, kKeys>(band).keys_of(first_query / 64));
  return own.size() > 0 ? own : nothing;
}

template <bool kSegments, typename T, typename Shape>
__device__ __forceinline__ void multiply_forward(ForwardShared<T, Shape>& shared,
                                                 const ForwardArguments& a,
                                                 const CUtensorMap& out_map, int multiplier) {
  constexpr int kWidth = Shape::kWidth;
  constexpr int kKeys = Shape::kKeys;
  constexpr int kSlabBytes = kKeys * kSwizzleRowBytes;
  constexpr bool kKeepsMaxima = std::is_same_v<T, __nv_bfloat16>;
  const TiledBand<Shape::kQueries, Shape::kKeys> band(a.band);
  const int thread = threadIdx.x % kWarpgroup;
  const bool is_first_lane = thread % 32 == 0;
  const float scale_log2 = a.scale * float{M_LOG2E};
  const uint64_t q_operand = k_major_descriptor(smem_address(shared.q[multiplier]));

  PipelineState<Shape::kStages> k_ring, v_ring;
  PipelineState<1> q_ring;
  float s[kKeys / 2], o[kWidth / 2];
  uint32_t p[kKeys / 4];

  // Lets another warpgroup's copier know, once this warp is done with a buffer.
  const auto release = [&](Barrier& empty) {
    __syncwarp();
    if (is_first_lane) empty.arrive();
  };
  const auto start_scores = [&] {
    shared.k_full[k_ring.stage].wait(k_ring.phase);
    const uint64_t k_operand = k_major_descriptor(smem_address(shared.k[k_ring.stage]));
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step) {
      const int within = step % 4 * kKMajorStepBytes;
      wgmma<T, Major::kK, Major::kK>(s,
                                     q_operand + ((step / 4 * 64 * kSwizzleRowBytes + within) >> 4),
                                     k_operand + ((step / 4 * kSlabBytes + within) >> 4), step > 0);
    }
    warpgroup_commit_batch();
  };
  const auto start_output = [&] {
    shared.v_full[v_ring.stage].wait(v_ring.phase);
    const uint64_t v_operand =
        mn_major_descriptor(smem_address(shared.v[v_ring.stage]), kSlabBytes);
    warpgroup_arrive();
#pragma unroll
    for (int step = 0; step < Shape::kKeys / 16; ++step) {
      wgmma<T, Major::kMN>(o, p + 4 * step, v_operand + (step * kMnMajorStepBytes >> 4));
    }
    warpgroup_commit_batch();
  };

  // The turn passes from one multiplier to the next; the first has it at the start.
  constexpr int kTurnThreads = 2 * kWarpgroup;
  const int next = multiplier + 1 == Shape::kMultipliers ? 0 : multiplier + 1;
  const auto await_turn = [&] { named_barrier_sync(kTurnBarrier + multiplier, kTurnThreads); };
  const auto pass_turn = [&] { named_barrier_arrive(kTurnBarrier + next, kTurnThreads); };
  if (next == 0) pass_turn();

  for (;;) {
    shared.q_full.wait(q_ring.phase);
    q_ring.advance();
    const ForwardTile place = shared.place;
    if (place.query_tile < 0) break;
    const TileRange all = shared.keys_seen;
    const int first_query = place.query_tile * Shape::kQueries + multiplier * 64;
    const TileRange range = own_part(band, all, first_query);
    const TileRange whole = band.whole_keys_of(first_query, 64);
    const int row = first_query + accumulator_row(thread);

    SegmentRows key_segments;
    SegmentRange own_segments;
    int segment[2];
    if constexpr (kSegments) {
      const SegmentRows query_segments = queries_of_sequence(a.segments, band, place.sequence);
      key_segments = keys_of_sequence(a.segments, band, place.sequence);
      own_segments = query_segments.of<64>(first_query);
      for (int r = 0; r < 2; ++r) segment[r] = query_segments.id(row + 8 * r);
    }
    const auto mask = [&](int key_tile) {
      const int first_key = key_tile * kKeys;
      // From here on relative to the thread's first column.
      const int origin = first_key + accumulator_column(thread);
      if (!whole.contains(key_tile)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int high = min(band.last_key(row + 8 * r), band.keys - 1) - origin;
#pragma unroll
          for (int i = 0; i < kKeys / 2; i += 4) {
#pragma unroll
            for (int b = 0; b < 2; ++b) {
              if (2 * i + b > high) s[i + 2 * r + b] = -INFINITY;
            }
          }
          // Of a causal mask without a window nothing is left.
          if (first_key >= band.first_key(first_query + 63)) continue;
          const int low = band.first_key(row + 8 * r) - origin;
#pragma unroll
          for (int i = 0; i < kKeys / 2; i += 4) {
#pragma unroll
            for (int b = 0; b < 2; ++b) {
              if (2 * i + b < low) s[i + 2 * r + b] = -INFINITY;
            }
          }
        }
      }
      if constexpr (kSegments) {
        if (are_one_segment(own_segments, key_segments.of<kKeys>(first_key))) return;
#pragma unroll
        for (int i = 0; i < kKeys / 2; i += 4) {
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            const int of_key = key_segments.id(origin + 2 * i + b);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              if (of_key != segment[r]) s[i + 2 * r + b] = -INFINITY;
            }
          }
        }
      }
    };

    SoftmaxRows<T, kKeys, kWidth> softmax;
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) o[i] = 0.0f;

    // A tile of keys that only other multipliers' queries see.
    const auto pass_over = [&](bool has_turn) {
      shared.k_full[k_ring.stage].wait(k_ring.phase);
      release(shared.k_empty[k_ring.stage]);
      k_ring.advance();
      shared.v_full[v_ring.stage].wait(v_ring.phase);
      release(shared.v_empty[v_ring.stage]);
      v_ring.advance();
      if (!has_turn) return;
      await_turn();
      pass_turn();
    };
    for (int i = range.end; i < all.end; ++i) pass_over(true);
    const bool is_idle = range.size() == 0;
    if (is_idle) {
      shared.q_empty.arrive();
    } else {
      int key_tile = range.end - 1;
      start_scores();
      warpgroup_wait<0>(s);
      release(shared.k_empty[k_ring.stage]);
      k_ring.advance();
      mask(key_tile);
      softmax.raise(s, scale_log2);
      // The loop turns between the maxima and the wait for the products beside them: within one
      // basic block the assembler would put the wait first.
      bool is_first = true;
      for (;;) {
        warpgroup_wait<0>(o, s);
        if (key_tile < range.end - 1) {
          release(shared.v_empty[v_ring.stage]);
          v_ring.advance();
        }
        if (!kKeepsMaxima) {
          softmax.weigh_anew(s, scale_log2, p, o);
        } else if (is_first) {
          softmax.weigh_first(s, scale_log2, p, o);
          is_first = false;
        } else {
          softmax.weigh(s, scale_log2, p, o);
        }
        if (key_tile == range.begin) break;

        --key_tile;
        await_turn();
        start_scores();
        start_output();
        pass_turn();
        warpgroup_wait<1>(s);
        release(shared.k_empty[k_ring.stage]);
        k_ring.advance();
        mask(key_tile);
        if (!kKeepsMaxima) softmax.raise(s, scale_log2);
        warpgroup_fence_operand(s);
      }
      shared.q_empty.arrive();
      start_output();
      warpgroup_wait<0>(o);
      release(shared.v_empty[v_ring.stage]);
      v_ring.advance();
    }

    // All have the same number of turns: one less than there are tiles.
    for (int i = range.begin; i > all.begin; --i) pass_over(!is_idle || i > all.begin + 1);

    // The earlier tile's output has left shared memory.
    if (thread == 0) tma_store_wait_read<0>();
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = softmax.total[r];
      total += __shfl_xor_sync(0xffffffff, total, 1);
      total += __shfl_xor_sync(0xffffffff, total, 2);
      factor[r] = softmax.largest[r] == -INFINITY ? 0.0f : 1.0f / total;
      if (thread % 4 == 0 && row + 8 * r < band.queries) {
        const int64_t head = int64_t{place.sequence} * a.heads + place.head;
        a.lse[head * band.queries + row + 8 * r] = softmax.largest[r] == -INFINITY
                                                       ? -INFINITY
                                                       : softmax.largest[r] * a.scale + logf(total);
      }
    }
    named_barrier_sync(kStoreBarrier + multiplier, kWarpgroup);
    char* const target = reinterpret_cast<char*>(shared.out[multiplier]);
#pragma unroll
    for (int i = 0; i < kWidth / 2; i += 2) {
      const int r = i / 2 % 2, column = i / 4 * 8;
      const uint32_t offset = swizzled_offset(
          accumulator_row(thread) + 8 * r, column % kSwizzleColumns + accumulator_column(thread));
      *reinterpret_cast<uint32_t*>(target + column / kSwizzleColumns * 64 * kSwizzleRowBytes +
                                   offset) = pack_pair<T>(o[i] * factor[r], o[i + 1] * factor[r]);
    }
    fence_async_proxy();
    named_barrier_sync(kStoreBarrier + multiplier, kWarpgroup);
    if (thread == 0 && first_query < band.queries) {
      for (int slab = 0; slab < Shape::kSlabs; ++slab) {
        tma_store_4d(out_map, shared.out[multiplier] + slab * 64 * kSwizzleColumns,
                     {slab * kSwizzleColumns, place.head, first_query, place.sequence});
      }
      tma_store_commit();
    }
  }
  if (multiplier == 0) await_turn();  // nobody leaves with a turn passed to nobody
  if (thread == 0) tma_store_wait<0>();
}

template <typename T, typename Shape, bool kSegments>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    flash_attention_forward_hopper_kernel(const __grid_constant__ CUtensorMap q_map,
                                          const __grid_constant__ CUtensorMap k_map,
                                          const __grid_constant__ CUtensorMap v_map,
                                          const __grid_constant__ CUtensorMap out_map,
                                          const __grid_constant__ ForwardArguments a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) unsigned char shared_memory[];
  auto& shared = *reinterpret_cast<ForwardShared<T, Shape>*>(shared_memory);

  if (threadIdx.x == 0) {
    prefetch_tensor_map(q_map);
    prefetch_tensor_map(k_map);
    prefetch_tensor_map(v_map);
    prefetch_tensor_map(out_map);
    shared.q_full.init(1);
    shared.q_empty.init(Shape::kReaders);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      shared.k_full[stage].init(1);
      shared.k_empty[stage].init(Shape::kWarps);
      shared.v_full[stage].init(1);
      shared.v_empty[stage].init(Shape::kWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();

  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0);
  if (warpgroup == 0) {
    warpgroup_reg_dealloc<Shape::kCopierRegisters>();
    if (threadIdx.x == 0) copy_forward<kSegments>(shared, a, q_map, k_map, v_map);
  } else {
    warpgroup_reg_alloc<Shape::kMultiplierRegisters>();
    multiply_forward<kSegments>(shared, a, out_map, warpgroup - 1);
  }
#endif
}

}  // namespace jaxllm::hopper
