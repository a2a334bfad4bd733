// What the FFI handlers of the GEMV share: the sizes of a call, and the loop over the calls that
// jax.vmap has batched.
#pragma once

#include <type_traits>

#include "common/ffi.h"
#include "gemm/matvec/matvec.h"

namespace jaxllm {

// out, (..., rows, count), of `weight`, (..., count, width), and x, (..., rows, width). W is int8_t
// for weights with a scale for each `group` of a row, and else void. The caller has checked the
// scales.
template <typename W>
ffi::Error run_matvec(cudaStream_t stream, const ffi::AnyBuffer& weight, const float* scales,
                      int64_t group, const ffi::AnyBuffer& x, ffi::Result<ffi::AnyBuffer>& out) {
  const char* const name = std::is_void_v<W> ? "w" : "q";
  const auto weight_axes = weight.dimensions(), x_axes = x.dimensions();
  const size_t axes = x_axes.size();
  if (axes < 2 || weight_axes.size() != axes || weight_axes.back() != x_axes.back()) {
    return invalid(name, "has not the axes and the width of x");
  }
  const int64_t rows = x_axes[axes - 2], width = x_axes.back(), size = weight_axes[axes - 2];
  const int64_t calls = count_matrices(x);
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    using M = std::conditional_t<std::is_void_v<W>, T, W>;
    const ffi::Error error = check_buffers({
        {name, weight, dtype_of<M>(), calls * size * width},
        {"x", x, dtype_of<T>(), calls * rows * width},
        {"out", *out, dtype_of<T>(), calls * rows * size},
    });
    if (error.failure()) return error;
    for (int64_t i = 0; i < calls; ++i) {
      const float* call_scales = scales;
      if (scales != nullptr && width > 0) call_scales += i * size * (width / group);
      const cudaError_t status = MatrixVector<T, M>::run(
          stream, data<M>(weight) + i * size * width, call_scales, group,
          data<T>(x) + i * rows * width, data<T>(out) + i * rows * size, rows, width, size);
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  });
}

}  // namespace jaxllm
