// The forward of flash attention on tensor cores by mma.sync.
//
// A block holds a tile of queries of one head, and visits the tiles of keys that they see. Each
// warp keeps some of the queries to itself: their scores, their running maximum and sum, and their
// output, which is scaled down whenever a larger score comes, stay in its registers.
#pragma once

#include <type_traits>

#include "attention/flash_tile.cuh"
#include "common/cp_async.cuh"

namespace jaxllm::attention {

// Stored is the type of q, k and v in memory: T, or a float8 that T holds exactly.
template <typename T, typename Stored = T>
struct ForwardArguments {
  HeadRows<const Stored> q, k, v;
  HeadRows<T> out;
  float* lse;
  int heads, group;  // query heads, in all and to a key head
  int width;
  Scores scores;
  float unit;  // of the scores, in powers of two; above zero
  Mask mask;
  Rotation rotation;                         // of q
  const float *q_scale, *k_scale, *v_scale;  // of a float8's heads
  bool aligned;
};

// Sizes of tiles, as they were fastest on an H200. A warp has 16 queries: 32 halve its reads of
// shared memory, but take the registers of other blocks, which keep the tensor cores busy while
// this one waits, and more of a tile is hidden at the edge of a mask. So 32, kTall, are for wide
// heads that see long rows of keys.
template <int kHeadWidth, bool kTall = false>
struct ForwardTiles {
  static constexpr int kWidth = kHeadWidth;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRowTiles = kTall ? 2 : 1;  // of 16 queries, for each warp
  // On a multiprocessor, at least.
  static constexpr int kBlocks = kWidth <= 64 ? 4 : kWidth <= 128 && !kTall ? 3 : 1;
  static constexpr int kQueries = 16 * kRowTiles * kWarps;
  static constexpr int kKeys = 64;
  static constexpr int kSharedBytes = (kQueries + 2 * kKeys) * kTileStride<kWidth> * 2;
};

// A row's four lanes hold its scores.
__device__ __forceinline__ float max_over_row(float value) {
  value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, 1));
  return fmaxf(value, __shfl_xor_sync(kFullWarp, value, 2));
}
__device__ __forceinline__ float sum_over_row(float value) {
  value += __shfl_xor_sync(kFullWarp, value, 1);
  return value + __shfl_xor_sync(kFullWarp, value, 2);
}

// Turns products into scores, but for a unit that the exponentials can multiply by at no cost.
template <int kRowTiles, int kColumnTiles>
__device__ __forceinline__ void score(float (&x)[kRowTiles][kColumnTiles][4],
                                      const Scores& scores) {
  if (scores.factor == 1.0f && scores.cap == 0.0f) return;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[m][n][i] *= scores.factor;
    }
  }
  if (scores.cap == 0.0f) return;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[m][n][i] = scores.cap * tanh_fast(x[m][n][i]);
    }
  }
}

// Turns scores into weights, 2^(unit * (score - maximum)), and scales the sums so far to the new
// maxima.
template <int kRowTiles, int kColumnTiles, int kOutTiles>
__device__ __forceinline__ void weigh(float (&x)[kRowTiles][kColumnTiles][4], float unit,
                                      float (&maximum)[kRowTiles][2], float (&sum)[kRowTiles][2],
                                      float (&out)[kRowTiles][kOutTiles][4]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = maximum[m][h];
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
        largest = fmaxf(largest, fmaxf(x[m][n][2 * h], x[m][n][2 * h + 1]));
      }
      largest = max_over_row(largest);
      // A row that has seen nothing yet: with zero its weights are zero, and not NaN.
      const float finite = largest == -INFINITY ? 0.0f : largest;
      const float correction = exp2_fast(unit * (maximum[m][h] - finite));
      const float minus = -unit * finite;
      maximum[m][h] = largest;
      float added = 0.0f;  // by this lane alone: the four meet at the end
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& value = x[m][n][2 * h + c];
          value = exp2_fast(fmaf(unit, value, minus));
          added += value;
        }
      }
      sum[m][h] = sum[m][h] * correction + added;
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n) {
        out[m][n][2 * h] *= correction;
        out[m][n][2 * h + 1] *= correction;
      }
    }
  }
}

template <class Tiles, typename T, typename Stored>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    flash_attention_forward_kernel(const ForwardArguments<T, Stored> arguments) {
  constexpr bool kScaled = !std::is_same_v<T, Stored>;
  constexpr int kWidth = Tiles::kWidth, kRowTiles = Tiles::kRowTiles;
  constexpr int kQueries = Tiles::kQueries, kKeys = Tiles::kKeys, kThreads = Tiles::kThreads;
  extern __shared__ __align__(16) unsigned char shared[];
  T* q_tile = reinterpret_cast<T*>(shared);
  T* k_tile = q_tile + kQueries * kTileStride<kWidth>;
  T* v_tile = k_tile + kKeys * kTileStride<kWidth>;

  // The last tile of queries first: under a causal mask it has the most to do.
  const int queries = arguments.mask.queries, keys = arguments.mask.keys;
  const int tiles = (queries + kQueries - 1) / kQueries;
  const Place place(tiles, arguments.heads);
  const int b = place.b, head = place.head;
  const int first = (tiles - 1 - place.tile) * kQueries;
  const Mask mask = arguments.mask.of_sequence(b);
  const int width = arguments.width;
  const bool aligned = arguments.aligned;
  const int kv_head = head / arguments.group;
  const Stored* q = head_of(arguments.q, b, queries, head, width);
  const Stored* k = head_of(arguments.k, b, keys, kv_head, width);
  const Stored* v = head_of(arguments.v, b, keys, kv_head, width);
  Scores scores = arguments.scores;
  if constexpr (kScaled) scores.factor *= arguments.q_scale[head] * arguments.k_scale[kv_head];
  const auto load_keys = [&](T* tile, const HeadRows<const Stored>& rows, const Stored* source,
                             int index) {
    load_tile<kKeys, kWidth, kThreads>(tile, source, rows.row_stride, index * kKeys, keys, width,
                                       aligned);
  };

  const int warp_row = threadIdx.x / 32 * 16 * kRowTiles;
  float out[kRowTiles][kWidth / 8][4] = {};
  float maximum[kRowTiles][2], sum[kRowTiles][2] = {};
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) maximum[m][0] = maximum[m][1] = -INFINITY;

  const TileWalk<Rows::kQueries, kQueries, kKeys> walk(mask, first);
  int tile = walk.first();
  load_tile<kQueries, kWidth, kThreads>(q_tile, q, arguments.q.row_stride, first, queries, width,
                                        aligned);
  if (tile < walk.end()) load_keys(k_tile, arguments.k, k, tile);
  if (arguments.rotation.cos != nullptr) {
    cp_async_wait_all();
    __syncthreads();
    rotate_rows<kWidth, 16 * kRowTiles>(q_tile + warp_row * kTileStride<kWidth>, arguments.rotation,
                                        1.0f, b, first + warp_row, queries);
  }
  while (tile < walk.end()) {
    cp_async_wait_all();
    __syncthreads();  // the keys are there, and nobody reads the values before any more
    load_keys(v_tile, arguments.v, v, tile);
    const int next = walk.next(tile + 1);
    const bool sees_all = walk.sees_all(mask, first, tile);

    float x[kRowTiles][kKeys / 8][4] = {};
    multiply_transposed<kWidth>(x, q_tile + warp_row * kTileStride<kWidth>, k_tile);
    cp_async_wait_all();
    __syncthreads();  // the values are there, and nobody reads the keys any more
    if (next < walk.end()) load_keys(k_tile, arguments.k, k, next);

    score(x, scores);
    if (!sees_all) hide<Rows::kQueries>(x, mask, first + warp_row, tile * kKeys, -INFINITY);
    weigh(x, arguments.unit, maximum, sum, out);
    multiply<kWidth>(out, x, v_tile);
    tile = next;
  }
  cp_async_wait_all();
  __syncthreads();  // where no key is seen, the queries' copies may still be under way

  float* lse = arguments.lse + (int64_t{b} * arguments.heads + head) * queries;
  const float unit = arguments.unit;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = sum_over_row(sum[m][h]);
      float factor = total == 0.0f ? 0.0f : 1.0f / total;
      if constexpr (kScaled) factor *= arguments.v_scale[kv_head];
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        out[m][n][2 * h] *= factor;
        out[m][n][2 * h + 1] *= factor;
      }
      const int row = first + warp_row + 16 * m + 8 * h + lane / 4;
      if (!kScaled && lane % 4 == 0 && row < queries)
        lse[row] = (unit * maximum[m][h] + log2f(total)) * kLn2;
    }
  }
  store_rows<kWidth>(out, q_tile + warp_row * kTileStride<kWidth>,
                     head_of(arguments.out, b, queries, head, width), arguments.out.row_stride,
                     first + warp_row, queries, width, aligned, [] {});
}

}  // namespace jaxllm::attention
