// FFI handlers of the kernels for boxes: check the buffers, switch on their dtype, launch.
#include "common/ffi.h"

#include "handlers.h"
#include "vision/nms.h"

namespace jaxllm {
namespace {

ffi::Error NmsImpl(cudaStream_t stream, Buffer boxes, Result keep, Result overlaps,
                   float iou_threshold, bool inclusive) {
  const auto axes = keep->dimensions();
  if (axes.size() == 0) return invalid("keep", "has no axis of boxes");
  // jax.vmap gives every buffer new leading axes: those of `keep` count the groups.
  ffi::Error error = check_leading_axes(boxes, "boxes", *keep, "keep");
  if (error.failure()) return error;
  const int64_t boxes_of_group = axes.back();
  const int64_t groups = boxes_of_group == 0 ? 0 : count(*keep) / boxes_of_group;
  const int64_t words = groups * boxes_of_group * nms_tiles(boxes_of_group);
  return dispatch_floating(boxes, "boxes", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch(
        {
            {"boxes", boxes, dtype_of<T>(), count(*keep) * 4},
            {"keep", *keep, ffi::PRED, count(*keep)},
            {"overlaps", *overlaps, ffi::U32, words * 2},
        },
        [&] {
          return nms(stream, data<T>(boxes), data<bool>(keep), data<uint64_t>(overlaps), groups,
                     boxes_of_group, iou_threshold, inclusive);
        });
  });
}

}  // namespace

JAXLLM_HANDLER(Nms, NmsImpl, "iou_threshold", "inclusive");

}  // namespace jaxllm
