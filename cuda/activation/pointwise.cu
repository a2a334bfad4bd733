#include "activation/functions.cuh"
#include "activation/pointwise.h"
#include "common/elementwise.cuh"

namespace jaxllm {
namespace {

struct ReluForward {
  __device__ __forceinline__ void operator()(const float (&in)[1], float (&out)[1]) const {
    out[0] = in[0] < 0.0f ? 0.0f : in[0];  // NaN remains
  }
};

struct ReluBackward {
  __device__ __forceinline__ void operator()(const float (&in)[2], float (&out)[1]) const {
    out[0] = in[0] > 0.0f ? in[1] : 0.0f;
  }
};

struct SigmoidForward {
  __device__ __forceinline__ void operator()(const float (&in)[1], float (&out)[1]) const {
    out[0] = logistic(in[0]);
  }
};

struct SigmoidBackward {
  __device__ __forceinline__ void operator()(const float (&in)[2], float (&out)[1]) const {
    const float s = logistic(in[0]);
    out[0] = in[1] * s * (1.0f - s);
  }
};

// Arrays of one shape count as one row.
template <class Op, typename T>
cudaError_t apply(cudaStream_t stream, Op op, const T* a, T* out, int64_t size) {
  return elementwise(stream, op, Arrays<const T, 1>{StridedRows<const T>{a}},
                     Arrays<T, 1>{StridedRows<T>{out}}, 1, 1, size);
}

template <class Op, typename T>
cudaError_t apply(cudaStream_t stream, Op op, const T* a, const T* b, T* out, int64_t size) {
  return elementwise(stream, op,
                     Arrays<const T, 2>{StridedRows<const T>{a}, StridedRows<const T>{b}},
                     Arrays<T, 1>{StridedRows<T>{out}}, 1, 1, size);
}

}  // namespace

template <typename T>
cudaError_t Gelu<T>::forward(cudaStream_t stream, const T* x, T* out, int64_t size) {
  return apply(stream, GeluForward{}, x, out, size);
}

template <typename T>
cudaError_t Gelu<T>::backward(cudaStream_t stream, const T* x, const T* dout, T* dx, int64_t size) {
  return apply(stream, GeluBackward{}, x, dout, dx, size);
}

template <typename T>
cudaError_t Relu<T>::forward(cudaStream_t stream, const T* x, T* out, int64_t size) {
  return apply(stream, ReluForward{}, x, out, size);
}

template <typename T>
cudaError_t Relu<T>::backward(cudaStream_t stream, const T* x, const T* dout, T* dx, int64_t size) {
  return apply(stream, ReluBackward{}, x, dout, dx, size);
}

template <typename T>
cudaError_t Sigmoid<T>::forward(cudaStream_t stream, const T* x, T* out, int64_t size) {
  return apply(stream, SigmoidForward{}, x, out, size);
}

template <typename T>
cudaError_t Sigmoid<T>::backward(cudaStream_t stream, const T* x, const T* dout, T* dx,
                                 int64_t size) {
  return apply(stream, SigmoidBackward{}, x, dout, dx, size);
}

template <typename T>
cudaError_t Add<T>::forward(cudaStream_t stream, const T* x, const T* y, T* out, int64_t size) {
  return apply(stream, Sum{}, x, y, out, size);
}

template struct Gelu<float>;
template struct Gelu<__nv_bfloat16>;
template struct Gelu<__half>;
template struct Relu<float>;
template struct Relu<__nv_bfloat16>;
template struct Relu<__half>;
template struct Sigmoid<float>;
template struct Sigmoid<__nv_bfloat16>;
template struct Sigmoid<__half>;
template struct Add<float>;
template struct Add<__nv_bfloat16>;
template struct Add<__half>;

}  // namespace jaxllm
