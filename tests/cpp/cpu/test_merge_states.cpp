// merge_states against the weighted mean it stands for.
#include <catch2/catch_test_macros.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "drive.h"
#include "elements.h"
#include "merge_problem.h"

using namespace tinyserve::cpu;
using namespace tinyserve::cpu::testing;

namespace {

Merged merge(const KernelTable& kernels, const States& states, Schedule schedule = {}) {
  Merged merged{Elements(states.outs.type(), states.num_rows_heads * states.head_dim),
                std::vector<float>(states.num_rows_heads, static_cast<float>(kNan))};
  const tinyserve::core::MergeStatesParams params{.outs = states.outs.data(),
                                                  .lses = states.lses.data(),
                                                  .type = states.outs.type(),
                                                  .num_states = states.num_states,
                                                  .num_rows_heads = states.num_rows_heads,
                                                  .head_dim = states.head_dim,
                                                  .out = merged.out.data(),
                                                  .lse = merged.lse.data()};
  run(kernels.merge_states, params, states.num_rows_heads, schedule);
  return merged;
}

}  // namespace

TEST_CASE("Merged states are the mean of their outputs weighted by exp(lse)") {
  for (const ElementType type : kElementTypes) {
    for (const int64_t head_dim : {8, 40, 64, 128, 256}) {
      for (const int64_t num_states : {1, 2, 5}) {
        const States states = draw_states(type, num_states, head_dim, 1);
        const ExactStates exact = merge_exactly(states);
        for (const KernelTable* kernels : targets()) {
          CAPTURE(static_cast<int>(type), head_dim, num_states, kernels->target);
          const Merged merged = merge(*kernels, states);
          require_close(merged.out.values(), exact.out, 1e-5, 1.05 * unit_roundoff(type));
          require_close(as_doubles(merged.lse), exact.lse, 1e-5);
          if (num_states == 1) {
            require_same_bits(merged.out.bytes(), states.outs.bytes());
            require_same_bits(merged.lse, states.lses);
          }
        }
      }
    }
  }
}

TEST_CASE("Shifting every lse by a million changes no bit of the output") {
  const States states = draw_states(ElementType::kFloat32, 5, 64, 2);
  for (const float shift : {1e6F, -1e6F}) {
    States shifted = states;
    for (float& lse : shifted.lses) lse += shift;
    for (const KernelTable* kernels : targets()) {
      CAPTURE(shift, kernels->target);
      const Merged merged = merge(*kernels, states);
      const Merged moved = merge(*kernels, shifted);
      require_same_bits(moved.out.bytes(), merged.out.bytes());
      // At a million fp32 counts in sixteenths.
      for (size_t i = 0; i < merged.lse.size(); ++i) {
        REQUIRE(std::fabs(moved.lse[i] - shift - merged.lse[i]) <= 1.0F / 16.0F);
      }
    }
  }
}

TEST_CASE("States that attended nothing do not count, whatever their outputs hold") {
  for (const KernelTable* kernels : targets()) {
    CAPTURE(kernels->target);
    const States two = draw_states(ElementType::kFloat16, 2, 40, 3);
    States padded = with_two_empty_states_between(two);
    const Merged merged = merge(*kernels, padded);
    const Merged expected = merge(*kernels, two);
    require_same_bits(merged.out.bytes(), expected.out.bytes());
    require_same_bits(merged.lse, expected.lse);

    padded.lses.assign(padded.lses.size(), kMinusInfinity);
    const Merged empty = merge(*kernels, padded);
    for (const double x : empty.out.values()) REQUIRE(x == 0.0);
    for (const float lse : empty.lse) REQUIRE(lse == kMinusInfinity);
    padded.num_states = 0;
    for (const float lse : merge(*kernels, padded).lse) REQUIRE(lse == kMinusInfinity);
  }
}

TEST_CASE("A NaN lse in any state gives NaN for its own head only") {
  for (const int64_t bad_state : {0, 1, 4}) {
    States states = draw_states(ElementType::kFloat32, 5, 8, 4);
    const States clean = states;
    states.lse(bad_state, 3) = static_cast<float>(kNan);
    for (const KernelTable* kernels : targets()) {
      CAPTURE(bad_state, kernels->target);
      const Merged merged = merge(*kernels, states);
      const Merged expected = merge(*kernels, clean);
      for (int64_t item = 0; item < states.num_rows_heads; ++item) {
        if (item == 3) {
          REQUIRE(std::isnan(merged.lse[item]));
          REQUIRE(std::isnan(merged.out.get(item * 8)));
        } else {
          REQUIRE(merged.lse[item] == expected.lse[item]);
          REQUIRE(merged.out.get(item * 8) == expected.out.get(item * 8));
        }
      }
    }
  }
}

TEST_CASE("Merging in two steps equals merging at once within fp32 rounding") {
  const States states = draw_states(ElementType::kFloat32, 4, 128, 5);
  const int64_t half = 2 * states.num_rows_heads;
  for (const KernelTable* kernels : targets()) {
    CAPTURE(kernels->target);
    States pairs{2, states.num_rows_heads, 128, Elements(ElementType::kFloat32, half * 128), {}};
    for (int64_t pair = 0; pair < 2; ++pair) {
      States two{2, states.num_rows_heads, 128, Elements(ElementType::kFloat32, half * 128), {}};
      for (int64_t i = 0; i < half * 128; ++i) two.outs.set(i, states.outs.get(pair * half * 128 + i));
      two.lses.assign(states.lses.begin() + pair * half, states.lses.begin() + (pair + 1) * half);
      const Merged merged = merge(*kernels, two);
      for (int64_t i = 0; i < merged.out.size(); ++i)
        pairs.outs.set(pair * merged.out.size() + i, merged.out.get(i));
      pairs.lses.insert(pairs.lses.end(), merged.lse.begin(), merged.lse.end());
    }
    const Merged at_once = merge(*kernels, states);
    const Merged in_steps = merge(*kernels, pairs);
    require_close(in_steps.out.values(), at_once.out.values(), 1e-5);
    require_close(as_doubles(in_steps.lse), as_doubles(at_once.lse), 1e-5);
  }
}

TEST_CASE("Threads and order do not change a bit of merged states") {
  const States states = draw_states(ElementType::kBFloat16, 3, 40, 6);
  for (const KernelTable* kernels : targets()) {
    const Merged serial = merge(*kernels, states);
    for (const Schedule& schedule : kOtherSchedules) {
      CAPTURE(kernels->target, schedule);
      const Merged other = merge(*kernels, states, schedule);
      require_same_bits(other.out.bytes(), serial.out.bytes());
      require_same_bits(other.lse, serial.lse);
    }
  }
}
