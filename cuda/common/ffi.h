// What FFI handlers share: views of XLA's buffers, checks, the switch over dtypes, and errors.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "xla/ffi/api/ffi.h"

namespace jaxllm {

namespace ffi = xla::ffi;

// The elements of a buffer that holds T, whatever name XLA has for it.
template <typename T>
const T* data(const ffi::AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}
template <typename T>
T* data(ffi::Result<ffi::AnyBuffer>& buffer) {
  return static_cast<T*>(buffer->untyped_data());
}

inline ffi::Error to_ffi_error(cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("CUDA error: ") + cudaGetErrorString(status));
}

// Carries a type into a generic lambda.
template <typename T>
struct Type {
  using type = T;
};

// Calls `launch(Type<T>)` with the C++ type of a floating dtype and returns its status.
template <class Launch>
ffi::Error dispatch_floating(ffi::DataType dtype, Launch launch) {
  switch (dtype) {
    case ffi::F32:
      return launch(Type<float>{});
    case ffi::BF16:
      return launch(Type<__nv_bfloat16>{});
    case ffi::F16:
      return launch(Type<__half>{});
    default:
      return ffi::Error::InvalidArgument("dtype is not float32, bfloat16 or float16");
  }
}

}  // namespace jaxllm
