// The FFI handlers of rounding to 8-bit floats, and of activations that do so, one for each layout
// of the result.
#include <algorithm>
#include <climits>

#include "common/ffi_float8.h"
#include "handlers.h"
#include "quantization/float8_activation.h"
#include "quantization/float8_rope.h"
#include "quantization/float8_round.h"
#include "quantization/float8_scale_and_round.h"

namespace jaxllm {
namespace {

// Results with the elements of x, and the sums over its rows with their workspace; nullptr where
// they are not wanted. jax.vmap gives every buffer the same new leading axes.
ffi::Error round_to_float8(cudaStream_t stream, const Buffer& x, const Buffer& scale,
                           Result* values, Result* transposed, Result* sums = nullptr,
                           Result* partial = nullptr) {
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
      const int64_t partials = float8_partial_rows(rows) * columns;
      ffi::Error error = check_buffers({
          {"scale", scale, ffi::F32, calls * scales},
          {"values", first, dtype, count(x)},
          {"transposed", transposed ? **transposed : first, dtype, count(x)},
          {"sums", sums ? **sums : x, dtype_of<T>(), sums ? calls * columns : count(x)},
          {"partial", partial ? **partial : scale, ffi::F32, calls * (partial ? partials : scales)},
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
            call.launch(stream, rows, columns, part(values), part(transposed),
                        sums ? data<T>(*sums) + i * columns : nullptr,
                        partial ? data<float>(*partial) + i * partials : nullptr);
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

ffi::Error Float8RoundSumsImpl(cudaStream_t stream, Buffer x, Buffer scale, Result values,
                               Result transposed, Result sums, Result partial) {
  return round_to_float8(stream, x, scale, &values, &transposed, &sums, &partial);
}

// Of the results but the scale, and of the workspace `partial`, those that are not wanted have no
// elements.
ffi::Error Float8ScaleAndRoundImpl(cudaStream_t stream, Buffer x, Result values, Result transposed,
                                   Result sums, Result scale, Result partial, Result maxima) {
  const auto of_x = x.dimensions();
  const size_t axes = of_x.size();
  if (axes < 2) return invalid("x", "is no matrix");
  const int64_t rows = of_x[axes - 2], columns = of_x[axes - 1], size = rows * columns;
  const int64_t calls = count_matrices(x);
  const bool has_values = count(*values) > 0, has_transposed = count(*transposed) > 0;
  const bool has_sums = count(*sums) > 0;
  if (size > 0 && !has_values && !has_transposed) return invalid("values", "has no elements");
  return dispatch_float8(*values, "values", [&](auto type) {
    return dispatch_floating(x, "x", [&](auto type_x) {
      using Float8 = typename decltype(type)::type;
      using T = typename decltype(type_x)::type;
      const auto dtype = values->element_type();
      const int64_t partials = has_sums ? float8_partial_rows(rows) * columns : 0;
      ffi::Error error = check_buffers({
          {"values", *values, dtype, count(x), Elements::kExactlyOrNone},
          {"transposed", *transposed, dtype, count(x), Elements::kExactlyOrNone},
          {"sums", *sums, dtype_of<T>(), calls * columns, Elements::kExactlyOrNone},
          {"scale", *scale, ffi::F32, calls},
          {"partial", *partial, ffi::F32, calls * partials},
          {"maxima", *maxima, ffi::F32, calls * kFloat8Maxima},
      });
      if (error.failure()) return error;
      for (int64_t i = 0; i < calls; ++i) {
        const Float8ScalingAndRounding<Float8, T> call{
            data<T>(x) + i * size, data<float>(scale) + i, data<float>(maxima) + i * kFloat8Maxima};
        const cudaError_t status = call.launch(
            stream, rows, columns, has_values ? data<Float8>(values) + i * size : nullptr,
            has_transposed ? data<Float8>(transposed) + i * size : nullptr,
            has_sums ? data<T>(sums) + i * columns : nullptr, data<float>(partial) + i * partials);
        if (status != cudaSuccess) return to_ffi_error(status);
      }
      return ffi::Error::Success();
    });
  });
}

// x is (..., length, columns), and the tables are (..., length, pairs). jax.vmap gives every buffer
// the same new leading axes; the scale has one element otherwise. Sums that are not wanted, and
// then `partial`, have no elements.
ffi::Error Float8RopeBackwardImpl(cudaStream_t stream, Buffer x, Buffer cos, Buffer sin,
                                  int64_t heads, int64_t head_dim, bool interleaved, Result values,
                                  Result transposed, Result sums, Result scale, Result partial,
                                  Result maxima) {
  const auto of_x = x.dimensions(), of_table = cos.dimensions();
  if (of_x.size() < 2) return invalid("x", "is no matrix");
  if (of_table.size() < 2) return invalid("cos", "has too few axes");
  const int64_t calls = count(*scale), length = of_x[of_x.size() - 2], columns = of_x.back();
  if (calls == 0) return ffi::Error::Success();
  const int64_t size = count(x) / calls, rows = columns == 0 ? 0 : size / columns;
  const int64_t pairs = of_table.back(), table = length * pairs, of_call = count(cos) / calls;
  if (heads < 0 || head_dim <= 0 || columns % head_dim != 0 || heads * head_dim > columns ||
      2 * pairs > head_dim || head_dim > INT_MAX) {
    return invalid("x", "does not fit the heads that rotate");
  }
  if (of_table[of_table.size() - 2] != length || (table != 0 && of_call % table != 0)) {
    return invalid("cos", "does not fit x");
  }
  const int64_t tables = table == 0 ? 1 : of_call / table;
  if (tables == 0 || rows % (tables * std::max<int64_t>(length, 1)) != 0) {
    return invalid("cos", "has tables that do not divide the sequences of x");
  }
  const bool has_sums = count(*sums) > 0;
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    using Float8 = typename Float8RopeRounding<T>::Float8;
    const int64_t partials = has_sums ? float8_partial_rows(rows) * columns : 0;
    const ffi::Error error = check_buffers({
        {"cos", cos, ffi::F32, calls * of_call},
        {"sin", sin, ffi::F32, calls * of_call},
        {"values", *values, ffi::F8E5M2, count(x)},
        {"transposed", *transposed, ffi::F8E5M2, count(x)},
        {"sums", *sums, dtype_of<T>(), calls * columns, Elements::kExactlyOrNone},
        {"scale", *scale, ffi::F32, calls},
        {"partial", *partial, ffi::F32, calls * partials},
        {"maxima", *maxima, ffi::F32, calls * kFloat8RopeMaxima},
    });
    if (error.failure()) return error;
    for (int64_t i = 0; i < calls; ++i) {
      const RowRotation rotation{data<float>(cos) + i * of_call,
                                 data<float>(sin) + i * of_call,
                                 length,
                                 rows / tables,
                                 static_cast<int>(heads),
                                 static_cast<int>(head_dim),
                                 static_cast<int>(pairs),
                                 interleaved};
      const Float8RopeRounding<T> call{data<T>(x) + i * size, data<float>(scale) + i,
                                       data<float>(maxima) + i * kFloat8RopeMaxima};
      const cudaError_t status = call.launch(
          stream, rows, columns, rotation, data<Float8>(values) + i * size,
          data<Float8>(transposed) + i * size, has_sums ? data<T>(sums) + i * columns : nullptr,
          data<float>(partial) + i * partials);
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  });
}

// The sizes of a call of an activation, from h of (..., rows, kParts width).
template <class Activation>
struct ActivationSizes {
  static constexpr int kParts = Activation::kParts;
  int64_t calls, rows, width;

  ffi::Error read(const Buffer& h) {
    const auto of_h = h.dimensions();
    if (of_h.size() < 2) return invalid("h", "is no matrix");
    if (of_h.back() % kParts != 0) return invalid("h", "has no even number of columns");
    rows = of_h[of_h.size() - 2];
    width = of_h.back() / kParts;
    calls = count_matrices(h);
    return ffi::Error::Success();
  }
};

// transposed is nullptr where it is not wanted.
template <class Activation>
ffi::Error activation_forward(cudaStream_t stream, const Buffer& h, const Buffer& scale,
                              Result* values, Result* transposed) {
  ActivationSizes<Activation> sizes;
  ffi::Error error = sizes.read(h);
  if (error.failure()) return error;
  const int64_t size = sizes.rows * sizes.width, total = sizes.calls * size;
  const Buffer& first = **values;
  error = check_buffers({{"scale", scale, ffi::F32, sizes.calls},
                         {"values", first, ffi::F8E4M3FN, total},
                         {"transposed", transposed ? **transposed : first, ffi::F8E4M3FN, total}});
  if (error.failure()) return error;
  return dispatch_floating(h, "h", [&](auto type) {
    using T = typename decltype(type)::type;
    for (int64_t i = 0; i < sizes.calls; ++i) {
      const Float8Activation<Activation, T> call{data<T>(h) + sizes.kParts * i * size,
                                                 data<float>(scale) + i, sizes.rows, sizes.width};
      const auto part = [&](Result* result) {
        return result ? data<__nv_fp8_e4m3>(*result) + i * size : nullptr;
      };
      const cudaError_t status = call.forward(stream, part(values), part(transposed));
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  });
}

// dbias and its workspace have no elements where it is not wanted.
template <class Activation>
ffi::Error activation_backward(cudaStream_t stream, const Buffer& h, const Buffer& dout,
                               const Buffer& scale, Result& values, Result& transposed,
                               Result& dbias, Result& partial) {
  ActivationSizes<Activation> sizes;
  ffi::Error error = sizes.read(h);
  if (error.failure()) return error;
  const int64_t columns = sizes.kParts * sizes.width, size = sizes.rows * columns;
  const int64_t total = sizes.calls * size;
  return dispatch_floating(h, "h", [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t sums = count(*dbias) ? columns : 0;
    const int64_t partials = float8_partial_rows(sizes.rows) * sums;
    ffi::Error error = check_buffers({{"dout", dout, h.element_type(), total / sizes.kParts},
                                      {"scale", scale, ffi::F32, sizes.calls},
                                      {"values", *values, ffi::F8E5M2, total},
                                      {"transposed", *transposed, ffi::F8E5M2, total},
                                      {"dbias", *dbias, dtype_of<T>(), sizes.calls * sums},
                                      {"partial", *partial, ffi::F32, sizes.calls * partials}});
    if (error.failure()) return error;
    for (int64_t i = 0; i < sizes.calls; ++i) {
      const Float8Activation<Activation, T> call{data<T>(h) + i * size, data<float>(scale) + i,
                                                 sizes.rows, sizes.width};
      const cudaError_t status = call.backward(
          stream, data<T>(dout) + i * size / sizes.kParts, data<__nv_fp8_e5m2>(values) + i * size,
          data<__nv_fp8_e5m2>(transposed) + i * size, sums ? data<T>(dbias) + i * sums : nullptr,
          data<float>(partial) + i * partials);
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  });
}

ffi::Error Float8GeluForwardImpl(cudaStream_t stream, Buffer h, Buffer scale, Result values) {
  return activation_forward<Float8Gelu>(stream, h, scale, &values, nullptr);
}

ffi::Error Float8GeluForwardBothImpl(cudaStream_t stream, Buffer h, Buffer scale, Result values,
                                     Result transposed) {
  return activation_forward<Float8Gelu>(stream, h, scale, &values, &transposed);
}

ffi::Error Float8GeluBackwardImpl(cudaStream_t stream, Buffer h, Buffer dout, Buffer scale,
                                  Result values, Result transposed, Result dbias, Result partial) {
  return activation_backward<Float8Gelu>(stream, h, dout, scale, values, transposed, dbias,
                                         partial);
}

ffi::Error Float8SwigluForwardImpl(cudaStream_t stream, Buffer h, Buffer scale, Result values) {
  return activation_forward<Float8Swiglu>(stream, h, scale, &values, nullptr);
}

ffi::Error Float8SwigluForwardBothImpl(cudaStream_t stream, Buffer h, Buffer scale, Result values,
                                       Result transposed) {
  return activation_forward<Float8Swiglu>(stream, h, scale, &values, &transposed);
}

ffi::Error Float8SwigluBackwardImpl(cudaStream_t stream, Buffer h, Buffer dout, Buffer scale,
                                    Result values, Result transposed, Result dbias,
                                    Result partial) {
  return activation_backward<Float8Swiglu>(stream, h, dout, scale, values, transposed, dbias,
                                           partial);
}

}  // namespace

JAXLLM_HANDLER(Float8GeluForward, Float8GeluForwardImpl);
JAXLLM_HANDLER(Float8GeluForwardBoth, Float8GeluForwardBothImpl);
JAXLLM_HANDLER(Float8GeluBackward, Float8GeluBackwardImpl);
JAXLLM_HANDLER(Float8SwigluForward, Float8SwigluForwardImpl);
JAXLLM_HANDLER(Float8SwigluForwardBoth, Float8SwigluForwardBothImpl);
JAXLLM_HANDLER(Float8SwigluBackward, Float8SwigluBackwardImpl);
JAXLLM_HANDLER(Float8ScaleAndRound, Float8ScaleAndRoundImpl);
JAXLLM_HANDLER(Float8RopeBackward, Float8RopeBackwardImpl, "heads", "head_dim", "interleaved");
JAXLLM_HANDLER(Float8Round, Float8RoundImpl);
JAXLLM_HANDLER(Float8RoundTransposed, Float8RoundTransposedImpl);
JAXLLM_HANDLER(Float8RoundBoth, Float8RoundBothImpl);
JAXLLM_HANDLER(Float8RoundSums, Float8RoundSumsImpl);

}  // namespace jaxllm
