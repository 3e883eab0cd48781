// merge_states: checks and kernel.

#include "torch/op_arguments.h"
#include "torch/registration.h"
#include "torch/run.h"

namespace tinyserve {
namespace {

std::tuple<Tensor, Tensor> merge_states(Tensor outs, Tensor lses) {
  const MergeArguments merge = check_merge_states(outs, lses);
  run(cpu::kernels().merge_states, merge.params, merge.params.num_rows_heads, /*grain=*/16);
  return {merge.out, merge.lse};
}

}  // namespace

TINYSERVE_CPU_OPS(m) { m.impl("merge_states", TORCH_BOX(&merge_states)); }

}  // namespace tinyserve
