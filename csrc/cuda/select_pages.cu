#include "cuda/select_pages.h"

#include "cuda/select_pages.cuh"

namespace tinyserve::cuda {

cudaError_t select_pages(const core::SelectPagesBatchParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.num_kv_heads == 0) return cudaSuccess;
  // As many threads as hold the longest row's keys in registers, if there are as many.
  unsigned num_threads = kMinSelectThreads;
  while (num_threads < kMaxSelectThreads && num_threads * int64_t{kSelectItems} < params.batch.max_pages) {
    num_threads *= 2;
  }
  const LaunchConfig config{
      .grid = {static_cast<unsigned>(params.num_rows), static_cast<unsigned>(params.num_kv_heads)},
      .block = {num_threads},
      .shared_bytes = sizeof(SelectShared),
      .stream = stream};
  return launch(&select_pages_kernel, config, params);
}

}  // namespace tinyserve::cuda
