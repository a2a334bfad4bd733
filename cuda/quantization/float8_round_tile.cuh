// Rounds a tile to 8-bit floats, in the layouts that are wanted.
#pragma once

#include "common/column_sum.cuh"
#include "quantization/float8_tile.cuh"

namespace jaxllm::float8 {

// What a call has, and which of its results are wanted.
template <bool kValues, bool kTransposed, bool kOneScale, bool kSums = false>
struct Variant {
  static constexpr bool has_values = kValues, has_transposed = kTransposed;
  static constexpr bool has_one_scale = kOneScale, has_sums = kSums;
  static_assert(kOneScale || kValues != kTransposed);
};

// Calls run() with the variant of the results of one scale that are wanted, and adds up the partial
// sums. cudaErrorNotSupported where sums are wanted without both layouts.
template <typename T, class Run>
cudaError_t run_with_one_scale(cudaStream_t stream, int64_t rows, int64_t columns, bool has_values,
                               bool has_transposed, T* sums, const float* partial, Run run) {
  if (sums) {
    if (!has_values || !has_transposed) return cudaErrorNotSupported;
    JAXLLM_RETURN_IF_ERROR(run(Variant<true, true, true, true>{}));
    const int64_t partials = Tile::partial_rows(rows);
    return column_sum(stream, partial, {sums}, 1, partials, partials, columns);
  }
  if (has_values && has_transposed) return run(Variant<true, true, true>{});
  return has_transposed ? run(Variant<false, true, true>{}) : run(Variant<true, false, true>{});
}

// The inverse scales of the rows of a thread's results: its rows, or its columns.
template <class V>
struct InverseScales {
  static constexpr int kCount = V::has_transposed && !V::has_one_scale ? kPack : kRowsOfThread;
  float of[kCount];

  // One of all.
  __device__ __forceinline__ explicit InverseScales(float scale) {
    static_assert(V::has_one_scale);
    const float one = __frcp_rn(scale);
#pragma unroll
    for (float& each : of) each = one;
  }

  __device__ __forceinline__ InverseScales(const Tile& tile, const float* scale) {
    if constexpr (V::has_one_scale) {
      *this = InverseScales(__ldg(scale));
    } else {
      const int64_t first = V::has_transposed ? tile.column() : tile.row();
      const int64_t end = V::has_transposed ? tile.columns : tile.rows;
      int i = 0;
#pragma unroll
      for (float& each : of) {
        each = first + i < end ? __frcp_rn(__ldg(scale + first + i)) : 1.0f;
        ++i;
      }
    }
  }
};

template <class V>
struct RoundingStorage {
  alignas(16) uint32_t words[V::has_transposed ? kSharedWords : 1];
  float sums[V::has_sums ? kThreads / 32 : 1][kTileColumns];
};

// Stores what is wanted of a tile. The storage serves for the next tile after a __syncthreads().
template <class V, typename Float8, typename T>
__device__ __forceinline__ void round_tile(const Tile& tile,
                                           const Pack<T, kPack> (&packs)[kRowsOfThread],
                                           const InverseScales<V>& inverse,
                                           RoundingStorage<V>& shared, uint8_t* values,
                                           uint8_t* transposed, float* partial) {
  Words words;
  float sums[1][kPack] = {};
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    float quotients[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if constexpr (V::has_sums) sums[0][j] += packs[i][j];
      const int of = V::has_one_scale ? 0 : V::has_transposed ? j : i;
      quotients[j] = packs[i][j] * inverse.of[of];
    }
    words.set_row<Float8>(i, quotients);
  }
  if constexpr (V::has_values) tile.store(words, values, tile.columns);
  if constexpr (V::has_transposed) {
    tile.stage_transposed(words, shared.words);
    __syncthreads();
    tile.store_transposed(shared.words, transposed);
  }
  if constexpr (V::has_sums) tile.store_sums(sums, shared.sums, partial);
}

}  // namespace jaxllm::float8
