// CUDA implementations of the operators, in a library file of their own (_ops_cuda.so): loaded only where
// torch itself was built for CUDA. Kernels run on torch's current stream of the tensors' device.

#include <optional>
#include <tuple>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "core/limits.h"
#include "cuda/merge_states.h"
#include "torch/element_type.h"

namespace tinyserve {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

cudaStream_t current_stream(const Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

std::tuple<Tensor, Tensor> merge_states(Tensor outs, Tensor lses) {
  const std::optional<core::ElementType> type = element_type_of(outs.scalar_type());
  STD_TORCH_CHECK(type.has_value(),
                  "tinyserve: outs: expected dtype float32, float16 or bfloat16, got another");
  STD_TORCH_CHECK(
      outs.dim() == 4 && outs.size(3) >= core::kMinHeadDim && outs.size(3) <= core::kMaxHeadDim,
      "tinyserve: outs: expected shape [num_states, num_tokens, num_heads, head_dim] with head_dim from ",
      core::kMinHeadDim, " to ", core::kMaxHeadDim, ", got ", outs.dim(), " dimensions");
  STD_TORCH_CHECK(
      lses.scalar_type() == ScalarType::Float && lses.dim() == 3 && lses.size(0) == outs.size(0) &&
          lses.size(1) == outs.size(1) && lses.size(2) == outs.size(2),
      "tinyserve: lses: expected float32 of the first three sizes of outs, got another shape or dtype");
  STD_TORCH_CHECK(lses.is_cuda() && lses.get_device_index() == outs.get_device_index(),
                  "tinyserve: lses: expected a tensor on the device of outs, got one on another");
  const torch::stable::accelerator::DeviceGuard guard(outs.get_device_index());
  const Tensor dense_outs = torch::stable::contiguous(outs);
  const Tensor dense_lses = torch::stable::contiguous(lses);
  Tensor out = torch::stable::new_empty(outs, {outs.size(1), outs.size(2), outs.size(3)});
  Tensor lse = torch::stable::new_empty(lses, {outs.size(1), outs.size(2)});
  const cudaError_t error =
      cuda::merge_states({.outs = dense_outs.const_data_ptr(),
                          .lses = static_cast<const float*>(dense_lses.const_data_ptr()),
                          .type = *type,
                          .num_states = outs.size(0),
                          .num_rows_heads = outs.size(1) * outs.size(2),
                          .head_dim = outs.size(3),
                          .out = out.mutable_data_ptr(),
                          .lse = static_cast<float*>(lse.mutable_data_ptr())},
                         current_stream(outs));
  STD_TORCH_CHECK(error == cudaSuccess, "tinyserve: merge_states: ", cudaGetErrorString(error));
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tinyserve, CUDA, m) { m.impl("merge_states", TORCH_BOX(&merge_states)); }

}  // namespace tinyserve
