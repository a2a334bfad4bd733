// What comes before and after the main kernel of the gradient: the numbers of each query that it
// reads, and, where it does not do so itself, the rounding of dq; and the gradient of a bias.
#pragma once

#include "attention/flash_backward_hopper.cuh"
#include "common/column_sum.cuh"

namespace jaxllm::hopper {

constexpr int kRowThreads = 256;

// Writes the sums of columns over rows of which kTeam neighbouring threads hold one, or, in `sums`,
// their own sums of several.
template <int kTeam, int kCount>
__device__ __forceinline__ void write_column_sums(float (&sums)[kCount], float* target) {
  constexpr int kWarps = kRowThreads / 32, kColumns = kTeam * kCount;
  __shared__ alignas(16) float of_warps[kWarps][kColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  sum_over_groups<kTeam>(sums);
  if (lane < kTeam) store(of_warps[warp] + lane * kCount, Pack<float, kCount>::of(sums));
  __syncthreads();
  if (threadIdx.x < kColumns) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += of_warps[w][threadIdx.x];
    target[threadIdx.x] = sum;
  }
  __syncthreads();  // before another call writes
}

// In powers of 2. Where no key is seen, and beyond the last query, 2^(s - inf) = 0.
__device__ __forceinline__ float scaled_lse(float lse) {
  return lse == -INFINITY ? INFINITY : lse * float{M_LOG2E};
}

// The zeros that the main kernel's counts start from; `index` is a thread's among all.
__device__ __forceinline__ void zero_counts(const BackwardArguments& a, int64_t index,
                                            int64_t rank_count) {
  if (index < rank_count) a.ranks[index] = 0;
  if (index == 0) *a.tickets = 0;
}

// What the main kernel reads beside q and dout, the zeros that its counts start from, and those of
// dq where no key is seen. A team of threads takes a row, a pack each; a block takes consecutive
// queries of one head: with a bias a whole tile, of which it adds up dout.
template <typename T, int kWidth, bool kSegments, bool kBias>
__global__ void __launch_bounds__(kRowThreads)
    flash_attention_backward_rows_kernel(const __grid_constant__ BackwardArguments a,
                                         HeadRows<const T> out, HeadRows<const T> dout,
                                         const float* lse, HeadRows<T> dq) {
  using Shape = BackwardShape<kWidth>;
  constexpr int kTeam = kWidth / kPackSize<T>, kRows = kRowThreads / kTeam;
  constexpr int kPasses = kBias ? Shape::kQueries / kRows : 1;
  const TiledBand<Shape::kQueries, Shape::kKeys> band(a.band);
  const int queries = band.queries, padded_queries = band.query_tiles() * Shape::kQueries;
  const int64_t rank_count = int64_t{gridDim.z} * gridDim.y * band.query_tiles();
  launch_dependent_grids();
  // The last sequences first: of those dout may be in the L2 cache still, and in the end it is of
  // the first, with which the main kernel begins.
  const int64_t head = blockIdx.y, sequence = gridDim.z - 1 - blockIdx.z;
  const int64_t row = sequence * gridDim.y + head;

  zero_counts(a, (row * gridDim.x + blockIdx.x) * kRowThreads + threadIdx.x, rank_count);

  // All loads before the first store, which the compiler must take for one to the same place.
  const int64_t column = head * kWidth + threadIdx.x % kTeam * kPackSize<T>;
  const int first_query = blockIdx.x * kPasses * kRows + threadIdx.x / kTeam;
  Pack<T> outs[kPasses] = {}, douts[kPasses] = {};
  float lses[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int query = first_query + pass * kRows;
    lses[pass] = -INFINITY;
    if (query < queries) {
      const int64_t token = sequence * queries + query;
      outs[pass] = load<kPackSize<T>>(out.data + token * out.row_stride + column);
      douts[pass] = load<kPackSize<T>>(dout.data + token * dout.row_stride + column);
      lses[pass] = lse[row * queries + query];
    }
  }

  [[maybe_unused]] float dout_sums[kPackSize<T>] = {};
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int query = first_query + pass * kRows, tile = query / Shape::kQueries;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) {
      sum += outs[pass][i] * douts[pass][i];
      if constexpr (kBias) dout_sums[i] += douts[pass][i];
    }
#pragma unroll
    for (int lane = kTeam / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
    if (threadIdx.x % kTeam == 0 && query < padded_queries) {
      a.lse[row * padded_queries + query] = scaled_lse(lses[pass]);
      a.delta[row * padded_queries + query] = sum;
    }
    if (query < queries &&
        keys_seen<kSegments>(a, band, static_cast<int>(sequence), tile).size() == 0) {
      store(dq.data + (sequence * queries + query) * dq.row_stride + column, Pack<T>{});
    }
  }
  if constexpr (kBias) {
    const int64_t group = a.heads / a.kv_heads, tile = sequence * gridDim.x + blockIdx.x;
    const int64_t partial = (tile * group + head % group) * a.kv_heads + head / group;
    write_column_sums<kTeam>(dout_sums, a.dout_partial + partial * kWidth);
  }
}

// The same where delta is known, and what a bias's gradient wants of dout; the queries are whole
// tiles. A thread takes a query of a head.
template <typename T, int kWidth, bool kSegments>
__global__ void __launch_bounds__(kRowThreads)
    flash_attention_backward_lse_kernel(const __grid_constant__ BackwardArguments a,
                                        const float* lse, HeadRows<T> dq) {
  using Shape = BackwardShape<kWidth>;
  const TiledBand<Shape::kQueries, Shape::kKeys> band(a.band);
  const int64_t rank_count = int64_t{gridDim.z} * gridDim.y * band.query_tiles();
  launch_dependent_grids();
  const int64_t head = blockIdx.y, sequence = blockIdx.z;
  const int64_t row = sequence * gridDim.y + head;
  zero_counts(a, (row * gridDim.x + blockIdx.x) * kRowThreads + threadIdx.x, rank_count);

  const int query = blockIdx.x * kRowThreads + threadIdx.x;
  if (query >= band.queries) return;
  a.lse[row * band.queries + query] = scaled_lse(lse[row * band.queries + query]);
  const int tile = query / Shape::kQueries;
  if (keys_seen<kSegments>(a, band, static_cast<int>(sequence), tile).size() == 0) {
    T* const to = dq.data + (sequence * band.queries + query) * dq.row_stride + head * kWidth;
    for (int i = 0; i < kWidth; i += kPackSize<T>) store(to + i, Pack<T>{});
  }
}

// Rounds dq. The parts of a tile lie as the multipliers' accumulators did: four threads hold eight
// columns of two rows, and here one thread reads what those four wrote, 64 bytes. With a bias a
// block adds up what it has rounded.
template <typename T, int kWidth, bool kSegments, bool kBias>
__global__ void __launch_bounds__(kRowThreads)
    flash_attention_backward_dq_kernel(const __grid_constant__ BackwardArguments a,
                                       HeadRows<T> dq) {
  using Shape = BackwardShape<kWidth>;
  constexpr int kReaders = Shape::kMultipliers * Shape::kHalfOfDq / 16;
  static_assert(kReaders % kRowThreads == 0);
  const TiledBand<Shape::kQueries, Shape::kKeys> band(a.band);
  const int query_tile = blockIdx.x;
  const int64_t head = blockIdx.y, sequence = blockIdx.z;
  const auto keys = keys_seen<kSegments>(a, band, static_cast<int>(sequence), query_tile);
  if (keys.size() == 0) return;
  const float* const parts = a.dq_sums + ((sequence * gridDim.y + head) * gridDim.x + query_tile) *
                                             (Shape::kQueries * kWidth);

#pragma unroll
  for (int first = 0; first < kReaders; first += kRowThreads) {
    // Columns run fastest, for the sake of the stores.
    const int reader = first + threadIdx.x;
    const int chunk = reader % 8, quad = reader / 8 % 32, multiplier = reader / 256;
    const float* const source =
        parts + multiplier * Shape::kHalfOfDq + (chunk * kWarpgroup + quad * 4) * 4;
    float values[2][8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 part = reinterpret_cast<const float4*>(source)[i];
      values[0][2 * i] = part.x * a.scale;
      values[0][2 * i + 1] = part.y * a.scale;
      values[1][2 * i] = part.z * a.scale;
      values[1][2 * i + 1] = part.w * a.scale;
    }
    constexpr bool kByColumn = Shape::kSlabs == 2;
    const int row = accumulator_row(quad * 4) + (kByColumn ? 0 : multiplier * 64);
    const int column = chunk * 8 + (kByColumn ? multiplier * kSwizzleColumns : 0);
    [[maybe_unused]] float sums[8] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = query_tile * Shape::kQueries + row + 8 * r;
      if (query < band.queries) {
        const auto rounded = Pack<T>::of(values[r]);
        store(dq.data + (sequence * band.queries + query) * dq.row_stride + head * kWidth + column,
              rounded);
        if constexpr (kBias) {
#pragma unroll
          for (int i = 0; i < 8; ++i) sums[i] += rounded[i];
        }
      }
    }
    if constexpr (kBias) {
      static_assert(kRowThreads == 256);  // the readers of one multiplier's part
      const int64_t tile = sequence * gridDim.x + query_tile;
      const int64_t row_of_sums = tile * Shape::kSumsOfDq + (kByColumn ? 0 : multiplier);
      float* const target = a.dq_partial + (row_of_sums * gridDim.y + head) * kWidth;
      write_column_sums<8>(sums, target + (kByColumn ? multiplier * kSwizzleColumns : 0));
    }
  }
}

// The gradient of a bias of which each group has `dq_rows` and `dout_rows` of partial sums, of so
// many columns. Block (x, y) adds 32 columns of group y: those of the queries, those of the keys,
// whose gradient is zero, or those of the values.
template <typename T>
__global__ void __launch_bounds__(kColumnSumThreads)
    flash_attention_backward_bias_kernel(const float* dq_partial, const float* dout_partial,
                                         T* dbias, int64_t dq_rows, int64_t dout_rows,
                                         int64_t dq_columns, int64_t dout_columns) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t group = blockIdx.y, column = int64_t{blockIdx.x} * 32;
  const int64_t first_of_values = dq_columns + dout_columns;
  float sum = 0.0f;
  if (column < dq_columns) {
    sum =
        sum_column_of_warp(dq_partial + group * dq_rows * dq_columns, dq_rows, dq_columns, column);
  } else if (column >= first_of_values) {
    sum = sum_column_of_warp(dout_partial + group * dout_rows * dout_columns, dout_rows,
                             dout_columns, column - first_of_values);
  }
  if (lane == 0) {
    dbias[group * (first_of_values + dout_columns) + column + warp] = from_float<T>(sum);
  }
}

}  // namespace jaxllm::hopper
