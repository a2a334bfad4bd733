// The product of a matrix, (out, in), and a few rows of x: what decoding consists of. It is bound
// by reading the matrix, so what stands before it (a norm of x) and after it (a residual, an
// activation) comes with it.
#pragma once

#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/widen.cuh"
#include "gemm/matvec_digits.cuh"
#include "gemm/matvec_epilogues.cuh"
#include "gemm/matvec_many_rows.cuh"
#include "gemm/matvec_one_row.cuh"

namespace jaxllm {

// For any type, width, group and alignment: a warp a pair of rows, element by element.
template <typename T, typename W, class Epilogue>
__global__ void __launch_bounds__(256)
    matvec_any_width_kernel(const MatvecArguments<T, W> a, const Epilogue epilogue) {
  const int lane = threadIdx.x % 32;
  const int64_t pair = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  launch_dependent_grids();
  wait_on_dependent_grids();
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

// The fewest bytes of an int8 matrix that make up for taking x apart.
constexpr int64_t kMinDigitsBytes = 16 << 20;

// At least what the kernels have in arrays of fixed size.
constexpr int64_t kDigitsFixedBytes = 4352, kManyRowsFixedBytes = 18 << 10, kOneRowFixedBytes = 256;

// One row of x: a block of eight warps takes two to eight pairs; long rows of a small matrix have
// four warps each, to keep all multiprocessors busy. More rows, or a long int8 matrix: blocks that
// stay, one or two a multiprocessor, and take tiles of eight pairs in turn.
template <typename T, typename W, class Epilogue>
cudaError_t matvec(cudaStream_t stream, const MatvecArguments<T, W>& a, const Epilogue& epilogue,
                   bool overlap = false) {
  if (a.rows == 0 || epilogue.pairs() == 0) return cudaSuccess;
  const int64_t pairs = epilogue.pairs();
  const auto launch = [&](auto kernel, int64_t blocks, int warps, int64_t shared,
                          const auto&... more) {
    const Launch how{dim3(static_cast<unsigned>(blocks)), dim3(32 * warps),
                     static_cast<size_t>(shared), 1, overlap};
    return launch_kernel(stream, kernel, how, a, epilogue, more...);
  };
  if constexpr (sizeof(T) == 2) {
    constexpr int kPerLane = 16 / sizeof(W);
    DeviceLimits device;
    JAXLLM_RETURN_IF_ERROR(device.read());
    const bool is_aligned =
        aligned_16(a.x, a.matrix, a.norm) && a.width % kPerLane == 0 && a.width > 0;
    // What a lane multiplies has one scale, and what four lanes do together on tensor cores.
    const bool power_of_two = (a.group & (a.group - 1)) == 0;
    const bool is_grouped = sizeof(W) != 1 || (power_of_two && a.group >= kPerLane);
    const bool by_tensor_cores = sizeof(W) != 1 || (power_of_two && a.group >= 4 * kPerLane);
    const int64_t tiles = divide_up(pairs, kTilePairs);
    const int64_t normed = a.norm == nullptr ? 0 : a.rows * a.width * sizeof(T);
    if constexpr (sizeof(W) == 1) {
      const int64_t shared =
          kDigitsWarps * kDigitsStages * sizeof(Piece) + Digits::bytes(a.width, a.rows);
      const int64_t blocks = std::min<int64_t>(tiles, device.multiprocessors);
      if (is_aligned && by_tensor_cores && a.rows <= kDigitsRows &&
          shared + kDigitsFixedBytes <= device.shared_bytes &&
          epilogue.rows() * a.width >= kMinDigitsBytes) {
        const int warps =
            digits_team_warps(divide_up(tiles, blocks), divide_up(a.width, kPieceBytes));
        return launch(matvec_digits_kernel<T, Epilogue>, blocks, kDigitsWarps, shared, warps);
      }
    }
    if (is_aligned && is_grouped && a.rows == 1 &&
        normed + kOneRowFixedBytes <= device.shared_bytes) {
      const auto with = [&](auto kernel, int pairs_per_block) {
        return launch(kernel, divide_up(pairs, pairs_per_block), 8, normed);
      };
      if (sizeof(W) == 1 && pairs >= 2048) return with(matvec_kernel<1, T, W, Epilogue>, 8);
      if (a.width >= 4096 && pairs <= 2048) return with(matvec_kernel<4, T, W, Epilogue>, 2);
      return with(matvec_kernel<2, T, W, Epilogue>, 4);
    }
    const int64_t shared = kManyRowsWarps * kManyRowsStages * sizeof(Piece) + normed;
    const int64_t all_shared = shared + kManyRowsFixedBytes;
    if (is_aligned && by_tensor_cores && a.rows <= 16 && all_shared <= device.shared_bytes) {
      const int per_multiprocessor = 2 * all_shared <= device.shared_bytes ? 2 : 1;
      const int64_t blocks = std::min<int64_t>(tiles, per_multiprocessor * device.multiprocessors);
      const auto with = [&](auto kernel) { return launch(kernel, blocks, kManyRowsWarps, shared); };
      return a.rows <= 8 ? with(matvec_many_rows_kernel<1, T, W, Epilogue>)
                         : with(matvec_many_rows_kernel<2, T, W, Epilogue>);
    }
  }
  return launch(matvec_any_width_kernel<T, W, Epilogue>, divide_up(pairs, 8), 8, 0);
}

}  // namespace jaxllm
