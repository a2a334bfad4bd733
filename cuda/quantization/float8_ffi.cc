// The FFI handlers of rounding to 8-bit floats, and of SwiGLU that does so, one for each layout of
// the result.
#include "common/ffi_float8.h"
#include "handlers.h"
#include "quantization/float8_round.h"
#include "quantization/float8_swiglu.h"

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
  const int64_t calls = count_matrices(x);
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

// The sizes of a call of SwiGLU, from gate_up of (..., rows, 2 width).
struct SwigluSizes {
  int64_t calls, rows, width;

  ffi::Error read(const Buffer& gate_up) {
    const auto of_x = gate_up.dimensions();
    if (of_x.size() < 2) return invalid("gate_up", "is no matrix");
    if (of_x.back() % 2 != 0) return invalid("gate_up", "has no even number of columns");
    rows = of_x[of_x.size() - 2];
    width = of_x.back() / 2;
    calls = count_matrices(gate_up);
    return ffi::Error::Success();
  }
};

// transposed is nullptr where it is not wanted.
ffi::Error swiglu_forward(cudaStream_t stream, const Buffer& gate_up, const Buffer& scale,
                          Result* values, Result* transposed) {
  SwigluSizes sizes;
  ffi::Error error = sizes.read(gate_up);
  if (error.failure()) return error;
  const int64_t size = sizes.rows * sizes.width, total = sizes.calls * size;
  const Buffer& first = **values;
  error = check_buffers({{"scale", scale, ffi::F32, sizes.calls},
                         {"values", first, ffi::F8E4M3FN, total},
                         {"transposed", transposed ? **transposed : first, ffi::F8E4M3FN, total}});
  if (error.failure()) return error;
  return dispatch_floating(gate_up, "gate_up", [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < sizes.calls; ++i) {
      const Float8Swiglu<T> call{data<T>(gate_up) + 2 * i * size, data<float>(scale) + i,
                                 sizes.rows, sizes.width};
      const auto part = [&](Result* result) {
        return result ? data<__nv_fp8_e4m3>(*result) + i * size : nullptr;
      };
      const cudaError_t status = call.forward(stream, part(values), part(transposed));
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  });
}

ffi::Error Float8SwigluForwardImpl(cudaStream_t stream, Buffer gate_up, Buffer scale,
                                   Result values) {
  return swiglu_forward(stream, gate_up, scale, &values, nullptr);
}

ffi::Error Float8SwigluForwardBothImpl(cudaStream_t stream, Buffer gate_up, Buffer scale,
                                       Result values, Result transposed) {
  return swiglu_forward(stream, gate_up, scale, &values, &transposed);
}

ffi::Error Float8SwigluBackwardImpl(cudaStream_t stream, Buffer gate_up, Buffer dout, Buffer scale,
                                    Result values, Result transposed) {
  SwigluSizes sizes;
  ffi::Error error = sizes.read(gate_up);
  if (error.failure()) return error;
  const int64_t size = sizes.rows * sizes.width, total = sizes.calls * size;
  error = check_buffers({{"dout", dout, gate_up.element_type(), total},
                         {"scale", scale, ffi::F32, sizes.calls},
                         {"values", *values, ffi::F8E5M2, 2 * total},
                         {"transposed", *transposed, ffi::F8E5M2, 2 * total}});
  if (error.failure()) return error;
  return dispatch_floating(gate_up, "gate_up", [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < sizes.calls; ++i) {
      const Float8Swiglu<T> call{data<T>(gate_up) + 2 * i * size, data<float>(scale) + i,
                                 sizes.rows, sizes.width};
      const cudaError_t status = call.backward(stream, data<T>(dout) + i * size,
                                               data<__nv_fp8_e5m2>(values) + 2 * i * size,
                                               data<__nv_fp8_e5m2>(transposed) + 2 * i * size);
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  });
}

}  // namespace

JAXLLM_HANDLER(Float8SwigluForward, Float8SwigluForwardImpl);
JAXLLM_HANDLER(Float8SwigluForwardBoth, Float8SwigluForwardBothImpl);
JAXLLM_HANDLER(Float8SwigluBackward, Float8SwigluBackwardImpl);
JAXLLM_HANDLER(Float8Round, Float8RoundImpl);
JAXLLM_HANDLER(Float8RoundTransposed, Float8RoundTransposedImpl);
JAXLLM_HANDLER(Float8RoundBoth, Float8RoundBothImpl);

}  // namespace jaxllm
