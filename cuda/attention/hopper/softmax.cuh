// The online softmax of the forward, and the softmax of the backward, on wgmma accumulators.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/fast_math.cuh"
#include "common/wgmma.cuh"

namespace jaxllm::hopper {

// What a softcap multiplies: tanh(factor s) of a score s = q k^T.
//
// By exponentials the tanh takes about as long as the products of heads of 128. So where the scores
// of a warp are small against the softcap, a polynomial in s^2 serves instead:
//
//   tanh(factor s) = s (c0 + c1 s^2 + c2 s^4 + c3 s^6)    |factor s| <= 1/2, relative error 2^-20
//   tanh(factor s) = s (c0 + c1 s^2)                      |factor s| <= 1/8, relative error 2^-17
//
// The second is for exponents of weights alone. With a softcap of 50 they are off by 4e-5 at most.
//
// A softcap c bounds the exponents of the weights, to base 2, by b = c log2(e). Where b is at most
// kMaxBound the online softmax in bfloat16, which has the exponents of float32, keeps the maxima of
// the first tile, but none below b - kMostAbove. So no weight is above 2^kMostAbove, which leaves
// room for the sums of weights times values.
struct Softcap {
  static constexpr double kMaxBound = 76.0, kMostAbove = 88.0;

  float factor;
  float square_limit, short_square_limit;  // of s^2, for each polynomial
  float coefficients[4];
  float log2_coefficients[4], short_log2_coefficients[2];  // times c log2(e), for the exponent
  bool is_bounded;
  float least_max;  // where they are bounded; as the maxima of tanh, not yet scaled

  static Softcap of(float scale, float softcap) {
    if (softcap == 0.0f) return {};
    // Those of the least largest relative error of tanh(x) for |x| <= 1/2, and for |x| <= 1/8.
    constexpr double kTanh[4] = {0.9999994558, -0.3332631793, 0.1319029655, -0.0444022248};
    constexpr double kShortTanh[2] = {0.9999959588, -0.3312617543};
    const double factor = static_cast<double>(scale) / softcap, bound = softcap * M_LOG2E;
    Softcap result{};
    result.factor = static_cast<float>(factor);
    result.square_limit = static_cast<float>(0.25 / (factor * factor));
    result.short_square_limit = static_cast<float>(0.015625 / (factor * factor));
    result.is_bounded = bound <= kMaxBound;
    result.least_max = static_cast<float>(std::max(-1.0, 1.0 - kMostAbove / bound));
    bool fits = std::isnormal(result.square_limit) && std::isnormal(result.short_square_limit);
    double power = factor;
    for (int i = 0; i < 4; ++i, power *= factor * factor) {
      const auto log2_of = [&](double c) { return static_cast<float>(c * power * bound); };
      result.coefficients[i] = static_cast<float>(kTanh[i] * power);
      result.log2_coefficients[i] = log2_of(kTanh[i]);
      if (i < 2) result.short_log2_coefficients[i] = log2_of(kShortTanh[i]);
      // Of some factors float32 does not hold the seventh power.
      fits = fits && std::isnormal(result.coefficients[i]) &&
             std::isnormal(result.log2_coefficients[i]);
    }
    if (!fits) result.square_limit = result.short_square_limit = -1.0f;
    return result;
  }
};

// c0 + c1 s^2 + c2 s^4 + ...
template <int kSize>
__device__ __forceinline__ float polynomial_of_square(float s, const float (&c)[kSize]) {
  const float square = s * s;
  float value = c[kSize - 1];
#pragma unroll
  for (int i = kSize - 2; i >= 0; --i) value = fmaf(square, value, c[i]);
  return value;
}

// At least the largest s^2 of the warp: that of eight sums of squares of each thread. It takes
// one instruction a score, as a maximum does, but one of twice the rate. NaN where a score is NaN.
template <int kSize>
__device__ __forceinline__ float bound_squares(const float (&s)[kSize]) {
  constexpr int kSums = 8;
  float sums[kSums] = {};
#pragma unroll
  for (int i = 0; i < kSize; ++i) sums[i % kSums] = fmaf(s[i], s[i], sums[i % kSums]);
  // Floats from 0 on are in the order of their bits, and NaN is after infinity.
  unsigned largest = 0;
#pragma unroll
  for (const float sum : sums) largest = max(largest, __float_as_uint(sum));
  return __uint_as_float(__reduce_max_sync(0xffffffff, largest));
}

template <int kSize>
__device__ __forceinline__ void cap_scores(float (&s)[kSize], const Softcap& softcap,
                                           float squares) {
  if (squares <= softcap.square_limit) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) s[i] *= polynomial_of_square(s[i], softcap.coefficients);
  } else {
#pragma unroll
    for (int i = 0; i < kSize; ++i) s[i] = tanh_fast(s[i] * softcap.factor);
  }
}

template <int kSize>
__device__ __forceinline__ void cap_scores(float (&s)[kSize], const Softcap& softcap) {
  cap_scores(s, softcap, bound_squares(s));
}

// The running softmax of a thread's two rows:
//
//   m' = max(m, max s)    p = 2^(c (s - m'))    o = o 2^(c (m - m')) + p v      c = scale log2(e)
//
// In bfloat16 m, and o with it, stay what they are as long as no row's p in a tile sum to more than
// 2^16: bfloat16 has the exponents of float32, and p above one is as precise as p below. A tile
// beyond is computed again.
template <typename T, int kBlockN, int kValueDim>
struct OnlineSoftmax {
  float row_max[2] = {-INFINITY, -INFINITY};  // of the scores, not yet scaled
  float row_sum[2] = {0.0f, 0.0f};            // over this thread's columns
  float scaled_max[2], rescale[2];            // of the present tile

  // Takes the scores' maxima. In two parts for each row, so that no operation waits for the last.
  __device__ __forceinline__ void update_max(const float (&s)[kBlockN / 2], float scale_log2) {
    float part[2][2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      part[row][0] = fmaxf(row_max[row], s[2 * row]);
      part[row][1] = s[2 * row + 1];
    }
#pragma unroll
    for (int i = 4; i < kBlockN / 2; i += 4) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int b = 0; b < 2; ++b) part[row][b] = fmaxf(part[row][b], s[i + 2 * row + b]);
      }
    }
    float highest[2] = {fmaxf(part[0][0], part[0][1]), fmaxf(part[1][0], part[1][1])};
#pragma unroll
    for (int lane = 1; lane < 4; lane *= 2) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        highest[row] = fmaxf(highest[row], __shfl_xor_sync(0xffffffff, highest[row], lane));
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // A row without keys so far: -inf - -inf is NaN.
      scaled_max[row] = highest[row] == -INFINITY ? 0.0f : highest[row] * scale_log2;
      rescale[row] = exp2_fast(fmaf(row_max[row], scale_log2, -scaled_max[row]));
      row_max[row] = highest[row];
    }
  }

  // Computes p, rounded, and the sums of p, and rescales the output. All in one pass: an
  // exponential takes eight clocks, in which there is room for the rest. Alone for the first tile,
  // after update_max.
  template <bool kRescale>
  __device__ __forceinline__ void exponentiate(const float (&s)[kBlockN / 2], float scale_log2,
                                               uint32_t (&p)[kBlockN / 4],
                                               float (&o)[kValueDim / 2], float (&sums)[2]) const {
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < kBlockN / 2; i += 4) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float pair[2];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          pair[b] = exp2_fast(fmaf(s[i + 2 * row + b], scale_log2, -scaled_max[row]));
          sum[row][b] += pair[b];
        }
        p[i / 2 + row] = pack_pair<T>(pair[0], pair[1]);
      }
      if constexpr (kRescale) {  // an equal part of the output, where the sizes divide
        constexpr int kParts = kBlockN / 8, kSize = kValueDim / 2;
#pragma unroll
        for (int k = 0; k < kSize; ++k) {
          if (k * kParts / kSize == i / 4) o[k] *= rescale[k / 2 % 2];
        }
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) sums[row] = sum[row][0] + sum[row][1];
  }

  // A later tile, after update_max.
  __device__ __forceinline__ void next(const float (&s)[kBlockN / 2], float scale_log2,
                                       uint32_t (&p)[kBlockN / 4], float (&o)[kValueDim / 2]) {
    float sums[2];
    exponentiate<true>(s, scale_log2, p, o, sums);
#pragma unroll
    for (int row = 0; row < 2; ++row) row_sum[row] = fmaf(row_sum[row], rescale[row], sums[row]);
  }

  // A later tile by the maxima of the tiles before; or, where these will not do, by its own.
  __device__ __forceinline__ void next_with_old_max(const float (&s)[kBlockN / 2], float scale_log2,
                                                    uint32_t (&p)[kBlockN / 4],
                                                    float (&o)[kValueDim / 2]) {
    constexpr float kMaxSum = 65536.0f;
    float sums[2];
    exponentiate<false>(s, scale_log2, p, o, sums);
    // Also where a sum is NaN, and where a row has had no keys.
    const bool is_beyond =
        !(fmaxf(sums[0], sums[1]) <= kMaxSum) || fminf(row_max[0], row_max[1]) == -INFINITY;
    if (__any_sync(0xffffffff, is_beyond)) {
      update_max(s, scale_log2);
      next(s, scale_log2, p, o);
    } else {
      row_sum[0] += sums[0];
      row_sum[1] += sums[1];
    }
  }

  // ---- With a softcap.

  // After update_max of the first tile, where its maxima do for all tiles.
  __device__ __forceinline__ void keep_max(float least_max, float scale_log2) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      row_max[row] = fmaxf(row_max[row], least_max);
      scaled_max[row] = row_max[row] * scale_log2;
      rescale[row] = 1.0f;
    }
  }

  // Overwrites the scores with the weights. exponent(score, row) is to base 2.
  template <class Exponent>
  __device__ __forceinline__ void exponentiate_in_place(float (&s)[kBlockN / 2],
                                                        const Exponent& exponent) {
    float sum[2][2] = {};
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) {
      const int row = i / 2 % 2;
      s[i] = exp2_fast(exponent(s[i], row));
      sum[row][i % 2] += s[i];
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      row_sum[row] = fmaf(row_sum[row], rescale[row], sum[row][0] + sum[row][1]);
    }
  }

  // Rounds the weights to p.
  __device__ __forceinline__ static void pack(const float (&weights)[kBlockN / 2],
                                              uint32_t (&p)[kBlockN / 4]) {
#pragma unroll
    for (int i = 0; i < kBlockN / 2; i += 2) p[i / 2] = pack_pair<T>(weights[i], weights[i + 1]);
  }
  __device__ __forceinline__ void rescale_output(float (&o)[kValueDim / 2]) const {
#pragma unroll
    for (int k = 0; k < kValueDim / 2; ++k) o[k] *= rescale[k / 2 % 2];
  }
};

// ---- The backward, with keys as rows. A column is a query, with an lse and a delta in shared
// memory; `lse` and `delta` begin with those of the first column.

// Calls visit(i, value) for the elements of an accumulator, with the column's one of `values`.
template <int kSize, class Visit>
__device__ __forceinline__ void for_each_with_query(const float* values, const Visit& visit) {
  const int column = accumulator_column(threadIdx.x % kWarpgroup);
#pragma unroll
  for (int j = 0; j < kSize; j += 4) {
    const float2 of_query = *reinterpret_cast<const float2*>(values + 2 * j + column);
#pragma unroll
    for (int r = 0; r < 4; r += 2) {
      visit(j + r, of_query.x);
      visit(j + r + 1, of_query.y);
    }
  }
}

// s becomes p = 2^(c s - lse).
template <int kSize>
__device__ __forceinline__ void exponentiate(float (&s)[kSize], float scale_log2,
                                             const float* lse) {
  for_each_with_query<kSize>(
      lse, [&](int i, float lse) { s[i] = exp2_fast(fmaf(s[i], scale_log2, -lse)); });
}

// dp becomes ds = p (dp - delta).
template <int kSize>
__device__ __forceinline__ void differentiate_softmax(const float (&p)[kSize], float (&dp)[kSize],
                                                      const float* delta) {
  for_each_with_query<kSize>(delta, [&](int i, float delta) { dp[i] = p[i] * (dp[i] - delta); });
}

// ds times the derivative of a softcap, 1 - s^2, with s = (log2(p) + lse) / c: nothing is kept of
// the scores.
template <int kSize>
__device__ __forceinline__ void differentiate_softcap(const float (&p)[kSize], float (&ds)[kSize],
                                                      float scale_log2, const float* lse) {
  const float inverse = 1.0f / scale_log2;
  for_each_with_query<kSize>(lse, [&](int i, float lse) {
    const float s = (log2_fast(p[i]) + lse) * inverse;
    ds[i] = p[i] == 0.0f ? 0.0f : ds[i] * fmaf(-s, s, 1.0f);
  });
}

// ---- The kernel for dq, with queries as rows: a thread has two of them, with an lse and a delta
// in registers.

// s becomes p = 2^(c s - lse).
template <int kSize>
__device__ __forceinline__ void exponentiate_rows(float (&s)[kSize], float scale_log2,
                                                  const float (&lse)[2]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) s[i] = exp2_fast(fmaf(s[i], scale_log2, -lse[i / 2 % 2]));
}

// ds = p (dp - delta). Not in the registers of dp: the compiler would have to move ds away from the
// registers of a wgmma that is started next, and does so too late where a softcap follows.
template <int kSize>
__device__ __forceinline__ void differentiate_softmax_rows(const float (&p)[kSize],
                                                           const float (&dp)[kSize],
                                                           const float (&delta)[2],
                                                           float (&ds)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) ds[i] = p[i] * (dp[i] - delta[i / 2 % 2]);
}

// As differentiate_softcap.
template <int kSize>
__device__ __forceinline__ void differentiate_softcap_rows(const float (&p)[kSize],
                                                           float (&ds)[kSize], float scale_log2,
                                                           const float (&lse)[2]) {
  const float inverse = 1.0f / scale_log2;
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float s = (log2_fast(p[i]) + lse[i / 2 % 2]) * inverse;
    ds[i] = p[i] == 0.0f ? 0.0f : ds[i] * fmaf(-s, s, 1.0f);
  }
}

}  // namespace jaxllm::hopper
