// Rounding to 8-bit floats with given scales, in the layouts that a GEMM on Hopper reads.
#pragma once

#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

// values[i][j] = round(x[i][j] / scale) of a matrix x of `rows` by `columns`, and
// transposed[j][i] the same; nullptr where it is not wanted. There is one scale for all, or one for
// each row of the result: then one of the two is wanted. What is finite does not overflow.
//
// Where both are wanted, `sums` may get the sums over the rows of x, (columns,); nullptr where they
// are not wanted. `partial` is a workspace for them: (float8_partial_rows(rows), columns).
//
// cudaErrorNotSupported where the columns are no multiple of 8, where the transposed matrix is
// wanted and the rows are no multiple of 16, and where a pointer is not a multiple of 16 bytes, or
// `values` of 8.
template <typename Float8, typename T>
struct Float8Rounding {
  const T* x;
  const float* scale;
  bool has_one_scale;

  cudaError_t launch(cudaStream_t stream, int64_t rows, int64_t columns, Float8* values,
                     Float8* transposed, T* sums = nullptr, float* partial = nullptr) const;
};

// How many partial rows the sums over so many rows have.
int64_t float8_partial_rows(int64_t rows);

}  // namespace jaxllm
