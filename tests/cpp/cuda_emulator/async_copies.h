// The cp.async copies of one thread. A copy is made when the thread waits for its group, and not before:
// until then its destination holds poison, so that whoever reads too early reads NaN.
#pragma once

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda_emulator/shared_block.h"

namespace tinyserve::cuda::emulator {

class AsyncCopies {
 public:
  void start(void* shared, const void* global, size_t bytes, size_t valid_bytes) {
    std::memset(shared, kPoison, bytes);
    open_.push_back({static_cast<std::byte*>(shared), global, bytes, valid_bytes});
  }

  void commit() { groups_.push_back(std::exchange(open_, {})); }

  void wait(size_t newest_that_may_go_on) {
    while (groups_.size() > newest_that_may_go_on) {
      for (const Copy& copy : groups_.front()) {
        std::memcpy(copy.shared, copy.global, copy.valid_bytes);
        std::memset(copy.shared + copy.valid_bytes, 0, copy.bytes - copy.valid_bytes);
      }
      groups_.erase(groups_.begin());
    }
  }

  bool under_way() const { return !open_.empty() || !groups_.empty(); }

 private:
  struct Copy {
    std::byte* shared;
    const void* global;
    size_t bytes;
    size_t valid_bytes;
  };

  std::vector<Copy> open_;                 // not committed
  std::vector<std::vector<Copy>> groups_;  // oldest first
};

}  // namespace tinyserve::cuda::emulator
