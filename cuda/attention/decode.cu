#include <algorithm>
#include <type_traits>

#include "attention/decode.h"
#include "attention/decode_arguments.cuh"
#include "attention/decode_long.cuh"
#include "attention/decode_merge.cuh"
#include "attention/decode_scores.cuh"
#include "attention/decode_step.cuh"
#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "common/fragment.cuh"
#include "common/launch.h"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "common/shared_needs.h"
#include "common/vector.cuh"
#include "common/widen.cuh"

namespace jaxllm {
namespace {

// Half of the multiprocessors read a long sequence as fast as all of them would, with a block of
// kMostWarps each, and a cluster then has all blocks of a head. Other blocks have fewer warps.
constexpr int kFewerWarps = 8;
constexpr int64_t kLongPart = 1024;  // tokens of a block
constexpr int kMostColumns = 256;    // of a head

// Keys or values of a step, by number: see `ask` below.
template <int kNumber>
using Item = std::integral_constant<int, kNumber>;

// The scores of 16 keys are a product of keys and queries; lane 4 r + c reads keys r and r + 8. In
// what order the columns of a head are multiplied does not matter, so the lane takes neighbouring
// ones, 16 bytes of them, where the tensor cores speak of columns 2c, 2c + 1, 2c + 8 and 2c + 9.
// The product of values and weights gives the columns of the result as rows, in any order likewise.
template <int kWarps, int kSlots, typename T, typename C, int kWidth>
__global__ void __launch_bounds__(32 * kWarps, kMostWarps / kWarps)
    decode_attention_kernel(const Arguments<T, C> a) {
  using Step = CacheStep<C, kWidth>;
  constexpr int kPerLoad = 16 / sizeof(C);         // columns of a key
  constexpr int kLoads = kWidth / (4 * kPerLoad);  // of a key, by each of four lanes
  constexpr int kPerLane = kWidth % (8 * kPerLoad) ? kPerLoad / 2 : kPerLoad;  // of a value
  constexpr int kParts = kWidth / (8 * kPerLane);  // of a value, by each of eight lanes
  constexpr int kWords = kPerLane * sizeof(C) / 4, kLaneBytes = kPerLane * sizeof(C);
  constexpr int kTokens = Step::kTokens, kProducts = Step::kProducts;
  static_assert(kLoads * 4 * kPerLoad == kWidth && kParts * 8 * kPerLane == kWidth);
  extern __shared__ __align__(128) char memory[];  // the warps' rings, and what they merge
  const Place place = place_of(a);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
  // To ask whether there is anything to wait for takes 0.1 us, of a kernel's 5 to 11.
  if (a.overlap || a.clusters > 1) launch_dependent_grids();
  if (a.overlap) wait_on_dependent_grids();

  // All warps ask for the length and the queries before any asks for keys: behind these they would
  // come a microsecond later.
  const int length = a.lengths[place.sequence];
  // Words of two columns of the queries.
  uint32_t q[kLoads][kPerLoad / 2] = {};
  if (r < place.heads) {
    const uint32_t head = place.sequence * a.heads + place.first_head + r;
    const T* row = a.q + uint64_t{head} * kWidth + c * kPerLoad;
    load_columns(q, row);
  }
  __syncthreads();

  const int64_t row_of_sequence = place.sequence * a.rows_of_sequence + place.kv_head;
  // The warps of all blocks take products' tokens in turn, as many of them as are a step.
  const int apart = a.splits * kWarps * kTokens, between = kProducts * apart;
  int first = (blockIdx.x * kWarps + warp) * kTokens;
  const Step key_step(a.k, a.k_scales, row_of_sequence, a.kv_heads);
  const Step value_step(a.v, a.v_scales, row_of_sequence, a.kv_heads);
  char* const ring = memory + warp * ring_bytes<C>(kWidth, kSlots);
  // The first keys do not wait for the length: the score of a key past it is dropped, whatever
  // stands there. A value past it would be multiplied by zero, and might be no number.
  if (first < a.length) key_step.fetch(ring, first, apart, a.length - 1);
  cp_async_commit();
  const int last = count_keys(a, length) - 1;
  // Asks for an item: 2 s are the keys of step s from the present one, 2 s + 1 its values.
  const auto ask = [&](auto item, char* slot) {
    constexpr int kItem = decltype(item)::value;
    const int start = first + kItem / 2 * between;
    if (start <= last) (kItem % 2 ? value_step : key_step).fetch(slot, start, apart, last);
    cp_async_commit();
  };
  ask(Item<1>{}, ring + Step::kSlotBytes);
  if constexpr (kSlots == 3) ask(Item<2>{}, ring + 2 * Step::kSlotBytes);
  Merge<kWarps, kWidth> merge(memory + kWarps * ring_bytes<C>(kWidth, kSlots), a.cluster,
                              place.heads, kWidth, a.share);

  // Where in a slot are chunks c and c + 4 of row r, and a value's part of rows 2c and 2c + 1; what
  // else the lane reads lies at constant distances from them.
  const int key_chunks[2] = {Step::offset(r, c * 16),
                             Step::offset(r, c * 16 + 64 % Step::kRowBytes)};
  const int value_parts[2] = {Step::offset(2 * c, r * kLaneBytes),
                              Step::offset(2 * c + 1, r * kLaneBytes)};

  // Of heads 2c and 2c + 1.
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
  float sums[kParts][kPerLane / 2][4] = {};
  char* slot = ring;
  const auto advance = [&] {
    slot += Step::kSlotBytes;
    if (slot == ring + kSlots * Step::kSlotBytes) slot = ring;
  };
  for (; first <= last; first += between) {
    cp_async_wait<kSlots - 1>();
    __syncwarp();
    // Of tokens r (the first two) and r + 8, heads 2c and 2c + 1.
    float scores[kProducts][4];
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
      const int token = first + n * apart;
      // Two sums, since a product waits for the one before it that adds to the same.
      float halves[2][4] = {};
      if (n == 0 || token <= last) {
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          uint32_t low[4], high[4];
          const char* row = slot + key_chunks[j % 2] + j / 2 * 128 + n * kTokens * Step::kRowBytes;
          read_words(low, row);
          read_words(high, row + 8 * Step::kRowBytes);
#pragma unroll
          for (int i = 0; i < kPerLoad; i += 4) {
            mma_m16n8k16<T>(halves[i / 4 % 2],
                            {neighbours<T, C>(low, i), neighbours<T, C>(high, i),
                             neighbours<T, C>(low, i + 2), neighbours<T, C>(high, i + 2)},
                            q[j][i / 2], q[j][i / 2 + 1]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = r + i / 2 * 8;
        float scale = a.scale * kLog2E;
        if constexpr (sizeof(C) == 1) scale *= Step::scales(slot)[n * kTokens + row];
        scores[n][i] = token + row <= last ? (halves[0][i] + halves[1][i]) * scale : -INFINITY;
      }
    }
    __syncwarp();
    ask(Item<kSlots>{}, slot);
    advance();

    float factor[2];
    weigh_scores(scores, largest, total, factor, [](float most) { return most; });
    if (__any_sync(kFullWarp, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
#pragma unroll
        for (int i = 0; i < kPerLane / 2; ++i) {
#pragma unroll
          for (int s = 0; s < 4; ++s) sums[p][i][s] *= factor[s % 2];
        }
      }
    }
    cp_async_wait<kSlots - 1>();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
      if (n > 0 && first + n * apart > last) break;
      uint32_t weights[2];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float scale = 1.0f;
        if constexpr (sizeof(C) == 1) scale = Step::scales(slot)[n * kTokens + r + 8 * t];
        weights[t] = movmatrix_transposed(
            pack_pair<T>(scores[n][2 * t] * scale, scores[n][2 * t + 1] * scale));
      }
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        uint32_t value[4][kWords];  // of tokens 2c, 2c + 1, 2c + 8, 2c + 9
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          read_words(value[t], slot + value_parts[t % 2] + p * 8 * kLaneBytes +
                                   (n * kTokens + t / 2 * 8) * Step::kRowBytes);
        }
#pragma unroll
        for (int i = 0; i < kPerLane / 2; ++i) {
          mma_m16n8k16<T>(
              sums[p][i],
              {across<T, C>(value[0], value[1], 2 * i), across<T, C>(value[0], value[1], 2 * i + 1),
               across<T, C>(value[2], value[3], 2 * i),
               across<T, C>(value[2], value[3], 2 * i + 1)},
              weights[0], weights[1]);
        }
      }
    }
    __syncwarp();
    ask(Item<kSlots + 1>{}, slot);
    advance();
  }

  sum_over_groups<4>(total);
  // The sums take the place of keys, some of which a warp without any has asked for nevertheless.
  cp_async_wait<0>();
  __syncwarp();
  float* const of_warp = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = 2 * c + h;
    if (head >= place.heads) continue;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < kPerLane / 2; i += 2) {
        const float *low = sums[p][i] + h, *high = sums[p][i + 1] + h;  // two columns of either
        store(of_warp + merge.place_of(head, (p * 8 + r) * kPerLane + 2 * i),
              Pack<float>::of({low[0], low[2], high[0], high[2]}));
      }
    }
    if (r == 0) merge.take_statistics(head, largest[h], total[h]);
  }
  merge.finish(memory, ring_bytes<C>(kWidth, kSlots), target_of(a, place));
}

// The same without tensor cores, for float32 and for heads of other widths: a lane has columns
// lane, lane + 32, ..., at most kColumns of them.
template <typename T, typename C, int kColumns>
__global__ void __launch_bounds__(32 * kFewerWarps)
    decode_attention_any_width_kernel(const Arguments<T, C> a) {
  constexpr int kWarps = kFewerWarps;
  extern __shared__ __align__(128) char memory[];
  const Place place = place_of(a);
  const size_t warp_bytes = sizeof(float) * a.most_heads * a.width;
  Merge<kWarps, 0> merge(memory + kWarps * warp_bytes, a.cluster, place.heads, a.width, a.share);
  launch_dependent_grids();
  wait_on_dependent_grids();
  const int length = count_keys(a, a.lengths[place.sequence]);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float q[kHeads][kColumns], sums[kHeads][kColumns] = {};
  float largest[kHeads], total[kHeads] = {};
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    largest[h] = -INFINITY;
    const T* row = a.q + (int64_t{place.sequence} * a.heads + place.first_head + h) * a.width;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane + 32 * i;
      q[h][i] = h < place.heads && column < a.width ? to_float(row[column]) : 0.0f;
    }
  }
  for (int token = blockIdx.x * kWarps + warp; token < length; token += a.splits * kWarps) {
    const int64_t at = (int64_t{place.sequence} * a.length + token) * a.kv_heads + place.kv_head;
    float key[kColumns], value[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane + 32 * i;
      const bool inside = column < a.width;
      key[i] = inside ? number(a.k[at * a.width + column]) : 0.0f;
      value[i] = inside ? number(a.v[at * a.width + column]) : 0.0f;
    }
    float k_scale = a.scale * kLog2E, v_scale = 1.0f;
    if constexpr (sizeof(C) == 1) {
      k_scale *= a.k_scales[at];
      v_scale = a.v_scales[at];
    }
    float scores[kHeads] = {};
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) scores[h] += q[h][i] * key[i];
    }
    sum_over_lanes<32>(scores);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float score = scores[h] * k_scale, found = fmaxf(largest[h], score);
      const float factor = exp2f(largest[h] - found), weight = exp2f(score - found);
      largest[h] = found;
      total[h] = total[h] * factor + weight;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        sums[h][i] = sums[h][i] * factor + weight * v_scale * value[i];
      }
    }
  }
  float* const of_warp = reinterpret_cast<float*>(memory + warp * warp_bytes);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= place.heads) continue;
    if (lane == 0) merge.take_statistics(h, largest[h], total[h]);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane + 32 * i;
      if (column < a.width) of_warp[merge.place_of(h, column)] = sums[h][i];
    }
  }
  merge.finish(memory, warp_bytes, target_of(a, place));
}

// Adds up the parts of a sequence that different clusters have read, a block a head of a sequence.
template <typename T>
__global__ void decode_attention_merge_kernel(float* partial, T* out, int parts, int width) {
  const int64_t row = blockIdx.x, rows = gridDim.x;
  launch_dependent_grids();
  wait_on_dependent_grids();
  const float* statistics = partial + parts * rows * width;
  float largest = -INFINITY, total = 0.0f;
  for (int p = 0; p < parts; ++p) largest = fmaxf(largest, statistics[(p * rows + row) * 2]);
  for (int p = 0; p < parts; ++p) {
    const float* part = statistics + (p * rows + row) * 2;
    total += weight_of_part(part[0], largest) * part[1];
  }
  for (int column = threadIdx.x; column < width; column += blockDim.x) {
    float sum = 0.0f;
    for (int p = 0; p < parts; ++p) {
      const float weight = weight_of_part(statistics[(p * rows + row) * 2], largest);
      sum += weight * partial[(p * rows + row) * width + column];
    }
    out[row * width + column] = from_float<T>(total == 0.0f ? 0.0f : sum / total);
  }
}

// The shared memory of a block of the tensor cores' kernel.
template <int kWarps, int kSlots, typename C, int kWidth>
constexpr size_t tensor_core_bytes(int heads, int cluster) {
  return kWarps * ring_bytes<C>(kWidth, kSlots) +
         Merge<kWarps, kWidth>::bytes(cluster, heads, kWidth);
}

// That of the kernel without tensor cores.
constexpr size_t any_width_bytes(int heads, int cluster, int64_t width) {
  return sizeof(float) * kFewerWarps * heads * width +
         Merge<kFewerWarps, 0>::bytes(cluster, heads, width);
}

// The least that a GPU must have: what the smallest blocks take with all their heads, and without
// clusters, which share what they merge.
const SharedNeed kNeedOfTensorCores(
    "decode_attention",
    std::max(tensor_core_bytes<kFewerWarps, kFewerSlots, __nv_bfloat16, 128>(kHeads, 1),
             tensor_core_bytes<kFewerWarps, kFewerSlots, int8_t, 128>(kHeads, 1)));
const SharedNeed kNeedOfAnyWidth("decode_attention_any_width",
                                 any_width_bytes(kHeads, 1, kMostColumns));

// How a kernel's splits are cut into clusters, the largest that there is room for; a cluster's size
// is a power of two that divides them. `bytes(size)` is the shared memory of a block.
template <class Kernel, class Bytes>
cudaError_t choose_cluster(Kernel* kernel, int threads, int64_t splits, Bytes bytes, int* size) {
  KernelImage image;
  JAXLLM_RETURN_IF_ERROR(image.read(kernel));
  *size = 1;
  if (!image.has_clusters()) return cudaSuccess;
  while (*size < kMaxCluster && splits % (2 * *size) == 0) *size *= 2;
  // A part of a GPU may have fewer SMs together than a cluster wants.
  for (; *size > 1; *size /= 2) {
    int clusters = 0;
    JAXLLM_RETURN_IF_ERROR(find_resident_clusters(kernel, *size, threads, bytes(*size), &clusters));
    if (clusters > 0) break;
  }
  return cudaSuccess;
}

}  // namespace

template <typename T, typename C>
cudaError_t CachedAttention<T, C>::run(cudaStream_t stream, const T* q, const C* k, const C* v,
                                       const float* k_scales, const float* v_scales,
                                       const int32_t* lengths, float scale, T* out, float* partial,
                                       DecodeSizes sizes, int64_t splits) {
  const int64_t batch = sizes.batch, width = sizes.width;
  if (batch * sizes.heads * width == 0) return cudaSuccess;
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(limits.read());

  Arguments<T, C> arguments = {};
  arguments.q = q, arguments.k = k, arguments.v = v;
  arguments.k_scales = k_scales, arguments.v_scales = v_scales;
  arguments.lengths = lengths, arguments.scale = scale;
  arguments.out = out, arguments.partial = partial;
  arguments.heads = sizes.heads, arguments.kv_heads = sizes.kv_heads;
  arguments.length = sizes.length, arguments.width = width;
  arguments.group = sizes.heads / sizes.kv_heads;
  arguments.head_blocks = divide_up(arguments.group, kHeads);
  arguments.most_heads = std::min(arguments.group, kHeads);
  arguments.rows_of_sequence = sizes.length * sizes.kv_heads;
  arguments.splits = splits, arguments.added = sizes.added;
  arguments.overlap = sizes.overlap;

  // A block for each split, for eight query heads of a key head, and for each sequence; the splits
  // are clusters of `cluster` blocks.
  const auto with_cluster = [&](auto kernel, int warps, int cluster, size_t bytes) {
    arguments.cluster = cluster;
    arguments.clusters = splits / cluster;
    arguments.share = share_of_block(width, cluster);
    Launch launch;
    launch.grid = dim3(splits, sizes.kv_heads * arguments.head_blocks, batch);
    launch.block = dim3(32 * warps);
    launch.shared = bytes;
    launch.cluster = cluster;
    launch.overlap = sizes.overlap;
    return launch_kernel(stream, kernel, launch, arguments);
  };
  const auto with = [&](auto kernel, int warps, auto bytes) {
    int cluster = 1;
    JAXLLM_RETURN_IF_ERROR(choose_cluster(kernel, 32 * warps, splits, bytes, &cluster));
    return with_cluster(kernel, warps, cluster, bytes(cluster));
  };
  const auto any_width = [&] {
    const auto bytes = [&](int cluster) {
      return any_width_bytes(arguments.most_heads, cluster, width);
    };
    if (width <= 64) return with(decode_attention_any_width_kernel<T, C, 2>, kFewerWarps, bytes);
    if (width <= 128) return with(decode_attention_any_width_kernel<T, C, 4>, kFewerWarps, bytes);
    return with(decode_attention_any_width_kernel<T, C, 8>, kFewerWarps, bytes);
  };
  cudaError_t status;
  if constexpr (sizeof(T) == 2) {
    const auto with_shape = [&](auto kernel_slots, auto kernel_warps, auto kernel_width) {
      constexpr int kSlots = decltype(kernel_slots)::value, kWarps = decltype(kernel_warps)::value;
      constexpr int kWidth = decltype(kernel_width)::value;
      static_assert(kSlots < kMostSlots ||
                    tensor_core_bytes<kWarps, kSlots, C, kWidth>(kHeads, 1) <= kBytesForMostSlots);
      const auto bytes = [&](int cluster) {
        return tensor_core_bytes<kWarps, kSlots, C, kWidth>(arguments.most_heads, cluster);
      };
      return with(decode_attention_kernel<kWarps, kSlots, T, C, kWidth>, kWarps, bytes);
    };
    const auto with_width = [&](auto kernel_width) {
      constexpr int kWidth = decltype(kernel_width)::value;
      constexpr std::integral_constant<int, kMostWarps> most_warps;
      constexpr std::integral_constant<int, kFewerWarps> fewer_warps;
      constexpr std::integral_constant<int, kMostSlots> most_slots;
      constexpr std::integral_constant<int, kFewerSlots> fewer_slots;
      const bool has_most_slots = limits.shared_bytes >= kBytesForMostSlots;
      // Blocks that have a multiprocessor each, and a long part of the cache. Clusters do not find
      // room on every last multiprocessor.
      const int64_t blocks = batch * sizes.kv_heads * arguments.head_blocks * splits;
      if (4 * blocks > 3 * limits.multiprocessors || sizes.length < splits * kLongPart) {
        return has_most_slots ? with_shape(most_slots, fewer_warps, kernel_width)
                              : with_shape(fewer_slots, fewer_warps, kernel_width);
      }
      if constexpr (kWidth * sizeof(C) >= 128) {
        using Shape = hopper::LongShape<C, kWidth>;
        constexpr auto kernel = hopper::decode_attention_long_kernel<T, C, kWidth>;
        constexpr size_t kBytes = sizeof(hopper::LongShared<Shape>);
        static_assert(kBytes <= kBytesForMostSlots);
        if (has_most_slots && arguments.group <= Shape::kHeads) {
          int cluster = 1;
          JAXLLM_RETURN_IF_ERROR(choose_cluster(
              kernel, Shape::kThreads, splits, [](int) { return kBytes; }, &cluster));
          if (cluster == Shape::kBlocks)
            return with_cluster(kernel, Shape::kWarps, cluster, kBytes);
        }
      }
      if (has_most_slots) return with_shape(most_slots, most_warps, kernel_width);
      constexpr int64_t kBytes = tensor_core_bytes<kMostWarps, kFewerSlots, C, kWidth>(kHeads, 1);
      return kBytes <= limits.shared_bytes ? with_shape(fewer_slots, most_warps, kernel_width)
                                           : with_shape(fewer_slots, fewer_warps, kernel_width);
    };
    const bool aligned = aligned_16(q, k, v);
    if (aligned && width == 64) {
      status = with_width(std::integral_constant<int, 64>{});
    } else if (aligned && width == 128) {
      status = with_width(std::integral_constant<int, 128>{});
    } else {
      status = any_width();
    }
  } else {
    status = any_width();
  }
  JAXLLM_RETURN_IF_ERROR(status);
  if (arguments.clusters == 1) return cudaSuccess;
  Launch merge;
  merge.grid = dim3(batch * sizes.heads);
  merge.block = dim3(128);
  merge.overlap = true;
  return launch_kernel(stream, decode_attention_merge_kernel<T>, merge, partial, out,
                       arguments.clusters, static_cast<int>(width));
}

template struct CachedAttention<float, float>;
template struct CachedAttention<float, int8_t>;
template struct CachedAttention<__nv_bfloat16, __nv_bfloat16>;
template struct CachedAttention<__nv_bfloat16, int8_t>;
template struct CachedAttention<__half, __half>;
template struct CachedAttention<__half, int8_t>;

}  // namespace jaxllm
