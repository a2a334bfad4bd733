#include <cooperative_groups.h>

#include <algorithm>

#include "attention/decode.h"
#include "attention/decode_fragments.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm {
namespace {

constexpr int kHeads = 8;    // query heads that a warp serves with one read of their keys
constexpr int kTokens = 16;  // of the cache, at a time
#ifndef DECODE_WARPS
#define DECODE_WARPS 8
#endif
constexpr int kWarps = DECODE_WARPS;
constexpr int kThreads = 32 * kWarps;
constexpr float kLog2e = 1.44269504f;

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
  int head_blocks;  // blocks for the query heads of one key head
  int splits;       // blocks along the cache
};

// What a block works on.
struct Place {
  int sequence, kv_head, first_head, heads;
  int first_chunk, last_chunk, length;
};

template <class Arguments>
__device__ Place place_of(const Arguments& a) {
  Place place;
  place.sequence = blockIdx.z;
  place.kv_head = blockIdx.y / a.head_blocks;
  const int group = a.heads / a.kv_heads, first = blockIdx.y % a.head_blocks * kHeads;
  place.first_head = place.kv_head * group + first;
  place.heads = min(kHeads, group - first);
  // A sequence's own length is split, so that all blocks have a part of it.
  place.length = min(max(a.lengths[place.sequence], 0), a.length);
  const int chunks = (place.length + kTokens - 1) / kTokens;
  const int per_split = (chunks + a.splits - 1) / a.splits;
  place.first_chunk = blockIdx.x * per_split;
  place.last_chunk = min(place.first_chunk + per_split, chunks);
  return place;
}

// The softmax of some keys so far, of each head: the largest score (of base 2), the sum of the
// weights beside it, and the sum of the weighted values.
struct Shared {
  float largest[kWarps][kHeads], total[kWarps][kHeads];
  float block_largest[kHeads], block_total[kHeads];
  float sums[1];  // [kWarps][kHeads][width]

  __device__ float* of_warp(int warp, int width) { return sums + warp * kHeads * width; }
};

__host__ __device__ constexpr size_t shared_bytes(int width) {
  return sizeof(Shared) + sizeof(float) * kWarps * kHeads * width;
}

// The weight of a part of the softmax in the whole; a part without keys has none.
__device__ __forceinline__ float weight_of(float largest, float largest_of_all) {
  return largest == -INFINITY ? 0.0f : exp2f(largest - largest_of_all);
}

// Adds up what the warps of a block have, into block_largest, block_total and the first warp's
// sums.
__device__ void merge_warps(Shared& shared, int heads, int width) {
  __syncthreads();
  for (int i = threadIdx.x; i < heads * width; i += kThreads) {
    const int head = i / width;
    float largest = -INFINITY;
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, shared.largest[w][head]);
    float total = 0.0f, sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) {
      const float weight = weight_of(shared.largest[w][head], largest);
      total += weight * shared.total[w][head];
      sum += weight * shared.of_warp(w, width)[i];
    }
    shared.sums[i] = sum;
    if (i % width == 0) {
      shared.block_largest[head] = largest;
      shared.block_total[head] = total;
    }
  }
}

// Adds up what the blocks of a cluster have, each block a part of the columns, and writes it.
template <class Arguments>
__device__ void merge_blocks(Shared& shared, const Arguments& a, const Place& place) {
#if __CUDA_ARCH__ >= 900
  namespace cg = cooperative_groups;
  const cg::cluster_group cluster = cg::this_cluster();
  const int blocks = cluster.num_blocks(), rank = cluster.block_rank();
  cluster.sync();
#else
  const int blocks = 1, rank = 0;
  __syncthreads();
#endif
  const int parts = a.splits / blocks, part = blockIdx.x / blocks;
  const int64_t first_row = int64_t{place.sequence} * a.heads + place.first_head;
  const int64_t rows = int64_t{gridDim.z} * a.heads;
  for (int i = rank * kThreads + threadIdx.x; i < place.heads * a.width; i += blocks * kThreads) {
    const int head = i / a.width;
    float largest = -INFINITY, total = 0.0f, sum = 0.0f;
    const auto block = [&](int k) {
#if __CUDA_ARCH__ >= 900
      return cluster.map_shared_rank(&shared, k);
#else
      return &shared;
#endif
    };
    for (int k = 0; k < blocks; ++k) largest = fmaxf(largest, block(k)->block_largest[head]);
    for (int k = 0; k < blocks; ++k) {
      const Shared& other = *block(k);
      const float weight = weight_of(other.block_largest[head], largest);
      total += weight * other.block_total[head];
      sum += weight * other.sums[i];
    }
    const int64_t row = first_row + head;
    const int column = i % a.width;
    if (parts == 1) {
      a.out[row * a.width + column] =
          from_float<std::remove_reference_t<decltype(*a.out)>>(total == 0.0f ? 0.0f : sum / total);
    } else {
      a.partial[(part * rows + row) * a.width + column] = sum;
      float* statistics = a.partial + parts * rows * a.width + (part * rows + row) * 2;
      if (column == 0) statistics[0] = largest, statistics[1] = total;
    }
  }
#if __CUDA_ARCH__ >= 900
  cluster.sync();  // nobody leaves while others read its memory
#endif
}

// The scores of 16 keys are a product of keys and queries; lane 4 r + c loads keys r and r + 8. In
// what order the columns of a head are multiplied does not matter, so the lane takes neighbouring
// ones, 16 bytes of them, where the tensor cores speak of columns 2c, 2c + 1, 2c + 8 and 2c + 9.
// The product of values and weights gives the columns of the result as rows, in any order likewise.
template <typename T, typename C, int kWidth>
__global__ void __launch_bounds__(kThreads, 16 / kWarps)
    decode_attention_kernel(const Arguments<T, C> a) {
  constexpr int kPerLoad = 16 / sizeof(C);         // columns of a key
  constexpr int kLoads = kWidth / (4 * kPerLoad);  // of a key, by each of four lanes
  constexpr int kPerLane = kWidth % (8 * kPerLoad) ? kPerLoad / 2 : kPerLoad;  // of a value
  constexpr int kParts = kWidth / (8 * kPerLane);  // of a value, by each of eight lanes
  constexpr int kWords = kPerLane * sizeof(C) / 4;
  static_assert(kLoads * 4 * kPerLoad == kWidth && kParts * 8 * kPerLane == kWidth);
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);

  const Place place = place_of(a);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
  const int64_t stride = int64_t{a.kv_heads} * kWidth;  // from one token to the next
  const int64_t start = int64_t{place.sequence} * a.length * stride + place.kv_head * kWidth;

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

  // Of heads 2c and 2c + 1.
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
  float sums[kParts][kPerLane / 2][4] = {};
  for (int chunk = place.first_chunk + warp; chunk < place.last_chunk; chunk += kWarps) {
    const int token = chunk * kTokens, last = place.length - 1;
    uint32_t keys[2][kLoads][4];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const C* row = a.k + start + min(token + r + 8 * t, last) * stride + c * kPerLoad;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int4 words = __ldcs(reinterpret_cast<const int4*>(row + j * 4 * kPerLoad));
        keys[t][j][0] = words.x, keys[t][j][1] = words.y;
        keys[t][j][2] = words.z, keys[t][j][3] = words.w;
      }
    }
    uint32_t values[4][kParts][kWords];  // of tokens 2c, 2c + 1, 2c + 8, 2c + 9
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const int at = min(token + 2 * c + t % 2 + t / 2 * 8, last);
      const C* row = a.v + start + at * stride + r * kPerLane;
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        if constexpr (kWords == 4) {
          const int4 words = __ldcs(reinterpret_cast<const int4*>(row + p * 8 * kPerLane));
          values[t][p][0] = words.x, values[t][p][1] = words.y;
          values[t][p][2] = words.z, values[t][p][3] = words.w;
        } else {
          const int2 words = __ldcs(reinterpret_cast<const int2*>(row + p * 8 * kPerLane));
          values[t][p][0] = words.x, values[t][p][1] = words.y;
        }
      }
    }
    float k_scale[2] = {a.scale * kLog2e, a.scale * kLog2e}, v_scale[2] = {1.0f, 1.0f};
    if constexpr (sizeof(C) == 1) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int64_t at =
            (int64_t{place.sequence} * a.length + min(token + r + 8 * t, last)) * a.kv_heads +
            place.kv_head;
        k_scale[t] *= a.k_scales[at];
        v_scale[t] = a.v_scales[at];
      }
    }

    // Of tokens r (the first two) and r + 8, heads 2c and 2c + 1.
    float scores[4] = {};
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int i = 0; i < kPerLoad; i += 4) {
        multiply_16x8x16<T>(scores, neighbours<T, C>(keys[0][j], i),
                            neighbours<T, C>(keys[1][j], i), neighbours<T, C>(keys[0][j], i + 2),
                            neighbours<T, C>(keys[1][j], i + 2), q[j][i / 2], q[j][i / 2 + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[i] = token + r + i / 2 * 8 <= last ? scores[i] * k_scale[i / 2] : -INFINITY;
    }
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float found = fmaxf(scores[h], scores[2 + h]);
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) {
        found = fmaxf(found, __shfl_xor_sync(kFullWarp, found, offset));
      }
      found = fmaxf(found, largest[h]);
      factor[h] = exp2f(largest[h] - found);
      largest[h] = found;
#pragma unroll
      for (int t = 0; t < 2; ++t) scores[2 * t + h] = exp2f(scores[2 * t + h] - found);
      total[h] = total[h] * factor[h] + scores[h] + scores[2 + h];
    }
    const uint32_t w0 = transpose_8x8(pack_pair<T>(scores[0] * v_scale[0], scores[1] * v_scale[0]));
    const uint32_t w1 = transpose_8x8(pack_pair<T>(scores[2] * v_scale[1], scores[3] * v_scale[1]));
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < kPerLane / 2; ++i) {
        float (&sum)[4] = sums[p][i];
#pragma unroll
        for (int s = 0; s < 4; ++s) sum[s] *= factor[s % 2];
        multiply_16x8x16<T>(sum, across<T, C>(values[0][p], values[1][p], 2 * i),
                            across<T, C>(values[0][p], values[1][p], 2 * i + 1),
                            across<T, C>(values[2][p], values[3][p], 2 * i),
                            across<T, C>(values[2][p], values[3][p], 2 * i + 1), w0, w1);
      }
    }
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      total[h] += __shfl_xor_sync(kFullWarp, total[h], offset);
    }
    const int head = 2 * c + h;
    if (r == 0) {
      shared.largest[warp][head] = largest[h];
      shared.total[warp][head] = total[h];
    }
    if (head >= place.heads) continue;
    float* target = shared.of_warp(warp, kWidth) + head * kWidth + r * kPerLane;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int i = 0; i < kPerLane / 2; ++i) {
        *reinterpret_cast<float2*>(target + p * 8 * kPerLane + 2 * i) =
            make_float2(sums[p][i][h], sums[p][i][2 + h]);
      }
    }
  }
  merge_warps(shared, place.heads, kWidth);
  merge_blocks(shared, a, place);
}

template <typename C>
__device__ __forceinline__ float number(C x) {
  if constexpr (sizeof(C) == 1) {
    return x;
  } else {
    return to_float(x);
  }
}

// The same without tensor cores, for float32 and for heads of other widths: a lane has columns
// lane, lane + 32, ..., at most kColumns of them.
template <typename T, typename C, int kColumns>
__global__ void __launch_bounds__(kThreads)
    decode_attention_any_width_kernel(const Arguments<T, C> a) {
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
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
  const int first = place.first_chunk * kTokens;
  const int last = min(place.last_chunk * kTokens, place.length);
  for (int token = first + warp; token < last; token += kWarps) {
    const int64_t at = (int64_t{place.sequence} * a.length + token) * a.kv_heads + place.kv_head;
    float key[kColumns], value[kColumns];
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane + 32 * i;
      const bool inside = column < a.width;
      key[i] = inside ? number(a.k[at * a.width + column]) : 0.0f;
      value[i] = inside ? number(a.v[at * a.width + column]) : 0.0f;
    }
    float k_scale = a.scale * kLog2e, v_scale = 1.0f;
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
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (lane == 0) {
      shared.largest[warp][h] = largest[h];
      shared.total[warp][h] = total[h];
    }
    if (h >= place.heads) continue;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int column = lane + 32 * i;
      if (column < a.width) shared.of_warp(warp, a.width)[h * a.width + column] = sums[h][i];
    }
  }
  merge_warps(shared, place.heads, a.width);
  merge_blocks(shared, a, place);
}

// Adds up the parts of a sequence that different clusters have read, a block a head of a sequence.
template <typename T>
__global__ void decode_attention_merge_kernel(const float* partial, T* out, int parts, int width) {
  const int64_t row = blockIdx.x, rows = gridDim.x;
  const float* statistics = partial + parts * rows * width;
  float largest = -INFINITY, total = 0.0f;
  for (int p = 0; p < parts; ++p) largest = fmaxf(largest, statistics[(p * rows + row) * 2]);
  for (int p = 0; p < parts; ++p) {
    const float* part = statistics + (p * rows + row) * 2;
    total += weight_of(part[0], largest) * part[1];
  }
  for (int column = threadIdx.x; column < width; column += blockDim.x) {
    float sum = 0.0f;
    for (int p = 0; p < parts; ++p) {
      const float weight = weight_of(statistics[(p * rows + row) * 2], largest);
      sum += weight * partial[(p * rows + row) * width + column];
    }
    out[row * width + column] = from_float<T>(total == 0.0f ? 0.0f : sum / total);
  }
}

// A block for each split, for eight query heads of a key head, and for each sequence; the splits
// are clusters of `cluster` blocks.
template <class Kernel, typename T, typename C>
cudaError_t launch(cudaStream_t stream, Kernel kernel, Arguments<T, C> arguments, int64_t batch,
                   int cluster) {
  const size_t bytes = shared_bytes(arguments.width);
  JAXLLM_RETURN_IF_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (cluster > 8) {
    JAXLLM_RETURN_IF_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(arguments.splits, arguments.kv_heads * arguments.head_blocks, batch);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments);
}

}  // namespace

#ifndef DECODE_MAX_CLUSTER
#define DECODE_MAX_CLUSTER 16
#endif

template <typename T, typename C>
cudaError_t CachedAttention<T, C>::run(cudaStream_t stream, const T* q, const C* k, const C* v,
                                       const float* k_scales, const float* v_scales,
                                       const int32_t* lengths, float scale, T* out, float* partial,
                                       DecodeSizes sizes, int64_t splits) {
  const int64_t batch = sizes.batch, width = sizes.width;
  if (batch * sizes.heads * width == 0) return cudaSuccess;
  int device, major;
  JAXLLM_RETURN_IF_ERROR(cudaGetDevice(&device));
  JAXLLM_RETURN_IF_ERROR(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  int cluster = 1;
  while (major >= 9 && cluster < DECODE_MAX_CLUSTER && splits % (2 * cluster) == 0) cluster *= 2;

  Arguments<T, C> arguments = {};
  arguments.q = q, arguments.k = k, arguments.v = v;
  arguments.k_scales = k_scales, arguments.v_scales = v_scales;
  arguments.lengths = lengths, arguments.scale = scale;
  arguments.out = out, arguments.partial = partial;
  arguments.heads = sizes.heads, arguments.kv_heads = sizes.kv_heads;
  arguments.length = sizes.length, arguments.width = width;
  arguments.head_blocks = divide_up(sizes.heads / sizes.kv_heads, kHeads);
  arguments.splits = splits;

  const auto with = [&](auto kernel) { return launch(stream, kernel, arguments, batch, cluster); };
  const auto any_width = [&] {
    if (width <= 64) return with(decode_attention_any_width_kernel<T, C, 2>);
    if (width <= 128) return with(decode_attention_any_width_kernel<T, C, 4>);
    return with(decode_attention_any_width_kernel<T, C, 8>);
  };
  cudaError_t status;
  if constexpr (sizeof(T) == 2) {
    const bool aligned = aligned_16(q, k, v);
    if (aligned && width == 64) {
      status = with(decode_attention_kernel<T, C, 64>);
    } else if (aligned && width == 128) {
      status = with(decode_attention_kernel<T, C, 128>);
    } else {
      status = any_width();
    }
  } else {
    status = any_width();
  }
  JAXLLM_RETURN_IF_ERROR(status);
  if (splits > cluster) {
    decode_attention_merge_kernel<<<batch * sizes.heads, 128, 0, stream>>>(partial, out,
                                                                           splits / cluster, width);
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
