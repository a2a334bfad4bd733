// Every FFI handler: the table of contents of the C++ side.
#pragma once

#include "xla/ffi/api/c_api.h"

// The FFI target is "jaxllm_" and the first name; the handler is the second.
#define JAXLLM_HANDLERS(HANDLER)                         \
  HANDLER(layer_norm_forward, LayerNormForward)          \
  HANDLER(layer_norm_backward, LayerNormBackward)        \
  HANDLER(add_layer_norm_forward, AddLayerNormForward)   \
  HANDLER(add_layer_norm_backward, AddLayerNormBackward) \
  HANDLER(rms_norm_forward, RmsNormForward)              \
  HANDLER(rms_norm_backward, RmsNormBackward)            \
  HANDLER(add_rms_norm_forward, AddRmsNormForward)       \
  HANDLER(add_rms_norm_backward, AddRmsNormBackward)     \
  HANDLER(embed_forward, EmbedForward)                   \
  HANDLER(embed_backward, EmbedBackward)                 \
  HANDLER(rope_forward, RopeForward)                     \
  HANDLER(rope_backward, RopeBackward)

namespace jaxllm {

#define JAXLLM_DECLARE(name, Handler) extern "C" XLA_FFI_Error* Handler(XLA_FFI_CallFrame*);
JAXLLM_HANDLERS(JAXLLM_DECLARE)
#undef JAXLLM_DECLARE

}  // namespace jaxllm
