// FFI handlers of the reductions: check the buffers, switch on their dtype, launch.
#include "common/ffi.h"

#include "handlers.h"
#include "reduction/histogram.h"
#include "reduction/reduce.h"

namespace jaxllm {
namespace {

constexpr int64_t kMaxCtas = 0x7fffffff;  // of a grid

// jax.vmap gives every buffer new leading axes: the size of `out` is the number of groups. The
// workspace may have any number of partial results.
ffi::ErrorOr<ReduceShape> shape_of(const Buffer& x, const char* name, Result& out,
                                   Result& partial) {
  ffi::Error error = check_leading_axes(x, name, *out, "out");
  if (error.success()) error = check_leading_axes(*partial, "partial", *out, "out");
  if (error.success()) error = check_dtype(*partial, ffi::F32, "partial");
  if (error.failure()) return ffi::Unexpected(error);
  ReduceShape shape = {count(*out), 0, 1};
  if (shape.groups == 0) return shape;
  shape.size = count(x) / shape.groups;
  shape.partials = count(*partial) / shape.groups;
  if (shape.partials < 1) return ffi::Unexpected(invalid("partial", "has no elements"));
  if (count(*partial) > kMaxCtas) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "jax.vmap maps over " + std::to_string(shape.groups) + " calls of " +
        std::to_string(shape.partials) + " blocks; a grid has at most 2147483647 blocks"));
  }
  return shape;
}

ffi::Error ReduceSumForwardImpl(cudaStream_t stream, Buffer x, Result out, Result partial) {
  const ffi::ErrorOr<ReduceShape> shape = shape_of(x, "x", out, partial);
  if (shape.has_error()) return shape.error();
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"out", *out, ffi::F32, shape->groups}}, [&] {
      return Reduce<T>::sum(stream, data<T>(x), data<float>(out), data<float>(partial), *shape);
    });
  });
}

ffi::Error ReduceMaxForwardImpl(cudaStream_t stream, Buffer x, Result out, Result partial) {
  const ffi::ErrorOr<ReduceShape> shape = shape_of(x, "x", out, partial);
  if (shape.has_error()) return shape.error();
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"out", *out, dtype_of<T>(), shape->groups}}, [&] {
      return Reduce<T>::max(stream, data<T>(x), data<T>(out), data<float>(partial), *shape);
    });
  });
}

ffi::Error DotForwardImpl(cudaStream_t stream, Buffer a, Buffer b, Result out, Result partial) {
  const ffi::ErrorOr<ReduceShape> shape = shape_of(a, "a", out, partial);
  if (shape.has_error()) return shape.error();
  return dispatch_floating(a, "a", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch(
        {
            {"b", b, dtype_of<T>(), count(a)},
            {"out", *out, ffi::F32, shape->groups},
        },
        [&] {
          return Reduce<T>::dot(stream, data<T>(a), data<T>(b), data<float>(out),
                                data<float>(partial), *shape);
        });
  });
}

// The last axis of `counts` has the bins; the other axes count the groups.
ffi::Error HistogramImpl(cudaStream_t stream, Buffer x, Result counts) {
  const auto axes = counts->dimensions();
  if (axes.size() == 0 || axes.back() == 0) return invalid("counts", "has no last axis of bins");
  ffi::Error error = check_leading_axes(x, "x", *counts, "counts", 1);
  if (error.failure()) return error;
  const int64_t bins = axes.back(), groups = count(*counts) / bins;
  return check_and_launch(
      {
          {"x", x, ffi::S32, count(x)},
          {"counts", *counts, ffi::S32, groups * bins},
      },
      [&] {
        if (groups == 0) return cudaSuccess;
        return histogram(stream, data<int32_t>(x), data<int32_t>(counts), groups, count(x) / groups,
                         bins);
      });
}

}  // namespace

JAXLLM_HANDLER(ReduceSumForward, ReduceSumForwardImpl);
JAXLLM_HANDLER(ReduceMaxForward, ReduceMaxForwardImpl);
JAXLLM_HANDLER(DotForward, DotForwardImpl);
JAXLLM_HANDLER(Histogram, HistogramImpl);

}  // namespace jaxllm
