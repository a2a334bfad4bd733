// FFI handlers of the optimizer's kernels. Their buffers are the leaves of trees, any number.
#include "common/ffi.h"

#include <vector>

#include "handlers.h"
#include "optimizer/adamw_update.h"
#include "optimizer/global_norm.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

constexpr int64_t kMaxGroups = 65535;  // they are the y axis of a grid

ffi::Error too_many(int64_t groups) {
  return ffi::Error::InvalidArgument("jax.vmap maps over " + std::to_string(groups) +
                                     " calls; at most 65535 are supported");
}

// Reads the leaves: `operands` are params, grads, ms, vs and perhaps one array of seeds, `results`
// params, ms, vs and perhaps copies, one after the other.
ffi::ErrorOr<std::vector<AdamWLeaf>> adamw_leaves(ffi::RemainingArgs operands,
                                                  ffi::RemainingRets results,
                                                  ffi::Span<const float> weight_decays,
                                                  int64_t groups) {
  const size_t count = weight_decays.size();
  const bool has_copy = results.size() == 4 * count;
  if (operands.size() < 4 * count || (results.size() != 3 * count && !has_copy)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("the trees have unequal numbers of leaves"));
  }
  std::vector<AdamWLeaf> leaves(count);
  for (size_t i = 0; i < count; ++i) {
    void* in_place[3];
    for (size_t k = 0; k < 3; ++k) {
      // The gradients stand between the params and ms, and no result is written over them.
      const auto operand = operands.get<Buffer>((k == 0 ? 0 : k + 1) * count + i);
      auto result = results.get<Buffer>(k * count + i);
      if (operand.has_error()) return ffi::Unexpected(operand.error());
      if (result.has_error()) return ffi::Unexpected(result.error());
      in_place[k] = (*result)->untyped_data();
      if (in_place[k] != operand->untyped_data()) {
        return ffi::Unexpected(ffi::Error::InvalidArgument("a result does not alias its operand"));
      }
    }
    const auto grad = operands.get<Buffer>(count + i);
    if (grad.has_error()) return ffi::Unexpected(grad.error());
    void* copy = nullptr;
    if (has_copy) {
      auto result = results.get<Buffer>(3 * count + i);
      if (result.has_error()) return ffi::Unexpected(result.error());
      copy = (*result)->untyped_data();
    }
    leaves[i] = AdamWLeaf{in_place[0],
                          grad->untyped_data(),
                          static_cast<float*>(in_place[1]),
                          static_cast<float*>(in_place[2]),
                          copy,
                          static_cast<int64_t>(grad->element_count()) / groups,
                          weight_decays[i],
                          static_cast<int>(i)};
  }
  return leaves;
}

// Calls `launch(Type<P>, Type<G>, Type<C>)` with the dtypes of the params, of the gradients (that
// of the params or float32, beside float32 any) and of the copies (16 bits; any where none are).
template <class Launch>
ffi::Error dispatch_adamw(ffi::DataType param, ffi::DataType grad, ffi::DataType copy,
                          Launch launch) {
  return dispatch_floating(param, [&](auto param_type) {
    return dispatch_floating(grad, [&](auto grad_type) {
      using P = typename decltype(param_type)::type;
      using G = typename decltype(grad_type)::type;
      if constexpr (std::is_same_v<P, float>) {
        if (copy == ffi::F16) return to_ffi_error(launch(param_type, grad_type, Type<__half>{}));
        return to_ffi_error(launch(param_type, grad_type, Type<__nv_bfloat16>{}));
      } else if constexpr (std::is_same_v<G, P> || std::is_same_v<G, float>) {
        return to_ffi_error(launch(param_type, grad_type, param_type));
      } else {
        return ffi::Error::InvalidArgument("grad has neither the dtype of param nor float32");
      }
    });
  });
}

ffi::Error AdamwUpdateImpl(cudaStream_t stream, Buffer scalars, ffi::RemainingArgs operands,
                           ffi::RemainingRets results, float b1, float one_minus_b1, float b2,
                           float one_minus_b2, float eps, ffi::Span<const float> weight_decays) {
  const int64_t groups = scalars.element_count() / kAdamWScalars;
  if (groups == 0 || weight_decays.size() == 0) return ffi::Error::Success();
  if (groups > kMaxGroups) return too_many(groups);
  const auto leaves = adamw_leaves(operands, results, weight_decays, groups);
  if (leaves.has_error()) return leaves.error();
  const size_t count = weight_decays.size();
  const ffi::DataType copy =
      results.size() == 4 * count ? (*results.get<Buffer>(3 * count))->element_type() : ffi::BF16;
  const uint32_t* seeds = nullptr;
  if (operands.size() > 4 * count) seeds = data<uint32_t>(*operands.get<Buffer>(4 * count));
  return dispatch_adamw(
      operands.get<Buffer>(0)->element_type(), operands.get<Buffer>(count)->element_type(), copy,
      [&](auto param_type, auto grad_type, auto copy_type) {
        using P = typename decltype(param_type)::type;
        using G = typename decltype(grad_type)::type;
        using C = typename decltype(copy_type)::type;
        return AdamW<P, G, C>::update(stream, *leaves, data<float>(scalars), seeds, count,
                                      {b1, one_minus_b1, b2, one_minus_b2, eps}, groups);
      });
}

ffi::Error GlobalNormImpl(cudaStream_t stream, ffi::RemainingArgs operands, Result norm,
                          Result partial, int64_t chunk) {
  const int64_t groups = norm->element_count();
  if (groups == 0) return ffi::Error::Success();
  if (groups > kMaxGroups) return too_many(groups);
  std::vector<NormLeaf> leaves;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto operand = operands.get<Buffer>(i);
    if (operand.has_error()) return operand.error();
    LeafType type;
    switch (operand->element_type()) {
      case ffi::F32:
        type = LeafType::kFloat;
        break;
      case ffi::BF16:
        type = LeafType::kBFloat16;
        break;
      case ffi::F16:
        type = LeafType::kHalf;
        break;
      default:
        return ffi::Error::InvalidArgument("dtype is not float32, bfloat16 or float16");
    }
    leaves.push_back(
        {operand->untyped_data(), static_cast<int64_t>(operand->element_count()) / groups, type});
  }
  const int64_t partials = partial->element_count() / groups;
  if (chunk < 1 || partials < global_norm_partials(leaves, chunk)) {
    return ffi::Error::InvalidArgument("the workspace has too few partial sums");
  }
  return to_ffi_error(global_norm(stream, leaves, data<float>(norm), data<float>(partial), partials,
                                  chunk, groups));
}

auto stream_binding() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(AdamwUpdate, AdamwUpdateImpl,
                              stream_binding()
                                  .Arg<Buffer>()    // scalars
                                  .RemainingArgs()  // params, grads, ms, vs; perhaps seeds
                                  .RemainingRets()  // params, ms, vs, copies
                                  .Attr<float>("b1")
                                  .Attr<float>("one_minus_b1")
                                  .Attr<float>("b2")
                                  .Attr<float>("one_minus_b2")
                                  .Attr<float>("eps")
                                  .Attr<ffi::Span<const float>>("weight_decays"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(GlobalNorm, GlobalNormImpl,
                              stream_binding()
                                  .RemainingArgs()  // the tree
                                  .Ret<Buffer>()    // norm
                                  .Ret<Buffer>()    // partial
                                  .Attr<int64_t>("chunk"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
