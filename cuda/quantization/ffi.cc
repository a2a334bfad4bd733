// FFI handlers of the quantization kernels: check the buffers, dispatch on their dtypes, launch.
#include "common/ffi.h"

#include "gemm/matvec/matvec_ffi.h"
#include "handlers.h"
#include "quantization/quantize.h"

namespace jaxllm {
namespace {

struct Groups {
  int64_t groups, width;  // how many, and the elements of each
};

// The last axes of both have the groups of a row; the other axes are equal.
ffi::ErrorOr<Groups> groups_of(const Buffer& values, const char* name, const Buffer& scales) {
  const auto axes = values.dimensions(), scales_axes = scales.dimensions();
  if (axes.size() == 0 || scales_axes.size() != axes.size() ||
      !has_leading_axes(values, scales, 1)) {
    return ffi::Unexpected(invalid("scales", std::string("has not the axes of ") + name));
  }
  const int64_t row_groups = scales_axes.back();
  if (row_groups == 0 ? axes.back() != 0 : axes.back() % row_groups != 0) {
    return ffi::Unexpected(
        invalid("scales", std::string("has groups that do not divide the rows of ") + name));
  }
  ffi::Error error = check_dtype(scales, ffi::F32, "scales");
  if (error.failure()) return ffi::Unexpected(error);
  return Groups{count(scales), row_groups == 0 ? 0 : axes.back() / row_groups};
}

ffi::Error QuantizeImpl(cudaStream_t stream, Buffer w, int64_t group_size, Result q,
                        Result scales) {
  const ffi::ErrorOr<Groups> groups = groups_of(w, "w", *scales);
  if (groups.has_error()) return groups.error();
  if (groups->groups > 0 && groups->width != group_size) {
    return invalid("scales", "has groups of " + std::to_string(groups->width) +
                                 " elements; group_size is " + std::to_string(group_size));
  }
  return dispatch_floating(w, "w", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"q", *q, ffi::S8, count(w)}}, [&] {
      return GroupQuantization<T>::quantize(stream, data<T>(w), data<int8_t>(q),
                                            data<float>(scales), groups->groups, groups->width);
    });
  });
}

ffi::Error DequantizeImpl(cudaStream_t stream, Buffer q, Buffer scales, Result w) {
  const ffi::ErrorOr<Groups> groups = groups_of(q, "q", scales);
  if (groups.has_error()) return groups.error();
  return dispatch_floating(*w, "w", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"q", q, ffi::S8, count(*w)}}, [&] {
      return GroupQuantization<T>::dequantize(stream, data<int8_t>(q), data<float>(scales),
                                              data<T>(w), groups->groups, groups->width);
    });
  });
}

ffi::Error QuantizedMatvecImpl(cudaStream_t stream, Buffer q, Buffer scales, Buffer x, Result out) {
  if (ffi::Error error = check_dtype(q, ffi::S8, "q"); error.failure()) return error;
  const ffi::ErrorOr<Groups> groups = groups_of(q, "q", scales);
  if (groups.has_error()) return groups.error();
  return run_matvec<int8_t>(stream, q, data<float>(scales), groups->width, x, out);
}

}  // namespace

JAXLLM_HANDLER(Quantize, QuantizeImpl, "group_size");
JAXLLM_HANDLER(Dequantize, DequantizeImpl);
JAXLLM_HANDLER(QuantizedMatvec, QuantizedMatvecImpl);

}  // namespace jaxllm
