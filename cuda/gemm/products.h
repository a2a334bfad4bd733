// What the handlers of matrix-vector products share: the sizes of a call, and the loop over the
// calls that jax.vmap has made one.
#pragma once

#include <type_traits>

#include "common/ffi.h"
#include "gemm/matvec.h"

namespace jaxllm {

// out, (..., rows, count), of the matrix, (..., count, width), and x, (..., rows, width). W is
// int8_t for a matrix with scales, one for `group` of a row, and else void. The caller has checked
// the scales.
template <typename W>
ffi::Error run_products(cudaStream_t stream, const ffi::AnyBuffer& matrix, const float* scales,
                        int64_t group, const ffi::AnyBuffer& x, ffi::Result<ffi::AnyBuffer>& out) {
  const char* const name = std::is_void_v<W> ? "w" : "q";
  const auto of_matrix = matrix.dimensions(), of_x = x.dimensions();
  const size_t axes = of_x.size();
  if (axes < 2 || of_matrix.size() != axes || of_matrix.back() != of_x.back()) {
    return invalid(name, "has not the axes and the width of x");
  }
  const int64_t rows = of_x[axes - 2], width = of_x.back(), size = of_matrix[axes - 2];
  int64_t calls = 1;
  for (size_t i = 0; i + 2 < axes; ++i) calls *= of_x[i];
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    using M = std::conditional_t<std::is_void_v<W>, T, W>;
    const ffi::Error error = check_buffers({
        {name, matrix, dtype_of<M>(), calls * size * width},
        {"x", x, dtype_of<T>(), calls * rows * width},
        {"out", *out, dtype_of<T>(), calls * rows * size},
    });
    if (error.failure()) return error;
    for (int64_t i = 0; i < calls; ++i) {
      const float* of_call = scales;
      if (scales != nullptr && width > 0) of_call += i * size * (width / group);
      const cudaError_t status = MatrixVector<T, M>::run(
          stream, data<M>(matrix) + i * size * width, of_call, group, data<T>(x) + i * rows * width,
          data<T>(out) + i * rows * size, rows, width, size);
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  });
}

}  // namespace jaxllm
