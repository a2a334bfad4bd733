// FFI handlers of the kernels for boxes: check the buffers, switch on their dtype, launch.
#include "common/ffi.h"

#include "handlers.h"
#include "vision/nms.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

ffi::Error NmsImpl(cudaStream_t stream, Buffer boxes, Result keep, Result overlaps,
                   float iou_threshold, bool inclusive) {
  const auto axes = keep->dimensions();
  if (axes.size() == 0) return ffi::Error::InvalidArgument("keep has no axis of boxes");
  const int64_t count = axes.back();
  if (keep->element_count() == 0) return ffi::Error::Success();
  // jax.vmap gives every buffer new leading axes: what comes out counts the groups.
  const int64_t groups = keep->element_count() / count;
  if (static_cast<int64_t>(boxes.element_count()) != groups * count * 4) {
    return ffi::Error::InvalidArgument("boxes has not four numbers for each element of keep");
  }
  const int64_t words = groups * count * nms_tiles(count);
  if (static_cast<int64_t>(overlaps->size_bytes()) < words * int64_t{sizeof(uint64_t)}) {
    return ffi::Error::InvalidArgument("the workspace has too few words");
  }
  return dispatch_floating(boxes.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(nms(stream, data<T>(boxes), data<bool>(keep), data<uint64_t>(overlaps),
                            groups, count, iou_threshold, inclusive));
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(Nms, NmsImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Buffer>()  // boxes
                                  .Ret<Buffer>()  // keep
                                  .Ret<Buffer>()  // overlaps
                                  .Attr<float>("iou_threshold")
                                  .Attr<bool>("inclusive"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
