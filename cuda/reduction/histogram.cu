#include <cuda_runtime.h>

#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "reduction/histogram.h"

namespace jaxllm {
namespace {

constexpr int kThreads = 1024;
constexpr int kPacks = 4;  // of four elements, loads in flight in a thread
constexpr int64_t kTile = kThreads * kPacks * 4;
// With more ranges than this the bins are counted in global memory. Each range loads all of x, from
// the L2 cache except for the first; with so many ranges that takes as long.
constexpr int64_t kMaxRanges = 16;

// A CTA counts the bins of one range in shared memory, in every ctas-th tile of a group, and adds
// its counts to those in global memory. CTAs of the same tiles and different ranges are neighbours:
// they load a tile at about the same time, and it comes from memory once.
__global__ void __launch_bounds__(kThreads, 1)
    histogram_kernel(const int32_t* x, int32_t* counts, int64_t size, int64_t bins, int ranges,
                     int width, int ctas) {
  extern __shared__ int32_t counters[];
  const int range = blockIdx.x % ranges, cta = blockIdx.x / ranges % ctas;
  const int64_t group = blockIdx.x / ranges / ctas;
  const int64_t first_bin = int64_t{range} * width;
  const uint32_t mine = min(int64_t{width}, bins - first_bin);
  x += group * size;
  counts += group * bins + first_bin;
  for (int bin = threadIdx.x; bin < mine; bin += kThreads) counters[bin] = 0;
  __syncthreads();

  // An atomic add of one without a result is a special instruction (POPC.INC): it combines equal
  // elements of a warp, so that data of one value are not slower.
  const auto count = [&](int32_t element) {
    const uint32_t bin = static_cast<uint32_t>(element) - static_cast<uint32_t>(first_bin);
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
  fetch(cta);
  for (int64_t tile = cta; tile < tiles; tile += ctas) {
    int4 current[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; ++p) current[p] = packs[p];
    fetch(tile + ctas);  // in flight while this tile is counted
#pragma unroll
    for (const int4& pack : current) {
      count(pack.x);
      count(pack.y);
      count(pack.z);
      count(pack.w);
    }
  }
  // The elements beyond the last whole tile, or all of an array that is not aligned.
#pragma unroll 4
  for (int64_t i = tiles * kTile + int64_t{cta} * kThreads + threadIdx.x; i < size;
       i += int64_t{ctas} * kThreads) {
    count(x[i]);
  }
  __syncthreads();
  for (int bin = threadIdx.x; bin < mine; bin += kThreads) {
    if (const int32_t counted = counters[bin]) atomicAdd(&counts[bin], counted);
  }
}

// The same for any number of bins: a warp combines its equal elements, and counts in global memory.
__global__ void __launch_bounds__(kThreads)
    histogram_in_global_kernel(const int32_t* x, int32_t* counts, int64_t size, int64_t bins,
                               int ctas) {
  const int64_t group = blockIdx.x / ctas;
  const int cta = blockIdx.x % ctas, lane = threadIdx.x % 32;
  x += group * size;
  counts += group * bins;
  // All lanes of a warp have the same number of iterations, as __match_any_sync requires.
  for (int64_t i = int64_t{cta} * kThreads + threadIdx.x; i - lane < size;
       i += int64_t{ctas} * kThreads) {
    const int32_t element = i < size ? x[i] : -1;
    const unsigned equal = __match_any_sync(kFullWarp, element);
    if (element >= 0 && element < bins && lane == __ffs(equal) - 1) {
      atomicAdd(&counts[element], __popc(equal));
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

  // Ranges of bins that fit the shared memory of a CTA, all of one size. A CTA on each SM, but none
  // without a tile, and at least one for each group and range.
  const int64_t ranges = divide_up(bins, image.dynamic_shared_bytes / int64_t{sizeof(*counts)});
  if (ranges > kMaxRanges) {
    const int64_t wanted = 2 * device.sms / groups;
    const int64_t ctas = std::clamp<int64_t>(wanted, 1, divide_up(size, kThreads));
    return launch_kernel(stream, histogram_in_global_kernel, {groups * ctas, kThreads}, x, counts,
                         size, bins, static_cast<int>(ctas));
  }
  const int64_t width = divide_up(bins, ranges);
  const int64_t wanted = device.sms / (groups * ranges);
  const int64_t ctas = std::clamp<int64_t>(wanted, 1, divide_up(size, kTile));
  const size_t shared_bytes = width * sizeof(*counts);
  return launch_kernel(stream, histogram_kernel, {groups * ctas * ranges, kThreads, shared_bytes},
                       x, counts, size, bins, static_cast<int>(ranges), static_cast<int>(width),
                       static_cast<int>(ctas));
}

}  // namespace jaxllm
