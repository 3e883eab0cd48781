// prefill_attention in CUDA: checks and launch.

#include "cuda/prefill_attention.h"
#include "torch/cuda/device.h"
#include "torch/op_arguments.h"
#include "torch/registration.h"

namespace tinyserve {
namespace {

std::tuple<Tensor, Tensor> prefill_attention(Tensor q, Tensor k, Tensor v, Tensor cu_query_lens,
                                             Tensor seq_lens, Tensor page_table, Tensor k_pages,
                                             Tensor v_pages, std::optional<Tensor> k_scales,
                                             std::optional<Tensor> v_scales, double sm_scale, int64_t window,
                                             double softcap) {
  const CurrentDevice device(q, "q");
  const PrefillArguments prefill =
      check_prefill_attention(q, k, v, k_pages, v_pages, k_scales, v_scales, sm_scale, window, softcap);
  const core::PrefillAttentionBatchParams params{
      .attention = prefill.params,
      .batch = check_batch_view(cu_query_lens, seq_lens, &page_table, 0),
      .num_rows = q.size(0)};
  device.check_launched(cuda::prefill_attention(params, device.stream()), "prefill_attention");
  return {prefill.out, prefill.lse};
}

}  // namespace

TINYSERVE_CUDA_OPS(m) { m.impl("prefill_attention", TORCH_BOX(&prefill_attention)); }

}  // namespace tinyserve
