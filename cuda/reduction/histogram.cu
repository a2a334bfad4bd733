#include <cuda_runtime.h>

#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "reduction/histogram.h"

namespace jaxllm {
namespace {

constexpr int kThreads = 1024;
constexpr int kPacks = 4;  // of four numbers, on their way at once in a thread
constexpr int64_t kTile = kThreads * kPacks * 4;
// With more ranges than this the bins are counted in memory: all of x is read for each range, from
// the L2 cache but for the first, and by then that takes as long.
constexpr int64_t kMaxRanges = 16;

// A block counts the bins of one range in shared memory, in every blocks-th tile of a group, and
// adds what it has to the counts in memory. Blocks of the same tiles and different ranges are
// neighbours, so that they read a tile at about the same time, and memory gives it once.
__global__ void __launch_bounds__(kThreads, 1)
    histogram_kernel(const int32_t* x, int32_t* counts, int64_t size, int64_t bins, int ranges,
                     int width, int blocks) {
  extern __shared__ int32_t counters[];
  const int range = blockIdx.x % ranges, block = blockIdx.x / ranges % blocks;
  const int64_t group = blockIdx.x / ranges / blocks;
  const int64_t first_bin = int64_t{range} * width;
  const uint32_t mine = min(int64_t{width}, bins - first_bin);
  x += group * size;
  counts += group * bins + first_bin;
  for (int bin = threadIdx.x; bin < mine; bin += kThreads) counters[bin] = 0;
  __syncthreads();

  // To add one, with nobody asking for the old value, is an instruction of its own: equal numbers
  // within a warp are added together, so data of one value are no slower than others.
  const auto count = [&](int32_t number) {
    const uint32_t bin = static_cast<uint32_t>(number) - static_cast<uint32_t>(first_bin);
    if (bin < mine) atomicAdd(&counters[bin], 1);
  };
  const int64_t tiles = reinterpret_cast<std::uintptr_t>(x) % 16 == 0 ? size / kTile : 0;
  int4 packs[kPacks];
  const auto fetch = [&](int64_t tile) {
    if (tile >= tiles) return;
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      packs[p] =
          __ldg(reinterpret_cast<const int4*>(x + tile * kTile) + p * kThreads + threadIdx.x);
    }
  };
  fetch(block);
  for (int64_t tile = block; tile < tiles; tile += blocks) {
    int4 here[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) here[p] = packs[p];
    fetch(tile + blocks);  // on its way while this one is counted
#pragma unroll
    for (const int4& pack : here) {
      count(pack.x);
      count(pack.y);
      count(pack.z);
      count(pack.w);
    }
  }
  // The end that fills no tile, or all of an array that is not aligned.
#pragma unroll 4
  for (int64_t i = tiles * kTile + int64_t{block} * kThreads + threadIdx.x; i < size;
       i += int64_t{blocks} * kThreads) {
    count(x[i]);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < mine; bin += kThreads) {
    if (const int32_t counted = counters[bin]) atomicAdd(&counts[bin], counted);
  }
}

// As above for any number of bins: a warp adds up its equal numbers, and counts in memory.
__global__ void __launch_bounds__(kThreads)
    histogram_in_memory_kernel(const int32_t* x, int32_t* counts, int64_t size, int64_t bins,
                               int blocks) {
  const int64_t group = blockIdx.x / blocks;
  const int block = blockIdx.x % blocks, lane = threadIdx.x % 32;
  x += group * size;
  counts += group * bins;
  // All lanes of a warp go round equally often, as they must to compare their numbers.
  for (int64_t i = int64_t{block} * kThreads + threadIdx.x; i - lane < size;
       i += int64_t{blocks} * kThreads) {
    const int32_t number = i < size ? x[i] : -1;
    const unsigned equal = __match_any_sync(kFullWarp, number);
    if (number >= 0 && number < bins && lane == __ffs(equal) - 1) {
      atomicAdd(&counts[number], __popc(equal));
    }
  }
}

}  // namespace

cudaError_t histogram(cudaStream_t stream, const int32_t* x, int32_t* counts, int64_t groups,
                      int64_t size, int64_t bins) {
  DeviceLimits device;
  KernelImage image;
  JAXLLM_RETURN_IF_ERROR(device.read());
  JAXLLM_RETURN_IF_ERROR(image.read(histogram_kernel));
  JAXLLM_RETURN_IF_ERROR(cudaMemsetAsync(counts, 0, groups * bins * sizeof(*counts), stream));
  if (size == 0) return cudaSuccess;

  // Ranges of bins as a block's shared memory holds them, all of a size; a block on each
  // multiprocessor, but none without a tile, and at least one for each group and range.
  const int64_t ranges = divide_up(bins, image.dynamic_shared_bytes / int64_t{sizeof(*counts)});
  if (ranges > kMaxRanges) {
    const int64_t wanted = 2 * device.multiprocessors / groups;
    const int64_t blocks = std::clamp<int64_t>(wanted, 1, divide_up(size, kThreads));
    return launch_kernel(stream, histogram_in_memory_kernel, {groups * blocks, kThreads}, x, counts,
                         size, bins, static_cast<int>(blocks));
  }
  const int64_t width = divide_up(bins, ranges);
  const int64_t wanted = device.multiprocessors / (groups * ranges);
  const int64_t blocks = std::clamp<int64_t>(wanted, 1, divide_up(size, kTile));
  const size_t shared_bytes = width * sizeof(*counts);
  return launch_kernel(stream, histogram_kernel, {groups * blocks * ranges, kThreads, shared_bytes},
                       x, counts, size, bins, static_cast<int>(ranges), static_cast<int>(width),
                       static_cast<int>(blocks));
}

}  // namespace jaxllm
