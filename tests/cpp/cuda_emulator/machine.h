// The emulated machine: runs a grid cluster by cluster, every CUDA thread as a fiber, and makes threads wait
// for each other as the hardware does. Whatever CUDA leaves undefined and this file can see (a barrier that
// threads miss or reach from different places, a collective with lanes elsewhere, a deadlock, a write past
// shared memory) ends the launch with a KernelError. device_functions.h puts CUDA's names on it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <source_location>
#include <stdexcept>
#include <string>

#include "cuda/launch_config.h"

namespace tinyserve::cuda::emulator {

// What a kernel did wrong, in which thread and where; what was expected and what came.
class KernelError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An operation of a kernel and its place in the source.
struct Site {
  const char* operation;
  std::source_location where;
};

// Runs `body` once for each thread of the grid, and returns when all are done.
void run_grid(const LaunchConfig& config, const std::function<void()>& body);

// ---- For the thread that runs. Outside of a launch none of these may be called. ----

[[noreturn]] void fail(const Site& site, const std::string& what);

// Waits for all threads of the block; returns the sum of their values.
int block_barrier(const Site& site, int value);

void cluster_barrier(const Site& site);

// Lets another thread go first, if the schedule wants to.
void may_be_overtaken();

// What each lane of a warp brought to a collective.
struct LaneValues {
  static constexpr size_t kMaxBytes = 64;
  alignas(16) std::array<std::array<std::byte, kMaxBytes>, 32> lanes;

  template <typename T>
  T of(int lane, size_t offset = 0) const {
    T value;
    std::memcpy(&value, lanes[static_cast<size_t>(lane)].data() + offset, sizeof(T));
    return value;
  }
};

// Waits for all lanes of the mask. They must come from the same place in the source with the same mask.
std::shared_ptr<const LaneValues> exchange(const Site& site, unsigned mask, const void* value, size_t bytes);

int lane_id();

struct SharedMemory {
  std::byte* begin;
  size_t bytes;
};
SharedMemory shared_memory();  // of the thread's block
unsigned rank_in_cluster();
unsigned blocks_of_cluster();
SharedMemory shared_memory_of(const Site& site, unsigned rank);  // of a block of the cluster

// Copies are made when the thread waits for them, not before: what reads the destination earlier reads NaN.
void start_copy(const Site& site, void* shared, const void* global, int bytes, int valid_bytes);
void commit_copies();
void wait_for_copies(size_t newest_that_may_go_on);

}  // namespace tinyserve::cuda::emulator
