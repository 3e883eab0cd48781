// Kernels with one mistake each: the emulator must find it and say where it is.
#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <cmath>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "cuda/arch.cuh"
#include "cuda_emulator/shared_block.h"  // AddressSanitizer's interface
#include "cuda_emulator/testing.h"

using namespace tinyserve::cuda;
using Catch::Matchers::ContainsSubstring;
using emulator::KernelError;
using emulator::kSchedules;
using emulator::ScheduleScope;

namespace {

// The error of a launch, the same kind under every schedule.
template <typename Run>
void require_error(Run run, const std::string& part) {
  for (const auto& schedule : kSchedules) {
    CAPTURE(schedule);
    const ScheduleScope scope(schedule);
    REQUIRE_THROWS_AS(run(), KernelError);
    REQUIRE_THROWS_WITH(run(), ContainsSubstring(part) && ContainsSubstring("test_errors.cpp"));
  }
}

// Each thread hands a value to the one `distance` on; the barrier between is what the kernel may lack.
template <bool kWithBarrier>
__global__ void hand_over(float* out, unsigned distance) {
  TINYSERVE_DYNAMIC_SHARED(memory);
  auto* values = reinterpret_cast<float*>(memory);
  values[threadIdx.x] = static_cast<float>(threadIdx.x);
  if constexpr (kWithBarrier) __syncthreads();
  out[threadIdx.x] = values[(threadIdx.x + distance) % blockDim.x];
}

template <bool kWithBarrier>
std::vector<float> handed_over() {
  std::vector<float> out(64);
  launch(&hand_over<kWithBarrier>, {.block = {64}, .shared_bytes = 256}, out.data(), 32U);
  return out;
}

// Accumulates into shared memory that nobody has set to zero.
__global__ void forget_to_clear(int8_t* out) {
  TINYSERVE_DYNAMIC_SHARED(memory);
  if (threadIdx.x == 0) memory[0] = static_cast<unsigned char>(memory[0] + 1);
  __syncthreads();
  out[blockIdx.x] = static_cast<int8_t>(memory[0]);
}

}  // namespace

TEST_CASE("A missing barrier shows as poison, and as schedules that disagree") {
  std::set<std::vector<uint32_t>> results;
  for (const auto& schedule : kSchedules) {
    CAPTURE(schedule);
    const ScheduleScope scope(schedule);
    bool poisoned = false;
    std::vector<uint32_t> bits;
    for (const float x : handed_over<false>()) {
      poisoned |= std::isnan(x);
      bits.push_back(__float_as_uint(x));
    }
    REQUIRE(poisoned);
    results.insert(bits);
    for (unsigned i = 0; i < 64; ++i) REQUIRE(handed_over<true>()[i] == static_cast<float>((i + 32) % 64));
  }
  REQUIRE(results.size() > 2);
}

TEST_CASE("Shared memory is poisoned anew for every block") {
  std::vector<int8_t> out(3);
  launch(&forget_to_clear, {.grid = {3}, .block = {32}, .shared_bytes = 1}, out.data());
  REQUIRE(out == std::vector<int8_t>(3, 0));  // -1 + 1, three times
}

namespace {

__global__ void shuffle_half_a_warp(int* out) {
  int x = static_cast<int>(threadIdx.x);
  if (threadIdx.x < 16) x = __shfl_sync(kFullWarp, x, 3);
  out[threadIdx.x] = x;
}
__global__ void shuffle_in_two_places(int* out) {
  int x = static_cast<int>(threadIdx.x);
  if (threadIdx.x % 2 == 0) {
    x = __shfl_sync(kFullWarp, x, 3);
  } else {
    x = __shfl_sync(kFullWarp, x + 1, 3);
  }
  out[threadIdx.x] = x;
}
__global__ void shuffle_with_two_masks(int* out) {
  const unsigned mask = threadIdx.x < 8 ? 0xffU : kFullWarp;
  out[threadIdx.x] = __shfl_sync(mask, static_cast<int>(threadIdx.x), 3);
}
__global__ void shuffle_without_oneself(int* out) {
  out[threadIdx.x] = __shfl_sync(0xfffeU, static_cast<int>(threadIdx.x), 3);
}
__global__ void shuffle_from_outside(int* out) {
  if (threadIdx.x < 8) out[threadIdx.x] = __shfl_sync(0xffU, static_cast<int>(threadIdx.x), 9);
}
__global__ void vote_with_the_departed(int* out) {
  if (threadIdx.x == 5) return;
  out[threadIdx.x] = __any_sync(kFullWarp, 1);
}
__global__ void vote_and_reduce(int* out) {
  out[threadIdx.x] = threadIdx.x < 9 ? __any_sync(kFullWarp, 1) : __reduce_add_sync(kFullWarp, 1);
}

void run(void (*kernel)(int*), unsigned threads = 32) {
  std::vector<int> out(threads);
  launch(kernel, {.block = {threads}}, out.data());
}

}  // namespace

TEST_CASE("A collective with lanes that are elsewhere, gone or not in the mask is an error") {
  require_error([] { run(&shuffle_half_a_warp); }, "__shfl_sync");
  require_error([] { run(&shuffle_in_two_places); }, "expected the lane at __shfl_sync");
  require_error([] { run(&shuffle_with_two_masks); }, "__shfl_sync");
  require_error([] { run(&shuffle_without_oneself); }, "expected a mask with the lane's own bit, got 0xfffe");
  require_error([] { run(&shuffle_from_outside); }, "expected to read a lane of the mask, got lane 9");
  require_error([] { run(&vote_with_the_departed); }, "__any_sync");
  require_error([] { run(&vote_and_reduce); }, "_sync");
  // 40 threads are one warp and a part of another that has no lane 8.
  require_error([] { run(&vote_and_reduce, 40); }, "_sync");
}

namespace {

__global__ void leave_before_the_barrier(int* out) {
  if (threadIdx.x >= 40) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}
__global__ void barrier_in_both_branches(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}
__global__ void wait_for_each_other(int* out) {
  if (threadIdx.x % 32 < 16) __syncthreads();
  out[threadIdx.x] = __reduce_add_sync(kFullWarp, 1);
  if (threadIdx.x % 32 >= 16) __syncthreads();
}
__global__ void leave_before_the_cluster_barrier(int* out) {
  if (cluster_rank() == 1) return;
  cluster_sync();
  out[threadIdx.x] = 1;
}
__global__ void reach_beyond_the_cluster(int* out) {
  TINYSERVE_DYNAMIC_SHARED(memory);
  cluster_sync();
  out[threadIdx.x] = *shared_of_rank(memory, 2);
}

}  // namespace

TEST_CASE("A barrier that threads miss, or reach from different places, is an error") {
  require_error([] { run(&leave_before_the_barrier, 64); }, "__syncthreads");
  require_error([] { run(&barrier_in_both_branches, 64); }, "expected the block's threads at one barrier");
  std::vector<int> out(64);
  const LaunchConfig pair{.grid = {2}, .block = {64}, .shared_bytes = 4, .cluster_size = 2};
  require_error([&] { launch(&leave_before_the_cluster_barrier, pair, out.data()); }, "cluster_sync");
  require_error([&] { launch(&reach_beyond_the_cluster, pair, out.data()); },
                "expected a rank below the cluster's size 2, got 2");
}

namespace {

__global__ void never_done(int* out) {
  while (__any_sync(kFullWarp, out[threadIdx.x] >= 0)) {
  }
}

}  // namespace

TEST_CASE("A warp that never leaves a loop of collectives is an error") {
  REQUIRE_THROWS_WITH(run(&never_done), ContainsSubstring("livelock") && ContainsSubstring("__any_sync at"));
}

TEST_CASE("A deadlock names the place where each thread waits") {
  require_error([] { run(&wait_for_each_other, 64); }, "deadlock");
  REQUIRE_THROWS_WITH(run(&wait_for_each_other, 64),
                      ContainsSubstring("numbers 0-15 32-47") && ContainsSubstring("numbers 16-31 48-63") &&
                          ContainsSubstring("__syncthreads at") && ContainsSubstring("__reduce_add_sync at"));
}

namespace {

__global__ void touch(int offset, bool write, int* out) {
  TINYSERVE_DYNAMIC_SHARED(memory);
#if defined(__SANITIZE_ADDRESS__)
  *out = __asan_address_is_poisoned(memory + offset);
  static_cast<void>(write);
#else
  if (write) memory[offset] = 1;
  *out = memory[offset];
#endif
}

}  // namespace

TEST_CASE("A write past either end of shared memory is an error, a read gives no number") {
  int result = -1;
  const auto run_touch = [&](int offset, bool write) {
    launch(&touch, {.shared_bytes = 37}, offset, write, &result);
    return result;
  };
#if defined(__SANITIZE_ADDRESS__)
  for (const int offset : {-256, -1, 37, 38, 37 + 255}) REQUIRE(run_touch(offset, true) == 1);
  for (const int offset : {0, 36}) REQUIRE(run_touch(offset, true) == 0);
#else
  for (const int offset : {37, 38, 200}) {
    REQUIRE_THROWS_WITH(
        run_touch(offset, true),
        ContainsSubstring("within the 37 bytes of shared memory, got one to byte " + std::to_string(offset)));
  }
  REQUIRE_THROWS_WITH(run_touch(-1, true), ContainsSubstring("got one 1 bytes before its begin"));
  REQUIRE(run_touch(36, true) == 1);
  REQUIRE(run_touch(36, false) == 0xff);
#endif
}

namespace {

enum class Mistake { kNone, kNoWait, kNoCommit, kOneGroupTooFew, kNoBarrier };

// Two tiles, the second under way while the first is read.
template <Mistake kMistake>
__global__ void copy_tiles(const float* in, float* out) {
  TINYSERVE_DYNAMIC_SHARED(memory);
  auto* tiles = reinterpret_cast<float*>(memory);
  const unsigned i = threadIdx.x;
  for (unsigned tile = 0; tile < 2; ++tile) {
    cp_async<16>(tiles + tile * 128 + 4 * i, in + tile * 128 + 4 * i);
    if (kMistake != Mistake::kNoCommit) cp_async_commit();
  }
  if (kMistake != Mistake::kNoWait) cp_async_wait<kMistake == Mistake::kOneGroupTooFew ? 2 : 1>();
  if (kMistake != Mistake::kNoBarrier) __syncthreads();
  for (unsigned k = 0; k < 4; ++k) out[k * 32 + i] = tiles[k * 32 + i];
  if (kMistake == Mistake::kNoCommit) cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (unsigned k = 4; k < 8; ++k) out[k * 32 + i] = tiles[k * 32 + i];
}

template <Mistake kMistake>
std::vector<float> copied_tiles() {
  alignas(16) static float in[256];
  for (int i = 0; i < 256; ++i) in[i] = static_cast<float>(i);
  std::vector<float> out(256);
  launch(&copy_tiles<kMistake>, {.block = {32}, .shared_bytes = sizeof(in)}, in, out.data());
  return out;
}

template <Mistake kMistake>
void require_poison() {
  for (const auto& schedule : kSchedules) {
    CAPTURE(schedule, static_cast<int>(kMistake));
    const ScheduleScope scope(schedule);
    const std::vector<float> out = copied_tiles<kMistake>();
    bool poisoned = false;
    for (size_t i = 0; i < 128; ++i) poisoned |= std::isnan(out[i]);
    REQUIRE(poisoned);
    for (size_t i = 128; i < 256; ++i) REQUIRE(out[i] == static_cast<float>(i));
  }
}

__global__ void copy_first_bytes(const uint8_t* in, uint8_t* out, int valid) {
  TINYSERVE_DYNAMIC_SHARED(memory);
  cp_async<8>(memory, in, valid);
  cp_async<4>(memory + 8, in + 8);
  cp_async_commit();
  cp_async_wait<0>();
  for (int i = 0; i < 12; ++i) out[i] = memory[i];
}
__global__ void leave_a_copy_behind(const float* in) {
  TINYSERVE_DYNAMIC_SHARED(memory);
  cp_async<4>(memory, in);
  cp_async_commit();
}
__global__ void copy_to(const float* in, int offset) {
  TINYSERVE_DYNAMIC_SHARED(memory);
  cp_async<16>(memory + offset, in);
  cp_async_commit();
  cp_async_wait<0>();
}

}  // namespace

TEST_CASE("What cp_async copies is there after commit, wait and barrier, and NaN if one is missing") {
  const auto good = emulator::same_under_every_schedule(&copied_tiles<Mistake::kNone>);
  for (size_t i = 0; i < 256; ++i) REQUIRE(good[i] == static_cast<float>(i));
  require_poison<Mistake::kNoWait>();
  require_poison<Mistake::kNoCommit>();
  require_poison<Mistake::kOneGroupTooFew>();
  require_poison<Mistake::kNoBarrier>();
}

TEST_CASE("cp_async fills up with zeros, and refuses bad places and copies that nobody awaits") {
  alignas(16) const uint8_t bytes[] = {11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22};
  std::vector<uint8_t> out(12);
  launch(&copy_first_bytes, {.shared_bytes = 16}, bytes, out.data(), 5);
  REQUIRE(out == std::vector<uint8_t>{11, 12, 13, 14, 15, 0, 0, 0, 19, 20, 21, 22});
  alignas(16) const float numbers[4] = {};
  REQUIRE_THROWS_WITH(launch(&leave_a_copy_behind, {.shared_bytes = 16}, numbers),
                      ContainsSubstring("expected a wait for every cp_async"));
  require_error([&] { launch(&copy_to, {.shared_bytes = 60}, numbers, 48); },
                "within the 60 bytes of shared memory, got offset 48");
  require_error([&] { launch(&copy_to, {.shared_bytes = 60}, numbers, 8); }, "aligned to 16 bytes");
}

TEST_CASE("A launch that the hardware would refuse is an error") {
  const auto launch_with = [](const LaunchConfig& config) { launch(+[](int) {}, config, 0); };
  REQUIRE_THROWS_WITH(launch_with({.block = {1025}}), ContainsSubstring("got 1025"));
  REQUIRE_THROWS_WITH(launch_with({.grid = {0}}), ContainsSubstring("got 0"));
  REQUIRE_THROWS_WITH(launch_with({.grid = {1, 65536}}), ContainsSubstring("got 65536"));
  REQUIRE_THROWS_WITH(launch_with({.shared_bytes = 300000}), ContainsSubstring("got 300000"));
  REQUIRE_THROWS_WITH(launch_with({.grid = {3}, .cluster_size = 2}),
                      ContainsSubstring("whole clusters, got 3"));
  launch_with({});
}
