// The forward of flash attention on tensor cores by mma.sync.
//
// A CTA holds a tile of queries of one head, and visits the tiles of keys that they see. Each warp
// has some of the queries: their scores, their running maximum and sum, and their output
// accumulator stay in its registers.
#pragma once

#include <type_traits>

#include "attention/mma/mask.cuh"
#include "attention/mma/rotary.cuh"
#include "attention/mma/score_bias.cuh"
#include "attention/mma/softmax.cuh"
#include "attention/mma/tile.cuh"
#include "attention/sinks.cuh"
#include "common/cp_async.cuh"

namespace jaxllm::attention {

// Stored is the type of q, k and v in memory: T, or a float8 that T holds exactly.
template <typename T, typename Stored = T>
struct ForwardParams {
  HeadRows<const Stored> q, k, v;
  HeadRows<T> out;
  float* lse;
  int heads, group;  // query heads, in all and of a key head
  int width;
  ScoreParams scores;
  float exp2_scale;  // of the scores; above zero
  Mask mask;
  Sinks sinks;
  ScoreBias bias;
  Rotary rotary;                             // of q
  const float *q_scale, *k_scale, *v_scale;  // of a float8's heads
  bool aligned;
};

// The tile shape, the fastest on an H200. A warp has 16 queries. 32 queries halve its reads of
// shared memory, but fewer CTAs fit an SM to keep the tensor cores busy while one waits, and the
// mask hides more of a tile. So kTwoMTiles is for large heads with long rows of keys. With kHasBias
// a thread has the bias of a tile in registers, which leaves those of fewer CTAs.
template <int kHeadDimension, bool kTwoMTiles = false, bool kHasBias = false>
struct ForwardTraits {
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kMTiles = kTwoMTiles ? 2 : 1;  // of 16 queries, for each warp
  static constexpr bool kBias = kHasBias;
  static constexpr int kCtasWithoutBias = kHeadDim <= 64                   ? 4
                                          : kHeadDim <= 128 && !kTwoMTiles ? 3
                                                                           : 1;
  static constexpr int kMinCtasPerSm = kCtasWithoutBias - (kBias && kCtasWithoutBias > 1);
  static constexpr int kBlockM = 16 * kMTiles * kWarps;  // queries
  static constexpr int kBlockN = 64;                     // keys
  static constexpr int kSmemBytes = (kBlockM + 2 * kBlockN) * kSmemStride<kHeadDim> * 2;
};

template <class Traits, typename T, typename Stored>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kMinCtasPerSm)
    flash_attention_forward_kernel(const ForwardParams<T, Stored> params) {
  constexpr bool kScaled = !std::is_same_v<T, Stored>;
  constexpr int kHeadDim = Traits::kHeadDim, kMTiles = Traits::kMTiles;
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  constexpr int kThreads = Traits::kThreads;
  extern __shared__ __align__(16) unsigned char shared[];
  T* q_tile = reinterpret_cast<T*>(shared);
  T* k_tile = q_tile + kBlockM * kSmemStride<kHeadDim>;
  T* v_tile = k_tile + kBlockN * kSmemStride<kHeadDim>;

  // The last tile of queries first: under a causal mask it has the most work.
  const int queries = params.mask.queries, keys = params.mask.keys;
  const int tiles = (queries + kBlockM - 1) / kBlockM;
  const WorkTile work(tiles, params.heads);
  const int b = work.b, head = work.head;
  const int first = (tiles - 1 - work.tile) * kBlockM;
  const Mask mask = params.mask.of_sequence(b);
  const int width = params.width;
  const bool aligned = params.aligned;
  const int kv_head = head / params.group;
  const Stored* q = head_of(params.q, b, queries, head, width);
  const Stored* k = head_of(params.k, b, keys, kv_head, width);
  const Stored* v = head_of(params.v, b, keys, kv_head, width);
  ScoreParams scores = params.scores;
  if constexpr (kScaled) scores.scale *= params.q_scale[head] * params.k_scale[kv_head];
  const auto load_keys = [&](T* tile, const HeadRows<const Stored>& rows, const Stored* source,
                             int index) {
    load_tile<kBlockN, kHeadDim, kThreads>(tile, source, rows.row_stride, index * kBlockN, keys,
                                           width, aligned);
  };

  const int warp_row = threadIdx.x / 32 * 16 * kMTiles;
  float out[kMTiles][kHeadDim / 8][4] = {};
  float maximum[kMTiles][2], sum[kMTiles][2] = {};
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) maximum[m][0] = maximum[m][1] = -INFINITY;

  const VisibleTiles<Rows::kQueries, kBlockM, kBlockN> visible(mask, first);
  int tile = visible.first();
  load_tile<kBlockM, kHeadDim, kThreads>(q_tile, q, params.q.row_stride, first, queries, width,
                                         aligned);
  if (tile < visible.end()) load_keys(k_tile, params.k, k, tile);
  if (params.rotary.cos != nullptr) {
    cp_async_wait_all();
    __syncthreads();
    apply_rotary<kHeadDim, 16 * kMTiles>(q_tile + warp_row * kSmemStride<kHeadDim>, params.rotary,
                                         1.0f, b, first + warp_row, queries);
  }

  // Mainloop. The copies of v run while the scores are computed, those of the next k while v is
  // multiplied.
  while (tile < visible.end()) {
    cp_async_wait_all();
    __syncthreads();  // k has come, and all threads have read the v before
    load_keys(v_tile, params.v, v, tile);
    const int next = visible.next(tile + 1);
    const bool sees_all = visible.sees_all(mask, first, tile);

    // On their way while q k^T is computed.
    [[maybe_unused]] float bias[kMTiles][kBlockN / 8][4];
    if constexpr (Traits::kBias) {
      load_bias<Rows::kQueries, T>(bias, params.bias, b, head, mask, first + warp_row,
                                   tile * kBlockN);
    }
    float s[kMTiles][kBlockN / 8][4] = {};
    gemm_ss<kHeadDim>(s, q_tile + warp_row * kSmemStride<kHeadDim>, k_tile);
    cp_async_wait_all();
    __syncthreads();  // v has come, and all threads have read k
    if (next < visible.end()) load_keys(k_tile, params.k, k, next);

    scale_scores(s, scores);
    if constexpr (Traits::kBias) add_bias(s, bias);
    if (!sees_all) {
      apply_mask<Rows::kQueries>(s, mask, first + warp_row, tile * kBlockN, -INFINITY);
    }
    online_softmax(s, params.exp2_scale, maximum, sum, out);
    gemm_rs<kHeadDim>(out, s, v_tile);
    tile = next;
  }

  // Epilogue.
  cp_async_wait_all();
  __syncthreads();  // where no key is seen, the copies of q may still be in flight
  float* lse = params.lse + (int64_t{b} * params.heads + head) * queries;
  const float sink = params.sinks.in_base_2(b * params.heads + head);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const SoftmaxEnd end =
          end_softmax(params.exp2_scale * maximum[m][h], quad_sum(sum[m][h]), sink);
      float factor = end.factor;
      if constexpr (kScaled) factor *= params.v_scale[kv_head];
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        out[m][n][2 * h] *= factor;
        out[m][n][2 * h + 1] *= factor;
      }
      const int row = first + warp_row + 16 * m + 8 * h + lane / 4;
      if (!kScaled && lane % 4 == 0 && row < queries) lse[row] = end.lse * kLn2;
    }
  }
  store_accumulator<kHeadDim>(out, q_tile + warp_row * kSmemStride<kHeadDim>,
                              head_of(params.out, b, queries, head, width), params.out.row_stride,
                              first + warp_row, queries, width, aligned, [] {});
}

template <typename T, typename Stored>
ForwardParams<T, Stored> make_forward_params(const FlashForward<T, Stored>& call) {
  const auto& [shape, options, q, k, v, out, lse, q_scale, k_scale, v_scale] = call;
  ForwardParams<T, Stored> params{q, k, v, out, lse};
  params.heads = static_cast<int>(shape.heads);
  params.group = static_cast<int>(shape.heads / shape.kv_heads);
  params.width = static_cast<int>(shape.width);
  params.scores = make_score_params(options);
  params.exp2_scale = 1.0f;
  params.mask = make_mask(shape, options);
  params.sinks =
      Sinks::of_groups(options.sinks.data, options.sinks.groups, shape.batch, shape.heads);
  params.bias = ScoreBias::of_call(shape, options.score_bias);
  params.rotary = make_rotary(shape, options.rope);
  params.q_scale = q_scale, params.k_scale = k_scale, params.v_scale = v_scale;
  params.aligned = heads_are_aligned(shape.width, q, k, v, out);
  return params;
}

template <class Traits, typename T, typename Stored>
cudaError_t launch_forward(cudaStream_t stream, const ForwardParams<T, Stored>& params,
                           int64_t batch) {
  const int64_t tiles = batch * params.heads * divide_up(params.mask.queries, Traits::kBlockM);
  return launch_tiles(stream, flash_attention_forward_kernel<Traits, T, Stored>, tiles,
                      Traits::kThreads, Traits::kSmemBytes, params);
}

}  // namespace jaxllm::attention
