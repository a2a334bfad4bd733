// Where a team of a forward kernel finds its row, and where it leaves what it makes of it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "common/hopper.cuh"

namespace jaxllm {

// Whether the GPU that this code is compiled for has a copy engine.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHasCopyEngine = true;
#else
inline constexpr bool kHasCopyEngine = false;
#endif

// In global memory; or, with kBulk, in shared memory, where the copy engine brings all rows of the
// block with one instruction and whence it takes the results, so that no thread holds registers for
// bytes on their way. There h takes the place of x, and the result that of the residual, or of x
// where none is added.
template <bool kBulk, bool kAdd, typename T>
class ForwardRows {
 public:
  // The dynamic shared memory of a block of so many rows.
  static constexpr int64_t shared_bytes(int64_t rows, int64_t width) {
    return kBulk ? (kAdd ? 2 : 1) * rows * width * int64_t{sizeof(T)} : 0;
  }

  // The block's rows begin at `first_row` of the arrays; beyond `rows` of them there are no more.
  // With kBulk all of the block calls this.
  template <class Team>
  __device__ __forceinline__ ForwardRows(const Team& team, const T* x, const T* residual, T* h,
                                         T* out, int64_t first_row, int64_t rows, int width) {
    const int64_t offset = first_row * width;
    all_h_ = h + offset, all_out_ = out + offset;
    if constexpr (kBulk && kHasCopyEngine) {
      extern __shared__ int4 shared_memory[];
      constexpr int kRows = Team::kRowsPerBlock;
      in_h_ = reinterpret_cast<T*>(shared_memory);
      in_out_ = kAdd ? in_h_ + kRows * width : in_h_;
      bytes_ = static_cast<uint32_t>(min(rows, int64_t{kRows})) * width * sizeof(T);
      if (threadIdx.x == 0) {
        arrived().init(1);
        hopper::fence_barrier_init();
        arrived().arrive_and_expect(kAdd ? 2 * bytes_ : bytes_);
        hopper::load_bytes(in_h_, x + offset, bytes_, arrived());
        if constexpr (kAdd) hopper::load_bytes(in_out_, residual + offset, bytes_, arrived());
      }
      __syncthreads();  // nobody waits at a barrier that is not there yet
      this->x = this->h = in_h_ + team.row() * width;
      this->residual = this->out = in_out_ + team.row() * width;
    } else {
      const int64_t of_team = offset + int64_t{team.row()} * width;
      this->x = x + of_team, this->residual = residual + of_team;
      this->h = h + of_team, this->out = out + of_team;
    }
  }

  // Waits until the row can be read.
  __device__ __forceinline__ void wait() {
    if constexpr (kBulk && kHasCopyEngine) arrived().wait(0);
  }

  // Sends the results on their way. Teams that have no row may have returned.
  __device__ __forceinline__ void finish() {
    if constexpr (kBulk && kHasCopyEngine) {
      hopper::fence_async_proxy();
      __syncthreads();
      if (threadIdx.x != 0) return;
      hopper::store_bytes(all_out_, in_out_, bytes_);
      if constexpr (kAdd) hopper::store_bytes(all_h_, in_h_, bytes_);
      hopper::commit_stores();
      hopper::wait_until_stores_have_read();  // with the block its shared memory ends
    }
  }

  const T *x, *residual;
  T *h, *out;

 private:
  __device__ __forceinline__ static hopper::Barrier& arrived() {
    __shared__ hopper::Barrier barrier;
    return barrier;
  }

  T *in_h_, *in_out_;  // all of the block's, in shared memory
  T *all_h_, *all_out_;
  uint32_t bytes_;
};

}  // namespace jaxllm
