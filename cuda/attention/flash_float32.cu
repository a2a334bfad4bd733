// Flash attention of float arrays on CUDA cores: every product and sum is float32. A plain kernel,
// with tiles as square as a block's threads.
#include <cmath>

#include "attention/flash_block.cuh"
#include "attention/flash_kernels.h"
#include "common/reduce_max.cuh"
#include "common/shared_needs.h"

namespace jaxllm::attention {
namespace {

// A row of a tile belongs to kLanes neighbouring lanes, which share out its columns.
template <int kHeadWidth>
struct Tiles {
  static constexpr int kWidth = kHeadWidth;
  static constexpr int kThreads = 256;
  static constexpr int kRows = kWidth <= 128 ? 32 : 16;
  static constexpr int kLanes = kThreads / kRows;
  static constexpr int kScores = kRows / kLanes;    // of a row, for each lane
  static constexpr int kColumns = kWidth / kLanes;  // of a row of a head, for each lane
  static constexpr int kStride = kWidth + 1;        // rows lie in different banks
  static constexpr int kScoreStride = kRows + 1;
  static constexpr int kTileElements = kRows * kStride;
  static constexpr int kScoreElements = kRows * kScoreStride;
  // Of a block of either direction.
  static constexpr int kSharedBytes = (4 * kTileElements + 2 * kScoreElements) * int{sizeof(float)};
};

struct Arguments {
  HeadRows<const float> q, k, v, dout;
  const float *lse, *delta;
  HeadRows<float> out, dq, dk, dv;
  float* new_lse;
  int heads, group;  // query heads, in all and to a key head
  int width;
  float scale, softcap;
  Mask mask;
};

// Copies rows of a head into a tile, with zeros beyond the last row and the width.
template <class Tiles>
__device__ void load_tile(float* tile, const float* head, int64_t row_stride, int first, int rows,
                          int width) {
  for (int index = threadIdx.x; index < Tiles::kRows * Tiles::kWidth; index += Tiles::kThreads) {
    const int row = index / Tiles::kWidth, column = index % Tiles::kWidth;
    const bool valid = first + row < rows && column < width;
    tile[row * Tiles::kStride + column] = valid ? head[(first + row) * row_stride + column] : 0.0f;
  }
}

// The products of row `row` of tile a with the rows of tile b that are this lane's.
template <class Tiles>
__device__ void multiply_rows(const float* a, const float* b, int width,
                              float (&products)[Tiles::kScores]) {
  const int row = threadIdx.x / Tiles::kLanes, lane = threadIdx.x % Tiles::kLanes;
  a += row * Tiles::kStride;
  b += lane * Tiles::kStride;
#pragma unroll
  for (int j = 0; j < Tiles::kScores; ++j) products[j] = 0.0f;
  for (int h = 0; h < width; ++h) {
#pragma unroll
    for (int j = 0; j < Tiles::kScores; ++j) {
      products[j] = fmaf(a[h], b[j * Tiles::kLanes * Tiles::kStride + h], products[j]);
    }
  }
}

// Adds to this lane's columns the rows of tile b, each times its weight in the lane's row.
template <class Tiles>
__device__ void add_rows(const float* weights, const float* b, float (&sums)[Tiles::kColumns]) {
  const int row = threadIdx.x / Tiles::kLanes, lane = threadIdx.x % Tiles::kLanes;
  weights += row * Tiles::kScoreStride;
  b += lane;
  for (int s = 0; s < Tiles::kRows; ++s) {
    const float weight = weights[s];
#pragma unroll
    for (int i = 0; i < Tiles::kColumns; ++i) {
      sums[i] = fmaf(weight, b[s * Tiles::kStride + i * Tiles::kLanes], sums[i]);
    }
  }
}

template <class Tiles>
__device__ void store_row(const float (&sums)[Tiles::kColumns], float factor, float* row,
                          int width) {
  const int lane = threadIdx.x % Tiles::kLanes;
#pragma unroll
  for (int i = 0; i < Tiles::kColumns; ++i) {
    const int column = i * Tiles::kLanes + lane;
    if (column < width) row[column] = sums[i] * factor;
  }
}

__device__ bool sees(const Mask& mask, int query, int key) {
  if (query >= mask.queries || key >= mask.keys || !mask.band_has(query, key)) return false;
  return mask.ranges == nullptr || mask.query_segments[query] == mask.key_segments[key];
}

__device__ float score_of(float product, const Arguments& arguments) {
  const float score = product * arguments.scale;
  if (arguments.softcap == 0.0f) return score;
  return arguments.softcap * tanhf(score / arguments.softcap);
}

// A block for each tile of queries of each head.
template <class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads)
    flash_attention_forward_float32_kernel(const Arguments arguments) {
  constexpr int kRows = Tiles::kRows, kLanes = Tiles::kLanes;
  extern __shared__ __align__(16) unsigned char shared[];
  float* q_tile = reinterpret_cast<float*>(shared);
  float* k_tile = q_tile + Tiles::kTileElements;
  float* v_tile = k_tile + Tiles::kTileElements;
  float* weights = v_tile + Tiles::kTileElements;

  const int queries = arguments.mask.queries, keys = arguments.mask.keys, width = arguments.width;
  const int tiles = (queries + kRows - 1) / kRows;
  const Place place(tiles, arguments.heads);
  const int b = place.b, head = place.head, first = place.tile * kRows;
  const Mask mask = arguments.mask.of_sequence(b);
  const float* k = head_of(arguments.k, b, keys, head / arguments.group, width);
  const float* v = head_of(arguments.v, b, keys, head / arguments.group, width);
  load_tile<Tiles>(q_tile, head_of(arguments.q, b, queries, head, width), arguments.q.row_stride,
                   first, queries, width);

  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes, query = first + row;
  float out[Tiles::kColumns] = {};
  float maximum = -INFINITY, sum = 0.0f;
  const TileWalk<Rows::kQueries, kRows, kRows> walk(mask, first);
  for (int tile = walk.first(); tile < walk.end(); tile = walk.next(tile + 1)) {
    __syncthreads();  // nobody reads the tiles before any more
    load_tile<Tiles>(k_tile, k, arguments.k.row_stride, tile * kRows, keys, width);
    load_tile<Tiles>(v_tile, v, arguments.v.row_stride, tile * kRows, keys, width);
    __syncthreads();

    float x[Tiles::kScores];
    multiply_rows<Tiles>(q_tile, k_tile, width, x);
    float largest = maximum;
#pragma unroll
    for (int j = 0; j < Tiles::kScores; ++j) {
      const int key = tile * kRows + j * kLanes + lane;
      x[j] = sees(mask, query, key) ? score_of(x[j], arguments) : -INFINITY;
      largest = fmaxf(largest, x[j]);
    }
    largest = max_over_lanes<kLanes>(largest);
    // A row that has seen nothing yet: with zero its weights are zero, and not NaN.
    const float finite = largest == -INFINITY ? 0.0f : largest;
    const float correction = expf(maximum - finite);
    maximum = largest;
    float added[1] = {0.0f};
#pragma unroll
    for (int j = 0; j < Tiles::kScores; ++j) {
      x[j] = expf(x[j] - finite);
      added[0] += x[j];
      weights[row * Tiles::kScoreStride + j * kLanes + lane] = x[j];
    }
    sum_over_lanes<kLanes>(added);
    sum = sum * correction + added[0];
#pragma unroll
    for (int i = 0; i < Tiles::kColumns; ++i) out[i] *= correction;
    __syncwarp();  // a row's weights are written and read in one warp
    add_rows<Tiles>(weights, v_tile, out);
  }
  if (query >= queries) return;
  float* target = head_of(arguments.out, b, queries, head, width);
  store_row<Tiles>(out, sum == 0.0f ? 0.0f : 1.0f / sum, target + query * arguments.out.row_stride,
                   width);
  if (lane == 0) {
    arguments.new_lse[(int64_t{b} * arguments.heads + head) * queries + query] =
        maximum + logf(sum);
  }
}

// A block owns a tile of queries or of keys, as in flash_backward_mma.cuh.
template <Rows kOwn, class Tiles>
__global__ void __launch_bounds__(Tiles::kThreads)
    flash_attention_backward_float32_kernel(const Arguments arguments) {
  constexpr bool kOwnsKeys = kOwn == Rows::kKeys;
  constexpr int kRows = Tiles::kRows, kLanes = Tiles::kLanes;
  extern __shared__ __align__(16) unsigned char shared[];
  float* own1_tile = reinterpret_cast<float*>(shared);
  float* own2_tile = own1_tile + Tiles::kTileElements;
  float* other1_tile = own2_tile + Tiles::kTileElements;
  float* other2_tile = other1_tile + Tiles::kTileElements;
  float* weights = other2_tile + Tiles::kTileElements;
  float* gradients = weights + Tiles::kScoreElements;

  const int queries = arguments.mask.queries, keys = arguments.mask.keys, width = arguments.width;
  const int heads = arguments.heads, group = arguments.group;
  const int own_rows = kOwnsKeys ? keys : queries, other_rows = kOwnsKeys ? queries : keys;
  const int own_heads = kOwnsKeys ? heads / group : heads;
  const int tiles = (own_rows + kRows - 1) / kRows;
  const Place place(tiles, own_heads);
  const int b = place.b, own_head = place.head, first = place.tile * kRows;
  const Mask mask = arguments.mask.of_sequence(b);
  const auto& own1 = kOwnsKeys ? arguments.k : arguments.q;
  const auto& own2 = kOwnsKeys ? arguments.v : arguments.dout;
  const auto& other1 = kOwnsKeys ? arguments.q : arguments.k;
  const auto& other2 = kOwnsKeys ? arguments.dout : arguments.v;
  load_tile<Tiles>(own1_tile, head_of(own1, b, own_rows, own_head, width), own1.row_stride, first,
                   own_rows, width);
  load_tile<Tiles>(own2_tile, head_of(own2, b, own_rows, own_head, width), own2.row_stride, first,
                   own_rows, width);

  const int row = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  float sum1[Tiles::kColumns] = {}, sum2[Tiles::kColumns] = {};
  const TileWalk<kOwn, kRows, kRows> walk(mask, first);
  const int first_head = kOwnsKeys ? own_head * group : own_head / group;
  const int end_head = kOwnsKeys ? first_head + group : first_head + 1;
  for (int head = first_head; head < end_head; ++head) {
    const float* other1_head = head_of(other1, b, other_rows, head, width);
    const float* other2_head = head_of(other2, b, other_rows, head, width);
    const int64_t statistics = (int64_t{b} * heads + (kOwnsKeys ? head : own_head)) * queries;
    for (int tile = walk.first(); tile < walk.end(); tile = walk.next(tile + 1)) {
      __syncthreads();  // nobody reads the tiles before any more
      load_tile<Tiles>(other1_tile, other1_head, other1.row_stride, tile * kRows, other_rows,
                       width);
      load_tile<Tiles>(other2_tile, other2_head, other2.row_stride, tile * kRows, other_rows,
                       width);
      __syncthreads();

      float x[Tiles::kScores], dx[Tiles::kScores];
      multiply_rows<Tiles>(own1_tile, other1_tile, width, x);
      multiply_rows<Tiles>(own2_tile, other2_tile, width, dx);
#pragma unroll
      for (int j = 0; j < Tiles::kScores; ++j) {
        const int column = j * kLanes + lane, other = tile * kRows + column;
        const int query = kOwnsKeys ? other : first + row, key = kOwnsKeys ? first + row : other;
        float p = 0.0f, da = 0.0f;
        if (sees(mask, query, key)) {
          const float score = score_of(x[j], arguments);
          p = expf(score - arguments.lse[statistics + query]);
          da = p * (dx[j] - arguments.delta[statistics + query]);
          if (arguments.softcap != 0.0f) {
            const float tanh = score / arguments.softcap;
            da *= 1.0f - tanh * tanh;
          }
        }
        weights[row * Tiles::kScoreStride + column] = p;
        gradients[row * Tiles::kScoreStride + column] = da;
      }
      __syncwarp();  // a row's weights are written and read in one warp
      add_rows<Tiles>(gradients, other1_tile, sum1);
      if constexpr (kOwnsKeys) add_rows<Tiles>(weights, other2_tile, sum2);
    }
  }
  if (first + row >= own_rows) return;
  const auto store = [&](const HeadRows<float>& target, auto& sums, float factor) {
    store_row<Tiles>(
        sums, factor,
        head_of(target, b, own_rows, own_head, width) + (first + row) * target.row_stride, width);
  };
  store(kOwnsKeys ? arguments.dk : arguments.dq, sum1, arguments.scale);
  if constexpr (kOwnsKeys) store(arguments.dv, sum2, 1.0f);
}

Arguments make_arguments(const FlashShape& shape, const FlashOptions& options) {
  Arguments arguments = {};
  arguments.heads = static_cast<int>(shape.heads);
  arguments.group = static_cast<int>(shape.heads / shape.kv_heads);
  arguments.width = static_cast<int>(shape.width);
  arguments.scale = options.scale;
  arguments.softcap = options.softcap;
  arguments.mask = make_mask(shape, options);
  return arguments;
}

// A block for each tile of `rows` rows of each of `heads` heads.
template <class Tiles, class Kernel>
cudaError_t launch(cudaStream_t stream, Kernel kernel, int64_t heads, int64_t rows,
                   const Arguments& arguments) {
  return launch_tiles(stream, kernel, heads * divide_up(rows, Tiles::kRows), Tiles::kThreads,
                      Tiles::kSharedBytes, arguments);
}

const SharedNeed kNeeds[] = {{"flash_attention_float32_64", Tiles<64>::kSharedBytes},
                             {"flash_attention_float32_128", Tiles<128>::kSharedBytes},
                             {"flash_attention_float32_256", Tiles<256>::kSharedBytes}};

// Calls `launch` with the tiles for heads of `width`.
template <class Launch>
cudaError_t choose_tiles(int64_t width, Launch launch) {
  if (width <= 64) return launch(Tiles<64>{});
  if (width <= 128) return launch(Tiles<128>{});
  return launch(Tiles<256>{});
}

}  // namespace

cudaError_t forward_by_float32(cudaStream_t stream, const ForwardCall<float>& call,
                               const FlashShape& shape, const FlashOptions& options) {
  Arguments arguments = make_arguments(shape, options);
  arguments.q = call.q;
  arguments.k = call.k;
  arguments.v = call.v;
  arguments.out = call.out;
  arguments.new_lse = call.lse;
  return choose_tiles(shape.width, [&](auto tiles) {
    using T = decltype(tiles);
    return launch<T>(stream, flash_attention_forward_float32_kernel<T>, shape.batch * shape.heads,
                     shape.queries, arguments);
  });
}

cudaError_t backward_by_float32(cudaStream_t stream, const BackwardCall<float>& call,
                                const FlashShape& shape, const FlashOptions& options) {
  Arguments arguments = make_arguments(shape, options);
  arguments.q = call.q;
  arguments.k = call.k;
  arguments.v = call.v;
  arguments.dout = call.dout;
  arguments.lse = call.lse;
  arguments.delta = call.delta;
  arguments.dq = call.dq;
  arguments.dk = call.dk;
  arguments.dv = call.dv;
  return choose_tiles(shape.width, [&](auto tiles) {
    using T = decltype(tiles);
    JAXLLM_RETURN_IF_ERROR(
        (launch<T>(stream, flash_attention_backward_float32_kernel<Rows::kKeys, T>,
                   shape.batch * shape.kv_heads, shape.keys, arguments)));
    return launch<T>(stream, flash_attention_backward_float32_kernel<Rows::kQueries, T>,
                     shape.batch * shape.heads, shape.queries, arguments);
  });
}

}  // namespace jaxllm::attention
