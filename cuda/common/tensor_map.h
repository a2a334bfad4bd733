// Tensor maps: what TMA must know of an array to copy boxes of it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/launch.h"

namespace jaxllm {

// The width of a box: the 128 bytes over which the swizzle permutes 16-byte chunks.
inline constexpr int kBoxWidth = 64;

// The heads of a batch of sequences: (batch, length, heads, width) elements of 16 bits. Tokens lie
// `row_stride` elements apart, so that the array may be a part of the rows of a wider one.
struct HeadArray {
  const void* data;
  int64_t batch, length, heads, width, row_stride;
};

// Whether TMA can address the array.
bool has_tensor_map(const HeadArray& array);

// Encodes boxes of `rows` tokens by kBoxWidth columns of one head of one sequence. Coordinates are
// (column, head, token, sequence). Elements beyond the head and the sequence read as zero, and are
// not written.
cudaError_t encode_tensor_map(const HeadArray& array, CUtensorMapDataType type, int rows,
                              CUtensorMap* map);

// A row-major matrix.
struct Matrix {
  const void* data;
  int64_t rows, columns;
  int element_bytes = 2;
};

// Whether TMA can address the matrix: rows begin at multiples of 16 bytes.
bool has_matrix_map(const Matrix& matrix);

// Encodes boxes of `rows` by `width`. Elements beyond the matrix read as zero, and are not written.
cudaError_t encode_matrix_map(const Matrix& matrix, CUtensorMapDataType type, int rows,
                              CUtensorMap* map, int width = kBoxWidth,
                              CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B);

}  // namespace jaxllm
