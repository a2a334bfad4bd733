// SwiGLU of one element and its gradients, as elementwise.cuh calls them.
#pragma once

#include "activation/functions.cuh"

namespace jaxllm {

// Of a gate and what it gates.
struct SwigluForward {
  __device__ __forceinline__ void operator()(const float (&in)[2], float (&out)[1]) const {
    out[0] = silu(in[0]) * in[1];
  }
};

// Of these and the gradient of the result.
struct SwigluBackward {
  __device__ __forceinline__ void operator()(const float (&in)[3], float (&out)[2]) const {
    const float gate = in[0], up = in[1], dout = in[2];
    const float s = logistic(gate), silu = gate * s;
    out[0] = dout * up * (s + silu * (1.0f - s));
    out[1] = dout * silu;
  }
};

}  // namespace jaxllm
