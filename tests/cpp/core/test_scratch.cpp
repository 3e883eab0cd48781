// The scratch block of a thread: aligned, grown, kept, and nobody else's.
#include "core/scratch.h"

#include <catch2/catch_test_macros.hpp>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

using tinyserve::core::Scratch;

namespace {

constexpr size_t kFirst = 1000;

bool aligned(const float* block) { return reinterpret_cast<uintptr_t>(block) % 64 == 0; }

}  // namespace

TEST_CASE("Scratch is aligned, usable to its end, and stays where it is until it must grow") {
  float* block = Scratch::reserve(kFirst);
  REQUIRE(aligned(block));
  std::fill_n(block, kFirst, 1.0F);
  REQUIRE(Scratch::reserve(1) == block);
  REQUIRE(Scratch::reserve(kFirst) == block);
  REQUIRE(block[kFirst - 1] == 1.0F);
  for (const size_t count : {kFirst + 1, 10 * kFirst, 100 * kFirst + 7}) {
    float* grown = Scratch::reserve(count);
    REQUIRE(aligned(grown));
    std::fill_n(grown, count, 2.0F);
    REQUIRE(Scratch::reserve(count - 1) == grown);
  }
}

TEST_CASE("Reserving nothing is allowed") {
  std::thread([] { Scratch::reserve(0); }).join();
  float* block = Scratch::reserve(10);
  REQUIRE(Scratch::reserve(0) == block);
}

TEST_CASE("Threads have blocks of their own") {
  constexpr int kThreads = 5;
  std::vector<int> intact(kThreads, 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t, &intact] {
      const auto mark = static_cast<float>(t);
      for (int round = 1; round <= 50; ++round) {
        const size_t count = static_cast<size_t>(round) * 100;
        float* block = Scratch::reserve(count);
        std::fill_n(block, count, mark);
        std::this_thread::yield();
        intact[t] += std::all_of(block, block + count, [=](float x) { return x == mark; }) ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  REQUIRE(intact == std::vector<int>(kThreads, 50));
}
