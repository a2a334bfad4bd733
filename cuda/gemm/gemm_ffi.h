// What the FFI handlers of GEMMs share: the sizes of a call, and the loop over the calls that
// jax.vmap has made one.
#pragma once

#include <utility>

#include "common/ffi.h"
#include "gemm/matmul_call.h"

namespace jaxllm {

// x (rows, width) times a matrix of `width` by `columns` elements. jax.vmap gives every buffer the
// same new leading axes: so many calls.
struct GemmSizes {
  int64_t calls, rows, width, columns;

  int64_t x() const { return rows * width; }
  int64_t weight() const { return width * columns; }
  int64_t out() const { return rows * columns; }
  GemmShape shape() const { return {rows, columns, width}; }

  // Of a matrix (width, columns), or (columns, width) where it is transposed. No rows.
  ffi::Error read(const Buffer& matrix, bool transposed, const char* name = "weight") {
    const auto dimensions = matrix.dimensions();
    const size_t axes = dimensions.size();
    if (axes < 2) return invalid(name, "is no matrix");
    *this = {count_matrices(matrix), 0, dimensions[axes - 2], dimensions[axes - 1]};
    if (transposed) std::swap(width, columns);
    return ffi::Error::Success();
  }

  // The rows too, those of x.
  ffi::Error read(const Buffer& x, const char* name, const Buffer& weight, bool transposed) {
    if (ffi::Error error = read(weight, transposed); error.failure()) return error;
    const auto of_x = x.dimensions();
    if (of_x.size() == 0 || of_x.back() != width) {
      return invalid(name, "has not the width of weight");
    }
    if (calls * width > 0) rows = count(x) / (calls * width);
    return ffi::Error::Success();
  }
};

// One of the calls: at() returns its part of a buffer that has `elements` for each call.
template <typename T>
struct Call {
  using Type = T;
  int64_t index;

  template <typename U = T>
  const U* at(const Buffer& buffer, int64_t elements) const {
    return data<U>(buffer) + index * elements;
  }
  template <typename U = T>
  U* at(Result& buffer, int64_t elements) const {
    return data<U>(buffer) + index * elements;
  }
};

// Checks the buffers, and calls launch(Call<T>) for every call with the dtype of `buffer`, which
// has 16 bits.
template <class Launch>
ffi::Error launch_calls(const Buffer& buffer, const char* name, int64_t calls,
                        std::initializer_list<BufferCheck> checks, Launch launch) {
  const ffi::Error error = check_buffers(checks);
  if (error.failure()) return error;
  const auto run = [&](auto type) {
    for (int64_t i = 0; i < calls; ++i) {
      const cudaError_t status = launch(Call<typename decltype(type)::type>{i});
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  };
  switch (buffer.element_type()) {
    case ffi::BF16:
      return run(Type<__nv_bfloat16>{});
    case ffi::F16:
      return run(Type<__half>{});
    default:
      return invalid(name, "has dtype " + dtype_name(buffer.element_type()) +
                               "; bfloat16 or float16 is required");
  }
}

}  // namespace jaxllm
