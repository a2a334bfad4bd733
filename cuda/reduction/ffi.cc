// FFI handlers of the reductions: check the buffers, switch on their dtype, launch.
#include "common/ffi.h"

#include "handlers.h"
#include "reduction/histogram.h"
#include "reduction/reduce.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

constexpr int64_t kMaxBlocks = 0x7fffffff;  // of a grid

// jax.vmap gives every buffer new leading axes: what comes out counts the groups.
ffi::ErrorOr<ReduceShape> shape_of(const Buffer& x, Result& out, Result& partial) {
  ReduceShape shape = {static_cast<int64_t>(out->element_count()), 0, 1};
  if (shape.groups == 0) return shape;
  shape.size = x.element_count() / shape.groups;
  shape.partials = partial->element_count() / shape.groups;
  if (shape.partials < 1) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("the workspace has no partial results"));
  }
  if (static_cast<int64_t>(partial->element_count()) > kMaxBlocks) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(
        "jax.vmap maps over " + std::to_string(shape.groups) + " calls of " +
        std::to_string(shape.partials) + " blocks; a grid has at most 2147483647 blocks"));
  }
  return shape;
}

ffi::Error ReduceSumForwardImpl(cudaStream_t stream, Buffer x, Result out, Result partial) {
  const ffi::ErrorOr<ReduceShape> shape = shape_of(x, out, partial);
  if (shape.has_error()) return shape.error();
  return dispatch_floating(x.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(
        Reduce<T>::sum(stream, data<T>(x), data<float>(out), data<float>(partial), *shape));
  });
}

ffi::Error ReduceMaxForwardImpl(cudaStream_t stream, Buffer x, Result out, Result partial) {
  const ffi::ErrorOr<ReduceShape> shape = shape_of(x, out, partial);
  if (shape.has_error()) return shape.error();
  return dispatch_floating(x.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(
        Reduce<T>::max(stream, data<T>(x), data<T>(out), data<float>(partial), *shape));
  });
}

ffi::Error DotForwardImpl(cudaStream_t stream, Buffer a, Buffer b, Result out, Result partial) {
  const ffi::ErrorOr<ReduceShape> shape = shape_of(a, out, partial);
  if (shape.has_error()) return shape.error();
  if (b.element_type() != a.element_type() || b.element_count() != a.element_count()) {
    return ffi::Error::InvalidArgument("b has not the shape and dtype of a");
  }
  return dispatch_floating(a.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(Reduce<T>::dot(stream, data<T>(a), data<T>(b), data<float>(out),
                                       data<float>(partial), *shape));
  });
}

ffi::Error HistogramImpl(cudaStream_t stream, Buffer x, Result counts) {
  if (x.element_type() != ffi::S32 || counts->element_type() != ffi::S32) {
    return ffi::Error::InvalidArgument("x or the counts are not int32");
  }
  const auto axes = counts->dimensions();
  if (axes.size() == 0 || axes.back() == 0) {
    return ffi::Error::InvalidArgument("the counts have no last axis of bins");
  }
  const int64_t bins = axes.back(), groups = counts->element_count() / bins;
  if (groups == 0) return ffi::Error::Success();
  const int64_t size = x.element_count() / groups;
  return to_ffi_error(
      histogram(stream, data<int32_t>(x), data<int32_t>(counts), groups, size, bins));
}

auto stream_binding() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ReduceSumForward, ReduceSumForwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // x
                                  .Ret<Buffer>()   // out
                                  .Ret<Buffer>(),  // partial
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(ReduceMaxForward, ReduceMaxForwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // x
                                  .Ret<Buffer>()   // out
                                  .Ret<Buffer>(),  // partial
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(DotForward, DotForwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // a
                                  .Arg<Buffer>()   // b
                                  .Ret<Buffer>()   // out
                                  .Ret<Buffer>(),  // partial
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(Histogram, HistogramImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // x
                                  .Ret<Buffer>(),  // counts
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
