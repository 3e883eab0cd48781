#include "cuda_emulator/fiber.h"

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define TINYSERVE_NO_TSAN __attribute__((no_sanitize("thread")))
#else
#define TINYSERVE_NO_TSAN
#endif

namespace tinyserve::cuda::emulator {
namespace {

// Kernels keep little on their stacks; the redzones of a sanitizer multiply it.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kStackBytes = 512 << 10;
#else
constexpr size_t kStackBytes = 128 << 10;
#endif

size_t guard_bytes() { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }

// makecontext hands over no pointer.
thread_local Fiber* entering = nullptr;

}  // namespace

Fiber::Fiber() {
  void* memory = ::mmap(nullptr, guard_bytes() + kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<std::byte*>(memory);
  if (::mprotect(memory_, guard_bytes(), PROT_NONE) != 0) {
    ::munmap(memory_, guard_bytes() + kStackBytes);
    throw std::bad_alloc();
  }
#if defined(__SANITIZE_THREAD__)
  tsan_fiber_ = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(__SANITIZE_THREAD__)
  __tsan_destroy_fiber(tsan_fiber_);
#endif
  ::munmap(memory_, guard_bytes() + kStackBytes);
}

TINYSERVE_NO_TSAN void Fiber::resume() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&resumer_fake_stack_, memory_ + guard_bytes(), kStackBytes);
#endif
#if defined(__SANITIZE_THREAD__)
  tsan_resumer_ = __tsan_get_current_fiber();
#endif
  if (_setjmp(resumer_) == 0) {
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(tsan_fiber_, 0);
#endif
    if (entered_) _longjmp(here_, 1);
    entered_ = true;
    entering = this;
    ucontext_t context;
    ::getcontext(&context);
    context.uc_stack.ss_sp = memory_ + guard_bytes();
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    ::makecontext(&context, &Fiber::enter, 0);
    ::setcontext(&context);
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(resumer_fake_stack_, nullptr, nullptr);
#endif
}

TINYSERVE_NO_TSAN void Fiber::suspend() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fake_stack_, resumer_stack_, resumer_stack_size_);
#endif
  if (_setjmp(here_) == 0) {
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(tsan_resumer_, 0);
#endif
    _longjmp(resumer_, 1);
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, &resumer_stack_, &resumer_stack_size_);
#endif
}

void Fiber::enter() {
  Fiber* self = entering;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &self->resumer_stack_, &self->resumer_stack_size_);
#endif
  self->run_forever();
}

// A stack serves one piece of work after the other.
void Fiber::run_forever() {
  for (;;) {
    work_();
    suspend();
  }
}

}  // namespace tinyserve::cuda::emulator
