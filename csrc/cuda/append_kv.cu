#include "cuda/append_kv.h"

#include <algorithm>
#include <type_traits>

#include "cuda/append_kv.cuh"

namespace tinyserve::cuda {

cudaError_t append_kv(const core::AppendKvBatchParams& params, cudaStream_t stream) {
  if (params.num_tokens == 0) return cudaSuccess;
  const core::Scorer scorer = params.scorer != nullptr ? *params.scorer : core::Scorer{};
  const auto most_warps = static_cast<int>(std::min<int64_t>(params.num_kv_heads, kAppendWarps));
  const SealLaunch seal = seal_launch(scorer, params.page_size, params.head_dim, most_warps);
  const int64_t head_blocks = (params.num_kv_heads + seal.num_warps - 1) / seal.num_warps;
  const LaunchConfig config{
      .grid = {static_cast<unsigned>(params.num_tokens), static_cast<unsigned>(head_blocks)},
      .block = {static_cast<unsigned>(seal.num_warps * kWarpSize)},
      .shared_bytes = static_cast<size_t>(seal.num_warps * seal.warp_bytes),
      .stream = stream};
  return dispatch_page_element(params.k_pages.type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const auto kernel = scorer.linear() ? &append_kv_kernel<T, false> : &append_kv_kernel<T, true>;
    return launch(kernel, config, params, scorer, seal.warp_bytes);
  });
}

}  // namespace tinyserve::cuda
