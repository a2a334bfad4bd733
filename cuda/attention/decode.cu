#include <cooperative_groups.h>

#include <algorithm>

#include "attention/decode.h"
#include "common/dependent_launch.cuh"
#include "common/fragments.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm {
namespace {

constexpr int kHeads = 8;    // query heads that a warp serves with one read of their keys
constexpr int kTokens = 16;  // of the cache, at a time
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxCluster = 16;
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
  int added;        // tokens in the cache beyond `lengths`
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
  place.length = min(max(a.lengths[place.sequence] + a.added, 0), a.length);
  const int chunks = (place.length + kTokens - 1) / kTokens;
  const int per_split = (chunks + a.splits - 1) / a.splits;
  place.first_chunk = blockIdx.x * per_split;
  place.last_chunk = min(place.first_chunk + per_split, chunks);
  return place;
}

// The softmax of some keys so far, of each head: the largest score (of base 2), the sum of the
// weights beside it, and the sum of the weighted values. What a block's warps have is added up, and
// each block of a cluster then sends every other one a share of its columns, to add up and write.
struct Shared {
  float largest[kWarps][kHeads], total[kWarps][kHeads], weight[kWarps][kHeads];
  float received_largest[kMaxCluster][kHeads], received_total[kMaxCluster][kHeads];
  float received_weight[kMaxCluster][kHeads], all_total[kHeads], all_largest[kHeads];
  float sums[1];  // [kWarps][kHeads][width], then what is received

  __device__ float* of_warp(int warp, int width) { return sums + warp * kHeads * width; }
  __device__ float* received(int width) { return sums + kWarps * kHeads * width; }
};

__host__ __device__ constexpr size_t shared_bytes(int width) {
  return sizeof(Shared) + sizeof(float) * ((kWarps + 1) * kHeads * width + kMaxCluster);
}

// The weight of a part of the softmax in the whole; a part without keys has none.
__device__ __forceinline__ float weight_of(float largest, float largest_of_all) {
  return largest == -INFINITY ? 0.0f : exp2f(largest - largest_of_all);
}

// A cluster of blocks, or one block by itself where there are no clusters.
struct Cluster {
#if __CUDA_ARCH__ >= 900
  cooperative_groups::cluster_group group = cooperative_groups::this_cluster();
  __device__ int blocks() const { return group.num_blocks(); }
  __device__ int rank() const { return group.block_rank(); }
  __device__ void arrive() const { group.barrier_arrive(); }
  __device__ void wait() const { group.barrier_wait(); }
  __device__ Shared* memory_of(Shared& mine, int rank) const {
    return group.map_shared_rank(&mine, rank);
  }
#else
  __device__ int blocks() const { return 1; }
  __device__ int rank() const { return 0; }
  __device__ void arrive() const {}
  __device__ void wait() const { __syncthreads(); }
  __device__ Shared* memory_of(Shared& mine, int) const { return &mine; }
#endif
};

// Adds up what the warps of a block have, and what the blocks of a cluster have, and writes it. The
// cluster's blocks have arrived once already, to say that they run.
template <class Arguments>
__device__ void merge(Shared& shared, const Cluster& cluster, const Arguments& a,
                      const Place& place) {
  const int blocks = cluster.blocks(), rank = cluster.rank(), count = place.heads * a.width;
  const int share = (count + blocks - 1) / blocks, thread = threadIdx.x;
  __syncthreads();
  if (thread < kWarps * kHeads) {
    const int warp = thread / kHeads, head = thread % kHeads;
    float largest = -INFINITY;
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, shared.largest[w][head]);
    shared.weight[warp][head] = weight_of(shared.largest[warp][head], largest);
  }
  cluster.wait();
  __syncthreads();
  for (int i = thread; i < blocks * kHeads; i += kThreads) {
    const int head = i % kHeads;
    float largest = -INFINITY, total = 0.0f;
    for (int w = 0; w < kWarps; ++w) {
      largest = fmaxf(largest, shared.largest[w][head]);
      total += shared.weight[w][head] * shared.total[w][head];
    }
    Shared& other = *cluster.memory_of(shared, i / kHeads);
    other.received_largest[rank][head] = largest;
    other.received_total[rank][head] = total;
  }
  for (int i = thread; i < count; i += kThreads) {
    const int head = i / a.width;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      sum += shared.weight[w][head] * shared.of_warp(w, a.width)[i];
    }
    cluster.memory_of(shared, i / share)->received(a.width)[rank * share + i % share] = sum;
  }
  cluster.arrive();
  cluster.wait();
  if (thread < kHeads) {
    float largest = -INFINITY, total = 0.0f;
    for (int k = 0; k < blocks; ++k) largest = fmaxf(largest, shared.received_largest[k][thread]);
    for (int k = 0; k < blocks; ++k) {
      const float weight = weight_of(shared.received_largest[k][thread], largest);
      shared.received_weight[k][thread] = weight;
      total += weight * shared.received_total[k][thread];
    }
    shared.all_largest[thread] = largest;
    shared.all_total[thread] = total;
  }
  __syncthreads();
  const int parts = a.splits / blocks, part = blockIdx.x / blocks;
  const int64_t first_row = int64_t{place.sequence} * a.heads + place.first_head;
  const int64_t rows = int64_t{gridDim.z} * a.heads;
  for (int i = rank * share + thread; i < min((rank + 1) * share, count); i += kThreads) {
    const int head = i / a.width, column = i % a.width;
    const float* received = shared.received(a.width) + i - rank * share;
    float sum = 0.0f;
    for (int k = 0; k < blocks; ++k) sum += shared.received_weight[k][head] * received[k * share];
    const float total = shared.all_total[head];
    const int64_t row = first_row + head;
    if (parts == 1) {
      using T = std::remove_reference_t<decltype(*a.out)>;
      a.out[row * a.width + column] = from_float<T>(total == 0.0f ? 0.0f : sum / total);
    } else {
      a.partial[(part * rows + row) * a.width + column] = sum;
      if (column == 0) {
        float* statistics = a.partial + parts * rows * a.width + (part * rows + row) * 2;
        statistics[0] = shared.all_largest[head];
        statistics[1] = total;
      }
    }
  }
}

// Eight or sixteen bytes that are used once.
template <int kWords, typename C>
__device__ __forceinline__ void load_words(uint32_t (&words)[kWords], const C* source) {
  if constexpr (kWords == 4) {
    const int4 found = __ldcs(reinterpret_cast<const int4*>(source));
    words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
  } else {
    const int2 found = __ldcs(reinterpret_cast<const int2*>(source));
    words[0] = found.x, words[1] = found.y;
  }
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
  const Cluster cluster;
  cluster.arrive();
  start_next_kernel();
  wait_for_last_kernel();

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
  // Short keys are read two chunks at a time, to have as many bytes on the way.
  constexpr int kChunks = kWidth * sizeof(C) <= 128 ? 2 : 1;
  const int last = min(place.length, place.last_chunk * kTokens) - 1;
  for (int chunk = place.first_chunk + warp; chunk < place.last_chunk; chunk += kWarps * kChunks) {
    uint32_t keys[kChunks][2][kLoads][4];
    uint32_t values[kChunks][4][kParts][kWords];  // of tokens 2c, 2c + 1, 2c + 8, 2c + 9
    float k_scale[kChunks][2], v_scale[kChunks][2];
#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      const int token = (chunk + n * kWarps) * kTokens;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const C* row = a.k + start + min(token + r + 8 * t, last) * stride + c * kPerLoad;
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          load_words(keys[n][t][j], row + j * 4 * kPerLoad);
        }
        k_scale[n][t] = a.scale * kLog2e;
        v_scale[n][t] = 1.0f;
        if constexpr (sizeof(C) == 1) {
          const int64_t at =
              (int64_t{place.sequence} * a.length + min(token + r + 8 * t, last)) * a.kv_heads +
              place.kv_head;
          k_scale[n][t] *= a.k_scales[at];
          v_scale[n][t] = a.v_scales[at];
        }
      }
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const int at = min(token + 2 * c + t % 2 + t / 2 * 8, last);
        const C* row = a.v + start + at * stride + r * kPerLane;
#pragma unroll
        for (int p = 0; p < kParts; ++p) load_words(values[n][t][p], row + p * 8 * kPerLane);
      }
    }

#pragma unroll
    for (int n = 0; n < kChunks; ++n) {
      const int token = (chunk + n * kWarps) * kTokens;
      // Of tokens r (the first two) and r + 8, heads 2c and 2c + 1.
      float scores[4] = {};
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const uint32_t *low = keys[n][0][j], *high = keys[n][1][j];
#pragma unroll
        for (int i = 0; i < kPerLoad; i += 4) {
          multiply_16x8x16<T>(scores, neighbours<T, C>(low, i), neighbours<T, C>(high, i),
                              neighbours<T, C>(low, i + 2), neighbours<T, C>(high, i + 2),
                              q[j][i / 2], q[j][i / 2 + 1]);
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool seen = token + r + i / 2 * 8 <= last;
        scores[i] = seen ? scores[i] * k_scale[n][i / 2] : -INFINITY;
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
      uint32_t weights[2];
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        weights[t] = transpose_8x8(
            pack_pair<T>(scores[2 * t] * v_scale[n][t], scores[2 * t + 1] * v_scale[n][t]));
      }
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const auto& value = values[n];
#pragma unroll
        for (int i = 0; i < kPerLane / 2; ++i) {
          float (&sum)[4] = sums[p][i];
#pragma unroll
          for (int s = 0; s < 4; ++s) sum[s] *= factor[s % 2];
          multiply_16x8x16<T>(sum, across<T, C>(value[0][p], value[1][p], 2 * i),
                              across<T, C>(value[0][p], value[1][p], 2 * i + 1),
                              across<T, C>(value[2][p], value[3][p], 2 * i),
                              across<T, C>(value[2][p], value[3][p], 2 * i + 1), weights[0],
                              weights[1]);
        }
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
  merge(shared, cluster, a, place);
}

// The same without tensor cores, for float32 and for heads of other widths: a lane has columns
// lane, lane + 32, ..., at most kColumns of them.
template <typename T, typename C, int kColumns>
__global__ void __launch_bounds__(kThreads)
    decode_attention_any_width_kernel(const Arguments<T, C> a) {
  extern __shared__ __align__(16) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const Cluster cluster;
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
  merge(shared, cluster, a, place);
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
cudaError_t launch(cudaStream_t stream, Kernel kernel, const Arguments<T, C>& arguments,
                   int64_t batch, int cluster, bool overlap) {
  const size_t bytes = shared_bytes(arguments.width);
  JAXLLM_RETURN_IF_ERROR(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (cluster > 8) {
    JAXLLM_RETURN_IF_ERROR(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  }
  const dim3 grid(arguments.splits, arguments.kv_heads * arguments.head_blocks, batch);
  return launch_kernel(stream, kernel, grid, dim3(kThreads), bytes, cluster, overlap, arguments);
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
  arguments.head_blocks = divide_up(sizes.heads / sizes.kv_heads, kHeads);
  arguments.splits = splits, arguments.added = sizes.added;

  const auto with = [&](auto kernel) {
    return launch(stream, kernel, arguments, batch, cluster, sizes.overlap);
  };
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
