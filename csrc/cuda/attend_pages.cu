#include "cuda/attend_pages.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cuda/attend_pages.cuh"

namespace tinyserve::cuda {
namespace {

// A third of what an SM of sm_90 has, less than half of sm_80's. Blocks that would need more have fewer
// warps.
constexpr int kSharedBytes = 75 << 10;

CopyUnit copy_unit(const core::PagePoolView& pool, int64_t head_dim) {
  if (pool.channel_major()) return CopyUnit::kElement;
  const int64_t size = core::element_size(pool.type);
  const auto all_multiples_of = [&](int64_t bytes) {
    return reinterpret_cast<uintptr_t>(pool.data) % static_cast<uintptr_t>(bytes) == 0 &&
           pool.page_stride * size % bytes == 0 && pool.head_stride * size % bytes == 0 &&
           pool.token_stride * size % bytes == 0 && head_dim * size % bytes == 0;
  };
  if (all_multiples_of(16)) return CopyUnit::kBytes16;
  return all_multiples_of(8) ? CopyUnit::kBytes8 : CopyUnit::kElement;
}

template <typename Traits>
cudaError_t launch_kernel(const core::AttendPagesBatchParams& params, cudaStream_t stream) {
  const core::AttendPagesParams& attend = params.attend;
  const int64_t num_blocks =
      ceil_div(attend.group_size, Traits::kHeads) * attend.num_kv_heads * attend.max_chunks * params.num_rows;
  if (num_blocks > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  AttendLayout<Traits> layout{static_cast<int>(attend.head_dim), kAttendWarps};
  while (layout.num_warps > 1 && layout.bytes() > kSharedBytes) layout.num_warps /= 2;
  const int shared_bytes = std::max(layout.bytes(), merge_bytes(static_cast<int>(attend.group_size)));
  const LaunchConfig config{.grid = {static_cast<unsigned>(num_blocks)},
                            .block = {static_cast<unsigned>(layout.num_warps * kWarpSize)},
                            .shared_bytes = static_cast<size_t>(shared_bytes),
                            .stream = stream};
  const CopyUnits units{copy_unit(attend.k_pages, attend.head_dim),
                        copy_unit(attend.v_pages, attend.head_dim)};
  return launch(&attend_pages_kernel<Traits>, config, params, units);
}

template <int kValue>
using Constant = std::integral_constant<int, kValue>;

// Query heads that share what a block reads: 3 values. Larger groups take several blocks, whose second reads
// come from the L2 cache.
template <typename F>
cudaError_t dispatch_heads(int64_t group_size, const F& f) {
  if (group_size == 1) return f(Constant<1>{});
  return group_size <= 4 ? f(Constant<4>{}) : f(Constant<8>{});
}

// 3 values; 1 for fp32 pages, which are not what fast decoding is about. 3 x (3 x 3 + 1) = 30 kernels.
template <typename T, typename F>
cudaError_t dispatch_head_dim(int64_t head_dim, const F& f) {
  if constexpr (!std::is_same_v<T, float>) {
    if (head_dim == 64) return f(Constant<64>{});
    if (head_dim == 128) return f(Constant<128>{});
  }
  return f(Constant<0>{});
}

}  // namespace

cudaError_t attend_pages(const core::AttendPagesBatchParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  return dispatch_page_element(params.attend.k_pages.type, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    return dispatch_head_dim<T>(params.attend.head_dim, [&](auto head_dim) {
      return dispatch_heads(params.attend.group_size, [&](auto heads) {
        return launch_kernel<AttendTraits<T, heads.value, head_dim.value>>(params, stream);
      });
    });
  });
}

}  // namespace tinyserve::cuda
