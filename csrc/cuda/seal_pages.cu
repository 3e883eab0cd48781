#include "cuda/seal_pages.h"

#include <type_traits>

#include "cuda/seal_pages.cuh"

namespace tinyserve::cuda {

cudaError_t seal_pages(const core::SealPagesParams& params, int64_t num_page_ids, cudaStream_t stream) {
  if (!params.scorer->linear()) return cudaErrorNotSupported;
  const int64_t num_blocks = (num_page_ids * params.num_kv_heads + kSealWarps - 1) / kSealWarps;
  if (num_blocks == 0) return cudaSuccess;
  const LaunchConfig config{
      .grid = {static_cast<unsigned>(num_blocks)}, .block = {kSealWarps * kWarpSize}, .stream = stream};
  return dispatch_page_element(params.k_pages.type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    return launch(&seal_pages_kernel<T>, config, params, num_page_ids, *params.scorer);
  });
}

}  // namespace tinyserve::cuda
