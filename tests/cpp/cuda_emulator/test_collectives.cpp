// Warp collectives, barriers, atomics and clusters of the emulator against plain loops over the lanes.
#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "cuda/arch.cuh"
#include "cuda_emulator/testing.h"

using namespace tinyserve::cuda;
using emulator::same_under_every_schedule;

namespace {

constexpr unsigned kThreads = 96;

std::vector<int> draw(size_t count, int limit) {
  std::mt19937 random(7);
  std::vector<int> values(count);
  for (int& value : values) value = static_cast<int>(random() % static_cast<unsigned>(2 * limit)) - limit;
  return values;
}

// Runs a collective on all lanes of three warps: `operation` takes the thread's value and gives its result.
template <typename Operation>
std::vector<int> per_thread(const std::vector<int>& values, Operation operation) {
  return same_under_every_schedule([&] {
    std::vector<int> results(values.size(), -12345);
    struct Kernel {
      static void run(Operation body, const int* in, int* out) {
        const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
        out[i] = body(in[i]);
      }
    };
    launch(&Kernel::run, {.grid = {static_cast<unsigned>(values.size()) / kThreads}, .block = {kThreads}},
           operation, values.data(), results.data());
    return results;
  });
}

// What each lane should get: `expected` sees the 32 values of its warp.
template <typename Expected>
void require_lanes(const std::vector<int>& actual, const std::vector<int>& values, Expected expected) {
  for (size_t i = 0; i < values.size(); ++i) {
    const int* warp = values.data() + i / 32 * 32;
    CAPTURE(i);
    REQUIRE(actual[i] == expected(warp, static_cast<int>(i % 32)));
  }
}

}  // namespace

TEST_CASE("Shuffles give the values of the lanes that CUDA names, in segments of any width") {
  const std::vector<int> values = draw(2 * kThreads, 1000000);
  for (const int width : {1, 2, 8, 16, 32}) {
    for (const int delta : {0, 1, 3, 7, 16, 31}) {
      CAPTURE(width, delta);
      require_lanes(per_thread(values, [=](int x) { return __shfl_sync(kFullWarp, x, delta, width); }),
                    values,
                    [=](const int* warp, int lane) { return warp[lane / width * width + delta % width]; });
      require_lanes(per_thread(values,
                               [=](int x) {
                                 return __shfl_up_sync(kFullWarp, x, static_cast<unsigned>(delta), width);
                               }),
                    values, [=](const int* warp, int lane) {
                      return lane % width >= delta ? warp[lane - delta] : warp[lane];
                    });
      require_lanes(per_thread(values,
                               [=](int x) {
                                 return __shfl_down_sync(kFullWarp, x, static_cast<unsigned>(delta), width);
                               }),
                    values, [=](const int* warp, int lane) {
                      return lane % width + delta < width ? warp[lane + delta] : warp[lane];
                    });
      require_lanes(per_thread(values, [=](int x) { return __shfl_xor_sync(kFullWarp, x, delta, width); }),
                    values, [=](const int* warp, int lane) {
                      // Later segments are out of reach, earlier ones are not.
                      return (lane ^ delta) / width <= lane / width ? warp[lane ^ delta] : warp[lane];
                    });
    }
  }
}

TEST_CASE("Votes, matches and reductions see all lanes of the mask") {
  const std::vector<int> values = draw(2 * kThreads, 5);
  const auto count = [](const int* warp, auto predicate) {
    unsigned mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= predicate(warp[lane]) ? 1U << lane : 0U;
    return mask;
  };
  require_lanes(
      per_thread(values, [](int x) { return static_cast<int>(__ballot_sync(kFullWarp, x > 2)); }), values,
      [&](const int* warp, int) { return static_cast<int>(count(warp, [](int x) { return x > 2; })); });
  for (const int limit : {-6, -4, 0, 3, 4}) {
    require_lanes(per_thread(values, [=](int x) { return __any_sync(kFullWarp, x > limit); }), values,
                  [&](const int* warp, int) { return count(warp, [=](int x) { return x > limit; }) != 0; });
    require_lanes(
        per_thread(values, [=](int x) { return __all_sync(kFullWarp, x > limit); }), values,
        [&](const int* warp, int) { return count(warp, [=](int x) { return x > limit; }) == kFullWarp; });
  }
  require_lanes(per_thread(values, [](int x) { return static_cast<int>(__match_any_sync(kFullWarp, x)); }),
                values, [&](const int* warp, int lane) {
                  return static_cast<int>(count(warp, [&](int x) { return x == warp[lane]; }));
                });
  const auto fold = [](const int* warp, auto operation) {
    int result = warp[0];
    for (int lane = 1; lane < 32; ++lane) result = operation(result, warp[lane]);
    return result;
  };
  require_lanes(per_thread(values, [](int x) { return __reduce_add_sync(kFullWarp, x); }), values,
                [&](const int* warp, int) { return fold(warp, [](int a, int b) { return a + b; }); });
  require_lanes(per_thread(values, [](int x) { return __reduce_min_sync(kFullWarp, x); }), values,
                [&](const int* warp, int) { return fold(warp, [](int a, int b) { return a < b ? a : b; }); });
  require_lanes(per_thread(values, [](int x) { return __reduce_max_sync(kFullWarp, x); }), values,
                [&](const int* warp, int) { return fold(warp, [](int a, int b) { return a > b ? a : b; }); });
  require_lanes(per_thread(values,
                           [](int x) {
                             return static_cast<int>(__reduce_xor_sync(kFullWarp, static_cast<unsigned>(x)));
                           }),
                values, [&](const int* warp, int) { return fold(warp, [](int a, int b) { return a ^ b; }); });
}

TEST_CASE("Parts of a warp run collectives of their own, as often as they like") {
  const std::vector<int> values = draw(kThreads, 1000);
  const auto results = per_thread(values, [](int x) {
    const unsigned lane = threadIdx.x % 32;
    if (lane < 5) {
      for (int i = 0; i < 3; ++i) x += __shfl_sync(0x1fU, x, 4);
      return x;
    }
    return __reduce_add_sync(0xffffffe0U, x);
  });
  require_lanes(results, values, [](const int* warp, int lane) {
    // Lane 4 doubles three times; the others add what it holds each time.
    if (lane < 4) return warp[lane] + 7 * warp[4];
    if (lane == 4) return 8 * warp[4];
    int sum = 0;
    for (int other = 5; other < 32; ++other) sum += warp[other];
    return sum;
  });
}

namespace {

// Every thread adds its neighbours' values of the step before, so each step needs its barrier.
__global__ void smooth(const int* in, int* out, int steps) {
  TINYSERVE_DYNAMIC_SHARED(memory);
  int* values = reinterpret_cast<int*>(memory);
  const unsigned i = threadIdx.x;
  values[i] = in[i];
  for (int step = 0; step < steps; ++step) {
    __syncthreads();
    const int sum = values[i] + values[(i + 1) % blockDim.x];
    __syncthreads();
    values[i] = sum;
  }
  out[i] = values[i];
}

__global__ void votes(int* out) {
  const int i = static_cast<int>(threadIdx.x);
  const int count = __syncthreads_count(i % 3 == 0);
  const int any = __syncthreads_or(i == 40);
  const int none = __syncthreads_or(i == 400);
  const int all = __syncthreads_and(i < 400);
  const int not_all = __syncthreads_and(i < 40);
  out[i] = count * 10000 + any * 1000 + none * 100 + all * 10 + not_all;
}

}  // namespace

TEST_CASE("Block barriers order what threads write and read, and count predicates") {
  const std::vector<int> values = draw(kThreads, 100);
  const auto results = same_under_every_schedule([&] {
    std::vector<int> out(kThreads);
    launch(&smooth, {.block = {kThreads}, .shared_bytes = kThreads * sizeof(int)}, values.data(), out.data(),
           4);
    return out;
  });
  for (size_t i = 0; i < kThreads; ++i) {
    constexpr int kBinomials[] = {1, 4, 6, 4, 1};
    int expected = 0;
    for (size_t k = 0; k < 5; ++k) expected += kBinomials[k] * values[(i + k) % kThreads];
    REQUIRE(results[i] == expected);
  }
  const auto counts = same_under_every_schedule([&] {
    std::vector<int> out(kThreads);
    launch(&votes, {.block = {kThreads}}, out.data());
    return out;
  });
  REQUIRE(counts == std::vector<int>(kThreads, 32 * 10000 + 1010));
}

namespace {

// Sums in parts: each block leaves its part, the block that finishes last adds them up in order.
__global__ void sum_in_last_block(const int* in, int* parts, uint32_t* finished, int* out) {
  TINYSERVE_DYNAMIC_SHARED(memory);
  int* const is_last = reinterpret_cast<int*>(memory);
  int sum = __reduce_add_sync(kFullWarp, in[blockIdx.x * blockDim.x + threadIdx.x]);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    *is_last = fetch_add_acq_rel(finished, 1) + 1 == gridDim.x;
    if (*is_last != 0) *finished = 0;
  }
  __syncthreads();
  if (*is_last == 0 || threadIdx.x != 0) return;
  int total = 0;
  for (unsigned block = 0; block < gridDim.x; ++block) total = 3 * total + parts[block];
  *out = total;
}

__global__ void histogram(const int* in, int* bins, int* largest, unsigned* order) {
  const int x = in[blockIdx.x * blockDim.x + threadIdx.x];
  atomicAdd(&bins[x + 5], 1);
  atomicMax(largest, x);
  order[atomicAdd(&order[0], 1U) + 1] = threadIdx.x;
}

}  // namespace

TEST_CASE("The block that arrives last finds the parts of all others, whatever the order of the blocks") {
  constexpr unsigned kBlocks = 9;
  const std::vector<int> values = draw(32 * kBlocks, 1000);
  uint32_t finished = 0;  // left as it was by every launch
  const auto total = same_under_every_schedule([&] {
    std::vector<int> parts(kBlocks, -1);
    int out = -1;
    launch(&sum_in_last_block, {.grid = {kBlocks}, .block = {32}, .shared_bytes = sizeof(int)}, values.data(),
           parts.data(), &finished, &out);
    REQUIRE(finished == 0);
    return out;
  });
  int expected = 0;
  for (size_t block = 0; block < kBlocks; ++block) {
    int part = 0;
    for (size_t i = 0; i < 32; ++i) part += values[block * 32 + i];
    expected = 3 * expected + part;
  }
  REQUIRE(total == expected);
}

TEST_CASE("Atomics lose nothing, and schedules reach them in different orders") {
  const std::vector<int> values = draw(2 * kThreads, 5);
  std::vector<std::vector<unsigned>> orders;
  same_under_every_schedule([&] {
    std::vector<int> bins(10, 0);
    int largest = -100;
    std::vector<unsigned> order(2 * kThreads + 1, 0);
    launch(&histogram, {.grid = {2}, .block = {kThreads}}, values.data(), bins.data(), &largest,
           order.data());
    orders.push_back(order);
    for (int bin = 0; bin < 10; ++bin) REQUIRE(bins[bin] == std::ranges::count(values, bin - 5));
    return largest;
  });
  for (size_t i = 0; i < orders.size(); ++i) {
    for (size_t j = 0; j < i; ++j) REQUIRE(orders[i] != orders[j]);
  }
}

namespace {

// Each block of a cluster leaves numbers in its shared memory and reads those of the next.
__global__ void pass_around(int* out) {
  TINYSERVE_DYNAMIC_SHARED(memory);
  int* const mine = reinterpret_cast<int*>(memory);
  mine[threadIdx.x] = static_cast<int>(1000 * blockIdx.x + threadIdx.x);
  cluster_sync();
  const unsigned next = (cluster_rank() + 1) % cluster_size();
  const unsigned i = blockDim.x - 1 - threadIdx.x;
  out[blockIdx.x * blockDim.x + threadIdx.x] = *shared_of_rank(mine + i, next);
  cluster_sync();
  mine[threadIdx.x] = -1;
}

}  // namespace

TEST_CASE("Blocks of a cluster run together and reach each other's shared memory") {
  const auto results = same_under_every_schedule([&] {
    std::vector<int> out(8 * 64);
    launch(&pass_around, {.grid = {8}, .block = {64}, .shared_bytes = 256, .cluster_size = 4}, out.data());
    return out;
  });
  for (int block = 0; block < 8; ++block) {
    const int next = block / 4 * 4 + (block + 1) % 4;
    for (int i = 0; i < 64; ++i) REQUIRE(results[block * 64 + i] == 1000 * next + 63 - i);
  }
}

namespace {

__global__ void name_yourself(uint32_t* out) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] += block * 1000 + thread;
}

}  // namespace

TEST_CASE("Every thread of a three-dimensional grid runs once") {
  std::vector<uint32_t> out(5 * 3 * 2 * 24, 0);
  launch(&name_yourself, {.grid = {5, 3, 2}, .block = {4, 3, 2}}, out.data());
  for (uint32_t i = 0; i < out.size(); ++i) REQUIRE(out[i] == i / 24 * 1000 + i % 24);
}
