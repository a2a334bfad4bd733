// out = p scale_a scale_b + bias, of the product p: a factor for each row, one for each column, and
// where there is a bias a term for each column. The epilogues whose names end in Amax also find the
// largest finite |out| of all columns, or of each half of them. Each operand has one scale there.
#pragma once

#include "common/reduce.cuh"
#include "common/vector.cuh"
#include "gemm/hopper/epilogue.cuh"

namespace jaxllm::hopper {

// Factors of the rows or columns of a matrix, or one of all.
struct Scales {
  const float* data;
  bool is_one;

  __device__ __forceinline__ float at(int index) const {
    return __ldg(data + (is_one ? 0 : index));
  }
};

// A product times its scales. It is rounded before a bias is added, whatever the compiler makes of
// the sum.
__device__ __forceinline__ float scaled(float product, float scale_a, float scale_b) {
  return __fmul_rn(product * scale_a, scale_b);
}

// Where the largest |out| goes: a float for each part of `columns` columns, zero before the kernel,
// that no subtile crosses. At most two parts.
struct Amax {
  float* data = nullptr;
  int64_t columns = 0;
};

// A result of 16 bits goes through shared memory and TMA, one of 32 past both: four lanes of a row
// write 32 bytes, a sector. The subtiles of the latter serve for the factors alone.
template <typename T>
using SubtileType = std::conditional_t<sizeof(T) == 2, T, __nv_bfloat16>;

// The factors and the bias of a tile's columns, in order: those of each 64 columns after the other.
template <class Tile>
inline constexpr int kColumnFactors = 2 * Tile::kColumnBlocks * 32;

// ---- A warp's shared memory.

// A warp has a buffer more than it stores from: there the factors of the columns lie.
template <class Tile, typename T>
struct ScaledWarp : EpilogueWarp<Tile, T> {
  static_assert(Tile::kSubtiles % kSubtileBuffers != 0);
  static_assert(kColumnFactors<Tile> * sizeof(float2) <= kSubtileSize * sizeof(T));

  __device__ __forceinline__ float2* factors() const {
    return reinterpret_cast<float2*>(this->buffer(kSubtileBuffers - 1));
  }
};

// Where the depth is multiplied in two halves (Float8Mainloop): the sums of the first wait in the
// buffers from which the result will leave, rounded to bfloat16. One consumer is in its mainloop at
// a time, so both have the same buffers in turn:
//
//   consumer 0   mma | put_aside | mma | take_back, store, release |
//   consumer 1                         | mma ............. | acquire, put_aside | mma | ...
template <class Tile>
struct HalvesStorage {
  __nv_bfloat16 sums[4][Tile::kSubtiles][kSubtileSize];
  float2 factors[Tile::kConsumers][4][kColumnFactors<Tile>];
  Barrier turn[Tile::kConsumers][4];  // the buffers of a warp are the consumer's

  __device__ __forceinline__ void init() {
    for (auto& of_consumer : turn) {
      for (Barrier& barrier : of_consumer) barrier.init(32);
    }
  }
};

template <class Tile, typename T>
struct HalvesWarp : EpilogueWarp<Tile, T, HalvesStorage<Tile>> {
  static_assert(!Tile::kCooperative);
  static constexpr bool kTakesHalves = true;
  using OfBlock = float[Tile::kBlockN / 2];  // accumulators of a row block

  uint32_t phase = this->consumer == 0;  // of `turn`: the first consumer need not wait

  __device__ __forceinline__ float2* factors() const {
    return this->smem.factors[this->consumer][this->warp];
  }
  // A buffer for each subtile.
  __device__ __forceinline__ T* acquire_buffer(const Subtile<Tile>& subtile) const {
    return reinterpret_cast<T*>(this->smem.sums[this->warp][subtile.index]);
  }

  // Keeps the sums of a row block, the first one first.
  __device__ __forceinline__ void put_aside(OfBlock& of_block, int block) {
    if (block == 0) {
      this->smem.turn[this->consumer][this->warp].wait(phase);
      phase ^= 1;
    }
    uint32_t words[Tile::kBlockN / 4];
    pack_accumulator<__nv_bfloat16>(of_block, words);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      chunk(block, i) = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
    }
  }

  // Adds the sums to those of the second half. Once all lanes have, the buffers serve for the
  // result.
  __device__ __forceinline__ void take_back(Accumulators<Tile>& accumulators) const {
#pragma unroll
    for (int block = 0; block < Tile::kRowBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const uint4 sums = chunk(block, i);
        const uint32_t words[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 pair = unpack_pair<__nv_bfloat16>(words[j]);
          accumulators[block][8 * i + 2 * j] += pair.x;
          accumulators[block][8 * i + 2 * j + 1] += pair.y;
        }
      }
    }
    end_basic_block(this->warp);
  }

  // Leaves the buffers to the other consumer. Each lane arrives for what it has read and written.
  __device__ __forceinline__ void release_buffers() const {
    if (this->lane == 0) tma_store_wait_read<0>();
    __syncwarp();
    this->smem.turn[this->consumer ^ 1][this->warp].arrive();
  }

 private:
  static constexpr int kChunks = Tile::kBlockN / 16;  // of a row block: 8 of a lane's sums each

  __device__ __forceinline__ uint4& chunk(int block, int i) const {
    auto* const chunks = reinterpret_cast<uint4*>(this->smem.sums[this->warp][0]);
    return chunks[(block * kChunks + i) * 32 + this->lane];
  }
};

// ---- The epilogue.

template <class Tile, typename T, class Warp, bool kAmax>
struct ScaledEpilogue : Warp {
  struct Arguments {
    T* out;
    Scales scale_a, scale_b;
    const T* bias;   // nullptr for none
    Amax amax = {};  // with kAmax
  };
  struct Params {
    CUtensorMap map;  // of a result of 16 bits
    T* out;           // one of 32
    Scales scale_a, scale_b;
    const T* bias;
    int rows, columns;
    float* amax;
    int columns_of_part;
  };

  const Params& params;
  float of_rows[Tile::kRowBlocks][2];      // those of the lane
  float2 of_columns[Tile::kColumnBlocks];  // of each 64, two in each lane
  float largest[2] = {};                   // |out| of each part, in the lane's tiles so far

  static cudaError_t to_params(const GemmShape& shape, const Arguments& arguments, Params* params) {
    params->out = arguments.out;
    params->scale_a = arguments.scale_a;
    params->scale_b = arguments.scale_b;
    params->bias = arguments.bias;
    params->rows = static_cast<int>(shape.rows);
    params->columns = static_cast<int>(shape.columns);
    params->amax = arguments.amax.data;
    params->columns_of_part = static_cast<int>(arguments.amax.columns);
    if constexpr (sizeof(T) == 4) {
      return cudaSuccess;
    } else {
      return Warp::encode_subtiles(arguments.out, shape, &params->map);
    }
  }

  __device__ __forceinline__ void begin(const WorkTile& tile, Accumulators<Tile>& accumulators) {
    // Where there are halves the mainloop leaves no registers.
    if constexpr (!Warp::kTakesHalves) load_factors(this->own(tile));
    Warp::begin(tile, accumulators);
  }

  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& tile,
                                        const WorkTile&, bool) {
    const WorkTile work = this->own(tile);
    float2* const factors = this->factors();
    if constexpr (Warp::kTakesHalves) {
      this->take_back(accumulators);
      load_factors(work);
    }
    __syncwarp();
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      factors[block * 32 + this->lane] = of_columns[block];
      // Not loaded before the mainloop, which has all registers.
      const int column = work.column + block * kSwizzleColumns + 2 * this->lane;
      float2 bias = {0.0f, 0.0f};
      if (params.bias != nullptr && column < params.columns) {
        bias = {to_float(params.bias[column]), to_float(params.bias[column + 1])};
      }
      factors[kBias + block * 32 + this->lane] = bias;
    }
    __syncwarp();
    if (kAmax || (params.scale_a.is_one && params.scale_b.is_one)) {
      store_subtiles<true>(accumulators, work, factors);
    } else {
      store_subtiles<false>(accumulators, work, factors);
    }
    if constexpr (Warp::kTakesHalves) this->release_buffers();
  }

  __device__ __forceinline__ void finish() {
    if constexpr (kAmax) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        // Floats that are not negative are in the order of their bits.
        const int of_lane = __float_as_int(rounded(largest[part]));
        const int of_warp = __reduce_max_sync(kFullWarp, of_lane);
        if (this->lane > 0 || part * params.columns_of_part >= params.columns) continue;
        atomicMax(reinterpret_cast<int*>(params.amax + part), of_warp);
      }
    }
  }

 private:
  __device__ __forceinline__ void load_factors(const WorkTile& work) {
#pragma unroll
    for (int block = 0; block < Tile::kRowBlocks; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = this->row(work, {block}) + this->lane / 4 + 8 * half;
        of_rows[block][half] = row < params.rows ? params.scale_a.at(row) : 0.0f;
      }
    }
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      const int column = work.column + block * kSwizzleColumns + 2 * this->lane;
      const bool is_inside = column < params.columns;
      of_columns[block] = is_inside
                              ? float2{params.scale_b.at(column), params.scale_b.at(column + 1)}
                              : float2{0.0f, 0.0f};
    }
  }

  static constexpr int kBias = Tile::kColumnBlocks * 32;  // where the bias lies
  static_assert(2 * kBias == kColumnFactors<Tile>);

  __device__ __forceinline__ static float rounded(float x) { return to_float(from_float<T>(x)); }

  // Of a subtile that has infinities, or numbers that are rounded to one, or rows beyond the last:
  // these are the bias. `rows` are those of the matrix from the lane's first one on.
  template <class Value>
  __device__ __forceinline__ static float largest_finite(const Value& value, int rows) {
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (8 * half >= rows) continue;
        const float2 pair = value(j, half);
        const float x = fabsf(pair.x), y = fabsf(pair.y);
        if (isfinite(rounded(x))) largest = fmaxf(largest, x);
        if (isfinite(rounded(y))) largest = fmaxf(largest, y);
      }
    }
    return largest;
  }

  // With one scale of each operand no factors come from shared memory: a GEMM of 32768 x 3072 x 768
  // took 4% less time on an H200.
  template <bool kOneScale>
  __device__ __forceinline__ void store_subtiles(Accumulators<Tile>& accumulators,
                                                 const WorkTile& work, const float2* factors) {
    const float of_a = __ldg(params.scale_a.data), of_b = __ldg(params.scale_b.data);
    const bool has_bias = params.bias != nullptr;
    for_each_subtile<Tile>([&](const Subtile<Tile>& subtile) {
      float of_subtile = 0.0f;  // NaN leaves it as it is
      const auto value = [&](int j, int half) {
        const float2 p = accumulator_pair<Tile>(accumulators, subtile, j, half);
        const int at = subtile.column_block() * 32 + 4 * j + this->lane % 4;
        const float row = kOneScale ? of_a : of_rows[subtile.row_block()][half];
        const float2 column = kOneScale ? float2{of_b, of_b} : factors[at];
        float2 pair{scaled(p.x, row, column.x), scaled(p.y, row, column.y)};
        if (has_bias) {
          const float2 bias = factors[kBias + at];
          pair = {pair.x + bias.x, pair.y + bias.y};
        }
        if (kAmax) of_subtile = fmaxf(of_subtile, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        return pair;
      };
      if constexpr (sizeof(T) == 2) {
        T* const out = this->acquire_buffer(subtile);
        write_subtile<T>(this->matrix_row(out), value);
        this->store_buffer(params.map, out, work, subtile);
      } else {
        write_rows(work, subtile, value);
      }
      if (!kAmax) return;
      const int rows = params.rows - this->row(work, subtile);
      if (!isfinite(rounded(of_subtile)) || rows < kSubtileRows) {
        of_subtile = largest_finite(value, rows - this->lane / 4);
      }
      const bool is_first = this->column(work, subtile) < params.columns_of_part;
      largest[0] = is_first ? fmaxf(largest[0], of_subtile) : largest[0];
      largest[1] = is_first ? largest[1] : fmaxf(largest[1], of_subtile);
    });
  }

  template <class Value>
  __device__ __forceinline__ void write_rows(const WorkTile& work, const Subtile<Tile>& subtile,
                                             const Value& value) const {
    const int row = this->row(work, subtile) + this->lane / 4;
    const int column = this->column(work, subtile) + this->lane % 4 * 2;
    T* const out = params.out + row * int64_t{params.columns} + column;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 pair = value(j, half);
        if (row + 8 * half < params.rows && column + 8 * j < params.columns) {
          *reinterpret_cast<float2*>(out + 8 * half * int64_t{params.columns} + 8 * j) = pair;
        }
      }
    }
  }
};

// Kernels of their own find the largest |out|: few do, and that is half of the code.
template <class Tile, typename T>
using EpilogueScaled = ScaledEpilogue<Tile, T, ScaledWarp<Tile, SubtileType<T>>, false>;
template <class Tile, typename T>
using EpilogueScaledAmax = ScaledEpilogue<Tile, T, ScaledWarp<Tile, SubtileType<T>>, true>;
template <class Tile, typename T>
using EpilogueScaledHalves = ScaledEpilogue<Tile, T, HalvesWarp<Tile, SubtileType<T>>, false>;
template <class Tile, typename T>
using EpilogueScaledHalvesAmax = ScaledEpilogue<Tile, T, HalvesWarp<Tile, SubtileType<T>>, true>;

}  // namespace jaxllm::hopper
