// Which thread group, and how many packs and rows for each thread, suit rows of a given width. The
// constants were measured on an H200.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "common/dependent_launch.cuh"
#include "norm/rows.cuh"

namespace jaxllm {

// The threads of the largest CTA.
inline constexpr int kMaxCtaThreads = 512;

// How a forward kernel loads and stores. Measured with the statistics stored.
enum class Access {
  kPlain,
  kWeightsFirst,  // loads the weights before the sums, where the registers suffice
  kStreaming,     // loads and stores the rows with streaming hints (.cs)
  kBulk,          // bulk copies of the rows, see forward_rows.cuh: faster where there is one sum
};

// How a kernel divides a row: each thread of the group has kPackCount packs.
template <class Threads, int kPackCount>
struct RowStrategy {
  using ThreadGroup = Threads;
  static constexpr int kPacks = kPackCount;

  // The threads of a CTA for rows of `packs` packs.
  static int threads(int64_t packs) {
    if (ThreadGroup::kRowsPerCta > 1) return ThreadGroup::kMaxThreads;
    return static_cast<int>(divide_up(packs, 32 * kPacks) * 32);
  }
};

// A forward kernel holds whole rows in registers and has a thread group for each row. Where a warp
// is enough for a row, a CTA is one warp, or two: the next row begins as soon as one is finished.
template <class Threads, int kPackCount, int kCtas, Access kAccess = Access::kPlain>
struct ForwardStrategy : RowStrategy<Threads, kPackCount> {
  static constexpr int kMinCtas = kCtas;  // on an SM: bounds the registers
  static constexpr bool kStreaming = kAccess == Access::kStreaming;
  static constexpr bool kBulk = kAccess == Access::kBulk;
  static constexpr bool kWeightsFirst = kAccess == Access::kWeightsFirst;

  // The same for an image without bulk copies.
  using Plain = ForwardStrategy<Threads, kPackCount, kCtas>;
};

// Returns `launch(strategy)` for the strategy that suits rows of `packs` packs, or
// cudaErrorNotSupported where the rows are too wide. kSums is the number of sums over a row that
// depend on each other. With kAdd a kernel loads and stores twice as much.
template <int kSums, bool kAdd, class Launch>
cudaError_t choose_forward(int64_t packs, Launch launch) {
  constexpr int kThreads = kMaxCtaThreads;
  if (packs <= 16) return launch(ForwardStrategy<LanesPerRow<16, 32>, 1, 24>{});
  if (packs <= 32) return launch(ForwardStrategy<LanesPerRow<32, 32>, 1, 24>{});
  if constexpr (kAdd) {
    if (packs > 64 && packs <= 96) return launch(ForwardStrategy<LanesPerRow<32, 32>, 3, 24>{});
    if (packs <= kThreads / 2) {
      return launch(ForwardStrategy<CtaPerRow<kThreads / 2>, 1, 6, Access::kWeightsFirst>{});
    }
    if (packs <= kThreads) {
      if constexpr (kSums == 1) {
        return launch(ForwardStrategy<CtaPerRow<kThreads>, 1, 3, Access::kBulk>{});
      } else {
        return launch(ForwardStrategy<CtaPerRow<kThreads / 2>, 2, 4, Access::kWeightsFirst>{});
      }
    }
  } else {
    if (packs <= 64) return launch(ForwardStrategy<LanesPerRow<32, 32>, 2, 24>{});
    if (packs <= 96) {
      if constexpr (kSums == 1) {
        return launch(ForwardStrategy<LanesPerRow<32, 64>, 3, 16, Access::kBulk>{});
      } else {
        return launch(ForwardStrategy<LanesPerRow<32, 32>, 3, 24>{});
      }
    }
    if constexpr (kSums == 1) {
      if (packs > kThreads / 2 && packs <= kThreads) {
        return launch(ForwardStrategy<CtaPerRow<kThreads / 4>, 4, 6, Access::kBulk>{});
      }
    }
    if (packs <= kThreads) {
      return launch(ForwardStrategy<CtaPerRow<kThreads / 2>, 2, 6, Access::kStreaming>{});
    }
  }
  if (packs <= 2 * kThreads) {
    return launch(ForwardStrategy<CtaPerRow<kThreads>, 2, 2, Access::kStreaming>{});
  }
  if (packs <= 4 * kThreads) {
    return launch(ForwardStrategy<CtaPerRow<kThreads>, 4, 1, Access::kStreaming>{});
  }
  if (packs <= 8 * kThreads) {
    return launch(ForwardStrategy<CtaPerRow<kThreads>, 8, 1, Access::kStreaming>{});
  }
  return cudaErrorNotSupported;
}

// A backward kernel is persistent: its CTAs loop over tiles of kRows rows for each thread group.
// kWarps is the number of warps on an SM that keeps the memory busy. With fewer the latency shows;
// with more the accesses spread over more pages of memory than stay open.
template <class Threads, int kPackCount, int kRowCount, int kWarpCount>
struct BackwardStrategy : RowStrategy<Threads, kPackCount> {
  static constexpr int kRows = kRowCount;
  static constexpr int kWarps = kWarpCount;
};

// As choose_forward.
template <int kSums, class Launch>
cudaError_t choose_backward(int64_t packs, Launch launch) {
  constexpr int kThreads = kMaxCtaThreads;
  constexpr int kRowsOf8KiB = kSums == 1 ? 2 : 4;  // of a tile where a row has 4 to 8 KiB
  if (packs <= 16) return launch(BackwardStrategy<LanesPerRow<16, 128>, 1, 4, 8>{});
  if (packs <= 32) return launch(BackwardStrategy<LanesPerRow<32, 128>, 1, 4, 8>{});
  if (packs <= 64) return launch(BackwardStrategy<LanesPerRow<32, 128>, 2, 2, 8>{});
  if (packs <= 96) return launch(BackwardStrategy<LanesPerRow<32, 128>, 3, 1, 12>{});
  if (packs <= kThreads / 2) return launch(BackwardStrategy<CtaPerRow<kThreads>, 1, 4, 16>{});
  if (packs <= kThreads) {
    return launch(BackwardStrategy<CtaPerRow<kThreads>, 1, kRowsOf8KiB, 16>{});
  }
  if (packs <= 2 * kThreads) return launch(BackwardStrategy<CtaPerRow<kThreads>, 2, 1, 16>{});
  if (packs <= 4 * kThreads) return launch(BackwardStrategy<CtaPerRow<kThreads>, 4, 1, 16>{});
  return cudaErrorNotSupported;
}

// The grid of a backward kernel: `warps` warps on each SM, if the work is enough. Zero CTAs where
// the tiles of a CTA, of `tile_bytes` in all, do not fit the device's shared memory.
template <class Kernel>
cudaError_t backward_ctas(Kernel kernel, int threads, int warps, int64_t tile_bytes, int64_t groups,
                          int64_t tiles, int64_t* ctas) {
  int resident = 0;
  DeviceLimits device;
  KernelImage image;
  JAXLLM_RETURN_IF_ERROR(device.read());
  JAXLLM_RETURN_IF_ERROR(image.read(kernel));
  *ctas = 0;
  if (tile_bytes > image.dynamic_shared_bytes) return cudaSuccess;
  JAXLLM_RETURN_IF_ERROR(find_resident_ctas(kernel, threads, tile_bytes, &resident));
  if (resident == 0) return cudaSuccess;
  const int64_t each = std::min(std::max(warps * 32 / threads, 1), resident);
  *ctas = std::min(divide_up(device.sms * each, groups), tiles);
  return cudaSuccess;
}

}  // namespace jaxllm
