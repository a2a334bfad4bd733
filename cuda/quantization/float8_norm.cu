// Layer norm and RMS norm in 8-bit floats. Each input is read once, and each result is written
// once. A CTA has whole rows, kRows of them, and takes four at a time:
//
//               8 columns
//            +-------------+
//   4 rows   |  a thread   | ...   -> sums of the four rows -> bytes -> values, a row at a time
//            +-------------+                                         -> words in shared memory
//
// A word has four rows of a column. At the end the CTA has kRows rows of each column in shared
// memory, and writes them as a piece of a row of the transposed matrix.
#include "common/dependent_launch.cuh"
#include "common/thread_group.cuh"
#include "norm/layer_norm_formula.cuh"
#include "norm/rms_norm_formula.cuh"
#include "norm/rows.cuh"
#include "quantization/float8_norm.h"
#include "quantization/float8_tile.cuh"

namespace jaxllm {
namespace {

using float8::kPack;
using float8::kRowsOfThread;
using float8::round_pair;
using float8::Words;

constexpr int64_t kMaxWidth = 1024 * kPack;

// A CTA of at most kMaxThreads threads, with kRowCount rows.
template <int kMaxThreads, int kRowCount>
struct Shape {
  static constexpr int kThreads = kMaxThreads, kRows = kRowCount;
  static constexpr int kColumnWords = kRows / kRowsOfThread;

  // From the words of four rows to those of the next four. With the padding, two lanes that read
  // words of one column, 16 rows apart, are 16 banks apart.
  __host__ __device__ static constexpr int stride(int width) { return width + 4; }
  // For the transposed matrix, where it is wanted.
  static int64_t shared_bytes(int width) { return int64_t{4} * kColumnWords * stride(width); }
};

// How many CTAs an SM holds at least: bounds the registers.
template <class Shape, bool kAdd, typename T>
constexpr int kMinCtas = Shape::kThreads == 1024  ? 1
                         : sizeof(T) == 4         ? 512 / Shape::kThreads
                         : Shape::kThreads == 512 ? 2
                         : kAdd                   ? 2
                                                  : 3;

// Whether the next rows are loaded into registers before the sums of these. Elsewhere the registers
// do not suffice, and the next rows only come to the L2 cache.
template <class Shape, typename T>
constexpr bool kLoadsAhead = Shape::kThreads == 256 && sizeof(T) == 2;

// How many rows of x and of the residual a thread has in registers at once.
template <class Shape, bool kAdd, typename T>
constexpr int kRowsAtOnce = Shape::kThreads == 1024 && sizeof(T) == 4 && kAdd ? 1 : kRowsOfThread;

// Loads the line of an address into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// See fence_packs.
template <typename T>
__device__ __forceinline__ void fence_pack(Pack<T, kPack>& pack) {
#pragma unroll
  for (uint32_t& word : pack.words) asm volatile("" : "+r"(word));
}

// Loads four weights, by a plain load: it stays in the loop over rows. What __ldg loads the
// compiler would keep from one iteration to the next, and the registers do not suffice.
template <typename W>
__device__ __forceinline__ void load_four(const W* from, float (&four)[4]) {
  using Access = std::conditional_t<sizeof(W) == 4, uint4, uint2>;
  Pack<W, kPack> pack;
  reinterpret_cast<Access&>(pack) = *reinterpret_cast<const Access*>(from);
#pragma unroll
  for (int j = 0; j < 4; ++j) four[j] = pack[j];
}

// A thread's part of four rows.
template <typename T>
struct FourRows {
  Pack<T, kPack> packs[kRowsOfThread];

  // Loads rows [begin, end) of four; those from `rows` on are zeros.
  __device__ __forceinline__ void load(const T* from, int width, int begin, int end, int rows) {
#pragma unroll
    for (int i = begin; i < end; ++i) {
      packs[i] = i < rows ? load_streaming<kPack>(from + i * width) : Pack<T, kPack>{};
    }
  }

  __device__ __forceinline__ static void prefetch(const T* from, int width, int rows) {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      if (i < rows) prefetch_l2(from + i * width);
    }
  }
};

// The sum of `term(element, row)` over each of four rows.
template <class ThreadGroup, typename T, class Term>
__device__ __forceinline__ void sum_over_rows(ThreadGroup& threads, const FourRows<T>& h,
                                              float (&sums)[kRowsOfThread], Term term) {
#pragma unroll
  for (int i = 0; i < kRowsOfThread; ++i) {
    sums[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < kPack; ++j) sums[i] += term(h.packs[i][j], i);
  }
  threads.sum(sums);
}

// Stores the transposed rows of the CTA, `count` of them; `to` is their first column.
template <class Shape>
__device__ __forceinline__ void store_transposed(const uint32_t* shared, uint8_t* to, int64_t rows,
                                                 int count, int width) {
  // Two neighbouring lanes write 32 bytes, a sector of the memory, where there are as many rows.
  constexpr int kWords = Shape::kColumnWords < 4 ? Shape::kColumnWords : 4;
  constexpr int kPieces = Shape::kColumnWords / kWords;
  using Access = std::conditional_t<kWords == 4, uint4, uint2>;
#pragma unroll 4
  for (int i = threadIdx.x; i < width * kPieces; i += blockDim.x) {
    const int column = i / kPieces, piece = i % kPieces, row = piece * kWords * kRowsOfThread;
    if (row >= count) continue;
    alignas(16) uint32_t words[kWords];
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      words[k] = shared[(piece * kWords + k) * Shape::stride(width) + column];
    }
    *reinterpret_cast<Access*>(to + column * rows + row) = reinterpret_cast<const Access&>(words);
  }
}

// The parameters are those of Float8Norm one by one, as in norm_forward_kernel.
template <class Norm, class Shape, bool kAdd, typename T, typename W>
__global__ void __launch_bounds__(Shape::kThreads, kMinCtas<Shape, kAdd, T>)
    float8_norm_kernel(const T* x, const T* residual, const W* x_bias, const W* scale,
                       const W* bias, const float* float8_scale, float eps, uint8_t* values,
                       uint8_t* transposed, T* h, float* mean, float* rstd, int64_t rows,
                       int width) {
  constexpr bool kAhead = kLoadsAhead<Shape, T>;
  constexpr int kAtOnce = kRowsAtOnce<Shape, kAdd, T>;
  extern __shared__ __align__(16) uint32_t shared[];
  CtaPerRow<Shape::kThreads> threads;
  const int column = threads.rank() * kPack;
  const bool is_inside = column < width;
  const int64_t first_row = cta_from_the_end() * Shape::kRows;
  const int count = static_cast<int>(min(int64_t{Shape::kRows}, rows - first_row));
  const int64_t first = first_row * width + column;
  // How many of four rows this thread loads and stores.
  const auto left = [&](int row) { return is_inside ? count - row : 0; };

  FourRows<T> branches, residuals;
  // Loads rows [begin, end) of the four at `row`.
  const auto load = [&](int row, int begin, int end) {
    const int64_t offset = first + row * width;
    branches.load(x + offset, width, begin, end, left(row));
    if constexpr (kAdd) residuals.load(residual + offset, width, begin, end, left(row));
  };
  if constexpr (kAhead) load(0, 0, kRowsOfThread);
  const float inverse = __frcp_rn(__ldg(float8_scale));
  const float per_column = __fdividef(1.0f, width);

#pragma unroll 1
  for (int row = 0; row < count; row += kRowsOfThread) {
    const int64_t offset = first + row * width;
    const int stored = left(row), next = row + kRowsOfThread;
    FourRows<T> sum;
#pragma unroll
    for (int begin = 0; begin < kRowsOfThread; begin += kAtOnce) {
      const int end = begin + kAtOnce;
      if constexpr (!kAhead) load(row, begin, end);
      Pack<W, kPack> added = {};
      if constexpr (kAdd && Norm::kCenters) {
        if (x_bias && is_inside) added = jaxllm::load<kPack>(x_bias + column);
      }
#pragma unroll
      for (int i = begin; i < end; ++i) {
        if constexpr (kAdd) {
          float each[kPack];
          if constexpr (sizeof(W) == 2) fence_pack(added);
#pragma unroll
          for (int j = 0; j < kPack; ++j) {
            each[j] = branches.packs[i][j] + added[j] + residuals.packs[i][j];
          }
          sum.packs[i] = Pack<T, kPack>::of(each);
          if (i < stored) store(h + offset + i * width, sum.packs[i]);
        } else {
          sum.packs[i] = branches.packs[i];
        }
      }
    }
    if constexpr (kAhead) {
      load(next, 0, kRowsOfThread);
    } else {
      const int64_t ahead = offset + kRowsOfThread * width;
      FourRows<T>::prefetch(x + ahead, width, left(next));
      if constexpr (kAdd) FourRows<T>::prefetch(residual + ahead, width, left(next));
    }

    float means[kRowsOfThread] = {}, rstds[kRowsOfThread];
    if constexpr (Norm::kCenters) {
      sum_over_rows(threads, sum, means, [](float x, int) { return x; });
#pragma unroll
      for (float& each : means) each *= per_column;
    }
    if constexpr (sizeof(T) == 2) fence_packs(sum.packs);
    sum_over_rows(threads, sum, rstds, [&](float x, int i) {
      const float c = Norm::kCenters && !is_inside ? 0.0f : x - means[i];
      return c * c;
    });
    if constexpr (sizeof(T) == 2) fence_packs(sum.packs);
#pragma unroll
    for (float& each : rstds) each = rsqrtf(each * per_column + eps);
    if (rstd && threads.rank() == 0) {
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        if (i >= stored) continue;
        if constexpr (Norm::kCenters) store_statistic(mean + first_row + row + i, means[i]);
        store_statistic(rstd + first_row + row + i, rstds[i]);
      }
    }

    Words words;
#pragma unroll
    for (int half = 0; half < kPack / 4; ++half) {
      float scales[4], biases[4] = {};
      if (is_inside) {
        load_four(scale + column + half * 4, scales);
        if constexpr (Norm::kCenters) load_four(bias + column + half * 4, biases);
      }
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        float quotients[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float c = sum.packs[i][half * 4 + j] - means[i];
          quotients[j] = Norm::out(c, rstds[i], scales[j], biases[j]) * inverse;
        }
        words.of[half][i] = round_pair<__nv_fp8_e4m3>(quotients[0], quotients[1]) |
                            round_pair<__nv_fp8_e4m3>(quotients[2], quotients[3]) << 16;
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      if (i >= stored) continue;
      *reinterpret_cast<uint2*>(values + offset + i * width) = {words.of[0][i], words.of[1][i]};
    }
    if (transposed != nullptr) {
      uint32_t* const at = shared + row / kRowsOfThread * Shape::stride(width) + column;
#pragma unroll
      for (int half = 0; half < kPack / 4; ++half) {
        uint32_t columns[4];
        float8::transpose_bytes(words.of[half], columns);
        if (is_inside) {
          reinterpret_cast<uint4*>(at)[half] = {columns[0], columns[1], columns[2], columns[3]};
        }
      }
    }
  }
  if (transposed != nullptr) {
    __syncthreads();
    store_transposed<Shape>(shared, transposed + first_row, rows, count, width);
  }
}

template <class Norm, bool kAdd, typename T, typename W>
struct Launcher {
  cudaStream_t stream;
  const Float8Norm<T, W>& call;
  int width = static_cast<int>(call.width);
  int threads = static_cast<int>(divide_up(call.width, 32 * kPack) * 32);

  template <class Shape>
  cudaError_t run() const {
    const auto shared = static_cast<size_t>(call.transposed ? Shape::shared_bytes(width) : 0);
    const Launch launch{divide_up(call.rows, Shape::kRows), threads, shared};
    return launch_kernel(stream, float8_norm_kernel<Norm, Shape, kAdd, T, W>, launch, call.x,
                         call.residual, call.x_bias, call.scale, call.bias, call.float8_scale,
                         call.eps, reinterpret_cast<uint8_t*>(call.values),
                         reinterpret_cast<uint8_t*>(call.transposed), call.h, call.mean, call.rstd,
                         call.rows, width);
  }

  // Whether an SM holds so many CTAs, as far as its shared memory decides.
  template <class Shape>
  cudaError_t fits(int ctas, bool* does) const {
    DeviceLimits device;
    KernelImage image;
    JAXLLM_RETURN_IF_ERROR(device.read());
    JAXLLM_RETURN_IF_ERROR(image.read(float8_norm_kernel<Norm, Shape, kAdd, T, W>));
    const int64_t dynamic = Shape::shared_bytes(width);
    const int64_t each = dynamic + image.static_shared_bytes + device.reserved_shared_bytes;
    *does = dynamic <= image.dynamic_shared_bytes && ctas * each <= device.shared_bytes_of_sm;
    return cudaSuccess;
  }

  // 32 rows make whole sectors of the transposed matrix. Fewer rows keep more of the GPU busy, and
  // take less shared memory.
  template <int kThreads>
  cudaError_t run_with() const {
    if (!call.transposed) return run<Shape<kThreads, 16>>();
    bool fits_shared = false;
    if constexpr (kThreads < 1024) {
      DeviceLimits device;
      JAXLLM_RETURN_IF_ERROR(device.read());
      JAXLLM_RETURN_IF_ERROR((fits<Shape<kThreads, 32>>(2, &fits_shared)));
      const bool is_busy = divide_up(call.rows, 32) * threads >= int64_t{512} * device.sms;
      if (fits_shared && is_busy) return run<Shape<kThreads, 32>>();
    }
    JAXLLM_RETURN_IF_ERROR((fits<Shape<kThreads, 16>>(1, &fits_shared)));
    if (fits_shared) return run<Shape<kThreads, 16>>();
    // 8192 columns take 64 KiB: any GPU has as much.
    if constexpr (kThreads == 1024) {
      JAXLLM_RETURN_IF_ERROR((fits<Shape<kThreads, 8>>(1, &fits_shared)));
      if (fits_shared) return run<Shape<kThreads, 8>>();
    }
    return cudaErrorNotSupported;
  }

  cudaError_t run() const {
    if (threads <= 256) return run_with<256>();
    return threads <= 512 ? run_with<512>() : run_with<1024>();
  }
};

template <class Norm, typename T, typename W>
cudaError_t launch(cudaStream_t stream, const Float8Norm<T, W>& call) {
  return call.residual ? Launcher<Norm, true, T, W>{stream, call}.run()
                       : Launcher<Norm, false, T, W>{stream, call}.run();
}

}  // namespace

template <typename T, typename W>
cudaError_t Float8Norm<T, W>::forward(cudaStream_t stream) const {
  if (rows == 0 || width == 0) return cudaSuccess;
  if (width > kMaxWidth || !float8::serves(rows, width, transposed) || !aligned<8>(values) ||
      !aligned_16(x, residual, x_bias, scale, bias, transposed, h)) {
    return cudaErrorNotSupported;
  }
  return bias ? launch<LayerNormFormula>(stream, *this) : launch<RmsNormFormula>(stream, *this);
}

template struct Float8Norm<float, float>;
template struct Float8Norm<__nv_bfloat16, __nv_bfloat16>;
template struct Float8Norm<__nv_bfloat16, float>;
template struct Float8Norm<__half, __half>;
template struct Float8Norm<__half, float>;

}  // namespace jaxllm
