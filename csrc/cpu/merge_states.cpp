// Joins partial attention results over disjoint sets of keys, in index order, by their log-sum-exp.

#include "core/limits.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"

namespace tinyserve::cpu::TINYSERVE_TARGET {

void merge_states(const core::MergeStatesParams& params, int64_t begin, int64_t end) {
  const float minus_infinity = -__builtin_inff();
  float merged[core::kMaxHeadDim];
  float state[core::kMaxHeadDim];
  for (int64_t item = begin; item < end; ++item) {
    float max = minus_infinity;
    for (int64_t s = 0; s < params.num_states; ++s) {
      const float lse = params.lses[s * params.num_rows_heads + item];
      if (lse > max) max = lse;  // a NaN still makes its weight NaN
    }
    float sum = 0.0F;
    __builtin_memset(merged, 0, sizeof(merged));
    for (int64_t s = 0; s < params.num_states; ++s) {
      const int64_t index = s * params.num_rows_heads + item;
      if (params.lses[index] == minus_infinity) continue;  // nothing attended: its output does not count
      const float weight = exp_nonpositive(params.lses[index] - max);
      load_row(params.outs, params.type, index * params.head_dim, params.head_dim, state);
      for (int64_t d = 0; d < params.head_dim; d += kLanes) {
        store(merged + d, load(merged + d) + splat(weight) * load(state + d));
      }
      sum += weight;
    }
    const float inverse = sum == 0.0F ? 0.0F : 1.0F / sum;
    dispatch_element(params.type, [&](auto* tag) {
      auto* out = static_cast<decltype(tag)>(params.out) + item * params.head_dim;
      for (int64_t d = 0; d < params.head_dim; ++d) from_float(merged[d] * inverse, out[d]);
    });
    params.lse[item] = sum == 0.0F ? minus_infinity : max + __builtin_logf(sum);
  }
}

}  // namespace tinyserve::cpu::TINYSERVE_TARGET
