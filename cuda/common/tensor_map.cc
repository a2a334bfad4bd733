#include "common/tensor_map.h"

#include <atomic>

namespace jaxllm {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found at run time: the extension must load where there is no driver. It is
// the same for all devices, and found once.
cudaError_t find_encode(Encode* encode) {
  static std::atomic<Encode> found{nullptr};
  *encode = found.load(std::memory_order_acquire);
  if (*encode != nullptr) return cudaSuccess;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  JAXLLM_RETURN_IF_ERROR(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                          12000, cudaEnableDefault, &result));
#else
  JAXLLM_RETURN_IF_ERROR(
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result));
#endif
  if (result != cudaDriverEntryPointSuccess || function == nullptr) return cudaErrorNotSupported;
  *encode = reinterpret_cast<Encode>(function);
  found.store(*encode, std::memory_order_release);
  return cudaSuccess;
}

template <int kRank>
cudaError_t encode_boxes(const void* data, CUtensorMapDataType type,
                         const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                         const cuuint32_t (&box)[kRank], CUtensorMapSwizzle swizzle,
                         CUtensorMap* map) {
  Encode encode = nullptr;
  JAXLLM_RETURN_IF_ERROR(find_encode(&encode));
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  const CUresult result =
      encode(map, type, kRank, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

bool is_aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 16 == 0; }

}  // namespace

bool has_tensor_map(const HeadArray& array) {
  return is_aligned(array.data) && array.row_stride % 8 == 0 && array.width % 8 == 0 &&
         array.length < (int64_t{1} << 30) && array.row_stride * array.length < (int64_t{1} << 38);
}

cudaError_t encode_tensor_map(const HeadArray& array, CUtensorMapDataType type, int rows,
                              CUtensorMap* map) {
  if (!has_tensor_map(array)) return cudaErrorNotSupported;
  return encode_boxes<4>(array.data, type,
                         {cuuint64_t(array.width), cuuint64_t(array.heads),
                          cuuint64_t(array.length), cuuint64_t(array.batch)},
                         {cuuint64_t(array.width) * 2, cuuint64_t(array.row_stride) * 2,
                          cuuint64_t(array.length * array.row_stride) * 2},
                         {kBoxWidth, 1, cuuint32_t(rows), 1}, CU_TENSOR_MAP_SWIZZLE_128B, map);
}

bool has_matrix_map(const Matrix& matrix) {
  constexpr int64_t kMax = int64_t{1} << 31;
  return is_aligned(matrix.data) && matrix.columns * matrix.element_bytes % 16 == 0 &&
         0 < matrix.rows && matrix.rows < kMax && 0 < matrix.columns && matrix.columns < kMax;
}

cudaError_t encode_matrix_map(const Matrix& matrix, CUtensorMapDataType type, int rows,
                              CUtensorMap* map, int width, CUtensorMapSwizzle swizzle) {
  if (!has_matrix_map(matrix)) return cudaErrorNotSupported;
  return encode_boxes<2>(matrix.data, type, {cuuint64_t(matrix.columns), cuuint64_t(matrix.rows)},
                         {cuuint64_t(matrix.columns * matrix.element_bytes)},
                         {cuuint32_t(width), cuuint32_t(rows)}, swizzle, map);
}

}  // namespace jaxllm
