// The Python extension `_cuda`: the FFI handlers as capsules, and what they were built with.
#include <nanobind/nanobind.h>

#include "handlers.h"

namespace nb = nanobind;

namespace jaxllm {
namespace {

nb::dict registrations() {
  nb::dict targets;
#define JAXLLM_REGISTER(name, Handler) \
  targets["jaxllm_" #name] = nb::capsule(reinterpret_cast<void*>(Handler));
  JAXLLM_HANDLERS(JAXLLM_REGISTER)
#undef JAXLLM_REGISTER
  return targets;
}

// The values come from CMakeLists.txt.
nb::dict build_facts() {
  nb::dict facts;
  facts["cuda"] = JAXLLM_CUDA_VERSION;
  facts["architectures"] = JAXLLM_CUDA_ARCHITECTURES;
  facts["jaxlib"] = JAXLLM_JAXLIB_VERSION;
  return facts;
}

}  // namespace
}  // namespace jaxllm

NB_MODULE(_cuda, module) {
  module.def("registrations", &jaxllm::registrations,
             "FFI targets by name, as capsules for jax.ffi.register_ffi_target.");
  module.def("build_facts", &jaxllm::build_facts,
             "The CUDA version, GPU architectures and jaxlib version of this build.");
}
