// FFI handlers of softmax: check the buffers, switch on their dtypes, launch.
#include "attention/softmax.h"
#include "common/ffi.h"
#include "handlers.h"

namespace jaxllm {
namespace {

// Rows of scores, `length` queries to a causal mask. A leading axis of jax.vmap adds rows.
struct ScoreRows {
  int64_t rows, width, length;
};

ffi::ErrorOr<ScoreRows> rows_of(const Buffer& x, const char* name, bool causal) {
  const auto dimensions = x.dimensions();
  const size_t axes = dimensions.size();
  if (axes < (causal ? 2 : 1)) return ffi::Unexpected(invalid(name, "has too few axes"));
  const int64_t width = dimensions[axes - 1];
  if (count(x) == 0) return ScoreRows{0, width, 1};
  // Without a mask every row sees all keys, as the last query of a causal mask does.
  const int64_t length = causal ? dimensions[axes - 2] : 1;
  return ScoreRows{count(x) / width, width, length};
}

ffi::Error SoftmaxForwardImpl(cudaStream_t stream, Buffer x, float scale, bool causal, Result out) {
  const ffi::ErrorOr<ScoreRows> rows = rows_of(x, "x", causal);
  if (rows.has_error()) return rows.error();
  return dispatch_floating(x, "x", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch({{"out", *out, dtype_of<T>(), count(x)}}, [&] {
      return Softmax<T>::forward(stream, data<T>(x), scale, data<T>(out), rows->rows, rows->width,
                                 rows->length);
    });
  });
}

ffi::Error SoftmaxBackwardImpl(cudaStream_t stream, Buffer out, Buffer dout, float scale,
                               bool causal, Result dx) {
  const ffi::ErrorOr<ScoreRows> rows = rows_of(out, "out", causal);
  if (rows.has_error()) return rows.error();
  return dispatch_floating(out, "out", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch(
        {{"dout", dout, dtype_of<T>(), count(out)}, {"dx", *dx, dtype_of<T>(), count(out)}}, [&] {
          return Softmax<T>::backward(stream, data<T>(out), data<T>(dout), scale, data<T>(dx),
                                      rows->rows, rows->width, rows->length);
        });
  });
}

}  // namespace

JAXLLM_HANDLER(SoftmaxForward, SoftmaxForwardImpl, "scale", "causal");
JAXLLM_HANDLER(SoftmaxBackward, SoftmaxBackwardImpl, "scale", "causal");

}  // namespace jaxllm
