// What the handlers of matrix-vector products share: the sizes of a call, and the loop over the
// calls that jax.vmap has made one.
#pragma once

#include "common/ffi.h"
#include "gemm/matvec.h"

namespace jaxllm {

// out, (..., rows, count), of the matrix, (..., count, width), and x, (..., rows, width). W is
// int8_t for a matrix with scales, one for `group` of a row, and else void.
template <typename W>
ffi::Error run_products(cudaStream_t stream, const ffi::AnyBuffer& matrix, const float* scales,
                        int64_t group, const ffi::AnyBuffer& x, ffi::Result<ffi::AnyBuffer>& out) {
  const auto of_matrix = matrix.dimensions(), of_x = x.dimensions();
  const size_t axes = of_x.size();
  if (axes < 2 || of_matrix.size() != axes || of_matrix.back() != of_x.back()) {
    return ffi::Error::InvalidArgument("the matrix and x do not fit together");
  }
  const int64_t rows = of_x[axes - 2], width = of_x.back(), count = of_matrix[axes - 2];
  int64_t calls = 1;
  for (size_t i = 0; i + 2 < axes; ++i) calls *= of_x[i];
  if (static_cast<int64_t>(matrix.element_count()) != calls * count * width ||
      static_cast<int64_t>(out->element_count()) != calls * rows * count) {
    return ffi::Error::InvalidArgument("the matrix, x and out do not fit together");
  }
  return dispatch_floating(x.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    using M = std::conditional_t<std::is_void_v<W>, T, W>;
    for (int64_t i = 0; i < calls; ++i) {
      const float* of_call = scales;
      if (scales != nullptr && width > 0) of_call += i * count * (width / group);
      const cudaError_t status = MatrixVector<T, M>::run(
          stream, data<M>(matrix) + i * count * width, of_call, group,
          data<T>(x) + i * rows * width, data<T>(out) + i * rows * count, rows, width, count);
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  });
}

}  // namespace jaxllm
