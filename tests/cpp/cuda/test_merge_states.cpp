// The CUDA kernel of merge_states, on the emulator, against the weighted mean it stands for.
#include <catch2/catch_test_macros.hpp>

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "../cpu/merge_problem.h"
#include "cuda/merge_states.h"
#include "cuda_emulator/testing.h"

using namespace tinyserve::cpu::testing;
using tinyserve::cuda::emulator::same_under_every_schedule;

namespace {

Merged merge(const States& states) {
  auto [out, lse] = same_under_every_schedule([&] {
    Elements merged(states.outs.type(), states.num_rows_heads * states.head_dim);
    std::vector<float> merged_lse(states.num_rows_heads, 12345.0F);
    REQUIRE(tinyserve::cuda::merge_states({.outs = states.outs.data(),
                                           .lses = states.lses.data(),
                                           .type = states.outs.type(),
                                           .num_states = states.num_states,
                                           .num_rows_heads = states.num_rows_heads,
                                           .head_dim = states.head_dim,
                                           .out = merged.data(),
                                           .lse = merged_lse.data()},
                                          nullptr) == cudaSuccess);
    std::vector<uint8_t> lse_bytes(merged_lse.size() * sizeof(float));
    std::memcpy(lse_bytes.data(), merged_lse.data(), lse_bytes.size());
    return std::pair(merged.bytes(), lse_bytes);
  });
  Merged merged{Elements(states.outs.type(), states.num_rows_heads * states.head_dim),
                std::vector<float>(states.num_rows_heads)};
  std::memcpy(merged.out.data(), out.data(), out.size());
  std::memcpy(merged.lse.data(), lse.data(), lse.size());
  return merged;
}

}  // namespace

TEST_CASE("Merged states are the mean of their outputs weighted by exp(lse)") {
  for (const ElementType type : kElementTypes) {
    for (const int64_t head_dim : {8, 40, 64, 256}) {
      for (const int64_t num_states : {1, 2, 5}) {
        CAPTURE(static_cast<int>(type), head_dim, num_states);
        const States states = draw_states(type, num_states, head_dim, 1);
        const ExactStates exact = merge_exactly(states);
        const Merged merged = merge(states);
        require_close(merged.out.values(), exact.out, 1e-5, 1.05 * unit_roundoff(type));
        require_close(as_doubles(merged.lse), exact.lse, 1e-5);
        if (num_states == 1) require_same_bits(merged.out.bytes(), states.outs.bytes());
      }
    }
  }
}

TEST_CASE("States that attended nothing do not count, whatever their outputs hold") {
  const States two = draw_states(ElementType::kFloat16, 2, 40, 3);
  States padded = with_two_empty_states_between(two);
  const Merged merged = merge(padded);
  const Merged expected = merge(two);
  require_same_bits(merged.out.bytes(), expected.out.bytes());
  require_same_bits(merged.lse, expected.lse);

  padded.lses.assign(padded.lses.size(), kMinusInfinity);
  const Merged empty = merge(padded);
  for (const double x : empty.out.values()) REQUIRE(x == 0.0);
  for (const float lse : empty.lse) REQUIRE(lse == kMinusInfinity);
}

TEST_CASE("A NaN lse in any state gives NaN for its own head only") {
  for (const int64_t bad_state : {0, 1, 4}) {
    CAPTURE(bad_state);
    States states = draw_states(ElementType::kFloat32, 5, 8, 4);
    const Merged expected = merge(states);
    states.lse(bad_state, 3) = static_cast<float>(kNan);
    const Merged merged = merge(states);
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
