// What the FFI handlers of kernels with rows, and a weight or bias of their columns, share.
#pragma once

#include <cstdint>
#include <string>

#include "common/ffi.h"

namespace jaxllm {

// The sizes of a call. jax.vmap gives every buffer a new leading axis; the weights have no other
// leading axis, so their rows count the independent groups.
struct RowShape {
  int64_t groups, rows, width;

  int64_t weights() const { return groups * width; }
  int64_t statistics() const { return groups * rows; }
  int64_t elements() const { return groups * rows * width; }
};

// The most blocks along the y and the z axis of a grid.
inline constexpr int64_t kMaxGridYZ = 65535;

inline ffi::ErrorOr<RowShape> row_shape_of(const Buffer& x, const char* name, const Buffer& weight,
                                           const char* weight_name, int64_t max_groups) {
  if (x.dimensions().size() == 0) return ffi::Unexpected(invalid(name, "is a scalar"));
  const int64_t width = x.dimensions().back();
  if (weight.dimensions().size() == 0 || weight.dimensions().back() != width) {
    return ffi::Unexpected(invalid(weight_name, std::string("is not as wide as ") + name));
  }
  if (ffi::Error error = check_leading_axes(x, name, weight, weight_name, 1); error.failure()) {
    return ffi::Unexpected(error);
  }
  if (width == 0) return RowShape{0, 0, 0};
  const int64_t groups = count(weight) / width;
  const int64_t rows = groups == 0 ? 0 : count(x) / width / groups;
  if (groups > max_groups) return ffi::Unexpected(too_many_groups(groups, max_groups));
  return RowShape{groups, rows, width};
}

// The rows of `partial`, the workspace of `sums` column sums: (groups, sums, rows, width).
inline ffi::ErrorOr<int64_t> partial_rows_of(const Buffer& partial, const RowShape& shape,
                                             int64_t sums) {
  const auto axes = partial.dimensions();
  if (axes.size() < 2) return ffi::Unexpected(invalid("partial", "has fewer than two axes"));
  const int64_t rows = axes[axes.size() - 2];
  if (rows > kMaxGridYZ || (rows == 0 && shape.rows > 0)) {
    return ffi::Unexpected(
        invalid("partial", "has " + std::to_string(rows) + " rows; 1 to 65535 are required"));
  }
  ffi::Error error =
      check_buffer({"partial", partial, ffi::F32, shape.groups * sums * rows * shape.width});
  if (error.failure()) return ffi::Unexpected(error);
  return rows;
}

}  // namespace jaxllm
