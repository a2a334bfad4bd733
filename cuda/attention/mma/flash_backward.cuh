// The backward of flash attention on tensor cores by mma.sync, without atomics.
//
// One kernel computes dq, or dk and dv. A CTA owns a tile of queries and accumulates dq over the
// tiles of keys. Or it owns a tile of keys and accumulates dk and dv over the tiles of queries of
// every query head that shares the key head. Both recompute the scores, with the own rows as the
// rows of the accumulators, so that p and ds need not pass through shared memory. With (own1, own2)
// and (other1, other2) being (q, dout) and (k, v), or (k, v) and (q, dout):
//
//   s = own1 other1^T   dp = own2 other2^T   acc1 += ds other1   acc2 += p other2
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/flash_kernels.h"
#include "attention/mma/mask.cuh"
#include "attention/mma/rotary.cuh"
#include "attention/mma/score_bias.cuh"
#include "attention/mma/softmax.cuh"
#include "attention/mma/tile.cuh"
#include "common/cp_async.cuh"

namespace jaxllm::attention {

template <typename T>
struct BackwardParams {
  HeadRows<const T> q, k, v, dout;
  const float *lse, *delta;
  HeadRows<T> dq, dk, dv;
  int heads, group;  // query heads, in all and of a key head
  int width;
  float scale;
  ScoreParams scores;
  Mask mask;
  ScoreBias bias;
  Rotary rotary;  // of dq and dk, by the negative angles
  bool aligned;
};

// The tile shape, the fastest on an H200 of those of which an SM holds two to four CTAs: few warps
// leave the tensor cores waiting. Each array of the other side has two tiles: one is copied while
// the other one is used. Unless it is kLarge, a CTA fits into the 99 KiB of shared memory that
// every GPU since sm_80 has for one; with 256 columns in tiles of 16 rows, and exactly. With
// kHasBias a thread has the bias of a tile in registers, which leaves those of fewer CTAs.
template <Rows kOwnRows, int kHeadDimension, bool kLarge = false, bool kHasBias = false>
struct BackwardTraits {
  static constexpr Rows kOwn = kOwnRows;
  static constexpr bool kOwnsKeys = kOwn == Rows::kKeys;
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr bool kIs256 = kHeadDim > 128;
  static constexpr bool kBias = kHasBias;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMinCtasPerSm = kHeadDim <= 64 ? (kBias ? 3 : 4) : 1;
  static constexpr int kMTiles = kLarge && !kOwnsKeys && !kIs256 ? 2 : 1;  // of 16 rows, per warp
  static constexpr int kBlockOwn = 16 * kMTiles * kWarps;
  static constexpr bool kHasLongTiles =
      (kLarge && kOwnsKeys) || (kHeadDim <= 64 && !kOwnsKeys && !kBias);
  static constexpr int kBlockOther = kIs256 ? (kLarge ? 32 : 16) : (kHasLongTiles ? 64 : 32);
  // The registers cannot hold dk and dv of 256 columns: a CTA has half of each.
  static constexpr int kParts = kOwnsKeys && kIs256 ? 2 : 1;
  static constexpr int kPartDim = kHeadDim / kParts;
  static constexpr int kOtherElements = kBlockOther * kSmemStride<kHeadDim>;
  static constexpr int kOwnElements = kBlockOwn * kSmemStride<kHeadDim>;
  // A CTA that owns keys has lse and delta of two tiles of queries, behind the tiles. Without space
  // there, they are in the 16 bytes of padding behind each row of q and dout.
  static constexpr bool kStatisticsInRows = kIs256 && !kLarge;
  template <typename T>
  static constexpr int kSmemBytes =
      (2 * kOwnElements + 4 * kOtherElements) * int{sizeof(T)} +
      (kOwnsKeys && !kStatisticsInRows ? 4 * kBlockOther * int{sizeof(float)} : 0);
};

template <class Traits, typename T>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinCtasPerSm)
    flash_attention_backward_kernel(const BackwardParams<T> params) {
  constexpr Rows kOwn = Traits::kOwn;
  constexpr bool kOwnsKeys = Traits::kOwnsKeys;
  constexpr int kHeadDim = Traits::kHeadDim, kMTiles = Traits::kMTiles, kThreads = Traits::kThreads;
  constexpr int kBlockOwn = Traits::kBlockOwn, kBlockOther = Traits::kBlockOther;
  constexpr int kNTiles = kBlockOther / 8;
  constexpr int kPartDim = Traits::kPartDim, kOtherElements = Traits::kOtherElements;
  extern __shared__ __align__(16) unsigned char shared[];
  T* own1_tile = reinterpret_cast<T*>(shared);
  T* own2_tile = own1_tile + Traits::kOwnElements;
  T* others = own2_tile + Traits::kOwnElements;  // two buffers of other1 and other2

  // The address of lse (0) or delta (1) of a buffer's query, and the stride between queries.
  constexpr int kStatisticStride =
      Traits::kStatisticsInRows ? kSmemStride<kHeadDim> * int{sizeof(T)} / int{sizeof(float)} : 1;
  const auto statistic = [&](int buffer, int which, int row) {
    const int tile = buffer * 2 + which;
    if constexpr (Traits::kStatisticsInRows) {
      return reinterpret_cast<float*>(others + tile * kOtherElements + kHeadDim) +
             row * kStatisticStride;
    } else {
      return reinterpret_cast<float*>(others + 4 * kOtherElements) + tile * kBlockOther + row;
    }
  };

  const int queries = params.mask.queries, keys = params.mask.keys;
  const int heads = params.heads, group = params.group, width = params.width;
  const int own_rows = kOwnsKeys ? keys : queries, other_rows = kOwnsKeys ? queries : keys;
  const int own_heads = (kOwnsKeys ? heads / group : heads) * Traits::kParts;
  const bool aligned = params.aligned;
  // First the tile with the most work under a causal mask: the last queries, or the first keys.
  const int tiles = (own_rows + kBlockOwn - 1) / kBlockOwn;
  const WorkTile work(tiles, own_heads);
  const int b = work.b, own_head = work.head / Traits::kParts;
  const int part_column = work.head % Traits::kParts * kPartDim;
  const int first = (kOwnsKeys ? work.tile : tiles - 1 - work.tile) * kBlockOwn;
  const Mask mask = params.mask.of_sequence(b);
  const auto& own1 = kOwnsKeys ? params.k : params.q;
  const auto& own2 = kOwnsKeys ? params.v : params.dout;
  const auto& other1 = kOwnsKeys ? params.q : params.k;
  const auto& other2 = kOwnsKeys ? params.dout : params.v;

  const VisibleTiles<kOwn, kBlockOwn, kBlockOther> visible(mask, first);
  const int first_tile = visible.first();
  // A CTA that owns keys visits the tiles of one query head after the other.
  const int first_head = kOwnsKeys ? own_head * group : own_head / group;
  const int end_head = kOwnsKeys ? first_head + group : first_head + 1;
  const auto load = [&](auto block, T* target, const HeadRows<const T>& array, int head, int row,
                        int rows) {
    load_tile<decltype(block)::value, kHeadDim, kThreads>(
        target, head_of(array, b, rows, head, width), array.row_stride, row, rows, width, aligned);
  };
  constexpr std::integral_constant<int, kBlockOwn> own_block;
  constexpr std::integral_constant<int, kBlockOther> other_block;
  const auto load_others = [&](int buffer, int head, int tile) {
    T* target = others + buffer * 2 * kOtherElements;
    load(other_block, target, other1, head, tile * kBlockOther, other_rows);
    load(other_block, target + kOtherElements, other2, head, tile * kBlockOther, other_rows);
    if constexpr (kOwnsKeys) {
      // Zeros past the last query, whose q and dout are zeros too, and add nothing.
      if (threadIdx.x < 2 * kBlockOther) {
        const int index = threadIdx.x, row = tile * kBlockOther + index % kBlockOther;
        const float* source = index < kBlockOther ? params.lse : params.delta;
        const bool valid = row < queries;
        source += (int64_t{b} * heads + head) * queries + (valid ? row : 0);
        cp_async_4(statistic(buffer, index / kBlockOther, index % kBlockOther), source, valid);
      }
    }
  };

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * kMTiles;
  const T* own1_rows = own1_tile + warp_row * kSmemStride<kHeadDim>;
  const T* own2_rows = own2_tile + warp_row * kSmemStride<kHeadDim>;
  float acc1[kMTiles][kPartDim / 8][4] = {};
  float acc2[kOwnsKeys ? kMTiles : 1][kOwnsKeys ? kPartDim / 8 : 1][4] = {};

  int tile = first_tile, head = first_head, buffer = 0;
  if (tile < visible.end()) {
    load(own_block, own1_tile, own1, own_head, first, own_rows);
    load(own_block, own2_tile, own2, own_head, first, own_rows);
    load_others(buffer, head, tile);
  }
  // Of the queries in this lane's rows.
  float row_lse[kMTiles][2] = {}, row_delta[kMTiles][2] = {};
  if constexpr (!kOwnsKeys) {
    const int64_t offset = (int64_t{b} * heads + own_head) * queries;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first + warp_row + 16 * m + 8 * h + lane / 4;
        if (row >= queries) continue;
        row_lse[m][h] = negative_lse(params.lse[offset + row]);
        row_delta[m][h] = params.delta[offset + row];
      }
    }
  }

  // Mainloop.
  while (tile < visible.end()) {
    cp_async_wait_all();
    __syncthreads();  // this tile has come, and all threads have read the one before
    const int current = tile;
    [[maybe_unused]] const int current_head = head;
    tile = visible.next(tile + 1);
    if (tile >= visible.end() && head + 1 < end_head) {
      tile = first_tile;
      ++head;
    }
    if (tile < visible.end()) load_others(buffer ^ 1, head, tile);
    const T* other1_tile = others + buffer * 2 * kOtherElements;
    const T* other2_tile = other1_tile + kOtherElements;
    // Of the queries in this lane's columns, from its first column on.
    const float* column_lse = statistic(buffer, 0, 2 * (lane % 4));
    const float* column_delta = statistic(buffer, 1, 2 * (lane % 4));

    [[maybe_unused]] float bias[kMTiles][kNTiles][4];
    if constexpr (Traits::kBias) {
      const int query_head = kOwnsKeys ? current_head : own_head;
      load_bias<kOwn, T>(bias, params.bias, b, query_head, mask, first + warp_row,
                         current * kBlockOther);
    }
    float p[kMTiles][kNTiles][4] = {};
    gemm_ss<kHeadDim>(p, own1_rows, other1_tile);
    const auto lse_of_column = [&](int n, int c) {
      return kOwnsKeys ? negative_lse(column_lse[(8 * n + c) * kStatisticStride]) : 0.0f;
    };
    const auto delta_of_column = [&](int n, int c) {
      return kOwnsKeys ? column_delta[(8 * n + c) * kStatisticStride] : 0.0f;
    };
    // What the product's score is added to: -lse, and the bias.
    const auto shift_of = [&](float lse, int m, int h, [[maybe_unused]] int n,
                              [[maybe_unused]] int c) {
      const float minus_lse = kOwnsKeys ? lse : row_lse[m][h];
      if constexpr (Traits::kBias) {
        return biased(minus_lse, bias[m][n][2 * h + c]);
      } else {
        return minus_lse;
      }
    };
    for_each_element(p, lse_of_column, [&](float& x, float lse, int m, int h, int n, int c) {
      x = weight_of(x, params.scores, shift_of(lse, m, h, n, c));
    });
    if (!visible.sees_all(mask, first, current)) {
      apply_mask<kOwn>(p, mask, first + warp_row, current * kBlockOther, 0.0f);
    }

    float ds[kMTiles][kNTiles][4] = {};
    gemm_ss<kHeadDim>(ds, own2_rows, other2_tile);
    for_each_element(ds, delta_of_column, [&](float& x, float delta, int m, int h, int n, int c) {
      x = p[m][n][2 * h + c] * (x - (kOwnsKeys ? delta : row_delta[m][h]));
    });
    if (params.scores.softcap != 0.0f) {
      for_each_element(ds, lse_of_column, [&](float& x, float lse, int m, int h, int n, int c) {
        x *= softcap_derivative(p[m][n][2 * h + c], params.scores, shift_of(lse, m, h, n, c));
      });
    }

    if constexpr (kOwnsKeys) gemm_rs<kHeadDim>(acc2, p, other2_tile + part_column);
    gemm_rs<kHeadDim>(acc1, ds, other1_tile + part_column);
    buffer ^= 1;
  }

  for_each_element(acc1, [&](float& x) { x *= params.scale; });
  // Epilogue. A warp has read its own rows in shared memory, which the results overwrite.
  const int part_width = min(width - part_column, kPartDim);
  const auto store = [&](const auto& sum, T* rows_of_warp, const HeadRows<T>& target,
                         const auto& change) {
    T* target_head = head_of(target, b, own_rows, own_head, width) + part_column;
    store_accumulator<kHeadDim>(sum, rows_of_warp, target_head, target.row_stride, first + warp_row,
                                own_rows, part_width, aligned, change);
  };
  T* rows1 = own1_tile + warp_row * kSmemStride<kHeadDim>;
  store(acc1, rows1, kOwnsKeys ? params.dk : params.dq, [&] {
    if (params.rotary.cos == nullptr) return;
    apply_rotary<kHeadDim, 16 * kMTiles>(rows1, params.rotary, -1.0f, b, first + warp_row,
                                         own_rows);
  });
  if constexpr (kOwnsKeys) {
    store(acc2, own2_tile + warp_row * kSmemStride<kHeadDim>, params.dv, [] {});
  }
}

template <typename T>
BackwardParams<T> make_backward_params(const FlashBackward<T>& call) {
  const auto& [shape, options, q, k, v, out, dout, lse, delta, dlse, dq, dk, dv] = call;
  BackwardParams<T> params{q, k, v, dout, lse, delta, dq, dk, dv};
  params.heads = static_cast<int>(shape.heads);
  params.group = static_cast<int>(shape.heads / shape.kv_heads);
  params.width = static_cast<int>(shape.width);
  params.scale = options.scale;
  params.scores = make_score_params(options);
  params.mask = make_mask(shape, options);
  params.bias = ScoreBias::of_call(shape, options.score_bias);
  if (shape.width <= kMmaMaxRotaryWidth) params.rotary = make_rotary(shape, options.rope);
  params.aligned = heads_are_aligned(shape.width, q, k, v, dout, dq, dk, dv);
  return params;
}

template <class Traits, typename T>
cudaError_t launch_backward(cudaStream_t stream, const BackwardParams<T>& params, int64_t batch) {
  const int64_t heads = Traits::kOwnsKeys ? params.heads / params.group : params.heads;
  const int64_t rows = Traits::kOwnsKeys ? params.mask.keys : params.mask.queries;
  const int64_t tiles = batch * heads * Traits::kParts * divide_up(rows, Traits::kBlockOwn);
  return launch_tiles(stream, flash_attention_backward_kernel<Traits, T>, tiles, Traits::kThreads,
                      Traits::template kSmemBytes<T>, params);
}

// Both kernels: dk and dv, then dq.
template <int kHeadDim, bool kLarge, bool kBias = false, typename T>
cudaError_t launch_both(cudaStream_t stream, const BackwardParams<T>& params, int64_t batch) {
  JAXLLM_RETURN_IF_ERROR((launch_backward<BackwardTraits<Rows::kKeys, kHeadDim, kLarge, kBias>>(
      stream, params, batch)));
  return launch_backward<BackwardTraits<Rows::kQueries, kHeadDim, kLarge, kBias>>(stream, params,
                                                                                  batch);
}

// The larger of the two kernels' shared memory.
template <int kHeadDim, bool kLarge, bool kBias = false>
constexpr int backward_smem_bytes() {
  using T = __nv_bfloat16;
  return std::max(BackwardTraits<Rows::kKeys, kHeadDim, kLarge, kBias>::template kSmemBytes<T>,
                  BackwardTraits<Rows::kQueries, kHeadDim, kLarge, kBias>::template kSmemBytes<T>);
}

}  // namespace jaxllm::attention
