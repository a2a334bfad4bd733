// FFI handlers of the attention kernels: check the buffers, switch on their dtypes, launch.
#include "common/ffi.h"

#include "attention/repeat_kv.h"
#include "attention/softmax.h"
#include "handlers.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// Rows of scores, `length` of them to a mask. jax.vmap's new leading axis is more rows.
struct Rows {
  int64_t rows, width, length;
};

ffi::ErrorOr<Rows> rows_of(const Buffer& x, bool causal) {
  const auto dimensions = x.dimensions();
  const size_t axes = dimensions.size();
  if (axes < (causal ? 2 : 1)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("x has too few axes"));
  }
  const int64_t width = dimensions[axes - 1];
  if (x.element_count() == 0) return Rows{0, width, 1};
  // Without a mask every row sees all, as the last of its queries does.
  const int64_t length = causal ? dimensions[axes - 2] : 1;
  return Rows{static_cast<int64_t>(x.element_count()) / width, width, length};
}

ffi::Error SoftmaxForwardImpl(cudaStream_t stream, Buffer x, float scale, bool causal, Result out) {
  const ffi::ErrorOr<Rows> rows = rows_of(x, causal);
  if (rows.has_error()) return rows.error();
  return dispatch_floating(x.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(Softmax<T>::forward(stream, data<T>(x), scale, data<T>(out), rows->rows,
                                            rows->width, rows->length));
  });
}

ffi::Error SoftmaxBackwardImpl(cudaStream_t stream, Buffer out, Buffer dout, float scale,
                               bool causal, Result dx) {
  const ffi::ErrorOr<Rows> rows = rows_of(out, causal);
  if (rows.has_error()) return rows.error();
  if (dout.element_type() != out.element_type() || dout.element_count() != out.element_count()) {
    return ffi::Error::InvalidArgument("dout is not like out");
  }
  return dispatch_floating(out.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(Softmax<T>::backward(stream, data<T>(out), data<T>(dout), scale,
                                             data<T>(dx), rows->rows, rows->width, rows->length));
  });
}

// Heads of `width` elements.
struct Heads {
  int64_t heads, width;
};

ffi::ErrorOr<Heads> heads_of(const Buffer& one, const Buffer& copies, int64_t groups) {
  if (one.dimensions().size() == 0) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("x is a scalar"));
  }
  if (copies.element_count() != one.element_count() * groups) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("out has not groups times the heads of x"));
  }
  if (one.element_count() == 0) return Heads{0, 0};
  const int64_t width = one.dimensions().back();
  return Heads{static_cast<int64_t>(one.element_count()) / width, width};
}

ffi::Error RepeatKvForwardImpl(cudaStream_t stream, Buffer x, int64_t groups, Result out) {
  const ffi::ErrorOr<Heads> heads = heads_of(x, *out, groups);
  if (heads.has_error()) return heads.error();
  return dispatch_floating(x.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(
        RepeatKv<T>::forward(stream, data<T>(x), data<T>(out), heads->heads, heads->width, groups));
  });
}

ffi::Error RepeatKvBackwardImpl(cudaStream_t stream, Buffer dout, int64_t groups, Result dx) {
  const ffi::ErrorOr<Heads> heads = heads_of(*dx, dout, groups);
  if (heads.has_error()) return heads.error();
  return dispatch_floating(dout.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(RepeatKv<T>::backward(stream, data<T>(dout), data<T>(dx), heads->heads,
                                              heads->width, groups));
  });
}

auto stream_binding() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(SoftmaxForward, SoftmaxForwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()         // x
                                  .Attr<float>("scale")  //
                                  .Attr<bool>("causal")  //
                                  .Ret<Buffer>(),        // out
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(SoftmaxBackward, SoftmaxBackwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()         // out
                                  .Arg<Buffer>()         // dout
                                  .Attr<float>("scale")  //
                                  .Attr<bool>("causal")  //
                                  .Ret<Buffer>(),        // dx
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(RepeatKvForward, RepeatKvForwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()            // x
                                  .Attr<int64_t>("groups")  //
                                  .Ret<Buffer>(),           // out
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(RepeatKvBackward, RepeatKvBackwardImpl,
                              stream_binding()
                                  .Arg<Buffer>()            // dout
                                  .Attr<int64_t>("groups")  //
                                  .Ret<Buffer>(),           // dx
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
