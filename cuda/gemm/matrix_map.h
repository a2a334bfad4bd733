// Tensor maps of matrices, for Hopper's copy engine.
#pragma once

#include <cstdint>

#include "common/tensor_map.h"

namespace jaxllm {

// A row-major matrix.
struct Matrix {
  const void* data;
  int64_t rows, columns;
  int element_bytes = 2;
};

// Whether the copy engine can address the matrix: rows begin at multiples of 16 bytes.
inline bool has_matrix_map(const Matrix& matrix) {
  constexpr int64_t kMax = int64_t{1} << 31;
  return reinterpret_cast<std::uintptr_t>(matrix.data) % 16 == 0 &&
         matrix.columns * matrix.element_bytes % 16 == 0 && 0 < matrix.rows && matrix.rows < kMax &&
         0 < matrix.columns && matrix.columns < kMax;
}

// Encodes boxes of `rows` by `width`. Elements beyond the matrix read as zero, and are not written.
inline cudaError_t encode_matrix_map(const Matrix& matrix, CUtensorMapDataType type, int rows,
                                     CUtensorMap* map, int width = kBoxWidth,
                                     CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
  if (!has_matrix_map(matrix)) return cudaErrorNotSupported;
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  JAXLLM_RETURN_IF_ERROR(find_tensor_map_encoder(&encode));
  const cuuint64_t sizes[2] = {cuuint64_t(matrix.columns), cuuint64_t(matrix.rows)};
  const cuuint64_t strides[1] = {cuuint64_t(matrix.columns * matrix.element_bytes)};
  const cuuint32_t box[2] = {cuuint32_t(width), cuuint32_t(rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result =
      encode(map, type, 2, const_cast<void*>(matrix.data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jaxllm
