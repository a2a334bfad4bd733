// out = p + bias, of the product p.
#pragma once

#include "gemm/hopper/epilogue.cuh"

namespace jaxllm::hopper {

template <class Tile, typename T>
struct EpilogueBias : EpilogueWarp<Tile, T> {
  struct Arguments {
    T* out;
    const T* bias;  // null for none
  };
  struct Params {
    CUtensorMap out;
    const T* bias;
    int columns;
  };

  const Params& params;

  static cudaError_t to_params(const GemmShape& shape, const Arguments& arguments, Params* params) {
    params->bias = arguments.bias;
    params->columns = static_cast<int>(shape.columns);
    return EpilogueBias::encode_subtiles(arguments.out, shape, &params->out);
  }

  __device__ __forceinline__ void begin(const WorkTile& work, Accumulators<Tile>& accumulators) {
    BiasFragment<Tile, T>::load_and_fill(params.bias, work, params.columns, this->lane,
                                         accumulators);
  }

  __device__ __forceinline__ void store(Accumulators<Tile>& accumulators, const WorkTile& work,
                                        const WorkTile&, bool) {
    for_each_subtile<Tile>([&](const Subtile<Tile>& subtile) {
      T* const out = this->acquire_buffer(subtile);
      write_subtile<T>(this->matrix_row(out), [&](int j, int half) {
        return accumulator_pair<Tile>(accumulators, subtile, j, half);
      });
      this->store_buffer(params.out, out, work, subtile);
    });
  }
};

}  // namespace jaxllm::hopper
