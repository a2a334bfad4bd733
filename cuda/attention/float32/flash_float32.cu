// Flash attention of float arrays on CUDA cores (SIMT): every product and sum is float32. Plain
// kernels, whose tiles of scores are square.
#include <cmath>

#include "attention/flash_kernels.h"
#include "attention/flash_tile_scheduler.cuh"
#include "attention/score_bias.cuh"
#include "attention/sinks.cuh"
#include "common/reduce.cuh"
#include "common/shared_needs.h"

namespace jaxllm::attention {
namespace {

// A row of a tile belongs to kLanes neighbouring lanes, each of which has every kLanes-th column.
template <int kHeadDimension>
struct Traits {
  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kThreads = 256;
  static constexpr int kBlock = kHeadDim <= 128 ? 32 : 16;  // queries, and keys
  static constexpr int kLanes = kThreads / kBlock;
  static constexpr int kScores = kBlock / kLanes;     // of a row, for each lane
  static constexpr int kColumns = kHeadDim / kLanes;  // of a row of a head, for each lane
  static constexpr int kStride = kHeadDim + 1;        // rows lie in different banks
  static constexpr int kScoreStride = kBlock + 1;
  static constexpr int kTileElements = kBlock * kStride;
  static constexpr int kScoreElements = kBlock * kScoreStride;
  // Of a CTA of either direction.
  static constexpr int kSmemBytes = (4 * kTileElements + 2 * kScoreElements) * int{sizeof(float)};
};

struct Params {
  HeadRows<const float> q, k, v, dout;
  const float *lse, *delta;
  HeadRows<float> out, dq, dk, dv;
  float* new_lse;
  int heads, group;  // query heads, in all and of a key head
  int width;
  float scale, softcap;
  Mask mask;
  Sinks sinks;  // of the forward
  ScoreBias bias;
};

// Copies rows of a head into a tile, with zeros past the last row and past `width`.
template <class Traits>
__device__ void load_tile(float* tile, const float* head, int64_t row_stride, int first, int rows,
                          int width) {
  for (int index = threadIdx.x; index < Traits::kBlock * Traits::kHeadDim;
       index += Traits::kThreads) {
    const int row = index / Traits::kHeadDim, column = index % Traits::kHeadDim;
    const bool valid = first + row < rows && column < width;
    tile[row * Traits::kStride + column] = valid ? head[(first + row) * row_stride + column] : 0.0f;
  }
}

// The products of this lane's row of tile a and its rows of tile b: its part of a b^T.
template <class Traits>
__device__ void gemm_nt(const float* a, const float* b, int width,
                        float (&products)[Traits::kScores]) {
  const int row = threadIdx.x / Traits::kLanes, lane = threadIdx.x % Traits::kLanes;
  a += row * Traits::kStride;
  b += lane * Traits::kStride;
#pragma unroll
  for (int j = 0; j < Traits::kScores; ++j) products[j] = 0.0f;
  for (int h = 0; h < width; ++h) {
#pragma unroll
    for (int j = 0; j < Traits::kScores; ++j) {
      products[j] = fmaf(a[h], b[j * Traits::kLanes * Traits::kStride + h], products[j]);
    }
  }
}

// acc += weights b, in this lane's row and columns.
template <class Traits>
__device__ void gemm_nn(const float* weights, const float* b, float (&acc)[Traits::kColumns]) {
  const int row = threadIdx.x / Traits::kLanes, lane = threadIdx.x % Traits::kLanes;
  weights += row * Traits::kScoreStride;
  b += lane;
  for (int s = 0; s < Traits::kBlock; ++s) {
    const float weight = weights[s];
#pragma unroll
    for (int i = 0; i < Traits::kColumns; ++i) {
      acc[i] = fmaf(weight, b[s * Traits::kStride + i * Traits::kLanes], acc[i]);
    }
  }
}

template <class Traits>
__device__ void store_row(const float (&acc)[Traits::kColumns], float factor, float* row,
                          int width) {
  const int lane = threadIdx.x % Traits::kLanes;
#pragma unroll
  for (int i = 0; i < Traits::kColumns; ++i) {
    const int column = i * Traits::kLanes + lane;
    if (column < width) row[column] = acc[i] * factor;
  }
}

__device__ bool sees(const Mask& mask, int query, int key) {
  if (query >= mask.queries || key >= mask.keys || !mask.in_window(query, key)) return false;
  return mask.ranges == nullptr || mask.query_segments[query] == mask.key_segments[key];
}

__device__ float score_of(float product, const Params& params) {
  const float score = product * params.scale;
  if (params.softcap == 0.0f) return score;
  return params.softcap * tanhf(score / params.softcap);
}

// The bias of the scores of a sequence's query head, as the element of its first query and key.
__device__ const float* bias_of(const Params& params, int b, int head) {
  return static_cast<const float*>(params.bias.data) +
         params.bias.matrix_of(b, head, params.mask.queries, params.mask.keys);
}

// e^(score - lse). Of a query all of whose keys are hidden by the bias, lse is -infinity too.
__device__ float weight_of(float score, float lse) {
  return score == -INFINITY ? 0.0f : expf(score - lse);
}

template <class Traits, bool kBias>
__global__ void __launch_bounds__(Traits::kThreads)
    flash_attention_forward_float32_kernel(const Params params) {
  constexpr int kBlock = Traits::kBlock, kLanes = Traits::kLanes;
  extern __shared__ __align__(16) unsigned char shared[];
  float* q_tile = reinterpret_cast<float*>(shared);
  float* k_tile = q_tile + Traits::kTileElements;
  float* v_tile = k_tile + Traits::kTileElements;
  float* weights = v_tile + Traits::kTileElements;

  const int queries = params.mask.queries, keys = params.mask.keys, width = params.width;
  const int tiles = (queries + kBlock - 1) / kBlock;
  const WorkTile work(tiles, params.heads);
  const int b = work.b, head = work.head, first = work.tile * kBlock;
  const Mask mask = params.mask.of_sequence(b);
  const float* k = head_of(params.k, b, keys, head / params.group, width);
  const float* v = head_of(params.v, b, keys, head / params.group, width);
  const float* bias = kBias ? bias_of(params, b, head) : nullptr;
  load_tile<Traits>(q_tile, head_of(params.q, b, queries, head, width), params.q.row_stride, first,
                    queries, width);

  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, query = first + row;
  float out[Traits::kColumns] = {};
  float maximum = -INFINITY, sum = 0.0f;
  const VisibleTiles<Rows::kQueries, kBlock, kBlock> visible(mask, first);
  for (int tile = visible.first(); tile < visible.end(); tile = visible.next(tile + 1)) {
    __syncthreads();  // all threads have read the tiles before
    load_tile<Traits>(k_tile, k, params.k.row_stride, tile * kBlock, keys, width);
    load_tile<Traits>(v_tile, v, params.v.row_stride, tile * kBlock, keys, width);
    __syncthreads();

    float s[Traits::kScores];
    gemm_nt<Traits>(q_tile, k_tile, width, s);
    float largest = maximum;
#pragma unroll
    for (int j = 0; j < Traits::kScores; ++j) {
      const int key = tile * kBlock + j * kLanes + lane;
      s[j] = sees(mask, query, key) ? score_of(s[j], params) : -INFINITY;
      if (kBias && s[j] != -INFINITY) s[j] += bias[int64_t{query} * keys + key];
      largest = fmaxf(largest, s[j]);
    }
    largest = max_over_lanes<kLanes>(largest);
    // The maximum of a row that has seen no key is -infinity: with 0 its weights are 0, not NaN.
    const float finite = largest == -INFINITY ? 0.0f : largest;
    const float correction = expf(maximum - finite);
    maximum = largest;
    float added[1] = {0.0f};
#pragma unroll
    for (int j = 0; j < Traits::kScores; ++j) {
      s[j] = expf(s[j] - finite);
      added[0] += s[j];
      weights[row * Traits::kScoreStride + j * kLanes + lane] = s[j];
    }
    sum_over_lanes<kLanes>(added);
    sum = sum * correction + added[0];
#pragma unroll
    for (int i = 0; i < Traits::kColumns; ++i) out[i] *= correction;
    __syncwarp();  // a row's weights are written and read in one warp
    gemm_nn<Traits>(weights, v_tile, out);
  }
  if (query >= queries) return;
  const SoftmaxEnd end = end_softmax<true>(maximum, sum, params.sinks.of(b * params.heads + head));
  float* target = head_of(params.out, b, queries, head, width);
  store_row<Traits>(out, end.factor, target + query * params.out.row_stride, width);
  if (lane == 0) {
    params.new_lse[(int64_t{b} * params.heads + head) * queries + query] = end.lse;
  }
}

// A CTA owns a tile of queries or of keys, as in attention/mma/flash_backward.cuh.
template <Rows kOwn, class Traits, bool kBias>
__global__ void __launch_bounds__(Traits::kThreads)
    flash_attention_backward_float32_kernel(const Params params) {
  constexpr bool kOwnsKeys = kOwn == Rows::kKeys;
  constexpr int kBlock = Traits::kBlock, kLanes = Traits::kLanes;
  extern __shared__ __align__(16) unsigned char shared[];
  float* own1_tile = reinterpret_cast<float*>(shared);
  float* own2_tile = own1_tile + Traits::kTileElements;
  float* other1_tile = own2_tile + Traits::kTileElements;
  float* other2_tile = other1_tile + Traits::kTileElements;
  float* weights = other2_tile + Traits::kTileElements;
  float* gradients = weights + Traits::kScoreElements;

  const int queries = params.mask.queries, keys = params.mask.keys, width = params.width;
  const int heads = params.heads, group = params.group;
  const int own_rows = kOwnsKeys ? keys : queries, other_rows = kOwnsKeys ? queries : keys;
  const int own_heads = kOwnsKeys ? heads / group : heads;
  const int tiles = (own_rows + kBlock - 1) / kBlock;
  const WorkTile work(tiles, own_heads);
  const int b = work.b, own_head = work.head, first = work.tile * kBlock;
  const Mask mask = params.mask.of_sequence(b);
  const auto& own1 = kOwnsKeys ? params.k : params.q;
  const auto& own2 = kOwnsKeys ? params.v : params.dout;
  const auto& other1 = kOwnsKeys ? params.q : params.k;
  const auto& other2 = kOwnsKeys ? params.dout : params.v;
  load_tile<Traits>(own1_tile, head_of(own1, b, own_rows, own_head, width), own1.row_stride, first,
                    own_rows, width);
  load_tile<Traits>(own2_tile, head_of(own2, b, own_rows, own_head, width), own2.row_stride, first,
                    own_rows, width);

  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  float acc1[Traits::kColumns] = {}, acc2[Traits::kColumns] = {};
  const VisibleTiles<kOwn, kBlock, kBlock> visible(mask, first);
  const int first_head = kOwnsKeys ? own_head * group : own_head / group;
  const int end_head = kOwnsKeys ? first_head + group : first_head + 1;
  for (int head = first_head; head < end_head; ++head) {
    const float* other1_head = head_of(other1, b, other_rows, head, width);
    const float* other2_head = head_of(other2, b, other_rows, head, width);
    const int query_head = kOwnsKeys ? head : own_head;
    const int64_t statistics = (int64_t{b} * heads + query_head) * queries;
    const float* bias = kBias ? bias_of(params, b, query_head) : nullptr;
    for (int tile = visible.first(); tile < visible.end(); tile = visible.next(tile + 1)) {
      __syncthreads();  // all threads have read the tiles before
      load_tile<Traits>(other1_tile, other1_head, other1.row_stride, tile * kBlock, other_rows,
                        width);
      load_tile<Traits>(other2_tile, other2_head, other2.row_stride, tile * kBlock, other_rows,
                        width);
      __syncthreads();

      float s[Traits::kScores], dp[Traits::kScores];
      gemm_nt<Traits>(own1_tile, other1_tile, width, s);
      gemm_nt<Traits>(own2_tile, other2_tile, width, dp);
#pragma unroll
      for (int j = 0; j < Traits::kScores; ++j) {
        const int column = j * kLanes + lane, other = tile * kBlock + column;
        const int query = kOwnsKeys ? other : first + row, key = kOwnsKeys ? first + row : other;
        float p = 0.0f, ds = 0.0f;
        if (sees(mask, query, key)) {
          const float score = score_of(s[j], params);
          const float lse = params.lse[statistics + query];
          if constexpr (kBias) {
            p = weight_of(score + bias[int64_t{query} * keys + key], lse);
          } else {
            p = expf(score - lse);
          }
          ds = p * (dp[j] - params.delta[statistics + query]);
          if (params.softcap != 0.0f) {
            const float tanh = score / params.softcap;
            ds *= 1.0f - tanh * tanh;
          }
        }
        weights[row * Traits::kScoreStride + column] = p;
        gradients[row * Traits::kScoreStride + column] = ds;
      }
      __syncwarp();  // a row's weights are written and read in one warp
      gemm_nn<Traits>(gradients, other1_tile, acc1);
      if constexpr (kOwnsKeys) gemm_nn<Traits>(weights, other2_tile, acc2);
    }
  }
  if (first + row >= own_rows) return;
  const auto store = [&](const HeadRows<float>& target, auto& acc, float factor) {
    store_row<Traits>(
        acc, factor,
        head_of(target, b, own_rows, own_head, width) + (first + row) * target.row_stride, width);
  };
  store(kOwnsKeys ? params.dk : params.dq, acc1, params.scale);
  if constexpr (kOwnsKeys) store(params.dv, acc2, 1.0f);
}

// The gradient of the bias: a CTA owns a tile of it, as in attention/mma/flash_bias_gradient.cuh.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads)
    flash_attention_bias_gradient_float32_kernel(const Params params) {
  constexpr int kBlock = Traits::kBlock, kLanes = Traits::kLanes;
  extern __shared__ __align__(16) unsigned char shared[];
  float* q_tile = reinterpret_cast<float*>(shared);
  float* k_tile = q_tile + Traits::kTileElements;
  float* dout_tile = k_tile + Traits::kTileElements;
  float* v_tile = dout_tile + Traits::kTileElements;

  const int queries = params.mask.queries, keys = params.mask.keys, width = params.width;
  const ScoreBiasTile tile(params.bias, params.heads, (queries + kBlock - 1) / kBlock,
                           (keys + kBlock - 1) / kBlock);
  const int first = tile.query_tile * kBlock, first_key = tile.key_tile * kBlock;
  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, query = first + row;
  const float* bias = bias_of(params, tile.first_b, tile.first_head);  // which members share
  float gradient[Traits::kScores] = {};
  for (int member = 0; member < tile.members; ++member) {
    const int b = tile.b_of(member), head = tile.head_of(member), kv_head = head / params.group;
    const Mask mask = params.mask.of_sequence(b);
    const VisibleTiles<Rows::kQueries, kBlock, kBlock> visible(mask, first);
    if (!visible.sees_any(tile.key_tile)) continue;
    const auto load = [&](float* target, const HeadRows<const float>& array, int rows, int of_head,
                          int from) {
      load_tile<Traits>(target, head_of(array, b, rows, of_head, width), array.row_stride, from,
                        rows, width);
    };
    __syncthreads();  // all threads have read the tiles before
    load(q_tile, params.q, queries, head, first);
    load(k_tile, params.k, keys, kv_head, first_key);
    load(dout_tile, params.dout, queries, head, first);
    load(v_tile, params.v, keys, kv_head, first_key);
    __syncthreads();

    float s[Traits::kScores], dp[Traits::kScores];
    gemm_nt<Traits>(q_tile, k_tile, width, s);
    gemm_nt<Traits>(dout_tile, v_tile, width, dp);
    const int64_t statistic = (int64_t{b} * params.heads + head) * queries + query;
#pragma unroll
    for (int j = 0; j < Traits::kScores; ++j) {
      const int key = first_key + j * kLanes + lane;
      if (!sees(mask, query, key)) continue;
      const float score = score_of(s[j], params) + bias[int64_t{query} * keys + key];
      const float p = weight_of(score, params.lse[statistic]);
      gradient[j] = fmaf(p, dp[j] - params.delta[statistic], gradient[j]);
    }
  }
  float* target = static_cast<float*>(params.bias.gradient) + tile.offset(queries, keys);
#pragma unroll
  for (int j = 0; j < Traits::kScores; ++j) {
    const int key = first_key + j * kLanes + lane;
    if (query < queries && key < keys) target[int64_t{query} * keys + key] = gradient[j];
  }
}

template <class Call>
Params make_params(const Call& call) {
  Params params = {call.q, call.k, call.v};
  params.heads = static_cast<int>(call.shape.heads);
  params.group = static_cast<int>(call.shape.heads / call.shape.kv_heads);
  params.width = static_cast<int>(call.shape.width);
  params.scale = call.options.scale;
  params.softcap = call.options.softcap;
  params.mask = make_mask(call.shape, call.options);
  params.bias = ScoreBias::of_call(call.shape, call.options.score_bias);
  return params;
}

template <class Traits, class Kernel>
cudaError_t launch(cudaStream_t stream, Kernel kernel, int64_t heads, int64_t rows,
                   const Params& params) {
  return launch_tiles(stream, kernel, heads * divide_up(rows, Traits::kBlock), Traits::kThreads,
                      Traits::kSmemBytes, params);
}

const SharedNeed kNeeds[] = {{"flash_attention_float32_64", Traits<64>::kSmemBytes},
                             {"flash_attention_float32_128", Traits<128>::kSmemBytes},
                             {"flash_attention_float32_256", Traits<256>::kSmemBytes}};

// Calls `launch` with the tiles for heads of `width`.
template <class Launch>
cudaError_t choose_tiles(int64_t width, Launch launch) {
  if (width <= 64) return launch(Traits<64>{});
  if (width <= 128) return launch(Traits<128>{});
  return launch(Traits<256>{});
}

// The kernels of the backward: dk and dv, then dq.
template <class Traits, bool kBias>
cudaError_t launch_backward(cudaStream_t stream, const FlashShape& shape, const Params& params) {
  JAXLLM_RETURN_IF_ERROR(
      (launch<Traits>(stream, flash_attention_backward_float32_kernel<Rows::kKeys, Traits, kBias>,
                      shape.batch * shape.kv_heads, shape.keys, params)));
  return launch<Traits>(stream,
                        flash_attention_backward_float32_kernel<Rows::kQueries, Traits, kBias>,
                        shape.batch * shape.heads, shape.queries, params);
}

}  // namespace

cudaError_t forward_by_float32(cudaStream_t stream, const FlashForward<float>& call) {
  const FlashShape& shape = call.shape;
  Params params = make_params(call);
  params.out = call.out, params.new_lse = call.lse;
  const FlashSinks& sinks = call.options.sinks;
  params.sinks = Sinks::of_groups(sinks.data, sinks.groups, shape.batch, shape.heads);
  return choose_tiles(shape.width, [&](auto tiles) {
    using T = decltype(tiles);
    return launch<T>(stream,
                     params.bias.data == nullptr ? flash_attention_forward_float32_kernel<T, false>
                                                 : flash_attention_forward_float32_kernel<T, true>,
                     shape.batch * shape.heads, shape.queries, params);
  });
}

cudaError_t backward_by_float32(cudaStream_t stream, const FlashBackward<float>& call) {
  const FlashShape& shape = call.shape;
  Params params = make_params(call);
  params.dout = call.dout, params.lse = call.lse, params.delta = call.delta;
  params.dq = call.dq, params.dk = call.dk, params.dv = call.dv;
  return choose_tiles(shape.width, [&](auto tiles) {
    using T = decltype(tiles);
    if (params.bias.data == nullptr) return launch_backward<T, false>(stream, shape, params);
    JAXLLM_RETURN_IF_ERROR((launch_backward<T, true>(stream, shape, params)));
    const FlashScoreBias& bias = call.options.score_bias;
    const int64_t matrices = bias.sequences * bias.heads;
    return launch<T>(stream, flash_attention_bias_gradient_float32_kernel<T>,
                     matrices * divide_up(shape.keys, T::kBlock), shape.queries, params);
  });
}

}  // namespace jaxllm::attention
