// Softmax cross entropy of the logits of the lm_head, fused into the GEMM that makes the logits: no
// pass over the logits is left.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxllm {

struct LmHeadSizes {
  int64_t rows, width, columns;
};

// With z = hidden weight the logits of a row, y its label, s = sum_v e^(z_v) over the vocabulary
// and p_v = e^(z_v) / s, a row has loss = log(s) - z_y, and the gradient of scale * loss for z_v is
// factor * exponential_v, where
//
//   exponential_v = e^(z_v - m)    but    exponential_y = -sum_{v != y} e^(z_v - m)
//   factor = scale / sum_v e^(z_v - m)
//
// for any m; columns of padding have exponentials 0. So the gradients of hidden and weight are
//
//   dhidden = factor * (exponentials weight^T)        dweight = (factor * hidden)^T exponentials
//
// The epilogue of the GEMM that makes z stores the exponentials, for m = z_y, which a dot product
// gives beforehand. Then no exponential exceeds e^loss, and that of the label is 1: unless the loss
// of a row is above 50, neither do they overflow nor do all vanish. For such rows m becomes the
// largest logit, and a second GEMM recomputes the exponentials. Without such rows the second launch
// returns at once.
struct LmHeadLoss {
  const __nv_bfloat16 *hidden, *weight;  // (rows, width), and (width, columns) or transposed
  bool transpose_weight;
  const int32_t* labels;
  const float* scale;
  int64_t ignore_index;  // the label of rows with loss, factor and exponentials zero
  int64_t vocab_size;    // columns from there on are padding
  __nv_bfloat16* exponentials;
  float *factors, *losses;  // one for each row
  float* sums;              // a workspace of (sum_tiles(columns), rows)
  float* statistics;        // of (2, rows)
  int32_t* counts;          // of 2 rows + 1

  static int64_t sum_tiles(int64_t columns);

  // Returns cudaErrorNotSupported as gemm/hopper/matmul_hopper.h says.
  cudaError_t run(cudaStream_t stream, LmHeadSizes sizes) const;
};

}  // namespace jaxllm
