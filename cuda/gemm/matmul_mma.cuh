// Matrix products on tensor cores from Ampere on, of any sizes: mma.sync of what asynchronous
// copies bring to shared memory. In 16 bits, or of float32 rounded to TF32.
//
// A block has 128 x 128 of the result, a warp 64 x 64. Slices of a and b, 64 bytes deep, come into
// a ring of buffers and lie there as in memory, with the depth along the rows or across them; rows
// are padded, so that the eight that ldmatrix takes 16 bytes of lie in different banks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "activation/functions.cuh"
#include "common/cp_async.cuh"
#include "common/dependent_launch.cuh"
#include "common/fragment.cuh"
#include "common/mma.cuh"
#include "common/tile_order.cuh"
#include "common/vector.cuh"

namespace jaxllm {
namespace {

// An operand: (side, depth), side being the result's rows or columns, or turned (depth, side).
template <typename T>
struct MmaOperand {
  const T* data;
  int64_t side, depth;
  int elements;  // that a copy may take at once: as many as fit its rows, up to 16 bytes
};

template <typename T>
struct MmaMatmul {
  MmaOperand<T> a, b;
  const T* bias;  // null for none
  void* h;        // null, or where the product goes before bias and activation
  void* out;
  bool wide;  // out and h are float32
  bool gelu;
  bool aligned;  // pairs of the results lie at multiples of their size
  int row_tiles_at_a_time, row_tiles;
};

template <typename T>
struct MmaTile {
  static constexpr int kSide = 128, kStages = 4, kThreads = 128;
  static constexpr int kDepth = 64 / sizeof(T);
  static constexpr int kStep = 32 / sizeof(T);  // the depth of one product
  static constexpr int kPack = 16 / sizeof(T);
  static constexpr int kWarpRows = 64, kWarpColumns = 64;

  // A slice's rows are so far apart, and it has so many elements.
  template <bool kTurned>
  static constexpr int kStride = kTurned ? kSide + 8 : kDepth + kPack;
  template <bool kTurned>
  static constexpr int kSlice = (kTurned ? kDepth : kSide) * kStride<kTurned>;
  template <bool kTurnA, bool kTurnB>
  static constexpr int kBytes = kStages * (kSlice<kTurnA> + kSlice<kTurnB>)*int{sizeof(T)};
};

// What copies slices of an operand: the tile's side from `first` on, one after the other along the
// depth. Beyond the operand there are zeros.
template <bool kTurned, typename T>
class MmaCopier {
 public:
  __device__ __forceinline__ MmaCopier(const MmaOperand<T>& operand, int64_t first)
      : operand_(operand), first_(first) {
    whole_ = operand.elements == Tile::kPack && first + Tile::kSide <= operand.side;
    source_ = operand.data + (kTurned ? row() * operand.side + first + column()
                                      : (first + row()) * operand.depth + column());
  }

  // Starts the copies of the next slice, which begins at `depth`.
  __device__ __forceinline__ void copy_next(T* target, int64_t depth) {
    if (whole_ && depth + Tile::kDepth <= operand_.depth) {
      const T* source = source_;
#pragma unroll
      for (int part = 0; part < kRows / kApart; ++part) {
        cp_async_16(target + (row() + part * kApart) * kStride + column(), source);
        source += kApart * (kTurned ? operand_.side : operand_.depth);
      }
    } else if (operand_.elements == Tile::kPack) {
      copy_edge<Tile::kPack>(target, depth);
    } else if (operand_.elements * sizeof(T) == 4) {
      copy_edge<4 / sizeof(T)>(target, depth);
    } else {
      copy_edge<1>(target, depth);
    }
    source_ += kTurned ? Tile::kDepth * operand_.side : Tile::kDepth;
  }

 private:
  using Tile = MmaTile<T>;
  static constexpr int kRows = kTurned ? Tile::kDepth : Tile::kSide;
  static constexpr int kColumns = kTurned ? Tile::kSide : Tile::kDepth;
  static constexpr int kStride = Tile::template kStride<kTurned>;
  // A thread copies packs that lie kApart rows apart.
  static constexpr int kPacks = kColumns / Tile::kPack;
  static constexpr int kApart = Tile::kThreads / kPacks;
  static_assert(kRows % kApart == 0);
  __device__ static int row() { return threadIdx.x / kPacks; }
  __device__ static int column() { return threadIdx.x % kPacks * Tile::kPack; }

  // So many elements at a time.
  template <int kElements>
  __device__ __forceinline__ void copy_edge(T* target, int64_t depth) const {
    constexpr int kParts = kColumns / kElements;
    const int64_t rows = kTurned ? operand_.depth : operand_.side;
    const int64_t columns = kTurned ? operand_.side : operand_.depth;
    const int64_t first_row = kTurned ? depth : first_, first_column = kTurned ? first_ : depth;
#pragma unroll 1
    for (int at = threadIdx.x; at < kRows * kParts; at += Tile::kThreads) {
      const int row = at / kParts, column = at % kParts * kElements;
      const bool valid = first_row + row < rows && first_column + column < columns;
      const int64_t offset = (first_row + row) * columns + first_column + column;
      const T* const source = operand_.data + (valid ? offset : 0);
      T* const to = target + row * kStride + column;
      if constexpr (kElements * sizeof(T) == 16) {
        cp_async_16(to, source, valid);
      } else if constexpr (kElements * sizeof(T) == 4) {
        cp_async_4(to, source, valid);
      } else {
        *to = valid ? *source : from_float<T>(0.0f);
      }
    }
  }

  const MmaOperand<T>& operand_;
  int64_t first_;
  const T* source_;
  bool whole_;
};

// Rounds a float to TF32, of 10 bits after the point.
__device__ __forceinline__ uint32_t round_to_tf32(float x) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
  return rounded;
}

// The four 8 x 8 parts (of 16 bits; 8 x 4 of TF32) of 16 of the side by one step of the depth. They
// follow each other along the side first for the left operand, along the depth for the right.
template <bool kTurned, bool kLeft, typename T>
__device__ __forceinline__ void load_parts(uint32_t (&parts)[4], const T* slice, int side,
                                           int depth) {
  using Tile = MmaTile<T>;
  constexpr int kStride = Tile::template kStride<kTurned>;
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(T) == 4 && kTurned) {
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const int along_side = kLeft ? part % 2 : part / 2, along_depth = kLeft ? part / 2 : part % 2;
      const int k = depth + along_depth * 4 + lane % 4, i = side + along_side * 8 + lane / 4;
      parts[part] = __float_as_uint(slice[k * kStride + i]);
    }
  } else {
    const int first = lane / 8 % 2, second = lane / 16;
    const int along_side = kLeft ? first : second, along_depth = kLeft ? second : first;
    if constexpr (kTurned) {
      const int k = depth + along_depth * 8 + lane % 8, i = side + along_side * 8;
      ldmatrix_transposed(parts, smem_address(slice + k * kStride + i));
    } else {
      const int i = side + along_side * 8 + lane % 8, k = depth + along_depth * Tile::kPack;
      ldmatrix(parts, smem_address(slice + i * kStride + k));
    }
  }
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (uint32_t& part : parts) part = round_to_tf32(__uint_as_float(part));
  }
}

// c += a b over one step of the depth.
template <typename T>
__device__ __forceinline__ void multiply_step(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                              uint32_t b1) {
  if constexpr (sizeof(T) == 4) {
    mma_m16n8k8_tf32(c, a, b0, b1);
  } else {
    mma_m16n8k16<T>(c, a, b0, b1);
  }
}

// Stores two neighbours of a row, of which `left` are in the result.
template <typename T>
__device__ __forceinline__ void store_pair(T* target, float first, float second, int64_t left,
                                           bool aligned) {
  if (left >= 2 && aligned) {
    if constexpr (sizeof(T) == 4) {
      *reinterpret_cast<float2*>(target) = {first, second};
    } else {
      *reinterpret_cast<uint32_t*>(target) = pack_pair<T>(first, second);
    }
  } else {
    if (left >= 1) target[0] = from_float<T>(first);
    if (left >= 2) target[1] = from_float<T>(second);
  }
}

template <typename T>
__device__ __forceinline__ void store_result(void* target, bool wide, int64_t offset, float first,
                                             float second, int64_t left, bool aligned) {
  if (wide) {
    store_pair(static_cast<float*>(target) + offset, first, second, left, aligned);
  } else {
    store_pair(static_cast<T*>(target) + offset, first, second, left, aligned);
  }
}

template <bool kTurnA, bool kTurnB, typename T>
__global__ void __launch_bounds__(MmaTile<T>::kThreads, 2)
    matmul_mma_kernel(const __grid_constant__ MmaMatmul<T> call) {
  using Tile = MmaTile<T>;
  extern __shared__ __align__(16) unsigned char shared_memory[];
  T* const stages = reinterpret_cast<T*>(shared_memory);
  constexpr int kSliceA = Tile::template kSlice<kTurnA>,
                kStage = kSliceA + Tile::template kSlice<kTurnB>;

  const TilePlace place =
      place_tile(blockIdx.x, call.row_tiles, gridDim.x / call.row_tiles, call.row_tiles_at_a_time);
  const int64_t tile_row = int64_t{place.row} * Tile::kSide;
  const int64_t tile_column = int64_t{place.column} * Tile::kSide;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % 2 * Tile::kWarpRows, warp_column = warp / 2 * Tile::kWarpColumns;
  const int64_t depth = call.a.depth;
  const int steps = static_cast<int>((depth + Tile::kDepth - 1) / Tile::kDepth);
  MmaCopier<kTurnA, T> copier_a(call.a, tile_row);
  MmaCopier<kTurnB, T> copier_b(call.b, tile_column);
  const auto copy = [&](int step) {
    if (step < steps) {
      T* const stage = stages + step % Tile::kStages * kStage;
      copier_a.copy_next(stage, int64_t{step} * Tile::kDepth);
      copier_b.copy_next(stage + kSliceA, int64_t{step} * Tile::kDepth);
    }
    cp_async_commit();
  };

  constexpr int kRowBlocks = Tile::kWarpRows / 16, kColumnBlocks = Tile::kWarpColumns / 8;
  float sums[kRowBlocks][kColumnBlocks][4] = {};
#pragma unroll 1
  for (int step = 0; step < Tile::kStages - 1; ++step) copy(step);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<Tile::kStages - 2>();
    __syncthreads();
    copy(step + Tile::kStages - 1);
    const T* const of_a = stages + step % Tile::kStages * kStage;
    const T* const of_b = of_a + kSliceA;
#pragma unroll
    for (int k = 0; k < Tile::kDepth; k += Tile::kStep) {
      uint32_t a[kRowBlocks][4], b[kColumnBlocks / 2][4];
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
        load_parts<kTurnA, true>(a[i], of_a, warp_row + 16 * i, k);
      }
#pragma unroll
      for (int j = 0; j < kColumnBlocks / 2; ++j) {
        load_parts<kTurnB, false>(b[j], of_b, warp_column + 16 * j, k);
      }
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnBlocks; ++j) {
          multiply_step<T>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
  cp_async_wait_all();

  const int64_t rows = call.a.side, columns = call.b.side;
#pragma unroll
  for (int j = 0; j < kColumnBlocks; ++j) {
    const int64_t column = tile_column + warp_column + 8 * j + lane % 4 * 2;
    const int64_t left = columns - column;
    if (left <= 0) break;
    float bias[2] = {};
    if (call.bias != nullptr) {
      bias[0] = to_float(call.bias[column]);
      if (left >= 2) bias[1] = to_float(call.bias[column + 1]);
    }
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = tile_row + warp_row + 16 * i + 8 * half + lane / 4;
        if (row >= rows) break;
        float first = sums[i][j][2 * half], second = sums[i][j][2 * half + 1];
        const int64_t offset = row * columns + column;
        if (call.h != nullptr) {
          store_result<T>(call.h, call.wide, offset, first, second, left, call.aligned);
        }
        first += bias[0], second += bias[1];
        if (call.gelu) first = gelu(first), second = gelu(second);
        store_result<T>(call.out, call.wide, offset, first, second, left, call.aligned);
      }
    }
  }
}

template <bool kTurnA, bool kTurnB, typename T>
cudaError_t launch_matmul_mma(cudaStream_t stream, MmaMatmul<T> call) {
  using Tile = MmaTile<T>;
  const auto kernel = matmul_mma_kernel<kTurnA, kTurnB, T>;
  constexpr int kBytes = Tile::template kBytes<kTurnA, kTurnB>;
  const int64_t row_tiles = divide_up(call.a.side, Tile::kSide);
  const int64_t tiles = row_tiles * divide_up(call.b.side, Tile::kSide);
  if (tiles >= int64_t{1} << 31) return cudaErrorNotSupported;
  call.row_tiles = static_cast<int>(row_tiles);
  const Launch launch{dim3(static_cast<unsigned>(tiles)), dim3(Tile::kThreads), kBytes};
  return launch_kernel(stream, kernel, launch, call);
}

}  // namespace
}  // namespace jaxllm
