// FFI handlers of the embedding kernels: check the buffers, switch on their dtype, launch.
#include "common/ffi.h"

#include "embedding/embed.h"
#include "handlers.h"

namespace jaxllm {
namespace {

using Buffer = ffi::AnyBuffer;
using Result = ffi::Result<ffi::AnyBuffer>;

// The last axes of the tables and of the embeddings give the sizes. jax.vmap gives every buffer new
// leading axes: those of the token table count the groups.
ffi::ErrorOr<EmbedShape> shape_of(ffi::Span<const int64_t> token_table,
                                  ffi::Span<const int64_t> position_table,
                                  ffi::Span<const int64_t> embeddings) {
  const size_t axes = token_table.size();
  if (axes < 2 || position_table.size() != axes || embeddings.size() < axes) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("a table has too few axes"));
  }
  EmbedShape shape;
  shape.vocabulary = token_table[axes - 2];
  shape.positions = position_table[axes - 2];
  shape.width = token_table[axes - 1];
  shape.length = embeddings[embeddings.size() - 2];
  shape.groups = shape.sequences = 1;
  for (size_t i = 0; i + 2 < embeddings.size(); ++i) {
    (i + 2 < axes ? shape.groups : shape.sequences) *= embeddings[i];
  }
  return shape;
}

ffi::Error EmbedForwardImpl(cudaStream_t stream, Buffer tokens, Buffer token_table,
                            Buffer position_table, Result out) {
  const ffi::ErrorOr<EmbedShape> shape =
      shape_of(token_table.dimensions(), position_table.dimensions(), out->dimensions());
  if (shape.has_error()) return shape.error();
  return dispatch_floating(token_table.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(Embed<T>::forward(stream, data<int32_t>(tokens), data<T>(token_table),
                                          data<T>(position_table), data<T>(out), *shape));
  });
}

// dtoken_table takes the place of dtable, what it is to be added to, if that has elements.
ffi::Error EmbedBackwardImpl(cudaStream_t stream, Buffer tokens, Buffer dout, Buffer dtable,
                             Result dtoken_table, Result dposition_table, Result tile_counts,
                             Result pairs, Result places, Result starts, Result partial,
                             int64_t buckets, int64_t slots) {
  ffi::ErrorOr<EmbedShape> shape =
      shape_of(dtoken_table->dimensions(), dposition_table->dimensions(), dout.dimensions());
  if (shape.has_error()) return shape.error();
  const bool adds = dtable.element_count() > 0;
  if (adds && dtable.untyped_data() != dtoken_table->untyped_data()) {
    return ffi::Error::InvalidArgument("dtoken_table is not in the place of dtable");
  }
  shape->buckets = buckets;
  shape->slots = slots;
  const EmbedWorkspace workspace{data<int32_t>(tile_counts), data<int32_t>(pairs),
                                 data<int32_t>(places), data<int32_t>(starts),
                                 data<float>(partial)};
  return dispatch_floating(dout.element_type(), [&](auto type) {
    using T = typename decltype(type)::type;
    return to_ffi_error(Embed<T>::backward(stream, data<int32_t>(tokens), data<T>(dout),
                                           data<T>(dtoken_table), adds, data<T>(dposition_table),
                                           workspace, *shape));
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EmbedForward, EmbedForwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Buffer>()   // tokens
                                  .Arg<Buffer>()   // token_table
                                  .Arg<Buffer>()   // position_table
                                  .Ret<Buffer>(),  // out
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(EmbedBackward, EmbedBackwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<Buffer>()  // tokens
                                  .Arg<Buffer>()  // dout
                                  .Arg<Buffer>()  // dtable
                                  .Ret<Buffer>()  // dtoken_table
                                  .Ret<Buffer>()  // dposition_table
                                  .Ret<Buffer>()  // tile_counts
                                  .Ret<Buffer>()  // pairs
                                  .Ret<Buffer>()  // places
                                  .Ret<Buffer>()  // starts
                                  .Ret<Buffer>()  // partial
                                  .Attr<int64_t>("buckets")
                                  .Attr<int64_t>("slots"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxllm
