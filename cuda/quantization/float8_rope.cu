// The gradient of a rotated projection: its current scale, and the gradient rotated back, rounded
// and transposed, by two kernels as in float8_scale_and_round.cu. Both rotate on load.
//
// Neighbouring tiles of a row of tiles are of heads that rotate by the same angles. A CTA takes
// kTilesAtOnce of them, so that it loads the angles of a row once.
#include <algorithm>
#include <climits>

#include "common/dependent_launch.cuh"
#include "quantization/float8_rope.h"
#include "quantization/float8_round_tile.cuh"
#include "quantization/float8_scale.cuh"

namespace jaxllm {
namespace {

using namespace float8;

constexpr int kTilesAtOnce = 4;
constexpr int kAmaxCtasOfSm = 4;

// How a pack of a row rotates, and where the other sides of its pairs are.
template <bool kInterleaved>
struct PackRotation {
  int first_pair = -1;  // none: it does not rotate
  int to_partner = 0;   // columns to the pack with the other sides; interleaved has them itself

  PackRotation() = default;
  __device__ __forceinline__ PackRotation(const RowRotation& rotation, int column) {
    const int head = column / rotation.width, of_head = column - head * rotation.width;
    if (head >= rotation.heads || of_head >= 2 * rotation.pairs) return;
    if constexpr (kInterleaved) {
      first_pair = of_head / 2;
    } else {
      const bool is_second = of_head >= rotation.pairs;
      to_partner = is_second ? -rotation.pairs : rotation.pairs;
      first_pair = of_head - is_second * rotation.pairs;
    }
  }

  __device__ __forceinline__ bool rotates() const { return first_pair >= 0; }

  // The angles of the pairs of a pack.
  static constexpr int kPairs = kInterleaved ? kPack / 2 : kPack;
  struct Angles {
    Pack<float, kPairs> cos, sin;
  };

  template <typename T>
  __device__ __forceinline__ Pack<T, kPack> rotate_back(const Pack<T, kPack>& pack,
                                                        const Pack<T, kPack>& partner,
                                                        const Angles& angles) const {
    float values[kPack];
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const int pair = kInterleaved ? j / 2 : j;
      const bool is_second = kInterleaved ? j % 2 == 1 : to_partner < 0;
      const float other = kInterleaved ? pack[j ^ 1] : partner[j];
      const float sine = is_second ? -angles.sin[pair] : angles.sin[pair];
      values[j] = pack[j] * angles.cos[pair] + other * sine;
    }
    return Pack<T, kPack>::of(values);
  }
};

// The kTilesAtOnce tiles that begin with one of a row of tiles.
struct TileGroup {
  Tile first;
  unsigned index;  // of the first tile
  int count;       // fewer at the end of a row

  __host__ __device__ static int64_t groups_of_row(int64_t columns) {
    return (Tile::tiles_of_row(columns) + kTilesAtOnce - 1) / kTilesAtOnce;
  }
  static int64_t groups(int64_t rows, int64_t columns) {
    return Tile::partial_rows(rows) * groups_of_row(columns);
  }
  __device__ __forceinline__ static TileGroup at(int64_t rows, int64_t columns, unsigned group) {
    const unsigned of_row = Tile::tiles_of_row(columns), groups = groups_of_row(columns);
    const unsigned row = group / groups, place = (group - row * groups) * kTilesAtOnce;
    const unsigned index = row * of_row + place;
    return {Tile(rows, columns, index), index,
            static_cast<int>(min(of_row - place, unsigned{kTilesAtOnce}))};
  }
};

// Loads a thread's rows of a group of tiles, and rotates them back.
template <bool kInterleaved, typename T>
__device__ __forceinline__ void load_rotated(const T* x, const TileGroup& group,
                                             const RowRotation& rotation,
                                             Pack<T, kPack> (&packs)[kTilesAtOnce][kRowsOfThread]) {
  using Rotation = PackRotation<kInterleaved>;
  const int64_t rows = group.first.rows, columns = group.first.columns;
  const int64_t first_column = group.first.column();
  Rotation rotations[kTilesAtOnce];
#pragma unroll
  for (int g = 0; g < kTilesAtOnce; ++g) {
    const int64_t column = first_column + g * kTileColumns;
    if (column < columns) rotations[g] = Rotation(rotation, static_cast<int>(column));
  }
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    const int64_t row = group.first.row() + i;
    const T* const from = x + row * columns + first_column;
    Pack<T, kPack> partners[kTilesAtOnce];
#pragma unroll
    for (int g = 0; g < kTilesAtOnce; ++g) {
      const bool is_inside = row < rows && first_column + g * kTileColumns < columns;
      const T* const at = from + g * kTileColumns;
      packs[g][i] = is_inside ? load<kPack>(at) : Pack<T, kPack>{};
      const bool has_partner = !kInterleaved && is_inside && rotations[g].rotates();
      partners[g] = has_partner ? load<kPack>(at + rotations[g].to_partner) : Pack<T, kPack>{};
    }
    if (row >= rows) continue;
    const unsigned of_row = static_cast<unsigned>(row);
    const unsigned length = rotation.length, rows_of_table = rotation.rows_of_table;
    const int64_t angles_at =
        (int64_t{of_row / rows_of_table} * length + of_row % length) * rotation.pairs;
    typename Rotation::Angles angles;
    int loaded = -1;
#pragma unroll
    for (int g = 0; g < kTilesAtOnce; ++g) {
      if (!rotations[g].rotates()) continue;
      if (rotations[g].first_pair != loaded) {
        loaded = rotations[g].first_pair;
        angles.cos = load_cached<Rotation::kPairs>(rotation.cos + angles_at + loaded);
        angles.sin = load_cached<Rotation::kPairs>(rotation.sin + angles_at + loaded);
      }
      packs[g][i] = rotations[g].rotate_back(packs[g][i], partners[g], angles);
    }
  }
}

// CTA i takes every gridDim.x-th group of tiles.
template <bool kInterleaved, typename T>
__global__ void __launch_bounds__(kThreads)
    float8_rope_amax_kernel(const T* x, int64_t rows, int64_t columns, RowRotation rotation,
                            unsigned groups, float* maxima) {
  launch_dependent_grids();
  float largest = 0.0f;
  for (unsigned i = blockIdx.x; i < groups; i += gridDim.x) {
    Pack<T, kPack> packs[kTilesAtOnce][kRowsOfThread];
    load_rotated<kInterleaved>(x, TileGroup::at(rows, columns, i), rotation, packs);
#pragma unroll
    for (const auto& of_tile : packs) largest = fmaxf(largest, largest_finite(of_tile));
  }
  __shared__ float scratch[32];
  largest = max_over_cta(largest, scratch);
  if (threadIdx.x == 0) maxima[blockIdx.x] = largest;
}

// A CTA for each group of tiles, the last one first.
template <class V, bool kInterleaved, typename Float8, typename T>
__global__ void __launch_bounds__(kThreads)
    float8_rope_round_kernel(const T* x, int64_t rows, int64_t columns, RowRotation rotation,
                             const float* maxima, int count, uint8_t* values, uint8_t* transposed,
                             float* partial, float* scale) {
  __shared__ RoundingStorage<V> shared;
  __shared__ float scratch[32];
  const TileGroup group = TileGroup::at(rows, columns, gridDim.x - 1 - blockIdx.x);
  Pack<T, kPack> packs[kTilesAtOnce][kRowsOfThread];
  load_rotated<kInterleaved>(x, group, rotation, packs);  // which the kernel before only reads
  wait_on_dependent_grids();
  const float of_all = scale_of_maxima<Float8>(maxima, count, scratch);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = of_all;
  const InverseScales<V> inverse(of_all);
#pragma unroll
  for (int g = 0; g < kTilesAtOnce; ++g) {
    if (g >= group.count) break;
    if (g > 0) __syncthreads();  // the storage is that of the tile before
    round_tile<V, Float8>(Tile(rows, columns, group.index + g), packs[g], inverse, shared, values,
                          transposed, partial);
  }
}

// Whether a pack rotates as a whole.
bool rotates_packs(const RowRotation& rotation) {
  return rotation.width % kPack == 0 &&
         (rotation.interleaved ? 2 : 1) * rotation.pairs % kPack == 0;
}

}  // namespace

template <typename T>
cudaError_t Float8RopeRounding<T>::launch(cudaStream_t stream, int64_t rows, int64_t columns,
                                          const RowRotation& rotation, Float8* values,
                                          Float8* transposed, T* sums, float* partial) const {
  if (!serves(rows, columns, /*transposed=*/true) || !rotates_packs(rotation) || rows > INT_MAX ||
      columns > INT_MAX) {
    return cudaErrorNotSupported;
  }
  if (!aligned<8>(values) || !aligned_16(x, transposed, rotation.cos, rotation.sin)) {
    return cudaErrorNotSupported;
  }
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(limits.read());
  const int64_t groups = TileGroup::groups(rows, columns);
  const int64_t ctas = std::min({groups, kAmaxCtasOfSm * int64_t{limits.sms}, kFloat8RopeMaxima});
  const auto with = [&](auto interleaved) {
    constexpr bool kInterleaved = interleaved;
    if (ctas > 0) {
      JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, float8_rope_amax_kernel<kInterleaved, T>,
                                           {dim3(ctas), kThreads}, x, rows, columns, rotation,
                                           static_cast<unsigned>(groups), maxima));
    }
    const auto run = [&](auto variant) {
      Launch launch;
      launch.grid = dim3(std::max<int64_t>(groups, 1));  // no elements have a scale too
      launch.block = dim3(kThreads);
      launch.pdl = ctas > 0;
      return launch_kernel(stream,
                           float8_rope_round_kernel<decltype(variant), kInterleaved, Float8, T>,
                           launch, x, rows, columns, rotation, maxima, static_cast<int>(ctas),
                           reinterpret_cast<uint8_t*>(values),
                           reinterpret_cast<uint8_t*>(transposed), partial, scale);
    };
    if (sums) {
      JAXLLM_RETURN_IF_ERROR(run(Variant<true, true, true, true>{}));
      const int64_t partials = Tile::partial_rows(rows);
      return column_sum(stream, partial, {sums}, 1, partials, partials, columns);
    }
    return run(Variant<true, true, true>{});
  };
  return rotation.interleaved ? with(std::true_type{}) : with(std::false_type{});
}

template struct Float8RopeRounding<float>;
template struct Float8RopeRounding<__nv_bfloat16>;
template struct Float8RopeRounding<__half>;

}  // namespace jaxllm
