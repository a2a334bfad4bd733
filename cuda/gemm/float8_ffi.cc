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

// The operands of a GEMM, and of as many calls as jax.vmap gives every buffer new leading axes. A
// scale has one element for each row of its operand, or one for all. The bias has none where there
// is no bias.
struct Operands {
  const Buffer &a, &b, &scale_a, &scale_b, &bias;
  GemmShape shape = {};
  int64_t calls = 0, scales_a = 0, scales_b = 0, biases = 0;

  ffi::Error read() {
    const auto of_a = a.dimensions(), of_b = b.dimensions();
    const auto of_scale_a = scale_a.dimensions(), of_scale_b = scale_b.dimensions();
    const size_t axes = of_a.size();
    if (axes < 2 || of_b.size() != axes) {
      return invalid("b", "has not the axes of a, or a is no matrix");
    }
    if (of_scale_a.size() != axes - 1) return invalid("scale_a", "has not the axes of a less one");
    if (of_scale_b.size() != axes - 1) return invalid("scale_b", "has not the axes of b less one");
    shape = {of_a[axes - 2], of_b[axes - 2], of_a[axes - 1]};
    if (of_b[axes - 1] != shape.depth) return invalid("b", "has not the depth of a");
    calls = count_matrices(a);
    scales_a = of_scale_a.back() == 1 ? 1 : shape.rows;
    scales_b = of_scale_b.back() == 1 ? 1 : shape.columns;
    biases = count(bias) ? shape.columns : 0;
    return ffi::Error::Success();
  }

  // `out` and `more` are results, or workspaces.
  template <typename Out>
  ffi::Error check(const Buffer& out, const BufferCheck& more) const {
    return check_buffers({
        {"a", a, a.element_type(), calls * shape.rows * shape.depth},
        {"b", b, b.element_type(), calls * shape.columns * shape.depth},
        {"scale_a", scale_a, ffi::F32, calls * scales_a},
        {"scale_b", scale_b, ffi::F32, calls * scales_b},
        {"bias", bias, dtype_of<Out>(), calls * biases},
        {"out", out, dtype_of<Out>(), calls * shape.rows * shape.columns},
        more,
    });
  }

  template <typename A, typename B, typename Out>
  Float8Gemm<A, B, Out> call(int64_t i) const {
    return {data<A>(a) + i * shape.rows * shape.depth,
            data<B>(b) + i * shape.columns * shape.depth,
            data<float>(scale_a) + i * scales_a,
            data<float>(scale_b) + i * scales_b,
            scale_a.dimensions().back() == 1,
            scale_b.dimensions().back() == 1,
            biases ? data<Out>(bias) + i * biases : nullptr};
  }
};

// `partial` has no elements where the depth is not split, else the tiles, and a tile for each of as
// many clusters as may run.
ffi::Error Float8MatmulImpl(cudaStream_t stream, Buffer a, Buffer b, Buffer scale_a, Buffer scale_b,
                            Buffer bias, Result out, Result partial) {
  Operands operands{a, b, scale_a, scale_b, bias};
  if (const ffi::Error error = operands.read(); error.failure()) return error;
  const GemmShape& shape = operands.shape;
  const int64_t of_partial = partial_floats(*partial, operands.calls, shape.rows, shape.columns);
  return dispatch_float8(a, "a", [&](auto type_a) {
    return dispatch_float8(b, "b", [&](auto type_b) {
      return dispatch_floating(*out, "out", [&](auto type_out) {
        using A = typename decltype(type_a)::type;
        using B = typename decltype(type_b)::type;
        using Out = typename decltype(type_out)::type;
        const ffi::Error error = operands.check<Out>(
            *out,
            {"partial", *partial, ffi::F32, operands.calls * of_partial, Elements::kExactlyOrNone});
        if (error.failure()) return error;
        for (int64_t i = 0; i < operands.calls; ++i) {
          const auto gemm = operands.call<A, B, Out>(i);
          Out* const to = data<Out>(out) + i * shape.rows * shape.columns;
          const cudaError_t status =
              of_partial > 0 ? float8_split(stream, gemm, shape, to,
                                            data<float>(partial) + i * of_partial, of_partial)
                             : float8_matmul(stream, gemm, shape, to);
          if (status != cudaSuccess) return to_ffi_error(status);
        }
        return ffi::Error::Success();
      });
    });
  });
}

// amax has an element for each part of the columns.
ffi::Error Float8MatmulAmaxImpl(cudaStream_t stream, Buffer a, Buffer b, Buffer scale_a,
                                Buffer scale_b, Buffer bias, Result out, Result amax) {
  using E4m3 = __nv_fp8_e4m3;
  Operands operands{a, b, scale_a, scale_b, bias};
  if (const ffi::Error error = operands.read(); error.failure()) return error;
  const GemmShape& shape = operands.shape;
  const int64_t parts = amax->dimensions().back();
  if (parts != 1 && parts != 2) return invalid("amax", "is of neither one nor two parts");
  for (const auto& [name, operand] : {std::pair{"a", &a}, std::pair{"b", &b}}) {
    if (operand->element_type() != ffi::F8E4M3FN) return invalid(name, "is not float8_e4m3fn");
  }
  return dispatch_floating(*out, "out", [&](auto type_out) {
    using Out = typename decltype(type_out)::type;
    const ffi::Error error =
        operands.check<Out>(*out, {"amax", *amax, ffi::F32, operands.calls * parts});
    if (error.failure()) return error;
    for (int64_t i = 0; i < operands.calls; ++i) {
      const cudaError_t status =
          float8_matmul_amax(stream, operands.call<E4m3, E4m3, Out>(i), shape,
                             data<Out>(out) + i * shape.rows * shape.columns,
                             data<float>(amax) + i * parts, static_cast<int>(parts));
      if (status != cudaSuccess) return to_ffi_error(status);
    }
    return ffi::Error::Success();
  });
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
