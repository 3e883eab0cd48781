// Address space without memory behind it, for pools that are far larger than what is touched of them.
#pragma once

#include <sys/mman.h>
#include <catch2/catch_test_macros.hpp>

#include <cstddef>

namespace tinyserve::cpu::testing {

class VirtualMemory {
 public:
  explicit VirtualMemory(size_t bytes)
      : bytes_(bytes),
        begin_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
                      0)) {
    REQUIRE(begin_ != MAP_FAILED);
  }
  ~VirtualMemory() { ::munmap(begin_, bytes_); }
  VirtualMemory(const VirtualMemory&) = delete;
  VirtualMemory& operator=(const VirtualMemory&) = delete;

  void* begin() const { return begin_; }

 private:
  size_t bytes_;
  void* begin_;
};

}  // namespace tinyserve::cpu::testing
