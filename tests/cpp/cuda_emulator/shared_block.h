// The shared memory of one block: exactly the bytes that it was launched with, NaN in every floating-point
// type and -1 in int8 until the kernel writes them. Fences around it show writes past either end, under
// AddressSanitizer reads as well, and at once.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace tinyserve::cuda::emulator {

inline constexpr int kPoison = 0xff;

class SharedBlock {
 public:
  explicit SharedBlock(size_t bytes)
      : bytes_(bytes), memory_(static_cast<std::byte*>(::operator new(bytes + 2 * kFence, kAlignment))) {
    std::memset(memory_.get(), kFenceByte, bytes + 2 * kFence);
    std::memset(begin(), kPoison, bytes);
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(memory_.get(), kFence);
    __asan_poison_memory_region(begin() + bytes, kFence);
#endif
  }
  ~SharedBlock() {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(memory_.get(), bytes_ + 2 * kFence);
#endif
  }
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;

  std::byte* begin() const { return memory_.get() + kFence; }
  size_t size() const { return bytes_; }

  // Says which byte outside was written, or nothing.
  std::string damage() const {
#if !defined(__SANITIZE_ADDRESS__)
    for (size_t i = 0; i < kFence; ++i) {
      if (begin()[bytes_ + i] != std::byte{kFenceByte}) {
        return "expected writes within the " + std::to_string(bytes_) +
               " bytes of shared memory, got one to byte " + std::to_string(bytes_ + i);
      }
      if (memory_.get()[i] != std::byte{kFenceByte}) {
        return "expected writes within shared memory, got one " + std::to_string(kFence - i) +
               " bytes before its begin";
      }
    }
#endif
    return {};
  }

 private:
  static constexpr std::align_val_t kAlignment{128};
  static constexpr size_t kFence = 256;
  static constexpr unsigned char kFenceByte = 0xa5;

  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };

  size_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace tinyserve::cuda::emulator
