#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/vector.cuh"
#include "embedding/embed.h"
#include "embedding/group_tokens.cuh"

namespace jaxllm {
namespace {

// The most CTAs along the y and the z axis of a grid; kernels loop where there are more.
constexpr int64_t kMaxGridYZ = 65535;

// The threads of one threadIdx.y store a block of columns of the rows of one position in kSequences
// sequences. A thread loads a pack of each row before it waits, and the position's pack once for
// all. Column blocks are the z axis of the grid, the slowest: the part of the token table that is
// in use then fits the L2 cache, and a row that several tokens read is loaded from memory once.
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
    Pack<T, kVector> packs[kSequences], positions{};
#pragma unroll
    for (int s = 0; s < kSequences; ++s) {
      packs[s] = load_cached<kVector>(token_table + sources[s] * width + column);
    }
    if (position_table) {
      const int64_t position_row = group * shape.positions + position;
      positions = load_cached<kVector>(position_table + position_row * width + column);
    }
#pragma unroll
    for (int s = 0; s < kSequences; ++s) {
      if (first + s >= shape.sequences) continue;
      if (position_table) {
        float sum[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum[i] = packs[s][i] + positions[i];
        packs[s] = Pack<T, kVector>::of(sum);
      }
      store_streaming<kVector>(out + (row + s * shape.length) * width + column, packs[s]);
    }
  }
}

// A lane's pack of a row, which starts at `column`, added up in float32.
template <int kVector>
struct RowSum {
  float sums[kVector] = {};
  int64_t width, column;

  __device__ RowSum(int64_t width, int64_t first_column)
      : width(width), column(first_column + threadIdx.x * kVector) {}

  template <typename S>
  __device__ __forceinline__ Pack<S, kVector> load(const S* rows, int64_t row) const {
    return column < width ? load_streaming<kVector>(rows + row * width + column)
                          : Pack<S, kVector>{};
  }

  template <typename S>
  __device__ __forceinline__ void store(S* rows, int64_t row) const {
    if (column >= width) return;
    store_streaming<kVector>(rows + row * width + column, Pack<S, kVector>::of(sums));
  }

  template <class AnyPack>
  __device__ __forceinline__ void add(const AnyPack& pack) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] += pack[i];
  }

  // Adds rows row_of(i) for i from `begin` to `end`, in this order, with kAhead loads in flight.
  template <int kAhead, typename S, class RowOf>
  __device__ __forceinline__ void add(const S* rows, int64_t begin, int64_t end, RowOf row_of) {
    for (int64_t i = begin; i < end; i += kAhead) {
      Pack<S, kVector> packs[kAhead] = {};
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (i + a < end) packs[a] = load(rows, row_of(i + a));
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) add(packs[a]);
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] = 0.0f;
  }
};

// A warp adds up 32 packs of one chunk of the grouped places, if all its tokens are equal.
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

// A warp stores 32 packs of the table's gradient, for kRows consecutive slots. Their places are
// consecutive too, and the warp goes through them with kAhead rows of dout in flight, whatever
// slots they belong to. kAdds: the gradient is added to the contents of the table.
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
    const auto store_row = [&](int row) {
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
        store_row(row);
      }
      continue;
    }

    int row = 0, row_end = start_of(1);
    const int end = start_of(kRows);
    for (int i = start_of(0); i < end; i += kAhead) {
      Pack<T, kVector> packs[kAhead] = {};
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (i + a < end) packs[a] = sum.load(my_dout, place(i + a));
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (i + a >= end) break;
        while (i + a >= row_end) {
          store_row(row);
          row_end = start_of(++row + 1);
        }
        sum.add(packs[a]);
      }
    }
    while (row < kRows) store_row(row++);
  }
}

// A CTA adds up 32 packs of one position: warp w takes sequences w, w + kPositionWarps, ..., and
// the first warp adds the sums of the warps.
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

// Calls launch(size) with the elements of a pack, as a std::integral_constant.
template <typename T, class Launch, typename... Pointers>
cudaError_t choose_pack_size(int64_t width, Launch launch, Pointers... arrays) {
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
    // Rows have no position: sequences of any length are right.
    view.sequences = shape.tokens() % kSequences == 0 ? kSequences : 1;
    view.length = shape.tokens() / view.sequences;
  }
  return choose_pack_size<T>(
      shape.width,
      [&](auto vector) {
        constexpr int kVector = decltype(vector)::value;
        const int64_t packs = divide_up(shape.width, kVector * 32) * 32;
        const auto launch = [&](auto kernel, int64_t sequences, dim3 block) {
          const int64_t tiles = view.groups * divide_up(view.sequences, sequences);
          const dim3 grid(divide_up(view.length, block.y), std::min(tiles, kMaxGridYZ),
                          divide_up(packs, block.x));
          return launch_kernel(stream, kernel, {grid, block}, tokens, token_table, position_table,
                               out, view);
        };
        // Two warps with four rows each; for few sequences, a CTA with one row.
        if (view.sequences < kSequences) {
          const dim3 block(std::min<int64_t>(packs, 256));
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
  const auto groups = static_cast<unsigned>(std::min(shape.groups, kMaxGridYZ));

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

  return choose_pack_size<T>(
      shape.width,
      [&](auto vector) {
        constexpr int kVector = decltype(vector)::value;
        const unsigned column_blocks = divide_up(shape.width, 32 * kVector);
        if (shape.positions > 0) {
          JAXLLM_RETURN_IF_ERROR(launch_kernel(
              stream, embed_position_sums_kernel<kVector, T>,
              {dim3(shape.positions, column_blocks, groups), dim3(32, kPositionWarps)}, dout,
              dposition_table, shape));
        }
        const int64_t chunks = shape.tokens() / kEmbedChunk;
        if (chunks > 0) {
          JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, embed_chunk_sums_kernel<kVector, T>,
                                               {dim3(chunks, column_blocks, groups), 32}, tokens,
                                               places, dout, partial, shape));
        }
        const int64_t ctas = divide_up(shape.buckets * shape.slots, kRows * kRowWarps);
        const auto kernel = adds ? embed_backward_kernel<kVector, true, T>
                                 : embed_backward_kernel<kVector, false, T>;
        return launch_kernel(stream, kernel,
                             {dim3(ctas, column_blocks, groups), dim3(32, kRowWarps)}, starts,
                             places, dout, partial, dtoken_table, shape);
      },
      dout, dtoken_table, dposition_table);
}

template struct Embed<float>;
template struct Embed<__nv_bfloat16>;
template struct Embed<__half>;

}  // namespace jaxllm
