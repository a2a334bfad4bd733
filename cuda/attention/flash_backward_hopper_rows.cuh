// What comes before and after the main kernel of the gradient: the numbers of each query that it
// reads, and, where it does not do so itself, the rounding of dq.
#pragma once

#include "attention/flash_backward_hopper.cuh"

namespace jaxllm::hopper {

constexpr int kRowThreads = 256;

// What the main kernel reads beside q and dout, the zeros that its counts start from, and those of
// dq where no key is seen. A team of threads takes a row, a pack each; a block takes consecutive
// queries of one head.
template <typename T, int kWidth, bool kSegments>
__global__ void __launch_bounds__(kRowThreads)
    flash_attention_backward_rows_kernel(const __grid_constant__ BackwardArguments a,
                                         HeadRows<const T> out, HeadRows<const T> dout,
                                         const float* lse, HeadRows<T> dq) {
  using Shape = BackwardShape<kWidth>;
  constexpr int kTeam = kWidth / kPackSize<T>;
  const TiledBand<Shape::kQueries, Shape::kKeys> band(a.band);
  const int queries = band.queries, padded_queries = band.query_tiles() * Shape::kQueries;
  const int64_t rank_count = int64_t{gridDim.z} * gridDim.y * band.query_tiles();
  start_next_kernel();
  const int query = blockIdx.x * (kRowThreads / kTeam) + threadIdx.x / kTeam;
  const int64_t head = blockIdx.y, sequence = blockIdx.z;
  const int64_t row = sequence * gridDim.y + head;

  const int64_t index = (row * gridDim.x + blockIdx.x) * kRowThreads + threadIdx.x;
  if (index < rank_count) a.ranks[index] = 0;
  if (index == 0) *a.tickets = 0;

  float sum = 0.0f;
  if (query < queries) {
    const int64_t token = sequence * queries + query;
    const int64_t column = head * kWidth + threadIdx.x % kTeam * kPackSize<T>;
    const auto outs = load<kPackSize<T>>(out.data + token * out.row_stride + column);
    const auto douts = load<kPackSize<T>>(dout.data + token * dout.row_stride + column);
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) sum += outs[i] * douts[i];
    const int tile = query / Shape::kQueries;
    if (keys_seen<kSegments>(a, band, static_cast<int>(sequence), tile).size() == 0) {
      store(dq.data + token * dq.row_stride + column, Pack<T>{});
    }
  }
#pragma unroll
  for (int lane = kTeam / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
  if (threadIdx.x % kTeam == 0 && query < padded_queries) {
    // Where no key is seen, and beyond the last query, 2^(s - inf) = 0.
    const float value = query < queries ? lse[row * queries + query] : -INFINITY;
    a.lse[row * padded_queries + query] = value == -INFINITY ? INFINITY : value * float{M_LOG2E};
    a.delta[row * padded_queries + query] = sum;
  }
}

// Rounds dq. The parts of a tile lie as the multipliers' accumulators did: four threads hold eight
// columns of two rows, and here one thread reads what those four wrote, 64 bytes.
template <typename T, int kWidth, bool kSegments>
__global__ void __launch_bounds__(kRowThreads)
    flash_attention_backward_dq_kernel(const __grid_constant__ BackwardArguments a,
                                       HeadRows<T> dq) {
  using Shape = BackwardShape<kWidth>;
  constexpr int kReaders = Shape::kMultipliers * Shape::kPartOfDq / 16;
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
        parts + multiplier * Shape::kPartOfDq + (chunk * kWarpgroup + quad * 4) * 4;
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
    const int column = chunk * 8 + (kByColumn ? multiplier * kSlabWidth : 0);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = query_tile * Shape::kQueries + row + 8 * r;
      if (query < band.queries) {
        store(dq.data + (sequence * band.queries + query) * dq.row_stride + head * kWidth + column,
              Pack<T>::of(values[r]));
      }
    }
  }
}

}  // namespace jaxllm::hopper
