// FFI handlers of repeat_kv: check the buffers, switch on their dtypes, launch.
#include "attention/repeat_kv.h"
#include "common/ffi.h"
#include "handlers.h"

namespace jaxllm {
namespace {

// Heads of `width` elements.
struct Heads {
  int64_t heads, width;
};

ffi::ErrorOr<Heads> heads_of(const Buffer& x, const char* name, int64_t groups) {
  if (x.dimensions().size() == 0) return ffi::Unexpected(invalid(name, "is a scalar"));
  if (groups < 1) return ffi::Unexpected(invalid("groups", "is below 1"));
  if (count(x) == 0) return Heads{0, 0};
  const int64_t width = x.dimensions().back();
  return Heads{count(x) / width, width};
}

ffi::Error RepeatKvForwardImpl(cudaStream_t stream, Buffer x, int64_t groups, Result out) {
  const ffi::ErrorOr<Heads> heads = heads_of(x, "x", groups);
  if (heads.has_error()) return heads.error();
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"out", *out, dtype_of<T>(), count(x) * groups}}, [&] {
      return RepeatKv<T>::forward(stream, data<T>(x), data<T>(out), heads->heads, heads->width,
                                  groups);
    });
  });
}

ffi::Error RepeatKvBackwardImpl(cudaStream_t stream, Buffer dout, int64_t groups, Result dx) {
  const ffi::ErrorOr<Heads> heads = heads_of(*dx, "dx", groups);
  if (heads.has_error()) return heads.error();
  return dispatch_floating(dout, "dout", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"dout", dout, dtype_of<T>(), count(*dx) * groups},
                             {"dx", *dx, dtype_of<T>(), count(*dx)}},
                            [&] {
                              return RepeatKv<T>::backward(stream, data<T>(dout), data<T>(dx),
                                                           heads->heads, heads->width, groups);
                            });
  });
}

}  // namespace

JAXLLM_HANDLER(RepeatKvForward, RepeatKvForwardImpl, "groups");
JAXLLM_HANDLER(RepeatKvBackward, RepeatKvBackwardImpl, "groups");

}  // namespace jaxllm
