// FFI handlers of the GEMMs that are fused with what precedes or follows them: check the buffers,
// switch on their dtype, launch.
#include <algorithm>

#include "common/launch.h"
#include "gemm/fold_norm.h"
#include "gemm/gemm_ffi.h"
#include "gemm/hopper/matmul_hopper.h"
#include "gemm/hopper/wgrad.h"
#include "handlers.h"

namespace jaxllm {
namespace {

// What does not depend on the dtype.
using AnyMatmul = MatmulHopper<__nv_bfloat16>;

// Saved for the backward is GELU's derivative, or what GELU is applied to, less the bias.
ffi::Error MatmulBiasGeluImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer bias, Result out,
                              Result saved, bool save_dgelu) {
  GemmSizes s;
  if (ffi::Error e = s.read(x, "x", weight, false); e.failure()) return e;
  const ffi::DataType dtype = x.element_type();
  const int64_t of_saved = save_dgelu ? AnyMatmul::dgelu_elements(s.shape()) : s.out();
  return launch_calls(x, "x", s.calls,
                      {
                          {"x", x, dtype, s.calls * s.x()},
                          {"weight", weight, dtype, s.calls * s.weight()},
                          {"bias", bias, dtype, s.calls * s.columns},
                          {"out", *out, dtype, s.calls * s.out()},
                          {"saved", *saved, dtype, s.calls * of_saved},
                      },
                      [&](auto call) {
                        using T = typename decltype(call)::Type;
                        return MatmulHopper<T>::bias_gelu(
                            stream, call.at(x, s.x()), call.at(weight, s.weight()),
                            call.at(bias, s.columns), save_dgelu, call.at(saved, of_saved),
                            call.at(out, s.out()), s.shape());
                      });
}

ffi::Error MatmulDgeluImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer dgelu, Result out,
                           Result sums, Result partial) {
  GemmSizes s;
  if (ffi::Error e = s.read(x, "x", weight, true); e.failure()) return e;
  const ffi::DataType dtype = x.element_type();
  const int64_t of_dgelu = AnyMatmul::dgelu_elements(s.shape());
  const int64_t of_partial = divide_up(s.rows, kDgeluRows) * s.columns;
  return launch_calls(x, "x", s.calls,
                      {
                          {"x", x, dtype, s.calls * s.x()},
                          {"weight", weight, dtype, s.calls * s.weight()},
                          {"dgelu", dgelu, dtype, s.calls * of_dgelu},
                          {"out", *out, dtype, s.calls * s.out()},
                          {"sums", *sums, dtype, s.calls * s.columns},
                          {"partial", *partial, ffi::F32, s.calls * of_partial},
                      },
                      [&](auto call) {
                        using T = typename decltype(call)::Type;
                        return MatmulHopper<T>::dgelu(
                            stream, call.at(x, s.x()), call.at(weight, s.weight()),
                            call.at(dgelu, of_dgelu), call.at(out, s.out()),
                            call.at(sums, s.columns), call.template at<float>(partial, of_partial),
                            s.shape());
                      });
}

ffi::Error MatmulResidualImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer bias,
                              Buffer residual, Result out) {
  GemmSizes s;
  if (ffi::Error e = s.read(x, "x", weight, false); e.failure()) return e;
  const ffi::DataType dtype = x.element_type();
  return launch_calls(x, "x", s.calls,
                      {
                          {"x", x, dtype, s.calls * s.x()},
                          {"weight", weight, dtype, s.calls * s.weight()},
                          {"bias", bias, dtype, s.calls * s.columns},
                          {"residual", residual, dtype, s.calls * s.out()},
                          {"out", *out, dtype, s.calls * s.out()},
                      },
                      [&](auto call) {
                        using T = typename decltype(call)::Type;
                        return MatmulHopper<T>::residual(
                            stream, call.at(x, s.x()), call.at(weight, s.weight()),
                            call.at(bias, s.columns), call.at(residual, s.out()),
                            call.at(out, s.out()), s.shape());
                      });
}

// The tokens of a sequence are the last axis of `delta`.
ffi::Error MatmulDeltaImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer out, Result dout,
                           Result delta, Result partial) {
  GemmSizes s;
  if (ffi::Error e = s.read(x, "x", weight, true); e.failure()) return e;
  const ffi::DataType dtype = x.element_type();
  const auto of_delta = delta->dimensions();
  const int64_t tokens = of_delta.size() == 0 ? 0 : of_delta.back();
  if (tokens == 0 || tokens % kDeltaRows != 0 || s.rows % tokens != 0 ||
      s.columns % kDeltaColumns != 0) {
    return invalid("delta", "has not the tokens of whole tiles, sequences and heads of dout");
  }
  const int64_t of_heads = s.out() / kDeltaColumns, of_partial = s.rows / kDeltaRows * s.columns;
  return launch_calls(x, "x", s.calls,
                      {
                          {"x", x, dtype, s.calls * s.x()},
                          {"weight", weight, dtype, s.calls * s.weight()},
                          {"out", out, dtype, s.calls * s.out()},
                          {"dout", *dout, dtype, s.calls * s.out()},
                          {"delta", *delta, ffi::F32, s.calls * of_heads},
                          {"partial", *partial, ffi::F32, s.calls * of_partial},
                      },
                      [&](auto call) {
                        using T = typename decltype(call)::Type;
                        return MatmulHopper<T>::delta(
                            stream, call.at(x, s.x()), call.at(weight, s.weight()),
                            call.at(out, s.out()), call.at(dout, s.out()),
                            call.template at<float>(delta, of_heads),
                            call.template at<float>(partial, of_partial), tokens, s.shape());
                      });
}

// The residual is kept normalized; so is the result.
ffi::Error MatmulResidualNormImpl(cudaStream_t stream, Buffer x, Buffer weight, Buffer bias,
                                  Buffer xhat, Buffer mean, Buffer rstd, Result out,
                                  Result new_mean, Result new_rstd, Result row_sums, float eps) {
  GemmSizes s;
  if (ffi::Error e = s.read(x, "x", weight, false); e.failure()) return e;
  const ffi::DataType dtype = x.element_type();
  const int64_t of_row_sums = AnyMatmul::row_sum_floats(s.shape());
  return launch_calls(
      x, "x", s.calls,
      {
          {"x", x, dtype, s.calls * s.x()},
          {"weight", weight, dtype, s.calls * s.weight()},
          {"bias", bias, dtype, s.calls * s.columns},
          {"xhat", xhat, dtype, s.calls * s.out()},
          {"mean", mean, ffi::F32, s.calls * s.rows},
          {"rstd", rstd, ffi::F32, s.calls * s.rows},
          {"out", *out, dtype, s.calls * s.out()},
          {"new_mean", *new_mean, ffi::F32, s.calls * s.rows},
          {"new_rstd", *new_rstd, ffi::F32, s.calls * s.rows},
          {"row_sums", *row_sums, ffi::F32, s.calls * of_row_sums},
      },
      [&](auto call) {
        using T = typename decltype(call)::Type;
        return MatmulHopper<T>::residual_norm(
            stream, call.at(x, s.x()), call.at(weight, s.weight()), call.at(bias, s.columns),
            call.at(xhat, s.out()), call.template at<float>(mean, s.rows),
            call.template at<float>(rstd, s.rows), eps, call.at(out, s.out()),
            call.template at<float>(new_mean, s.rows), call.template at<float>(new_rstd, s.rows),
            call.template at<float>(row_sums, of_row_sums), s.shape());
      });
}

// dx takes the place of dtotal. `partial` has rows for as many groups of clusters as may run.
ffi::Error MatmulNormBackwardImpl(cudaStream_t stream, Buffer dout, Buffer weight, Buffer xhat,
                                  Buffer rstd, Buffer dtotal, Result dx, Result dtotal_sum,
                                  Result partial, Result row_sums) {
  GemmSizes s;
  if (ffi::Error e = s.read(dout, "dout", weight, true); e.failure()) return e;
  const ffi::DataType dtype = dout.element_type();
  const int64_t of_group = kNormPartialRows * s.columns, of_groups = s.calls * of_group;
  const int64_t groups = of_groups == 0 ? 1 : std::max<int64_t>(1, count(*partial) / of_groups);
  const int64_t of_partial = groups * of_group;
  const int64_t of_row_sums = AnyMatmul::row_sum_floats(s.shape());
  // The checks come first: a wrong size must not be copied.
  const std::initializer_list<BufferCheck> checks = {
      {"dout", dout, dtype, s.calls * s.x()},
      {"weight", weight, dtype, s.calls * s.weight()},
      {"xhat", xhat, dtype, s.calls * s.out()},
      {"rstd", rstd, ffi::F32, s.calls * s.rows},
      {"dtotal", dtotal, dtype, s.calls * s.out()},
      {"dx", *dx, dtype, s.calls * s.out()},
      {"dtotal_sum", *dtotal_sum, dtype, s.calls * s.columns},
      {"partial", *partial, ffi::F32, s.calls * of_partial},
      {"row_sums", *row_sums, ffi::F32, s.calls * of_row_sums},
  };
  if (const ffi::Error error = check_buffers(checks); error.failure()) return error;
  if (const cudaError_t status = copy_unless_aliased(stream, dtotal, dx)) {
    return to_ffi_error(status);
  }
  return launch_calls(dout, "dout", s.calls, {}, [&](auto call) {
    using T = typename decltype(call)::Type;
    return MatmulHopper<T>::norm_backward(
        stream, call.at(dout, s.x()), call.at(weight, s.weight()), call.at(xhat, s.out()),
        call.template at<float>(rstd, s.rows), call.at(dx, s.out()), call.at(dtotal_sum, s.columns),
        call.template at<float>(partial, of_partial), of_partial,
        call.template at<float>(row_sums, of_row_sums), s.shape());
  });
}

// `partial` has the tiles, and a tile for each of as many CTAs as may run.
ffi::Error WgradPairImpl(cudaStream_t stream, Buffer x0, Buffer dout0, Buffer x1, Buffer dout1,
                         Result dweight0, Result dweight1, Result partial) {
  GemmSizes s0, s1;
  if (ffi::Error e = s0.read(*dweight0, false, "dweight0"); e.failure()) return e;
  if (ffi::Error e = s1.read(*dweight1, false, "dweight1"); e.failure()) return e;
  if (count(*dweight0) == 0) return invalid("dweight0", "has no elements");
  if (count(*dweight1) == 0) return invalid("dweight1", "has no elements");
  const int64_t calls = s0.calls, tokens = count(x0) / (calls * s0.width);
  const auto tiles_of = [](const GemmSizes& s) {
    return divide_up(s.width, kWgradTileRows) * divide_up(s.columns, kWgradTileColumns);
  };
  constexpr int64_t kTile = kWgradTileRows * kWgradTileColumns;
  const int64_t of_partial =
      std::max(count(*partial) / (calls * kTile), 2 * (tiles_of(s0) + tiles_of(s1))) * kTile;
  const ffi::DataType dtype = x0.element_type();
  return launch_calls(x0, "x0", calls,
                      {
                          {"x0", x0, dtype, calls * tokens * s0.width},
                          {"dout0", dout0, dtype, calls * tokens * s0.columns},
                          {"x1", x1, dtype, calls * tokens * s1.width},
                          {"dout1", dout1, dtype, calls * tokens * s1.columns},
                          {"dweight0", *dweight0, dtype, calls * s0.weight()},
                          {"dweight1", *dweight1, dtype, calls * s1.weight()},
                          {"partial", *partial, ffi::F32, calls * of_partial},
                      },
                      [&](auto call) {
                        using T = typename decltype(call)::Type;
                        const Wgrad<T> gradients[2] = {
                            {call.at(x0, tokens * s0.width), call.at(dout0, tokens * s0.columns),
                             call.at(dweight0, s0.weight()), s0.width, s0.columns},
                            {call.at(x1, tokens * s1.width), call.at(dout1, tokens * s1.columns),
                             call.at(dweight1, s1.weight()), s1.width, s1.columns}};
                        return wgrad_pair(stream, gradients, tokens,
                                          call.template at<float>(partial, of_partial), of_partial);
                      });
}

ffi::Error FoldNormImpl(cudaStream_t stream, Buffer scale, Buffer norm_bias, Buffer weight,
                        Buffer bias, Result folded_weight, Result folded_bias) {
  GemmSizes s;
  if (ffi::Error e = s.read(weight, false); e.failure()) return e;
  const ffi::DataType dtype = weight.element_type();
  return launch_calls(
      weight, "weight", s.calls,
      {
          {"scale", scale, dtype, s.calls * s.width},
          {"norm_bias", norm_bias, dtype, s.calls * s.width},
          {"weight", weight, dtype, s.calls * s.weight()},
          {"bias", bias, dtype, s.calls * s.columns},
          {"folded_weight", *folded_weight, dtype, s.calls * s.weight()},
          {"folded_bias", *folded_bias, dtype, s.calls * s.columns},
      },
      [&](auto call) {
        using T = typename decltype(call)::Type;
        return FoldNormLayer<T>::forward(
            stream,
            {call.at(scale, s.width), call.at(norm_bias, s.width), call.at(weight, s.weight()),
             call.at(bias, s.columns), s.width, s.columns},
            call.at(folded_weight, s.weight()), call.at(folded_bias, s.columns));
      });
}

ffi::Error FoldNormBackwardImpl(cudaStream_t stream, Buffer scale, Buffer norm_bias, Buffer weight,
                                Buffer dfolded_weight, Buffer dfolded_bias, Result dscale,
                                Result dnorm_bias, Result dweight) {
  GemmSizes s;
  if (ffi::Error e = s.read(weight, false); e.failure()) return e;
  const ffi::DataType dtype = weight.element_type();
  return launch_calls(weight, "weight", s.calls,
                      {
                          {"scale", scale, dtype, s.calls * s.width},
                          {"norm_bias", norm_bias, dtype, s.calls * s.width},
                          {"weight", weight, dtype, s.calls * s.weight()},
                          {"dfolded_weight", dfolded_weight, dtype, s.calls * s.weight()},
                          {"dfolded_bias", dfolded_bias, dtype, s.calls * s.columns},
                          {"dscale", *dscale, dtype, s.calls * s.width},
                          {"dnorm_bias", *dnorm_bias, dtype, s.calls * s.width},
                          {"dweight", *dweight, dtype, s.calls * s.weight()},
                      },
                      [&](auto call) {
                        using T = typename decltype(call)::Type;
                        return FoldNormLayer<T>::backward(
                            stream,
                            {call.at(scale, s.width), call.at(norm_bias, s.width),
                             call.at(weight, s.weight()), nullptr, s.width, s.columns},
                            call.at(dfolded_weight, s.weight()), call.at(dfolded_bias, s.columns),
                            call.at(dscale, s.width), call.at(dnorm_bias, s.width),
                            call.at(dweight, s.weight()));
                      });
}

}  // namespace

JAXLLM_HANDLER(MatmulBiasGelu, MatmulBiasGeluImpl, "save_dgelu");
JAXLLM_HANDLER(MatmulDgelu, MatmulDgeluImpl);
JAXLLM_HANDLER(MatmulResidual, MatmulResidualImpl);
JAXLLM_HANDLER(MatmulDelta, MatmulDeltaImpl);
JAXLLM_HANDLER(MatmulResidualNorm, MatmulResidualNormImpl, "eps");
JAXLLM_HANDLER(MatmulNormBackward, MatmulNormBackwardImpl);
JAXLLM_HANDLER(WgradPair, WgradPairImpl);
JAXLLM_HANDLER(FoldNorm, FoldNormImpl);
JAXLLM_HANDLER(FoldNormBackward, FoldNormBackwardImpl);

}  // namespace jaxllm
