// Where a team of a forward kernel finds its row, and where it leaves what it makes of it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/tma.cuh"
namespace jaxllm {

// In global memory; or, with kBulk, in shared memory, where bulk copies bring all rows of the block
// with one instruction and whence they take the results, so that no thread holds registers for
// bytes on their way. There h takes the place of x, and the result that of the residual, or of x
// where none is added. Whether to use kBulk is the host's decision (KernelImage::has_bulk_copies):
// compiled for a GPU without bulk copies, a kernel with kBulk is never launched.
template <bool kBulk, bool kAdd, typename T>
class ForwardRows {
 public:
  // The dynamic shared memory of a block of so many rows.
  static constexpr int64_t shared_bytes(int64_t rows, int64_t width) {
    return kBulk ? (kAdd ? 2 : 1) * rows * width * int64_t{sizeof(T)} : 0;
  }

  // The block's rows begin at `first_row` of the arrays; beyond `rows` of them there are no more.
  // `residual` and `h` are of no account without kAdd. With kBulk all of the block calls this.
  template <class Team>
  __device__ __forceinline__ ForwardRows(const Team& team, const T* x, const T* residual, T* h,
                                         T* out, int64_t first_row, int64_t rows, int width) {
    const int64_t offset = first_row * width;
    x += offset, out += offset;
    if constexpr (kAdd) residual += offset, h += offset;
    if constexpr (kBulk) {
      // At an address that is no multiple of 128 the engine is a tenth slower.
      extern __shared__ __align__(128) int4 tile[];
      constexpr int kRows = Team::kRowsPerBlock;
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
      __syncthreads();  // nobody waits at a barrier that is not there yet
      x = tile_h_, out = tile_out_;
      if constexpr (kAdd) residual = tile_out_, h = tile_h_;
    }
    const int64_t of_team = int64_t{team.row()} * width;
    this->x = x + of_team, this->out = out + of_team;
    if constexpr (kAdd) this->residual = residual + of_team, this->h = h + of_team;
  }

  // Waits until the row can be read.
  __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBulk) arrived().wait(0);
#endif
  }

  // Sends the results on their way. Teams that have no row may have returned.
  __device__ __forceinline__ void finish() {
#if __CUDA_ARCH__ >= 900
    if constexpr (kBulk) {
      hopper::fence_async_proxy();
      __syncthreads();
      if (threadIdx.x != 0) return;
      hopper::bulk_store(target_out_, tile_out_, bytes_);
      if constexpr (kAdd) hopper::bulk_store(target_h_, tile_h_, bytes_);
      hopper::tma_store_commit();
      hopper::tma_store_wait_read<0>();  // with the block its shared memory ends
    }
#endif
  }

  // The team's row.
  const T *x, *residual;
  T *h, *out;

 private:
  __device__ __forceinline__ static hopper::Barrier& arrived() {
    __shared__ hopper::Barrier barrier;
    return barrier;
  }

  // All of the block's rows, in shared memory and in the arrays.
  T *tile_h_, *tile_out_, *target_h_, *target_out_;
  uint32_t bytes_;
};

}  // namespace jaxllm
