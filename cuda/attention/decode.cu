#include <algorithm>
#include <type_traits>

#include "attention/decode.h"
#include "attention/decode_merge.cuh"
#include "attention/decode_step.cuh"
#include "common/dependent_launch.cuh"
#include "common/fragments.cuh"
#include "common/launch.h"
#include "common/mma.cuh"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm {
namespace {

// Half of the multiprocessors read a long sequence as fast as all of them would, with a block of
// kMostWarps each, and a cluster then has all blocks of a head. Other blocks have fewer warps.
constexpr int kFewerWarps = 8;
constexpr int64_t kLongPart = 1024;  // tokens of a block

template <typename T, typename C>
struct Arguments {
  const T* q;
  const C *k, *v;
  const float *k_scales, *v_scales;
  const int32_t* lengths;
  float scale;
  T* out;
  float* partial;
  int heads, kv_heads, length, width;
  int group;        // query heads of a key head
  int head_blocks;  // blocks for them
  int splits;       // blocks along the cache
  int added;        // tokens in the cache beyond `lengths`
};

// What a block works on; `length` keys are there in all.
struct Place {
  int sequence, kv_head, first_head, heads, length;
};

template <class Arguments>
__device__ __forceinline__ Place place_of(const Arguments& a) {
  Place place;
  place.sequence = blockIdx.z;
  const int length = a.lengths[place.sequence];
  const bool one_block = a.head_blocks == 1;  // then nobody waits for a division
  place.kv_head = one_block ? blockIdx.y : blockIdx.y / a.head_blocks;
  const int first = one_block ? 0 : blockIdx.y % a.head_blocks * kHeads;
  place.first_head = place.kv_head * a.group + first;
  place.heads = min(kHeads, a.group - first);
  place.length = min(max(length + a.added, 0), a.length);
  return place;
}

// Eight or sixteen bytes of shared memory.
template <int kWords>
__device__ __forceinline__ void read_words(uint32_t (&words)[kWords], const char* source) {
  if constexpr (kWords == 4) {
    const uint4 found = *reinterpret_cast<const uint4*>(source);
    words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
  } else {
    const uint2 found = *reinterpret_cast<const uint2*>(source);
    words[0] = found.x, words[1] = found.y;
  }
}

// The bytes of shared memory of a warp: its step, and in the end its sums.
template <typename C>
__host__ __device__ constexpr size_t warp_bytes(int width) {
  const size_t sums = sizeof(float) * kHeads * width, step = step_bytes<C>(width);
  return ((sums > step ? sums : step) + 15) / 16 * 16;
}

template <typename T, typename C>
__device__ __forceinline__ MergeTarget<T> target_of(const Arguments<T, C>& a, const Place& place,
                                                    const BlockCluster& cluster) {
  const int blocks = cluster.blocks();
  const int64_t first_row = int64_t{place.sequence} * a.heads + place.first_head;
  return {a.out,
          a.partial,
          a.splits / blocks,
          static_cast<int>(blockIdx.x) / blocks,
          first_row,
          int64_t{gridDim.z} * a.heads};
}

// The scores of 16 keys are a product of keys and queries; lane 4 r + c reads keys r and r + 8. In
// what order the columns of a head are multiplied does not matter, so the lane takes neighbouring
// ones, 16 bytes of them, where the tensor cores speak of columns 2c, 2c + 1, 2c + 8 and 2c + 9.
// The product of values and weights gives the columns of the result as rows, in any order likewise.
template <int kWarps, typename T, typename C, int kWidth>
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
  extern __shared__ __align__(128) char memory[];
  MergeMemory& shared = *reinterpret_cast<MergeMemory*>(memory);
  const BlockCluster cluster;
  cluster.arrive();
  start_next_kernel();
  wait_for_last_kernel();

  const Place place = place_of(a);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
  const int64_t row_of_sequence = int64_t{place.sequence} * a.length * a.kv_heads + place.kv_head;
  const int last = place.length - 1;

  // The warps of all blocks take products' tokens in turn, as many of them as are a step.
  const int apart = a.splits * kWarps * kTokens, between = kProducts * apart;
  int first = (blockIdx.x * kWarps + warp) * kTokens;
  char* const of_warps = memory + merge_bytes(kWidth);
  char* const keys = of_warps + warp * warp_bytes<C>(kWidth);
  char* const values = keys + Step::kBytes;
  float* const k_scales = reinterpret_cast<float*>(values + Step::kBytes);
  float* const v_scales = k_scales + Step::kRows;
  const Step key_step(a.k, a.k_scales, row_of_sequence, a.kv_heads, keys, k_scales);
  const Step value_step(a.v, a.v_scales, row_of_sequence, a.kv_heads, values, v_scales);
  if (first <= last) key_step.fetch(first, apart, last);
  commit_copies();
  if (first <= last) value_step.fetch(first, apart, last);
  commit_copies();

  // Words of two columns of the queries.
  uint32_t q[kLoads][kPerLoad / 2] = {};
  if (r < place.heads) {
    const T* row =
        a.q + (int64_t{place.sequence} * a.heads + place.first_head + r) * kWidth + c * kPerLoad;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int i = 0; i < kPerLoad / 8; ++i) {
        const uint4 words = *reinterpret_cast<const uint4*>(row + j * 4 * kPerLoad + i * 8);
        q[j][4 * i] = words.x, q[j][4 * i + 1] = words.y;
        q[j][4 * i + 2] = words.z, q[j][4 * i + 3] = words.w;
      }
    }
  }

  // Chunks c and c + 4 of row r, and a value's part of rows 2c and 2c + 1; what else the lane reads
  // lies at constant distances from them.
  const char* const key_chunks[2] = {keys + Step::offset(r, c * 16),
                                     keys + Step::offset(r, c * 16 + 64 % Step::kRowBytes)};
  const char* const value_parts[2] = {values + Step::offset(2 * c, r * kLaneBytes),
                                      values + Step::offset(2 * c + 1, r * kLaneBytes)};

  // Of heads 2c and 2c + 1.
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
  float sums[kParts][kPerLane / 2][4] = {};
  for (; first <= last; first += between) {
    const bool continues = first + between <= last;
    wait_for_older_copies<1>();
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
          const char* row = key_chunks[j % 2] + j / 2 * 128 + n * kTokens * Step::kRowBytes;
          read_words(low, row);
          read_words(high, row + 8 * Step::kRowBytes);
#pragma unroll
          for (int i = 0; i < kPerLoad; i += 4) {
            multiply_16x8x16<T>(halves[i / 4 % 2], neighbours<T, C>(low, i),
                                neighbours<T, C>(high, i), neighbours<T, C>(low, i + 2),
                                neighbours<T, C>(high, i + 2), q[j][i / 2], q[j][i / 2 + 1]);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = r + i / 2 * 8;
        float scale = a.scale * kLog2E;
        if constexpr (sizeof(C) == 1) scale *= k_scales[n * kTokens + row];
        scores[n][i] = token + row <= last ? (halves[0][i] + halves[1][i]) * scale : -INFINITY;
      }
    }
    __syncwarp();
    if (continues) key_step.fetch(first + between, apart, last);
    commit_copies();

    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float found = largest[h];
#pragma unroll
      for (int n = 0; n < kProducts; ++n) {
        found = fmaxf(found, fmaxf(scores[n][h], scores[n][2 + h]));
      }
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        found = fmaxf(found, __shfl_xor_sync(kFullWarp, found, offset));
      }
      factor[h] = exp2_fast(largest[h] - found);
      largest[h] = found;
      total[h] *= factor[h];
#pragma unroll
      for (int n = 0; n < kProducts; ++n) {
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          scores[n][2 * t + h] = exp2_fast(scores[n][2 * t + h] - found);
          total[h] += scores[n][2 * t + h];
        }
      }
    }
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
    wait_for_older_copies<1>();
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kProducts; ++n) {
      if (n > 0 && first + n * apart > last) break;
      uint32_t weights[2];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        float scale = 1.0f;
        if constexpr (sizeof(C) == 1) scale = v_scales[n * kTokens + r + 8 * t];
        weights[t] =
            transpose_8x8(pack_pair<T>(scores[n][2 * t] * scale, scores[n][2 * t + 1] * scale));
      }
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        uint32_t value[4][kWords];  // of tokens 2c, 2c + 1, 2c + 8, 2c + 9
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          read_words(value[t], value_parts[t % 2] + p * 8 * kLaneBytes +
                                   (n * kTokens + t / 2 * 8) * Step::kRowBytes);
        }
#pragma unroll
        for (int i = 0; i < kPerLane / 2; ++i) {
          multiply_16x8x16<T>(sums[p][i], across<T, C>(value[0], value[1], 2 * i),
                              across<T, C>(value[0], value[1], 2 * i + 1),
                              across<T, C>(value[2], value[3], 2 * i),
                              across<T, C>(value[2], value[3], 2 * i + 1), weights[0], weights[1]);
        }
      }
    }
    __syncwarp();
    if (continues) value_step.fetch(first + between, apart, last);
    commit_copies();
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      total[h] += __shfl_xor_sync(kFullWarp, total[h], offset);
    }
    if (r == 0) shared.largest[2 * c + h][warp] = largest[h];
  }
  __syncthreads();
  float* const of_warp = reinterpret_cast<float*>(keys);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = 2 * c + h;
    const float weight = weight_in_block<kWarps>(shared, head, warp);
    if (r == 0) shared.total[head][warp] = total[h] * weight;
    if (head >= place.heads) continue;
    float* const of_head = of_warp + head * kWidth;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < kPerLane / 2; i += 2) {
        const int column = (p * 8 + r) * kPerLane + 2 * i;
        const float *low = sums[p][i] + h, *high = sums[p][i + 1] + h;  // two columns of either
        store(of_head + 4 * pack_of_sums(head, column),
              Pack<float>::of(
                  {low[0] * weight, low[2] * weight, high[0] * weight, high[2] * weight}));
      }
    }
  }
  merge_parts<kWarps, kWidth>(shared, of_warps, warp_bytes<C>(kWidth), cluster,
                              target_of(a, place, cluster), place.heads, kWidth);
}

// The same without tensor cores, for float32 and for heads of other widths: a lane has columns
// lane, lane + 32, ..., at most kColumns of them.
template <typename T, typename C, int kColumns>
__global__ void __launch_bounds__(32 * kFewerWarps)
    decode_attention_any_width_kernel(const Arguments<T, C> a) {
  constexpr int kWarps = kFewerWarps;
  extern __shared__ __align__(128) char memory[];
  MergeMemory& shared = *reinterpret_cast<MergeMemory*>(memory);
  const BlockCluster cluster;
  cluster.arrive();
  start_next_kernel();
  wait_for_last_kernel();
  const Place place = place_of(a);
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
  for (int token = blockIdx.x * kWarps + warp; token < place.length; token += a.splits * kWarps) {
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
  if (lane == 0) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) shared.largest[h][warp] = largest[h];
  }
  __syncthreads();
  char* const of_warps = memory + merge_bytes(a.width);
  const size_t bytes = warp_bytes<C>(a.width);
  float* const of_warp = reinterpret_cast<float*>(of_warps + warp * bytes);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const float weight = weight_in_block<kWarps>(shared, h, warp);
    if (lane == 0) shared.total[h][warp] = total[h] * weight;
    if (h >= place.heads) continue;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane + 32 * i;
      if (column < a.width) of_warp[h * a.width + column] = sums[h][i] * weight;
    }
  }
  merge_parts<kWarps, 0>(shared, of_warps, bytes, cluster, target_of(a, place, cluster),
                         place.heads, a.width);
}

// Adds up the parts of a sequence that different clusters have read, a block a head of a sequence.
template <typename T>
__global__ void decode_attention_merge_kernel(float* partial, T* out, int parts, int width) {
  const int64_t row = blockIdx.x, rows = gridDim.x;
  start_next_kernel();
  wait_for_last_kernel();
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

// A block of `warps` warps for each split, for eight query heads of a key head, and for each
// sequence; the splits are clusters of `cluster` blocks.
template <class Kernel, typename T, typename C>
cudaError_t launch(cudaStream_t stream, Kernel kernel, const Arguments<T, C>& arguments,
                   int64_t batch, int warps, int cluster, bool overlap) {
  const size_t bytes = merge_bytes(arguments.width) + warps * warp_bytes<C>(arguments.width);
  JAXLLM_RETURN_IF_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const dim3 grid(arguments.splits, arguments.kv_heads * arguments.head_blocks, batch);
  return launch_kernel(stream, kernel, grid, dim3(32 * warps), bytes, cluster, overlap, arguments);
}

}  // namespace

template <typename T, typename C>
cudaError_t CachedAttention<T, C>::run(cudaStream_t stream, const T* q, const C* k, const C* v,
                                       const float* k_scales, const float* v_scales,
                                       const int32_t* lengths, float scale, T* out, float* partial,
                                       DecodeSizes sizes, int64_t splits) {
  const int64_t batch = sizes.batch, width = sizes.width;
  if (batch * sizes.heads * width == 0) return cudaSuccess;
  int device, major;
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(limits.read());
  JAXLLM_RETURN_IF_ERROR(cudaGetDevice(&device));
  JAXLLM_RETURN_IF_ERROR(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  int cluster = 1;
  while (major >= 9 && cluster < kMaxCluster && splits % (2 * cluster) == 0) cluster *= 2;

  Arguments<T, C> arguments = {};
  arguments.q = q, arguments.k = k, arguments.v = v;
  arguments.k_scales = k_scales, arguments.v_scales = v_scales;
  arguments.lengths = lengths, arguments.scale = scale;
  arguments.out = out, arguments.partial = partial;
  arguments.heads = sizes.heads, arguments.kv_heads = sizes.kv_heads;
  arguments.length = sizes.length, arguments.width = width;
  arguments.group = sizes.heads / sizes.kv_heads;
  arguments.head_blocks = divide_up(arguments.group, kHeads);
  arguments.splits = splits, arguments.added = sizes.added;

  const auto with = [&](auto kernel, int warps) {
    return launch(stream, kernel, arguments, batch, warps, cluster, sizes.overlap);
  };
  const auto any_width = [&] {
    if (width <= 64) return with(decode_attention_any_width_kernel<T, C, 2>, kFewerWarps);
    if (width <= 128) return with(decode_attention_any_width_kernel<T, C, 4>, kFewerWarps);
    return with(decode_attention_any_width_kernel<T, C, 8>, kFewerWarps);
  };
  cudaError_t status;
  if constexpr (sizeof(T) == 2) {
    // Blocks of more warps where each has a multiprocessor of its own, memory enough, and a long
    // part of the cache. Clusters do not find room on every last multiprocessor.
    const int64_t blocks = batch * sizes.kv_heads * arguments.head_blocks * splits;
    const auto bytes = static_cast<int64_t>(merge_bytes(width) + kMostWarps * warp_bytes<C>(width));
    const bool many_warps = 4 * blocks <= 3 * limits.multiprocessors &&
                            bytes <= limits.shared_bytes && sizes.length >= splits * kLongPart;
    const auto with_width = [&](auto kernel_width) {
      constexpr int kWidth = decltype(kernel_width)::value;
      return many_warps ? with(decode_attention_kernel<kMostWarps, T, C, kWidth>, kMostWarps)
                        : with(decode_attention_kernel<kFewerWarps, T, C, kWidth>, kFewerWarps);
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
  if (splits > cluster) {
    JAXLLM_RETURN_IF_ERROR(launch_kernel(
        stream, decode_attention_merge_kernel<T>, dim3(batch * sizes.heads), dim3(128), 0, 1, true,
        partial, out, static_cast<int>(splits / cluster), static_cast<int>(width)));
  }
  return cudaGetLastError();
}

template struct CachedAttention<float, float>;
template struct CachedAttention<float, int8_t>;
template struct CachedAttention<__nv_bfloat16, __nv_bfloat16>;
template struct CachedAttention<__nv_bfloat16, int8_t>;
template struct CachedAttention<__half, __half>;
template struct CachedAttention<__half, int8_t>;

}  // namespace jaxllm
