// The packs of 16 bytes of a row that begins at any address, divided among the threads of a group.
//
// Packs are counted from the aligned address at or before the row's first element. The first pack
// and the last may lie partly outside of the row; then they are moved one element at a time:
//
//   | pack 0 | pack 1 | ... | last pack |      aligned to 16 bytes
//      |<-------- row -------->|
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/cp_async.cuh"
#include "common/launch.h"
#include "common/thread_group.cuh"
#include "common/vector.cuh"

namespace jaxllm::attention {

using Cta = CtaPerRow<512>;

template <class ThreadGroup>
__device__ __forceinline__ float sum_over(ThreadGroup& threads, float value) {
  float values[1] = {value};
  threads.sum(values);
  return values[0];
}

// The elements from the aligned address, from which packs are counted, to `row`.
template <typename T>
__device__ __forceinline__ int elements_past_aligned(const T* row) {
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(row) % 16 / sizeof(T));
}

// Whether all arrays begin at the same address modulo 16, and so all their rows do.
template <typename First, typename... Rest>
bool equally_aligned(First first, Rest... rest) {
  const auto past = [](auto pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16; };
  return ((past(rest) == past(first)) && ...);
}

// A row of a (rows, width) array. If it is not `aligned`, no pack is moved as a whole.
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
  int seen;           // columns before the mask's
  int before, after;  // elements of other rows that a pack may read
  bool aligned;
};

// The packs of a row that one thread has in registers at once.
template <typename T>
struct RowPart {
  static constexpr int kVector = kPackSize<T>;

  // The group works from the column `start` on, which is negative if that is before the row.
  template <class ThreadGroup>
  __device__ __forceinline__ RowPart(const ThreadGroup& threads, const Row<T>& row, int start)
      : row(row), first(start + threads.rank() * kVector), stride(threads.size() * kVector) {}

  // The first column of pack p.
  __device__ __forceinline__ int column(int p) const { return first + p * stride; }

  // Whether any of pack p is seen.
  __device__ __forceinline__ bool sees(int p) const { return column(p) < row.seen; }

  // Writes `hidden` over those of pack p's values that are not seen.
  __device__ __forceinline__ void apply_mask(int p, float (&values)[kVector], float hidden) const {
    if (column(p) >= 0 && column(p) + kVector <= row.seen) return;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (column(p) + i < 0 || column(p) + i >= row.seen) values[i] = hidden;
    }
  }

  // Loads the packs of which any element is seen. The elements that are not seen may have any
  // value: a pack may reach into neighbouring rows. With kKeep the cache keeps the packs for
  // another load.
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

  // Starts to copy pack 0 to shared memory, if any element of it is seen.
  __device__ __forceinline__ void copy(Pack<T>* target, const T* source) const {
    if (!sees(0)) return;
    if (can_read(0)) {
      cp_async_16(target, source + column(0));
    } else {
      *target = load_elements(0, source);
    }
  }

  // Stores the elements of pack p that are in the row.
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

  // Stores zeros to those of kPacks packs of which no element is seen.
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

// ---- Rows that do not fit the registers of a CTA. The CTA works on parts, one pack of each array
// for each thread, in as many passes over the row as the kernel makes.
//
// A source of packs has `begin`, before the first pass, and `pass`, which calls work(part, packs)
// for the parts from the column `first` up to `end`. The numbers of threads and CTAs are the
// fastest on an H200.

// Every pass loads the row again, usually from the L2 cache, one part ahead.
struct RowFromL2 {
  static constexpr int kThreads = 1024;
  static constexpr int kMinCtasPerSm = 2;

  template <typename T, int kArrays>
  __device__ __forceinline__ void begin(const Cta&, const Row<T>&, const T* const (&)[kArrays],
                                        int) const {}

  template <bool kLast, typename T, int kArrays, class Work>
  __device__ __forceinline__ void pass(const Cta& threads, const Row<T>& row,
                                       const T* const (&sources)[kArrays], int first, int end,
                                       Work work) const {
    const int stride = blockDim.x * kPackSize<T>;
    Pack<T> next[kArrays][1];
    const auto fetch = [&](int start) {
      const RowPart<T> part(threads, row, start);
#pragma unroll
      for (int a = 0; a < kArrays; ++a) part.template load<!kLast>(next[a], sources[a]);
    };
    fetch(first);
    for (int start = first; start < end; start += stride) {
      Pack<T> packs[kArrays][1];
#pragma unroll
      for (int a = 0; a < kArrays; ++a) packs[a][0] = next[a][0];
      fetch(start + stride);
      work(RowPart<T>(threads, row, start), packs);
    }
  }
};

// cp.async copies the whole row to shared memory before the first pass. A thread reads what it
// copied itself, which needs no barrier.
struct RowInSmem {
  static constexpr int kThreads = 512;
  static constexpr int kMinCtasPerSm = 2;

  static int64_t bytes(int64_t packs, int arrays) {
    return divide_up(packs, kThreads) * kThreads * arrays * 16;
  }

  template <typename T, int kArrays>
  __device__ __forceinline__ void begin(const Cta& threads, const Row<T>& row,
                                        const T* const (&sources)[kArrays], int first) const {
    const int stride = blockDim.x * kPackSize<T>;
    Pack<T>* slot = slots<T>();
    for (int start = first; start < row.seen; start += stride) {
      const RowPart<T> part(threads, row, start);
#pragma unroll
      for (int a = 0; a < kArrays; ++a, slot += blockDim.x) part.copy(slot, sources[a]);
    }
    cp_async_wait_all();
  }

  template <bool kLast, typename T, int kArrays, class Work>
  __device__ __forceinline__ void pass(const Cta& threads, const Row<T>& row,
                                       const T* const (&)[kArrays], int first, int end,
                                       Work work) const {
    const int stride = blockDim.x * kPackSize<T>;
    const Pack<T>* slot = slots<T>();
    for (int start = first; start < end; start += stride) {
      const RowPart<T> part(threads, row, start);
      Pack<T> packs[kArrays][1];
#pragma unroll
      for (int a = 0; a < kArrays; ++a, slot += blockDim.x) {
        if (part.sees(0)) packs[a][0] = *slot;
      }
      work(part, packs);
    }
  }

  template <typename T>
  __device__ __forceinline__ static Pack<T>* slots() {
    extern __shared__ int4 shared_memory[];
    return reinterpret_cast<Pack<T>*>(shared_memory) + threadIdx.x;
  }
};

}  // namespace jaxllm::attention
