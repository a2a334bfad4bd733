// The FFI handler of GEMMs of 8-bit floats: checks the buffers, switches on their dtypes, launches.
#include <algorithm>

#include "common/ffi_float8.h"
#include "common/launch.h"
#include "gemm/gemm_ffi.h"
#include "gemm/hopper/float8_derivative.h"
#include "gemm/hopper/float8_split.h"
#include "handlers.h"

namespace jaxllm {
namespace {

// What a call has of the workspace: as many whole tiles as there are, and at least one more than
// the tiles of the result. None where there is no workspace.
int64_t partial_floats(const Buffer& partial, int64_t calls, int64_t rows, int64_t columns) {
  if (count(partial) == 0 || calls == 0) return 0;
  constexpr int64_t kTile = int64_t{kFloat8SplitRows} * kFloat8SplitColumns;
  const int64_t tiles = divide_up(rows, kFloat8SplitRows) * divide_up(columns, kFloat8SplitColumns);
  return std::max(count(partial) / (calls * kTile), tiles + 1) * kTile;
}

// jax.vmap gives every buffer the same new leading axes. A scale has one element for each row of
// its operand, or one for all. The bias has none where there is no bias. amax has one for each part
// of the columns; nullptr where it is not wanted. `partial` has no elements where the depth is not
// split, else the tiles, and a tile for each of as many clusters as may run; nullptr with amax.
ffi::Error multiply(cudaStream_t stream, const Buffer& a, const Buffer& b, const Buffer& scale_a,
                    const Buffer& scale_b, const Buffer& bias, Result* out, Result* amax,
                    Result* partial) {
  const auto of_a = a.dimensions(), of_b = b.dimensions();
  const auto of_scale_a = scale_a.dimensions(), of_scale_b = scale_b.dimensions();
  const size_t axes = of_a.size();
  if (axes < 2 || of_b.size() != axes) {
    return invalid("b", "has not the axes of a, or a is no matrix");
  }
  if (of_scale_a.size() != axes - 1) return invalid("scale_a", "has not the axes of a less one");
  if (of_scale_b.size() != axes - 1) return invalid("scale_b", "has not the axes of b less one");
  const int64_t rows = of_a[axes - 2], columns = of_b[axes - 2], depth = of_a[axes - 1];
  if (of_b[axes - 1] != depth) return invalid("b", "has not the depth of a");
  const int64_t calls = count_matrices(a);
  const bool has_one_a = of_scale_a.back() == 1, has_one_b = of_scale_b.back() == 1;
  const int64_t scales_a = has_one_a ? 1 : rows, scales_b = has_one_b ? 1 : columns;
  const int64_t biases = count(bias) ? columns : 0;
  const int64_t parts = amax ? (*amax)->dimensions().back() : 1;
  if (parts != 1 && parts != 2) return invalid("amax", "is of neither one nor two parts");
  const int64_t of_partial = partial ? partial_floats(**partial, calls, rows, columns) : 0;
  return dispatch_float8(a, "a", [&](auto type_a) {
    return dispatch_float8(b, "b", [&](auto type_b) {
      return dispatch_floating(**out, "out", [&](auto type_out) {
        using A = typename decltype(type_a)::type;
        using B = typename decltype(type_b)::type;
        using Out = typename decltype(type_out)::type;
        const ffi::Error error = check_buffers({
            {"a", a, a.element_type(), calls * rows * depth},
            {"b", b, b.element_type(), calls * columns * depth},
            {"scale_a", scale_a, ffi::F32, calls * scales_a},
            {"scale_b", scale_b, ffi::F32, calls * scales_b},
            {"bias", bias, dtype_of<Out>(), calls * biases},
            {"out", **out, dtype_of<Out>(), calls * rows * columns},
            {"amax", amax ? **amax : scale_a, ffi::F32, calls * (amax ? parts : scales_a)},
            {"partial", partial ? **partial : no_buffer(), ffi::F32, calls * of_partial,
             Elements::kExactlyOrNone},
        });
        if (error.failure()) return error;
        for (int64_t i = 0; i < calls; ++i) {
          const Float8Gemm<A, B, Out> call{data<A>(a) + i * rows * depth,
                                           data<B>(b) + i * columns * depth,
                                           data<float>(scale_a) + i * scales_a,
                                           data<float>(scale_b) + i * scales_b,
                                           has_one_a,
                                           has_one_b,
                                           biases ? data<Out>(bias) + i * biases : nullptr};
          const GemmShape shape{rows, columns, depth};
          Out* const to = data<Out>(*out) + i * rows * columns;
          const cudaError_t status =
              of_partial > 0
                  ? float8_split(stream, call, shape, to, data<float>(*partial) + i * of_partial,
                                 of_partial)
                  : call.launch(stream, shape, to, amax ? data<float>(*amax) + i * parts : nullptr,
                                static_cast<int>(parts));
          if (status != cudaSuccess) return to_ffi_error(status);
        }
        return ffi::Error::Success();
      });
    });
  });
}

ffi::Error Float8MatmulImpl(cudaStream_t stream, Buffer a, Buffer b, Buffer scale_a, Buffer scale_b,
                            Buffer bias, Result out, Result partial) {
  return multiply(stream, a, b, scale_a, scale_b, bias, &out, nullptr, &partial);
}

ffi::Error Float8MatmulAmaxImpl(cudaStream_t stream, Buffer a, Buffer b, Buffer scale_a,
                                Buffer scale_b, Buffer bias, Result out, Result amax) {
  return multiply(stream, a, b, scale_a, scale_b, bias, &out, &amax, nullptr);
}

// `Gemm` is Float8Dgelu or Float8Dswiglu, whose h has kParts parts. dbias and its workspace have no
// elements where it is not wanted; they are nullptr for a GEMM that does not sum it. jax.vmap gives
// every buffer the same new leading axes.
template <template <typename> class Gemm, int kParts>
ffi::Error multiply_by_derivative(cudaStream_t stream, const Buffer& a, const Buffer& b,
                                  const Buffer& scale_a, const Buffer& scale_b, const Buffer& h,
                                  const Buffer& scale, Result& values, Result& transposed,
                                  Result* dbias = nullptr, Result* partial = nullptr) {
  const auto of_a = a.dimensions(), of_b = b.dimensions();
  const size_t axes = of_a.size();
  if (axes < 2 || of_b.size() != axes) {
    return invalid("b", "has not the axes of a, or a is no matrix");
  }
  const GemmShape shape{of_a[axes - 2], of_b[axes - 2], of_a[axes - 1]};
  if (of_b[axes - 1] != shape.depth) return invalid("b", "has not the depth of a");
  const int64_t calls = count_matrices(a), size = kParts * shape.rows * shape.columns;
  const int64_t size_a = shape.rows * shape.depth, size_b = shape.columns * shape.depth;
  const bool has_sums = dbias && count(**dbias) > 0;
  const int64_t sums = has_sums ? shape.columns : 0;
  const int64_t partials = divide_up(shape.rows, kFloat8DgeluRows) * sums;
  return launch_calls(
      h, "h", calls,
      {
          {"a", a, ffi::F8E5M2, calls * size_a},
          {"b", b, ffi::F8E4M3FN, calls * size_b},
          {"scale_a", scale_a, ffi::F32, calls},
          {"scale_b", scale_b, ffi::F32, calls},
          {"h", h, h.element_type(), calls * size},
          {"scale", scale, ffi::F32, calls},
          {"values", *values, ffi::F8E5M2, calls * size},
          {"transposed", *transposed, ffi::F8E5M2, calls * size},
          {"dbias", dbias ? **dbias : h, h.element_type(), calls * (dbias ? sums : size),
           Elements::kExactlyOrNone},
          {"partial", partial ? **partial : scale, ffi::F32, calls * (partial ? partials : 1)},
      },
      [&](auto call) {
        using T = typename decltype(call)::Type;
        const Gemm<T> gemm{
            {call.template at<__nv_fp8_e5m2>(a, size_a), call.template at<__nv_fp8_e4m3>(b, size_b),
             call.template at<float>(scale_a, 1), call.template at<float>(scale_b, 1),
             call.at(h, size), call.template at<float>(scale, 1)}};
        const auto launch = [&](auto... of_sums) {
          return gemm.launch(stream, shape, call.template at<__nv_fp8_e5m2>(values, size),
                             call.template at<__nv_fp8_e5m2>(transposed, size), of_sums...);
        };
        if constexpr (std::is_same_v<Gemm<T>, Float8Dgelu<T>>) {
          return launch(has_sums ? call.at(*dbias, sums) : nullptr,
                        call.template at<float>(*partial, partials));
        } else {
          return launch();
        }
      });
}

ffi::Error Float8MatmulDgeluImpl(cudaStream_t stream, Buffer a, Buffer b, Buffer scale_a,
                                 Buffer scale_b, Buffer h, Buffer scale, Result values,
                                 Result transposed, Result dbias, Result partial) {
  return multiply_by_derivative<Float8Dgelu, 1>(stream, a, b, scale_a, scale_b, h, scale, values,
                                                transposed, &dbias, &partial);
}

ffi::Error Float8MatmulDswigluImpl(cudaStream_t stream, Buffer a, Buffer b, Buffer scale_a,
                                   Buffer scale_b, Buffer h, Buffer scale, Result values,
                                   Result transposed) {
  return multiply_by_derivative<Float8Dswiglu, 2>(stream, a, b, scale_a, scale_b, h, scale, values,
                                                  transposed);
}

}  // namespace

JAXLLM_HANDLER(Float8Matmul, Float8MatmulImpl);
JAXLLM_HANDLER(Float8MatmulAmax, Float8MatmulAmaxImpl);
JAXLLM_HANDLER(Float8MatmulDgelu, Float8MatmulDgeluImpl);
JAXLLM_HANDLER(Float8MatmulDswiglu, Float8MatmulDswigluImpl);

}  // namespace jaxllm
