#include "cuda/attend_pages.h"

#include <algorithm>
#include <limits>

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

template <typename Products>
cudaError_t launch_kernel(const core::AttendPagesBatchParams& params, cudaStream_t stream) {
  const core::AttendPagesParams& attend = params.attend;
  const int64_t num_blocks = ceil_div(attend.group_size, Products::kHeads) * attend.num_kv_heads *
                             attend.max_chunks * params.num_rows;
  if (num_blocks > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidConfiguration;
  AttendLayout<Products> layout{static_cast<int>(attend.head_dim), kAttendWarps};
  while (layout.num_warps > 1 && layout.bytes() > kSharedBytes) layout.num_warps /= 2;
  const int shared_bytes = std::max(layout.bytes(), merge_bytes(static_cast<int>(attend.group_size)));
  const LaunchConfig config{.grid = {static_cast<unsigned>(num_blocks)},
                            .block = {static_cast<unsigned>(layout.num_warps * kWarpSize)},
                            .shared_bytes = static_cast<size_t>(shared_bytes),
                            .stream = stream};
  const CopyUnits units{copy_unit(attend.k_pages, attend.head_dim),
                        copy_unit(attend.v_pages, attend.head_dim)};
  if constexpr (kOnTensorCores<Products>) {
    return launch(&attend_pages_tensor_kernel<Products>, config, params, units);
  } else {
    return launch(&attend_pages_kernel<Products>, config, params, units);
  }
}

// What a kernel is for; the first of the table that fits is taken. So neither the batch nor how the pages are
// laid out decides, and a row has the same bits in any of them.
struct Kernel {
  core::ElementType pages;
  bool same_queries;   // the queries are of the pages' type, too
  int64_t head_dim;    // 0: any
  int64_t group_size;  // at most
  cudaError_t (*launch)(const core::AttendPagesBatchParams& params, cudaStream_t stream);

  bool fits(const core::AttendPagesParams& attend) const {
    return attend.k_pages.type == pages && (!same_queries || attend.q.type == pages) &&
           (head_dim == 0 || attend.head_dim == head_dim) && attend.group_size <= group_size;
  }
};

// Larger groups take several blocks of the widest kernel, whose second reads come from the L2 cache.
constexpr int64_t kAnyGroup = std::numeric_limits<int64_t>::max();

template <typename T, int kHeadDim>
constexpr Kernel tensor_cores() {
  return {element_type_of<T>, true, kHeadDim, kAnyGroup, &launch_kernel<TensorCoreProducts<T, kHeadDim>>};
}
template <typename T, int kHeadDim, int kHeads>
constexpr Kernel cuda_cores() {
  return {element_type_of<T>, false, kHeadDim, kHeads == 8 ? kAnyGroup : kHeads,
          &launch_kernel<CudaCoreProducts<T, kHeads, kHeadDim>>};
}

constexpr Kernel kKernels[] = {
    tensor_cores<__half, 64>(),         tensor_cores<__half, 128>(),       tensor_cores<__nv_bfloat16, 64>(),
    tensor_cores<__nv_bfloat16, 128>(), cuda_cores<int8_t, 64, 1>(),       cuda_cores<int8_t, 64, 4>(),
    cuda_cores<int8_t, 64, 8>(),        cuda_cores<int8_t, 128, 1>(),      cuda_cores<int8_t, 128, 4>(),
    cuda_cores<int8_t, 128, 8>(),       cuda_cores<int8_t, 0, 1>(),        cuda_cores<int8_t, 0, 4>(),
    cuda_cores<int8_t, 0, 8>(),         cuda_cores<__half, 0, 1>(),        cuda_cores<__half, 0, 4>(),
    cuda_cores<__half, 0, 8>(),         cuda_cores<__nv_bfloat16, 0, 1>(), cuda_cores<__nv_bfloat16, 0, 4>(),
    cuda_cores<__nv_bfloat16, 0, 8>(),  cuda_cores<float, 0, 1>(),         cuda_cores<float, 0, 4>(),
    cuda_cores<float, 0, 8>(),
};

}  // namespace

cudaError_t attend_pages(const core::AttendPagesBatchParams& params, cudaStream_t stream) {
  if (params.num_rows == 0) return cudaSuccess;
  const Kernel* kernel =
      std::ranges::find_if(kKernels, [&](const Kernel& candidate) { return candidate.fits(params.attend); });
  return kernel->launch(params, stream);
}

}  // namespace tinyserve::cuda
