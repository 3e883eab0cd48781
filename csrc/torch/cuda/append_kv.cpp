// append_kv and seal_pages in CUDA: checks and launches. Which tokens begin a page is found on the device.

#include "cuda/append_kv.h"
#include "cuda/seal_pages.h"
#include "torch/cuda/device.h"
#include "torch/cuda/summary_rows.h"
#include "torch/op_arguments.h"
#include "torch/registration.h"

namespace tinyserve {
namespace {

void append_kv(Tensor k, Tensor v, Tensor cu_query_lens, Tensor seq_lens, Tensor page_table, Tensor k_pages,
               Tensor v_pages, std::optional<Tensor> k_scales, std::optional<Tensor> v_scales,
               std::optional<Tensor> page_summary, std::string scorer) {
  const CurrentDevice device(k_pages, "k_pages");
  const AppendArguments arguments =
      check_append_kv(k, v, k_pages, v_pages, k_scales, v_scales, page_summary, scorer);
  check_summary_rows(arguments.page_summary);
  const KvPools& pools = arguments.pools;
  const core::AppendKvBatchParams params{.k = arguments.k,
                                         .v = arguments.v,
                                         .batch = check_batch_view(cu_query_lens, seq_lens, &page_table, 0),
                                         .num_tokens = k.size(0),
                                         .num_kv_heads = pools.num_kv_heads,
                                         .head_dim = pools.head_dim,
                                         .page_size = pools.page_size,
                                         .k_pages = pools.k,
                                         .v_pages = pools.v,
                                         .page_summary = arguments.page_summary,
                                         .scorer = arguments.scorer};
  device.check_launched(cuda::append_kv(params, device.stream()), "append_kv");
}

void seal_pages(Tensor page_ids, Tensor k_pages, std::optional<Tensor> k_scales, Tensor page_summary,
                std::string scorer) {
  const CurrentDevice device(k_pages, "k_pages");
  core::SealPagesParams params = check_seal_pages(k_pages, k_scales, page_summary, scorer);
  check_summary_rows(params.page_summary);
  params.page_ids = check_int32(page_ids, "page_ids", 1, "[num_page_ids]");
  device.check_launched(cuda::seal_pages(params, page_ids.size(0), device.stream()), "seal_pages");
}

}  // namespace

TINYSERVE_CUDA_OPS(m) {
  m.impl("append_kv", TORCH_BOX(&append_kv));
  m.impl("seal_pages", TORCH_BOX(&seal_pages));
}

}  // namespace tinyserve
