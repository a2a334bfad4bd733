#include <cuda_runtime.h>

#include <algorithm>

#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "common/reduce.cuh"
#include "common/vector.cuh"
#include "vision/nms.h"

namespace jaxllm {
namespace {

constexpr int kSelectThreads = 1024;  // a warp for two boxes of a tile
constexpr int kWords = 5;             // of a row, loads in flight in a lane
constexpr int64_t kMaxGridZ = 65535;

// A side of a box or of an intersection: zero where it would be negative, and NaN where a corner is
// NaN, so that such a box overlaps nothing.
__device__ __forceinline__ float side(float low, float high, float pixel) {
  return max_or_nan(high - low + pixel, 0.0f);
}

struct Box {
  float x1, y1, x2, y2, area;

  template <typename T>
  __device__ __forceinline__ Box(const T* corners, float pixel)
      : x1(to_float(corners[0])),
        y1(to_float(corners[1])),
        x2(to_float(corners[2])),
        y2(to_float(corners[3])),
        area(side(x1, x2, pixel) * side(y1, y2, pixel)) {}
  Box() = default;

  // Whether the intersection over the union is above the threshold, without a division.
  __device__ __forceinline__ bool overlaps(const Box& other, float threshold, float pixel) const {
    const float width = side(max_or_nan(x1, other.x1), min_or_nan(x2, other.x2), pixel);
    const float height = side(max_or_nan(y1, other.y1), min_or_nan(y2, other.y2), pixel);
    const float both = width * height;
    return both > threshold * (area + other.area - both);
  }
};

// CTA (x, y, z) compares the boxes of tile y with those of tile x >= y, a thread for each row: bit
// j of its word is box j of tile x. On the diagonal it sets only the bits of the boxes before its
// own.
template <typename T>
__global__ void __launch_bounds__(kNmsTile)
    nms_overlaps_kernel(const T* boxes, uint64_t* overlaps, int64_t groups, int64_t count,
                        float threshold, float pixel) {
  __shared__ Box columns[kNmsTile];
  if (blockIdx.x < blockIdx.y) return;
  const int thread = threadIdx.x;
  const int64_t row = int64_t{blockIdx.y} * kNmsTile + thread;
  const int64_t first_column = int64_t{blockIdx.x} * kNmsTile;
  const bool diagonal = blockIdx.x == blockIdx.y;
  const int width = min(int64_t{kNmsTile}, count - first_column);
  for (int64_t group = blockIdx.z; group < groups; group += gridDim.z) {
    const T* corners = boxes + group * count * 4;
    __syncthreads();  // all threads are done with the columns of the last group
    if (thread < width) columns[thread] = Box(corners + (first_column + thread) * 4, pixel);
    __syncthreads();
    if (row >= count) continue;
    const Box mine(corners + row * 4, pixel);
    uint64_t word = 0;
    const int end = diagonal ? thread : width;
#pragma unroll 8
    for (int j = 0; j < end; ++j) {
      word |= uint64_t{mine.overlaps(columns[j], threshold, pixel)} << j;
    }
    overlaps[(group * count + row) * gridDim.x + blockIdx.x] = word;
  }
}

// One CTA goes through the tiles of a group in order. The first warp decides which boxes of a tile
// are kept. Then each warp takes rows of kept boxes, and removes the boxes of later tiles that they
// overlap.
__global__ void __launch_bounds__(kSelectThreads)
    nms_select_kernel(const uint64_t* overlaps, bool* keep, int64_t count, int tiles) {
  extern __shared__ uint32_t removed[];  // two words for each tile: bits of removed boxes
  __shared__ uint64_t kept_in_tile;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  overlaps += blockIdx.x * count * tiles;
  keep += blockIdx.x * count;
  for (int i = threadIdx.x; i < 2 * tiles; i += kSelectThreads) removed[i] = 0;

  // The boxes of a tile that overlap boxes `lane` and `lane` + 32 of it and come before them.
  uint64_t before[2] = {};
  const auto fetch_before = [&](int tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t box = int64_t{tile} * kNmsTile + half * 32 + lane;
      before[half] = tile < tiles && box < count ? overlaps[box * tiles + tile] : 0;
    }
  };
  if (warp == 0) fetch_before(0);

  for (int tile = 0; tile < tiles; ++tile) {
    const int64_t first = int64_t{tile} * kNmsTile;
    __syncthreads();
    if (warp == 0) {
      // A box is kept if no kept box before it overlaps it. Start with all kept, and decide again
      // until nothing changes: box i is final after i + 1 iterations, and most after two or three.
      const uint64_t out = uint64_t{removed[2 * tile + 1]} << 32 | removed[2 * tile];
      uint64_t kept = ~out, last;
      do {
        last = kept;
        const bool low = !(out >> lane & 1) && !(before[0] & last);
        const bool high = !(out >> (lane + 32) & 1) && !(before[1] & last);
        kept = uint64_t{__ballot_sync(kFullWarp, high)} << 32 | __ballot_sync(kFullWarp, low);
      } while (kept != last);
      fetch_before(tile + 1);  // in flight while the rows are loaded
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int box = half * 32 + lane;
        if (first + box < count) keep[first + box] = kept >> box & 1;
      }
      if (lane == 0) kept_in_tile = kept;
    }
    __syncthreads();
    // Each warp has two boxes of the tile. The loads of both are in flight at once.
    bool is_kept[2];
    const uint64_t* rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int box = half * 32 + warp;
      is_kept[half] = first + box < count && (kept_in_tile >> box & 1);
      rows[half] = overlaps + (first + box) * tiles;
    }
    if (!is_kept[0] && !is_kept[1]) continue;
    for (int later = tile + 1 + lane; later < tiles; later += 32 * kWords) {
      uint64_t words[2][kWords];
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = later + 32 * w;
          words[half][w] = is_kept[half] && column < tiles ? rows[half][column] : 0;
        }
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const uint64_t word = words[0][w] | words[1][w];
        const uint32_t low = word, high = word >> 32;
        if (low) atomicOr(&removed[2 * (later + 32 * w)], low);
        if (high) atomicOr(&removed[2 * (later + 32 * w) + 1], high);
      }
    }
  }
}

}  // namespace

template <typename T>
cudaError_t nms(cudaStream_t stream, const T* boxes, bool* keep, uint64_t* overlaps, int64_t groups,
                int64_t count, float iou_threshold, bool inclusive) {
  if (groups == 0 || count == 0) return cudaSuccess;
  const int64_t tiles = nms_tiles(count);
  const dim3 grid(tiles, tiles, std::min(groups, kMaxGridZ));
  JAXLLM_RETURN_IF_ERROR(launch_kernel(stream, nms_overlaps_kernel<T>, {grid, kNmsTile}, boxes,
                                       overlaps, groups, count, iou_threshold,
                                       inclusive ? 1.0f : 0.0f));
  const size_t shared_bytes = 2 * sizeof(uint32_t) * tiles;
  return launch_kernel(stream, nms_select_kernel, {groups, kSelectThreads, shared_bytes}, overlaps,
                       keep, count, static_cast<int>(tiles));
}

template cudaError_t nms<float>(cudaStream_t, const float*, bool*, uint64_t*, int64_t, int64_t,
                                float, bool);
template cudaError_t nms<__nv_bfloat16>(cudaStream_t, const __nv_bfloat16*, bool*, uint64_t*,
                                        int64_t, int64_t, float, bool);
template cudaError_t nms<__half>(cudaStream_t, const __half*, bool*, uint64_t*, int64_t, int64_t,
                                 float, bool);

}  // namespace jaxllm
