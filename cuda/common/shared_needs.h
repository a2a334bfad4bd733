// The shared memory of kernels that need a fixed amount, by kernel name.
//
// Python's predicates reject a device with less. Kernels whose launcher adapts to the device are
// not in the list. An entry stands next to the kernel's launcher, at namespace scope, with the
// constant that the launcher uses:
//
//   const SharedNeed kNeed("flash_attention_backward_mma_256", sizeof(Shared));
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace jaxllm {

class SharedNeed {
 public:
  // `kernel` is the kernel's name without "_kernel", plus what tells its instantiations apart. Of
  // two entries with the same name the larger counts.
  SharedNeed(const char* kernel, int64_t bytes);

  // All entries. They are made when the library is loaded.
  static const std::map<std::string, int64_t>& all();
};

}  // namespace jaxllm
