#include <algorithm>
#include <type_traits>

#include "core/limits.h"
#include "cuda/merge_states.cuh"
#include "cuda/merge_states.h"

namespace tinyserve::cuda {

cudaError_t merge_states(const core::MergeStatesParams& params, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 1 << 20;
  if (params.num_rows_heads == 0) return cudaSuccess;
  return dispatch_element(params.type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const LaunchConfig config{.grid = {static_cast<unsigned>(std::min(params.num_rows_heads, kMaxBlocks))},
                              .block = {static_cast<unsigned>(params.head_dim)},
                              .stream = stream};
    return launch(&merge_states_kernel<T>, config, params);
  });
}

}  // namespace tinyserve::cuda
