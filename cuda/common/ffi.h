// What FFI handlers share: views of XLA's buffers, checks, the switch over dtypes, errors,
// bindings.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace jaxllm {

namespace ffi = xla::ffi;

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// The elements of a buffer that holds T, whatever name XLA has for it.
template <typename T>
const T* data(const ffi::AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}
template <typename T>
T* data(ffi::Result<ffi::AnyBuffer>& buffer) {
  return static_cast<T*>(buffer->untyped_data());
}

// An operand or a result without elements, and without data: an optional buffer that is not there.
inline Buffer no_buffer() {
  static int64_t no_elements = 0;
  static XLA_FFI_Buffer buffer = [] {
    XLA_FFI_Buffer none = {};
    none.rank = 1;
    none.dims = &no_elements;
    return none;
  }();
  return Buffer(&buffer);
}

inline ffi::Error to_ffi_error(cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("CUDA error: ") + cudaGetErrorString(status));
}

// Makes `result` hold what `operand` does, for a kernel that works in place. As a rule XLA gives an
// operand and the result that aliases it one buffer, and nothing is to be done. But it passes a
// slice of a larger array as a view into that array, with a separate result: then this copies.
inline cudaError_t copy_unless_aliased(cudaStream_t stream, const ffi::AnyBuffer& operand,
                                       ffi::Result<ffi::AnyBuffer>& result) {
  if (operand.untyped_data() == result->untyped_data()) return cudaSuccess;
  if (operand.size_bytes() != result->size_bytes()) return cudaErrorInvalidValue;
  return cudaMemcpyAsync(result->untyped_data(), operand.untyped_data(), operand.size_bytes(),
                         cudaMemcpyDeviceToDevice, stream);
}

// Carries a type into a generic lambda.
template <typename T>
struct Type {
  using type = T;
};

// The name that NumPy has for a dtype, for error messages.
inline std::string dtype_name(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::F32:
      return "float32";
    case ffi::BF16:
      return "bfloat16";
    case ffi::F16:
      return "float16";
    case ffi::S8:
      return "int8";
    case ffi::U8:
      return "uint8";
    case ffi::S16:
      return "int16";
    case ffi::U16:
      return "uint16";
    case ffi::S32:
      return "int32";
    case ffi::U32:
      return "uint32";
    case ffi::S64:
      return "int64";
    case ffi::F64:
      return "float64";
    case ffi::PRED:
      return "bool";
    default:
      return "number " + std::to_string(static_cast<int>(dtype));
  }
}

// XLA's dtype for a C++ type.
template <typename T>
constexpr ffi::DataType dtype_of() = delete;
template <>
constexpr ffi::DataType dtype_of<float>() {
  return ffi::F32;
}
template <>
constexpr ffi::DataType dtype_of<__nv_bfloat16>() {
  return ffi::BF16;
}
template <>
constexpr ffi::DataType dtype_of<__half>() {
  return ffi::F16;
}
template <>
constexpr ffi::DataType dtype_of<int8_t>() {
  return ffi::S8;
}
template <>
constexpr ffi::DataType dtype_of<int32_t>() {
  return ffi::S32;
}
template <>
constexpr ffi::DataType dtype_of<uint32_t>() {
  return ffi::U32;
}

// The checks of a handler. A wrong dtype or size would make a kernel read or write beyond a buffer.
// So each handler, before its first launch,
//
//   1. takes the sizes of the call from the dimensions of one or two buffers;
//   2. lists every buffer, operands, results and workspaces, with the dtype and the number of
//      elements that the kernel reads or writes there:
//
//        return check_and_launch(
//            {
//                {"x", x, dtype_of<T>(), rows * width},
//                {"bias", bias, ffi::F32, width, Elements::kExactlyOrNone},
//                {"out", *out, dtype_of<T>(), rows * width},
//            },
//            [&] { return launch(stream, data<T>(x), ...); });
//
// The error is InvalidArgument and names the buffer, what it has, and what it should have. No
// integer division by a size that may be zero comes before the list.

// How the number of elements of a buffer is compared.
enum class Elements {
  kExactly,
  kExactlyOrNone,  // an optional buffer: no elements stand for no buffer
};

// What a kernel takes one buffer to be. A Result is given as `*result`.
struct BufferCheck {
  const char* name;
  ffi::AnyBuffer buffer;
  ffi::DataType dtype;
  int64_t count;
  Elements elements = Elements::kExactly;
};

inline int64_t count(const ffi::AnyBuffer& buffer) {
  return static_cast<int64_t>(buffer.element_count());
}

// How many matrices an array holds: jax.vmap gives every buffer of a call the same new leading
// axes, and the call is one for each of them. Of at least two axes.
inline int64_t count_matrices(const ffi::AnyBuffer& buffer) {
  const auto sizes = buffer.dimensions();
  int64_t matrices = 1;
  for (size_t i = 0; i + 2 < sizes.size(); ++i) matrices *= sizes[i];
  return matrices;
}

// "name has dtype int32; float32 is required", or success.
inline ffi::Error check_dtype(const ffi::AnyBuffer& buffer, ffi::DataType dtype, const char* name) {
  if (buffer.element_type() == dtype) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(name) + " has dtype " +
                                     dtype_name(buffer.element_type()) + "; " + dtype_name(dtype) +
                                     " is required");
}

// "name has 3 elements; 4 are required", or success.
inline ffi::Error check_count(const ffi::AnyBuffer& buffer, int64_t required, const char* name,
                              Elements elements = Elements::kExactly) {
  const int64_t has = count(buffer);
  const bool is_absent = elements == Elements::kExactlyOrNone && has == 0;
  if (has == required || is_absent) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(name) + " has " + std::to_string(has) +
                                     " elements; " + std::to_string(required) + " are required");
}

inline ffi::Error check_buffer(const BufferCheck& check) {
  // The dtype of an optional buffer that is not there does not matter.
  if (check.elements == Elements::kExactlyOrNone && count(check.buffer) == 0) {
    return ffi::Error::Success();
  }
  ffi::Error error = check_dtype(check.buffer, check.dtype, check.name);
  if (error.success()) error = check_count(check.buffer, check.count, check.name, check.elements);
  return error;
}

// The first failure, or success.
inline ffi::Error check_buffers(std::initializer_list<BufferCheck> checks) {
  for (const BufferCheck& check : checks) {
    if (ffi::Error error = check_buffer(check); error.failure()) return error;
  }
  return ffi::Error::Success();
}

// The same; where all buffers pass, calls `launch`, which returns a CUDA status.
template <class Launch>
ffi::Error check_and_launch(std::initializer_list<BufferCheck> checks, Launch launch) {
  ffi::Error error = check_buffers(checks);
  return error.failure() ? error : to_ffi_error(launch());
}

// InvalidArgument about one buffer: "name" and what is wrong with it.
inline ffi::Error invalid(const std::string& name, const std::string& what) {
  return ffi::Error::InvalidArgument(name + " " + what);
}

// The error of a call that jax.vmap maps over more groups than a grid's axis has blocks.
inline ffi::Error too_many_groups(int64_t groups, int64_t most) {
  return ffi::Error::InvalidArgument("jax.vmap maps over " + std::to_string(groups) +
                                     " calls; at most " + std::to_string(most) + " are supported");
}

// Whether `buffer` begins with the axes of `outer`, except for the last `inner` axes of `outer`.
// jax.vmap gives all buffers the same new leading axes. A handler that counts the groups of a call
// by the elements of a small buffer checks with this that a large buffer has the same groups.
inline bool has_leading_axes(const ffi::AnyBuffer& buffer, const ffi::AnyBuffer& outer,
                             size_t inner = 0) {
  const auto axes = buffer.dimensions(), of_outer = outer.dimensions();
  if (of_outer.size() < inner || axes.size() < of_outer.size() - inner) return false;
  for (size_t i = 0; i + inner < of_outer.size(); ++i) {
    if (axes[i] != of_outer[i]) return false;
  }
  return true;
}

// "buffer has other leading axes than outer", or success.
inline ffi::Error check_leading_axes(const ffi::AnyBuffer& buffer, const char* name,
                                     const ffi::AnyBuffer& outer, const char* outer_name,
                                     size_t inner = 0) {
  if (has_leading_axes(buffer, outer, inner)) return ffi::Error::Success();
  return invalid(name, std::string("has other leading axes than ") + outer_name);
}

// Calls `launch(Type<T>)` with the C++ type of the floating dtype of a buffer; returns its error.
template <class Launch>
ffi::Error dispatch_floating(const ffi::AnyBuffer& buffer, const char* name, Launch launch) {
  switch (buffer.element_type()) {
    case ffi::F32:
      return launch(Type<float>{});
    case ffi::BF16:
      return launch(Type<__nv_bfloat16>{});
    case ffi::F16:
      return launch(Type<__half>{});
    default:
      return ffi::Error::InvalidArgument(std::string(name) + " has dtype " +
                                         dtype_name(buffer.element_type()) +
                                         "; float32, bfloat16 or float16 is required");
  }
}

template <class Parameter>
inline constexpr bool kIsAttribute =
    !std::is_same_v<Parameter, cudaStream_t> && !std::is_same_v<Parameter, Buffer> &&
    !std::is_same_v<Parameter, Result> && !std::is_same_v<Parameter, ffi::RemainingArgs> &&
    !std::is_same_v<Parameter, ffi::RemainingRets> && !std::is_same_v<Parameter, ffi::Dictionary>;

template <class Parameter, class Binding>
auto bind_parameter(Binding&& binding, const char* name) {
  if constexpr (std::is_same_v<Parameter, cudaStream_t>) {
    return std::move(binding).template Ctx<ffi::PlatformStream<cudaStream_t>>();
  } else if constexpr (std::is_same_v<Parameter, Buffer>) {
    return std::move(binding).template Arg<Buffer>();
  } else if constexpr (std::is_same_v<Parameter, Result>) {
    return std::move(binding).template Ret<Buffer>();
  } else if constexpr (std::is_same_v<Parameter, ffi::RemainingArgs>) {
    return std::move(binding).RemainingArgs();
  } else if constexpr (std::is_same_v<Parameter, ffi::RemainingRets>) {
    return std::move(binding).RemainingRets();
  } else if constexpr (std::is_same_v<Parameter, ffi::Dictionary>) {
    return std::move(binding).Attrs();
  } else {
    return std::move(binding).template Attr<Parameter>(name);
  }
}

template <class Parameter, class... Rest, class Binding>
auto bind_parameters(Binding&& binding, const char* const* name) {
  if constexpr (sizeof...(Rest) == 0) {
    return bind_parameter<Parameter>(std::move(binding), *name);
  } else {
    return bind_parameters<Rest...>(bind_parameter<Parameter>(std::move(binding), *name),
                                    name + kIsAttribute<Parameter>);
  }
}

// The binding of a handler, from the parameters of its implementation: the stream, operands
// (Buffer), results (Result), and attributes (any other type), which have these names in order.
// RemainingArgs, RemainingRets and Dictionary stand for all that are left.
template <class... Parameters, class... Names>
auto bind(ffi::Error (*)(Parameters...), Names... names) {
  static_assert((0 + ... + kIsAttribute<Parameters>) == sizeof...(Names));
  const char* const list[] = {names..., nullptr};
  return bind_parameters<Parameters...>(ffi::Ffi::Bind(), list);
}

// Defines a handler by its implementation and the names of its attributes, in order. A handler only
// launches, so that XLA may record it into a CUDA graph. cmake/handlers.cmake lists the handlers.
#define JAXLLM_HANDLER(name, implementation, ...)                                          \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, implementation, bind(implementation, ##__VA_ARGS__), \
                                {ffi::Traits::kCmdBufferCompatible})

}  // namespace jaxllm
