// FFI handlers of the quantization kernels: check the buffers, switch on their dtypes, launch.
#include "common/ffi.h"

#include "gemm/products.h"
#include "handlers.h"
#include "quantization/quantize.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// Groups of elements, each with a scale.
struct Groups {
  int64_t groups, width;
};

ffi::ErrorOr<Groups> groups_of(const Buffer& values, const Buffer& scales) {
  const int64_t groups = scales.element_count(), count = values.element_count();
  if (scales.element_type() != ffi::F32 || (groups == 0 ? count != 0 : count % groups != 0)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("scales are not float32, one a group"));
  }
  return Groups{groups, groups == 0 ? 0 : count / groups};
}

ffi::Error QuantizeImpl(cudaStream_t stream, Buffer w, int64_t group_size, Result q,
                        Result scales) {
  const ffi::ErrorOr<Groups> groups = groups_of(w, *scales);
  if (groups.has_error()) return groups.error();
  if (q->element_type() != ffi::S8 || (groups->groups > 0 && groups->width != group_size)) {
    return ffi::Error::InvalidArgument("q is not int8, or scales do not fit group_size");
  }
  return dispatch_floating(w.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(GroupQuantization<T>::quantize(
        stream, data<T>(w), data<int8_t>(q), data<float>(scales), groups->groups, groups->width));
  });
}

ffi::Error DequantizeImpl(cudaStream_t stream, Buffer q, Buffer scales, Result w) {
  const ffi::ErrorOr<Groups> groups = groups_of(q, scales);
  if (groups.has_error()) return groups.error();
  if (q.element_type() != ffi::S8 || w->element_count() != q.element_count()) {
    return ffi::Error::InvalidArgument("q is not int8, or w not of its size");
  }
  return dispatch_floating(w->element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(GroupQuantization<T>::dequantize(
        stream, data<int8_t>(q), data<float>(scales), data<T>(w), groups->groups, groups->width));
  });
}

ffi::Error QuantizedMatvecImpl(cudaStream_t stream, Buffer q, Buffer scales, Buffer x, Result out) {
  if (q.element_type() != ffi::S8) return ffi::Error::InvalidArgument("q is not int8");
  const ffi::ErrorOr<Groups> groups = groups_of(q, scales);
  if (groups.has_error()) return groups.error();
  return run_products<int8_t>(stream, q, data<float>(scales), groups->width, x, out);
}

auto stream_binding() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Quantize, QuantizeImpl,
                              stream_binding()
                                  .Arg<Buffer>()                // w
                                  .Attr<int64_t>("group_size")  //
                                  .Ret<Buffer>()                // q
                                  .Ret<Buffer>(),               // scales
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(Dequantize, DequantizeImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // q
                                  .Arg<Buffer>()   // scales
                                  .Ret<Buffer>(),  // w
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(QuantizedMatvec, QuantizedMatvecImpl,
                              stream_binding()
                                  .Arg<Buffer>()   // q
                                  .Arg<Buffer>()   // scales
                                  .Arg<Buffer>()   // x
                                  .Ret<Buffer>(),  // out
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
