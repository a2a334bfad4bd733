// FFI handlers of the rotary kernels: check the buffers, switch on their dtype, launch.
#include "common/ffi.h"

#include <limits>

#include "handlers.h"
#include "rotary/rope.h"

namespace jaxllm {
namespace {

// The sizes of a call. The axes of the tables before the positions are the first axes of q:
// jax.vmap gives every buffer a new leading axis, whether or not each sequence has its own table.
ffi::ErrorOr<RopeShape> shape_of(const Buffer& q, const Buffer& k, const Buffer& cos) {
  const auto q_axes = q.dimensions(), k_axes = k.dimensions(), table_axes = cos.dimensions();
  if (q_axes.size() < 3) return ffi::Unexpected(invalid("q", "has too few axes"));
  if (k_axes.size() != q_axes.size()) {
    return ffi::Unexpected(invalid("k", "has another number of axes than q"));
  }
  if (table_axes.size() < 2) return ffi::Unexpected(invalid("cos", "has too few axes"));
  RopeShape shape;
  shape.length = q_axes[q_axes.size() - 3];
  shape.q_heads = q_axes[q_axes.size() - 2];
  shape.k_heads = k_axes[k_axes.size() - 2];
  shape.width = q_axes.back();
  shape.pairs = table_axes.back();
  shape.sequences = shape.tables = 1;
  for (size_t i = 0; i + 3 < q_axes.size(); ++i) shape.sequences *= q_axes[i];
  for (size_t i = 0; i + 2 < table_axes.size(); ++i) shape.tables *= table_axes[i];
  ffi::Error error = check_leading_axes(q, "q", cos, "cos", 2);
  if (error.failure()) return ffi::Unexpected(error);
  if (2 * shape.pairs > shape.width || shape.width > std::numeric_limits<int32_t>::max()) {
    return ffi::Unexpected(invalid("cos", "has " + std::to_string(shape.pairs) +
                                              " pairs of columns; heads have " +
                                              std::to_string(shape.width) + " columns"));
  }
  if (shape.tables != 0 && shape.sequences % shape.tables != 0) {
    return ffi::Unexpected(invalid("cos", "has tables that do not divide the sequences of q"));
  }
  return shape;
}

ffi::Error rotate(cudaStream_t stream, const Buffer& q, const Buffer& k, const Buffer& cos,
                  const Buffer& sin, bool interleaved, bool inverse, Result& q_out, Result& k_out) {
  const ffi::ErrorOr<RopeShape> shape = shape_of(q, k, cos);
  if (shape.has_error()) return shape.error();
  const int64_t rows = shape->sequences * shape->length;
  const int64_t q_row = shape->q_heads * shape->width, k_row = shape->k_heads * shape->width;
  const int64_t of_table = shape->tables * shape->length * shape->pairs;
  return dispatch_floating(q, "q", [&](auto type) {
    using T = typename decltype(type)::type;
    return check_and_launch(
        {
            {"k", k, dtype_of<T>(), rows * k_row},
            {"cos", cos, ffi::F32, of_table},
            {"sin", sin, ffi::F32, of_table},
            {"q_out", *q_out, dtype_of<T>(), rows * q_row},
            {"k_out", *k_out, dtype_of<T>(), rows * k_row},
        },
        [&] {
          return Rope<T>::rotate(stream, {data<T>(q), q_row}, {data<T>(k), k_row}, data<float>(cos),
                                 data<float>(sin), {data<T>(q_out), q_row}, {data<T>(k_out), k_row},
                                 interleaved, inverse, *shape);
        });
  });
}

ffi::Error RopeForwardImpl(cudaStream_t stream, Buffer q, Buffer k, Buffer cos, Buffer sin,
                           bool interleaved, Result q_out, Result k_out) {
  return rotate(stream, q, k, cos, sin, interleaved, /*inverse=*/false, q_out, k_out);
}

ffi::Error RopeBackwardImpl(cudaStream_t stream, Buffer dq_out, Buffer dk_out, Buffer cos,
                            Buffer sin, bool interleaved, Result dq, Result dk) {
  return rotate(stream, dq_out, dk_out, cos, sin, interleaved, /*inverse=*/true, dq, dk);
}

// Rotates the first `heads` heads of each row of a projection (..., length, columns). XLA gives the
// result the buffer of qkv; the other heads are copied where it does not.
ffi::Error rotate_packed(cudaStream_t stream, const Buffer& qkv, const Buffer& cos,
                         const Buffer& sin, int64_t heads, int64_t head_dim, bool interleaved,
                         bool inverse, Result& out) {
  const auto axes = qkv.dimensions(), table_axes = cos.dimensions();
  if (axes.size() < 2) return invalid("qkv", "has too few axes");
  if (table_axes.size() < 2) return invalid("cos", "has too few axes");
  RopeShape shape{};
  shape.length = axes[axes.size() - 2];
  shape.q_heads = heads;
  shape.width = head_dim;
  shape.pairs = table_axes.back();
  shape.sequences = shape.tables = 1;
  for (size_t i = 0; i + 2 < axes.size(); ++i) shape.sequences *= axes[i];
  for (size_t i = 0; i + 2 < table_axes.size(); ++i) shape.tables *= table_axes[i];
  const int64_t columns = axes.back(), of_table = shape.tables * shape.length * shape.pairs;
  if (heads < 0 || head_dim <= 0 || head_dim > std::numeric_limits<int32_t>::max() ||
      columns % head_dim != 0 || heads * head_dim > columns) {
    return invalid("qkv", "does not fit the heads that rotate");
  }
  if (2 * shape.pairs > head_dim || (shape.tables != 0 && shape.sequences % shape.tables != 0)) {
    return invalid("cos", "does not fit qkv");
  }
  return dispatch_floating(qkv, "qkv", [&](auto type) {
    using T = typename decltype(type)::type;
    const HeadRows<T> rows{data<T>(out), columns}, none{nullptr, columns};
    return check_and_launch(
        {
            {"cos", cos, ffi::F32, of_table},
            {"sin", sin, ffi::F32, of_table},
            {"out", *out, dtype_of<T>(), count(qkv)},
        },
        [&] {
          if (rows.data != data<T>(qkv)) {
            const cudaError_t status = cudaMemcpyAsync(rows.data, data<T>(qkv), qkv.size_bytes(),
                                                       cudaMemcpyDeviceToDevice, stream);
            if (status != cudaSuccess) return status;
          }
          return Rope<T>::rotate(stream, {rows.data, columns}, {nullptr, columns}, data<float>(cos),
                                 data<float>(sin), rows, none, interleaved, inverse, shape);
        });
  });
}

ffi::Error RopePackedForwardImpl(cudaStream_t stream, Buffer qkv, Buffer cos, Buffer sin,
                                 int64_t heads, int64_t head_dim, bool interleaved, Result out) {
  return rotate_packed(stream, qkv, cos, sin, heads, head_dim, interleaved, /*inverse=*/false, out);
}

ffi::Error RopePackedBackwardImpl(cudaStream_t stream, Buffer dqkv_out, Buffer cos, Buffer sin,
                                  int64_t heads, int64_t head_dim, bool interleaved, Result dqkv) {
  return rotate_packed(stream, dqkv_out, cos, sin, heads, head_dim, interleaved, /*inverse=*/true,
                       dqkv);
}

}  // namespace

JAXLLM_HANDLER(RopePackedForward, RopePackedForwardImpl, "heads", "head_dim", "interleaved");
JAXLLM_HANDLER(RopePackedBackward, RopePackedBackwardImpl, "heads", "head_dim", "interleaved");
JAXLLM_HANDLER(RopeForward, RopeForwardImpl, "interleaved");
JAXLLM_HANDLER(RopeBackward, RopeBackwardImpl, "interleaved");

}  // namespace jaxllm
