#include "common/launch.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <utility>

namespace jaxllm {
namespace {

// Facts that do not change while the process runs, each found once.
template <class Key, class Facts>
class Cache {
 public:
  // The facts of a key. The first call finds them by `find(Facts*)`; a failure is not kept.
  template <class Find>
  cudaError_t get(const Key& key, Facts* facts, Find find) {
    {
      const std::shared_lock lock(mutex_);
      const auto entry = entries_.find(key);
      if (entry != entries_.end()) return *facts = entry->second, cudaSuccess;
    }
    if (const cudaError_t status = find(facts)) {
      cudaGetLastError();  // else a later call would report the error
      return status;
    }
    const std::unique_lock lock(mutex_);
    entries_.emplace(key, *facts);
    return cudaSuccess;
  }

 private:
  std::shared_mutex mutex_;
  std::map<Key, Facts> entries_;
};

// The bound that an environment variable sets, if any.
int bound(const char* name) {
  const char* const text = std::getenv(name);
  const int value = text == nullptr ? 0 : std::atoi(text);
  return value > 0 ? value : INT32_MAX;
}

// Lowers the limits to those of a smaller GPU.
void lower_limits(DeviceLimits* limits) {
  limits->sms = std::min(limits->sms, bound("JAXLLM_MAX_SMS"));
  const int shared_kib = bound("JAXLLM_MAX_SHARED_KIB");
  if (shared_kib >= limits->shared_bytes >> 10) return;
  limits->shared_bytes = shared_kib << 10;
  limits->shared_bytes_of_sm = limits->shared_bytes + limits->reserved_shared_bytes;
  limits->capability = std::min(limits->capability, 86);  // no longer a Hopper GPU
}

cudaError_t find_limits(int device, DeviceLimits* limits) {
  const auto ask = [device](int* value, cudaDeviceAttr attribute) {
    return cudaDeviceGetAttribute(value, attribute, device);
  };
  int major = 0, minor = 0;
  JAXLLM_RETURN_IF_ERROR(ask(&limits->sms, cudaDevAttrMultiProcessorCount));
  JAXLLM_RETURN_IF_ERROR(ask(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin));
  JAXLLM_RETURN_IF_ERROR(
      ask(&limits->shared_bytes_of_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor));
  JAXLLM_RETURN_IF_ERROR(
      ask(&limits->reserved_shared_bytes, cudaDevAttrReservedSharedMemoryPerBlock));
  JAXLLM_RETURN_IF_ERROR(ask(&major, cudaDevAttrComputeCapabilityMajor));
  JAXLLM_RETURN_IF_ERROR(ask(&minor, cudaDevAttrComputeCapabilityMinor));
  limits->capability = 10 * major + minor;
  lower_limits(limits);
  return cudaSuccess;
}

cudaError_t find_image(const void* kernel, KernelImage* image) {
  DeviceLimits limits;
  cudaFuncAttributes attributes;
  JAXLLM_RETURN_IF_ERROR(limits.read());
  JAXLLM_RETURN_IF_ERROR(cudaFuncGetAttributes(&attributes, kernel));
  // Machine code too is made from PTX of this version, which __CUDA_ARCH__ follows.
  image->architecture = attributes.ptxVersion;
  image->registers = attributes.numRegs;
  image->static_shared_bytes = static_cast<int>(attributes.sharedSizeBytes);
  image->dynamic_shared_bytes = limits.shared_bytes - image->static_shared_bytes;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              image->dynamic_shared_bytes);
}

cudaError_t count_clusters(const void* kernel, int size, int threads, size_t shared,
                           int* clusters) {
  KernelImage image;  // also raises the limit of shared memory
  JAXLLM_RETURN_IF_ERROR(image.read(kernel));
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(size);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaOccupancyMaxActiveClusters(clusters, kernel, &config);
}

}  // namespace

cudaError_t DeviceLimits::read() {
  static Cache<int, DeviceLimits> cache;
  int device;
  JAXLLM_RETURN_IF_ERROR(cudaGetDevice(&device));
  return cache.get(device, this, [&](auto* limits) { return find_limits(device, limits); });
}

cudaError_t KernelImage::read(const void* kernel) {
  static Cache<std::pair<const void*, int>, KernelImage> cache;
  int device;
  JAXLLM_RETURN_IF_ERROR(cudaGetDevice(&device));
  return cache.get({kernel, device}, this, [&](auto* image) { return find_image(kernel, image); });
}

cudaError_t find_resident_clusters(const void* kernel, int size, int threads, size_t shared,
                                   int* clusters) {
  static Cache<std::tuple<const void*, int, int, int, size_t>, int> cache;
  int device;
  DeviceLimits limits;
  JAXLLM_RETURN_IF_ERROR(cudaGetDevice(&device));
  JAXLLM_RETURN_IF_ERROR(limits.read());
  JAXLLM_RETURN_IF_ERROR(
      cache.get({kernel, device, size, threads, shared}, clusters,
                [&](int* found) { return count_clusters(kernel, size, threads, shared, found); }));
  *clusters = std::min(*clusters, limits.sms / size);
  return cudaSuccess;
}

cudaError_t find_resident_ctas(const void* kernel, int threads, int64_t shared_bytes, int* ctas) {
  static Cache<std::tuple<const void*, int, int, int64_t>, int> cache;
  int device;
  KernelImage image;
  JAXLLM_RETURN_IF_ERROR(cudaGetDevice(&device));
  JAXLLM_RETURN_IF_ERROR(image.read(kernel));
  return cache.get({kernel, device, threads, shared_bytes}, ctas, [&](int* found) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(found, kernel, threads, shared_bytes);
  });
}

cudaError_t launch_with_parameters(cudaStream_t stream, const void* kernel, const Launch& launch,
                                   void** parameters) {
  KernelImage image;
  JAXLLM_RETURN_IF_ERROR(image.read(kernel));
  if (launch.cluster > 1 && !image.has_clusters()) return cudaErrorNotSupported;
  cudaLaunchAttribute attributes[3];
  cudaLaunchConfig_t config = {};
  config.gridDim = launch.grid;
  config.blockDim = launch.block;
  config.dynamicSmemBytes = launch.shared;
  config.stream = stream;
  config.attrs = attributes;
  if (launch.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
  }
  if (launch.pdl && image.architecture >= 90) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.cooperative) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  const cudaError_t status = cudaLaunchKernelExC(&config, kernel, parameters);
  if (status != cudaSuccess) cudaGetLastError();  // else a later call would report the error
  return status;
}

}  // namespace jaxllm
