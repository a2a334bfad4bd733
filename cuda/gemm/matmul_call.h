// What a matrix product is asked for, whichever kernel computes it.
#pragma once

#include <cstdint>

namespace jaxllm {

// A result of rows x columns, from products over the depth.
struct GemmShape {
  int64_t rows, columns, depth;
};

// out = f(a b + bias): a (rows, depth), or transposed (depth, rows); b (depth, columns), or
// transposed (columns, depth).
template <typename T>
struct MatmulCall {
  int64_t rows, columns, depth;
  const T* a;
  const T* b;
  bool transpose_a, transpose_b;
  const T* bias;     // null for none
  bool gelu;         // f; h then gets the product alone
  bool tf32;         // whether factors of float32 may be rounded
  bool float32_out;  // out and h are float32, whatever T is
  void* h;
  void* out;
};

}  // namespace jaxllm
