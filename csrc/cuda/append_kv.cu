#include "cuda/append_kv.h"

#include <algorithm>
#include <type_traits>

#include "cuda/append_kv.cuh"

namespace tinyserve::cuda {

cudaError_t append_kv(const core::AppendKvBatchParams& params, cudaStream_t stream) {
  if (params.scorer != nullptr && !params.scorer->linear()) return cudaErrorNotSupported;
  if (params.num_tokens == 0) return cudaSuccess;
  const int64_t num_warps = std::min<int64_t>(params.num_kv_heads, kAppendWarps);
  const int64_t head_blocks = (params.num_kv_heads + num_warps - 1) / num_warps;
  const LaunchConfig config{
      .grid = {static_cast<unsigned>(params.num_tokens), static_cast<unsigned>(head_blocks)},
      .block = {static_cast<unsigned>(num_warps * kWarpSize)},
      .stream = stream};
  const core::Scorer scorer = params.scorer != nullptr ? *params.scorer : core::Scorer{};
  return dispatch_page_element(params.k_pages.type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    return launch(&append_kv_kernel<T>, config, params, scorer);
  });
}

}  // namespace tinyserve::cuda
