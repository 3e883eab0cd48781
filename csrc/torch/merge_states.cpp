// merge_states: checks and kernel.

#include <torch/csrc/stable/library.h>

#include "torch/checks.h"
#include "torch/run.h"

namespace tinyserve {
namespace {

std::tuple<Tensor, Tensor> merge_states(Tensor outs, Tensor lses) {
  const core::ElementType type = check_element_type(outs, "outs");
  check_dim(outs, "outs", 4, "[num_states, num_tokens, num_heads, head_dim]");
  check_head_dim(outs.size(3));
  TINYSERVE_CHECK(check_element_type(lses, "lses") == core::ElementType::kFloat32,
                  "lses: expected dtype float32, got a 16-bit type");
  check_dim(lses, "lses", 3, "[num_states, num_tokens, num_heads]");
  for (int64_t axis = 0; axis < 3; ++axis) check_size(lses, "lses", axis, outs.size(axis), "as outs");
  const Tensor dense_outs = outs.is_contiguous() ? outs : torch::stable::contiguous(outs);
  const Tensor dense_lses = lses.is_contiguous() ? lses : torch::stable::contiguous(lses);
  Tensor out = empty_cpu({outs.size(1), outs.size(2), outs.size(3)}, outs.scalar_type());
  Tensor lse = empty_cpu({outs.size(1), outs.size(2)}, ScalarType::Float);
  const core::MergeStatesParams params{.outs = dense_outs.const_data_ptr(),
                                       .lses = static_cast<const float*>(dense_lses.const_data_ptr()),
                                       .type = type,
                                       .num_states = outs.size(0),
                                       .num_rows_heads = outs.size(1) * outs.size(2),
                                       .head_dim = outs.size(3),
                                       .out = out.mutable_data_ptr(),
                                       .lse = static_cast<float*>(lse.mutable_data_ptr())};
  run(cpu::kernels().merge_states, params, params.num_rows_heads, /*grain=*/16);
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tinyserve, CPU, m) { m.impl("merge_states", TORCH_BOX(&merge_states)); }

}  // namespace tinyserve
