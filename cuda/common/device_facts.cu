#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <thread>

#include "common/device_facts.h"
#include "gemm/hopper/matmul_hopper.h"

namespace jaxllm {
namespace {

// All sources are compiled for the same architectures, so the image of this kernel says which one
// the driver chooses for all kernels. Its number of threads tells an image for sm_90a from one for
// sm_90.
constexpr int kThreadsOfSm90a = 64;
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int kMaxThreads = kThreadsOfSm90a;
#else
constexpr int kMaxThreads = 32;
#endif

__global__ void __launch_bounds__(kMaxThreads) image_probe_kernel() {}

cudaError_t find_facts(DeviceFacts* facts) {
  JAXLLM_RETURN_IF_ERROR(facts->limits.read());
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, image_probe_kernel);
  switch (status) {
    case cudaSuccess:
      break;
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorUnsupportedPtxVersion:  // PTX that is newer than the driver
      cudaGetLastError();                 // else the next launch would report it
      return cudaSuccess;
    default:
      return status;
  }
  facts->image = attributes.ptxVersion;
  facts->has_sm90a = attributes.maxThreadsPerBlock == kThreadsOfSm90a;
  if (!facts->has_sm90a) return cudaSuccess;
  int of_bfloat16 = 0, of_float16 = 0;
  JAXLLM_RETURN_IF_ERROR(MatmulHopper<__nv_bfloat16>::row_clusters(&of_bfloat16));
  JAXLLM_RETURN_IF_ERROR(MatmulHopper<__half>::row_clusters(&of_float16));
  facts->clusters = std::min(of_bfloat16, of_float16);
  return cudaSuccess;
}

}  // namespace

cudaError_t find_device_facts(int ordinal, DeviceFacts* facts) {
  // In a separate thread, with its own current device. To switch back to the previous device would
  // create a context there, on a GPU that this process may not be allowed to use.
  cudaError_t status = cudaSuccess;
  std::thread([&] {
    status = cudaSetDevice(ordinal);
    if (status == cudaSuccess) status = find_facts(facts);
  }).join();
  return status;
}

}  // namespace jaxllm
