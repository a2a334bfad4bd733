// What FFI handlers of 8-bit floats share.
#pragma once

#include <cuda_fp8.h>

#include <string>

#include "common/ffi.h"

namespace jaxllm {

// Calls launch(Type<T>) with the C++ type of a buffer of 8-bit floats; returns its error.
template <class Launch>
ffi::Error dispatch_float8(const Buffer& buffer, const char* name, Launch launch) {
  switch (buffer.element_type()) {
    case ffi::F8E4M3FN:
      return launch(Type<__nv_fp8_e4m3>{});
    case ffi::F8E5M2:
      return launch(Type<__nv_fp8_e5m2>{});
    default:
      return invalid(name, "has dtype " + dtype_name(buffer.element_type()) +
                               "; float8_e4m3fn or float8_e5m2 is required");
  }
}

}  // namespace jaxllm
