#include "cuda/seal_pages.h"

#include <type_traits>

#include "cuda/seal_pages.cuh"

namespace tinyserve::cuda {

cudaError_t seal_pages(const core::SealPagesParams& params, int64_t num_page_ids, cudaStream_t stream) {
  const core::Scorer& scorer = *params.scorer;
  const SealLaunch seal = seal_launch(scorer, params.page_size, params.head_dim, kSealWarps);
  const int64_t num_blocks = (num_page_ids * params.num_kv_heads + seal.num_warps - 1) / seal.num_warps;
  if (num_blocks == 0) return cudaSuccess;
  const LaunchConfig config{.grid = {static_cast<unsigned>(num_blocks)},
                            .block = {static_cast<unsigned>(seal.num_warps * kWarpSize)},
                            .shared_bytes = static_cast<size_t>(seal.num_warps * seal.warp_bytes),
                            .stream = stream};
  return dispatch_page_element(params.k_pages.type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const auto kernel = scorer.linear() ? &seal_pages_kernel<T, false> : &seal_pages_kernel<T, true>;
    return launch(kernel, config, params, num_page_ids, scorer, seal.warp_bytes);
  });
}

}  // namespace tinyserve::cuda
