// The product of an int8 matrix and one or two rows of x, on tensor cores that multiply int8.
//
// It is x that is taken apart, not the matrix, which is so much longer: 64 of its numbers at a time
// become integers of 23 bits, in units of a power of two that the largest of them sets, and those
// become three digits of eight bits. The digits are columns of the other factor. So the matrix goes
// from memory to the tensor cores as it is, and the sums of 64 products are exact, but for what of
// x is less than half a unit: 2^-23 of the power of two above the largest.
#pragma once

#include "common/dependent_launch.cuh"
#include "common/fragment.cuh"
#include "common/mma.cuh"
#include "gemm/matvec_ring.cuh"

namespace jaxllm {

constexpr int kDigitsWarps = 16, kDigitsStages = 4, kDigitsRows = 2;

// The digits of x in shared memory: three planes a row, the highest digits first, and the units.
struct Digits {
  __host__ __device__ static int padded(int64_t width) { return (width + 127) / 128 * 128; }
  __host__ __device__ static int64_t bytes(int64_t width, int64_t rows) {
    return rows * (3 * (padded(width) + 64) + padded(width) / 64 * sizeof(float));
  }

  // Planes are half the banks apart, since a load takes from two of them at once.
  __device__ Digits(char* memory, int width, int rows)
      : planes(memory), plane_bytes(padded(width) + 64), groups(padded(width) / 64) {
    units = reinterpret_cast<float*>(planes + 3 * rows * plane_bytes);
  }
  __device__ char* plane(int row, int digit) const {
    return planes + (row * 3 + digit) * plane_bytes;
  }

  char* planes;
  float* units;
  int plane_bytes, groups;
};

// Takes eight numbers apart; eight threads in a row have a group. What is not finite makes all of
// its group NaN.
__device__ __forceinline__ void take_apart(const float (&values)[8], const Digits& digits, int row,
                                           int column, bool is_inside) {
  uint32_t largest = 0;  // as bits, where NaN is above infinity
#pragma unroll
  for (int j = 0; j < 8; ++j) largest = max(largest, __float_as_uint(values[j]) & 0x7fffffffu);
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) {
    largest = max(largest, __shfl_xor_sync(kFullWarp, largest, offset));
  }
  if (!is_inside) return;
  // All are below 2^(exponent - 127), and become integers below 2^22.
  const uint32_t exponent = max(largest >> 23, 22u) + 1;
  const float to_integer = __uint_as_float((276 - exponent) << 23);
  uint32_t words[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    // Adding 1.5 * 2^23 rounds, and leaves the integer in the last bits. Adding 128 to each digit
    // carries what a negative digit borrows, and turning its top bit takes the 128 away again.
    const uint32_t rounded = __float_as_uint(values[j] * to_integer + 12582912.0f) - 0x4b400000u;
    words[j] = (rounded + 0x808080u) ^ 0x808080u;
  }
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    const uint32_t pick = (2 - d) | (6 - d) << 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // A group is 4 x 4 words of four columns. Lane c takes word c of each four, at one go.
      const int word = column / 4 % 16 + h;
      char* target = digits.plane(row, d) + column / 64 * 64 + word % 4 * 16 + word / 4 * 4;
      *reinterpret_cast<uint32_t*>(target) =
          __byte_perm(__byte_perm(words[4 * h], words[4 * h + 1], pick),
                      __byte_perm(words[4 * h + 2], words[4 * h + 3], pick), 0x5410);
    }
  }
  if (column % 64 == 0) {
    const bool is_finite = largest < 0x7f800000u;
    digits.units[row * digits.groups + column / 64] =
        __uint_as_float(is_finite ? (exponent - 22) << 23 : 0x7fc00000u);
  }
}

// Takes x apart, times the norm's factors; `squares` gets each warp's sum of squares of a row.
// `meanwhile` is called when the first loads are on their way.
template <typename T, class Meanwhile>
__device__ void take_apart_rows(const MatvecArguments<T, int8_t>& a, const Digits& digits,
                                float (*squares)[kDigitsWarps], const Meanwhile& meanwhile) {
  constexpr int kHeld = 4, kThreads = 32 * kDigitsWarps;
  const int width = a.width, rows = a.rows, of_row = digits.groups * 8;  // packs
  float sums[kDigitsRows] = {};
  for (int first = 0; first < rows * of_row; first += kHeld * kThreads) {
    Pack<T, 8> held[kHeld] = {};
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int i = first + h * kThreads + threadIdx.x, row = i >= of_row;
      const int column = (i - row * of_row) * 8;
      if (row < rows && column < width) held[h] = load<8>(a.x + row * width + column);
    }
    if (first == 0) meanwhile();
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const int i = first + h * kThreads + threadIdx.x, row = i >= of_row;
      const int column = (i - row * of_row) * 8;
      if (i - static_cast<int>(threadIdx.x) % 32 >= rows * of_row) break;
      float values[8], square = 0.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        values[j] = held[h][j];
        square += values[j] * values[j];
      }
      sums[0] += row == 0 ? square : 0.0f;
      sums[1] += row == 0 ? 0.0f : square;
      if (a.norm != nullptr && column < width) {
        const Pack<T, 8> factors = load_cached<8>(a.norm + column);
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] *= factors[j];
      }
      take_apart(values, digits, row, column, i < rows * of_row);
    }
  }
  if (a.norm == nullptr) return;
  sum_over_lanes<32>(sums);
  if (threadIdx.x % 32 == 0) {
    squares[0][threadIdx.x / 32] = sums[0];
    squares[1][threadIdx.x / 32] = sums[1];
  }
}

// Lane 4 r + c has digit r % 4 of row r / 4 of x, and of the products rows r and r + 8 of a tile,
// columns 2c and 2c + 1: two digits of row c / 2 of x. A team has `team_warps` warps, a power of
// two.
template <typename T, class Epilogue>
__global__ void __launch_bounds__(32 * kDigitsWarps, 1)
    matvec_digits_kernel(const MatvecArguments<T, int8_t> a, const Epilogue epilogue,
                         int team_warps) {
  __shared__ float partial[2][kDigitsWarps][kDigitsRows][16];
  __shared__ float squares[kDigitsRows][kDigitsWarps];
  extern __shared__ __align__(128) char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, c = lane % 4;
  const int rows = a.rows, team_number = warp / team_warps;
  Piece* rings = reinterpret_cast<Piece*>(memory);
  const Digits digits(reinterpret_cast<char*>(rings + kDigitsWarps * kDigitsStages), a.width, rows);
  launch_dependent_grids();
  const int blocks = gridDim.x;
  const MatrixTeam team = {team_number * blocks + static_cast<int>(blockIdx.x),
                           kDigitsWarps / team_warps * blocks, warp % team_warps, team_warps};
  MatrixRing<kDigitsStages, MatvecArguments<T, int8_t>, Epilogue> ring(
      a, epilogue, team, rings + warp * kDigitsStages);
  wait_on_dependent_grids();
  take_apart_rows(a, digits, squares, [&] { ring.fill(); });
  __syncthreads();

  const int thread = team.part * 32 + lane;  // in its team; it stores pair thread % 8
  const int stored_row = thread / kTilePairs;
  float rstd_of_row = 1.0f;
  if (a.norm != nullptr && stored_row < rows)
    rstd_of_row = rstd(a, squares[stored_row], kDigitsWarps);
  const bool has_digit = r % 4 < 3 && r / 4 < rows;
  const char* plane = digits.plane(has_digit ? r / 4 : 0, has_digit ? r % 4 : 0) + c * 16;
  const float* units = digits.units + (c / 2 < rows ? c / 2 : 0) * digits.groups;
  const int place = Piece::place(lane % 16, lane / 16);

  int buffer = 0;
  for (int tile = team.first_tile; tile < ring.tiles; tile += team.stride, buffer ^= 1) {
    float sums[2] = {};  // of rows r and r + 8
    for (int at = team.part; at < ring.pieces; at += team.warps) {
      const Piece& piece = ring.next();
      const float2 unit = *reinterpret_cast<const float2*>(units + 2 * at);
      const float2 low = *reinterpret_cast<const float2*>(piece.scales[r]);
      const float2 high = *reinterpret_cast<const float2*>(piece.scales[r + 8]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 x = {0, 0, 0, 0};
        if (has_digit) x = *reinterpret_cast<const uint4*>(plane + at * 128 + half * 64);
        int products[4] = {};
        uint32_t matrix[4];
        ldmatrix(matrix, smem_address(piece.bytes + (place ^ half * 64)));
        mma_m16n8k32_int8(products, matrix, x.x, x.y);
        ldmatrix(matrix, smem_address(piece.bytes + (place ^ half * 64 ^ 32)));
        mma_m16n8k32_int8(products, matrix, x.z, x.w);
        const float scale = half == 0 ? unit.x : unit.y;
        sums[0] += scale * (half == 0 ? low.x : low.y) * (products[0] * 256 + products[1]);
        sums[1] += scale * (half == 0 ? high.x : high.y) * (products[2] * 256 + products[3]);
      }
    }
    // Even lanes have the first digit and the second, odd ones the third in the place of the first.
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sums[h] *= c % 2 == 0 ? 256.0f : 1.0f / 256.0f;
      sums[h] += __shfl_xor_sync(kFullWarp, sums[h], 1);
      if (c % 2 == 0) partial[buffer][warp][c / 2][r + 8 * h] = sums[h];
    }
    synchronize_warps(team_number, team.warps);
    const int64_t pair = int64_t{tile} * kTilePairs + thread % kTilePairs;
    if (stored_row >= rows || pair >= epilogue.pairs()) continue;
    float first = 0.0f, second = 0.0f;
    for (int w = 0; w < team.warps; ++w) {
      const float* of_warp = partial[buffer][team_number * team.warps + w][stored_row];
      first += of_warp[thread % kTilePairs];
      second += of_warp[thread % kTilePairs + kTilePairs];
    }
    epilogue.store(pair, stored_row, first * rstd_of_row, second * rstd_of_row);
  }
}

// As many teams as a block has tiles, so that each does the same; but none of a single warp, which
// could not keep its ring full, and no more warps in one than have two pieces of a tile each.
inline int digits_team_warps(int64_t tiles_per_block, int64_t pieces) {
  int warps = kDigitsWarps;
  while (warps > 2 && (2 * kDigitsWarps / warps <= tiles_per_block || 2 * warps > pieces)) {
    warps /= 2;
  }
  return warps;
}

}  // namespace jaxllm
