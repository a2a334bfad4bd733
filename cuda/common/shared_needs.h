// The shared memory of kernels that take as much whatever the device has, by name.
//
// Python reads the list: its predicates decline a device with less, and a test holds them to it. A
// kernel whose launcher adapts to the device is not in it. An entry stands beside the kernel's
// launcher, at namespace scope, and takes the constant that the launcher takes:
//
//   const SharedNeed kNeed("flash_attention_backward_mma_256", sizeof(Shared));
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace jaxllm {

class SharedNeed {
 public:
  // `kernel` is the kernel's name without "_kernel", and what tells its instantiations apart. Of
  // two entries with one name the larger counts.
  SharedNeed(const char* kernel, int64_t bytes);

  // All entries. They are made while the library is loaded.
  static const std::map<std::string, int64_t>& all();
};

}  // namespace jaxllm
