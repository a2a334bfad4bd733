#include "common/shared_needs.h"

#include <algorithm>

namespace jaxllm {
namespace {

// In a function, because entries of other files may be made before the variables of this file.
std::map<std::string, int64_t>& needs() {
  static std::map<std::string, int64_t> all;
  return all;
}

}  // namespace

SharedNeed::SharedNeed(const char* kernel, int64_t bytes) {
  int64_t& need = needs()[kernel];
  need = std::max(need, bytes);
}

const std::map<std::string, int64_t>& SharedNeed::all() { return needs(); }

}  // namespace jaxllm
