// The FFI handler of the norms that write 8-bit floats: checks the buffers, switches on their
// dtypes, launches.
#include "common/ffi_rows.h"
#include "handlers.h"
#include "quantization/float8_norm.h"

namespace jaxllm {
namespace {

// The part of call i in an array with `size` elements for each call; null for one without elements.
template <typename T>
const T* part(const Buffer& buffer, int64_t i, int64_t size) {
  return count(buffer) ? data<T>(buffer) + i * size : nullptr;
}
template <typename T>
T* part(Result& buffer, int64_t i, int64_t size) {
  return count(*buffer) ? data<T>(buffer) + i * size : nullptr;
}

// Without `bias` it is an RMS norm. `residual`, x_bias, `transposed` and the statistics are
// optional too; h is there where `residual` is.
template <typename T, typename W>
ffi::Error float8_norm(cudaStream_t stream, const Buffer& x, const Buffer& residual,
                       const Buffer& x_bias, const Buffer& scale, const Buffer& bias,
                       const Buffer& float8_scale, float eps, Result& values, Result& transposed,
                       Result& h, Result& mean, Result& rstd, RowShape shape) {
  const bool centers = count(bias) > 0, adds = count(residual) > 0;
  const int64_t of_h = adds ? shape.elements() : 0;
  const int64_t of_x_bias = adds && centers ? shape.weights() : 0;
  const int64_t of_mean = centers && count(*rstd) ? shape.statistics() : 0;
  constexpr auto kOrNone = Elements::kExactlyOrNone;
  ffi::Error error = check_buffers({
      {"residual", residual, dtype_of<T>(), shape.elements(), kOrNone},
      {"x_bias", x_bias, dtype_of<W>(), of_x_bias, kOrNone},
      {"scale", scale, dtype_of<W>(), shape.weights()},
      {"bias", bias, dtype_of<W>(), shape.weights(), kOrNone},
      {"float8_scale", float8_scale, ffi::F32, shape.groups},
      {"values", *values, ffi::F8E4M3FN, shape.elements()},
      {"transposed", *transposed, ffi::F8E4M3FN, shape.elements(), kOrNone},
      {"h", *h, dtype_of<T>(), of_h},
      {"mean", *mean, ffi::F32, of_mean},
      {"rstd", *rstd, ffi::F32, shape.statistics(), kOrNone},
  });
  if (error.failure()) return error;
  const int64_t size = shape.rows * shape.width;
  for (int64_t i = 0; i < shape.groups; ++i) {
    const Float8Norm<T, W> call{part<T>(x, i, size),
                                part<T>(residual, i, size),
                                part<W>(x_bias, i, shape.width),
                                part<W>(scale, i, shape.width),
                                part<W>(bias, i, shape.width),
                                part<float>(float8_scale, i, 1),
                                eps,
                                part<__nv_fp8_e4m3>(values, i, size),
                                part<__nv_fp8_e4m3>(transposed, i, size),
                                part<T>(h, i, size),
                                part<float>(mean, i, shape.rows),
                                part<float>(rstd, i, shape.rows),
                                shape.rows,
                                shape.width};
    const cudaError_t status = call.forward(stream);
    if (status != cudaSuccess) return to_ffi_error(status);
  }
  return ffi::Error::Success();
}

ffi::Error Float8NormForwardImpl(cudaStream_t stream, Buffer x, Buffer residual, Buffer x_bias,
                                 Buffer scale, Buffer bias, Buffer float8_scale, float eps,
                                 Result values, Result transposed, Result h, Result mean,
                                 Result rstd) {
  const ffi::ErrorOr<RowShape> shape = row_shape_of(x, "x", scale, "scale", INT64_MAX);
  if (shape.has_error()) return shape.error();
  if (shape->width == 0) return ffi::Error::Success();
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    const auto run = [&](auto weight_type) {
      using W = typename decltype(weight_type)::type;
      return float8_norm<T, W>(stream, x, residual, x_bias, scale, bias, float8_scale, eps, values,
                               transposed, h, mean, rstd, *shape);
    };
    if (scale.element_type() == x.element_type()) return run(type);
    if (scale.element_type() == ffi::F32) return run(Type<float>{});
    return invalid("scale", "has dtype " + dtype_name(scale.element_type()) +
                                "; that of x or float32 is required");
  });
}

}  // namespace

JAXLLM_HANDLER(Float8NormForward, Float8NormForwardImpl, "eps");

}  // namespace jaxllm
