// For tests of kernels on the emulator: a result that any schedule must give.
#pragma once

#include <catch2/catch_test_macros.hpp>

#include <functional>
#include <optional>

#include "cuda_emulator/machine.h"
#include "cuda_emulator/schedule.h"

namespace tinyserve::cuda::emulator {

// Runs `run` under every schedule and returns its result, the same bit for bit if it is made of bytes or
// integers.
template <typename Run>
auto same_under_every_schedule(Run run) {
  std::optional<decltype(run())> first;
  for (const Schedule& schedule : kSchedules) {
    CAPTURE(schedule);
    const ScheduleScope scope(schedule);
    auto result = run();
    if (!first.has_value()) {
      first = std::move(result);
    } else {
      REQUIRE(result == *first);
    }
  }
  return *std::move(first);
}

}  // namespace tinyserve::cuda::emulator
