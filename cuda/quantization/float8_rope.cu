// The gradient of a rotated projection: its current scale, and the gradient rotated back, rounded
// and transposed, by two kernels as in float8_scale_and_round.cu. Both rotate on load.
//
// A CTA has a group of kTiles neighbouring tiles, and a thread kPacks packs of each of its rows:
// both sides of pairs of columns, of heads that rotate by the same angles. With heads of 64
// columns:
//
//   a row of the group     |0 1 2 3 4 5 6 7|8 . . .      packs
//   thread 0                *       *                    side a and side b of pairs 0 to 7, and
//                                                        those of the head two further
#include <algorithm>
#include <climits>

#include "common/dependent_launch.cuh"
#include "quantization/float8_rope.h"
#include "quantization/float8_round_tile.cuh"
#include "quantization/float8_scale.cuh"

namespace jaxllm {
namespace {

using namespace float8;

constexpr int kTiles = 4, kPacks = 4;
constexpr int kGroupColumns = kTiles * kTileColumns;
constexpr int kPacksOfGroup = kGroupColumns / kPack;
constexpr int kAmaxCtasOfSm = 4;

// Which packs of a row of its group a thread has: `first`, and those that differ in one bit of
// their place or in two. `side` is the bit of the other side of a pair; neighbours that rotate as a
// pair are in one pack.
struct ThreadPacks {
  int first, side, other;

  template <bool kInterleaved>
  __device__ __forceinline__ static ThreadPacks of(const RowRotation& rotation) {
    const int thread = threadIdx.x % kPacksOfRow;
    const int side = kInterleaved ? kPacksOfRow : rotation.pairs / kPack;
    if (side > kPacksOfRow) return {thread, side, kPacksOfRow};
    // The places without the bit of the side.
    const int below = thread & (side - 1);
    return {below | (thread - below) << 1, side, kPacksOfGroup / 2};
  }

  __device__ __forceinline__ int at(int k) const {
    return first | (k % 2 ? side : 0) | (k / 2 ? other : 0);
  }
};

// A group of tiles, and the part of one thread.
template <bool kInterleaved>
struct TileGroup {
  // The angles of the pairs of a pack.
  static constexpr int kPairs = kInterleaved ? kPack / 2 : kPack;
  struct Angles {
    Pack<float, kPairs> cos, sin;
  };

  const RowRotation& rotation;
  int64_t rows, columns;
  int64_t first_row, first_column;
  ThreadPacks packs;

  __host__ __device__ static int64_t groups_of_row(int64_t columns) {
    return (columns + kGroupColumns - 1) / kGroupColumns;
  }
  static int64_t count(int64_t rows, int64_t columns) {
    return Tile::partial_rows(rows) * groups_of_row(columns);
  }

  __device__ __forceinline__ TileGroup(const RowRotation& rotation, int64_t rows, int64_t columns,
                                       unsigned index)
      : rotation(rotation),
        rows(rows),
        columns(columns),
        packs(ThreadPacks::of<kInterleaved>(rotation)) {
    const unsigned of_row = groups_of_row(columns);
    first_row = int64_t{index / of_row} * kTileRows;
    first_column = int64_t{index % of_row} * kGroupColumns;
  }

  __device__ __forceinline__ int64_t row(int i) const {
    return first_row + threadIdx.x / kPacksOfRow * kRowsOfThread + i;
  }
  __device__ __forceinline__ int64_t column(int k) const {
    return first_column + packs.at(k) * kPack;
  }
  // The tile with the thread's k-th packs, as if they were its own.
  __device__ __forceinline__ Tile tile(int k) const {
    Tile tile(rows, columns, 0);
    tile.first_row = first_row;
    tile.first_column = first_column + packs.at(k) / kPacksOfRow * kTileColumns;
    tile.pack = packs.at(k) % kPacksOfRow;
    return tile;
  }

  // The thread's packs of its i-th row, rotated back; zeros beyond the matrix.
  template <typename T>
  __device__ __forceinline__ void load(const T* x, int i, Pack<T, kPack> (&of_row)[kPacks]) const {
    const T* const from = x + row(i) * columns;
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      const bool is_inside = row(i) < rows && column(k) < columns;
      of_row[k] = is_inside ? jaxllm::load<kPack>(from + column(k)) : Pack<T, kPack>{};
    }
    if (row(i) >= rows) return;
    const float* const cos = rotation.cos + angles_at(row(i));
    const float* const sin = rotation.sin + angles_at(row(i));
    Angles angles;
    int loaded = -1;
    // A pack with both sides of its pairs, or two that have a side each.
    constexpr int kStep = kInterleaved ? 1 : 2;
#pragma unroll
    for (int k = 0; k < kPacks; k += kStep) {
      const int at = static_cast<int>(column(k)), head = at / rotation.width;
      const int of_head = at - head * rotation.width, pair = kInterleaved ? of_head / 2 : of_head;
      if (head >= rotation.heads || pair >= rotation.pairs) continue;
      if (pair != loaded) {
        angles.cos = load_cached<kPairs>(cos + pair);
        angles.sin = load_cached<kPairs>(sin + pair);
        loaded = pair;
      }
      rotate_back(angles, of_row[k], of_row[k + kStep - 1]);
    }
  }

 private:
  // Where the angles of a row are.
  __device__ __forceinline__ int64_t angles_at(int64_t row) const {
    const unsigned index = static_cast<unsigned>(row), length = rotation.length;
    const unsigned table = index / static_cast<unsigned>(rotation.rows_of_table);
    return (int64_t{table} * length + index % length) * rotation.pairs;
  }

  // Rotates by the negative angles; interleaved, both packs are one.
  template <typename T>
  __device__ __forceinline__ static void rotate_back(const Angles& angles, Pack<T, kPack>& first,
                                                     Pack<T, kPack>& second) {
    float of_first[kPack], of_second[kPack];
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float a = kInterleaved ? first[2 * j] : first[j];
      const float b = kInterleaved ? first[2 * j + 1] : second[j];
      float& out_a = kInterleaved ? of_first[2 * j] : of_first[j];
      float& out_b = kInterleaved ? of_first[2 * j + 1] : of_second[j];
      out_a = a * angles.cos[j] + b * angles.sin[j];
      out_b = b * angles.cos[j] - a * angles.sin[j];
    }
    first = Pack<T, kPack>::of(of_first);
    if constexpr (!kInterleaved) second = Pack<T, kPack>::of(of_second);
  }
};

// CTA i takes every gridDim.x-th group.
template <bool kInterleaved, typename T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 2 ? kAmaxCtasOfSm : 2)
    float8_rope_amax_kernel(const T* x, int64_t rows, int64_t columns,
                            const __grid_constant__ RowRotation rotation, unsigned groups,
                            float* maxima) {
  launch_dependent_grids();
  float largest = 0.0f;
  for (unsigned i = blockIdx.x; i < groups; i += gridDim.x) {
    const TileGroup<kInterleaved> group(rotation, rows, columns, i);
#pragma unroll
    for (int of_thread = 0; of_thread < kRowsOfThread; ++of_thread) {
      Pack<T, kPack> packs[kPacks];
      group.load(x, of_thread, packs);
      largest = fmaxf(largest, largest_finite(packs));
    }
  }
  __shared__ float scratch[32];
  largest = max_over_cta(largest, scratch);
  if (threadIdx.x == 0) maxima[blockIdx.x] = largest;
}

template <bool kSums>
struct GroupStorage {
  // A warp stores packs of two tiles at once, with heads of 64: they are 16 banks apart.
  alignas(16) uint32_t words[kTiles][kSharedWords + 16];
  float sums[kSums ? kThreads / 32 : 1][kGroupColumns];
  float scratch[32];
};

// A CTA for each group, the last one first.
template <bool kSums, bool kInterleaved, typename Float8, typename T>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 4 ? 1
                                            : kSums        ? 2
                                                           : 3)
    float8_rope_round_kernel(const T* x, int64_t rows, int64_t columns,
                             const __grid_constant__ RowRotation rotation, const float* maxima,
                             int count, uint8_t* values, uint8_t* transposed, float* partial,
                             float* scale) {
  __shared__ GroupStorage<kSums> shared;
  const TileGroup<kInterleaved> group(rotation, rows, columns, gridDim.x - 1 - blockIdx.x);
  wait_on_dependent_grids();
  const float of_all = scale_of_maxima<Float8>(maxima, count, shared.scratch);
  if (blockIdx.x == 0 && threadIdx.x == 0) *scale = of_all;
  const float inverse = __frcp_rn(of_all);

  Words words[kPacks];
  [[maybe_unused]] float sums[kPacks][kPack] = {};
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    Pack<T, kPack> packs[kPacks];
    group.load(x, i, packs);
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
      float quotients[kPack];
#pragma unroll
      for (int j = 0; j < kPack; ++j) {
        if constexpr (kSums) sums[k][j] += packs[k][j];
        quotients[j] = packs[k][j] * inverse;
      }
      words[k].template set_row<Float8>(i, quotients);
    }
  }
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    const Tile tile = group.tile(k);
    tile.store(words[k], values, columns);
    tile.stage_transposed(words[k], shared.words[group.packs.at(k) / kPacksOfRow]);
    if constexpr (kSums) {
      store_sums_of_warp(sums[k], &shared.sums[threadIdx.x / 32][group.packs.at(k) * kPack]);
    }
  }
  __syncthreads();
  Tile tile(rows, columns, 0);
  tile.first_row = group.first_row;
#pragma unroll
  for (int g = 0; g < kTiles; ++g) {
    tile.first_column = group.first_column + g * kTileColumns;
    tile.store_transposed(shared.words[g], transposed);
  }
  if constexpr (kSums) {
    const int64_t column = group.first_column + threadIdx.x;
    static_assert(kThreads == kGroupColumns);
    if (column >= columns) return;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; ++warp) sum += shared.sums[warp][threadIdx.x];
    partial[group.first_row / kTileRows * columns + column] = sum;
  }
}

// Whether a thread has both sides of its pairs.
bool has_pairs(const RowRotation& rotation) {
  if (rotation.interleaved) return rotation.width % kPack == 0 && 2 * rotation.pairs % kPack == 0;
  const int packs = rotation.pairs / kPack;
  return rotation.width == 2 * rotation.pairs && rotation.pairs == packs * kPack && packs > 0 &&
         packs <= kPacksOfGroup / 2 && (packs & (packs - 1)) == 0;
}

}  // namespace

template <typename T>
cudaError_t Float8RopeRounding<T>::launch(cudaStream_t stream, int64_t rows, int64_t columns,
                                          const RowRotation& rotation, Float8* values,
                                          Float8* transposed, T* sums, float* partial) const {
  if (!serves(rows, columns, /*transposed=*/true) || !has_pairs(rotation) || rows > INT_MAX ||
      columns > INT_MAX) {
    return cudaErrorNotSupported;
  }
  if (!aligned<8>(values) || !aligned_16(x, transposed, rotation.cos, rotation.sin)) {
    return cudaErrorNotSupported;
  }
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(limits.read());
  const auto with = [&](auto interleaved) {
    constexpr bool kInterleaved = interleaved;
    const int64_t groups = TileGroup<kInterleaved>::count(rows, columns);
    const int64_t ctas = std::min({groups, kAmaxCtasOfSm * int64_t{limits.sms}, kFloat8RopeMaxima});
    if (ctas > 0) {
      JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, float8_rope_amax_kernel<kInterleaved, T>,
                                           {dim3(ctas), kThreads}, x, rows, columns, rotation,
                                           static_cast<unsigned>(groups), maxima));
    }
    const auto run = [&](auto has_sums) {
      Launch launch;
      launch.grid = dim3(std::max<int64_t>(groups, 1));  // no elements have a scale too
      launch.block = dim3(kThreads);
      launch.pdl = ctas > 0;
      return launch_kernel(stream,
                           float8_rope_round_kernel<has_sums.value, kInterleaved, Float8, T>,
                           launch, x, rows, columns, rotation, maxima, static_cast<int>(ctas),
                           reinterpret_cast<uint8_t*>(values),
                           reinterpret_cast<uint8_t*>(transposed), partial, scale);
    };
    if (sums == nullptr) return run(std::false_type{});
    JAXLLM_RETURN_IF_ERROR(run(std::true_type{}));
    const int64_t partials = Tile::partial_rows(rows);
    return column_sum(stream, partial, {sums}, 1, partials, partials, columns);
  };
  return rotation.interleaved ? with(std::true_type{}) : with(std::false_type{});
}

template struct Float8RopeRounding<float>;
template struct Float8RopeRounding<__nv_bfloat16>;
template struct Float8RopeRounding<__half>;

}  // namespace jaxllm
