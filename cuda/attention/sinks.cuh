// Attention sinks: a score of each head that joins the denominator of its softmaxes, without a key.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/fast_math.cuh"

namespace jaxllm::attention {

// `data` is null if there are none. Rows are (sequence, head); those of a group share their sinks.
struct Sinks {
  const float* data;  // in base e
  uint32_t heads, group_rows;

  static Sinks of_groups(const float* data, int64_t groups, int64_t batch, int64_t heads) {
    if (data == nullptr) return {};
    return {data, static_cast<uint32_t>(heads), static_cast<uint32_t>(batch / groups * heads)};
  }

  // -infinity for none.
  __device__ __forceinline__ float of(uint32_t row) const {
    return data == nullptr ? -INFINITY : data[row / group_rows * heads + row % heads];
  }
  __device__ __forceinline__ float in_base_2(uint32_t row) const { return of(row) * kLog2E; }
};

// The end of a softmax over keys.
struct SoftmaxEnd {
  float factor;  // of the values' sum, which becomes their mean; 0 where no key is seen
  float lse;     // in the base of the scores
};

// From the largest score of the keys and the sum of their weights relative to it; the sink is
// -infinity for none. Nothing overflows where the sink is far above the scores. In base 2, or with
// kBaseE as exact as float32 is.
template <bool kBaseE = false>
__device__ __forceinline__ SoftmaxEnd end_softmax(float largest, float total, float sink) {
  const float most = fmaxf(largest, sink);
  const auto weight = [most](float score) {
    if (score == -INFINITY) return 0.0f;  // the difference of two is no number
    return kBaseE ? expf(score - most) : exp2_fast(score - most);
  };
  // Without a sink nothing changes, and a NaN among the scores stays in the total.
  const float of_keys = sink == -INFINITY ? 1.0f : weight(largest);
  const float sum = fmaf(total, of_keys, weight(sink));
  return {sum == 0.0f ? 0.0f : of_keys / sum, most + (kBaseE ? logf(sum) : log2f(sum))};
}

}  // namespace jaxllm::attention
