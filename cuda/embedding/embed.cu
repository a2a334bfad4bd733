#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/unit.cuh"
#include "embedding/embed.h"
#include "embedding/group_tokens.cuh"

namespace jaxllm {
namespace {

// The most blocks along the y and the z axis of a grid; kernels loop where there is more to do.
constexpr int64_t kMaxBlocks = 65535;

// The threads of one threadIdx.y write one slab of columns of one position's rows in kSequences
// sequences. A thread has a unit of each: it loads them all before it waits, and the position's
// unit once for them. Slabs come one after the other (z is the slowest axis of a grid): the part of
// the token table that is in use then fits the L2 cache, and a row that several tokens read comes
// from memory once.
template <int kSequences, int kVector, typename T>
__global__ void embed_forward_kernel(const int32_t* tokens, const T* token_table,
                                     const T* position_table, T* out, EmbedShape shape) {
  const int64_t width = shape.width, last_token = shape.vocabulary - 1;
  const int64_t position = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (position >= shape.length) return;
  const int64_t column = (int64_t{blockIdx.z} * blockDim.x + threadIdx.x) * kVector;
  const int64_t tiles = (shape.sequences + kSequences - 1) / kSequences;
  for (int64_t tile = blockIdx.y; tile < shape.groups * tiles; tile += gridDim.y) {
    const int64_t group = tile / tiles, first = tile % tiles * kSequences;
    const int64_t row = (group * shape.sequences + first) * shape.length + position;
    int64_t sources[kSequences];
#pragma unroll
    for (int s = 0; s < kSequences; ++s) {
      const int64_t token = first + s < shape.sequences ? tokens[row + s * shape.length] : 0;
      sources[s] = group * shape.vocabulary + min(max(token, int64_t{0}), last_token);
    }
    if (column >= width) continue;
    Unit<T, kVector> units[kSequences], positions{};
#pragma unroll
    for (int s = 0; s < kSequences; ++s) {
      units[s] = load_unit_cached<kVector>(token_table + sources[s] * width + column);
    }
    if (position_table) {
      const int64_t position_row = group * shape.positions + position;
      positions = load_unit_cached<kVector>(position_table + position_row * width + column);
    }
#pragma unroll
    for (int s = 0; s < kSequences; ++s) {
      if (first + s >= shape.sequences) continue;
      if (position_table) {
        float sum[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum[i] = units[s][i] + positions[i];
        units[s] = Unit<T, kVector>::of(sum);
      }
      store_unit_streaming<kVector>(out + (row + s * shape.length) * width + column, units[s]);
    }
  }
}

// A lane's unit of a row, which starts at `column`, added up in float32.
template <int kVector>
struct RowSum {
  float sums[kVector] = {};
  int64_t width, column;

  __device__ RowSum(int64_t width, int64_t first_column)
      : width(width), column(first_column + threadIdx.x * kVector) {}

  template <typename S>
  __device__ __forceinline__ Unit<S, kVector> load(const S* rows, int64_t row) const {
    return column < width ? load_unit_streaming<kVector>(rows + row * width + column)
                          : Unit<S, kVector>{};
  }

  template <typename S>
  __device__ __forceinline__ void store(S* rows, int64_t row) const {
    if (column >= width) return;
    store_unit_streaming<kVector>(rows + row * width + column, Unit<S, kVector>::of(sums));
  }

  template <class AnyUnit>
  __device__ __forceinline__ void add(const AnyUnit& unit) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] += unit[i];
  }

  // Adds rows row_of(i) for i from `begin` to `end`, in this order, kAhead of them on their way.
  template <int kAhead, typename S, class RowOf>
  __device__ __forceinline__ void add(const S* rows, int64_t begin, int64_t end, RowOf row_of) {
    for (int64_t i = begin; i < end; i += kAhead) {
      Unit<S, kVector> units[kAhead] = {};
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (i + a < end) units[a] = load(rows, row_of(i + a));
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) add(units[a]);
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] = 0.0f;
  }
};

// A warp adds up 32 units of one chunk of the grouped places, if its tokens are all one.
template <int kVector, typename T>
__global__ void embed_chunk_sums_kernel(const int32_t* tokens, const int32_t* places, const T* dout,
                                        float* partial, EmbedShape shape) {
  const int64_t chunks = shape.tokens() / kEmbedChunk, chunk = blockIdx.x;
  for (int64_t group = blockIdx.z; group < shape.groups; group += gridDim.z) {
    const int32_t* my_tokens = tokens + group * shape.tokens();
    const int32_t* my_places = places + group * shape.tokens() + chunk * kEmbedChunk;
    const int first = clamped(my_tokens[my_places[0]], shape);
    const int last = clamped(my_tokens[my_places[kEmbedChunk - 1]], shape);
    if (first != last) continue;
    RowSum<kVector> sum(shape.width, int64_t{blockIdx.y} * 32 * kVector);
    sum.template add<8>(dout + group * shape.tokens() * shape.width, 0, kEmbedChunk,
                        [&](int64_t i) { return my_places[i]; });
    sum.store(partial, group * chunks + chunk);
  }
}

// A warp writes 32 units of the table's gradient, for kRows slots that follow each other. So do
// their places, and the warp streams through them with kAhead rows of dout on their way, whatever
// slots they belong to. kAdds: the gradient is added to what is there.
constexpr int kRows = 4, kAhead = 4, kRowWarps = 4;
template <int kVector, bool kAdds, typename T>
__global__ void __launch_bounds__(32 * kRowWarps, 9)
    embed_backward_kernel(const int32_t* starts, const int32_t* places, const T* dout,
                          const float* partial, T* dtoken_table, EmbedShape shape) {
  const int64_t chunks = shape.tokens() / kEmbedChunk, all_slots = shape.buckets * shape.slots;
  const int64_t first_slot = (int64_t{blockIdx.x} * kRowWarps + threadIdx.y) * kRows;
  if (first_slot >= all_slots) return;
  for (int64_t group = blockIdx.z; group < shape.groups; group += gridDim.z) {
    const int32_t* my_places = places + group * shape.tokens();
    const T* my_dout = dout + group * shape.tokens() * shape.width;
    const auto place = [&](int64_t i) { return my_places[i]; };
    // Lane r has the start of row r; rows past the last slot are empty.
    const int64_t my_slot = min(first_slot + threadIdx.x, all_slots);
    const int my_start = starts[group * (all_slots + 1) + my_slot];
    const auto start_of = [&](int row) { return __shfl_sync(kFullWarp, my_start, row); };

    RowSum<kVector> sum(shape.width, int64_t{blockIdx.y} * 32 * kVector);
    const auto finish_row = [&](int row) {
      const unsigned slot = first_slot + row, slots = shape.slots;
      const int64_t token = int64_t{slot % slots} * shape.buckets + slot / slots;
      const bool is_written = !kAdds || start_of(row) < start_of(row + 1);
      if (slot < all_slots && token < shape.vocabulary && is_written) {
        const int64_t table_row = group * shape.vocabulary + token;
        if constexpr (kAdds) sum.add(sum.load(dtoken_table, table_row));
        sum.store(dtoken_table, table_row);
      }
      sum.clear();
    };

    const int next_start = __shfl_down_sync(kFullWarp, my_start, 1);
    const bool is_long = threadIdx.x < kRows && next_start - my_start >= kEmbedChunk;
    if (__any_sync(kFullWarp, is_long)) {
      // Row by row: places before the first whole chunk, sums of chunks, places after the last.
      for (int row = 0; row < kRows; ++row) {
        const int64_t begin = start_of(row), end = start_of(row + 1);
        const int64_t first_chunk = (begin + kEmbedChunk - 1) / kEmbedChunk;
        const int64_t last_chunk = max(end / kEmbedChunk, first_chunk);
        const int64_t head_end = min(first_chunk * kEmbedChunk, end);
        const int64_t tail = max(last_chunk * kEmbedChunk, head_end);
        sum.template add<kAhead>(my_dout, begin, head_end, place);
        sum.template add<kAhead>(partial + group * chunks * shape.width, first_chunk, last_chunk,
                                 [](int64_t i) { return i; });
        sum.template add<kAhead>(my_dout, tail, end, place);
        finish_row(row);
      }
      continue;
    }

    int row = 0, row_end = start_of(1);
    const int end = start_of(kRows);
    for (int i = start_of(0); i < end; i += kAhead) {
      Unit<T, kVector> units[kAhead] = {};
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (i + a < end) units[a] = sum.load(my_dout, place(i + a));
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (i + a >= end) break;
        while (i + a >= row_end) {
          finish_row(row);
          row_end = start_of(++row + 1);
        }
        sum.add(units[a]);
      }
    }
    while (row < kRows) finish_row(row++);
  }
}

// A block adds up 32 units of one position: warp w takes sequences w, w + kPositionWarps, ..., and
// the first warp adds the warps' sums.
constexpr int kPositionWarps = 8;
template <int kVector, typename T>
__global__ void __launch_bounds__(32 * kPositionWarps)
    embed_position_sums_kernel(const T* dout, T* dposition_table, EmbedShape shape) {
  __shared__ float warp_sums[kPositionWarps][kVector][32];
  const int64_t position = blockIdx.x;
  const int lane = threadIdx.x, warp = threadIdx.y;
  for (int64_t group = blockIdx.z; group < shape.groups; group += gridDim.z) {
    RowSum<kVector> sum(shape.width, int64_t{blockIdx.y} * 32 * kVector);
    if (position < shape.length) {
      const int64_t mine = (shape.sequences - warp + kPositionWarps - 1) / kPositionWarps;
      sum.template add<8>(dout + group * shape.tokens() * shape.width, 0, mine, [&](int64_t i) {
        return (warp + i * kPositionWarps) * shape.length + position;
      });
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) warp_sums[warp][i][lane] = sum.sums[i];
    __syncthreads();
    if (warp == 0) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        for (int w = 1; w < kPositionWarps; ++w) sum.sums[i] += warp_sums[w][i][lane];
      }
      sum.store(dposition_table, group * shape.positions + position);
    }
    __syncthreads();  // warp_sums may be written again
  }
}

// Calls launch(size) with the elements of a unit, as a std::integral_constant.
template <typename T, class Launch, typename... Pointers>
cudaError_t choose_vector(int64_t width, Launch launch, Pointers... arrays) {
  if (width % kPackSize<T> == 0 && aligned_16(arrays...)) {
    return launch(std::integral_constant<int, kPackSize<T>>{});
  }
  return launch(std::integral_constant<int, 1>{});
}

}  // namespace

template <typename T>
cudaError_t Embed<T>::forward(cudaStream_t stream, const int32_t* tokens, const T* token_table,
                              const T* position_table, T* out, const EmbedShape& shape) {
  if (shape.groups * shape.tokens() * shape.width == 0) return cudaSuccess;
  constexpr int kSequences = 4;
  EmbedShape view = shape;
  if (shape.positions == 0) {
    position_table = nullptr;
    // No row belongs to a position: sequences of any length will do.
    view.sequences = shape.tokens() % kSequences == 0 ? kSequences : 1;
    view.length = shape.tokens() / view.sequences;
  }
  return choose_vector<T>(
      shape.width,
      [&](auto vector) {
        constexpr int kVector = decltype(vector)::value;
        const int64_t units = divide_up(shape.width, kVector * 32) * 32;
        const auto launch = [&](auto kernel, int64_t sequences, dim3 block) {
          const int64_t tiles = view.groups * divide_up(view.sequences, sequences);
          const dim3 grid(divide_up(view.length, block.y), std::min(tiles, kMaxBlocks),
                          divide_up(units, block.x));
          return launch_kernel(stream, kernel, {grid, block}, tokens, token_table, position_table,
                               out, view);
        };
        // Two warps with four rows each; of few sequences, a block with one.
        if (view.sequences < kSequences) {
          const dim3 block(std::min<int64_t>(units, 256));
          return launch(embed_forward_kernel<1, kVector, T>, 1, block);
        }
        return launch(embed_forward_kernel<kSequences, kVector, T>, kSequences, dim3(32, 2));
      },
      token_table, position_table, out);
}

template <typename T>
cudaError_t Embed<T>::backward(cudaStream_t stream, const int32_t* tokens, const T* dout,
                               T* dtoken_table, bool adds, T* dposition_table,
                               const EmbedWorkspace& workspace, const EmbedShape& shape) {
  if (shape.groups * shape.width == 0) return cudaSuccess;
  if (shape.buckets > kMaxKeys || shape.slots > kMaxKeys) return cudaErrorInvalidValue;
  const auto groups = static_cast<unsigned>(std::min(shape.groups, kMaxBlocks));

  constexpr int kSortThreads = 32 * kSortWarps;
  int32_t *tile_counts = workspace.tile_counts, *places = workspace.places,
          *starts = workspace.starts;
  float* partial = workspace.partial;
  const auto found = reinterpret_cast<int2*>(workspace.pairs);
  const dim3 tile_grid(kEmbedTiles, 1, groups), bucket_grid(shape.buckets, 1, groups);
  JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, embed_count_kernel, {tile_grid, kSortThreads},
                                       tokens, tile_counts, shape));
  JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, embed_bucket_kernel, {tile_grid, kSortThreads},
                                       tokens, tile_counts, found, starts, shape));
  JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, embed_slot_kernel, {bucket_grid, kSortThreads},
                                       found, places, starts, shape));

  return choose_vector<T>(
      shape.width,
      [&](auto vector) {
        constexpr int kVector = decltype(vector)::value;
        const unsigned slabs = divide_up(shape.width, 32 * kVector);
        if (shape.positions > 0) {
          JAXLLM_RETURN_IF_ERROR(
              launch_kernel(stream, embed_position_sums_kernel<kVector, T>,
                            {dim3(shape.positions, slabs, groups), dim3(32, kPositionWarps)}, dout,
                            dposition_table, shape));
        }
        const int64_t chunks = shape.tokens() / kEmbedChunk;
        if (chunks > 0) {
          JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, embed_chunk_sums_kernel<kVector, T>,
                                               {dim3(chunks, slabs, groups), 32}, tokens, places,
                                               dout, partial, shape));
        }
        const int64_t blocks = divide_up(shape.buckets * shape.slots, kRows * kRowWarps);
        const auto kernel = adds ? embed_backward_kernel<kVector, true, T>
                                 : embed_backward_kernel<kVector, false, T>;
        return launch_kernel(stream, kernel, {dim3(blocks, slabs, groups), dim3(32, kRowWarps)},
                             starts, places, dout, partial, dtoken_table, shape);
      },
      dout, dtoken_table, dposition_table);
}

template struct Embed<float>;
template struct Embed<__nv_bfloat16>;
template struct Embed<__half>;

}  // namespace jaxllm
