// Division by a number that is known at the launch, as a product and a shift.
#pragma once

#include <cstdint>

namespace jaxllm {

// Divides numbers below 2^31 by `divisor`, from 1 to 2^31 - 1. With 2^s the power of two at or
// above the divisor, the factor is 2^(31 + s) / divisor, rounded up: it has 32 bits, and is too
// large by less than 1, that is, a product by less than 2^31 of 2^(31 + s).
class Divisor {
 public:
  Divisor() = default;
  explicit Divisor(uint32_t divisor) : divisor_(divisor), shift_(31) {
    while (uint64_t{1} << (shift_ - 31) < divisor) ++shift_;
    factor_ = ((uint64_t{1} << shift_) + divisor - 1) / divisor;
  }

  __host__ __device__ __forceinline__ uint32_t quotient(uint32_t number) const {
    return uint64_t{number} * factor_ >> shift_;
  }
  __host__ __device__ __forceinline__ uint32_t value() const { return divisor_; }

 private:
  uint32_t divisor_ = 0, factor_ = 0, shift_ = 0;
};

}  // namespace jaxllm
