// The backward of flash attention on tensor cores by mma.sync, without atomics.
//
// One kernel, for two sets of results. A block owns a tile of queries and sums up dq over the tiles
// of keys; or it owns a tile of keys and sums up dk and dv over the tiles of queries, of every
// query head that shares the key head. Either computes the scores and their gradients anew, with
// its own rows as the rows of the products and the other side's as the columns, so that neither has
// to pass through shared memory: with (own1, own2) and (other1, other2) being (q, dout) and (k, v),
// or (k, v) and (q, dout),
//
//   x = own1 other1^T   dx = own2 other2^T   sum1 += da other1   sum2 += p other2
#pragma once

#include "attention/flash_tile.cuh"
#include "common/cp_async.cuh"

namespace jaxllm::attention {

template <typename T>
struct BackwardArguments {
  HeadRows<const T> q, k, v, dout;
  const float *lse, *delta;
  HeadRows<T> dq, dk, dv;
  int heads, group;  // query heads, in all and to a key head
  int width;
  float scale;
  Scores scores;
  Mask mask;
  Rotation rotation;  // back, of dq and dk
  bool aligned;
};

// Sizes of tiles, with two tiles of each array of the other side: one is copied while the other is
// used. They are what was fastest on an H200 of the sizes that fit two to four blocks there: few
// warps leave the tensor cores waiting. Unless it is kLarge, a block fits into the 99 KiB of shared
// memory that every GPU since sm_80 has for one; of 256 columns in tiles of 16 rows, and exactly.
template <Rows kOwnRows, int kHeadWidth, bool kLarge = false>
struct BackwardTiles {
  static constexpr Rows kOwn = kOwnRows;
  static constexpr bool kOwnsKeys = kOwn == Rows::kKeys;
  static constexpr int kWidth = kHeadWidth;
  static constexpr bool kIsWide = kWidth > 128;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kBlocks = kWidth <= 64 ? 4 : 1;  // on a multiprocessor, at least
  // Tiles of 16 rows, for each warp.
  static constexpr int kRowTiles = kLarge && !kOwnsKeys && !kIsWide ? 2 : 1;
  static constexpr int kOwnTile = 16 * kRowTiles * kWarps;
  static constexpr bool kHasLongTiles = (kLarge && kOwnsKeys) || (kWidth <= 64 && !kOwnsKeys);
  static constexpr int kTile = kIsWide ? (kLarge ? 32 : 16) : (kHasLongTiles ? 64 : 32);
  // dk and dv of whole keys would be too much for the registers: a block has half of each.
  static constexpr int kParts = kOwnsKeys && kIsWide ? 2 : 1;
  static constexpr int kPartWidth = kWidth / kParts;
  static constexpr int kTileElements = kTile * kTileStride<kWidth>;
  static constexpr int kOwnElements = kOwnTile * kTileStride<kWidth>;
  // A block that owns keys has lse and delta of two tiles of queries, behind the tiles; or, where
  // there is no room, in the 16 bytes behind each row of q and dout that keep rows apart.
  static constexpr bool kStatisticsInRows = kIsWide && !kLarge;
  template <typename T>
  static constexpr int kSharedBytes =
      (2 * kOwnElements + 4 * kTileElements) * int{sizeof(T)} +
      (kOwnsKeys && !kStatisticsInRows ? 4 * kTile * int{sizeof(float)} : 0);
};

// The negative lse of a query, in powers of two. A query that sees no key has an lse of -infinity:
// what stands for it here makes all its weights zero.
__device__ __forceinline__ float negative_lse(float lse) {
  return lse == -INFINITY ? -INFINITY : -lse * kLog2E;
}

// The weight of a product and, where there is a softcap, the scores' derivative by it.
__device__ __forceinline__ float weight_of(float product, const Scores& scores, float minus_lse) {
  if (scores.cap == 0.0f) return exp2_fast(fmaf(product, scores.factor, minus_lse));
  return exp2_fast(fmaf(tanh_fast(product * scores.factor), scores.cap, minus_lse));
}

// 1 - tanh^2, the derivative of the softcap, found again from the weight. A weight that is zero, of
// a hidden key too, has no gradient anyway.
__device__ __forceinline__ float softcap_derivative(float weight, const Scores& scores,
                                                    float minus_lse) {
  if (weight == 0.0f) return 0.0f;
  const float tanh = (log2_fast(weight) - minus_lse) / scores.cap;
  return 1.0f - tanh * tanh;
}

template <class Tiles, typename T>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    flash_attention_backward_kernel(const BackwardArguments<T> arguments) {
  constexpr Rows kOwn = Tiles::kOwn;
  constexpr bool kOwnsKeys = Tiles::kOwnsKeys;
  constexpr int kWidth = Tiles::kWidth, kRowTiles = Tiles::kRowTiles, kThreads = Tiles::kThreads;
  constexpr int kOwnTile = Tiles::kOwnTile, kTile = Tiles::kTile, kTileWords = kTile / 8;
  constexpr int kPartWidth = Tiles::kPartWidth, kTileElements = Tiles::kTileElements;
  extern __shared__ __align__(16) unsigned char shared[];
  T* own1_tile = reinterpret_cast<T*>(shared);
  T* own2_tile = own1_tile + Tiles::kOwnElements;
  T* others = own2_tile + Tiles::kOwnElements;  // two buffers of other1 and other2

  // Where lse (0) or delta (1) of a buffer's query stands, and how far apart those of queries do.
  constexpr int kStatisticStride =
      Tiles::kStatisticsInRows ? kTileStride<kWidth> * int{sizeof(T)} / int{sizeof(float)} : 1;
  const auto statistic = [&](int buffer, int which, int row) {
    const int tile = buffer * 2 + which;
    if constexpr (Tiles::kStatisticsInRows) {
      return reinterpret_cast<float*>(others + tile * kTileElements + kWidth) +
             row * kStatisticStride;
    } else {
      return reinterpret_cast<float*>(others + 4 * kTileElements) + tile * kTile + row;
    }
  };

  const int queries = arguments.mask.queries, keys = arguments.mask.keys;
  const int heads = arguments.heads, group = arguments.group, width = arguments.width;
  const int own_rows = kOwnsKeys ? keys : queries, other_rows = kOwnsKeys ? queries : keys;
  const int own_heads = (kOwnsKeys ? heads / group : heads) * Tiles::kParts;
  const bool aligned = arguments.aligned;
  // Under a causal mask the last queries and the first keys have the most to do.
  const int tiles = (own_rows + kOwnTile - 1) / kOwnTile;
  const Place place(tiles, own_heads);
  const int b = place.b, own_head = place.head / Tiles::kParts;
  const int part_column = place.head % Tiles::kParts * kPartWidth;
  const int first = (kOwnsKeys ? place.tile : tiles - 1 - place.tile) * kOwnTile;
  const Mask mask = arguments.mask.of_sequence(b);
  const auto& own1 = kOwnsKeys ? arguments.k : arguments.q;
  const auto& own2 = kOwnsKeys ? arguments.v : arguments.dout;
  const auto& other1 = kOwnsKeys ? arguments.q : arguments.k;
  const auto& other2 = kOwnsKeys ? arguments.dout : arguments.v;

  const TileWalk<kOwn, kOwnTile, kTile> walk(mask, first);
  const int first_tile = walk.first();
  // What comes after (head, tile): a block that owns keys does one query head after the other.
  const int first_head = kOwnsKeys ? own_head * group : own_head / group;
  const int end_head = kOwnsKeys ? first_head + group : first_head + 1;
  const auto load_others = [&](int buffer, int head, int tile) {
    T* target = others + buffer * 2 * kTileElements;
    load_tile<kTile, kWidth, kThreads>(target, head_of(other1, b, other_rows, head, width),
                                       other1.row_stride, tile * kTile, other_rows, width, aligned);
    load_tile<kTile, kWidth, kThreads>(target + kTileElements,
                                       head_of(other2, b, other_rows, head, width),
                                       other2.row_stride, tile * kTile, other_rows, width, aligned);
    if constexpr (kOwnsKeys) {
      // Zeros beyond the last query, whose q and dout are zeros too, and add nothing.
      if (threadIdx.x < 2 * kTile) {
        const int index = threadIdx.x, row = tile * kTile + index % kTile;
        const float* source = index < kTile ? arguments.lse : arguments.delta;
        const bool valid = row < queries;
        source += (int64_t{b} * heads + head) * queries + (valid ? row : 0);
        cp_async_4(statistic(buffer, index / kTile, index % kTile), source, valid);
      }
    }
  };

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * kRowTiles;
  const T* own1_rows = own1_tile + warp_row * kTileStride<kWidth>;
  const T* own2_rows = own2_tile + warp_row * kTileStride<kWidth>;
  float sum1[kRowTiles][kPartWidth / 8][4] = {};
  float sum2[kOwnsKeys ? kRowTiles : 1][kOwnsKeys ? kPartWidth / 8 : 1][4] = {};

  int tile = first_tile, head = first_head, buffer = 0;
  if (tile < walk.end()) {
    load_tile<kOwnTile, kWidth, kThreads>(own1_tile, head_of(own1, b, own_rows, own_head, width),
                                          own1.row_stride, first, own_rows, width, aligned);
    load_tile<kOwnTile, kWidth, kThreads>(own2_tile, head_of(own2, b, own_rows, own_head, width),
                                          own2.row_stride, first, own_rows, width, aligned);
    load_others(buffer, head, tile);
  }
  // The statistics of the queries that this lane's rows are.
  float row_lse[kRowTiles][2] = {}, row_delta[kRowTiles][2] = {};
  if constexpr (!kOwnsKeys) {
    const int64_t offset = (int64_t{b} * heads + own_head) * queries;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + warp_row + 16 * m + 8 * h + lane / 4;
        if (row >= queries) continue;
        row_lse[m][h] = negative_lse(arguments.lse[offset + row]);
        row_delta[m][h] = arguments.delta[offset + row];
      }
    }
  }

  while (tile < walk.end()) {
    cp_async_wait_all();
    __syncthreads();  // this tile is there, and nobody reads the one before any more
    const int here = tile;
    tile = walk.next(tile + 1);
    if (tile >= walk.end() && head + 1 < end_head) {
      tile = first_tile;
      ++head;
    }
    if (tile < walk.end()) load_others(buffer ^ 1, head, tile);
    const T* other1_tile = others + buffer * 2 * kTileElements;
    const T* other2_tile = other1_tile + kTileElements;
    // The statistics of the queries that this lane's columns are, from its first on.
    const float* column_lse = statistic(buffer, 0, 2 * (lane % 4));
    const float* column_delta = statistic(buffer, 1, 2 * (lane % 4));

    float p[kRowTiles][kTileWords][4] = {};
    multiply_transposed<kWidth>(p, own1_rows, other1_tile);
#pragma unroll
    for (int n = 0; n < kTileWords; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float of_column = 0.0f;
        if constexpr (kOwnsKeys)
          of_column = negative_lse(column_lse[(8 * n + c) * kStatisticStride]);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& value = p[m][n][2 * h + c];
            value = weight_of(value, arguments.scores, kOwnsKeys ? of_column : row_lse[m][h]);
          }
        }
      }
    }
    if (!walk.sees_all(mask, first, here)) {
      hide<kOwn>(p, mask, first + warp_row, here * kTile, 0.0f);
    }

    float da[kRowTiles][kTileWords][4] = {};
    multiply_transposed<kWidth>(da, own2_rows, other2_tile);
#pragma unroll
    for (int n = 0; n < kTileWords; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float of_column = kOwnsKeys ? column_delta[(8 * n + c) * kStatisticStride] : 0.0f;
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& value = da[m][n][2 * h + c];
            value = p[m][n][2 * h + c] * (value - (kOwnsKeys ? of_column : row_delta[m][h]));
          }
        }
      }
    }
    if (arguments.scores.cap != 0.0f) {
#pragma unroll
      for (int n = 0; n < kTileWords; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float of_column = 0.0f;
          if constexpr (kOwnsKeys)
            of_column = negative_lse(column_lse[(8 * n + c) * kStatisticStride]);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              da[m][n][2 * h + c] *= softcap_derivative(p[m][n][2 * h + c], arguments.scores,
                                                        kOwnsKeys ? of_column : row_lse[m][h]);
            }
          }
        }
      }
    }

    if constexpr (kOwnsKeys) multiply<kWidth>(sum2, p, other2_tile + part_column);
    multiply<kWidth>(sum1, da, other1_tile + part_column);
    buffer ^= 1;
  }

#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kPartWidth / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum1[m][n][i] *= arguments.scale;
    }
  }
  // Each warp is done with its own rows in shared memory; the results take their place.
  const int width_here = min(width - part_column, kPartWidth);
  const auto store = [&](const auto& sum, T* rows_of_warp, const HeadRows<T>& target,
                         const auto& change) {
    T* target_head = head_of(target, b, own_rows, own_head, width) + part_column;
    store_rows<kWidth>(sum, rows_of_warp, target_head, target.row_stride, first + warp_row,
                       own_rows, width_here, aligned, change);
  };
  T* rows1 = own1_tile + warp_row * kTileStride<kWidth>;
  store(sum1, rows1, kOwnsKeys ? arguments.dk : arguments.dq, [&] {
    if (arguments.rotation.cos == nullptr) return;
    rotate_rows<kWidth, 16 * kRowTiles>(rows1, arguments.rotation, -1.0f, b, first + warp_row,
                                        own_rows);
  });
  if constexpr (kOwnsKeys) {
    store(sum2, own2_tile + warp_row * kTileStride<kWidth>, arguments.dv, [] {});
  }
}

}  // namespace jaxllm::attention
