// out = gelu(p + bias), and what its backward needs: p itself, or GELU's derivative.
#pragma once

#include "activation/gelu_each.cuh"
#include "gemm/hopper/dgelu_order.cuh"
#include "gemm/hopper/epilogue.cuh"

namespace jaxllm::hopper {

// Two pairs each of 8 j to 8 j + 15 go through the activation together: four warps hide its latency
// only so. first, first + 1 are two j; elements 4 (j - first) + 2 half and the next are a pair.
inline constexpr int kActivationElements = 8;

template <class Tile>
__device__ __forceinline__ void load_batch(const Accumulators<Tile>& accumulators,
                                           const Subtile<Tile>& subtile, int first,
                                           float (&x)[kActivationElements]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 p = accumulator_pair<Tile>(accumulators, subtile, first + i / 2, i % 2);
    x[2 * i] = p.x;
    x[2 * i + 1] = p.y;
  }
}

template <typename T>
__device__ __forceinline__ void pack_batch(const float (&x)[kActivationElements],
                                           uint32_t (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = pack_pair<T>(x[2 * i], x[2 * i + 1]);
}

// out = gelu(p + bias), preactivation = p.
template <class Tile, typename T>
struct EpilogueGelu : EpilogueWarp<Tile, T> {
  struct Arguments {
    T* out;
    T* preactivation;
    const T* bias;  // null for none
  };
  struct Params {
    CUtensorMap out, preactivation;
    const T* bias;
    int columns;
  };

  const Params& params;
  BiasFragment<Tile, T> bias;

  static cudaError_t to_params(const GemmShape& shape, const Arguments& arguments, Params* params) {
    params->bias = arguments.bias;
    params->columns = static_cast<int>(shape.columns);
    JAXLLM_RETURN_IF_ERROR(EpilogueGelu::encode_subtiles(arguments.out, shape, &params->out));
    return EpilogueGelu::encode_subtiles(arguments.preactivation, shape, &params->preactivation);
  }

  __device__ __forceinline__ void begin(const WorkTile& work, Accumulators<Tile>& accumulators) {
    bias.load(params.bias, work, params.columns, this->lane);
    EpilogueWarp<Tile, T>::begin(work, accumulators);
  }

  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& work,
                                        const WorkTile&, bool) {
    static_assert(Tile::kSubtiles % 2 == 0);
    for_each_subtile<Tile>([&](const Subtile<Tile>& subtile) {
      T* const preactivation = this->buffer(subtile.index % 2 * 2);
      T* const out = this->buffer(subtile.index % 2 * 2 + 1);
      // All stores but those of the subtile before have left their buffers.
      if (this->lane == 0) tma_store_wait_read<1>();
      __syncwarp();
#pragma unroll
      for (int first = 0; first < 8; first += 2) {
        float x[kActivationElements];
        uint32_t words[4];
        load_batch<Tile>(accumulators, subtile, first, x);
        pack_batch<T>(x, words);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 of_columns = bias.pair(subtile.column_block(), first + i / 2, this->lane);
          x[2 * i] += of_columns.x;
          x[2 * i + 1] += of_columns.y;
        }
        gelu_each(x);
        stmatrix(this->matrix_row(preactivation) ^ 16 * first, words);
        pack_batch<T>(x, words);
        stmatrix(this->matrix_row(out) ^ 16 * first, words);
      }
      fence_async_proxy();
      __syncwarp();
      if (this->lane == 0) {
        const int column = this->column(work, subtile), row = this->row(work, subtile);
        tma_store_2d(params.preactivation, preactivation, column, row);
        tma_store_2d(params.out, out, column, row);
        tma_store_commit();
      }
    });
  }
};

// out = gelu(p + bias), dgelu = gelu'(p + bias) in the order of dgelu_order.cuh.
template <class Tile, typename T>
struct EpilogueGeluDgelu : EpilogueWarp<Tile, T> {
  struct Arguments {
    T* out;
    T* dgelu;
    const T* bias;
  };
  struct Params {
    CUtensorMap out;
    T* dgelu;
    const T* bias;
    int columns, column_tiles;
  };

  const Params& params;

  static cudaError_t to_params(const GemmShape& shape, const Arguments& arguments, Params* params) {
    params->dgelu = arguments.dgelu;
    params->bias = arguments.bias;
    params->columns = static_cast<int>(shape.columns);
    params->column_tiles = DgeluOrder<Tile>::column_tiles(shape.columns);
    return EpilogueGeluDgelu::encode_subtiles(arguments.out, shape, &params->out);
  }

  __device__ __forceinline__ void begin(const WorkTile& work, Accumulators<Tile>& accumulators) {
    BiasFragment<Tile, T>::load_and_fill(params.bias, work, params.columns, this->lane,
                                         accumulators);
  }

  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& work,
                                        const WorkTile&, bool) {
    for_each_subtile<Tile>([&](const Subtile<Tile>& subtile) {
      int lane = this->lane;
      opaque(lane);
      uint4* const saved = DgeluOrder<Tile>::fragment(params.dgelu, params.column_tiles, work,
                                                      this->warp, lane, subtile);
      T* const out = this->acquire_buffer(subtile);
#pragma unroll
      for (int first = 0; first < 8; first += 2) {
        float x[kActivationElements], dgelu[kActivationElements];
        uint32_t words[4];
        load_batch<Tile>(accumulators, subtile, first, x);
        gelu_and_dgelu_each(x, dgelu);
        pack_batch<T>(dgelu, words);
        // Nobody reads them before the backward pass.
        __stcs(saved + first / 2 * 32, make_uint4(words[0], words[1], words[2], words[3]));
        pack_batch<T>(x, words);
        stmatrix(this->matrix_row(out) ^ 16 * first, words);
        end_basic_block(work.end_k_block);
      }
      this->store_buffer(params.out, out, work, subtile);
    });
  }
};

}  // namespace jaxllm::hopper
