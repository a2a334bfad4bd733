// FFI handlers of the optimizer's kernels. Their buffers are the leaves of pytrees, any number.
#include <type_traits>
#include <vector>

#include "common/ffi_rows.h"
#include "common/launch.h"
#include "handlers.h"
#include "optimizer/adamw_update.h"
#include "optimizer/global_norm.h"

namespace jaxllm {
namespace {

// The trees of a call, as lists of buffers. `operands` are params, grads, ms, vs and optionally one
// array of seeds; `results` are params, ms, vs and optionally copies.
struct AdamWBuffers {
  std::vector<Buffer> operands;
  std::vector<Result> results;
  size_t count;  // of the leaves of a tree

  // Operand k that result k replaces: params, ms, vs. The gradients, which lie between, have none.
  Buffer& in(int k, size_t i) { return operands[(k == 0 ? 0 : k + 1) * count + i]; }
  Buffer& grad(size_t i) { return operands[count + i]; }
  Result& out(int k, size_t i) { return results[k * count + i]; }
  bool has_seeds() const { return operands.size() > 4 * count; }
  bool has_copies() const { return results.size() > 3 * count; }
};

ffi::ErrorOr<AdamWBuffers> adamw_buffers(ffi::RemainingArgs operands, ffi::RemainingRets results,
                                         size_t count) {
  const bool operands_fit = operands.size() == 4 * count || operands.size() == 4 * count + 1;
  if (!operands_fit || (results.size() != 3 * count && results.size() != 4 * count)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("the trees have unequal numbers of leaves"));
  }
  AdamWBuffers buffers{{}, {}, count};
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto operand = operands.get<Buffer>(i);
    if (operand.has_error()) return ffi::Unexpected(operand.error());
    buffers.operands.push_back(*operand);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    const auto result = results.get<Buffer>(i);
    if (result.has_error()) return ffi::Unexpected(result.error());
    buffers.results.push_back(*result);
  }
  return buffers;
}

// Checks every buffer against the dtypes of the first leaf, P, G and C, and the size of its leaf.
template <typename P, typename G, typename C>
ffi::Error check_adamw(AdamWBuffers& buffers, const Buffer& scalars, int64_t groups) {
  ffi::Error error = check_buffer({"scalars", scalars, ffi::F32, groups * kAdamWScalars});
  if (error.success() && buffers.has_seeds()) {
    error = check_buffer(
        {"seeds", buffers.operands.back(), ffi::U32, groups * static_cast<int64_t>(buffers.count)});
  }
  for (size_t i = 0; i < buffers.count && error.success(); ++i) {
    const Buffer& param = buffers.in(0, i);
    const int64_t size = count(param);
    error = check_leading_axes(param, "param", scalars, "scalars", 1);
    if (error.failure()) break;
    error = check_buffers({
        {"param", param, dtype_of<P>(), size},
        {"grad", buffers.grad(i), dtype_of<G>(), size},
        {"m", buffers.in(1, i), ffi::F32, size},
        {"v", buffers.in(2, i), ffi::F32, size},
        {"the new param", *buffers.out(0, i), dtype_of<P>(), size},
        {"the new m", *buffers.out(1, i), ffi::F32, size},
        {"the new v", *buffers.out(2, i), ffi::F32, size},
    });
    if (error.success() && buffers.has_copies()) {
      error = check_buffer({"copy", *buffers.out(3, i), dtype_of<C>(), size});
    }
  }
  return error;
}

// Makes the list of leaves; the results hold copies of the operands that they replace.
cudaError_t adamw_leaves(cudaStream_t stream, AdamWBuffers& buffers,
                         ffi::Span<const float> weight_decays, int64_t groups,
                         std::vector<AdamWLeaf>* leaves) {
  for (size_t i = 0; i < buffers.count; ++i) {
    for (int k = 0; k < 3; ++k) {
      JAXLLM_RETURN_IF_ERROR(copy_unless_aliased(stream, buffers.in(k, i), buffers.out(k, i)));
    }
    const Buffer& grad = buffers.grad(i);
    leaves->push_back({buffers.out(0, i)->untyped_data(), grad.untyped_data(),
                       data<float>(buffers.out(1, i)), data<float>(buffers.out(2, i)),
                       buffers.has_copies() ? buffers.out(3, i)->untyped_data() : nullptr,
                       count(grad) / groups, weight_decays[i], static_cast<int>(i)});
  }
  return cudaSuccess;
}

// Calls `launch(Type<P>, Type<G>, Type<C>)` with the dtypes of the params, gradients and copies.
// Gradients of float32 params have any dtype, others the dtype of the params or float32. Copies
// have 16 bits.
template <class Launch>
ffi::Error dispatch_adamw(AdamWBuffers& buffers, Launch launch) {
  const Buffer &param = buffers.in(0, 0), &grad = buffers.grad(0);
  return dispatch_floating(param, "param", [&](auto param_type) {
    return dispatch_floating(grad, "grad", [&](auto grad_type) {
      using P = typename decltype(param_type)::type;
      using G = typename decltype(grad_type)::type;
      if constexpr (std::is_same_v<P, float>) {
        if (buffers.has_copies() && buffers.out(3, 0)->element_type() == ffi::F16) {
          return launch(param_type, grad_type, Type<__half>{});
        }
        return launch(param_type, grad_type, Type<__nv_bfloat16>{});
      } else if constexpr (std::is_same_v<G, P> || std::is_same_v<G, float>) {
        return launch(param_type, grad_type, param_type);
      } else {
        return invalid("grad", "has neither the dtype of param nor float32");
      }
    });
  });
}

ffi::Error AdamwUpdateImpl(cudaStream_t stream, Buffer scalars, ffi::RemainingArgs operands,
                           ffi::RemainingRets results, float b1, float one_minus_b1, float b2,
                           float one_minus_b2, float eps, ffi::Span<const float> weight_decays) {
  const auto axes = scalars.dimensions();
  if (axes.size() == 0 || axes.back() != kAdamWScalars) {
    return invalid("scalars", "has no last axis of 5 elements");
  }
  const int64_t groups = count(scalars) / kAdamWScalars;
  if (groups > kMaxGridYZ) return too_many_groups(groups, kMaxGridYZ);
  ffi::ErrorOr<AdamWBuffers> buffers = adamw_buffers(operands, results, weight_decays.size());
  if (buffers.has_error()) return buffers.error();
  if (groups == 0 || buffers->count == 0) return ffi::Error::Success();
  return dispatch_adamw(*buffers, [&](auto param_type, auto grad_type, auto copy_type) {
    using P = typename decltype(param_type)::type;
    using G = typename decltype(grad_type)::type;
    using C = typename decltype(copy_type)::type;
    if (ffi::Error error = check_adamw<P, G, C>(*buffers, scalars, groups); error.failure()) {
      return error;
    }
    std::vector<AdamWLeaf> leaves;
    const cudaError_t copied = adamw_leaves(stream, *buffers, weight_decays, groups, &leaves);
    if (copied != cudaSuccess) return to_ffi_error(copied);
    const uint32_t* seeds =
        buffers->has_seeds() ? data<uint32_t>(buffers->operands.back()) : nullptr;
    return to_ffi_error(AdamW<P, G, C>::update(stream, leaves, data<float>(scalars), seeds,
                                               buffers->count,
                                               {b1, one_minus_b1, b2, one_minus_b2, eps}, groups));
  });
}

template <typename T>
constexpr LeafType kLeafType = std::is_same_v<T, float>           ? LeafType::kFloat
                               : std::is_same_v<T, __nv_bfloat16> ? LeafType::kBFloat16
                                                                  : LeafType::kHalf;

ffi::Error GlobalNormImpl(cudaStream_t stream, ffi::RemainingArgs operands, Result norm,
                          Result partial, int64_t chunk) {
  const int64_t groups = count(*norm);
  if (groups > kMaxGridYZ) return too_many_groups(groups, kMaxGridYZ);
  if (chunk < kNormChunkStep || chunk % kNormChunkStep != 0) {
    return ffi::Error::InvalidArgument("chunk is no multiple of 2048");
  }
  std::vector<NormLeaf> leaves;
  for (size_t i = 0; i < operands.size() && groups > 0; ++i) {
    const auto operand = operands.get<Buffer>(i);
    if (operand.has_error()) return operand.error();
    ffi::Error error = check_leading_axes(*operand, "a leaf", *norm, "norm");
    if (error.failure()) return error;
    error = dispatch_floating(*operand, "a leaf", [&](auto type) {
      using T = typename decltype(type)::type;
      leaves.push_back({data<T>(*operand), count(*operand) / groups, kLeafType<T>});
      return ffi::Error::Success();
    });
    if (error.failure()) return error;
  }
  const int64_t partials = global_norm_partials(leaves, chunk);
  return check_and_launch(
      {
          {"norm", *norm, ffi::F32, groups},
          {"partial", *partial, ffi::F32, groups * partials},
      },
      [&] {
        return global_norm(stream, leaves, data<float>(norm), data<float>(partial), partials, chunk,
                           groups);
      });
}

}  // namespace

JAXLLM_HANDLER(AdamwUpdate, AdamwUpdateImpl, "b1", "one_minus_b1", "b2", "one_minus_b2", "eps",
               "weight_decays");
JAXLLM_HANDLER(GlobalNorm, GlobalNormImpl, "chunk");

}  // namespace jaxllm
