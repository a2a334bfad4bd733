// Where the threads of a forward kernel find their row, and where they leave the results.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/tma.cuh"

namespace jaxllm {

// Without kBulk, in global memory. With kBulk, in shared memory: one bulk copy (TMA) loads all rows
// of the CTA and another stores the results, so that no thread holds registers for loads in flight:
//
//   shared memory    before             after
//   tile_h_          x                  h (the result where there is no residual)
//   tile_out_        residual (kAdd)    the result
//
// The host decides about kBulk (KernelImage::has_bulk_copies).
template <bool kBulk, bool kAdd, typename T>
class ForwardRows {
 public:
  // The dynamic shared memory of a CTA of so many rows.
  static constexpr int64_t shared_bytes(int64_t rows, int64_t width) {
    return kBulk ? (kAdd ? 2 : 1) * rows * width * int64_t{sizeof(T)} : 0;
  }

  // The CTA's rows begin at `first_row` of the arrays, in which `rows` rows are left. `residual`
  // and `h` are not used without kAdd. With kBulk all threads of the CTA call this.
  template <class ThreadGroup>
  __device__ __forceinline__ ForwardRows(const ThreadGroup& threads, const T* x, const T* residual,
                                         T* h, T* out, int64_t first_row, int64_t rows, int width) {
    const int64_t offset = first_row * width;
    x += offset, out += offset;
    if constexpr (kAdd) residual += offset, h += offset;
    if constexpr (kBulk) {
      // At an address that is no multiple of 128 the copies are a tenth slower.
      extern __shared__ __align__(128) int4 tile[];
      constexpr int kRows = ThreadGroup::kRowsPerCta;
      target_h_ = h, target_out_ = out;
      tile_h_ = reinterpret_cast<T*>(tile);
      tile_out_ = kAdd ? tile_h_ + kRows * width : tile_h_;
      bytes_ = static_cast<uint32_t>(min(rows, int64_t{kRows})) * width * sizeof(T);
#if __CUDA_ARCH__ >= 900
      if (threadIdx.x == 0) {
        arrived().init(1);
        hopper::fence_barrier_init();
        arrived().arrive_and_expect(kAdd ? 2 * bytes_ : bytes_);
        hopper::bulk_load(tile_h_, x, bytes_, arrived());
        if constexpr (kAdd) hopper::bulk_load(tile_out_, residual, bytes_, arrived());
      }
#endif
      __syncthreads();  // no thread waits at the barrier before its init
      x = tile_h_, out = tile_out_;
      if constexpr (kAdd) residual = tile_out_, h = tile_h_;
    }
    const int64_t offset_of_row = int64_t{threads.row()} * width;
    this->x = x + offset_of_row, this->out = out + offset_of_row;
    if constexpr (kAdd) this->residual = residual + offset_of_row, this->h = h + offset_of_row;
  }

  // Waits until the row can be read.
  __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBulk) arrived().wait(0);
#endif
  }

  // Stores the results. Threads without a row may have returned.
  __device__ __forceinline__ void store() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBulk) {
      hopper::fence_async_proxy();
      __syncthreads();
      if (threadIdx.x != 0) return;
      hopper::bulk_store(target_out_, tile_out_, bytes_);
      if constexpr (kAdd) hopper::bulk_store(target_h_, tile_h_, bytes_);
      hopper::tma_store_commit();
      hopper::tma_store_wait_read<0>();  // the shared memory ends with the CTA
    }
#endif
  }

  // The row of this thread's group.
  const T *x, *residual;
  T *h, *out;

 private:
  __device__ __forceinline__ static hopper::Barrier& arrived() {
    __shared__ hopper::Barrier barrier;
    return barrier;
  }

  // All rows of the CTA, in shared memory and in the arrays.
  T *tile_h_, *tile_out_, *target_h_, *target_out_;
  uint32_t bytes_;
};

}  // namespace jaxllm
