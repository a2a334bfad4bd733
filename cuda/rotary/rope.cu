#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/head_order.cuh"
#include "common/launch.h"
#include "common/vector.cuh"
#include "rotary/rope.h"

namespace jaxllm {
namespace {

// Where the row of a head is. Heads are numbered through: the key heads come after the query heads.
template <typename T>
struct Heads {
  HeadRows<const T> q, k;
  HeadRows<T> q_out, k_out;
  int64_t q_heads, k_heads;
  HeadOrder q_order, q_out_order;

  __device__ __forceinline__ int64_t count() const { return q_heads + k_heads; }

  __device__ __forceinline__ const T* source(int64_t row, int64_t head, int64_t width) const {
    return head < q_heads ? q.data + row * q.row_stride + q_order.place(head) * width
                          : k.data + row * k.row_stride + (head - q_heads) * width;
  }

  __device__ __forceinline__ T* target(int64_t row, int64_t head, int64_t width) const {
    return head < q_heads ? q_out.data + row * q_out.row_stride + q_out_order.place(head) * width
                          : k_out.data + row * k_out.row_stride + (head - q_heads) * width;
  }
};

// Loads kCount neighbouring entries of a table, which every sequence loads again.
template <int kCount>
__device__ __forceinline__ void load_table(float* values, const float* table) {
  if constexpr (kCount % 4 == 0) {
    const auto pack = load_cached<kCount>(table);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = pack[i];
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = __ldg(table + i);
  }
}

// A CTA rotates all heads of one position. A thread has two packs of a head, at columns `first` and
// `second`, and their table entries. With these it goes through heads threadIdx.y, threadIdx.y +
// blockDim.y, ..., with the loads of kUnroll heads in flight. The packs are `pairs` columns apart:
//
//   half-split    first: side a of kVector pairs       second: side b of the same pairs
//   interleaved   first: kVector / 2 pairs (a b a b)    second: kVector / 2 other pairs
//
// So accesses coalesce in both layouts.
template <bool kInterleaved, int kUnroll, typename T>
__global__ void rope_kernel(Heads<T> heads, const float* cos, const float* sin, float sign,
                            RopeShape shape) {
  constexpr int kVector = kPackSize<T>;
  const int pairs = shape.pairs, width = shape.width;
  int first = threadIdx.x * kVector, second = first + pairs;
  const bool rotates = first < pairs;
  if (!rotates) {  // packs of the columns that are copied
    first += pairs;
    second = first + (width - 2 * pairs) / 2;
  }
  for (int64_t sequence = blockIdx.y; sequence < shape.sequences; sequence += gridDim.y) {
    float cosines[kVector], sines[kVector];
    if (rotates) {
      const int64_t group = shape.tables == 1 ? 0 : sequence * shape.tables / shape.sequences;
      const int64_t row = (group * shape.length + blockIdx.x) * pairs;
      if constexpr (kInterleaved) {
        constexpr int kHalf = kVector / 2;
        load_table<kHalf>(cosines, cos + row + first / 2);
        load_table<kHalf>(cosines + kHalf, cos + row + second / 2);
        load_table<kHalf>(sines, sin + row + first / 2);
        load_table<kHalf>(sines + kHalf, sin + row + second / 2);
      } else {
        load_table<kVector>(cosines, cos + row + first);
        load_table<kVector>(sines, sin + row + first);
      }
    }
    const int64_t row = sequence * shape.length + blockIdx.x;
    for (int64_t head = threadIdx.y; head < heads.count(); head += kUnroll * blockDim.y) {
      Pack<T> packs[kUnroll][2];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (head + u * blockDim.y >= heads.count()) continue;
        const T* source = heads.source(row, head + u * blockDim.y, width);
        packs[u][0] = load_streaming<kVector>(source + first);
        packs[u][1] = load_streaming<kVector>(source + second);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (head + u * blockDim.y >= heads.count()) continue;
        if (rotates) {
          float values[2][kVector];
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            // Pair i: the pack and the elements of its sides a and b.
            const int pack = 2 * i / kVector, element = 2 * i % kVector;
            float& out_a = kInterleaved ? values[pack][element] : values[0][i];
            float& out_b = kInterleaved ? values[pack][element + 1] : values[1][i];
            const float a = kInterleaved ? packs[u][pack][element] : packs[u][0][i];
            const float b = kInterleaved ? packs[u][pack][element + 1] : packs[u][1][i];
            out_a = a * cosines[i] - b * (sign * sines[i]);
            out_b = b * cosines[i] + a * (sign * sines[i]);
          }
          packs[u][0] = Pack<T>::of(values[0]);
          packs[u][1] = Pack<T>::of(values[1]);
        }
        T* target = heads.target(row, head + u * blockDim.y, width);
        store_streaming(target + first, packs[u][0]);
        store_streaming(target + second, packs[u][1]);
      }
    }
  }
}

// Heads of any width and alignment: the threads along x go through the pairs, then through the
// columns that are copied.
template <typename T>
__global__ void rope_any_width_kernel(Heads<T> heads, const float* cos, const float* sin,
                                      float sign, bool interleaved, RopeShape shape) {
  for (int64_t sequence = blockIdx.y; sequence < shape.sequences; sequence += gridDim.y) {
    const int64_t group = sequence * shape.tables / shape.sequences;
    const int64_t table_row = (group * shape.length + blockIdx.x) * shape.pairs;
    const int64_t row = sequence * shape.length + blockIdx.x;
    for (int64_t head = threadIdx.y; head < heads.count(); head += blockDim.y) {
      const T* source = heads.source(row, head, shape.width);
      T* target = heads.target(row, head, shape.width);
      for (int64_t i = threadIdx.x; i < shape.pairs; i += blockDim.x) {
        const int64_t first = interleaved ? 2 * i : i;
        const int64_t second = interleaved ? first + 1 : i + shape.pairs;
        const float cosine = cos[table_row + i], sine = sign * sin[table_row + i];
        const float a = to_float(source[first]), b = to_float(source[second]);
        target[first] = from_float<T>(a * cosine - b * sine);
        target[second] = from_float<T>(b * cosine + a * sine);
      }
      for (int64_t i = 2 * shape.pairs + threadIdx.x; i < shape.width; i += blockDim.x) {
        target[i] = source[i];
      }
    }
  }
}

}  // namespace

template <typename T>
cudaError_t Rope<T>::rotate(cudaStream_t stream, HeadRows<const T> q, HeadRows<const T> k,
                            const float* cos, const float* sin, HeadRows<T> q_out,
                            HeadRows<T> k_out, bool interleaved, bool inverse,
                            const RopeShape& shape) {
  constexpr int kVector = kPackSize<T>;
  constexpr int kUnroll = 4;
  const int64_t count = shape.q_heads + shape.k_heads;
  if (shape.sequences * shape.length * count * shape.width == 0) return cudaSuccess;
  const auto order_of = [&](int group) {
    return HeadOrder{group, static_cast<int>(shape.q_heads / group)};
  };
  const Heads<T> heads{q,
                       k,
                       q_out,
                       k_out,
                       shape.q_heads,
                       shape.k_heads,
                       order_of(shape.q_group),
                       order_of(shape.q_out_group)};
  const float sign = inverse ? -1.0f : 1.0f;

  // A CTA for each position and sequence; CTAs loop over sequences where a grid does not hold all.
  const dim3 grid(shape.length, std::min<int64_t>(shape.sequences, 65535));
  const int64_t columns = divide_up(shape.width, 2 * kVector);  // threads that share a head
  const auto rows_fit = [](const auto&... rows) {
    return ((rows.row_stride % kVector == 0 && aligned_16(rows.data)) && ...);
  };
  const bool packed = shape.pairs % kVector == 0 && shape.width % (2 * kVector) == 0 &&
                      columns <= 256 && rows_fit(q, k, q_out, k_out) && aligned_16(cos, sin);
  if (packed) {
    const int64_t slots = std::min(divide_up(count, kUnroll), 256 / columns);
    const dim3 block(columns, slots);
    const auto kernel =
        interleaved ? rope_kernel<true, kUnroll, T> : rope_kernel<false, kUnroll, T>;
    return launch_kernel(stream, kernel, {grid, block}, heads, cos, sin, sign, shape);
  }
  const dim3 block(32, std::min<int64_t>(count, 8));
  return launch_kernel(stream, rope_any_width_kernel<T>, {grid, block}, heads, cos, sin, sign,
                       interleaved, shape);
}

template struct Rope<float>;
template struct Rope<__nv_bfloat16>;
template struct Rope<__half>;

}  // namespace jaxllm
