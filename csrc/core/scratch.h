// Working memory of the CPU ops: one block per calling thread, grown on demand and kept, so that a decode
// step allocates nothing. Valid until the thread's next reserve().
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace tinyserve::core {

class Scratch {
 public:
  // At least `count` floats, 64-byte aligned, contents undefined.
  static float* reserve(size_t count) {
    thread_local Scratch scratch;
    if (count > scratch.count_) {
      scratch.block_.reset();
      scratch.count_ = 0;
      scratch.block_.reset(static_cast<float*>(::operator new(count * sizeof(float), kAlignment)));
      scratch.count_ = count;
    }
    return scratch.block_.get();
  }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* block) const { ::operator delete(block, kAlignment); }
  };
  std::unique_ptr<float, Free> block_;
  size_t count_ = 0;
};

}  // namespace tinyserve::core
