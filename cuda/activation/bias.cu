#include <algorithm>

#include "activation/bias.h"
#include "activation/functions.cuh"
#include "common/column_sum.cuh"
#include "common/dependent_launch.cuh"
#include "common/elementwise.cuh"

namespace jaxllm {
namespace {

struct GeluOfSum {
  __device__ __forceinline__ void operator()(const float (&in)[2], float (&out)[1]) const {
    out[0] = gelu(in[0] + in[1]);
  }
};

template <class Op, typename T>
cudaError_t launch_forward(cudaStream_t stream, Op op, const T* x, const T* bias, T* out,
                           int64_t groups, int64_t rows, int64_t width) {
  const StridedRows<const T> xs{x, width, rows * width}, biases{bias, 0, width};
  return elementwise(stream, op, Arrays<const T, 2>{xs, biases},
                     Arrays<T, 1>{StridedRows<T>{out, width, rows * width}}, groups, rows, width);
}

// The shape of the persistent backward kernel, measured on an H200: a warp has kRows rows at a
// time, and an SM kCtas CTAs. With a second wave of CTAs the memory would be half idle at the end.
template <bool kGelu>
struct BackwardShape {
  static constexpr int kWarps = 4;
  static constexpr int kRows = kGelu ? 2 : 4;
  static constexpr int kCtas = kGelu ? 8 : 12;
};

// CTA (x, y, z) adds up the columns of 32 neighbouring packs over every gridDim.y-th tile of rows
// of group z, and stores the sums as one partial row.
template <bool kGelu, typename T, class Shape = BackwardShape<kGelu>>
__global__ void __launch_bounds__(Shape::kWarps * 32, Shape::kCtas)
    bias_backward_kernel(const T* x, const T* bias, const T* dout, T* dx, float* partial,
                         int64_t rows, int64_t width, int64_t partial_rows) {
  constexpr int kWarps = Shape::kWarps, kRows = Shape::kRows;
  constexpr int kVector = kPackSize<T>;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = (int64_t{blockIdx.x} * 32 + lane) * kVector;
  const bool is_column = column < width;
  const int64_t group_offset = blockIdx.z * rows * width + column;

  Pack<T> biases = {};
  if (kGelu && is_column) biases = load_cached<kVector>(bias + blockIdx.z * width + column);
  float sums[kVector] = {};
  const int64_t stride = int64_t{gridDim.y} * kWarps * kRows;
  for (int64_t row = (int64_t{blockIdx.y} * kWarps + warp) * kRows; row < rows; row += stride) {
    Pack<T> xs[kRows] = {}, douts[kRows] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (!is_column || row + r >= rows) continue;
      const int64_t offset = group_offset + (row + r) * width;
      if constexpr (kGelu) xs[r] = load_streaming<kVector>(x + offset);
      douts[r] = load_streaming<kVector>(dout + offset);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float values[kVector];
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        values[i] = kGelu ? douts[r][i] * dgelu(xs[r][i] + biases[i]) : douts[r][i];
        sums[i] += values[i];
      }
      if (kGelu && is_column && row + r < rows) {
        store_streaming(dx + group_offset + (row + r) * width, Pack<T>::of(values));
      }
    }
  }

  // The warps' sums meet in shared memory and are added in order.
  __shared__ float warp_sums[kWarps][kVector][32];
#pragma unroll
  for (int i = 0; i < kVector; ++i) warp_sums[warp][i][lane] = sums[i];
  __syncthreads();
  partial += (blockIdx.z * partial_rows + blockIdx.y) * width;
  for (int i = threadIdx.x; i < 32 * kVector; i += 32 * kWarps) {
    const int64_t my_column = int64_t{blockIdx.x} * 32 * kVector + i;
    if (my_column >= width) break;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += warp_sums[w][i % kVector][i / kVector];
    partial[my_column] = sum;
  }
}

// The same for rows of any width and alignment: a thread for each column.
template <bool kGelu, typename T>
__global__ void bias_backward_unaligned_kernel(const T* x, const T* bias, const T* dout, T* dx,
                                               float* partial, int64_t rows, int64_t width,
                                               int64_t partial_rows) {
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= width) return;
  float sum = 0.0f;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    const int64_t i = (blockIdx.z * rows + row) * width + column;
    float value = to_float(dout[i]);
    if constexpr (kGelu) {
      value *= dgelu(to_float(x[i]) + to_float(bias[blockIdx.z * width + column]));
      dx[i] = from_float<T>(value);
    }
    sum += value;
  }
  partial[(blockIdx.z * partial_rows + blockIdx.y) * width + column] = sum;
}

template <bool kGelu, typename T>
cudaError_t launch_backward(cudaStream_t stream, const T* x, const T* bias, const T* dout, T* dx,
                            T* dbias, float* partial, int64_t groups, int64_t rows, int64_t width,
                            int64_t partial_rows) {
  if (groups * width == 0) return cudaSuccess;
  int64_t used = 0;  // without rows the gradient is zero
  if (rows > 0) {
    if (width % kPackSize<T> == 0 && aligned_16(x, bias, dout, dx)) {
      using Shape = BackwardShape<kGelu>;
      DeviceLimits device;
      JAXLLM_RETURN_IF_ERROR(device.read());
      const int64_t strips = divide_up(width, 32 * kPackSize<T>);
      const int64_t resident = std::max(device.sms * Shape::kCtas / (strips * groups), int64_t{1});
      used = std::min({divide_up(rows, Shape::kWarps * Shape::kRows), resident, partial_rows});
      JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, bias_backward_kernel<kGelu, T>,
                                           {dim3(strips, used, groups), Shape::kWarps * 32}, x,
                                           bias, dout, dx, partial, rows, width, partial_rows));
    } else {
      used = std::min(rows, partial_rows);
      const dim3 grid(divide_up(width, 128), used, groups);
      JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, bias_backward_unaligned_kernel<kGelu, T>,
                                           {grid, 128}, x, bias, dout, dx, partial, rows, width,
                                           partial_rows));
    }
  }
  return column_sum(stream, partial, {dbias}, groups, used, partial_rows, width);
}

}  // namespace

template <typename T>
cudaError_t BiasAdd<T>::forward(cudaStream_t stream, const T* x, const T* bias, T* out,
                                int64_t groups, int64_t rows, int64_t width) {
  return launch_forward(stream, Sum{}, x, bias, out, groups, rows, width);
}

template <typename T>
cudaError_t BiasAdd<T>::backward(cudaStream_t stream, const T* dout, T* dbias, float* partial,
                                 int64_t groups, int64_t rows, int64_t width,
                                 int64_t partial_rows) {
  const T* const none = nullptr;
  return launch_backward<false>(stream, none, none, dout, static_cast<T*>(nullptr), dbias, partial,
                                groups, rows, width, partial_rows);
}

template <typename T>
cudaError_t BiasGelu<T>::forward(cudaStream_t stream, const T* x, const T* bias, T* out,
                                 int64_t groups, int64_t rows, int64_t width) {
  return launch_forward(stream, GeluOfSum{}, x, bias, out, groups, rows, width);
}

template <typename T>
cudaError_t BiasGelu<T>::backward(cudaStream_t stream, const T* x, const T* bias, const T* dout,
                                  T* dx, T* dbias, float* partial, int64_t groups, int64_t rows,
                                  int64_t width, int64_t partial_rows) {
  return launch_backward<true>(stream, x, bias, dout, dx, dbias, partial, groups, rows, width,
                               partial_rows);
}

template struct BiasAdd<float>;
template struct BiasAdd<__nv_bfloat16>;
template struct BiasAdd<__half>;
template struct BiasGelu<float>;
template struct BiasGelu<__nv_bfloat16>;
template struct BiasGelu<__half>;

}  // namespace jaxllm
