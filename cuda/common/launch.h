// What launchers share: the early return on an error, the facts that decide about a launch, sizes
// of grids, the launch.
//
// The host decides about a launch once, from what the device has (DeviceLimits) and what the code
// that runs there was compiled for (KernelImage). The second does not follow from the first: a
// kernel that the driver compiles from PTX for sm_80 behaves on sm_90 as on sm_80. So device code
// never chooses a size by __CUDA_ARCH__ that the host chooses too; it gets the choice as a template
// argument or a parameter.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

// Returns from the enclosing function where a CUDA call failed.
#define JAXLLM_RETURN_IF_ERROR(expression)                  \
  do {                                                      \
    const cudaError_t jaxllm_status = (expression);         \
    if (jaxllm_status != cudaSuccess) return jaxllm_status; \
  } while (false)

namespace jaxllm {

// What the current device has. JAXLLM_MAX_SMS in the environment lowers the number of SMs, and
// JAXLLM_MAX_SHARED_KIB the shared memory of a CTA, so that a test on a large GPU takes the
// decisions of a small one. With less shared memory a GPU does not count as a Hopper GPU.
struct DeviceLimits {
  int sms = 0;                    // streaming multiprocessors
  int shared_bytes = 0;           // the shared memory of a CTA at most, static and dynamic
  int shared_bytes_of_sm = 0;     // the shared memory of an SM
  int reserved_shared_bytes = 0;  // what the system takes of it for each CTA
  int capability = 0;             // 90 for sm_90

  cudaError_t read();
};

// The image of a kernel that runs on the current device.
struct KernelImage {
  int architecture = 0;          // compiled for: 90 where __CUDA_ARCH__ was 900
  int registers = 0;             // of a thread
  int static_shared_bytes = 0;   // of a CTA
  int dynamic_shared_bytes = 0;  // of a CTA at most, in addition; the kernel is allowed as much

  // Clusters, programmatic dependent launch and bulk copies are instructions of sm_90.
  bool has_clusters() const { return architecture >= 90; }
  bool has_bulk_copies() const { return architecture >= 90; }

  // The first call for a kernel and a device also raises the kernel's limit of dynamic shared
  // memory to the device's. Later calls are a look-up, so host threads do not race for the limit.
  // Returns cudaErrorNoKernelImageForDevice where no image fits.
  cudaError_t read(const void* kernel);
  template <class Kernel>
  cudaError_t read(Kernel* kernel) {
    return read(reinterpret_cast<const void*>(kernel));
  }
};

// How many CTAs of a kernel an SM holds at once (the occupancy). The first call asks the driver,
// and later ones look up.
cudaError_t find_resident_ctas(const void* kernel, int threads, int64_t shared_bytes, int* ctas);
template <class Kernel>
cudaError_t find_resident_ctas(Kernel* kernel, int threads, int64_t shared_bytes, int* ctas) {
  return find_resident_ctas(reinterpret_cast<const void*>(kernel), threads, shared_bytes, ctas);
}

// How many clusters of `size` CTAs of a kernel run at once on the current device, with at most one
// CTA for each SM. A CTA has `threads` threads and `shared` bytes of dynamic shared memory. The
// first call asks the driver, and later ones look up.
cudaError_t find_resident_clusters(const void* kernel, int size, int threads, size_t shared,
                                   int* clusters);
template <class Kernel>
cudaError_t find_resident_clusters(Kernel* kernel, int size, int threads, size_t shared,
                                   int* clusters) {
  return find_resident_clusters(reinterpret_cast<const void*>(kernel), size, threads, shared,
                                clusters);
}

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a kernel is launched.
struct Launch {
  dim3 grid, block;
  size_t shared = 0;  // dynamic shared memory of a CTA, in bytes
  int cluster = 1;    // CTAs of a cluster, along x
  // Programmatic dependent launch: may start before the kernel before it on the stream has ended,
  // and must call wait_on_dependent_grids. Ignored for images before sm_90.
  bool pdl = false;
  // All CTAs run at once, or the launch fails: for kernels whose CTAs wait for one another.
  bool cooperative = false;
};

// Launches a kernel with its parameters at `parameters`.
cudaError_t launch_with_parameters(cudaStream_t stream, const void* kernel, const Launch& launch,
                                   void** parameters);

// The arguments are converted as in a call.
template <class... Parameters, class... Arguments>
cudaError_t launch_kernel(cudaStream_t stream, void (*kernel)(Parameters...), const Launch& launch,
                          const Arguments&... arguments) {
  return [&](Parameters... parameters) {
    void* addresses[] = {const_cast<void*>(static_cast<const void*>(&parameters))...};
    return launch_with_parameters(stream, reinterpret_cast<const void*>(kernel), launch, addresses);
  }(arguments...);
}

}  // namespace jaxllm
