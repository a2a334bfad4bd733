// The layout of the heads of an array in memory.
#pragma once

#include <cstdint>

namespace jaxllm {

// Element (b, t, n, h) of a (batch, length, heads, width) array is
// data[(b * length + t) * row_stride + n * width + h]: the array may be part of wider rows.
template <typename T>
struct HeadRows {
  T* data;
  int64_t row_stride;
};

}  // namespace jaxllm
