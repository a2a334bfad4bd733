#include <cuda_runtime.h>

#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/vector.cuh"
#include "reduction/reduce.h"

namespace jaxllm {
namespace {

constexpr int kReduceThreads = 256;
constexpr int kReducePacks = 4;  // of each array, loads in flight in a thread
constexpr int kFinalThreads = 1024;

// A reduction: how it combines two values, and its identity.
struct Sum {
  static constexpr float kIdentity = 0.0f;
  __device__ __forceinline__ static float combine(float a, float b) { return a + b; }
};

struct Max {
  static constexpr float kIdentity = -INFINITY;
  __device__ __forceinline__ static float combine(float a, float b) { return max_or_nan(a, b); }
};

// A block reduce; every thread gets the result. To be called once in a kernel: a second call could
// write `scratch` while other threads read it.
template <class Reduction>
__device__ __forceinline__ float reduce_over_cta(float value) {
  __shared__ float scratch[32];
  const auto over_warp = [](float value) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      value = Reduction::combine(value, __shfl_xor_sync(kFullWarp, value, offset));
    }
    return value;
  };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  value = over_warp(value);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  return over_warp(lane < warps ? scratch[lane] : Reduction::kIdentity);
}

// A CTA reduces one chunk of one group: of x, or with kProduct of the products of x and y.
template <class Reduction, bool kProduct, typename T>
__global__ void __launch_bounds__(kReduceThreads)
    reduce_kernel(const T* x, const T* y, float* partial, int64_t partials, int64_t size,
                  int64_t chunk) {
  constexpr int kVector = kPackSize<T>;
  constexpr int kStep = kReduceThreads * kVector;
  const int64_t group = blockIdx.x / partials;
  int64_t i = blockIdx.x % partials * chunk;
  const int64_t end = min(i + chunk, size);
  x += group * size;
  if constexpr (kProduct) y += group * size;

  float values[kReducePacks];
#pragma unroll
  for (float& value : values) value = Reduction::kIdentity;
  const bool aligned = reinterpret_cast<std::uintptr_t>(x + i) % 16 == 0 &&
                       (!kProduct || reinterpret_cast<std::uintptr_t>(y + i) % 16 == 0);
  if (aligned) {
    for (; i + kReducePacks * kStep <= end; i += kReducePacks * kStep) {
      Pack<T> xs[kReducePacks], ys[kReducePacks];
#pragma unroll
      for (int p = 0; p < kReducePacks; ++p) {
        const int64_t first = i + p * kStep + threadIdx.x * kVector;
        xs[p] = load_streaming<kVector>(x + first);
        if constexpr (kProduct) ys[p] = load_streaming<kVector>(y + first);
      }
#pragma unroll
      for (int p = 0; p < kReducePacks; ++p) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const float element = kProduct ? xs[p][k] * ys[p][k] : xs[p][k];
          values[p] = Reduction::combine(values[p], element);
        }
      }
    }
  }
#pragma unroll 4
  for (i += threadIdx.x; i < end; i += kReduceThreads) {
    const float element = kProduct ? to_float(x[i]) * to_float(y[i]) : to_float(x[i]);
    values[0] = Reduction::combine(values[0], element);
  }
  const float value = reduce_over_cta<Reduction>(Reduction::combine(
      Reduction::combine(values[0], values[1]), Reduction::combine(values[2], values[3])));
  if (threadIdx.x == 0) partial[blockIdx.x] = value;
}

// CTA x reduces the partial results of group x.
template <class Reduction, typename T>
__global__ void __launch_bounds__(kFinalThreads)
    reduce_final_kernel(const float* partial, T* out, int64_t partials) {
  partial += blockIdx.x * partials;
  float value = Reduction::kIdentity;
#pragma unroll 8  // several loads in flight
  for (int64_t i = threadIdx.x; i < partials; i += kFinalThreads) {
    value = Reduction::combine(value, partial[i]);
  }
  value = reduce_over_cta<Reduction>(value);
  if (threadIdx.x == 0) out[blockIdx.x] = from_float<T>(value);
}

template <class Reduction, bool kProduct, typename T, typename Out>
cudaError_t reduce(cudaStream_t stream, const T* x, const T* y, Out* out, float* partial,
                   const ReduceShape& shape) {
  if (shape.groups == 0) return cudaSuccess;
  // Chunks of whole steps, so that all are aligned where the first is.
  constexpr int64_t kStep = kReducePacks * kReduceThreads * kPackSize<T>;
  const int64_t chunk = divide_up(divide_up(shape.size, shape.partials), kStep) * kStep;
  const int64_t ctas = shape.groups * shape.partials;
  JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, reduce_kernel<Reduction, kProduct, T>,
                                       {ctas, kReduceThreads}, x, y, partial, shape.partials,
                                       shape.size, chunk));
  return launch_kernel(stream, reduce_final_kernel<Reduction, Out>, {shape.groups, kFinalThreads},
                       partial, out, shape.partials);
}

}  // namespace

template <typename T>
cudaError_t Reduce<T>::sum(cudaStream_t stream, const T* x, float* out, float* partial,
                           const ReduceShape& shape) {
  return reduce<Sum, false>(stream, x, static_cast<const T*>(nullptr), out, partial, shape);
}

template <typename T>
cudaError_t Reduce<T>::max(cudaStream_t stream, const T* x, T* out, float* partial,
                           const ReduceShape& shape) {
  return reduce<Max, false>(stream, x, static_cast<const T*>(nullptr), out, partial, shape);
}

template <typename T>
cudaError_t Reduce<T>::dot(cudaStream_t stream, const T* a, const T* b, float* out, float* partial,
                           const ReduceShape& shape) {
  return reduce<Sum, true>(stream, a, b, out, partial, shape);
}

template struct Reduce<float>;
template struct Reduce<__nv_bfloat16>;
template struct Reduce<__half>;

}  // namespace jaxllm
