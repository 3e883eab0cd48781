// The order in which the emulator runs what the machine may run in any order: the threads of a cluster
// between two waits, and the blocks of a grid. A kernel's result may not depend on it.
#pragma once

#include <cstdint>
#include <ostream>

namespace tinyserve::cuda::emulator {

struct Schedule {
  // kAscending: of the threads that can run always the first, which drives warps as far apart as barriers
  // let them; kDescending: always the last; kShuffled: any, by the seed, and atomics are places to be
  // overtaken.
  enum class Order { kAscending, kDescending, kShuffled };

  Order order = Order::kAscending;
  uint64_t seed = 0;
};

inline std::ostream& operator<<(std::ostream& out, const Schedule& schedule) {
  if (schedule.order == Schedule::Order::kAscending) return out << "ascending schedule";
  if (schedule.order == Schedule::Order::kDescending) return out << "descending schedule";
  return out << "schedule shuffled with seed " << schedule.seed;
}

inline constexpr Schedule kSchedules[] = {{Schedule::Order::kAscending},   {Schedule::Order::kDescending},
                                          {Schedule::Order::kShuffled, 1}, {Schedule::Order::kShuffled, 2},
                                          {Schedule::Order::kShuffled, 3}, {Schedule::Order::kShuffled, 4}};

// Launches of this thread follow `schedule` while the object lives; ascending otherwise.
class ScheduleScope {
 public:
  explicit ScheduleScope(Schedule schedule);
  ~ScheduleScope();
  ScheduleScope(const ScheduleScope&) = delete;
  ScheduleScope& operator=(const ScheduleScope&) = delete;

 private:
  Schedule before_;
};

Schedule current_schedule();

}  // namespace tinyserve::cuda::emulator
