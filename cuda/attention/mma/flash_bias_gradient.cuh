// The gradient of the bias on the scores, on tensor cores by mma.sync, without atomics.
//
// A CTA owns a tile of queries and keys of one matrix of the gradient. It visits the sequences and
// query heads that share the matrix, recomputes their weights and adds up p * (dp - delta) in
// registers:
//
//   s = q k^T   dp = dout v^T
#pragma once

#include <type_traits>

#include "attention/mma/flash_backward.cuh"

namespace jaxllm::attention {

// With 256 columns a CTA has exactly the 99 KiB of shared memory that every GPU since sm_80 has.
template <int kHeadDimension>
struct BiasGradientTraits {
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMinCtasPerSm = 2;
  static constexpr int kBlockM = 16 * kWarps;               // queries
  static constexpr int kBlockN = kHeadDim > 128 ? 32 : 64;  // keys
  static constexpr int kSmemBytes = 2 * (kBlockM + kBlockN) * kSmemStride<kHeadDim> * 2;
};

template <class Traits, typename T>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinCtasPerSm)
    flash_attention_bias_gradient_kernel(const BackwardParams<T> params) {
  constexpr int kHeadDim = Traits::kHeadDim, kThreads = Traits::kThreads;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kNTiles = kBlockN / 8;
  extern __shared__ __align__(16) unsigned char shared[];
  T* q_tile = reinterpret_cast<T*>(shared);
  T* dout_tile = q_tile + kBlockM * kSmemStride<kHeadDim>;
  T* k_tile = dout_tile + kBlockM * kSmemStride<kHeadDim>;
  T* v_tile = k_tile + kBlockN * kSmemStride<kHeadDim>;

  const int queries = params.mask.queries, keys = params.mask.keys;
  const int heads = params.heads, group = params.group, width = params.width;
  const bool aligned = params.aligned;
  const ScoreBiasTile tile(params.bias, heads, (queries + kBlockM - 1) / kBlockM,
                           (keys + kBlockN - 1) / kBlockN);
  const int first = tile.query_tile * kBlockM, first_key = tile.key_tile * kBlockN;
  using Visible = VisibleTiles<Rows::kQueries, kBlockM, kBlockN>;
  // The first member from `member` on of which a query sees a key of the tile.
  const auto next = [&](int member) {
    while (member < tile.members) {
      const Mask mask = params.mask.of_sequence(tile.b_of(member));
      if (Visible(mask, first).sees_any(tile.key_tile)) break;
      member += tile.heads - member % tile.heads;  // the mask is that of the sequence
    }
    return member;
  };
  const auto load = [&](auto block, T* target, const HeadRows<const T>& array, int b, int head,
                        int row, int rows) {
    load_tile<decltype(block)::value, kHeadDim, kThreads>(
        target, head_of(array, b, rows, head, width), array.row_stride, row, rows, width, aligned);
  };
  constexpr std::integral_constant<int, kBlockM> query_block;
  constexpr std::integral_constant<int, kBlockN> key_block;
  const auto load_q_and_k = [&](int member) {
    const int b = tile.b_of(member), head = tile.head_of(member);
    load(query_block, q_tile, params.q, b, head, first, queries);
    load(key_block, k_tile, params.k, b, head / group, first_key, keys);
  };
  const auto load_dout_and_v = [&](int member) {
    const int b = tile.b_of(member), head = tile.head_of(member);
    load(query_block, dout_tile, params.dout, b, head, first, queries);
    load(key_block, v_tile, params.v, b, head / group, first_key, keys);
  };

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  int member = next(0);
  if (member < tile.members) load_q_and_k(member);
  float bias[1][kNTiles][4], gradient[1][kNTiles][4] = {};
  if (member < tile.members) {  // members share it
    load_bias<Rows::kQueries, T>(bias, params.bias, tile.first_b, tile.first_head, params.mask,
                                 first + warp_row, first_key);
  }

  // Mainloop. The copies of dout and v run while the scores are computed, those of the next q and k
  // while dp is.
  while (member < tile.members) {
    cp_async_wait_all();
    __syncthreads();  // q and k have come, and all threads have read the dout and v before
    load_dout_and_v(member);
    const int following = next(member + 1);
    const int b = tile.b_of(member), head = tile.head_of(member);
    const Mask mask = params.mask.of_sequence(b);
    const bool sees_all = Visible(mask, first).sees_all(mask, first, tile.key_tile);
    float row_lse[2] = {}, row_delta[2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first + warp_row + 8 * h + lane / 4;
      if (row >= queries) continue;
      const int64_t statistic = (int64_t{b} * heads + head) * queries + row;
      row_lse[h] = negative_lse(params.lse[statistic]);
      row_delta[h] = params.delta[statistic];
    }

    float p[1][kNTiles][4] = {};
    gemm_ss<kHeadDim>(p, q_tile + warp_row * kSmemStride<kHeadDim>, k_tile);
    cp_async_wait_all();
    __syncthreads();  // dout and v have come, and all threads have read q and k
    if (following < tile.members) load_q_and_k(following);
    const auto nothing = [](int, int) { return 0; };
    for_each_element(p, nothing, [&](float& x, int, int m, int h, int n, int c) {
      x = weight_of(x, params.scores, biased(row_lse[h], bias[m][n][2 * h + c]));
    });
    if (!sees_all) apply_mask<Rows::kQueries>(p, mask, first + warp_row, first_key, 0.0f);

    float dp[1][kNTiles][4] = {};
    gemm_ss<kHeadDim>(dp, dout_tile + warp_row * kSmemStride<kHeadDim>, v_tile);
    for_each_element(gradient, nothing, [&](float& x, int, int m, int h, int n, int c) {
      const int i = 2 * h + c;
      x = fmaf(p[m][n][i], dp[m][n][i] - row_delta[h], x);
    });
    member = following;
  }

  const auto store = [&](auto* matrices) {
    store_bias_gradient(gradient, matrices + tile.offset(queries, keys), queries, keys,
                        first + warp_row, first_key);
  };
  if (params.bias.is_float32) {
    store(static_cast<float*>(params.bias.gradient));
  } else {
    store(static_cast<T*>(params.bias.gradient));
  }
}

}  // namespace jaxllm::attention
