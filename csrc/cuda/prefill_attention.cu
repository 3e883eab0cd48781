#include "cuda/prefill_attention.h"

#include <limits>
#include <type_traits>

#include "cuda/prefill_attention.cuh"

namespace tinyserve::cuda {
namespace {

// What a block of any GPU from sm_80 on may have.
constexpr int kSharedBytes = 99 << 10;

}  // namespace

cudaError_t prefill_attention(const core::PrefillAttentionBatchParams& params, cudaStream_t stream) {
  const core::PrefillAttentionParams& attention = params.attention;
  if (params.num_rows == 0 || attention.num_kv_heads == 0) return cudaSuccess;
  PrefillLayout layout{static_cast<int>(attention.head_dim), kPrefillMaxWarps};
  const auto shared_bytes = [&] { return layout.floats() * static_cast<int>(sizeof(float)); };
  while (shared_bytes() > kSharedBytes) layout.num_warps /= 2;
  const int64_t num_blocks =
      (params.num_rows * attention.group_size + layout.num_queries() - 1) / layout.num_queries();
  if (num_blocks > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  const LaunchConfig config{
      .grid = {static_cast<unsigned>(num_blocks), static_cast<unsigned>(attention.num_kv_heads)},
      .block = {static_cast<unsigned>(layout.num_warps * kWarpSize)},
      .shared_bytes = static_cast<size_t>(shared_bytes()),
      .stream = stream};
  return dispatch_page_element(attention.k_pages.type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    return launch(&prefill_attention_kernel<T>, config, params);
  });
}

}  // namespace tinyserve::cuda
