// What the multipliers of narrow and of wide heads have in common: the products of one of them,
// which has 64 keys of the block's tile as rows, the mask of its scores, and its gradients' way
// out.
#pragma once

#include <climits>
#include <cmath>

#include "attention/flash_backward_hopper_dq.cuh"
#include "common/fast_math.cuh"
#include "common/fragment.cuh"

namespace jaxllm::hopper {

// rows x queries^T, of as many queries as `result` has columns: s = k q^T, dp = v dout^T.
template <typename Shape, typename T, int kSize>
__device__ __forceinline__ void start_scores(float (&result)[kSize], uint64_t rows,
                                             const T* queries) {
  constexpr int kKeySlabBytes = Shape::kKeys * kSwizzleRowBytes;
  constexpr int kQuerySlabBytes = Shape::kQueries * kSwizzleRowBytes;
  const uint64_t columns = k_major_descriptor(smem_address(queries));
  warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < Shape::kSlabs * kSwizzleColumns / 16; ++step) {
    const int within = step % 4 * kKMajorStepBytes;
    wgmma<T, Major::kK, Major::kK>(result, rows + ((step / 4 * kKeySlabBytes + within) >> 4),
                                   columns + ((step / 4 * kQuerySlabBytes + within) >> 4),
                                   step > 0);
  }
  warpgroup_commit_batch();
}

// sum += weights x queries, of as many queries as `weights` has columns: dv += p dout, dk += ds q.
template <typename Shape, typename T, int kSize, int kWords>
__device__ __forceinline__ void start_gradient(float (&sum)[kSize],
                                               const uint32_t (&weights)[kWords],
                                               const T* queries) {
  const uint64_t rows =
      mn_major_descriptor(smem_address(queries), Shape::kQueries * kSwizzleRowBytes);
  warpgroup_arrive();
#pragma unroll
  for (int step = 0; step < kWords / 4; ++step) {
    wgmma<T, Major::kMN>(sum, weights + 4 * step, rows + (step * kMnMajorStepBytes >> 4));
  }
  warpgroup_commit_batch();
}

// The first of a multiplier's 64 keys of a tile.
template <typename Shape>
__device__ __forceinline__ int first_key_of(const BackwardTile& tile, int multiplier) {
  return tile.key_tile * Shape::kKeys + multiplier * 64;
}

// Which scores of them count.
template <bool kSegments, typename Tiles>
struct ScoreMask {
  const Tiles& band;
  int first_key;
  TileRange whole_queries;  // the tiles of queries that see all of them
  SegmentRows query_segments, key_segments;

  __device__ __forceinline__ ScoreMask(const BackwardArguments& a, const Tiles& band,
                                       const BackwardTile& tile, int first_key)
      : band(band), first_key(first_key), whole_queries(band.whole_queries_of(first_key, 64)) {
    if constexpr (kSegments) {
      query_segments = queries_of_sequence(a.segments, band, tile.sequence);
      key_segments = keys_of_sequence(a.segments, band, tile.sequence);
    }
  }

  // Leaves -inf where a query does not see a key. The columns are queries from `first_query` on, of
  // the given tile.
  template <int kSize>
  __device__ __forceinline__ void apply(float (&s)[kSize], int query_tile, int first_query) const {
    constexpr int kColumns = 2 * kSize;
    const int thread = threadIdx.x % kWarpgroup;
    const int key = first_key + accumulator_row(thread);
    // From here on relative to the thread's first column.
    const int origin = first_query + accumulator_column(thread);
    if (!whole_queries.contains(query_tile)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int low = key + 8 * r < band.keys ? band.first_query(key + 8 * r) - origin : INT_MAX;
#pragma unroll
        for (int i = 0; i < kSize; i += 4) {
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            if (2 * i + b < low) s[i + 2 * r + b] = -INFINITY;
          }
        }
        // Of a causal mask without a window nothing is left.
        if (first_query + kColumns - 1 <= band.last_query(first_key)) continue;
        const int high = band.last_query(key + 8 * r) - origin;
#pragma unroll
        for (int i = 0; i < kSize; i += 4) {
#pragma unroll
          for (int b = 0; b < 2; ++b) {
            if (2 * i + b > high) s[i + 2 * r + b] = -INFINITY;
          }
        }
      }
    }
    if constexpr (kSegments) {
      if (are_one_segment(query_segments.of<kColumns>(first_query),
                          key_segments.of<64>(first_key))) {
        return;
      }
      const int segment[2] = {key_segments.id(key), key_segments.id(key + 8)};
#pragma unroll
      for (int i = 0; i < kSize; i += 4) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const int of_query = query_segments.id(origin + 2 * i + b);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (of_query != segment[r]) s[i + 2 * r + b] = -INFINITY;
          }
        }
      }
    }
  }
};

// s becomes p = 2^(c s - lse), where `lse` has that of the first query.
template <int kSize>
__device__ __forceinline__ void exponentiate(float (&s)[kSize], float scale_log2,
                                             const float* lse) {
  const int column = accumulator_column(threadIdx.x % kWarpgroup);
#pragma unroll
  for (int j = 0; j < kSize; j += 4) {
    const float2 of_query = *reinterpret_cast<const float2*>(lse + 2 * j + column);
#pragma unroll
    for (int r = 0; r < 4; r += 2) {
      s[j + r] = exp2_fast(fmaf(s[j + r], scale_log2, -of_query.x));
      s[j + r + 1] = exp2_fast(fmaf(s[j + r + 1], scale_log2, -of_query.y));
    }
  }
}

// dp becomes ds = p (dp - delta), where `delta` has that of the first query.
template <int kSize>
__device__ __forceinline__ void differentiate_softmax(const float (&p)[kSize], float (&dp)[kSize],
                                                      const float* delta) {
  const int column = accumulator_column(threadIdx.x % kWarpgroup);
#pragma unroll
  for (int j = 0; j < kSize; j += 4) {
    const float2 of_query = *reinterpret_cast<const float2*>(delta + 2 * j + column);
#pragma unroll
    for (int r = 0; r < 4; r += 2) {
      dp[j + r] = p[j + r] * (dp[j + r] - of_query.x);
      dp[j + r + 1] = p[j + r + 1] * (dp[j + r + 1] - of_query.y);
    }
  }
}

// Where a thread's row begins of a chunk of eight columns and the next, in a tile that is laid out
// as k and v are; `rows` is where that of the first does.
template <typename Shape>
__device__ __forceinline__ uint32_t row_of_chunk(uint32_t rows, int chunk) {
  return (rows + chunk / 8 * Shape::kKeys * kSwizzleRowBytes) ^ chunk % 8 * 16;
}

// Writes 64 rows of ds to shared memory, where dq sums over the keys of both multipliers; `rows` is
// where this thread's begin.
template <typename Shape, int kWords>
__device__ __forceinline__ void store_ds(const uint32_t (&ds)[kWords], uint32_t rows) {
#pragma unroll
  for (int j = 0; j < kWords; j += 4) {
    const int chunk = j / 2;  // of eight queries
    stmatrix(row_of_chunk<Shape>(rows, chunk), *reinterpret_cast<const uint32_t (*)[4]>(ds + j));
  }
}

// Writes a multiplier's 64 rows of a gradient to a tile that is laid out as k and v are.
template <typename Shape, typename T, int kSize>
__device__ __forceinline__ void store_gradient(const float (&gradient)[kSize], float factor,
                                               T* tile, int multiplier) {
  const int thread = threadIdx.x % kWarpgroup;
  const uint32_t rows = smem_address(tile) + offset_of_matrices(multiplier, thread);
#pragma unroll
  for (int chunk = 0; chunk < kSize / 4; chunk += 2) {  // of eight columns
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = gradient + 4 * chunk + 2 * i;
      words[i] = pack_pair<T>(pair[0] * factor, pair[1] * factor);
    }
    stmatrix(row_of_chunk<Shape>(rows, chunk), words);
  }
}

// Leaves a multiplier's rows of both gradients to the copy engine, unless there are none. By one
// thread, when they are in shared memory.
template <typename Shape, typename T>
__device__ __forceinline__ void copy_gradients(const CUtensorMap& dk_map, const T* dk_tile,
                                               const CUtensorMap& dv_map, const T* dv_tile,
                                               const BackwardTile& tile, int multiplier, int keys) {
  const int first_key = first_key_of<Shape>(tile, multiplier);
  if (first_key >= keys) return;
  for (int slab = 0; slab < Shape::kSlabs; ++slab) {
    const Box box{slab * kSwizzleColumns, tile.kv_head, first_key, tile.sequence};
    const int offset = (slab * Shape::kKeys + multiplier * 64) * kSwizzleColumns;
    tma_store_4d(dk_map, dk_tile + offset, box);
    tma_store_4d(dv_map, dv_tile + offset, box);
  }
  tma_store_commit();
}

}  // namespace jaxllm::hopper
