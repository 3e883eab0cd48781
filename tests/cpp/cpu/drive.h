// Runs a kernel over its work items as a driver might: in one range, split over threads, or item by item in
// a random order. Results may not depend on it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <ostream>
#include <random>
#include <thread>
#include <type_traits>
#include <vector>

#include "cpu/kernel_table.h"

namespace tinyserve::cpu::testing {

struct Schedule {
  int num_threads = 1;
  uint32_t shuffle_seed = 0;  // 0: ranges in order
};

inline std::ostream& operator<<(std::ostream& out, const Schedule& schedule) {
  return out << schedule.num_threads << " threads, shuffle seed " << schedule.shuffle_seed;
}

inline constexpr Schedule kOtherSchedules[] = {{2, 0}, {5, 0}, {1, 7}, {3, 11}};

template <typename Params>
void run(Kernel<Params> kernel, const std::type_identity_t<Params>& params, int64_t num_items,
         Schedule schedule = {}) {
  std::vector<int64_t> order(static_cast<size_t>(num_items));
  std::iota(order.begin(), order.end(), 0);
  if (schedule.shuffle_seed != 0) std::ranges::shuffle(order, std::mt19937(schedule.shuffle_seed));
  const auto run_part = [&](int64_t begin, int64_t end) {
    if (schedule.shuffle_seed == 0) {
      kernel(params, begin, end);
    } else {
      for (int64_t i = begin; i < end; ++i) kernel(params, order[i], order[i] + 1);
    }
  };
  if (schedule.num_threads == 1) {
    run_part(0, num_items);
    return;
  }
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < schedule.num_threads; ++t) {
    threads.emplace_back(run_part, num_items * t / schedule.num_threads,
                         num_items * (t + 1) / schedule.num_threads);
  }
  for (std::thread& thread : threads) thread.join();
}

// The kernels of every CPU target that this machine runs.
inline std::vector<const KernelTable*> targets() {
  std::vector<const KernelTable*> found;
  for (const char* name : {"scalar", "avx2", "avx512", "avx512vnni", "avx512bf16"}) {
    if (const KernelTable* table = kernels_of(name)) found.push_back(table);
  }
  return found;
}

}  // namespace tinyserve::cpu::testing
