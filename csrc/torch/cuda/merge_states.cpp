// merge_states in CUDA: checks and launch.

#include "cuda/merge_states.h"
#include "torch/cuda/device.h"
#include "torch/op_arguments.h"
#include "torch/registration.h"

namespace tinyserve {
namespace {

std::tuple<Tensor, Tensor> merge_states(Tensor outs, Tensor lses) {
  const CurrentDevice device(outs, "outs");
  const MergeArguments merge = check_merge_states(outs, lses);
  device.check_launched(cuda::merge_states(merge.params, device.stream()), "merge_states");
  return {merge.out, merge.lse};
}

}  // namespace

TINYSERVE_CUDA_OPS(m) { m.impl("merge_states", TORCH_BOX(&merge_states)); }

}  // namespace tinyserve
