// Softsign, x / (1 + |x|), and its gradient: a kernel of your own, and its FFI handlers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

__device__ float to_float(float x) { return x; }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ void round_to(float* y, float x) { *y = x; }
__device__ void round_to(__half* y, float x) { *y = __float2half_rn(x); }
__device__ void round_to(__nv_bfloat16* y, float x) { *y = __float2bfloat16_rn(x); }

// out = x / (1 + |x|); where there is a dout, out = dout / (1 + |x|)^2.
template <typename T>
__global__ void softsign_kernel(const T* x, const T* dout, T* out, int64_t size) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += stride) {
    const float wide = to_float(x[i]);
    const float slope = 1.0f / (1.0f + fabsf(wide));
    round_to(out + i, dout ? to_float(dout[i]) * slope * slope : wide * slope);
  }
}

template <typename T>
ffi::Error launch(cudaStream_t stream, const ffi::AnyBuffer& x, const ffi::AnyBuffer* dout,
                  ffi::Result<ffi::AnyBuffer>& out) {
  const auto size = static_cast<int64_t>(x.element_count());
  if (size == 0) return ffi::Error::Success();
  constexpr int kThreads = 256;
  constexpr int64_t kMostBlocks = 132 * 8;
  const auto blocks = std::min((size + kThreads - 1) / kThreads, kMostBlocks);
  softsign_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<const T*>(x.untyped_data()),
      dout ? static_cast<const T*>(dout->untyped_data()) : nullptr,
      static_cast<T*>(out->untyped_data()), size);
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? ffi::Error::Success()
                               : ffi::Error::Internal(cudaGetErrorString(status));
}

ffi::Error dispatch(cudaStream_t stream, const ffi::AnyBuffer& x, const ffi::AnyBuffer* dout,
                    ffi::Result<ffi::AnyBuffer>& out) {
  switch (x.element_type()) {
    case ffi::F32:
      return launch<float>(stream, x, dout, out);
    case ffi::BF16:
      return launch<__nv_bfloat16>(stream, x, dout, out);
    case ffi::F16:
      return launch<__half>(stream, x, dout, out);
    default:
      return ffi::Error::InvalidArgument("x is not float32, bfloat16 or float16");
  }
}

ffi::Error forward(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out) {
  return dispatch(stream, x, nullptr, out);
}

ffi::Error backward(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer dout,
                    ffi::Result<ffi::AnyBuffer> dx) {
  return dispatch(stream, x, &dout, dx);
}

}  // namespace

// The symbols of the library. A launch may be captured in a CUDA graph: it allocates nothing and
// waits for nothing.
XLA_FFI_DEFINE_HANDLER_SYMBOL(SoftsignForward, forward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()   // x
                                  .Ret<ffi::AnyBuffer>(),  // out
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(SoftsignBackward, backward,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()   // x
                                  .Arg<ffi::AnyBuffer>()   // dout
                                  .Ret<ffi::AnyBuffer>(),  // dx
                              {ffi::Traits::kCmdBufferCompatible});
