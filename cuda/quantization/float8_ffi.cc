// The FFI handlers of rounding to 8-bit floats, one for each layout of the result.
#include "common/ffi_float8.h"
#include "handlers.h"
#include "quantization/float8_round.h"

namespace jaxllm {
namespace {

// A result with the elements of x; nullptr where it is not wanted. jax.vmap gives every buffer the
// same new leading axes.
ffi::Error round_to_float8(cudaStream_t stream, const Buffer& x, const Buffer& scale,
                           Result* values, Result* transposed) {
  const auto of_x = x.dimensions(), of_scale = scale.dimensions();
  const size_t axes = of_x.size();
  if (axes < 2) return invalid("x", "is no matrix");
  if (of_scale.size() != axes - 1) return invalid("scale", "has not the axes of x less one");
  const int64_t rows = of_x[axes - 2], columns = of_x[axes - 1];
  int64_t calls = 1;
  for (size_t i = 0; i + 2 < axes; ++i) calls *= of_x[i];
  const bool has_one_scale = of_scale.back() == 1 || (values && transposed);
  const int64_t scales = has_one_scale ? 1 : values ? rows : columns;
  const Buffer& first = values ? **values : **transposed;
  return dispatch_float8(first, "values", [&](auto type) {
    return dispatch_floating(x, "x", [&](auto type_x) {
      using Float8 = typename decltype(type)::type;
      using T = typename decltype(type_x)::type;
      const auto dtype = first.element_type();
      ffi::Error error = check_buffers({
          {"scale", scale, ffi::F32, calls * scales},
          {"values", first, dtype, count(x)},
          {"transposed", transposed ? **transposed : first, dtype, count(x)},
      });
      if (error.failure()) return error;
      const int64_t size = rows * columns;
      for (int64_t i = 0; i < calls; ++i) {
        const Float8Rounding<Float8, T> call{data<T>(x) + i * size, data<float>(scale) + i * scales,
                                             has_one_scale};
        const auto part = [&](Result* result) {
          return result ? data<Float8>(*result) + i * size : nullptr;
        };
        const cudaError_t status =
            call.launch(stream, rows, columns, part(values), part(transposed));
        if (status != cudaSuccess) return to_ffi_error(status);
      }
      return ffi::Error::Success();
    });
  });
}

ffi::Error Float8RoundImpl(cudaStream_t stream, Buffer x, Buffer scale, Result values) {
  return round_to_float8(stream, x, scale, &values, nullptr);
}

ffi::Error Float8RoundTransposedImpl(cudaStream_t stream, Buffer x, Buffer scale,
                                     Result transposed) {
  return round_to_float8(stream, x, scale, nullptr, &transposed);
}

ffi::Error Float8RoundBothImpl(cudaStream_t stream, Buffer x, Buffer scale, Result values,
                               Result transposed) {
  return round_to_float8(stream, x, scale, &values, &transposed);
}

}  // namespace

JAXLLM_HANDLER(Float8Round, Float8RoundImpl);
JAXLLM_HANDLER(Float8RoundTransposed, Float8RoundTransposedImpl);
JAXLLM_HANDLER(Float8RoundBoth, Float8RoundBothImpl);

}  // namespace jaxllm
