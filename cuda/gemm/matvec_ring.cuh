// A matrix that passes through rings of pieces in shared memory, a ring for each warp: as many
// bytes as memory needs to be busy are on their way, whatever the warps are at.
#pragma once

#include "common/cp_async.cuh"
#include "common/mma.cuh"
#include "gemm/matvec_arguments.cuh"

namespace jaxllm {

constexpr int kPieceBytes = 128;  // of a row
constexpr int kTilePairs = 8;     // pairs of rows, in a tile of 16 rows

// 16 rows of a matrix, 128 bytes of each, and for int8 a scale for either half of a row. Sixteen
// bytes of a row stand where the row's number says, so that what is loaded at once lies in all
// banks.
struct alignas(kPieceBytes) Piece {
  char bytes[16 * kPieceBytes];
  float scales[16][2];

  // Where the i-th sixteen bytes of a row are.
  __device__ __forceinline__ static int place(int row, int i) {
    return row * kPieceBytes + (i ^ row % 2 * 4 ^ row / 2 % 4) * 16;
  }
};

// Some warps of a block that share tiles: they have every `stride`-th, and each warp has every
// `warps`-th piece of it.
struct MatrixTeam {
  int first_tile, stride, part, warps;
};

// Waits for the warps of a team; teams are numbered from 0, and are all as large.
__device__ __forceinline__ void synchronize_warps(int team, int warps) {
  asm volatile("bar.sync %0, %1;" ::"r"(team), "r"(32 * warps) : "memory");
}

// The pieces of a warp, in the order in which it takes them. It is a class of its own, as copies
// are started well ahead, in a later tile perhaps.
template <int kStages, class Arguments, class Epilogue>
class MatrixRing {
  using W = std::remove_cv_t<std::remove_pointer_t<decltype(Arguments::matrix)>>;
  static constexpr bool kScaled = sizeof(W) == 1;

 public:
  __device__ MatrixRing(const Arguments& arguments, const Epilogue& epilogue,
                        const MatrixTeam& team, Piece* ring)
      : a_(arguments), epilogue_(epilogue), team_(team), ring_(ring) {
    const int lane = threadIdx.x % 32;
    tiles = (epilogue.pairs() + kTilePairs - 1) / kTilePairs;
    row_bytes_ = static_cast<int>(a_.width * sizeof(W));
    pieces = (row_bytes_ + kPieceBytes - 1) / kPieceBytes;
    shift_ = kScaled ? __ffs(static_cast<int>(a_.group)) - 1 : 0;
    place_[0] = Piece::place(lane / 8, lane % 8);
    place_[1] = Piece::place(lane / 8 + 4, lane % 8);
    next_tile_ = team.part < pieces ? team.first_tile : tiles;  // a short row has none for all
    next_piece_ = team.part;
    begin_tile();
    start_copy(0);
  }

  // Starts to copy as much as there is room for. The first piece alone is on its way before: what
  // else the block must read first would have to queue behind all of them.
  __device__ void fill() {
#pragma unroll
    for (int i = 1; i < kStages - 1; ++i) start_copy(i);
  }

  // The next piece, once it is there; the one before it makes room for another.
  __device__ const Piece& next() {
    cp_async_wait<kStages - 2>();
    __syncwarp();
    start_copy(stage_ == 0 ? kStages - 1 : stage_ - 1);
    const Piece& found = ring_[stage_];
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    return found;
  }

  int tiles, pieces;  // of the matrix, and of a tile

 private:
  // Rows 0 to 7 of a tile are the first ones of its pairs, the others the second ones.
  __device__ int64_t row_of(int i) const {
    const int64_t pair =
        min(int64_t{next_tile_} * kTilePairs + i % kTilePairs, epilogue_.pairs() - 1);
    return min(i < kTilePairs ? epilogue_.first(pair) : epilogue_.second(pair),
               epilogue_.rows() - 1);
  }

  __device__ void begin_tile() {
    if (next_tile_ >= tiles) return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      source_[i] = reinterpret_cast<const char*>(a_.matrix) +
                   row_of(4 * i + lane / 8) * row_bytes_ + lane % 8 * 16;
    }
    if constexpr (kScaled) {
      scales_ = a_.scales + row_of(lane / 2) * (static_cast<int>(a_.width) >> shift_);
    }
  }

  // Past the end of its rows a matrix reads as zeros, and so do the scales.
  __device__ void start_copy(int stage) {
    if (next_tile_ < tiles) {
      const int lane = threadIdx.x % 32, at = next_piece_ * kPieceBytes;
      const bool is_inside = at + lane % 8 * 16 < row_bytes_;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        cp_async_16(ring_[stage].bytes + place_[i % 2] + i / 2 * 8 * kPieceBytes,
                    source_[i] + (is_inside ? at : 0), is_inside);
      }
      if constexpr (kScaled) {
        const int column = at + lane % 2 * (kPieceBytes / 2);
        const bool is_scaled = column < row_bytes_;
        cp_async_4(&ring_[stage].scales[0][0] + lane, scales_ + (is_scaled ? column >> shift_ : 0),
                   is_scaled);
      }
      next_piece_ += team_.warps;
      if (next_piece_ >= pieces) {
        next_piece_ = team_.part;
        next_tile_ += team_.stride;
        begin_tile();
      }
    }
    cp_async_commit();
  }

  const Arguments& a_;
  const Epilogue& epilogue_;
  const MatrixTeam team_;
  Piece* const ring_;
  int row_bytes_, shift_, place_[2], next_tile_, next_piece_, stage_ = 0;
  const char* source_[4];
  const float* scales_;
};

}  // namespace jaxllm
