// FFI handlers of the embedding kernels: check the buffers, switch on their dtype, launch.
#include "common/ffi.h"

#include <limits>

#include "common/launch.h"
#include "embedding/embed.h"
#include "handlers.h"

namespace jaxllm {
namespace {

// The sizes of a call, from the last axes of the tables and of the embeddings. jax.vmap gives every
// buffer new leading axes: those of the token table count the groups.
ffi::ErrorOr<EmbedShape> shape_of(const Buffer& token_table, const char* name,
                                  const Buffer& position_table, const Buffer& embeddings) {
  const auto of_tokens = token_table.dimensions(), of_positions = position_table.dimensions();
  const auto axes = embeddings.dimensions();
  const size_t table_axes = of_tokens.size();
  if (table_axes < 2 || of_positions.size() != table_axes || axes.size() < table_axes) {
    return ffi::Unexpected(invalid(name, "or what belongs to it has too few axes"));
  }
  ffi::Error error = check_leading_axes(embeddings, "the embeddings", token_table, name, 2);
  if (error.failure()) return ffi::Unexpected(error);
  EmbedShape shape;
  shape.vocabulary = of_tokens[table_axes - 2];
  shape.positions = of_positions[table_axes - 2];
  shape.width = of_tokens[table_axes - 1];
  shape.length = axes[axes.size() - 2];
  shape.groups = shape.sequences = 1;
  for (size_t i = 0; i + 2 < axes.size(); ++i) {
    (i + 2 < table_axes ? shape.groups : shape.sequences) *= axes[i];
  }
  if (shape.vocabulary < 1) return ffi::Unexpected(invalid(name, "has no rows"));
  if (shape.positions > 0 && shape.positions < shape.length) {
    return ffi::Unexpected(invalid(
        "the position table", "has " + std::to_string(shape.positions) + " rows; at least " +
                                  std::to_string(shape.length) + ", the length, are required"));
  }
  return shape;
}

int64_t tokens_of(const EmbedShape& shape) { return shape.groups * shape.tokens(); }

ffi::Error EmbedForwardImpl(cudaStream_t stream, Buffer tokens, Buffer token_table,
                            Buffer position_table, Result out) {
  const ffi::ErrorOr<EmbedShape> shape = shape_of(token_table, "token_table", position_table, *out);
  if (shape.has_error()) return shape.error();
  return dispatch_floating(token_table, "token_table", [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t groups = shape->groups, width = shape->width;
    return check_and_launch(
        {
            {"tokens", tokens, ffi::S32, tokens_of(*shape)},
            {"token_table", token_table, dtype_of<T>(), groups * shape->vocabulary * width},
            {"position_table", position_table, dtype_of<T>(), groups * shape->positions * width},
            {"out", *out, dtype_of<T>(), tokens_of(*shape) * width},
        },
        [&] {
          return Embed<T>::forward(stream, data<int32_t>(tokens), data<T>(token_table),
                                   data<T>(position_table), data<T>(out), *shape);
        });
  });
}

// If dtable has elements, the gradient is added to them, and dtoken_table replaces dtable.
ffi::Error EmbedBackwardImpl(cudaStream_t stream, Buffer tokens, Buffer dout, Buffer dtable,
                             Result dtoken_table, Result dposition_table, Result tile_counts,
                             Result pairs, Result places, Result starts, Result partial,
                             int64_t buckets, int64_t slots) {
  ffi::ErrorOr<EmbedShape> shape = shape_of(*dtoken_table, "dtoken_table", *dposition_table, dout);
  if (shape.has_error()) return shape.error();
  if (buckets < 1 || buckets > kEmbedMaxKeys || (buckets & (buckets - 1)) != 0 || slots < 1 ||
      slots > kEmbedMaxKeys || buckets * slots < shape->vocabulary) {
    return ffi::Error::InvalidArgument(
        "buckets is no power of two up to 1024, slots is not from 1 to 1024, or both are too few "
        "for the rows of dtoken_table");
  }
  if (shape->tokens() > std::numeric_limits<int32_t>::max() / 2) {
    return invalid("tokens", "has more than 2^30 elements");
  }
  shape->buckets = buckets;
  shape->slots = slots;
  const EmbedWorkspace workspace{data<int32_t>(tile_counts), data<int32_t>(pairs),
                                 data<int32_t>(places), data<int32_t>(starts),
                                 data<float>(partial)};
  return dispatch_floating(dout, "dout", [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t groups = shape->groups, width = shape->width;
    const int64_t of_table = groups * shape->vocabulary * width,
                  chunks = shape->tokens() / kEmbedChunk;
    return check_and_launch(
        {
            {"tokens", tokens, ffi::S32, tokens_of(*shape)},
            {"dout", dout, dtype_of<T>(), tokens_of(*shape) * width},
            {"dtable", dtable, dtype_of<T>(), of_table, Elements::kExactlyOrNone},
            {"dtoken_table", *dtoken_table, dtype_of<T>(), of_table},
            {"dposition_table", *dposition_table, dtype_of<T>(), groups * shape->positions * width},
            {"tile_counts", *tile_counts, ffi::S32, groups * kEmbedTiles * buckets},
            {"pairs", *pairs, ffi::S32, tokens_of(*shape) * 2},
            {"places", *places, ffi::S32, tokens_of(*shape)},
            {"starts", *starts, ffi::S32, groups * (buckets * slots + 1)},
            {"partial", *partial, ffi::F32, groups * chunks * width},
        },
        [&] {
          const bool adds = count(dtable) > 0;
          if (adds) JAXLLM_RETURN_IF_ERROR(copy_unless_aliased(stream, dtable, dtoken_table));
          return Embed<T>::backward(stream, data<int32_t>(tokens), data<T>(dout),
                                    data<T>(dtoken_table), adds, data<T>(dposition_table),
                                    workspace, *shape);
        });
  });
}

}  // namespace

JAXLLM_HANDLER(EmbedForward, EmbedForwardImpl);
JAXLLM_HANDLER(EmbedBackward, EmbedBackwardImpl, "buckets", "slots");

}  // namespace jaxllm
