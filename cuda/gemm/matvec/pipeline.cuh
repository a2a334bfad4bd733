// The cp.async pipeline of the tensor-core GEMV kernels. Each warp loads the weights for itself,
// through kStages stages of its own, so that enough bytes are in flight whatever other warps do.
#pragma once

#include "common/cp_async.cuh"
#include "gemm/matvec/epilogue.cuh"
#include "gemm/matvec/params.cuh"

namespace jaxllm {

constexpr int kBlockBytes = 128;  // of a row, in a K-block
constexpr int kTilePairs = 8;     // pairs of outputs, in a tile of 16 weight rows

// A K-block of a tile: 16 weight rows of 128 bytes, and for int8 a scale for either half of a row.
// Rows 0 to 7 are the first outputs of the tile's pairs, rows 8 to 15 the second ones. 16-byte
// chunk i of a row lies at i ^ swizzle, so that a load of a warp covers all banks:
//
//   row       0  1  2  3  4  5  6  7   8 ...
//   swizzle   0  4  1  5  2  6  3  7   0 ...
struct alignas(kBlockBytes) MatvecStage {
  char bytes[16 * kBlockBytes];
  float scales[16][2];

  __device__ __forceinline__ static int offset(int row, int chunk) {
    return row * kBlockBytes + (chunk ^ row % 2 * 4 ^ row / 2 % 4) * 16;
  }
};

// Sliced-K: `slices` warps share a tile. A warp has every tile_stride-th tile from first_tile on,
// and of a tile every slices-th K-block from `slice` on.
struct KSlice {
  int first_tile, tile_stride, slice, slices;
};

// The K-blocks of a warp in order. Copies run ahead of their use, perhaps in a later tile.
template <int kStages, class Params, class Epilogue>
class MatvecPipeline {
  using W = std::remove_cv_t<std::remove_pointer_t<decltype(Params::weight)>>;
  static constexpr bool kScaled = sizeof(W) == 1;

 public:
  __device__ MatvecPipeline(const Params& params, const Epilogue& epilogue, const KSlice& slice,
                            MatvecStage* stages)
      : params_(params), epilogue_(epilogue), slice_(slice), stages_(stages) {
    const int lane = threadIdx.x % 32;
    tiles = (epilogue.pairs() + kTilePairs - 1) / kTilePairs;
    row_bytes_ = static_cast<int>(params_.width * sizeof(W));
    k_blocks = (row_bytes_ + kBlockBytes - 1) / kBlockBytes;
    group_shift_ = kScaled ? __ffs(static_cast<int>(params_.group)) - 1 : 0;
    offset_[0] = MatvecStage::offset(lane / 8, lane % 8);
    offset_[1] = MatvecStage::offset(lane / 8 + 4, lane % 8);
    next_tile_ = slice.slice < k_blocks ? slice.first_tile : tiles;  // a short row lacks K-blocks
    next_k_block_ = slice.slice;
    begin_tile();
    start_copy(0);
  }

  // Fills the pipeline. The constructor has started the first copy alone: what the CTA loads before
  // the others start need not queue behind them.
  __device__ void fill() {
#pragma unroll
    for (int i = 1; i < kStages - 1; ++i) start_copy(i);
  }

  // Waits for the next K-block, and starts a copy into the stage of the one before it.
  __device__ const MatvecStage& next() {
    cp_async_wait<kStages - 2>();
    __syncwarp();
    start_copy(stage_ == 0 ? kStages - 1 : stage_ - 1);
    const MatvecStage& full = stages_[stage_];
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    return full;
  }

  int tiles, k_blocks;  // of the weights, and of a tile

 private:
  __device__ int64_t row_of(int i) const {
    const int64_t pair =
        min(int64_t{next_tile_} * kTilePairs + i % kTilePairs, epilogue_.pairs() - 1);
    return weight_row(epilogue_, pair, i / kTilePairs);
  }

  __device__ void begin_tile() {
    if (next_tile_ >= tiles) return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      source_[i] = reinterpret_cast<const char*>(params_.weight) +
                   row_of(4 * i + lane / 8) * row_bytes_ + lane % 8 * 16;
    }
    if constexpr (kScaled) {
      scales_ =
          params_.scales + row_of(lane / 2) * (static_cast<int>(params_.width) >> group_shift_);
    }
  }

  // Past the end of the rows, weights and scales are zero.
  __device__ void start_copy(int stage) {
    if (next_tile_ < tiles) {
      const int lane = threadIdx.x % 32, at = next_k_block_ * kBlockBytes;
      const bool is_inside = at + lane % 8 * 16 < row_bytes_;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        cp_async_16(stages_[stage].bytes + offset_[i % 2] + i / 2 * 8 * kBlockBytes,
                    source_[i] + (is_inside ? at : 0), is_inside);
      }
      if constexpr (kScaled) {
        const int column = at + lane % 2 * (kBlockBytes / 2);
        const bool is_scaled = column < row_bytes_;
        cp_async_4(&stages_[stage].scales[0][0] + lane,
                   scales_ + (is_scaled ? column >> group_shift_ : 0), is_scaled);
      }
      next_k_block_ += slice_.slices;
      if (next_k_block_ >= k_blocks) {
        next_k_block_ = slice_.slice;
        next_tile_ += slice_.tile_stride;
        begin_tile();
      }
    }
    cp_async_commit();
  }

  const Params& params_;
  const Epilogue& epilogue_;
  const KSlice slice_;
  MatvecStage* const stages_;
  int row_bytes_, group_shift_, offset_[2], next_tile_, next_k_block_, stage_ = 0;
  const char* source_[4];
  const float* scales_;
};

}  // namespace jaxllm
