// Tensor maps: what TMA must know of an array to copy boxes of it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/launch.h"

namespace jaxllm {

// The heads of a batch of sequences: (batch, length, heads, width) elements of 16 bits. Tokens lie
// `row_stride` elements apart, so that the array may be a part of the rows of a wider one.
struct HeadArray {
  const void* data;
  int64_t batch, length, heads, width, row_stride;
};

// The driver's function, found at run time: the extension must load where there is no driver.
inline cudaError_t find_tensor_map_encoder(decltype(&cuTensorMapEncodeTiled)* encoder) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  JAXLLM_RETURN_IF_ERROR(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                          12000, cudaEnableDefault, &found));
#else
  JAXLLM_RETURN_IF_ERROR(
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found));
#endif
  if (found != cudaDriverEntryPointSuccess || function == nullptr) return cudaErrorNotSupported;
  *encoder = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  return cudaSuccess;
}

// The width of a box: the 128 bytes over which the swizzle permutes 16-byte chunks.
inline constexpr int kBoxWidth = 64;

// Whether TMA can address the array.
inline bool has_tensor_map(const HeadArray& array) {
  return reinterpret_cast<std::uintptr_t>(array.data) % 16 == 0 && array.row_stride % 8 == 0 &&
         array.width % kBoxWidth == 0 && array.length < (int64_t{1} << 30) &&
         array.row_stride * array.length < (int64_t{1} << 38);
}

// Encodes boxes of `rows` tokens by kBoxWidth columns of one head of one sequence. Coordinates are
// (column, head, token, sequence). Elements beyond the sequence read as zero, and are not written.
inline cudaError_t encode_tensor_map(const HeadArray& array, CUtensorMapDataType type, int rows,
                                     CUtensorMap* map) {
  if (!has_tensor_map(array)) return cudaErrorNotSupported;
  decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  JAXLLM_RETURN_IF_ERROR(find_tensor_map_encoder(&encode));
  const cuuint64_t sizes[4] = {cuuint64_t(array.width), cuuint64_t(array.heads),
                               cuuint64_t(array.length), cuuint64_t(array.batch)};
  const cuuint64_t strides[3] = {cuuint64_t(array.width) * 2, cuuint64_t(array.row_stride) * 2,
                                 cuuint64_t(array.length * array.row_stride) * 2};
  const cuuint32_t box[4] = {kBoxWidth, 1, cuuint32_t(rows), 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(map, type, 4, const_cast<void*>(array.data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A row-major matrix.
struct Matrix {
  const void* data;
  int64_t rows, columns;
  int element_bytes = 2;
};

// Whether TMA can address the matrix: rows begin at multiples of 16 bytes.
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
