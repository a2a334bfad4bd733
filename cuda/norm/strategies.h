// Which team of threads, and how many packs and rows for each thread, suit rows of a given width.
// The numbers were found by measurement on an H200.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "norm/rows.cuh"

namespace jaxllm {

// The threads of the largest block.
inline constexpr int kMostThreads = 512;

// How a forward kernel reads. It may ask for the weights before the sums, so that the row need not
// wait for them, where the registers suffice; or stream, which says of the rows that nobody else
// wants them; or leave the rows to the copy engine (see forward_rows.cuh), which pays where the
// kernel has few instructions: with one sum. Which is faster was measured with the statistics
// written.
enum class Access { kPlain, kWeightsFirst, kStreaming, kBulk };

// A forward kernel holds whole rows in registers and has a team for each row. Where a warp is
// enough for a row, a block is one warp, or two: the next row begins as soon as one is finished.
template <class TeamType, int kPackCount, int kBlocks, Access kAccess = Access::kPlain>
struct ForwardStrategy {
  using Team = TeamType;
  static constexpr int kPacks = kPackCount;
  static constexpr int kMinBlocks = kBlocks;  // on a multiprocessor: bounds the registers
  static constexpr bool kStreams = kAccess == Access::kStreaming;
  static constexpr bool kBulk = kAccess == Access::kBulk;
  static constexpr bool kWeightsFirst = kAccess == Access::kWeightsFirst;

  // The same for an image without bulk copies.
  using Plain = ForwardStrategy<TeamType, kPackCount, kBlocks>;

  static int threads_per_row(int block_threads) { return block_threads / Team::kRowsPerBlock; }
};

// Returns `launch(strategy, threads)` for the strategy that suits rows of `packs` packs, or false
// where the rows are too wide. kSums is the number of sums over a row that wait for each other.
// With kAdd a kernel reads and writes twice as much.
template <int kSums, bool kAdd, class Launch>
bool choose_forward(int64_t packs, Launch launch) {
  constexpr int kThreads = kMostThreads;
  if (packs <= 16) return launch(ForwardStrategy<LanesPerRow<16, 32>, 1, 24>{}, 32);
  if (packs <= 32) return launch(ForwardStrategy<LanesPerRow<32, 32>, 1, 24>{}, 32);
  if constexpr (kAdd) {
    if (packs > 64 && packs <= 96) return launch(ForwardStrategy<LanesPerRow<32, 32>, 3, 24>{}, 32);
    if (packs <= kThreads / 2) {
      return launch(ForwardStrategy<BlockPerRow<kThreads / 2>, 1, 6, Access::kWeightsFirst>{},
                    block_threads(packs, 1));
    }
    if (packs <= kThreads) {
      if constexpr (kSums == 1) {
        return launch(ForwardStrategy<BlockPerRow<kThreads>, 1, 3, Access::kBulk>{},
                      block_threads(packs, 1));
      } else {
        return launch(ForwardStrategy<BlockPerRow<kThreads / 2>, 2, 4, Access::kWeightsFirst>{},
                      block_threads(packs, 2));
      }
    }
  } else {
    if (packs <= 64) return launch(ForwardStrategy<LanesPerRow<32, 32>, 2, 24>{}, 32);
    if (packs <= 96) {
      if constexpr (kSums == 1) {
        return launch(ForwardStrategy<LanesPerRow<32, 64>, 3, 16, Access::kBulk>{}, 64);
      } else {
        return launch(ForwardStrategy<LanesPerRow<32, 32>, 3, 24>{}, 32);
      }
    }
    if constexpr (kSums == 1) {
      if (packs > kThreads / 2 && packs <= kThreads) {
        return launch(ForwardStrategy<BlockPerRow<kThreads / 4>, 4, 6, Access::kBulk>{},
                      block_threads(packs, 4));
      }
    }
    if (packs <= kThreads) {
      return launch(ForwardStrategy<BlockPerRow<kThreads / 2>, 2, 6, Access::kStreaming>{},
                    block_threads(packs, 2));
    }
  }
  if (packs <= 2 * kThreads) {
    return launch(ForwardStrategy<BlockPerRow<kThreads>, 2, 2, Access::kStreaming>{},
                  block_threads(packs, 2));
  }
  if (packs <= 4 * kThreads) {
    return launch(ForwardStrategy<BlockPerRow<kThreads>, 4, 1, Access::kStreaming>{},
                  block_threads(packs, 4));
  }
  if (packs <= 8 * kThreads) {
    return launch(ForwardStrategy<BlockPerRow<kThreads>, 8, 1, Access::kStreaming>{},
                  block_threads(packs, 8));
  }
  return false;
}

// A backward kernel's blocks stay on their multiprocessors and loop over tiles of kRows rows for
// each team. kWarps is the number of warps on a multiprocessor that keeps the memory busy: with
// fewer the latency shows, and with more the accesses spread over more pages of memory than stay
// open.
template <class TeamType, int kPackCount, int kRowCount, int kWarpCount>
struct BackwardStrategy {
  using Team = TeamType;
  static constexpr int kPacks = kPackCount;
  static constexpr int kRows = kRowCount;
  static constexpr int kWarps = kWarpCount;
};

// As choose_forward. kWideRows is the number of rows in a tile where a row has 4 to 8 KiB.
template <int kWideRows, class Launch>
bool choose_backward(int64_t packs, Launch launch) {
  constexpr int kLaneThreads = 128;
  if (packs <= 16) {
    return launch(BackwardStrategy<LanesPerRow<16, kLaneThreads>, 1, 4, 8>{}, kLaneThreads);
  }
  if (packs <= 32) {
    return launch(BackwardStrategy<LanesPerRow<32, kLaneThreads>, 1, 4, 8>{}, kLaneThreads);
  }
  if (packs <= 64) {
    return launch(BackwardStrategy<LanesPerRow<32, kLaneThreads>, 2, 2, 8>{}, kLaneThreads);
  }
  if (packs <= 96) {
    return launch(BackwardStrategy<LanesPerRow<32, kLaneThreads>, 3, 1, 12>{}, kLaneThreads);
  }
  if (packs <= kMostThreads / 2) {
    return launch(BackwardStrategy<BlockPerRow<kMostThreads>, 1, 4, 16>{}, block_threads(packs, 1));
  }
  if (packs <= kMostThreads) {
    return launch(BackwardStrategy<BlockPerRow<kMostThreads>, 1, kWideRows, 16>{},
                  block_threads(packs, 1));
  }
  if (packs <= 2 * kMostThreads) {
    return launch(BackwardStrategy<BlockPerRow<kMostThreads>, 2, 1, 16>{}, block_threads(packs, 2));
  }
  if (packs <= 4 * kMostThreads) {
    return launch(BackwardStrategy<BlockPerRow<kMostThreads>, 4, 1, 16>{}, block_threads(packs, 4));
  }
  return false;
}

// The grid of a backward kernel: `warps` warps on each multiprocessor, if the work is enough; zero
// blocks where a block's tiles, of `tile_bytes` in all, do not fit the device's shared memory.
template <class Kernel>
cudaError_t backward_blocks(Kernel kernel, int threads, int warps, int64_t tile_bytes,
                            int64_t groups, int64_t tiles, int64_t* blocks) {
  int resident = 0;
  DeviceLimits device;
  KernelImage image;
  JAXLLM_RETURN_IF_ERROR(device.read());
  JAXLLM_RETURN_IF_ERROR(image.read(kernel));
  *blocks = 0;
  if (tile_bytes > image.dynamic_shared_bytes) return cudaSuccess;
  JAXLLM_RETURN_IF_ERROR(find_resident_ctas(kernel, threads, tile_bytes, &resident));
  if (resident == 0) return cudaSuccess;
  const int64_t each = std::min(std::max(warps * 32 / threads, 1), resident);
  *blocks = std::min(divide_up(device.multiprocessors * each, groups), tiles);
  return cudaSuccess;
}

}  // namespace jaxllm
