// A stack of its own on which a piece of work runs until it suspends itself, for the threads of an emulated
// block. Switching is _setjmp/_longjmp, some twenty nanoseconds; swapcontext would make a system call each
// way. A guard page lies below each stack. AddressSanitizer and ThreadSanitizer are told of every switch.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <functional>
#include <utility>

namespace tinyserve::cuda::emulator {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next resume() begins `work`, which must not let an exception out. Only when no work is under way.
  void set_work(std::function<void()> work) { work_ = std::move(work); }

  // Runs the work until it suspends or ends.
  void resume();

  // To be called from within the work.
  void suspend();

 private:
  static void enter();
  [[noreturn]] void run_forever();

  std::function<void()> work_;
  std::byte* memory_;  // guard page, then the stack
  bool entered_ = false;
  std::jmp_buf here_;
  std::jmp_buf resumer_;

  // What the sanitizers keep of the two stacks.
  void* fake_stack_ = nullptr;
  void* resumer_fake_stack_ = nullptr;
  const void* resumer_stack_ = nullptr;
  size_t resumer_stack_size_ = 0;
  void* tsan_fiber_ = nullptr;
  void* tsan_resumer_ = nullptr;
};

}  // namespace tinyserve::cuda::emulator
