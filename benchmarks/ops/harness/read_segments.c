// Reads every byte of a list of memory segments, one call per thread, and does as little else as it can.
//
// Sums of 64-bit words in eight independent vectors: enough loads in flight for the memory system to be the limit, and
// a result that depends on every byte, so nothing is optimised away. Where segments are short and apart, the hardware
// does not foresee the next one; prefetching it in step with the current one then helps by 10 to 20 %. Threads meet before they start, and each stamps its own begin and end: neither thread
// creation nor Python is in the times.

#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <time.h>

typedef uint64_t words __attribute__((vector_size(32), aligned(8), may_alias));

static int64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

// Bytes beyond the last multiple of 256 are read one by one.
static uint64_t read_segment(const char* data, int64_t num_bytes, const char* next, int64_t next_bytes) {
  words sums[8] = {{0}};
  const char* end = data + num_bytes / 256 * 256;
  for (int64_t offset = 0; data < end; data += 256, offset += 256) {
    if (offset < next_bytes)
      for (int line = 0; line < 256; line += 64) __builtin_prefetch(next + offset + line, 0, 2);
    const words* block = (const words*)data;
    for (int i = 0; i < 8; ++i) sums[i] += block[i];
  }
  uint64_t sum = 0;
  for (int i = 0; i < 8; ++i)
    for (int lane = 0; lane < 4; ++lane) sum += sums[i][lane];
  for (int64_t i = 0; i < num_bytes % 256; ++i) sum += (unsigned char)data[i];
  return sum;
}

// addresses, sizes: [num_segments]. ahead: how many segments on to prefetch, 0 for not at all. arrived: one int shared by the num_threads callers, 0 before the first. times: begin
// and end of this caller in nanoseconds. Returns the sum, which only has to be used.
uint64_t read_segments(const char* const* addresses, const int64_t* sizes, int64_t num_segments,
                       int64_t ahead, int* arrived, int num_threads, int64_t* times) {
  __atomic_add_fetch(arrived, 1, __ATOMIC_ACQ_REL);
  while (__atomic_load_n(arrived, __ATOMIC_ACQUIRE) < num_threads) sched_yield();
  times[0] = now_ns();
  uint64_t sum = 0;
  for (int64_t i = 0; i < num_segments; ++i) {
    const int64_t next = ahead > 0 && i + ahead < num_segments ? i + ahead : i;
    sum += read_segment(addresses[i], sizes[i], addresses[next], next == i ? 0 : sizes[next]);
  }
  times[1] = now_ns();
  return sum;
}
