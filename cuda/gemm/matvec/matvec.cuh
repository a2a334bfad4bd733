// GEMV launcher: the product of a weight matrix, (outputs, width), and a few rows of x.
//
// Decoding consists of these. Reading the weights bounds them, so the kernels fuse what comes
// before (the RMS norm of x) and after (residual, SwiGLU, RoPE and the caches:
// gemm/matvec/epilogue.cuh).
#pragma once

#include <algorithm>

#include "common/dependent_launch.cuh"
#include "gemm/matvec/epilogue.cuh"
#include "gemm/matvec/mainloop_int8_split.cuh"
#include "gemm/matvec/mainloop_mma.cuh"
#include "gemm/matvec/mainloop_simt.cuh"

namespace jaxllm {

// The fewest bytes of int8 weights that make up for splitting x.
constexpr int64_t kMinSplitBytes = 16 << 20;

// At least the static shared memory of the kernels.
constexpr int64_t kSplitStaticBytes = 4352, kMmaStaticBytes = 18 << 10, kSimtStaticBytes = 256;

//   kernel                     rows of x   a CTA has
//   matvec_int8_split_kernel   1, 2        tiles of eight pairs; persistent, one CTA an SM
//   matvec_kernel              1           2, 4 or 8 pairs, for eight warps
//   matvec_mma_kernel          1 to 16     tiles of eight pairs; persistent, one or two CTAs an SM
//   matvec_fallback_kernel     any         8 pairs
template <typename T, typename W, class Epilogue>
cudaError_t matvec(cudaStream_t stream, const MatvecParams<T, W>& p, const Epilogue& epilogue,
                   bool pdl = false) {
  if (p.rows == 0 || epilogue.pairs() == 0) return cudaSuccess;
  const int64_t pairs = epilogue.pairs();
  const auto launch = [&](auto kernel, int64_t ctas, int warps, int64_t smem_bytes,
                          const auto&... more) {
    const Launch how{dim3(static_cast<unsigned>(ctas)), dim3(32 * warps),
                     static_cast<size_t>(smem_bytes), 1, pdl};
    return launch_kernel(stream, kernel, how, p, epilogue, more...);
  };
  if constexpr (sizeof(T) == 2) {
    constexpr int kPerLane = 16 / sizeof(W);
    DeviceLimits device;
    JAXLLM_RETURN_IF_ERROR(device.read());
    // The kernels with 16 bytes of a lane count the bytes of a row in an int, and some beyond it.
    constexpr int64_t kMaxRowBytes = int64_t{1} << 30;
    const bool is_aligned = aligned_16(p.x, p.weight, p.norm) && p.width % kPerLane == 0 &&
                            p.width > 0 && p.width * int64_t{sizeof(W)} <= kMaxRowBytes;
    // The 16 bytes of a lane have one scale; on tensor cores those of four lanes have.
    const bool power_of_two = (p.group & (p.group - 1)) == 0;
    const bool simt_groups = sizeof(W) != 1 || (power_of_two && p.group >= kPerLane);
    const bool mma_groups = sizeof(W) != 1 || (power_of_two && p.group >= 4 * kPerLane);
    const int64_t tiles = divide_up(pairs, kTilePairs);
    const int64_t x_bytes = p.norm == nullptr ? 0 : p.rows * p.width * sizeof(T);
    if constexpr (sizeof(W) == 1) {
      const int64_t smem_bytes =
          kSplitWarps * kSplitStages * sizeof(MatvecStage) + Int8Split::bytes(p.width, p.rows);
      const int64_t ctas = std::min<int64_t>(tiles, device.sms);
      if (is_aligned && mma_groups && p.rows <= kSplitRows &&
          smem_bytes + kSplitStaticBytes <= device.shared_bytes &&
          epilogue.outputs() * p.width >= kMinSplitBytes) {
        const int slices = split_k_slices(divide_up(tiles, ctas), divide_up(p.width, kBlockBytes));
        return launch(matvec_int8_split_kernel<T, Epilogue>, ctas, kSplitWarps, smem_bytes, slices);
      }
    }
    if (is_aligned && simt_groups && p.rows == 1 &&
        x_bytes + kSimtStaticBytes <= device.shared_bytes) {
      const auto with = [&](auto kernel, int pairs_per_cta) {
        return launch(kernel, divide_up(pairs, pairs_per_cta), 8, x_bytes);
      };
      if (sizeof(W) == 1 && pairs >= 2048) return with(matvec_kernel<1, T, W, Epilogue>, 8);
      // Few long rows: four warps each keep all SMs busy.
      if (p.width >= 4096 && pairs <= 2048) return with(matvec_kernel<4, T, W, Epilogue>, 2);
      return with(matvec_kernel<2, T, W, Epilogue>, 4);
    }
    const int64_t smem_bytes = kMatvecMmaWarps * kMatvecMmaStages * sizeof(MatvecStage) + x_bytes;
    const int64_t all_bytes = smem_bytes + kMmaStaticBytes;
    if (is_aligned && mma_groups && p.rows <= 16 && all_bytes <= device.shared_bytes) {
      const int ctas_per_sm = 2 * all_bytes <= device.shared_bytes ? 2 : 1;
      const int64_t ctas = std::min<int64_t>(tiles, ctas_per_sm * device.sms);
      const auto with = [&](auto kernel) {
        return launch(kernel, ctas, kMatvecMmaWarps, smem_bytes);
      };
      return p.rows <= 8 ? with(matvec_mma_kernel<1, T, W, Epilogue>)
                         : with(matvec_mma_kernel<2, T, W, Epilogue>);
    }
  }
  return launch(matvec_fallback_kernel<T, W, Epilogue>, divide_up(pairs, 8), 8, 0);
}

}  // namespace jaxllm
