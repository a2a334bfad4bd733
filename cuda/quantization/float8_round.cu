// Rounds a matrix to 8-bit floats, and transposes it. The matrix is read once, and each result is
// written once. The transposition goes through shared memory, in words of four rows:
//
//                 8 columns                              a word: 4 rows of a column
//            +---------------+                          +---+
//   4 rows   | of one thread |   -> registers, bytes -> |   | x 8 columns -> shared memory
//            +---------------+      permuted            +---+
//
//   shared memory -> 16 rows of a column at once -> a row of the transposed matrix
#include <type_traits>

#include "common/dependent_launch.cuh"
#include "common/vector.cuh"
#include "quantization/float8_round.h"

namespace jaxllm {
namespace {

constexpr int kThreads = 256;
constexpr int kPack = 8;          // neighbours in a row, of one thread
constexpr int kRowsOfThread = 4;  // as many bytes as a word
constexpr int kTileColumns = 64;
constexpr int kPacksOfRow = kTileColumns / kPack;  // threads that share a row of a tile
constexpr int kTileRows = kThreads / kPacksOfRow * kRowsOfThread;
constexpr int kColumnWords = kTileRows / kRowsOfThread;

// The place of a word of a column in shared memory. In a store a warp writes 4 words of each of 8
// columns, which are kPack columns apart. Their places are shifted by 4 banks each: no two lanes
// share a bank.
__device__ __forceinline__ int word_index(int column, int word) {
  return column * kColumnWords + column / kPack * 4 + word;
}
constexpr int kSharedWords = kTileColumns * kColumnWords + kPacksOfRow * 4;

template <typename Float8>
constexpr bool kHasInfinity = std::is_same_v<Float8, __nv_fp8_e5m2>;

// Two floats as bytes, the first one lower. The conversion itself makes the largest number of an
// infinity.
template <typename Float8>
__device__ __forceinline__ uint32_t round_pair(float low, float high) {
  constexpr auto kFormat = kHasInfinity<Float8> ? __NV_E5M2 : __NV_E4M3;
  if constexpr (!kHasInfinity<Float8>) {
    // Zero times an infinity is NaN, and times another number it is a zero of that number's sign.
    low = fmaf(low, 0.0f, low);
    high = fmaf(high, 0.0f, high);
  }
  uint32_t pair = __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, kFormat);
  if constexpr (kHasInfinity<Float8>) {
    // One more than the largest number is the infinity.
    pair += (isinf(low) ? 0x0001u : 0u) + (isinf(high) ? 0x0100u : 0u);
  }
  return pair;
}

// The bytes of four words as a matrix, transposed.
__device__ __forceinline__ void transpose_bytes(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t left_top = __byte_perm(rows[0], rows[1], 0x5140);
  const uint32_t left_bottom = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t right_top = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t right_bottom = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(left_top, left_bottom, 0x5410);
  columns[1] = __byte_perm(left_top, left_bottom, 0x7632);
  columns[2] = __byte_perm(right_top, right_bottom, 0x5410);
  columns[3] = __byte_perm(right_top, right_bottom, 0x7632);
}

// What a call has, and which of its results are wanted.
template <bool kValues, bool kTransposed, bool kOneScale>
struct Variant {
  static constexpr bool has_values = kValues, has_transposed = kTransposed;
  static constexpr bool has_one_scale = kOneScale;
  static_assert(kOneScale || kValues != kTransposed);
};

// A CTA for each tile; the tiles of a row of tiles follow each other.
template <class V, typename Float8, typename T>
__global__ void __launch_bounds__(kThreads)
    float8_round_kernel(const T* x, const float* scale, int64_t rows, int64_t columns,
                        int64_t tiles_of_row, uint8_t* values, uint8_t* transposed) {
  __shared__ alignas(16) uint32_t shared[V::has_transposed ? kSharedWords : 1];
  const int64_t tile_row = blockIdx.x / tiles_of_row * kTileRows;
  const int64_t tile_column = blockIdx.x % tiles_of_row * kTileColumns;
  const int pack = threadIdx.x % kPacksOfRow, group = threadIdx.x / kPacksOfRow;
  const int64_t row = tile_row + group * kRowsOfThread, column = tile_column + pack * kPack;

  Pack<T, kPack> packs[kRowsOfThread];
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    const bool is_inside = row + i < rows && column < columns;
    packs[i] = is_inside ? load<kPack>(x + (row + i) * columns + column) : Pack<T, kPack>{};
  }
  // Of the rows of the results: those of this thread, or its columns.
  float inverse[V::has_transposed && !V::has_one_scale ? kPack : kRowsOfThread];
  if constexpr (V::has_one_scale) {
    const float one = __frcp_rn(__ldg(scale));
#pragma unroll
    for (float& each : inverse) each = one;
  } else {
    const int64_t first = V::has_transposed ? column : row;
    const int64_t end = V::has_transposed ? columns : rows;
    int i = 0;
#pragma unroll
    for (float& each : inverse) {
      each = first + i < end ? __frcp_rn(__ldg(scale + first + i)) : 1.0f;
      ++i;
    }
  }

  uint32_t words[kPack / 4][kRowsOfThread];
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    float quotients[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const int of = V::has_one_scale ? 0 : V::has_transposed ? j : i;
      quotients[j] = packs[i][j] * inverse[of];
    }
#pragma unroll
    for (int j = 0; j < kPack; j += 4) {
      words[j / 4][i] = round_pair<Float8>(quotients[j], quotients[j + 1]) |
                        round_pair<Float8>(quotients[j + 2], quotients[j + 3]) << 16;
    }
  }
  if constexpr (V::has_values) {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      if (row + i >= rows || column >= columns) continue;
      uint2* const to = reinterpret_cast<uint2*>(values + (row + i) * columns + column);
      *to = {words[0][i], words[1][i]};
    }
  }
  if constexpr (V::has_transposed) {
#pragma unroll
    for (int half = 0; half < kPack / 4; ++half) {
      uint32_t of_columns[4];
      transpose_bytes(words[half], of_columns);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        shared[word_index(pack * kPack + half * 4 + j, group)] = of_columns[j];
      }
    }
    __syncthreads();
    constexpr int kChunks = kColumnWords / 4;  // of 16 rows
    for (int i = threadIdx.x; i < kTileColumns * kChunks; i += kThreads) {
      const int of_tile = i / kChunks, chunk = i % kChunks;
      const int64_t to_row = tile_column + of_tile, to_column = tile_row + chunk * 16;
      if (to_row >= columns || to_column >= rows) continue;
      *reinterpret_cast<uint4*>(transposed + to_row * rows + to_column) =
          *reinterpret_cast<const uint4*>(&shared[word_index(of_tile, chunk * 4)]);
    }
  }
}

}  // namespace

template <typename Float8, typename T>
cudaError_t Float8Rounding<Float8, T>::launch(cudaStream_t stream, int64_t rows, int64_t columns,
                                              Float8* values, Float8* transposed) const {
  if (rows == 0 || columns == 0) return cudaSuccess;
  if (columns % kPack != 0 || (transposed && rows % 16 != 0)) return cudaErrorNotSupported;
  if (!aligned_16(x, values, transposed)) return cudaErrorNotSupported;
  const int64_t tiles_of_row = divide_up(columns, kTileColumns);
  const int64_t ctas = divide_up(rows, kTileRows) * tiles_of_row;
  const auto run = [&](auto variant) {
    using V = decltype(variant);
    return launch_kernel(stream, float8_round_kernel<V, Float8, T>, {ctas, kThreads}, x, scale,
                         rows, columns, tiles_of_row, reinterpret_cast<uint8_t*>(values),
                         reinterpret_cast<uint8_t*>(transposed));
  };
  if (values && transposed) {
    return has_one_scale ? run(Variant<true, true, true>{}) : cudaErrorNotSupported;
  }
  if (transposed) {
    return has_one_scale ? run(Variant<false, true, true>{}) : run(Variant<false, true, false>{});
  }
  return has_one_scale ? run(Variant<true, false, true>{}) : run(Variant<true, false, false>{});
}

#define JAXLLM_INSTANTIATE(Float8)                       \
  template struct Float8Rounding<Float8, float>;         \
  template struct Float8Rounding<Float8, __nv_bfloat16>; \
  template struct Float8Rounding<Float8, __half>;

JAXLLM_INSTANTIATE(__nv_fp8_e4m3)
JAXLLM_INSTANTIATE(__nv_fp8_e5m2)
#undef JAXLLM_INSTANTIATE

}  // namespace jaxllm
