// The product of a matrix, (out, in), and a few rows of x: what decoding consists of. It is bound
// by reading the matrix, so what stands before it (a norm of x) and after it (a residual, an
// activation) comes with it.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/fragments.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/vector.cuh"

namespace jaxllm {

// T is the type of x, W that of the matrix: T, or int8_t with a scale for each `group` of a row.
template <typename T, typename W>
struct MatvecArguments {
  const T* x;           // (rows, width)
  const W* matrix;      // (out, width)
  const float* scales;  // (out, width / group)
  const T* norm;        // x is divided by its root mean square and multiplied by this; may be null
  float eps;
  int64_t rows, width, group;
};

// What becomes of the products is an epilogue's business. It pairs rows of the matrix, so that two
// products that need each other meet in one thread: pair i consists of rows first(i) and second(i),
// and store(i, row of x, product, product) is called once for each.

// Products as they are, and perhaps a residual. Pairs are neighbouring rows, eight apart.
template <typename T>
struct StoreProducts {
  T* out;             // (rows, count)
  const T* residual;  // may be null
  int64_t count;

  __host__ __device__ int64_t pairs() const { return (count + 15) / 16 * 8; }
  __device__ int64_t first(int64_t i) const { return i / 8 * 16 + i % 8; }
  __device__ int64_t second(int64_t i) const { return first(i) + 8; }
  __device__ int64_t rows() const { return count; }
  __device__ void store(int64_t i, int64_t row, float a, float b) const {
    store_one(first(i), row, a);
    store_one(second(i), row, b);
  }
  __device__ void store_one(int64_t at, int64_t row, float product) const {
    if (at >= count) return;
    at += row * count;
    out[at] = from_float<T>(residual == nullptr ? product : product + to_float(residual[at]));
  }
};

// silu(gate) * up, where the gates' rows come first.
template <typename T>
struct StoreSwiglu {
  T* out;  // (rows, count)
  int64_t count;

  __host__ __device__ int64_t pairs() const { return count; }
  __device__ int64_t first(int64_t i) const { return i; }
  __device__ int64_t second(int64_t i) const { return count + i; }
  __device__ int64_t rows() const { return 2 * count; }
  __device__ void store(int64_t i, int64_t row, float gate, float up) const {
    out[row * count + i] = from_float<T>(gate / (1.0f + __expf(-gate)) * up);
  }
};

// Queries, keys and values: queries and keys are turned by the angles of their position, and keys
// and values go into the caches behind the tokens that are there. A pair is columns j and j + width
// / 2 of a head, which turn together.
template <typename T>
struct StoreQkv {
  T *q, *k_cache, *v_cache;  // (rows, heads, width), (rows, length, kv_heads, width)
  const float *cos, *sin;    // (rows, width / 2)
  const int32_t* lengths;    // tokens in the cache; a full one gets no more
  int64_t heads, kv_heads, length, width;

  __host__ __device__ int64_t pairs() const { return (heads + 2 * kv_heads) * (width / 2); }
  __device__ int64_t first(int64_t i) const { return i / (width / 2) * width + i % (width / 2); }
  __device__ int64_t second(int64_t i) const { return first(i) + width / 2; }
  __device__ int64_t rows() const { return 2 * pairs(); }
  __device__ void store(int64_t i, int64_t row, float a, float b) const {
    const int64_t half = width / 2, j = i % half;
    int64_t head = i / half;
    if (head < heads + kv_heads) {
      const float c = cos[row * half + j], s = sin[row * half + j];
      const float turned = a * c - b * s;
      b = a * s + b * c;
      a = turned;
    }
    T* target = q + (row * heads + head) * width;
    if (head >= heads) {
      const int64_t position = lengths[row];
      if (position < 0 || position >= length) return;
      head -= heads;
      T* cache = head < kv_heads ? k_cache : v_cache;
      head = head < kv_heads ? head : head - kv_heads;
      target = cache + ((row * length + position) * kv_heads + head) * width;
    }
    target[j] = from_float<T>(a);
    target[j + half] = from_float<T>(b);
  }
};

// Multiplies x by the norm's factors, and leaves the division by its root mean square to the
// products: `squares` gets each warp's share of the sum of squares, `stride` floats a row of x.
template <class Arguments, typename T>
__device__ const T* normalize(const Arguments& a, T* normed, float* squares, int stride) {
  const int width = a.width;
  for (int row = 0; row < a.rows; ++row) {
    float square[1] = {0.0f};
    for (int i = threadIdx.x * 8; i < width; i += blockDim.x * 8) {
      const Pack<T, 8> pack = load_cached<8>(a.x + row * width + i);
      const Pack<T, 8> factor = load_cached<8>(a.norm + i);
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        square[0] += pack[j] * pack[j];
        values[j] = pack[j] * factor[j];
      }
      store(normed + row * width + i, Pack<T, 8>::of(values));
    }
    sum_over_lanes<32>(square);
    if (threadIdx.x % 32 == 0) squares[row * stride + threadIdx.x / 32] = square[0];
  }
  __syncthreads();
  return normed;
}

// One over the root mean square of a row of x.
template <class Arguments>
__device__ float rstd(const Arguments& a, const float* squares, int warps) {
  float square = 0.0f;
  for (int w = 0; w < warps; ++w) square += squares[w];
  return rsqrtf(square / a.width + a.eps);
}

// Four int8 numbers as floats, exactly: offset by 128 they are the last bits of a number of 2^23.
__device__ __forceinline__ void widen_four(uint32_t word, float (&floats)[4]) {
  word ^= 0x80808080u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    floats[i] = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i)) - 8388736.0f;
  }
}

// For one row of x: kWarpsPerPair warps share a pair of rows, 32 times 16 bytes of each at a time.
// int8 has half the loads in flight, since it has twice the numbers to widen.
template <int kWarpsPerPair, typename T, typename W, class Epilogue>
__global__ void __launch_bounds__(256, 4)
    matvec_kernel(const MatvecArguments<T, W> a, const Epilogue epilogue) {
  constexpr int kPerLane = 16 / sizeof(W), kSteps = sizeof(W) == 1 ? 2 : 4;
  constexpr int kWarps = 8, kStride = 32 * kWarpsPerPair;
  __shared__ float partial[kWarps][2];
  __shared__ float squares[kWarps];
  extern __shared__ __align__(16) char memory[];

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = warp % kWarpsPerPair;
  const int64_t own = int64_t{blockIdx.x} * (kWarps / kWarpsPerPair) + warp / kWarpsPerPair;
  const int64_t pair = min(own, epilogue.pairs() - 1);
  const int width = a.width, packs = width / kPerLane;
  const int groups = sizeof(W) == 1 ? width / a.group : 0, shift = __ffsll(a.group) - 1;
  const W* matrix[2];
  const float* scale_of[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row =
        min(h == 0 ? epilogue.first(pair) : epilogue.second(pair), epilogue.rows() - 1);
    matrix[h] = a.matrix + row * width;
    scale_of[h] = sizeof(W) == 1 ? a.scales + row * groups : nullptr;
  }
  start_next_kernel();

  uint32_t words[kSteps][2][4];
  float scales[kSteps][2];
  const auto fetch = [&](int first) {
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const int at = first + u * kStride;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int4 found = {0, 0, 0, 0};
        if (at < packs) found = __ldcs(reinterpret_cast<const int4*>(matrix[h]) + at);
        words[u][h][0] = found.x, words[u][h][1] = found.y;
        words[u][h][2] = found.z, words[u][h][3] = found.w;
        if constexpr (sizeof(W) == 1) {
          scales[u][h] = at < packs ? __ldg(scale_of[h] + (at * kPerLane >> shift)) : 0.0f;
        }
      }
    }
  };
  int first = part * 32 + lane;
  fetch(first);
  wait_for_last_kernel();
  const T* x = a.x;
  if (a.norm != nullptr) x = normalize(a, reinterpret_cast<T*>(memory), squares, kWarps);

  float sums[2] = {};
  while (true) {
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const int at = min(first + u * kStride, packs - 1);  // past the end the matrix reads as zeros
      float factors[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane / 8; ++i) {
        const Pack<T, 8> pack = load<8>(x + at * kPerLane + 8 * i);
#pragma unroll
        for (int j = 0; j < 8; ++j) factors[8 * i + j] = pack[j];
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = 0.0f;
        if constexpr (sizeof(W) == 1) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float weights[4];
            widen_four(words[u][h][i], weights);
#pragma unroll
            for (int j = 0; j < 4; ++j) sum += weights[j] * factors[4 * i + j];
          }
          sum *= scales[u][h];
        } else {
          const Pack<T, 8>& weights = reinterpret_cast<const Pack<T, 8>&>(words[u][h]);
#pragma unroll
          for (int i = 0; i < 8; ++i) sum += weights[i] * factors[i];
        }
        sums[h] += sum;
      }
    }
    first += kSteps * kStride;
    if (first - lane >= packs) break;
    fetch(first);
  }

  sum_over_lanes<32>(sums);
  if (lane == 0) {
    partial[warp][0] = sums[0];
    partial[warp][1] = sums[1];
  }
  __syncthreads();
  if (part != 0 || lane != 0 || own >= epilogue.pairs()) return;
  float products[2] = {};
#pragma unroll
  for (int w = 0; w < kWarpsPerPair; ++w) {
    products[0] += partial[warp + w][0];
    products[1] += partial[warp + w][1];
  }
  const float factor = a.norm == nullptr ? 1.0f : rstd(a, squares, kWarps);
  epilogue.store(own, 0, products[0] * factor, products[1] * factor);
}

// For more rows of x. A block takes eight pairs of rows, and its warps parts of their width. Lane 4
// r + c has pair r, and 16 bytes of both rows at a time; x is the other factor of the tensor cores,
// eight rows of it a fragment. The sums of the warps meet in shared memory.
template <int kFragments, typename T, typename W, class Epilogue>
__global__ void __launch_bounds__(256)
    matvec_many_rows_kernel(const MatvecArguments<T, W> a, const Epilogue epilogue) {
  constexpr int kPerLane = 16 / sizeof(W), kPerStep = 4 * kPerLane, kMaxWarps = 8, kSteps = 2;
  __shared__ float4 partial[kMaxWarps][kFragments][32];
  __shared__ float squares[8 * kFragments][kMaxWarps];
  extern __shared__ __align__(16) char memory[];
  T* normed = reinterpret_cast<T*>(memory);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int r = lane / 4, c = lane % 4, width = a.width;
  const int steps = (width + kPerStep - 1) / kPerStep;
  const int groups = sizeof(W) == 1 ? width / a.group : 0, rows = a.rows;
  const int shift = __ffsll(a.group) - 1;
  const int64_t pair = min(int64_t{blockIdx.x} * 8 + r, epilogue.pairs() - 1);
  const W* matrix[2];
  const float* scale_of[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row =
        min(h == 0 ? epilogue.first(pair) : epilogue.second(pair), epilogue.rows() - 1);
    matrix[h] = a.matrix + row * width + c * kPerLane;
    scale_of[h] = sizeof(W) == 1 ? a.scales + row * groups : nullptr;
  }
  start_next_kernel();

  uint32_t words[kSteps][2][4];
  float scales[kSteps][2];
  const auto fetch = [&](int step) {
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const int at = (step + u) * kPerStep;
      const bool inside = at + c * kPerLane < width;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int4 found = {0, 0, 0, 0};
        if (inside) found = __ldcs(reinterpret_cast<const int4*>(matrix[h] + at));
        words[u][h][0] = found.x, words[u][h][1] = found.y;
        words[u][h][2] = found.z, words[u][h][3] = found.w;
        if constexpr (sizeof(W) == 1) {
          scales[u][h] = inside ? __ldg(scale_of[h] + (at >> shift)) : 0.0f;
        }
      }
    }
  };
  int step = warp * kSteps;
  fetch(step);
  wait_for_last_kernel();

  const T* x = a.x;
  if (a.norm != nullptr) x = normalize(a, normed, &squares[0][0], kMaxWarps);

  float sums[kFragments][4] = {};
  while (true) {
#pragma unroll
    for (int u = 0; u < kSteps; ++u) {
      const int at = (step + u) * kPerStep + c * kPerLane;
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        uint32_t factor[kPerLane / 2] = {};
        const int row = f * 8 + r;
        if (row < rows && at < width) {
#pragma unroll
          for (int i = 0; i < kPerLane / 8; ++i) {
            const uint4 found = *reinterpret_cast<const uint4*>(x + row * width + at + 8 * i);
            factor[4 * i] = found.x, factor[4 * i + 1] = found.y;
            factor[4 * i + 2] = found.z, factor[4 * i + 3] = found.w;
          }
        }
        if constexpr (sizeof(W) == 2) {
#pragma unroll
          for (int i = 0; i < kPerLane; i += 4) {
            multiply_16x8x16<T>(sums[f], words[u][0][i / 2], words[u][1][i / 2],
                                words[u][0][i / 2 + 1], words[u][1][i / 2 + 1], factor[i / 2],
                                factor[i / 2 + 1]);
          }
        } else {
          float products[4] = {};
#pragma unroll
          for (int i = 0; i < kPerLane; i += 4) {
            multiply_16x8x16<T>(
                products, neighbours<T, W>(words[u][0], i), neighbours<T, W>(words[u][1], i),
                neighbours<T, W>(words[u][0], i + 2), neighbours<T, W>(words[u][1], i + 2),
                factor[i / 2], factor[i / 2 + 1]);
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            // The products are sums over the four lanes of a row, all of one group.
            sums[f][i] += scales[u][i / 2] * products[i];
          }
        }
      }
    }
    step += warps * kSteps;
    if (step >= steps) break;
    fetch(step);
  }

#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
    partial[warp][f][lane] = make_float4(sums[f][0], sums[f][1], sums[f][2], sums[f][3]);
  }
  __syncthreads();
  // A thread for each pair and row of x. Lane 4 r + c has rows 2 c and 2 c + 1 of x.
  for (int i = threadIdx.x; i < 64 * kFragments; i += blockDim.x) {
    const int f = i / 64, of_pair = i % 64 / 8, column = i % 8, row = f * 8 + column;
    const int64_t stored = int64_t{blockIdx.x} * 8 + of_pair;
    if (row >= rows || stored >= epilogue.pairs()) continue;
    float first = 0.0f, second = 0.0f;
    for (int w = 0; w < warps; ++w) {
      const float* of_lane =
          reinterpret_cast<const float*>(&partial[w][f][4 * of_pair + column / 2]);
      first += of_lane[column % 2];
      second += of_lane[2 + column % 2];
    }
    if (a.norm != nullptr) {
      const float factor = rstd(a, squares[row], warps);
      first *= factor;
      second *= factor;
    }
    epilogue.store(stored, row, first, second);
  }
}

// The same for any type, width, group and alignment: a warp a pair of rows, element by element.
template <typename T, typename W, class Epilogue>
__global__ void __launch_bounds__(256)
    matvec_any_width_kernel(const MatvecArguments<T, W> a, const Epilogue epilogue) {
  const int lane = threadIdx.x % 32;
  const int64_t pair = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  start_next_kernel();
  wait_for_last_kernel();
  if (pair >= epilogue.pairs()) return;
  const int64_t row_of[2] = {min(epilogue.first(pair), epilogue.rows() - 1),
                             min(epilogue.second(pair), epilogue.rows() - 1)};
  for (int64_t row = 0; row < a.rows; ++row) {
    float sums[3] = {};  // the products, and the squares of x
    for (int64_t i = lane; i < a.width; i += 32) {
      float x = to_float(a.x[row * a.width + i]);
      sums[2] += x * x;
      if (a.norm != nullptr) x *= to_float(a.norm[i]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float weight = number(a.matrix[row_of[h] * a.width + i]);
        if constexpr (sizeof(W) == 1) {
          weight *= a.scales[row_of[h] * (a.width / a.group) + i / a.group];
        }
        sums[h] += weight * x;
      }
    }
    sum_over_lanes<32>(sums);
    const float rstd = a.norm == nullptr ? 1.0f : rsqrtf(sums[2] / a.width + a.eps);
    if (lane == 0) epilogue.store(pair, row, sums[0] * rstd, sums[1] * rstd);
  }
}

// Rows of x that are normalized in shared memory.
constexpr int64_t kMaxNormedBytes = 96 * 1024;

// For one row of x a block of eight warps takes two to eight pairs: long rows of a small matrix
// have four warps each, to keep all multiprocessors busy. For more rows a block takes eight pairs.
template <typename T, typename W, class Epilogue>
cudaError_t matvec(cudaStream_t stream, const MatvecArguments<T, W>& a, const Epilogue& epilogue,
                   bool overlap = false) {
  if (a.rows == 0 || epilogue.pairs() == 0) return cudaSuccess;
  constexpr int64_t kPerLane = 16 / sizeof(W);
  const int64_t normed = a.norm == nullptr ? 0 : a.rows * a.width * sizeof(T),
                pairs = epilogue.pairs();
  const auto with = [&](auto kernel, int pairs_per_block) {
    if (normed > 0) {
      JAXLLM_RETURN_IF_ERROR(cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxNormedBytes));
    }
    return launch_kernel(stream, kernel, dim3(divide_up(pairs, pairs_per_block)), dim3(256), normed,
                         1, overlap, a, epilogue);
  };
  if constexpr (sizeof(T) == 2) {
    // A pack of a row, and with tensor cores four of them, have one scale.
    const bool grouped = sizeof(W) != 1 || ((a.group & (a.group - 1)) == 0 &&
                                            a.group >= (a.rows == 1 ? 1 : 4) * kPerLane);
    const bool aligned =
        aligned_16(a.x, a.matrix, a.norm) && a.width % kPerLane == 0 && a.width > 0;
    if (aligned && grouped && a.rows <= 16 && normed <= kMaxNormedBytes) {
      if (a.rows == 1) {
        if (sizeof(W) == 1 && pairs >= 2048) return with(matvec_kernel<1, T, W, Epilogue>, 8);
        if (a.width >= 4096 && pairs <= 2048) return with(matvec_kernel<4, T, W, Epilogue>, 2);
        return with(matvec_kernel<2, T, W, Epilogue>, 4);
      }
      if (a.rows <= 8) return with(matvec_many_rows_kernel<1, T, W, Epilogue>, 8);
      return with(matvec_many_rows_kernel<2, T, W, Epilogue>, 8);
    }
  }
  return launch_kernel(stream, matvec_any_width_kernel<T, W, Epilogue>, dim3(divide_up(pairs, 8)),
                       dim3(256), 0, 1, overlap, a, epilogue);
}

}  // namespace jaxllm
