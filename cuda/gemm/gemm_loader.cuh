// Loads K-blocks of an operand into shared memory with cp.async, for gemm/mma and gemm/float32.
#pragma once

#include <cstdint>

#include "common/cp_async.cuh"
#include "common/vector.cuh"
#include "gemm/gemm_params.cuh"

namespace jaxllm {
namespace {

// Loads the K-blocks of a CTA tile, kExtent by kBlockK, one after the other. Elements beyond the
// operand are zero. A K-block keeps its major in shared memory, with kStride elements from row to
// row; kTranspose makes it MN-major, by copies of single elements. kSingles has a fast path for
// operands without 16-byte alignment too.
template <typename T, int kExtent, int kBlockK, int kStride, int kThreads, bool kMnMajor,
          bool kTranspose, bool kSingles>
class KBlockLoader {
 public:
  // The tile begins at `first` of the operand's extent.
  __device__ __forceinline__ KBlockLoader(const GemmOperand<T>& operand, int64_t first)
      : operand_(operand), first_(first) {
    whole_ = (kSingles || has_vectors()) && first + kExtent <= operand.extent;
    const bool vectors = !kTranspose && (!kSingles || has_vectors());
    const int row = vectors ? Vectors::row() : Singles::row();
    const int column = vectors ? Vectors::column() : Singles::column();
    source_ = operand.data + (kMnMajor ? row * operand.extent + first + column
                                       : (first + row) * operand.depth + column);
  }

  // Starts the copies of the next K-block, which begins at `depth`.
  __device__ __forceinline__ void load_next(T* target, int64_t depth) {
    const bool whole = whole_ && depth + kBlockK <= operand_.depth;
    if constexpr (kSingles) {
      if (!whole) {
        load_predicated<1>(target, depth);
      } else if (!kTranspose && has_vectors()) {
        load_whole<Vectors>(target);
      } else {
        load_whole<Singles>(target);
      }
    } else if (whole) {
      load_whole<Vectors>(target);
    } else if (has_vectors()) {
      load_predicated<kVector>(target, depth);
    } else if (operand_.vector * sizeof(T) == 4) {
      load_predicated<4 / sizeof(T)>(target, depth);
    } else {
      load_predicated<1>(target, depth);
    }
    source_ += kMnMajor ? kBlockK * operand_.extent : kBlockK;
  }

 private:
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kRows = kMnMajor ? kBlockK : kExtent;
  static constexpr int kColumns = kMnMajor ? kExtent : kBlockK;

  // How the threads share a K-block: each copies kElements of every kRowsAtOnce-th row.
  template <int kElements_>
  struct ThreadMap {
    static constexpr int kElements = kElements_, kCopies = kColumns / kElements;
    static constexpr int kRowsAtOnce = kThreads / kCopies;
    __device__ static int row() { return threadIdx.x / kCopies; }
    __device__ static int column() { return threadIdx.x % kCopies * kElements; }
  };
  using Singles = ThreadMap<1>;
  using Vectors = ThreadMap<kVector>;

  __device__ __forceinline__ bool has_vectors() const { return operand_.vector == kVector; }
  __device__ __forceinline__ static int smem_offset(int row, int column) {
    return kTranspose ? column * kStride + row : row * kStride + column;
  }

  template <class Map>
  __device__ __forceinline__ void load_whole(T* target) const {
    static_assert(Map::kRowsAtOnce * Map::kCopies == kThreads && kRows % Map::kRowsAtOnce == 0);
    const T* source = source_;
    T* const first = target + smem_offset(Map::row(), Map::column());
#pragma unroll
    for (int row = 0; row < kRows; row += Map::kRowsAtOnce) {
      if constexpr (Map::kElements * sizeof(T) == 16) {
        cp_async_16(first + smem_offset(row, 0), source);
      } else {
        cp_async_4(first + smem_offset(row, 0), source);
      }
      source += Map::kRowsAtOnce * (kMnMajor ? operand_.extent : operand_.depth);
    }
  }

  template <int kElements>
  __device__ __forceinline__ void load_predicated(T* target, int64_t depth) const {
    constexpr int kCopies = kColumns / kElements;
    const int64_t rows = kMnMajor ? operand_.depth : operand_.extent;
    const int64_t columns = kMnMajor ? operand_.extent : operand_.depth;
    const int64_t first_row = kMnMajor ? depth : first_, first_column = kMnMajor ? first_ : depth;
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kCopies; i += kThreads) {
      const int row = i / kCopies, column = i % kCopies * kElements;
      const bool valid = first_row + row < rows && first_column + column < columns;
      const int64_t offset = (first_row + row) * columns + first_column + column;
      const T* source = operand_.data;
      if constexpr (kSingles) {  // 12% faster for float32, and a select 17% for TF32
        if (valid) source += offset;
      } else {
        source += valid ? offset : 0;
      }
      T* const to = target + smem_offset(row, column);
      if constexpr (kElements * sizeof(T) == 16) {
        cp_async_16(to, source, valid);
      } else if constexpr (kElements * sizeof(T) == 4) {
        cp_async_4(to, source, valid);
      } else {
        *to = valid ? *source : from_float<T>(0.0f);
      }
    }
  }

  const GemmOperand<T>& operand_;
  int64_t first_;
  const T* source_;
  bool whole_;
};

}  // namespace
}  // namespace jaxllm
