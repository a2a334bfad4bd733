// The kernels before and after the backward's main kernel: lse and delta of each query, the
// conversion of dq where the main kernel does not convert it, and the gradient of a bias.
#pragma once

#include "attention/hopper/backward_traits.cuh"
#include "common/column_sum.cuh"

namespace jaxllm::hopper {

constexpr int kRowThreads = 256;

// The threads that have a row of a head of out and dout, a pack each; a power of two.
template <typename T, class Traits>
constexpr int kRowGroup = Traits::kValueColumns > 128 ? 32 : Traits::kValueColumns / kPackSize<T>;

// Writes column sums over the CTA's rows. kGroup neighbouring threads have a row, kCount columns
// each; `sums` may be sums over several rows already.
template <int kGroup, int kCount>
__device__ __forceinline__ void write_column_sums(float (&sums)[kCount], float* target) {
  constexpr int kWarps = kRowThreads / 32, kColumns = kGroup * kCount;
  __shared__ alignas(16) float of_warps[kWarps][kColumns];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  sum_over_groups<kGroup>(sums);
  if (lane < kGroup) store(of_warps[warp] + lane * kCount, Pack<float, kCount>::of(sums));
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

// Zeros the semaphores and the tile counters; `index` is that of a thread in the grid.
template <class Traits>
__device__ __forceinline__ void zero_semaphores(const BackwardParams& params, int64_t index,
                                                int64_t semaphores) {
  if (!Traits::kSeparateDq && index < semaphores) params.dq_semaphore[index] = 0;
  if (index < (Traits::kSeparateDq ? 2 : 1)) params.tile_counter[index] = 0;
}

// Writes lse and delta = rowsum(dout * out) - dlse, where dlse is null or the gradient of lse, zero
// semaphores, and zeros of dq where no key is seen (without kSeparateDq). And delta once more,
// without padding.
// A group of threads takes a row, a pack each, and a CTA consecutive queries of one head. With a
// bias they are a whole tile, of which the CTA also writes the column sums of dout.
template <typename T, class Traits, bool kSegments, bool kBias>
__global__ void __launch_bounds__(kRowThreads)
    flash_attention_backward_hopper_preprocess_kernel(const __grid_constant__ BackwardParams params,
                                                      HeadRows<const T> out, HeadRows<const T> dout,
                                                      const float* lse, const float* dlse,
                                                      float* delta, HeadRows<T> dq) {
  constexpr int kGroup = kRowGroup<T, Traits>, kRows = kRowThreads / kGroup;
  constexpr int kPasses = kBias ? Traits::kBlockM / kRows : 1;
  const TiledMask<Traits::kBlockM, Traits::kBlockN> mask(params.mask);
  const int queries = mask.queries, padded_queries = mask.query_tiles() * Traits::kBlockM;
  const int64_t semaphores = int64_t{gridDim.z} * gridDim.y * mask.query_tiles();
  launch_dependent_grids();
  // The last sequences first, of which dout may still be in the L2 cache. At the end the cache has
  // the first ones, with which the main kernel begins.
  const int64_t head = blockIdx.y, sequence = gridDim.z - 1 - blockIdx.z;
  const int64_t row = sequence * gridDim.y + head;

  zero_semaphores<Traits>(params, (row * gridDim.x + blockIdx.x) * kRowThreads + threadIdx.x,
                          semaphores);

  // All loads before the first store, which may alias for all that the compiler knows.
  const int of_head = threadIdx.x % kGroup * kPackSize<T>;
  const bool has_column = of_head < params.width;
  const int64_t column = head * params.width + of_head;
  const int first_query = blockIdx.x * kPasses * kRows + threadIdx.x / kGroup;
  Pack<T> outs[kPasses] = {}, douts[kPasses] = {};
  float lses[kPasses], dlses[kPasses] = {};
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int query = first_query + pass * kRows;
    lses[pass] = -INFINITY;
    if (query < queries) {
      const int64_t token = sequence * queries + query;
      if (has_column) {
        outs[pass] = load<kPackSize<T>>(out.data + token * out.row_stride + column);
        douts[pass] = load<kPackSize<T>>(dout.data + token * dout.row_stride + column);
      }
      lses[pass] = lse[row * queries + query];
      if (!kBias && dlse != nullptr) dlses[pass] = dlse[row * queries + query];
    }
  }

  [[maybe_unused]] float dout_sums[kPackSize<T>] = {};
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int query = first_query + pass * kRows;
    [[maybe_unused]] const int tile = query / Traits::kBlockM;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) {
      sum += outs[pass][i] * douts[pass][i];
      if constexpr (kBias) dout_sums[i] += douts[pass][i];
    }
#pragma unroll
    for (int lane = kGroup / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
    if (threadIdx.x % kGroup == 0 && query < padded_queries) {
      params.lse[row * padded_queries + query] = scaled_lse(lses[pass]);
      params.delta[row * padded_queries + query] = sum - dlses[pass];
      if (query < queries) delta[row * queries + query] = sum - dlses[pass];
    }
    if constexpr (!Traits::kSeparateDq) {  // else the kernel for dq does
      if (query < queries && has_column &&
          visible_key_tiles<kSegments>(params, mask, static_cast<int>(sequence), tile).size() ==
              0) {
        const int64_t first = params.q_order.place(static_cast<int>(head)) * params.width;
        store(dq.data + (sequence * queries + query) * dq.row_stride + first + of_head, Pack<T>{});
      }
    }
  }
  if constexpr (kBias) {
    const int64_t group = params.heads / params.kv_heads, tile = sequence * gridDim.x + blockIdx.x;
    const int64_t partial = (tile * group + head % group) * params.kv_heads + head / group;
    write_column_sums<kGroup>(dout_sums, params.dout_column_sums + partial * Traits::kColumns);
  }
}

// The same where the caller has delta and the column sums of dout; the queries are whole tiles. A
// thread takes a query of a head.
template <typename T, class Traits, bool kSegments>
__global__ void __launch_bounds__(kRowThreads)
    flash_attention_backward_hopper_lse_kernel(const __grid_constant__ BackwardParams params,
                                               const float* lse, HeadRows<T> dq) {
  const TiledMask<Traits::kBlockM, Traits::kBlockN> mask(params.mask);
  const int64_t semaphores = int64_t{gridDim.z} * gridDim.y * mask.query_tiles();
  launch_dependent_grids();
  const int64_t head = blockIdx.y, sequence = blockIdx.z;
  const int64_t row = sequence * gridDim.y + head;
  zero_semaphores<Traits>(params, (row * gridDim.x + blockIdx.x) * kRowThreads + threadIdx.x,
                          semaphores);

  const int query = blockIdx.x * kRowThreads + threadIdx.x;
  if (query >= mask.queries) return;
  params.lse[row * mask.queries + query] = scaled_lse(lse[row * mask.queries + query]);
  const int tile = query / Traits::kBlockM;
  if (visible_key_tiles<kSegments>(params, mask, static_cast<int>(sequence), tile).size() == 0) {
    T* const to =
        dq.data + (sequence * mask.queries + query) * dq.row_stride + head * Traits::kHeadDim;
    for (int i = 0; i < Traits::kHeadDim; i += kPackSize<T>) store(to + i, Pack<T>{});
  }
}

// Converts dq. A tile lies in the order of the consumers' accumulators: four threads hold eight
// columns of two rows, and here one thread reads what those four wrote, 64 bytes. With a bias a CTA
// also writes the column sums of what it has converted.
template <typename T, class Traits, bool kSegments, bool kBias>
__global__ void __launch_bounds__(kRowThreads) flash_attention_backward_hopper_postprocess_kernel(
    const __grid_constant__ BackwardParams params, HeadRows<T> dq) {
  constexpr int kReaders = Traits::kDqBlocks * Traits::kDqBlockSize / 16;
  static_assert(kReaders % kRowThreads == 0);
  const TiledMask<Traits::kBlockM, Traits::kBlockN> mask(params.mask);
  const int query_tile = blockIdx.x;
  const int64_t head = blockIdx.y, sequence = blockIdx.z;
  const int64_t place = params.q_order.place(blockIdx.y);
  const auto keys =
      visible_key_tiles<kSegments>(params, mask, static_cast<int>(sequence), query_tile);
  if (keys.size() == 0) return;
  const float* const parts =
      params.dq_accum + ((sequence * gridDim.y + head) * gridDim.x + query_tile) *
                            (Traits::kBlockM * Traits::kColumns);

#pragma unroll
  for (int first = 0; first < kReaders; first += kRowThreads) {
    // Columns run fastest, so that stores coalesce.
    const int reader = first + threadIdx.x;
    const int chunk = reader % 8, quad = reader / 8 % 32, block = reader / 256;
    const float* const source =
        parts + block * Traits::kDqBlockSize + (chunk * kWarpgroup + quad * 4) * 4;
    float values[2][8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 part = reinterpret_cast<const float4*>(source)[i];
      values[0][2 * i] = part.x * params.scale;
      values[0][2 * i + 1] = part.y * params.scale;
      values[1][2 * i] = part.z * params.scale;
      values[1][2 * i + 1] = part.w * params.scale;
    }
    constexpr bool kByColumn = Traits::kColumnBlocks > 1;
    const int row = accumulator_row(quad * 4) + (kByColumn ? 0 : block * 64);
    const int column = chunk * 8 + (kByColumn ? block * kSwizzleColumns : 0);
    [[maybe_unused]] float sums[8] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = query_tile * Traits::kBlockM + row + 8 * r;
      if (query < mask.queries && column < params.width) {
        const auto rounded = Pack<T>::of(values[r]);
        store(dq.data + (sequence * mask.queries + query) * dq.row_stride + place * params.width +
                  column,
              rounded);
        if constexpr (kBias) {
#pragma unroll
          for (int i = 0; i < 8; ++i) sums[i] += rounded[i];
        }
      }
    }
    if constexpr (kBias) {
      static_assert(kRowThreads == 256);  // the readers of a block
      const int64_t tile = sequence * gridDim.x + query_tile;
      const int64_t row_of_sums = tile * Traits::kDqColumnSums + (kByColumn ? 0 : block);
      float* const target =
          params.dq_column_sums + (row_of_sums * gridDim.y + head) * Traits::kColumns;
      write_column_sums<8>(sums, target + (kByColumn ? block * kSwizzleColumns : 0));
    }
  }
}

// Sums the partial column sums to the gradient of a bias; each group has `dq_rows` and `dout_rows`
// of them. CTA (x, y) adds 32 columns of group y: of the queries, from dq; of the keys, whose
// gradient is zero; or of the values, from dout. A vector added to all keys of a head adds the same
// number to all scores of a query, which changes no probability. The probabilities of a query add
// up to one, so the values' part is the sum of dout.
template <typename T>
__global__ void __launch_bounds__(kColumnSumThreads)
    flash_attention_backward_hopper_bias_kernel(const float* dq_column_sums,
                                                const float* dout_column_sums, T* dbias,
                                                int64_t dq_rows, int64_t dout_rows,
                                                int64_t dq_columns, int64_t dout_columns) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t group = blockIdx.y, column = int64_t{blockIdx.x} * 32;
  const int64_t first_of_values = dq_columns + dout_columns;
  float sum = 0.0f;
  if (column < dq_columns) {
    sum = sum_column_of_warp(dq_column_sums + group * dq_rows * dq_columns, dq_rows, dq_columns,
                             column);
  } else if (column >= first_of_values) {
    sum = sum_column_of_warp(dout_column_sums + group * dout_rows * dout_columns, dout_rows,
                             dout_columns, column - first_of_values);
  }
  if (lane == 0) {
    dbias[group * (first_of_values + dout_columns) + column + warp] = from_float<T>(sum);
  }
}

}  // namespace jaxllm::hopper
