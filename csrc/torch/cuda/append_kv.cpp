// append_kv and seal_pages in CUDA: checks and launches. Which tokens begin a page is found on the device.

#include "cuda/append_kv.h"
#include "cuda/seal_pages.h"
#include "torch/cuda/device.h"
#include "torch/cuda/summary_rows.h"
#include "torch/op_arguments.h"
#include "torch/registration.h"

namespace tinyserve {
namespace {

// What the kernels answer to a scorer whose summaries they cannot make.
void check_can_seal(cudaError_t error, const std::string& scorer) {
  TINYSERVE_CHECK(error != cudaErrorNotSupported,
                  "scorer: expected one whose summaries are made in CUDA, got '", scorer, "'");
}

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
  const cudaError_t error = cuda::append_kv(params, device.stream());
  check_can_seal(error, scorer);
  device.check_launched(error, "append_kv");
}

void seal_pages(Tensor page_ids, Tensor k_pages, std::optional<Tensor> k_scales, Tensor page_summary,
                std::string scorer) {
  const CurrentDevice device(k_pages, "k_pages");
  core::SealPagesParams params = check_seal_pages(k_pages, k_scales, page_summary, scorer);
  check_summary_rows(params.page_summary);
  params.page_ids = check_int32(page_ids, "page_ids", 1, "[num_page_ids]");
  const cudaError_t error = cuda::seal_pages(params, page_ids.size(0), device.stream());
  check_can_seal(error, scorer);
  device.check_launched(error, "seal_pages");
}

}  // namespace

TINYSERVE_CUDA_OPS(m) {
  m.impl("append_kv", TORCH_BOX(&append_kv));
  m.impl("seal_pages", TORCH_BOX(&seal_pages));
}

}  // namespace tinyserve
