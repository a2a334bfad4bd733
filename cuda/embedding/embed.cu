#include <algorithm>

#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/unit.cuh"
#include "embedding/embed.h"

namespace jaxllm {
namespace {

// The most blocks along the y and the z axis of a grid; kernels loop where there is more to do.
constexpr int64_t kMaxBlocks = 65535;

// A block writes one slab of columns of one position's rows in kSequences sequences. A thread has a
// unit of each: it loads them all before it waits, and the position's unit once for them. Slabs
// come one after the other (z is the slowest axis of a grid): the part of the token table that is
// in use then fits the L2 cache, and a row that several tokens read comes from memory once.
template <int kSequences, int kVector, typename T>
__global__ void embed_forward_kernel(const int32_t* tokens, const T* token_table,
                                     const T* position_table, T* out, EmbedShape shape) {
  const int64_t width = shape.width, position = blockIdx.x, last_token = shape.vocabulary - 1;
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

// The backward pass first groups the places of equal tokens, in order, so that each row's gradient
// adds up in one order whatever the timing. It is a stable counting sort, first by the last bits of
// the token (its bucket), then by the other bits (its slot). Frequent tokens stand close together
// in a vocabulary, and the last bits spread them. Table rows then count bucket after bucket: row r
// is slot r % slots of bucket r / slots.
__device__ __forceinline__ int clamped(int token, const EmbedShape& shape) {
  return min(max(token, 0), static_cast<int>(shape.vocabulary) - 1);
}

constexpr int kSortWarps = 8;
constexpr int kMaxKeys = 1024;  // buckets, and slots of a bucket: their counts are in shared memory

// Sorts entries [first, first + count) by a key below `keys`: each warp has a stretch of them.
struct BlockSort {
  int (&counts)[kSortWarps][kMaxKeys];
  int begin, end;  // this warp's stretch
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  __device__ BlockSort(int (&counts)[kSortWarps][kMaxKeys], int first, int count) : counts(counts) {
    const int stretch = (count + 32 * kSortWarps - 1) / (32 * kSortWarps) * 32;
    begin = first + min(warp * stretch, count);
    end = min(begin + stretch, first + count);
  }

  // How often each key is in each warp's stretch.
  template <class KeyOf>
  __device__ void count(int keys, KeyOf key_of) {
    for (int key = lane; key < keys; key += 32) counts[warp][key] = 0;
    __syncwarp();
#pragma unroll 4
    for (int i = begin + lane; i < end; i += 32) atomicAdd(&counts[warp][key_of(i)], 1);
    __syncthreads();
  }

  __device__ int total(int key) const {
    int sum = 0;
    for (int w = 0; w < kSortWarps; ++w) sum += counts[w][key];
    return sum;
  }

  // Puts where each warp's entries with this key go in the place of their counts.
  __device__ void place(int key, int start) {
    for (int w = 0; w < kSortWarps; ++w) {
      const int its_count = counts[w][key];
      counts[w][key] = start;
      start += its_count;
    }
  }

  // Calls emit(i, target) for each entry; entries with one key keep their order.
  template <class KeyOf, class Emit>
  __device__ void distribute(KeyOf key_of, Emit emit) {
    for (int i = begin + lane; i - lane < end; i += 32) {
      const int key = i < end ? key_of(i) : -1;
      const unsigned equal = __match_any_sync(kFullWarp, key);
      const int before = __popc(equal & ((1u << lane) - 1));
      if (i < end) emit(i, counts[warp][key] + before);
      __syncwarp();
      if (i < end && before == 0) counts[warp][key] += __popc(equal);
      __syncwarp();
    }
  }
};

// Turns counts into the sums of those before, plus `start`. The first warp alone calls.
__device__ void exclusive_sums(int* counts, int keys, int start) {
  for (int first = 0; first < keys; first += 32) {
    const int key = first + threadIdx.x;
    const int its_count = key < keys ? counts[key] : 0;
    int sum = its_count;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(kFullWarp, sum, offset);
      if (threadIdx.x >= offset) sum += other;
    }
    if (key < keys) counts[key] = start + sum - its_count;
    start += __shfl_sync(kFullWarp, sum, 31);
  }
}

// The tokens of tile blockIdx.x: kEmbedTiles tiles share them out.
struct Tile {
  int first, count;
  __device__ explicit Tile(const EmbedShape& shape) {
    const int tokens = shape.tokens(), size = (tokens + kEmbedTiles - 1) / kEmbedTiles;
    first = min(static_cast<int>(blockIdx.x) * size, tokens);
    count = min(size, tokens - first);
  }
};

// Counts the tokens of a tile by bucket.
__global__ void __launch_bounds__(32 * kSortWarps)
    embed_count_kernel(const int32_t* tokens, int32_t* tile_counts, EmbedShape shape) {
  __shared__ int counts[kSortWarps][kMaxKeys];
  const Tile tile(shape);
  for (int64_t group = blockIdx.z; group < shape.groups; group += gridDim.z) {
    const int32_t* my_tokens = tokens + group * shape.tokens();
    BlockSort sort(counts, tile.first, tile.count);
    sort.count(shape.buckets,
               [&](int i) { return clamped(my_tokens[i], shape) & (shape.buckets - 1); });
    for (int bucket = threadIdx.x; bucket < shape.buckets; bucket += blockDim.x) {
      tile_counts[(group * kEmbedTiles + blockIdx.x) * shape.buckets + bucket] = sort.total(bucket);
    }
    __syncthreads();  // the counts may be written again
  }
}

// Sorts the tokens of a tile by bucket: `found` gets (slot, place), bucket after bucket and each in
// the order of places.
__global__ void __launch_bounds__(32 * kSortWarps)
    embed_bucket_kernel(const int32_t* tokens, const int32_t* tile_counts, int2* found,
                        int32_t* starts, EmbedShape shape) {
  __shared__ int counts[kSortWarps][kMaxKeys], bucket_starts[kMaxKeys];
  const Tile tile(shape);
  const int buckets = shape.buckets, slots = shape.slots, bits = __popc(buckets - 1);
  for (int64_t group = blockIdx.z; group < shape.groups; group += gridDim.z) {
    const int32_t* my_tokens = tokens + group * shape.tokens();
    int2* my_found = found + group * shape.tokens();
    int32_t* my_starts = starts + group * (int64_t{buckets} * slots + 1);
    const auto bucket_of = [&](int i) { return clamped(my_tokens[i], shape) & (buckets - 1); };
    BlockSort sort(counts, tile.first, tile.count);
    sort.count(buckets, bucket_of);

    // A tile's part of a bucket comes after the parts of the tiles before it.
    int before[kMaxKeys / (32 * kSortWarps)];
#pragma unroll
    for (int k = 0; k < kMaxKeys / (32 * kSortWarps); ++k) {
      const int bucket = threadIdx.x + k * blockDim.x;
      if (bucket >= buckets) break;
      int sum = 0;
#pragma unroll 16
      for (int t = 0; t < kEmbedTiles; ++t) {
        if (t == blockIdx.x) before[k] = sum;
        sum += tile_counts[(group * kEmbedTiles + t) * buckets + bucket];
      }
      bucket_starts[bucket] = sum;
    }
    __syncthreads();
    if (sort.warp == 0) exclusive_sums(bucket_starts, buckets, 0);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kMaxKeys / (32 * kSortWarps); ++k) {
      const int bucket = threadIdx.x + k * blockDim.x;
      if (bucket >= buckets) break;
      sort.place(bucket, bucket_starts[bucket] + before[k]);
      if (blockIdx.x == 0) my_starts[int64_t{bucket} * slots] = bucket_starts[bucket];
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) my_starts[int64_t{buckets} * slots] = shape.tokens();
    __syncthreads();
    sort.distribute(bucket_of, [&](int i, int target) {
      my_found[target] = make_int2(clamped(my_tokens[i], shape) >> bits, i);
    });
    __syncthreads();  // the counts may be written again
  }
}

// Sorts a bucket by slot.
__global__ void __launch_bounds__(32 * kSortWarps)
    embed_slot_kernel(const int2* found, int32_t* places, int32_t* starts, EmbedShape shape) {
  __shared__ int counts[kSortWarps][kMaxKeys], slot_starts[kMaxKeys];
  const int slots = shape.slots;
  for (int64_t group = blockIdx.z; group < shape.groups; group += gridDim.z) {
    const int2* my_found = found + group * shape.tokens();
    int32_t* my_places = places + group * shape.tokens();
    int32_t* my_starts = starts + group * (shape.buckets * slots + 1) + int64_t{blockIdx.x} * slots;
    const int first = my_starts[0], count = my_starts[slots] - first;
    const auto slot_of = [&](int i) { return my_found[i].x; };
    BlockSort sort(counts, first, count);
    sort.count(slots, slot_of);
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
      slot_starts[slot] = sort.total(slot);
    }
    __syncthreads();
    if (sort.warp == 0) exclusive_sums(slot_starts, slots, first);
    __syncthreads();
    for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
      sort.place(slot, slot_starts[slot]);
      if (slot > 0) my_starts[slot] = slot_starts[slot];
    }
    __syncthreads();
    sort.distribute(slot_of, [&](int i, int target) { my_places[target] = my_found[i].y; });
    __syncthreads();  // the counts may be written again
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
// slots they belong to.
constexpr int kRows = 4, kAhead = 4, kRowWarps = 4;
template <int kVector, typename T>
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
      if (slot < all_slots && token < shape.vocabulary) {
        sum.store(dtoken_table, group * shape.vocabulary + token);
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
  constexpr int kSequences = 8;
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
        const auto launch = [&](auto kernel, int64_t sequences, int64_t threads) {
          const int64_t tiles = view.groups * divide_up(view.sequences, sequences);
          const dim3 grid(view.length, std::min(tiles, kMaxBlocks), divide_up(units, threads));
          kernel<<<grid, threads, 0, stream>>>(tokens, token_table, position_table, out, view);
          return cudaGetLastError();
        };
        // A warp with eight rows; of few sequences, a block with one.
        if (view.sequences < kSequences) {
          return launch(embed_forward_kernel<1, kVector, T>, 1, std::min<int64_t>(units, 256));
        }
        return launch(embed_forward_kernel<kSequences, kVector, T>, kSequences, 32);
      },
      token_table, position_table, out);
}

template <typename T>
cudaError_t Embed<T>::backward(cudaStream_t stream, const int32_t* tokens, const T* dout,
                               T* dtoken_table, T* dposition_table, const EmbedWorkspace& workspace,
                               const EmbedShape& shape) {
  if (shape.groups * shape.width == 0) return cudaSuccess;
  if (shape.buckets > kMaxKeys || shape.slots > kMaxKeys) return cudaErrorInvalidValue;
  const auto groups = static_cast<unsigned>(std::min(shape.groups, kMaxBlocks));

  constexpr int kSortThreads = 32 * kSortWarps;
  int32_t *tile_counts = workspace.tile_counts, *places = workspace.places,
          *starts = workspace.starts;
  float* partial = workspace.partial;
  const auto found = reinterpret_cast<int2*>(workspace.pairs);
  const dim3 tile_grid(kEmbedTiles, 1, groups), bucket_grid(shape.buckets, 1, groups);
  embed_count_kernel<<<tile_grid, kSortThreads, 0, stream>>>(tokens, tile_counts, shape);
  embed_bucket_kernel<<<tile_grid, kSortThreads, 0, stream>>>(tokens, tile_counts, found, starts,
                                                              shape);
  embed_slot_kernel<<<bucket_grid, kSortThreads, 0, stream>>>(found, places, starts, shape);
  JAXLLM_RETURN_IF_ERROR(cudaGetLastError());

  return choose_vector<T>(
      shape.width,
      [&](auto vector) {
        constexpr int kVector = decltype(vector)::value;
        const unsigned slabs = divide_up(shape.width, 32 * kVector);
        if (shape.positions > 0) {
          embed_position_sums_kernel<kVector, T>
              <<<dim3(shape.positions, slabs, groups), dim3(32, kPositionWarps), 0, stream>>>(
                  dout, dposition_table, shape);
        }
        const int64_t chunks = shape.tokens() / kEmbedChunk;
        if (chunks > 0) {
          embed_chunk_sums_kernel<kVector, T><<<dim3(chunks, slabs, groups), 32, 0, stream>>>(
              tokens, places, dout, partial, shape);
        }
        const int64_t blocks = divide_up(shape.buckets * shape.slots, kRows * kRowWarps);
        embed_backward_kernel<kVector, T>
            <<<dim3(blocks, slabs, groups), dim3(32, kRowWarps), 0, stream>>>(
                starts, places, dout, partial, dtoken_table, shape);
        return cudaGetLastError();
      },
      dout, dtoken_table, dposition_table);
}

template struct Embed<float>;
template struct Embed<__nv_bfloat16>;
template struct Embed<__half>;

}  // namespace jaxllm
