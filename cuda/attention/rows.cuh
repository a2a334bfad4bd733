// How threads share rows that begin at any address, a pack of 16 bytes at a time.
//
// A row of odd width does not begin where a pack may. So packs are counted from the aligned address
// at or before the row's first element: the first pack and the last may lie partly outside of the
// row, and are then moved one element at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/team.cuh"
#include "common/vector.cuh"

namespace jaxllm::attention {

// The threads of the largest block.
inline constexpr int kMostThreads = 512;
using Block = BlockPerRow<kMostThreads>;

template <class Team>
__device__ __forceinline__ float sum_over(Team& team, float value) {
  float values[1] = {value};
  team.sum(values);
  return values[0];
}

// How many elements `row` lies behind the aligned address from which its packs are counted.
template <typename T>
__device__ __forceinline__ int elements_past_aligned(const T* row) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(row) % 16 / sizeof(T));
}

// Whether all arrays begin equally far behind an aligned address, and so all their rows do.
template <typename First, typename... Rest>
bool equally_aligned(First first, Rest... rest) {
  const auto past = [](auto pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16; };
  return ((past(rest) == past(first)) && ...);
}

// A row of a (rows, width) array: how much of it counts, and what can be read around it. Where its
// packs are not `aligned`, none is moved as a whole.
template <typename T>
struct Row {
  __device__ __forceinline__ Row(int64_t row, int64_t rows, int width, int seen, bool aligned)
      : width(width), seen(seen), aligned(aligned) {
    // A pack reaches no further than its own size.
    constexpr int64_t kVector = kPackSize<T>;
    before = static_cast<int>(min(row * width, kVector));
    after = static_cast<int>(min((rows - 1 - row) * width, kVector));
  }

  int width;
  int seen;           // the columns below count
  int before, after;  // elements of other rows
  bool aligned;
};

// Waits for the copies that this thread started.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// The packs of a row that one thread works on at once.
template <typename T>
struct RowPart {
  static constexpr int kVector = kPackSize<T>;

  // The team works from the column `start` on, which is negative where that is before the row.
  template <class Team>
  __device__ __forceinline__ RowPart(const Team& team, const Row<T>& row, int start)
      : row(row), first(start + team.thread() * kVector), stride(team.threads() * kVector) {}

  // The first column of pack p.
  __device__ __forceinline__ int column(int p) const { return first + p * stride; }

  // Whether any of pack p is seen.
  __device__ __forceinline__ bool sees(int p) const { return column(p) < row.seen; }

  // Puts `hidden` in the place of those of pack p's values that are not seen.
  __device__ __forceinline__ void hide(int p, float (&values)[kVector], float hidden) const {
    if (column(p) >= 0 && column(p) + kVector <= row.seen) return;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (column(p) + i < 0 || column(p) + i >= row.seen) values[i] = hidden;
    }
  }

  // Reads the packs of which anything is seen. What is not seen of them comes as it may: where
  // there are neighbouring rows, a pack that reaches into them is read as a whole. Where the block
  // will read the packs again, the cache is to keep them.
  template <bool kKeep = false, int kPacks>
  __device__ __forceinline__ void load(Pack<T> (&packs)[kPacks], const T* source) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!sees(p)) continue;
      if (can_read(p)) {
        const T* pack = source + column(p);
        packs[p] = kKeep ? load_cached<kVector>(pack) : load_streaming<kVector>(pack);
      } else {
        packs[p] = load_elements(p, source);
      }
    }
  }

  // Starts to copy pack 0 to shared memory, if anything of it is seen.
  __device__ __forceinline__ void copy(Pack<T>* target, const T* source) const {
    if (!sees(0)) return;
    if (can_read(0)) {
      const auto address = static_cast<unsigned>(__cvta_generic_to_shared(target));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address),
                   "l"(source + column(0))
                   : "memory");
    } else {
      *target = load_elements(0, source);
    }
  }

  // Writes what lies in the row of pack p.
  __device__ __forceinline__ void store(int p, const Pack<T>& pack, T* target) const {
    if (row.aligned && column(p) >= 0 && column(p) + kVector <= row.width) {
      store_streaming(target + column(p), pack);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (is_inside(p, i)) target[column(p) + i] = from_float<T>(pack[i]);
    }
  }

  // Writes zeros to the packs, of kPacks, of which nothing is seen.
  template <int kPacks>
  __device__ __forceinline__ void clear_unseen(T* target) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
      if (!sees(p)) store(p, Pack<T>{}, target);
    }
  }

  __device__ __forceinline__ bool can_read(int p) const {
    return row.aligned && column(p) >= -row.before && column(p) + kVector <= row.width + row.after;
  }
  __device__ __forceinline__ Pack<T> load_elements(int p, const T* source) const {
    float values[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      values[i] = is_inside(p, i) ? to_float(source[column(p) + i]) : 0.0f;
    }
    return Pack<T>::of(values);
  }
  __device__ __forceinline__ bool is_inside(int p, int i) const {
    return column(p) + i >= 0 && column(p) + i < row.width;
  }

  Row<T> row;
  int first;
  int stride;
};

}  // namespace jaxllm::attention
