// The Python extension `_cuda`: the FFI handlers as capsules, and what they were built with.
#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>

#include "common/device_facts.h"
#include "common/shared_needs.h"
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

// By the names of the fields of jaxllm.core.ffi.Device.
nb::dict describe(const DeviceFacts& found) {
  nb::dict facts;
  facts["capability"] = found.limits.capability;
  facts["multiprocessors"] = found.limits.sms;
  facts["shared_bytes"] = found.limits.shared_bytes;
  facts["image"] = found.image;
  facts["has_sm90a"] = found.has_sm90a;
  facts["clusters"] = found.clusters;
  return facts;
}

nb::dict device_facts(int ordinal) {
  DeviceFacts found;
  if (const cudaError_t status = find_device_facts(ordinal, &found)) {
    throw std::runtime_error("device " + std::to_string(ordinal) + ": " +
                             cudaGetErrorString(status));
  }
  return describe(found);
}

nb::dict shared_needs() {
  nb::dict needs;
  for (const auto& [kernel, bytes] : SharedNeed::all()) needs[kernel.c_str()] = bytes;
  return needs;
}

nb::list device_fact_names() { return describe({}).keys(); }

}  // namespace
}  // namespace jaxllm

NB_MODULE(_cuda, module) {
  module.def("registrations", &jaxllm::registrations,
             "FFI targets by name, as capsules for jax.ffi.register_ffi_target.");
  module.def("build_facts", &jaxllm::build_facts,
             "The CUDA version, GPU architectures and jaxlib version of this build.");
  module.def("device_facts", &jaxllm::device_facts,
             "What launchers know of the GPU with this ordinal of the CUDA runtime.");
  module.def("device_fact_names", &jaxllm::device_fact_names,
             "The keys of device_facts, by which Python detects an extension of older sources.");
  module.def("shared_needs", &jaxllm::shared_needs,
             "The shared memory, in bytes, of kernels that need a fixed amount.");
}
