// Partial attention states and what they merge to, for the tests of merge_states on the CPU and in CUDA.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "elements.h"

namespace tinyserve::cpu::testing {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct States {
  int64_t num_states;
  int64_t num_rows_heads;
  int64_t head_dim;
  Elements outs;  // [num_states, num_rows_heads, head_dim]
  std::vector<float> lses;

  double out(int64_t state, int64_t item, int64_t d) const {
    return outs.get((state * num_rows_heads + item) * head_dim + d);
  }
  float& lse(int64_t state, int64_t item) { return lses[state * num_rows_heads + item]; }
  float lse(int64_t state, int64_t item) const { return lses[state * num_rows_heads + item]; }
};

struct Merged {
  Elements out;
  std::vector<float> lse;
};

// log-sum-exps are multiples of 1/16, so that fp32 adds a million to them exactly.
inline States draw_states(ElementType type, int64_t num_states, int64_t head_dim, uint32_t seed) {
  constexpr int64_t kItems = 11;
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  States states{num_states, kItems, head_dim, Elements(type, num_states * kItems * head_dim), {}};
  for (int64_t i = 0; i < states.outs.size(); ++i) states.outs.set(i, normal(random));
  for (int64_t i = 0; i < num_states * kItems; ++i) {
    states.lses.push_back(static_cast<float>(static_cast<int>(random() % 200) - 100) / 16.0F);
  }
  return states;
}

// The means weighted by exp(lse), in fp64.
struct ExactStates {
  std::vector<double> out;
  std::vector<double> lse;
};

inline ExactStates merge_exactly(const States& states) {
  ExactStates exact;
  for (int64_t item = 0; item < states.num_rows_heads; ++item) {
    double sum = 0.0;
    for (int64_t s = 0; s < states.num_states; ++s) sum += std::exp(states.lse(s, item));
    for (int64_t d = 0; d < states.head_dim; ++d) {
      double x = 0.0;
      for (int64_t s = 0; s < states.num_states; ++s) {
        x += std::exp(states.lse(s, item)) / sum * states.out(s, item, d);
      }
      exact.out.push_back(x);
    }
    exact.lse.push_back(std::log(sum));
  }
  return exact;
}

// States 0 and 1 at the places 0 and 3; nothing was attended in the two between, whose outputs are NaN.
inline States with_two_empty_states_between(const States& two) {
  const int64_t state_size = two.num_rows_heads * two.head_dim;
  States padded{4, two.num_rows_heads, two.head_dim, Elements(two.outs.type(), 4 * state_size), {}};
  padded.lses.assign(4 * two.num_rows_heads, kMinusInfinity);
  for (int64_t s = 0; s < 2; ++s) {
    for (int64_t i = 0; i < state_size; ++i) {
      padded.outs.set(3 * s * state_size + i, two.outs.get(s * state_size + i));
    }
    for (int64_t item = 0; item < two.num_rows_heads; ++item) padded.lse(3 * s, item) = two.lse(s, item);
  }
  return padded;
}

}  // namespace tinyserve::cpu::testing
