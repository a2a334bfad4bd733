// out = p scale_a scale_b, of the product p: a factor for each row, and one for each column.
#pragma once

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

// A result of 16 bits goes through shared memory and TMA, one of 32 past both: four lanes of a row
// write 32 bytes, a sector. The subtiles of the latter serve for the factors alone.
template <typename T>
using SubtileType = std::conditional_t<sizeof(T) == 2, T, __nv_bfloat16>;

template <class Tile, typename T>
struct EpilogueScaled : EpilogueWarp<Tile, SubtileType<T>> {
  using Base = EpilogueWarp<Tile, SubtileType<T>>;

  struct Arguments {
    T* out;
    Scales scale_a, scale_b;
  };
  struct Params {
    CUtensorMap map;  // of a result of 16 bits
    T* out;           // one of 32
    Scales scale_a, scale_b;
    int rows, columns;
  };

  const Params& params;
  float of_rows[Tile::kRowBlocks][2];      // those of the lane
  float2 of_columns[Tile::kColumnBlocks];  // of each 64, two in each lane

  // A warp has a buffer more than it stores from: the factors of the columns lie there in order.
  static_assert(Tile::kSubtiles % kSubtileBuffers != 0);

  static cudaError_t to_params(const GemmShape& shape, const Arguments& arguments, Params* params) {
    params->out = arguments.out;
    params->scale_a = arguments.scale_a;
    params->scale_b = arguments.scale_b;
    params->rows = static_cast<int>(shape.rows);
    params->columns = static_cast<int>(shape.columns);
    if constexpr (sizeof(T) == 4) {
      return cudaSuccess;
    } else {
      return Base::encode_subtiles(arguments.out, shape, &params->map);
    }
  }

  __device__ __forceinline__ void begin(const WorkTile& tile, Accumulators<Tile>& accumulators) {
    const WorkTile work = own(tile);
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
    Base::begin(work, accumulators);
  }

  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& tile,
                                        const WorkTile&, bool) {
    const WorkTile work = own(tile);
    auto* const factors = reinterpret_cast<float2*>(this->buffer(kSubtileBuffers - 1));
    __syncwarp();
#pragma unroll
    for (int block = 0; block < Tile::kColumnBlocks; ++block) {
      factors[block * 32 + this->lane] = of_columns[block];
    }
    __syncwarp();
    for_each_subtile<Tile>([&](const Subtile<Tile>& subtile) {
      const auto value = [&](int j, int half) {
        const float2 p = accumulator_pair<Tile>(accumulators, subtile, j, half);
        const float2 column = factors[subtile.column_block() * 32 + 4 * j + this->lane % 4];
        const float row = of_rows[subtile.row_block()][half];
        return float2{p.x * row * column.x, p.y * row * column.y};
      };
      if constexpr (sizeof(T) == 2) {
        T* const out = this->acquire_buffer(subtile);
        write_subtile<T>(this->matrix_row(out), value);
        this->store_buffer(params.map, out, work, subtile);
      } else {
        write_rows(work, subtile, value);
      }
    });
  }

 private:
  // The part of a tile that the consumer has.
  __device__ __forceinline__ WorkTile own(WorkTile work) const {
    if (Tile::kCooperative) work.row += this->consumer * Tile::kConsumerM;
    return work;
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

}  // namespace jaxllm::hopper
